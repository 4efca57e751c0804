package gpu

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

// Whichever call of the backend fails, every request has exactly one outcome, a success is exact, and
// the engine closes with even books.
func TestConformanceFailureAtEveryCall_GPU01(t *testing.T) { conform(t, withHands, testEveryFailure) }

func testEveryFailure(t *testing.T, r rig) {
	const n = 12 << 10
	scenario := func(k int) (calls int) {
		m := r.open(t, Options{Limits: Limits{ChunkBytes: 4 << 10, ChunkRuns: 4}})
		e := m.engine()
		m.failCall(k)
		p, err := e.AllocPinned(4 * n)
		if err != nil {
			require.Error(t, err)
			require.Equal(t, 1, classesOf(err), "%v", err)
			return m.calls()
		}
		host := p.Bytes()
		noise(rand.New(rand.NewPCG(5, uint64(k))), host)
		device := m.alloc(t, 0, 4*n)
		want := make([]byte, n)
		var released atomic.Int32
		submitted := 0
		for i := range 4 {
			at := device + uint64(i%2*n)
			b := Batch{Direction: Load, Regions: []Region{{at, host[i%2*n : i%2*n+n]}}, Released: func() { released.Add(1) }}
			if i >= 2 {
				b.Direction = Store
				b.Regions = []Region{{at, host[i*n : i*n+5000]}, {at + 5000, host[i*n+5000 : i*n+n]}}
				m.peek(t, 0, at, want)
			}
			x, err := e.Submit(t.Context(), b)
			if err == nil {
				submitted++
				err = wait(t, x)
			}
			switch {
			case err != nil:
				require.Equal(t, 1, classesOf(err), "%v", err)
				require.True(t, x == nil || !x.Quarantined())
			case i < 2:
				m.peek(t, 0, at, want)
				require.True(t, bytes.Equal(host[i*n:i*n+n], want), "load %d, call %d", i, k)
			default:
				require.True(t, bytes.Equal(want, host[i*n:i*n+n]), "store %d, call %d", i, k)
			}
		}
		require.EqualValues(t, submitted, released.Load())
		require.False(t, e.Stats()[0].Lost)
		even(t, e)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		if err := e.Close(ctx); err != nil { // giving something back failed
			require.Equal(t, 1, classesOf(err), "%v", err)
			require.NotErrorIs(t, err, txn.ErrBusy)
		}
		m.verify(t)
		return m.calls()
	}
	calls := scenario(0)
	require.Greater(t, calls, 8)
	for k := 1; k <= calls; k++ {
		scenario(k)
	}
}

// classesOf counts the error classes that err wraps.
func classesOf(err error) (n int) {
	for _, c := range errorClasses {
		if errors.Is(err, c) {
			n++
		}
	}
	return n
}

// When one chunk fails, the others in flight are waited for before anything is released.
func TestConformancePartialFailureKeepsAllUntilDrained_GPU08(t *testing.T) {
	conform(t, withHands, testPartialFailure)
}

func testPartialFailure(t *testing.T, r rig) {
	m := r.open(t, Options{Limits: Limits{ChunkBytes: 4 << 10, Lanes: 1, LaneDepth: 4}})
	e := m.engine()
	const n = 12 << 10
	host := pinned(t, e, n)
	device := m.alloc(t, 0, n)
	require.NoError(t, wait(t, submit(t, e, Batch{Direction: Load, Regions: []Region{{device, host[:1]}}})))
	m.hold()
	var released atomic.Bool
	x := submit(t, e, Batch{Direction: Load, Regions: []Region{{device, host[:4<<10]}, {device + 4<<10, host[4<<10 : 8<<10]}}, Released: func() { released.Store(true) }})
	eventually(t, "it is in flight", func() bool { return e.Stats()[0].InFlightBytes == 8<<10 })
	y := submit(t, e, Batch{Direction: Load, Regions: []Region{{device + 8<<10, host[8<<10:]}}})
	eventually(t, "both are in flight", func() bool { return e.Stats()[0].InFlightBytes == 12<<10 })
	require.False(t, released.Load())
	m.failCall(1) // the next call is a copy, of either
	m.letGo()
	errX, errY := wait(t, x), wait(t, y)
	if r.host {
		require.True(t, (errX == nil) != (errY == nil), "one of them failed: %v, %v", errX, errY)
	}
	soon(t, x.Released(), "not released")
	m.verify(t)
}

func TestConformanceLostDevice_GPU01(t *testing.T) { conform(t, withHands, testLostDevice) }

func testLostDevice(t *testing.T, r rig) {
	m := r.open(t, Options{Limits: Limits{ChunkBytes: 4 << 10, Lanes: 1, LaneDepth: 1}})
	e := m.engine()
	const n = 16 << 10
	host := pinned(t, e, 4*n)
	d0, d1 := m.alloc(t, 0, 4*n), m.alloc(t, 1, n)
	require.NoError(t, wait(t, submit(t, e, Batch{Device: 1, Direction: Load, Regions: []Region{{d1, host[:n]}}})))
	m.hold()
	var freed, kept atomic.Int32
	b := Batch{Direction: Load, Regions: []Region{{d0, host[:n]}}, Released: func() { freed.Add(1) }, Quarantined: func(err error) {
		if errors.Is(err, ErrDeviceLost) {
			kept.Add(1)
		}
	}}
	running := submit(t, e, b)
	eventually(t, "it is in flight", func() bool { return e.Stats()[0].Chunks == 1 })
	b.Regions = []Region{{d0 + n, host[n : 2*n]}}
	waiting := submit(t, e, b)
	b.Regions, b.After = []Region{{d0 + 2*n, host[2*n : 3*n]}}, Order{Transfer: running}
	ordered := submit(t, e, b)
	m.lose(0)
	m.letGo()
	require.ErrorIs(t, wait(t, running), ErrDeviceLost)
	require.ErrorIs(t, running.Err(), txn.ErrIO)
	require.True(t, running.Quarantined())
	for _, x := range []*Transfer{waiting, ordered} {
		require.ErrorIs(t, wait(t, x), ErrDeviceLost)
		require.False(t, x.Quarantined(), "it was never issued")
	}
	require.EqualValues(t, 1, kept.Load())
	require.EqualValues(t, 2, freed.Load())
	_, err := e.Submit(t.Context(), Batch{Direction: Load, Regions: []Region{{d0, host[:n]}}})
	require.ErrorIs(t, err, ErrDeviceLost)
	_, err = e.Submit(t.Context(), Batch{Direction: Load})
	require.ErrorIs(t, err, ErrDeviceLost)
	require.True(t, e.Stats()[0].Lost)
	// The other device works, and may not be ordered after what never ends.
	require.NoError(t, wait(t, submit(t, e, Batch{Device: 1, Direction: Load, Regions: []Region{{d1, host[3*n:]}}})))
	require.ErrorIs(t, wait(t, submit(t, e, Batch{Device: 1, Direction: Load, Regions: []Region{{d1, host[3*n:]}}, After: Order{Transfer: running}})), ErrDeviceLost)
	err = e.Close(t.Context())
	require.ErrorIs(t, err, ErrDeviceLost)
	require.False(t, isClosed(running.Released()))
	m.verify(t)
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
