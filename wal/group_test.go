package wal

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

// order is what a test commits: the payload of its record, or the error to refuse it with.
type order struct {
	payload string
	kind    byte // 0 = 1; no record if payload is "" as well
	refuse  error
}

// ledger is a state machine behind a group: what is prepared is pending until the pass ends.
type ledger struct {
	t        testing.TB
	pending  []string
	applied  []string
	lsns     []txn.LSN
	batches  []int
	discards []error
	applyErr error
}

func (b *ledger) hooks() Hooks[order] {
	return Hooks[order]{
		Prepare: func(r *Request[order], lsn txn.LSN) (Record, error) {
			o := r.Payload
			if o.refuse != nil {
				return Record{}, o.refuse
			}
			b.pending = append(b.pending, o.payload)
			if o.payload == "" {
				return Record{}, nil
			}
			return Record{Kind: max(o.kind, 1), Payload: []byte(o.payload), Essential: r.Essential}, nil
		},
		Apply: func(accepted []*Request[order]) error {
			if b.applyErr != nil {
				return b.applyErr
			}
			require.Len(b.t, accepted, len(b.pending))
			for i, r := range accepted {
				require.Equal(b.t, b.pending[i], r.Payload.payload)
				if r.LSN() != 0 {
					b.lsns = append(b.lsns, r.LSN())
				}
			}
			b.applied = append(b.applied, b.pending...)
			b.batches = append(b.batches, len(accepted))
			b.pending = nil
			return nil
		},
		Discard: func(accepted []*Request[order], err error) {
			require.Error(b.t, err)
			b.discards = append(b.discards, err)
			b.pending = nil
		},
	}
}

func newGroup(t testing.TB, l *Log, b *ledger, o GroupOptions) *Group[order] {
	t.Helper()
	g, err := NewGroup(l, b.hooks(), o)
	require.NoError(t, err)
	t.Cleanup(g.Close)
	return g
}

// gate stops every file sync until it is let through, and counts them.
type gate struct {
	syncs atomic.Int64
	shut  atomic.Bool
	pass  chan struct{}
}

func (g *gate) fs() *seam {
	g.pass = make(chan struct{})
	return newSeam(func(op operation) error {
		if op.name == "fsync" {
			g.syncs.Add(1)
			if g.shut.Load() {
				<-g.pass
			}
		}
		return nil
	})
}

// pending starts a commit and gives its outcome later.
func pending(g *Group[order], ctx context.Context, r *Request[order]) <-chan error {
	outcome := make(chan error, 1)
	go func() { outcome <- g.Commit(ctx, r) }()
	return outcome
}

func durable(payload string) *Request[order] {
	return &Request[order]{Payload: order{payload: payload}, Durable: true}
}

// While one batch is synced the next one gathers, and one sync serves all of it.
func TestOneSyncServesAllThatQueuedMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var disk gate
		l := open(t, filepath.Join(t.TempDir(), "wal"), Options{FS: disk.fs()})
		b := &ledger{t: t}
		g := newGroup(t, l, b, GroupOptions{})
		ctx := context.Background()
		require.NoError(t, g.Commit(ctx, durable("first")))
		before := disk.syncs.Load()

		disk.shut.Store(true)
		flying := pending(g, ctx, durable("in flight"))
		synctest.Wait()
		var rest []<-chan error
		for i := range 63 {
			rest = append(rest, pending(g, ctx, durable(fmt.Sprint(i))))
		}
		synctest.Wait()
		require.Equal(t, 63, g.queued())
		disk.pass <- struct{}{}
		require.NoError(t, <-flying)
		synctest.Wait()
		require.Zero(t, g.queued(), "all were taken at once")
		disk.pass <- struct{}{}
		for _, outcome := range rest {
			require.NoError(t, <-outcome)
		}
		require.Equal(t, before+2, disk.syncs.Load())
		require.Equal(t, []int{1, 1, 63}, b.batches)
		require.Equal(t, txn.LSN(65), l.Synced())
		disk.shut.Store(false)
		g.Close()
		require.NoError(t, l.Close())
	})
}

// What nothing durable waits for is acknowledged in its place, without a sync; a durable request covers all before it, even if
// it has nothing to write itself.
func TestOnlyDurableRequestsWaitForASync(t *testing.T) {
	var disk gate
	l := open(t, filepath.Join(t.TempDir(), "wal"), Options{FS: disk.fs()})
	g := newGroup(t, l, &ledger{t: t}, GroupOptions{})
	ctx := context.Background()
	require.NoError(t, g.Commit(ctx, durable("first")))
	before := disk.syncs.Load()
	for i := range 20 {
		r := &Request[order]{Payload: order{payload: fmt.Sprint(i)}}
		require.NoError(t, g.Commit(ctx, r))
		require.Equal(t, txn.LSN(i+2), r.LSN())
	}
	require.Equal(t, before, disk.syncs.Load())
	require.Equal(t, txn.LSN(1), l.Synced())
	require.Len(t, replayed(t, l, 1), 21)

	nothing := durable("")
	require.NoError(t, g.Commit(ctx, nothing))
	require.Zero(t, nothing.LSN())
	require.Equal(t, before+1, disk.syncs.Load())
	require.Equal(t, txn.LSN(21), l.Synced())
	require.NoError(t, g.Commit(ctx, durable("")))
	require.Equal(t, before+1, disk.syncs.Load(), "nothing new to sync")
}

// A refused request gets its own error and leaves nothing; those around it go on in one batch with consecutive numbers.
func TestRefusalIsIndividual(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var disk gate
		l := open(t, filepath.Join(t.TempDir(), "wal"), Options{FS: disk.fs()})
		b := &ledger{t: t}
		g := newGroup(t, l, b, GroupOptions{})
		ctx := context.Background()
		disk.shut.Store(true)
		flying := pending(g, ctx, durable("in flight"))
		synctest.Wait()
		mine := fmt.Errorf("mine: %w", txn.ErrConflict)
		var outcomes []<-chan error
		for i := range 9 {
			r := durable(fmt.Sprint(i))
			if i%3 == 1 {
				r.Payload.refuse = mine
			}
			outcomes = append(outcomes, pending(g, ctx, r))
			synctest.Wait()
		}
		disk.shut.Store(false)
		disk.pass <- struct{}{}
		require.NoError(t, <-flying)
		for i, outcome := range outcomes {
			if i%3 == 1 {
				require.Equal(t, mine, <-outcome)
			} else {
				require.NoError(t, <-outcome)
			}
		}
		require.Equal(t, []int{1, 6}, b.batches)
		require.Empty(t, b.discards)
		require.Equal(t, []string{"in flight", "0", "2", "3", "5", "6", "8"}, payloads(replayed(t, l, 1)))
		require.Equal(t, []txn.LSN{1, 2, 3, 4, 5, 6, 7}, b.lsns)

		refused := durable("x")
		refused.Payload.refuse = mine
		require.Equal(t, mine, g.Commit(ctx, refused), "alone")
		require.Equal(t, txn.LSN(8), l.Next())
		g.Close()
		require.NoError(t, l.Close())
	})
}

// A context that ends while the request waits withdraws it without a trace; one that ends later changes nothing: the answer is
// what happened.
func TestContextNeverMeansMaybe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var disk gate
		l := open(t, filepath.Join(t.TempDir(), "wal"), Options{FS: disk.fs()})
		g := newGroup(t, l, &ledger{t: t}, GroupOptions{})
		ended, end := context.WithCancel(context.Background())
		end()
		require.ErrorIs(t, g.Commit(ended, durable("never")), txn.ErrBusy)

		disk.shut.Store(true)
		taken, endTaken := context.WithCancel(context.Background())
		flying := pending(g, taken, durable("in flight"))
		synctest.Wait()
		queued, endQueued := context.WithCancel(context.Background())
		withdrawn := pending(g, queued, durable("withdrawn"))
		stays := pending(g, context.Background(), durable("stays"))
		synctest.Wait()
		endTaken()
		endQueued()
		err := <-withdrawn
		require.ErrorIs(t, err, txn.ErrBusy)
		require.ErrorIs(t, err, context.Canceled)
		synctest.Wait()
		require.Empty(t, flying, "its outcome is not known yet")
		disk.shut.Store(false)
		disk.pass <- struct{}{}
		require.NoError(t, <-flying)
		require.NoError(t, <-stays)
		require.Equal(t, []string{"in flight", "stays"}, payloads(replayed(t, l, 1)))
		g.Close()
		require.NoError(t, l.Close())
	})
}

// The queue is bounded: who finds it full waits for room until its context ends, in turn, and is then told to come again.
func TestFullQueueIsBusy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var disk gate
		l := open(t, filepath.Join(t.TempDir(), "wal"), Options{FS: disk.fs()})
		g := newGroup(t, l, &ledger{t: t}, GroupOptions{QueueLimit: 4})
		ctx := context.Background()
		disk.shut.Store(true)
		outcomes := []<-chan error{pending(g, ctx, durable("in flight"))}
		synctest.Wait()
		first, withdraw := context.WithCancel(ctx)
		withdrawn := pending(g, first, durable("withdrawn"))
		synctest.Wait()
		for i := range 3 {
			outcomes = append(outcomes, pending(g, ctx, durable(fmt.Sprint(i))))
		}
		synctest.Wait()
		require.Equal(t, 4, g.queued())
		impatient, end := context.WithCancel(ctx)
		busy := pending(g, impatient, durable("no room"))
		synctest.Wait()
		end()
		require.ErrorIs(t, <-busy, txn.ErrBusy)
		outcomes = append(outcomes, pending(g, ctx, durable("gets the room")))
		synctest.Wait()
		require.Equal(t, 4, g.queued())
		withdraw()
		require.ErrorIs(t, <-withdrawn, txn.ErrBusy)
		synctest.Wait()
		require.Equal(t, 4, g.queued())
		patient := pending(g, ctx, durable("still waiting"))
		synctest.Wait()
		disk.shut.Store(false)
		disk.pass <- struct{}{}
		for _, outcome := range append(outcomes, patient) {
			require.NoError(t, <-outcome)
		}
		require.Len(t, replayed(t, l, 1), 6)
		g.Close()
		require.NoError(t, l.Close())
	})
}

// Close admits nobody, finishes what waits, and turns away who waits for room.
func TestCloseFinishesTheQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var disk gate
		l := open(t, filepath.Join(t.TempDir(), "wal"), Options{FS: disk.fs()})
		g := newGroup(t, l, &ledger{t: t}, GroupOptions{QueueLimit: 2})
		ctx := context.Background()
		disk.shut.Store(true)
		admitted := []<-chan error{pending(g, ctx, durable("in flight"))}
		synctest.Wait()
		for i := range 2 {
			admitted = append(admitted, pending(g, ctx, durable(fmt.Sprint(i))))
		}
		synctest.Wait()
		outside := pending(g, ctx, durable("outside"))
		synctest.Wait()
		closed := make(chan struct{})
		go func() { g.Close(); close(closed) }()
		require.ErrorIs(t, <-outside, txn.ErrClosed)
		disk.shut.Store(false)
		disk.pass <- struct{}{}
		for _, outcome := range admitted {
			require.NoError(t, <-outcome)
		}
		<-closed
		g.Close()
		require.ErrorIs(t, g.Commit(ctx, durable("late")), txn.ErrClosed)
		require.Len(t, replayed(t, l, 1), 3)
		require.NoError(t, l.Close())
	})
}

// A failed write or sync fails its whole batch, is told to the state, and fails everything after it.
func TestFailedBatchStopsTheGroup_B29(t *testing.T) {
	for _, name := range []string{"append", "fsync"} {
		synctest.Test(t, func(t *testing.T) {
			var failing atomic.Bool
			reached, pass := make(chan struct{}), make(chan struct{})
			l := open(t, filepath.Join(t.TempDir(), "wal"), Options{FS: newSeam(func(op operation) error {
				if op.name == name && failing.Load() {
					reached <- struct{}{}
					<-pass
					return syscall.EIO
				}
				return nil
			})})
			b := &ledger{t: t}
			g := newGroup(t, l, b, GroupOptions{})
			ctx := context.Background()
			require.NoError(t, g.Commit(ctx, durable("before")))
			failing.Store(true)
			flying := pending(g, ctx, durable("in flight"))
			<-reached
			failing.Store(false)
			queued := pending(g, ctx, durable("queued"))
			synctest.Wait()
			pass <- struct{}{}
			require.ErrorIs(t, <-flying, txn.ErrIO)
			require.ErrorIs(t, <-queued, txn.ErrIO)
			require.ErrorIs(t, g.Commit(ctx, durable("later")), txn.ErrIO)
			require.ErrorIs(t, g.Commit(ctx, &Request[order]{Payload: order{payload: "not durable"}}), txn.ErrIO)
			require.Equal(t, []string{"before"}, b.applied)
			require.Len(t, b.discards, 1)
			g.Close()
			require.ErrorIs(t, l.Close(), txn.ErrIO)
		})
	}
}

// Nothing is acknowledged once the fence says no, durable or not.
func TestFencedGroupAcknowledgesNothing(t *testing.T) {
	for _, isDurable := range []bool{true, false} {
		for _, nothing := range []bool{true, false} {
			var lost atomic.Bool
			l := open(t, filepath.Join(t.TempDir(), "wal"), Options{
				Fence: func() error {
					if lost.Load() {
						return errors.New("lock lost")
					}
					return nil
				},
				FS: newSeam(func(op operation) error {
					if op.name == "append" {
						lost.Store(true) // after the check before the write
					}
					return nil
				}),
			})
			b := &ledger{t: t}
			g := newGroup(t, l, b, GroupOptions{})
			r := &Request[order]{Payload: order{payload: "x"}, Durable: isDurable}
			if nothing {
				r.Payload.payload = ""
				lost.Store(true)
			}
			require.ErrorIs(t, g.Commit(context.Background(), r), txn.ErrFenced)
			require.Empty(t, b.applied)
			require.ErrorIs(t, l.Err(), txn.ErrFenced)
			g.Close()
		}
	}
}

// On a full disk a mixed batch comes apart: what gives space back goes through, the rest is ErrNoSpace, and the group goes on.
func TestFullDiskSplitsTheBatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := newFull()
		reached, pass := make(chan struct{}, 1), make(chan struct{})
		var shut atomic.Bool
		disk.check = func(op operation) error {
			if op.name == "fsync" && shut.Load() {
				reached <- struct{}{}
				<-pass
			}
			return nil
		}
		l := open(t, filepath.Join(t.TempDir(), "wal"), Options{FS: disk, ReserveBytes: 2000})
		b := &ledger{t: t}
		g := newGroup(t, l, b, GroupOptions{})
		ctx := context.Background()
		require.NoError(t, g.Commit(ctx, durable("before")))
		shut.Store(true)
		flying := pending(g, ctx, durable("in flight"))
		<-reached
		disk.now = true
		for name := range disk.reserved {
			disk.reserved[name] = l.tail.size + 2000 + 40 // room for the reserve and hardly more
		}
		l.tail.reserved = l.tail.size + 2000 + 40
		var essential, ordinary []<-chan error
		for i := range 5 {
			r := durable(fmt.Sprintf("essential %d", i))
			r.Essential = true
			essential = append(essential, pending(g, ctx, r))
			ordinary = append(ordinary, pending(g, ctx, durable("ordinary")))
		}
		synctest.Wait()
		shut.Store(false)
		pass <- struct{}{}
		require.NoError(t, <-flying)
		for i := range essential {
			require.NoError(t, <-essential[i])
			require.ErrorIs(t, <-ordinary[i], txn.ErrNoSpace)
		}
		require.NoError(t, l.Err())
		require.Len(t, b.discards, 1)
		require.Equal(t, []int{1, 1, 5}, b.batches)

		// More essential ones than the reserve holds: as many as fit, one by one.
		shut.Store(true)
		r := durable("holds the committer")
		r.Essential = true
		flying = pending(g, ctx, r)
		<-reached
		essential = nil
		for range 40 {
			r := durable(strings.Repeat("e", 100))
			r.Essential = true
			essential = append(essential, pending(g, ctx, r))
		}
		synctest.Wait()
		shut.Store(false)
		pass <- struct{}{}
		require.NoError(t, <-flying)
		through := 0
		for _, outcome := range essential {
			if err := <-outcome; err == nil {
				through++
			} else {
				require.ErrorIs(t, err, txn.ErrNoSpace)
			}
		}
		require.Positive(t, through)
		require.Less(t, through, 40)
		require.NoError(t, l.Err())
		require.Less(t, l.tail.reserved-l.tail.size, entryBytes(100), "the reserve was used to the last record")
		disk.now = false
		require.NoError(t, g.Commit(ctx, durable("after")))
		require.Len(t, replayed(t, l, 1), int(l.Next())-1)
		g.Close()
		require.NoError(t, l.Close())
	})
}

// A record that no log can hold fails alone, although it was prepared with others.
func TestMisfitFailsAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var disk gate
		l := open(t, filepath.Join(t.TempDir(), "wal"), Options{FS: disk.fs()})
		b := &ledger{t: t}
		g := newGroup(t, l, b, GroupOptions{})
		ctx := context.Background()
		disk.shut.Store(true)
		flying := pending(g, ctx, durable("in flight"))
		synctest.Wait()
		good := pending(g, ctx, durable("good"))
		synctest.Wait()
		large := pending(g, ctx, durable(strings.Repeat("l", MaxRecordBytes+1)))
		strange := durable("strange")
		strange.Payload.kind = 255
		odd := pending(g, ctx, strange)
		synctest.Wait()
		disk.shut.Store(false)
		disk.pass <- struct{}{}
		require.NoError(t, <-flying)
		require.NoError(t, <-good)
		require.ErrorIs(t, <-large, txn.ErrTooLarge)
		require.ErrorIs(t, <-odd, txn.ErrInvalid)
		require.Equal(t, []string{"in flight", "good"}, b.applied)
		require.Len(t, b.discards, 2)
		require.Equal(t, []string{"in flight", "good"}, payloads(replayed(t, l, 1)))
		g.Close()
		require.NoError(t, l.Close())
	})
}

// A state that cannot take what the log holds stops everything: only opening again makes the two agree.
func TestFailedApplyStopsTheLog(t *testing.T) {
	l := open(t, filepath.Join(t.TempDir(), "wal"), Options{})
	b := &ledger{t: t, applyErr: fmt.Errorf("index: %w", txn.ErrIO)}
	g := newGroup(t, l, b, GroupOptions{})
	ctx := context.Background()
	require.ErrorIs(t, g.Commit(ctx, durable("x")), txn.ErrIO)
	require.ErrorIs(t, g.Commit(ctx, durable("y")), txn.ErrIO)
	require.ErrorIs(t, l.Err(), txn.ErrIO)
}

// Batches stay within their bounds, and what did not fit comes next, in order.
func TestBatchBounds(t *testing.T) {
	for _, c := range []struct {
		o       GroupOptions
		batches []int
	}{
		{GroupOptions{BatchLimit: 4}, []int{1, 4, 4, 2}},
		{GroupOptions{BatchBytes: 3 * entryBytes(3)}, []int{1, 3, 3, 3, 1}},
	} {
		synctest.Test(t, func(t *testing.T) {
			var disk gate
			l := open(t, filepath.Join(t.TempDir(), "wal"), Options{FS: disk.fs()})
			b := &ledger{t: t}
			g := newGroup(t, l, b, c.o)
			ctx := context.Background()
			disk.shut.Store(true)
			want := []string{"100"}
			outcomes := []<-chan error{pending(g, ctx, durable("100"))}
			synctest.Wait()
			for i := range 10 {
				want = append(want, fmt.Sprint(101+i))
				outcomes = append(outcomes, pending(g, ctx, durable(want[i+1])))
				synctest.Wait()
			}
			disk.shut.Store(false)
			disk.pass <- struct{}{}
			for _, outcome := range outcomes {
				require.NoError(t, <-outcome)
			}
			require.Equal(t, want, b.applied)
			require.Equal(t, c.batches, b.batches)
			g.Close()
			require.NoError(t, l.Close())
		})
	}
}

func TestGroupRefusesNonsense(t *testing.T) {
	l := open(t, filepath.Join(t.TempDir(), "wal"), Options{})
	b := &ledger{t: t}
	for _, o := range []GroupOptions{{QueueLimit: -1}, {QueueLimit: QueueLimitMax + 1}, {BatchLimit: -1},
		{BatchLimit: QueueLimitMax + 1}, {BatchBytes: -1}, {BatchBytes: BatchBytesMax + 1}} {
		_, err := NewGroup(l, b.hooks(), o)
		require.ErrorIs(t, err, txn.ErrInvalid)
	}
	_, err := NewGroup(l, Hooks[order]{}, GroupOptions{})
	require.ErrorIs(t, err, txn.ErrInvalid)
	g := newGroup(t, l, b, GroupOptions{})
	r := durable("once")
	require.NoError(t, g.Commit(context.Background(), r))
	require.ErrorIs(t, g.Commit(context.Background(), r), txn.ErrInvalid)
}

// Many callers at once, durable and not, some impatient, with rotation and cuts under way: everybody gets the truth, the state
// sees each record once and in the order of the log, and the log gives the same back.
func TestConcurrentCommitters(t *testing.T) {
	const callers, each = 64, 40
	dir := filepath.Join(memoryDir(t), "wal")
	var disk gate
	o := Options{RotateBytes: 8 << 10, FS: disk.fs()}
	l := open(t, dir, o)
	b := &ledger{t: t}
	g := newGroup(t, l, b, GroupOptions{QueueLimit: 48})
	var mu sync.Mutex
	acknowledged := map[txn.LSN]string{}
	var callersDone sync.WaitGroup
	for c := range callers {
		callersDone.Go(func() {
			for i := range each {
				r := &Request[order]{Payload: order{payload: fmt.Sprintf("caller %d request %d", c, i)}, Durable: c%4 != 0}
				ctx, end := context.WithCancel(context.Background())
				if c%8 == 7 {
					go end()
				}
				err := g.Commit(ctx, r)
				end()
				if err != nil {
					if !errors.Is(err, txn.ErrBusy) || c%8 != 7 {
						t.Errorf("caller %d: %v", c, err)
					}
					continue
				}
				if r.Durable && r.LSN() > l.Synced() {
					t.Errorf("LSN %d acknowledged, %d synced", r.LSN(), l.Synced())
				}
				mu.Lock()
				acknowledged[r.LSN()] = r.Payload.payload
				mu.Unlock()
			}
		})
	}
	const kept = 1200
	callersDone.Go(func() {
		for range 20 {
			if next := l.Next(); next > kept {
				if err := l.Cut(next - kept); err != nil {
					t.Error(err)
				}
			}
			_ = l.First() + l.Next() + l.Synced() + txn.LSN(l.Size()+l.Bytes())
		}
	})
	callersDone.Wait()
	g.Close()
	require.GreaterOrEqual(t, len(acknowledged), callers*each*7/8)
	require.Len(t, b.applied, len(acknowledged))
	for i, lsn := range b.lsns {
		require.Equal(t, txn.LSN(i+1), lsn)
		require.Equal(t, acknowledged[lsn], b.applied[i])
	}
	require.Less(t, disk.syncs.Load(), int64(len(acknowledged)/3), "syncs are shared")
	require.NoError(t, l.Close())
	l = open(t, dir, Options{})
	for _, e := range replayed(t, l, 0) {
		require.Equal(t, acknowledged[e.lsn], e.payload)
	}
	require.Equal(t, txn.LSN(len(acknowledged)+1), l.Next())
}
