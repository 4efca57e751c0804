package db

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/holdfast-db/holdfast/txn"
)

// Forced operations: what an operator asks for while traffic goes on. None of them takes anything from under a lease: what is
// held leaves when it is let go.

// ClearReport says what Clear did.
type ClearReport struct {
	Checkpoints int   // retired and deleted
	Held        int   // pages that leases still hold; their space comes back when they are let go
	Bytes       int64 // allocated disk bytes that the catalogue gave up
}

// Clear retires and deletes every checkpoint of a namespace, or of all namespaces if ns is the zero key. What is published
// while it runs may stay. A report with Held above zero is not a complete success, and not an error either.
func (d *DB) Clear(ctx context.Context, ns txn.Key) (r ClearReport, err error) {
	if err := d.enterToWrite(ctx); err != nil {
		return r, err
	}
	defer d.gate.leave()
	before, gens, err := d.everything(ctx, ns)
	if err != nil {
		return r, err
	}
	for len(gens) > 0 && ctx.Err() == nil {
		n := min(len(gens), retireAtOnce)
		if err := d.retireAll(ctx, gens[:n], txn.ReasonCleared); err != nil {
			return r, err
		}
		r.Checkpoints += n
		gens = gens[n:]
	}
	after, _, err := d.everything(context.WithoutCancel(ctx), ns)
	r.Held = d.residency.heldAndGone()
	r.Bytes = before.AllocatedBytes - after.AllocatedBytes
	if err == nil && len(gens) > 0 {
		err = fmt.Errorf("db: clear: %d checkpoints are left: %w: %w", len(gens), ErrBusy, context.Cause(ctx))
	}
	return r, err
}

// everything gives the totals and the checkpoints of a namespace, listed and retired.
func (d *DB) everything(ctx context.Context, ns txn.Key) (a txn.Accounts, gens []Generation, err error) {
	snapshot := d.index.Snapshot()
	defer snapshot.Close()
	if a, err = txn.ReadAccounts(snapshot); err != nil {
		return a, nil, err
	}
	err = txn.States(snapshot, func(g Generation, _ *txn.State) (bool, error) {
		gens = append(gens, g)
		return ctx.Err() == nil, nil
	})
	if err == nil && ctx.Err() != nil {
		err = fmt.Errorf("db: listing checkpoints: %w: %w", ErrBusy, context.Cause(ctx))
	}
	if err != nil || ns.IsZero() {
		return a, gens, err
	}
	of := gens[:0]
	for _, g := range gens {
		m, err := txn.ReadManifest(snapshot, g)
		if err != nil {
			return a, nil, err
		}
		if m != nil && m.Namespace == ns {
			of = append(of, g)
		}
	}
	return a, of, nil
}

// heldAndGone counts the pages that the catalogue has dropped and leases still hold.
func (r *residency) heldAndGone() (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for p := range r.pages.all() {
		if p.pins > 0 && !p.known && p.filler() == nil {
			n++
		}
	}
	return n
}

// DropRAM empties the RAM tier: pages with disk copies are evicted, the others are written or given up as the write
// policy says. Pages under leases stay. It gives the bytes of RAM that are still in use.
func (d *DB) DropRAM(ctx context.Context) (left int64, err error) {
	if err := d.gate.enterWith(ctx); err != nil {
		return 0, err
	}
	defer d.gate.leave()
	for err == nil {
		var freed bool
		if freed, err = d.makeRoom(ctx, math.MaxInt64/2); !freed {
			break
		}
	}
	return d.arena.Usage().Used, err
}

// SetRAMBytes changes the capacity of the RAM tier, MinRAMBytes…MaxRAMBytes, evicting what does not fit any more. If leases
// hold more than the new capacity when the context ends, the capacity is in force all the same and the answer is ErrBusy.
func (d *DB) SetRAMBytes(ctx context.Context, bytes int64) error {
	if err := checkNumber("RAM bytes", bytes, MinRAMBytes, MaxRAMBytes); err != nil {
		return err
	}
	if err := d.gate.enterWith(ctx); err != nil {
		return err
	}
	defer d.gate.leave()
	if err := d.arena.Resize(bytes); err != nil {
		return fmt.Errorf("db: %w", err)
	}
	for {
		room := d.residency.roomChanged()
		u := d.arena.Usage()
		if u.Held <= u.Capacity {
			return nil
		}
		freed, err := d.makeRoom(ctx, u.Held-u.Capacity)
		if err != nil {
			return err
		}
		if freed {
			continue
		}
		select {
		case <-room:
		case <-d.gate.stopping:
			return errClosed
		case <-ctx.Done():
			return fmt.Errorf("db: %d bytes are held in RAM, %d more than its new capacity: %w: %w", u.Held, u.Held-u.Capacity, ErrBusy, context.Cause(ctx))
		}
	}
}

// SetDiskBytes changes the budget of the disk tier; 0 is unbounded. It is in force at once for what is written; checkpoints
// beyond it are evicted in the background.
func (d *DB) SetDiskBytes(bytes int64) error {
	if err := checkNumber("disk bytes", bytes, 0, 1<<60); err != nil {
		return err
	}
	if err := d.enterToWrite(context.Background()); err != nil {
		return err
	}
	defer d.gate.leave()
	d.disk.setBudget(bytes)
	d.trim()
	return nil
}

// trim evicts checkpoints in the background until the disk is within its budget.
func (d *DB) trim() {
	d.gate.hold()
	go func() {
		defer d.gate.leave()
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		go func() {
			select {
			case <-d.gate.stopping:
				cancel()
			case <-ctx.Done():
			}
		}()
		before := d.counters.retired.Load()
		if err := d.disk.trim(ctx); err != nil && !errors.Is(err, context.Canceled) {
			d.options.Logger.Warn("disk not trimmed to its budget", "error", err)
		}
		if n := d.counters.retired.Load() - before; n > 0 {
			d.options.Logger.Info("disk trimmed to its budget", "checkpoints", n)
		}
	}()
}
