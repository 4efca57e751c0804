package db

import (
	"context"
	"fmt"
	"sync"
)

// gate counts the calls that are inside the database, so that Close takes nothing away from under them.
type gate struct {
	stopping chan struct{} // closed when the gate shuts: waits inside end with ErrClosed

	mu     sync.Mutex // guards what follows
	inside int
	shut   bool
	empty  chan struct{} // closed once the gate is shut and nobody is inside
}

func newGate() *gate { return &gate{stopping: make(chan struct{}), empty: make(chan struct{})} }

// enter admits a call, which has to leave; ErrClosed if the gate is shut.
func (g *gate) enter() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.shut {
		return errClosed
	}
	g.inside++
	return nil
}

func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.inside--; g.shut && g.inside == 0 {
		close(g.empty)
	}
}

// close shuts the gate and waits until nobody is inside, or the context ends.
func (g *gate) close(ctx context.Context) error {
	g.mu.Lock()
	if !g.shut {
		g.shut = true
		close(g.stopping)
		if g.inside == 0 {
			close(g.empty)
		}
	}
	g.mu.Unlock()
	select {
	case <-g.empty:
		return nil
	case <-ctx.Done():
		select {
		case <-g.empty:
			return nil
		default:
		}
		return fmt.Errorf("db: close: calls are still inside: %w: %w", ErrBusy, context.Cause(ctx))
	}
}
