package db

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/holdfast-db/holdfast/txn"
)

// Reason says why a checkpoint was retired.
type Reason = txn.Reason

// The reasons.
const (
	ReasonRequested    = txn.ReasonRequested    // the application asked for it
	ReasonReplaced     = txn.ReasonReplaced     // another manifest was published for the same prefix
	ReasonNotDurable   = txn.ReasonNotDurable   // found at open without a complete disk copy
	ReasonRAMPressure  = txn.ReasonRAMPressure  // its pages left RAM before they had a disk copy
	ReasonDiskPressure = txn.ReasonDiskPressure // evicted to keep the disk within its budget
	ReasonWriteFailed  = txn.ReasonWriteFailed  // its pages could not be written
	ReasonLost         = txn.ReasonLost         // a page turned out missing or corrupt
	ReasonShutdown     = txn.ReasonShutdown     // Close had no time left to write it
	ReasonCleared      = txn.ReasonCleared      // a forced clear
)

// reasonsMax is one more than the largest Reason.
const reasonsMax = int(ReasonCleared) + 1

// EventKind says what happened to a checkpoint. Zero is invalid.
type EventKind uint8

// The kinds of event.
const (
	EventPublished  EventKind = 1 // listed: lookups find it
	EventSuperseded EventKind = 2 // By took its place: it goes first when room is needed, and stays restorable
	EventCurrent    EventKind = 3 // superseded no more, because it was found again or because the application said so
	EventGraceEnded EventKind = 4 // superseded for long enough to go first, though something had continued from it
	EventUsed       EventKind = 5 // found by a lookup or a restore: youngest again
	EventRetired    EventKind = 6 // delisted, for Reason: lookups miss it. What it had superseded passes to what superseded it, or is current again
	EventDeleted    EventKind = 7 // its pages are given up
	EventPersisted  EventKind = 8 // Pages got disk copies, or other ones than they had
	// EventDurable: the last disk copy that it lacked is there. It is told while it happens and not read from the log, because
	// it follows from the whole catalogue. A checkpoint that is published with all its copies has none.
	EventDurable EventKind = 9
)

var eventKinds = [...]string{
	EventPublished: "published", EventSuperseded: "superseded", EventCurrent: "current", EventGraceEnded: "grace ended", EventUsed: "used",
	EventRetired: "retired", EventDeleted: "deleted", EventPersisted: "persisted", EventDurable: "durable",
}

// String gives the kind in words.
func (k EventKind) String() string {
	if k == 0 || int(k) >= len(eventKinds) {
		return fmt.Sprintf("EventKind(%d)", uint8(k))
	}
	return eventKinds[k]
}

// Event is one change in the life of a checkpoint. Events of one record have its LSN and follow each other.
type Event struct {
	LSN        txn.LSN
	Time       time.Time // when it was applied; zero if it was read from the log, whose records have none
	Kind       EventKind
	Generation Generation // zero for EventPersisted, which is about pages
	Reason     Reason     // of EventRetired, and of EventDeleted if the same record retired it; else 0
	By         Generation // what superseded or replaced it, else zero

	// Of EventPublished.
	Namespace  txn.Key
	Offset     int64 // tokens
	Checkpoint CheckpointKind
	Request    string
	Continues  Generation

	// Of EventPublished: pages of one rank and logical bytes of all ranks, shared ones included. Of EventPersisted: pages of one
	// rank and stored bytes of all ranks.
	Pages int64
	Bytes int64
	// NewPages are those of Pages that the catalogue did not know, of EventPublished.
	NewPages int64
}

// Level is slog.LevelWarn for what an operator should see: a checkpoint lost to damage or to a failed write. Use is
// slog.LevelDebug, the rest slog.LevelInfo.
func (e *Event) Level() slog.Level {
	switch {
	case e.Kind == EventRetired && (e.Reason == ReasonLost || e.Reason == ReasonWriteFailed):
		return slog.LevelWarn
	case e.Kind == EventUsed:
		return slog.LevelDebug
	}
	return slog.LevelInfo
}

// Attrs gives what is known of the event, for a log.
func (e *Event) Attrs() []slog.Attr {
	attrs := make([]slog.Attr, 0, 12)
	attrs = append(attrs, slog.Uint64("lsn", uint64(e.LSN)))
	key := func(name string, k txn.Key) {
		if !k.IsZero() {
			attrs = append(attrs, slog.String(name, k.String()))
		}
	}
	number := func(name string, n int64) {
		if n != 0 {
			attrs = append(attrs, slog.Int64(name, n))
		}
	}
	key("generation", txn.Key(e.Generation))
	if e.Reason != 0 {
		attrs = append(attrs, slog.String("reason", e.Reason.String()))
	}
	key("by", txn.Key(e.By))
	key("namespace", e.Namespace)
	number("offset", e.Offset)
	if e.Checkpoint != 0 {
		attrs = append(attrs, slog.String("checkpoint", e.Checkpoint.String()))
	}
	if e.Request != "" {
		attrs = append(attrs, slog.String("request", e.Request))
	}
	key("continues", txn.Key(e.Continues))
	number("pages", e.Pages)
	number("new_pages", e.NewPages)
	number("bytes", e.Bytes)
	return attrs
}

// LogValue implements slog.LogValuer.
func (e Event) LogValue() slog.Value {
	return slog.GroupValue(append([]slog.Attr{slog.String("kind", e.Kind.String())}, e.Attrs()...)...)
}

// record gives the event as a log record.
func (e *Event) record() slog.Record {
	at := e.Time
	if at.IsZero() {
		at = time.Now()
	}
	message := "checkpoint " + e.Kind.String()
	if e.Kind == EventPersisted {
		message = "pages persisted"
	}
	r := slog.NewRecord(at, e.Level(), message, 0)
	r.AddAttrs(e.Attrs()...)
	return r
}

// appendEvents appends what a record says of checkpoints. It is a function of the record alone, so that history and presence
// tell the same.
func appendEvents(to []Event, lsn txn.LSN, r txn.Record) []Event {
	each := func(gens []Generation, e Event) {
		e.LSN = lsn
		for _, e.Generation = range gens {
			to = append(to, e)
		}
	}
	switch r := r.(type) {
	case *txn.Publish:
		m := &r.Manifest
		gen := m.Generation()
		to = append(to, Event{
			LSN: lsn, Kind: EventPublished, Generation: gen, Namespace: m.Namespace, Offset: m.Offset, Checkpoint: CheckpointKind(m.Kind),
			Request: m.Request, Continues: m.Continues, Pages: m.Pages(), Bytes: m.Bytes(), NewPages: int64(len(r.Pages)),
		})
		each(r.Replaced, Event{Kind: EventRetired, Reason: ReasonReplaced, By: gen})
		each(r.Replaced, Event{Kind: EventDeleted, Reason: ReasonReplaced, By: gen})
		each(r.Supersedes, Event{Kind: EventSuperseded, By: gen})
	case *txn.Supersede:
		kind := EventSuperseded
		if r.By.IsZero() {
			kind = EventCurrent
		}
		each(r.Generations, Event{Kind: kind, By: r.By})
	case *txn.Retire:
		each(r.Generations, Event{Kind: EventRetired, Reason: r.Reason})
		if r.Delete {
			each(r.Generations, Event{Kind: EventDeleted, Reason: r.Reason})
		}
	case *txn.Delete:
		each(r.Generations, Event{Kind: EventDeleted})
	case *txn.Persist:
		e := Event{LSN: lsn, Kind: EventPersisted, Pages: int64(len(r.Pages))}
		for i := range r.Pages {
			for _, at := range r.Pages[i].Place {
				e.Bytes += at.Stored
			}
		}
		to = append(to, e)
	case *txn.Mark:
		kind := EventUsed
		if r.Mark == txn.MarkEndGrace {
			kind = EventGraceEnded
		}
		each(r.Generations, Event{Kind: kind})
	}
	return to
}

// Bounds of the event stream.
const (
	// MaxSubscriptions bounds the subscriptions of a handle.
	MaxSubscriptions = 64
	// DefaultEventBuffer is how many events a subscription holds for its reader.
	DefaultEventBuffer = 4096
	// MaxEventBuffer bounds SubscribeOptions.Buffer.
	MaxEventBuffer = 1 << 20

	recentEvents  = 256  // kept for RecentEvents
	historyAtOnce = 1024 // events that a subscription reads from the log at a time; the record that goes over it comes whole
)

// stream tells events to whoever wants them, on the committer goroutine, and never waits for a reader.
//
// A subscription is first read from the log, up to the record that was the last one when it began; from there on what
// happens is put into its buffer. Records are put whole or not at all: the one that finds no room ends the subscription,
// which then has given a gapless beginning, and says from which LSN to subscribe again. The log has what was missed, as long
// as it is not cut. So a slow reader costs a bounded buffer and no time of anybody else, and nothing is missing in silence.
//
// Holding every event back until the slowest reader has it would have made a reader a part of the commit path; reading from the
// log alone would have read up to a whole log file for each event.
type stream struct {
	retired [reasonsMax]atomic.Int64 // by reason
	scratch []Event                  // of the committer goroutine

	mu            sync.Mutex // guards what follows, and what subscriptions say it does
	last          txn.LSN    // of the last record told
	subscriptions map[*Subscription]bool
	recent        [recentEvents]Event
	told          int64 // events so far: the next one's place in recent, modulo
	closed        bool
}

func newStream(applied txn.LSN) *stream {
	return &stream{last: applied, subscriptions: map[*Subscription]bool{}}
}

// tell tells what a record did. On the committer goroutine.
func (s *stream) tell(t *transaction) {
	now := time.Now()
	events := appendEvents(s.scratch[:0], t.lsn, t.record)
	for _, g := range t.effects.Durable {
		events = append(events, Event{LSN: t.lsn, Kind: EventDurable, Generation: g})
	}
	for i := range events {
		events[i].Time = now
		if e := &events[i]; e.Kind == EventRetired {
			s.retired[e.Reason].Add(1)
		}
	}
	s.scratch = events
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last = t.lsn
	for i := range events {
		s.recent[s.told%recentEvents] = events[i]
		s.told++
	}
	for sub := range s.subscriptions {
		sub.offer(events)
	}
}

// close ends all subscriptions, once they have given what they hold.
func (s *stream) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for sub := range s.subscriptions {
		sub.end(errClosed)
	}
}

// RecentEvents gives the last events of this handle, at most 256, oldest first.
func (d *DB) RecentEvents() []Event {
	s := d.events
	s.mu.Lock()
	defer s.mu.Unlock()
	n := min(s.told, recentEvents)
	events := make([]Event, 0, n)
	for i := s.told - n; i < s.told; i++ {
		events = append(events, s.recent[i%recentEvents])
	}
	return events
}

// SubscribeOptions of a Subscribe. The zero value subscribes to what happens from now on.
type SubscribeOptions struct {
	// From is the LSN of the first record of interest; 0 is the next one. What lies before the call is read from the log. OldestLSN is
	// the oldest record that the log holds.
	From txn.LSN
	// Buffer is how many events are held for the reader, 1…MaxEventBuffer, and one record more; 0 is DefaultEventBuffer.
	Buffer int
}

// OldestLSN, as SubscribeOptions.From, begins with the oldest record that the log holds.
const OldestLSN txn.LSN = math.MaxUint64

// Subscription is a stream of events. One goroutine reads it; Close may be called by any.
type Subscription struct {
	db *DB

	// Of the reader.
	history txn.LSN // next record to be read from the log; above until if none is
	oldest  bool    // history begins wherever the log does
	until   txn.LSN // last record to be read from the log
	resume  txn.LSN
	ready   []Event // read from the log and not given yet

	// Guarded by stream.mu.
	from   txn.LSN
	queue  []Event // told and not given yet: queue[head:]
	head   int
	buffer int
	ended  error
	wake   chan struct{} // holds a token if there is something new
}

// Subscribe gives the events from an LSN on: those of the past from the log, then what happens, in order and without a gap. How far
// back the log goes depends on Options.ReplayBytes, and a database that was closed has cut it.
//
// A reader is never waited for. When SubscribeOptions.Buffer events are held for it and another record comes, the subscription
// ends: the reader gets what is held, then ErrBusy, and may subscribe again from Subscription.Resume. A read-only handle tells the
// past, and what it retires for itself.
//
// Errors: ErrInvalid, ErrTooLarge for the options; ErrBusy if MaxSubscriptions are open; ErrClosed.
func (d *DB) Subscribe(o SubscribeOptions) (*Subscription, error) {
	if o.Buffer == 0 {
		o.Buffer = DefaultEventBuffer
	}
	if err := checkNumber("SubscribeOptions.Buffer", int64(o.Buffer), 1, MaxEventBuffer); err != nil {
		return nil, err
	}
	if err := d.gate.enter(); err != nil {
		return nil, err
	}
	defer d.gate.leave()
	s := d.events
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errClosed
	}
	if len(s.subscriptions) >= MaxSubscriptions {
		return nil, fmt.Errorf("db: %d subscriptions are open: %w", MaxSubscriptions, ErrBusy)
	}
	sub := &Subscription{db: d, history: o.From, until: min(s.last, d.log.Next()-1), from: o.From, buffer: o.Buffer, wake: make(chan struct{}, 1)}
	switch o.From {
	case 0:
		sub.history, sub.from = s.last+1, s.last+1
	case OldestLSN:
		sub.history, sub.from, sub.oldest = 1, 1, true
	}
	sub.resume = sub.history
	s.subscriptions[sub] = true
	return sub, nil
}

// offer puts the events of one record into the buffer, or ends the subscription. With stream.mu.
func (s *Subscription) offer(events []Event) {
	if s.ended != nil || len(events) == 0 || events[0].LSN < s.from {
		return
	}
	if held := len(s.queue) - s.head; held > 0 && held+len(events) > s.buffer {
		s.end(fmt.Errorf("db: events from LSN %d on are not held for a reader that has %d waiting: subscribe again from there: %w", events[0].LSN, held, ErrBusy))
		return
	}
	if s.head > 0 && len(s.queue)+len(events) > cap(s.queue) {
		n := copy(s.queue, s.queue[s.head:])
		clear(s.queue[n:])
		s.queue, s.head = s.queue[:n], 0
	}
	s.queue = append(s.queue, events...)
	s.signal()
}

// end ends the subscription for the reader, once it has what is held. With stream.mu.
func (s *Subscription) end(err error) {
	if s.ended == nil {
		s.ended = err
	}
	delete(s.db.events.subscriptions, s)
	s.signal()
}

func (s *Subscription) signal() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Close ends the subscription. Closing again does nothing.
func (s *Subscription) Close() {
	s.db.events.mu.Lock()
	defer s.db.events.mu.Unlock()
	s.queue, s.head = nil, 0
	s.end(fmt.Errorf("db: the subscription is closed: %w", ErrClosed))
}

// Resume is the LSN from which to subscribe to go on after the last event that Next gave. A record of which Next gave a part only comes
// again whole.
func (s *Subscription) Resume() txn.LSN { return s.resume }

// Next waits for the next event, until the context ends.
//
// Errors: ErrBusy if the context ended, and then the subscription goes on, or because the reader was too slow, and then it has
// ended and Resume says where to go on; ErrNotFound if the log does not reach back so far (any more); ErrClosed once the
// database is closing and everything before that was given, or the subscription is closed; ErrCorrupt, ErrIO from reading the log.
func (s *Subscription) Next(ctx context.Context) (Event, error) {
	for {
		if len(s.ready) > 0 {
			e := s.ready[0]
			s.ready = s.ready[1:]
			s.gave(&e, len(s.ready) > 0 && s.ready[0].LSN == e.LSN)
			return e, nil
		}
		if s.history <= s.until {
			if err := s.readHistory(ctx); err != nil {
				return Event{}, err
			}
			continue
		}
		if e, ok, err := s.take(); ok || err != nil {
			return e, err
		}
		select {
		case <-s.wake:
		case <-ctx.Done():
			return Event{}, fmt.Errorf("db: no event: %w: %w", ErrBusy, context.Cause(ctx))
		}
	}
}

func (s *Subscription) gave(e *Event, more bool) {
	if s.resume = e.LSN; !more {
		s.resume++
	}
}

// take gives the next event of the buffer.
func (s *Subscription) take() (e Event, ok bool, err error) {
	s.db.events.mu.Lock()
	defer s.db.events.mu.Unlock()
	if s.head == len(s.queue) {
		return e, false, s.ended
	}
	e = s.queue[s.head]
	s.queue[s.head] = Event{}
	if s.head++; s.head == len(s.queue) {
		s.queue, s.head = s.queue[:0], 0
	}
	s.gave(&e, s.head < len(s.queue) && s.queue[s.head].LSN == e.LSN)
	return e, true, nil
}

// errEnough ends a reading of the log when there is enough for now.
var errEnough = errors.New("enough")

// readHistory reads the next events from the log. It holds up the cutting of the log for as long as it reads, and no longer: a
// reader that takes its time takes it between the calls.
func (s *Subscription) readHistory(ctx context.Context) error {
	d := s.db
	if err := d.gate.enter(); err != nil {
		return err
	}
	defer d.gate.leave()
	if err := s.closedByReader(); err != nil {
		return err
	}
	from := s.history
	if s.oldest {
		from = 0
	}
	s.ready = s.ready[:0]
	err := d.log.Replay(ctx, from, func(lsn txn.LSN, kind byte, payload []byte) error {
		if lsn > s.until || len(s.ready) >= historyAtOnce {
			return errEnough
		}
		s.history, s.oldest = lsn+1, false
		record, err := txn.Decode(txn.Kind(kind), payload)
		if err != nil {
			return fmt.Errorf("db: LSN %d: %w", lsn, err)
		}
		s.ready = appendEvents(s.ready, lsn, record)
		return nil
	})
	switch {
	case errors.Is(err, errEnough):
		if len(s.ready) == 0 {
			s.history = s.until + 1 // what is left has no events
		}
	case err == nil:
		s.history = s.until + 1
	case errors.Is(err, ErrCorrupt) && from != 0 && from < d.log.First():
		return fmt.Errorf("db: events from LSN %d on were asked for, the log begins at %d: %w", from, d.log.First(), ErrNotFound)
	default:
		return fmt.Errorf("db: %w", err)
	}
	return nil
}

// closedByReader tells whether Close was called.
func (s *Subscription) closedByReader() error {
	s.db.events.mu.Lock()
	defer s.db.events.mu.Unlock()
	if s.queue == nil && s.head == 0 && errors.Is(s.ended, ErrClosed) {
		return s.ended
	}
	return nil
}

// Events gives the events as a sequence, until the context ends, the subscription does or the loop is left. An error ends the
// sequence; those of Next.
func (s *Subscription) Events(ctx context.Context) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		for {
			e, err := s.Next(ctx)
			if !yield(e, err) || err != nil {
				return
			}
		}
	}
}

// LogEvents writes events to a slog handler until the context ends or the database closes. Where the handler is too slow it goes on
// from the log, and what the log does not hold any more is logged as a gap.
//
// It returns nil once the database is closing; ErrBusy if the context ended; what the handler or reading the log failed with.
func (d *DB) LogEvents(ctx context.Context, h slog.Handler, o SubscribeOptions) error {
	for {
		again, err := d.logEvents(ctx, h, o)
		if again == nil || err != nil {
			return err
		}
		o = *again
	}
}

// logEvents logs one subscription; again says how to go on, nil not at all.
func (d *DB) logEvents(ctx context.Context, h slog.Handler, o SubscribeOptions) (again *SubscribeOptions, err error) {
	sub, err := d.Subscribe(o)
	if err != nil {
		if errors.Is(err, ErrClosed) {
			err = nil
		}
		return nil, err
	}
	defer sub.Close()
	for e, err := range sub.Events(ctx) {
		switch {
		case err == nil:
			if !h.Enabled(ctx, e.Level()) {
				continue
			}
			if err := h.Handle(ctx, e.record()); err != nil {
				return nil, fmt.Errorf("db: logging an event: %w: %w", ErrIO, err)
			}
		case errors.Is(err, ErrClosed):
			return nil, nil
		case ctx.Err() != nil:
			return nil, err
		case errors.Is(err, ErrBusy):
			o.From = sub.Resume()
			return &o, nil
		case errors.Is(err, ErrNotFound):
			r := slog.NewRecord(time.Now(), slog.LevelWarn, "events missed", 0)
			r.AddAttrs(slog.Uint64("from", uint64(sub.Resume())), slog.Any("error", err))
			if err := h.Handle(ctx, r); err != nil {
				return nil, fmt.Errorf("db: logging an event: %w: %w", ErrIO, err)
			}
			o.From = OldestLSN
			return &o, nil
		default:
			return nil, err
		}
	}
	return nil, nil
}
