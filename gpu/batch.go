package gpu

import (
	"cmp"
	"fmt"
	"slices"
	"time"
	"unsafe"

	"github.com/holdfast-db/holdfast/txn"
)

// Direction says which end of a batch is the source. Zero is invalid.
type Direction uint8

const (
	Store Direction = 1 // from the device to the host
	Load  Direction = 2 // from the host to the device
)

func (d Direction) String() string {
	switch d {
	case Store:
		return "store"
	case Load:
		return "load"
	}
	return fmt.Sprintf("direction %d", uint8(d))
}

// Priority orders the transfers of a device. A lower class gets one turn in fairTurns while a higher one has work.
type Priority uint8

const (
	ByDirection Priority = 0 // Foreground for a Load, Background for a Store
	Urgent      Priority = 1
	Foreground  Priority = 2
	Background  Priority = 3
)

const priorities = 3

// Region is one stretch of device memory and the host bytes it is copied to or from; len(Host) is its size.
//
// With the CUDA backend Host lies inside memory that Engine.Pin was given, never on the Go heap. The host backend
// takes any bytes, and keeps those on the Go heap alive until the transfer is released.
type Region struct {
	Device uint64 // address in device memory; 0 is invalid
	Host   []byte
}

// Order is what a batch waits for before its first byte moves. All of it is waited for; the zero Order is nothing.
//
// The engine waits on the host and gives the device a chunk only after the order is met. The alternative, a wait that
// is queued on the device in front of the chunk, starts the copy some 10 µs sooner, but it fills the lane and the
// window with copies that cannot run, holds up more urgent ones behind it, and turns a hung producer into memory that
// has to be quarantined, where here a batch that was never issued is simply given back.
type Order struct {
	// Stream is a stream of the caller on the same device: its CUstream, or the Handle of a HostStream. The batch
	// waits for what is on the stream when Submit is called. The legacy default stream is named by 1, since 0 is none.
	Stream uintptr
	// Event is an event that the caller has recorded: its CUevent, or the Handle of a HostEvent. It must be neither
	// recorded again nor destroyed before the transfer is settled.
	Event uintptr
	// Transfer is waited for until it is released, whether it succeeds or not, on any device of the same engine. If it never
	// will be, because its device was lost under it, the batch fails with that error.
	Transfer *Transfer
}

// Batch is one request: regions of one device that are copied in the same direction, in no particular order.
type Batch struct {
	Device    int // index in Engine.Devices
	Direction Direction
	// Regions do not overlap on the device, and do not overlap on the host in a Store. None at all is a batch that
	// succeeds without touching the device. Submit keeps no reference to the slice.
	Regions  []Region
	Priority Priority
	After    Order
	// Deadline is when the transfer settles at the latest; zero means Options.Deadline from now.
	Deadline time.Time
	// NoWait makes Submit refuse with ErrBusy, rather than wait, when there is no room in the budget.
	NoWait bool

	// Released, if not nil, is called once, when it is proven that no copy of this batch reads or writes either end
	// any more; it has returned before Done is closed unless the batch was quarantined. It is never called for a
	// batch that Submit refused, nor for one whose device was lost under its copies.
	Released func()
	// Quarantined, if not nil, is called at most once, before Done is closed, when the batch settles with copies that
	// are not proven finished; the argument is why. Both ends must be kept until Released.
	Quarantined func(error)
	// Both run on a goroutine of the engine, one after the other, and must not block or call the engine's Close.
}

// plan checks the regions of b and turns them into runs: sorted by device address, merged where both ends are adjacent
// within one pinned piece, and cut so that none is longer than l.ChunkBytes or crosses the border of a piece (the
// driver refuses a copy over two registrations). Memory that is not pinned is never merged: neighbours on the Go heap
// are neighbours by accident and different objects.
func plan(b *Batch, l Limits, pinned spans, mustPin bool) (runs []run, bytes int64, err error) {
	if b.Direction != Store && b.Direction != Load {
		return nil, 0, fmt.Errorf("gpu: %v: %w", b.Direction, txn.ErrInvalid)
	}
	if b.Priority > Background {
		return nil, 0, fmt.Errorf("gpu: priority %d: want 0 to %d: %w", b.Priority, Background, txn.ErrInvalid)
	}
	if len(b.Regions) > l.Regions {
		return nil, 0, fmt.Errorf("gpu: batch of %d regions: limit %d: %w", len(b.Regions), l.Regions, txn.ErrTooLarge)
	}
	ends := make([]run, len(b.Regions))
	for i, r := range b.Regions {
		n := int64(len(r.Host))
		switch {
		case n == 0:
			return nil, 0, fmt.Errorf("gpu: region %d of %d is empty: %w", i, len(b.Regions), txn.ErrInvalid)
		case r.Device == 0:
			return nil, 0, fmt.Errorf("gpu: region %d of %d has device address 0: %w", i, len(b.Regions), txn.ErrInvalid)
		case r.Device+uint64(n) < r.Device:
			return nil, 0, fmt.Errorf("gpu: region %d of %d at device address %#x: %d bytes pass the end of memory: %w", i, len(b.Regions), r.Device, n, txn.ErrInvalid)
		}
		ends[i] = run{device: r.Device, host: unsafe.Pointer(unsafe.SliceData(r.Host)), bytes: n}
		bytes += n
	}
	if bytes > l.Bytes {
		return nil, 0, fmt.Errorf("gpu: batch of %d bytes: limit %d: %w", bytes, l.Bytes, txn.ErrTooLarge)
	}
	if b.Direction == Store {
		if a, c, ok := overlap(ends, run.hostAddress); ok {
			return nil, 0, fmt.Errorf("gpu: store with two regions on the same host bytes: %d at %#x and %d at %#x: %w",
				a.bytes, a.hostAddress(), c.bytes, c.hostAddress(), txn.ErrInvalid)
		}
	}
	if a, c, ok := overlap(ends, func(r run) uint64 { return r.device }); ok {
		return nil, 0, fmt.Errorf("gpu: two regions on the same device bytes: %d at %#x and %d at %#x: %w",
			a.bytes, a.device, c.bytes, c.device, txn.ErrInvalid)
	}

	runs = make([]run, 0, len(ends))
	var last *span
	for _, r := range ends {
		for r.bytes > 0 {
			piece := pinned.find(r.hostAddress())
			if piece == nil && mustPin {
				return nil, 0, fmt.Errorf("gpu: host bytes %d at %#x are not pinned: %w", r.bytes, r.hostAddress(), txn.ErrInvalid)
			}
			n := r.bytes
			if piece != nil {
				n = min(n, int64(piece.end-r.hostAddress()))
			}
			if k := len(runs) - 1; k >= 0 && piece != nil && piece == last &&
				runs[k].device+uint64(runs[k].bytes) == r.device && runs[k].hostAddress()+uint64(runs[k].bytes) == r.hostAddress() {
				runs[k].bytes += n
			} else {
				runs = append(runs, run{device: r.device, host: r.host, bytes: n})
			}
			last = piece
			r = r.after(n)
		}
	}
	return cut(runs, l.ChunkBytes), bytes, nil
}

// after gives what is left of r behind its first n bytes.
func (r run) after(n int64) run {
	left := run{device: r.device + uint64(n), bytes: r.bytes - n}
	if left.bytes > 0 {
		left.host = unsafe.Add(r.host, n)
	}
	return left
}

// cut splits the runs that are longer than most.
func cut(runs []run, most int64) []run {
	pieces := 0
	for _, r := range runs {
		pieces += int((r.bytes + most - 1) / most)
	}
	if pieces == len(runs) {
		return runs
	}
	out := make([]run, 0, pieces)
	for _, r := range runs {
		for ; r.bytes > most; r = r.after(most) {
			out = append(out, run{device: r.device, host: r.host, bytes: most})
		}
		out = append(out, r)
	}
	return out
}

// overlap sorts ends by address and gives two of them that share a byte, if any do.
func overlap(ends []run, address func(run) uint64) (a, b run, found bool) {
	order := func(a, b run) int { return cmp.Compare(address(a), address(b)) }
	if !slices.IsSortedFunc(ends, order) {
		slices.SortFunc(ends, order)
	}
	for i := 1; i < len(ends); i++ {
		if address(ends[i-1])+uint64(ends[i-1].bytes) > address(ends[i]) {
			return ends[i-1], ends[i], true
		}
	}
	return run{}, run{}, false
}
