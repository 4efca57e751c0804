package gpu

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

func TestConformanceHost(t *testing.T)          { conform(t, hostRig(0)) }
func TestConformanceHostReordered(t *testing.T) { conform(t, hostRig(7)) }

// conform is the suite that every backend has to pass. Most of it takes a machine with hands: one that can hold copies and
// make calls fail; what remains is what can be asked of a real device.
func conform(t *testing.T, r rig) {
	for _, c := range []struct {
		name  string
		hands bool
		test  func(*testing.T, rig)
	}{
		{"ScatterGatherIsExact_GPU06", false, testScatterGather},
		{"CoalescedRunsAreExact_GPU08", false, testCoalescing},
		{"RefusedBeforeAnythingMoves_GPU02", false, testRefusals},
		{"NothingToCopyTouchesNothing_GPU04", false, testEmpty},
		{"SubmitDoesNotWait", true, testAsynchrony},
		{"WaitsForTheProducer_GPU03", false, testOrder},
		{"WaitsForAnotherTransfer", false, testOrderAfterTransfer},
		{"CompletesExactlyOnce_ADM09", true, testExactlyOnce},
		{"CancelWaitsForRunningCopies_CAN08", true, testCancel},
		{"ContextCancels", true, testContext},
		{"DeadlineQuarantines_GPU09", true, testDeadline},
		{"StuckLaneLeavesOthers", true, testStuckLane},
		{"FailureAtEveryCall_GPU01", true, testEveryFailure},
		{"PartialFailureKeepsAllUntilDrained_GPU08", true, testPartialFailure},
		{"LostDevice_GPU01", true, testLostDevice},
		{"BudgetHoldsBack_ADM08", true, testBudget},
		{"WindowIsKept", true, testWindow},
		{"RestoresBeforeStores", true, testPriority},
		{"StoresDoNotStarve", true, testFairness},
		{"CloseDrains", false, testCloseDrains},
		{"CloseQuarantinesWhatIsNotProven_GPU01", true, testCloseQuarantine},
		{"PinnedMemoryStaysWhileInUse", true, testUnpin},
		{"ManyCallers", false, testManyCallers},
	} {
		if r.hands || !c.hands {
			t.Run(c.name, func(t *testing.T) { c.test(t, r) })
		}
	}
}

// wait gives the outcome of t, which has to settle soon.
func wait(tb testing.TB, t *Transfer) error {
	tb.Helper()
	select {
	case <-t.Done():
	case <-time.After(20 * time.Second):
		require.FailNow(tb, "the transfer does not settle")
	}
	return t.Err()
}

// soon waits for a channel to be closed.
func soon(tb testing.TB, c <-chan struct{}, what string) {
	tb.Helper()
	select {
	case <-c:
	case <-time.After(20 * time.Second):
		require.FailNow(tb, what)
	}
}

func contextFor(d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), d)
}

// even checks that everything taken from the budget and the window of every device has been given back.
func even(tb testing.TB, e *Engine) {
	tb.Helper()
	for i, d := range e.opened() {
		eventually(tb, "what is released is forgotten", func() bool { return e.Stats()[i].Admitted == 0 })
		d.budget.mu.Lock()
		require.Equal(tb, load{}, d.budget.used)
		d.budget.mu.Unlock()
		d.mu.Lock()
		require.Equal(tb, load{}, d.window)
		for _, r := range d.lanes {
			require.Zero(tb, r.depth)
			require.Zero(tb, r.stuck)
		}
		d.mu.Unlock()
	}
}

// eventually waits for a condition that nothing announces.
func eventually(tb testing.TB, what string, ok func() bool) {
	tb.Helper()
	require.Eventually(tb, ok, 20*time.Second, time.Millisecond, what)
}

// pinned gives page-locked memory that goes with the test.
func pinned(tb testing.TB, e *Engine, bytes int) []byte {
	tb.Helper()
	p, err := e.AllocPinned(int64(bytes))
	require.NoError(tb, err)
	return p.Bytes()
}

func submit(tb testing.TB, e *Engine, b Batch) *Transfer {
	tb.Helper()
	t, err := e.Submit(context.Background(), b)
	require.NoError(tb, err)
	return t
}

func noise(r *rand.Rand, b []byte) {
	for len(b) >= 8 {
		binary.LittleEndian.PutUint64(b, r.Uint64())
		b = b[8:]
	}
	for i := range b {
		b[i] = byte(r.Uint32())
	}
}

// layout places regions of random sizes at random places of a device arena and a host arena, in random order, with gaps
// that serve as canaries, some of them adjacent at both ends.
func layout(r *rand.Rand, device uint64, host []byte, sizes []int) []Region {
	place := func() []int { // offsets, in an order of their own, none overlapping
		order := r.Perm(len(sizes))
		if r.IntN(2) == 0 {
			slices.Sort(order)
		}
		offsets := make([]int, len(sizes))
		at := 16 * r.IntN(8)
		for _, i := range order {
			offsets[i] = at
			at += sizes[i]
			if r.IntN(3) > 0 {
				at += 1 + r.IntN(100)
			}
			if r.IntN(2) == 0 {
				at = (at + 15) &^ 15
			}
		}
		return offsets
	}
	d, h := place(), place()
	regions := make([]Region, len(sizes))
	for i, n := range sizes {
		regions[i] = Region{Device: device + uint64(d[i]), Host: host[h[i] : h[i]+n : h[i]+n]}
	}
	return regions
}

// testScatterGather: random batches both ways leave exactly the bytes of a copy made region by region, and nothing else
// changed at either end.
func testScatterGather(t *testing.T, r rig) {
	m := r.open(t, Options{Limits: Limits{ChunkBytes: 64 << 10, ChunkRuns: 16}})
	e := m.engine()
	random := rand.New(rand.NewPCG(1, 2))
	const arena = 640 << 10
	host := pinned(t, e, arena)
	var devices []uint64
	for i := range min(2, len(e.Devices())) {
		devices = append(devices, m.alloc(t, i, arena))
	}
	for round := range 24 {
		dev := round % len(devices)
		device := devices[dev]
		sizes := make([]int, []int{1, 4, 5, 8, 11, 60}[round%6])
		for i := range sizes {
			sizes[i] = []int{1, 15, 16, 4 << 10, 1 + random.IntN(9000), 16 * (1 + random.IntN(200))}[random.IntN(6)]
		}
		if round%8 == 7 {
			sizes[0] = 200<<10 + random.IntN(99) // several chunks
		}
		regions := layout(random, device, host, sizes)
		wantHost, wantDevice := make([]byte, arena), make([]byte, arena)
		noise(random, host)
		copy(wantHost, host)
		noise(random, wantDevice)
		m.poke(t, dev, device, wantDevice)

		direction := []Direction{Store, Load}[random.IntN(2)]
		for _, g := range regions {
			off := int(g.Device - device)
			if direction == Load {
				copy(wantDevice[off:], g.Host)
			} else {
				at := offsetIn(host, g.Host)
				copy(wantHost[at:at+len(g.Host)], wantDevice[off:])
			}
		}
		require.NoError(t, wait(t, submit(t, e, Batch{Device: dev, Direction: direction, Regions: regions})), "round %d", round)
		gotDevice := make([]byte, arena)
		m.peek(t, dev, device, gotDevice)
		require.True(t, bytes.Equal(wantHost, host), "host side of a %v, round %d", direction, round)
		require.True(t, bytes.Equal(wantDevice, gotDevice), "device side of a %v, round %d", direction, round)
	}
	m.verify(t)
}

// testCoalescing: neighbours at both ends travel as one run; gaps, reversed order, and neighbours at one end only do not.
func testCoalescing(t *testing.T, r rig) {
	const page = 4096
	for _, c := range []struct {
		name         string
		device, host []int // page numbers, pairwise
		runs         int64
	}{
		{"adjacent", []int{0, 1, 2, 3}, []int{4, 5, 6, 7}, 1},
		{"adjacent in any order", []int{2, 0, 3, 1}, []int{6, 4, 7, 5}, 1},
		{"hole", []int{0, 1, 3, 4}, []int{0, 1, 3, 4}, 2},
		{"hole on the device only", []int{0, 1, 3, 4}, []int{0, 1, 2, 3}, 2},
		{"hole on the host only", []int{0, 1, 2, 3}, []int{0, 1, 3, 4}, 2},
		{"reversed", []int{0, 1, 2, 3}, []int{3, 2, 1, 0}, 4},
		{"two groups that touch", []int{0, 1, 4, 5}, []int{0, 1, 2, 3}, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := r.open(t, Options{})
			e := m.engine()
			host := pinned(t, e, 8*page)
			noise(rand.New(rand.NewPCG(3, 4)), host)
			device := m.alloc(t, 0, 8*page)
			var regions []Region
			want := bytes.Repeat([]byte{poison}, 8*page)
			for i := range c.device {
				piece := host[c.host[i]*page : (c.host[i]+1)*page]
				regions = append(regions, Region{Device: device + uint64(c.device[i]*page), Host: piece})
				copy(want[c.device[i]*page:], piece)
			}
			require.NoError(t, wait(t, submit(t, e, Batch{Direction: Load, Regions: regions})))
			got := make([]byte, 8*page)
			m.peek(t, 0, device, got)
			require.True(t, bytes.Equal(want, got))
			require.Equal(t, c.runs, e.Stats()[0].Runs)
			m.verify(t)
		})
	}
}

func testRefusals(t *testing.T, r rig) {
	m := r.open(t, Options{Limits: Limits{Regions: 4, Bytes: 64 << 10, ChunkBytes: 16 << 10}})
	e := m.engine()
	host := pinned(t, e, 128<<10)
	d := m.alloc(t, 0, 128<<10)
	at := func(device, host1, n int) Region {
		return Region{Device: d + uint64(device), Host: host[host1 : host1+n]}
	}
	good := []Region{at(0, 0, 100)}
	submit(t, e, Batch{Direction: Load, Regions: good}) // the device is open
	for _, c := range []struct {
		name string
		b    Batch
		want error
	}{
		{"no such device", Batch{Device: len(e.Devices()), Direction: Load, Regions: good}, txn.ErrInvalid},
		{"negative device", Batch{Device: -1, Direction: Load, Regions: good}, txn.ErrInvalid},
		{"no direction", Batch{Regions: good}, txn.ErrInvalid},
		{"unknown direction", Batch{Direction: 3, Regions: good}, txn.ErrInvalid},
		{"unknown priority", Batch{Direction: Load, Priority: 4, Regions: good}, txn.ErrInvalid},
		{"empty region", Batch{Direction: Load, Regions: []Region{at(0, 0, 0)}}, txn.ErrInvalid},
		{"address 0", Batch{Direction: Load, Regions: []Region{{Device: 0, Host: host[:1]}}}, txn.ErrInvalid},
		{"past the end of memory", Batch{Direction: Load, Regions: []Region{{Device: ^uint64(0), Host: host[:2]}}}, txn.ErrInvalid},
		{"same device page twice", Batch{Direction: Store, Regions: []Region{at(0, 0, 100), at(0, 200, 100)}}, txn.ErrInvalid},
		{"device overlap by one byte", Batch{Direction: Load, Regions: []Region{at(99, 0, 100), at(0, 200, 100)}}, txn.ErrInvalid},
		{"host overlap in a store", Batch{Direction: Store, Regions: []Region{at(0, 99, 100), at(200, 0, 100)}}, txn.ErrInvalid},
		{"too many regions", Batch{Direction: Load, Regions: []Region{at(0, 0, 1), at(2, 2, 1), at(4, 4, 1), at(6, 6, 1), at(8, 8, 1)}}, txn.ErrTooLarge},
		{"too many bytes", Batch{Direction: Load, Regions: []Region{at(0, 0, 64<<10+1)}}, txn.ErrTooLarge},
		{"no such stream", Batch{Direction: Load, Regions: good, After: Order{Stream: 0xdead0}}, txn.ErrInvalid},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.b.After.Stream != 0 && !strings.HasPrefix(r.name, "host") {
				t.Skip("a handle that names no stream is undefined behaviour in the driver")
			}
			before := e.Stats()[0].Submitted
			_, err := e.Submit(t.Context(), c.b)
			require.ErrorIs(t, err, c.want)
			require.Equal(t, before, e.Stats()[0].Submitted)
		})
	}
	// The same host page into two device pages is a broadcast and allowed.
	require.NoError(t, wait(t, submit(t, e, Batch{Direction: Load, Regions: []Region{at(0, 0, 100), at(200, 0, 100)}})))
	_, err := e.Pin(host[1:4097])
	require.ErrorIs(t, err, txn.ErrInvalid)
	_, err = e.Pin(host[:4096])
	require.ErrorIs(t, err, txn.ErrInvalid, "pinned already")
	m.verify(t)
}

func testEmpty(t *testing.T, r rig) {
	m := r.open(t, Options{})
	submit(t, m.engine(), Batch{Direction: Load, Regions: nil}) // opens the device
	before := m.calls()
	released := 0
	x := submit(t, m.engine(), Batch{Direction: Store, Released: func() { released++ }})
	require.NoError(t, wait(t, x))
	require.Equal(t, 1, released)
	require.Equal(t, before, m.calls())
	require.Zero(t, m.engine().Stats()[0].Chunks)
}

// testAsynchrony: Submit returns while the copy cannot move a byte, and nothing is reported before it did.
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

// testOrder: a store reads what the caller's stream has produced by then, and not what was there at Submit; a load does
// not overwrite what the stream still reads. Batches without an order do not wait for those with one.
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

// testExactlyOnce: of three transfers the second fails; each settles once, releases once, and says which it was.
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

// testCancel: what is in flight is waited for, the rest is never issued, and nothing is released before.
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

// testDeadline: a copy that outlives its deadline keeps both ends until it is proven finished.
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
	x := submit(t, e, Batch{
		Direction: Load, Regions: []Region{{device, p.Bytes()}}, Deadline: time.Now().Add(200 * time.Millisecond),
		Released: func() { note("released") },
		Quarantined: func(err error) {
			if errors.Is(err, ErrDeadline) {
				note("quarantined")
			}
		},
	})
	eventually(t, "it is in flight", func() bool { return e.Stats()[0].Chunks == 1 })
	require.ErrorIs(t, wait(t, x), ErrDeadline)
	require.True(t, x.Quarantined())
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

// testStuckLane: while one lane is stuck, the device's other lanes and the other device go on.
func testStuckLane(t *testing.T, r rig) {
	m := r.open(t, Options{})
	e := m.engine()
	const n = 4096
	host := pinned(t, e, 4*n)
	device, second := m.alloc(t, 0, 4*n), m.alloc(t, 1, n)
	m.hold()
	x := submit(t, e, Batch{Direction: Load, Regions: []Region{{device, host[:n]}}, Deadline: time.Now().Add(200 * time.Millisecond)})
	eventually(t, "it is in flight", func() bool { return e.Stats()[0].Chunks == 1 })
	require.ErrorIs(t, wait(t, x), ErrDeadline)
	y := submit(t, e, Batch{Direction: Load, Regions: []Region{{device + n, host[n : 2*n]}}, Deadline: time.Now().Add(200 * time.Millisecond)})
	require.ErrorIs(t, wait(t, y), ErrDeadline)
	require.True(t, y.Quarantined(), "the second lane took it")
	z := submit(t, e, Batch{Direction: Load, Regions: []Region{{device + 2*n, host[2*n : 3*n]}}, Deadline: time.Now().Add(50 * time.Millisecond)})
	require.ErrorIs(t, wait(t, z), ErrDeadline)
	require.False(t, z.Quarantined(), "with every lane stuck nothing more is issued")
	m.letGo()
	require.NoError(t, wait(t, submit(t, e, Batch{Device: 1, Direction: Load, Regions: []Region{{second, host[:n]}}})))
	soon(t, x.Released(), "x is not released")
	soon(t, y.Released(), "y is not released")
	require.NoError(t, wait(t, submit(t, e, Batch{Direction: Load, Regions: []Region{{device, host[:n]}}})))
	even(t, e)
	m.verify(t)
}

// testEveryFailure: whichever call of the backend fails, every request has exactly one outcome, a success is exact, and
// the engine closes with even books.
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
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
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

// testPartialFailure: when one chunk fails, the others in flight are waited for before anything is released.
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
	if r.name == "host" {
		require.True(t, (errX == nil) != (errY == nil), "one of them failed: %v, %v", errX, errY)
	}
	soon(t, x.Released(), "not released")
	m.verify(t)
}

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

// testWindow: the device never has more than the window, and the lanes never more than their depth.
func testWindow(t *testing.T, r rig) {
	l := Limits{ChunkBytes: 8 << 10, ChunkRuns: 3, WindowBytes: 20 << 10, WindowRuns: 5, Lanes: 2, LaneDepth: 2}
	m := r.open(t, Options{Limits: l})
	e := m.engine()
	const n = 4096
	host := pinned(t, e, 64*n)
	device := m.alloc(t, 0, 128*n)
	var regions []Region
	for i := range 64 {
		regions = append(regions, Region{device + uint64(2*i*n), host[i*n : (i+1)*n]})
	}
	m.hold()
	var all []*Transfer
	for part := range slices.Chunk(regions, 16) {
		all = append(all, submit(t, e, Batch{Direction: Load, Regions: part}), submit(t, e, Batch{Direction: Store, Regions: part}))
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

// testPriority: a restore that comes after many stores is done after those in flight, not after all.
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

// testFairness: under a steady stream of restores a store still gets its turn.
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

// testCloseDrains: Close under load lets what was admitted finish, and refuses the rest.
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

// testCloseQuarantine: a Close that cannot prove a copy finished says so, frees nothing of it, and can be called again.
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

// testManyCallers: callers on both devices, in both directions, with cancels in between, each on memory of its own;
// every success is exact.
func testManyCallers(t *testing.T, r rig) {
	m := r.open(t, Options{Limits: Limits{ChunkBytes: 8 << 10, ChunkRuns: 7, WindowBytes: 64 << 10, Transfers: 5}})
	e := m.engine()
	const callers, n, rounds = 8, 32 << 10, 12
	host := pinned(t, e, callers*n)
	var wg sync.WaitGroup
	failures := make(chan error, callers)
	devices := min(2, len(e.Devices()))
	for c := range callers {
		device := m.alloc(t, c%devices, n)
		wg.Go(func() {
			random := rand.New(rand.NewPCG(uint64(c), 11))
			mine := host[c*n : (c+1)*n : (c+1)*n]
			want := make([]byte, n)
			for round := range rounds {
				noise(random, mine)
				copy(want, mine)
				var regions []Region
				for _, i := range random.Perm(n / 1024) {
					regions = append(regions, Region{device + uint64(i*1024), mine[i*1024 : (i+1)*1024]})
				}
				down, err := e.Submit(context.Background(), Batch{Device: c % devices, Direction: Load, Regions: regions})
				if err != nil {
					failures <- err
					return
				}
				if round%4 == 3 {
					down.Cancel()
				}
				if <-down.Done(); down.Err() != nil {
					if !errors.Is(down.Err(), ErrCanceled) {
						failures <- down.Err()
						return
					}
					continue
				}
				clear(mine)
				up, err := e.Submit(context.Background(), Batch{Device: c % devices, Direction: Store, Regions: regions})
				if err == nil {
					<-up.Done()
					err = up.Err()
				}
				if err == nil && !bytes.Equal(want, mine) {
					err = fmt.Errorf("caller %d, round %d: bytes differ", c, round)
				}
				if err != nil {
					failures <- err
					return
				}
			}
		})
	}
	wg.Wait()
	close(failures)
	for err := range failures {
		require.NoError(t, err)
	}
	even(t, e)
	m.verify(t)
}

// offsetIn gives where part begins in whole.
func offsetIn(whole, part []byte) int {
	return int(uintptr(unsafe.Pointer(&part[0])) - uintptr(unsafe.Pointer(&whole[0])))
}
