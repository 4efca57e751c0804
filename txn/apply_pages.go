package txn

import (
	"cmp"
	"encoding/binary"
	"fmt"
)

type pageChange struct {
	PageEntry
	gone  bool
	fresh bool // made by this record
	cool  bool // before this record; a new page is not, and is needed by the checkpoint that brings it
}

// page gives a page to be changed.
func (a *applier) page(key Key) (*pageChange, error) {
	if p := a.pages[key]; p != nil {
		if p.gone {
			return nil, fmt.Errorf("page %s was dropped by this record: %w", key.Short(), ErrCorrupt)
		}
		return p, nil
	}
	p := new(pageChange)
	if err := mustLoad(a.v, key1(tagPage, key), &p.PageEntry); err != nil {
		return nil, err
	}
	p.cool = p.Current == 0
	a.pages[key] = p
	return p, nil
}

// peek is page for a look: what it gives is not written back.
func (a *applier) peek(key Key) (*PageEntry, error) {
	if a.pages[key] != nil {
		p, err := a.page(key)
		if err != nil {
			return nil, err
		}
		return &p.PageEntry, nil
	}
	p := new(PageEntry)
	return p, mustLoad(a.v, key1(tagPage, key), p)
}

// holdPages adds the new pages of a publication, and counts the checkpoint at the pages that its manifest names. fresh
// says that the manifest does not hold them yet. waiting is how many of them wait for a disk copy.
func (a *applier) holdPages(r *Publish, g Generation, fresh bool) (waiting uint64, err error) {
	m := &r.Manifest
	for i := range r.Pages {
		if err := a.addPage(&r.Pages[i], int64(m.Ranks)); err != nil {
			return 0, err
		}
	}
	err = m.holds(func(group *GroupPages, key Key) error {
		p, err := a.page(key)
		if err != nil {
			return err
		}
		if !m.fits(group, &p.PageEntry) {
			return refuse(CompleteAtPublish, ErrCorrupt, "page %s is not what the manifest of generation %s says", key.Short(), Key(g).Short())
		}
		if !p.ChainDurable {
			waiting++
		}
		if fresh {
			p.Held++
			if err := a.v.Set(key2(tagHold, key, g), nil); err != nil {
				return err
			}
		}
		return cmp.Or(a.count(key, listedCount, 1), a.count(key, currentCount, 1))
	})
	if err != nil {
		return 0, err
	}
	for i := range r.Pages {
		if key := r.Pages[i].Key; a.pages[key].Held == 0 {
			return 0, refuse(ExactAccounting, ErrCorrupt, "page %s is new and generation %s does not need it", key.Short(), Key(g).Short())
		}
	}
	return waiting, nil
}

func (a *applier) addPage(n *NewPage, ranks int64) error {
	// A page is there only if its parent is, so none that follows a new page has to be looked up.
	if p := a.pages[n.Parent]; p == nil || !p.fresh {
		known, err := a.v.Get(key1(tagPage, n.Key))
		if err != nil {
			return err
		}
		if known != nil {
			return fmt.Errorf("page %s is there already: %w", n.Key.Short(), ErrCorrupt)
		}
	}
	if a.pages[n.Key] != nil {
		return fmt.Errorf("page %s is there already: %w", n.Key.Short(), ErrCorrupt)
	}
	p := &pageChange{PageEntry: PageEntry{Parent: n.Parent, Bytes: n.Bytes, Ranks: ranks, ChainDurable: len(n.Place) != 0}, fresh: true}
	if !n.Parent.IsZero() {
		parent, err := a.page(n.Parent)
		if err != nil {
			return err
		}
		if parent.Bytes != n.Bytes || parent.Ranks != ranks {
			return refuse(CompleteAtPublish, ErrCorrupt, "page %s is of another size than %s, which it follows", n.Key.Short(), n.Parent.Short())
		}
		parent.Held++
		p.Depth = parent.Depth + 1
		p.ChainDurable = p.ChainDurable && parent.ChainDurable
		if err := a.v.Set(key2(tagChild, n.Parent, n.Key), nil); err != nil {
			return err
		}
	}
	a.pages[n.Key] = p
	a.accounts.Pages++
	a.accounts.PageBytes += n.Bytes * ranks
	return a.place(n.Key, p, n.Place)
}

// place gives a page its disk copies.
func (a *applier) place(key Key, p *pageChange, places []Placement) error {
	if len(places) == 0 {
		return nil
	}
	if int64(len(places)) != p.Ranks {
		return refuse(AllRanks, ErrCorrupt, "page %s has disk copies of %d of %d ranks", key.Short(), len(places), p.Ranks)
	}
	p.Place = places
	a.accounts.PlacedPages++
	for _, c := range places {
		s, err := a.segment(c.Segment)
		if err != nil {
			return err
		}
		s.LivePages++
		s.LiveBytes += c.Allocated()
		s.End = max(s.End, c.Offset+c.Allocated())
		a.accounts.StoredBytes += c.Stored
		a.accounts.AllocatedBytes += c.Allocated()
		a.accounts.LastSegment = max(a.accounts.LastSegment, int64(c.Segment))
	}
	return nil
}

// unplace takes a page's disk copies from it.
func (a *applier) unplace(p *pageChange) error {
	if len(p.Place) == 0 {
		return nil
	}
	a.accounts.PlacedPages--
	for _, c := range p.Place {
		s, err := a.segment(c.Segment)
		if err != nil {
			return err
		}
		s.LivePages--
		s.LiveBytes -= c.Allocated()
		a.accounts.StoredBytes -= c.Stored
		a.accounts.AllocatedBytes -= c.Allocated()
	}
	p.Place = nil
	return nil
}

// listedCount and currentCount choose what count counts.
func listedCount(p *PageEntry) *int64 { return &p.Listed }

func currentCount(p *PageEntry) *int64 { return &p.Current }

// count adds delta, 1 or −1, to the ways that lead from the page to a checkpoint of some sort, and tells its ancestors if that
// makes the first way or takes the last.
func (a *applier) count(key Key, of func(*PageEntry) *int64, delta int64) error {
	for !key.IsZero() {
		p, err := a.page(key)
		if err != nil {
			return err
		}
		n := of(&p.PageEntry)
		if *n += delta; *n < 0 {
			return refuse(ExactAccounting, ErrCorrupt, "page %s is counted as needed by no checkpoint of its sort and one needs it", key.Short())
		}
		if *n != max(delta, 0) {
			return nil
		}
		key = p.Parent
	}
	return nil
}

// release takes one edge from a page, and drops the page and the ancestors that nothing holds any more.
func (a *applier) release(key Key) error {
	for {
		p, err := a.page(key)
		if err != nil {
			return err
		}
		if p.Held == 0 {
			return refuse(ExactAccounting, ErrCorrupt, "page %s is counted as held by nothing and something holds it", key.Short())
		}
		if p.Held--; p.Held > 0 {
			return nil
		}
		if p.Listed != 0 {
			return refuse(RetireBeforeDelete, ErrCorrupt, "page %s would go while %d listed checkpoints need it", key.Short(), p.Listed)
		}
		a.effects.Dropped = append(a.effects.Dropped, DroppedPage{Key: key, Parent: p.Parent, Bytes: p.Bytes, Ranks: p.Ranks, Place: p.Place})
		if err := a.unplace(p); err != nil {
			return err
		}
		p.gone = true
		a.accounts.Pages--
		a.accounts.PageBytes -= p.Bytes * p.Ranks
		if p.Parent.IsZero() {
			return nil
		}
		if err := a.v.Delete(key2(tagChild, p.Parent, key)); err != nil {
			return err
		}
		key = p.Parent
	}
}

func (a *applier) persist(r *Persist) error {
	a.follow = make(map[Key][]Key, len(r.Pages))
	for i := range r.Pages {
		key := r.Pages[i].Key
		if a.pages[key] != nil {
			continue
		}
		p, err := a.page(key)
		if err != nil {
			return err
		}
		a.follow[p.Parent] = append(a.follow[p.Parent], key)
	}
	for i := range r.Pages {
		in := &r.Pages[i]
		p, err := a.page(in.Key)
		if err != nil {
			return err
		}
		if len(in.Place) == 0 {
			return refuse(AllRanks, ErrCorrupt, "page %s has disk copies of 0 of %d ranks", in.Key.Short(), p.Ranks)
		}
		moved := p.Place
		if err := a.unplace(p); err != nil {
			return err
		}
		a.effects.Freed = append(a.effects.Freed, moved...)
		if err := a.place(in.Key, p, in.Place); err != nil {
			return err
		}
		if p.ChainDurable {
			continue
		}
		durable := p.Parent.IsZero()
		if !durable {
			parent, err := a.peek(p.Parent)
			if err != nil {
				return err
			}
			durable = parent.ChainDurable
		}
		if durable {
			if err := a.chainDurable(in.Key); err != nil {
				return err
			}
		}
	}
	return nil
}

// chainDurable tells the checkpoints that waited for this page, and goes on to the pages after it that have a copy
// already. Every page becomes chain-durable once in its life, so the cost is that of what is new.
func (a *applier) chainDurable(key Key) error {
	next := []Key{key}
	for len(next) > 0 {
		key, next = next[len(next)-1], next[:len(next)-1]
		p, err := a.page(key)
		if err != nil {
			return err
		}
		p.ChainDurable = true
		children := a.follow[key]
		if int64(len(children)) != p.Held { // else nothing but those leads to it, and there is nothing to look for
			holders, err := edges[Generation](a.v, key1(tagHold, key))
			if err != nil {
				return err
			}
			for _, g := range holders {
				if err := a.waitsForOneLess(g); err != nil {
					return err
				}
			}
			if children, err = edges[Key](a.v, key1(tagChild, key)); err != nil {
				return err
			}
		}
		for _, c := range children {
			child, err := a.peek(c)
			if err != nil {
				return err
			}
			if len(child.Place) != 0 && !child.ChainDurable {
				next = append(next, c)
			}
		}
	}
	return nil
}

func (a *applier) waitsForOneLess(g Generation) error {
	k := key1(tagWaiting, g)
	b, err := a.v.Get(k)
	if err != nil || b == nil {
		return err // retired: nobody waits
	}
	n, w := binary.Uvarint(b)
	if w <= 0 || n == 0 {
		return fmt.Errorf("waiting entry of generation %s: %w", Key(g).Short(), ErrCorrupt)
	}
	if n > 1 {
		return a.v.Set(k, binary.AppendUvarint(nil, n-1))
	}
	if err := a.v.Delete(k); err != nil {
		return err
	}
	var s State
	if err := mustLoad(a.v, key1(tagState, g), &s); err != nil {
		return err
	}
	s.Durable = true
	a.accounts.Undurable--
	a.effects.Durable = append(a.effects.Durable, g)
	return a.writeState(g, &s)
}
