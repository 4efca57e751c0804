package fuzz

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"sync"
	"testing/synctest"
)

// Scheduler decides in which order the changes that several goroutines ask of a Disk happen: it lets everything run until all
// goroutines wait, for a turn or for each other or for time to pass, and then gives one of those that wait for a turn its turn, by a
// seed. With the time of a synctest bubble, which passes only when nobody can do anything else, a history then depends on its
// seed alone, and a disk that hangs for a minute costs nothing.
//
// One thing is asked of the code under test: no mutex is held over a change of the disk that another goroutine may want
// meanwhile; for a mutex is not a wait that a bubble recognizes.
type Scheduler struct {
	mu      sync.Mutex // guards what follows
	rng     *rand.Rand
	waiting []*ticket
	idle    chan struct{} // somebody waits until nobody wants a turn
	arrived chan struct{}
}

type ticket struct {
	call Call
	turn chan struct{}
}

// NewScheduler makes a scheduler for the bubble that it is called in.
func NewScheduler() *Scheduler {
	return &Scheduler{rng: rand.New(rand.NewPCG(0, 0)), arrived: make(chan struct{}, 1)}
}

// Seed begins a new sequence of decisions.
func (s *Scheduler) Seed(seed uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rng = rand.New(rand.NewPCG(seed, 0x7475726e))
}

// Run calls fn and decides until it returns. It has to be called in a bubble.
func (s *Scheduler) Run(fn func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		fn()
	}()
	for {
		synctest.Wait()
		if s.next() {
			continue
		}
		select {
		case <-s.arrived:
		case <-done:
			return
		}
	}
}

// next gives one turn, or wakes who waits for idleness.
func (s *Scheduler) next() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.waiting) == 0 {
		if s.idle == nil {
			return false
		}
		close(s.idle)
		s.idle = nil
		return true
	}
	slices.SortStableFunc(s.waiting, func(a, b *ticket) int {
		return cmp.Or(cmp.Compare(a.call.Path, b.call.Path), cmp.Compare(a.call.Op, b.call.Op), cmp.Compare(a.call.Size, b.call.Size))
	})
	i := s.rng.IntN(len(s.waiting))
	t := s.waiting[i]
	s.waiting = slices.Delete(s.waiting, i, i+1)
	close(t.turn)
	return true
}

func (s *Scheduler) signal() {
	select {
	case s.arrived <- struct{}{}:
	default:
	}
}

// turn waits until the caller may go on.
func (s *Scheduler) turn(c Call) {
	t := &ticket{call: c, turn: make(chan struct{})}
	s.mu.Lock()
	s.waiting = append(s.waiting, t)
	s.mu.Unlock()
	s.signal()
	<-t.turn
}

// Settle waits until nobody wants a turn and everybody waits for something.
func (s *Scheduler) Settle() {
	done := make(chan struct{})
	s.mu.Lock()
	s.idle = done
	s.mu.Unlock()
	s.signal()
	<-done
}
