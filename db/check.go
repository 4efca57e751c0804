package db

import (
	"context"
	"fmt"

	"github.com/holdfast-db/holdfast/txn"
)

// Check re-derives everything that the database counts: the whole catalogue from its manifests and pages, and, as long as
// nothing else goes on, the bytes in RAM and on disk from the pages that are there. It reads the index whole and no page.
// ErrCorrupt says what does not add up; ErrBusy that the context ended.
func (d *DB) Check(ctx context.Context) error {
	if err := d.gate.enterWith(ctx); err != nil {
		return err
	}
	defer d.gate.leave()
	snapshot := d.index.Snapshot()
	defer snapshot.Close()
	if err := txn.Check(snapshot); err != nil {
		return err
	}
	live, err := d.loose.segments(snapshot)
	if err != nil {
		return err
	}
	if err := txn.Segments(snapshot, func(n uint64, use txn.SegmentUse) (bool, error) {
		live[n] = segmentLive{use.LivePages, use.LiveBytes}
		return true, nil
	}); err != nil {
		return err
	}
	return d.checkTiers(live)
}

// checkTiers compares the tiers' counts with what is there, if nothing is under way that would make them differ.
func (d *DB) checkTiers(live map[uint64]segmentLive) error {
	t, s := d.residency, d.disk
	t.mu.Lock()
	defer t.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	var ram int64
	for p := range t.pages.all() {
		if p.pins > 0 || p.filler() != nil || p.job() != nil {
			return nil
		}
		for _, slot := range p.slots {
			ram += int64(len(slot.Padded()))
		}
		if p.unrecorded { // it was written for somebody who did not wait for the record
			for _, at := range p.place {
				l := live[at.Segment]
				live[at.Segment] = segmentLive{l.copies + 1, l.bytes + at.Allocated()}
			}
		}
	}
	if d.counters.leases.Load() > 0 || d.pending.count() > 0 || s.pending > 0 || len(s.queue)+len(s.loose)+len(s.unsettled) > 0 || s.busy || d.gate.others() {
		return nil
	}
	if used := d.arena.Usage().Used; used != ram {
		return fmt.Errorf("db: %d bytes of RAM are in use, the pages there take %d: %w", used, ram, ErrCorrupt)
	}
	if d.options.ReadOnly {
		return nil // what is given up in memory only keeps its space on disk
	}
	var disk int64
	for n, l := range live {
		disk += l.bytes
		if s.live[n] != l {
			return fmt.Errorf("db: segment %d: %+v in the index, %+v counted: %w", n, l, s.live[n], ErrCorrupt)
		}
	}
	if disk != s.used || len(live) != len(s.live) {
		return fmt.Errorf("db: %d bytes on disk in %d segments are counted, the index has %d in %d: %w", s.used, len(s.live), disk, len(live), ErrCorrupt)
	}
	return nil
}
