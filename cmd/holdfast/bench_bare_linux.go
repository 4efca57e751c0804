package main

import (
	"os"

	"golang.org/x/sys/unix"
)

// openDirect opens a file past the page cache, or through it where the file system does not take that.
func openDirect(path string, flag int) (*os.File, error) {
	f, err := os.OpenFile(path, flag|unix.O_DIRECT, 0o600)
	if err != nil {
		f, err = os.OpenFile(path, flag, 0o600)
	}
	return f, err
}

// preallocate asks for blocks; a file system that gives none in advance gives them with the write.
func preallocate(f *os.File, off, n int64) {
	_ = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, off, n)
}

func syncData(f *os.File) error { return unix.Fdatasync(int(f.Fd())) }

func adviseHuge(b []byte) { _ = unix.Madvise(b, unix.MADV_HUGEPAGE) }
