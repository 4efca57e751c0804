package db

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// When pages are written, how often, and what a disk that lags or hangs does to everybody else.

// Each write policy does what its name says: what is on disk after the publication, after pressure, and after a restore and
// pressure; and publications that ask to be durable are written under each.
func TestPoliciesByName_WOE01_WOE05(t *testing.T) {
	for name, x := range map[string]struct{ published, evicted, reused int64 }{
		"write-through": {7, 7, 7},
		"on-evict":      {0, 7, 7},
		"on-reuse":      {0, 0, 7},
		"never":         {0, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			policy, err := ParseWritePolicy(name)
			require.NoError(t, err)
			require.Equal(t, name, policy.String())
			for _, reuse := range []bool{false, true} {
				d := openDB(t, tempDir(t), Options{WritePolicy: policy})
				ns, books := testNamespace(t, 1, sevenPages(64<<10)...), shelf{}
				seq := seqOf(t, ns, tokens(1, 48))
				books.publish(t, d, seq, 48)
				require.Equal(t, x.published, stats(t, d).PagesWritten)
				want := x.evicted
				if reuse {
					want = x.reused
					require.EqualValues(t, 48, restoreAt(t, d, seq))
				}
				outOfRAM(t, d)
				require.Equal(t, want, stats(t, d).PagesWritten)
				offset := int64(0)
				if want > 0 {
					offset = 48
				}
				require.Equal(t, offset, restoreAt(t, d, seq))
				asked := seqOf(t, ns, tokens(2, 48))
				books.publish(t, d, asked, 48, durable)
				require.Equal(t, want+7, stats(t, d).PagesWritten)
				require.EqualValues(t, (want+7)*64<<10, stats(t, d).PayloadWritten)
				d = reopen(t, d, true)
				require.EqualValues(t, 48, restoreAt(t, d, asked))
				require.Equal(t, offset, restoreAt(t, d, seq))
				books.requireListedIsReadable(t, d)
				recount(t, d)
			}
		})
	}
	_, err := ParseWritePolicy("sometimes")
	requireClass(t, err, ErrInvalid)
}

// Of two that were restored or not, on-reuse keeps over a restart the one that was.
func TestReuseIsKeptOverARestart_WOE05(t *testing.T) {
	d := openDB(t, tempDir(t), Options{WritePolicy: OnReuse})
	ns, books := testNamespace(t, 4, sevenPages(4096)...), shelf{}
	used, other := seqOf(t, ns, tokens(1, 48)), seqOf(t, ns, tokens(2, 48))
	books.publish(t, d, used, 48)
	books.publish(t, d, other, 48)
	require.EqualValues(t, 48, restoreAt(t, d, used))
	d = reopen(t, d, false)
	require.EqualValues(t, 48, restoreAt(t, d, used))
	require.Zero(t, lookupAt(t, d, other))
	require.Equal(t, []int64{48}, books.requireListedIsReadable(t, d))
	recount(t, d)
}

// A dirty page is written once, however many ask for it at the same time, and once only while it lives; if its copy is lost, what
// needs it is retired, and a republication writes it anew.
func TestADirtyPageIsWrittenOnce_WOE02(t *testing.T) {
	v, books := newValve(), shelf{}
	d := openDB(t, tempDir(t), Options{WritePolicy: OnEvict, segmentFS: v.segments()})
	ns := testNamespace(t, 2, sevenPages(4096)...)
	seq := seqOf(t, ns, tokens(1, 96))
	books.publish(t, d, seq, 48)
	open := v.close("write")
	var group sync.WaitGroup
	errs := make(chan error, 4)
	for i := range 4 {
		group.Go(func() {
			if i < 2 {
				_, err := d.DropRAM(context.Background())
				errs <- err
				return
			}
			p, err := d.Begin(context.Background(), PublishRequest{Sequence: seq, Offset: 48, Durable: true, Meta: fmt.Appendf(nil, "%d", i)})
			if err == nil {
				for rank := 0; rank < 2 && err == nil; rank++ {
					_, err = p.Commit(context.Background(), rank)
				}
			}
			errs <- err
		})
	}
	v.waitFor(t, "write")
	require.EqualValues(t, 48, restoreAt(t, d, seq), "a page that is being written is readable")
	open()
	group.Wait()
	for range 4 {
		require.NoError(t, <-errs)
	}
	require.EqualValues(t, 2*7, stats(t, d).PagesWritten)
	for range 3 {
		require.EqualValues(t, 48, restoreAt(t, d, seq))
		outOfRAM(t, d)
	}
	publish(t, d, seq, 96)
	outOfRAM(t, d)
	require.EqualValues(t, 2*(7+3+4), stats(t, d).PagesWritten, "what is shared is there")
	recount(t, d)
}

// A disk that lags: after a bounded time pages that wait for it hold up nobody else. What the device may be reading stays, other dirty
// pages are given up with their checkpoints, counted, and publications go on. When it answers, all is as before.
func TestDiskThatLags_WOE03_EVE05(t *testing.T) {
	v, books := newValve(), shelf{}
	d := openDB(t, tempDir(t), Options{WritePolicy: OnEvict, RAMBytes: 32 << 20, AdmissionTimeout: 3 * time.Second, segmentFS: v.segments()})
	ns := testNamespace(t, 1, sevenPages(512<<10)...)
	seq := func(i int) *Sequence { return seqOf(t, ns, tokens(uint64(i), 48)) }
	for i := range 9 {
		books.publish(t, d, seq(i), 48)
	}
	open := v.close("write")
	for i := 9; i < 20; i++ {
		books.publish(t, d, seq(i), 48)
		require.EqualValues(t, 48, restoreAt(t, d, seq(i)))
	}
	s := stats(t, d)
	require.NotZero(t, s.WritesLate)
	require.NotZero(t, s.RetiredTotal)
	require.Zero(t, s.PagesWritten)
	open()
	settle(t, d)
	require.Zero(t, d.lateWrites.Load())
	books.requireListedIsReadable(t, d)
	retired := stats(t, d).RetiredTotal
	for i := 20; i < 30; i++ {
		books.publish(t, d, seq(i), 48)
	}
	require.Equal(t, retired, stats(t, d).RetiredTotal, "nothing is given up any more")
	books.requireListedIsReadable(t, d)
	recount(t, d)
}

// On-evict: nothing is written at publication or restore; what pressure drives out is on disk, what stayed is not.
func TestPressureWritesWhatItDrivesOut_WOE04(t *testing.T) {
	d := openDB(t, tempDir(t), Options{WritePolicy: OnEvict, RAMBytes: 4 << 20})
	ns, books := testNamespace(t, 1, sevenPages(128<<10)...), shelf{}
	first := seqOf(t, ns, tokens(1, 48))
	books.publish(t, d, first, 48)
	require.EqualValues(t, 48, restoreAt(t, d, first))
	require.Zero(t, stats(t, d).PagesWritten)
	var newest Generation
	for i := range 12 {
		newest, _ = books.publish(t, d, seqOf(t, ns, tokens(uint64(10+i), 48)), 48)
	}
	s := stats(t, d)
	require.GreaterOrEqual(t, s.PagesWritten, int64(7))
	require.Zero(t, s.AdmissionTimeouts)
	require.Zero(t, s.RetiredTotal)
	c, err := d.Checkpoint(newest)
	require.NoError(t, err)
	require.False(t, c.Durable)
	d = reopen(t, d, true)
	require.EqualValues(t, 48, restoreAt(t, d, first))
	books.requireListedIsReadable(t, d)
	recount(t, d)
}

// A burst of deferred writes on a slow disk does not delay a restore: it reads while the burst is written, and no longer than a few
// writes take.
func TestBurstDoesNotDelayARestore_WOE07(t *testing.T) {
	v, books := newValve(), shelf{}
	d := openDB(t, tempDir(t), Options{WritePolicy: OnEvict, RAMBytes: 8 << 20, segmentFS: v.segments()})
	ns := testNamespace(t, 1, sevenPages(128<<10)...)
	wanted := seqOf(t, ns, tokens(1, 48))
	books.publish(t, d, wanted, 48)
	outOfRAM(t, d)
	var mu sync.Mutex
	v.slow("sync", 100*time.Millisecond)
	stop := make(chan struct{})
	var group sync.WaitGroup
	for w := range 6 {
		group.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				s := seqOf(t, ns, tokens(uint64(1000*w+i+10), 48))
				p, err := d.Begin(context.Background(), PublishRequest{Sequence: s, Offset: 48})
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				books.keep(t, p.Generation(), s, 48)
				mu.Unlock()
				slots, err := p.Slots(context.Background(), 0)
				for _, s := range slots {
					s.Write(content(s.Key(), 0, s.Size()))
				}
				if err == nil {
					_, err = p.Commit(context.Background(), 0)
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	require.Eventually(t, func() bool { return stats(t, d).PagesWritten > 70 }, patience, time.Millisecond)
	for range 5 { // while the burst goes on, which nobody stops before
		begun := time.Now()
		require.EqualValues(t, 48, restoreAt(t, d, wanted))
		timely(t, begun, 500*time.Millisecond)
	}
	close(stop)
	group.Wait()
	v.slow("sync", 0)
	books.requireListedIsReadable(t, d)
	recount(t, d)
}

// Bytes written are at most those of current pages that left RAM: a conversation of twenty turns that stays in RAM writes nothing, gone idle
// it writes its newest state once, and no attention page twice.
func TestConversationIsWrittenWhenItGoesIdle_WOE08(t *testing.T) {
	const turns = 20
	ns := testNamespace(t, 1, Group{Name: "attention:kv", Kind: Attention, PageBytes: 4096, PageTokens: 16},
		Group{Name: "recurrent:state", Kind: Recurrent, PageBytes: 64 << 10, Pages: 1})
	written := map[WritePolicy]int64{}
	for _, policy := range []WritePolicy{WriteThrough, OnEvict} {
		d := openDB(t, tempDir(t), Options{WritePolicy: policy, SupersedeGrace: -1})
		books, seq := shelf{}, ns.NewSequence()
		var previous Generation
		for turn := range turns {
			require.NoError(t, seq.Append(tokens(uint64(turn), 32)))
			previous, _ = books.publish(t, d, seq, seq.Len(), func(r *PublishRequest) {
				r.Continues, r.Request = previous, fmt.Sprint(turn)
			})
			require.EqualValues(t, seq.Len(), restoreAt(t, d, seq))
			if policy == OnEvict {
				require.Zero(t, stats(t, d).PagesWritten, "active")
			}
		}
		outOfRAM(t, d)
		s := stats(t, d)
		states := (s.PayloadWritten - 2*turns*4096) / (64 << 10)
		require.Zero(t, (s.PayloadWritten-2*turns*4096)%(64<<10), "each attention page once")
		written[policy] = states
		require.EqualValues(t, seq.Len(), restoreAt(t, d, seq))
		books.requireListedIsReadable(t, d)
		recount(t, d)
	}
	require.EqualValues(t, turns, written[WriteThrough])
	require.LessOrEqual(t, written[OnEvict], int64(turns/10), "the newest states only")
}

// A write that hangs: what it writes is served from RAM, everything else goes on as fast as before, at the bound publications are
// told that the database is busy by their own deadline, and one that is cancelled returns at once.
func TestStalledWrite_B30(t *testing.T) {
	v, books := newValve(), shelf{}
	d := openDB(t, tempDir(t), Options{RAMBytes: 1 << 20, AdmissionTimeout: time.Hour, LoadTimeout: time.Hour, segmentFS: v.segments()})
	ns := testNamespace(t, 1, sevenPages(32<<10)...)
	a, unrelated := seqOf(t, ns, tokens(1, 48)), seqOf(t, ns, tokens(2, 48))
	books.publish(t, d, unrelated, 48)
	lookups := func() time.Duration {
		var took []time.Duration
		for range 200 {
			begun := time.Now()
			require.EqualValues(t, 48, lookupAt(t, d, unrelated))
			took = append(took, time.Since(begun))
		}
		slices.Sort(took)
		return took[198]
	}
	before := lookups()
	d.options.WritePolicy = OnEvict
	books.publish(t, d, a, 48)
	d.options.WritePolicy = WriteThrough
	open := v.close("write")
	dropping, drop := context.WithCancel(context.Background())
	dropped := make(chan error, 1)
	go func() {
		_, err := d.DropRAM(dropping)
		dropped <- err
	}()
	v.waitFor(t, "write")
	begun := time.Now()
	require.EqualValues(t, 48, restoreAt(t, d, a), "from RAM, while its write hangs")
	timely(t, begun, time.Second)
	stalled := lookups()
	t.Logf("99 of 100 lookups take at most %v, while a write hangs %v", before, stalled)
	if os.Getenv("HOLDFAST_TIMING") != "" {
		require.LessOrEqual(t, stalled, 2*before)
	}
	drop()
	require.ErrorIs(t, <-dropped, ErrBusy)

	// Write-through publications until RAM, the bound of what waits for the disk, is full.
	var waiting sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	busy := 0
	for i := 0; busy == 0; i++ {
		require.Less(t, i, 40)
		s := seqOf(t, ns, tokens(uint64(100+i), 48))
		begun := time.Now()
		p, err := d.Begin(briefly(t, 200*time.Millisecond), PublishRequest{Sequence: s, Offset: 48})
		if err != nil {
			requireClass(t, err, ErrBusy)
			timely(t, begun, 220*time.Millisecond)
			busy++
			continue
		}
		p.lease.detach() // the short deadline was for Begin
		fill(t, p, 0)
		waiting.Go(func() {
			if _, err := p.Commit(ctx, 0); err == nil || !errors.Is(err, ErrBusy) && !errors.Is(err, ErrConflict) {
				t.Error(err)
			}
		})
		require.LessOrEqual(t, stats(t, d).RAMUsed, int64(1<<20))
	}
	begun = time.Now()
	cancel()
	waiting.Wait()
	timely(t, begun, 100*time.Millisecond)
	require.Zero(t, stats(t, d).Pending)
	open()
	settle(t, d)
	books.requireListedIsReadable(t, d)
	recount(t, d)
}
