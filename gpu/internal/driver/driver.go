//go:build cgo && linux

package driver

/*
#cgo CFLAGS: -std=c11 -Wall -Wextra -O2 -fno-strict-aliasing
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "shim.h"
*/
import "C"

import (
	"unsafe"
)

// Driver is an opened driver library. It stays open for the life of the process.
type Driver struct{ table *C.hf_driver }

// Load opens a driver library and starts it. The error is a *LoadError.
func Load(path string) (*Driver, error) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	var table *C.hf_driver
	var why [512]C.char
	if r := C.hf_load(name, &table, &why[0], C.size_t(len(why))); r != 0 {
		return nil, &LoadError{Reason: C.GoString(&why[0]), Code: Code(r)}
	}
	return &Driver{table}, nil
}

// Version gives the newest CUDA version that the driver supports, as 1000 × major + 10 × minor.
func (d *Driver) Version() int { return int(C.hf_version(d.table)) }

// Features gives what the driver can do.
func (d *Driver) Features() Features { return Features(C.hf_features(d.table)) }

func code(r C.hf_result) error {
	if r == 0 {
		return nil
	}
	return Code(r)
}

// Devices describes the devices in the driver's order.
func (d *Driver) Devices() ([]Device, error) {
	var n C.int
	if err := code(C.hf_device_count(d.table, &n)); err != nil {
		return nil, err
	}
	devices := make([]Device, n)
	for i := range devices {
		var c C.hf_device
		if err := code(C.hf_describe(d.table, C.int(i), &c)); err != nil {
			return nil, err
		}
		devices[i] = Device{
			Handle: int(c.handle), Name: C.GoString(&c.name[0]), UUID: [16]byte(C.GoBytes(unsafe.Pointer(&c.uuid[0]), 16)),
			Bytes: int64(c.bytes), CopyEngines: int(c.copy_engines), NUMANode: int(c.numa_node),
			HostPointerOK: c.host_pointer_ok != 0, POSIXFD: c.posix_fd != 0,
		}
	}
	return devices, nil
}

// Context is the primary context of a device, which all libraries of the process share.
type Context struct {
	d      *Driver
	ctx    C.uintptr_t
	device C.int
}

// Retain makes the primary context of a device, or takes part in it.
func (d *Driver) Retain(device Device) (*Context, error) {
	c := &Context{d: d, device: C.int(device.Handle)}
	if err := code(C.hf_retain(d.table, c.device, &c.ctx)); err != nil {
		return nil, err
	}
	return c, nil
}

// Release gives it up; the last one to do so destroys it.
func (c *Context) Release() error { return code(C.hf_release(c.d.table, c.device)) }

// HostAlloc gives page-locked memory that every device can read and write.
func (c *Context) HostAlloc(bytes int) (unsafe.Pointer, error) {
	var p unsafe.Pointer
	err := code(C.hf_host_alloc(c.d.table, c.ctx, C.size_t(bytes), &p))
	return p, err
}

// HostFree frees what HostAlloc gave.
func (c *Context) HostFree(p unsafe.Pointer) error { return code(C.hf_host_free(c.d.table, c.ctx, p)) }

// HostRegister page-locks mem, which is off the Go heap, for every device.
func (c *Context) HostRegister(mem []byte) error {
	return code(C.hf_host_register(c.d.table, c.ctx, unsafe.Pointer(unsafe.SliceData(mem)), C.size_t(len(mem))))
}

// HostUnregister undoes HostRegister.
func (c *Context) HostUnregister(mem []byte) error {
	return code(C.hf_host_unregister(c.d.table, c.ctx, unsafe.Pointer(unsafe.SliceData(mem))))
}

// Alloc gives device memory.
func (c *Context) Alloc(bytes int64) (uint64, error) {
	var address C.uint64_t
	err := code(C.hf_alloc(c.d.table, c.ctx, C.size_t(bytes), &address))
	return uint64(address), err
}

// Free frees what Alloc gave.
func (c *Context) Free(address uint64) error {
	return code(C.hf_free(c.d.table, c.ctx, C.uint64_t(address)))
}

// Stream makes a stream that does not wait for the default streams, of the highest priority or of the lowest.
func (c *Context) Stream(urgent bool) (uintptr, error) {
	var s C.uintptr_t
	var high C.int
	if urgent {
		high = 1
	}
	err := code(C.hf_stream(c.d.table, c.ctx, high, &s))
	return uintptr(s), err
}

// StreamWait blocks until the stream is idle.
func (c *Context) StreamWait(stream uintptr) error {
	return code(C.hf_stream_wait(c.d.table, c.ctx, C.uintptr_t(stream)))
}

// StreamDestroy gives a stream back.
func (c *Context) StreamDestroy(stream uintptr) error {
	return code(C.hf_stream_destroy(c.d.table, c.ctx, C.uintptr_t(stream)))
}

// Event makes an event without timing, whose waiters sleep.
func (c *Context) Event() (uintptr, error) {
	var e C.uintptr_t
	err := code(C.hf_event(c.d.table, c.ctx, &e))
	return uintptr(e), err
}

// EventRecord puts an event behind what is on a stream now.
func (c *Context) EventRecord(event, stream uintptr) error {
	return code(C.hf_event_record(c.d.table, c.ctx, C.uintptr_t(event), C.uintptr_t(stream)))
}

// EventWait blocks until what was recorded has happened.
func (c *Context) EventWait(event uintptr) error {
	return code(C.hf_event_wait(c.d.table, c.ctx, C.uintptr_t(event)))
}

// EventDestroy gives an event back.
func (c *Context) EventDestroy(event uintptr) error {
	return code(C.hf_event_destroy(c.d.table, c.ctx, C.uintptr_t(event)))
}

// EventQuery asks for all events in one call: results[i] is 0 for an event that has happened, NotReady for one that has not.
func (c *Context) EventQuery(events []uintptr, results []Code) error {
	if len(events) == 0 {
		return nil
	}
	raw := make([]C.hf_result, len(events))
	err := code(C.hf_event_query(c.d.table, c.ctx, C.size_t(len(events)), (*C.uintptr_t)(unsafe.Pointer(&events[0])), &raw[0]))
	for i, r := range raw {
		results[i] = Code(r)
	}
	return err
}

// Module compiles a kernel; it stays while the context lives.
func (c *Context) Module(ptx, name string) (uintptr, error) {
	text, symbol := C.CString(ptx), C.CString(name)
	defer C.free(unsafe.Pointer(text))
	defer C.free(unsafe.Pointer(symbol))
	var f C.uintptr_t
	err := code(C.hf_module(c.d.table, c.ctx, text, symbol, &f))
	return uintptr(f), err
}

// KernelRun is a copy of 16-byte words by the kernel: the layout that the PTX reads.
type KernelRun struct{ From, To, Words uint64 }

// PlaneRun is a 2-D copy: rows of width bytes, whose starts are a pitch apart.
type PlaneRun struct{ Device, Host, Width, Rows, DevicePitch, HostPitch uint64 }

// Chunk is a set of copies in one direction. Its arrays lie in memory from HostAlloc and belong to the chunk until its
// event has happened.
type Chunk struct {
	Direction   int      // 1 from the device to the host, 2 from the host to the device
	Batch       Features // BatchV1, BatchV2, or 0 for a call per copy
	Kernel      uintptr
	Blocks      int
	KernelRuns  []KernelRun
	Planes      []PlaneRun
	To, From    []uint64
	CopiedBytes []uint64
}

// Outcome says what became of a submission.
type Outcome struct {
	Err      error  // of the first call that failed
	Call     string // its name
	Index    int    // which copy, -1 if unknown
	Started  bool   // the device may have been given something
	Recorded bool   // the event tells when that is at rest
}

// Submit starts a chunk on a stream and records event behind it, or behind the part of it that was started.
func (c *Context) Submit(stream, event uintptr, k *Chunk) Outcome {
	var raw C.hf_chunk
	raw.direction, raw.batch = C.int(k.Direction), C.int(k.Batch)
	raw.kernel, raw.blocks = C.uintptr_t(k.Kernel), C.unsigned(k.Blocks)
	raw.kernel_runs, raw.planes, raw.copies = C.size_t(len(k.KernelRuns)), C.size_t(len(k.Planes)), C.size_t(len(k.To))
	raw.kernel_run = (*C.hf_kernel_run)(unsafe.Pointer(unsafe.SliceData(k.KernelRuns)))
	raw.plane = (*C.hf_plane)(unsafe.Pointer(unsafe.SliceData(k.Planes)))
	raw.to = (*C.uint64_t)(unsafe.SliceData(k.To))
	raw.from = (*C.uint64_t)(unsafe.SliceData(k.From))
	raw.bytes = (*C.size_t)(unsafe.SliceData(k.CopiedBytes))
	out := C.hf_submit(c.d.table, c.ctx, C.uintptr_t(stream), C.uintptr_t(event), &raw)
	o := Outcome{Err: code(out.result), Started: out.started != 0, Recorded: out.recorded != 0, Index: int(out.index)}
	if o.Err != nil {
		o.Call = C.GoString(out.call)
	}
	return o
}

// Copy copies between device memory and any host memory, and returns when it is done.
func (c *Context) Copy(direction int, device uint64, host []byte) error {
	return code(C.hf_copy(c.d.table, c.ctx, C.int(direction), C.uint64_t(device), unsafe.Pointer(unsafe.SliceData(host)), C.size_t(len(host))))
}

// Fill queues a fill of device memory on a stream.
func (c *Context) Fill(stream uintptr, device uint64, value byte, bytes int64) error {
	return code(C.hf_fill(c.d.table, c.ctx, C.uintptr_t(stream), C.uint64_t(device), C.uchar(value), C.size_t(bytes)))
}

// IPCExport gives a handle by which another process can open the allocation at device.
func (c *Context) IPCExport(device uint64) (handle [64]byte, err error) {
	err = code(C.hf_ipc_export(c.d.table, c.ctx, C.uint64_t(device), (*C.uchar)(&handle[0])))
	return handle, err
}

// IPCOpen maps the allocation that a handle names.
func (c *Context) IPCOpen(handle [64]byte) (device uint64, bytes int64, err error) {
	var address C.uint64_t
	var size C.size_t
	err = code(C.hf_ipc_open(c.d.table, c.ctx, (*C.uchar)(&handle[0]), &address, &size))
	return uint64(address), int64(size), err
}

// IPCClose undoes one IPCOpen.
func (c *Context) IPCClose(device uint64) error {
	return code(C.hf_ipc_close(c.d.table, c.ctx, C.uint64_t(device)))
}

// Mapping is memory that was mapped by file descriptor.
type Mapping struct {
	Handle, Device uint64
	Bytes          int64
}

// FDCreate makes device memory and a file descriptor for it, which is the caller's.
func (c *Context) FDCreate(bytes int64) (m Mapping, fd int, err error) {
	var raw C.hf_mapping
	var out C.int
	err = code(C.hf_fd_create(c.d.table, c.ctx, c.device, C.size_t(bytes), &raw, &out))
	return Mapping{uint64(raw.handle), uint64(raw.device), int64(raw.bytes)}, int(out), err
}

// FDOpen maps the memory behind a file descriptor, which stays the caller's.
func (c *Context) FDOpen(fd int, bytes int64) (m Mapping, err error) {
	var raw C.hf_mapping
	err = code(C.hf_fd_open(c.d.table, c.ctx, c.device, C.int(fd), C.size_t(bytes), &raw))
	return Mapping{uint64(raw.handle), uint64(raw.device), int64(raw.bytes)}, err
}

// FDClose unmaps what FDCreate or FDOpen mapped.
func (c *Context) FDClose(m Mapping) error {
	raw := C.hf_mapping{handle: C.uint64_t(m.Handle), device: C.uint64_t(m.Device), bytes: C.size_t(m.Bytes)}
	return code(C.hf_fd_close(c.d.table, c.ctx, &raw))
}
