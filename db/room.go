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
func (d *DB) allocate(ctx context.Context, sizes []int64) (slots []arena.Slot, err error) {
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
	slots = make([]arena.Slot, 0, len(sizes))
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
	ctx, m := d.telemetry.begin(ctx, opAdmission)
	defer func() { m.end(err, int64(len(sizes)), total) }()
	ctx, cancel := context.WithTimeout(ctx, d.options.AdmissionTimeout)
	defer cancel()
	select {
	case d.admission.turn <- struct{}{}:
		defer func() { <-d.admission.turn }()
	case <-d.gate.stopping:
		return nil, errClosed
	case <-ctx.Done():
		return nil, d.noRoom(ctx, total, nil)
	}
	var full error
	for {
		room := d.residency.roomChanged() // before the attempt, so that no change is missed
		if slots, full = d.fill(slots, sizes); !errors.Is(full, arena.ErrFull) {
			return slots, full
		}
		if freed, err := d.makeRoom(ctx, missingBytes(sizes[len(slots):])); err != nil {
			d.giveBack(slots)
			if ctx.Err() != nil {
				return nil, d.noRoom(ctx, total, full)
			}
			return nil, err
		} else if freed && ctx.Err() == nil {
			continue
		}
		select {
		case <-room:
		case <-d.gate.stopping:
			d.giveBack(slots)
			return nil, errClosed
		case <-ctx.Done():
			d.giveBack(slots)
			return nil, d.noRoom(ctx, total, full)
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

// noRoom is the error of a wait that ended; full, if not nil, is what it waited for.
func (d *DB) noRoom(ctx context.Context, bytes int64, full error) error {
	d.counters.admissionTimeouts.Add(1)
	if full == nil {
		return fmt.Errorf("db: no room for %d bytes in RAM: %w: %w", bytes, ErrBusy, context.Cause(ctx))
	}
	return fmt.Errorf("db: no room for %d bytes in RAM: %v: %w: %w", bytes, full, ErrBusy, context.Cause(ctx))
}

// makeRoom evicts pages, in this order: clean ones, which costs nothing; dirty ones that no current checkpoint needs, which are
// given up with the superseded checkpoints that need them, and never written; dirty ones of current checkpoints, which
// the write policy has written or given up. It reports whether anything was freed or may be evicted now.
func (d *DB) makeRoom(ctx context.Context, bytes int64) (some bool, err error) {
	ctx, m := d.telemetry.begin(ctx, opEvictRAM)
	var pages, freed int64 // that were dealt with; freed at once
	defer func() {
		if some || err != nil {
			m.end(err, pages, freed)
		} else {
			m.close(nil, 0, 0)
		}
	}()
	var evicted int64
	freed, evicted = d.residency.evictClean(bytes)
	d.counters.pagesEvicted.Add(evicted)
	if pages = evicted; freed > 0 {
		return true, nil
	}
	if cool := d.residency.oldest(&d.residency.dirtyCool, bytes); len(cool) > 0 {
		d.residency.unpinAll(cool) // so that what is given up can go at once
		pages = int64(len(cool))
		gone, err := d.giveUpOldest(ctx, true, nil)
		if err == nil && gone == 0 {
			err = d.giveUpCool(ctx, cool)
		}
		return err == nil, err
	}
	dirty := d.residency.oldest(&d.residency.dirty, writeBackBytes)
	if len(dirty) == 0 {
		return false, nil
	}
	pages = int64(len(dirty))
	err = d.relieve(ctx, dirty)
	d.residency.unpinAll(dirty)
	return err == nil, err
}

// relieve makes dirty pages evictable: it writes those that the policy keeps, and gives up the others and those that cannot
// be written. It waits for a write for half of the admission timeout. One that takes longer keeps its pages, which the device may be
// reading, and until it ends the disk counts as lagging: what else is dirty is given up instead of queueing behind it.
func (d *DB) relieve(ctx context.Context, pages []*page) error {
	keep, drop := d.sortDirty(pages)
	if len(keep) > 0 && d.lateWrites.Load() > 0 {
		d.options.Logger.Warn("disk lags, checkpoints are retired", "pages", len(keep))
		keep, drop = nil, pages
	}
	if len(drop) > 0 {
		gone, err := d.giveUpOldest(ctx, false, pages)
		if err == nil && gone == 0 {
			err = d.giveUp(ctx, drop, txn.ReasonRAMPressure)
		}
		if err != nil {
			return err
		}
	}
	if len(keep) == 0 {
		return nil
	}
	patient, cancel := context.WithTimeout(ctx, d.options.AdmissionTimeout/2)
	err := d.persist(patient, keep)
	late := patient.Err() != nil
	cancel()
	if err == nil || ctx.Err() != nil || errors.Is(err, ErrClosed) || d.log.Err() != nil {
		return err
	}
	if late {
		d.noteLate(keep)
		return nil
	}
	d.options.Logger.Warn("pages not written, their checkpoints are retired", "pages", len(keep), "error", err)
	var unwritten []*page
	d.residency.mu.Lock()
	for _, p := range keep {
		if !p.placed() {
			unwritten = append(unwritten, p)
		}
	}
	d.residency.mu.Unlock()
	return d.giveUp(ctx, unwritten, txn.ReasonWriteFailed)
}

// noteLate makes the writes late that are under way for the pages.
func (d *DB) noteLate(pages []*page) {
	d.residency.mu.Lock()
	defer d.residency.mu.Unlock()
	for _, p := range pages {
		if p.job() != nil && !p.use.job.late {
			p.use.job.late = true
			d.lateWrites.Add(1)
			d.counters.writesLate.Add(1)
		}
	}
}

// sortDirty tells apart the dirty pages that the policy has written and those that it has given up.
func (d *DB) sortDirty(pages []*page) (keep, drop []*page) {
	d.residency.mu.Lock()
	defer d.residency.mu.Unlock()
	for _, p := range pages {
		if d.options.WritePolicy == Never || (d.options.WritePolicy == OnReuse && !p.reused) {
			drop = append(drop, p)
		} else {
			keep = append(keep, p)
		}
	}
	return keep, drop
}

// Bounds of one round of giving up.
const (
	giveUpAtOnce = 4
	giveUpLook   = 256
)

// giveUpOldest retires and deletes the checkpoints that go first of those that have pages in RAM only, a few at a time, and
// tells how many. Choosing by checkpoint and not by page matters: the oldest page is the beginning that all others share.
// It looks at a bounded number of checkpoints; with superseded set, only at those that go before all current ones. One whose
// pages somebody holds is passed over, because giving it up makes no room; pages are pinned by the caller.
func (d *DB) giveUpOldest(ctx context.Context, superseded bool, pages []*page) (gone int, err error) {
	pinned := make(map[*page]int, len(pages))
	for _, p := range pages {
		pinned[p]++
	}
	err = d.committer.commitEssential(ctx, &transaction{
		decide: func(v txn.Reader) (txn.Record, error) {
			var victims []Generation
			looked := 0
			err := txn.Checkpoints(v, func(g Generation) (bool, error) {
				s, err := txn.ReadState(v, g)
				if err != nil || s == nil || superseded && !s.GoesFirst() {
					return false, err
				}
				if !s.Durable {
					held, err := d.isHeld(v, g, pinned)
					if err != nil {
						return false, err
					}
					if !held {
						victims = append(victims, g)
					}
				}
				looked++
				return len(victims) < giveUpAtOnce && looked < giveUpLook, nil
			})
			if err != nil {
				return nil, err
			}
			return optional(txn.DecideRetire(v, victims, txn.ReasonRAMPressure, true, false))
		},
		applied: func(e *txn.Effects) { gone = len(e.Retired) },
	})
	return gone, err
}

// isHeld tells whether somebody holds a checkpoint: whether the last page of one of its groups has other pins than those given.
func (d *DB) isHeld(v txn.Reader, g Generation, pinned map[*page]int) (bool, error) {
	m, err := txn.ReadManifest(v, g)
	if err != nil || m == nil {
		return false, err
	}
	d.residency.mu.Lock()
	defer d.residency.mu.Unlock()
	for i := range m.Groups {
		last := m.Groups[i].Head
		if !m.Groups[i].Chained {
			last = m.Groups[i].Keys[len(m.Groups[i].Keys)-1]
		}
		if p := d.residency.pages.get(last); p != nil && int(p.pins) > pinned[p] {
			return true, nil
		}
	}
	return false, nil
}

// giveUp retires and deletes every checkpoint that needs one of the pages, so that the pages may go: retire before delete.
// Once it returns, the record is durable and nothing in the catalogue needs them.
func (d *DB) giveUp(ctx context.Context, pages []*page, reason txn.Reason) error {
	return d.giveUpIf(ctx, pages, reason, func(*txn.PageEntry) bool { return true })
}

// giveUpCool is giveUp for pages that no current checkpoint needs; a page that one needs again by now is left alone.
func (d *DB) giveUpCool(ctx context.Context, pages []*page) error {
	return d.giveUpIf(ctx, pages, txn.ReasonRAMPressure, func(e *txn.PageEntry) bool { return e.Current == 0 })
}

func (d *DB) giveUpIf(ctx context.Context, pages []*page, reason txn.Reason, may func(*txn.PageEntry) bool) error {
	loose, pages := splitLoose(pages)
	if len(loose) > 0 {
		if _, err := d.dropLoose(keysOf(loose)); err != nil {
			return err
		}
	}
	if len(pages) == 0 {
		return nil
	}
	dependents := func(v txn.Reader) (needed []Generation, err error) {
		for _, p := range pages {
			e, err := txn.ReadPage(v, p.key)
			if err != nil {
				return nil, err
			}
			if e == nil || !may(e) {
				continue
			}
			gens, err := txn.Dependents(v, p.key)
			if err != nil {
				return nil, err
			}
			needed = append(needed, gens...)
		}
		return needed, nil
	}
	for try := 1; ; try++ {
		err := d.committer.commitEssential(ctx, &transaction{decide: func(v txn.Reader) (txn.Record, error) {
			gens, err := dependents(v)
			if err != nil {
				return nil, err
			}
			return optional(txn.DecideRetire(v, gens, reason, true, false))
		}})
		if err != nil {
			return err
		}
		// What was retired before and not deleted needs them too. It kept them in the catalogue, so a publication may have built
		// on them in between, and is to be retired as well.
		err = d.committer.commitEssential(ctx, &transaction{decide: func(v txn.Reader) (txn.Record, error) {
			gens, err := dependents(v)
			if err != nil {
				return nil, err
			}
			return optional(txn.DecideDelete(v, gens))
		}})
		if !errors.Is(err, ErrConflict) || try == giveUpTries {
			return err
		}
	}
}

// giveUpTries bounds how often giving up begins anew because a publication came in between.
const giveUpTries = 16
