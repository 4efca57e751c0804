package gpu

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/holdfast-db/holdfast/txn"
)

// HostOptions configures a host backend. The zero value is one device, without faults.
type HostOptions struct {
	Devices int // how many devices it plays; default 1, at most 64
	Workers int // goroutines that copy, per lane; default GOMAXPROCS, at most 64
	// Seed, if not 0, makes workers take the pieces of a lane's oldest chunk in random order.
	Seed uint64
	// Fault, if not nil, is called at the points that HostOp names, from many goroutines. It delays what it does not
	// return from. An error makes the operation fail; for HostCopy one that wraps ErrDeviceLost means that nobody
	// knows any more whether the copy is at rest.
	Fault func(HostCall) error
}

// HostOp is a point where a host backend can be made to fail. Zero is invalid.
type HostOp uint8

const (
	HostOpen   HostOp = 1 // a device is opened
	HostLane   HostOp = 2 // a lane is opened
	HostPin    HostOp = 3
	HostGate   HostOp = 4 // an order is captured
	HostSubmit HostOp = 5 // a chunk is submitted
	HostCopy   HostOp = 6 // a piece of a chunk, at most hostPiece bytes, is about to be copied
)

// HostCall is one call of HostOptions.Fault.
type HostCall struct {
	Op        HostOp
	Device    int
	Direction Direction // HostLane, HostSubmit and HostCopy
	Bytes     int64     // HostPin, HostSubmit and HostCopy
}

// hostPiece is the most that one worker copies at a time, so that a large chunk is spread over all of them. It is not
// less than what copy moves past the caches on amd64 (1 MiB), which is half as fast again.
const hostPiece = 2 << 20

// hostTake is how many bytes of smaller pieces a worker takes at once.
const hostTake = 256 << 10

// Host is a backend without hardware: goroutines play the copy engines and ordinary memory plays the devices. It keeps the
// promises of a real one and no more: a copy may happen at any time between submission and completion, pieces of a
// batch in any order, batches in any order but the one asked for, and any of it can be made to fail.
//
// Device memory is memory that Expose was given. It has addresses of its own, apart from the process's, with gaps in
// between, so that an address that is wrong by a little is refused and not another buffer's.
type Host struct {
	o       HostOptions
	devices []*hostDevice

	mu      sync.Mutex
	handles map[uintptr]hostOrder // streams and events by handle
	last    uintptr
}

// hostOrder is a stream or an event: it gives an event that is over when everything on it up to now is.
type hostOrder interface{ mark() *HostEvent }

// NewHost makes a host backend. ErrInvalid for options outside their limits.
func NewHost(o HostOptions) (*Host, error) {
	if o.Devices == 0 {
		o.Devices = 1
	}
	if o.Workers == 0 {
		o.Workers = min(runtime.GOMAXPROCS(0), 64)
	}
	if o.Devices < 0 || o.Devices > 64 || o.Workers < 0 || o.Workers > 64 {
		return nil, fmt.Errorf("gpu: host backend of %d devices with %d workers: want 1 to 64: %w", o.Devices, o.Workers, txn.ErrInvalid)
	}
	h := &Host{o: o, handles: map[uintptr]hostOrder{}, last: 1 << 12}
	for i := range o.Devices {
		h.devices = append(h.devices, &hostDevice{host: h, index: i, memory: hostMemory{next: uint64(i+1) << 48}})
	}
	return h, nil
}

// Name gives "host".
func (h *Host) Name() string { return "host" }

// Devices describes the devices that the backend plays.
func (h *Host) Devices() []DeviceInfo {
	infos := make([]DeviceInfo, len(h.devices))
	for i := range infos {
		infos[i] = DeviceInfo{
			Name: fmt.Sprintf("host memory %d", i), UUID: [16]byte{'h', 'o', 's', 't', 15: byte(i)},
			NUMANode: -1, CopyEngines: 2, Features: []string{fmt.Sprintf("%d copy workers per lane", h.o.Workers)},
		}
	}
	return infos
}

func (h *Host) fault(c HostCall) error {
	if h.o.Fault == nil {
		return nil
	}
	return h.o.Fault(c)
}

func (h *Host) open(index int, l Limits) (device, error) {
	if err := h.fault(HostCall{Op: HostOpen, Device: index}); err != nil {
		return nil, err
	}
	d := h.devices[index]
	d.depth, d.lanes = l.LaneDepth, nil
	return d, nil
}

func (h *Host) pin(mem []byte) error { return h.fault(HostCall{Op: HostPin, Bytes: int64(len(mem))}) }

func (h *Host) unpin([]byte) error { return nil }
func (h *Host) mustPin() bool      { return false }
func (h *Host) close() error       { return nil }

// Expose makes mem device memory of a device and gives the address by which batches name it.
func (h *Host) Expose(device int, mem []byte) (uint64, error) {
	if device < 0 || device >= len(h.devices) || len(mem) == 0 {
		return 0, fmt.Errorf("gpu: expose %d bytes as memory of device %d of %d: %w", len(mem), device, len(h.devices), txn.ErrInvalid)
	}
	return h.devices[device].memory.add(mem), nil
}

// Withdraw undoes Expose. Copies that are in flight go on with the memory; later ones fail.
func (h *Host) Withdraw(device int, address uint64) error {
	if device < 0 || device >= len(h.devices) || !h.devices[device].memory.remove(address) {
		return fmt.Errorf("gpu: withdraw memory at %#x of device %d: %w", address, device, txn.ErrNotFound)
	}
	return nil
}

type hostDevice struct {
	host   *Host
	index  int
	depth  int
	memory hostMemory
	lanes  []*hostLane
}

func (d *hostDevice) openLane(dir Direction) (lane, error) {
	if err := d.host.fault(HostCall{Op: HostLane, Device: d.index, Direction: dir}); err != nil {
		return nil, err
	}
	l := &hostLane{d: d, direction: dir, fifo: make(chan *hostJob, d.depth)}
	l.work.L = &l.mu
	if d.host.o.Seed != 0 {
		l.random = rand.New(rand.NewPCG(d.host.o.Seed, uint64(d.index)<<8|uint64(dir)))
	}
	for range d.host.o.Workers {
		l.workers.Go(l.copy)
	}
	d.lanes = append(d.lanes, l)
	return l, nil
}

func (d *hostDevice) openImport(ImportHandle) (uint64, int64, func() error, error) {
	return 0, 0, nil, fmt.Errorf("the host backend has no memory of other processes: %w", txn.ErrUnsupported)
}

func (d *hostDevice) allocate(bytes int64) (uint64, func() error, error) {
	address := d.memory.add(make([]byte, bytes))
	return address, func() error { return d.host.Withdraw(d.index, address) }, nil
}

// bare copies on as many goroutines as a lane has, each run whole.
func (d *hostDevice) bare(m Method, dir Direction, runs []run) (time.Duration, error) {
	if m != MethodSingle {
		return 0, fmt.Errorf("gpu: copies by %v on the host: %w", m, txn.ErrUnsupported)
	}
	copies := make([]hostCopy, len(runs))
	for i, r := range runs {
		mem, err := d.memory.slice(r.device, r.bytes)
		if err != nil {
			return 0, err
		}
		copies[i] = hostCopy{to: mem, from: r.mem()}
		if dir == Store {
			copies[i] = hostCopy{to: r.mem(), from: mem}
		}
	}
	var wg sync.WaitGroup
	begin := time.Now()
	for w := range d.host.o.Workers {
		wg.Go(func() {
			for i := w; i < len(copies); i += d.host.o.Workers {
				copy(copies[i].to, copies[i].from)
			}
		})
	}
	wg.Wait()
	return time.Since(begin), nil
}

// close ends the workers, of which none is at work: also on a lost device, as far as goroutines know.
func (d *hostDevice) close(bool) {
	for _, l := range d.lanes {
		l.end()
	}
}

// hostLane is a FIFO of chunks that a few workers copy, piece by piece. A worker that finds no piece of the oldest chunk
// goes on to the next, so chunks may overlap; they are awaited in order all the same.
type hostLane struct {
	d         *hostDevice
	direction Direction
	random    *rand.Rand // guarded by mu
	fifo      chan *hostJob
	workers   sync.WaitGroup

	mu     sync.Mutex
	work   sync.Cond  // signalled when there are pieces to take, or closed is set
	queue  []*hostJob // with pieces that nobody has taken
	closed bool
}

// hostJob is a chunk in a lane.
type hostJob struct {
	done chan struct{}

	// Guarded by the lane's mu.
	pieces  []hostCopy // not taken
	working int        // workers that have taken some and are not done
	err     error      // first failure; the rest is not copied
	lost    error
}

// hostCopy is one copy between memory of the device and of the host.
type hostCopy struct{ to, from []byte }

func (l *hostLane) submit(runs []run) (bool, error) {
	var bytes int64
	job := &hostJob{done: make(chan struct{}), pieces: make([]hostCopy, 0, len(runs))}
	for _, r := range runs {
		bytes += r.bytes
		mem, err := l.d.memory.slice(r.device, r.bytes)
		if err != nil {
			return false, err
		}
		for host := r.mem(); len(host) > 0; {
			n := min(len(host), hostPiece)
			c := hostCopy{to: host[:n], from: mem[:n]}
			if l.direction == Load {
				c.to, c.from = c.from, c.to
			}
			job.pieces = append(job.pieces, c)
			host, mem = host[n:], mem[n:]
		}
	}
	if err := l.d.host.fault(HostCall{Op: HostSubmit, Device: l.d.index, Direction: l.direction, Bytes: bytes}); err != nil {
		return false, err
	}
	l.fifo <- job
	l.mu.Lock()
	l.queue = append(l.queue, job)
	l.work.Broadcast()
	l.mu.Unlock()
	return true, nil
}

func (l *hostLane) await() (verdict, error) {
	job := <-l.fifo
	<-job.done
	switch {
	case job.lost != nil:
		return unproven, job.lost
	case job.err != nil:
		return drained, job.err
	}
	return copied, nil
}

// copy is a worker: it takes pieces of the oldest chunk that has some until the lane closes.
func (l *hostLane) copy() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		for len(l.queue) == 0 {
			if l.closed {
				return
			}
			l.work.Wait()
		}
		job := l.queue[0]
		taken := l.take(job)
		l.mu.Unlock()

		var err error
		for _, c := range taken {
			if err = l.d.host.fault(HostCall{Op: HostCopy, Device: l.d.index, Direction: l.direction, Bytes: int64(len(c.to))}); err != nil {
				break
			}
			copy(c.to, c.from)
		}

		l.mu.Lock()
		l.settle(job, err)
	}
}

// take gives a worker some pieces of job, the first in the queue: one, or as many small ones as make hostTake bytes, so that
// the lock is not what limits them. Called with mu held.
func (l *hostLane) take(job *hostJob) []hostCopy {
	n := len(job.pieces)
	if l.random != nil {
		k := l.random.IntN(n)
		job.pieces[k], job.pieces[n-1] = job.pieces[n-1], job.pieces[k]
	}
	from, bytes := n, 0
	for from > 0 && bytes < hostTake {
		from--
		bytes += len(job.pieces[from].to)
	}
	taken := job.pieces[from:]
	job.pieces = job.pieces[:from]
	job.working++
	if from == 0 {
		l.queue = l.queue[1:]
	}
	return taken
}

// settle books the end of what one worker took of job. Called with mu held.
func (l *hostLane) settle(job *hostJob, err error) {
	job.working--
	if err != nil {
		if len(job.pieces) > 0 {
			job.pieces = nil
			l.queue = slices.DeleteFunc(l.queue, func(o *hostJob) bool { return o == job })
		}
		if errors.Is(err, ErrDeviceLost) {
			job.lost = err
		} else if job.err == nil {
			job.err = err
		}
	}
	if job.working == 0 && len(job.pieces) == 0 {
		close(job.done)
	}
}

func (l *hostLane) close() {
	l.end()
	l.workers.Wait()
}

// end makes the workers return when they have nothing to do.
func (l *hostLane) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	l.work.Broadcast()
}
