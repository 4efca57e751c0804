package gpu

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

func TestConformanceBudgetHoldsBack_ADM08(t *testing.T) { conform(t, withHands, testBudget) }

func testBudget(t *testing.T, r rig) {
	m := r.open(t, Options{Limits: Limits{Transfers: 1}})
	e := m.engine()
	const n = 4096
	host := pinned(t, e, 3*n)
	device := m.alloc(t, 0, 3*n)
	region := func(i int) []Region { return []Region{{device + uint64(i*n), host[i*n : (i+1)*n]}} }
	m.hold()
	first := submit(t, e, Batch{Direction: Store, Regions: region(0)})
	eventually(t, "it is in flight", func() bool { return e.Stats()[0].InFlightBytes == n })
	_, err := e.Submit(t.Context(), Batch{Direction: Store, Regions: region(1), NoWait: true})
	require.ErrorIs(t, err, txn.ErrBusy)
	require.EqualValues(t, 1, e.Stats()[0].Chunks, "the refused one started no copy")
	_, err = e.Submit(t.Context(), Batch{Direction: Store, Regions: region(1), Deadline: time.Now().Add(10 * time.Millisecond)})
	require.ErrorIs(t, err, txn.ErrBusy)
	require.Equal(t, 1, classesOf(err))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = e.Submit(ctx, Batch{Direction: Store, Regions: region(1)})
	require.ErrorIs(t, err, context.Canceled)

	// A store and then a load wait; the load is admitted first.
	var mu sync.Mutex
	var order []Direction
	var wg sync.WaitGroup
	waiters := func() (n int) {
		b := &e.opened()[0].budget
		b.mu.Lock()
		defer b.mu.Unlock()
		for _, w := range b.waiting {
			n += len(w)
		}
		return n
	}
	for i, d := range []Direction{Store, Load} {
		wg.Go(func() {
			x, err := e.Submit(context.Background(), Batch{Direction: d, Regions: region(i + 1), Released: func() {
				mu.Lock()
				order = append(order, d)
				mu.Unlock()
			}})
			if err == nil {
				<-x.Done()
			}
		})
		eventually(t, "it waits", func() bool { return waiters() == i+1 })
	}
	m.letGo()
	require.NoError(t, wait(t, first))
	wg.Wait()
	require.Equal(t, []Direction{Load, Store}, order)
	m.verify(t)
}

// The device never has more than the window, and the lanes never more than their depth.
func TestConformanceWindowIsKept(t *testing.T) { conform(t, withHands, testWindow) }

func testWindow(t *testing.T, r rig) {
	l := Limits{ChunkBytes: 8 << 10, ChunkRuns: 3, WindowBytes: 20 << 10, WindowRuns: 5, Lanes: 2, LaneDepth: 2}
	m := r.open(t, Options{Limits: l})
	e := m.engine()
	const n = 4096
	host := pinned(t, e, 128*n)
	device := m.alloc(t, 0, 256*n)
	var regions []Region
	for i := range 128 {
		regions = append(regions, Region{device + uint64(2*i*n), host[i*n : (i+1)*n]})
	}
	m.hold()
	var all []*Transfer
	for part := range slices.Chunk(regions, 32) {
		all = append(all, submit(t, e, Batch{Direction: Load, Regions: part[:16]}), submit(t, e, Batch{Direction: Store, Regions: part[16:]}))
	}
	eventually(t, "the window is full", func() bool { return e.Stats()[0].InFlightRuns == 4 })
	m.letGo()
	for _, x := range all {
		require.NoError(t, wait(t, x))
	}
	require.EqualValues(t, 16<<10, e.Stats()[0].InFlightBytesMax, "two chunks of two pages; a third would pass both limits")
	require.EqualValues(t, 4, e.Stats()[0].InFlightRunsMax)
	even(t, e)
	m.verify(t)
}

// A restore that comes after many stores is done after those in flight, not after all.
func TestConformanceRestoresBeforeStores(t *testing.T) { conform(t, withHands, testPriority) }

func testPriority(t *testing.T, r rig) {
	m := r.open(t, Options{Limits: Limits{ChunkBytes: 4096, WindowBytes: 4096, Lanes: 1, LaneDepth: 1}})
	e := m.engine()
	const n, stores = 4096, 12
	host := pinned(t, e, (stores+2)*n)
	device := m.alloc(t, 0, (stores+2)*n)
	var mu sync.Mutex
	var order []int
	var all []*Transfer
	add := func(i int, d Direction, p Priority) {
		all = append(all, submit(t, e, Batch{Direction: d, Priority: p, Regions: []Region{{device + uint64(i*n), host[i*n : (i+1)*n]}}, Released: func() {
			mu.Lock()
			defer mu.Unlock()
			order = append(order, i)
		}}))
	}
	m.hold()
	for i := range stores {
		add(i, Store, ByDirection)
	}
	eventually(t, "the first is in flight", func() bool { return e.Stats()[0].InFlightBytes == n })
	add(stores, Load, ByDirection)
	add(stores+1, Store, Urgent)
	m.letGo()
	for _, x := range all {
		require.NoError(t, wait(t, x))
	}
	want := []int{0, stores + 1, stores}
	for i := 1; i < stores; i++ {
		want = append(want, i)
	}
	require.Equal(t, want, order)
	m.verify(t)
}

// Under a steady stream of restores a store still gets its turn.
func TestConformanceStoresDoNotStarve(t *testing.T) { conform(t, withHands, testFairness) }

func testFairness(t *testing.T, r rig) {
	m := r.open(t, Options{Limits: Limits{ChunkBytes: 4096, WindowBytes: 4096, Lanes: 1, LaneDepth: 1}})
	e := m.engine()
	const n, loads = 4096, 3 * fairTurns
	host := pinned(t, e, (loads+1)*n)
	device := m.alloc(t, 0, (loads+1)*n)
	var done, before atomic.Int32
	m.hold()
	var all []*Transfer
	for i := range loads {
		all = append(all, submit(t, e, Batch{Direction: Load, Regions: []Region{{device + uint64(i*n), host[i*n : (i+1)*n]}}, Released: func() { done.Add(1) }}))
	}
	all = append(all, submit(t, e, Batch{Direction: Store, Regions: []Region{{device + loads*n, host[loads*n:]}}, Released: func() { before.Store(done.Load()) }}))
	m.letGo()
	for _, x := range all {
		require.NoError(t, wait(t, x))
	}
	require.LessOrEqual(t, before.Load(), int32(fairTurns+2))
	m.verify(t)
}
