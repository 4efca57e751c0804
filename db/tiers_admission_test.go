package db

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Who is let in, who waits, and for how long.

// The number of pending publications is bounded; ending one admits the next. Impossible limits are refused.
func TestPendingIsBounded_ADM01(t *testing.T) {
	d := openDB(t, memoryDir(t), Options{})
	ns := testNamespace(t, 1, tiny()...)
	pending := make([]*Publication, MaxPending)
	for i := range pending {
		pending[i] = begin(t, d, seqOf(t, ns, tokens(uint64(i), 16)), 16)
	}
	one := seqOf(t, ns, tokens(MaxPending, 16))
	_, err := d.Begin(context.Background(), PublishRequest{Sequence: one, Offset: 16})
	requireClass(t, err, ErrBusy, "1024")
	require.EqualValues(t, MaxPending, stats(t, d).Pending)
	require.NoError(t, pending[0].Abort())
	pending[0] = begin(t, d, one, 16)
	for _, p := range pending {
		require.NoError(t, p.Abort())
	}
	recount(t, d)
	for _, o := range []Options{{RAMBytes: -1}, {DiskBytes: -1}, {AdmissionTimeout: -1}, {LeaseTimeout: -1}, {LoadTimeout: -1}, {RAMBytes: 1}} {
		_, err := Open(context.Background(), tempDir(t), o)
		require.ErrorIs(t, err, ErrInvalid, "%+v", o)
	}
}

// A bounded catalogue, which is a bounded disk, forgets the checkpoint that was used least recently, and no more of them than
// it needs to.
func TestLeastRecentlyUsedGoesFirst_ADM02(t *testing.T) {
	ns, books := testNamespace(t, 1, sevenPages(64<<10)...), shelf{}
	const each = 7 * 64 << 10
	d := openDB(t, tempDir(t), Options{DiskBytes: 3*each + each/2, RAMBytes: 16 * each})
	seq := func(i int) *Sequence { return seqOf(t, ns, tokens(uint64(i), 48)) }
	for i := range 3 {
		books.publish(t, d, seq(i), 48)
	}
	require.EqualValues(t, 48, lookupAt(t, d, seq(0)))
	_, err := d.curator.work(context.Background())
	require.NoError(t, err)
	books.publish(t, d, seq(3), 48)
	require.Zero(t, lookupAt(t, d, seq(1)), "the least recently used one")
	for _, i := range []int{0, 2, 3} {
		require.EqualValues(t, 48, restoreAt(t, d, seq(i)), "%d", i)
	}
	require.Len(t, books.requireListedIsReadable(t, d), 3)
	recount(t, d)
}

// The number of leases is bounded, a refusal leaves nothing behind, and releasing one admits the next.
func TestLeasesAreBounded_ADM03_ADM10(t *testing.T) {
	d := openDB(t, memoryDir(t), Options{})
	ns := testNamespace(t, 1, tiny()...)
	seq := seqOf(t, ns, tokens(1, 16))
	publish(t, d, seq, 16)
	held := make([]*Restoration, MaxLeases)
	for i := range held {
		r, err := d.Restore(context.Background(), seq, LookupOptions{})
		require.NoError(t, err)
		held[i] = r
	}
	for range 3 {
		_, err := d.Restore(context.Background(), seq, LookupOptions{})
		requireClass(t, err, ErrBusy, "4096")
		_, err = d.GetLoose(context.Background(), nil, ns, looseName(1))
		requireClass(t, err, ErrBusy)
		require.EqualValues(t, MaxLeases, stats(t, d).Leases)
	}
	publish(t, d, seqOf(t, ns, tokens(2, 16)), 16) // publications have a bound of their own
	held[7].Release()
	r, err := d.Restore(context.Background(), seq, LookupOptions{})
	require.NoError(t, err)
	verify(t, r, 1)
	held[7] = r
	for _, r := range held {
		r.Release()
	}
	recount(t, d)
}

// A publication that does not fit beside pinned pages ends after its bounded wait, whatever its own deadline, and harms nothing; one that
// is larger than the tier ends at once.
func TestNoRoomBesidePinnedPages_ADM04(t *testing.T) {
	const timeout = 150 * time.Millisecond
	d := openDB(t, tempDir(t), Options{RAMBytes: 4 << 20, AdmissionTimeout: timeout})
	books := shelf{}
	small := seqOf(t, testNamespace(t, 1, sevenPages(64<<10)...), tokens(1, 48))
	books.publish(t, d, small, 48)
	held, err := d.Restore(context.Background(), small, LookupOptions{})
	require.NoError(t, err)
	big := seqOf(t, testNamespace(t, 1, attentionOnly(2<<20, 16)...), tokens(2, 48))
	before := gauges(stats(t, d))
	for offset, class := range map[int64]error{48: ErrTooLarge, 32: ErrBusy} {
		begun := time.Now()
		_, err = d.Begin(context.Background(), PublishRequest{Sequence: big, Offset: offset})
		requireClass(t, err, class)
		if class == ErrBusy {
			require.GreaterOrEqual(t, time.Since(begun), timeout)
		}
		require.Equal(t, before, gauges(stats(t, d)))
	}
	s := stats(t, d)
	require.EqualValues(t, 1, s.AdmissionWaits)
	require.EqualValues(t, 1, s.AdmissionTimeouts)
	require.Zero(t, lookupAt(t, d, big))
	verify(t, held, 1)
	require.EqualValues(t, 48, lookupAt(t, d, small))
	held.Release()
	books.publish(t, d, big, 16)
	require.Equal(t, []int64{16, 48}, books.requireListedIsReadable(t, d))
	recount(t, d)
}

// Publications of several times the RAM tier pass beside a pinned restore, under every policy.
func TestSustainedPublications_ADM05(t *testing.T) {
	for _, policy := range []WritePolicy{WriteThrough, OnEvict, OnReuse, Never} {
		t.Run(policy.String(), func(t *testing.T) {
			d := openDB(t, memoryDir(t), Options{RAMBytes: 4 << 20, WritePolicy: policy})
			ns, books := testNamespace(t, 1, sevenPages(128<<10)...), shelf{}
			pinned := seqOf(t, ns, tokens(1000, 48))
			books.publish(t, d, pinned, 48)
			held, err := d.Restore(context.Background(), pinned, LookupOptions{})
			require.NoError(t, err)
			for i := range 16 {
				seq := seqOf(t, ns, tokens(uint64(i), 48))
				books.publish(t, d, seq, 48)
				require.EqualValues(t, 48, restoreAt(t, d, seq))
				s := stats(t, d)
				require.LessOrEqual(t, s.RAMUsed, s.RAMCapacity)
				require.Zero(t, s.AdmissionTimeouts)
			}
			verify(t, held, 1)
			require.EqualValues(t, 48, lookupAt(t, d, pinned), "what is pinned is not given up")
			held.Release()
			books.requireListedIsReadable(t, d)
			recount(t, d)
			requireEmpty(t, d)
		})
	}
}

// A reservation that fails because room cannot be made, while what would undo it fails too, is an error and leaves nothing pinned
// and nothing pending; and the log that failed stops everything else.
func TestReservationThatCannotBeUndone_ADM06(t *testing.T) {
	disk, log := &seam{}, &seam{}
	d := openDB(t, tempDir(t), Options{WritePolicy: OnEvict, RAMBytes: 1 << 20, segmentFS: disk.segments(), walFS: log.log()})
	ns := testNamespace(t, 1, sevenPages(64<<10)...)
	publish(t, d, seqOf(t, ns, tokens(1, 48)), 48)
	publish(t, d, seqOf(t, ns, tokens(2, 48)), 48)
	disk.fail("write", errno(t, "EIO"))
	log.fail("log append", errno(t, "EIO")) // the retirement of what could not be written
	_, err := d.Begin(context.Background(), PublishRequest{Sequence: seqOf(t, ns, tokens(3, 48)), Offset: 48})
	requireClass(t, err, ErrIO)
	requireIdle(t, d)
	s := stats(t, d)
	require.EqualValues(t, 2*7*64<<10, s.RAMDirtyBytes, "nothing was dropped without a record")
	require.EqualValues(t, 2, s.Checkpoints)
	for i := range 2 {
		require.EqualValues(t, 48, restoreAt(t, d, seqOf(t, ns, tokens(uint64(1+i), 48))))
	}
	disk.fail("", nil)
	_, err = d.Begin(context.Background(), PublishRequest{Sequence: seqOf(t, ns, tokens(3, 48)), Offset: 48})
	require.Error(t, err, "the log has stopped")
	requireIdle(t, d)
	_, err = d.Close(context.Background())
	require.Error(t, err)
	d = openDB(t, d.dir.path, Options{})
	require.Empty(t, shelf{}.requireListedIsReadable(t, d), "they were in RAM only")
	recount(t, d)
}

// Only lack of room waits: the wait is woken by the first release, and by Close; what cannot succeed returns at once.
func TestOnlyRoomIsWaitedFor_ADM07(t *testing.T) {
	d := openDB(t, tempDir(t), Options{RAMBytes: 1 << 20, AdmissionTimeout: time.Hour})
	ns := testNamespace(t, 1, sevenPages(128<<10)...)
	seq, next := seqOf(t, ns, tokens(1, 48)), seqOf(t, ns, tokens(2, 48))
	publish(t, d, seq, 48)
	held, err := d.Restore(context.Background(), seq, LookupOptions{})
	require.NoError(t, err)
	answer := make(chan error, 1)
	var p *Publication
	wait := func() {
		go func() {
			var err error
			p, err = d.Begin(context.Background(), PublishRequest{Sequence: next, Offset: 48})
			answer <- err
		}()
		require.Eventually(t, func() bool { return d.admission.waiting.Load() == 1 }, patience, time.Millisecond)
	}
	wait()
	_, err = d.Begin(context.Background(), PublishRequest{Sequence: next, Offset: 49})
	requireClass(t, err, ErrInvalid)
	other := seqOf(t, testNamespace(t, 1, attentionOnly(2<<20, 16)...), tokens(1, 16))
	_, err = d.Begin(context.Background(), PublishRequest{Sequence: other, Offset: 16})
	requireClass(t, err, ErrTooLarge)
	require.EqualValues(t, 48, restoreAt(t, d, seq), "what is in RAM needs no room")
	held.Release()
	require.NoError(t, <-answer, "the release makes room")
	s := stats(t, d)
	require.EqualValues(t, 1, s.AdmissionWaits)
	require.Zero(t, s.AdmissionTimeouts)
	require.NoError(t, p.Abort())

	held, err = d.Restore(context.Background(), seq, LookupOptions{})
	require.NoError(t, err)
	wait()
	closed := make(chan error, 1)
	go func() {
		_, err := d.Close(briefly(t, patience))
		closed <- err
	}()
	requireClass(t, <-answer, ErrClosed)
	require.NoError(t, <-closed)
	held.Release()
}

// Waiting is first come, first served: many callers that each need most of the tier all get their turn, and none of them waits for
// another one that is half served.
func TestEveryWaiterIsServed_ADM07(t *testing.T) {
	d := openDB(t, memoryDir(t), Options{RAMBytes: 1 << 20, AdmissionTimeout: time.Minute})
	ns := testNamespace(t, 1, sevenPages(96<<10)...)
	var group sync.WaitGroup
	const callers = 16
	errs := make(chan error, 2*callers)
	for i := range callers {
		seq := seqOf(t, ns, tokens(uint64(i), 48))
		group.Go(func() {
			for range 2 {
				p, err := d.Begin(context.Background(), PublishRequest{Sequence: seq, Offset: 48})
				if err == nil {
					err = p.Abort()
				}
				errs <- err
			}
		})
	}
	group.Wait()
	for range 2 * callers {
		require.NoError(t, <-errs)
	}
	require.Zero(t, stats(t, d).AdmissionTimeouts)
	recount(t, d)
}
