package index

import (
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// shadow is a file system that reads what is on disk and keeps every change to itself, in memory. Through it Pebble opens an
// index on read-only media, replays into it and flushes as it always does, and the disk is not touched: not even by a lock
// file. What it holds in memory is what was written since, so its owner bounds that, and leaves compactions off.
//
// Pebble's own read-only mode is no substitute: it takes a lock file, and has nowhere to replay to.
type shadow struct {
	disk   vfs.FS
	memory *vfs.MemFS

	mu   sync.Mutex      // guards what follows
	gone map[string]bool // removed here, and still on disk
}

// newShadow shadows the directory, which need not be there.
func newShadow(disk vfs.FS, dir string) (*shadow, error) {
	s := &shadow{disk: disk, memory: vfs.NewMem(), gone: map[string]bool{}}
	return s, s.memory.MkdirAll(dir, 0o700)
}

func (s *shadow) inMemory(name string) bool {
	_, err := s.memory.Stat(name)
	return err == nil
}

// onDisk reports whether the name is seen, and on disk.
func (s *shadow) onDisk(name string) bool {
	s.mu.Lock()
	gone := s.gone[filepath.Clean(name)]
	s.mu.Unlock()
	if gone {
		return false
	}
	_, err := s.disk.Stat(name)
	return err == nil
}

func (s *shadow) setGone(name string, gone bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if gone {
		s.gone[filepath.Clean(name)] = true
	} else {
		delete(s.gone, filepath.Clean(name))
	}
}

func missing(op, name string) error { return &fs.PathError{Op: op, Path: name, Err: fs.ErrNotExist} }

func (s *shadow) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := s.memory.Create(name, c)
	if err == nil {
		s.setGone(name, true) // the one on disk, if there is one
	}
	return f, err
}

func (s *shadow) Open(name string, opts ...vfs.OpenOption) (vfs.File, error) {
	switch {
	case s.inMemory(name):
		return s.memory.Open(name, opts...)
	case s.onDisk(name):
		return s.disk.Open(name, opts...)
	}
	return nil, missing("open", name)
}

func (s *shadow) OpenReadWrite(name string, c vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File, error) {
	if !s.inMemory(name) && s.onDisk(name) {
		return nil, &fs.PathError{Op: "open", Path: name, Err: syscall.EROFS}
	}
	return s.memory.OpenReadWrite(name, c, opts...)
}

func (s *shadow) OpenDir(name string) (vfs.File, error) { return s.memory.OpenDir(name) }

func (s *shadow) Remove(name string) error {
	was := s.onDisk(name)
	s.setGone(name, true)
	err := s.memory.Remove(name)
	if was {
		return nil
	}
	return err
}

func (s *shadow) RemoveAll(name string) error {
	s.setGone(name, true)
	return s.memory.RemoveAll(name)
}

func (s *shadow) Rename(from, to string) error {
	if !s.inMemory(from) {
		return &fs.PathError{Op: "rename", Path: from, Err: syscall.EROFS}
	}
	s.setGone(to, true)
	return s.memory.Rename(from, to)
}

func (s *shadow) Link(from, to string) error {
	if !s.inMemory(from) {
		return &fs.PathError{Op: "link", Path: from, Err: syscall.EROFS}
	}
	return s.memory.Link(from, to)
}

func (s *shadow) ReuseForWrite(from, to string, c vfs.DiskWriteCategory) (vfs.File, error) {
	if err := s.Remove(from); err != nil {
		return nil, err
	}
	return s.Create(to, c)
}

func (s *shadow) MkdirAll(dir string, perm os.FileMode) error { return s.memory.MkdirAll(dir, perm) }

// Lock takes none: the owner of the directory sees to that.
func (s *shadow) Lock(string) (io.Closer, error) { return io.NopCloser(nil), nil }

func (s *shadow) List(dir string) ([]string, error) {
	names, err := s.memory.List(dir)
	if err != nil {
		names = nil
	}
	below, diskErr := s.disk.List(dir)
	if err != nil && diskErr != nil {
		return nil, diskErr
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range below {
		if !s.gone[filepath.Join(dir, n)] && !slices.Contains(names, n) {
			names = append(names, n)
		}
	}
	return names, nil
}

func (s *shadow) Stat(name string) (vfs.FileInfo, error) {
	switch {
	case s.inMemory(name):
		return s.memory.Stat(name)
	case s.onDisk(name):
		return s.disk.Stat(name)
	}
	return nil, missing("stat", name)
}

func (s *shadow) PathBase(path string) string                     { return s.disk.PathBase(path) }
func (s *shadow) PathJoin(elem ...string) string                  { return s.disk.PathJoin(elem...) }
func (s *shadow) PathDir(path string) string                      { return s.disk.PathDir(path) }
func (s *shadow) GetDiskUsage(path string) (vfs.DiskUsage, error) { return s.disk.GetDiskUsage(path) }

// Unwrap gives nothing: what is below must not be reached around this.
func (s *shadow) Unwrap() vfs.FS { return nil }
