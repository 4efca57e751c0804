package main

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/db"
)

// restorationOf forges what a restore of the first blocks of r gives, as it must be.
func restorationOf(e *embedded, blocks int64) (f found, ranks [][]db.Page) {
	f.Offset = blocks * blockTokens
	for rank := range e.setup.Ranks {
		var pages []db.Page
		add := func(group int, position, size int64) {
			b := make([]byte, size)
			e.name(group, position, rank, blocks).fill(b)
			pages = append(pages, db.Page{Group: group, Position: position, Bytes: b})
		}
		for i := range blocks {
			add(attentionGroup, i, e.setup.PageBytes)
		}
		if e.setup.Model == hybridModel {
			add(recurrentGroup, 0, e.setup.StateBytes)
		}
		ranks = append(ranks, pages)
	}
	return f, ranks
}

// Whatever a restore gets wrong, however consistent it is in itself, is a mismatch.
func TestEveryWrongRestorationIsSeen(t *testing.T) {
	for _, m := range []model{hybridModel, attentionModel} {
		e := &embedded{setup: testSetup(m)}
		e.digests = prefixDigests(nil, request{Blocks: []uint64{11, 12, 13, 14}})
		check := func(f found, ranks [][]db.Page) found {
			e.check(&f, func(rank int) []db.Page { return ranks[rank] })
			return f
		}
		good, ranks := restorationOf(e, 3)
		good = check(good, ranks)
		require.Zero(t, good.Mismatches, good.Faults)
		perRank := int64(3)
		if m == hybridModel {
			perRank = 4
		}
		require.Equal(t, 2*perRank, good.Pages)

		another := &embedded{setup: e.setup, digests: prefixDigests(nil, request{Blocks: []uint64{11, 12, 99, 14}})}
		_, foreign := restorationOf(another, 3)
		_, longer := restorationOf(e, 4)
		for name, spoil := range map[string]func(f *found, ranks [][]db.Page){
			"the last byte of the last page": func(_ *found, r [][]db.Page) {
				p := r[1][len(r[1])-1].Bytes
				p[len(p)-1] ^= 0x80
			},
			"a page of another prefix":     func(_ *found, r [][]db.Page) { r[0][2].Bytes = foreign[0][2].Bytes },
			"ranks swapped":                func(_ *found, r [][]db.Page) { r[0], r[1] = r[1], r[0] },
			"pages swapped":                func(_ *found, r [][]db.Page) { r[0][0].Bytes, r[0][1].Bytes = r[0][1].Bytes, r[0][0].Bytes },
			"pages in another order":       func(_ *found, r [][]db.Page) { r[0][0], r[0][1] = r[0][1], r[0][0] },
			"a page too few":               func(_ *found, r [][]db.Page) { r[1] = r[1][1:] },
			"no pages":                     func(_ *found, r [][]db.Page) { r[1] = nil },
			"a page too many":              func(_ *found, r [][]db.Page) { r[1] = append(r[1], r[1][0]) },
			"a short page":                 func(_ *found, r [][]db.Page) { r[0][0].Bytes = r[0][0].Bytes[1:] },
			"a longer prefix's pages":      func(_ *found, r [][]db.Page) { r[0] = longer[0] },
			"a wrong offset":               func(f *found, _ [][]db.Page) { f.Offset -= blockTokens },
			"an offset inside a block":     func(f *found, _ [][]db.Page) { f.Offset-- },
			"an offset beyond the request": func(f *found, _ [][]db.Page) { f.Offset = 5 * blockTokens },
			"an offset of nothing":         func(f *found, _ [][]db.Page) { f.Offset = 0 },
		} {
			f, ranks := restorationOf(e, 3)
			spoil(&f, ranks)
			f = check(f, ranks)
			require.Positive(t, f.Mismatches, "%s, %s", m, name)
			require.NotEmpty(t, f.Faults, name)
		}

		if m == hybridModel {
			// The state of another offset has the right size, group and position.
			f, ranks := restorationOf(e, 3)
			_, at4 := restorationOf(e, 4)
			ranks[0][3].Bytes = at4[0][4].Bytes
			f = check(f, ranks)
			require.Equal(t, int64(1), f.Mismatches)
			require.Contains(t, f.Faults[0], "page 0 of group 1 on rank 0")
		}
	}
}

func TestAMismatchOnEachOfManyPagesIsCountedAndAFewAreDescribed(t *testing.T) {
	e := &embedded{setup: testSetup(attentionModel)}
	e.digests = prefixDigests(nil, request{Blocks: slices.Repeat([]uint64{5}, 40)})
	f, ranks := restorationOf(e, 40)
	for _, pages := range ranks {
		for _, p := range pages {
			p.Bytes[0]++
		}
	}
	e.check(&f, func(rank int) []db.Page { return ranks[rank] })
	require.Equal(t, int64(80), f.Mismatches)
	require.Len(t, f.Faults, faultsMax)
}

// Directories that were kept are found again, by a replay of the same shape and by no other.
func TestNamespacesOfReplays(t *testing.T) {
	ids := map[string]string{}
	for _, s := range []setup{
		{Model: hybridModel, Ranks: 1, PageBytes: 4096, StateBytes: 65536},
		{Model: hybridModel, Ranks: 2, PageBytes: 4096, StateBytes: 65536},
		{Model: hybridModel, Ranks: 1, PageBytes: 8192, StateBytes: 65536},
		{Model: hybridModel, Ranks: 1, PageBytes: 4096, StateBytes: 4096},
		{Model: attentionModel, Ranks: 1, PageBytes: 4096},
	} {
		ns, err := namespaceOf(s)
		require.NoError(t, err)
		again, err := namespaceOf(s)
		require.NoError(t, err)
		require.Equal(t, ns.ID(), again.ID())
		ids[ns.ID().String()] = fmt.Sprint(s)
	}
	require.Len(t, ids, 5)
}

// Given a kept directory, when the same requests come again, then everything is found and nothing is written anew.
func TestReplayInAKeptDirectory(t *testing.T) {
	dir := t.TempDir() + "/kept"
	args := append([]string{"--limit", "60", "--dir", dir}, smallPages...)
	first := replayJSON(t, statusOK, args...)
	second := replayJSON(t, statusOK, args...)
	require.Equal(t, first.Checkpoints, second.Checkpoints)
	require.Equal(t, second.Blocks, second.HitBlocks)
	require.Greater(t, second.HitBlocks, second.PossibleHitBlocks, "possible counts this replay alone")
	require.Zero(t, second.Mismatches)
	require.Zero(t, second.Written.Payload)
	require.Equal(t, dir, second.Dir)
}
