package gpu

import (
	"bytes"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Submit returns while the copy cannot move a byte, and nothing is reported before it did.
func TestConformanceSubmitDoesNotWait_GPU05(t *testing.T) { conform(t, withHands, testAsynchrony) }

func testAsynchrony(t *testing.T, r rig) {
	m := r.open(t, Options{})
	e := m.engine()
	host := pinned(t, e, 1<<20)
	device := m.alloc(t, 0, 1<<20)
	for _, direction := range []Direction{Load, Store} {
		for i := range host {
			host[i] = byte(direction)
		}
		m.hold()
		var released atomic.Bool
		x := submit(t, e, Batch{Direction: direction, Regions: []Region{{device, host}}, Released: func() { released.Store(true) }})
		eventually(t, "the copy is in flight", func() bool { return e.Stats()[0].InFlightBytes == 1<<20 })
		select {
		case <-x.Done():
			require.Fail(t, "settled before a byte moved")
		case <-x.Released():
			require.Fail(t, "released before a byte moved")
		case <-time.After(20 * time.Millisecond):
		}
		require.NoError(t, x.Err())
		require.False(t, released.Load())
		m.letGo()
		require.NoError(t, wait(t, x))
		require.True(t, released.Load(), "released before it settled")
		require.False(t, x.Quarantined())
	}
	m.verify(t)
}

// A store reads what the caller's stream has produced by then, and not what was there at Submit; a load does
// not overwrite what the stream still reads. Batches without an order do not wait for those with one.
func TestConformanceWaitsForTheProducer_GPU03(t *testing.T) { conform(t, withoutHands, testOrder) }

func testOrder(t *testing.T, r rig) {
	m := r.open(t, Options{})
	e := m.engine()
	host := pinned(t, e, 64<<10)
	const n = 16 << 10
	produced, other, target := m.alloc(t, 0, n), m.alloc(t, 0, n), m.alloc(t, 0, n)
	s := m.newStream(t, 0)
	defer s.close()
	s.fill(produced, n, 1)
	s.fill(target, n, 2)
	store := submit(t, e, Batch{Direction: Store, Regions: []Region{{produced, host[:n]}}, After: Order{Stream: s.handle()}})
	copy(host[n:2*n], bytes.Repeat([]byte{3}, n))
	load := submit(t, e, Batch{Direction: Load, Regions: []Region{{target, host[n : 2*n]}}, After: Order{Stream: s.handle()}})

	for range 8 {
		free := submit(t, e, Batch{Direction: Store, Regions: []Region{{other, host[2*n : 3*n]}}})
		require.NoError(t, wait(t, free), "a batch without an order waits for nobody")
	}
	for _, x := range []*Transfer{store, load} {
		select {
		case <-x.Done():
			require.Fail(t, "did not wait for the stream")
		default:
		}
	}
	require.Zero(t, e.Stats()[0].InFlightBytes, "what waits for its order takes no room on the device")
	s.start()
	require.NoError(t, wait(t, store))
	require.NoError(t, wait(t, load))
	require.Equal(t, bytes.Repeat([]byte{1}, n), host[:n])
	got := make([]byte, n)
	m.peek(t, 0, target, got)
	require.Equal(t, bytes.Repeat([]byte{3}, n), got, "the load overtook the stream")

	// An order that is met already costs nothing; one that is never met ends at the deadline with the memory free.
	require.NoError(t, wait(t, submit(t, e, Batch{Direction: Store, Regions: []Region{{produced, host[:n]}}, After: Order{Stream: s.handle()}})))
	stuck := m.newStream(t, 0)
	defer stuck.close()
	stuck.fill(produced, n, 9)
	x := submit(t, e, Batch{Direction: Store, Regions: []Region{{produced, host[:n]}}, After: Order{Stream: stuck.handle()}, Deadline: time.Now().Add(30 * time.Millisecond)})
	require.ErrorIs(t, wait(t, x), ErrDeadline)
	require.False(t, x.Quarantined(), "nothing was issued")
	m.verify(t)
}

func TestConformanceWaitsForAnotherTransfer(t *testing.T) {
	conform(t, withoutHands, testOrderAfterTransfer)
}

func testOrderAfterTransfer(t *testing.T, r rig) {
	m := r.open(t, Options{})
	e := m.engine()
	const n = 64 << 10
	host := pinned(t, e, 2*n)
	copy(host, bytes.Repeat([]byte{1}, n))
	last := min(2, len(e.Devices())) - 1
	a, b := m.alloc(t, 0, n), m.alloc(t, last, n)
	m.hold()
	first := submit(t, e, Batch{Direction: Load, Regions: []Region{{a, host[:n]}}})
	second := submit(t, e, Batch{Direction: Store, Regions: []Region{{a, host[n:]}}, After: Order{Transfer: first}})
	third := submit(t, e, Batch{Device: last, Direction: Load, Regions: []Region{{b, host[n:]}}, After: Order{Transfer: second}})
	m.letGo()
	require.NoError(t, wait(t, third))
	require.NoError(t, second.Err())
	got := make([]byte, n)
	m.peek(t, last, b, got)
	require.Equal(t, bytes.Repeat([]byte{1}, n), got)
	require.NoError(t, wait(t, submit(t, e, Batch{Direction: Load, Regions: []Region{{a, host[:n]}}, After: Order{Transfer: first}})))
	m.verify(t)
}
