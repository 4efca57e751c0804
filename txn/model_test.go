package txn

import (
	"bytes"
	"cmp"
	"maps"
	"slices"

	"github.com/stretchr/testify/require"
)

// model is the catalogue as one would first think of it: every checkpoint has its full list of pages, and every question is
// answered by going through all checkpoints. It keeps no counts, no edges and no spine. What a record does is the difference
// between two states.
type model struct {
	checkpoints map[Generation]*modelCheckpoint // listed and retired
	placed      map[Key][]Placement             // disk copies of live pages
	ends        map[uint64]int64                // of the segments in use
	lastSegment uint64
	namespaces  map[Key]bool
}

type modelCheckpoint struct {
	sequence     *sequence
	manifest     *Manifest
	pages        []pageInfo
	status       Status
	published    LSN
	used         LSN
	supersededBy Generation
	continued    bool
	grace        bool
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

func all(*modelCheckpoint) bool            { return true }
func isListed(c *modelCheckpoint) bool     { return c.status == Listed }
func isSuperseded(c *modelCheckpoint) bool { return !c.supersededBy.IsZero() }
func goesFirst(c *modelCheckpoint) bool    { return isSuperseded(c) && !c.grace }
func isWarm(c *modelCheckpoint) bool       { return isListed(c) && !goesFirst(c) }
func inGrace(c *modelCheckpoint) bool      { return c.grace }

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

// change runs fn and gives the difference that it made.
func (m *model) change(fn func()) *Effects {
	before := &model{checkpoints: map[Generation]*modelCheckpoint{}, placed: maps.Clone(m.placed)}
	for g, c := range m.checkpoints {
		copied := *c
		before.checkpoints[g] = &copied
	}
	fn()

	e := &Effects{}
	lists := func(m *model, g Generation) bool { c := m.checkpoints[g]; return c != nil && isListed(c) }
	for _, g := range m.generations(isListed) {
		c, old := m.checkpoints[g], before.checkpoints[g]
		if !lists(before, g) {
			e.Listed = append(e.Listed, g)
		} else if m.durable(c) && !before.durable(old) {
			e.Durable = append(e.Durable, g)
		}
		if c.grace && !(lists(before, g) && old.grace) {
			e.Graced = append(e.Graced, g)
		}
	}
	for _, g := range before.generations(all) {
		if lists(before, g) && !lists(m, g) {
			e.Retired = append(e.Retired, g)
		}
		if m.checkpoints[g] == nil {
			e.Deleted = append(e.Deleted, g)
		}
	}
	was, is, wasWarm, isWarm := before.live(all), m.live(all), before.live(isWarm), m.live(isWarm)
	for _, key := range sorted(was) {
		p, places := was[key], before.placed[key]
		if _, there := is[key]; !there {
			e.Dropped = append(e.Dropped, DroppedPage{Key: key, Parent: p.parent, Bytes: p.bytes, Ranks: p.ranks, Place: places})
			delete(m.placed, key)
			continue
		}
		if !slices.Equal(places, m.placed[key]) {
			e.Freed = append(e.Freed, places...)
		}
		_, warmBefore := wasWarm[key]
		_, warm := isWarm[key]
		switch {
		case warmBefore && !warm:
			e.Cooled = append(e.Cooled, key)
		case warm && !warmBefore:
			e.Warmed = append(e.Warmed, key)
		}
	}
	use := m.segments()
	for n := range m.ends {
		if use[n].LivePages == 0 {
			delete(m.ends, n)
		}
	}
	return e
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
func (m *model) publish(lsn LSN, q *sequence, manifest *Manifest, place map[Key][]Placement, supersedes []Generation) {
	g, known, old := manifest.Generation(), m.live(all), m.listedFor(manifest.Prefix)
	m.checkpoints[g] = &modelCheckpoint{sequence: q, manifest: manifest, pages: q.pages(), status: Listed, published: lsn, used: lsn}
	m.namespaces[manifest.Namespace] = true
	for _, p := range q.pages() {
		if _, ok := known[p.key]; !ok {
			m.place(p.key, place[p.key])
		}
	}
	if c := m.checkpoints[manifest.Continues]; c != nil {
		c.continued = true
	}
	for _, s := range supersedes {
		if s != old {
			m.supersede(g, s)
		}
	}
	if !old.IsZero() { // what it had superseded may be superseded by the new one by now, and then its time of grace does not begin anew
		m.retire(old)
		delete(m.checkpoints, old)
	}
}

func (m *model) supersede(by, g Generation) {
	c := m.checkpoints[g]
	if by.IsZero() {
		c.grace = false
	} else if !isSuperseded(c) && c.continued {
		c.grace = true
	}
	c.supersededBy = by
}

func (m *model) retire(g Generation) {
	c := m.checkpoints[g]
	for o, other := range m.checkpoints {
		if other.supersededBy == g {
			m.supersede(c.supersededBy, o)
		}
	}
	c.status, c.supersededBy, c.continued, c.grace = Retired, Generation{}, false, false
}

// policy is the supersession policy in the words of the design. ok is false if the manifest names a checkpoint that it
// cannot have continued from.
func (m *model) policy(q *sequence, manifest *Manifest) (previous, continues Generation, supersedes []Generation, ok bool) {
	longest := func(n int64) (g Generation) {
		if gens := m.prefixes(q.first(n)); len(gens) > 0 {
			return gens[0]
		}
		return g
	}
	if c := m.checkpoints[manifest.Continues]; c != nil && isListed(c) {
		continues = manifest.Continues
		if !slices.Contains(m.prefixes(q.first(q.len()-1)), continues) {
			return previous, continues, nil, false
		}
	}
	previous = longest(q.len() - 1)

	// The way back, from each checkpoint to the longest prefix that it had when it was published, or has now if that is gone.
	way := map[Generation]bool{continues: true}
	var requests []string
	for g := previous; !g.IsZero(); {
		c := m.checkpoints[g]
		way[g] = true
		if manifest.Request == "" || c.manifest.Request != manifest.Request {
			if r := c.manifest.Request; r != "" && !slices.Contains(requests, r) {
				requests = append(requests, r)
			}
			if continues.IsZero() {
				continues = g
			} else if isSuperseded(c) {
				break
			} else if g != continues && c.manifest.Kind != InstructionKind {
				supersedes = append(supersedes, g)
			}
		}
		next := c.manifest.Previous
		if p := m.checkpoints[next]; !next.IsZero() && (p == nil || !isListed(p)) {
			next = longest(c.manifest.Offset - 1)
		}
		g = next
	}
	if manifest.Kind != PromptKind {
		return previous, continues, supersedes, true
	}
	for _, r := range requests[:min(len(requests), supersedeRequestsMax)] {
		supersedes = append(supersedes, m.generations(func(c *modelCheckpoint) bool {
			return isListed(c) && !isSuperseded(c) && c.sequence.space == q.space && c.manifest.Request == r && c.manifest.Kind != InstructionKind &&
				c.manifest.Offset < manifest.Offset && !way[c.manifest.Generation()]
		})...)
	}
	return previous, continues, supersedes, true
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
	slices.SortStableFunc(gens, func(a, b Generation) int {
		x, y := m.checkpoints[a], m.checkpoints[b]
		if goesFirst(x) != goesFirst(y) {
			if goesFirst(x) {
				return -1
			}
			return 1
		}
		return cmp.Compare(x.used, y.used)
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

	gens := func(scan func(Reader, func(Generation) (bool, error)) error) (gens []Generation) {
		require.NoError(t, scan(v, func(g Generation) (bool, error) { gens = append(gens, g); return true, nil }))
		return gens
	}
	require.Equal(t, m.order(), gens(Checkpoints))
	require.Equal(t, m.generations(func(c *modelCheckpoint) bool { return isListed(c) && !m.durable(c) }), gens(Undurable))
	require.Equal(t, m.generations(inGrace), gens(InGrace))
	found, err := FirstGoes(v)
	require.NoError(t, err)
	require.Equal(t, len(m.generations(goesFirst)) > 0, found)
	require.Equal(t, m.generations(all), gens(func(v Reader, fn func(Generation) (bool, error)) error {
		return States(v, func(g Generation, _ *State) (bool, error) { return fn(g) })
	}))

	segments := map[uint64]SegmentUse{}
	require.NoError(t, Segments(v, func(n uint64, use SegmentUse) (bool, error) { segments[n] = use; return true, nil }))
	require.Equal(t, m.segments(), segments)

	for g, c := range m.checkpoints {
		s, err := ReadState(v, g)
		require.NoError(t, err)
		want := State{Status: c.status, Durable: m.durable(c), Published: c.published, Used: c.used, SupersededBy: c.supersededBy, Continued: c.continued, Grace: c.grace}
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
	listed, warm := m.live(isListed), m.live(isWarm)
	for key, p := range m.live(all) {
		entry, err := ReadPage(v, key)
		require.NoError(t, err)
		_, needed := listed[key]
		_, current := warm[key]
		if entry == nil || entry.Parent != p.parent || entry.Depth != p.depth || entry.Bytes != p.bytes || entry.Ranks != p.ranks ||
			entry.Listed > 0 != needed || entry.Current > 0 != current || !slices.Equal(entry.Place, m.placed[key]) {
			require.Failf(t, "another page entry", "want %+v, needed %v, current %v, at %+v, have %+v", p, needed, current, m.placed[key], entry)
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
	require.ElementsMatch(t, want.Graced, have.Graced)
	require.ElementsMatch(t, want.Freed, have.Freed)
	require.Equal(t, want.Cooled, have.Cooled)
	require.Equal(t, want.Warmed, have.Warmed)
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
