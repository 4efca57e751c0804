package db

import (
	"context"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

// Holds on pages: how they end, and what a dead holder leaves.

const shortly = 40 * time.Millisecond

func newOwner(t testing.TB, d *DB, ttl time.Duration) *Owner {
	t.Helper()
	o, err := d.NewOwner("worker", ttl)
	require.NoError(t, err)
	return o
}

// expires makes a lease that was given for long end soon, so that what comes before its end has all the time it needs.
func expires(l *lease, soon time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.timer.Reset(soon)
}

// falls makes an owner that was given long to live miss its heartbeat soon.
func falls(o *Owner, soon time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.timer.Reset(soon)
}

// becomes waits until a gauge has a value, without any other call to the database than Stats.
func becomes(t testing.TB, d *DB, want int64, gauge func(Stats) int64, msg string) {
	t.Helper()
	require.Eventually(t, func() bool { return gauge(stats(t, d)) == want }, patience, time.Millisecond, msg)
}

func pendingOf(s Stats) int64 { return s.Pending }
func leasesOf(s Stats) int64  { return s.Leases }

// What a dead publisher held is taken back after its time, without a further call; before that it is not. What it still says
// changes nothing, and the checkpoint can be published again. The same for a publication whose lease is over.
func TestDeadPublisher_LSE01(t *testing.T) {
	for _, how := range []string{"owner", "lease", "never filled"} {
		t.Run(how, func(t *testing.T) {
			d := openDB(t, tempDir(t), Options{})
			seq, books := seqOf(t, testNamespace(t, 2, sevenPages(4096)...), tokens(1, 48)), shelf{}
			r := PublishRequest{Sequence: seq, Offset: 48}
			if how == "owner" {
				r.Owner = newOwner(t, d, time.Hour)
			}
			p, err := d.Begin(context.Background(), r)
			require.NoError(t, err)
			var of []*Slot
			if how != "never filled" {
				of = slots(t, p, 0)
				fill(t, p, 0)
				require.EqualValues(t, 1, stats(t, d).Pending, "alive")
				require.NotZero(t, stats(t, d).RAMUsed)
			}
			begun := time.Now()
			if how == "owner" {
				falls(r.Owner, shortly)
			} else {
				expires(&p.lease, shortly)
			}
			becomes(t, d, 0, pendingOf, "pending")
			require.GreaterOrEqual(t, time.Since(begun), shortly)
			becomes(t, d, 0, func(s Stats) int64 { return s.RAMUsed }, "RAM")
			_, err = p.Commit(context.Background(), 0)
			requireClass(t, err, ErrConflict)
			_, err = p.Slots(context.Background(), 1)
			requireClass(t, err, ErrConflict)
			_, err = p.Transfer(0)
			requireClass(t, err, ErrConflict)
			requireClass(t, p.Abort(), ErrConflict)
			for _, s := range of {
				_, err := s.Write([]byte("late"))
				requireClass(t, err, ErrConflict)
				require.Nil(t, s.Buffer())
			}
			if r.Owner != nil {
				requireClass(t, r.Owner.Heartbeat(), ErrConflict, "register anew")
				_, err = d.Begin(context.Background(), r)
				requireClass(t, err, ErrConflict)
				require.EqualValues(t, 1, stats(t, d).OwnersExpired)
			} else {
				require.EqualValues(t, 1, stats(t, d).LeasesExpired)
			}
			require.Zero(t, lookupAt(t, d, seq))
			books.publish(t, d, seq, 48)
			require.Equal(t, []int64{48}, books.requireListedIsReadable(t, d))
			recount(t, d)
		})
	}
}

// The pins of a dead reader are taken back: what was deleted under it leaves RAM and disk.
func TestDeadReader_LSE02(t *testing.T) {
	for _, how := range []string{"owner", "lease", "context"} {
		d := openDB(t, tempDir(t), Options{})
		seq := seqOf(t, testNamespace(t, 2, sevenPages(4096)...), tokens(1, 48))
		gen, _ := publish(t, d, seq, 48)
		var o LookupOptions
		ctx, cancel := context.WithCancel(context.Background())
		die := func() {}
		switch how {
		case "owner":
			o.Owner = newOwner(t, d, time.Hour)
			die = o.Owner.Close
		case "lease":
		case "context":
			die = cancel
		}
		r, err := d.Restore(ctx, seq, o)
		require.NoError(t, err)
		require.NoError(t, d.Delete(context.Background(), gen))
		idle(d)
		require.NotZero(t, stats(t, d).RAMUsed)
		require.NotZero(t, stats(t, d).DiskBytes)
		verify(t, r, 2)
		if how == "lease" {
			expires(&r.lease, shortly)
		}
		die()
		becomes(t, d, 0, leasesOf, how)
		becomes(t, d, 0, func(s Stats) int64 { return s.RAMUsed }, how)
		idle(d)
		require.Zero(t, stats(t, d).DiskBytes)
		requireClass(t, r.Err(), ErrConflict)
		require.Nil(t, r.Pages(0))
		cancel()
		r.Release()
		requireEmpty(t, d)
	}
}

// The rules of ending: twice, too late, or with a length that is none.
func TestRulesOfLeases_LSE03_CAN04(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	seq := seqOf(t, testNamespace(t, 1, tiny()...), tokens(1, 16))
	publish(t, d, seq, 16)
	for _, lease := range []time.Duration{-1, MaxLease + 1} {
		_, err := d.Restore(context.Background(), seq, LookupOptions{Lease: lease})
		require.Error(t, err)
		_, err = d.Begin(context.Background(), PublishRequest{Sequence: seq, Offset: 8, Lease: lease})
		require.Error(t, err)
	}
	for _, ttl := range []time.Duration{0, -1, MinOwnerTTL - 1, MaxOwnerTTL + 1} {
		_, err := d.NewOwner("w", ttl)
		require.Error(t, err)
	}
	_, err := d.NewOwner("", time.Second)
	requireClass(t, err, ErrInvalid)
	r, err := d.Restore(context.Background(), seq, LookupOptions{})
	require.NoError(t, err)
	copied, err := r.Transfer()
	require.NoError(t, err)
	for range 3 {
		r.Release()
		require.Zero(t, stats(t, d).Leases)
	}
	require.EqualValues(t, 1, stats(t, d).Transfers)
	require.NotZero(t, d.residency.counts().pinned)
	for range 3 {
		copied.Done()
		require.Zero(t, stats(t, d).Transfers)
	}
	_, err = r.Transfer()
	requireClass(t, err, ErrConflict)
	o := newOwner(t, d, time.Hour)
	require.NoError(t, o.Heartbeat())
	o.Close()
	o.Close()
	requireClass(t, o.Heartbeat(), ErrConflict)
	require.Zero(t, stats(t, d).Owners)
	require.Zero(t, stats(t, d).OwnersExpired)
	recount(t, d)
}

// Pages under a restore cannot be taken away on any rank; after its release they can.
func TestPagesUnderARestoreStay_LSE04(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	seq := seqOf(t, testNamespace(t, 4, sevenPages(4096)...), tokens(1, 48))
	gen, bytes := publish(t, d, seq, 48)
	r, err := d.Restore(context.Background(), seq, LookupOptions{})
	require.NoError(t, err)
	require.NoError(t, d.Delete(context.Background(), gen))
	left, err := d.DropRAM(context.Background())
	require.NoError(t, err)
	require.Equal(t, bytes, left)
	idle(d)
	require.Equal(t, bytes, stats(t, d).DiskBytes)
	verify(t, r, 4)
	r.Release()
	requireEmpty(t, d)
}

// A clear leaves what is held, says how much that is, and a publication that is pending goes on; a second one takes the rest.
func TestClearLeavesWhatIsHeld_LSE05_B40(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	ns, other, books := testNamespace(t, 2, sevenPages(4096)...), testNamespace(t, 1, tiny()...), shelf{}
	held, gone, next := seqOf(t, ns, tokens(1, 48)), seqOf(t, ns, tokens(2, 48)), seqOf(t, ns, tokens(3, 48))
	foreign := seqOf(t, other, tokens(1, 16))
	for _, s := range []*Sequence{held, gone} {
		publish(t, d, s, 48)
	}
	books.publish(t, d, foreign, 16)
	r, err := d.Restore(context.Background(), held, LookupOptions{})
	require.NoError(t, err)
	p := begin(t, d, next, 48)
	fill(t, p, 0)
	report, err := d.Clear(context.Background(), ns.ID())
	require.NoError(t, err)
	require.Equal(t, 2, report.Checkpoints)
	require.Equal(t, 7, report.Held)
	require.EqualValues(t, 2*2*7*4096, report.Bytes)
	verify(t, r, 2)
	require.Zero(t, lookupAt(t, d, held))
	require.Zero(t, lookupAt(t, d, gone))
	require.EqualValues(t, 16, restoreAt(t, d, foreign), "another namespace")
	require.False(t, commit(t, p, 0))
	fill(t, p, 1)
	require.True(t, commit(t, p, 1))
	require.EqualValues(t, 48, restoreAt(t, d, next))
	r.Release()
	report, err = d.Clear(context.Background(), txn.Key{})
	require.NoError(t, err)
	require.Equal(t, 2, report.Checkpoints)
	require.Zero(t, report.Held)
	recount(t, d)
	requireEmpty(t, d)
}

// An answer that would come after the caller's deadline does not come: the call ends by it, no lease is left, and the
// checkpoint stays listed. The read that was under way is of use to the next caller.
func TestAnswerAfterTheDeadline_LSE06(t *testing.T) {
	v, books := newValve(), shelf{}
	d := openDB(t, tempDir(t), Options{segmentFS: v.segments(), LoadTimeout: time.Hour})
	seq := seqOf(t, testNamespace(t, 2, sevenPages(4096)...), tokens(1, 48))
	books.publish(t, d, seq, 48)
	outOfRAM(t, d)
	open := v.close("read")
	r, err := d.Restore(briefly(t, shortly), seq, LookupOptions{})
	requireClass(t, err, ErrBusy)
	require.Nil(t, r)
	require.Zero(t, stats(t, d).Leases)
	require.EqualValues(t, 48, lookupAt(t, d, seq))
	open()
	settle(t, d)
	require.EqualValues(t, 48, restoreAt(t, d, seq))
	require.Equal(t, []int64{48}, books.requireListedIsReadable(t, d))
	recount(t, d)
}

// A copy of which nobody knows whether it has finished keeps its pages, and only those, whatever becomes of its publication:
// they are given to nobody, Stats and Close say so, and the same pages can be published again in other memory.
func TestUnprovenCopyKeepsItsPages_LSE07_CAN10(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	seq, books := seqOf(t, testNamespace(t, 2, sevenPages(4096)...), tokens(1, 48)), shelf{}
	p := begin(t, d, seq, 48)
	under := slots(t, p, 0)[0].Buffer()
	copied, err := p.Transfer(0)
	require.NoError(t, err)
	expires(&p.lease, shortly)
	becomes(t, d, 0, pendingOf, "pending")
	require.EqualValues(t, 1, stats(t, d).Transfers)
	require.EqualValues(t, 2*7*4096, stats(t, d).RAMUsed, "given to nobody")
	books.publish(t, d, seq, 48)
	for i := range under {
		under[i] = 0xEE // the copy goes on
	}
	require.EqualValues(t, 48, restoreAt(t, d, seq))
	require.EqualValues(t, 2*2*7*4096, stats(t, d).RAMUsed)
	report := closeDB(t, d)
	require.Equal(t, 1, report.Transfers)
	for i := range under {
		under[i] = 0xDD // not even the end of the handle takes the memory away
	}
	copied.Done()
	require.Zero(t, d.arena.Usage().Slots)
	d = openDB(t, d.dir.path, Options{})
	require.Equal(t, []int64{48}, books.requireListedIsReadable(t, d))
	recount(t, d)
}

// A commit whose caller stops waiting while it is being written is not lost and not in doubt: it is answered with its outcome, and
// saying it again changes nothing.
func TestCommitIsNeverInDoubt_LSE08(t *testing.T) {
	v, books := newValve(), shelf{}
	d := openDB(t, tempDir(t), Options{walFS: v.log()})
	seq := seqOf(t, testNamespace(t, 1, sevenPages(4096)...), tokens(1, 48))
	p := begin(t, d, seq, 48)
	fill(t, p, 0)
	open := v.close("log sync")
	ctx, cancel := context.WithCancel(context.Background())
	type answer struct {
		listed bool
		err    error
	}
	answered := make(chan answer, 1)
	go func() {
		listed, err := p.Commit(ctx, 0)
		answered <- answer{listed, err}
	}()
	v.waitFor(t, "log sync")
	cancel()
	open()
	require.Equal(t, answer{listed: true}, <-answered)
	require.False(t, commit(t, p, 0))
	require.NoError(t, func() error { _, err := d.Checkpoint(p.Generation()); return err }())
	require.EqualValues(t, 1, stats(t, d).Published)
	books.keep(t, p.Generation(), seq, 48)
	d = reopen(t, d, true)
	require.Equal(t, []int64{48}, books.requireListedIsReadable(t, d))
	recount(t, d)
}

// A request that is given up between lookup and load holds nothing, without any further call: leases are 0, RAM can be filled,
// what it held can be evicted, and neither memory nor goroutines grow over many of them.
func TestGivenUpRequestsHoldNothing_B11(t *testing.T) {
	rounds := 10_000
	if testing.Short() {
		rounds = 1000
	}
	d := openDB(t, memoryDir(t), Options{RAMBytes: 1 << 20})
	ns := testNamespace(t, 1, sevenPages(64<<10)...)
	seq := seqOf(t, ns, tokens(1, 48))
	publish(t, d, seq, 48)
	giveUp := func() *Restoration {
		ctx, cancel := context.WithCancel(context.Background())
		r, err := d.Restore(ctx, seq, LookupOptions{})
		require.NoError(t, err)
		cancel()
		return r
	}
	free := func() { // without a further call
		begun := time.Now()
		eventually(func() bool { return stats(t, d).Leases == 0 })
		require.Zero(t, stats(t, d).Leases)
		timely(t, begun, time.Second)
	}
	for range 100 {
		giveUp()
		free()
	}
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	memory, goroutines := heap(), runtime.NumGoroutine()
	for range rounds {
		giveUp()
		free()
	}
	// What is on its way out may still be there, what has leaked stays.
	eventually(func() bool { return runtime.NumGoroutine() <= goroutines+goroutines/20 })
	require.LessOrEqual(t, runtime.NumGoroutine(), goroutines+goroutines/20)
	eventually(func() bool { return heap() <= memory+memory/20 })
	require.LessOrEqual(t, heap(), memory+memory/20)
	publish(t, d, seqOf(t, ns, tokens(2, 48)), 48)
	publish(t, d, seqOf(t, ns, tokens(3, 48)), 48)
	require.NotZero(t, stats(t, d).PagesEvicted)
	last := giveUp()
	last.Release()
	last.Release()
	becomes(t, d, 0, leasesOf, "leases")
	recount(t, d)
}

// A writer that dies mid-way, a reader that was silent too long, and a tier that is all pinned.
func TestDeadWritersAndPinnedTiers_B17(t *testing.T) {
	const ttl = 150 * time.Millisecond
	d := openDB(t, tempDir(t), Options{RAMBytes: 1 << 20, AdmissionTimeout: time.Hour})
	ns, books := testNamespace(t, 1, sevenPages(64<<10)...), shelf{}
	seq := seqOf(t, ns, tokens(1, 48))
	w := newOwner(t, d, time.Hour)
	dead, err := d.Begin(context.Background(), PublishRequest{Sequence: seq, Offset: 48, Owner: w})
	require.NoError(t, err)
	for _, s := range slots(t, dead, 0)[:2] {
		_, err := s.Write(content(s.Key(), 0, s.Size()))
		require.NoError(t, err)
	}
	// Another worker of the same checkpoint: busy until the first is dead, then it takes over.
	second := begin(t, d, seq, 48, func(r *PublishRequest) { r.Meta = []byte("second") })
	_, err = second.Slots(briefly(t, time.Millisecond), 0)
	requireClass(t, err, ErrBusy)
	require.ErrorIs(t, d.Delete(context.Background(), dead.Generation()), ErrNotFound, "deleting what is not listed is a plain answer")
	begun := time.Now()
	falls(w, ttl)
	fill(t, second, 0) // waits for the death
	require.GreaterOrEqual(t, time.Since(begun), ttl)
	timely(t, begun, 2*ttl)
	require.True(t, commit(t, second, 0))
	books.keep(t, second.Generation(), seq, 48)
	becomes(t, d, 0, pendingOf, "staged bytes of the dead")
	require.EqualValues(t, 7*64<<10, stats(t, d).RAMUsed)

	// One that is alive and silent for three times its lease.
	slow := newOwner(t, d, time.Hour)
	r, err := d.Restore(context.Background(), seq, LookupOptions{Owner: slow})
	require.NoError(t, err)
	falls(slow, MinOwnerTTL)
	becomes(t, d, 0, leasesOf, "leases")
	requireClass(t, r.Err(), ErrConflict)
	_, err = d.Begin(context.Background(), PublishRequest{Sequence: seqOf(t, ns, tokens(2, 48)), Offset: 48, Owner: slow})
	requireClass(t, err, ErrConflict, "register anew")
	slow = newOwner(t, d, time.Hour)
	next := seqOf(t, ns, tokens(2, 48))
	books.publish(t, d, next, 48, func(r *PublishRequest) { r.Owner = slow })

	// Everything pinned: busy at the caller's own deadline.
	a, err := d.Restore(context.Background(), seq, LookupOptions{})
	require.NoError(t, err)
	b, err := d.Restore(context.Background(), next, LookupOptions{})
	require.NoError(t, err)
	begun = time.Now()
	_, err = d.Begin(briefly(t, 300*time.Millisecond), PublishRequest{Sequence: seqOf(t, ns, tokens(3, 48)), Offset: 48})
	requireClass(t, err, ErrBusy)
	require.GreaterOrEqual(t, time.Since(begun), 290*time.Millisecond)
	timely(t, begun, 330*time.Millisecond)
	a.Release()
	b.Release()
	books.requireListedIsReadable(t, d)
	recount(t, d)
}
