package fuzz

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/holdfast-db/holdfast/db"
)

// keepsAll tells whether the write policy writes what has to leave RAM.
func (w *World) keepsAll() bool {
	return w.options.WritePolicy == db.WriteThrough || w.options.WritePolicy == db.OnEvict
}

// lookAside closes the database, looks at it through a read-only handle, and opens it again.
func (w *World) lookAside(ctx context.Context) bool {
	w.shut(ctx)
	before := w.disk.Calls()
	o := w.options
	w.options.ReadOnly = true
	ok := w.open()
	if ok {
		w.settle()
		w.check()
		_, err := w.db.Close(ctx)
		w.accept("close of a read-only handle", err)
		w.db = nil
	}
	w.options = o
	if n := w.disk.Calls() - before; n > 0 {
		w.fail("a read-only handle changed the disk: %d calls", n)
	}
	return ok && w.open()
}

// check holds the database against the model.
func (w *World) check() {
	ctx := context.Background()
	listed := map[db.Generation]*Checkpoint{}
	w.out.Checks["listed is known"]++
	for c, err := range w.db.Checkpoints(ctx) {
		if err != nil {
			w.accept("list of checkpoints", err)
			return
		}
		known := w.model.May[c.Generation]
		if known == nil {
			w.fail("listed, and was never published, or was taken back: %s at %d", c.Generation, c.Offset)
		}
		if int64(len(known.Tokens)) != c.Offset {
			w.fail("listed at %d, was published at %d: %s", c.Offset, len(known.Tokens), c.Generation)
		}
		known.Placed = c.Durable
		listed[c.Generation] = known
	}
	w.dies()
	if !w.damaged && !w.budget {
		for g, c := range w.model.Must {
			w.out.Checks["acknowledged is there"]++
			if listed[g] == nil && (c.Durable || c.Placed || !w.sick() && w.options.RAMBytes >= 32<<20) {
				w.fail("acknowledged and gone: %s at %d, durable %v", g, len(c.Tokens), c.Durable)
			}
		}
	}
	if trace != nil {
		for _, g := range sorted(listed) {
			fmt.Fprintf(trace, "listed %v space %d at %d durable %v\n", g, listed[g].Space, len(listed[g].Tokens), listed[g].Durable)
		}
	}
	w.model.Saw(listed)
	for _, g := range sorted(listed) {
		w.restore(listed, listed[g])
		w.settle()
	}
	if w.damaged {
		return
	}
	for space := range w.spaces {
		if w.narrow && space > 0 {
			break
		}
		for _, tokens := range w.walks {
			w.out.Checks["lookup is the longest"]++
			m, err := w.db.Lookup(ctx, w.sequence(space, tokens), db.LookupOptions{})
			w.settle()
			w.accept("lookup", err, db.ErrNotFound)
			want := Longest(listed, space, tokens)
			if space == 1 && m.Offset < want || space != 1 && m.Offset != want {
				if w.sick() {
					continue // something may have been given up meanwhile
				}
				w.fail("lookup found %d tokens of %d, the longest listed prefix has %d", m.Offset, len(tokens), want)
			}
		}
	}
	if w.sick() {
		return
	}
	w.checkLoose(ctx)
	w.settle()
	s, err := w.db.Stats()
	if err != nil {
		w.fail("stats: %v", err)
	}
	w.out.Checks["what is held stays as it is"]++
	for _, r := range w.held {
		for rank := 0; r.Pages(rank) != nil; rank++ {
			for _, p := range r.Pages(rank) {
				if err := Verify(p.Bytes, p.Key, rank); err != nil {
					w.fail("wrong bytes under a lease: %v", err)
				}
			}
		}
	}
	w.out.Checks["nothing is left held"]++
	alive := 0
	for _, r := range w.held {
		if r.Err() == nil {
			alive++
		}
	}
	if int(s.Leases) != alive {
		w.fail("%d leases, %d are held", s.Leases, alive)
	}
	if s.Pending > int64(len(w.pubs)) {
		w.fail("%d pending publications, %d are known", s.Pending, len(w.pubs))
	}
	if s.RAMUsed > s.RAMCapacity && alive == 0 && s.Pending == 0 {
		w.fail("%d bytes of RAM in use, the tier has %d", s.RAMUsed, s.RAMCapacity)
	}
	w.out.Checks["accounting equals recount"]++
	if err := w.db.Check(ctx); err != nil {
		w.fail("recount: %v", err)
	}
}

// checkLoose gets every loose page that is said to be there.
func (w *World) checkLoose(ctx context.Context) {
	for key := range looseKeys {
		name := []byte(looseKey(key))
		there, err := w.db.ExistsLoose(w.spaces[0], name)
		w.dies()
		w.accept("question for a loose page", err)
		if err != nil || !there[0] {
			continue
		}
		w.out.Checks["a loose page that exists can be got"]++
		l, err := w.db.GetLoose(ctx, nil, w.spaces[0], name)
		w.dies()
		if errors.Is(err, db.ErrBusy) && (len(w.pubs) > 0 || len(w.held) > 0) {
			continue // no room
		}
		if err != nil || l.Found() == 0 {
			w.fail("a loose page is said to be there and cannot be got: %s: %v", name, err)
		}
		w.verifyLoose(looseKey(key), l)
	}
}

func sorted(m map[db.Generation]*Checkpoint) []db.Generation {
	return slices.SortedFunc(maps.Keys(m), func(a, b db.Generation) int { return slices.Compare(a[:], b[:]) })
}

// restore restores a listed checkpoint on all ranks and compares every byte.
func (w *World) restore(listed map[db.Generation]*Checkpoint, c *Checkpoint) {
	w.out.Checks["listed is restorable"]++
	r, err := w.db.Restore(context.Background(), w.sequence(c.Space, c.Tokens), db.LookupOptions{})
	w.dies()
	if err != nil {
		w.classed(err)
		if errors.Is(err, db.ErrBusy) && (len(w.pubs) > 0 || len(w.held) > 0) || w.sick() {
			return // no room, or a bad disk
		}
		w.fail("listed and not restorable: %s at %d: %v", c.Generation, len(c.Tokens), err)
	}
	defer r.Release()
	if want := int64(len(c.Tokens)); r.Offset() != want && !w.sick() && !w.damaged {
		w.fail("restored %d tokens of a listed checkpoint of %d", r.Offset(), want)
	}
	for rank := range Layouts[c.Space].Ranks {
		pages := r.Pages(rank)
		if len(pages) == 0 {
			w.fail("restored no page of rank %d", rank)
		}
		for _, p := range pages {
			if err := Verify(p.Bytes, p.Key, rank); err != nil {
				w.fail("wrong bytes: %v", err)
			}
		}
	}
}
