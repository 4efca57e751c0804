package wal

import (
	"errors"
	"io"
	"io/fs"
	"os"
)

// FS is everything the log asks of a file system, and the one place where faults are injected. Paths are those that Open was
// given, joined. Implementations must be safe for concurrent use; errors keep the operating system's error in their chain.
type FS interface {
	// Mkdir makes one directory, mode 0700. Nothing is promised about it after a crash until its parent is synced.
	Mkdir(path string) error
	// ReadDir lists a directory.
	ReadDir(path string) ([]fs.DirEntry, error)
	// SyncDir makes the entries of a directory durable: what was created in it or removed from it stays so.
	SyncDir(path string) error
	// Remove takes away a file or an empty directory; durable once the parent is synced.
	Remove(path string) error
	// Open opens a file for reading.
	Open(path string) (File, error)
	// Truncate cuts a file to size and gives back all blocks behind it, also those that Reserve took. Durable once the
	// file is synced.
	Truncate(path string, size int64) error
	// Renew writes the bytes of a file from offset to its end once more, as they are, and syncs the file. A sync alone would
	// not do: after a failed one the page cache may show bytes that it believes to be on disk and that are not.
	Renew(path string, offset int64) error
	// Reserve gives a file blocks for n bytes from offset on without changing its size or content. The error wraps
	// errors.ErrUnsupported where the file system cannot do that. Blocks survive a crash as far as a file's size does.
	Reserve(path string, offset, n int64) error
	// Appender opens the file of a numbered directory for appending; it makes the file, and nothing durable, if there is
	// none. entries is how many the file holds.
	Appender(dir string) (a Appender, entries uint64, err error)
}

// File is a file open for reading.
type File interface {
	io.ReaderAt
	io.Closer
	// Size is the size in bytes now.
	Size() (int64, error)
}

// Appender writes to the end of one file. One goroutine uses it. After an error nothing is known about the end of the file.
type Appender interface {
	// Append writes the entries, each with its length before it, in one write.
	Append(entries [][]byte) error
	// Sync returns when everything appended is durable.
	Sync() error
	// Close gives up the file; it may sync.
	Close() error
}

// OS is the operating system's file system, for those who wrap it.
func OS() FS { return diskFS{} }

// diskFS is the operating system's file system.
type diskFS struct{}

func (diskFS) Mkdir(path string) error                    { return os.Mkdir(path, 0o700) }
func (diskFS) ReadDir(path string) ([]fs.DirEntry, error) { return os.ReadDir(path) }
func (diskFS) Remove(path string) error                   { return os.Remove(path) }
func (diskFS) SyncDir(path string) error                  { return with(path, os.O_RDONLY, (*os.File).Sync) }
func (diskFS) Truncate(path string, size int64) error     { return os.Truncate(path, size) }

func (diskFS) Open(path string) (File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	return diskFile{f}, nil
}

func (diskFS) Renew(path string, offset int64) error {
	return with(path, os.O_RDWR, func(f *os.File) error {
		buf := make([]byte, windowBytes)
		for at := offset; ; {
			n, readErr := f.ReadAt(buf, at)
			if _, err := f.WriteAt(buf[:n], at); err != nil {
				return err
			}
			at += int64(n)
			if readErr == io.EOF {
				return f.Sync()
			}
			if readErr != nil {
				return readErr
			}
		}
	})
}

func (diskFS) Reserve(path string, offset, n int64) error {
	return with(path, os.O_WRONLY, func(f *os.File) error {
		if err := reserve(f, offset, n); err != nil {
			return &fs.PathError{Op: "reserve", Path: path, Err: err}
		}
		return nil
	})
}

func (diskFS) Appender(dir string) (Appender, uint64, error) { return openAppender(dir) }

// with opens a file for the time of one action and reports every error, that of closing included.
func with(path string, flag int, do func(*os.File) error) error {
	f, err := os.OpenFile(path, flag, 0)
	if err != nil {
		return err
	}
	return errors.Join(do(f), f.Close())
}

type diskFile struct{ *os.File }

func (f diskFile) Size() (int64, error) {
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}
