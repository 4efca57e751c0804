package wal

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// reserve takes blocks without changing the size of the file. The system counts from the physical end of the file, so that
// what is asked for is the part of [offset, offset+n) that has no blocks yet.
func reserve(f *os.File, offset, n int64) error {
	var stat unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &stat); err != nil {
		return err
	}
	missing := offset + n - stat.Blocks*512
	if missing <= 0 {
		return nil
	}
	store := unix.Fstore_t{Flags: unix.F_ALLOCATEALL, Posmode: unix.F_PEOFPOSMODE, Length: missing}
	err := unix.FcntlFstore(f.Fd(), unix.F_PREALLOCATE, &store)
	if err == unix.EINVAL {
		return fmt.Errorf("%w: %w", errors.ErrUnsupported, err)
	}
	return err
}
