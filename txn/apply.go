package txn

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
)

// Effects is what a record did to checkpoints and pages, for the owner of the bytes.
type Effects struct {
	Listed   []Generation
	Retired  []Generation
	Farewell []Farewell // of each of them, in the same order
	Deleted  []Generation
	Durable  []Generation  // listed checkpoints whose last missing disk copy this record brought
	Dropped  []DroppedPage // pages that nothing needs any more
	Freed    []Placement   // disk copies that a moved page left behind
	Cooled   []Key         // pages that no current checkpoint needs any more, and that are still there
	Warmed   []Key         // pages that were cool and that a current checkpoint needs again
	Graced   []Generation  // checkpoints whose time of grace has begun
}

// Farewell is what was known of a checkpoint when it was delisted, for whoever keeps a history: once its manifest is deleted the
// catalogue knows nothing of it any more.
type Farewell struct {
	Generation     Generation
	Namespace      Key
	Prefix         Key
	Offset         int64 // tokens
	Bytes          int64 // as Manifest.Bytes
	CheckpointKind uint8
	Request        string
	Published      LSN
	Durable        bool
	Reason         Reason
	Previous       Generation // as Manifest.Previous
	By             Generation // the one that was published for the same prefix (ReasonReplaced), or that had superseded it; zero if none
}

// DroppedPage is a page that has left the catalogue. Its space may be given back once the record is durable and the last
// lease on it has ended (record-before-effect).
type DroppedPage struct {
	Key    Key
	Parent Key // dropped by the same record only if nothing else held it; then it follows in the list
	Bytes  int64
	Ranks  int64
	Place  []Placement
}

// Apply turns a decided record into changes of the catalogue and remembers lsn as applied. It is deterministic: the same
// record on the same state gives the same bytes. Applying a record that is applied already (lsn not above ReadApplied)
// is refused with monotone-lsn. An error leaves v half changed: the caller discards it.
func Apply(v View, lsn LSN, r Record) (*Effects, error) {
	effects, err := apply(v, lsn, r)
	if err != nil {
		return nil, err
	}
	return effects, checkAfterApply(v)
}

func apply(v View, lsn LSN, r Record) (*Effects, error) {
	applied, err := ReadApplied(v)
	if err != nil {
		return nil, err
	}
	if lsn <= applied {
		return nil, refuse(MonotoneLSN, ErrConflict, "LSN %d after LSN %d", lsn, applied)
	}
	a := &applier{v: v, lsn: lsn, pages: map[Key]*pageChange{}, segments: map[uint64]*SegmentUse{}}
	if a.accounts, err = ReadAccounts(v); err != nil {
		return nil, err
	}
	switch r := r.(type) {
	case *Publish:
		err = a.publish(r)
	case *Supersede:
		err = a.supersede(r.By, r.Generations)
	case *Retire:
		err = a.retire(r.Generations, r.Reason, Generation{})
		if err == nil && r.Delete {
			err = a.delete(r.Generations)
		}
	case *Delete:
		err = a.delete(r.Generations)
	case *Persist:
		err = a.persist(r)
	case *Mark:
		err = a.mark(r)
	default:
		err = fmt.Errorf("record of type %T: %w", r, ErrUnsupported)
	}
	if err == nil {
		err = a.flush()
	}
	if err != nil {
		return nil, fmt.Errorf("apply LSN %d: %w", lsn, err)
	}
	return &a.effects, nil
}

// applier carries one record into the view. Page, segment and account entries are changed in memory and written once.
type applier struct {
	v        View
	lsn      LSN
	accounts Accounts
	pages    map[Key]*pageChange
	segments map[uint64]*SegmentUse
	follow   map[Key][]Key // pages of a persist record by the page before them
	effects  Effects
}

func (a *applier) segment(n uint64) (*SegmentUse, error) {
	if s := a.segments[n]; s != nil {
		return s, nil
	}
	s := new(SegmentUse)
	if _, err := load(a.v, segmentKey(n), s); err != nil {
		return nil, err
	}
	a.segments[n] = s
	return s, nil
}

func (a *applier) flush() error {
	for _, key := range slices.SortedFunc(maps.Keys(a.pages), func(a, b Key) int { return bytes.Compare(a[:], b[:]) }) {
		p := a.pages[key]
		k := key1(tagPage, key)
		if p.gone {
			if err := a.v.Delete(k); err != nil {
				return err
			}
			continue
		}
		if err := a.v.Set(k, p.marshal()); err != nil {
			return err
		}
		switch cool := p.Current == 0; {
		case cool == p.cool:
		case cool:
			a.effects.Cooled = append(a.effects.Cooled, key)
		default:
			a.effects.Warmed = append(a.effects.Warmed, key)
		}
	}
	for n, s := range a.segments {
		if s.LivePages == 0 {
			if err := a.v.Delete(segmentKey(n)); err != nil {
				return err
			}
		} else if err := a.v.Set(segmentKey(n), s.marshal()); err != nil {
			return err
		}
	}
	for _, f := range a.accounts.fields() {
		if *f < 0 {
			return refuse(ExactAccounting, ErrCorrupt, "a total fell below zero: %+v", a.accounts)
		}
	}
	if err := a.v.Set([]byte{tagAccounts}, a.accounts.marshal()); err != nil {
		return err
	}
	return writeApplied(a.v, a.lsn)
}

// holds calls fn for every page that the manifest names itself.
func (m *Manifest) holds(fn func(g *GroupPages, key Key) error) error {
	for i := range m.Groups {
		g := &m.Groups[i]
		keys := g.Keys
		if g.Chained {
			keys = []Key{g.Head}
		}
		for _, key := range keys {
			if err := fn(g, key); err != nil {
				return err
			}
		}
	}
	return nil
}

// fits tells whether a page is what the manifest says of the pages of a group that it names.
func (m *Manifest) fits(g *GroupPages, p *PageEntry) bool {
	depth := int64(0)
	if g.Chained {
		depth = g.Count - 1
	}
	return p.Depth == depth && p.Bytes == g.PageBytes && p.Ranks == int64(m.Ranks)
}

func (a *applier) publish(r *Publish) error {
	m := &r.Manifest
	g := m.Generation()
	var before State
	relisted, err := load(a.v, key1(tagState, g), &before)
	if err != nil {
		return err
	}
	if relisted && before.Status != Retired {
		return fmt.Errorf("generation %s is %v already: %w", Key(g).Short(), before.Status, ErrCorrupt)
	}
	if err := a.enterNamespace(m.Namespace, r.Encoding); err != nil {
		return err
	}
	waiting, err := a.holdPages(r, g, !relisted)
	if err != nil {
		return err
	}
	if err := a.enterSpine(r); err != nil {
		return err
	}
	// A relisted manifest is written again: who published it, and why, is that of the last publication.
	if err := a.v.Set(key1(tagManifest, g), EncodeManifest(m)); err != nil {
		return err
	}
	if waiting > 0 {
		a.accounts.Undurable++
		if err := a.v.Set(key1(tagWaiting, g), binary.AppendUvarint(nil, waiting)); err != nil {
			return err
		}
	}
	if relisted {
		a.accounts.Retired--
	}
	a.accounts.Listed++
	a.effects.Listed = append(a.effects.Listed, g)
	if err := a.writeState(g, &State{Status: Listed, Durable: waiting == 0, Published: a.lsn, Used: a.lsn}); err != nil {
		return err
	}
	if m.Request != "" {
		if err := a.v.Set(requestKey(m, g), nil); err != nil {
			return err
		}
	}
	if err := a.continued(m.Continues); err != nil {
		return err
	}
	// What the one that is replaced had superseded, and the new one supersedes, stays superseded meanwhile: its time of grace does not
	// begin anew.
	if err := a.supersede(g, r.Supersedes); err != nil {
		return err
	}
	// The new checkpoint holds its pages by now, so that what it shares with the one it replaces stays.
	if err := a.retire(r.Replaced, ReasonReplaced, g); err != nil {
		return err
	}
	if err := a.delete(r.Replaced); err != nil {
		return err
	}
	if listed, err := readPrefix(a.v, m.Prefix); err != nil || !listed.IsZero() {
		return cmp.Or(err, fmt.Errorf("generation %s is listed for the prefix and not replaced: %w", Key(listed).Short(), ErrCorrupt))
	}
	return a.v.Set(key1(tagPrefix, m.Prefix), g[:])
}

// enterNamespace remembers the encoding of a namespace, which comes with the first publication in it and no other.
func (a *applier) enterNamespace(ns Key, encoding []byte) error {
	known, err := a.v.Get(key1(tagNamespace, ns))
	if err != nil {
		return err
	}
	if (known == nil) == (len(encoding) == 0) {
		return fmt.Errorf("namespace %s: encoding of %d bytes, known before: %v: %w", ns.Short(), len(encoding), known != nil, ErrCorrupt)
	}
	if known != nil {
		return nil
	}
	a.accounts.Namespaces++
	return a.v.Set(key1(tagNamespace, ns), encoding)
}

func (a *applier) writeState(g Generation, s *State) error {
	if s.Status == Listed {
		if err := a.v.Set(orderKey(g, s), nil); err != nil {
			return err
		}
		if s.Grace {
			if err := a.v.Set(key1(tagGrace, g), nil); err != nil {
				return err
			}
		}
	}
	return a.v.Set(key1(tagState, g), s.marshal())
}

// unplaceState takes a listed checkpoint out of the order of eviction, before its state changes.
func (a *applier) unplaceState(g Generation, s *State) error {
	if s.Grace {
		if err := a.v.Delete(key1(tagGrace, g)); err != nil {
			return err
		}
	}
	return a.v.Delete(orderKey(g, s))
}

// changeState rewrites the state of a listed checkpoint, and counts its pages anew if it goes first now and did not before, or
// the other way round.
func (a *applier) changeState(g Generation, change func(s *State) error) error {
	var s State
	if err := mustLoad(a.v, key1(tagState, g), &s); err != nil {
		return err
	}
	if s.Status != Listed {
		return refuse(SupersedeIsAPreference, ErrCorrupt, "generation %s is %v", Key(g).Short(), s.Status)
	}
	if err := a.unplaceState(g, &s); err != nil {
		return err
	}
	first := s.GoesFirst()
	if err := change(&s); err != nil {
		return err
	}
	if s.GoesFirst() != first {
		m, err := a.manifest(g)
		if err != nil {
			return err
		}
		delta := int64(1)
		if s.GoesFirst() {
			delta = -1
		}
		if err := m.holds(func(_ *GroupPages, key Key) error { return a.count(key, currentCount, delta) }); err != nil {
			return err
		}
	}
	return a.writeState(g, &s)
}

// continued remembers that a publication went on from a checkpoint.
func (a *applier) continued(g Generation) error {
	if g.IsZero() {
		return nil
	}
	return a.changeState(g, func(s *State) error {
		s.Continued = true
		return nil
	})
}

func (a *applier) mark(r *Mark) error {
	for _, g := range r.Generations {
		err := a.changeState(g, func(s *State) error {
			switch r.Mark {
			case MarkUsed:
				s.Used = a.lsn
			case MarkEndGrace:
				s.Grace = false
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (a *applier) manifest(g Generation) (*Manifest, error) {
	m, err := ReadManifest(a.v, g)
	if err == nil && m == nil {
		err = fmt.Errorf("manifest of generation %s is missing: %w", Key(g).Short(), ErrCorrupt)
	}
	return m, err
}

func (a *applier) retire(gens []Generation, reason Reason, by Generation) error {
	for _, g := range gens {
		var s State
		if err := mustLoad(a.v, key1(tagState, g), &s); err != nil {
			return err
		}
		if s.Status != Listed {
			return fmt.Errorf("generation %s is retired twice: %w", Key(g).Short(), ErrCorrupt)
		}
		m, err := a.manifest(g)
		if err != nil {
			return err
		}
		if err := a.unplaceState(g, &s); err != nil {
			return err
		}
		if err := a.releaseSuperseded(g, &s); err != nil {
			return err
		}
		if err := a.v.Delete(key1(tagPrefix, m.Prefix)); err != nil {
			return err
		}
		if !s.Durable {
			a.accounts.Undurable--
			if err := a.v.Delete(key1(tagWaiting, g)); err != nil {
				return err
			}
		}
		err = m.holds(func(_ *GroupPages, key Key) error {
			if !s.GoesFirst() {
				if err := a.count(key, currentCount, -1); err != nil {
					return err
				}
			}
			return a.count(key, listedCount, -1)
		})
		if err != nil {
			return err
		}
		if m.Request != "" {
			if err := a.v.Delete(requestKey(m, g)); err != nil {
				return err
			}
		}
		if err := a.leaveSpine(m); err != nil {
			return err
		}
		if err := a.writeState(g, &State{Status: Retired, Durable: s.Durable, Published: s.Published, Used: s.Used}); err != nil {
			return err
		}
		a.accounts.Listed--
		a.accounts.Retired++
		a.effects.Retired = append(a.effects.Retired, g)
		last := Farewell{
			Generation: g, Namespace: m.Namespace, Prefix: m.Prefix, Offset: m.Offset, Bytes: m.Bytes(), CheckpointKind: m.Kind, Request: m.Request, Previous: m.Previous,
			Published: s.Published, Durable: s.Durable, Reason: reason, By: by,
		}
		if by.IsZero() {
			last.By = s.SupersededBy
		}
		a.effects.Farewell = append(a.effects.Farewell, last)
	}
	return nil
}

// releaseSuperseded takes a generation that is being retired out of the supersede relation. What it had superseded is
// superseded by its own superseding generation from now on, or current again if it has none.
func (a *applier) releaseSuperseded(g Generation, s *State) error {
	heir := s.SupersededBy
	if !heir.IsZero() {
		a.accounts.Superseded--
		if err := a.v.Delete(key2(tagSupersede, heir, g)); err != nil {
			return err
		}
	}
	left, err := edges[Generation](a.v, key1(tagSupersede, g))
	if err != nil {
		return err
	}
	return a.supersede(heir, left)
}

// supersede points generations at the one that superseded them, or makes them current with a zero by.
func (a *applier) supersede(by Generation, gens []Generation) error {
	var newer State
	if !by.IsZero() && len(gens) > 0 {
		if err := mustLoad(a.v, key1(tagState, by), &newer); err != nil {
			return err
		}
	}
	for _, g := range gens {
		err := a.changeState(g, func(s *State) error {
			if !by.IsZero() && (newer.Status != Listed || newer.Published <= s.Published) {
				return refuse(NoDanglingSupersede, ErrCorrupt, "generation %s (LSN %d) cannot be superseded by %s, which is %v (LSN %d)",
					Key(g).Short(), s.Published, Key(by).Short(), newer.Status, newer.Published)
			}
			before := s.Superseded()
			if before {
				a.accounts.Superseded--
				if err := a.v.Delete(key2(tagSupersede, s.SupersededBy, g)); err != nil {
					return err
				}
			}
			if s.SupersededBy = by; !s.Superseded() {
				s.Grace = false
				return nil
			}
			a.accounts.Superseded++
			if !before && s.Continued {
				s.Grace = true
				a.effects.Graced = append(a.effects.Graced, g)
			}
			return a.v.Set(key2(tagSupersede, by, g), nil)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (a *applier) delete(gens []Generation) error {
	for _, g := range gens {
		var s State
		if err := mustLoad(a.v, key1(tagState, g), &s); err != nil {
			return err
		}
		if s.Status != Retired {
			return refuse(RetireBeforeDelete, ErrCorrupt, "generation %s is %v", Key(g).Short(), s.Status)
		}
		m, err := a.manifest(g)
		if err != nil {
			return err
		}
		if err := a.v.Delete(key1(tagManifest, g)); err != nil {
			return err
		}
		if err := a.v.Delete(key1(tagState, g)); err != nil {
			return err
		}
		a.accounts.Retired--
		a.effects.Deleted = append(a.effects.Deleted, g)
		err = m.holds(func(_ *GroupPages, key Key) error {
			if err := a.v.Delete(key2(tagHold, key, g)); err != nil {
				return err
			}
			return a.release(key)
		})
		if err != nil {
			return err
		}
	}
	return nil
}
