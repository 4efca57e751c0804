package db

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/holdfast-db/holdfast/db/internal/segment"
	"github.com/holdfast-db/holdfast/txn"
	"github.com/holdfast-db/holdfast/txn/mutant"
)

// job is a transfer between RAM and disk that is under way for some pages: a write or a load. It has its own pins and its own
// goroutine, so that whoever waits for it may give up at a deadline while the device still works on the memory. A device
// that hangs costs the pages under its jobs, and no caller more than its deadline.
type job struct {
	done chan struct{} // closed when it has ended
	err  error         // valid then
	late bool          // it was not waited for to the end; guarded by residency.mu
}

// Bounds of what is tried again. A write that fails is tried again in another segment, because the failed one is sealed.
const (
	writeTries   = 3
	writeBackoff = 20 * time.Millisecond // doubles with every try
)

// persist gives every page of the list a disk copy and, where the catalogue knows the page already, records it. The caller
// has them pinned. A page is written once: who finds it being written waits for that.
//
// The order is payload, sync, record, sync (payload-before-record): segments return after the sync, the record comes
// after that, and the commit of the record is durable.
func (d *DB) persist(ctx context.Context, pages []*page) (err error) {
	if n, bytes := d.residency.unwritten(pages); n > 0 {
		var m measured
		ctx, m = d.telemetry.begin(ctx, opPersist)
		defer func() { m.end(err, n, bytes) }()
	}
	if err := d.writePages(ctx, pages); err != nil {
		return err
	}
	loose, pages := splitLoose(pages)
	if err := d.indexLoose(loose); err != nil {
		return err
	}
	var intents []txn.PersistIntent
	var named []*page
	r := d.residency
	r.mu.Lock()
	for _, p := range pages {
		if p.known && !p.lost {
			intents = append(intents, txn.PersistIntent{Key: p.key, Place: p.place})
			named = append(named, p)
		}
	}
	r.mu.Unlock()
	if len(intents) == 0 {
		return nil
	}
	return d.committer.commit(ctx, &transaction{
		decide: func(v txn.Reader) (txn.Record, error) {
			rec, _, err := txn.DecidePersist(v, intents) // what is unused belongs to pages that are dropped with their copies
			return optional(rec, err)
		},
		applied: func(*txn.Effects) { r.recorded(named) },
	}, true)
}

// indexLoose enters loose pages that have disk copies in their index. Who was deleted meanwhile stays out. One that somebody else put,
// wrote and evicted since it was looked up has a copy there already, and keeps that one.
func (d *DB) indexLoose(pages []*page) error {
	if len(pages) == 0 {
		return nil
	}
	r := d.residency
	var second []txn.Placement
	err := d.loose.add(pages, func(p *page) (txn.Placement, bool) {
		r.mu.Lock()
		defer r.mu.Unlock()
		if !p.known || p.lost {
			return txn.Placement{}, false
		}
		return p.place[0], true
	}, func(p *page, first txn.Placement) {
		r.mu.Lock()
		defer r.mu.Unlock()
		if p.place[0] != first {
			second = append(second, p.place...)
			p.place = []txn.Placement{first}
		}
	})
	if err == nil {
		r.recorded(pages)
	}
	r.giveBack(&leftovers{places: second})
	return err
}

// writePages returns once every page of the list has a disk copy, written for this caller or for somebody else.
func (d *DB) writePages(ctx context.Context, pages []*page) error {
	r := d.residency
	var own *job
	for {
		var mine []*page
		var wait *job
		r.mu.Lock()
		for _, p := range pages {
			switch {
			case p.place != nil:
			case p.slots == nil || p.filler() != nil || p.lost:
				r.mu.Unlock()
				return fmt.Errorf("db: page %s has no complete copy to write: %w", p.key.Short(), ErrConflict)
			case p.job() != nil:
				wait = p.job()
			default:
				mine = append(mine, p)
			}
		}
		if wait == nil && own != nil && len(mine) > 0 {
			r.mu.Unlock()
			return own.err // it was this caller's, and it failed
		}
		if len(mine) > 0 {
			own = &job{done: make(chan struct{})}
			taken := mine[:0]
			for _, p := range mine {
				if p.job() == nil { // a list may name a page twice
					r.pin(p)
					p.using().job = own
					taken = append(taken, p)
				}
			}
			wait = own
			d.gate.hold()
			go d.write(own, taken)
		}
		r.mu.Unlock()
		if wait == nil {
			return nil
		}
		select {
		case <-wait.done:
		case <-ctx.Done():
			return fmt.Errorf("db: waiting for pages to be written: %w: %w", ErrBusy, context.Cause(ctx))
		}
	}
}

// togetherBytesMax is the space up to which pages of shared and own lifetime that are written together go into one segment. Each file
// costs a sync, and a device carries them out one after the other: for so few bytes that is most of the time. What dies first leaves a
// hole.
const togetherBytesMax = 512 << 10

// write is a job that writes pages. The lifetime classes go to different segments, at the same time, unless they are small.
func (d *DB) write(j *job, pages []*page) {
	byClass := map[segment.Class][]*page{}
	bytes := int64(0)
	for _, p := range pages {
		byClass[p.class] = append(byClass[p.class], p)
		for _, s := range p.slots {
			bytes += txn.Placement{Stored: s.Len()}.Allocated()
		}
	}
	if own := byClass[segment.Own]; bytes <= togetherBytesMax && len(own) > 0 && len(byClass[segment.Shared]) > 0 {
		byClass[segment.Shared] = append(byClass[segment.Shared], own...)
		delete(byClass, segment.Own)
	}
	ctx, cancel := context.WithTimeout(context.Background(), d.options.AdmissionTimeout)
	ticket, err := d.disk.reserve(ctx, bytes)
	cancel()
	if err == nil {
		var mu sync.Mutex // guards written and err
		var written []txn.Placement
		put := func(class segment.Class) {
			list, ranks := byClass[class], 1
			for _, p := range list {
				ranks = max(ranks, len(p.slots))
			}
			for some := range slices.Chunk(list, segment.AppendPagesMax/ranks) {
				places, e := d.writeClass(class, some)
				mu.Lock()
				written, err = append(written, places...), errors.Join(err, e)
				mu.Unlock()
				if e != nil {
					return
				}
			}
		}
		var group sync.WaitGroup
		classes := slices.Sorted(maps.Keys(byClass)) // always in the same order, so that a history can be run again
		for _, class := range classes[1:] {
			group.Go(func() { put(class) })
		}
		put(classes[0])
		group.Wait()
		d.disk.settle(ticket, bytes, written)
	}
	d.endJob(j, pages, err)
}

// endJob takes the job from its pages and wakes who waits for it.
func (d *DB) endJob(j *job, pages []*page, err error) {
	r := d.residency
	r.mu.Lock()
	for _, p := range pages {
		if p.use != nil {
			p.use.job = nil
		}
	}
	if j.late {
		d.lateWrites.Add(-1)
	}
	r.mu.Unlock()
	r.unpinAll(pages)
	j.err = err
	close(j.done)
	d.gate.leave()
}

// writeClass writes pages of one lifetime class, a bounded number of times.
func (d *DB) writeClass(class segment.Class, pages []*page) ([]txn.Placement, error) {
	batch := make([]segment.Page, 0, len(pages))
	for _, p := range pages {
		for rank, s := range p.slots {
			if mutant.On("a rank is forgotten") {
				s = p.slots[0]
			}
			batch = append(batch, segment.Page{Key: p.key, Parent: p.parent, Rank: uint16(rank), Bytes: s.Bytes(), Codec: d.options.Codec})
		}
	}
	var places []txn.Placement
	for try, wait := 1, writeBackoff; ; try, wait = try+1, wait*2 {
		var err error
		if places, err = d.segments.Append(context.Background(), class, batch); err == nil {
			break
		}
		d.counters.writesFailed.Add(1)
		if try == writeTries || errors.Is(err, ErrClosed) || errors.Is(err, ErrInvalid) {
			return nil, fmt.Errorf("db: write of %d pages, tried %d times: %w", len(pages), try, err)
		}
		d.options.Logger.Warn("write failed, trying again", "pages", len(pages), "try", try, "error", err)
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-d.gate.stopping:
			timer.Stop()
		}
	}
	written := places
	d.residency.mu.Lock()
	defer d.residency.mu.Unlock()
	for _, p := range pages {
		n := len(p.slots)
		p.place, p.unrecorded, places = places[:n:n], true, places[n:]
		d.counters.pagesWritten.Add(int64(n))
		d.counters.payloadWritten.Add(p.bytes * int64(n))
		if p.class == segment.Own {
			d.counters.ownWritten.Add(p.bytes * int64(n))
		}
	}
	return written, nil
}
