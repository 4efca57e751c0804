package db

import "github.com/holdfast-db/holdfast/txn"

// The classes of failure, for errors.Is. Every error that package db returns wraps exactly one of them; they are the
// values of package txn under the name that an application imports.
var (
	// ErrInvalid: the request breaks a rule of the interface; the message names the field, the value and the limit.
	ErrInvalid = txn.ErrInvalid
	// ErrTooLarge: the request is well formed and over a documented limit.
	ErrTooLarge = txn.ErrTooLarge
	// ErrNotFound: there is no such checkpoint, page or prefix; also the answer to every miss.
	ErrNotFound = txn.ErrNotFound
	// ErrConflict: a stale attempt, or a transaction that a concurrent one has overtaken.
	ErrConflict = txn.ErrConflict
	// ErrBusy: a bounded wait ended before room or a turn came; trying again later may succeed.
	ErrBusy = txn.ErrBusy
	// ErrNoSpace: the disk, or the budget given to it, is full.
	ErrNoSpace = txn.ErrNoSpace
	// ErrReadOnly: the database was opened read-only.
	ErrReadOnly = txn.ErrReadOnly
	// ErrPermission: the operating system denied access.
	ErrPermission = txn.ErrPermission
	// ErrLocked: another process, or another handle in this one, owns the directory.
	ErrLocked = txn.ErrLocked
	// ErrFenced: this handle lost the ownership of the directory and may not acknowledge anything any more.
	ErrFenced = txn.ErrFenced
	// ErrCorrupt: stored bytes fail their checksum or contradict each other.
	ErrCorrupt = txn.ErrCorrupt
	// ErrIO: the operating system failed a read, a write or a sync.
	ErrIO = txn.ErrIO
	// ErrUnsupported: the format, version or operation is not one that this build knows.
	ErrUnsupported = txn.ErrUnsupported
	// ErrClosed: the handle is closed.
	ErrClosed = txn.ErrClosed
)
