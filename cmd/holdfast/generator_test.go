package main

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/zeebo/xxh3"
	"pgregory.net/rapid"
)

func TestGeneratorFollowsFromItsSeed(t *testing.T) {
	first, err := read(generate(7, 300).requests)
	require.NoError(t, err)
	again, err := read(generate(7, 300).requests)
	require.NoError(t, err)
	require.Equal(t, first, again)
	longer, err := read(generate(7, 400).requests)
	require.NoError(t, err)
	require.Equal(t, first, longer[:300], "a longer run begins with the shorter one")
	other, err := read(generate(8, 300).requests)
	require.NoError(t, err)
	require.NotEqual(t, first, other)

	// The workload of a seed is an interface: figures that were written down refer to it.
	require.Equal(t, generatedDigest, fmt.Sprintf("%016x", xxh3.HashString(fmt.Sprint(first))))
}

const generatedDigest = "349f9b2c5756e0e8"

func TestGeneratedRequestsAreATrace(t *testing.T) {
	all, err := read(generate(3, 2000).requests)
	require.NoError(t, err)
	require.Len(t, all, 2000)
	before := map[uint64]uint64{} // the id before each id
	for i, r := range all {
		require.Equal(t, i, r.Index)
		require.Equal(t, r.Input/blockTokens, int64(len(r.Blocks)))
		require.Positive(t, r.Output)
		require.LessOrEqual(t, r.Input, int64(contextTokensMax+20_000), "contexts are bounded")
		if i > 0 {
			require.GreaterOrEqual(t, r.At, all[i-1].At, "arrivals are in order")
		}
		for k, id := range r.Blocks {
			previous := uint64(0)
			if k > 0 {
				previous = r.Blocks[k-1]
			}
			if known, ok := before[id]; ok {
				require.Equal(t, known, previous, "equal ids mean equal prefixes")
			}
			before[id] = previous
		}
	}
}

// The default workload has everything in it that makes prefix caches hard, and enough to find.
func TestGeneratorHasEveryKindOfTurn(t *testing.T) {
	g := newGenerator(1)
	l := newLedger(setup{Model: hybridModel, Ranks: 1, PageBytes: 1, StateBytes: 1})
	var blocks, possible int
	for range generatedRequests {
		r := g.next()
		blocks += len(r.Blocks)
		possible += l.possible(r)
		l.acknowledge(r)
	}
	for _, event := range []string{"continued", "retried", "aborted", "rewound", "branched", "side", "side ended", "sub-agent", "sub-agent ended", "ended", "compacted"} {
		require.GreaterOrEqual(t, g.events[event], 5, "%s: %v", event, g.events)
	}
	require.Greater(t, g.events["continued"], generatedRequests/2)
	require.Less(t, g.threads.Len(), 8*agentsAtOnce, "the crowd does not grow without end")
	require.InDelta(t, 0.9, float64(possible)/float64(blocks), 0.08, "%d of %d blocks were there before", possible, blocks)
}

func TestTranscriptsShareIDsUpToWhereTheyPart(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.Custom(func(t *rapid.T) [2]int64 {
			return [2]int64{rapid.Int64Range(1, 5).Draw(t, "text"), rapid.Int64Range(1, 1500).Draw(t, "tokens")}
		})
		shared := rapid.SliceOfN(text, 0, 6).Draw(t, "shared")
		build := func(texts [][2]int64) (t transcript) {
			for _, x := range texts {
				t.add(uint64(x[0]), x[1])
			}
			return t
		}
		trunk := build(shared)
		kept := slices.Clone(trunk.blocks)
		a, b := trunk, trunk
		a.add(100, 3000)
		b.add(101, 3000)
		require.True(t, slices.Equal(kept, trunk.blocks), "adding to a branch leaves the trunk as it was")
		require.Equal(t, build(append(slices.Clip(shared), [2]int64{100, 3000})), a, "a branch is what was put together")

		whole := int(trunk.tokens / blockTokens)
		require.Equal(t, a.tokens/blockTokens, int64(len(a.blocks)))
		require.Equal(t, a.blocks[:whole], b.blocks[:whole])
		require.NotEqual(t, a.blocks[whole], b.blocks[whole])

		// An answer that is cut short has the ids of the whole answer up to the cut.
		cut := trunk
		n := rapid.Int64Range(1, 2999).Draw(t, "cut")
		cut.add(100, n)
		require.True(t, slices.Equal(a.blocks[:len(cut.blocks)], cut.blocks))
	})
}
