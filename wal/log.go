package wal

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/holdfast-db/holdfast/txn"
	"github.com/holdfast-db/holdfast/txn/mutant"
)

// Log is an open log.
//
// # Writing
//
// A batch goes through these stages, in this order, and no stage begins before the one before it is done:
//
//	fence    the directory is still ours
//	rotate   if the tail is full: sync it, begin the next directory
//	claim    the tail has blocks for the batch, and the reserve behind it
//	write    one write of all frames
//	settle   only in a new directory: sync the file, the directory, and the directory above; close the old file
//
// and then, if something durable waits for it, Sync: sync the file, ask the fence, acknowledge.
//
// # Invariants
//
//   - LSNs grow by one from record to record, except for numbers skipped on purpose, which the next frame states.
//   - A batch is in one file. A file is synced to its end before the next directory exists.
//   - Whatever is durable is a prefix of the log, and Synced never says more than that.
//   - The first failed write, sync, or fence stops the log for good: the memory of tidwall, the page cache and the disk may
//     then disagree, and a sync that is tried again may succeed without having written anything. Every later call gets
//     the same class of error. Only opening the log again ends that: it reads the file and writes the end that nobody
//     vouches for once more before it believes it to be on disk.
//   - A full disk is found before a byte is written, by claiming blocks, and therefore stops nothing: ErrNoSpace refuses one
//     batch. Should a write or sync run out of space all the same, because the file system cannot claim blocks
//     ahead, it is a failed write like any other.
//
// # The reserve
//
// ReserveBytes of blocks are kept allocated behind the end of the newest file. Ordinary records must leave them; a batch of
// essential records may use them, so that space can be given back on a full disk. The blocks belong to the file already:
// nobody else can take them between the refusal and the retry, which is what speaks against the usual ballast file that is
// deleted in need. If there is no room for a new directory, the log goes on in the old one up to four times RotateBytes.
//
// # Concurrency
//
// Append and Sync are for one goroutine, the committer; calling them from more is safe and gains nothing. Cut, Replay and
// the accessors may be called at any time from any goroutine.
type Log struct {
	dir  string
	opts Options

	// turn is held by Append, Sync and Close for their whole length. It guards tail, frames, entries and unreserved.
	turn       sync.Mutex
	tail       *tail
	frames     []byte // the batch being written; reused
	entries    [][]byte
	unreserved bool // the file system cannot claim blocks

	// reading is held by Replay and Cut, so that no directory is removed under a reader. Taken after turn, before mu.
	reading sync.Mutex

	// mu guards what follows; it is never held over I/O.
	mu          sync.Mutex
	directories []directory // the last one is the tail's, if there is a tail
	previous    txn.LSN     // of the first record that is held
	last        txn.LSN     // of the last record written; or what the first record will name as the one before it
	next        txn.LSN
	synced      txn.LSN
	written     int64
	failed      error
	closed      bool
	repaired    RepairReport
}

// framesKeptBytes is the largest batch whose encoding buffer is kept for the next one.
const framesKeptBytes = 1 << 20

// newLog builds the state of a log from what the survey found.
func newLog(dir string, o Options, s survey) *Log {
	l := &Log{dir: dir, opts: o, directories: s.whole, repaired: s.report, previous: s.previous}
	if n := len(s.whole); n > 0 {
		l.last = s.whole[n-1].last
		l.next = max(l.last+1, o.FirstLSN)
		l.synced = l.last
		return l
	}
	l.next = max(1, o.FirstLSN)
	l.last = l.next - 1
	l.previous, l.synced = l.last, l.last
	return l
}

// Append writes records in order, as one write to one file, and returns the LSN of the first; the others follow it one by one.
// They are ordered and readable at once, and durable after the next successful Sync.
//
// ErrInvalid, ErrTooLarge and ErrNoSpace refuse the batch: nothing was written, and the log goes on (Err is nil). Any other
// error stops the log; whether the batch is in it is known after opening it again.
func (l *Log) Append(records []Record) (first txn.LSN, err error) {
	size, essential, err := measure(records)
	if err != nil {
		return 0, err
	}
	l.turn.Lock()
	defer l.turn.Unlock()
	if err := l.writable(); err != nil {
		return 0, err
	}
	if err := l.owned(); err != nil {
		return 0, err
	}
	old := l.tail
	t, err := l.target(size, essential)
	if err != nil {
		return 0, err
	}
	l.encode(t, records, size)
	err = t.appender.Append(l.entries)
	l.forget()
	if err != nil {
		if t != old {
			err = errors.Join(err, t.appender.Close())
		}
		return 0, l.fail("append to "+t.file(), err)
	}
	first = l.wrote(t, len(records), size)
	if t != old {
		if err := l.settle(t, old); err != nil {
			return 0, err
		}
	}
	return first, nil
}

// measure checks a batch and adds it up.
func measure(records []Record) (size int64, essential bool, err error) {
	if len(records) == 0 {
		return 0, false, fmt.Errorf("wal: batch without a record: %w", txn.ErrInvalid)
	}
	essential = true
	for _, r := range records {
		if err := r.check(); err != nil {
			return 0, false, err
		}
		size += entryBytes(len(r.Payload))
		essential = essential && r.Essential
	}
	if size > MaxBatchBytes {
		return 0, false, fmt.Errorf("wal: batch of %d bytes, at most %d: %w", size, MaxBatchBytes, txn.ErrTooLarge)
	}
	return size, essential, nil
}

// encode builds the entries of a batch that goes to t.
func (l *Log) encode(t *tail, records []Record, size int64) {
	l.frames, l.entries = slices.Grow(l.frames[:0], int(size)), l.entries[:0]
	h := header{durable: uint32(t.durable), lsn: l.next, previous: l.last}
	for _, r := range records {
		h.kind = r.Kind
		start := len(l.frames)
		l.frames = appendFrame(l.frames, h, r.Payload)
		l.entries = append(l.entries, l.frames[start:])
		h.lsn, h.previous = h.lsn+1, h.lsn
	}
}

// forget lets go of the memory of a large batch.
func (l *Log) forget() {
	clear(l.entries)
	if cap(l.frames) > framesKeptBytes {
		l.frames = nil
	}
}

// wrote publishes what a successful write added, and gives the LSN of its first record.
func (l *Log) wrote(t *tail, records int, size int64) (first txn.LSN) {
	l.mu.Lock()
	defer l.mu.Unlock()
	first = l.next
	l.last = first + txn.LSN(records) - 1
	l.next = l.last + 1
	l.written += size
	t.last, t.size, t.sealed = l.last, t.size+size, false
	if t != l.tail {
		l.tail = t
		l.directories = append(l.directories, t.directory)
	}
	l.directories[len(l.directories)-1] = t.directory
	return first
}

// Sync returns when everything appended before is durable and this process still owns the directory. An error stops the log.
func (l *Log) Sync() error {
	l.turn.Lock()
	defer l.turn.Unlock()
	if err := l.writable(); err != nil {
		return err
	}
	if err := l.syncTail(); err != nil {
		return err
	}
	return l.owned()
}

// syncTail makes the tail durable, if it is not.
func (l *Log) syncTail() error {
	if l.tail == nil || l.tail.durable == l.tail.size {
		return nil
	}
	if err := l.flush(l.tail); err != nil {
		return err
	}
	l.allSynced()
	return nil
}

// flush syncs the file of t.
func (l *Log) flush(t *tail) error {
	if mutant.On("log is not synced") {
		t.durable = t.size
		return nil
	}
	if err := t.appender.Sync(); err != nil {
		return l.fail("sync "+t.file(), err)
	}
	t.durable = t.size
	return nil
}

// allSynced publishes that everything written is durable.
func (l *Log) allSynced() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.synced = l.last
}

// Close makes everything durable, seals the log and gives up its file. It waits for Replay and Cut. On a log that was stopped
// it writes nothing and returns the error that stopped it. Closing twice is a no-op.
func (l *Log) Close() error {
	l.turn.Lock()
	defer l.turn.Unlock()
	l.reading.Lock()
	defer l.reading.Unlock()
	err := l.writable()
	if errors.Is(err, txn.ErrClosed) {
		return nil
	}
	if err == nil {
		err = l.seal()
	}
	if errors.Is(err, txn.ErrReadOnly) {
		err = nil
	}
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	if l.tail != nil {
		if closeErr := l.tail.appender.Close(); closeErr != nil && err == nil {
			err = failure("close "+l.tail.file(), closeErr)
		}
	}
	return err
}

// seal marks the end of the log as durable and complete, unless it is marked already.
func (l *Log) seal() error {
	t := l.tail
	if t == nil || t.sealed {
		return nil
	}
	if err := l.owned(); err != nil {
		return err
	}
	if err := l.syncTail(); err != nil {
		return err
	}
	size := entryBytes(0)
	err := l.claim(t, size, true)
	if errors.Is(err, txn.ErrNoSpace) {
		return nil // not worth failing for: everything is durable, and the next open only finds no mark
	}
	if err != nil {
		return err
	}
	frame := appendFrame(l.frames[:0], header{kind: kindSeal, durable: uint32(t.durable), lsn: l.last, previous: l.last}, nil)
	if err := t.appender.Append([][]byte{frame}); err != nil {
		return l.fail("seal "+t.file(), err)
	}
	t.size += size
	return l.syncTail()
}

// writable refuses what a log that is closed, read-only or stopped cannot do.
func (l *Log) writable() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
		return fmt.Errorf("wal: %s: %w", l.dir, txn.ErrClosed)
	case l.opts.ReadOnly:
		return fmt.Errorf("wal: %s: %w", l.dir, txn.ErrReadOnly)
	case l.failed != nil:
		return fmt.Errorf("wal: stopped until opened again: %w", l.failed)
	}
	return nil
}

// owned asks the fence; a refusal stops the log.
func (l *Log) owned() error {
	if err := l.opts.Fence(); err != nil && !mutant.On("fence is not asked") {
		return l.stop(fenced(l.dir, err))
	}
	return nil
}

// fail stops the log because of an error of the file system.
func (l *Log) fail(what string, err error) error { return l.stop(failure(what, err)) }

// stop keeps the first error for all later calls.
func (l *Log) stop(err error) error {
	l.mu.Lock()
	first := l.failed == nil
	if first {
		l.failed = err
	}
	last, synced := l.last, l.synced
	l.mu.Unlock()
	if first {
		l.opts.Logger.Error("wal: stopped", "error", err, "last_lsn", uint64(last), "synced_lsn", uint64(synced))
	}
	return err
}

// First is the LSN of the first record that the log holds; equal to Next if it holds none.
func (l *Log) First() txn.LSN {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.directories) == 0 {
		return l.next
	}
	return l.directories[0].first
}

// Next is the LSN that the next record will get.
func (l *Log) Next() txn.LSN {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.next
}

// Synced is the LSN up to which every record is durable.
func (l *Log) Synced() txn.LSN {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.synced
}

// Bytes is how much was appended through this handle, framing included.
func (l *Log) Bytes() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.written
}

// Size is the size of all files of the log in bytes, without the reserve.
func (l *Log) Size() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	var size int64
	for _, d := range l.directories {
		size += d.size
	}
	return size
}

// Err is the error that stopped the log, nil while it works.
func (l *Log) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.failed
}

// Repair says what Open did to the end of the log; on a read-only log, what it would have done.
func (l *Log) Repair() RepairReport { return l.repaired }
