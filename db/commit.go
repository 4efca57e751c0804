package db

import (
	"context"
	"fmt"
	"log/slog"
	"sync"

	"github.com/holdfast-db/holdfast/db/internal/index"
	"github.com/holdfast-db/holdfast/txn"
	"github.com/holdfast-db/holdfast/wal"
)

// transaction is one change of the catalogue on its way through the committer.
type transaction struct {
	// decide reads the catalogue as it is when the transaction's turn comes and gives the record, or nil if there is
	// nothing to do, or a refusal. It runs on the committer goroutine and must not block.
	decide func(v txn.Reader) (txn.Record, error)
	// applied, if set, runs on the committer goroutine once the record is in the catalogue, before anybody sees it as done
	// and before the next batch.
	applied func(effects *txn.Effects)

	effects *txn.Effects // nil if there was nothing to do
	record  txn.Record
	lsn     txn.LSN
}

// committer turns transactions into records, one batch at a time: it decides each against the catalogue and the ones
// before it in the batch, appends the batch to the log, syncs once if one of them has to be durable, applies it to the
// index and tells the rest of the database what changed. The log is ahead of the index by one batch at most, and nothing
// that needed a sync is visible before it.
//
// The index is cut loose from the log by flushing it: a flush is begun when there is half as much to replay as an open after a
// crash may have to, and when it has ended the log is cut below what the flush made durable. That bounds both the log and the
// replay at open. What replaying takes is measured in bytes of log and in pages: a page that is moved or written late takes little
// log and as much of the index as one that is published.
type committer struct {
	log     *wal.Log
	group   *wal.Group[*transaction]
	index   *index.Index
	effects func(*txn.Effects)
	told    func(*transaction) // every transaction that changed something, after effects; set before the first one
	logger  *slog.Logger
	history *chronicle

	// Of the committer goroutine.
	batch   *index.Batch
	payload []byte // encoded records of the batch
	broken  error  // a record could not be applied: nothing more is committed

	replayBytes int64
	flushedAt   int64           // log.Bytes() when the last flush began
	changed     int64           // pages and records changed since then
	flushing    <-chan struct{} // closed when it has ended; nil if none is under way

	// Without a group the committer is that of a read-only handle: see readonly.go.
	turn sync.Mutex
	next txn.LSN // of the next record that stays in memory; with turn
}

func newCommitter(l *wal.Log, x *index.Index, h *chronicle, replayBytes int64, logger *slog.Logger, effects func(*txn.Effects)) (*committer, error) {
	c := &committer{log: l, index: x, history: h, effects: effects, logger: logger, replayBytes: replayBytes, flushedAt: l.Bytes()}
	var err error
	c.group, err = wal.NewGroup(l, wal.Hooks[*transaction]{Prepare: c.prepare, Apply: c.apply, Discard: c.discard}, wal.GroupOptions{})
	return c, err
}

// commit carries out a transaction. durable ones are acknowledged after a sync. A context that ends while the transaction
// waits for its turn withdraws it; after that its outcome is waited for.
func (c *committer) commit(ctx context.Context, t *transaction, durable bool) error {
	if c.group == nil {
		return c.commitPrivately(t)
	}
	return c.group.Commit(ctx, &wal.Request[*transaction]{Payload: t, Durable: durable})
}

// commitEssential is commit for what gives space back: it goes through on a full disk.
func (c *committer) commitEssential(ctx context.Context, t *transaction) error {
	if c.group == nil {
		return c.commitPrivately(t)
	}
	return c.group.Commit(ctx, &wal.Request[*transaction]{Payload: t, Durable: true, Essential: true})
}

func (c *committer) prepare(r *wal.Request[*transaction], lsn txn.LSN) (rec wal.Record, err error) {
	if c.broken != nil {
		return wal.Record{}, c.broken
	}
	defer func() {
		// Pebble panics where it cannot go on; that must not take the serving process with it.
		if p := recover(); p != nil {
			c.broken = fmt.Errorf("db: catalogue: %v: %w", p, ErrIO)
			err = c.broken
		}
	}()
	if c.batch == nil {
		c.batch = c.index.NewBatch()
		c.payload = c.payload[:0]
	}
	t := r.Payload
	t.effects, t.lsn = nil, 0
	record, err := t.decide(c.batch)
	if err != nil || record == nil {
		return wal.Record{}, err
	}
	start := len(c.payload)
	c.payload = txn.Encode(c.payload, record)
	encoded := c.payload[start:len(c.payload):len(c.payload)]
	if len(encoded) > txn.RecordBytesMax {
		return wal.Record{}, fmt.Errorf("db: %v record of %d bytes: limit %d: %w", record.Kind(), len(encoded), txn.RecordBytesMax, ErrTooLarge)
	}
	effects, err := txn.Apply(c.batch, lsn, record)
	if err == nil {
		err = c.history.note(c.batch, lsn, effects)
	}
	if err != nil {
		c.broken = fmt.Errorf("db: %v record: %w", record.Kind(), err)
		return wal.Record{}, c.broken
	}
	t.effects, t.lsn, t.record = effects, lsn, record
	c.changed += replayCost(record, effects)
	return wal.Record{Kind: byte(record.Kind()), Payload: encoded, Essential: r.Essential}, nil
}

func (c *committer) apply(accepted []*wal.Request[*transaction]) (err error) {
	if c.broken != nil {
		return c.broken
	}
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("db: catalogue: %v: %w", p, ErrIO)
		}
	}()
	b := c.batch
	c.batch = nil
	if b == nil {
		return nil
	}
	if err := b.Commit(); err != nil {
		return err
	}
	for _, r := range accepted {
		t := r.Payload
		if t.effects == nil {
			continue
		}
		if t.applied != nil {
			t.applied(t.effects)
		}
		c.effects(t.effects)
		c.told(t)
	}
	c.maintain()
	return nil
}

func (c *committer) discard([]*wal.Request[*transaction], error) {
	if c.batch != nil {
		c.batch.Discard() // its error would be about giving memory back; the batch is gone either way
		c.batch = nil
	}
}

// maintain begins a flush of the index when enough log has gathered, and cuts the log behind one that has ended. Neither
// has to succeed now: a log that could not be cut is cut the next time.
func (c *committer) maintain() {
	if c.group == nil {
		return
	}
	var err error
	if c.flushing != nil {
		select {
		case <-c.flushing:
			c.flushing = nil
			err = c.cut()
		default:
		}
	} else if c.log.Bytes()-c.flushedAt >= c.replayBytes/2 || c.changed >= c.replayBytes/replayBytesPerPage/2 {
		c.flushedAt, c.changed = c.log.Bytes(), 0
		c.flushing, err = c.index.AsyncFlush()
	}
	if err != nil {
		c.logger.Warn("log not cut", "error", err)
	}
}

// replayBytesPerPage is how many bytes of Options.ReplayBytes a page of a record stands for, whatever it takes in the log.
const replayBytesPerPage = 512

// replayCost is what a record takes to be replayed, in pages.
func replayCost(r txn.Record, e *txn.Effects) int64 {
	n := 1 + len(e.Dropped)
	switch r := r.(type) {
	case *txn.Publish:
		n += len(r.Pages)
	case *txn.Persist:
		n += len(r.Pages)
	}
	return int64(n)
}

// flushSoon has the next transaction begin a flush: what was replayed at open is not replayed by the next open as well.
func (c *committer) flushSoon() { c.changed = c.replayBytes }

func (c *committer) cut() error {
	durable, err := c.index.DurableApplied()
	if err != nil {
		return err
	}
	return c.log.Cut(durable + 1)
}

// stop commits what is queued and nothing more.
func (c *committer) stop() {
	if c.group != nil {
		c.group.Close()
	}
}

// close commits what is queued, flushes the index and cuts the log.
func (c *committer) close() error {
	if c.group == nil {
		return nil
	}
	c.group.Close()
	if c.broken != nil {
		return c.broken
	}
	if err := c.log.Err(); err != nil {
		return err
	}
	if c.flushing != nil {
		<-c.flushing
	}
	if err := c.index.Flush(); err != nil {
		return err
	}
	return c.cut()
}
