package wal

import (
	"errors"
	"path/filepath"

	"github.com/holdfast-db/holdfast/txn"
	"github.com/holdfast-db/holdfast/txn/mutant"
)

// claimStepBytes is how far ahead blocks are claimed, so that one append in many asks for them.
const claimStepBytes = 1 << 20

// stretchMax is how many times RotateBytes the tail may hold when there is no room for a new directory; essential records may
// go on for ReserveBytes more.
const stretchMax = 4

// tail is the file that is written to.
type tail struct {
	directory
	appender Appender
	durable  int64 // bytes known to be synced
	reserved int64 // bytes from the start of the file known to have blocks
	sealed   bool  // nothing was written since the seal of a Close
}

// openTail opens the newest directory for appending. It runs before the log is shared.
func (l *Log) openTail(entries uint64) error {
	if len(l.directories) == 0 {
		return nil
	}
	d := l.directories[len(l.directories)-1]
	appender, found, err := l.opts.FS.Appender(d.path)
	if err != nil {
		return failure("open "+d.path, err)
	}
	l.tail = &tail{directory: d, appender: appender, durable: d.size, reserved: d.size, sealed: l.repaired.Clean}
	if found != entries {
		err = &Damage{File: d.file(), Offset: d.size, Reason: "changed while it was opened"}
	} else if err = l.claim(l.tail, 0, true); errors.Is(err, txn.ErrNoSpace) {
		err = nil // appends will say so, and what is left of the reserve is still there
	}
	if err != nil {
		return errors.Join(err, appender.Close())
	}
	return nil
}

// target gives the tail that a batch goes to: the one there is, or a new one if that is full. A new one has no name on disk
// that would survive a crash, and is not the log's tail, until the batch is written and settled.
func (l *Log) target(size int64, essential bool) (*tail, error) {
	old := l.tail
	if old == nil {
		return l.begin(size, essential)
	}
	if old.size < l.opts.RotateBytes {
		return old, l.claim(old, size, essential)
	}
	if err := l.syncTail(); err != nil {
		return nil, err
	}
	t, err := l.begin(size, false)
	limit := stretchMax * l.opts.RotateBytes
	if essential {
		limit += l.opts.ReserveBytes
	}
	if errors.Is(err, txn.ErrNoSpace) && l.Err() == nil && old.size+size <= limit {
		return old, l.claim(old, size, essential)
	}
	return t, err
}

// begin makes the next directory, with room for a batch of the given size and the reserve behind it. If there is no room, it
// leaves nothing behind: only the newest directory may be found without a record.
func (l *Log) begin(size int64, essential bool) (*tail, error) {
	d := directory{path: filepath.Join(l.dir, directoryName(l.next)), first: l.next}
	t := &tail{directory: d}
	err := l.opts.FS.Mkdir(d.path)
	if err == nil {
		t.appender, _, err = l.opts.FS.Appender(d.path)
	}
	if err == nil {
		err = l.claim(t, size, essential)
	}
	if err == nil {
		return t, nil
	}
	err = l.unlessFull("begin "+d.path, err)
	var undo error
	if t.appender != nil {
		undo = t.appender.Close()
	}
	if l.Err() != nil {
		return nil, err
	}
	if undo = errors.Join(undo, d.remove(l.opts.FS)); undo == nil {
		undo = l.opts.FS.SyncDir(l.dir)
	}
	if undo != nil {
		return nil, l.fail("remove "+d.path, undo)
	}
	return nil, err
}

// unlessFull stops the log for any error but a lack of space that was met before anything was written.
func (l *Log) unlessFull(what string, err error) error {
	switch {
	case errors.Is(err, txn.ErrNoSpace) || l.Err() != nil:
		return err
	case noSpace(err):
		return failure(what, err)
	default:
		return l.fail(what, err)
	}
}

// settle makes a new directory last, with the first batch in it, before anything in it is acknowledged; then it gives up the
// one before, whose reserve is not needed any more.
func (l *Log) settle(t, old *tail) error {
	err := l.anchor(t)
	if old == nil {
		return err
	}
	if closeErr := old.appender.Close(); closeErr != nil && err == nil {
		err = l.fail("close "+old.file(), closeErr)
	}
	if err != nil {
		return err
	}
	if err := l.opts.FS.Truncate(old.file(), old.size); err != nil {
		return l.fail("release the reserve of "+old.file(), err)
	}
	return nil
}

// anchor syncs a new directory from the inside out. Nothing in it is durable before its name is.
func (l *Log) anchor(t *tail) error {
	if err := l.flush(t); err != nil {
		return err
	}
	for _, dir := range []string{t.path, l.dir} {
		if mutant.On("directory of the log is not synced") {
			break
		}
		if err := l.opts.FS.SyncDir(dir); err != nil {
			return l.fail("sync "+dir, err)
		}
	}
	l.allSynced()
	return nil
}

// claim makes sure that t has blocks for n more bytes and, unless they are essential, for the reserve behind them. Lack of
// space is ErrNoSpace and stops nothing.
func (l *Log) claim(t *tail, n int64, essential bool) error {
	need := t.size + n
	want := need + l.opts.ReserveBytes
	if l.unreserved || t.reserved >= want {
		return nil
	}
	ends := []int64{want + claimStepBytes, want}
	if essential {
		ends = append(ends, need)
	}
	var err error
	for _, end := range ends {
		if t.reserved >= end {
			return nil
		}
		err = l.opts.FS.Reserve(t.file(), t.size, end-t.size)
		if err == nil {
			t.reserved = end
			return nil
		}
		if !noSpace(err) {
			break
		}
	}
	if errors.Is(err, errors.ErrUnsupported) {
		l.unreserved = true
		l.opts.Logger.Warn("wal: no reserve on this file system", "file", t.file(), "error", err)
		return nil
	}
	return l.unlessFull("claim space in "+t.file(), err)
}
