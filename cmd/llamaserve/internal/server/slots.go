package server

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/state"
	"github.com/holdfast-db/holdfast/txn"
)

// slots are the sessions that no request has. A request takes the one that has most of its prompt, and of those the one
// that has been idle longest.
type slots struct {
	free chan struct{} // one element for each idle session

	mu      sync.Mutex // guards what follows
	idle    []*state.Session
	waiting int
}

func newSlots(sessions []*state.Session) *slots {
	s := &slots{free: make(chan struct{}, len(sessions)), idle: sessions}
	for range sessions {
		s.free <- struct{}{}
	}
	return s
}

// take waits for a session. ErrBusy if too many wait already, or for too long.
func (s *slots) take(ctx context.Context, tokens []int32) (*state.Session, error) {
	s.mu.Lock()
	if s.waiting >= MaxQueue {
		s.mu.Unlock()
		return nil, fmt.Errorf("server: %d requests wait for a slot: %w", MaxQueue, txn.ErrBusy)
	}
	s.waiting++
	s.mu.Unlock()
	timer := time.NewTimer(MaxQueueWait)
	defer timer.Stop()
	var err error
	select {
	case <-s.free:
	case <-ctx.Done():
		err = fmt.Errorf("server: no slot came free before the request ended: %w: %w", txn.ErrBusy, context.Cause(ctx))
	case <-timer.C:
		err = fmt.Errorf("server: no slot came free in %v: %w", MaxQueueWait, txn.ErrBusy)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waiting--
	if err != nil {
		return nil, err
	}
	best := 0
	for i, session := range s.idle {
		if session.Common(tokens) > s.idle[best].Common(tokens) {
			best = i
		}
	}
	session := s.idle[best]
	s.idle = append(s.idle[:best], s.idle[best+1:]...)
	return session, nil
}

// give takes a session back.
func (s *slots) give(session *state.Session) {
	s.mu.Lock()
	s.idle = append(s.idle, session)
	s.mu.Unlock()
	s.free <- struct{}{}
}
