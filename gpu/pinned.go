package gpu

import (
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/holdfast-db/holdfast/txn"
)

// pinPiece is how much memory is page-locked in one call: the driver holds locks meanwhile that serving needs.
const pinPiece = 1 << 30

// Pinned is host memory that is page-locked for every device. Between Pin and Unpin the memory must stay mapped where it
// is, and no page of it may be given back to the system: after an madvise(MADV_DONTNEED) the devices would go on using
// the old pages.
type Pinned struct {
	e      *Engine
	mem    []byte
	pieces []*span
	unmap  func() error // for memory that AllocPinned has mapped

	mu   sync.Mutex
	gone bool
}

// Pin page-locks mem, so that devices copy from and to it directly; mem is off the Go heap, and its start and length are
// multiples of 4096 bytes. It touches every page first, from all processors, since the driver would do so from one;
// where nothing is to be locked, as in the host backend, it only enters the memory in the engine's books. The cost is
// some 100 ms for 1 GiB, so it is done for whole arenas, not for operations.
//
// Errors: ErrInvalid for a range that is empty, not aligned, or overlaps one that is pinned; ErrClosed; what the
// backend says, with nothing pinned.
func (e *Engine) Pin(mem []byte) (*Pinned, error) {
	start := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem))))
	if len(mem) == 0 || start%pinAlign != 0 || len(mem)%pinAlign != 0 {
		return nil, fmt.Errorf("gpu: pin %d bytes at %#x: want multiples of %d: %w", len(mem), start, pinAlign, txn.ErrInvalid)
	}
	if err := e.begin(); err != nil {
		return nil, err
	}
	defer e.end()
	if e.pinned.overlaps(start, start+uint64(len(mem))) {
		return nil, fmt.Errorf("gpu: pin %d bytes at %#x: overlaps pinned memory: %w", len(mem), start, txn.ErrInvalid)
	}
	p := &Pinned{e: e, mem: mem}
	e.mu.Lock()
	e.pins[p] = struct{}{}
	e.mu.Unlock()

	if e.backend.mustPin() {
		touch(mem)
	}
	for off := 0; off < len(mem); off += e.pinPiece {
		piece := mem[off:min(off+e.pinPiece, len(mem))]
		if err := e.pinOne(p, piece, start+uint64(off)); err != nil {
			return nil, combined(err, p.Unpin())
		}
	}
	return p, nil
}

// pinOne locks one piece and enters it in the books, in this order, so that no copy finds a piece that is not locked.
func (e *Engine) pinOne(p *Pinned, piece []byte, start uint64) error {
	if err := e.backend.pin(piece); err != nil {
		return fmt.Errorf("gpu: pin %d bytes at %#x: %w", len(piece), start, classified(err))
	}
	s, ok := e.pinned.add(start, start+uint64(len(piece)))
	if !ok { // another call was faster
		return combined(fmt.Errorf("gpu: pin %d bytes at %#x: overlaps pinned memory: %w", len(piece), start, txn.ErrInvalid), e.backend.unpin(piece))
	}
	p.pieces = append(p.pieces, s)
	return nil
}

// touchShare is what a goroutine is worth: some milliseconds of page faults.
const touchShare = 32 << 20

// touch makes every page of mem present.
func touch(mem []byte) {
	var wg sync.WaitGroup
	share := max(touchShare, (len(mem)/runtime.GOMAXPROCS(0)+pinAlign)&^(pinAlign-1))
	for part := range slices.Chunk(mem, share) {
		wg.Go(func() {
			for i := 0; i < len(part); i += pinAlign {
				// A write, so that the page is not the shared zero page, that changes nothing.
				atomic.OrUint32((*uint32)(unsafe.Pointer(&part[i])), 0)
			}
		})
	}
	wg.Wait()
}

// Bytes gives the memory.
func (p *Pinned) Bytes() []byte { return p.mem }

// Unpin undoes Pin. With transfers that touch the memory and are not released it fails with ErrBusy and changes nothing.
// Calling it again after a success does nothing.
func (p *Pinned) Unpin() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.gone {
		return nil
	}
	if users := p.e.pinned.retire(p.pieces); users > 0 {
		return fmt.Errorf("gpu: unpin %d bytes: %d transfers use them: %w", len(p.mem), users, txn.ErrBusy)
	}
	p.gone = true
	p.e.mu.Lock()
	delete(p.e.pins, p)
	p.e.mu.Unlock()

	var failures []error
	for _, s := range p.pieces {
		start := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(p.mem))))
		piece := p.mem[s.start-start : s.end-start]
		if err := p.e.backend.unpin(piece); err != nil {
			failures = append(failures, fmt.Errorf("gpu: unpin %d bytes at %#x: %w", len(piece), s.start, classified(err)))
		}
	}
	if len(failures) == 0 && p.unmap != nil { // what may still be locked stays mapped
		failures = append(failures, p.unmap())
	}
	return combined(failures...)
}

// AllocPinned maps bytes of memory off the Go heap, in huge pages where the system has them, rounded up to 4096, and pins
// it. Unpin gives it back.
func (e *Engine) AllocPinned(bytes int64) (*Pinned, error) {
	const most = 1 << 40
	if bytes <= 0 || bytes > most {
		return nil, fmt.Errorf("gpu: allocate %d pinned bytes: want 1 to %d: %w", bytes, int64(most), txn.ErrInvalid)
	}
	mem, unmap, err := mapMemory((bytes + pinAlign - 1) &^ (pinAlign - 1))
	if err != nil {
		return nil, err
	}
	p, err := e.Pin(mem)
	if err != nil {
		return nil, combined(err, unmap())
	}
	p.unmap = unmap
	return p, nil
}

func (e *Engine) allPinned() []*Pinned {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Collect(maps.Keys(e.pins))
}
