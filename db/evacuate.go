package db

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/holdfast-db/holdfast/db/internal/segment"
	"github.com/holdfast-db/holdfast/txn"
)

// Evacuation moves what is left alive in a segment that is nearly empty to the segments being written, so that the file can
// be removed. Where the file system can punch holes that saves files; where it cannot it is what gives space back. It copies
// at most one byte for every evacuateShare bytes it frees.
//
// The order for each page: the new copy is written and synced, then a persist record names it, then the old one is given
// back. The page is in RAM and pinned meanwhile, so nobody reads the old copy.
const (
	evacuateShare = 8  // a sealed segment is evacuated once at most this part of it is alive
	evacuatePages = 64 // pages moved at a time
	evacuateQueue = 64 // segments that wait to be evacuated; more are noticed when they lose another page
)

// evacuateLoop evacuates the segments that giving space back has left sparse.
func (d *DB) evacuateLoop() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	for {
		select {
		case n := <-d.disk.sparse:
			d.evacuating.Lock()
			err := d.evacuate(ctx, n)
			d.evacuating.Unlock()
			if err != nil && !errors.Is(err, ErrClosed) {
				d.options.Logger.Warn("segment not evacuated", "segment", n, "error", err)
			}
		case <-d.gate.stopping:
			return
		}
	}
}

// evacuate moves all live pages out of a segment. What cannot be moved now stays where it is.
func (d *DB) evacuate(ctx context.Context, number uint64) error {
	var keys []txn.Key
	seen := map[txn.Key]bool{}
	_, err := d.segments.Scan(ctx, number, func(e segment.Entry) error {
		if !seen[e.Key] {
			seen[e.Key] = true
			keys = append(keys, e.Key)
		}
		return nil
	})
	if errors.Is(err, ErrNotFound) {
		return nil // emptied and removed in the meantime
	}
	if err != nil {
		return err
	}
	for len(keys) > 0 {
		select {
		case <-d.gate.stopping:
			return nil
		default:
		}
		some := keys[:min(len(keys), evacuatePages)]
		keys = keys[len(some):]
		if err := d.evacuatePages(ctx, number, some); err != nil {
			return err
		}
	}
	return nil
}

// evacuatePages moves those of the pages that live in the segment.
func (d *DB) evacuatePages(ctx context.Context, number uint64, keys []txn.Key) error {
	byRanks, err := d.pinLiving(number, keys)
	if err != nil {
		return err
	}
	for ranks, pages := range byRanks {
		if proven, e := d.proveNow(pages); e != nil || !proven {
			err = errors.Join(err, e)
			d.residency.unpinAll(pages)
			continue // what changed on the way is looked at when the segment loses its next page
		}
		// load unpins on an error, lost pages are retired by it, and the others stay where they are.
		if e := d.load(ctx, pages, ranks); e != nil {
			err = errors.Join(err, e)
			continue
		}
		err = errors.Join(err, d.move(ctx, pages))
		d.residency.unpinAll(pages)
	}
	return err
}

// pinLiving pins the pages that have a copy in the segment, by the number of their ranks.
func (d *DB) pinLiving(number uint64, keys []txn.Key) (map[int][]*page, error) {
	snapshot := d.index.Snapshot()
	defer snapshot.Close()
	t := d.residency
	pages := map[int][]*page{}
	for _, key := range keys {
		e, err := txn.ReadPage(snapshot, key)
		if err != nil {
			for _, some := range pages {
				t.unpinAll(some)
			}
			return nil, err
		}
		if e == nil || !slices.ContainsFunc(e.Place, func(p txn.Placement) bool { return p.Segment == number }) {
			continue
		}
		t.mu.Lock()
		p := t.pages.get(key)
		if p == nil && t.quarantine[key] == nil {
			p = &page{key: key, parent: e.Parent, bytes: e.Bytes, place: e.Place, class: segment.Shared, known: true, unproven: true, cool: e.Current == 0}
			t.pages.put(p)
		}
		if p != nil && p.known && !p.lost && p.filler() == nil && slices.Equal(p.place, e.Place) {
			t.pin(p)
			pages[int(e.Ranks)] = append(pages[int(e.Ranks)], p)
		}
		t.mu.Unlock()
	}
	for ranks, some := range pages {
		kept, err := d.stillPlaced(some)
		if err != nil {
			delete(pages, ranks)
			for _, rest := range pages {
				t.unpinAll(rest)
			}
			return nil, err
		}
		pages[ranks] = kept
	}
	return pages, nil
}

// stillPlaced gives those of the pinned pages whose disk copies the catalogue still names; the others are unpinned. One that
// was dropped before it was entered into the table would otherwise stay there as if the catalogue knew it, and be shared by
// the next publication together with disk copies that are gone. From here on a change of the catalogue finds the pins.
func (d *DB) stillPlaced(pages []*page) (kept []*page, err error) {
	snapshot := d.index.Snapshot()
	defer snapshot.Close()
	t := d.residency
	var changed []*page
	for _, p := range pages {
		e, readErr := txn.ReadPage(snapshot, p.key)
		err = errors.Join(err, readErr)
		t.mu.Lock()
		same := e != nil && slices.Equal(e.Place, p.place)
		if !same && p.slots == nil && p.known {
			t.detach(p)
		}
		t.mu.Unlock()
		if same && err == nil {
			kept = append(kept, p)
		} else {
			changed = append(changed, p)
		}
	}
	if err != nil {
		kept, changed = nil, pages
	}
	t.unpinAll(changed)
	return kept, err
}

// proveNow is prove with the catalogue as it is now.
func (d *DB) proveNow(pages []*page) (bool, error) {
	snapshot := d.index.Snapshot()
	defer snapshot.Close()
	return d.prove(snapshot, pages)
}

// move writes new copies of pages that are in RAM and pinned, and has the catalogue name them.
func (d *DB) move(ctx context.Context, pages []*page) error {
	bytes := int64(0)
	d.residency.mu.Lock()
	for _, p := range pages {
		for _, at := range p.place {
			bytes += at.Allocated()
		}
	}
	d.residency.mu.Unlock()
	ticket, _ := d.disk.tryReserve(bytes)
	if ticket == 0 {
		return nil // no room for a second copy: the space comes back when the rest of the segment dies
	}
	var batch []segment.Page
	for _, p := range pages {
		for rank, s := range p.slots {
			batch = append(batch, segment.Page{Key: p.key, Parent: p.parent, Rank: uint16(rank), Bytes: s.Bytes()})
		}
	}
	places, err := d.segments.Append(ctx, segment.Shared, batch)
	d.disk.settle(ticket, bytes, places)
	if err != nil {
		return fmt.Errorf("db: copying %d pages: %w", len(pages), err)
	}
	intents := make([]txn.PersistIntent, len(pages))
	byKey := make(map[txn.Key]*page, len(pages))
	for i, p := range pages {
		n := len(p.slots)
		intents[i] = txn.PersistIntent{Key: p.key, Place: places[:n:n], Moved: true}
		places = places[n:]
		byKey[p.key] = p
	}
	var unused []txn.PersistIntent
	t := &transaction{}
	t.decide = func(v txn.Reader) (txn.Record, error) {
		rec, left, err := txn.DecidePersist(v, intents)
		unused = left
		return optional(rec, err)
	}
	t.applied = func(*txn.Effects) {
		stay := map[txn.Key]bool{}
		for _, u := range unused {
			stay[u.Key] = true
		}
		d.residency.mu.Lock()
		for _, in := range intents {
			if !stay[in.Key] {
				byKey[in.Key].place = in.Place
			}
		}
		d.residency.mu.Unlock()
		d.counters.pagesMoved.Add(int64(len(intents) - len(unused)))
	}
	if err := d.committer.commit(ctx, t, true); err != nil {
		return err
	}
	for _, u := range unused {
		d.disk.free(u.Place, nil) // dropped in the meantime: the new copies are nobody's
	}
	return nil
}
