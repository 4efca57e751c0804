package txn

import (
	"errors"
	"maps"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// refusedBy checks that a transaction is refused with an error of the class that names the invariant, and changes nothing.
func refusedBy(t *testing.T, c *catalogue, invariant Invariant, class error, decide func() error) {
	t.Helper()
	before := hash(t, c.view)
	err := decide()
	require.ErrorIs(t, err, class)
	var v *Violation
	require.True(t, errors.As(err, &v), "%v names no invariant", err)
	require.Equal(t, invariant, v.Invariant)
	require.Equal(t, before, hash(t, c.view))
	require.Contains(t, err.Error(), string(invariant))
}

// hybrid gives a catalogue with the checkpoint of 600 tokens in a namespace with a chain, a window and state.
func hybrid(t require.TestingT) (*catalogue, *sequence, Generation) {
	c := newCatalogue()
	q := newSpace("hybrid", 2, shape{tokens: 128, bytes: 100}, shape{tokens: 128, window: 200, bytes: 50}, shape{count: 2, bytes: 7}).sequence().plus(run(1, 600)...)
	g, _ := c.publish(t, q.intent(""))
	return c, q, g
}

// decide wraps DecidePublish for intents that deserve a refusal.
func (c *catalogue) decide(in *PublishIntent) func() error {
	return func() error { _, err := DecidePublish(c.view, in); return err }
}

// lacking gives an answer to PublishIntent.Have that lacks one page.
func lacking(missing Key) func(Key) ([]Placement, bool) {
	return func(key Key) ([]Placement, bool) { return nil, key != missing }
}

func TestCompleteAtPublish_PUB05_B03_B08(t *testing.T) {
	c, q, _ := hybrid(t)
	more := q.plus(run(1, 200)...)
	refused := func(class error, change func(in *PublishIntent)) {
		t.Helper()
		in := more.intent("")
		change(in)
		refusedBy(t, c, CompleteAtPublish, class, c.decide(in))
	}
	known := map[Key]bool{}
	for _, p := range q.pages() {
		known[p.key] = true
	}
	for _, p := range more.pages() { // every page that no listed checkpoint needs
		if !known[p.key] {
			refused(ErrConflict, func(in *PublishIntent) { in.Have = lacking(p.key) })
		}
	}
	for i := range more.groups {
		refused(ErrInvalid, func(in *PublishIntent) { in.Manifest.Groups[i].Count = 0 })
		refused(ErrInvalid, func(in *PublishIntent) { in.Manifest.Groups[i].PageBytes = 0 })
		refused(ErrInvalid, func(in *PublishIntent) { in.Manifest.Groups[i].PageBytes = -1 })
	}
	refused(ErrInvalid, func(in *PublishIntent) { in.Manifest.Groups[0].PageBytes++ })
	refused(ErrInvalid, func(in *PublishIntent) { in.Manifest.Groups[0].Head = Key{} })
	refused(ErrInvalid, func(in *PublishIntent) { in.Manifest.Groups[1].Count++ })
	refused(ErrInvalid, func(in *PublishIntent) { in.Manifest.Groups[2].Keys[1] = Key{} })
	refused(ErrInvalid, func(in *PublishIntent) { in.Manifest.Groups[2].Positions = []int64{0} })
	refused(ErrInvalid, func(in *PublishIntent) { in.ChainKey = func(int, int64) Key { return Key{} } })

	// State and window pages that are known, of another size.
	for i := 1; i < len(q.groups); i++ {
		in := q.intent("other")
		in.Manifest.Groups[i].PageBytes++
		refusedBy(t, c, CompleteAtPublish, ErrInvalid, c.decide(in))
	}

	// The head is known and fewer or more pages come before it than the manifest says.
	for _, count := range []int64{1, 4, 6, 1 << 40} {
		in := q.intent("other")
		in.Manifest.Groups[0].Count = count
		in.ChainKey = func(_ int, position int64) Key { return q.pageAt(0, position%4) }
		refusedBy(t, c, CompleteAtPublish, ErrInvalid, c.decide(in))
	}
}

// TestMalformedManifests: what is no manifest at all is refused before any invariant is asked.
func TestMalformedManifests(t *testing.T) {
	c, q, base := hybrid(t)
	more := q.plus(run(1, 200)...)
	chained := func(in *PublishIntent) *GroupPages { return &in.Manifest.Groups[0] }
	state := func(in *PublishIntent) *GroupPages { return &in.Manifest.Groups[2] }
	for name, x := range map[string]struct {
		class  error
		change func(in *PublishIntent)
	}{
		"no offset":             {ErrInvalid, func(in *PublishIntent) { in.Manifest.Offset = 0 }},
		"no ranks":              {ErrInvalid, func(in *PublishIntent) { in.Manifest.Ranks = 0; in.Committed = 0 }},
		"no groups":             {ErrInvalid, func(in *PublishIntent) { in.Manifest.Groups = nil }},
		"no namespace":          {ErrInvalid, func(in *PublishIntent) { in.Manifest.Namespace = Key{} }},
		"no prefix":             {ErrInvalid, func(in *PublishIntent) { in.Manifest.Prefix = Key{} }},
		"no spine":              {ErrInvalid, func(in *PublishIntent) { in.Manifest.Spine = Key{} }},
		"unknown namespace":     {ErrInvalid, func(in *PublishIntent) { in.Manifest.Namespace = Key{1}; in.Encoding = nil }},
		"ranks":                 {ErrTooLarge, func(in *PublishIntent) { in.Manifest.Ranks = RanksMax + 1; in.Committed = RanksMax + 1 }},
		"offset":                {ErrTooLarge, func(in *PublishIntent) { in.Manifest.Offset = intMax + 1 }},
		"page size":             {ErrTooLarge, func(in *PublishIntent) { state(in).PageBytes = PageBytesMax + 1 }},
		"chain with a list":     {ErrInvalid, func(in *PublishIntent) { chained(in).Keys, chained(in).Positions = []Key{{1}}, []int64{1} }},
		"falling positions":     {ErrInvalid, func(in *PublishIntent) { state(in).Positions = []int64{1, 0} }},
		"equal positions":       {ErrInvalid, func(in *PublishIntent) { state(in).Positions = []int64{1, 1} }},
		"negative position":     {ErrInvalid, func(in *PublishIntent) { state(in).Positions = []int64{-1, 0} }},
		"huge position":         {ErrInvalid, func(in *PublishIntent) { state(in).Positions = []int64{0, intMax + 1} }},
		"page twice in a group": {ErrInvalid, func(in *PublishIntent) { state(in).Keys[1] = state(in).Keys[0] }},
		"page in two groups":    {ErrInvalid, func(in *PublishIntent) { in.Manifest.Groups[1].Keys[0] = state(in).Keys[0] }},
		"head in two groups":    {ErrInvalid, func(in *PublishIntent) { in.Manifest.Groups = append(in.Manifest.Groups, *chained(in)) }},
		"page of a chain":       {ErrInvalid, func(in *PublishIntent) { state(in).Keys[0] = more.pageAt(0, 5) }},
		"circular chain": {ErrInvalid, func(in *PublishIntent) {
			in.ChainKey = func(_ int, position int64) Key { return Key{1, byte(position % 2)} }
		}},
		"another chain": {ErrInvalid, func(in *PublishIntent) {
			chained(in).Head, chained(in).Count = q.pageAt(0, 4), 5
			in.ChainKey = func(int, int64) Key { return Key{1} }
		}},
		"spine of other blocks": {ErrInvalid, func(in *PublishIntent) {
			in.SpineKey = func(int64) Key { return q.spine(1) }
			in.Manifest.Spine = Key{1}
			in.Manifest.Offset = 1000
		}},
		"disk copy": {ErrInvalid, func(in *PublishIntent) { in.Have = func(Key) ([]Placement, bool) { return make([]Placement, 2), true } }},
	} {
		in := more.intent("")
		x.change(in)
		before := hash(t, c.view)
		_, err := DecidePublish(c.view, in)
		require.ErrorIs(t, err, x.class, name)
		require.Equal(t, before, hash(t, c.view))
	}
	for _, reason := range []Reason{0, ReasonCleared + 1} {
		_, err := DecideRetire(c.view, []Generation{base}, reason, false, false)
		require.ErrorIs(t, err, ErrInvalid)
	}
	good := Placement{Segment: 1, Stored: 1, Codec: CodecNone}
	for name, change := range map[string]func(p *Placement){
		"segment 0":        func(p *Placement) { p.Segment = 0 },
		"huge segment":     func(p *Placement) { p.Segment = intMax + 1 },
		"negative offset":  func(p *Placement) { p.Offset = -1 },
		"nothing stored":   func(p *Placement) { p.Stored = 0 },
		"end out of range": func(p *Placement) { p.Offset, p.Stored = intMax, 1 },
		"codec 0":          func(p *Placement) { p.Codec = 0 },
		"codec 3":          func(p *Placement) { p.Codec = 3 },
	} {
		bad := good
		change(&bad)
		_, _, err := DecidePersist(c.view, []PersistIntent{{Key: q.pageAt(0, 0), Place: []Placement{good, bad}}})
		require.ErrorIs(t, err, ErrInvalid, name)
	}
}

func TestAllRanks_PUB06(t *testing.T) {
	c, q, _ := hybrid(t)
	more := q.plus(run(1, 200)...)
	for _, committed := range []int{-1, 0, 1, 3} {
		in := more.intent("")
		in.Committed = committed
		refusedBy(t, c, AllRanks, ErrInvalid, c.decide(in))
	}
	require.EqualValues(t, 600, c.longest(t, more))

	// Disk copies of fewer, or of more, ranks than there are.
	d := newDisk()
	for _, ranks := range []int64{1, 3} {
		in := more.intent("")
		in.Have = func(Key) ([]Placement, bool) { return d.copies(1, ranks, 10), true }
		refusedBy(t, c, AllRanks, ErrInvalid, c.decide(in))
	}
	for _, ranks := range []int64{0, 1, 3} {
		refusedBy(t, c, AllRanks, ErrInvalid, func() error {
			_, _, err := DecidePersist(c.view, []PersistIntent{{Key: q.pageAt(0, 0), Place: d.copies(1, ranks, 100)}})
			return err
		})
	}
	// A page that is known has copies of another number of ranks.
	in := more.intent("")
	in.Manifest.Ranks, in.Committed = 3, 3
	refusedBy(t, c, AllRanks, ErrInvalid, c.decide(in))

	// A record that says so nevertheless is not applied.
	for _, r := range []Record{
		&Persist{Pages: []PlacedPage{{Key: q.pageAt(0, 0), Place: d.copies(1, 1, 100)}}},
	} {
		_, err := Apply(c.view.Clone(), c.lsn+1, r)
		require.ErrorIs(t, err, ErrCorrupt)
		require.Contains(t, err.Error(), AllRanks)
	}
}

func TestRetireBeforeDelete(t *testing.T) {
	c, q, base := hybrid(t)
	more, _ := c.publish(t, q.plus(run(1, 200)...).intent(""))
	refusedBy(t, c, RetireBeforeDelete, ErrConflict, func() error { _, err := DecideDelete(c.view, []Generation{base}); return err })
	c.retire(t, false, base)
	// One that is listed among those that are not: none goes.
	refusedBy(t, c, RetireBeforeDelete, ErrConflict, func() error { _, err := DecideDelete(c.view, []Generation{base, more}); return err })
	_, err := Apply(c.view.Clone(), c.lsn+1, &Delete{Generations: []Generation{more}})
	require.ErrorIs(t, err, ErrCorrupt)
	require.Contains(t, err.Error(), RetireBeforeDelete)

	r, err := DecideDelete(c.view, []Generation{base, base})
	require.NoError(t, err)
	require.Equal(t, []Generation{base}, r.Generations)
	c.commit(t, r)
	require.EqualValues(t, 800, c.longest(t, q.plus(run(1, 200)...)), "what shares its pages is whole")
}

func TestSupersedeIsAPreference(t *testing.T) {
	c, q, base := hybrid(t)
	more, _ := c.publish(t, q.plus(run(1, 200)...).intent(""))
	before := c.view.Clone()
	r, err := DecideSupersede(c.view, more, []Generation{base})
	require.NoError(t, err)
	effects := c.commit(t, r)
	require.NotEmpty(t, effects.Cooled, "pages that base alone has go first")
	effects.Cooled = nil
	require.Equal(t, &Effects{}, effects, "nothing is retired, deleted or dropped")
	require.Equal(t, []Generation{base, more}, c.listed(t))
	g, offset, err := LongestListed(c.view, q.query())
	require.NoError(t, err)
	require.Equal(t, base, g)
	require.EqualValues(t, 600, offset)

	changed := map[byte]bool{}
	for _, v := range []*Memory{before, c.view} {
		for k, b := range v.values {
			if !slices.Equal(b, before.values[k]) || !slices.Equal(b, c.view.values[k]) || c.view.values[k] == nil || before.values[k] == nil {
				changed[k[0]] = true
			}
		}
	}
	require.ElementsMatch(t, []byte{tagAccounts, tagOrder, tagPage, tagState, tagSupersede, tagApplied}, slices.Collect(maps.Keys(changed)))

	r, err = DecideSupersede(c.view, Generation{}, []Generation{base})
	require.NoError(t, err)
	c.commit(t, r)
	require.NoError(t, writeApplied(c.view, 2))
	require.Equal(t, hash(t, before), hash(t, c.view), "and back")
}

// TestMarksNeedListedCheckpoints: what is not listed has no place in the order of eviction.
func TestMarksNeedListedCheckpoints(t *testing.T) {
	c, _, base := hybrid(t)
	for _, mark := range []MarkKind{0, MarkEndGrace + 1} {
		_, err := DecideMark(c.view, mark, []Generation{base})
		require.ErrorIs(t, err, ErrInvalid)
	}
	c.retire(t, false, base)
	for _, r := range []Record{&Mark{Mark: MarkUsed, Generations: []Generation{base}}, &Supersede{Generations: []Generation{base}}} {
		_, err := Apply(c.view.Clone(), c.lsn+1, r)
		require.ErrorIs(t, err, ErrCorrupt)
		require.Contains(t, err.Error(), SupersedeIsAPreference)
	}
	_, err := Apply(c.view.Clone(), c.lsn+1, &Mark{Mark: MarkUsed, Generations: []Generation{{1}}})
	require.ErrorIs(t, err, ErrCorrupt)
}

func TestNoDanglingSupersede(t *testing.T) {
	c, q, base := hybrid(t)
	mid, _ := c.publish(t, q.plus(run(1, 100)...).intent(""))
	other := newSpace("other", 1, shape{count: 1, bytes: 1}).sequence().plus(1, 2, 3)
	foreign, _ := c.publish(t, other.intent(""))
	retired, _ := c.publish(t, q.plus(run(2, 10)...).intent(""))
	c.retire(t, false, retired)
	newest, _ := c.publish(t, q.plus(run(1, 200)...).intent(""))
	unknown := Generation{1}

	supersede := func(by Generation, old ...Generation) func() error {
		return func() error { _, err := DecideSupersede(c.view, by, old); return err }
	}
	refusedBy(t, c, NoDanglingSupersede, ErrInvalid, supersede(newest, newest))
	refusedBy(t, c, NoDanglingSupersede, ErrInvalid, supersede(mid, newest))
	refusedBy(t, c, NoDanglingSupersede, ErrInvalid, supersede(newest, base, foreign))
	refusedBy(t, c, NoDanglingSupersede, ErrInvalid, supersede(foreign, base))
	for _, gone := range []Generation{unknown, retired} {
		refusedBy(t, c, NoDanglingSupersede, ErrConflict, supersede(gone, base))
		refusedBy(t, c, NoDanglingSupersede, ErrConflict, supersede(newest, base, gone))
		refusedBy(t, c, NoDanglingSupersede, ErrConflict, supersede(Generation{}, gone))
	}
	for old, class := range map[Generation]error{unknown: ErrConflict, retired: ErrConflict, foreign: ErrInvalid} {
		in := q.plus(run(1, 300)...).intent("")
		in.Supersedes = []Generation{base, old}
		refusedBy(t, c, NoDanglingSupersede, class, c.decide(in))
	}
	in := q.plus(run(2, 10)...).intent("") // listed again, superseding itself
	in.Supersedes = []Generation{retired}
	refusedBy(t, c, NoDanglingSupersede, ErrInvalid, c.decide(in))

	// Records that say so nevertheless are not applied.
	for _, r := range []*Supersede{{By: mid, Generations: []Generation{newest}}, {By: retired, Generations: []Generation{base}},
		{By: newest, Generations: []Generation{newest}}} {
		_, err := Apply(c.view.Clone(), c.lsn+1, r)
		require.ErrorIs(t, err, ErrCorrupt)
		require.Contains(t, err.Error(), NoDanglingSupersede)
	}
}

func TestPayloadBeforeRecord(t *testing.T) {
	c, q, _ := hybrid(t)
	more := q.plus(run(1, 200)...)
	d := newDisk()
	durable := func(written func(key Key) bool) *PublishIntent {
		in := more.intent("")
		in.Durable = true
		in.Have = func(key Key) ([]Placement, bool) {
			if written(key) {
				return d.copies(1, 2, 10), true
			}
			return nil, true
		}
		return in
	}
	everything := func(Key) bool { return true }
	refusedBy(t, c, PayloadBeforeRecord, ErrConflict, c.decide(durable(func(Key) bool { return false })))
	refusedBy(t, c, PayloadBeforeRecord, ErrConflict, c.decide(durable(everything))) // what it builds on is in memory only
	for _, p := range q.pages() {
		c.persist(t, PersistIntent{Key: p.key, Place: d.copies(2, 2, p.bytes)})
	}
	known := map[Key]bool{}
	for _, p := range q.pages() {
		known[p.key] = true
	}
	for _, p := range more.pages() {
		if !known[p.key] {
			refusedBy(t, c, PayloadBeforeRecord, ErrConflict, c.decide(durable(func(key Key) bool { return key != p.key })))
		}
	}
	g, _ := c.publish(t, durable(everything))
	s, err := ReadState(c.view, g)
	require.NoError(t, err)
	require.True(t, s.Durable)
}

func TestMonotoneLSN(t *testing.T) {
	c, q, base := hybrid(t)
	c.retire(t, false, base)
	r, err := DecideDelete(c.view, []Generation{base})
	require.NoError(t, err)
	for _, lsn := range []LSN{0, 1, 2} {
		refusedBy(t, c, MonotoneLSN, ErrConflict, func() error { _, err := Apply(c.view, lsn, r); return err })
	}
	_, err = Apply(c.view, 1000, r) // there may be gaps
	require.NoError(t, err)
	applied, err := ReadApplied(c.view)
	require.NoError(t, err)
	require.EqualValues(t, 1000, applied)
	require.NoError(t, Check(c.view))

	c.lsn = 1000
	c.publish(t, q.intent(""))
	require.NoError(t, writeApplied(c.view, 1000))
	var v *Violation
	require.True(t, errors.As(Check(c.view), &v))
	require.Equal(t, MonotoneLSN, v.Invariant, "a checkpoint is newer than the last record")
}

// rich gives a catalogue with an entry of every kind; a checkpoint in it is listed, durable and superseded.
func rich(t *testing.T) (*catalogue, *sequence, Generation) {
	c, q, base := hybrid(t)
	d := newDisk()
	for _, p := range q.pages() {
		c.persist(t, PersistIntent{Key: p.key, Place: d.copies(2, 2, p.bytes)})
	}
	first := q.plus(run(1, 300)...)
	in := first.intent("")
	in.Supersedes = []Generation{base}
	c.publish(t, in)
	for i, q := range []*sequence{first.plus(1), first.plus(1, 1)} { // the first one is continued from and superseded
		in := q.intent("")
		in.PrefixKey, in.Manifest.Request = q.prefix, string(rune('a'+i))
		c.publish(t, in)
	}
	gone, _ := c.publish(t, q.plus(run(2, 300)...).intent(""))
	c.retire(t, false, gone)
	c.publish(t, q.first(10).intent(""))
	tags := map[byte]bool{}
	for _, k := range c.view.keys {
		tags[k[0]] = true
	}
	require.Len(t, tags, len(keyBytes), "an entry of every kind")
	return c, q, base
}

// TestExactAccounting: given a catalogue in which any one entry is missing, is one too many, or holds another value, when it
// is checked, then the difference is found, unless the entry says what no other entry does.
func TestExactAccounting(t *testing.T) {
	c, _, _ := rich(t)
	for _, k := range c.view.keys {
		v := c.view.Clone()
		require.NoError(t, v.Delete([]byte(k)))
		require.Error(t, Check(v), "without %x", k)

		if len(k) > 1 {
			v = c.view.Clone()
			other := []byte(k)
			other[len(other)-1] ^= 1
			require.NoError(t, v.Set(other, c.view.values[k]))
			require.ErrorIs(t, Check(v), ErrCorrupt, "with another %x", k)
		}

		require.ErrorIs(t, Check(with(t, c.view, append([]byte(k), 0), c.view.values[k])), ErrCorrupt)
		require.ErrorIs(t, Check(with(t, c.view, []byte(k[:len(k)-1]), c.view.values[k])), ErrCorrupt)

		value := c.view.values[k]
		if k[0] != tagNamespace {
			require.ErrorIs(t, Check(with(t, c.view, []byte(k), append(slices.Clone(value), 0))), ErrCorrupt, "longer %x", k)
		}
		for i := range value {
			changed := slices.Clone(value)
			changed[i] ^= 1 << (i % 8)
			err := Check(with(t, c.view, []byte(k), changed))
			if err == nil && !free(t, k[0], value, changed) {
				require.Failf(t, "a change is not noticed", "%x: %x became %x", k, value, changed)
			}
		}
	}
}

func with(t *testing.T, m *Memory, key, value []byte) *Memory {
	v := m.Clone()
	require.NoError(t, v.Set(key, value))
	return v
}

// free tells whether only that has changed which nothing else in the catalogue depends on.
func free(t *testing.T, tag byte, before, after []byte) bool {
	switch tag {
	case tagNamespace, tagApplied:
		return true
	case tagManifest: // who published it, and why
		return true // the content is protected by the generation
	case tagPage: // where its copies are, within the segment
		var a, b PageEntry
		require.NoError(t, a.unmarshal(before))
		require.NoError(t, b.unmarshal(after))
		for i := range a.Place {
			a.Place[i].Offset, a.Place[i].Checksum, a.Place[i].Codec = b.Place[i].Offset, b.Place[i].Checksum, b.Place[i].Codec
		}
		return slices.Equal(a.marshal(), b.marshal())
	case tagSegment: // the end never falls, so it may be larger than what is live says
		var a, b SegmentUse
		require.NoError(t, a.unmarshal(before))
		require.NoError(t, b.unmarshal(after))
		a.End = max(a.End, b.End)
		return a == b
	case tagAccounts:
		var a, b Accounts
		require.NoError(t, a.unmarshal(before))
		require.NoError(t, b.unmarshal(after))
		a.LastSegment = max(a.LastSegment, b.LastSegment)
		return a == b
	case tagState: // when it was published, and whether it was continued from; a retired one keeps the marks that it had
		var a, b State
		require.NoError(t, a.unmarshal(before))
		require.NoError(t, b.unmarshal(after))
		if a.Status == Retired {
			a.Durable, a.Used = b.Durable, b.Used
		}
		a.Published, a.Continued = b.Published, b.Continued
		return a == b
	}
	return false
}

// TestCheckKnowsTheRules: given catalogues whose counts all add up and which break a rule nevertheless, when they are
// checked, then the rule is named.
func TestCheckKnowsTheRules(t *testing.T) {
	breaks := func(v *Memory, rule Invariant) {
		t.Helper()
		err := Check(v)
		require.ErrorIs(t, err, ErrCorrupt)
		var violation *Violation
		require.True(t, errors.As(err, &violation), "%v", err)
		require.Equal(t, rule, violation.Invariant, "%v", err)
	}
	set := func(v *Memory, key []byte, e interface{ marshal() []byte }) {
		require.NoError(t, v.Set(key, e.marshal()))
	}
	resize := func(v *Memory, keys ...Key) {
		a, err := ReadAccounts(v)
		require.NoError(t, err)
		for _, key := range keys {
			p, err := ReadPage(v, key)
			require.NoError(t, err)
			p.Bytes++
			a.PageBytes += p.Ranks
			set(v, key1(tagPage, key), p)
		}
		set(v, []byte{tagAccounts}, &a)
	}
	c, q, base := hybrid(t)
	chain, err := ChainPages(c.view, q.pageAt(0, 4), 5)
	require.NoError(t, err)

	v := c.view.Clone()
	resize(v, chain[:2]...) // pages of two sizes in a chain
	breaks(v, CompleteAtPublish)
	v = c.view.Clone()
	resize(v, chain...) // all of another size than the manifest says
	breaks(v, CompleteAtPublish)

	v = c.view.Clone() // a page that nothing holds
	a, err := ReadAccounts(v)
	require.NoError(t, err)
	a.Pages, a.PageBytes = a.Pages+1, a.PageBytes+1
	set(v, []byte{tagAccounts}, &a)
	set(v, key1(tagPage, Key{1}), &PageEntry{Bytes: 1, Ranks: 1})
	breaks(v, ExactAccounting)

	v = c.view.Clone() // a block that leads nowhere
	var node spineEntry
	require.NoError(t, mustLoad(v, key1(tagSpine, q.spine(1)), &node))
	node.children++
	set(v, key1(tagSpine, q.spine(1)), &node)
	set(v, key1(tagSpine, Key{1}), &spineEntry{parent: q.spine(1), index: 2})
	breaks(v, ExactAccounting)

	v = c.view.Clone() // a time of grace for a current checkpoint
	s, err := ReadState(v, base)
	require.NoError(t, err)
	s.Grace, s.Continued = true, true
	set(v, key1(tagState, base), s)
	require.NoError(t, v.Set(key1(tagGrace, base), nil))
	breaks(v, SupersedeIsAPreference)

	// Superseded by an older one: the LSNs of two checkpoints are exchanged.
	in := q.plus(run(1, 10)...).intent("")
	in.Supersedes = []Generation{base}
	newer, _ := c.publish(t, in)
	v = c.view.Clone()
	for g, lsn := range map[Generation]LSN{base: 2, newer: 1} {
		s, err := ReadState(v, g)
		require.NoError(t, err)
		require.NoError(t, v.Delete(orderKey(g, s)))
		s.Published, s.Used = lsn, lsn
		set(v, key1(tagState, g), s)
		require.NoError(t, v.Set(orderKey(g, s), nil))
	}
	breaks(v, NoDanglingSupersede)

	// Superseded by one of another namespace: a record says so.
	foreign, _ := c.publish(t, newSpace("other", 1, shape{count: 1, bytes: 1}).sequence().plus(1).intent(""))
	v = c.view.Clone()
	_, err = apply(v, c.lsn+1, &Supersede{By: foreign, Generations: []Generation{newer}})
	require.NoError(t, err)
	breaks(v, NoDanglingSupersede)
}

// TestTotalsBelowZero: a record that would bring a total below zero is not applied.
func TestTotalsBelowZero(t *testing.T) {
	c, q, base := hybrid(t)
	refuses := func(key []byte, value []byte, r Record) {
		t.Helper()
		_, err := Apply(with(t, c.view, key, value), c.lsn+1, r)
		require.ErrorIs(t, err, ErrCorrupt)
		require.Contains(t, err.Error(), ExactAccounting)
	}
	retire := &Retire{Reason: ReasonRequested, Delete: true, Generations: []Generation{base}}
	refuses([]byte{tagAccounts}, new(Accounts).marshal(), retire)

	key := key1(tagPage, q.pageAt(0, 4))
	p, err := ReadPage(c.view, q.pageAt(0, 4))
	require.NoError(t, err)
	unlisted := *p
	unlisted.Listed = 0
	refuses(key, unlisted.marshal(), retire)
	unheld := *p
	unheld.Held = 0
	refuses(key, unheld.marshal(), retire)

	key = key1(tagSpine, q.spine(1))
	var node spineEntry
	require.NoError(t, mustLoad(c.view, key, &node))
	node.add(88, -1)
	node.add(89, 1)
	refuses(key, node.marshal(), retire)
	key = key1(tagSpine, q.spine(0))
	require.NoError(t, mustLoad(c.view, key, &node))
	node.children = 0
	refuses(key, node.marshal(), retire)
}

// TestContradictoryRecords: given a record that was decided on and then changed, when it is applied, then it is refused, or
// leaves a catalogue in which all accounts are right.
func TestContradictoryRecords(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newMachine(t)
		m.replica = nil
		t.Repeat(m.actions())
		v := NewMemory()
		for _, l := range m.log {
			r, err := Decode(l.kind, l.payload)
			require.NoError(t, err)
			contradict(t, r)
			changed := v.Clone()
			if _, err := Apply(changed, l.lsn, r); err != nil {
				require.ErrorIs(t, err, ErrCorrupt)
			} else {
				require.NoError(t, Check(changed))
			}
			l.apply(t, v)
		}
	})
}

// contradict changes one thing in a record.
func contradict(t *rapid.T, r Record) {
	gens := func(g []Generation) []Generation {
		if len(g) == 0 || rapid.Bool().Draw(t, "stranger") {
			return append(g, Generation{7})
		}
		if rapid.Bool().Draw(t, "twice") {
			return append(g, g[0])
		}
		return g[1:]
	}
	switch r := r.(type) {
	case *Retire:
		r.Generations = gens(r.Generations)
	case *Delete:
		r.Generations = gens(r.Generations)
	case *Mark:
		r.Generations, r.Mark = gens(r.Generations), MarkUsed+MarkEndGrace-r.Mark
	case *Supersede:
		r.Generations = gens(r.Generations)
	case *Persist:
		p := &r.Pages[rapid.IntRange(0, len(r.Pages)-1).Draw(t, "page")]
		switch rapid.IntRange(0, 2).Draw(t, "change") {
		case 0:
			p.Key[0]++
		case 1:
			p.Place = p.Place[1:]
		case 2:
			r.Pages = append(r.Pages, *p)
		}
	case *Publish:
		contradictPublish(t, r)
	}
}

func contradictPublish(t *rapid.T, r *Publish) {
	change := rapid.IntRange(0, 13).Draw(t, "change")
	if len(r.Pages) > 0 {
		i := rapid.IntRange(0, len(r.Pages)-1).Draw(t, "page")
		p := &r.Pages[i]
		switch change {
		case 0:
			p.Key[0]++
		case 1:
			p.Parent[0]++
		case 2:
			p.Bytes++
		case 3:
			p.Place = append(p.Place, Placement{Segment: 1, Stored: 1, Codec: CodecNone})
		case 4:
			r.Pages = slices.Delete(r.Pages, i, i+1)
		case 5:
			r.Pages = append(r.Pages, *p)
		case 6:
			r.Pages = append(r.Pages, NewPage{Key: Key{9}, Parent: p.Key, Bytes: p.Bytes})
		}
	}
	switch change {
	case 7:
		r.Spine = append(r.Spine, r.Manifest.Spine)
	case 8:
		if len(r.Spine) > 0 {
			r.Spine = r.Spine[1:]
		}
	case 9:
		r.SpineRoot = Key{1}
	case 10:
		r.Replaced = nil
	case 11:
		if r.Encoding == nil {
			r.Encoding = []byte("again")
		} else {
			r.Encoding = nil
		}
	case 12:
		r.Supersedes = append(r.Supersedes, r.Manifest.Generation())
	case 13:
		r.Manifest.Groups[0].Count++
	}
}
