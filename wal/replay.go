package wal

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/holdfast-db/holdfast/txn"
)

// Replay calls fn for every record from LSN from on, in order, as far as the log went when Replay was called. The payload is
// valid during the call only. fn may use the accessors of the log and nothing else of it.
//
// From 0 means whatever the log still holds. For any other from, records that the log has lost or cut away are missing, and
// Replay fails with ErrCorrupt before the first call; numbers that were skipped on purpose are not missing. Bytes are
// checked again on this way, and damage is ErrCorrupt (a *Damage with file and offset). A failed read is ErrIO, the end of
// ctx ErrBusy, an error of fn is returned as it is. Memory is bounded by the largest record.
func (l *Log) Replay(ctx context.Context, from txn.LSN, fn func(lsn txn.LSN, kind byte, payload []byte) error) error {
	l.reading.Lock()
	defer l.reading.Unlock()
	l.mu.Lock()
	directories, previous, closed := slices.Clone(l.directories), l.previous, l.closed
	l.mu.Unlock()
	if closed {
		return fmt.Errorf("wal: replay %s: %w", l.dir, txn.ErrClosed)
	}
	if from != 0 && from <= previous {
		return &Damage{File: l.dir, Reason: fmt.Sprintf("records from %d on were asked for, those up to %d are missing", from, previous)}
	}
	sc := &scanner{last: previous, anything: true}
	for _, d := range directories {
		if d.last < from {
			sc.last = d.last
			continue
		}
		if err := l.replayDirectory(ctx, sc, d, from, fn); err != nil {
			return err
		}
	}
	return nil
}

func (l *Log) replayDirectory(ctx context.Context, sc *scanner, d directory, from txn.LSN, fn func(txn.LSN, byte, []byte) error) error {
	file, err := l.opts.FS.Open(d.file())
	if err != nil {
		return failure("open "+d.file(), err)
	}
	defer func() { _ = file.Close() }() // nothing was written through it
	sc.begin(file, d.file(), d.size)
	for {
		h, payload, err := sc.next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if h.kind == kindSeal || h.lsn < from {
			continue
		}
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("wal: replay at LSN %d: %w: %w", h.lsn, txn.ErrBusy, err)
		}
		if err := fn(h.lsn, h.kind, payload); err != nil {
			return err
		}
	}
	if sc.last != d.last {
		return &Damage{File: d.file(), Offset: sc.off, Reason: fmt.Sprintf("ends at LSN %d, was %d", sc.last, d.last)}
	}
	return nil
}
