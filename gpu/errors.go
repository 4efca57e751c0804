package gpu

import (
	"context"
	"errors"
	"fmt"

	"github.com/holdfast-db/holdfast/txn"
)

var (
	// ErrDeviceLost: the device, or the context on it, failed in a way that it does not come back from within this
	// process. Transfers that had copies on it stay in quarantine; other devices go on working.
	ErrDeviceLost = fmt.Errorf("device lost: %w", txn.ErrIO)
	// ErrCanceled: the transfer was canceled before its last chunk was issued. Its target holds an arbitrary mixture.
	ErrCanceled = fmt.Errorf("%w: %w", context.Canceled, txn.ErrBusy)
	// ErrDeadline: the transfer's deadline passed first. If it had copies in flight, its memory is in quarantine.
	ErrDeadline = fmt.Errorf("%w: %w", context.DeadlineExceeded, txn.ErrBusy)
)

// errorClasses are the sentinels of which an error that leaves the package wraps exactly one.
var errorClasses = []error{
	txn.ErrInvalid, txn.ErrTooLarge, txn.ErrNotFound, txn.ErrConflict, txn.ErrBusy, txn.ErrNoSpace, txn.ErrReadOnly,
	txn.ErrPermission, txn.ErrLocked, txn.ErrFenced, txn.ErrCorrupt, txn.ErrIO, txn.ErrUnsupported, txn.ErrClosed,
}

// classified gives err a class, ErrIO, if it has none: what a backend reports without one is a failed copy.
func classified(err error) error {
	if err == nil {
		return nil
	}
	for _, class := range errorClasses {
		if errors.Is(err, class) {
			return err
		}
	}
	return fmt.Errorf("%w: %w", txn.ErrIO, err)
}

// combined gives the first of errs that is not nil, with the others as text: an error has one class, and the first is the
// one that explains the others.
func combined(errs ...error) error {
	var first error
	for _, err := range errs {
		switch {
		case err == nil:
		case first == nil:
			first = err
		default:
			first = fmt.Errorf("%w; also: %v", first, err)
		}
	}
	return first
}
