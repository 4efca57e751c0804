package wal

import (
	"os"

	"golang.org/x/sys/unix"
)

// reserveTriesMax bounds how often a reservation that a signal interrupted is tried again.
const reserveTriesMax = 100

// reserve takes blocks for [offset, offset+n) without changing the size of the file. Where the file system cannot, the error
// is errors.ErrUnsupported to errors.Is.
func reserve(f *os.File, offset, n int64) (err error) {
	for range reserveTriesMax {
		if err = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, offset, n); err != unix.EINTR {
			return err
		}
	}
	return err
}
