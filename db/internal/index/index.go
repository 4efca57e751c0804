// Package index keeps the catalogue (package txn) in Pebble.
//
// The index is derived: the log is the truth, and what the index lacks after a crash is replayed from it. So Pebble runs
// with its own write-ahead log off. Every batch carries the LSN of the last record applied in it, and Pebble keeps batches
// in order, so after a crash the index holds exactly the records up to some LSN: that of the last flush. The log is cut
// only below that one (DurableApplied). The index may be ahead of the log's synced end, when a flush outran records that
// nobody waited for; they are in the index then, and numbering goes on behind them.
//
// Reads see the memtable first: recent changes are in memory, older ones on disk, and neither memory nor the time to open
// grows with the number of checkpoints.
package index

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"syscall"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/bloom"
	"github.com/cockroachdb/pebble/v2/sstable"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/holdfast-db/holdfast/txn"
)

// FormatVersion is the Pebble format that a directory is created with. It is pinned, so that a newer Pebble does not move
// existing directories on by itself.
const FormatVersion = pebble.FormatColumnarBlocks

// LooseTag begins the keys of what is not of the catalogue: the index of loose pages, which no record and no LSN covers. A
// scan of everything ends before it.
const LooseTag = 0x80

// HistoryTag begins the keys of the history: what was retired and why, and when which LSN was. It is written with the changes that
// it tells of and is not of the catalogue either: old parts of it are forgotten without a record.
const HistoryTag = 0x90

// Sizes of the index in memory.
const (
	memTableBytes = 32 << 20 // two of them at most: one filling, one being flushed
	cacheBytes    = 64 << 20
	openTables    = 512
)

// Options of Open.
type Options struct {
	FS vfs.FS // nil: the operating system's
	// ReadOnly leaves the disk as it is, and takes no lock on it: what is changed stays in memory and goes with Close.
	ReadOnly bool
	Logger   *slog.Logger // nil: slog.Default()
}

// Index is the catalogue on disk. Reading is safe from any number of goroutines; batches belong to one goroutine at a time.
type Index struct {
	db      *pebble.DB
	careful *careful
	compact *compactions
	cache   *pebble.Cache
	dir     string
	fs      vfs.FS
	tables  sstable.ReaderOptions
	recent  *recent
}

// Open opens or creates the index in dir.
func Open(dir string, o Options) (x *Index, err error) {
	defer func() {
		if p := recover(); p != nil { // what Pebble calls fatal, and what a damaged file makes it run into
			x, err = nil, fmt.Errorf("index %s: %v: %w", dir, p, txn.ErrCorrupt)
		}
	}()
	if o.FS == nil {
		o.FS = private{vfs.Default}
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.ReadOnly {
		s, err := newShadow(o.FS, dir)
		if err != nil {
			return nil, fmt.Errorf("index %s: %w", dir, classify(err))
		}
		o.FS = s
	}
	if err := checkManifest(o.FS, dir); err != nil {
		return nil, fmt.Errorf("index %s: %w", dir, err)
	}
	guard := newCareful(o.FS)
	compact := newCompactions()
	cache := pebble.NewCache(cacheBytes)
	opts := &pebble.Options{
		FS:                          guard,
		Cache:                       cache,
		DisableWAL:                  true,
		FormatMajorVersion:          FormatVersion,
		MemTableSize:                memTableBytes,
		MemTableStopWritesThreshold: 4,
		L0CompactionThreshold:       4,
		L0StopWritesThreshold:       24,
		MaxOpenFiles:                openTables,
		Logger:                      pebbleLog{o.Logger, guard},
		// By default Pebble calls a block that fails its checksum fatal. Here it is the error of whoever reads it.
		EventListener: &pebble.EventListener{
			DataCorruption: func(info pebble.DataCorruptionInfo) {
				o.Logger.Error("index", "file", info.Path, "damage", info.Details)
			},
			CompactionEnd:   compact.ended,
			WriteStallBegin: func(pebble.WriteStallBeginInfo) { go compact.begin() }, // there may be nothing else that ends it
		},
		DisableAutomaticCompactions: o.ReadOnly,
	}
	opts.Experimental.CompactionScheduler = compact
	for i := range opts.Levels {
		opts.Levels[i].FilterPolicy = bloom.FilterPolicy(10)
	}
	db, err := pebble.Open(dir, opts)
	if err != nil {
		cache.Unref()
		// A file that the index names is gone, or a damaged name leads nowhere; or it is not the system that complains.
		if errno := syscall.Errno(0); errors.Is(err, fs.ErrNotExist) || !errors.As(err, &errno) {
			return nil, fmt.Errorf("index %s: %w: %w", dir, txn.ErrCorrupt, err)
		}
		return nil, fmt.Errorf("index %s: %w", dir, classify(err))
	}
	guard.mu.Lock()
	guard.opened = true
	guard.mu.Unlock()
	return &Index{db: db, careful: guard, compact: compact, cache: cache, dir: dir, fs: o.FS, tables: opts.MakeReaderOptions(), recent: newRecent()}, nil
}

// Begin lets compactions begin. Before that they do if writes have to wait for one.
func (x *Index) Begin() { x.compact.begin() }

// Close closes the index. What was not flushed is dropped, and replayed from the log at the next open.
func (x *Index) Close() error {
	close(x.careful.closing)
	err := x.db.Close()
	x.cache.Unref()
	return classify(err)
}

// AsyncFlush begins to make everything applied so far durable; the channel is closed once it is.
func (x *Index) AsyncFlush() (<-chan struct{}, error) {
	done, err := x.db.AsyncFlush()
	return done, classify(err)
}

// DurableApplied is the LSN up to which the index survives a crash.
func (x *Index) DurableApplied() (txn.LSN, error) {
	it, err := x.db.NewIter(&pebble.IterOptions{OnlyReadGuaranteedDurable: true})
	if err != nil {
		return 0, classify(err)
	}
	defer it.Close()
	return txn.ReadApplied(durableReader{it})
}

// durableReader reads single keys through an iterator over what is durable.
type durableReader struct{ it *pebble.Iterator }

func (r durableReader) Get(key []byte) ([]byte, error) {
	if !r.it.SeekGE(key) || string(r.it.Key()) != string(key) {
		return nil, classify(r.it.Error())
	}
	v, err := r.it.ValueAndErr()
	return v, classify(err)
}

func (durableReader) Scan([]byte, func(k, v []byte) (bool, error)) error { return txn.ErrUnsupported }

// Level is one level of the tree on disk.
type Level struct{ Files, Bytes int64 }

// Shape is what the index takes.
type Shape struct {
	Levels        []Level
	MemTableBytes int64
	CacheBytes    int64
	CacheHits     int64
	CacheMisses   int64
}

// Shape reads the sizes of the index.
func (x *Index) Shape() (s Shape) {
	m := x.db.Metrics()
	for i := range m.Levels {
		s.Levels = append(s.Levels, Level{Files: m.Levels[i].TablesCount, Bytes: m.Levels[i].TablesSize})
	}
	s.MemTableBytes, s.CacheBytes = int64(m.MemTable.Size), m.BlockCache.Size
	s.CacheHits, s.CacheMisses = m.BlockCache.Hits, m.BlockCache.Misses
	return s
}

// DiskBytes is what the index takes on disk.
func (x *Index) DiskBytes() int64 { return int64(x.db.Metrics().DiskSpaceUsage()) }

// Snapshot gives a consistent view for reading. It is used by one goroutine and must be closed.
func (x *Index) Snapshot() *Snapshot {
	var s *pebble.Snapshot
	version := x.recent.now(func() { s = x.db.NewSnapshot() })
	return &Snapshot{reader: reader{src: s}, snapshot: s, recent: x.recent, version: version}
}

// Snapshot is the catalogue as it was at one moment. It implements txn.Reader.
type Snapshot struct {
	reader
	snapshot *pebble.Snapshot
	recent   *recent
	version  uint64
	value    []byte // of the last Get that recent answered
}

// Get implements txn.Reader.
func (s *Snapshot) Get(key []byte) ([]byte, error) {
	v, known := s.recent.get(key, s.version, s.value)
	if known {
		if v != nil {
			s.value = v
		}
		return v, nil
	}
	v, err := s.reader.Get(key)
	if err == nil {
		s.recent.saw(key, v, s.version)
	}
	return v, err
}

// Close ends the snapshot.
func (s *Snapshot) Close() error {
	s.release()
	return classify(s.snapshot.Close())
}

// NewBatch begins a set of changes. Its reads see the index and the changes made so far. One batch that changes the catalogue is open at
// a time; others, of what is not of the catalogue, may be beside it.
func (x *Index) NewBatch() *Batch {
	b := x.db.NewIndexedBatch()
	return &Batch{
		reader: reader{src: b}, index: reader{src: x.db}, batch: b, recent: x.recent, version: x.recent.version.Load(),
		seen: map[string][]byte{}, changes: map[string][]byte{},
	}
}

// Batch is a set of changes that is applied whole or not at all. It implements txn.View.
//
// Deciding and applying a transaction ask for the same entries, absent ones included, so a batch remembers what it has read
// and written: a key costs one search of the index however often it is asked for.
type Batch struct {
	reader    // of the changes over the index, for scans
	index     reader
	batch     *pebble.Batch
	recent    *recent
	version   uint64
	seen      map[string][]byte // what was read; nil: there is none
	changes   map[string][]byte // what was written; nil: deleted
	catalogue bool              // some of it is of the catalogue
}

// Get implements txn.Reader.
func (b *Batch) Get(key []byte) ([]byte, error) {
	if v, ok := b.changes[string(key)]; ok {
		return v, nil
	}
	if v, ok := b.seen[string(key)]; ok {
		return v, nil
	}
	v, known := b.recent.get(key, b.version, nil)
	if !known {
		var err error
		if v, err = b.index.Get(key); err != nil {
			return nil, err
		}
		if v != nil {
			v = append([]byte{}, v...)
		}
		b.recent.saw(key, v, b.version)
	}
	b.seen[string(key)] = v
	return v, nil
}

// Set implements txn.View.
func (b *Batch) Set(key, value []byte) error {
	b.change(key, append([]byte{}, value...))
	return classify(b.batch.Set(key, value, nil))
}

// Delete implements txn.View.
func (b *Batch) Delete(key []byte) error {
	b.change(key, nil)
	return classify(b.batch.Delete(key, nil))
}

func (b *Batch) change(key, value []byte) {
	b.changes[string(key)] = value
	b.catalogue = b.catalogue || key[0] < LooseTag
}

// Note is Set for what is not of the catalogue and nobody reads again through this batch.
func (b *Batch) Note(key, value []byte) error { return classify(b.batch.Set(key, value, nil)) }

// DeleteRange deletes every entry from the key from on and below the key to. None of them is of the catalogue, and the batch is not asked
// for them before it is committed.
func (b *Batch) DeleteRange(from, to []byte) error {
	return classify(b.batch.DeleteRange(from, to, nil))
}

// Commit applies the changes; they are visible to every reader once it returns, and durable after a later flush.
func (b *Batch) Commit() error {
	b.index.release()
	commit := func() error { return b.batch.Commit(pebble.NoSync) }
	var err error
	if b.catalogue {
		err = b.recent.commit(b.changes, commit)
	} else {
		err = commit()
	}
	return classify(errors.Join(err, b.batch.Close()))
}

// Discard throws the changes away.
func (b *Batch) Discard() error {
	b.index.release()
	return classify(b.batch.Close())
}

// reader implements txn.Reader over anything of Pebble's that can be read.
type reader struct {
	src    pebble.Reader
	closer io.Closer // keeps the value of the last Get valid
}

func (r *reader) release() {
	if r.closer != nil {
		r.closer.Close()
		r.closer = nil
	}
}

// Get implements txn.Reader.
func (r *reader) Get(key []byte) ([]byte, error) {
	r.release()
	v, closer, err := r.src.Get(key)
	if errors.Is(err, pebble.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, classify(err)
	}
	r.closer = closer
	if v == nil {
		v = []byte{}
	}
	return v, nil
}

// Scan implements txn.Reader.
func (r *reader) Scan(prefix []byte, fn func(key, value []byte) (bool, error)) error {
	return r.ScanFrom(prefix, prefix, fn)
}

// ScanFrom implements txn.Seeker.
func (r *reader) ScanFrom(prefix, from []byte, fn func(key, value []byte) (bool, error)) error {
	end := after(prefix)
	if len(prefix) == 0 {
		end = []byte{LooseTag}
	}
	it, err := r.src.NewIter(&pebble.IterOptions{LowerBound: from, UpperBound: end})
	if err != nil {
		return classify(err)
	}
	defer it.Close()
	for ok := it.First(); ok; ok = it.Next() {
		v, err := it.ValueAndErr()
		if err != nil {
			return classify(err)
		}
		if more, err := fn(it.Key(), v); err != nil || !more {
			return err
		}
	}
	return classify(it.Error())
}

// after is the first key that is above every key with the prefix, nil if there is none.
func after(prefix []byte) []byte {
	end := append([]byte(nil), prefix...)
	for i := len(end) - 1; i >= 0; i-- {
		if end[i]++; end[i] != 0 {
			return end[:i+1]
		}
	}
	return nil
}

// classify gives an error of Pebble's or of the operating system's its class.
func classify(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return fmt.Errorf("%w: %w", txn.ErrNoSpace, err)
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		return fmt.Errorf("%w: %w", txn.ErrPermission, err)
	case pebble.IsCorruptionError(err):
		return fmt.Errorf("%w: %w", txn.ErrCorrupt, err)
	case errors.Is(err, pebble.ErrClosed):
		return fmt.Errorf("%w: %w", txn.ErrClosed, err)
	default:
		return fmt.Errorf("%w: %w", txn.ErrIO, err)
	}
}

// pebbleLog passes on what Pebble has to complain about; its running commentary is dropped.
type pebbleLog struct {
	log     *slog.Logger
	careful *careful
}

func (pebbleLog) Infof(string, ...any) {}

func (l pebbleLog) Errorf(format string, args ...any) {
	l.log.Error("index", "message", fmt.Sprintf(format, args...))
}

// Fatalf is called by Pebble where it cannot go on, such as a manifest that cannot be written. The process is not ended:
// where a manifest failed, Pebble goes on with the error, and the index is broken; anything else panics, which the committer
// turns into an error of class ErrIO.
func (l pebbleLog) Fatalf(format string, args ...any) {
	if l.careful.err() != nil {
		l.log.Error("index", "message", fmt.Sprintf(format, args...))
		return
	}
	panic(fatal(fmt.Sprintf(format, args...)))
}

type fatal string

func (f fatal) Error() string { return "index: " + string(f) }
