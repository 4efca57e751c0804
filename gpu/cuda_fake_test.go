//go:build cgo && linux

package gpu

import (
	"bytes"
	"context"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/gpu/internal/driver"
	"github.com/holdfast-db/holdfast/gpu/internal/fakecuda"
	"github.com/holdfast-db/holdfast/txn"
)

// Every way to make copies gives the same bytes, and is the way that was used.
func TestCUDAMethodsAreExact_GPU06(t *testing.T) {
	abis := func(version, bits uint64) func(*fakecuda.Control) {
		return func(c *fakecuda.Control) { c.Version.Store(version); c.BatchABIs.Store(bits) }
	}
	for _, c := range []struct {
		name   string
		o      CUDAOptions
		set    func(*fakecuda.Control)
		used   func(*fakecuda.Control) uint64
		unused func(*fakecuda.Control) uint64
	}{
		{"batch of 12.8", CUDAOptions{KernelBytes: -1}, abis(12080, 1),
			func(c *fakecuda.Control) uint64 { return c.Batches.Load() }, func(c *fakecuda.Control) uint64 { return c.Copies.Load() }},
		{"batch of 12.8 on 13.0", CUDAOptions{KernelBytes: -1}, abis(13000, 3),
			func(c *fakecuda.Control) uint64 { return c.Batches.Load() }, func(c *fakecuda.Control) uint64 { return c.Copies.Load() }},
		{"batch of 13.0", CUDAOptions{KernelBytes: -1}, abis(13000, 2),
			func(c *fakecuda.Control) uint64 { return c.Batches.Load() }, func(c *fakecuda.Control) uint64 { return c.Copies.Load() }},
		{"driver of 11.4", CUDAOptions{KernelBytes: -1}, abis(11040, 0),
			func(c *fakecuda.Control) uint64 { return c.Copies.Load() }, func(c *fakecuda.Control) uint64 { return c.Batches.Load() }},
		{"single copies", CUDAOptions{Method: MethodSingle}, nil,
			func(c *fakecuda.Control) uint64 { return c.Copies.Load() }, func(c *fakecuda.Control) uint64 { return c.Batches.Load() + c.Kernels.Load() }},
		{"kernel where it can", CUDAOptions{Method: MethodKernel}, nil,
			func(c *fakecuda.Control) uint64 { return c.KernelRuns.Load() }, func(c *fakecuda.Control) uint64 { return 0 }},
		{"calibrated", CUDAOptions{}, nil,
			func(c *fakecuda.Control) uint64 { return c.Kernels.Load() }, func(c *fakecuda.Control) uint64 { return 0 }},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := fakeRig(c.o, func(x *fakecuda.Control) {
				x.DelayMicroseconds.Store(0)
				if c.set != nil {
					c.set(x)
				}
			})
			var seen *fakecuda.Control
			open := r.open
			r.open = func(t testing.TB, o Options) machine {
				m := open(t, o)
				seen = m.(*fakeMachine).c
				return m
			}
			testScatterGather(t, r)
			require.NotZero(t, c.used(seen))
			require.Zero(t, c.unused(seen))
		})
	}
}

// Without a batch call, blocks at regular strides, as the layers of a page are, travel as 2-D copies.
func TestCUDAPlanes(t *testing.T) {
	for _, method := range []Method{MethodPlane, MethodAuto} {
		r := fakeRig(CUDAOptions{Method: method, KernelBytes: -1}, func(c *fakecuda.Control) { c.BatchABIs.Store(0); c.DelayMicroseconds.Store(0) })
		testScatterGather(t, r)
		m := r.open(t, Options{}).(*fakeMachine)
		const layers, block, pitch = 12, 4096, 16 << 10
		host := pinned(t, m.e, 3*layers*block)
		noise(rand.New(rand.NewPCG(1, 1)), host)
		device := m.alloc(t, 0, layers*pitch)
		var regions []Region
		want := bytes.Repeat([]byte{poison}, layers*pitch)
		for i := range layers {
			piece := host[3*i*block : (3*i+1)*block]
			regions = append(regions, Region{device + uint64(i*pitch), piece})
			copy(want[i*pitch:], piece)
		}
		odd := host[block : block+100] // one that fits no stride
		regions = append(regions, Region{device + 5000, odd})
		copy(want[5000:], odd)
		require.NoError(t, wait(t, submit(t, m.e, Batch{Direction: Load, Regions: regions})))
		got := make([]byte, len(want))
		m.peek(t, 0, device, got)
		require.True(t, bytes.Equal(want, got))
		require.EqualValues(t, 1, m.c.Planes.Load())
		require.EqualValues(t, 2, m.c.Copies.Load(), "the first block, which the odd one parts from the rest, and the odd one")

		clear(host)
		require.NoError(t, wait(t, submit(t, m.e, Batch{Direction: Store, Regions: regions[1:layers]})))
		for i := 1; i < layers; i++ {
			require.Equal(t, want[i*pitch:i*pitch+block], host[3*i*block:(3*i+1)*block])
		}
		require.EqualValues(t, 2, m.c.Planes.Load())
		m.verify(t)
	}
}

// The driver refuses a copy over two registrations; a region may lie over them all the same.
func TestCUDARegionOverTwoPinnedPieces(t *testing.T) {
	m := fakeRig(CUDAOptions{KernelBytes: -1}, nil).open(t, Options{}).(*fakeMachine)
	m.e.pinPiece = 8 << 10
	host := pinned(t, m.e, 40<<10)
	noise(rand.New(rand.NewPCG(1, 1)), host)
	device := m.alloc(t, 0, 40<<10)
	require.NoError(t, wait(t, submit(t, m.e, Batch{Direction: Load, Regions: []Region{{device, host[100 : 100+30<<10]}}})))
	got := make([]byte, 30<<10)
	m.peek(t, 0, device, got)
	require.Equal(t, host[100:100+30<<10], got)
	require.EqualValues(t, 4, m.e.Stats()[0].Runs)
}

// Host memory that is not pinned is refused before anything moves: the driver would copy it while Submit waits, and not at
// all if it is Go's.
func TestCUDARefusesUnpinnedMemory_GPU02(t *testing.T) {
	m := fakeRig(CUDAOptions{KernelBytes: -1}, nil).open(t, Options{}).(*fakeMachine)
	p, err := m.e.AllocPinned(8 << 10)
	require.NoError(t, err)
	device := m.alloc(t, 0, 64<<10)
	mem := p.Bytes()
	beyond, unmap, err := mapMemory(4096)
	require.NoError(t, err)
	defer func() { require.NoError(t, unmap()) }()
	for _, host := range [][]byte{make([]byte, 16), beyond, unsafe.Slice(&mem[4096], 4097)} {
		_, err := m.e.Submit(t.Context(), Batch{Direction: Load, Regions: []Region{{device, mem[:16]}, {device + 4096, host}}})
		require.ErrorIs(t, err, txn.ErrInvalid)
		require.ErrorContains(t, err, "not pinned")
	}
	require.Zero(t, m.c.Copies.Load()+m.c.Batches.Load())
	even(t, m.e)
	require.NoError(t, p.Unpin())
	_, err = m.e.Submit(t.Context(), Batch{Direction: Load, Regions: []Region{{device, mem[:16]}}})
	require.ErrorContains(t, err, "not pinned")
}

// Memory of a copy in flight cannot be touched by the process: this is what makes the fake driver catch early releases.
func TestCUDAFakeGuardsMemoryInFlight(t *testing.T) {
	m := fakeRig(CUDAOptions{KernelBytes: -1}, nil).open(t, Options{}).(*fakeMachine)
	const n = 8 << 10
	host := pinned(t, m.e, 2*n)
	device := m.alloc(t, 0, 2*n)
	m.hold()
	store := submit(t, m.e, Batch{Direction: Store, Regions: []Region{{device, host[:n]}}})
	load := submit(t, m.e, Batch{Direction: Load, Regions: []Region{{device + n, host[n:]}}})
	eventually(t, "both are in flight", func() bool { return m.e.Stats()[0].InFlightBytes == 2*n })
	eventually(t, "both are on their streams", func() bool { return m.c.Batches.Load()+m.c.Copies.Load() == 2 })
	faults := func(f func()) (fault bool) {
		defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
		defer func() { fault = recover() != nil }()
		f()
		return
	}
	require.True(t, faults(func() { _ = host[0] + 1; sink = host[0] }), "the target of a store")
	require.False(t, faults(func() { sink = host[n] }), "the source of a load may be read")
	require.True(t, faults(func() { host[n] = 1 }), "but not written")
	m.letGo()
	require.NoError(t, wait(t, store))
	require.NoError(t, wait(t, load))
	require.False(t, faults(func() { host[0], host[n] = 1, 1 }))
}

var sink byte

func TestCUDAWithoutDriver(t *testing.T) {
	_, err := OpenCUDA(CUDAOptions{Library: filepath.Join(t.TempDir(), "libcuda.so.1")})
	require.ErrorIs(t, err, txn.ErrUnsupported)
	require.ErrorContains(t, err, "libcuda.so.1")
	require.Equal(t, 1, classesOf(err))

	for _, c := range []struct {
		name  string
		set   func(*fakecuda.Control)
		class error
		says  string
	}{
		{"old", func(c *fakecuda.Control) { c.Version.Store(11030) }, txn.ErrUnsupported, "version 11.3"},
		{"no device", func(c *fakecuda.Control) { c.InitResult.Store(100) }, txn.ErrNotFound, "no device"},
		{"none listed", func(c *fakecuda.Control) { c.Devices.Store(0) }, txn.ErrNotFound, "no device"},
		{"not permitted", func(c *fakecuda.Control) { c.InitResult.Store(800) }, txn.ErrPermission, "800"},
		{"broken", func(c *fakecuda.Control) { c.InitResult.Store(999) }, txn.ErrIO, "999"},
	} {
		t.Run(c.name, func(t *testing.T) {
			path, control := installFake(t)
			c.set(control)
			_, err := OpenCUDA(CUDAOptions{Library: path})
			require.ErrorIs(t, err, c.class)
			require.ErrorContains(t, err, c.says)
			require.Equal(t, 1, classesOf(err))
		})
	}
}

// A driver without a function that is needed is refused by name; without one that is not, everything else works.
func TestCUDAMissingSymbols(t *testing.T) {
	if _, err := fakecuda.Compiler(); err != nil {
		t.Skip("the fake CUDA driver is built by a C compiler: ", err)
	}
	build := func(t *testing.T, without ...string) string {
		object, err := fakeObject()
		require.NoError(t, err)
		library := filepath.Join(t.TempDir(), "lacking.so")
		require.NoError(t, fakecuda.LinkWithout(object, library, without...))
		path := filepath.Join(t.TempDir(), "libcuda.so.1")
		_, err = fakecuda.Install(library, path)
		require.NoError(t, err)
		return path
	}
	t.Run("needed", func(t *testing.T) {
		_, err := OpenCUDA(CUDAOptions{Library: build(t, "cuEventQuery")})
		require.ErrorIs(t, err, txn.ErrUnsupported)
		require.ErrorContains(t, err, "cuEventQuery")
	})
	t.Run("optional", func(t *testing.T) {
		path := build(t, "cuGetProcAddress_v2", "cuMemcpyBatchAsync", "cuMemcpy2DAsync_v2", "cuLaunchKernel", "cuIpcOpenMemHandle_v2", "cuMemMap", "cuMemcpyBatchAsync_v2")
		b, err := OpenCUDA(CUDAOptions{Library: path})
		require.NoError(t, err)
		e, err := Open(b, Options{Logger: quiet})
		require.NoError(t, err)
		defer closeEngine(t, e)
		m := &fakeMachine{e: e, b: b.(*cuda), c: &fakecuda.Control{}}
		host := pinned(t, e, 3*4096)
		device := m.alloc(t, 0, 3*4096)
		require.NoError(t, wait(t, submit(t, e, Batch{Direction: Load, Regions: []Region{{device, host[:4096]}, {device + 8192, host[8192:]}}})))
		_, err = e.OpenImport(t.Context(), 0, ImportHandle{IPC: new([64]byte)})
		require.ErrorIs(t, err, txn.ErrUnsupported)
		_, err = e.OpenImport(t.Context(), 0, ImportHandle{File: os.Stdin, Bytes: 1})
		require.ErrorIs(t, err, txn.ErrUnsupported)
		require.Equal(t, []string{"CUDA 13.0", "batch copy: none"}, e.Devices()[0].Features)
	})
	t.Run("batch by symbol", func(t *testing.T) {
		b, err := OpenCUDA(CUDAOptions{Library: build(t, "cuGetProcAddress_v2")})
		require.NoError(t, err)
		require.Contains(t, b.Devices()[0].Features, "batch copy: 12.8 ABI")
	})
}

func TestCUDADevicesByUUID(t *testing.T) {
	path, control := installFake(t)
	control.Devices.Store(3)
	uuid := func(i byte) [16]byte { return [16]byte([]byte("fake GPU, no. \x00" + string(rune(i)))) }
	b, err := OpenCUDA(CUDAOptions{Library: path, Devices: [][16]byte{uuid(2), uuid(0)}})
	require.NoError(t, err)
	e, err := Open(b, Options{})
	require.NoError(t, err)
	defer closeEngine(t, e)
	require.Equal(t, "fake device 2", e.Devices()[0].Name)
	i, err := e.DeviceByUUID(uuid(0))
	require.NoError(t, err)
	require.Equal(t, 1, i)
	_, err = e.DeviceByUUID(uuid(1))
	require.ErrorIs(t, err, txn.ErrNotFound)
	_, err = OpenCUDA(CUDAOptions{Library: path, Devices: [][16]byte{uuid(7)}})
	require.ErrorIs(t, err, txn.ErrNotFound)
	require.EqualValues(t, 0, control.Contexts.Load(), "a device that is not used costs nothing")
}

// A driver that does not take the kernel, or fails in the calibration, costs speed and nothing else.
func TestCUDAWithoutKernel(t *testing.T) {
	r := fakeRig(CUDAOptions{}, func(c *fakecuda.Control) { c.ModuleResult.Store(222) })
	m := r.open(t, Options{}).(*fakeMachine)
	host := pinned(t, m.e, 4096)
	device := m.alloc(t, 0, 4096)
	require.NoError(t, wait(t, submit(t, m.e, Batch{Direction: Load, Regions: []Region{{device, host}}})))
	require.Zero(t, m.c.Kernels.Load())

	for k := 1; k <= 40; k += 3 {
		m := fakeRig(CUDAOptions{}, func(c *fakecuda.Control) { c.DelayMicroseconds.Store(0) }).open(t, Options{}).(*fakeMachine)
		device := m.alloc(t, 0, 4096)
		m.failCall(k)
		_, err := m.e.Submit(t.Context(), Batch{Direction: Load})
		if err != nil {
			require.Equal(t, 1, classesOf(err), "%v", err)
		}
		m.c.FailAt.Store(0)
		host := pinned(t, m.e, 4096)
		require.NoError(t, wait(t, submit(t, m.e, Batch{Direction: Load, Regions: []Region{{device, host}}})))
	}
}

// A launch that finds its descriptors changed copies the wrong bytes, so this fails if a slot is used again too early.
func TestCUDAKernelDescriptorsLiveUntilConsumed_GPU06(t *testing.T) {
	m := fakeRig(CUDAOptions{KernelBytes: 64}, nil).open(t, Options{Limits: Limits{ChunkRuns: 16, Lanes: 1, LaneDepth: 3}}).(*fakeMachine)
	const runs, size = 16 * 11, 64
	host := pinned(t, m.e, 32<<10)
	noise(rand.New(rand.NewPCG(2, 2)), host)
	device := m.alloc(t, 0, runs*2*size)
	want := bytes.Repeat([]byte{poison}, runs*2*size)
	var regions []Region
	for i := range runs {
		piece := host[2*i*size : (2*i+1)*size]
		regions = append(regions, Region{device + uint64(2*i*size), piece})
		copy(want[2*i*size:], piece)
	}
	m.hold()
	x := submit(t, m.e, Batch{Direction: Load, Regions: regions})
	eventually(t, "the lane is full", func() bool { return m.c.Kernels.Load() == 3 })
	m.letGo()
	require.NoError(t, wait(t, x))
	require.EqualValues(t, 11, m.c.Kernels.Load())
	got := make([]byte, len(want))
	m.peek(t, 0, device, got)
	require.True(t, bytes.Equal(want, got))
}

// Memory of another process is copied from and to; it cannot be closed under a copy; and the death of the exporter hurts
// nobody: what is mapped stays, what is opened afterwards is refused, other transfers go on.
func TestCUDAImportFromAnotherProcess(t *testing.T) {
	m := fakeRig(CUDAOptions{KernelBytes: -1}, nil).open(t, Options{}).(*fakeMachine)
	library, _ := installFake(t) // its own, so that it does not count with ours
	x := startExporter(t, library)
	host := pinned(t, m.e, 64<<10)
	own := m.alloc(t, 0, 64<<10)
	want := make([]byte, 64<<10)
	for i := range want {
		want[i] = exportedByte(i)
	}

	_, err := m.e.OpenImport(t.Context(), 0, ImportHandle{})
	require.ErrorIs(t, err, txn.ErrInvalid)
	_, err = m.e.OpenImport(t.Context(), 0, ImportHandle{File: x.file})
	require.ErrorIs(t, err, txn.ErrInvalid)
	_, err = m.e.OpenImport(t.Context(), 1, ImportHandle{IPC: &x.handle})
	require.ErrorIs(t, err, txn.ErrInvalid, "another device")

	byIPC, err := m.e.OpenImport(t.Context(), 0, ImportHandle{IPC: &x.handle})
	require.NoError(t, err)
	require.EqualValues(t, len(want), byIPC.Bytes())
	_, err = m.e.OpenImport(t.Context(), 0, ImportHandle{IPC: &x.handle})
	require.ErrorIs(t, err, txn.ErrConflict, "it is open")
	byFile, err := m.e.OpenImport(t.Context(), 0, ImportHandle{File: x.file, Bytes: x.bytes})
	require.NoError(t, err)

	for _, im := range []*DeviceMemory{byIPC, byFile} {
		clear(host)
		m.hold()
		up := submit(t, m.e, Batch{Direction: Store, Regions: []Region{{im.Address(), host}}})
		require.ErrorIs(t, im.Close(), txn.ErrBusy, "a copy reads it")
		m.letGo()
		require.NoError(t, wait(t, up))
		require.True(t, bytes.Equal(want, host))
		require.NoError(t, wait(t, submit(t, m.e, Batch{Direction: Load, Regions: []Region{{im.Address() + 4096, host[:4096]}}})))
	}

	m.hold()
	during := submit(t, m.e, Batch{Direction: Store, Regions: []Region{{byIPC.Address(), host}}})
	eventually(t, "it is in flight", func() bool { return m.e.Stats()[0].InFlightBytes == 64<<10 })
	x.kill()
	m.letGo()
	require.NoError(t, wait(t, during), "what is mapped stays")
	require.NoError(t, byIPC.Close())
	require.NoError(t, byIPC.Close())
	require.NoError(t, byFile.Close())
	_, err = m.e.OpenImport(t.Context(), 0, ImportHandle{IPC: &x.handle})
	require.ErrorIs(t, err, txn.ErrInvalid, "the exporter is gone")
	again, err := m.e.OpenImport(t.Context(), 0, ImportHandle{File: x.file, Bytes: x.bytes})
	require.NoError(t, err, "a descriptor keeps the memory")
	require.NoError(t, again.Close())
	left, err := m.e.OpenImport(t.Context(), 0, ImportHandle{File: x.file, Bytes: x.bytes})
	require.NoError(t, err)
	require.NoError(t, x.file.Close())
	_, err = m.e.OpenImport(t.Context(), 0, ImportHandle{File: x.file, Bytes: x.bytes})
	require.ErrorIs(t, err, txn.ErrInvalid, "it is closed")
	require.NoError(t, wait(t, submit(t, m.e, Batch{Direction: Store, Regions: []Region{{own, host}}})))
	closeEngine(t, m.e)
	require.NoError(t, left.Close(), "the engine has closed it")
	require.Zero(t, m.c.Imports.Load())
	m.verify(t)
}

// An order that hangs holds up nobody else's, and Close does not wait for it longer than it is given.
func TestCUDAHungProducer(t *testing.T) {
	m := fakeRig(CUDAOptions{KernelBytes: -1}, nil).open(t, Options{}).(*fakeMachine)
	host := pinned(t, m.e, 4096)
	device := m.alloc(t, 0, 4096)
	var streams []testStream
	for i := range 12 {
		s := m.newStream(t, 0)
		s.fill(device, 4096, byte(i+1))
		streams = append(streams, s)
		submit(t, m.e, Batch{Direction: Store, Regions: []Region{{device, host}}, After: Order{Stream: s.handle()}})
	}
	s := m.newStream(t, 0)
	s.fill(device, 4096, 50)
	free := submit(t, m.e, Batch{Direction: Store, Regions: []Region{{device, host}}, After: Order{Stream: s.handle()}})
	s.start()
	require.NoError(t, wait(t, free))
	ctx, cancel := contextFor(20 * time.Millisecond)
	defer cancel()
	require.NoError(t, m.e.Close(ctx), "nothing was issued, so nothing is in quarantine")
	for _, x := range append(streams, s) {
		x.start()
		x.close()
	}
}

// A device that hangs while it is opened holds callers up until their deadline, and Close until its own.
func TestCUDAHangsWhileItIsOpened(t *testing.T) {
	m := fakeRig(CUDAOptions{}, nil).open(t, Options{}).(*fakeMachine)
	m.hold() // and with it the calibration
	for range 2 {
		_, err := m.e.Submit(t.Context(), Batch{Direction: Load, Deadline: time.Now().Add(10 * time.Millisecond)})
		require.ErrorIs(t, err, txn.ErrBusy)
		require.ErrorIs(t, err, context.DeadlineExceeded)
	}
	ctx, cancel := contextFor(10 * time.Millisecond)
	defer cancel()
	require.ErrorIs(t, m.e.Close(ctx), txn.ErrBusy)
	m.letGo()
}

// A copy whose event could not be recorded is waited for by draining its stream; if that fails too, nobody knows when it
// ends, and the device is lost.
func TestCUDADrainThatFailsIsFatal_GPU03(t *testing.T) {
	m := fakeRig(CUDAOptions{KernelBytes: -1}, nil).open(t, Options{}).(*fakeMachine)
	host := pinned(t, m.e, 4096)
	device := m.alloc(t, 0, 4096)
	b := Batch{Direction: Load, Regions: []Region{{device, host}}}
	require.NoError(t, wait(t, submit(t, m.e, b)))

	m.failCall(3) // set current, copy, and then record
	x := submit(t, m.e, b)
	require.ErrorContains(t, wait(t, x), "cuEventRecord")
	require.False(t, x.Quarantined(), "the stream was drained")

	m.hold()
	m.c.FailMore.Store(100)
	m.failCall(3)
	x = submit(t, m.e, b)
	require.ErrorIs(t, wait(t, x), ErrDeviceLost)
	require.True(t, x.Quarantined())
	m.c.FailAt.Store(0)
	require.ErrorIs(t, m.e.Close(t.Context()), ErrDeviceLost)
	m.c.Lost[0].Store(1) // so that the machine is not expected to close
}

// A batch waits for an event of the caller, and one that fails fails it.
func TestCUDAEventOrder_GPU03(t *testing.T) {
	m := fakeRig(CUDAOptions{KernelBytes: -1}, nil).open(t, Options{}).(*fakeMachine)
	host := pinned(t, m.e, 4096)
	device := m.alloc(t, 0, 4096)
	s := m.newStream(t, 0).(*fakeStream)
	s.fill(device, 4096, 7)
	event, err := s.ctx.Event()
	require.NoError(t, err)
	require.NoError(t, s.ctx.EventRecord(event, s.stream))
	x := submit(t, m.e, Batch{Direction: Store, Regions: []Region{{device, host}}, After: Order{Event: event, Stream: s.stream}})
	require.False(t, isClosed(x.Done()))
	s.start()
	require.NoError(t, wait(t, x))
	require.Equal(t, bytes.Repeat([]byte{7}, 4096), host)
	require.NoError(t, s.ctx.EventDestroy(event))
	s.close()
}

func TestDriverErrorsHaveOneClass(t *testing.T) {
	for c := driver.Code(1); c < 1000; c++ {
		err := driverError(c)
		require.Equal(t, 1, classesOf(err), "%v", err)
		require.True(t, strings.HasPrefix(err.Error(), "CUDA driver: "))
		if c.Fatal() {
			require.ErrorIs(t, err, ErrDeviceLost)
		}
	}
	require.NoError(t, driverError(nil))
}

func TestMeasureCUDAOnFake(t *testing.T) {
	testMeasure(t, fakeRig(CUDAOptions{KernelBytes: -1}, nil), MethodSingle, MethodBatch, MethodPlane)
	testMeasure(t, fakeRig(CUDAOptions{KernelBytes: 4096}, nil), MethodSingle, MethodBatch, MethodPlane, MethodKernel)
}

// What check.sh runs on a machine with a GPU runs on the fake driver too, so that it is known to work before it gets there.
func TestDeviceTestsOnFake(t *testing.T) {
	if deviceLibrary() != "" {
		t.Skip("this is that run")
	}
	path, control := installFake(t)
	control.Devices.Store(1)
	self, err := os.Executable()
	require.NoError(t, err)
	c := exec.Command(self, "-test.run=^TestDevice|^TestConformance/^cuda$", "-test.v", "-test.timeout=60s")
	// The search for leaks at the end, under -asan, reads all memory, some of which nobody may.
	c.Env = append(os.Environ(), "HOLDFAST_GPU_LIBRARY="+path, "HOLDFAST_GPU_SWEEP=1", "ASAN_OPTIONS=detect_leaks=0")
	out, err := c.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "| load | 4 KiB | 16 |")
	require.Contains(t, string(out), "4 MiB in blocks of 64 KiB on fake device 0")
	require.Contains(t, string(out), "checkpoint of 4 MiB in blocks of 64 KiB on fake device 0")
	require.Zero(t, control.Violations.Load(), control.Violation())
}
