package gpu

import (
	"bytes"
	"errors"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

func openHost(t testing.TB, o HostOptions) (*Host, *Engine) {
	h, err := NewHost(o)
	require.NoError(t, err)
	e, err := Open(h, Options{Logger: quiet})
	require.NoError(t, err)
	t.Cleanup(func() { closeEngine(t, e) })
	return h, e
}

// Buffers on the Go heap work with the host backend, live until the copy has ended, and are never merged, not even when
// they happen to be neighbours.
func TestHostTakesGoMemory(t *testing.T) {
	h, e := openHost(t, HostOptions{})
	whole := make([]byte, 64<<10)
	address, err := h.Expose(0, whole)
	require.NoError(t, err)
	var regions []Region
	for i := range 16 {
		regions = append(regions, Region{address + uint64(i*4096), bytes.Repeat([]byte{byte(i)}, 4096)})
	}
	x := submit(t, e, Batch{Direction: Load, Regions: regions})
	regions = nil
	runtime.GC()
	require.NoError(t, wait(t, x))
	for i := range whole {
		require.Equal(t, byte(i/4096), whole[i])
	}
	require.EqualValues(t, 16, e.Stats()[0].Runs)
}

func TestHostEventOrder(t *testing.T) {
	h, e := openHost(t, HostOptions{})
	memory, host := make([]byte, 16), make([]byte, 16)
	address, err := h.Expose(0, memory)
	require.NoError(t, err)
	event, stream := h.NewEvent(), h.NewStream()
	defer stream.Close()
	b := Batch{Direction: Store, Regions: []Region{{address, host}}, After: Order{Event: event.Handle(), Stream: stream.Handle()}}
	stream.Do(func() { memory[0] = 1 })
	x := submit(t, e, b)
	memory[1] = 2
	event.Signal(nil)
	require.NoError(t, wait(t, x))
	require.Equal(t, []byte{1, 2}, host[:2])

	failed := h.NewEvent()
	b.After = Order{Event: failed.Handle()}
	x = submit(t, e, b)
	failed.Signal(errors.New("the producer failed"))
	failed.Signal(nil)
	require.ErrorContains(t, wait(t, x), "the producer failed")
	require.Equal(t, 1, classesOf(x.Err()))
	require.False(t, x.Quarantined())
	failed.Close()
	_, err = e.Submit(t.Context(), b)
	require.ErrorIs(t, err, txn.ErrInvalid)
}

func TestHostAddressesAreChecked(t *testing.T) {
	h, e := openHost(t, HostOptions{Devices: 2})
	address, err := h.Expose(0, make([]byte, 4096))
	require.NoError(t, err)
	host := make([]byte, 4096)
	for _, c := range []struct {
		device  int
		address uint64
	}{{0, address - 1}, {0, address + 1}, {0, address + 4096}, {0, 1}, {1, address}} {
		x := submit(t, e, Batch{Device: c.device, Direction: Store, Regions: []Region{{c.address, host}}})
		require.ErrorIs(t, wait(t, x), txn.ErrInvalid)
		require.False(t, x.Quarantined())
	}
	require.NoError(t, h.Withdraw(0, address))
	require.ErrorIs(t, h.Withdraw(0, address), txn.ErrNotFound)
	require.ErrorIs(t, wait(t, submit(t, e, Batch{Direction: Store, Regions: []Region{{address, host}}})), txn.ErrInvalid)
	_, err = h.Expose(2, host)
	require.ErrorIs(t, err, txn.ErrInvalid)
	_, err = e.OpenImport(t.Context(), 0, ImportHandle{IPC: new([64]byte)})
	require.ErrorIs(t, err, txn.ErrUnsupported)
}

func TestOptionsAreChecked(t *testing.T) {
	_, err := NewHost(HostOptions{Devices: 65})
	require.ErrorIs(t, err, txn.ErrInvalid)
	_, err = NewHost(HostOptions{Workers: -1})
	require.ErrorIs(t, err, txn.ErrInvalid)
	for _, o := range []Options{
		{Limits: Limits{Transfers: -1}}, {Limits: Limits{Regions: 1 << 25}}, {Limits: Limits{Bytes: -1}}, {Limits: Limits{ChunkBytes: 4095}},
		{Limits: Limits{ChunkBytes: 1 << 20, WindowBytes: 1<<20 - 1}}, {Limits: Limits{ChunkRuns: 10, WindowRuns: 9}},
		{Limits: Limits{WindowRuns: 5}}, {Limits: Limits{WindowBytes: 4096}},
		{Limits: Limits{Lanes: 9}}, {Limits: Limits{LaneDepth: 17}}, {Deadline: -1},
	} {
		h, err := NewHost(HostOptions{})
		require.NoError(t, err)
		_, err = Open(h, o)
		require.ErrorIs(t, err, txn.ErrInvalid, "%+v", o)
	}
}

// Without a GPU the host backend is the default; with one, CUDA is.
func TestDetect(t *testing.T) {
	b, reason := Detect(CUDAOptions{})
	if reason != nil {
		require.Equal(t, "host", b.Name())
		require.Equal(t, 1, classesOf(reason))
	} else {
		require.Equal(t, "cuda", b.Name())
	}
	require.NotEmpty(t, b.Devices())
	require.NoError(t, b.close())
}

// A driver that blocks in an "asynchronous" copy of one direction does not hold up the other.
func TestBlockedSubmissionHoldsUpItsLaneOnly(t *testing.T) {
	blocked, reached := make(chan struct{}), make(chan struct{}, 2)
	h, err := NewHost(HostOptions{Fault: func(c HostCall) error {
		if c.Op == HostSubmit && c.Direction == Load {
			reached <- struct{}{}
			<-blocked
		}
		return nil
	}})
	require.NoError(t, err)
	e, err := Open(h, Options{Limits: Limits{Lanes: 1}, Logger: quiet})
	require.NoError(t, err)
	defer closeEngine(t, e)
	address, err := h.Expose(0, make([]byte, 3*4096))
	require.NoError(t, err)
	region := func(i uint64) []Region { return []Region{{address + i*4096, make([]byte, 4096)}} }
	first, second := submit(t, e, Batch{Direction: Load, Regions: region(0)}), submit(t, e, Batch{Direction: Load, Regions: region(1)})
	<-reached
	require.NoError(t, wait(t, submit(t, e, Batch{Direction: Store, Regions: region(2)})))
	close(blocked)
	require.NoError(t, wait(t, first))
	require.NoError(t, wait(t, second))
}
