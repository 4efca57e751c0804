package gpu

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// stage is where a transfer stands. Zero is invalid.
type stage uint8

const (
	gated   stage = 1 // waits for its order
	ready   stage = 2 // has chunks to issue and waits for its turn
	issued  stage = 3 // nothing more will be issued; chunks are in flight
	settled stage = 4 // the outcome is known
)

// Transfer is the handle of an admitted batch. Its methods may be called from any goroutine.
//
// Two things happen to it, each exactly once and in this order unless it is quarantined: it is released (both ends are
// proven untouched from now on) and it settles (the outcome is known). What makes it settle is the last chunk coming to
// rest, the first failure once the chunks in flight have come to rest, Cancel in the same way, or, at once, its deadline or
// the loss of its device. In the last two cases chunks may still be in flight: the transfer settles quarantined, and is
// released when the last of them is proven at rest, or never.
//
// All state is guarded by the dispatcher's mutex. What becomes due under it (callbacks, closing of channels) is queued
// in due and run outside it by one goroutine at a time, so that callbacks see the order above and may call back.
type Transfer struct {
	d            *dispatcher
	direction    Direction
	priority     Priority
	cost         load
	onRelease    func()
	onQuarantine func(error)
	done         chan struct{}
	free         chan struct{}

	// The rest is guarded by d.mu.
	stage    stage
	runs     []run
	next     int      // first run that is not issued
	inFlight []*chunk // issued and not proven at rest
	err      error    // first failure; final once settled
	released bool
	gate     gate
	timer    *time.Timer
	unbind   func() bool // detaches the transfer from the context it was submitted with
	pins     []*span
	memory   []*span         // of the device
	waiters  []*transferGate // transfers ordered after this one
	due      []func()
	busy     bool // somebody runs due
}

// Done is closed when the transfer has settled.
func (t *Transfer) Done() <-chan struct{} { return t.done }

// Released is closed when no copy of the transfer touches either end any more. It is closed before Done, unless the
// transfer is quarantined: then later, or never if its device was lost.
func (t *Transfer) Released() <-chan struct{} { return t.free }

// Err gives the outcome: nil before Done is closed and after a success. A failed Load leaves a mixture of old and new
// bytes in its target, as does a failed Store.
func (t *Transfer) Err() error {
	select {
	case <-t.done:
		return t.err
	default:
		return nil
	}
}

// Quarantined reports whether the transfer has settled while its memory has not been released.
func (t *Transfer) Quarantined() bool {
	select {
	case <-t.done:
	default:
		return false
	}
	select {
	case <-t.free:
		return false
	default:
		return true
	}
}

// Bytes is the size of the batch.
func (t *Transfer) Bytes() int64 { return t.cost.bytes }

// Wait waits for the transfer to settle and gives its outcome, or ErrCanceled or ErrDeadline when ctx ends before: that
// stops the waiting, not the transfer.
func (t *Transfer) Wait(ctx context.Context) error {
	if ends(ctx, t.done) {
		return t.err
	}
	why := ErrCanceled
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		why = ErrDeadline
	}
	return fmt.Errorf("gpu: wait for %v of %d bytes: %w", t.direction, t.cost.bytes, why)
}

// Cancel stops the transfer: what has not been issued never is. It settles with ErrCanceled once the chunks in flight
// have come to rest, or in quarantine at its deadline. Canceling when all has been issued does nothing.
func (t *Transfer) Cancel() {
	t.d.mu.Lock()
	if t.stage == gated || t.stage == ready {
		t.fail(ErrCanceled)
		t.finish()
	}
	t.unlock()
}

// end settles the transfer with err at once, in quarantine if it has chunks in flight. If it has failed before and waits for
// those chunks, err is what the caller has to know first.
func (t *Transfer) end(err error) {
	t.d.mu.Lock()
	if before := t.err; before != nil && t.stage != settled {
		t.err = nil
		err = fmt.Errorf("%w; before that: %v", err, before)
	}
	t.fail(err)
	t.settle()
	t.unlock()
}

// fail records the first failure and takes the transfer out of its queue, so that nothing more of it is issued. Called
// with d.mu held.
func (t *Transfer) fail(err error) {
	if t.err != nil || t.stage == settled {
		return
	}
	t.err = fmt.Errorf("gpu: %v of %d bytes on device %d: %w", t.direction, t.cost.bytes, t.d.index, classified(err))
	if t.stage == ready {
		t.d.dequeue(t)
	}
	t.stage = issued
}

// finish settles the transfer if nothing of it is left to do, and releases it if it settled before. Called with d.mu held.
func (t *Transfer) finish() {
	if len(t.inFlight) > 0 || t.stage == gated || t.stage == ready {
		return
	}
	t.settle()
}

// settle makes the outcome final, whatever is still in flight, and releases the memory if nothing is. Called with d.mu
// held; further calls only release.
func (t *Transfer) settle() {
	first := t.stage != settled
	t.stage = settled
	if first {
		t.timer.Stop()
		if t.unbind != nil {
			t.unbind()
		}
		if t.gate != nil {
			g := t.gate
			t.gate = nil
			t.due = append(t.due, g.release)
		}
		t.d.count(t)
	}
	if !first && (t.released || len(t.inFlight) > 0) {
		return
	}
	t.released = len(t.inFlight) == 0
	if t.released {
		t.due = append(t.due, t.release)
	} else {
		t.d.quarantine(t)
		t.due = append(t.due, t.quarantine)
	}
	if first {
		t.due = append(t.due, func() { close(t.done) })
	}
	if t.released {
		t.due = append(t.due, func() { t.d.forget(t, !first) })
	}
}

// release is run, outside the lock, when the memory is proven untouched.
func (t *Transfer) release() {
	t.d.e.pinned.drop(t.pins)
	t.d.memory.drop(t.memory)
	t.runs = nil
	if t.onRelease != nil {
		t.onRelease()
	}
	close(t.free)
	t.d.budget.give(t.cost)
	t.wake(nil)
}

// wake lets go of the transfers ordered after t, unless err says why they never will be.
func (t *Transfer) wake(err error) {
	t.d.mu.Lock()
	waiters := t.waiters
	t.waiters = nil
	t.d.mu.Unlock()
	for _, g := range waiters {
		g.f(err)
	}
}

// quarantine is run, outside the lock, when the transfer settles with copies in flight.
func (t *Transfer) quarantine() {
	t.d.e.log.Error("gpu copy not proven finished: memory quarantined", "device", t.d.index, "direction", t.direction.String(), "bytes", t.cost.bytes, "reason", t.err)
	if t.onQuarantine != nil {
		t.onQuarantine(t.err)
	}
}

// unlock ends a section under d.mu that may have made something due, and runs it.
func (t *Transfer) unlock() {
	if t.busy {
		t.d.mu.Unlock()
		return
	}
	t.busy = true
	for len(t.due) > 0 {
		due := t.due
		t.due = nil
		t.d.mu.Unlock()
		for _, f := range due {
			f()
		}
		t.d.mu.Lock()
	}
	t.busy = false
	t.d.mu.Unlock()
}

// transferGate is the order after another transfer. It is passed when that is released, and fails if it never will be
// because its device was lost under it.
type transferGate struct {
	after *Transfer
	f     func(error)
	gone  bool // released; guarded by the mutex of after
}

func (g *transferGate) watch(f func(error)) {
	t := g.after
	g.f = f
	t.d.mu.Lock()
	switch {
	case g.gone:
		t.d.mu.Unlock()
	case t.released:
		t.d.mu.Unlock()
		f(nil)
	case t.d.lost != nil && len(t.inFlight) > 0:
		err := t.d.lost
		t.d.mu.Unlock()
		f(err)
	default:
		t.waiters = append(t.waiters, g)
		t.d.mu.Unlock()
	}
}

func (g *transferGate) release() {
	t := g.after
	t.d.mu.Lock()
	g.gone = true
	t.waiters = slices.DeleteFunc(t.waiters, func(o *transferGate) bool { return o == g })
	t.d.mu.Unlock()
}
