package arena

import (
	"bufio"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// resident is how many bytes of the arena's address space have memory, as the kernel counts it.
func resident(t testing.TB, a *Arena) int64 {
	t.Helper()
	f, err := os.Open("/proc/self/smaps")
	require.NoError(t, err)
	defer f.Close()
	var sum int64
	inside := false
	for sc := bufio.NewScanner(f); sc.Scan(); {
		var from, to uintptr
		var kib int64
		if n, _ := fmt.Sscanf(sc.Text(), "%x-%x ", &from, &to); n == 2 && !strings.HasPrefix(sc.Text(), "Rss") {
			inside = false
			for _, g := range a.regions {
				// Neighbouring anonymous mappings with the same advice are one to the kernel.
				inside = inside || from < address(g.raw)+uintptr(len(g.raw)) && address(g.raw) < to
			}
		} else if n, _ := fmt.Sscanf(sc.Text(), "Rss: %d kB", &kib); n == 1 && inside {
			sum += kib << 10
		}
	}
	return sum
}

// slopBytes allows for whatever else the runtime has mapped beside the arena's regions.
const slopBytes = 2 << 20

// Whatever sizes come and go, and wherever the holes are, resident memory stays within the capacity.
func TestResidentMemoryStaysWithinCapacity_RST06(t *testing.T) {
	const capacity = 32 << 20
	a := newArena(t, capacity)
	fill := func(n int64) (slots []Slot) {
		for {
			s, err := a.Alloc(n)
			if err != nil {
				require.ErrorIs(t, err, ErrFull)
				return slots
			}
			stamp(s.Bytes(), 1)
			slots = append(slots, s)
		}
	}
	halve := func(slots []Slot) (kept []Slot) {
		for i, s := range slots {
			if i%2 == 0 {
				free(t, a, s)
			} else {
				kept = append(kept, s)
			}
		}
		return kept
	}
	var live []Slot
	for _, n := range []int64{64 << 10, 128 << 10, 2 << 20, 4096, 1000, 6 << 20, 5 << 20, 64 << 10, 2<<20 + 1} {
		live = halve(append(live, fill(n)...))
		u, rss := a.Usage(), resident(t, a)
		t.Logf("after slots of %7d: held %2d MiB, warm %2d MiB, resident %2d MiB", n, u.Held>>20, u.Warm>>20, rss>>20)
		require.LessOrEqual(t, rss, int64(capacity+slopBytes))
		require.GreaterOrEqual(t, rss, u.Held-slopBytes, "the reading is blind")
	}
	free(t, a, live...)
	require.Zero(t, a.Usage().Refused)
	require.NoError(t, a.Resize(4096))
	require.LessOrEqual(t, resident(t, a), int64(slopBytes), "freed memory was not given back")
}
