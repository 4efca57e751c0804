package main

import (
	"cmp"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// longConversations gives conversations of 20 turns, of which a few go on side by side; every turn adds three blocks to the one before.
func longConversations(conversations, atATime int) source {
	const turns = 20
	return source{name: "conversations", total: conversations * turns, requests: func(yield func(request, error) bool) {
		index := 0
		for first := 0; first < conversations; first += atATime {
			for turn := range turns {
				for c := first; c < first+atATime; c++ {
					r := request{Index: index}
					for b := range 3 * (turn + 1) {
						r.Blocks = append(r.Blocks, uint64(c)<<32|uint64(b)+1)
					}
					r.Input = r.tokens()
					if index++; !yield(r, nil) {
						return
					}
				}
			}
		}
	}}
}

// Deferred writing pays: while conversations of 20 turns stay in RAM as long as they are active, a tenth of the state bytes is written at
// most, because states that a later turn has superseded never are; and no page is written twice, attention pages included.
func TestDeferredWritesOfConversations(t *testing.T) {
	written := map[string]written{}
	unique := int64(0)
	for _, policy := range []string{"write-through", "on-evict"} {
		s := setup{
			Dir: t.TempDir(), Model: hybridModel, Ranks: 1, PageBytes: 4 << 10, StateBytes: 64 << 10, RAMBytes: 12 << 20,
			WritePolicy: policy, Grace: -1,
		}
		h, err := openEmbedded(t.Context(), s)
		require.NoError(t, err)
		d := driver(h, s, 0)
		d.source = longConversations(48, 4)
		require.NoError(t, d.run(t.Context()))
		require.Zero(t, d.report.Mismatches, d.report.Faults)
		written[policy] = d.report.Written
		unique = d.report.UniquePayloadBytes
		require.NoError(t, h.close(t.Context()))
	}
	through, deferred := written["write-through"], written["on-evict"]
	t.Logf("states: %d bytes written through, %d deferred: %.3f", through.Own, deferred.Own, float64(deferred.Own)/float64(through.Own))
	require.Equal(t, unique, through.Payload, "every page once")
	require.EqualValues(t, 48*20*(64<<10), through.Own)
	require.Positive(t, deferred.Own, "some left RAM")
	require.LessOrEqual(t, deferred.Own*10, through.Own)
	require.LessOrEqual(t, deferred.Payload-deferred.Own, through.Payload-through.Own, "no attention page twice")
	require.Positive(t, deferred.Left)
	require.LessOrEqual(t, float64(deferred.Payload), 1.02*float64(deferred.Left)+float64(12<<20), "beyond what left RAM, what is written and still there")
}

// Pages whose compression was tried in vain come back as they were, over restarts; a codec that there is none is refused.
func TestReplayWithCompression(t *testing.T) {
	s := testSetup(hybridModel)
	s.Dir, s.PageBytes, s.StateBytes, s.Codec = t.TempDir(), 16<<10, 64<<10, "zstd"
	h, err := openEmbedded(t.Context(), s)
	require.NoError(t, err)
	d := driver(h, s, 60)
	d.restartEvery = 20
	require.NoError(t, d.run(t.Context()))
	require.NoError(t, h.close(t.Context()))
	require.Zero(t, d.report.Mismatches, d.report.Faults)
	for _, codec := range []string{"gzip", "ZSTD", "none "} {
		o := defaultReplayOptions()
		o.codec = codec
		_, err := o.setup()
		require.ErrorContains(t, err, fmt.Sprintf("codec %q", codec), cmp.Or(codec, "empty"))
	}
}
