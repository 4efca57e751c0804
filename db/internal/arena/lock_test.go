package arena

import (
	"errors"
	"iter"
	"maps"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/holdfast-db/holdfast/txn"
)

// lockBook plays the devices: it knows what is page-locked, and panics at what the driver would not forgive.
type lockBook struct {
	mu    sync.Mutex
	books map[uintptr][]byte // what is locked, by address

	calls      int
	failLock   func(call int) bool
	failUnlock bool
	refused    bool // a lock since failed was last asked
}

var errLock = errors.New("too much is locked")

func newLockBook() *lockBook { return &lockBook{books: map[uintptr][]byte{}} }

func (l *lockBook) options() Options {
	if l == nil {
		return Options{}
	}
	return Options{Lock: l.lock}
}

func (l *lockBook) overlaps(mem []byte) bool {
	from, end := address(mem), address(mem)+uintptr(len(mem))
	for at, b := range l.books {
		if from < at+uintptr(len(b)) && at < end {
			return true
		}
	}
	return false
}

func (l *lockBook) lock(mem []byte) (func() error, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(mem) == 0 || address(mem)%4096 != 0 || len(mem)%4096 != 0 || l.overlaps(mem) {
		panic("what is locked is no whole pages, or locked already")
	}
	l.calls++
	if l.failLock != nil && l.failLock(l.calls) {
		l.refused = true
		return nil, errLock
	}
	l.books[address(mem)] = mem
	return func() error {
		l.mu.Lock()
		defer l.mu.Unlock()
		if len(l.books[address(mem)]) != len(mem) {
			panic("unlocked twice")
		}
		if l.failUnlock {
			return errLock
		}
		delete(l.books, address(mem))
		return nil
	}, nil
}

// watch makes the arena panic if it gives memory back that is locked.
func (l *lockBook) watch(a *Arena) {
	if l == nil {
		return
	}
	below := a.giveBack
	a.giveBack = func(b []byte) error {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.overlaps(b) {
			panic("locked memory is given back to the system")
		}
		return below(b)
	}
}

// failed tells whether a lock failed since it was last asked.
func (l *lockBook) failed() bool {
	if l == nil {
		return false
	}
	defer func() { l.refused = false }()
	return l.refused
}

// pieces gives the sizes of what is locked.
func (l *lockBook) pieces() (sizes []int) {
	if l == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, b := range l.books {
		sizes = append(sizes, len(b))
	}
	slices.Sort(sizes)
	return sizes
}

// check wants every live slot to lie within one locked piece, and nothing else to be locked than what is held or warm.
func (l *lockBook) check(t require.TestingT, u Usage, live iter.Seq[[]byte]) {
	if l == nil {
		return
	}
	var sum int64
	for _, n := range l.pieces() {
		sum += int64(n)
	}
	require.Equal(t, sum, u.Locked+u.Stuck)
	require.Equal(t, u.Held+u.Warm, u.Locked+u.Stuck)
	for b := range live {
		covered := false
		for at, piece := range l.books {
			covered = covered || address(b) >= at && address(b)+uintptr(len(b)) <= at+uintptr(len(piece))
		}
		require.True(t, covered, "a slot of %d bytes is not locked, or over two pieces", len(b))
	}
}

// The same histories as without, some locks failing: what is handed out is locked, what is given back is not.
func TestLockedArenaAgreesWithModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := newLockBook()
		every := rapid.SampledFrom([]int{0, 3, 10}).Draw(t, "every which lock fails")
		l.failLock = func(call int) bool { return every > 0 && call%every == 0 }
		agreesWithModel(t, l)
	})
}

func newLockedArena(t *testing.T, capacity int64) (*Arena, *lockBook) {
	l := newLockBook()
	a, err := New(capacity, l.options())
	require.NoError(t, err)
	l.watch(a)
	return a, l
}

// Locking is dear, so what is locked is large pieces, and whoever uses a piece again does not lock it again.
func TestLockedPiecesAreLargeAndStay(t *testing.T) {
	a, l := newLockedArena(t, 64<<20)
	var slots []Slot
	for _, n := range []int64{64, 3000, 4096, 64 << 10, 600 << 10, 1 << 20} {
		for range 3 {
			slots = append(slots, alloc(t, a, n))
		}
	}
	require.Equal(t, slices.Repeat([]int{2 << 20}, 7), l.pieces(), "one for each size, and another for the third MiB")
	free(t, a, slots...)
	for range 10 {
		for _, n := range []int64{128, 4096, 256 << 10, 2 << 20} {
			slots = append(slots[:0], alloc(t, a, n), alloc(t, a, n))
			free(t, a, slots...)
		}
	}
	require.Equal(t, 7, l.calls)
	require.EqualValues(t, 0, a.Usage().Held)

	require.NoError(t, a.Resize(4<<20))
	require.Equal(t, []int{2 << 20, 2 << 20}, l.pieces(), "what no capacity is left for is unlocked")
	require.NoError(t, a.Close())
	require.Empty(t, l.pieces())

	large, l := newLockedArena(t, 64<<30)
	free(t, large, alloc(t, large, 2<<20))
	require.Equal(t, []int{16 << 20}, l.pieces())
	require.NoError(t, large.Close())
}

// Pieces do not keep the last bytes of the capacity from being used.
func TestLockedArenaFillsToTheLastPage(t *testing.T) {
	a, l := newLockedArena(t, 5<<20+3*4096)
	var slots []Slot
	for range (5<<20 + 3*4096) / 4096 {
		slots = append(slots, alloc(t, a, 4096))
	}
	require.Zero(t, a.Usage().Free)
	_, err := a.Alloc(4096)
	require.ErrorIs(t, err, ErrFull)
	free(t, a, slots...)
	hog := alloc(t, a, 5<<20)
	slots = []Slot{alloc(t, a, 8192), alloc(t, a, 64)}
	require.Zero(t, a.Usage().Free)
	free(t, a, append(slots, hog)...)
	require.NoError(t, a.Close())
	require.Empty(t, l.pieces())
}

// Memory that cannot be locked is no room, and what was there before goes on being used.
func TestLockThatFailsIsNoRoom(t *testing.T) {
	a, l := newLockedArena(t, 64<<20)
	s := alloc(t, a, 2<<20)
	l.failLock = func(int) bool { return true }
	_, err := a.Alloc(2 << 20)
	require.ErrorIs(t, err, txn.ErrBusy)
	require.ErrorContains(t, err, errLock.Error())
	_, err = a.Alloc(64)
	require.ErrorIs(t, err, ErrFull)
	require.EqualValues(t, 2<<20, a.Usage().Held)
	free(t, a, s)
	s = alloc(t, a, 64)
	require.EqualValues(t, 2<<20, a.Usage().Held)
	free(t, a, s)
	require.NoError(t, a.Close())
	require.Empty(t, l.pieces())
}

// Memory that cannot be unlocked is the devices' until the process ends: it is neither given back, unmapped nor handed out.
func TestMemoryThatCannotBeUnlockedIsStuck(t *testing.T) {
	a, l := newLockedArena(t, 4<<20)
	free(t, a, alloc(t, a, 2<<20))
	l.failUnlock = true
	stuck := slices.Collect(maps.Values(l.books))[0]
	_, err := a.Alloc(2<<20 + 4096)
	require.ErrorIs(t, err, ErrFull, "there is none to take its place")
	require.EqualValues(t, 2<<20, a.Usage().Stuck)
	require.EqualValues(t, 1, a.Usage().Refused)
	l.failUnlock = false
	for range 3 {
		s := alloc(t, a, 1<<20)
		require.NotEqual(t, address(stuck), address(s.Bytes()))
		l.check(t, a.Usage(), slices.Values([][]byte{s.Padded()}))
		free(t, a, s)
	}
	require.EqualValues(t, 2<<20, a.Usage().Held)
	require.NoError(t, a.Close())
	require.Equal(t, []int{2 << 20}, l.pieces())
	stuck[0]++ // still mapped
}

func TestLockedArenaUnderManyTenants(t *testing.T) {
	l := newLockBook()
	a, err := New(8<<20, l.options())
	require.NoError(t, err)
	l.watch(a)
	l.failLock = func(call int) bool { return call%16 == 0 }
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			sizes := []int64{64, 4096, 64 << 10, 600 << 10, 2 << 20, 3 << 20}
			var held []Slot
			for i := range 300 {
				s, err := a.Alloc(sizes[(i*7+w)%len(sizes)])
				if err == nil {
					stamp(s.Bytes(), uint64(w))
					held = append(held, s)
				} else if !assertFull(t, err) {
					return
				}
				if len(held) > 0 && (err != nil || len(held) > 6) {
					if !stamped(held[0].Bytes(), uint64(w)) || a.Free(held[0]) != nil {
						t.Errorf("slot of %d bytes was shared", held[0].n)
						return
					}
					held = held[1:]
				}
			}
			for _, s := range held {
				if a.Free(s) != nil {
					t.Error("free")
				}
			}
		})
	}
	wg.Wait()
	l.check(t, a.Usage(), slices.Values([][]byte(nil)))
	require.Zero(t, a.Usage().Held)
	require.NoError(t, a.Close())
	require.Empty(t, l.pieces())
}
