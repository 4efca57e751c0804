package db

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/holdfast-db/holdfast/txn"
)

// pendingPublications is the set of publications that have begun and not ended. It gives each its attempt, with a fencing
// number that rises over the life of the handle.
type pendingPublications struct {
	mu     sync.Mutex // guards what follows
	next   uint64
	all    map[*Publication]bool
	closed bool
	none   chan struct{} // closed once closed is set and all is empty
}

func newPending() *pendingPublications {
	return &pendingPublications{all: map[*Publication]bool{}, none: make(chan struct{})}
}

func (s *pendingPublications) add(p *Publication) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errClosed
	}
	if len(s.all) >= MaxPending {
		return fmt.Errorf("db: %d publications are pending: %w", len(s.all), ErrBusy)
	}
	s.next++
	p.attempt = txn.NewAttempt(s.next, p.gen, p.manifest.Ranks)
	s.all[p] = true
	return nil
}

func (s *pendingPublications) remove(p *Publication) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.all, p)
	s.signal()
}

func (s *pendingPublications) signal() {
	if s.closed && len(s.all) == 0 {
		select {
		case <-s.none:
		default:
			close(s.none)
		}
	}
}

func (s *pendingPublications) count() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return int64(len(s.all))
}

// drainTime bounds how long Close waits for publications that have begun; with a deadline it is a third of what is left, if
// that is less.
const drainTime = 5 * time.Second

// close admits no more publications, waits a while for those that are pending, and aborts the rest.
func (s *pendingPublications) close(ctx context.Context) (aborted int) {
	wait := drainTime
	if deadline, ok := ctx.Deadline(); ok {
		wait = min(wait, time.Until(deadline)/3)
	}
	drain, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	s.mu.Lock()
	s.closed = true
	s.signal()
	s.mu.Unlock()
	select {
	case <-s.none:
		return 0
	case <-drain.Done():
	}
	s.mu.Lock()
	var rest []*Publication
	for p := range s.all {
		rest = append(rest, p)
	}
	s.mu.Unlock()
	within(ctx, func() {
		var aborts sync.WaitGroup
		for _, p := range rest {
			aborts.Go(func() { p.Abort() })
		}
		aborts.Wait()
	})
	return len(rest)
}
