// Package recovery brings a directory back to the promise after it was not closed, or not closed whole: it replays the log
// into the catalogue and makes manifests and payload agree again. It knows storage through two narrow interfaces, Catalogue
// and Log, and a list of segment files, and decides without changing anything by itself: Reconcile gives a plan, the owner of the directory carries
// it out as logged transactions. db.Open and the command line use the same code.
//
// # Stages at open
//
//	replay     the records after the last one that the index holds, in order, in batches
//	undurable  checkpoints that were listed while their pages were in RAM only are retired; the catalogue keeps a list
//	           of them, so no manifest and no page is read to know it
//	sizes      each segment file is compared with the end of the last copy ever recorded in it; only for a file that is
//	           missing or too short are the pages in it looked for, and what needs them is retired
//	leftovers  files in which nothing is alive are removed, and what lies behind the recorded end of the others is cut off:
//	           it belongs to writes that no record names
//
// The work follows the log since the last flush of the index, the number of undurable checkpoints and the number of segment
// files, never the number of pages.
package recovery

import (
	"context"
	"fmt"
	"slices"

	"github.com/holdfast-db/holdfast/txn"
)

// Catalogue is the index under recovery. Nobody else uses it meanwhile.
type Catalogue interface {
	// Read calls fn with a consistent view.
	Read(fn func(v txn.Reader) error) error
	// Update calls fn with a view whose changes are applied whole if fn returns nil, and not at all otherwise.
	Update(fn func(v txn.View) error) error
}

// Historian is a Catalogue that wants to know what each replayed record did, in the batch that carries its changes.
type Historian interface {
	Applied(v txn.View, lsn txn.LSN, effects *txn.Effects) error
}

// Log is the log under recovery.
type Log interface {
	// Replay calls fn for every record from the given LSN on, in order.
	Replay(ctx context.Context, from txn.LSN, fn func(lsn txn.LSN, kind byte, payload []byte) error) error
}

// SegmentFile is one segment file as it lies there.
type SegmentFile struct {
	Number uint64
	Size   int64 // bytes
}

// replayBatch is how many records are applied to the index in one batch.
const replayBatch = 256

// ReplayReport says what Replay did.
type ReplayReport struct {
	Records  int64
	From, To txn.LSN // first and last record applied; 0 if there was none
}

// Replay applies the records that the catalogue lacks.
func Replay(ctx context.Context, l Log, c Catalogue) (r ReplayReport, err error) {
	var applied txn.LSN
	err = c.Read(func(v txn.Reader) (err error) {
		applied, err = txn.ReadApplied(v)
		return err
	})
	if err != nil {
		return r, fmt.Errorf("recovery: applied LSN: %w", err)
	}
	type item struct {
		lsn    txn.LSN
		record txn.Record
	}
	batch := make([]item, 0, replayBatch)
	history, _ := c.(Historian)
	flush := func() error {
		if len(batch) == 0 {
			return nil
		}
		err := c.Update(func(v txn.View) error {
			for _, i := range batch {
				effects, err := txn.Apply(v, i.lsn, i.record)
				if err != nil {
					return err
				}
				if history == nil {
					continue
				}
				if err := history.Applied(v, i.lsn, effects); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("recovery: replay of LSN %d to %d: %w", batch[0].lsn, batch[len(batch)-1].lsn, err)
		}
		if r.Records == 0 {
			r.From = batch[0].lsn
		}
		r.To = batch[len(batch)-1].lsn
		r.Records += int64(len(batch))
		batch = batch[:0]
		return nil
	}
	err = l.Replay(ctx, applied+1, func(lsn txn.LSN, kind byte, payload []byte) error {
		record, err := txn.Decode(txn.Kind(kind), payload)
		if err != nil {
			return fmt.Errorf("recovery: LSN %d: %w", lsn, err)
		}
		if batch = append(batch, item{lsn, record}); len(batch) == replayBatch {
			return flush()
		}
		return nil
	})
	if err != nil {
		return r, err
	}
	return r, flush()
}

// Plan is what has to be done so that every listed checkpoint is restorable again.
type Plan struct {
	Undurable []txn.Generation // listed without a complete disk copy
	Lost      []txn.Generation // need a page of a file that is missing or too short, listed or retired
	LostPages int64
	Damaged   []SegmentDamage
	Orphans   []uint64         // files in which nothing is alive
	Tails     []SegmentFile    // files to be cut to this size
	Live      map[uint64]int64 // page copies alive in each segment
}

// SegmentDamage is a file that is shorter than what the catalogue recorded in it.
type SegmentDamage struct {
	Number uint64
	Size   int64 // −1: missing
	Needed int64 // recorded end
}

// Reconcile compares the catalogue with the segment files that are there. It changes nothing and reads no payload.
func Reconcile(c Catalogue, segments []SegmentFile) (plan Plan, err error) {
	files := map[uint64]int64{}
	for _, f := range segments {
		files[f.Number] = f.Size
	}
	plan.Live = map[uint64]int64{}
	err = c.Read(func(v txn.Reader) error {
		if err := txn.Undurable(v, func(g txn.Generation) (bool, error) {
			plan.Undurable = append(plan.Undurable, g)
			return true, nil
		}); err != nil {
			return err
		}
		// A retired one that has pages without disk copies has lost them as well, and the catalogue still knows them: a publication would
		// build on them. Only a retirement without a deletion leaves one behind, so looking is rare.
		accounts, err := txn.ReadAccounts(v)
		if err != nil {
			return err
		}
		if accounts.Retired > 0 {
			if err := txn.States(v, func(g txn.Generation, s *txn.State) (bool, error) {
				if s.Status != txn.Retired || s.Durable {
					return true, nil
				}
				whole, err := txn.OnDisk(v, g)
				if !whole {
					plan.Undurable = append(plan.Undurable, g)
				}
				return true, err
			}); err != nil {
				return err
			}
		}
		if err := txn.Segments(v, func(n uint64, use txn.SegmentUse) (bool, error) {
			plan.Live[n] = use.LivePages
			size, there := files[n]
			switch {
			case !there:
				plan.Damaged = append(plan.Damaged, SegmentDamage{Number: n, Size: -1, Needed: use.End})
			case size < use.End:
				plan.Damaged = append(plan.Damaged, SegmentDamage{Number: n, Size: size, Needed: use.End})
			case size > wholeBlocks(use.End):
				plan.Tails = append(plan.Tails, SegmentFile{Number: n, Size: wholeBlocks(use.End)})
			}
			return true, nil
		}); err != nil {
			return err
		}
		if len(plan.Damaged) > 0 {
			return plan.findLost(v)
		}
		return nil
	})
	for n := range files {
		if _, live := plan.Live[n]; !live {
			plan.Orphans = append(plan.Orphans, n)
		}
	}
	slices.Sort(plan.Orphans)
	return plan, err
}

// wholeBlocks rounds the end of a small page up to where its segment goes on: segments are written in blocks of 4096.
func wholeBlocks(end int64) int64 { return (end + 4095) &^ 4095 }

// findLost looks for the pages that lie in the missing part of a damaged file.
func (plan *Plan) findLost(v txn.Reader) error {
	sizes := map[uint64]int64{}
	for _, d := range plan.Damaged {
		sizes[d.Number] = d.Size
	}
	var pages []txn.Key
	err := txn.Pages(v, func(key txn.Key, e *txn.PageEntry) (bool, error) {
		for _, at := range e.Place {
			if size, damaged := sizes[at.Segment]; damaged && at.Offset+at.Stored > size {
				pages = append(pages, key)
				break
			}
		}
		return true, nil
	})
	if err != nil {
		return err
	}
	plan.LostPages = int64(len(pages))
	seen := map[txn.Generation]bool{}
	for _, key := range pages {
		gens, err := txn.Dependents(v, key)
		if err != nil {
			return err
		}
		for _, g := range gens {
			if !seen[g] {
				seen[g] = true
				plan.Lost = append(plan.Lost, g)
			}
		}
	}
	return nil
}
