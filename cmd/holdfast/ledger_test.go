package main

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// tracePath gives a recorded trace, or skips the test where there is none.
func tracePath(t testing.TB, name string) string {
	t.Helper()
	path := filepath.Join("..", "..", "..", "shared", "traces", name)
	if _, err := os.Stat(path); err != nil {
		t.Skipf("the recorded traces are not here: %v", err)
	}
	return path
}

// What the recorded traces give a cache that never forgets has been computed independently.
func TestLedgerOfTheRecordedTraces(t *testing.T) {
	for _, c := range []struct {
		trace                                                 string
		requests, blocks, distinct, checkpoints, hybrid, attn int
	}{
		{"mooncake_conversation.jsonl", 12031, 276491, 170899, 9633, 98899, 105592},
		{"mooncake_synthetic.jsonl", 3993, 117888, 40148, 1607, 60812, 77740},
	} {
		t.Run(c.trace, func(t *testing.T) {
			s, closer, err := openTrace(tracePath(t, c.trace), nil)
			require.NoError(t, err)
			defer closer.Close()
			require.Equal(t, c.requests, s.total)
			hybrid := newLedger(setup{Model: hybridModel, Ranks: 2, PageBytes: 4096, StateBytes: 65536})
			attn := newLedger(setup{Model: attentionModel, Ranks: 1, PageBytes: 10, StateBytes: 0})
			var requests, blocks, hybridHits, attnHits int
			var newBytes int64
			for r, err := range s.requests {
				require.NoError(t, err)
				requests++
				blocks += len(r.Blocks)
				hybridHits += hybrid.possible(r)
				attnHits += attn.possible(r)
				newBytes += hybrid.newBytes(r)
				hybrid.acknowledge(r)
				attn.acknowledge(r)
			}
			require.Equal(t, c.requests, requests)
			require.Equal(t, c.blocks, blocks)
			require.Equal(t, c.hybrid, hybridHits)
			require.Equal(t, c.attn, attnHits)
			require.Len(t, hybrid.prefixes, c.distinct)
			require.Len(t, hybrid.checkpoints, c.checkpoints)
			require.Len(t, hybrid.order, c.checkpoints)
			require.Equal(t, int64(2*(4096*c.distinct+65536*c.checkpoints)), hybrid.uniqueBytes())
			require.Equal(t, hybrid.uniqueBytes(), newBytes)
			require.Equal(t, int64(10*c.distinct), attn.uniqueBytes())
		})
	}
}

func TestLedgerByKindOfModel(t *testing.T) {
	a := request{Blocks: []uint64{1, 2, 3}}
	for _, c := range []struct {
		asked        []uint64
		hybrid, attn int
	}{
		{[]uint64{1, 2, 3}, 3, 3},
		{[]uint64{1, 2, 3, 4}, 3, 3},
		{[]uint64{1, 2}, 0, 2},
		{[]uint64{1, 2, 9}, 0, 2},
		{[]uint64{2, 3}, 0, 0},
		{nil, 0, 0},
	} {
		for model, want := range map[model]int{hybridModel: c.hybrid, attentionModel: c.attn} {
			l := newLedger(setup{Model: model, Ranks: 1, PageBytes: 1, StateBytes: 1})
			l.acknowledge(a)
			l.acknowledge(request{})
			require.Equal(t, want, l.possible(request{Blocks: c.asked}), fmt.Sprint(model, c.asked))
		}
	}
}
