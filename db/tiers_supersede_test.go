package db

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Supersession: what it marks, what it changes, and that it never costs more than order.

// coolPages gives the page copies of one rank that are in RAM and that no current checkpoint needs.
func coolPages(d *DB) (n int) {
	d.residency.mu.Lock()
	defer d.residency.mu.Unlock()
	for _, l := range []*pageList{&d.residency.cleanCool, &d.residency.dirtyCool} {
		for p := l.first(); p != nil; p = l.after(p) {
			n++
		}
	}
	return n
}

func supersededBy(t testing.TB, d *DB, g Generation) Generation {
	t.Helper()
	c, err := d.Checkpoint(g)
	require.NoError(t, err)
	return c.SupersededBy
}

// sharedAndOwn is a layout of pages that longer prefixes share and pages of one checkpoint.
func sharedAndOwn() []Group {
	return []Group{
		{Name: "attention:kv", Kind: Attention, PageBytes: 4096, PageTokens: 16},
		{Name: "recurrent:state", Kind: Recurrent, PageBytes: 4096, Pages: 1},
	}
}

// Superseding marks the pages that only the older checkpoint has; what newer ones share, the newest and an instruction stay
// current. Again changes nothing; what is unknown, older or of another namespace is refused.
func TestSupersedeMarksOnly_SUP01(t *testing.T) {
	for _, policy := range []WritePolicy{WriteThrough, OnEvict} {
		d := openDB(t, tempDir(t), Options{WritePolicy: policy, SupersedeGrace: -1})
		ns, books := testNamespace(t, 1, sharedAndOwn()...), shelf{}
		seq := seqOf(t, ns, tokens(1, 100))
		instruction, _ := books.publish(t, d, seq, 16, func(r *PublishRequest) { r.Kind = Instruction })
		first, _ := books.publish(t, d, seq, 40) // pages 0, 1, 2 (in part) and its state
		second, _ := books.publish(t, d, seq, 96)
		require.Zero(t, coolPages(d), "the second went on from the first")
		for range 2 {
			require.NoError(t, d.Supersede(context.Background(), second, first))
			_, err := d.curator.work(context.Background()) // ends its time of grace, which is none
			require.NoError(t, err)
			require.Equal(t, 2, coolPages(d), "the page that is not full and the state")
		}
		require.EqualValues(t, 1, stats(t, d).Superseded)
		require.True(t, supersededBy(t, d, instruction).IsZero())
		require.True(t, supersededBy(t, d, second).IsZero())
		require.Equal(t, second, supersededBy(t, d, first))
		require.Error(t, d.Supersede(context.Background(), second, Generation{1}), "unknown")
		require.Error(t, d.Supersede(context.Background(), first, second), "not newer")
		require.Error(t, d.Supersede(context.Background(), second, second), "itself")
		foreign, _ := publish(t, d, seqOf(t, testNamespace(t, 1, tiny()...), tokens(1, 16)), 16)
		require.Error(t, d.Supersede(context.Background(), foreign, first), "another namespace")
		require.EqualValues(t, 1, stats(t, d).Superseded)
		require.NoError(t, d.Delete(context.Background(), foreign))
		require.Equal(t, []int64{16, 40, 96}, books.requireListedIsReadable(t, d))
		recount(t, d)
	}
}

// A page that a newer checkpoint needs is current again, and is written before it leaves RAM.
func TestNeededAgainIsCurrentAgain_SUP02(t *testing.T) {
	d := openDB(t, tempDir(t), Options{WritePolicy: OnEvict, SupersedeGrace: -1})
	ns, books := testNamespace(t, 1, sharedAndOwn()...), shelf{}
	old := seqOf(t, ns, tokens(1, 48))
	a, _ := books.publish(t, d, old, 48)
	b, _ := books.publish(t, d, seqOf(t, ns, tokens(2, 48)), 48)
	require.NoError(t, d.Supersede(context.Background(), b, a))
	require.Equal(t, 4, coolPages(d))
	longer := seqOf(t, ns, tokens(1, 48), tokens(3, 16))
	books.publish(t, d, longer, 64)
	require.Equal(t, 1, coolPages(d), "the state of the old one")
	outOfRAM(t, d)
	require.Zero(t, lookupAt(t, d, old), "its state was not written")
	require.EqualValues(t, 64, restoreAt(t, d, longer))
	require.EqualValues(t, 4+4+1, stats(t, d).PagesWritten)
	require.Len(t, books.requireListedIsReadable(t, d), 2)
	recount(t, d)
}

// Disk eviction takes superseded checkpoints first, oldest first, and only as many as it needs.
func TestDiskVictims_SUP04(t *testing.T) {
	const each = 4 * 4096
	d := openDB(t, tempDir(t), Options{DiskBytes: 6 * each, SupersedeGrace: -1})
	ns, books := testNamespace(t, 1, sharedAndOwn()...), shelf{}
	var gens []Generation
	seq := func(i int) *Sequence { return seqOf(t, ns, tokens(uint64(i), 48)) }
	for i := range 6 {
		g, _ := books.publish(t, d, seq(i), 48)
		gens = append(gens, g)
	}
	require.NoError(t, d.Supersede(context.Background(), gens[5], gens[2], gens[4]))
	listed := func() (n []int) {
		for i := range 9 {
			if lookupAt(t, d, seq(i)) > 0 {
				n = append(n, i)
			}
		}
		_, err := d.curator.work(context.Background()) // the finds above are not to be found by what comes
		require.NoError(t, err)
		return n
	}
	books.publish(t, d, seq(6), 48)
	c, err := d.Checkpoint(gens[4])
	require.NoError(t, err)
	require.False(t, c.SupersededBy.IsZero())
	_, err = d.Checkpoint(gens[2])
	require.ErrorIs(t, err, ErrNotFound, "the older one of the superseded")
	books.publish(t, d, seq(7), 48)
	require.Equal(t, []int{0, 1, 3, 5, 6, 7}, listed())
	require.LessOrEqual(t, stats(t, d).DiskBytes, int64(6*each))
	books.requireListedIsReadable(t, d)
	recount(t, d)
}

// Taking a mark back costs a write and nothing else.
func TestForgottenMarkCostsAWrite_SUP05(t *testing.T) {
	d := openDB(t, tempDir(t), Options{WritePolicy: OnEvict, SupersedeGrace: -1})
	ns, books := testNamespace(t, 1, sharedAndOwn()...), shelf{}
	old := seqOf(t, ns, tokens(1, 48))
	a, _ := books.publish(t, d, old, 48)
	b, _ := books.publish(t, d, seqOf(t, ns, tokens(2, 48)), 48)
	require.NoError(t, d.Supersede(context.Background(), b, a))
	require.NoError(t, d.Supersede(context.Background(), Generation{}, a))
	require.Zero(t, coolPages(d))
	outOfRAM(t, d)
	require.EqualValues(t, 8, stats(t, d).PagesWritten)
	require.Equal(t, []int64{48, 48}, books.requireListedIsReadable(t, d))
	recount(t, d)
}

// A response that the new prompt does not extend is superseded only if it is shorter than the prompt; what belongs to the same
// request never is.
func TestRewrittenEndpoints_SUP07(t *testing.T) {
	d := openDB(t, tempDir(t), Options{SupersedeGrace: -1})
	ns, books := testNamespace(t, 1, sharedAndOwn()...), shelf{}
	prompt := tokens(1, 48)
	of := func(request string, kind CheckpointKind) func(*PublishRequest) {
		return func(r *PublishRequest) { r.Request, r.Kind = request, kind }
	}
	a, _ := books.publish(t, d, seqOf(t, ns, prompt), 48, of("first", Prompt))
	short, _ := books.publish(t, d, seqOf(t, ns, prompt, tokens(2, 20)), 68, of("first", Response))
	long, _ := books.publish(t, d, seqOf(t, ns, prompt, tokens(3, 200)), 248, of("first", Response))
	require.True(t, supersededBy(t, d, a).IsZero(), "same request")
	// The client has rewritten the response: the next prompt extends the first prompt and neither response.
	next, _ := books.publish(t, d, seqOf(t, ns, prompt, tokens(4, 60)), 108, of("second", Prompt))
	require.Equal(t, next, supersededBy(t, d, short))
	require.True(t, supersededBy(t, d, long).IsZero(), "the new request branched off before it")
	require.True(t, supersededBy(t, d, a).IsZero(), "it went on from this one")
	tail, _ := books.publish(t, d, seqOf(t, ns, prompt, tokens(4, 60), tokens(5, 9)), 117, of("second", PrefillTail))
	require.True(t, supersededBy(t, d, next).IsZero(), "same request")
	require.True(t, supersededBy(t, d, tail).IsZero())
	books.requireListedIsReadable(t, d)
	recount(t, d)
}

// A superseded checkpoint that somebody went on from keeps its place for the time of grace, and goes first after it; the time
// begins anew after a restart.
func TestGrace_SUP08(t *testing.T) {
	const grace = 200 * time.Millisecond
	dir := tempDir(t)
	d := openDB(t, dir, Options{WritePolicy: WriteThrough, SupersedeGrace: time.Hour})
	ns, books := testNamespace(t, 1, sharedAndOwn()...), shelf{}
	seq := seqOf(t, ns, tokens(1, 200))
	var gens []Generation
	for i, n := range []int64{48, 96, 144, 192} {
		g, _ := books.publish(t, d, seq, n, func(r *PublishRequest) { r.Request = fmt.Sprint(i) })
		gens = append(gens, g)
	}
	first := func() Generation { // the first to be evicted
		for c, err := range d.Checkpoints(context.Background()) {
			require.NoError(t, err)
			return c.Generation
		}
		return Generation{}
	}
	other, _ := books.publish(t, d, seqOf(t, ns, tokens(2, 48)), 48)
	plain, _ := books.publish(t, d, seqOf(t, ns, tokens(3, 48)), 48)
	require.NoError(t, d.Supersede(context.Background(), plain, other))
	require.False(t, supersededBy(t, d, gens[0]).IsZero())
	require.Equal(t, other, first(), "from which nobody went on: at once")
	require.NoError(t, d.Delete(context.Background(), other))
	closeDB(t, d)
	d = openDB(t, dir, Options{SupersedeGrace: grace})
	require.Eventually(t, func() bool { return coolPages(d) == 0 && first() == gens[0] }, patience, time.Millisecond)
	snapshot := func() bool {
		for c, err := range d.Checkpoints(context.Background()) {
			require.NoError(t, err)
			return !c.SupersededBy.IsZero()
		}
		return false
	}
	require.Eventually(t, snapshot, patience, time.Millisecond)
	books.requireListedIsReadable(t, d)
	recount(t, d)
}

// The three sequences from the field, on two ranks and under every policy: a retry that branches off before the original response, a side
// request that forks and comes back, and an aborted turn resumed with other tokens. While it fits the branch stays restorable, and
// under pressure what is listed stays readable.
func TestBranchesFromTheField_SUP07_SUP10(t *testing.T) {
	for _, policy := range []WritePolicy{WriteThrough, OnEvict, OnReuse, Never} {
		t.Run(policy.String(), func(t *testing.T) {
			d := openDB(t, tempDir(t), Options{WritePolicy: policy, RAMBytes: 1 << 20, SupersedeGrace: -1})
			ns, books := testNamespace(t, 2, sharedAndOwn()...), shelf{}
			base := tokens(1, 96)
			step := func(request string, kind CheckpointKind, continues Generation, parts ...[]int32) (*Sequence, Generation) {
				s := seqOf(t, ns, append([][]int32{base}, parts...)...)
				g, _ := books.publish(t, d, s, s.Len(), func(r *PublishRequest) { r.Request, r.Kind, r.Continues = request, kind, continues })
				require.Equal(t, s.Len(), restoreAt(t, d, s))
				return s, g
			}
			p0, g0 := step("turn 0", Prompt, Generation{})
			original, r0 := step("turn 0", Response, g0, tokens(2, 80))
			_, g1 := step("turn 1", Prompt, r0, tokens(2, 80), tokens(3, 16))

			// A retry of turn 0, other tokens from the prompt on, shorter than the original.
			retry, _ := step("turn 0 again", Response, g0, tokens(4, 40))
			require.EqualValues(t, 96, restoreAt(t, d, p0))
			require.EqualValues(t, original.Len(), restoreAt(t, d, original))

			// A side request forks from turn 1 and the conversation comes back.
			side, _ := step("side", Prompt, g1, tokens(2, 80), tokens(3, 16), tokens(5, 200))
			back, g2 := step("turn 2", Prompt, g1, tokens(2, 80), tokens(3, 16), tokens(6, 32))
			require.Equal(t, side.Len(), restoreAt(t, d, side))

			// Turn 3 is aborted and resumed with other tokens.
			aborted := begin(t, d, seqOf(t, ns, base, tokens(2, 80), tokens(3, 16), tokens(6, 32), tokens(7, 48)), 272)
			fill(t, aborted, 0)
			require.NoError(t, aborted.Abort())
			resumed, _ := step("turn 3", Prompt, g2, tokens(2, 80), tokens(3, 16), tokens(6, 32), tokens(8, 64))
			for _, s := range []*Sequence{retry, side, back, resumed} {
				require.Equal(t, s.Len(), restoreAt(t, d, s), "it fits, so it stays")
			}
			books.requireListedIsReadable(t, d)
			recount(t, d)

			// Others push everything out.
			for i := range 12 {
				books.publish(t, d, seqOf(t, ns, tokens(uint64(100+i), 320)), 320)
				for _, s := range []*Sequence{p0, original, retry, side, back, resumed} {
					require.Equal(t, lookupAt(t, d, s), restoreAt(t, d, s), "listed means restorable")
				}
			}
			if policy == WriteThrough || policy == OnEvict {
				require.Equal(t, resumed.Len(), restoreAt(t, d, resumed))
			}
			books.requireListedIsReadable(t, d)
			recount(t, d)
			d = reopen(t, d, policy == WriteThrough)
			books.requireListedIsReadable(t, d)
			recount(t, d)
		})
	}
}

// By whatever way the last copy of a page goes, everything listed that needs it is retired first.
func TestEveryWayOfLosingAPage_SUP10(t *testing.T) {
	for name, lose := range map[string]func(t *testing.T, d *DB, s *seam, seq *Sequence){
		"RAM pressure": func(t *testing.T, d *DB, _ *seam, seq *Sequence) {
			for i := range 40 {
				publish(t, d, seqOf(t, seq.Namespace(), tokens(uint64(100+i), 320)), 320)
			}
		},
		"disk pressure": func(t *testing.T, d *DB, _ *seam, seq *Sequence) {
			outOfRAM(t, d)
			require.NoError(t, d.SetDiskBytes(4096))
			settle(t, d)
		},
		"write failure": func(t *testing.T, d *DB, s *seam, seq *Sequence) {
			s.fail("write", errno(t, "EIO"))
			outOfRAM(t, d)
		},
		"forced clear": func(t *testing.T, d *DB, _ *seam, seq *Sequence) {
			_, err := d.Clear(context.Background(), seq.Namespace().ID())
			require.NoError(t, err)
		},
		"corruption": func(t *testing.T, d *DB, _ *seam, seq *Sequence) {
			outOfRAM(t, d)
			damage(t, d)
			restoreAt(t, d, seq)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := &seam{}
			policy := OnEvict
			if name == "RAM pressure" {
				policy = Never
			}
			d := openDB(t, tempDir(t), Options{WritePolicy: policy, RAMBytes: 1 << 20, SupersedeGrace: -1, segmentFS: s.segments()})
			ns, books := testNamespace(t, 2, sharedAndOwn()...), shelf{}
			a, b := seqOf(t, ns, tokens(1, 48), tokens(2, 48)), seqOf(t, ns, tokens(1, 48), tokens(3, 96))
			older, _ := books.publish(t, d, a, 96)
			newer, _ := books.publish(t, d, b, 144)
			require.NoError(t, d.Supersede(context.Background(), newer, older))
			lose(t, d, s, b)
			for _, seq := range []*Sequence{a, b} {
				require.Equal(t, lookupAt(t, d, seq), restoreAt(t, d, seq))
			}
			require.Zero(t, lookupAt(t, d, a), "the superseded one is gone")
			require.NotZero(t, stats(t, d).RetiredTotal)
			for c, err := range d.Checkpoints(context.Background()) {
				require.NoError(t, err)
				if _, ok := books[c.Generation]; ok {
					continue
				}
				require.NoError(t, d.Delete(context.Background(), c.Generation))
			}
			books.requireListedIsReadable(t, d)
			recount(t, d)
		})
	}
}

// A find refreshes the order of eviction in both tiers, and is no disk copy: nothing is read or written for it.
func TestFindRefreshesBothTiers_SUP11(t *testing.T) {
	for _, finds := range []bool{false, true} {
		const each = 4 * 4 * 4096
		d := openDB(t, tempDir(t), Options{DiskBytes: 2*each + each/2})
		ns, books := testNamespace(t, 4, sharedAndOwn()...), shelf{}
		early, later := seqOf(t, ns, tokens(1, 48)), seqOf(t, ns, tokens(2, 48))
		books.publish(t, d, early, 48)
		books.publish(t, d, later, 48)
		if finds {
			before := stats(t, d)
			require.EqualValues(t, 48, lookupAt(t, d, early))
			_, err := d.curator.work(context.Background())
			require.NoError(t, err)
			after := stats(t, d)
			require.Equal(t, before.PagesRead, after.PagesRead)
			require.Equal(t, before.PagesWritten, after.PagesWritten)
		}
		books.publish(t, d, seqOf(t, ns, tokens(3, 48)), 48)
		require.Equal(t, finds, lookupAt(t, d, early) > 0)
		require.Equal(t, !finds, lookupAt(t, d, later) > 0)
		books.requireListedIsReadable(t, d)
		recount(t, d)

		// In RAM, of two that are on disk the one that was restored stays.
		d = openDB(t, tempDir(t), Options{})
		for _, s := range []*Sequence{early, later} {
			books.publish(t, d, s, 48)
		}
		if finds {
			require.EqualValues(t, 48, restoreAt(t, d, early))
		}
		d.residency.evictClean(each)
		read := stats(t, d).PagesRead
		require.EqualValues(t, 48, restoreAt(t, d, early))
		require.Equal(t, finds, stats(t, d).PagesRead == read)

		// A page that was found and not stored is still dirty.
		d = openDB(t, tempDir(t), Options{WritePolicy: OnEvict})
		books.publish(t, d, early, 48)
		require.EqualValues(t, 48, lookupAt(t, d, early))
		require.EqualValues(t, each, stats(t, d).RAMDirtyBytes)
		outOfRAM(t, d)
		require.EqualValues(t, 16, stats(t, d).PagesWritten)
		d = reopen(t, d, true)
		require.EqualValues(t, 48, restoreAt(t, d, early))
		recount(t, d)
	}
}
