package db

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// The three kinds of model, and what of a checkpoint they need. Scenario area ID asks for the longest prefix at any offset;
// here it is which offsets there are.

// restoredAt restores with options, checks every byte and the set of pages, and gives the offset; 0 for a miss. It has to agree
// with what a lookup says.
func restoredAt(t testing.TB, d *DB, s *Sequence, o LookupOptions) int64 {
	t.Helper()
	m, lookupErr := d.Lookup(context.Background(), s, o)
	r, err := d.Restore(context.Background(), s, o)
	if err != nil {
		require.ErrorIs(t, err, ErrNotFound)
		require.ErrorIs(t, lookupErr, ErrNotFound)
		return 0
	}
	defer r.Release()
	require.NoError(t, lookupErr)
	require.Equal(t, m.Offset, r.Offset())
	require.Equal(t, m.Generation, r.Generation())
	layout := s.Namespace().Layout()
	verify(t, r, layout.Ranks)
	at := 0
	pages := r.Pages(0)
	for i, g := range layout.Groups {
		first, count := layout.pagesAt(i, r.Offset())
		for k := first; k < first+count; k++ {
			p := pages[at]
			require.Equal(t, i, p.Group)
			require.Equal(t, k, p.Position)
			require.Equal(t, s.pageKey(i, k, layout.pageEnd(i, k, r.Offset())), p.Key)
			require.Len(t, p.Bytes, int(g.PageBytes))
			at++
		}
	}
	require.Len(t, pages, at)
	return r.Offset()
}

// modelOfLookup is what a lookup has to find, from the definition: a listed checkpoint that is a prefix, or, if all groups are
// attention groups, an offset at which pages of every group end and whose pages all belong to listed checkpoints.
func modelOfLookup(layout Layout, published map[*Sequence][]int64, s *Sequence, limit int64) int64 {
	have := map[any]bool{}
	best := int64(0)
	for seq, offsets := range published {
		for _, n := range offsets {
			if n <= limit && n <= s.Len() && seq.prefix(n) == s.prefix(n) {
				best = max(best, n)
			}
			for i := range layout.Groups {
				first, count := layout.pagesAt(i, n)
				for k := first; k < first+count; k++ {
					have[seq.pageKey(i, k, layout.pageEnd(i, k, n))] = true
				}
			}
		}
	}
	for n := limit; n > best; n-- {
		if n > 0 && layout.boundary(n) == n && func() bool {
			for i := range layout.Groups {
				first, count := layout.pagesAt(i, n)
				for k := first; k < first+count; k++ {
					if !have[s.pageKey(i, k, layout.pageEnd(i, k, n))] {
						return false
					}
				}
			}
			return true
		}() {
			return n
		}
	}
	return best
}

// A hybrid model is restored exactly where a checkpoint was published and nowhere between, and so is one with auxiliary pages.
func TestHybridIsRestoredAtExactOffsets_ID04(t *testing.T) {
	for _, groups := range [][]Group{tiny(), shared(), {
		{Name: "attention:kv", Kind: Attention, PageBytes: 64, PageTokens: 16}, {Name: "auxiliary:x", Kind: Auxiliary, PageBytes: 10, Pages: 2},
	}} {
		restarts(t, func(t *testing.T, crashed bool) {
			d := openDB(t, tempDir(t), Options{})
			seq, books := seqOf(t, testNamespace(t, 2, groups...), tokens(1, 200)), shelf{}
			for _, n := range []int64{33, 96, 161} {
				books.publish(t, d, seq, n)
			}
			d = reopen(t, d, crashed)
			for limit := int64(1); limit <= 200; limit++ {
				want := int64(0)
				for _, n := range []int64{33, 96, 161} {
					if n <= limit {
						want = n
					}
				}
				require.Equal(t, want, restoredAt(t, d, seq, LookupOptions{MaxOffset: limit}))
			}
			books.requireListedIsReadable(t, d)
		})
	}
}

// An attention-only model is restored at every page boundary inside any listed checkpoint, and at its exact end, where the last
// page may be partial.
func TestAttentionIsRestoredAtPageBoundaries_ID04(t *testing.T) {
	restarts(t, func(t *testing.T, crashed bool) {
		d := openDB(t, tempDir(t), Options{})
		ns, text, books := testNamespace(t, 2, attentionOnly(64, 16)...), tokens(1, 300), shelf{}
		gen, _ := books.publish(t, d, seqOf(t, ns, text), 200)
		branch := seqOf(t, ns, text[:100], tokens(2, 100))
		books.publish(t, d, branch, 183)
		d = reopen(t, d, crashed)
		for _, c := range []struct {
			seq         *Sequence
			shared, end int64
		}{{seqOf(t, ns, text), 300, 200}, {branch, 200, 183}} {
			for limit := int64(1); limit <= c.shared; limit++ {
				want := min(limit, c.end) / 16 * 16
				if limit >= c.end {
					want = c.end
				}
				require.Equal(t, want, restoredAt(t, d, c.seq, LookupOptions{MaxOffset: limit}))
			}
		}
		m, err := d.Lookup(context.Background(), seqOf(t, ns, text), LookupOptions{MaxOffset: 199})
		require.NoError(t, err)
		require.Equal(t, Match{Offset: 192}, m, "no checkpoint of its own")
		m, err = d.Lookup(context.Background(), seqOf(t, ns, text), LookupOptions{})
		require.NoError(t, err)
		require.Equal(t, Match{Offset: 200, Generation: gen}, m)
		stranger := seqOf(t, ns, text[:63], tokens(3, 100))
		require.EqualValues(t, 48, restoredAt(t, d, stranger, LookupOptions{}), "63 tokens are shared: three whole pages")

		require.NoError(t, d.Delete(context.Background(), gen))
		require.EqualValues(t, 96, restoredAt(t, d, seqOf(t, ns, text), LookupOptions{}), "what the branch shares with it")
		books.requireListedIsReadable(t, d)
		requireEmpty(t, d)
	})
}

// Groups with pages of different lengths meet at the common multiples.
func TestBoundariesOfSeveralPageSizes_ID04(t *testing.T) {
	groups := []Group{
		{Name: "attention:a", Kind: Attention, PageBytes: 64, PageTokens: 16},
		{Name: "attention:b", Kind: Attention, PageBytes: 128, PageTokens: 24},
		{Name: "attention:c", Kind: Attention, PageBytes: 32, PageTokens: 6},
	}
	d := openDB(t, tempDir(t), Options{})
	seq, books := seqOf(t, testNamespace(t, 1, groups...), tokens(1, 300)), shelf{}
	books.publish(t, d, seq, 200)
	d = reopen(t, d, true)
	for limit := int64(1); limit <= 300; limit++ {
		want := min(limit, 200) / 48 * 48
		if limit >= 200 {
			want = 200
		}
		require.Equal(t, want, restoredAt(t, d, seq, LookupOptions{MaxOffset: limit}))
	}
	books.requireListedIsReadable(t, d)
}

// A window needs only the pages that hold its tokens. A checkpoint whose window is there is restored though older pages
// are gone; a boundary whose window is gone is not.
func TestWindowNeedsItsPagesOnly_ID04(t *testing.T) {
	groups := []Group{
		{Name: "attention:full", Kind: Attention, PageBytes: 64, PageTokens: 16},
		{Name: "attention:window", Kind: Attention, PageBytes: 80, PageTokens: 8, WindowTokens: 32},
	}
	restarts(t, func(t *testing.T, crashed bool) {
		d := openDB(t, tempDir(t), Options{})
		seq, books := seqOf(t, testNamespace(t, 2, groups...), tokens(1, 400)), shelf{}
		early, _ := books.publish(t, d, seq, 64)
		p := begin(t, d, seq, 203)
		window := map[int64]bool{}
		for _, s := range slots(t, p, 0) {
			if s.GroupName() == "attention:window" {
				window[s.Position()] = true
			}
		}
		require.Equal(t, map[int64]bool{21: true, 22: true, 23: true, 24: true, 25: true}, window, "tokens 171…202")
		fill(t, p, 0)
		fill(t, p, 1)
		require.False(t, commit(t, p, 0))
		require.True(t, commit(t, p, 1))
		books.keep(t, p.Generation(), seq, 203)
		d = reopen(t, d, crashed)
		expect := func(limit, want int64) {
			t.Helper()
			require.Equal(t, want, restoredAt(t, d, seq, LookupOptions{MaxOffset: limit}), "at most %d", limit)
		}
		expect(400, 203)
		expect(202, 64) // 192 would need tokens 160…191, and page 20 of the window was never there
		expect(64, 64)
		expect(63, 0) // 48 would need tokens 16…47
		require.NoError(t, d.Delete(context.Background(), early))
		expect(400, 203)
		expect(202, 0)
		expect(64, 0)
		books.publish(t, d, seq, 192)
		expect(202, 192)
		expect(191, 0)
		books.requireListedIsReadable(t, d)
		requireEmpty(t, d)
	})
}

// MaxOffset and LeaveTokens bound what is found, for every kind of model, and what is asked for counts, not what would fit.
func TestLookupBounds_ID04(t *testing.T) {
	d := openDB(t, tempDir(t), Options{WritePolicy: Never})
	text := tokens(1, 100)
	attention, hybrid := testNamespace(t, 1, attentionOnly(64, 16)...), testNamespace(t, 1, tiny()...)
	for _, ns := range []*Namespace{attention, hybrid} {
		for _, n := range []int64{32, 96, 100} {
			publish(t, d, seqOf(t, ns, text), n)
		}
	}
	for _, c := range []struct {
		o                 LookupOptions
		attention, hybrid int64
	}{
		{LookupOptions{}, 100, 100},
		{LookupOptions{LeaveTokens: 1}, 96, 96},
		{LookupOptions{LeaveTokens: 4}, 96, 96},
		{LookupOptions{LeaveTokens: 5}, 80, 32},
		{LookupOptions{LeaveTokens: 69}, 16, 0},
		{LookupOptions{LeaveTokens: 85}, 0, 0},
		{LookupOptions{LeaveTokens: 100}, 0, 0},
		{LookupOptions{LeaveTokens: 1 << 62}, 0, 0},
		{LookupOptions{MaxOffset: 99}, 96, 96},
		{LookupOptions{MaxOffset: 95}, 80, 32},
		{LookupOptions{MaxOffset: 40, LeaveTokens: 50}, 32, 32},
		{LookupOptions{MaxOffset: 60, LeaveTokens: 69}, 16, 0},
		{LookupOptions{MaxOffset: 1}, 0, 0},
	} {
		require.Equal(t, c.attention, restoredAt(t, d, seqOf(t, attention, text), c.o), "attention %+v", c.o)
		require.Equal(t, c.hybrid, restoredAt(t, d, seqOf(t, hybrid, text), c.o), "hybrid %+v", c.o)
	}
	require.Zero(t, restoredAt(t, d, attention.NewSequence(), LookupOptions{}), "an empty sequence has no prefix")
}

// Random trees of prefixes in random layouts, with deletions and restarts: every lookup finds what the definition says.
func TestLookupAgreesWithTheDefinition_ID10_ID11(t *testing.T) {
	rounds := 12
	if testing.Short() {
		rounds = 2
	}
	for round := range rounds {
		t.Run(fmt.Sprint(round), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(uint64(round), 7))
			var groups []Group
			for i := range 1 + rng.IntN(3) {
				g := Group{Name: fmt.Sprintf("attention:%d", i), Kind: Attention, PageBytes: 1 + rng.Int64N(200), PageTokens: []int64{1, 8, 12, 16, 50}[rng.IntN(5)]}
				if rng.IntN(2) == 0 {
					g.WindowTokens = 1 + rng.Int64N(120)
				}
				groups = append(groups, g)
			}
			if rng.IntN(4) == 0 {
				groups = append(groups, Group{Name: "recurrent", Kind: Recurrent, PageBytes: 1 + rng.Int64N(300), Pages: 1 + rng.IntN(2)})
			}
			d := openDB(t, tempDir(t), Options{WritePolicy: OnEvict})
			ns, books := testNamespace(t, 1+rng.IntN(2), groups...), shelf{}
			trunk := tokens(uint64(round), 600)
			var seqs []*Sequence
			for i := range 4 {
				seqs = append(seqs, seqOf(t, ns, trunk[:rng.IntN(500)], tokens(uint64(1000+i), 10+rng.IntN(100))))
			}
			published, gens := map[*Sequence][]int64{}, map[Generation]func(){}
			for range 10 {
				seq := seqs[rng.IntN(len(seqs))]
				n := 1 + rng.Int64N(seq.Len())
				gen, _ := publish(t, d, seq, n)
				books.keep(t, gen, seq, n)
				if gens[gen] != nil {
					continue // published before, perhaps from another sequence
				}
				published[seq] = append(published[seq], n)
				at := len(published[seq]) - 1
				gens[gen] = func() { published[seq][at] = 0 }
			}
			for gen, forget := range gens {
				if rng.IntN(4) == 0 {
					require.NoError(t, d.Delete(context.Background(), gen))
					forget()
				}
			}
			for seq := range published {
				kept := published[seq][:0:0]
				for _, n := range published[seq] {
					if n > 0 {
						kept = append(kept, n)
					}
				}
				published[seq] = kept
			}
			d = reopen(t, d, false)
			layout := ns.Layout()
			for _, seq := range seqs {
				for range 15 {
					limit := 1 + rng.Int64N(seq.Len())
					want := modelOfLookup(layout, published, seq, limit)
					require.Equal(t, want, restoredAt(t, d, seq, LookupOptions{MaxOffset: limit}), "%+v, at most %d", groups, limit)
				}
			}
			books.requireListedIsReadable(t, d)
			requireEmpty(t, d)
		})
	}
}
