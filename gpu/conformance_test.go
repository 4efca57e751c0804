package gpu

import (
	"context"
	"encoding/binary"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The promises that every backend has to keep are the tests TestConformance…, each run on every backend of this machine.

// rigs gives them; a file for a backend adds its own.
var rigs = []func() (rig, bool){
	func() (rig, bool) { return hostRig("host", 0), true },
	func() (rig, bool) { return hostRig("host reordered", 7), true },
}

// Most promises take a machine with hands: one that can hold copies and make calls fail. What remains can be asked of a real
// device.
const (
	withHands    = true
	withoutHands = false
)

// conform checks one promise.
func conform(t *testing.T, hands bool, test func(*testing.T, rig)) {
	for _, open := range rigs {
		if r, ok := open(); ok && (r.hands || !hands) {
			t.Run(r.name, func(t *testing.T) { test(t, r) })
		}
	}
}

// patience is how long a test waits for what has to come.
const patience = time.Minute

// wait gives the outcome of t, which has to settle soon.
func wait(tb testing.TB, t *Transfer) error {
	tb.Helper()
	select {
	case <-t.Done():
	case <-time.After(patience):
		require.FailNow(tb, "the transfer does not settle")
	}
	return t.Err()
}

// soon waits for a channel to be closed.
func soon(tb testing.TB, c <-chan struct{}, what string) {
	tb.Helper()
	select {
	case <-c:
	case <-time.After(patience):
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
	require.Eventually(tb, ok, patience, time.Millisecond, what)
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
