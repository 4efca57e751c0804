package segment

import (
	"errors"
	"fmt"
	"io/fs"

	"golang.org/x/sys/unix"

	"github.com/holdfast-db/holdfast/txn"
)

// failure wraps what the file system said in the class of error that it belongs to.
func failure(what string, err error) error {
	return fmt.Errorf("segment: %s: %w: %w", what, classOf(err), err)
}

func classOf(err error) error {
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return txn.ErrNoSpace
	case errors.Is(err, unix.EROFS):
		return txn.ErrReadOnly
	case errors.Is(err, fs.ErrPermission):
		return txn.ErrPermission
	case errors.Is(err, fs.ErrNotExist):
		return txn.ErrNotFound
	case errors.Is(err, unix.ELOOP): // a link, or something else, where a segment was
		return txn.ErrCorrupt
	case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
		return txn.ErrBusy
	}
	return txn.ErrIO
}
