//go:build cgo && linux

package gpu

import (
	"fmt"
	"unsafe"

	"github.com/holdfast-db/holdfast/gpu/internal/driver"
)

// cudaLane is a stream with a ring of slots, one for each chunk that may be on it. submit fills slots in turn and await
// waits for them in the same order; the engine never has more chunks in a lane than slots, and its hand-over of a chunk
// from one goroutine to the other orders their access to the slot.
//
// A chunk costs one call down and one event, however many runs it has. An event per run, or a goroutine, was not
// considered: at 4 µs a copy the bookkeeping would cost as much as the copies.
type cudaLane struct {
	d         *cudaDevice
	direction Direction
	method    Method
	stream    uintptr
	slots     []cudaSlot
	submitted int // chunks so far; used by submit
	awaited   int // used by await
}

// cudaSlot is what a chunk needs while it is on the stream: an event, and page-locked memory for its descriptors, which the
// kernel reads from the device.
type cudaSlot struct {
	event    uintptr
	memory   unsafe.Pointer
	chunk    driver.Chunk
	recorded bool  // the event tells when the chunk is at rest
	err      error // why only a part was started
}

// Descriptors of a slot for n runs: kernel runs, then target, source and size of copies, then 2-D copies.
const (
	kernelRunBytes = int(unsafe.Sizeof(driver.KernelRun{}))
	planeRunBytes  = int(unsafe.Sizeof(driver.PlaneRun{}))
	wordBytes      = 8
)

// planeRowsMin is how many equal strides make a 2-D copy worth more than single ones.
const planeRowsMin = 4

func slotBytes(runs int) int {
	return runs*kernelRunBytes + 3*runs*wordBytes + (runs/planeRowsMin+1)*planeRunBytes
}

func (d *cudaDevice) openLane(dir Direction) (lane, error) {
	l, err := d.newLane(dir, d.c.o.Method, d.limits.LaneDepth, d.limits.ChunkRuns)
	if err != nil {
		return nil, driverError(err)
	}
	return l, nil
}

// newLane makes a lane of depth slots for chunks of at most runs runs.
func (d *cudaDevice) newLane(dir Direction, m Method, depth, runs int) (*cudaLane, error) {
	l := &cudaLane{d: d, direction: dir, method: m}
	var err error
	if l.stream, err = d.ctx.Stream(dir == Load); err != nil {
		return nil, err
	}
	for range depth {
		var s cudaSlot
		if s.event, err = d.ctx.Event(); err == nil {
			if s.memory, err = d.ctx.HostAlloc(slotBytes(runs)); err != nil {
				_ = d.ctx.EventDestroy(s.event)
			}
		}
		if err != nil {
			l.close()
			return nil, err
		}
		s.carve(runs)
		l.slots = append(l.slots, s)
	}
	return l, nil
}

// carve lays the arrays out in the slot's memory.
func (s *cudaSlot) carve(runs int) {
	p := s.memory
	take := func(bytes int) unsafe.Pointer {
		at := p
		p = unsafe.Add(p, bytes)
		return at
	}
	s.chunk = driver.Chunk{
		KernelRuns:  unsafe.Slice((*driver.KernelRun)(take(runs*kernelRunBytes)), runs)[:0],
		To:          unsafe.Slice((*uint64)(take(runs*wordBytes)), runs)[:0],
		From:        unsafe.Slice((*uint64)(take(runs*wordBytes)), runs)[:0],
		CopiedBytes: unsafe.Slice((*uint64)(take(runs*wordBytes)), runs)[:0],
		Planes:      unsafe.Slice((*driver.PlaneRun)(take((runs/planeRowsMin+1)*planeRunBytes)), runs/planeRowsMin+1)[:0],
	}
}

func (l *cudaLane) submit(runs []run) (bool, error) {
	s := &l.slots[l.submitted%len(l.slots)]
	l.place(runs, &s.chunk)
	out := l.d.ctx.Submit(l.stream, s.event, &s.chunk)
	if out.Started {
		l.submitted++
	}
	s.recorded, s.err = out.Recorded, nil
	if out.Err != nil {
		s.err = fmt.Errorf("%s of %d runs, at %d: %w", out.Call, len(runs), out.Index, driverError(out.Err))
	}
	return out.Started, s.err
}

// place decides for each run how it is copied and writes its descriptor.
func (l *cudaLane) place(runs []run, c *driver.Chunk) {
	*c = driver.Chunk{
		Direction: int(l.direction), Kernel: l.d.kernel, Blocks: l.d.c.o.KernelBlocks,
		KernelRuns: c.KernelRuns[:0], Planes: c.Planes[:0], To: c.To[:0], From: c.From[:0], CopiedBytes: c.CopiedBytes[:0],
	}
	if l.method == MethodAuto || l.method == MethodBatch || l.method == MethodKernel {
		c.Batch = l.d.c.batch()
	}
	small := l.kernelBytes()
	for len(runs) > 0 {
		if r := runs[0]; r.bytes <= small && (r.device|r.hostAddress()|uint64(r.bytes))%16 == 0 {
			from, to := l.ends(r)
			c.KernelRuns = append(c.KernelRuns, driver.KernelRun{From: from, To: to, Words: uint64(r.bytes) / 16})
			runs = runs[1:]
			continue
		}
		rows := 1
		if l.method == MethodPlane || l.method == MethodAuto && c.Batch == 0 {
			rows = l.d.stride(runs, small)
		}
		r := runs[0]
		if rows >= planeRowsMin {
			c.Planes = append(c.Planes, driver.PlaneRun{
				Device: r.device, Host: r.hostAddress(), Width: uint64(r.bytes), Rows: uint64(rows),
				DevicePitch: runs[1].device - r.device, HostPitch: runs[1].hostAddress() - r.hostAddress(),
			})
			runs = runs[rows:]
			continue
		}
		from, to := l.ends(r)
		c.To, c.From, c.CopiedBytes = append(c.To, to), append(c.From, from), append(c.CopiedBytes, uint64(r.bytes))
		runs = runs[1:]
	}
	// A launch for a few blocks costs more than it saves.
	const kernelRunsMin = 16
	if len(c.KernelRuns) < kernelRunsMin && l.method != MethodKernel {
		for _, k := range c.KernelRuns {
			c.To, c.From, c.CopiedBytes = append(c.To, k.To), append(c.From, k.From), append(c.CopiedBytes, k.Words*16)
		}
		c.KernelRuns = c.KernelRuns[:0]
	}
}

// kernelBytes is the largest run that the kernel copies in this lane, -1 for none.
func (l *cudaLane) kernelBytes() int64 {
	switch {
	case l.d.kernel == 0:
		return -1
	case l.method == MethodKernel:
		return 1 << 62
	case l.method == MethodAuto && l.direction == Load && l.d.kernelBytes > 0:
		return l.d.kernelBytes
	}
	return -1
}

func (l *cudaLane) ends(r run) (from, to uint64) {
	if l.direction == Store {
		return r.device, r.hostAddress()
	}
	return r.hostAddress(), r.device
}

// stride gives how many of the first runs have the same size and lie the same distances apart at both ends, as far as a
// 2-D copy takes them.
func (d *cudaDevice) stride(runs []run, small int64) int {
	const pitchMax = 1<<31 - 1
	if d.c.d.Features()&driver.Plane == 0 || len(runs) < 2 || runs[0].bytes <= small {
		return 1
	}
	device, host := runs[1].device-runs[0].device, runs[1].hostAddress()-runs[0].hostAddress()
	width := uint64(runs[0].bytes)
	if device < width || device > pitchMax || host < width || host > pitchMax { // also if host addresses fall
		return 1
	}
	n := 1
	for n < len(runs) && runs[n].bytes == runs[0].bytes && runs[n].device-runs[n-1].device == device && runs[n].hostAddress()-runs[n-1].hostAddress() == host {
		n++
	}
	return n
}

// await waits for the event of the oldest chunk. Where there is none, or the wait fails without the context being lost,
// the stream is drained instead; only if that fails too is the chunk unproven.
func (l *cudaLane) await() (verdict, error) {
	s := &l.slots[l.awaited%len(l.slots)]
	l.awaited++
	var waited error
	if s.recorded {
		if waited = driverError(l.d.ctx.EventWait(s.event)); waited == nil && s.err == nil {
			return copied, nil
		}
	}
	if !s.recorded || waited != nil {
		if err := driverError(l.d.ctx.StreamWait(l.stream)); err != nil {
			return unproven, combined(s.err, waited, err)
		}
	}
	if s.err != nil {
		return drained, s.err
	}
	return drained, waited
}

// close gives the lane back. What the driver says to it changes nothing: everything was at rest.
func (l *cudaLane) close() {
	for _, s := range l.slots {
		_ = l.d.ctx.EventDestroy(s.event)
		_ = l.d.ctx.HostFree(s.memory)
	}
	_ = l.d.ctx.StreamDestroy(l.stream)
}
