package db

import (
	"context"
	"fmt"
	"sync"
)

// gate counts the calls and the jobs that are inside the database, so that Close takes nothing away from under them.
type gate struct {
	stopping chan struct{} // closed when the gate shuts: waits inside end with ErrClosed

	mu     sync.Mutex // guards what follows
	inside int
	shut   bool
	idle   chan struct{} // closed while nobody is inside
}

func newGate() *gate {
	g := &gate{stopping: make(chan struct{}), idle: make(chan struct{})}
	close(g.idle)
	return g
}

// enter admits a call, which has to leave; ErrClosed if the gate is shut.
func (g *gate) enter() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.shut {
		return errClosed
	}
	g.admit()
	return nil
}

// enterWith is enter for a call with a context: one that ended before the call gets nothing done, and says so with ErrBusy.
func (g *gate) enterWith(ctx context.Context) error {
	if ctx.Err() != nil {
		return fmt.Errorf("db: the context ended before the call: %w: %w", ErrBusy, context.Cause(ctx))
	}
	return g.enter()
}

// hold admits a job that somebody inside, or Close itself, begins. It has to leave.
func (g *gate) hold() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.admit()
}

func (g *gate) admit() {
	if g.inside++; g.inside == 1 {
		g.idle = make(chan struct{})
	}
}

// others reports whether anybody but the caller is inside.
func (g *gate) others() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.inside > 1
}

func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.inside--; g.inside == 0 {
		close(g.idle)
	}
}

// close shuts the gate and waits until nobody is inside, or the context ends.
func (g *gate) close(ctx context.Context) error {
	g.mu.Lock()
	if !g.shut {
		g.shut = true
		close(g.stopping)
	}
	g.mu.Unlock()
	return g.wait(ctx)
}

// wait returns once nobody is inside; ErrBusy if the context ends before.
func (g *gate) wait(ctx context.Context) error {
	g.mu.Lock()
	idle := g.idle
	g.mu.Unlock()
	select {
	case <-idle:
		return nil
	default:
	}
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("db: close: calls or transfers are still under way: %w: %w", ErrBusy, context.Cause(ctx))
	}
}
