package recovery

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/holdfast-db/holdfast/txn"
)

// Evidence is what is left of a catalogue whose index or log is damaged. It is collected from three witnesses, none of which
// has to be whole:
//
//	index     manifests, states, namespaces, spine nodes and pages, but for what lies in blocks that cannot be read
//	log       records, but for those that cannot be read; newer than what the index has applied
//	segments  which page, after which other, of which rank, lies where
//
// Then Judge keeps the checkpoints that can be proven whole: the manifest is known and nothing says that it was retired, its
// blocks of tokens lead back to the first, and a copy of every page of every rank was read and its checksum held. Rebuild
// enters those into an empty catalogue as publications of their own.
//
// What it cannot do: manifests are in the index and the log and nowhere else, so a checkpoint whose manifest is in neither is
// gone, though its pages are there, and not even its name is known. A checkpoint that was retired by a record that is lost
// may come back; whole, since all of its pages were read.
//
// All of it is in memory, in proportion to manifests and pages: it is an offline tool's.
type Evidence struct {
	applied     txn.LSN
	last        txn.LSN
	namespaces  map[txn.Key][]byte
	checkpoints map[txn.Generation]*testimony
	orphaned    map[txn.Generation]bool // states without a manifest
	spines      map[txn.Key]txn.SpineNode
	pages       map[txn.Key]*pageFacts
}

// testimony is what is known of one checkpoint.
type testimony struct {
	manifest     *txn.Manifest
	published    txn.LSN
	used         txn.LSN
	supersededBy txn.Generation
	listed       bool
}

// pageFacts is what is known of one page.
type pageFacts struct {
	parent txn.Key
	bytes  int64
	copies map[int][]txn.Placement // by rank, newest last
	chosen []txn.Placement         // one for every rank, once all were read; nil if that failed
	tried  bool
}

// NewEvidence begins a collection.
func NewEvidence() *Evidence {
	return &Evidence{
		namespaces: map[txn.Key][]byte{}, checkpoints: map[txn.Generation]*testimony{}, orphaned: map[txn.Generation]bool{},
		spines: map[txn.Key]txn.SpineNode{}, pages: map[txn.Key]*pageFacts{},
	}
}

func (e *Evidence) page(key, parent txn.Key, size int64) *pageFacts {
	p := e.pages[key]
	if p == nil {
		p = &pageFacts{parent: parent, bytes: size, copies: map[int][]txn.Placement{}}
		e.pages[key] = p
	}
	return p
}

func (p *pageFacts) add(rank int, at txn.Placement) {
	if !slices.Contains(p.copies[rank], at) {
		p.copies[rank] = append(p.copies[rank], at)
	}
}

// AddIndex takes what the index holds. The reader may leave out what it cannot read.
func (e *Evidence) AddIndex(v txn.Reader) (err error) {
	if e.applied, err = txn.ReadApplied(v); err != nil {
		e.applied = 0 // the log has to tell
	}
	e.last = max(e.last, e.applied)
	if err := txn.Namespaces(v, func(ns txn.Key, encoding []byte) (bool, error) {
		e.namespaces[ns] = encoding
		return true, nil
	}); err != nil {
		return err
	}
	if err := txn.Manifests(v, func(g txn.Generation, m *txn.Manifest, damage error) (bool, error) {
		if damage == nil {
			e.checkpoints[g] = &testimony{manifest: m}
		}
		return true, nil
	}); err != nil {
		return err
	}
	if err := txn.States(v, func(g txn.Generation, s *txn.State) (bool, error) {
		e.last = max(e.last, s.Used)
		t := e.checkpoints[g]
		if t == nil {
			if s.Status == txn.Listed {
				e.orphaned[g] = true
			}
			return true, nil
		}
		t.listed, t.published, t.used, t.supersededBy = s.Status == txn.Listed, s.Published, s.Used, s.SupersededBy
		if s.Status == txn.Retired {
			delete(e.checkpoints, g)
		}
		return true, nil
	}); err != nil {
		return err
	}
	if err := txn.Spines(v, func(key txn.Key, n txn.SpineNode) (bool, error) {
		e.spines[key] = n
		return true, nil
	}); err != nil {
		return err
	}
	return txn.Pages(v, func(key txn.Key, entry *txn.PageEntry) (bool, error) {
		p := e.page(key, entry.Parent, entry.Bytes)
		for rank, at := range entry.Place {
			p.add(rank, at)
		}
		return true, nil
	})
}

// AddRecord takes a record of the log; they come in order. whole says that the index could be read whole, so that it knows
// better about what it has applied.
func (e *Evidence) AddRecord(lsn txn.LSN, r txn.Record, whole bool) {
	e.last = max(e.last, lsn)
	if whole && lsn <= e.applied {
		return
	}
	switch r := r.(type) {
	case *txn.Publish:
		e.addPublish(lsn, r)
	case *txn.Persist:
		for i := range r.Pages {
			if p := e.pages[r.Pages[i].Key]; p != nil {
				for rank, at := range r.Pages[i].Place {
					p.add(rank, at)
				}
			}
		}
	case *txn.Supersede:
		for _, g := range r.Generations {
			if t := e.checkpoints[g]; t != nil {
				t.supersededBy = r.By
			}
		}
	case *txn.Mark:
		for _, g := range r.Generations {
			if t := e.checkpoints[g]; t != nil && r.Mark == txn.MarkUsed {
				t.used = max(t.used, lsn)
			}
		}
	case *txn.Retire:
		e.forget(r.Generations)
	case *txn.Delete:
		e.forget(r.Generations)
	}
}

func (e *Evidence) forget(gens []txn.Generation) {
	for _, g := range gens {
		delete(e.checkpoints, g)
		delete(e.orphaned, g)
	}
}

func (e *Evidence) addPublish(lsn txn.LSN, r *txn.Publish) {
	m := r.Manifest
	if len(r.Encoding) > 0 {
		e.namespaces[m.Namespace] = r.Encoding
	}
	parent, at := r.SpineRoot, m.SpineIndex()-int64(len(r.Spine))
	for _, key := range r.Spine {
		at++
		e.spines[key] = txn.SpineNode{Parent: parent, Index: at}
		parent = key
	}
	for i := range r.Pages {
		n := &r.Pages[i]
		p := e.page(n.Key, n.Parent, n.Bytes)
		for rank, place := range n.Place {
			p.add(rank, place)
		}
	}
	e.forget(r.Replaced)
	g := m.Generation()
	delete(e.orphaned, g)
	e.checkpoints[g] = &testimony{manifest: &m, published: lsn, used: lsn, listed: true}
	for _, old := range r.Supersedes {
		if t := e.checkpoints[old]; t != nil {
			t.supersededBy = g
		}
	}
}

// AddCopy takes what a segment file says lies in it.
func (e *Evidence) AddCopy(key, parent txn.Key, rank int, size int64, at txn.Placement) {
	e.page(key, parent, size).add(rank, at)
}

// LostCheckpoint is one that is known to have been listed and cannot be proven whole.
type LostCheckpoint struct {
	Generation txn.Generation
	Offset     int64 // tokens; 0 if the manifest is lost
	Reason     string
}

// Verdict is what Judge found.
type Verdict struct {
	Kept   []txn.Generation // in the order in which they were published
	Lost   []LostCheckpoint
	Pages  int64   // distinct ones that the kept checkpoints need
	Unused int64   // pages known from any witness that no kept checkpoint needs
	Last   txn.LSN // the highest LSN that any witness names

	evidence *Evidence
	needed   map[txn.Key]bool
	kept     map[txn.Generation]bool
}

// Judge decides what can be kept. readable reads a page's copy of one rank and tells whether its checksum held.
func (e *Evidence) Judge(readable func(key txn.Key, rank int, size int64, at txn.Placement) (bool, error)) (*Verdict, error) {
	v := &Verdict{Last: e.last, evidence: e, needed: map[txn.Key]bool{}, kept: map[txn.Generation]bool{}}
	order := slices.SortedFunc(maps.Keys(e.checkpoints), func(a, b txn.Generation) int {
		return cmp.Or(cmp.Compare(e.checkpoints[a].published, e.checkpoints[b].published), bytes.Compare(a[:], b[:]))
	})
	for _, g := range order {
		t := e.checkpoints[g]
		pages, reason, err := e.try(t, readable)
		if err != nil {
			return nil, err
		}
		if reason != "" {
			v.Lost = append(v.Lost, LostCheckpoint{Generation: g, Offset: t.manifest.Offset, Reason: reason})
			continue
		}
		v.Kept = append(v.Kept, g)
		v.kept[g] = true
		for _, key := range pages {
			v.needed[key] = true
		}
	}
	for _, g := range slices.SortedFunc(maps.Keys(e.orphaned), func(a, b txn.Generation) int { return bytes.Compare(a[:], b[:]) }) {
		v.Lost = append(v.Lost, LostCheckpoint{Generation: g, Reason: "its manifest cannot be read"})
	}
	v.Pages = int64(len(v.needed))
	for key := range e.pages {
		if !v.needed[key] {
			v.Unused++
		}
	}
	return v, nil
}

// try gives the pages of a checkpoint, or why it cannot be kept.
func (e *Evidence) try(t *testimony, readable func(txn.Key, int, int64, txn.Placement) (bool, error)) (pages []txn.Key, reason string, err error) {
	m := t.manifest
	if !t.listed {
		return nil, "whether it was listed or retired cannot be read", nil
	}
	if e.namespaces[m.Namespace] == nil {
		return nil, "the description of its namespace cannot be read", nil
	}
	if _, ok := e.blocks(m); !ok {
		return nil, "the way to it through its tokens cannot be read", nil
	}
	for i := range m.Groups {
		g := &m.Groups[i]
		keys := g.Keys
		if g.Chained {
			var ok bool
			if keys, ok = e.chain(g.Head, g.Count); !ok {
				return nil, fmt.Sprintf("group %d: the pages before page %s are not known", i, g.Head.Short()), nil
			}
		}
		for _, key := range keys {
			p := e.pages[key]
			if p == nil || p.bytes != g.PageBytes {
				return nil, fmt.Sprintf("group %d: page %s is not known", i, key.Short()), nil
			}
			if err := p.choose(key, m.Ranks, readable); err != nil {
				return nil, "", err
			}
			if len(p.chosen) != m.Ranks {
				return nil, fmt.Sprintf("group %d: page %s has no readable copy on every rank", i, key.Short()), nil
			}
		}
		pages = append(pages, keys...)
	}
	return pages, "", nil
}

// choose reads copies until every rank has one.
func (p *pageFacts) choose(key txn.Key, ranks int, readable func(txn.Key, int, int64, txn.Placement) (bool, error)) error {
	if p.tried {
		return nil
	}
	p.tried = true
	for rank := range ranks {
		copies := p.copies[rank]
		for i := len(copies) - 1; i >= 0 && len(p.chosen) == rank; i-- {
			ok, err := readable(key, rank, p.bytes, copies[i])
			if err != nil {
				return err
			}
			if ok {
				p.chosen = append(p.chosen, copies[i])
			}
		}
		if len(p.chosen) == rank {
			p.chosen = nil
			return nil
		}
	}
	return nil
}

// blocks gives the spine of a checkpoint from its first block on.
func (e *Evidence) blocks(m *txn.Manifest) (keys []txn.Key, ok bool) {
	key := m.Spine
	for i := m.SpineIndex(); i >= 0; i-- {
		n, known := e.spines[key]
		if !known || n.Index != i || (i == 0) != n.Parent.IsZero() {
			return nil, false
		}
		keys = append(keys, key)
		key = n.Parent
	}
	slices.Reverse(keys)
	return keys, true
}

// chain gives the pages of a chained group from the first on.
func (e *Evidence) chain(head txn.Key, count int64) (keys []txn.Key, ok bool) {
	key := head
	for i := count - 1; i >= 0; i-- {
		p := e.pages[key]
		if p == nil || (i == 0) != p.parent.IsZero() {
			return nil, false
		}
		keys = append(keys, key)
		key = p.parent
	}
	slices.Reverse(keys)
	return keys, true
}

// Rebuild enters the kept checkpoints into an empty catalogue, with LSNs above every one that was ever seen, and gives the
// next one. Order of publication, supersession and last use are as they were.
func (v *Verdict) Rebuild(c Catalogue) (next txn.LSN, err error) {
	e := v.evidence
	next = v.Last + 1
	commit := func(decide func(r txn.Reader) (txn.Record, error)) error {
		return c.Update(func(view txn.View) error {
			r, err := decide(view)
			if err != nil || r == nil {
				return err
			}
			if _, err = txn.Apply(view, next, r); err == nil {
				next++
			}
			return err
		})
	}
	for _, g := range v.Kept {
		m := *e.checkpoints[g].manifest
		blocks, _ := e.blocks(&m)
		chains := map[int][]txn.Key{}
		for i := range m.Groups {
			if m.Groups[i].Chained {
				chains[i], _ = e.chain(m.Groups[i].Head, m.Groups[i].Count)
			}
		}
		err := commit(func(r txn.Reader) (txn.Record, error) {
			rec, err := txn.DecidePublish(r, &txn.PublishIntent{
				Manifest: &m, Committed: m.Ranks, Encoding: e.namespaces[m.Namespace], Durable: true,
				SpineKey: func(index int64) txn.Key { return blocks[index] },
				ChainKey: func(group int, position int64) txn.Key { return chains[group][position] },
				Have: func(key txn.Key) ([]txn.Placement, bool) {
					p := e.pages[key]
					return p.chosen, len(p.chosen) > 0
				},
			})
			if rec == nil || err != nil {
				return nil, err
			}
			// How it came to be is not decided again: it is what it was.
			for _, old := range rec.Replaced { // both were thought listed, because the record between them is lost
				delete(v.kept, old)
			}
			rec.Manifest.Continues, rec.Manifest.Previous = v.ifKept(m.Continues), v.ifKept(m.Previous)
			return rec, nil
		})
		if err != nil {
			return 0, fmt.Errorf("recovery: rebuilding generation %s: %w", g, err)
		}
	}
	v.Kept = slices.DeleteFunc(v.Kept, func(g txn.Generation) bool { return !v.kept[g] })
	bySupersession := map[txn.Generation][]txn.Generation{}
	for _, g := range v.Kept {
		if by := v.ifKept(e.checkpoints[g].supersededBy); !by.IsZero() {
			bySupersession[by] = append(bySupersession[by], g)
		}
	}
	for _, by := range v.Kept {
		if old := bySupersession[by]; len(old) > 0 {
			if err := commit(func(r txn.Reader) (txn.Record, error) {
				rec, err := txn.DecideSupersede(r, by, old)
				if rec == nil || err != nil {
					return nil, err
				}
				return rec, nil
			}); err != nil {
				return 0, fmt.Errorf("recovery: rebuilding the order of eviction: %w", err)
			}
		}
	}
	used := slices.SortedFunc(slices.Values(v.Kept), func(a, b txn.Generation) int {
		return cmp.Compare(e.checkpoints[a].used, e.checkpoints[b].used)
	})
	for _, g := range used {
		if t := e.checkpoints[g]; t.used <= t.published {
			continue
		}
		if err := commit(func(r txn.Reader) (txn.Record, error) {
			rec, err := txn.DecideMark(r, txn.MarkUsed, []txn.Generation{g})
			if rec == nil || err != nil {
				return nil, err
			}
			return rec, nil
		}); err != nil {
			return 0, fmt.Errorf("recovery: rebuilding the order of eviction: %w", err)
		}
	}
	return next, nil
}

// ifKept gives a generation that other checkpoints name, or zero if it is not kept itself.
func (v *Verdict) ifKept(g txn.Generation) txn.Generation {
	if v.kept[g] {
		return g
	}
	return txn.Generation{}
}
