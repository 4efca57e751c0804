package db

import (
	"context"
	"fmt"
	"sync"

	"github.com/holdfast-db/holdfast/txn"
)

type slotID struct {
	rank  int
	claim int
}

// Slot is where one rank writes one page. It is closed when the rank commits, and when the publication ends by whatever
// cause: from then on it takes nothing, so that a late writer cannot change a page that others read by now. Memory that
// Buffer gave before that is beyond its control and must not be touched any more, unless a Transfer covers it.
type Slot struct {
	name  string
	group int
	at    int64
	key   txn.Key

	mu      sync.Mutex // guards what follows; held while bytes are copied, so that the page changes hands after that
	buf     []byte
	written int64 // what Write and Filled say
	closed  error // why the slot takes nothing any more
}

// Group is the index of the page's group in the layout.
func (s *Slot) Group() int { return s.group }

// GroupName is the name of the page's group.
func (s *Slot) GroupName() string { return s.name }

// Position is the page's logical position in its group.
func (s *Slot) Position() int64 { return s.at }

// Key is the page's content key. It is the same on all ranks.
func (s *Slot) Key() txn.Key { return s.key }

// Size is the page's size in bytes.
func (s *Slot) Size() int64 { return int64(len(s.buf)) }

// Write appends p to the page. Bytes past the end of the page are refused with ErrTooLarge, and then none of p is taken.
// ErrConflict once the slot is closed.
func (s *Slot) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed != nil {
		return 0, fmt.Errorf("db: group %q, page %d: %w", s.name, s.at, s.closed)
	}
	if s.written < 0 || int64(len(p)) > s.Size()-s.written {
		return 0, fmt.Errorf("db: group %q, page %d: write of %d bytes at %d: the page has %d: %w", s.name, s.at, len(p), s.written, s.Size(), ErrTooLarge)
	}
	n := copy(s.buf[s.written:], p)
	s.written += int64(n)
	return n, nil
}

// Buffer is the memory of the whole page, off the Go heap, aligned for direct I/O and copy engines. Filled tells how much of
// it is valid. Nil once the slot is closed.
func (s *Slot) Buffer() []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed != nil {
		return nil
	}
	return s.buf
}

// Filled says that the first n bytes of Buffer are valid. Commit refuses any other number than the page's size.
func (s *Slot) Filled(n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.written = n
}

// closeFull closes the slot if it is full, and gives what was written otherwise.
func (s *Slot) closeFull(why error) (written int64, full bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.written != s.Size() {
		return s.written, false
	}
	s.closed = why
	return s.written, true
}

// setClosed closes the slot, or with nil opens it again.
func (s *Slot) setClosed(why error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = why
}

// Slots gives the slots that this rank has to fill: one for every page that is not there yet and that no other publication
// fills. Pages that another one is filling are waited for, until they are shared or taken over.
//
// Errors: ErrInvalid for a rank that the layout does not have, ErrBusy if the context or the admission timeout ended first
// (call again), ErrConflict once the publication has ended, ErrClosed.
func (p *Publication) Slots(ctx context.Context, rank int) ([]*Slot, error) {
	if err := p.checkRank(rank); err != nil {
		return nil, err
	}
	if err := p.db.gate.enterWith(ctx); err != nil {
		return nil, err
	}
	defer p.db.gate.leave()
	ctx, cancel := context.WithTimeout(ctx, p.db.options.AdmissionTimeout)
	defer cancel()
	for {
		slots, wait, err := p.tryslots(rank)
		if err != nil || wait == nil {
			return slots, err
		}
		select {
		case <-wait:
		case <-p.db.gate.stopping:
			return nil, errClosed
		case <-ctx.Done():
			return nil, fmt.Errorf("db: rank %d waits for pages that another publication is filling: %w: %w", rank, ErrBusy, context.Cause(ctx))
		}
	}
}

func (p *Publication) tryslots(rank int) (slots []*Slot, wait <-chan struct{}, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listed {
		return nil, nil, nil
	}
	if err := p.attempt.Alive(); err != nil {
		return nil, nil, err
	}
	if p.attempt.HasCommitted(rank) {
		return nil, nil, nil
	}
	r := p.db.residency
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, q := range p.claims {
		switch {
		case q.lost:
			return nil, nil, p.errQuarantined(i)
		case q.filler() == nil || q.use.done[rank]:
		case q.filler() != p:
			return nil, q.wait(), nil
		default:
			slots = append(slots, p.slot(rank, i))
		}
	}
	return slots, nil, nil
}

// slot gives the same object for the same page and rank, so that what was written stays counted.
func (p *Publication) slot(rank, i int) *Slot {
	id := slotID{rank, i}
	s := p.slots[id]
	if s == nil {
		q, at := p.claims[i], p.groups[i]
		s = &Slot{name: p.layout.Groups[at.group].Name, group: at.group, at: at.position, key: q.key, buf: q.slots[rank].Bytes()}
		p.slots[id] = s
	}
	return s
}
