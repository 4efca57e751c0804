package txn

import (
	"bytes"
	"cmp"
	"slices"

	"github.com/stretchr/testify/require"
)

// model is the catalogue as one would first think of it: every checkpoint has its full list of pages, and every question is
// answered by going through all checkpoints. It keeps no counts, no edges and no spine.
type model struct {
	checkpoints  map[Generation]*modelCheckpoint // listed and retired
	placed       map[Key][]Placement             // disk copies of live pages
	ends         map[uint64]int64                // of the segments in use
	lastSegment  uint64
	namespaces   map[Key]bool
	lastListings LSN
}

type modelCheckpoint struct {
	sequence     *sequence
	manifest     *Manifest
	pages        []pageInfo
	status       Status
	published    LSN
	supersededBy Generation
}

func newModel() *model {
	return &model{checkpoints: map[Generation]*modelCheckpoint{}, placed: map[Key][]Placement{}, ends: map[uint64]int64{}, namespaces: map[Key]bool{}}
}

// generations gives what the model knows in an order that does not change between runs.
func (m *model) generations(want func(c *modelCheckpoint) bool) (gens []Generation) {
	for g, c := range m.checkpoints {
		if want(c) {
			gens = append(gens, g)
		}
	}
	slices.SortFunc(gens, func(a, b Generation) int { return bytes.Compare(a[:], b[:]) })
	return gens
}

func isListed(c *modelCheckpoint) bool { return c.status == Listed }

// live gives the pages of all checkpoints that want accepts.
func (m *model) live(want func(c *modelCheckpoint) bool) map[Key]pageInfo {
	pages := map[Key]pageInfo{}
	for _, c := range m.checkpoints {
		if want(c) {
			for _, p := range c.pages {
				pages[p.key] = p
			}
		}
	}
	return pages
}

func all(*modelCheckpoint) bool { return true }

// sorted gives the keys of live pages in an order that does not change between runs.
func sorted(pages map[Key]pageInfo) (keys []Key) {
	for k := range pages {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, func(a, b Key) int { return bytes.Compare(a[:], b[:]) })
	return keys
}

func (m *model) durable(c *modelCheckpoint) bool {
	return !slices.ContainsFunc(c.pages, func(p pageInfo) bool { return len(m.placed[p.key]) == 0 })
}

// listedFor gives the generation listed for exactly this prefix.
func (m *model) listedFor(prefix Key) (g Generation) {
	for other, c := range m.checkpoints {
		if isListed(c) && c.manifest.Prefix == prefix {
			return other
		}
	}
	return g
}

func (m *model) place(key Key, places []Placement) {
	if len(places) == 0 {
		return
	}
	m.placed[key] = places
	for _, p := range places {
		m.ends[p.Segment] = max(m.ends[p.Segment], p.Offset+p.Allocated())
		m.lastSegment = max(m.lastSegment, p.Segment)
	}
}

// publish lists a checkpoint. place has the disk copies of its new pages.
func (m *model) publish(lsn LSN, q *sequence, manifest *Manifest, place map[Key][]Placement, supersedes []Generation) *Effects {
	g := manifest.Generation()
	effects := &Effects{Listed: []Generation{g}}
	known := m.live(all)
	old := m.listedFor(manifest.Prefix)
	c := &modelCheckpoint{sequence: q, manifest: manifest, pages: q.pages(), status: Listed, published: lsn}
	m.checkpoints[g] = c
	m.namespaces[manifest.Namespace] = true
	for _, p := range c.pages {
		if _, ok := known[p.key]; !ok {
			m.place(p.key, place[p.key])
		}
	}
	if !old.IsZero() {
		gone := m.retire([]Generation{old}, true)
		effects.Retired, effects.Deleted, effects.Dropped = gone.Retired, gone.Deleted, gone.Dropped
	}
	for _, s := range supersedes {
		if s != old {
			m.checkpoints[s].supersededBy = g
		}
	}
	return effects
}

func (m *model) retire(gens []Generation, alsoDelete bool) *Effects {
	effects := &Effects{Retired: gens}
	for _, g := range gens {
		c := m.checkpoints[g]
		for _, other := range m.checkpoints {
			if other.supersededBy == g {
				other.supersededBy = c.supersededBy
			}
		}
		c.status, c.supersededBy = Retired, Generation{}
	}
	if alsoDelete {
		gone := m.delete(gens)
		effects.Deleted, effects.Dropped = gone.Deleted, gone.Dropped
	}
	return effects
}

func (m *model) delete(gens []Generation) *Effects {
	effects := &Effects{Deleted: gens}
	before := m.live(all)
	for _, g := range gens {
		delete(m.checkpoints, g)
	}
	after := m.live(all)
	for _, k := range sorted(before) {
		if _, ok := after[k]; !ok {
			p := before[k]
			effects.Dropped = append(effects.Dropped, DroppedPage{Key: k, Parent: p.parent, Bytes: p.bytes, Ranks: p.ranks, Place: m.placed[k]})
			delete(m.placed, k)
		}
	}
	m.forgetSegments()
	return effects
}

func (m *model) persist(pages []PersistIntent) *Effects {
	effects := &Effects{}
	waiting := m.generations(func(c *modelCheckpoint) bool { return isListed(c) && !m.durable(c) })
	for _, p := range pages {
		effects.Freed = append(effects.Freed, m.placed[p.Key]...)
		m.place(p.Key, p.Place)
	}
	for _, g := range waiting {
		if m.durable(m.checkpoints[g]) {
			effects.Durable = append(effects.Durable, g)
		}
	}
	m.forgetSegments()
	return effects
}

// forgetSegments drops what is known of segments without a live copy.
func (m *model) forgetSegments() {
	use := m.segments()
	for n := range m.ends {
		if use[n].LivePages == 0 {
			delete(m.ends, n)
		}
	}
}

func (m *model) segments() map[uint64]SegmentUse {
	use := map[uint64]SegmentUse{}
	for _, places := range m.placed {
		for _, p := range places {
			u := use[p.Segment]
			u.LiveBytes += p.Allocated()
			u.LivePages++
			u.End = m.ends[p.Segment]
			use[p.Segment] = u
		}
	}
	return use
}

func (m *model) accounts() (a Accounts) {
	for _, c := range m.checkpoints {
		if !isListed(c) {
			a.Retired++
			continue
		}
		a.Listed++
		if !c.supersededBy.IsZero() {
			a.Superseded++
		}
		if !m.durable(c) {
			a.Undurable++
		}
	}
	a.Namespaces = int64(len(m.namespaces))
	for k, p := range m.live(all) {
		a.Pages++
		a.PageBytes += p.bytes * p.ranks
		if len(m.placed[k]) != 0 {
			a.PlacedPages++
		}
		for _, place := range m.placed[k] {
			a.StoredBytes += place.Stored
			a.AllocatedBytes += place.Allocated()
		}
	}
	a.LastSegment = int64(m.lastSegment)
	return a
}

// order gives the listed checkpoints in the order of eviction.
func (m *model) order() []Generation {
	gens := m.generations(isListed)
	slices.SortFunc(gens, func(a, b Generation) int {
		x, y := m.checkpoints[a], m.checkpoints[b]
		if sx, sy := !x.supersededBy.IsZero(), !y.supersededBy.IsZero(); sx != sy {
			if sx {
				return -1
			}
			return 1
		}
		return cmp.Compare(x.published, y.published)
	})
	return gens
}

// prefixes gives the listed checkpoints that are exact prefixes of the query, longest first. It compares tokens.
func (m *model) prefixes(q *sequence) (gens []Generation) {
	for _, g := range m.generations(isListed) {
		have := m.checkpoints[g].sequence
		if have.space == q.space && have.len() <= q.len() && slices.Equal(have.tokens, q.tokens[:have.len()]) {
			gens = append(gens, g)
		}
	}
	slices.SortFunc(gens, func(a, b Generation) int {
		return cmp.Compare(m.checkpoints[b].manifest.Offset, m.checkpoints[a].manifest.Offset)
	})
	return gens
}

// boundary gives the longest page boundary of the query at which listed checkpoints have all that a restore needs.
func (m *model) boundary(q *sequence) int64 {
	listed := m.live(isListed)
	for n := q.len() / q.step() * q.step(); n > 0; n -= q.step() {
		if !slices.ContainsFunc(q.first(n).pages(), func(p pageInfo) bool { _, ok := listed[p.key]; return !ok }) {
			return n
		}
	}
	return 0
}

// compare checks that the catalogue says what the model says.
func (m *model) compare(t require.TestingT, v Reader) {
	accounts, err := ReadAccounts(v)
	require.NoError(t, err)
	require.Equal(t, m.accounts(), accounts)

	order := []Generation{}
	require.NoError(t, Checkpoints(v, func(g Generation) (bool, error) { order = append(order, g); return true, nil }))
	require.Equal(t, m.order(), append([]Generation(nil), order...))

	var undurable []Generation
	require.NoError(t, Undurable(v, func(g Generation) (bool, error) { undurable = append(undurable, g); return true, nil }))
	require.Equal(t, m.generations(func(c *modelCheckpoint) bool { return isListed(c) && !m.durable(c) }), undurable)

	segments := map[uint64]SegmentUse{}
	require.NoError(t, Segments(v, func(n uint64, use SegmentUse) (bool, error) { segments[n] = use; return true, nil }))
	require.Equal(t, m.segments(), segments)

	for g, c := range m.checkpoints {
		s, err := ReadState(v, g)
		require.NoError(t, err)
		want := State{Status: c.status, Durable: m.durable(c), Published: c.published, SupersededBy: c.supersededBy}
		if s != nil && !isListed(c) {
			want.Durable = s.Durable // as it was when the checkpoint was retired
		}
		if s == nil || *s != want {
			require.Equal(t, &want, s)
		}
		if b, _ := v.Get(key1(tagManifest, g)); !bytes.Equal(EncodeManifest(c.manifest), b) {
			have, err := ReadManifest(v, g)
			require.NoError(t, err)
			require.Equal(t, c.manifest, have)
		}
	}
	listed := m.live(isListed)
	for key, p := range m.live(all) {
		entry, err := ReadPage(v, key)
		require.NoError(t, err)
		_, needed := listed[key]
		if entry == nil || entry.Parent != p.parent || entry.Depth != p.depth || entry.Bytes != p.bytes || entry.Ranks != p.ranks ||
			entry.Listed > 0 != needed || !slices.Equal(entry.Place, m.placed[key]) {
			require.Failf(t, "another page entry", "want %+v, needed %v, at %+v, have %+v", p, needed, m.placed[key], entry)
		}
	}
}

// compareLookups checks that lookups of one query find what the model finds.
func (m *model) compareLookups(t require.TestingT, v Reader, q *sequence) {
	want := m.prefixes(q)
	var have []Generation
	require.NoError(t, ListedPrefixes(v, q.query(), func(g Generation, offset int64) bool {
		require.Equal(t, m.checkpoints[g].manifest.Offset, offset)
		have = append(have, g)
		return true
	}))
	require.Equal(t, want, have)
	g, offset, err := LongestListed(v, q.query())
	require.NoError(t, err)
	if len(want) == 0 {
		require.Zero(t, g)
		require.Zero(t, offset)
	} else {
		require.Equal(t, want[0], g)
		require.Equal(t, m.checkpoints[g].manifest.Offset, offset)
	}
	if !q.attentionOnly() {
		return
	}
	var shapes []AttentionShape
	for _, s := range q.groups {
		shapes = append(shapes, s.attention())
	}
	whole := func(group int, position int64) Key {
		return q.page(group, position, (position+1)*q.groups[group].tokens)
	}
	n, err := LongestBoundary(v, shapes, q.step(), q.len(), whole)
	require.NoError(t, err)
	require.Equal(t, m.boundary(q), n)
}

// compareEffects checks that a record did what the model did.
func compareEffects(t require.TestingT, want, have *Effects) {
	require.ElementsMatch(t, want.Listed, have.Listed)
	require.ElementsMatch(t, want.Retired, have.Retired)
	require.ElementsMatch(t, want.Deleted, have.Deleted)
	require.ElementsMatch(t, want.Durable, have.Durable)
	require.ElementsMatch(t, want.Freed, have.Freed)
	require.ElementsMatch(t, want.Dropped, have.Dropped)
	at := map[Key]int{}
	for i, p := range have.Dropped {
		at[p.Key] = i
	}
	for i, p := range have.Dropped {
		if parent, ok := at[p.Parent]; ok {
			require.Greater(t, parent, i, "page %s is dropped after its parent", p.Key.Short())
		}
	}
}
