package txn

import "errors"

// The classes of failure. Every error that leaves Holdfast wraps exactly one of them, so that a caller can tell
// "try again" (ErrBusy, ErrNoSpace) from "never" (ErrInvalid, ErrUnsupported) with errors.Is. They live in this
// package because it is the one that every other package may import; applications use the same values from package db.
var (
	// ErrInvalid: the request breaks a rule of the interface; the message names the field, the value and the limit.
	ErrInvalid = errors.New("invalid")
	// ErrTooLarge: the request is well formed and over a documented limit (docs/limits.md).
	ErrTooLarge = errors.New("too large")
	// ErrNotFound: there is no such checkpoint, page or prefix; also the answer to every miss.
	ErrNotFound = errors.New("not found")
	// ErrConflict: a stale attempt, or a transaction that a concurrent one has overtaken.
	ErrConflict = errors.New("conflict")
	// ErrBusy: a bounded wait ended before room or a turn came; trying again later may succeed.
	ErrBusy = errors.New("busy")
	// ErrNoSpace: the disk, or the budget given to it, is full.
	ErrNoSpace = errors.New("no space")
	// ErrReadOnly: the database was opened read-only.
	ErrReadOnly = errors.New("read-only")
	// ErrPermission: the operating system denied access.
	ErrPermission = errors.New("permission denied")
	// ErrLocked: another process, or another handle in this one, owns the directory.
	ErrLocked = errors.New("locked")
	// ErrFenced: this handle lost the ownership of the directory and may not acknowledge anything any more.
	ErrFenced = errors.New("fenced")
	// ErrCorrupt: stored bytes fail their checksum or contradict each other.
	ErrCorrupt = errors.New("corrupt")
	// ErrIO: the operating system failed a read, a write or a sync.
	ErrIO = errors.New("input/output error")
	// ErrUnsupported: the format, version or operation is not one that this build knows.
	ErrUnsupported = errors.New("unsupported")
	// ErrClosed: the handle is closed.
	ErrClosed = errors.New("closed")
)
