// Package recovery brings a directory back to the promise after it was not closed, or not closed whole: it replays the log
// into the catalogue and makes manifests and payload agree again. It knows storage through two narrow interfaces, Catalogue
// and Log, and a list of segment files, and decides without changing anything by itself: Reconcile gives a plan, the owner of the directory carries
// it out as logged transactions. db.Open and the command line use the same code.
//
// # Stages at open
//
//	replay     the records after the last one that the index holds, in order, in batches
//	sizes      each segment file is compared with the end of the last copy ever recorded in it
//	undurable  checkpoints that were listed while their pages were in RAM only are retired; the catalogue keeps a list
//	           of them, so no manifest and no page is read to know it
//	lost       only for a file that is missing or too short are the pages in it looked for, and what needs them is retired
//	stale      only if checkpoints are retired and not deleted are those looked for that lost pages with the process
//	leftovers  files in which nothing is alive are removed, and what lies behind the recorded end of the others is cut off:
//	           it belongs to writes that no record names
//
// The first two stages are done when the directory is served, and make the plan of the others; their work follows the log
// since the last flush of the index, the number of undurable checkpoints and the number of segment files, never the number of
// pages. What the others would find is known to be unproven until they have come to it, and whoever meets it first has Broken
// tell whether it is there.
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

// ReplayBatch is how many records are applied to the index in one batch.
const ReplayBatch = 256

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
	batch := make([]item, 0, ReplayBatch)
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
		if batch = append(batch, item{lsn, record}); len(batch) == ReplayBatch {
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
	Damaged   []SegmentDamage  // in LostUnder is what that costs
	Retired   int64            // checkpoints retired and not deleted: StaleUnder tells which have lost pages
	Orphans   []uint64         // files in which nothing is alive
	Tails     []SegmentFile    // files to be cut to this size
}

// SegmentDamage is a file that is shorter than what the catalogue recorded in it.
type SegmentDamage struct {
	Number uint64
	Size   int64 // −1: missing
	Needed int64 // recorded end
}

// Reconcile compares the catalogue with the segment files that are there. It changes nothing, reads no payload, no manifest and
// no page.
func Reconcile(c Catalogue, segments []SegmentFile) (plan Plan, err error) {
	files := map[uint64]int64{}
	for _, f := range segments {
		files[f.Number] = f.Size
	}
	named := map[uint64]bool{}
	err = c.Read(func(v txn.Reader) error {
		if err := txn.Undurable(v, func(g txn.Generation) (bool, error) {
			plan.Undurable = append(plan.Undurable, g)
			return true, nil
		}); err != nil {
			return err
		}
		accounts, err := txn.ReadAccounts(v)
		if err != nil {
			return err
		}
		plan.Retired = accounts.Retired
		return txn.Segments(v, func(n uint64, use txn.SegmentUse) (bool, error) {
			named[n] = true
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
		})
	})
	for n := range files {
		if !named[n] {
			plan.Orphans = append(plan.Orphans, n)
		}
	}
	slices.Sort(plan.Orphans)
	return plan, err
}

// wholeBlocks rounds the end of a small page up to where its segment goes on: segments are written in blocks of 4096.
func wholeBlocks(end int64) int64 { return (end + 4095) &^ 4095 }

// Short gives the sizes of the damaged files, −1 for one that is missing.
func (p *Plan) Short() map[uint64]int64 {
	sizes := map[uint64]int64{}
	for _, d := range p.Damaged {
		sizes[d.Number] = d.Size
	}
	return sizes
}

// Reaches tells whether a page copy lies where its file, one of short, has ended.
func Reaches(short map[uint64]int64, at txn.Placement) bool {
	size, damaged := short[at.Segment]
	return damaged && at.Offset+at.Stored > size
}

// LostUnder gives the pages whose keys begin with b that lie in the missing part of a damaged file, and the checkpoints, listed or
// retired, that need them.
func LostUnder(v txn.Reader, b byte, short map[uint64]int64) (pages []txn.Key, gens []txn.Generation, err error) {
	err = txn.PagesUnder(v, []byte{b}, func(key txn.Key, e *txn.PageEntry) (bool, error) {
		if slices.ContainsFunc(e.Place, func(at txn.Placement) bool { return Reaches(short, at) }) {
			pages = append(pages, key)
		}
		return true, nil
	})
	if err != nil {
		return nil, nil, err
	}
	seen := map[txn.Generation]bool{}
	for _, key := range pages {
		needed, err := txn.Dependents(v, key)
		if err != nil {
			return nil, nil, err
		}
		for _, g := range needed {
			if !seen[g] {
				seen[g] = true
				gens = append(gens, g)
			}
		}
	}
	return pages, gens, nil
}

// StaleUnder gives the checkpoints whose generations begin with b, that are retired and not deleted, were retired up to the given
// LSN, and have pages without disk copies. Those pages went with the process that had them in RAM, and the catalogue still knows
// them: a publication would build on them.
func StaleUnder(v txn.Reader, b byte, until txn.LSN) (gens []txn.Generation, err error) {
	err = txn.StatesUnder(v, []byte{b}, func(g txn.Generation, s *txn.State) (bool, error) {
		if s.Status != txn.Retired || s.Durable || s.Published > until {
			return true, nil
		}
		whole, err := txn.OnDisk(v, g)
		if !whole {
			gens = append(gens, g)
		}
		return true, err
	})
	return gens, err
}

// Broken follows the chain of a page towards its beginning, as long as something in it may be missing, and gives the first page of
// it that is not there: neither on disk, nor held in RAM. A zero key says that all are there. A page that is in no chain has depth
// 0. short are the damaged files. What the catalogue does not know is not there.
func Broken(v txn.Reader, key txn.Key, short map[uint64]int64, inRAM func(txn.Key) bool) (first txn.Key, depth int64, err error) {
	for {
		e, err := txn.ReadPage(v, key)
		if err != nil {
			return txn.Key{}, 0, err
		}
		if e == nil {
			return key, depth, nil
		}
		there := len(e.Place) > 0 && !slices.ContainsFunc(e.Place, func(at txn.Placement) bool { return Reaches(short, at) })
		if !there && !inRAM(key) {
			first, depth = key, e.Depth
		}
		if e.Parent.IsZero() || e.ChainDurable && len(short) == 0 {
			return first, depth, nil
		}
		key = e.Parent
	}
}
