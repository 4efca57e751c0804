package segment

import (
	"cmp"
	"container/list"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/holdfast-db/holdfast/txn"
)

// Limits of a store.
const (
	SegmentBytesDefault = 256 << 20
	SegmentBytesMin     = 64 << 10
	SegmentBytesMax     = 1 << 40
	AppendPagesMax      = 1 << 16 // pages in one Append

	queueLimitDefault   = 256
	readParallelDefault = 8
	openFilesDefault    = 256
)

// DirectMode says whether to ask for direct I/O.
type DirectMode uint8

// Direct modes.
const (
	DirectAuto DirectMode = iota // direct where the file system takes it
	DirectOff                    // buffered always
)

// Options of a store. The zero value of every field but DatabaseID means its default.
type Options struct {
	SegmentBytes int64    // size at which a segment is sealed; a batch with a larger page gets a segment of its own
	DatabaseID   [16]byte // written into every file
	Floor        uint64   // the highest number that was ever used, as far as the caller knows: new segments get higher ones
	Direct       DirectMode
	ReadOnly     bool
	QueueLimit   int // Append calls that wait in each class, default 256; one more waits outside
	ReadParallel int // reads at a time, default 8; each has 256 KiB of staging memory
	OpenFiles    int // segment files kept open for reading, default 256
	FS           FS  // default: the operating system
	Logger       *slog.Logger
}

// Store is the segment files of one database directory.
//
// Writing: each class has a *lane*, one goroutine with one open segment. Append puts a request in the lane's bounded queue;
// the lane takes what has gathered, lays it out in batches, writes them, syncs once, and wakes all of them. So small
// requests of many callers share descriptors and syncs, and no timer delays a single one.
//
// Reading: any goroutine, on files that are opened at first use and kept in a bounded least-recently-used cache. A read
// holds the file, so that Remove never takes it from under a read.
//
// Invariants:
//
//   - a Placement is returned only after a sync, that came after its bytes were written, succeeded, in a file whose
//     name was made durable before; sizes in Segments count synced batches only
//   - a file is written by the lane that created it, never after a failed write or sync, never after a restart
//   - bytes beside those of the page never come from the memory beside the page: everything that is not whole blocks
//     of the caller's is copied into staging memory, the rest of which is cleared
//   - a page is returned only if its length and checksum are those of the placement
//   - names that do not look like a segment, and things that are no plain file, are never opened, changed or removed
//
// Rejected: one file per page (directories of millions, a sync and a directory sync per page); one writer for both classes
// (a burst of deferred writes of one would delay the other); several writers per class, which keeps more segments open
// and interleaves pages that die at different times; memory-mapped reads, whose faults block a thread
// that runs Go code and turn bad sectors into signals.
//
// All methods are safe for concurrent use. Store does not lock its directory; its owner does.
type Store struct {
	dir   string
	o     Options
	fs    FS
	log   *slog.Logger
	turns readTurns
	// Reads go before writes.
	precedence precedence
	codec      codec
	count      counters
	direct     atomic.Bool // ask for direct I/O; goes off at the first sign that it does not work here
	// There is a call for holes and one to preallocate, until the file system says otherwise.
	punch, prealloc atomic.Bool
	calls           sync.WaitGroup

	mu       sync.Mutex // guards what follows
	closed   bool
	highest  uint64 // highest number used
	segments map[uint64]*segment
	lanes    [3]*lane   // by class − 1; nil before the first Append
	idle     *list.List // segments with an open file that nobody reads, most recently used first
	open     int        // segments with an open file
}

// segment is one file, as far as it is known without its content. Store.mu guards all fields.
type segment struct {
	number  uint64
	class   Class // 0 until something has read the header
	size    int64 // bytes that are synced, or the size found at Open
	writing bool  // a lane appends to it
	removed bool

	file    File // for reading, nil if not open
	readers int
	spot    *list.Element // in Store.idle
}

// Info describes a segment.
type Info struct {
	Number    uint64
	Size      int64 // bytes up to the end of its last batch
	Allocated int64 // bytes of disk blocks: less than Size where holes were punched, more where space is preallocated
	Sealed    bool  // nothing is appended to it any more
}

// Open lists the segments in dir, which it creates if need be (its parent is there). It reads names and sizes, never
// contents, and changes nothing but to give back blocks that a crash left preallocated behind the end of a file.
func Open(dir string, o Options) (*Store, error) {
	if err := o.fill(); err != nil {
		return nil, err
	}
	s := &Store{dir: dir, o: o, fs: o.FS, log: o.Logger, highest: o.Floor, segments: make(map[uint64]*segment), idle: list.New(), codec: newCodec(o.ReadParallel)}
	s.direct.Store(o.Direct == DirectAuto)
	s.punch.Store(true)
	s.prealloc.Store(true)
	if !o.ReadOnly {
		if err := s.fs.Mkdir(dir); err != nil {
			return nil, failure("make "+dir, err)
		}
	}
	found, err := s.fs.List(dir)
	if err != nil && !(o.ReadOnly && errors.Is(err, fs.ErrNotExist)) {
		return nil, failure("list "+dir, err)
	}
	for _, l := range found {
		number, ok := parseName(l.Name)
		if !ok {
			continue
		}
		s.highest = max(s.highest, number)
		if !l.Regular {
			s.log.Warn("segment skipped", "file", s.path(number), "reason", "not a plain file")
			continue
		}
		s.segments[number] = &segment{number: number, size: l.Size}
		if l.Allocated > roundUp(l.Size, blockBytes) && !o.ReadOnly {
			s.giveBackTail(number, l)
		}
	}
	if s.turns, err = newReadTurns(o.ReadParallel); err != nil {
		return nil, err
	}
	return s, nil
}

// fill puts defaults in and checks limits.
func (o *Options) fill() error {
	if o.SegmentBytes == 0 {
		o.SegmentBytes = SegmentBytesDefault
	}
	if o.SegmentBytes < SegmentBytesMin || o.SegmentBytes > SegmentBytesMax {
		return fmt.Errorf("segment: segments of %d bytes, want %d to %d: %w", o.SegmentBytes, int64(SegmentBytesMin), int64(SegmentBytesMax), txn.ErrInvalid)
	}
	for _, n := range []struct {
		field        *int
		preset, most int
		name         string
	}{
		{&o.QueueLimit, queueLimitDefault, 1 << 16, "QueueLimit"},
		{&o.ReadParallel, readParallelDefault, 1 << 10, "ReadParallel"},
		{&o.OpenFiles, openFilesDefault, 1 << 16, "OpenFiles"},
	} {
		if *n.field == 0 {
			*n.field = n.preset
		}
		if *n.field < 1 || *n.field > n.most {
			return fmt.Errorf("segment: %s is %d, want 1 to %d: %w", n.name, *n.field, n.most, txn.ErrInvalid)
		}
	}
	if o.Direct > DirectOff {
		return fmt.Errorf("segment: direct mode %d: %w", o.Direct, txn.ErrInvalid)
	}
	if o.FS == nil {
		o.FS = osFS{}
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return nil
}

// giveBackTail trims what a lane that was not closed had preallocated. Failing to is no harm.
func (s *Store) giveBackTail(number uint64, l Listed) {
	f, err := s.fs.Open(s.path(number), true, false)
	if err == nil {
		err = errors.Join(f.Truncate(l.Size), f.Close())
	}
	if err != nil {
		s.log.Warn("segment keeps preallocated blocks", "file", s.path(number), "bytes", l.Allocated-l.Size, "error", err)
	}
}

const nameDigits = 20

func (s *Store) path(number uint64) string {
	return filepath.Join(s.dir, fmt.Sprintf("%0*d.seg", nameDigits, number))
}

// parseName gives the number in the name of a segment; other names are not ours.
func parseName(name string) (uint64, bool) {
	if len(name) != nameDigits+len(".seg") || name[nameDigits:] != ".seg" {
		return 0, false
	}
	for _, c := range name[:nameDigits] {
		if c < '0' || c > '9' {
			return 0, false
		}
	}
	n, err := strconv.ParseUint(name[:nameDigits], 10, 64)
	return n, err == nil && n > 0 && n < 1<<63
}

// enter counts a call in, so that Close waits for it.
func (s *Store) enter() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return fmt.Errorf("segment: %s: %w", s.dir, txn.ErrClosed)
	}
	s.calls.Add(1)
	return nil
}

// enterToWrite is enter for calls that change the directory.
func (s *Store) enterToWrite() error {
	if s.o.ReadOnly {
		return fmt.Errorf("segment: %s: %w", s.dir, txn.ErrReadOnly)
	}
	return s.enter()
}

// origin is what the headers in a segment must say.
func (s *Store) origin(number uint64, class Class) origin {
	return origin{database: s.o.DatabaseID, number: number, class: class}
}

// Highest is the highest segment number that was ever used here, or Options.Floor if that is higher.
func (s *Store) Highest() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.highest
}

// Segments describes all segments, by number. It lists the directory.
func (s *Store) Segments() ([]Info, error) {
	if err := s.enter(); err != nil {
		return nil, err
	}
	defer s.calls.Done()
	found, err := s.fs.List(s.dir)
	if err != nil && !(s.o.ReadOnly && errors.Is(err, fs.ErrNotExist)) {
		return nil, failure("list "+s.dir, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	infos := make([]Info, 0, len(s.segments))
	for _, l := range found {
		number, ok := parseName(l.Name)
		if !ok || !l.Regular {
			continue
		}
		if g := s.segments[number]; g != nil {
			infos = append(infos, Info{Number: number, Size: g.size, Allocated: l.Allocated, Sealed: !g.writing})
		}
	}
	slices.SortFunc(infos, func(a, b Info) int { return cmp.Compare(a.Number, b.Number) })
	return infos, nil
}

// Remove deletes a segment file and makes that durable. Reads that hold it finish; later ones get txn.ErrNotFound. Removing
// one that is gone succeeds. One that is being appended to is txn.ErrBusy: Seal first.
func (s *Store) Remove(number uint64) error {
	if err := s.enterToWrite(); err != nil {
		return err
	}
	defer s.calls.Done()
	s.mu.Lock()
	g := s.segments[number]
	if g != nil && g.writing {
		s.mu.Unlock()
		return fmt.Errorf("segment: remove %s: it is being appended to: %w", s.path(number), txn.ErrBusy)
	}
	s.mu.Unlock()
	if g == nil {
		return nil
	}
	if err := s.fs.Remove(s.path(number)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return failure("remove", err)
	}
	s.forget(g)
	if err := s.fs.SyncDir(s.dir); err != nil {
		return failure("sync "+s.dir, err)
	}
	s.count.removed.Add(1)
	return nil
}

// Truncate cuts a segment that nothing appends to, to size bytes, a multiple of 4096 not above its size, and makes that
// durable.
func (s *Store) Truncate(number uint64, size int64) error {
	if err := s.enterToWrite(); err != nil {
		return err
	}
	defer s.calls.Done()
	g, f, err := s.acquire(number)
	if err != nil {
		return fmt.Errorf("segment: truncate: %w", err)
	}
	defer s.release(g)
	s.mu.Lock()
	writing, have := g.writing, g.size
	s.mu.Unlock()
	if writing {
		return fmt.Errorf("segment: truncate %s: it is being appended to: %w", s.path(number), txn.ErrBusy)
	}
	if size < blockBytes || size > have || size%blockBytes != 0 && size != have {
		return fmt.Errorf("segment: truncate %s of %d bytes to %d: %w", s.path(number), have, size, txn.ErrInvalid)
	}
	if err := f.Truncate(size); err != nil {
		return failure("truncate", err)
	}
	if err := f.Sync(); err != nil {
		return failure("sync", err)
	}
	s.mu.Lock()
	g.size = size
	s.mu.Unlock()
	return nil
}

// Close lets running calls finish, seals the open segments and closes all files. Calls after it get txn.ErrClosed.
// Closing twice is no error.
func (s *Store) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	lanes := s.lanes
	s.mu.Unlock()
	s.calls.Wait()
	for _, l := range lanes {
		if l != nil {
			close(l.queue)
			<-l.done
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, g := range s.segments {
		if g.file != nil {
			_ = g.file.Close()
			g.file = nil
		}
	}
	s.turns.close()
	return nil
}
