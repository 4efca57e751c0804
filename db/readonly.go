package db

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"

	"github.com/holdfast-db/holdfast/db/internal/index"
	"github.com/holdfast-db/holdfast/txn"
	"github.com/holdfast-db/holdfast/wal"
)

// A read-only handle is an ordinary one whose writing ends have been turned back:
//
//	directory   has to be there, with a marker; its lock file is held shared and not written to, and no epoch is entered. A
//	            directory without a lock file has no writer, and none is made for it.
//	index       opened through a shadow of the file system (package index): the log is replayed into memory
//	log         read, not repaired: a torn end is left where it is
//	segments    read; nothing is removed, cut or punched
//	committer   decides and applies as ever and appends to no log, so that what a crash left unrestorable, and what a
//	            restore finds lost, is retired for this handle, and the disk keeps its own opinion
//
// So everything that reads is the code that a writer runs, and listed means restorable here as well. What an application asks
// to be changed is refused at the edge with ErrReadOnly. Memory grows with the log since the last flush of the index, which
// Options.ReplayBytes bounded when it was written, and with what turns out lost.

// takeDirectory takes the directory for one handle.
func takeDirectory(fsys DirectoryFS, dir string, readOnly bool) (*directory, error) {
	if readOnly {
		return lookDirectory(fsys, dir)
	}
	return openDirectory(fsys, dir)
}

// lookDirectory takes a directory for reading. It creates and changes nothing.
func lookDirectory(fsys DirectoryFS, dir string) (*directory, error) {
	path, err := resolve(fsys, dir)
	if err != nil {
		return nil, err
	}
	m, err := readMarker(fsys, path)
	if err != nil {
		return nil, err
	}
	if m == nil {
		return nil, fmt.Errorf("db: %s: there is no database in it: %w", path, ErrNotFound)
	}
	d := &directory{fs: fsys, path: path, marker: *m}
	d.lock, err = fsys.Lock(d.join(lockName), true)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		d.lock = noLock{}
		return d, nil // whoever writes makes the lock file first
	case err != nil:
		return nil, osError("lock", d.join(lockName), err)
	case d.lock == nil:
		return nil, locked(fsys, path)
	}
	// The marker was read before the lock was there.
	if m, err = readMarker(fsys, path); err != nil || m == nil {
		return nil, errors.Join(err, d.lock.Close())
	}
	d.marker = *m
	return d, nil
}

// resolve gives the absolute path of a directory that is there.
func resolve(fsys DirectoryFS, dir string) (string, error) {
	if dir == "" {
		return "", fmt.Errorf("db: name of the directory is empty: %w", ErrInvalid)
	}
	path, err := fsys.Resolve(dir, false)
	if errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("db: %s: %w: %w", dir, ErrNotFound, err)
	}
	if err != nil {
		return "", osError("resolve", dir, err)
	}
	return path, nil
}

// locked says who holds the directory: the writer that the lock file names, or readers, which write nothing there.
func locked(fsys DirectoryFS, path string) error {
	name := filepath.Join(path, lockName)
	if shared, err := fsys.Lock(name, true); err == nil && shared != nil {
		return errors.Join(fmt.Errorf("db: %s is in use by read-only handles: %w", path, ErrLocked), shared.Close())
	}
	holder, _ := fsys.ReadFile(name)
	return fmt.Errorf("db: %s is in use by %s: %w", path, bytes.TrimSpace(holder), ErrLocked)
}

// enterToWrite admits a call that is to change the database.
func (d *DB) enterToWrite(ctx context.Context) error {
	if d.options.ReadOnly {
		return fmt.Errorf("db: %s is open read-only: %w", d.dir.path, ErrReadOnly)
	}
	return d.gate.enterWith(ctx)
}

// newPrivateCommitter makes the committer of a read-only handle.
func newPrivateCommitter(l *wal.Log, x *index.Index, h *chronicle, logger *slog.Logger, effects func(*txn.Effects)) *committer {
	return &committer{log: l, index: x, history: h, effects: effects, logger: logger, next: l.Next()}
}

// commitPrivately carries a transaction out in memory.
func (c *committer) commitPrivately(t *transaction) error {
	c.turn.Lock()
	defer c.turn.Unlock()
	r := &wal.Request[*transaction]{Payload: t}
	if _, err := c.prepare(r, c.next); err != nil {
		c.discard(nil, err)
		return err
	}
	c.next++
	return c.apply([]*wal.Request[*transaction]{r})
}
