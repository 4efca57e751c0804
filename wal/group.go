package wal

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"

	"github.com/holdfast-db/holdfast/txn"
)

// Limits and defaults of GroupOptions.
const (
	QueueLimitDefault = 1024
	QueueLimitMax     = 1 << 16
	BatchLimitDefault = 1024
	BatchBytesDefault = 4 << 20
	BatchBytesMax     = 16 << 20 // with one more record of MaxRecordBytes still within MaxBatchBytes
)

// gatherYieldsMax bounds how often the committer steps aside for callers that are about to queue.
const (
	gatherYieldsMax    = 16
	gatherFruitlessMax = 2 // in a row
)

// Request is one transaction on its way through a Group. It is used for one Commit.
type Request[T any] struct {
	// Payload is the caller's, carried to the hooks and back.
	Payload T
	// Durable requests are acknowledged after a sync that covers them and everything before them; others once their
	// record is written in its place.
	Durable bool
	// Essential requests are tried again, without the others, when the disk is too full for the batch; the record that
	// Prepare gives for them should be Essential too.
	Essential bool

	lsn  txn.LSN
	err  error
	done chan struct{} // closed once lsn and err are final; nil before Commit
}

// LSN is the number of the record that was written; 0 if there was nothing to write. Valid after Commit returned nil, and in
// Apply.
func (r *Request[T]) LSN() txn.LSN { return r.lsn }

// Hooks are what a Group asks of its owner. They are called by the committer, never two at a time, and must not call Commit
// or Close.
//
// Transactions are prepared one after the other, each seeing the effect of those prepared before it. A pass over a batch ends
// with one call of either Apply or Discard, after which the next pass begins. A batch may take more than one pass. The slices
// given to Apply and Discard are theirs during the call only.
type Hooks[T any] struct {
	// Prepare validates one request against the state and the requests of this pass accepted so far, and gives the
	// record for it, which will have the given LSN. A Record of kind 0 accepts the request with nothing to write. An error
	// refuses this request alone and must leave no trace in the state. The record's payload must stay as it is until the
	// pass ends.
	Prepare func(r *Request[T], lsn txn.LSN) (Record, error)
	// Apply makes the accepted requests of the pass visible, in order; their records are written, and synced if one of them
	// is durable. The list may be empty. An error stops the log, because the records cannot be taken back.
	Apply func(accepted []*Request[T]) error
	// Discard forgets the accepted requests of the pass: none of them is acknowledged. If the log goes on, nothing of them
	// is written; if it stopped, opening it again tells.
	Discard func(accepted []*Request[T], err error)
}

// GroupOptions bounds a Group. Zero values mean the defaults.
type GroupOptions struct {
	QueueLimit int   // requests that wait for their turn; at most QueueLimitMax
	BatchLimit int   // requests of one batch; at most QueueLimitMax
	BatchBytes int64 // a batch takes no further request once its records hold so much; at most BatchBytesMax
}

func (o GroupOptions) withDefaults() (GroupOptions, error) {
	if o.QueueLimit == 0 {
		o.QueueLimit = QueueLimitDefault
	}
	if o.BatchLimit == 0 {
		o.BatchLimit = BatchLimitDefault
	}
	if o.BatchBytes == 0 {
		o.BatchBytes = BatchBytesDefault
	}
	switch {
	case o.QueueLimit < 0 || o.QueueLimit > QueueLimitMax:
		return o, fmt.Errorf("wal: QueueLimit %d, want 0…%d: %w", o.QueueLimit, QueueLimitMax, txn.ErrInvalid)
	case o.BatchLimit < 0 || o.BatchLimit > QueueLimitMax:
		return o, fmt.Errorf("wal: BatchLimit %d, want 0…%d: %w", o.BatchLimit, QueueLimitMax, txn.ErrInvalid)
	case o.BatchBytes < 0 || o.BatchBytes > BatchBytesMax:
		return o, fmt.Errorf("wal: BatchBytes %d, want 0…%d: %w", o.BatchBytes, int64(BatchBytesMax), txn.ErrInvalid)
	}
	return o, nil
}

// Group is group commit: many callers, one committer, one write and at most one sync for all that came in the meantime.
//
// A request is *queued*, then *taken*, then *done*. While it is queued its caller may withdraw it, and it leaves no trace. Once
// taken, its caller waits for the outcome, whatever happens to its context: a commit never answers "maybe". The committer
// takes all that is queued (up to BatchLimit), and then
//
//	prepare   each request in order; refusals are noted
//	append    one batch, one write
//	sync      once, if an accepted request is durable
//	apply     make the accepted ones visible
//	wake      all of the batch, in order
//
// while the next batch gathers in the queue.
//
// # Gathering
//
// Callers that were just woken often have their next request ready within microseconds. A committer that goes on at once finds
// only those that queued during its sync, so that busy callers split into two halves that take turns, and each sync
// serves half of them. So after waking more than one caller it yields the processor, as long as that makes the queue longer,
// until as many are queued as are known to be about. It never waits for time to pass: a lone caller is never held up, and
// the worst case is gatherYieldsMax rounds of other goroutines' work that is ready to run.
//
// # Who commits
//
// The committer is whoever has the turn. A caller that finds nobody at work takes it for the one batch that its request is in: a lone
// caller is spared two changes of goroutines, which take about as long as a fast device takes for a sync. All others leave
// their requests to a goroutine of the group, which goes on as long as there are any.
//
// Rejected: a timer (it costs a lone caller its whole length, and is too coarse for fast disks); letting callers commit one batch after
// another (each would be held up by the work of others); two batches in
// flight (the second could be acknowledged only after the first anyway, and a failure of the first would have to undo both).
//
// # Failure
//
// What fails before anything is written fails alone: a refused request, an oversized record, the requests that are not
// essential on a full disk. A failed write, sync, fence or Apply stops the log; its batch and every later request get that error.
type Group[T any] struct {
	log   *Log
	hooks Hooks[T]
	opts  GroupOptions

	turn     chan struct{} // holds a token while somebody is the committer
	wake     chan struct{} // tells the goroutine that the queue is not empty, or closing
	closing  chan struct{} // closed by Close
	finished chan struct{} // closed when the goroutine has ended

	mu     sync.Mutex // guards what follows
	queue  []*Request[T]
	room   chan struct{} // closed when the queue gets shorter; nil if nobody waits for that
	closed bool

	// The committer's own, kept from batch to batch for their memory.
	batch    []*Request[T]
	rest     []*Request[T] // taken, and the last batch had no room for them
	accepted []*Request[T]
	records  []Record
}

// NewGroup starts the committer of a log, which nobody else appends to from then on. All hooks must be set. Close ends it.
func NewGroup[T any](l *Log, h Hooks[T], o GroupOptions) (*Group[T], error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	if h.Prepare == nil || h.Apply == nil || h.Discard == nil {
		return nil, fmt.Errorf("wal: group without all of its hooks: %w", txn.ErrInvalid)
	}
	g := &Group[T]{
		log: l, hooks: h, opts: o,
		turn:     make(chan struct{}, 1),
		wake:     make(chan struct{}, 1),
		closing:  make(chan struct{}),
		finished: make(chan struct{}),
	}
	go g.commitAll()
	return g, nil
}

// Commit queues a request and waits for its outcome: nil, the error with which Prepare refused it, or the error of its batch.
// ErrBusy, which then also wraps the context's error, means that ctx ended while the request waited for room in the queue or
// for its turn; it was not and will not be written. ErrClosed means the same for a group that is closed.
func (g *Group[T]) Commit(ctx context.Context, r *Request[T]) error {
	if r.done != nil {
		return fmt.Errorf("wal: request committed twice: %w", txn.ErrInvalid)
	}
	r.done = make(chan struct{})
	if err := g.enqueue(ctx, r); err != nil {
		return err
	}
	select {
	case g.turn <- struct{}{}:
		g.lead()
	default:
		g.signal() // whoever has the turn may have taken what it takes
	}
	select {
	case <-r.done:
	case <-ctx.Done():
		if g.withdraw(r) {
			return busy(ctx)
		}
		<-r.done
	}
	return r.err
}

// lead commits what is queued, in the turn that the caller has taken for its request, and gives up the turn.
func (g *Group[T]) lead() {
	if batch := g.take(); len(batch) > 0 { // else somebody was faster
		g.commit(batch)
	}
	left := len(g.rest) > 0 || g.queued() > 0
	<-g.turn
	if left {
		g.signal()
	}
}

func busy(ctx context.Context) error {
	return fmt.Errorf("wal: commit withdrawn before its turn: %w: %w", txn.ErrBusy, context.Cause(ctx))
}

// enqueue puts r at the end of the queue, as soon as there is room.
func (g *Group[T]) enqueue(ctx context.Context, r *Request[T]) error {
	if ctx.Err() != nil {
		return busy(ctx)
	}
	for {
		g.mu.Lock()
		if g.closed {
			g.mu.Unlock()
			return errGroupClosed
		}
		if len(g.queue) < g.opts.QueueLimit {
			g.queue = append(g.queue, r)
			g.mu.Unlock()
			return nil
		}
		if g.room == nil {
			g.room = make(chan struct{})
		}
		room := g.room
		g.mu.Unlock()
		select {
		case <-room:
		case <-ctx.Done():
			return busy(ctx)
		case <-g.closing:
			return errGroupClosed
		}
	}
}

// shorter tells those who wait that the queue got shorter. With g.mu.
func (g *Group[T]) shorter() {
	if g.room != nil {
		close(g.room)
		g.room = nil
	}
}

var errGroupClosed = fmt.Errorf("wal: group: %w", txn.ErrClosed)

// signal wakes the goroutine; a signal that is already pending serves for both.
func (g *Group[T]) signal() {
	select {
	case g.wake <- struct{}{}:
	default:
	}
}

// withdraw takes r out of the queue and reports whether it was still there.
func (g *Group[T]) withdraw(r *Request[T]) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	i := slices.Index(g.queue, r)
	if i < 0 {
		return false
	}
	g.queue = slices.Delete(g.queue, i, i+1)
	g.shorter()
	return true
}

// Close admits no further request, commits those that are queued, and returns when that is done. The log stays
// open. Closing twice is a no-op.
func (g *Group[T]) Close() {
	g.mu.Lock()
	if !g.closed {
		g.closed = true
		close(g.closing)
	}
	g.signal()
	g.mu.Unlock()
	<-g.finished
}

// queued is the number of requests that wait.
func (g *Group[T]) queued() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.queue)
}

// take gives the next batch, up to BatchLimit: the rest of the last one, and what is queued.
func (g *Group[T]) take() []*Request[T] {
	last := g.batch
	g.batch = append(last[:0], g.rest...)
	clear(last[len(g.batch):])
	g.mu.Lock()
	defer g.mu.Unlock()
	n := min(len(g.queue), g.opts.BatchLimit-len(g.batch))
	g.batch = append(g.batch, g.queue[:n]...)
	g.queue = slices.Delete(g.queue, 0, n)
	if n > 0 {
		g.shorter()
	}
	return g.batch
}

// commitAll commits what callers leave to it.
func (g *Group[T]) commitAll() {
	defer close(g.finished)
	for range g.wake {
		g.turn <- struct{}{}
		closed := g.commitQueue()
		<-g.turn
		if closed {
			return
		}
	}
}

// commitQueue commits until nothing is queued, and tells whether nothing will be.
func (g *Group[T]) commitQueue() (closed bool) {
	for {
		g.mu.Lock()
		closed = g.closed // before the queue is looked at: from then on it only gets shorter
		g.mu.Unlock()
		batch := g.take()
		if len(batch) == 0 {
			return closed
		}
		taken := len(batch)
		g.commit(batch)
		if served := taken - len(g.rest); served > 1 {
			g.gather(served)
		}
	}
}

// gather steps aside while that makes the queue longer, for as many requests as were just served and are queued by now.
func (g *Group[T]) gather(served int) {
	before := g.queued()
	want := min(before+served, g.opts.BatchLimit)
	fruitless := 0
	for range gatherYieldsMax {
		runtime.Gosched()
		now := g.queued()
		if now == before {
			fruitless++
		} else {
			fruitless = 0
		}
		if now >= want || fruitless == gatherFruitlessMax {
			return
		}
		before = now
	}
}

// pass is one attempt at a batch.
type pass[T any] struct {
	prepared []*Request[T] // all that were looked at
	accepted []*Request[T]
	first    txn.LSN
	records  []Record
	durable  bool
	misfit   *Request[T] // ended the pass: its record is one that no log could hold
}

// commit carries out one batch and then lets go of it, so that an idle group keeps nobody's requests and payloads. What it had no
// room for is the rest; all others are done.
func (g *Group[T]) commit(batch []*Request[T]) {
	g.rest = g.carryOut(batch)
	if len(g.rest) == 0 {
		clear(g.batch)
	}
	clear(g.accepted)
	clear(g.records)
}

func (g *Group[T]) carryOut(batch []*Request[T]) (rest []*Request[T]) {
	limit := len(batch)
	for len(batch) > 0 {
		if err := g.log.Err(); err != nil {
			finish(batch, fmt.Errorf("wal: stopped until opened again: %w", err))
			return nil
		}
		p, err := g.prepare(batch[:min(limit, len(batch))])
		if err == nil {
			err = g.write(p)
		}
		if err == nil {
			g.complete(p)
			return batch[len(p.prepared):]
		}
		g.hooks.Discard(p.accepted, err)
		full := g.log.Err() == nil && errors.Is(err, txn.ErrNoSpace)
		ordinary := func(r *Request[T]) bool { return !r.Essential }
		switch {
		case p.misfit != nil:
			batch = drop(batch, func(r *Request[T]) bool { return r == p.misfit }, err)
		case full && slices.ContainsFunc(batch, ordinary):
			batch = drop(batch, ordinary, err)
		case full && len(p.prepared) > 1:
			limit = 1 // together they are more than the reserve holds; as many as fit shall go through
		default:
			finish(p.prepared, err)
			batch = batch[len(p.prepared):]
		}
	}
	return nil
}

// prepare runs one pass up to its write. The error is that of a misfit.
func (g *Group[T]) prepare(batch []*Request[T]) (pass[T], error) {
	p := pass[T]{first: g.log.Next(), accepted: g.accepted[:0], records: g.records[:0]}
	defer func() { g.accepted, g.records = p.accepted, p.records }()
	var size int64
	for i, r := range batch {
		if size >= g.opts.BatchBytes {
			break
		}
		p.prepared = batch[:i+1]
		r.lsn = 0
		rec, err := g.hooks.Prepare(r, p.first+txn.LSN(len(p.records)))
		if r.err = err; err != nil {
			continue
		}
		p.accepted = append(p.accepted, r)
		p.durable = p.durable || r.Durable
		if rec.Kind == 0 {
			continue
		}
		if err := rec.check(); err != nil {
			p.misfit = r
			return p, err
		}
		r.lsn = p.first + txn.LSN(len(p.records))
		p.records = append(p.records, rec)
		size += entryBytes(len(rec.Payload))
	}
	return p, nil
}

// write appends the records of a pass and makes them as durable as its requests want.
func (g *Group[T]) write(p pass[T]) error {
	if len(p.records) > 0 {
		first, err := g.log.Append(p.records)
		if err != nil {
			return err
		}
		if first != p.first {
			return g.log.stop(fmt.Errorf("wal: record %d written as %d, somebody else appends: %w", p.first, first, txn.ErrConflict))
		}
	}
	if p.durable {
		return g.log.Sync()
	}
	return g.log.owned()
}

// complete makes a written pass visible and wakes its callers.
func (g *Group[T]) complete(p pass[T]) {
	if err := g.hooks.Apply(p.accepted); err != nil {
		finish(p.prepared, g.log.stop(err))
		return
	}
	for _, r := range p.prepared {
		close(r.done)
	}
}

// drop fails the requests that match and gives the others.
func drop[T any](batch []*Request[T], match func(*Request[T]) bool, err error) []*Request[T] {
	return slices.DeleteFunc(batch, func(r *Request[T]) bool {
		if match(r) {
			finish([]*Request[T]{r}, err)
			return true
		}
		return false
	})
}

// finish fails requests, refused ones included.
func finish[T any](batch []*Request[T], err error) {
	for _, r := range batch {
		r.err = err
		close(r.done)
	}
}
