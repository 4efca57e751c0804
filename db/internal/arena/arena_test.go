package arena

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"unsafe"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/holdfast-db/holdfast/txn"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newArena(t testing.TB, capacity int64) *Arena {
	t.Helper()
	a, err := New(capacity, Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, a.Close()) })
	return a
}

func alloc(t testing.TB, a *Arena, n int64) Slot {
	t.Helper()
	s, err := a.Alloc(n)
	require.NoError(t, err, "slot of %d bytes", n)
	return s
}

func free(t testing.TB, a *Arena, slots ...Slot) {
	t.Helper()
	for _, s := range slots {
		require.NoError(t, a.Free(s))
	}
}

// stamp marks the bytes of a slot with its own number; stamped tells whether they still are.
func stamp(b []byte, id uint64) {
	for i := 0; i+8 <= len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], id+uint64(i))
	}
	for i := len(b) &^ 7; i < len(b); i++ {
		b[i] = byte(id)
	}
}

func stamped(b []byte, id uint64) bool {
	for i := 0; i+8 <= len(b); i += 8 {
		if binary.LittleEndian.Uint64(b[i:]) != id+uint64(i) {
			return false
		}
	}
	for i := len(b) &^ 7; i < len(b); i++ {
		if b[i] != byte(id) {
			return false
		}
	}
	return true
}

func address(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

func zero(b []byte) bool {
	for _, x := range b {
		if x != 0 {
			return false
		}
	}
	return true
}

func TestSlotsAreAlignedRoundedAndPadded(t *testing.T) {
	a := newArena(t, 64<<20)
	for _, c := range []struct{ n, size, align int64 }{
		{1, 64, 64}, {63, 64, 64}, {64, 64, 64}, {65, 128, 64}, {1000, 1024, 64}, {4032, 4032, 64},
		{4033, 4096, 4096}, {4095, 4096, 4096}, {4096, 4096, 4096}, {4097, 8192, 4096}, {64 << 10, 64 << 10, 4096},
		{2 << 20, 2 << 20, 2 << 20}, {2<<20 + 1, 2<<20 + 4096, 4096},
	} {
		t.Run(fmt.Sprint(c.n), func(t *testing.T) {
			// The second round gets the memory of the first, which was full of other bytes.
			for range 2 {
				s := alloc(t, a, c.n)
				require.Len(t, s.Bytes(), int(c.n))
				require.Equal(t, int(c.n), cap(s.Bytes()))
				require.Equal(t, c.n, s.Len())
				require.Len(t, s.Padded(), int(c.size))
				require.Equal(t, int(c.size), cap(s.Padded()))
				require.True(t, zero(s.Padded()[c.n:]), "the rest of the slot is not zero")
				if runtime.GOOS == "linux" || c.align < hugeBytes {
					require.Zero(t, address(s.Bytes())%uintptr(c.align))
				}
				require.Equal(t, c.size, a.Usage().Used)
				require.Equal(t, c.n, a.Usage().Logical)
				for i := range s.Padded() {
					s.Padded()[i] = 0xff
				}
				free(t, a, s)
			}
		})
	}
	require.Zero(t, a.Usage().Held)
}

func TestUnusableSizesAreRefused_B38(t *testing.T) {
	for _, c := range []struct {
		capacity int64
		class    error
	}{{-1, txn.ErrInvalid}, {0, txn.ErrInvalid}, {4095, txn.ErrInvalid}, {CapacityMax + 1, txn.ErrTooLarge}} {
		_, err := New(c.capacity, Options{})
		require.ErrorIs(t, err, c.class, "capacity %d", c.capacity)
	}
	a := newArena(t, 2<<30)
	before := a.Usage()
	for _, c := range []struct {
		n     int64
		class error
	}{{-1, txn.ErrInvalid}, {0, txn.ErrInvalid}, {SlotBytesMax + 1, txn.ErrTooLarge}, {1 << 32, txn.ErrTooLarge}, {1<<32 + 1, txn.ErrTooLarge}} {
		_, err := a.Alloc(c.n)
		require.ErrorIs(t, err, c.class, "slot of %d bytes", c.n)
	}
	require.Equal(t, before, a.Usage())
	s := alloc(t, a, SlotBytesMax)
	s.Bytes()[0], s.Bytes()[SlotBytesMax-1] = 1, 2
	free(t, a, s)

	small := newArena(t, 8<<10)
	_, err := small.Alloc(8<<10 + 1)
	require.ErrorIs(t, err, txn.ErrTooLarge, "what can never fit is told apart from what does not fit now")
}

func TestRawBytesFitButAlignedSlotsDoNot_RST04(t *testing.T) {
	a := newArena(t, 7*4096)
	hog := alloc(t, a, 4096)
	var slots []Slot
	for range 6 {
		slots = append(slots, alloc(t, a, 3500+600))
		if a.Usage().Free < 8192 {
			break
		}
	}
	require.Len(t, slots, 3)
	require.Zero(t, a.Usage().Free)
	_, err := a.Alloc(1)
	require.ErrorIs(t, err, ErrFull)
	require.ErrorIs(t, err, txn.ErrBusy)
	free(t, a, hog)
	free(t, a, alloc(t, a, 4096))
	free(t, a, slots...)
}

// Given 64 KiB holes between pinned 64 KiB slots, when slots of 128 KiB are wanted, then all that the free bytes
// allow are there, and the neighbours keep their bytes.
func TestHolesServeLargerSlots_RST06(t *testing.T) {
	const capacity = 16 << 20
	a := newArena(t, capacity)
	var pinned, holes []Slot
	for i := range capacity / (64 << 10) {
		s := alloc(t, a, 64<<10)
		stamp(s.Bytes(), uint64(i))
		if i%2 == 0 {
			pinned = append(pinned, s)
		} else {
			holes = append(holes, s)
		}
	}
	_, err := a.Alloc(1)
	require.ErrorIs(t, err, ErrFull)
	free(t, a, holes...)
	require.EqualValues(t, capacity/2, a.Usage().Free)

	var large []Slot
	for i := range capacity / 2 / (128 << 10) {
		s := alloc(t, a, 128<<10)
		stamp(s.Bytes(), uint64(1000+i))
		large = append(large, s)
	}
	require.Zero(t, a.Usage().Free)
	_, err = a.Alloc(128 << 10)
	require.ErrorIs(t, err, ErrFull)
	for i, s := range pinned {
		require.True(t, stamped(s.Bytes(), uint64(2*i)))
	}
	for i, s := range large {
		require.True(t, stamped(s.Bytes(), uint64(1000+i)))
	}
	free(t, a, large...)
	free(t, a, alloc(t, a, capacity/2))
	free(t, a, pinned...)
}

func TestSmallSlotsArePacked(t *testing.T) {
	a := newArena(t, 1<<20)
	for size := lineBytes; size < pageBytes; size += lineBytes {
		n := 20 * pageBytes / size
		var slots []Slot
		for range n {
			slots = append(slots, alloc(t, a, size))
		}
		u := a.Usage()
		require.Equal(t, n*size, u.Used)
		require.LessOrEqual(t, u.Held, u.Used*8/7+slabPagesMax*pageBytes, "slots of %d bytes", size)
		free(t, a, slots...)
		require.Zero(t, a.Usage().Held, "slots of %d bytes", size)
	}
	one := alloc(t, a, 64)
	require.EqualValues(t, 4096, a.Usage().Held)
	free(t, a, one)
}

// A slab of the best size may not fit where a single page does.
func TestSmallSlotFitsIntoTheLastPage(t *testing.T) {
	a := newArena(t, 4*pageBytes)
	require.Greater(t, a.slabBytes(1408), pageBytes)
	hog := alloc(t, a, 3*pageBytes)
	s := alloc(t, a, 1408)
	require.Zero(t, a.Usage().Free)
	second := alloc(t, a, 1408)
	_, err := a.Alloc(1408)
	require.ErrorIs(t, err, ErrFull)
	free(t, a, hog, s, second)
}

func TestFreedSlotStaysWarmForItsClass(t *testing.T) {
	a := newArena(t, 4<<20)
	s := alloc(t, a, 256<<10)
	stamp(s.Bytes(), 7)
	at := address(s.Bytes())
	require.Zero(t, a.Usage().Warm)
	free(t, a, s)
	require.EqualValues(t, 256<<10, a.Usage().Warm)
	s = alloc(t, a, 256<<10)
	require.Equal(t, at, address(s.Bytes()))
	require.False(t, zero(s.Bytes()), "the memory was given back although nobody needed it")
	require.Zero(t, a.Usage().Warm)
	free(t, a, s)
}

func TestSpansMoveBetweenClasses(t *testing.T) {
	a := newArena(t, 8<<20)
	for i := range 100 {
		s := alloc(t, a, 8<<20-int64(i)*pageBytes) // each a class of its own, and none fits beside another
		free(t, a, s)
	}
	require.LessOrEqual(t, a.Usage().Address, 3*(spanBytes+hugeBytes))
	require.LessOrEqual(t, len(a.classes), 3)
}

func TestMisuseOfFreeIsDetected(t *testing.T) {
	if poisonsFreed {
		t.Skip("the invariants build panics instead: TestMisuseOfFreePanics")
	}
	a, b := newArena(t, 1<<20), newArena(t, 1<<20)
	for _, n := range []int64{64, 4096, 64 << 10} {
		s := alloc(t, a, n)
		require.ErrorIs(t, b.Free(s), txn.ErrInvalid, "foreign")
		require.ErrorIs(t, a.Free(Slot{}), txn.ErrInvalid, "zero")
		require.NoError(t, a.Free(s))
		require.ErrorIs(t, a.Free(s), txn.ErrInvalid, "twice")
		again := alloc(t, a, n)
		require.ErrorIs(t, a.Free(s), txn.ErrInvalid, "by its former owner")
		require.Equal(t, int64(1), a.Usage().Slots)
		require.NoError(t, a.Free(again))
	}
	require.Zero(t, a.Usage().Held)
	require.Zero(t, b.Usage().Held)
}

func TestCloseKeepsLiveSlotsReadable(t *testing.T) {
	a, err := New(1<<20, Options{})
	require.NoError(t, err)
	s := alloc(t, a, 5000)
	stamp(s.Bytes(), 3)
	require.ErrorIs(t, a.Close(), txn.ErrBusy)
	_, err = a.Alloc(1)
	require.ErrorIs(t, err, txn.ErrClosed)
	require.ErrorIs(t, a.Resize(1<<20), txn.ErrClosed)
	require.True(t, stamped(s.Bytes(), 3))
	require.NoError(t, a.Free(s))
	require.Zero(t, a.Usage().Address)
	require.NoError(t, a.Close())
}

func TestResizeShrinksUnderLiveSlots(t *testing.T) {
	a := newArena(t, 8<<20)
	var slots []Slot
	for range 8 {
		slots = append(slots, alloc(t, a, 1<<20))
	}
	free(t, a, slots[6:]...)
	require.NoError(t, a.Resize(2<<20))
	u := a.Usage()
	require.Zero(t, u.Warm)
	require.Zero(t, u.Free)
	require.EqualValues(t, 6<<20, u.Held)
	free(t, a, slots[:5]...)
	require.EqualValues(t, 1<<20, a.Usage().Free)
	slots = append(slots[5:6], alloc(t, a, 1<<20))
	_, err := a.Alloc(1)
	require.ErrorIs(t, err, ErrFull)
	require.NoError(t, a.Resize(8<<20))
	slots = append(slots, alloc(t, a, 6<<20))
	free(t, a, slots...)
	require.ErrorIs(t, a.Resize(0), txn.ErrInvalid)
}

func TestHeapPerSlotIsSmall(t *testing.T) {
	const n = 1 << 16
	a := newArena(t, n*64<<10)
	slots := make([]Slot, 0, n)
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before := heap()
	for range n {
		slots = append(slots, alloc(t, a, 64<<10)) // 4 GiB that nobody touches
	}
	perSlot := (heap() - before) / n
	t.Logf("%d bytes of heap per live 64 KiB slot, %d in the handle", perSlot, unsafe.Sizeof(Slot{}))
	require.LessOrEqual(t, perSlot+int64(unsafe.Sizeof(Slot{})), int64(64))
	free(t, a, slots...)
	require.LessOrEqual(t, (heap()-before)/n, int64(64), "heap per warm slot")
}

// Every history of allocations, frees and resizes agrees with a list of live slots: none overlap, none loses its bytes,
// the gauges are sums over the list, and a slot of a page or more is refused exactly if the free bytes do not suffice.
func TestArenaAgreesWithModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) { agreesWithModel(t, nil) })
}

func agreesWithModel(t *rapid.T, locked *lockBook) {
	type live struct {
		Slot
		id uint64
	}
	capacity := int64(64 << 10)
	a, err := New(capacity, locked.options())
	require.NoError(t, err)
	locked.watch(a)
	var slots []live
	var next uint64
	check := func(s live) {
		require.True(t, stamped(s.Bytes(), s.id), "slot of %d bytes lost its content", s.n)
		require.True(t, zero(s.Padded()[s.n:]), "slot of %d bytes: rest is not zero", s.n)
	}
	drop := func(i int) {
		check(slots[i])
		require.NoError(t, a.Free(slots[i].Slot))
		slots[i] = slots[len(slots)-1]
		slots = slots[:len(slots)-1]
	}
	sizes := rapid.SampledFrom([]int64{1, 64, 65, 200, 1000, 1400, 2100, 4032, 4033, 4096, 4097, 8192, 12 << 10, 20000, 32 << 10, 64 << 10})
	t.Repeat(map[string]func(*rapid.T){
		"alloc": func(t *rapid.T) {
			n, before := sizes.Draw(t, "n"), a.Usage()
			s, err := a.Alloc(n)
			switch size := slotBytes(n); {
			case size > capacity:
				require.ErrorIs(t, err, txn.ErrTooLarge)
			case locked.failed():
			case size >= pageBytes && locked == nil:
				require.Equal(t, size <= before.Free, err == nil, "slot of %d bytes with %d free: %v", size, before.Free, err)
			case before.Free >= max(size, pageBytes):
				require.NoError(t, err)
			}
			if err != nil {
				after := a.Usage()
				if locked != nil { // warm memory may have gone for a piece that could not be locked
					before.Warm, before.Locked, before.Address = after.Warm, after.Locked, after.Address
				}
				require.Equal(t, before, after)
				return
			}
			require.True(t, zero(s.Padded()[n:]))
			next += 1 << 32
			stamp(s.Bytes(), next)
			slots = append(slots, live{s, next})
		},
		"free": func(t *rapid.T) {
			if len(slots) > 0 {
				drop(rapid.IntRange(0, len(slots)-1).Draw(t, "slot"))
			}
		},
		"free many": func(t *rapid.T) {
			for range len(slots) / 2 {
				drop(rapid.IntRange(0, len(slots)-1).Draw(t, "slot"))
			}
		},
		"resize": func(t *rapid.T) {
			capacity = rapid.SampledFrom([]int64{16 << 10, 48 << 10, 64 << 10, 128 << 10}).Draw(t, "capacity")
			require.NoError(t, a.Resize(capacity))
		},
		"": func(t *rapid.T) {
			u := a.Usage()
			var want Usage
			for _, s := range slots {
				check(s)
				want.Used += slotBytes(int64(s.n))
				want.Logical += int64(s.n)
				want.Slots++
			}
			require.Equal(t, want.Used, u.Used)
			require.Equal(t, want.Logical, u.Logical)
			require.Equal(t, want.Slots, u.Slots)
			require.GreaterOrEqual(t, u.Held, u.Used)
			locked.check(t, u, func(yield func([]byte) bool) {
				for _, s := range slots {
					if !yield(s.Padded()) {
						return
					}
				}
			})
			if u.Held <= capacity {
				require.LessOrEqual(t, u.Held+u.Warm, capacity)
				require.Equal(t, capacity-u.Held, u.Free)
			}
		},
	})
	for len(slots) > 0 {
		drop(0)
	}
	require.Zero(t, a.Usage().Held)
	require.NoError(t, a.Close())
	require.Empty(t, locked.pieces())
}

// While one call releases memory, another that needs it waits for that, rather than exceed the capacity or find it full.
func TestAllocWaitsForMemoryBeingReleased(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const half = 1 << 20
		a := newArena(t, 2*half)
		free(t, a, alloc(t, a, 2*half)) // one warm slot that holds everything
		gate := make(chan struct{})
		a.giveBack = func(b []byte) error {
			<-gate
			return giveBack(b)
		}
		var done atomic.Int64
		slots := make([]Slot, 2)
		for i := range slots {
			go func() {
				slots[i], _ = a.Alloc(half)
				done.Add(1)
			}()
		}
		synctest.Wait()
		require.Zero(t, done.Load(), "a slot was handed out before there was memory for it")
		require.EqualValues(t, 2*half, a.Usage().Held)
		require.ErrorIs(t, a.Close(), txn.ErrBusy, "calls are running")
		close(gate)
		synctest.Wait()
		require.EqualValues(t, 2, done.Load())
		free(t, a, slots...)
	})
}

// A system that refuses to take memory back is counted; allocation goes on.
func TestRefusedReleaseIsCounted(t *testing.T) {
	a := newArena(t, 1<<20)
	a.giveBack = func([]byte) error { return errors.New("no") }
	free(t, a, alloc(t, a, 1<<20))
	free(t, a, alloc(t, a, 1<<19))
	require.EqualValues(t, 1, a.Usage().Refused)
}

func TestConcurrentTenantsKeepTheirBytes(t *testing.T) {
	const workers, rounds = 8, 400
	a := newArena(t, 4<<20)
	sizes := []int64{64, 300, 4096, 5000, 64 << 10, 100 << 10, 1 << 20}
	var full atomic.Int64
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(1, uint64(w)))
			var held []Slot
			for i := range rounds {
				s, err := a.Alloc(sizes[rng.IntN(len(sizes))])
				if err != nil {
					if !assertFull(t, err) {
						return
					}
					full.Add(1)
				} else {
					stamp(s.Bytes(), uint64(w))
					held = append(held, s)
				}
				if len(held) > 0 && (err != nil || len(held) > 12) {
					j := rng.IntN(len(held))
					if !stamped(held[j].Bytes(), uint64(w)) || a.Free(held[j]) != nil {
						t.Errorf("slot of %d bytes was shared", held[j].n)
						return
					}
					held = append(held[:j], held[j+1:]...)
				}
				if u := a.Usage(); u.Held > u.Capacity || u.Held+u.Warm > u.Capacity || u.Used > u.Held {
					t.Errorf("round %d: %+v", i, u)
					return
				}
			}
			for _, s := range held {
				if !stamped(s.Bytes(), uint64(w)) || a.Free(s) != nil {
					t.Errorf("slot of %d bytes was shared", s.n)
				}
			}
		})
	}
	wg.Wait()
	require.Positive(t, full.Load(), "the arena never was full: the test shows little")
	require.Zero(t, a.Usage().Held)
}

func assertFull(t *testing.T, err error) bool {
	t.Helper()
	if !isFull(err) {
		t.Errorf("alloc: %v", err)
		return false
	}
	return true
}

func isFull(err error) bool { return errors.Is(err, ErrFull) }
