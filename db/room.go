package db

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/holdfast-db/holdfast/db/internal/arena"
	"github.com/holdfast-db/holdfast/txn"
)

// admission lets one caller at a time make room in RAM. Who finds enough free memory does not come here; the others queue,
// so that the first to wait is the first to be served, two half-served callers never wait for each other, and
// eviction runs once for all that need it.
type admission struct {
	turn    chan struct{} // holds a token while somebody makes room
	waiting atomic.Int64  // callers that have a turn or wait for one
}

// writeBackBytes is how much dirty data is written at a time to make room.
const writeBackBytes = 16 << 20

// allocate hands out slots of the given sizes, all or none, in the same order. It waits for room until the context ends or
// the admission timeout is over, evicting what may be evicted.
func (d *DB) allocate(ctx context.Context, sizes []int64) ([]arena.Slot, error) {
	if len(sizes) == 0 {
		return nil, nil
	}
	total := int64(0)
	for _, n := range sizes {
		total += txn.Placement{Stored: n}.Allocated()
	}
	if capacity := d.arena.Usage().Capacity; total > capacity {
		return nil, fmt.Errorf("db: %d pages of %d bytes in all: the RAM tier has %d: %w", len(sizes), total, capacity, ErrTooLarge)
	}
	slots := make([]arena.Slot, 0, len(sizes))
	if d.admission.waiting.Load() == 0 {
		var err error
		if slots, err = d.fill(slots, sizes); !errors.Is(err, arena.ErrFull) {
			return slots, err
		}
		d.giveBack(slots)
		slots = slots[:0]
	}
	d.admission.waiting.Add(1)
	defer d.admission.waiting.Add(-1)
	d.counters.admissionWaits.Add(1)
	ctx, cancel := context.WithTimeout(ctx, d.options.AdmissionTimeout)
	defer cancel()
	select {
	case d.admission.turn <- struct{}{}:
		defer func() { <-d.admission.turn }()
	case <-d.gate.stopping:
		return nil, errClosed
	case <-ctx.Done():
		return nil, d.noRoom(ctx, total)
	}
	for {
		room := d.residency.roomChanged() // before the attempt, so that no change is missed
		var err error
		slots, err = d.fill(slots, sizes)
		if !errors.Is(err, arena.ErrFull) {
			return slots, err
		}
		if freed, err := d.makeRoom(ctx, missingBytes(sizes[len(slots):])); err != nil {
			d.giveBack(slots)
			return nil, err
		} else if freed {
			continue
		}
		select {
		case <-room:
		case <-d.gate.stopping:
			d.giveBack(slots)
			return nil, errClosed
		case <-ctx.Done():
			d.giveBack(slots)
			return nil, d.noRoom(ctx, total)
		}
	}
}

func missingBytes(sizes []int64) (n int64) {
	for _, s := range sizes {
		n += txn.Placement{Stored: s}.Allocated()
	}
	return n
}

// fill goes on allocating where slots leaves off. On any error but ErrFull what was allocated is given back.
func (d *DB) fill(slots []arena.Slot, sizes []int64) ([]arena.Slot, error) {
	for len(slots) < len(sizes) {
		s, err := d.arena.Alloc(sizes[len(slots)])
		if errors.Is(err, arena.ErrFull) {
			return slots, err
		}
		if err != nil {
			d.giveBack(slots)
			return nil, err
		}
		slots = append(slots, s)
	}
	return slots, nil
}

func (d *DB) giveBack(slots []arena.Slot) { d.residency.giveBack(&leftovers{slots: slots}) }

func (d *DB) noRoom(ctx context.Context, bytes int64) error {
	d.counters.admissionTimeouts.Add(1)
	return fmt.Errorf("db: no room for %d bytes in RAM: %w: %w", bytes, ErrBusy, context.Cause(ctx))
}

// makeRoom evicts pages: clean ones first, which costs nothing, then dirty ones, as the write policy says. It reports whether
// anything was freed or may be evicted now.
func (d *DB) makeRoom(ctx context.Context, bytes int64) (bool, error) {
	freed, pages := d.residency.evictClean(bytes)
	d.counters.pagesEvicted.Add(pages)
	if freed > 0 {
		return true, nil
	}
	dirty := d.residency.oldestDirty(max(bytes, writeBackBytes))
	if len(dirty) == 0 {
		return false, nil
	}
	var keep, drop []*page
	for _, p := range dirty {
		if d.keepsDirty(p) {
			keep = append(keep, p)
		} else {
			drop = append(drop, p)
		}
	}
	defer d.residency.unpinAll(dirty)
	reason := txn.ReasonRAMPressure
	if len(keep) > 0 {
		if err := d.persist(ctx, keep); err != nil {
			if ctx.Err() != nil || errors.Is(err, ErrClosed) || d.committer.log.Err() != nil {
				return false, err
			}
			d.options.Logger.Warn("pages not written, their checkpoints are retired", "pages", len(keep), "error", err)
			drop, reason = dirty, txn.ReasonWriteFailed
		}
	}
	if len(drop) > 0 {
		if err := d.giveUp(ctx, drop, reason); err != nil {
			return false, err
		}
	}
	return true, nil
}

// keepsDirty tells whether the policy has a dirty page written when RAM is needed, rather than given up.
func (d *DB) keepsDirty(p *page) bool {
	switch d.options.WritePolicy {
	case Never:
		return false
	case OnReuse:
		d.residency.mu.Lock()
		defer d.residency.mu.Unlock()
		return p.reused
	}
	return true
}

// giveUp retires and deletes every checkpoint that needs one of the pages, so that the pages may go: retire before delete.
// Once it returns, the record is durable and nothing listed needs them.
func (d *DB) giveUp(ctx context.Context, pages []*page, reason txn.Reason) error {
	var needed []Generation
	dependents := func(v txn.Reader) error {
		needed = needed[:0]
		for _, p := range pages {
			gens, err := txn.Dependents(v, p.key)
			if err != nil {
				return err
			}
			needed = append(needed, gens...)
		}
		return nil
	}
	err := d.committer.commitEssential(ctx, &transaction{decide: func(v txn.Reader) (txn.Record, error) {
		if err := dependents(v); err != nil {
			return nil, err
		}
		rec, err := txn.DecideRetire(v, needed, reason, true, false)
		if rec == nil || err != nil {
			return nil, err
		}
		return rec, nil
	}})
	if err != nil {
		return err
	}
	// What was retired before and not deleted needs them too.
	return d.committer.commitEssential(ctx, &transaction{decide: func(v txn.Reader) (txn.Record, error) {
		if err := dependents(v); err != nil {
			return nil, err
		}
		rec, err := txn.DecideDelete(v, needed)
		if rec == nil || err != nil {
			return nil, err
		}
		return rec, nil
	}})
}
