//go:build cgo && linux

package gpu

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/gpu/internal/driver"
	"github.com/holdfast-db/holdfast/gpu/internal/fakecuda"
)

// The tests named TestDevice are for a machine with a GPU and are what check.sh runs there, with the promises on rig "cuda". HOLDFAST_GPU_LIBRARY names
// another driver library, by which they are themselves tested on the fake one.
func deviceLibrary() string { return os.Getenv("HOLDFAST_GPU_LIBRARY") }

func init() {
	found := sync.OnceValue(func() bool {
		_, err := OpenCUDA(CUDAOptions{Library: deviceLibrary()})
		return err == nil
	})
	rigs = append(rigs, func() (rig, bool) { return deviceRig(CUDAOptions{KernelBytes: 16 << 10}), found() })
}

// openDevice opens the machine's driver, or skips the test where there is none.
func openDevice(t testing.TB, o CUDAOptions) *cuda {
	o.Library = deviceLibrary()
	b, err := OpenCUDA(o)
	if err != nil {
		t.Skip("no GPU: ", err)
	}
	return b.(*cuda)
}

// deviceMachine is a machine with a real device, which cannot be held or broken.
type deviceMachine struct {
	fakeMachine
}

func (m *deviceMachine) hold()             {}
func (m *deviceMachine) letGo()            {}
func (m *deviceMachine) failCall(int)      {}
func (m *deviceMachine) calls() int        { return 0 }
func (m *deviceMachine) lose(int)          {}
func (m *deviceMachine) verify(testing.TB) {}

func (m *deviceMachine) alloc(t testing.TB, device, n int) uint64 {
	ctx := m.ctx(t, device)
	a, err := ctx.Alloc(int64(n))
	require.NoError(t, err)
	require.NoError(t, ctx.Copy(int(Load), a, bytes.Repeat([]byte{poison}, n)))
	t.Cleanup(func() { _ = ctx.Free(a) })
	return a
}

func (m *deviceMachine) poke(t testing.TB, device int, address uint64, b []byte) {
	require.NoError(t, m.ctx(t, device).Copy(int(Load), address, b))
}

func (m *deviceMachine) peek(t testing.TB, device int, address uint64, b []byte) {
	require.NoError(t, m.ctx(t, device).Copy(int(Store), address, b))
}

// deviceStream keeps its fills back by work in front of them that takes the device some 100 ms.
type deviceStream struct {
	t      testing.TB
	ctx    *driver.Context
	stream uintptr
	busy   uint64
}

func (m *deviceMachine) newStream(t testing.TB, device int) testStream {
	if m.c != nil {
		return m.fakeMachine.newStream(t, device)
	}
	ctx := m.ctx(t, device)
	s, err := ctx.Stream(false)
	require.NoError(t, err)
	x := &deviceStream{t: t, ctx: ctx, stream: s}
	const bytes, fills = 256 << 20, 1000
	x.busy, err = ctx.Alloc(bytes)
	require.NoError(t, err)
	for range fills {
		require.NoError(t, ctx.Fill(s, x.busy, 0, bytes))
	}
	return x
}

func (s *deviceStream) handle() uintptr { return s.stream }
func (s *deviceStream) start()          {}

func (s *deviceStream) fill(address uint64, bytes int, value byte) {
	require.NoError(s.t, s.ctx.Fill(s.stream, address, value, int64(bytes)))
}

func (s *deviceStream) close() {
	require.NoError(s.t, s.ctx.StreamWait(s.stream))
	require.NoError(s.t, s.ctx.StreamDestroy(s.stream))
	require.NoError(s.t, s.ctx.Free(s.busy))
}

func deviceRig(o CUDAOptions) rig {
	return rig{name: "cuda", open: func(t testing.TB, engine Options) machine {
		m := &deviceMachine{}
		m.b = openDevice(t, o)
		if deviceLibrary() != "" {
			c, err := fakecuda.Attach(deviceLibrary())
			require.NoError(t, err)
			m.c = c
		}
		if engine.Logger == nil {
			engine.Logger = quiet
		}
		var err error
		m.e, err = Open(m.b, engine)
		require.NoError(t, err)
		t.Cleanup(func() { closeEngine(t, m.e) })
		return m
	}}
}

// TestDeviceABI says what was found, and refuses a driver that has less than this package is made for.
func TestDeviceABI(t *testing.T) {
	b := openDevice(t, CUDAOptions{})
	for i, d := range b.Devices() {
		t.Logf("device %d: %s, %x, %d MiB, NUMA node %d, %d copy engines: %s", i, d.Name, d.UUID, d.Bytes>>20, d.NUMANode, d.CopyEngines, strings.Join(d.Features, ", "))
	}
	ctx, err := b.context(0)
	require.NoError(t, err)
	_, err = ctx.Module(kernelPTX, "holdfast_copy")
	require.NoError(t, err, "the PTX of the kernel")
	d := &cudaDevice{c: b, ctx: ctx}
	d.kernel, err = ctx.Module(kernelPTX, "holdfast_copy")
	require.NoError(t, err)
	threshold, err := d.tryCalibrate()
	require.NoError(t, err)
	t.Logf("the kernel copies blocks of up to %d bytes to the device", threshold)
	require.NoError(t, b.close())
}

func TestDeviceMethodsAreExact(t *testing.T) {
	openDevice(t, CUDAOptions{})
	for m := MethodSingle; m <= MethodKernel; m++ {
		t.Run(m.String(), func(t *testing.T) { testScatterGather(t, deviceRig(CUDAOptions{Method: m})) })
	}
}

func TestDeviceImport(t *testing.T) {
	m := deviceRig(CUDAOptions{}).open(t, Options{}).(*deviceMachine)
	library := deviceLibrary()
	if library == "" {
		library = "libcuda.so.1"
	}
	x := startExporter(t, library)
	host := pinned(t, m.e, exportedBytes)
	for name, h := range map[string]ImportHandle{"by IPC handle": {IPC: &x.handle}, "by file": {File: x.file, Bytes: x.bytes}} {
		t.Run(name, func(t *testing.T) {
			clear(host)
			im, err := m.e.OpenImport(t.Context(), 0, h)
			require.NoError(t, err)
			require.NoError(t, wait(t, submit(t, m.e, Batch{Direction: Store, Regions: []Region{{im.Address(), host}}})))
			for i := range host {
				require.Equal(t, exportedByte(i), host[i], "byte %d", i)
			}
			require.NoError(t, im.Close())
		})
	}
}

// TestDeviceBlocks stores and loads 2 GiB in blocks of 64 KiB, as a checkpoint of a paged cache is, in both directions
// one after the other and at once, and compares.
func TestDeviceBlocks(t *testing.T) {
	if os.Getenv("HOLDFAST_GPU_SWEEP") == "" {
		t.Skip("part of check.sh")
	}
	m := deviceRig(CUDAOptions{}).open(t, Options{}).(*deviceMachine)
	const block = 64 << 10
	total := deviceBytes(2 << 30)
	host := pinned(t, m.e, 2*total)
	device := m.alloc(t, 0, total)
	first, second := make([]Region, 0, total/block), make([]Region, 0, total/block)
	for at := 0; at < total; at += block {
		for i := at; i < at+block; i += 4096 {
			host[i] = byte(i >> 12)
		}
		// The blocks of the device in reverse, so that none are merged.
		address := device + uint64(total-block-at)
		first = append(first, Region{address, host[at : at+block]})
		second = append(second, Region{address, host[total+at : total+at+block]})
	}
	speed := func(f func()) float64 {
		begin := time.Now()
		f()
		return float64(total) / time.Since(begin).Seconds() / 1e9
	}
	load := speed(func() { require.NoError(t, wait(t, submit(t, m.e, Batch{Direction: Load, Regions: first}))) })
	store := speed(func() { require.NoError(t, wait(t, submit(t, m.e, Batch{Direction: Store, Regions: second}))) })
	require.True(t, bytes.Equal(host[:total], host[total:]), "bytes differ")
	half := len(first) / 2
	both := speed(func() {
		up := submit(t, m.e, Batch{Direction: Store, Regions: second[half:]})
		down := submit(t, m.e, Batch{Direction: Load, Regions: first[:half]})
		require.NoError(t, wait(t, up))
		require.NoError(t, wait(t, down))
	})
	fmt.Printf("\n%d MiB in blocks of 64 KiB on %s, GB/s: load %.1f, store %.1f, both at once %.1f\n", total>>20, m.e.Devices()[0].Name, load, store, both)
}

// deviceBytes is n, or little where the device is the fake one.
func deviceBytes(n int) int {
	if deviceLibrary() != "" {
		return n >> 9
	}
	return n
}

// TestDeviceSweep prints the table of docs/gpu.md.
func TestDeviceSweep(t *testing.T) {
	if os.Getenv("HOLDFAST_GPU_SWEEP") == "" {
		t.Skip("part of check.sh")
	}
	m := deviceRig(CUDAOptions{}).open(t, Options{Deadline: time.Minute}).(*deviceMachine)
	shapes := []Shape{{int64(deviceBytes(256 << 20)), 1}}
	for _, size := range []int64{4 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10, 512 << 10, 2 << 20, 16 << 20} {
		for _, count := range []int{16, 128, 1000} {
			if size*int64(count) <= int64(deviceBytes(2<<30)) {
				shapes = append(shapes, Shape{size, count})
			}
		}
	}
	samples, err := m.e.Measure(t.Context(), 0, shapes, 4)
	require.NoError(t, err)
	info := m.e.Devices()[0]
	fmt.Printf("\n%s, %s; GB/s\n\n| direction | block | blocks | engine | single | batch | 2-D | kernel | engine / best |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|\n", info.Name, strings.Join(info.Features, ", "))
	for _, s := range samples {
		best := 0.0
		fmt.Printf("| %v | %d KiB | %d | %.2f |", s.Direction, s.BlockBytes>>10, s.Blocks, s.Engine/1e9)
		for m := MethodSingle; m <= MethodKernel; m++ {
			best = max(best, s.Bare[m])
			if speed, ok := s.Bare[m]; ok {
				fmt.Printf(" %.2f |", speed/1e9)
			} else {
				fmt.Print(" |")
			}
		}
		fmt.Printf(" %.2f |\n", s.Engine/best)
	}
}
