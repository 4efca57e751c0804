package gpu

import (
	"bytes"
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

// Of three transfers the second fails; each settles once, releases once, and says which it was.
func TestConformanceCompletesExactlyOnce_ADM09(t *testing.T) { conform(t, withHands, testExactlyOnce) }

func testExactlyOnce(t *testing.T, r rig) {
	m := r.open(t, Options{Limits: Limits{Lanes: 1, LaneDepth: 1}})
	e := m.engine()
	const n = 4096
	host := pinned(t, e, 3*n)
	device := m.alloc(t, 0, 3*n)
	var released [3]atomic.Int32
	var x [3]*Transfer
	for i := range x {
		if i == 1 {
			m.failCall(1)
		}
		x[i] = submit(t, e, Batch{Direction: Load, Regions: []Region{{device + uint64(i*n), host[i*n : (i+1)*n]}}, Released: func() { released[i].Add(1) }})
		_ = wait(t, x[i])
	}
	require.NoError(t, x[0].Err())
	require.Error(t, x[1].Err())
	require.ErrorIs(t, x[1].Err(), txn.ErrIO)
	require.NoError(t, x[2].Err())
	for i := range x {
		x[i].Cancel()
		<-x[i].Released()
		require.EqualValues(t, 1, released[i].Load())
		require.Equal(t, x[i].Err(), x[i].Wait(t.Context()))
	}
	s := e.Stats()[0]
	require.EqualValues(t, []int64{3, 2, 1}, []int64{s.Submitted, s.Completed, s.Failed})
	even(t, e)
	m.verify(t)
}

// What is in flight is waited for, the rest is never issued, and nothing is released before.
func TestConformanceCancelWaitsForRunningCopies_CAN08(t *testing.T) {
	conform(t, withHands, testCancel)
}

func testCancel(t *testing.T, r rig) {
	m := r.open(t, Options{Limits: Limits{ChunkBytes: 4 << 10, Lanes: 1, LaneDepth: 2}})
	e := m.engine()
	const n = 64 << 10
	host := pinned(t, e, n)
	device := m.alloc(t, 0, n)
	m.hold()
	var released atomic.Int32
	x := submit(t, e, Batch{Direction: Load, Regions: []Region{{device, host}}, Released: func() { released.Add(1) }})
	eventually(t, "the lane is full", func() bool { return e.Stats()[0].Chunks == 2 })
	x.Cancel()
	x.Cancel()
	select {
	case <-x.Done():
		require.Fail(t, "settled under a running copy")
	case <-x.Released():
		require.Fail(t, "released under a running copy")
	case <-time.After(20 * time.Millisecond):
	}
	require.Zero(t, released.Load())
	m.letGo()
	require.ErrorIs(t, wait(t, x), ErrCanceled)
	require.False(t, x.Quarantined())
	require.EqualValues(t, 1, released.Load())
	require.EqualValues(t, 2, e.Stats()[0].Chunks, "issued after Cancel")
	got := make([]byte, n-8<<10)
	m.peek(t, 0, device+8<<10, got)
	require.Equal(t, bytes.Repeat([]byte{poison}, len(got)), got)
	even(t, e)
	m.verify(t)
}

func TestConformanceContextCancels(t *testing.T) { conform(t, withHands, testContext) }

func testContext(t *testing.T, r rig) {
	m := r.open(t, Options{Limits: Limits{ChunkBytes: 4 << 10, Lanes: 1, LaneDepth: 1}})
	e := m.engine()
	host := pinned(t, e, 64<<10)
	device := m.alloc(t, 0, 64<<10)
	m.hold()
	ctx, cancel := context.WithCancel(context.Background())
	x, err := e.Submit(ctx, Batch{Direction: Load, Regions: []Region{{device, host}}})
	require.NoError(t, err)
	eventually(t, "it is in flight", func() bool { return e.Stats()[0].Chunks == 1 })
	cancel()
	require.ErrorIs(t, x.Wait(ctx), context.Canceled, "the waiting ends, the transfer does not")
	m.letGo()
	require.ErrorIs(t, wait(t, x), ErrCanceled)
	m.verify(t)
}

// expires submits a batch with a deadline that is over while its copies are held. One that is over before the copies have
// begun leaves nothing behind, and the next gets a later one.
func expires(t *testing.T, e *Engine, batch func() Batch) *Transfer {
	for deadline := 50 * time.Millisecond; ; deadline *= 2 {
		b := batch()
		b.Deadline = time.Now().Add(deadline)
		x := submit(t, e, b)
		require.ErrorIs(t, wait(t, x), ErrDeadline)
		if x.Quarantined() {
			return x
		}
	}
}

// A copy that outlives its deadline keeps both ends until it is proven finished.
func TestConformanceDeadlineQuarantines_GPU09(t *testing.T) { conform(t, withHands, testDeadline) }

func testDeadline(t *testing.T, r rig) {
	m := r.open(t, Options{})
	e := m.engine()
	const n = 64 << 10
	p, err := e.AllocPinned(n)
	require.NoError(t, err)
	device := m.alloc(t, 0, n)
	m.hold()
	var mu sync.Mutex
	var events []string
	note := func(s string) { mu.Lock(); events = append(events, s); mu.Unlock() }
	x := expires(t, e, func() Batch {
		mu.Lock()
		events = nil
		mu.Unlock()
		return Batch{
			Direction: Load, Regions: []Region{{device, p.Bytes()}},
			Released: func() { note("released") },
			Quarantined: func(err error) {
				if errors.Is(err, ErrDeadline) {
					note("quarantined")
				}
			},
		}
	})
	require.EqualValues(t, n, e.Stats()[0].QuarantinedBytes)
	require.ErrorIs(t, p.Unpin(), txn.ErrBusy)
	after := submit(t, e, Batch{Direction: Store, Regions: []Region{{device, p.Bytes()}}, After: Order{Transfer: x}})
	m.letGo()
	soon(t, x.Released(), "not released although the copy ended")
	require.NoError(t, wait(t, after))
	require.False(t, x.Quarantined())
	require.ErrorIs(t, x.Err(), ErrDeadline, "the outcome does not change")
	require.Equal(t, []string{"quarantined", "released"}, events)
	eventually(t, "the books are even", func() bool { s := e.Stats()[0]; return s.Quarantined == 0 && s.Admitted == 0 })
	require.NoError(t, p.Unpin())
	even(t, e)
	m.verify(t)
}

// While one lane is stuck, the device's other lanes and the other device go on.
func TestConformanceStuckLaneLeavesOthers_GPU09(t *testing.T) { conform(t, withHands, testStuckLane) }

func testStuckLane(t *testing.T, r rig) {
	m := r.open(t, Options{})
	e := m.engine()
	const n = 4096
	host := pinned(t, e, 4*n)
	device, second := m.alloc(t, 0, 4*n), m.alloc(t, 1, n)
	m.hold()
	load := func(i int) Batch {
		return Batch{Direction: Load, Regions: []Region{{device + uint64(i*n), host[i*n : (i+1)*n]}}}
	}
	x := expires(t, e, func() Batch { return load(0) })
	y := expires(t, e, func() Batch { return load(1) }) // the second lane took it
	last := load(2)
	last.Deadline = time.Now().Add(50 * time.Millisecond)
	z := submit(t, e, last)
	require.ErrorIs(t, wait(t, z), ErrDeadline)
	require.False(t, z.Quarantined(), "with every lane stuck nothing more is issued")
	m.letGo()
	require.NoError(t, wait(t, submit(t, e, Batch{Device: 1, Direction: Load, Regions: []Region{{second, host[:n]}}})))
	soon(t, x.Released(), "x is not released")
	soon(t, y.Released(), "y is not released")
	require.NoError(t, wait(t, submit(t, e, load(0))))
	even(t, e)
	m.verify(t)
}
