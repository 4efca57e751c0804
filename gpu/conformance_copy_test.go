package gpu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

// Random batches both ways leave exactly the bytes of a copy made region by region, and nothing else
// changed at either end.
func TestConformanceScatterGatherIsExact_GPU06(t *testing.T) {
	conform(t, withoutHands, testScatterGather)
}

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

// Neighbours at both ends travel as one run; gaps, reversed order, and neighbours at one end only do not.
func TestConformanceCoalescedRunsAreExact_GPU08(t *testing.T) {
	conform(t, withoutHands, testCoalescing)
}

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

func TestConformanceRefusedBeforeAnythingMoves_GPU02(t *testing.T) {
	conform(t, withoutHands, testRefusals)
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
			if c.b.After.Stream != 0 && !r.host {
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

func TestConformanceNothingToCopyTouchesNothing_GPU04(t *testing.T) {
	conform(t, withoutHands, testEmpty)
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

// Callers on both devices, in both directions, with cancels in between, each on memory of its own;
// every success is exact.
func TestConformanceManyCallers(t *testing.T) { conform(t, withoutHands, testManyCallers) }

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
