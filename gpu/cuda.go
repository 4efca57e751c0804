//go:build cgo && linux

package gpu

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/holdfast-db/holdfast/gpu/internal/driver"
	"github.com/holdfast-db/holdfast/txn"
)

// cuda is the backend for NVIDIA GPUs. It uses the primary context of each device, which the frameworks of the process
// use too, so that their streams, events and memory can be used here.
//
// The shared promises of package driver are kept one level up: descriptors lie in page-locked memory that belongs to a
// slot of a lane, a slot is used again only after the wait for its event has succeeded, and what a lost context may
// still touch is never given back, by not calling the driver for it any more.
type cuda struct {
	d       *driver.Driver
	o       CUDAOptions
	devices []driver.Device
	infos   []DeviceInfo

	contexts []cudaContext // by device
}

// cudaContext is the context of a device, once it is used. Each has a lock of its own, since a driver may hang in making
// one.
type cudaContext struct {
	mu  sync.Mutex // held while it is made
	ctx atomic.Pointer[driver.Context]
}

// OpenCUDA opens the CUDA driver. Without one that can be used it fails, and the process goes on without: with
// ErrUnsupported if the library is missing, older than CUDA 11.4 or incomplete, with ErrPermission if the system keeps the
// devices from this process, with ErrNotFound if there is no device, or none with a wanted UUID.
func OpenCUDA(o CUDAOptions) (Backend, error) {
	if o.Library == "" {
		o.Library = "libcuda.so.1"
	}
	if o.KernelBlocks == 0 {
		o.KernelBlocks = 12
	}
	if o.KernelBlocks < 0 || o.KernelBlocks > 1024 || o.Method > MethodKernel {
		return nil, fmt.Errorf("gpu: CUDA backend with %d kernel blocks (want 1 to 1024) and %v: %w", o.KernelBlocks, o.Method, txn.ErrInvalid)
	}
	d, err := driver.Load(o.Library)
	if err != nil {
		return nil, loadError(err)
	}
	all, err := d.Devices()
	if err != nil {
		return nil, fmt.Errorf("gpu: list CUDA devices: %w", driverError(err))
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("gpu: the CUDA driver has no device: %w", txn.ErrNotFound)
	}
	c := &cuda{d: d, o: o, devices: all}
	if len(o.Devices) > 0 {
		c.devices = nil
		for _, uuid := range o.Devices {
			i := slices.IndexFunc(all, func(d driver.Device) bool { return d.UUID == uuid })
			if i < 0 {
				return nil, fmt.Errorf("gpu: no CUDA device %x among %d: %w", uuid, len(all), txn.ErrNotFound)
			}
			c.devices = append(c.devices, all[i])
		}
	}
	for _, dev := range c.devices {
		c.infos = append(c.infos, DeviceInfo{
			Name: dev.Name, UUID: dev.UUID, Bytes: dev.Bytes, NUMANode: dev.NUMANode, CopyEngines: dev.CopyEngines,
			Features: c.features(dev),
		})
	}
	c.contexts = make([]cudaContext, len(c.devices))
	return c, nil
}

// loadError says in the database's terms why there is no driver.
func loadError(err error) error {
	var load *driver.LoadError
	if !errors.As(err, &load) {
		return fmt.Errorf("gpu: CUDA: %w", classified(err))
	}
	switch load.Code {
	case 1, driver.NotSupported:
		return fmt.Errorf("gpu: no usable CUDA driver: %w: %w", err, txn.ErrUnsupported)
	case driver.NotPermitted:
		return fmt.Errorf("gpu: CUDA: %w: %w", err, txn.ErrPermission)
	case driver.NoDevice:
		// The driver says the same when it may not open its device files.
		if f, denied := os.OpenFile("/dev/nvidiactl", os.O_RDWR, 0); denied == nil {
			_ = f.Close()
		} else if errors.Is(denied, os.ErrPermission) {
			return fmt.Errorf("gpu: CUDA: %w: %w: %w", err, denied, txn.ErrPermission)
		}
		return fmt.Errorf("gpu: CUDA: %w: no device: %w", err, txn.ErrNotFound)
	}
	return fmt.Errorf("gpu: CUDA: %w: %w", err, txn.ErrIO)
}

// driverError gives a result of the driver its class.
func driverError(err error) error {
	if err == nil {
		return nil
	}
	var c driver.Code
	if !errors.As(err, &c) {
		return classified(err)
	}
	class := txn.ErrIO
	switch {
	case c.Fatal():
		class = ErrDeviceLost
	case c == driver.InvalidValue, c == driver.InvalidDevice, c == driver.InvalidContext, c == driver.InvalidHandle:
		class = txn.ErrInvalid
	case c == driver.OutOfMemory:
		class = txn.ErrNoSpace
	case c == driver.NoDevice:
		class = txn.ErrNotFound
	case c == driver.NotPermitted:
		class = txn.ErrPermission
	case c == driver.NotSupported:
		class = txn.ErrUnsupported
	}
	return fmt.Errorf("%w: %w", err, class)
}

func (c *cuda) features(dev driver.Device) []string {
	v := c.d.Version()
	out := []string{fmt.Sprintf("CUDA %d.%d", v/1000, v%1000/10), "batch copy: " + batchName(c.batch())}
	for _, f := range []struct {
		has  bool
		name string
	}{
		{c.d.Features()&driver.Kernel != 0 && dev.HostPointerOK, "copy kernel"},
		{c.d.Features()&driver.Plane != 0, "2-D copy"},
		{c.d.Features()&driver.IPC != 0, "import by IPC handle"},
		{c.d.Features()&driver.Shareable != 0 && dev.POSIXFD, "import by file descriptor"},
	} {
		if f.has {
			out = append(out, f.name)
		}
	}
	return out
}

// batch gives the ABI of the batch copy that is used: the older one where there is a choice, since it tells which copy
// was refused.
func (c *cuda) batch() driver.Features {
	f := c.d.Features()
	if f&driver.BatchV1 != 0 {
		return driver.BatchV1
	}
	return f & driver.BatchV2
}

func batchName(f driver.Features) string {
	switch f {
	case driver.BatchV1:
		return "12.8 ABI"
	case driver.BatchV2:
		return "13.0 ABI"
	}
	return "none"
}

// Name gives "cuda".
func (c *cuda) Name() string { return "cuda" }

// Devices describes the chosen devices.
func (c *cuda) Devices() []DeviceInfo { return c.infos }

func (c *cuda) mustPin() bool { return true }

// context gives the context of a device, retaining it at the first use.
func (c *cuda) context(index int) (*driver.Context, error) {
	one := &c.contexts[index]
	one.mu.Lock()
	defer one.mu.Unlock()
	if ctx := one.ctx.Load(); ctx != nil {
		return ctx, nil
	}
	ctx, err := c.d.Retain(c.devices[index])
	if err != nil {
		return nil, driverError(err)
	}
	one.ctx.Store(ctx)
	return ctx, nil
}

// each calls f with contexts that are in use until one of them is not lost, since memory is pinned for all of them; with
// none in use, it begins with that of the first device.
func (c *cuda) each(f func(*driver.Context) error) (err error) {
	used := false
	for i := range c.contexts {
		ctx := c.contexts[i].ctx.Load()
		if ctx == nil {
			continue
		}
		used = true
		if err = driverError(f(ctx)); !errors.Is(err, ErrDeviceLost) {
			return err
		}
	}
	if used {
		return err
	}
	ctx, err := c.context(0)
	if err != nil {
		return err
	}
	return driverError(f(ctx))
}

func (c *cuda) pin(mem []byte) error {
	if page := syscall.Getpagesize(); page > pinAlign {
		return fmt.Errorf("pages of %d bytes: %w", page, txn.ErrUnsupported)
	}
	return c.each(func(ctx *driver.Context) error { return ctx.HostRegister(mem) })
}

func (c *cuda) unpin(mem []byte) error {
	return c.each(func(ctx *driver.Context) error { return ctx.HostUnregister(mem) })
}

func (c *cuda) close() (err error) {
	for i := range c.contexts {
		ctx := c.contexts[i].ctx.Swap(nil)
		if ctx == nil {
			continue
		}
		if failed := ctx.Release(); failed != nil {
			err = combined(err, fmt.Errorf("gpu: release the context of CUDA device %d: %w", i, driverError(failed)))
		}
	}
	return err
}

// cudaDevice is an opened device.
type cudaDevice struct {
	c      *cuda
	ctx    *driver.Context
	limits Limits
	gates  gateWatcher

	kernel      uintptr // 0 if there is none
	kernelBytes int64   // the largest block of a Load that it copies
}

func (c *cuda) open(index int, l Limits) (device, error) {
	ctx, err := c.context(index)
	if err != nil {
		return nil, err
	}
	d := &cudaDevice{c: c, ctx: ctx, limits: l}
	d.gates.ctx = ctx
	if c.d.Features()&driver.Kernel != 0 && c.devices[index].HostPointerOK && c.o.KernelBytes >= 0 {
		// Without the kernel everything works: a driver that does not take the PTX is no reason to fail, a lost one is.
		d.kernel, err = ctx.Module(kernelPTX, "holdfast_copy")
		if err = driverError(err); errors.Is(err, ErrDeviceLost) {
			return nil, err
		} else if err != nil {
			d.kernel = 0
		}
	}
	switch {
	case d.kernel == 0:
	case c.o.KernelBytes > 0 || c.o.Method == MethodKernel:
		d.kernelBytes = c.o.KernelBytes
	case c.o.Method == MethodAuto:
		if d.kernelBytes, err = d.calibrate(); err != nil {
			return nil, err
		}
	}
	return d, nil
}

func (d *cudaDevice) close(drained bool) { d.gates.close(drained) }

func (d *cudaDevice) openImport(h ImportHandle) (uint64, int64, func() error, error) {
	if h.IPC != nil {
		address, bytes, err := d.ctx.IPCOpen(*h.IPC)
		return address, bytes, func() error { return driverError(d.ctx.IPCClose(address)) }, driverError(err)
	}
	raw, err := h.File.SyscallConn()
	if err != nil {
		return 0, 0, nil, fmt.Errorf("%w: %w", err, txn.ErrInvalid)
	}
	var m driver.Mapping
	var failed error
	if err := raw.Control(func(fd uintptr) { m, failed = d.ctx.FDOpen(int(fd), h.Bytes) }); err != nil {
		return 0, 0, nil, fmt.Errorf("%w: %w", err, txn.ErrInvalid)
	}
	return m.Device, m.Bytes, func() error { return driverError(d.ctx.FDClose(m)) }, driverError(failed)
}

func (d *cudaDevice) allocate(bytes int64) (uint64, func() error, error) {
	address, err := d.ctx.Alloc(bytes)
	return address, func() error { return driverError(d.ctx.Free(address)) }, driverError(err)
}
