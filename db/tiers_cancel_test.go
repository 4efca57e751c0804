package db

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Requests that are given up, and storage that answers late or never.

// onDisk publishes a checkpoint of two ranks and takes it out of RAM.
func onDisk(t testing.TB, d *DB, books shelf, seed uint64) (*Sequence, Generation) {
	t.Helper()
	seq := seqOf(t, testNamespace(t, 2, sevenPages(4096)...), tokens(seed, 48))
	gen, _ := books.publish(t, d, seq, 48)
	outOfRAM(t, d)
	return seq, gen
}

// startRestore begins a restore that the caller can cancel.
func startRestore(d *DB, seq *Sequence) (cancel func(), answer <-chan error) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		r, err := d.Restore(ctx, seq, LookupOptions{})
		if err == nil {
			r.Release()
		}
		done <- err
	}()
	return cancel, done
}

// A restore that is cancelled while storage is stuck ends at once, as busy and not as a loss: the checkpoint stays listed, no lease is
// left, and its pages can be deleted.
func TestCancelledRestoreHoldsNothing_CAN01(t *testing.T) {
	v, books := newValve(), shelf{}
	d := openDB(t, tempDir(t), Options{segmentFS: v.segments()})
	seq, gen := onDisk(t, d, books, 1)
	open := v.close("read")
	cancel, answer := startRestore(d, seq)
	v.waitFor(t, "read")
	cancel()
	requireClass(t, <-answer, ErrBusy)
	require.Zero(t, stats(t, d).Leases)
	require.EqualValues(t, 48, lookupAt(t, d, seq))
	require.NoError(t, d.Delete(context.Background(), gen))
	open()
	settle(t, d)
	idle(d)
	require.Zero(t, stats(t, d).RAMUsed)
	require.Zero(t, stats(t, d).DiskBytes)
	recount(t, d)
}

// Storage that never answers costs each restore its deadline, or the load timeout where it has none, and no more: neither the next
// restore nor a publication nor a lookup waits for it. Once it answers, everything is as before.
func TestStorageThatNeverAnswers_CAN02(t *testing.T) {
	v, books := newValve(), shelf{}
	d := openDB(t, tempDir(t), Options{segmentFS: v.segments(), LoadTimeout: 200 * time.Millisecond})
	first, _ := onDisk(t, d, books, 1)
	second, _ := onDisk(t, d, books, 2)
	open := v.close("read")
	for _, seq := range []*Sequence{first, second, first} {
		for _, ctx := range []context.Context{briefly(t, shortly), context.Background()} {
			begun := time.Now()
			_, err := d.Restore(ctx, seq, LookupOptions{})
			requireClass(t, err, ErrBusy)
			timely(t, begun, 220*time.Millisecond)
			require.Zero(t, stats(t, d).Leases)
		}
	}
	third := seqOf(t, first.Namespace(), tokens(3, 48))
	books.publish(t, d, third, 48)
	require.EqualValues(t, 48, restoreAt(t, d, third))
	open()
	require.Equal(t, []int64{48, 48, 48}, books.requireListedIsReadable(t, d))
	recount(t, d)
}

// The late answer to a restore that was cancelled is of use: the next one takes what it has read, and nothing is read twice.
func TestLateAnswerIsUsed_CAN03(t *testing.T) {
	v, books := newValve(), shelf{}
	d := openDB(t, tempDir(t), Options{segmentFS: v.segments()})
	seq, gen := onDisk(t, d, books, 1)
	open := v.close("read")
	cancel, answer := startRestore(d, seq)
	v.waitFor(t, "read")
	cancel()
	requireClass(t, <-answer, ErrBusy)
	_, next := startRestore(d, seq)
	open()
	require.NoError(t, <-next)
	require.EqualValues(t, 48, restoreAt(t, d, seq))
	settle(t, d)
	// Reads that had not begun when the first gave up were dropped with it; none was carried out twice.
	require.LessOrEqual(t, d.segments.Stats().PagesRead, int64(2*7))
	require.NoError(t, d.Delete(context.Background(), gen))
	requireEmpty(t, d)
}

// Of two restores of the same pages one is cancelled: the other gets its answer, and cancelling again changes nothing.
func TestOneOfTwoIsCancelled_CAN04(t *testing.T) {
	v, books := newValve(), shelf{}
	d := openDB(t, tempDir(t), Options{segmentFS: v.segments()})
	seq, _ := onDisk(t, d, books, 1)
	for _, late := range []bool{false, true} { // whether the second came when the first was reading
		outOfRAM(t, d)
		open := v.close("read")
		cancel, a := startRestore(d, seq)
		v.waitFor(t, "read")
		_, b := startRestore(d, seq)
		if late {
			require.Eventually(t, func() bool { return stats(t, d).Leases == 2 }, patience, time.Millisecond)
		}
		cancel()
		requireClass(t, <-a, ErrBusy)
		open()
		require.NoError(t, <-b)
		cancel()
		settle(t, d)
		recount(t, d)
	}
	require.Equal(t, []int64{48}, books.requireListedIsReadable(t, d))
}

// Close ends the restores that wait at once, and lets those that have their pages keep them.
func TestCloseEndsWaitingRestores_CAN05(t *testing.T) {
	v, books := newValve(), shelf{}
	d := openDB(t, tempDir(t), Options{segmentFS: v.segments()})
	seq, _ := onDisk(t, d, books, 1)
	other, _ := onDisk(t, d, books, 2)
	held, err := d.Restore(context.Background(), other, LookupOptions{})
	require.NoError(t, err)
	open := v.close("read")
	cancel, a := startRestore(d, seq)
	_, b := startRestore(d, seq)
	v.waitFor(t, "read")
	cancel()
	requireClass(t, <-a, ErrBusy)
	closed := make(chan CloseReport, 1)
	go func() {
		r, err := d.Close(briefly(t, patience))
		require.NoError(t, err)
		closed <- r
	}()
	requireClass(t, <-b, ErrClosed)
	open() // the device has to have finished with the memory
	require.Equal(t, 1, (<-closed).Leases)
	verify(t, held, 2)
	held.Release()
	require.Zero(t, d.arena.Usage().Slots)
}

// A publication that could not be begun pins nothing and is pending nowhere, for whatever reason it could not.
func TestRefusedPublicationPinsNothing_CAN06(t *testing.T) {
	d := openDB(t, tempDir(t), Options{RAMBytes: 1 << 20, AdmissionTimeout: shortly})
	ns := testNamespace(t, 1, sevenPages(128<<10)...)
	seq := seqOf(t, ns, tokens(1, 48))
	publish(t, d, seq, 48)
	held, err := d.Restore(context.Background(), seq, LookupOptions{})
	require.NoError(t, err)
	dead := newOwner(t, d, time.Hour)
	dead.Close()
	cancelled, cancel := context.WithCancel(context.Background())
	cancel()
	before := gauges(stats(t, d))
	longer := seqOf(t, ns, tokens(1, 48), tokens(2, 48))
	for name, x := range map[string]struct {
		ctx   context.Context
		r     PublishRequest
		class error
	}{
		"cancelled":  {cancelled, PublishRequest{Sequence: longer, Offset: 96}, ErrBusy},
		"no room":    {context.Background(), PublishRequest{Sequence: longer, Offset: 96}, ErrBusy},
		"dead owner": {context.Background(), PublishRequest{Sequence: seqOf(t, ns, tokens(1, 47)), Offset: 16, Owner: dead}, nil},
	} {
		_, err := d.Begin(x.ctx, x.r)
		require.Error(t, err, name)
		if x.class != nil {
			requireClass(t, err, x.class)
		}
		require.Equal(t, before, gauges(stats(t, d)), name)
		require.Equal(t, 7, d.residency.counts().pinned, "%s: those of the restoration", name)
	}
	held.Release()
	_, err = d.Begin(context.Background(), PublishRequest{Sequence: seqOf(t, ns, tokens(5, 48)), Offset: 48, Owner: dead})
	requireClass(t, err, ErrConflict)
	recount(t, d)
}

// The id of a request that was given up, while filling or while being written, is used by another request: nothing of the first
// touches the second.
func TestReusedRequestID_CAN07(t *testing.T) {
	for _, committing := range []bool{false, true} {
		v, books := newValve(), shelf{}
		d := openDB(t, tempDir(t), Options{segmentFS: v.segments()})
		ns := testNamespace(t, 1, sevenPages(4096)...)
		same := func(r *PublishRequest) { r.Request = "request" }
		first := begin(t, d, seqOf(t, ns, tokens(1, 48)), 48, same)
		fill(t, first, 0)
		committed := make(chan error, 1)
		open := v.close("write")
		if committing {
			go func() {
				_, err := first.Commit(context.Background(), 0)
				committed <- err
			}()
			v.waitFor(t, "write")
		}
		require.NoError(t, first.Abort(), "it does not wait for the disk")
		if committing {
			require.Error(t, <-committed)
		}
		require.NoError(t, first.Abort(), "twice is as once")
		open()
		seq := seqOf(t, ns, tokens(1, 48), tokens(2, 48))
		books.publish(t, d, seq, 48, same)
		books.publish(t, d, seq, 96, same)
		require.NoError(t, first.Abort())
		require.EqualValues(t, 96, restoreAt(t, d, seq))
		require.Equal(t, []int64{48, 96}, books.requireListedIsReadable(t, d))
		recount(t, d)
	}
}

// A restore that is given up while a device copies from it shows nothing any more; its room comes back when the copy has ended,
// and not before.
func TestRestoreGivenUpDuringItsCopy_CAN08(t *testing.T) {
	d := openDB(t, tempDir(t), Options{RAMBytes: 1 << 20, AdmissionTimeout: shortly})
	ns := testNamespace(t, 1, sevenPages(128<<10)...)
	seq, next := seqOf(t, ns, tokens(1, 48)), seqOf(t, ns, tokens(2, 48))
	publish(t, d, seq, 48)
	ctx, cancel := context.WithCancel(context.Background())
	r, err := d.Restore(ctx, seq, LookupOptions{})
	require.NoError(t, err)
	under := r.Pages(0)
	copied, err := r.Transfer()
	require.NoError(t, err)
	cancel()
	becomes(t, d, 0, leasesOf, "leases")
	require.Nil(t, r.Pages(0))
	_, err = d.Begin(context.Background(), PublishRequest{Sequence: next, Offset: 48})
	requireClass(t, err, ErrBusy)
	for _, p := range under {
		require.Equal(t, content(p.Key, 0, int64(len(p.Bytes))), p.Bytes, "the copy reads what it began to read")
	}
	copied.Done()
	d.options.AdmissionTimeout = time.Hour
	publish(t, d, next, 48)
	recount(t, d)
}

// Taking RAM away waits a bounded time for a copy that runs, cancels nothing, and succeeds if the copy drains in time.
func TestPreemptionWaitsForCopies_CAN09(t *testing.T) {
	d := openDB(t, tempDir(t), Options{RAMBytes: 4 << 20})
	seq := seqOf(t, testNamespace(t, 1, sevenPages(128<<10)...), tokens(1, 48))
	publish(t, d, seq, 48)
	r, err := d.Restore(context.Background(), seq, LookupOptions{})
	require.NoError(t, err)
	copied, err := r.Transfer()
	require.NoError(t, err)
	r.Release()
	requireClass(t, d.SetRAMBytes(briefly(t, shortly), 1<<17), ErrBusy)
	require.EqualValues(t, 1<<17, stats(t, d).RAMCapacity, "in force all the same")
	require.EqualValues(t, 1, stats(t, d).Transfers)
	done := make(chan error, 1)
	go func() { done <- d.SetRAMBytes(context.Background(), 1<<17) }()
	copied.Done()
	require.NoError(t, <-done)
	require.LessOrEqual(t, stats(t, d).RAMUsed, int64(1<<17))
	require.NoError(t, d.SetRAMBytes(context.Background(), 4<<20))
	require.EqualValues(t, 48, restoreAt(t, d, seq))
	recount(t, d)
}
