package db

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/holdfast-db/holdfast/db/internal/segment"
	"github.com/holdfast-db/holdfast/txn"
)

// persist gives every page of the list a disk copy and, where the catalogue knows the page already, records it. The caller
// has them pinned. A page is written once: who finds it being written waits for that.
//
// The order is payload, sync, record, sync (payload-before-record): segments return after the sync, the record comes
// after that, and the commit of the record is durable.
func (d *DB) persist(ctx context.Context, pages []*page) error {
	if err := d.writePages(ctx, pages); err != nil {
		return err
	}
	var intents []txn.PersistIntent
	r := d.residency
	r.mu.Lock()
	for _, p := range pages {
		if p.known && !p.lost {
			intents = append(intents, txn.PersistIntent{Key: p.key, Place: p.place})
		}
	}
	r.mu.Unlock()
	if len(intents) == 0 {
		return nil
	}
	return d.committer.commit(ctx, &transaction{decide: func(v txn.Reader) (txn.Record, error) {
		rec, _, err := txn.DecidePersist(v, intents) // what is unused belongs to pages that are dropped with their copies
		if rec == nil || err != nil {
			return nil, err
		}
		return rec, nil
	}}, true)
}

// writePages returns once every page of the list has a disk copy, written here or by somebody else.
func (d *DB) writePages(ctx context.Context, pages []*page) error {
	r := d.residency
	for {
		var mine []*page
		var wait <-chan struct{}
		r.mu.Lock()
		for _, p := range pages {
			switch {
			case p.place != nil:
			case p.slots == nil || p.filler != nil:
				r.mu.Unlock()
				return fmt.Errorf("db: page %s has no complete copy to write: %w", p.key.Short(), ErrConflict)
			case p.busy:
				wait = p.wait()
			default:
				p.busy = true
				mine = append(mine, p)
			}
		}
		r.mu.Unlock()
		if len(mine) > 0 {
			if err := d.writeMine(ctx, mine); err != nil {
				return err
			}
		}
		if wait == nil {
			return nil
		}
		select {
		case <-wait:
		case <-ctx.Done():
			return fmt.Errorf("db: waiting for a page that is being written: %w: %w", ErrBusy, context.Cause(ctx))
		}
	}
}

// writeMine writes pages that this caller has marked busy. The lifetime classes go to different segments, at the same time.
func (d *DB) writeMine(ctx context.Context, pages []*page) error {
	r := d.residency
	byClass := map[segment.Class][]*page{}
	bytes := int64(0)
	for _, p := range pages {
		byClass[p.class] = append(byClass[p.class], p)
		for _, s := range p.slots {
			bytes += txn.Placement{Stored: s.Len()}.Allocated()
		}
	}
	err := d.disk.reserve(ctx, bytes)
	if err == nil {
		errs := make([]error, 0, len(byClass))
		var mu sync.Mutex
		var group sync.WaitGroup
		for class, list := range byClass {
			work := func() {
				if err := d.writeClass(ctx, class, list); err != nil {
					mu.Lock()
					errs = append(errs, err)
					mu.Unlock()
				}
			}
			if len(byClass) == 1 {
				work()
			} else {
				group.Go(work)
			}
		}
		group.Wait()
		err = errors.Join(errs...)
		d.disk.settle(bytes, pages)
	}
	r.mu.Lock()
	for _, p := range pages {
		p.busy = false
		p.signal()
	}
	r.mu.Unlock()
	return err
}

func (d *DB) writeClass(ctx context.Context, class segment.Class, pages []*page) error {
	batch := make([]segment.Page, 0, len(pages))
	for _, p := range pages {
		for rank, s := range p.slots {
			batch = append(batch, segment.Page{Key: p.key, Parent: p.parent, Rank: uint16(rank), Bytes: s.Bytes()})
		}
	}
	places, err := d.segments.Append(ctx, class, batch)
	if err != nil {
		return fmt.Errorf("db: write of %d pages: %w", len(pages), err)
	}
	d.residency.mu.Lock()
	for _, p := range pages {
		n := len(p.slots)
		p.place, places = places[:n:n], places[n:]
		d.counters.pagesWritten.Add(int64(n))
		d.counters.payloadWritten.Add(p.bytes * int64(n))
	}
	d.residency.mu.Unlock()
	return nil
}
