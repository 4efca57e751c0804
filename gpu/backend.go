package gpu

import (
	"time"
	"unsafe"
)

// Backend is a kind of device that an Engine can drive: NewHost or OpenCUDA. An Engine owns its backend and closes it.
type Backend interface {
	// Name says which kind it is: "host" or "cuda".
	Name() string
	// Devices lists the devices in a fixed order; a device's place in it is its number in Batch.
	Devices() []DeviceInfo

	// open makes a device usable; the engine calls it once for each device that is used, before anything else on it.
	open(index int, l Limits) (device, error)
	// pin page-locks mem, whose start and length are multiples of pinAlign, for every device; unpin undoes it and is
	// called with the same range, after the last copy on it.
	pin(mem []byte) error
	unpin(mem []byte) error
	// mustPin reports whether host memory has to be pinned before it is copied from or to.
	mustPin() bool
	// close gives the backend's resources back. Every device has been closed.
	close() error
}

// DeviceInfo describes a device.
type DeviceInfo struct {
	Name  string
	UUID  [16]byte // identity that holds over processes, reboots and changes of numbering
	Bytes int64    // memory of the device, 0 if unknown
	// NUMANode is the host memory node next to the device, -1 if unknown.
	NUMANode int
	// CopyEngines is how many copies the device makes at the same time beside computing.
	CopyEngines int
	Features    []string // what the backend found and uses, for people to read
}

// device is one opened device. The engine calls openLane from one goroutine, gate from any.
type device interface {
	// openLane makes an ordered stream of chunks in one direction. Lanes are independent of each other.
	openLane(d Direction) (lane, error)
	// gate captures what o means at this moment. A nil gate means that there is nothing to wait for. It moves nothing.
	gate(o Order) (gate, error)
	// openImport maps memory that another process has exported, for the copies of this device.
	openImport(h ImportHandle) (address uint64, bytes int64, unmap func() error, err error)
	// allocate gives device memory.
	allocate(bytes int64) (address uint64, free func() error, err error)
	// bare copies runs once by one method, with nothing of the engine around it, and tells how long that took.
	bare(m Method, d Direction, runs []run) (time.Duration, error)
	// close gives the device back. drained is false if copies on it are not proven finished: then everything that
	// such a copy may touch, its own descriptors included, is left as it is until the process ends.
	close(drained bool)
}

// gate is a captured Order.
type gate interface {
	// watch arranges for f to be called once, from any goroutine and possibly before watch returns: with nil when
	// everything that the order waits for is done, with an error if it never will be.
	watch(f func(error))
	// release gives the gate back, watched or not. A call of f that is on its way may still come; a watch after it does
	// nothing.
	release()
}

// lane is a stream of chunks on a device. One goroutine calls submit and another await; a lane holds at most
// Limits.LaneDepth chunks that were submitted and not awaited.
type lane interface {
	// submit starts the copies of a chunk and returns, as a rule, before they end. The runs belong to the lane until
	// await has returned for them. started says whether the device was given anything: if not, the chunk is at rest
	// and await is not called for it. If it was and err is not nil, only a part was started, and await tells when
	// that part is at rest.
	submit(runs []run) (started bool, err error)
	// await blocks until the oldest submitted chunk is at rest, or cannot be proven to be.
	await() (verdict, error)
	// close gives the lane back; everything submitted has been awaited and is at rest.
	close()
}

// verdict is what is known about a chunk that was started. Zero is invalid.
type verdict uint8

const (
	copied   verdict = 1 // every byte is where it belongs
	drained  verdict = 2 // it failed; the device no longer touches its memory
	unproven verdict = 3 // the device may touch its memory until the process ends
)

// run is a stretch of bytes that is contiguous at both ends. Its host side is off the Go heap, or the host backend's.
type run struct {
	device uint64
	host   unsafe.Pointer
	bytes  int64
}

func (r run) hostAddress() uint64 { return uint64(uintptr(r.host)) }

// mem gives the host side as bytes.
func (r run) mem() []byte { return unsafe.Slice((*byte)(r.host), r.bytes) }

// pinAlign is the granularity of page-locking, the page size of every system that the CUDA driver runs on with 4 KiB
// pages; systems with larger pages are asked for at open.
const pinAlign = 4096
