package txn

import (
	"fmt"
	"slices"

	"github.com/holdfast-db/holdfast/txn/mutant"
)

// RecordBytesMax bounds the encoded size of one record.
const RecordBytesMax = 32 << 20

// PublishIntent is what a complete publication asks for. The functions answer from memory and have no side effects.
type PublishIntent struct {
	Manifest  *Manifest
	Committed int    // distinct ranks that have committed
	Encoding  []byte // canonical encoding of the namespace
	Durable   bool   // to be listed only with a complete disk copy

	// SpineKey gives the spine digest after index whole blocks, 0…Manifest.SpineIndex().
	SpineKey func(index int64) Key
	// ChainKey gives the key of a page of a chained group, 0…Count−1.
	ChainKey func(group int, position int64) Key
	// SpineNear and ChainNear are guesses at how many blocks, and how many pages of each group, the catalogue knows; 0 and nil if
	// there are none. They decide nothing: guesses that are right save most of the search.
	SpineNear int64
	ChainNear []int64
	// Have reports whether the publication holds the bytes of a page for all ranks, and their synced disk copies if there
	// are any. It is asked about pages that the catalogue does not know. What the catalogue knows is there: nobody lets go of
	// the bytes of a page before the record is durable that drops it.
	Have func(key Key) (place []Placement, ok bool)

	// Supersedes names listed checkpoints that the new one supersedes.
	Supersedes []Generation
	// PrefixKey gives the digest of the exact first tokens, 1…Offset. If it is set, the supersession policy is asked for more,
	// and decides what the manifest says of its lineage (Continues, Previous); otherwise that is left empty.
	PrefixKey func(tokens int64) Key
}

// DecidePublish checks a publication against the catalogue and gives the record that lists it: what the catalogue does
// not know yet, and nothing else. It reads as many entries as it writes. A nil record means that this very generation is
// listed already and that nothing is to be done; whether it is durable by now is in its State.
func DecidePublish(v Reader, in *PublishIntent) (*Publish, error) {
	m := in.Manifest
	if err := validateManifest(m); err != nil {
		return nil, err
	}
	if in.Committed != m.Ranks {
		return nil, refuse(AllRanks, ErrInvalid, "%d of %d ranks committed", in.Committed, m.Ranks)
	}
	g := m.Generation()
	state, err := ReadState(v, g)
	if err != nil {
		return nil, err
	}
	if state != nil && state.Status == Listed {
		return nil, nil
	}
	r := &Publish{Manifest: *m}
	known, err := v.Get(key1(tagNamespace, m.Namespace))
	if err != nil {
		return nil, err
	}
	if known == nil {
		if len(in.Encoding) == 0 {
			return nil, fmt.Errorf("manifest: first one of namespace %s, whose encoding is missing: %w", m.Namespace.Short(), ErrInvalid)
		}
		r.Encoding = in.Encoding
	}
	durable, err := r.decidePages(v, in)
	if err != nil {
		return nil, err
	}
	if in.Durable && !durable {
		return nil, refuse(PayloadBeforeRecord, ErrConflict, "generation %s is to be durable and has pages without a disk copy", Key(g).Short())
	}
	if err := r.decideSpine(v, in); err != nil {
		return nil, err
	}
	listed, err := readPrefix(v, m.Prefix)
	if err != nil {
		return nil, err
	}
	if !listed.IsZero() && !mutant.On("what is replaced stays listed") {
		r.Replaced = []Generation{listed}
	}
	var l lineage
	if in.PrefixKey != nil {
		if l, err = chooseSuperseded(v, in); err != nil {
			return nil, err
		}
	}
	r.Manifest.Continues, r.Manifest.Previous = l.continues, l.previous
	for _, old := range unique(slices.Concat(in.Supersedes, l.supersedes)) {
		if !listed.IsZero() && old == listed {
			continue
		}
		if err := checkSuperseded(v, old, g, m.Namespace); err != nil {
			return nil, err
		}
		r.Supersedes = append(r.Supersedes, old)
	}
	return r, nil
}

func validateManifest(m *Manifest) error {
	if m.Offset < 1 || m.Ranks < 1 || len(m.Groups) == 0 || m.Namespace.IsZero() || m.Prefix.IsZero() || m.Spine.IsZero() {
		return fmt.Errorf("manifest: offset %d, %d ranks, %d groups, namespace %s, prefix %s, spine %s: %w",
			m.Offset, m.Ranks, len(m.Groups), m.Namespace.Short(), m.Prefix.Short(), m.Spine.Short(), ErrInvalid)
	}
	if m.Ranks > RanksMax || m.Offset > intMax {
		return fmt.Errorf("manifest: %d ranks, offset %d; the limits are %d and %d: %w", m.Ranks, m.Offset, RanksMax, int64(intMax), ErrTooLarge)
	}
	seen := map[Key]bool{}
	for i := range m.Groups {
		g := &m.Groups[i]
		if g.Count < 1 || g.PageBytes < 1 {
			return refuse(CompleteAtPublish, ErrInvalid, "group %d: %d pages of %d bytes", i, g.Count, g.PageBytes)
		}
		if g.PageBytes > PageBytesMax {
			return fmt.Errorf("manifest: group %d: pages of %d bytes; the limit is %d: %w", i, g.PageBytes, PageBytesMax, ErrTooLarge)
		}
		if g.Chained {
			if len(g.Keys)+len(g.Positions) != 0 {
				return fmt.Errorf("manifest: chained group %d lists %d pages: %w", i, len(g.Keys), ErrInvalid)
			}
			if seen[g.Head] {
				return fmt.Errorf("manifest: group %d: page %s twice: %w", i, g.Head.Short(), ErrInvalid)
			}
			seen[g.Head] = true
			continue
		}
		if int64(len(g.Keys)) != g.Count || int64(len(g.Positions)) != g.Count {
			return refuse(CompleteAtPublish, ErrInvalid, "group %d: %d keys and %d positions for %d pages", i, len(g.Keys), len(g.Positions), g.Count)
		}
		for j, p := range g.Positions {
			if p < 0 || p > intMax || (j > 0 && p <= g.Positions[j-1]) {
				return fmt.Errorf("manifest: group %d: position %d is not above the one before: %w", i, p, ErrInvalid)
			}
			if seen[g.Keys[j]] {
				return fmt.Errorf("manifest: group %d: page %s twice: %w", i, g.Keys[j].Short(), ErrInvalid)
			}
			seen[g.Keys[j]] = true
		}
	}
	return nil
}

// decidePages finds the pages that the catalogue does not know. durable tells whether the whole checkpoint will have
// disk copies once the record is applied.
func (r *Publish) decidePages(v Reader, in *PublishIntent) (durable bool, err error) {
	durable = true
	added := map[Key]bool{}
	for i := range in.Manifest.Groups {
		g := &in.Manifest.Groups[i]
		if g.Chained {
			d, err := r.decideChain(v, in, i, added)
			if err != nil {
				return false, err
			}
			durable = durable && d
			continue
		}
		for j, key := range g.Keys {
			d, err := r.decidePage(v, in, pageOf{group: i, position: g.Positions[j], key: key}, added)
			if err != nil {
				return false, err
			}
			durable = durable && d
		}
	}
	return durable, nil
}

// decideChain decides the pages of a chained group. The catalogue knows them up to some page, because it knows no page
// without its parent, and the rest are new.
func (r *Publish) decideChain(v Reader, in *PublishIntent, group int, added map[Key]bool) (durable bool, err error) {
	g := &in.Manifest.Groups[group]
	key := func(depth int64) Key {
		if depth == g.Count-1 {
			return g.Head
		}
		return in.ChainKey(group, depth)
	}
	var entry *PageEntry // of the last known page
	near := int64(NoGuess)
	if group < len(in.ChainNear) {
		near = min(in.ChainNear[group], g.Count) - 1
	}
	known, err := Deepest(g.Count-1, near, func(depth int64) (bool, error) {
		e, err := ReadPage(v, key(depth))
		if e != nil {
			entry = e
		}
		return e != nil, err
	})
	if err != nil {
		return false, err
	}
	durable = true
	parent := Key{}
	if known > 0 {
		parent = key(known - 1)
	}
	for depth := max(known, 0); depth < g.Count; depth++ {
		page := pageOf{group: group, position: depth, depth: depth, key: key(depth), parent: parent}
		if depth > 0 && parent.IsZero() {
			return false, refuse(CompleteAtPublish, ErrInvalid, "group %d, page %d has no key", group, depth-1)
		}
		d := false
		if depth == known {
			d, err = entry.ChainDurable, in.Manifest.checkKnown(page, entry)
		} else {
			d, err = r.newPage(in, page, added)
		}
		if err != nil {
			return false, err
		}
		durable, parent = durable && d, page.key
	}
	return durable, nil
}

// pageOf is a page as a manifest sees it.
type pageOf struct {
	group       int
	position    int64
	depth       int64 // pages before it in its chain
	key, parent Key
}

// decidePage decides a page that is in no chain. durable tells whether it will have disk copies.
func (r *Publish) decidePage(v Reader, in *PublishIntent, page pageOf, added map[Key]bool) (durable bool, err error) {
	entry, err := ReadPage(v, page.key)
	if err != nil {
		return false, err
	}
	if entry != nil {
		return entry.ChainDurable, in.Manifest.checkKnown(page, entry)
	}
	return r.newPage(in, page, added)
}

// checkKnown refuses a page that the catalogue knows as another one than the manifest.
func (m *Manifest) checkKnown(page pageOf, entry *PageEntry) error {
	want := m.Groups[page.group].PageBytes
	if entry.Bytes != want || entry.Depth != page.depth {
		return refuse(CompleteAtPublish, ErrInvalid, "group %d, page %d has %d bytes and %d pages before it, the manifest says %d and %d",
			page.group, page.position, entry.Bytes, entry.Depth, want, page.depth)
	}
	if entry.Ranks != int64(m.Ranks) {
		return refuse(AllRanks, ErrInvalid, "group %d, page %d has copies of %d ranks, the manifest says %d", page.group, page.position, entry.Ranks, m.Ranks)
	}
	if entry.Parent != page.parent {
		return fmt.Errorf("group %d, page %d follows %s in the catalogue and %s in the manifest: %w", page.group, page.position, entry.Parent.Short(), page.parent.Short(), ErrInvalid)
	}
	return nil
}

// newPage adds a page that the catalogue does not know to the record.
func (r *Publish) newPage(in *PublishIntent, page pageOf, added map[Key]bool) (durable bool, err error) {
	if page.key.IsZero() {
		return false, refuse(CompleteAtPublish, ErrInvalid, "group %d, page %d has no key", page.group, page.position)
	}
	m := in.Manifest
	place, ok := in.Have(page.key)
	if !ok {
		return false, refuse(CompleteAtPublish, ErrConflict, "group %d, page %d (%s) is not there on all ranks", page.group, page.position, page.key.Short())
	}
	if added[page.key] {
		return false, fmt.Errorf("group %d, page %d (%s) is in the manifest twice: %w", page.group, page.position, page.key.Short(), ErrInvalid)
	}
	if len(place) != 0 {
		if err := validatePlacements(page.key, place, int64(m.Ranks)); err != nil {
			return false, err
		}
	}
	added[page.key] = true
	r.Pages = append(r.Pages, NewPage{Key: page.key, Parent: page.parent, Bytes: m.Groups[page.group].PageBytes, Place: place})
	return len(place) != 0, nil
}

// validatePlacements refuses disk copies that are not one for every rank, and those that no record can hold.
func validatePlacements(key Key, places []Placement, ranks int64) error {
	if int64(len(places)) != ranks {
		return refuse(AllRanks, ErrInvalid, "page %s has disk copies of %d of %d ranks", key.Short(), len(places), ranks)
	}
	for i := range places {
		if p := &places[i]; !p.valid() {
			return fmt.Errorf("page %s, rank %d: disk copy %+v: %w", key.Short(), i, *p, ErrInvalid)
		}
	}
	return nil
}

// decideSpine finds the blocks that the catalogue does not know, from the one in which the checkpoint ends back to the
// first known one.
func (r *Publish) decideSpine(v Reader, in *PublishIntent) error {
	last := in.Manifest.SpineIndex()
	known, err := Deepest(last, guess(in.SpineNear, last), func(i int64) (bool, error) {
		var node spineEntry
		ok, err := load(v, key1(tagSpine, in.spineKey(i)), &node)
		if ok && node.index != i {
			err = fmt.Errorf("manifest: spine key %s is that of block %d in the catalogue and of block %d here: %w", in.spineKey(i).Short(), node.index, i, ErrInvalid)
		}
		return ok, err
	})
	if err != nil {
		return err
	}
	for i := known + 1; i <= last; i++ {
		r.Spine = append(r.Spine, in.spineKey(i))
	}
	if len(r.Spine) > 0 && known >= 0 {
		r.SpineRoot = in.spineKey(known)
	}
	return nil
}

// checkSuperseded refuses what no-dangling-supersede forbids, for a superseding generation that is being published.
func checkSuperseded(v Reader, old, by Generation, ns Key) error {
	if old == by {
		return refuse(NoDanglingSupersede, ErrInvalid, "generation %s would supersede itself", Key(by).Short())
	}
	s, err := ReadState(v, old)
	if err != nil {
		return err
	}
	if s == nil || s.Status != Listed {
		return refuse(NoDanglingSupersede, ErrConflict, "generation %s is not listed", Key(old).Short())
	}
	m, err := ReadManifest(v, old)
	if err != nil {
		return err
	}
	if m == nil || m.Namespace != ns {
		return refuse(NoDanglingSupersede, ErrInvalid, "generation %s belongs to another namespace", Key(old).Short())
	}
	return nil
}

// DecideSupersede marks generations as superseded by a newer listed one of the same namespace. With a zero by it makes
// them current again. A nil record means that there is nothing to do.
func DecideSupersede(v Reader, by Generation, old []Generation) (*Supersede, error) {
	r := &Supersede{By: by}
	var ns Key
	var published LSN
	if !by.IsZero() {
		s, err := ReadState(v, by)
		if err != nil {
			return nil, err
		}
		m, err := ReadManifest(v, by)
		if err != nil {
			return nil, err
		}
		if s == nil || m == nil || s.Status != Listed {
			return nil, refuse(NoDanglingSupersede, ErrConflict, "superseding generation %s is not listed", Key(by).Short())
		}
		ns, published = m.Namespace, s.Published
	}
	for _, g := range unique(old) {
		s, err := ReadState(v, g)
		if err != nil {
			return nil, err
		}
		if s == nil || s.Status != Listed {
			return nil, refuse(NoDanglingSupersede, ErrConflict, "generation %s is not listed", Key(g).Short())
		}
		if s.SupersededBy == by {
			continue
		}
		if !by.IsZero() {
			if err := checkSuperseded(v, g, by, ns); err != nil {
				return nil, err
			}
			if s.Published >= published {
				return nil, refuse(NoDanglingSupersede, ErrInvalid, "generation %s (LSN %d) is not older than %s (LSN %d)", Key(g).Short(), s.Published, Key(by).Short(), published)
			}
		}
		r.Generations = append(r.Generations, g)
	}
	if len(r.Generations) == 0 {
		return nil, nil
	}
	return r, nil
}

// DecideMark moves listed checkpoints in the order of eviction. Those to which the mark does not apply are left out. A nil record
// means that there is nothing to do.
func DecideMark(v Reader, mark MarkKind, gens []Generation) (*Mark, error) {
	if mark != MarkUsed && mark != MarkEndGrace {
		return nil, fmt.Errorf("mark %d is none: %w", mark, ErrInvalid)
	}
	r := &Mark{Mark: mark}
	for _, g := range unique(gens) {
		s, err := ReadState(v, g)
		if err != nil {
			return nil, err
		}
		if s == nil || s.Status != Listed || (mark == MarkEndGrace && !s.Grace) {
			continue
		}
		r.Generations = append(r.Generations, g)
	}
	if len(r.Generations) == 0 {
		return nil, nil
	}
	return r, nil
}

// DecideRetire delists the generations that are listed. Unknown and retired ones are left out, unless strict is set: then
// they are ErrNotFound. With alsoDelete their pages are given up by the same record.
func DecideRetire(v Reader, gens []Generation, reason Reason, alsoDelete, strict bool) (*Retire, error) {
	if reason == 0 || int(reason) >= len(reasonNames) {
		return nil, fmt.Errorf("retire: %v: %w", reason, ErrInvalid)
	}
	r := &Retire{Reason: reason, Delete: alsoDelete}
	for _, g := range unique(gens) {
		s, err := ReadState(v, g)
		if err != nil {
			return nil, err
		}
		if s == nil || s.Status != Listed {
			if strict {
				return nil, fmt.Errorf("generation %s is not listed: %w", Key(g).Short(), ErrNotFound)
			}
			continue
		}
		r.Generations = append(r.Generations, g)
	}
	if len(r.Generations) == 0 {
		return nil, nil
	}
	return r, nil
}

// DecideDelete gives up the pages of retired generations.
func DecideDelete(v Reader, gens []Generation) (*Delete, error) {
	r := new(Delete)
	for _, g := range unique(gens) {
		s, err := ReadState(v, g)
		if err != nil {
			return nil, err
		}
		if s == nil {
			return nil, fmt.Errorf("generation %s: %w", Key(g).Short(), ErrNotFound)
		}
		if s.Status != Retired {
			return nil, refuse(RetireBeforeDelete, ErrConflict, "generation %s is %v", Key(g).Short(), s.Status)
		}
		r.Generations = append(r.Generations, g)
	}
	if len(r.Generations) == 0 {
		return nil, nil
	}
	return r, nil
}

// PersistIntent is one page that has been written and synced on all ranks. Moved says that it lies on disk already and
// that the new copy replaces the old one.
type PersistIntent struct {
	Key   Key
	Place []Placement
	Moved bool
}

// DecidePersist records disk copies. Pages that are gone, or that have a copy already, are left out and given back in
// unused: their new copies are nobody's and the caller frees them.
func DecidePersist(v Reader, pages []PersistIntent) (r *Persist, unused []PersistIntent, err error) {
	r = new(Persist)
	seen := make(map[Key]bool, len(pages))
	for _, in := range pages {
		p, err := ReadPage(v, in.Key)
		if err != nil {
			return nil, nil, err
		}
		if p == nil || seen[in.Key] || (len(p.Place) != 0) != in.Moved {
			unused = append(unused, in)
			continue
		}
		if err := validatePlacements(in.Key, in.Place, p.Ranks); err != nil {
			return nil, nil, err
		}
		seen[in.Key] = true
		r.Pages = append(r.Pages, PlacedPage{Key: in.Key, Place: in.Place})
	}
	if len(r.Pages) == 0 {
		return nil, unused, nil
	}
	return r, unused, nil
}

func unique(gens []Generation) []Generation {
	seen := make(map[Generation]bool, len(gens))
	out := make([]Generation, 0, len(gens))
	for _, g := range gens {
		if !seen[g] {
			seen[g] = true
			out = append(out, g)
		}
	}
	return out
}
