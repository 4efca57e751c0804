package gpu

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

// Close under load lets what was admitted finish, and refuses the rest.
func TestConformanceCloseDrains(t *testing.T) { conform(t, withoutHands, testCloseDrains) }

func testCloseDrains(t *testing.T, r rig) {
	m := r.open(t, Options{Limits: Limits{ChunkBytes: 4096, Transfers: 8}})
	e := m.engine()
	const n, callers = 16 << 10, 6
	host := pinned(t, e, callers*n)
	device := m.alloc(t, 0, callers*n)
	var wg sync.WaitGroup
	var admitted, completed, refused atomic.Int32
	started := make(chan struct{}, callers)
	for i := range callers {
		wg.Go(func() {
			for first := true; ; first = false {
				x, err := e.Submit(context.Background(), Batch{Direction: Load, Regions: []Region{{device + uint64(i*n), host[i*n : (i+1)*n]}}})
				if first {
					started <- struct{}{}
				}
				if err != nil {
					if errors.Is(err, txn.ErrClosed) {
						refused.Add(1)
					}
					return
				}
				admitted.Add(1)
				if <-x.Done(); x.Err() == nil {
					completed.Add(1)
				}
			}
		})
	}
	for range callers {
		<-started
	}
	closeEngine(t, e)
	wg.Wait()
	require.Equal(t, admitted.Load(), completed.Load())
	require.EqualValues(t, callers, refused.Load())
	_, err := e.Pin(host)
	require.ErrorIs(t, err, txn.ErrClosed)
	closeEngine(t, e)
	m.verify(t)
}

// A Close that cannot prove a copy finished says so, frees nothing of it, and can be called again.
func TestConformanceCloseQuarantinesWhatIsNotProven_GPU01(t *testing.T) {
	conform(t, withHands, testCloseQuarantine)
}

func testCloseQuarantine(t *testing.T, r rig) {
	m := r.open(t, Options{Limits: Limits{ChunkBytes: 4096, Lanes: 1, LaneDepth: 1}})
	e := m.engine()
	host := pinned(t, e, 16<<10)
	device := m.alloc(t, 0, 16<<10)
	m.hold()
	x := submit(t, e, Batch{Direction: Load, Regions: []Region{{device, host[:8<<10]}}})
	eventually(t, "it is in flight", func() bool { return e.Stats()[0].Chunks == 1 })
	y := submit(t, e, Batch{Direction: Load, Regions: []Region{{device + 8<<10, host[8<<10:]}}})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, e.Close(ctx), txn.ErrBusy)
	require.ErrorIs(t, wait(t, x), txn.ErrClosed)
	require.True(t, x.Quarantined())
	require.ErrorIs(t, wait(t, y), txn.ErrClosed)
	require.False(t, y.Quarantined())
	_, err := e.Submit(t.Context(), Batch{Direction: Load, Regions: []Region{{device, host}}})
	require.ErrorIs(t, err, txn.ErrClosed)
	require.NotPanics(t, func() { _ = host[0] }, "still mapped")
	m.letGo()
	soon(t, x.Released(), "not released although the copy ended")
	closeEngine(t, e)
	m.verify(t)
}

func TestConformancePinnedMemoryStaysWhileInUse(t *testing.T) { conform(t, withHands, testUnpin) }

func testUnpin(t *testing.T, r rig) {
	m := r.open(t, Options{})
	e := m.engine()
	p, err := e.AllocPinned(4096)
	require.NoError(t, err)
	device := m.alloc(t, 0, 4096)
	m.hold()
	x := submit(t, e, Batch{Direction: Store, Regions: []Region{{device, p.Bytes()}}})
	require.ErrorIs(t, p.Unpin(), txn.ErrBusy)
	m.letGo()
	require.NoError(t, wait(t, x))
	require.NoError(t, p.Unpin())
	require.NoError(t, p.Unpin())
	m.verify(t)
}
