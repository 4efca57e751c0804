package wal

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/holdfast-db/holdfast/txn"
)

func TestMain(m *testing.M) {
	if run, ok := children[os.Getenv(childVariable)]; ok {
		run()
		return
	}
	goleak.VerifyTestMain(m)
}

// childVariable names the function of children that a re-executed test binary runs instead of the tests.
const childVariable = "WAL_TEST_CHILD"

var children = map[string]func(){}

// entry is one record as Replay gives it.
type entry struct {
	lsn     txn.LSN
	kind    byte
	payload string
}

func open(t testing.TB, dir string, o Options) *Log {
	t.Helper()
	l, err := Open(dir, o)
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// memoryDir is a temporary directory on a file system without a disk, where there is one, for tests of many thousand syncs.
func memoryDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "holdfast-wal")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	return dir
}

func record(payload string) Record { return Record{Kind: 1, Payload: []byte(payload)} }

// put appends each payload as a batch of its own and syncs it.
func put(t testing.TB, l *Log, payloads ...string) {
	t.Helper()
	for _, p := range payloads {
		_, err := l.Append([]Record{record(p)})
		require.NoError(t, err)
		require.NoError(t, l.Sync())
	}
}

func replayed(t testing.TB, l *Log, from txn.LSN) []entry {
	t.Helper()
	var got []entry
	require.NoError(t, l.Replay(context.Background(), from, func(lsn txn.LSN, kind byte, payload []byte) error {
		got = append(got, entry{lsn, kind, string(payload)})
		return nil
	}))
	return got
}

func payloads(entries []entry) []string {
	got := make([]string, 0, len(entries))
	for _, e := range entries {
		got = append(got, e.payload)
	}
	return got
}

// abandon ends the use of a log as a crash of the process does: nothing is synced and nothing sealed.
func abandon(t testing.TB, l *Log) {
	t.Helper()
	_ = l.stop(errors.New("abandoned by the test"))
	_ = l.Close()
}

// newest is the file that the log would write to.
func newest(t testing.TB, dir string) string {
	t.Helper()
	found, err := listDirectories(diskFS{}, dir)
	require.NoError(t, err)
	require.NotEmpty(t, found)
	return found[len(found)-1].file()
}

func appendTo(t testing.TB, path string, data []byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	require.NoError(t, err)
	_, err = f.Write(data)
	require.NoError(t, errors.Join(err, f.Close()))
}

func contents(t testing.TB, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	return data
}

// fingerprint is a digest of the names, modes and contents of everything below dir.
func fingerprint(t testing.TB, dir string) string {
	t.Helper()
	h := sha256.New()
	require.NoError(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		fmt.Fprintf(h, "%q %v ", name, info.Mode())
		if !d.IsDir() {
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			fmt.Fprintf(h, "%d %x", len(data), sha256.Sum256(data))
		}
		return nil
	}))
	return fmt.Sprintf("%x", h.Sum(nil))
}

// logged collects log records.
type logged struct {
	mu      sync.Mutex
	records []slog.Record
}

func (c *logged) Enabled(context.Context, slog.Level) bool { return true }
func (c *logged) WithAttrs([]slog.Attr) slog.Handler       { return c }
func (c *logged) WithGroup(string) slog.Handler            { return c }
func (c *logged) Handle(_ context.Context, r slog.Record) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.records = append(c.records, r)
	return nil
}

// warnings gives the attributes of every record of at least level Warn.
func (c *logged) warnings() []map[string]any {
	c.mu.Lock()
	defer c.mu.Unlock()
	var got []map[string]any
	for _, r := range c.records {
		if r.Level < slog.LevelWarn {
			continue
		}
		attributes := map[string]any{"message": r.Message}
		r.Attrs(func(a slog.Attr) bool {
			attributes[a.Key] = a.Value.Any()
			return true
		})
		got = append(got, attributes)
	}
	return got
}

// operation is one call of the file system seam.
type operation struct {
	name string // mkdir, readdir, syncdir, remove, open, truncate, renew, reserve, appender, append, fsync, close
	path string
}

// seam is the disk with a say before every operation: an error returned by check is the operation's.
type seam struct {
	FS
	check func(operation) error
}

func newSeam(check func(operation) error) *seam { return &seam{FS: diskFS{}, check: check} }

func (s *seam) Mkdir(path string) error {
	return s.guard("mkdir", path, func() error { return s.FS.Mkdir(path) })
}

func (s *seam) ReadDir(path string) (list []fs.DirEntry, err error) {
	err = s.guard("readdir", path, func() error { list, err = s.FS.ReadDir(path); return err })
	return list, err
}

func (s *seam) SyncDir(path string) error {
	return s.guard("syncdir", path, func() error { return s.FS.SyncDir(path) })
}

func (s *seam) Remove(path string) error {
	return s.guard("remove", path, func() error { return s.FS.Remove(path) })
}

func (s *seam) Open(path string) (f File, err error) {
	err = s.guard("open", path, func() error { f, err = s.FS.Open(path); return err })
	return seamFile{f, s, path}, err
}

func (s *seam) Truncate(path string, size int64) error {
	return s.guard("truncate", path, func() error { return s.FS.Truncate(path, size) })
}

func (s *seam) Renew(path string, offset int64) error {
	return s.guard("renew", path, func() error { return s.FS.Renew(path, offset) })
}

func (s *seam) Reserve(path string, offset, n int64) error {
	return s.guard("reserve", path, func() error { return s.FS.Reserve(path, offset, n) })
}

func (s *seam) Appender(dir string) (a Appender, entries uint64, err error) {
	err = s.guard("appender", dir, func() error { a, entries, err = s.FS.Appender(dir); return err })
	if err != nil {
		return nil, 0, err
	}
	return seamAppender{a, s, filepath.Join(dir, segmentName)}, entries, nil
}

func (s *seam) guard(name, path string, do func() error) error {
	if err := s.check(operation{name, path}); err != nil {
		return &fs.PathError{Op: name, Path: path, Err: err}
	}
	return do()
}

type seamFile struct {
	File
	s    *seam
	path string
}

func (f seamFile) ReadAt(p []byte, off int64) (n int, err error) {
	err = f.s.guard("read", f.path, func() error { n, err = f.File.ReadAt(p, off); return err })
	return n, err
}

type seamAppender struct {
	Appender
	s    *seam
	path string
}

func (a seamAppender) Append(entries [][]byte) error {
	return a.s.guard("append", a.path, func() error { return a.Appender.Append(entries) })
}

func (a seamAppender) Sync() error {
	return a.s.guard("fsync", a.path, a.Appender.Sync)
}

func (a seamAppender) Close() error {
	return errors.Join(a.s.check(operation{"close", a.path}), a.Appender.Close())
}
