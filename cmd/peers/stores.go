package main

import (
	"context"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/dgraph-io/badger/v4"
	_ "github.com/mattn/go-sqlite3"
	"go.etcd.io/bbolt"

	"github.com/holdfast-db/holdfast/db"
)

// manifestOf is the value that stands for a checkpoint: the keys of its pages.
func manifestOf(c *checkpoint) []byte {
	var b []byte
	for _, k := range c.pages {
		b = append(b, k[:]...)
	}
	return b
}

func pagesOf(manifest []byte) int { return len(manifest) / len(digest{}) }

func pageKey(k digest, rank int) []byte { return append([]byte{'p', byte(rank)}, k[:]...) }

func manifestKey(k digest) []byte { return append([]byte{'m'}, k[:]...) }

// readPages reads the pages of a checkpoint by key.
func readPages(c *checkpoint, dst []byte, get func(k digest, rank int, dst []byte) error) error {
	size := len(dst) / ranks / len(c.pages)
	for rank := range ranks {
		for _, k := range c.pages {
			if err := get(k, rank, dst[:size]); err != nil {
				return err
			}
			dst = dst[size:]
		}
	}
	return nil
}

// probe asks for the prefixes of a prompt, the longest first.
func probe(c *checkpoint, get func(name digest) ([]byte, error)) (int, error) {
	for _, name := range c.probes {
		m, err := get(name)
		if err != nil || m != nil {
			return pagesOf(m), err
		}
	}
	return 0, nil
}

// pageFiles keeps one file for each page: written to a temporary name, synced, renamed, and the directory synced.
type pageFiles struct{ dir string }

func (f *pageFiles) open(dir string) error {
	f.dir = filepath.Join(dir, "pages")
	return os.MkdirAll(f.dir, 0o700)
}

func (f *pageFiles) path(k digest, rank int) string {
	return filepath.Join(f.dir, fmt.Sprintf("%s.%d", hex.EncodeToString(k[:]), rank))
}

func (f *pageFiles) write(pages []page) error {
	for _, p := range pages {
		path := f.path(p.key, p.rank)
		tmp, err := os.Create(path + ".tmp")
		if err != nil {
			return err
		}
		_, err = tmp.Write(p.bytes)
		if err == nil {
			err = tmp.Sync()
		}
		if err = errors.Join(err, tmp.Close()); err != nil {
			return err
		}
		if err := os.Rename(path+".tmp", path); err != nil {
			return err
		}
	}
	d, err := os.Open(f.dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func (f *pageFiles) read(k digest, rank int, dst []byte) error {
	file, err := os.Open(f.path(k, rank))
	if err != nil {
		return err
	}
	defer file.Close()
	_, err = file.ReadAt(dst, 0)
	return err
}

// sqliteStore has manifests in SQLite with a write-ahead log that is synced at every commit.
type sqliteStore struct {
	pageFiles
	db          *sql.DB
	insert, get *sql.Stmt
}

func (s *sqliteStore) open(dir string) error {
	if err := s.pageFiles.open(dir); err != nil {
		return err
	}
	var err error
	s.db, err = sql.Open("sqlite3", "file:"+filepath.Join(dir, "manifests.db")+"?_journal_mode=WAL&_synchronous=FULL")
	if err != nil {
		return err
	}
	s.db.SetMaxOpenConns(1)
	if _, err = s.db.Exec("CREATE TABLE IF NOT EXISTS manifests (name BLOB PRIMARY KEY, pages BLOB) WITHOUT ROWID"); err != nil {
		return err
	}
	if s.insert, err = s.db.Prepare("INSERT OR REPLACE INTO manifests VALUES (?, ?)"); err != nil {
		return err
	}
	s.get, err = s.db.Prepare("SELECT pages FROM manifests WHERE name = ?")
	return err
}

func (s *sqliteStore) publish(c *checkpoint) error {
	if err := s.pageFiles.write(c.new); err != nil {
		return err
	}
	_, err := s.insert.Exec(c.name[:], manifestOf(c))
	return err
}

func (s *sqliteStore) lookup(c *checkpoint) (int, error) {
	return probe(c, func(name digest) (m []byte, err error) {
		if err = s.get.QueryRow(name[:]).Scan(&m); errors.Is(err, sql.ErrNoRows) {
			err = nil
		}
		return m, err
	})
}

func (s *sqliteStore) read(c *checkpoint, dst []byte) error {
	return readPages(c, dst, s.pageFiles.read)
}

func (s *sqliteStore) close() error {
	return errors.Join(s.insert.Close(), s.get.Close(), s.db.Close())
}

// bboltStore has manifests in bbolt, which syncs at every commit.
type bboltStore struct {
	pageFiles
	db *bbolt.DB
}

var bucket = []byte("manifests")

func (s *bboltStore) open(dir string) (err error) {
	if err := s.pageFiles.open(dir); err != nil {
		return err
	}
	if s.db, err = bbolt.Open(filepath.Join(dir, "manifests.bolt"), 0o600, nil); err != nil {
		return err
	}
	return s.db.Update(func(tx *bbolt.Tx) error {
		_, err := tx.CreateBucketIfNotExists(bucket)
		return err
	})
}

func (s *bboltStore) publish(c *checkpoint) error {
	if err := s.pageFiles.write(c.new); err != nil {
		return err
	}
	return s.db.Update(func(tx *bbolt.Tx) error { return tx.Bucket(bucket).Put(c.name[:], manifestOf(c)) })
}

func (s *bboltStore) lookup(c *checkpoint) (n int, err error) {
	err = s.db.View(func(tx *bbolt.Tx) error {
		n, err = probe(c, func(name digest) ([]byte, error) { return tx.Bucket(bucket).Get(name[:]), nil })
		return err
	})
	return n, err
}

func (s *bboltStore) read(c *checkpoint, dst []byte) error {
	return readPages(c, dst, s.pageFiles.read)
}

func (s *bboltStore) close() error { return s.db.Close() }

// badgerStore has everything in Badger, pages in its value log.
type badgerStore struct{ db *badger.DB }

func (s *badgerStore) open(dir string) (err error) {
	o := badger.DefaultOptions(dir).WithSyncWrites(true).WithValueThreshold(1 << 10).WithLogger(nil).WithMetricsEnabled(false)
	s.db, err = badger.Open(o)
	return err
}

func (s *badgerStore) publish(c *checkpoint) error {
	tx := s.db.NewTransaction(true)
	defer func() { tx.Discard() }()
	for _, p := range c.new {
		err := tx.Set(pageKey(p.key, p.rank), p.bytes)
		if errors.Is(err, badger.ErrTxnTooBig) { // the shared prefix
			if err = tx.Commit(); err == nil {
				tx = s.db.NewTransaction(true)
				err = tx.Set(pageKey(p.key, p.rank), p.bytes)
			}
		}
		if err != nil {
			return err
		}
	}
	if err := tx.Set(manifestKey(c.name), manifestOf(c)); err != nil {
		return err
	}
	return tx.Commit()
}

func (s *badgerStore) lookup(c *checkpoint) (n int, err error) {
	err = s.db.View(func(tx *badger.Txn) error {
		n, err = probe(c, func(name digest) ([]byte, error) {
			it, err := tx.Get(manifestKey(name))
			if errors.Is(err, badger.ErrKeyNotFound) {
				return nil, nil
			}
			if err != nil {
				return nil, err
			}
			return it.ValueCopy(nil)
		})
		return err
	})
	return n, err
}

func (s *badgerStore) read(c *checkpoint, dst []byte) error {
	return s.db.View(func(tx *badger.Txn) error {
		return readPages(c, dst, func(k digest, rank int, dst []byte) error {
			it, err := tx.Get(pageKey(k, rank))
			if err != nil {
				return err
			}
			return it.Value(func(v []byte) error {
				copy(dst, v)
				return nil
			})
		})
	})
}

func (s *badgerStore) close() error { return s.db.Close() }

// pebbleStore has everything in Pebble, with pages in blob files.
type pebbleStore struct{ db *pebble.DB }

type silent struct{}

func (silent) Infof(string, ...any)  {}
func (silent) Errorf(string, ...any) {}
func (silent) Fatalf(f string, a ...any) {
	panic(fmt.Sprintf(f, a...))
}

func (s *pebbleStore) open(dir string) (err error) {
	o := &pebble.Options{FormatMajorVersion: pebble.FormatValueSeparation, MemTableSize: 64 << 20, Logger: silent{}}
	o.Experimental.ValueSeparationPolicy = func() pebble.ValueSeparationPolicy {
		return pebble.ValueSeparationPolicy{Enabled: true, MinimumSize: 1 << 10, MaxBlobReferenceDepth: 10, RewriteMinimumAge: 5 * time.Minute, TargetGarbageRatio: 0.2}
	}
	s.db, err = pebble.Open(dir, o)
	return err
}

func (s *pebbleStore) publish(c *checkpoint) error {
	b := s.db.NewBatch()
	defer b.Close()
	for _, p := range c.new {
		if err := b.Set(pageKey(p.key, p.rank), p.bytes, nil); err != nil {
			return err
		}
	}
	if err := b.Set(manifestKey(c.name), manifestOf(c), nil); err != nil {
		return err
	}
	return b.Commit(pebble.Sync)
}

func (s *pebbleStore) get(key []byte, use func([]byte)) error {
	v, closer, err := s.db.Get(key)
	if err != nil {
		return err
	}
	use(v)
	return closer.Close()
}

func (s *pebbleStore) lookup(c *checkpoint) (int, error) {
	return probe(c, func(name digest) (m []byte, err error) {
		err = s.get(manifestKey(name), func(v []byte) { m = append(m, v...) })
		if errors.Is(err, pebble.ErrNotFound) {
			err = nil
		}
		return m, err
	})
}

func (s *pebbleStore) read(c *checkpoint, dst []byte) error {
	return readPages(c, dst, func(k digest, rank int, dst []byte) error {
		return s.get(pageKey(k, rank), func(v []byte) { copy(dst, v) })
	})
}

func (s *pebbleStore) close() error { return s.db.Close() }

// holdfastStore is Holdfast with its defaults.
type holdfastStore struct {
	pageBytes int
	ns        *db.Namespace
	db        *db.DB
	sequences map[int]*db.Sequence // of prompts, hashed, as the digests of the others are
}

func (s *holdfastStore) open(dir string) (err error) {
	if s.ns == nil {
		s.sequences = map[int]*db.Sequence{}
		if s.ns, err = db.NewNamespace(db.Identity{
			Model: "peers", Weights: "unversioned:made-up", Tokenizer: "numbers", Engine: "peers 1", DType: "bytes",
			Layout: db.Layout{Ranks: ranks, Groups: []db.Group{
				{Name: "attention:kv", Kind: db.Attention, PageBytes: int64(s.pageBytes), PageTokens: pageTokens},
				{Name: "recurrent:state", Kind: db.Recurrent, PageBytes: int64(s.pageBytes), Pages: 1},
			}},
		}); err != nil {
			return err
		}
	}
	s.db, err = db.Open(context.Background(), dir, db.Options{})
	return err
}

func (s *holdfastStore) publish(c *checkpoint) error {
	ctx := context.Background()
	prompt := s.ns.NewSequence()
	if err := prompt.Append(c.prompt); err != nil {
		return err
	}
	s.sequences[c.number] = prompt
	p, err := s.db.Begin(ctx, db.PublishRequest{Sequence: prompt, Offset: int64(len(c.tokens))})
	if err != nil {
		return err
	}
	defer p.Abort()
	for rank := range ranks {
		slots, err := p.Slots(ctx, rank)
		if err != nil {
			return err
		}
		each := len(c.new) / ranks
		if len(slots) != each {
			return fmt.Errorf("%d pages to fill, want %d", len(slots), each)
		}
		for i, slot := range slots {
			if _, err := slot.Write(c.new[rank*each+i].bytes); err != nil {
				return err
			}
		}
		if _, err := p.Commit(ctx, rank); err != nil {
			return err
		}
	}
	return nil
}

func (s *holdfastStore) lookup(c *checkpoint) (int, error) {
	m, err := s.db.Lookup(context.Background(), s.sequences[c.number], db.LookupOptions{})
	return int(m.Offset/pageTokens) + 1, err
}

func (s *holdfastStore) read(c *checkpoint, dst []byte) error {
	r, err := s.db.Restore(context.Background(), s.sequences[c.number], db.LookupOptions{})
	if err != nil {
		return err
	}
	defer r.Release()
	for rank := range ranks {
		for _, p := range r.Pages(rank) {
			dst = dst[copy(dst, p.Bytes):]
		}
	}
	return nil
}

func (s *holdfastStore) close() error {
	_, err := s.db.Close(context.Background())
	return err
}
