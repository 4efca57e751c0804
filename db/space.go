package db

import (
	"context"
	"fmt"
	"log/slog"
	"sync"

	"github.com/holdfast-db/holdfast/db/internal/segment"
	"github.com/holdfast-db/holdfast/txn"
	"github.com/holdfast-db/holdfast/txn/mutant"
)

// diskSpace accounts for the page copies on disk, keeps them within the budget and gives the space of dropped ones back.
// Bytes are allocated bytes (txn.Placement.Allocated). They are reserved before they are written and count until their
// space has been given back, so that what the files take never exceeds the budget because of a crash or a delay in between.
type diskSpace struct {
	segments *segment.Store
	logger   *slog.Logger
	evict    func(ctx context.Context, n int) (more bool, err error) // retires and deletes the n checkpoints that go first
	// halted tells that nothing can be recorded any more. What failed last may be in the log all the same, and then the next
	// open lists what was given up for it: from then on nothing is taken off the disk.
	halted func() bool
	// settled makes what the index says now durable. No record tells that a loose page is deleted: until then a crash brings its entry
	// back, and the entry must not name a copy that is gone.
	settled func() error

	mu      sync.Mutex             // guards what follows
	budget  int64                  // 0: unbounded
	used    int64                  // written and not given back
	pending int64                  // reserved, being written
	live    map[uint64]segmentLive // copies in each segment that are not given back

	// A write that is under way may have put pages into a segment that are not in live yet. So a segment that is found
	// empty is removed only once every write that had begun by then has been counted.
	tickets uint64            // writes begun so far
	writing map[uint64]bool   // tickets of the writes under way
	emptied map[uint64]uint64 // sealed segments found empty, and the tickets given out by then

	queue  []txn.Placement
	loose  []txn.Placement // of loose pages
	idle   chan struct{}   // closed while the queue is empty and nothing is being given back
	wake   chan struct{}
	closed bool
	busy   bool // run is giving a batch back
	// unsettled are copies of loose pages whose deletion could not be made durable. They are tried again with the next ones.
	unsettled []txn.Placement

	sparse   chan uint64   // segments of which little is left
	evicting chan struct{} // holds a token while somebody evicts
	finished chan struct{}
}

// segmentLive is what is not given back of one segment.
type segmentLive struct{ copies, bytes int64 }

func newDiskSpace(s *segment.Store, budget int64, live map[uint64]segmentLive, logger *slog.Logger) *diskSpace {
	used := int64(0)
	for _, l := range live {
		used += l.bytes
	}
	idle := make(chan struct{})
	close(idle)
	return &diskSpace{
		segments: s, budget: budget, used: used, live: live, writing: map[uint64]bool{}, emptied: map[uint64]uint64{}, logger: logger, idle: idle, halted: func() bool { return false }, settled: func() error { return nil },
		wake: make(chan struct{}, 1), evicting: make(chan struct{}, 1), sparse: make(chan uint64, evacuateQueue), finished: make(chan struct{}),
	}
}

// reserve sets bytes aside for a write, evicting checkpoints if the budget calls for it. The ticket is given back by settle or
// moved.
func (s *diskSpace) reserve(ctx context.Context, bytes int64) (ticket uint64, err error) {
	for n := 1; ; n = min(2*n, evictAtOnceMax) {
		ticket, budget := s.tryReserve(bytes)
		if ticket > 0 {
			return ticket, nil
		}
		if bytes > budget {
			return 0, fmt.Errorf("db: write of %d bytes: the disk tier has %d: %w", bytes, budget, ErrTooLarge)
		}
		if err := s.makeRoom(ctx, bytes, n); err != nil {
			return 0, err
		}
	}
}

// tryReserve is reserve if there is room now; else the ticket is 0.
func (s *diskSpace) tryReserve(bytes int64) (ticket uint64, budget int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.fits(bytes) {
		return 0, s.budget
	}
	s.pending += bytes
	s.tickets++
	s.writing[s.tickets] = true
	return s.tickets, s.budget
}

// fits tells whether bytes more are within the budget. With s.mu.
func (s *diskSpace) fits(bytes int64) bool {
	return s.budget == 0 || s.used+s.pending+bytes <= s.budget
}

func (s *diskSpace) setBudget(bytes int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.budget = bytes
}

// trim evicts until what is used is within the budget.
func (s *diskSpace) trim(ctx context.Context) error {
	for n := 1; ; n = min(2*n, evictAtOnceMax) {
		s.mu.Lock()
		fits := s.fits(0)
		s.mu.Unlock()
		if fits {
			return nil
		}
		if err := s.makeRoom(ctx, 0, n); err != nil {
			return err
		}
	}
}

// settle ends a reservation: what was written counts as used, the rest is free again.
func (s *diskSpace) settle(ticket uint64, bytes int64, written []txn.Placement) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end(ticket, bytes)
	for _, at := range written {
		s.count(at, 1)
	}
}

// end ends a write, in the same critical section in which its pages are counted. With s.mu.
func (s *diskSpace) end(ticket uint64, bytes int64) {
	s.pending -= bytes
	delete(s.writing, ticket)
	if len(s.emptied) > 0 {
		s.signal()
	}
}

func (s *diskSpace) signal() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// removeEmpty removes the segments that were found empty and that no write can have filled since.
func (s *diskSpace) removeEmpty() {
	if s.halted() {
		return
	}
	var empty []uint64
	s.mu.Lock()
	for n, by := range s.emptied {
		settled := true
		for ticket := range s.writing {
			settled = settled && ticket > by
		}
		if !settled {
			continue
		}
		delete(s.emptied, n)
		if s.live[n].copies == 0 {
			empty = append(empty, n)
		}
	}
	s.mu.Unlock()
	for _, n := range empty {
		if err := s.segments.Remove(n); err != nil {
			s.logger.Warn("segment not removed", "segment", n, "error", err)
		}
	}
}

// count adds or takes one copy. With s.mu.
func (s *diskSpace) count(at txn.Placement, delta int64) {
	s.used += delta * at.Allocated()
	if mutant.On("space is counted twice") && delta > 0 {
		s.used += at.Allocated()
	}
	l := s.live[at.Segment]
	l.copies += delta
	l.bytes += delta * at.Allocated()
	if l.copies == 0 {
		delete(s.live, at.Segment)
	} else {
		s.live[at.Segment] = l
	}
}

// evictAtOnceMax bounds the checkpoints that one round of disk eviction retires. The first round of a caller retires one, and
// each after it twice as many: a large write costs few records, and a small one no checkpoint that could have stayed.
const evictAtOnceMax = 64

// makeRoom evicts n checkpoints and waits until their space is given back. One caller does so at a time.
func (s *diskSpace) makeRoom(ctx context.Context, bytes int64, n int) error {
	select {
	case s.evicting <- struct{}{}:
		defer func() { <-s.evicting }()
	case <-ctx.Done():
		return fmt.Errorf("db: no room for %d bytes on disk: %w: %w", bytes, ErrBusy, context.Cause(ctx))
	}
	s.mu.Lock()
	enough := s.fits(bytes)
	s.mu.Unlock()
	if enough {
		return nil // somebody before us made room
	}
	more, err := s.evict(ctx, n)
	if err != nil {
		return err
	}
	s.mu.Lock()
	idle := s.idle
	s.mu.Unlock()
	select {
	case <-idle:
	case <-ctx.Done():
		return fmt.Errorf("db: no room for %d bytes on disk: %w: %w", bytes, ErrBusy, context.Cause(ctx))
	}
	if s.mu.Lock(); !more && !s.fits(bytes) {
		defer s.mu.Unlock()
		return fmt.Errorf("db: %d bytes on disk: %d of %d in use and nothing left to evict: %w", bytes, s.used+s.pending, s.budget, ErrNoSpace)
	}
	s.mu.Unlock()
	return nil
}

// free takes page copies that nothing needs any more: their last lease has ended, and the record that says so is durable, or they are
// of loose pages, of which there is none. It does not block; the queues are bounded by the number of page copies on disk.
func (s *diskSpace) free(places, loose []txn.Placement) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(places)+len(loose) > 0 {
		select {
		case <-s.idle:
			s.idle = make(chan struct{})
		default: // run is still at it
		}
	}
	s.queue, s.loose = append(s.queue, places...), append(s.loose, loose...)
	s.signal()
}

// run gives space back until the disk space is closed. Failures cost space, never correctness: they are logged, and
// the next open finds what is left over.
func (s *diskSpace) run() {
	defer close(s.finished)
	for {
		s.removeEmpty()
		s.mu.Lock()
		batch, loose, closed := s.queue, s.loose, s.closed
		s.queue, s.loose = nil, nil
		busy := len(batch)+len(loose) > 0
		s.busy = busy
		if !busy {
			select {
			case <-s.idle:
			default:
				close(s.idle)
			}
		}
		s.mu.Unlock()
		if len(batch) > 0 {
			s.giveBack(batch)
		}
		if len(loose) > 0 {
			s.giveBackLoose(loose)
		}
		if busy {
			continue
		}
		if closed {
			return
		}
		<-s.wake
	}
}

// giveBackLoose makes the deletion of loose pages durable and gives back their copies.
func (s *diskSpace) giveBackLoose(batch []txn.Placement) {
	s.mu.Lock()
	batch = append(s.unsettled, batch...)
	s.unsettled = nil
	s.mu.Unlock()
	if !s.halted() && !mutant.On("copies of loose pages go before their entries") {
		if err := s.settled(); err != nil {
			s.logger.Warn("space not given back", "loose pages", len(batch), "error", err)
			s.mu.Lock()
			s.unsettled = batch
			s.mu.Unlock()
			return
		}
	}
	s.giveBack(batch)
}

func (s *diskSpace) giveBack(batch []txn.Placement) {
	if s.halted() {
		s.logger.Warn("space not given back", "pages", len(batch), "reason", "the log is stopped until the database is opened again")
	} else if err := s.segments.Free(batch); err != nil {
		s.logger.Warn("space not given back", "pages", len(batch), "error", err)
	}
	touched := map[uint64]segmentLive{}
	s.mu.Lock()
	for _, p := range batch {
		s.count(p, -1)
	}
	for _, p := range batch {
		touched[p.Segment] = s.live[p.Segment]
	}
	s.mu.Unlock()
	infos, err := s.segments.Segments()
	if err != nil {
		s.logger.Warn("segments not listed", "error", err)
	}
	for _, info := range infos {
		// A segment that is still being written to is left alone; once sealed, nothing new comes into it.
		live, ok := touched[info.Number]
		switch {
		case !ok || !info.Sealed:
		case live.copies == 0:
			s.mu.Lock()
			s.emptied[info.Number] = s.tickets
			s.mu.Unlock()
		case live.bytes*evacuateShare <= info.Size:
			select {
			case s.sparse <- info.Number:
			default:
			}
		}
	}
}

// bound gives the budget, 0 if there is none.
func (s *diskSpace) bound() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.budget
}

// inUse gives the bytes that count against the budget.
func (s *diskSpace) inUse() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.used + s.pending
}

// close gives back what is queued and ends run.
func (s *diskSpace) close() {
	s.mu.Lock()
	s.closed = true
	s.signal()
	s.mu.Unlock()
	<-s.finished
}
