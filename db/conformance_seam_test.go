package db

import (
	"fmt"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/db/internal/segment"
	"github.com/holdfast-db/holdfast/wal"
)

// seam stands between the database and the disk. It notes what is asked of log and segments, in order, and fails what it is
// told to.
type seam struct {
	mu     sync.Mutex // guards what follows
	events []event
	keep   bool // note events
	op     string
	err    error
	times  int // how often it still fails; negative: for ever
	left   int // operations until the disk dies; 0: never
	gone   bool
}

// event is one operation on a path; of the log the names begin with "log ".
type event struct{ op, path string }

// fail fails every operation of a name until told otherwise.
func (s *seam) fail(op string, err error) { s.failTimes(op, err, -1) }

func (s *seam) failTimes(op string, err error, times int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.op, s.err, s.times = op, err, times
}

// dieAt has every operation fail from the nth on.
func (s *seam) dieAt(nth int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.left = nth
}

// dead tells whether the disk has died.
func (s *seam) dead() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.gone
}

// at fails the operation if it is to fail.
func (s *seam) at(op, path string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.left > 0 {
		s.left--
		s.gone = s.left == 0
	}
	if s.gone {
		return &syscallError{op, path, syscall.EIO}
	}
	if op == s.op && s.times != 0 {
		s.times--
		return &syscallError{op, path, s.err}
	}
	return nil
}

// done notes an operation that has succeeded.
func (s *seam) done(op, path string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.keep {
		s.events = append(s.events, event{op, path})
	}
}

// run carries out an operation between its two halves.
func (s *seam) run(op, path string, do func() error) error {
	if err := s.at(op, path); err != nil {
		return err
	}
	if err := do(); err != nil {
		return err
	}
	s.done(op, path)
	return nil
}

func (s *seam) trace() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keep, s.events = true, nil
}

func (s *seam) noted() []event {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.events
}

type syscallError struct {
	op, path string
	err      error
}

func (e *syscallError) Error() string { return fmt.Sprintf("injected: %s %s: %v", e.op, e.path, e.err) }

func (e *syscallError) Unwrap() error { return e.err }

// errno gives an error of the operating system by its name.
func errno(t testing.TB, name string) error {
	t.Helper()
	err, ok := map[string]error{"EIO": syscall.EIO, "ENOSPC": syscall.ENOSPC}[name]
	require.True(t, ok)
	return err
}

func (s *seam) segments() segment.FS { return seamSegments{segment.OS(), s} }

func (s *seam) log() wal.FS { return seamLog{wal.OS(), s} }

type seamSegments struct {
	segment.FS
	s *seam
}

func (f seamSegments) Create(path string, direct bool) (file segment.File, err error) {
	err = f.s.run("create", path, func() (err error) {
		file, err = f.FS.Create(path, direct)
		return err
	})
	if err != nil {
		return nil, err
	}
	return seamFile{file, f.s, path}, nil
}

func (f seamSegments) Open(path string, write, direct bool) (segment.File, error) {
	file, err := f.FS.Open(path, write, direct)
	if err != nil || !write {
		return file, err
	}
	return seamFile{file, f.s, path}, nil
}

func (f seamSegments) Remove(path string) error {
	return f.s.run("remove", path, func() error { return f.FS.Remove(path) })
}

func (f seamSegments) SyncDir(dir string) error {
	return f.s.run("syncdir", dir, func() error { return f.FS.SyncDir(dir) })
}

type seamFile struct {
	segment.File
	s    *seam
	path string
}

func (f seamFile) WriteAt(buffers [][]byte, off int64) (n int, err error) {
	err = f.s.run("write", f.path, func() (err error) {
		n, err = f.File.WriteAt(buffers, off)
		return err
	})
	return n, err
}

func (f seamFile) Sync() error { return f.s.run("sync", f.path, f.File.Sync) }

type seamLog struct {
	wal.FS
	s *seam
}

func (f seamLog) Mkdir(path string) error {
	return f.s.run("log mkdir", path, func() error { return f.FS.Mkdir(path) })
}

func (f seamLog) Remove(path string) error {
	return f.s.run("log remove", path, func() error { return f.FS.Remove(path) })
}

func (f seamLog) SyncDir(path string) error {
	return f.s.run("log syncdir", path, func() error { return f.FS.SyncDir(path) })
}

func (f seamLog) Truncate(path string, size int64) error {
	return f.s.run("log truncate", path, func() error { return f.FS.Truncate(path, size) })
}

func (f seamLog) Appender(dir string) (a wal.Appender, entries uint64, err error) {
	err = f.s.run("log appender", dir, func() (err error) {
		a, entries, err = f.FS.Appender(dir)
		return err
	})
	if err != nil {
		return nil, 0, err
	}
	return seamAppender{a, f.s, filepath.Clean(dir)}, entries, nil
}

type seamAppender struct {
	wal.Appender
	s   *seam
	dir string
}

func (a seamAppender) Append(entries [][]byte) error {
	return a.s.run("log append", a.dir, func() error { return a.Appender.Append(entries) })
}

func (a seamAppender) Sync() error { return a.s.run("log sync", a.dir, a.Appender.Sync) }
