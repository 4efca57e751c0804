package db

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// The fault that started this project: a newer checkpoint superseded an older branch, RAM eviction dropped the older one's state
// before its deferred write, the older one stayed listed, and a restore found 13 of 22 pages. Given two branches of one
// conversation on two ranks, at both sizes and under every write policy, when the newer one supersedes the older and
// publications of others push everything out of RAM, then each of the two restores whole, or is an ordinary miss, and what is
// listed is what can be read.
func TestSupersededBranchIsWholeOrAMiss(t *testing.T) {
	for _, policy := range []WritePolicy{WriteThrough, OnEvict, OnReuse, Never} {
		for _, pages := range []int{61, 120} {
			t.Run(fmt.Sprintf("%v/%d pages", policy, pages), func(t *testing.T) {
				dir := tempDir(t)
				ns := testNamespace(t, 2,
					Group{Name: "attention:kv", Kind: Attention, PageBytes: 4096, PageTokens: 16},
					Group{Name: "recurrent:state", Kind: Recurrent, PageBytes: 16384, Pages: 4})
				// Room for about three checkpoints.
				o := Options{WritePolicy: policy, RAMBytes: int64(3 * 2 * (pages*4096 + 4*16384)), SupersedeGrace: -1}
				d := openDB(t, dir, o)
				n := int64((pages - 4) * 16)
				shared := tokens(1, int(n/2))
				older := seqOf(t, ns, shared, tokens(2, int(n-n/2)))
				newer := seqOf(t, ns, shared, tokens(3, int(n-n/2)), tokens(4, 64))
				first, _ := publish(t, d, older, n)
				second, _ := publish(t, d, newer, newer.Len())
				require.NoError(t, d.Supersede(context.Background(), second, first))
				for i := range 8 {
					other := seqOf(t, ns, tokens(uint64(100+i), int(n)))
					publish(t, d, other, n)
					require.Contains(t, []int64{0, n}, lookupAt(t, d, older))
				}
				for _, x := range []struct {
					name string
					seq  *Sequence
				}{{"older", older}, {"newer", newer}} {
					listed := lookupAt(t, d, x.seq)
					require.Equal(t, listed, restoreAt(t, d, x.seq), "%s: listed means restorable", x.name)
					require.Contains(t, []int64{0, x.seq.Len()}, listed, x.name)
				}
				if policy == WriteThrough {
					require.Equal(t, n, restoreAt(t, d, older), "a checkpoint that is all on disk is never retired by RAM pressure")
				}
				if policy == WriteThrough || policy == OnEvict {
					require.Equal(t, newer.Len(), restoreAt(t, d, newer), "a current checkpoint is written before its pages leave RAM")
				}
				checkCatalogue(t, d)
				before := map[*Sequence]int64{older: lookupAt(t, d, older), newer: lookupAt(t, d, newer)}
				if policy == WriteThrough {
					crash(t, d)
				} else {
					closeDB(t, d)
				}
				d = openDB(t, dir, o)
				for seq, was := range before {
					listed := lookupAt(t, d, seq)
					require.Equal(t, listed, restoreAt(t, d, seq))
					if policy == WriteThrough || policy == OnEvict {
						require.Equal(t, was, listed, "a clean close, or a crash under write-through, loses nothing")
					}
				}
				checkCatalogue(t, d)
				require.Zero(t, stats(t, d).Leases)
			})
		}
	}
}

// Under on-evict, pages of superseded checkpoints that leave RAM are never written (SUP-03, WOE-08).
func TestSupersededPagesAreNotWritten_SUP03(t *testing.T) {
	ns := testNamespace(t, 1)
	d := openDB(t, tempDir(t), Options{WritePolicy: OnEvict, RAMBytes: 1 << 20, SupersedeGrace: -1})
	older, newer := seqOf(t, ns, tokens(1, 512)), seqOf(t, ns, tokens(2, 512))
	a, _ := publish(t, d, older, 512)
	b, _ := publish(t, d, newer, 512)
	require.NoError(t, d.Supersede(context.Background(), b, a))
	require.Zero(t, stats(t, d).PagesWritten, "nothing is written while there is room")
	for i := range 12 {
		publish(t, d, seqOf(t, ns, tokens(uint64(10+i), 512)), 512)
	}
	require.Zero(t, lookupAt(t, d, older), "superseded pages go first, with their checkpoint")
	require.EqualValues(t, 512, restoreAt(t, d, newer))
	c := stats(t, d)
	require.NotZero(t, c.PagesWritten)
	require.Zero(t, c.AdmissionTimeouts)
	require.EqualValues(t, 1, c.RetiredTotal)
	require.LessOrEqual(t, c.PagesWritten, int64(12*33), "each page once at most")
	checkCatalogue(t, d)
}

// A conversation e1 < e2 < e3: what was continued from stays current until the conversation has moved past it twice (SUP-06).
func TestTheContinuationPointStaysCurrent_SUP06(t *testing.T) {
	ns := testNamespace(t, 1)
	d := openDB(t, tempDir(t), Options{SupersedeGrace: -1})
	seq := ns.NewSequence()
	var gens []Generation
	superseded := func() (n []bool) {
		for _, g := range gens {
			c, err := d.Checkpoint(g)
			require.NoError(t, err)
			n = append(n, !c.SupersededBy.IsZero())
		}
		return n
	}
	for i := range 4 {
		require.NoError(t, seq.Append(tokens(uint64(i), 300)))
		g, _ := publish(t, d, seq, seq.Len())
		gens = append(gens, g)
	}
	require.Equal(t, []bool{true, true, false, false}, superseded())
	// Found again: current again (SUP-09), and it survives a restart.
	require.NoError(t, func() error { _, err := d.Lookup(context.Background(), seq, LookupOptions{MaxOffset: 300}); return err }())
	_, err := d.curator.work(context.Background())
	require.NoError(t, err)
	require.Equal(t, []bool{false, true, false, false}, superseded())
	require.EqualValues(t, 1, stats(t, d).FoundAgain)
	dir := d.dir.path
	crash(t, d)
	d = openDB(t, dir, Options{})
	require.Equal(t, []bool{false, true, false, false}, superseded())
	checkCatalogue(t, d)
}

// A checkpoint that was retired while its pages were in RAM only has lost them after a crash. Publishing it again asks for them
// again: what the catalogue knows is there (complete-at-publish).
func TestRetiredInRAMOnlyIsGoneAfterACrash(t *testing.T) {
	for _, crashed := range []bool{true, false} {
		dir := tempDir(t)
		ns := testNamespace(t, 1)
		o := Options{WritePolicy: Never}
		d := openDB(t, dir, o)
		seq := seqOf(t, ns, tokens(1, 300))
		g, written := publish(t, d, seq, 300)
		require.NoError(t, d.Retire(context.Background(), g))
		if crashed {
			crash(t, d)
		} else {
			closeDB(t, d)
		}
		d = openDB(t, dir, o)
		again, bytes := publish(t, d, seq, 300)
		require.Equal(t, g, again)
		require.Equal(t, written, bytes, "every page is asked for")
		require.EqualValues(t, 300, restoreAt(t, d, seq))
		checkCatalogue(t, d)
	}
}
