package wal

import (
	"errors"
	"math"

	tidwall "github.com/tidwall/wal"
)

// tidwallAppender appends to a directory that holds one tidwall log of one file. The segment size is above everything that
// the log lets a file grow to, so that tidwall never begins a second file, and NoSync leaves the syncs to the log.
//
// tidwall keeps the open file in memory as well, so a log costs up to the size of its newest file in RAM.
type tidwallAppender struct {
	log   *tidwall.Log
	batch *tidwall.Batch
	next  uint64
}

// batchKeptBytes is the largest batch whose buffer is kept for the next one.
const batchKeptBytes = 1 << 20

func openAppender(dir string) (Appender, uint64, error) {
	log, err := tidwall.Open(dir, &tidwall.Options{
		NoSync:           true,
		SegmentSize:      math.MaxInt,
		SegmentCacheSize: 1,
		DirPerms:         0o700,
		FilePerms:        0o600,
	})
	if err != nil {
		return nil, 0, err
	}
	last, err := log.LastIndex()
	if err != nil {
		return nil, 0, errors.Join(err, log.Close())
	}
	return &tidwallAppender{log: log, batch: new(tidwall.Batch), next: last + 1}, last, nil
}

func (a *tidwallAppender) Append(entries [][]byte) error {
	total := 0
	for _, e := range entries {
		a.batch.Write(a.next, e)
		a.next++
		total += len(e)
	}
	if err := a.log.WriteBatch(a.batch); err != nil {
		return err
	}
	if total > batchKeptBytes {
		a.batch = new(tidwall.Batch)
	}
	return nil
}

func (a *tidwallAppender) Sync() error { return a.log.Sync() }

// Close tries twice, because tidwall keeps its file open when the sync before the close fails, and a failed sync is reported
// once only.
func (a *tidwallAppender) Close() error {
	err := a.log.Close()
	if err != nil && !errors.Is(err, tidwall.ErrClosed) {
		return errors.Join(err, a.log.Close())
	}
	return err
}
