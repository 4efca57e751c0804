package txn

import (
	"errors"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// machine draws random transactions over small token trees. It predicts each outcome with the model, refusals included,
// and checks after every record that the catalogue derives (Check) and says what the model says.
type machine struct {
	t         *rapid.T
	spaces    []*space
	sequences []*sequence // what queries and publications are made of; all prefixes of each
	*catalogue
	model   *model
	replica *Memory // the same log, applied a second time; nil: nothing is compared
	disk    *disk
}

// longestTokens is the length of the longest sequences: four blocks and a little.
const longestTokens = 4*BlockTokens + 50

// testSpaces are a plain transformer, one with sliding windows of two page sizes, and a hybrid, with 1, 2 and 3 ranks.
func testSpaces() []*space {
	return []*space{
		newSpace("plain", 1, shape{tokens: 64, bytes: 100}),
		newSpace("window", 2, shape{tokens: 32, bytes: 64}, shape{tokens: 64, window: 100, bytes: 5000}, shape{tokens: 32, window: 32, bytes: 1}),
		newSpace("hybrid", 3, shape{tokens: 128, bytes: 4096}, shape{count: 2, bytes: 70}, shape{tokens: 64, window: 64, bytes: 9}, shape{tokens: 256, bytes: 7}),
	}
}

func newMachine(t *rapid.T) *machine {
	m := &machine{t: t, spaces: testSpaces(), catalogue: newCatalogue(), model: newModel(), replica: NewMemory(), disk: newDisk()}
	for _, s := range m.spaces {
		m.sequences = append(m.sequences, s.sequence().plus(run(1, 300)...))
	}
	return m
}

// length draws a number of tokens, near the edges of pages and blocks more often than not.
func (m *machine) length(most int64) int64 {
	near := rapid.SampledFrom([]int64{1, 31, 32, 33, 63, 64, 65, 128, 192, 255, 256, 257, 320, 511, 512, 513, 640, 1023, 1024, 1025, 1536, 1537, 2048, 2049}).Draw(m.t, "near")
	if near <= most {
		return near
	}
	return rapid.Int64Range(1, most).Draw(m.t, "length")
}

// grow adds a branch to the token tree.
func (m *machine) grow(*rapid.T) {
	q := rapid.SampledFrom(m.sequences).Draw(m.t, "stem")
	q = q.first(m.length(q.len()))
	n := min(m.length(BlockTokens+100), longestTokens-q.len())
	if n > 0 {
		m.sequences = append(m.sequences, q.plus(run(rapid.Int32Range(1, 2).Draw(m.t, "token"), int(n))...))
	}
}

// commit changes the model, applies the record to both copies of the catalogue, and compares all three.
func (m *machine) commit(r Record, change func()) {
	want := m.model.change(change)
	if m.replica == nil {
		m.append(r).apply(m.t, m.view)
		return
	}
	have := m.catalogue.commit(m.t, r)
	compareEffects(m.t, want, have)
	require.Equal(m.t, have, m.log[len(m.log)-1].apply(m.t, m.replica))
	require.Equal(m.t, hash(m.t, m.view), hash(m.t, m.replica))
	m.model.compare(m.t, m.view)
}

// some draws a few of the generations.
func (m *machine) some(gens []Generation, label string) []Generation {
	if len(gens) == 0 {
		return nil
	}
	return rapid.SliceOfN(rapid.SampledFrom(gens), 1, rapid.SampledFrom([]int{1, 1, 2, 5}).Draw(m.t, "most")).Draw(m.t, label)
}

// refusal tells what the model expects instead of a record.
type refusal struct {
	invariant Invariant
	class     error
}

func (m *machine) publish(*rapid.T) {
	q := rapid.SampledFrom(m.sequences).Draw(m.t, "sequence")
	q = q.first(m.length(q.len()))
	gens := m.model.generations(all)
	meta := rapid.SampledFrom([]string{"", "", "other"}).Draw(m.t, "meta")
	if len(gens) > 0 {
		c := m.model.checkpoints[rapid.SampledFrom(gens).Draw(m.t, "published")]
		switch rapid.SampledFrom([]string{"anything", "again", "goes on", "goes on"}).Draw(m.t, "what") {
		case "again":
			q, meta = c.sequence, string(c.manifest.Meta)
		case "goes on":
			if n := min(m.length(BlockTokens/2), longestTokens-c.sequence.len()); n > 0 {
				q = c.sequence.plus(run(rapid.Int32Range(1, 2).Draw(m.t, "token"), int(n))...)
				m.sequences = append(m.sequences, q)
			}
		}
	}
	in := q.intent(meta)
	in.Manifest.Kind = rapid.SampledFrom([]uint8{PromptKind, PromptKind, 2, InstructionKind}).Draw(m.t, "kind")
	in.Manifest.Request = rapid.SampledFrom([]string{"", "r1", "r2", "r3", "r4", "r5", "r6"}).Draw(m.t, "request")
	if rapid.IntRange(0, 3).Draw(m.t, "policy") > 0 {
		in.PrefixKey = q.prefix
	}
	if len(gens) > 0 && rapid.IntRange(0, 4).Draw(m.t, "continuing") == 0 {
		in.Manifest.Continues = rapid.SampledFrom(gens).Draw(m.t, "continues")
	}
	in.Durable = rapid.IntRange(0, 4).Draw(m.t, "durable") == 0
	if rapid.IntRange(0, 15).Draw(m.t, "rank lost") == 0 {
		in.Committed = rapid.IntRange(0, q.ranks-1).Draw(m.t, "committed")
	}
	if rapid.IntRange(0, 5).Draw(m.t, "superseding") == 0 {
		in.Supersedes = m.some(gens, "supersedes")
	}
	pages := q.pages()
	missing := Key{}
	if rapid.IntRange(0, 4).Draw(m.t, "page lost") == 0 {
		missing = rapid.SampledFrom(pages).Draw(m.t, "missing").key
	}
	written := rapid.SampledFrom([]string{"none", "all", "some"}).Draw(m.t, "written")
	known := m.model.live(all)
	place := map[Key][]Placement{}
	for _, p := range pages {
		if written == "all" || written == "some" && rapid.Bool().Draw(m.t, "page written") {
			place[p.key] = m.disk.copies(rapid.Uint64Range(1, 3).Draw(m.t, "segment"), p.ranks, p.bytes)
		}
	}
	in.Have = func(key Key) ([]Placement, bool) { return place[key], key != missing }

	c := m.model.checkpoints[in.Manifest.Generation()]
	if in.Committed == q.ranks && c != nil && isListed(c) {
		r, err := DecidePublish(m.view, in)
		require.NoError(m.t, err)
		require.Nil(m.t, r)
		return
	}
	decided := *in.Manifest
	supersedes, lineage := in.Supersedes, true
	decided.Continues = Generation{}
	if in.PrefixKey != nil {
		var chosen []Generation
		decided.Previous, decided.Continues, chosen, lineage = m.model.policy(q, in.Manifest)
		supersedes = slices.Concat(supersedes, chosen)
	}
	if want := m.refusesPublish(in, q, known, place, missing, lineage); want != nil {
		m.refused(want, func() error { _, err := DecidePublish(m.view, in); return err })
		return
	}
	r, err := DecidePublish(m.view, in)
	require.NoError(m.t, err)
	var fresh, declared []Key
	for _, p := range pages {
		if _, ok := known[p.key]; !ok {
			fresh = append(fresh, p.key)
		}
	}
	for _, p := range r.Pages {
		declared = append(declared, p.Key)
	}
	require.Equal(m.t, fresh, declared, "the record declares what is new and nothing else")
	m.commit(r, func() { m.model.publish(m.lsn+1, q, &decided, place, unique(supersedes)) })
}

// refusesPublish tells which refusal a publication deserves.
func (m *machine) refusesPublish(in *PublishIntent, q *sequence, known map[Key]pageInfo, place map[Key][]Placement, missing Key, lineage bool) *refusal {
	if in.Committed != q.ranks {
		return &refusal{AllRanks, ErrInvalid}
	}
	durable := true
	for _, p := range q.pages() {
		places := place[p.key]
		if _, ok := known[p.key]; ok {
			places = m.model.placed[p.key]
		} else if p.key == missing {
			return &refusal{CompleteAtPublish, ErrConflict}
		}
		durable = durable && len(places) != 0
	}
	if in.Durable && !durable {
		return &refusal{PayloadBeforeRecord, ErrConflict}
	}
	if !lineage {
		return &refusal{"", ErrInvalid}
	}
	g, replaced := in.Manifest.Generation(), m.model.listedFor(in.Manifest.Prefix)
	for _, old := range in.Supersedes {
		c := m.model.checkpoints[old]
		switch {
		case old == replaced:
		case old == g:
			return &refusal{NoDanglingSupersede, ErrInvalid}
		case c.status != Listed:
			return &refusal{NoDanglingSupersede, ErrConflict}
		case c.sequence.space != q.space:
			return &refusal{NoDanglingSupersede, ErrInvalid}
		}
	}
	return nil
}

// refused checks that a transaction is refused as expected and changes nothing.
func (m *machine) refused(want *refusal, decide func() error) {
	before := hash(m.t, m.view)
	err := decide()
	require.ErrorIs(m.t, err, want.class)
	var violation *Violation
	if want.invariant != "" {
		require.True(m.t, errors.As(err, &violation), "%v", err)
		require.Equal(m.t, want.invariant, violation.Invariant)
	}
	require.Equal(m.t, before, hash(m.t, m.view))
}

func (m *machine) retire(*rapid.T) {
	gens := m.some(m.model.generations(all), "retired")
	alsoDelete := rapid.Bool().Draw(m.t, "delete")
	listed := slices.DeleteFunc(unique(gens), func(g Generation) bool { return !isListed(m.model.checkpoints[g]) })
	if len(listed) < len(unique(gens)) {
		m.refused(&refusal{"", ErrNotFound}, func() error {
			_, err := DecideRetire(m.view, gens, ReasonRequested, alsoDelete, true)
			return err
		})
	}
	r, err := DecideRetire(m.view, gens, ReasonRequested, alsoDelete, false)
	require.NoError(m.t, err)
	if len(listed) == 0 {
		require.Nil(m.t, r)
		return
	}
	m.commit(r, func() {
		for _, g := range listed {
			if m.model.retire(g); alsoDelete {
				delete(m.model.checkpoints, g)
			}
		}
	})
}

func (m *machine) delete(*rapid.T) {
	gens := unique(m.some(m.model.generations(all), "deleted"))
	if len(gens) == 0 {
		return
	}
	if slices.ContainsFunc(gens, func(g Generation) bool { return isListed(m.model.checkpoints[g]) }) {
		m.refused(&refusal{RetireBeforeDelete, ErrConflict}, func() error { _, err := DecideDelete(m.view, gens); return err })
		gens = slices.DeleteFunc(gens, func(g Generation) bool { return isListed(m.model.checkpoints[g]) })
	}
	r, err := DecideDelete(m.view, gens)
	require.NoError(m.t, err)
	if len(gens) == 0 {
		require.Nil(m.t, r)
		return
	}
	m.commit(r, func() {
		for _, g := range gens {
			delete(m.model.checkpoints, g)
		}
	})
}

func (m *machine) supersede(*rapid.T) {
	gens := m.model.generations(all)
	if len(gens) == 0 {
		return
	}
	by := Generation{}
	if rapid.Bool().Draw(m.t, "superseding") {
		by = rapid.SampledFrom(gens).Draw(m.t, "by")
	}
	old := m.some(gens, "superseded")
	if c := m.model.checkpoints[by]; c != nil && rapid.IntRange(0, 3).Draw(m.t, "sensible") > 0 {
		fitting := m.model.generations(func(o *modelCheckpoint) bool {
			return isListed(o) && o.sequence.space == c.sequence.space && o.published < c.published
		})
		if len(fitting) > 0 {
			old = m.some(fitting, "older")
		}
	}
	want, changed := m.refusesSupersede(by, unique(old))
	if want != nil {
		m.refused(want, func() error { _, err := DecideSupersede(m.view, by, old); return err })
		return
	}
	r, err := DecideSupersede(m.view, by, old)
	require.NoError(m.t, err)
	if len(changed) == 0 {
		require.Nil(m.t, r)
		return
	}
	require.Equal(m.t, changed, r.Generations)
	m.commit(r, func() {
		for _, g := range changed {
			m.model.supersede(by, g)
		}
	})
}

func (m *machine) refusesSupersede(by Generation, old []Generation) (want *refusal, changed []Generation) {
	b := m.model.checkpoints[by]
	if b != nil && !isListed(b) {
		return &refusal{NoDanglingSupersede, ErrConflict}, nil
	}
	for _, g := range old {
		c := m.model.checkpoints[g]
		switch {
		case !isListed(c):
			return &refusal{NoDanglingSupersede, ErrConflict}, nil
		case c.supersededBy == by:
			continue
		case b != nil && (g == by || c.sequence.space != b.sequence.space || c.published >= b.published):
			return &refusal{NoDanglingSupersede, ErrInvalid}, nil
		}
		changed = append(changed, g)
	}
	return nil, changed
}

// mark makes checkpoints young again, or ends their time of grace.
func (m *machine) mark(*rapid.T) {
	kind := rapid.SampledFrom([]MarkKind{MarkUsed, MarkEndGrace}).Draw(m.t, "mark")
	gens := m.some(m.model.generations(all), "marked")
	if graced := m.model.generations(inGrace); kind == MarkEndGrace && len(graced) > 0 {
		gens = m.some(graced, "graced")
	}
	want := slices.DeleteFunc(unique(gens), func(g Generation) bool {
		c := m.model.checkpoints[g]
		return !isListed(c) || kind == MarkEndGrace && !c.grace
	})
	r, err := DecideMark(m.view, kind, append(gens, Generation{1}))
	require.NoError(m.t, err)
	if len(want) == 0 {
		require.Nil(m.t, r)
		return
	}
	require.Equal(m.t, want, r.Generations)
	m.commit(r, func() {
		for _, g := range want {
			if c := m.model.checkpoints[g]; kind == MarkUsed {
				c.used = m.lsn + 1
			} else {
				c.grace = false
			}
		}
	})
}

// persist gives pages disk copies and moves others; it asks for pages that are gone, and twice for some.
func (m *machine) persist(*rapid.T) {
	live := m.model.live(all)
	keys := sorted(live)
	if len(keys) == 0 {
		return
	}
	var intents, want, unused []PersistIntent
	seen := map[Key]bool{}
	for _, key := range rapid.SliceOfN(rapid.SampledFrom(append(keys, Key{1})), 1, 12).Draw(m.t, "pages") {
		p, known := live[key]
		in := PersistIntent{Key: key, Moved: rapid.IntRange(0, 3).Draw(m.t, "moved") == 0}
		in.Place = m.disk.copies(rapid.Uint64Range(1, 4).Draw(m.t, "segment"), max(p.ranks, 1), max(p.bytes/2, 1))
		intents = append(intents, in)
		if !known || seen[key] || (len(m.model.placed[key]) != 0) != in.Moved {
			unused = append(unused, in)
			continue
		}
		seen[key] = true
		want = append(want, in)
	}
	m.persistPages(intents, want, unused)
}

// persistAll gives every page of one checkpoint a disk copy, in an order of its own.
func (m *machine) persistAll(*rapid.T) {
	gens := m.model.generations(all)
	if len(gens) == 0 {
		return
	}
	pages := rapid.Permutation(m.model.checkpoints[rapid.SampledFrom(gens).Draw(m.t, "whole")].pages).Draw(m.t, "order")
	var want []PersistIntent
	for _, p := range pages {
		if len(m.model.placed[p.key]) == 0 {
			want = append(want, PersistIntent{Key: p.key, Place: m.disk.copies(4, p.ranks, p.bytes)})
		}
	}
	m.persistPages(want, want, nil)
}

func (m *machine) persistPages(intents, want, unused []PersistIntent) {
	r, left, err := DecidePersist(m.view, intents)
	require.NoError(m.t, err)
	require.Equal(m.t, unused, left)
	if len(want) == 0 {
		require.Nil(m.t, r)
		return
	}
	m.commit(r, func() {
		for _, p := range want {
			m.model.place(p.Key, p.Place)
		}
	})
}

func (m *machine) actions() map[string]func(*rapid.T) {
	return map[string]func(*rapid.T){ // drawn with equal odds; more is made than taken away
		"grow": m.grow, "publish": m.publish, "publish 2": m.publish, "publish 3": m.publish, "publish 4": m.publish, "publish 5": m.publish,
		"publish 6": m.publish, "publish 7": m.publish, "publish 8": m.publish,
		"retire": m.retire, "delete": m.delete, "supersede": m.supersede, "mark": m.mark, "persist": m.persist, "persist all": m.persistAll,
	}
}

// TestHistoriesAgreeWithModel: given any history of the five transactions over token trees with shared prefixes, when the
// catalogue is asked anything, then it answers as the model does, and what it refuses leaves no trace (ID-04, ID-10,
// ID-12, PUB-03, PUB-06, DED-01, DED-02, SUP-10).
func TestHistoriesAgreeWithModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newMachine(t)
		actions := m.actions()
		actions[""] = func(t *rapid.T) {
			m.model.compareLookups(t, m.view, rapid.SampledFrom(m.sequences).Draw(t, "query"))
		}
		t.Repeat(actions)
		for _, q := range m.sequences {
			for n := int64(1); n <= q.len(); n += max(1, q.len()/5) {
				m.model.compareLookups(t, m.view, q.first(n))
			}
		}
	})
}

// TestReplayFromAnyPrefix: given the log of any history, when it is replayed from the start, or offered as a whole to the
// state after any of its records, then every state has the bytes that it had at commit.
func TestReplayFromAnyPrefix(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newMachine(t)
		m.replica = nil
		t.Repeat(m.actions())
		fresh := NewMemory()
		states := []*Memory{fresh.Clone()}
		for _, l := range m.log {
			l.apply(t, fresh)
			states = append(states, fresh.Clone())
		}
		require.Equal(t, hash(t, m.view), hash(t, fresh))

		at := rapid.IntRange(0, len(m.log)).Draw(t, "prefix")
		v := states[at].Clone()
		for i, l := range m.log {
			r, err := Decode(l.kind, l.payload)
			require.NoError(t, err)
			_, err = Apply(v, l.lsn, r)
			if i < at {
				require.ErrorIs(t, err, ErrConflict)
				require.Equal(t, hash(t, states[at]), hash(t, v), "a record that is applied already changed something")
				continue
			}
			require.NoError(t, err)
			require.Equal(t, hash(t, states[i+1]), hash(t, v))
		}
	})
}
