package txn

import (
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestManyPrefixesInOneBlock_ID11: given 43 true prefixes of 1, 8, …, 295 tokens and 43 decoys of the same lengths in the
// same blocks, when 300 tokens are queried, then the one of 295 is found, by reading what the query's own blocks hold.
func TestManyPrefixesInOneBlock_ID11(t *testing.T) {
	c := newCatalogue()
	s := newSpace("state", 1, shape{count: 1, bytes: 1})
	query := s.sequence()
	for i := range int32(300) {
		query = query.plus(i)
	}
	want := map[Generation]int64{}
	for n := int64(1); n <= 295; n += 7 {
		q := query.first(n)
		g, _ := c.publish(t, q.intent(""))
		want[g] = n
		c.publish(t, q.first(n-1).plus(1000).intent(""))
	}
	require.Len(t, want, 43)
	g, offset, err := LongestListed(c.view, query.query())
	require.NoError(t, err)
	require.EqualValues(t, 295, offset)
	require.EqualValues(t, 295, want[g])

	last := int64(1 << 40)
	require.NoError(t, ListedPrefixes(c.view, query.query(), func(g Generation, at int64) bool {
		require.Equal(t, want[g], at)
		require.Less(t, at, last)
		last = at
		delete(want, g)
		return true
	}))
	require.Empty(t, want)

	// A foreign tail after any shared length finds the longest checkpoint below it.
	for n := int64(1); n < 295; n += 7 {
		require.EqualValues(t, n, c.longest(t, query.first(n).plus(2000, 2000)))
	}
	require.Zero(t, c.longest(t, s.sequence().plus(2000)))
	require.NoError(t, ListedPrefixes(c.view, &Query{Max: 0}, nil))
}

// TestLookupReadsWhatIsNear: the blocks read do not grow with the length of the prompt if the hit is at its end, and grow
// with its logarithm if nothing is shared.
func TestLookupReadsWhatIsNear(t *testing.T) {
	for _, blocks := range []int{4, 64, 1024} {
		t.Run(fmt.Sprint(blocks), func(t *testing.T) {
			c := newCatalogue()
			s := newSpace("state", 1, shape{count: 1, bytes: 1})
			q := s.sequence().plus(run(1, blocks*BlockTokens)...)
			c.publish(t, q.intent(""))
			v := &countingView{View: c.view}
			lookup := func(q *sequence) int64 {
				v.counts = counts{}
				_, offset, err := LongestListed(v, q.query())
				require.NoError(t, err)
				return offset
			}
			require.Equal(t, q.len(), lookup(q))
			require.Equal(t, counts{gets: 2}, v.counts, "its block, its prefix")
			require.Zero(t, lookup(s.sequence().plus(run(2, blocks*BlockTokens)...)))
			require.LessOrEqual(t, v.gets, 2+2*bits(blocks), "back to the namespace's own block")
			require.Equal(t, q.len(), lookup(q.plus(run(2, 100)...)), "a conversation that goes on")
			require.LessOrEqual(t, v.gets, 5)
			require.Equal(t, q.len(), lookup(q.plus(run(2, blocks*BlockTokens)...)))
			require.LessOrEqual(t, v.gets, 6+2*bits(blocks))
			require.Zero(t, v.sets+v.deletes+v.scans)
		})
	}
}

// bits is the number of halvings that bring n to 1.
func bits(n int) (b int) {
	for ; n > 1; n /= 2 {
		b++
	}
	return b
}

// TestManifestSizes: the size of a checkpoint counts every page of every rank, those that the manifest does not name too.
func TestManifestSizes(t *testing.T) {
	_, q, _ := hybrid(t)
	m := q.manifest("")
	require.EqualValues(t, 5+2+2, m.Pages())
	require.EqualValues(t, 2*(5*100+2*50+2*7), m.Bytes())
	for _, x := range []struct {
		offset, index int64
		tail          int
	}{{1, 0, 1}, {511, 0, 511}, {512, 0, 512}, {513, 1, 1}, {1024, 1, 512}, {1025, 2, 1}} {
		m := Manifest{Offset: x.offset}
		require.Equal(t, x.index, m.SpineIndex())
		require.Equal(t, x.tail, m.Tail())
	}
}

func TestAttentionPagesNeeded(t *testing.T) {
	for _, x := range []struct{ tokens, window, offset, first, count int64 }{
		{16, 0, 1, 0, 1}, {16, 0, 16, 0, 1}, {16, 0, 17, 0, 2}, {16, 0, 1000, 0, 63},
		{16, 32, 1, 0, 1}, {16, 32, 32, 0, 2}, {16, 32, 33, 0, 3}, {16, 32, 48, 1, 2}, {16, 32, 49, 1, 3},
		{16, 1, 16, 0, 1}, {16, 1, 17, 1, 1}, {1, 1, 2, 1, 1}, {1, 1, 5, 4, 1}, {16, 1000, 1000, 0, 63}, {16, 24, 100, 4, 3},
	} {
		first, count := AttentionShape{PageTokens: x.tokens, WindowTokens: x.window}.Needed(x.offset)
		require.Equal(t, []int64{x.first, x.count}, []int64{first, count}, "%+v", x)
	}
}

func TestBoundaryRefusesBadSteps(t *testing.T) {
	key := func(int, int64) Key { return Key{1} }
	for _, x := range []struct {
		shapes []AttentionShape
		step   int64
	}{
		{[]AttentionShape{{PageTokens: 16}}, 0},
		{[]AttentionShape{{PageTokens: 16}}, -16},
		{[]AttentionShape{{PageTokens: 16}}, 24},
		{[]AttentionShape{{PageTokens: 16}, {PageTokens: 32}}, 16},
		{[]AttentionShape{{PageTokens: 0}}, 16},
	} {
		_, err := LongestBoundary(NewMemory(), x.shapes, x.step, 100, key)
		require.ErrorIs(t, err, ErrInvalid)
	}
	for _, shapes := range [][]AttentionShape{nil, {{PageTokens: 16}}, {{PageTokens: 16, WindowTokens: 16}}} {
		for _, max := range []int64{-1, 0, 15, 16} {
			n, err := LongestBoundary(NewMemory(), shapes, 16, max, key)
			require.NoError(t, err)
			require.Zero(t, n)
		}
	}
}

func TestChainPagesAndDependents(t *testing.T) {
	c, q, base := hybrid(t)
	more, _ := c.publish(t, q.plus(run(1, 200)...).intent(""))
	branch, _ := c.publish(t, q.first(256).plus(run(2, 100)...).intent(""))
	retired, _ := c.publish(t, q.plus(run(3, 1)...).intent(""))
	c.retire(t, false, retired)

	keys, err := ChainPages(c.view, q.pageAt(0, 4), 5)
	require.NoError(t, err)
	for k, key := range keys {
		require.Equal(t, q.pageAt(0, int64(k)), key)
	}
	for _, count := range []int64{-1, 0, 4, 6, 1 << 60} {
		_, err := ChainPages(c.view, q.pageAt(0, 4), count)
		require.ErrorIs(t, err, ErrCorrupt)
	}
	_, err = ChainPages(c.view, Key{1}, 1)
	require.ErrorIs(t, err, ErrCorrupt)

	dependents := func(key Key) []Generation {
		gens, err := Dependents(c.view, key)
		require.NoError(t, err)
		return gens
	}
	require.ElementsMatch(t, []Generation{base, more, branch, retired}, dependents(q.pageAt(0, 0)))
	require.ElementsMatch(t, []Generation{base, more, retired}, dependents(q.pageAt(0, 2)))
	require.ElementsMatch(t, []Generation{base}, dependents(q.pageAt(0, 4)))
	require.ElementsMatch(t, []Generation{base}, dependents(q.pageAt(2, 1)))
	require.Empty(t, dependents(Key{1}))

	anyListed := func(key Key) Generation {
		g, err := AnyListed(c.view, key)
		require.NoError(t, err)
		return g
	}
	require.Contains(t, []Generation{base, more, branch}, anyListed(q.pageAt(0, 0)))
	require.Contains(t, []Generation{base, more}, anyListed(q.pageAt(0, 2)))
	require.Equal(t, base, anyListed(q.pageAt(2, 0)))
	whole, _ := c.publish(t, q.first(256).intent(""))
	require.Equal(t, whole, anyListed(q.pageAt(0, 1)), "the nearest one")
	c.retire(t, false, whole)
	require.Contains(t, []Generation{base, more, branch}, anyListed(q.pageAt(0, 1)), "not the nearest one, which is retired")
	only := q.plus(3)
	require.Zero(t, anyListed(only.pageAt(0, 4)), "only a retired one needs it")
	c.retire(t, false, base, more)
	require.Equal(t, branch, anyListed(q.pageAt(0, 0)))
	require.Zero(t, anyListed(q.pageAt(0, 2)))
}

// TestDamagedEntries: given an index that holds bytes which no record put there, when it is read, then the answer is
// ErrCorrupt, and never a panic.
func TestDamagedEntries(t *testing.T) {
	c, q, base := rich(t)
	read := map[string]func(v View) error{
		"accounts":   func(v View) error { _, err := ReadAccounts(v); return err },
		"page":       func(v View) error { _, err := ReadPage(v, q.pageAt(0, 0)); return err },
		"state":      func(v View) error { _, err := ReadState(v, base); return err },
		"manifest":   func(v View) error { _, err := ReadManifest(v, base); return err },
		"pages":      func(v View) error { return Pages(v, func(Key, *PageEntry) (bool, error) { return true, nil }) },
		"segments":   func(v View) error { return Segments(v, func(uint64, SegmentUse) (bool, error) { return true, nil }) },
		"order":      func(v View) error { return Checkpoints(v, func(Generation) (bool, error) { return true, nil }) },
		"undurable":  func(v View) error { return Undurable(v, func(Generation) (bool, error) { return true, nil }) },
		"namespaces": func(v View) error { return Namespaces(v, func(Key, []byte) (bool, error) { return true, nil }) },
		"states":     func(v View) error { return States(v, func(Generation, *State) (bool, error) { return true, nil }) },
		"in grace":   func(v View) error { return InGrace(v, func(Generation) (bool, error) { return true, nil }) },
		"any listed": func(v View) error { _, err := AnyListed(v, q.pageAt(0, 0)); return err },
		"pages under": func(v View) error {
			return PagesUnder(v, nil, func(Key, *PageEntry) (bool, error) { return true, nil })
		},
		"manifests": func(v View) error {
			return Manifests(v, func(_ Generation, _ *Manifest, damage error) (bool, error) { return true, damage })
		},
		"spines":     func(v View) error { return Spines(v, func(Key, SpineNode) (bool, error) { return true, nil }) },
		"applied":    func(v View) error { _, err := ReadApplied(v); return err },
		"lookup":     func(v View) error { _, _, err := LongestListed(v, q.query()); return err },
		"dependents": func(v View) error { _, err := Dependents(v, q.pageAt(0, 0)); return err },
		"retire": func(v View) error {
			_, err := Apply(v, c.lsn+1, &Retire{Reason: ReasonLost, Delete: true, Generations: []Generation{base}})
			return err
		},
		"republish": func(v View) error { _, err := DecidePublish(v, q.intent("other")); return err },
	}
	noticed := map[string]bool{}
	for _, damage := range []func(v *Memory, k string){
		func(v *Memory, k string) { require.NoError(t, v.Set([]byte(k), nil)) },
		func(v *Memory, k string) { require.NoError(t, v.Set([]byte(k), v.values[k][:len(v.values[k])/2])) },
		func(v *Memory, k string) { require.NoError(t, v.Set([]byte(k), append(v.values[k], 1))) },
		func(v *Memory, k string) { require.NoError(t, v.Set([]byte(k[:1+len(k)/2]), v.values[k])) },
	} {
		for _, k := range c.view.keys {
			v := c.view.Clone()
			damage(v, k)
			for name, fn := range read {
				if err := fn(v.Clone()); err != nil {
					require.ErrorIs(t, err, ErrCorrupt, name)
					noticed[name] = true
				}
			}
			if hash(t, v) != hash(t, c.view) && k[0] != tagNamespace {
				require.ErrorIs(t, Check(v), ErrCorrupt, "%x", k)
			}
		}
	}
	for name := range read {
		require.True(t, noticed[name], "%s notices no damage", name)
	}

	// A key that is as long as one of another sort.
	short := c.view.Clone()
	require.NoError(t, short.Set(key1(tagChild, q.pageAt(0, 0)), nil))
	for _, name := range []string{"dependents", "any listed"} {
		require.ErrorIs(t, read[name](short), ErrCorrupt, name)
	}
	require.ErrorIs(t, Check(short), ErrCorrupt)

	// A cycle of parents ends the search for the first page.
	v := c.view.Clone()
	p, err := ReadPage(v, q.pageAt(0, 0))
	require.NoError(t, err)
	p.Parent = q.pageAt(0, 3)
	require.NoError(t, v.Set(key1(tagPage, q.pageAt(0, 0)), p.marshal()))
	require.ErrorIs(t, Check(v), ErrCorrupt)
	keys, err := ChainPages(v, q.pageAt(0, 3), 4)
	require.NoError(t, err)
	require.Len(t, keys, 4)

	// An ending that lies outside its block.
	node := append(make([]byte, 32), 0, 0, 1)
	node = append(binary.AppendUvarint(node, 1<<63), 1)
	require.NoError(t, v.Set(key1(tagSpine, q.spine(1)), node))
	_, _, err = LongestListed(v, q.query())
	require.ErrorIs(t, err, ErrCorrupt)
}
