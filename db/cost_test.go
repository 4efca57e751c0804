//go:build !invariants && !race

// What deriving everything anew, and looking for races, allocate is not of interest.

package db

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
)

// What an operation costs that does not depend on the machine: allocations and bytes of the log. The bounds are a little above
// what is measured, so that a change which costs more is seen.
func costDB(t *testing.T) (*DB, *Namespace) {
	d := openDB(t, tempDir(t), Options{RAMBytes: 64 << 20, WritePolicy: Never})
	ns := testNamespace(t, 2, Group{Name: "attention:kv", Kind: Attention, PageBytes: 64, PageTokens: 16}, Group{Name: "recurrent:state", Kind: Recurrent, PageBytes: 64, Pages: 1})
	return d, ns
}

// longSequence gives a sequence of n tokens and publishes it.
func longSequence(t *testing.T, d *DB, ns *Namespace, seed uint64, n int) *Sequence {
	seq := seqOf(t, ns, tokens(seed, n))
	publishAll(t, d, seq)
	return seq
}

func publishAll(t testing.TB, d *DB, seq *Sequence) {
	p, err := d.Begin(context.Background(), PublishRequest{Sequence: seq, Offset: seq.Len()})
	require.NoError(t, err)
	for rank := range 2 {
		slots, err := p.Slots(context.Background(), rank)
		require.NoError(t, err)
		for _, s := range slots {
			s.Filled(s.Size())
		}
		_, err = p.Commit(context.Background(), rank)
		require.NoError(t, err)
	}
}

// One more page pair on 4,096 pages costs the log what it costs on 16, and few bytes.
func TestLogBytesOfAPublicationFollowWhatIsNew(t *testing.T) {
	d, ns := costDB(t)
	var cost []int64
	for i, pages := range []int{16, 4096} {
		seq := longSequence(t, d, ns, uint64(1000*(i+1)), 16*pages)
		before, err := d.Stats()
		require.NoError(t, err)
		require.NoError(t, seq.Append(tokens(uint64(7+i), 16)))
		publishAll(t, d, seq)
		after, err := d.Stats()
		require.NoError(t, err)
		cost = append(cost, after.LogWritten-before.LogWritten)
	}
	t.Logf("log bytes: %v", cost)
	for _, n := range cost {
		require.LessOrEqual(t, n, int64(640))
	}
	require.InDelta(t, cost[0], cost[1], 64)
}

// Allocations of a lookup do not grow with the prompt, and those of a restore follow its pages.
func TestAllocationsOfLookupAndRestore(t *testing.T) {
	d, ns := costDB(t)
	ctx := context.Background()
	var lookups, restores []float64
	for i, pages := range []int{16, 1024} {
		seq := longSequence(t, d, ns, uint64(1000*(i+1)), 16*pages)
		lookups = append(lookups, testing.AllocsPerRun(200, func() {
			_, err := d.Lookup(ctx, seq, LookupOptions{})
			require.NoError(t, err)
		}))
		restores = append(restores, testing.AllocsPerRun(20, func() {
			r, err := d.Restore(ctx, seq, LookupOptions{})
			require.NoError(t, err)
			r.Release()
		})/float64(pages))
	}
	t.Logf("allocations: lookup %v, restore %v a page", lookups, restores)
	for _, n := range lookups {
		require.LessOrEqual(t, n, 26.0)
	}
	require.LessOrEqual(t, restores[1], 0.25)
}

// Allocations of a publication follow what is new.
func TestAllocationsOfAPublication(t *testing.T) {
	d, ns := costDB(t)
	var cost []float64
	for i, pages := range []int{16, 1024} {
		base := longSequence(t, d, ns, uint64(1000*(i+1)), 16*pages)
		next := uint64(1)
		cost = append(cost, testing.AllocsPerRun(50, func() {
			seq, err := base.Fork(base.Len())
			require.NoError(t, err)
			require.NoError(t, seq.Append(tokens(next, 16)))
			next++
			publishAll(t, d, seq)
		}))
	}
	t.Logf("allocations: %v", cost)
	for _, n := range cost {
		require.LessOrEqual(t, n, 450.0)
	}
}
