package txn

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"slices"
)

// Check re-derives the whole catalogue from what cannot be derived (manifests, their states, the parents, sizes and
// placements of pages, the parents of spine nodes, namespace encodings) and compares every entry. It reads everything, in
// time that is linear but for sorting: it is for tests, for verify, and, under the build tag "invariants", for every record
// that is applied. The view may hold any bytes.
func Check(v Reader) error {
	c := &checker{want: NewMemory(), pages: map[Key]*PageEntry{}, spines: map[Key]*spineEntry{}, segments: map[uint64]*SegmentUse{}}
	have := NewMemory()
	err := v.Scan(nil, func(k, b []byte) (bool, error) {
		if len(k) == 0 || len(k) != keyBytes[k[0]] {
			return false, refuse(ExactAccounting, ErrCorrupt, "catalogue key %x is there and nothing accounts for it", k)
		}
		return true, have.Set(k, b)
	})
	if err != nil {
		return err
	}
	if err := c.derive(have); err != nil {
		return err
	}
	c.want.sort() // so that the first difference is always the same one
	for _, k := range c.want.keys {
		got, ok := have.values[k]
		if !ok {
			return refuse(ExactAccounting, ErrCorrupt, "catalogue key %x is missing", k)
		}
		if !bytes.Equal(got, c.want.values[k]) {
			return refuse(ExactAccounting, ErrCorrupt, "catalogue key %x holds %x, its value derives as %x", k, got, c.want.values[k])
		}
	}
	for _, k := range have.keys {
		if _, ok := c.want.values[k]; !ok {
			return refuse(ExactAccounting, ErrCorrupt, "catalogue key %x is there and nothing accounts for it", k)
		}
	}
	return nil
}

type checker struct {
	want     *Memory
	accounts Accounts
	pages    map[Key]*PageEntry
	spines   map[Key]*spineEntry
	segments map[uint64]*SegmentUse
	applied  LSN
}

func (c *checker) derive(have *Memory) (err error) {
	if c.applied, err = ReadApplied(have); err != nil {
		return err
	}
	if err := c.basePages(have); err != nil {
		return err
	}
	err = have.Scan([]byte{tagSpine}, func(k, b []byte) (bool, error) {
		s := new(spineEntry)
		err := s.unmarshal(b)
		c.spines[Key(k[1:])] = &spineEntry{parent: s.parent, index: s.index}
		return true, err
	})
	if err != nil {
		return err
	}
	err = have.Scan([]byte{tagNamespace}, func(k, b []byte) (bool, error) {
		c.accounts.Namespaces++
		return true, c.want.Set(k, b)
	})
	if err != nil {
		return err
	}
	err = have.Scan([]byte{tagState}, func(k, b []byte) (bool, error) {
		var s State
		if err := s.unmarshal(b); err != nil {
			return false, err
		}
		return true, c.checkpoint(have, Generation(k[1:]), &s)
	})
	if err != nil {
		return err
	}
	for key, p := range c.pages {
		if p.Held == 0 {
			return refuse(ExactAccounting, ErrCorrupt, "page %s is held by nothing", key.Short())
		}
		c.want.Set(key1(tagPage, key), p.marshal())
	}
	for key, s := range c.spines {
		if s.parent.IsZero() {
			continue
		}
		p := c.spines[s.parent]
		if p == nil || p.index != s.index-1 {
			return refuse(ExactAccounting, ErrCorrupt, "spine node %s has no parent", key.Short())
		}
		p.children++
	}
	for key, s := range c.spines {
		if s.empty() || (s.index == 0) != s.parent.IsZero() {
			return refuse(ExactAccounting, ErrCorrupt, "spine node %s leads nowhere", key.Short())
		}
		c.want.Set(key1(tagSpine, key), s.marshal())
	}
	for n, s := range c.segments {
		// The recorded end never falls while the segment is in use, so it can lie above what is live now.
		var kept SegmentUse
		if _, err := load(have, segmentKey(n), &kept); err != nil {
			return err
		}
		s.End = max(s.End, kept.End)
		c.want.Set(segmentKey(n), s.marshal())
	}
	kept, err := ReadAccounts(have)
	if err != nil {
		return err
	}
	c.accounts.LastSegment = max(c.accounts.LastSegment, kept.LastSegment)
	if c.applied == 0 {
		return nil
	}
	c.want.Set([]byte{tagAccounts}, c.accounts.marshal())
	return writeApplied(c.want, c.applied)
}

// basePages takes from the page entries what only they know, and derives from it, parents first, what does not depend on
// manifests: depths, child edges, disk copies, and what is durable with all before it.
func (c *checker) basePages(have *Memory) error {
	var keys []Key
	err := have.Scan([]byte{tagPage}, func(k, b []byte) (bool, error) {
		var p PageEntry
		if err := p.unmarshal(b); err != nil {
			return false, err
		}
		key := Key(k[1:])
		keys = append(keys, key)
		c.pages[key] = &PageEntry{Parent: p.Parent, Depth: p.Depth, Bytes: p.Bytes, Ranks: p.Ranks, Place: p.Place}
		return true, nil
	})
	if err != nil {
		return err
	}
	slices.SortFunc(keys, func(a, b Key) int { return cmp.Compare(c.pages[a].Depth, c.pages[b].Depth) })
	for _, key := range keys {
		p := c.pages[key]
		p.ChainDurable = len(p.Place) != 0
		if p.Parent.IsZero() {
			if p.Depth != 0 {
				return refuse(CompleteAtPublish, ErrCorrupt, "page %s has no parent and %d pages before it", key.Short(), p.Depth)
			}
		} else {
			parent := c.pages[p.Parent]
			if parent == nil || parent.Depth != p.Depth-1 || parent.Bytes != p.Bytes || parent.Ranks != p.Ranks {
				return refuse(CompleteAtPublish, ErrCorrupt, "page %s follows %s, which is gone or belongs to another chain", key.Short(), p.Parent.Short())
			}
			parent.Held++
			p.ChainDurable = p.ChainDurable && parent.ChainDurable
			c.want.Set(key2(tagChild, p.Parent, key), nil)
		}
		c.accounts.Pages++
		c.accounts.PageBytes += p.Bytes * p.Ranks
		if err := c.place(key, p); err != nil {
			return err
		}
	}
	return nil
}

func (c *checker) place(key Key, p *PageEntry) error {
	if len(p.Place) == 0 {
		return nil
	}
	if int64(len(p.Place)) != p.Ranks {
		return refuse(AllRanks, ErrCorrupt, "page %s has disk copies of %d of %d ranks", key.Short(), len(p.Place), p.Ranks)
	}
	c.accounts.PlacedPages++
	for _, x := range p.Place {
		s := c.segments[x.Segment]
		if s == nil {
			s = new(SegmentUse)
			c.segments[x.Segment] = s
		}
		s.LivePages++
		s.LiveBytes += x.Allocated()
		s.End = max(s.End, x.Offset+x.Allocated())
		c.accounts.StoredBytes += x.Stored
		c.accounts.AllocatedBytes += x.Allocated()
		c.accounts.LastSegment = max(c.accounts.LastSegment, int64(x.Segment))
	}
	return nil
}

func (c *checker) checkpoint(have *Memory, g Generation, s *State) error {
	m, err := ReadManifest(have, g)
	if err != nil {
		return err
	}
	if m == nil {
		return refuse(CompleteAtPublish, ErrCorrupt, "generation %s has no manifest", Key(g).Short())
	}
	c.want.Set(key1(tagManifest, g), have.values[string(key1(tagManifest, g))])
	if have.values[string(key1(tagNamespace, m.Namespace))] == nil {
		return refuse(ExactAccounting, ErrCorrupt, "generation %s belongs to namespace %s, which is not there", Key(g).Short(), m.Namespace.Short())
	}
	if s.Published == 0 || s.Published > s.Used || s.Used > c.applied {
		return refuse(MonotoneLSN, ErrCorrupt, "generation %s was published by LSN %d, applied is LSN %d", Key(g).Short(), s.Published, c.applied)
	}
	waiting, err := c.holds(m, g, s)
	if err != nil {
		return err
	}
	// What was durable when it was retired stays marked so; for a listed one the mark is exact.
	if s.Status == Retired {
		c.accounts.Retired++
		derived := State{Status: Retired, Durable: s.Durable, Published: s.Published, Used: s.Used}
		return c.want.Set(key1(tagState, g), derived.marshal())
	}
	derived := *s
	derived.Durable = waiting == 0
	c.want.Set(key1(tagState, g), derived.marshal())
	c.want.Set(orderKey(g, s), nil)
	if m.Request != "" {
		c.want.Set(requestKey(m, g), nil)
	}
	if s.Grace {
		c.want.Set(key1(tagGrace, g), nil)
	}
	if s.Grace && (!s.Superseded() || !s.Continued) {
		return refuse(SupersedeIsAPreference, ErrCorrupt, "generation %s has a time of grace and nothing to show for it", Key(g).Short())
	}
	c.want.Set(key1(tagPrefix, m.Prefix), g[:])
	c.accounts.Listed++
	if waiting > 0 {
		c.accounts.Undurable++
		c.want.Set(key1(tagWaiting, g), binary.AppendUvarint(nil, waiting))
	}
	node := c.spines[m.Spine]
	if node == nil || node.index != m.SpineIndex() {
		return refuse(ExactAccounting, ErrCorrupt, "generation %s has no spine node", Key(g).Short())
	}
	node.add(m.Tail(), 1)
	if !s.Superseded() {
		return nil
	}
	c.accounts.Superseded++
	c.want.Set(key2(tagSupersede, s.SupersededBy, g), nil)
	by, err := ReadState(have, s.SupersededBy)
	if err != nil {
		return err
	}
	byManifest, err := ReadManifest(have, s.SupersededBy)
	if err != nil {
		return err
	}
	if by == nil || byManifest == nil || by.Status != Listed || by.Published <= s.Published || byManifest.Namespace != m.Namespace {
		return refuse(NoDanglingSupersede, ErrCorrupt, "generation %s is superseded by %s, which is not listed, newer and of the same namespace", Key(g).Short(), Key(s.SupersededBy).Short())
	}
	return nil
}

// holds derives the hold edges of a manifest and how many of them wait for a disk copy.
func (c *checker) holds(m *Manifest, g Generation, s *State) (waiting uint64, err error) {
	err = m.holds(func(group *GroupPages, key Key) error {
		p := c.pages[key]
		if p == nil || !m.fits(group, p) {
			return refuse(CompleteAtPublish, ErrCorrupt, "generation %s: page %s is gone or not what the manifest says", Key(g).Short(), key.Short())
		}
		p.Held++
		c.want.Set(key2(tagHold, key, g), nil)
		if s.Status == Listed {
			c.raise(key, listedCount)
			if !s.GoesFirst() {
				c.raise(key, currentCount)
			}
		}
		if !p.ChainDurable {
			waiting++
		}
		return nil
	})
	return waiting, err
}

func (c *checker) raise(key Key, of func(*PageEntry) *int64) {
	for p := c.pages[key]; p != nil; p = c.pages[p.Parent] {
		n := of(p)
		if *n++; *n > 1 {
			return
		}
	}
}
