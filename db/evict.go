package db

import (
	"context"
	"errors"

	"github.com/holdfast-db/holdfast/txn"
)

// evictFromDisk retires and deletes the n checkpoints that go first of those whose going gives disk space back. more is false
// once none is left.
func (d *DB) evictFromDisk(ctx context.Context, n int) (more bool, err error) {
	ctx, m := d.telemetry.begin(ctx, opEvictDisk)
	var pages, bytes int64
	defer func() { m.end(err, pages, bytes) }()
	if more, err = d.evictOldestLoose(); more || err != nil {
		return more, err
	}
	victims, err := d.diskVictims(n)
	if len(victims) == 0 || err != nil {
		return false, err
	}
	err = d.committer.commitEssential(ctx, &transaction{
		decide: func(v txn.Reader) (txn.Record, error) {
			return optional(txn.DecideRetire(v, victims, txn.ReasonDiskPressure, true, false))
		},
		applied: func(e *txn.Effects) { pages, bytes = int64(len(e.Dropped)), allocatedBytes(e.Dropped) },
	})
	return true, err // if they were gone by then, that made room as well
}

// diskVictims chooses checkpoints in the order of eviction. One that is in RAM only is passed over: it takes nothing on disk,
// and giving it up would make no room there. One that is on disk in part is chosen if a copy goes with it that nothing else needs;
// or, if there is no other, if it has any. It reads the catalogue beside the committer, which may go on meanwhile.
func (d *DB) diskVictims(n int) (victims []Generation, err error) {
	snapshot := d.index.Snapshot()
	defer func() { err = errors.Join(err, snapshot.Close()) }()
	var inPart []Generation
	err = txn.Checkpoints(snapshot, func(g Generation) (bool, error) {
		s, err := txn.ReadState(snapshot, g)
		if err != nil || s == nil {
			return true, err
		}
		if !s.Durable {
			any, own, err := copiesOf(snapshot, g)
			if err != nil {
				return false, err
			}
			if any && !own && len(inPart) < n {
				inPart = append(inPart, g)
			}
			if !own {
				return true, nil
			}
		}
		victims = append(victims, g)
		return len(victims) < n, nil
	})
	if len(victims) == 0 {
		victims = inPart
	}
	return victims, err
}

// copiesOf tells whether any page of a checkpoint has disk copies, and whether one has that nothing else needs.
func copiesOf(v txn.Reader, g Generation) (any, own bool, err error) {
	m, err := txn.ReadManifest(v, g)
	if err != nil || m == nil {
		return false, false, err
	}
	for i := range m.Groups {
		keys := m.Groups[i].Keys
		if m.Groups[i].Chained {
			keys = []txn.Key{m.Groups[i].Head}
		}
		for _, key := range keys {
			for alone := true; !key.IsZero(); {
				p, err := txn.ReadPage(v, key)
				if err != nil || p == nil {
					return any, own, err
				}
				alone = alone && p.Held == 1
				if len(p.Place) > 0 {
					any, own = true, own || alone
					break // what comes before it in its chain is shared by all that share this one
				}
				key = p.Parent
			}
			if own {
				return any, own, nil
			}
		}
	}
	return any, own, nil
}
