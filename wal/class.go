package wal

import (
	"errors"
	"fmt"
	"io/fs"
	"syscall"

	"github.com/holdfast-db/holdfast/txn"
)

// class gives the one sentinel that a failure of the operating system belongs to.
func class(err error) error {
	switch {
	case noSpace(err):
		return txn.ErrNoSpace
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		return txn.ErrPermission
	default:
		return txn.ErrIO
	}
}

// failure wraps what the operating system said with what was being done and its class.
func failure(what string, err error) error {
	return fmt.Errorf("wal: %s: %w: %w", what, class(err), err)
}

func noSpace(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// fenced wraps the answer of a fence. Its own class, if it has one, gives way to ErrFenced.
func fenced(dir string, err error) error {
	return fmt.Errorf("wal: %s: %w: %v", dir, txn.ErrFenced, err)
}
