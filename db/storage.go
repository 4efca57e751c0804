package db

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/gofrs/flock"

	"github.com/holdfast-db/holdfast/db/internal/segment"
	"github.com/holdfast-db/holdfast/wal"
)

// Storage is everything a database asks of the operating system about files, one narrow interface for each part of the directory.
// It is where a simulated disk goes under a whole database (package fuzz); a nil field is the operating system's.
type Storage struct {
	Directory DirectoryFS // marker, lock, and the names at the top
	Log       wal.FS
	Segments  SegmentFS
	Index     vfs.FS // Pebble's
}

// SegmentFS, SegmentFile and SegmentListed are the file system as segment files need it.
type (
	SegmentFS     = segment.FS
	SegmentFile   = segment.File
	SegmentListed = segment.Listed
)

// DirectoryFS is the file system as the top of a database directory needs it. Errors keep the operating system's error in
// their chain.
type DirectoryFS interface {
	// Resolve gives the absolute path of a directory, symbolic links resolved, and with create makes it first if it is not there.
	Resolve(dir string, create bool) (string, error)
	ReadFile(path string) ([]byte, error)
	ReadDir(path string) ([]fs.DirEntry, error)
	// Exists reports whether the name is there, whatever it is.
	Exists(path string) (bool, error)
	// WriteFile gives a file of mode 0600 this content, making it if it is not there and following no link, and syncs it if
	// sync says so. A crash may leave any part of the content, and no name before the directory is synced.
	WriteFile(path string, content []byte, sync bool) error
	// Rename replaces to by from, whole; durable once the directory is synced.
	Rename(from, to string) error
	// SyncDir makes the entries of a directory durable.
	SyncDir(dir string) error
	// Lock takes the lock file, exclusively, or shared with others that do the same; nil without an error if somebody has
	// it. An exclusive lock makes the file, a shared one is fs.ErrNotExist where there is none.
	Lock(path string, shared bool) (DirectoryLock, error)
}

// DirectoryLock is a lock that is held.
type DirectoryLock interface {
	// Check reports an error if the file that is locked is not the one that has the name now.
	Check() error
	// Close gives the lock up.
	Close() error
}

// osDirectory is the operating system's.
type osDirectory struct{}

func (osDirectory) Resolve(dir string, create bool) (string, error) {
	if create {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return "", err
		}
	}
	path, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	return filepath.EvalSymlinks(path)
}

func (osDirectory) ReadFile(path string) ([]byte, error)       { return os.ReadFile(path) }
func (osDirectory) ReadDir(path string) ([]fs.DirEntry, error) { return os.ReadDir(path) }
func (osDirectory) Rename(from, to string) error               { return os.Rename(from, to) }

func (osDirectory) Exists(path string) (bool, error) {
	_, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

func (osDirectory) WriteFile(path string, content []byte, sync bool) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err == nil && sync {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

func (osDirectory) SyncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

func (osDirectory) Lock(path string, shared bool) (DirectoryLock, error) {
	lock := flock.New(path, flock.SetPermissions(0o600))
	try := lock.TryLock
	if shared {
		lock = flock.New(path, flock.SetFlag(os.O_RDONLY))
		try = lock.TryRLock
	}
	if ok, err := try(); err != nil || !ok {
		return nil, err
	}
	return osLock{lock}, nil
}

type osLock struct{ *flock.Flock }

var errReplaced = errors.New("the lock file was replaced")

func (l osLock) Check() error {
	held, err := l.Stat()
	if err != nil {
		return err
	}
	there, err := os.Stat(l.Path())
	if err != nil || !os.SameFile(held, there) {
		return errReplaced
	}
	return nil
}

// noLock is that of a reader of a directory that has no lock file.
type noLock struct{}

func (noLock) Check() error { return nil }
func (noLock) Close() error { return nil }
