package gpu

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/holdfast-db/holdfast/txn"
)

// load is an amount of work: what a transfer costs the budget, what a chunk costs the window.
type load struct {
	transfers int
	regions   int
	bytes     int64
}

func (a load) plus(b load) load {
	return load{a.transfers + b.transfers, a.regions + b.regions, a.bytes + b.bytes}
}

func (a load) minus(b load) load {
	return load{a.transfers - b.transfers, a.regions - b.regions, a.bytes - b.bytes}
}

func (a load) within(b load) bool {
	return a.transfers <= b.transfers && a.regions <= b.regions && a.bytes <= b.bytes
}

// budget is the back-pressure of a device: a transfer takes its load before it is admitted and gives it back when it is
// released. One in quarantine keeps it, so that a device that hangs ends in ErrBusy and not in ever more quarantined
// memory. Who waits is served by class, then arrival; one that does not fit holds up those behind it, so that a large
// batch is not overtaken for ever by small ones.
type budget struct {
	limit load

	mu      sync.Mutex
	used    load
	waiting [priorities][]*claim
	closed  error // why nothing is admitted any more
}

// claim is a wait for room; granted is closed when it has it, or with err set when it never will.
type claim struct {
	load    load
	granted chan struct{}
	err     error
}

// take waits until there is room for l, ctx ends, or the budget is closed; with noWait it refuses instead of waiting.
func (b *budget) take(ctx context.Context, l load, p Priority, noWait bool) error {
	b.mu.Lock()
	if b.closed != nil {
		b.mu.Unlock()
		return b.closed
	}
	if b.used.plus(l).within(b.limit) && !b.overtakes(p) {
		b.used = b.used.plus(l)
		b.mu.Unlock()
		return nil
	}
	if noWait {
		err := b.full(l, nil)
		b.mu.Unlock()
		return err
	}
	c := &claim{load: l, granted: make(chan struct{})}
	b.waiting[p-1] = append(b.waiting[p-1], c)
	b.mu.Unlock()

	select {
	case <-c.granted:
		return c.err
	case <-ctx.Done():
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	select {
	case <-c.granted: // it was granted meanwhile: the room is ours
		return c.err
	default:
	}
	b.waiting[p-1] = slices.DeleteFunc(b.waiting[p-1], func(o *claim) bool { return o == c })
	b.grant() // who stood behind it may fit
	return b.full(l, ctx.Err())
}

// overtakes reports whether somebody of class p or higher waits already. Called with mu held.
func (b *budget) overtakes(p Priority) bool {
	for _, w := range b.waiting[:p] {
		if len(w) > 0 {
			return true
		}
	}
	return false
}

// full says that there was no room. Called with mu held.
func (b *budget) full(l load, cause error) error {
	state := fmt.Sprintf("no room for %d bytes in %d regions: %d of %d transfers, %d of %d regions and %d of %d bytes are taken",
		l.bytes, l.regions, b.used.transfers, b.limit.transfers, b.used.regions, b.limit.regions, b.used.bytes, b.limit.bytes)
	if cause != nil {
		return fmt.Errorf("gpu: %s: %w: %w", state, cause, txn.ErrBusy)
	}
	return fmt.Errorf("gpu: %s: %w", state, txn.ErrBusy)
}

// give returns what take took.
func (b *budget) give(l load) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used = b.used.minus(l)
	b.grant()
}

// grant admits those who fit, in order. Called with mu held.
func (b *budget) grant() {
	for p := range b.waiting {
		for len(b.waiting[p]) > 0 {
			c := b.waiting[p][0]
			if !b.used.plus(c.load).within(b.limit) {
				return
			}
			b.used = b.used.plus(c.load)
			b.waiting[p] = b.waiting[p][1:]
			close(c.granted)
		}
	}
}

// shut refuses everybody who waits or comes later with err. The first reason stays.
func (b *budget) shut(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed != nil {
		return
	}
	b.closed = err
	for p := range b.waiting {
		for _, c := range b.waiting[p] {
			c.err = err
			close(c.granted)
		}
		b.waiting[p] = nil
	}
}
