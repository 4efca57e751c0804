// Package arena is the memory of the RAM tier: page slots outside the Go heap, of a bounded number of bytes.
package arena

import (
	"fmt"
	"sync"

	"github.com/holdfast-db/holdfast/txn"
)

const (
	// SlotBytesMax is the largest slot, 1 GiB, which is the largest page.
	SlotBytesMax int64 = 1 << 30
	// CapacityMax bounds the capacity of one arena, 16 TiB: a tenth of the address space that a 64-bit process has.
	CapacityMax int64 = 1 << 44

	pageBytes int64 = 4096    // slots of at least this size are aligned and rounded to it, as direct I/O asks
	lineBytes int64 = 64      // smaller slots are aligned and rounded to this
	hugeBytes int64 = 2 << 20 // slots of a multiple of this size lie in huge pages where the system has them
	spanBytes int64 = 1 << 30 // address space reserved at a time; the largest slot fits exactly

	lockPieces    = 4096 // as many pieces are page-locked, of more than 2 MiB if need be
	lockPiecesMin = 16   // but at least as many, of less than 2 MiB in a small arena
)

// ErrFull is the answer to an allocation for which no room is left now. It is of class txn.ErrBusy: freeing slots makes
// room.
var ErrFull = fmt.Errorf("arena full: %w", txn.ErrBusy)

// Arena hands out slots of page memory and never lets more than its capacity be resident.
//
// # How fragmentation is kept from mattering
//
// Address space is plentiful and memory is not, so the two are allotted apart. A *span* is 1 GiB of address space without
// memory. It belongs to one *class*, the slots of exactly one size, lying one after the other; a class that needs more
// slots takes another span. Memory is only counted, in bytes. A slot of any size can therefore be handed out whenever as
// many bytes are free, wherever the holes are: the memory of free slots of other sizes is given back to the system
// and comes in again under the new slot's addresses.
//
// A slot goes through these states:
//
//	cold ──alloc──▶ live ──free──▶ warm ──alloc──▶ live
//	  ▲                              │
//	  └─────────── released ◀────────┘   when another class needs its bytes
//
// A freed slot stays *warm*: its memory stays, because giving it back and taking it again costs page faults, several times the
// price of filling it (BenchmarkReuse). Allocation prefers the slot of its class that was freed last. Only when a
// cold slot has to be used and the capacity is reached are warm slots released, longest unused class first and oldest
// slot first, each whole. Releasing is a system call that can take milliseconds and runs outside the lock.
//
// # Small slots
//
// Slots under 4096 bytes are packed into *slabs*, which are slots of 1 to 8 pages taken from the classes above. A slab
// is given back as soon as its last slot is freed. Memory is held by the slab, so that small slots scattered
// over many slabs hold more than their own bytes: Usage tells the two apart, and Free counts what is really left.
//
// # Page-locked memory
//
// With Options.Lock every byte that is handed out is page-locked, so that devices can copy from and to it, and memory
// is unlocked before it goes back to the system: a device would otherwise go on using the pages that were there. Locking
// is dear, so it is done when a cold slot comes to life, never when a warm one is used again, and in large pieces:
// slots of up to half of a piece are packed into slabs of about one, which is 2 MiB or 1/4096 of the capacity. The price is
// that of slabs, at a larger size. When no whole piece is free, smaller ones serve, down to the slot alone.
//
// Memory that cannot be unlocked is *stuck*: the devices may know its addresses until the process ends, so neither is given
// to anybody again. It stays held.
//
// # Invariants
//
//   - held ≤ capacity: held is the sum of the sizes of live slots that are in no slab, of slabs and of what is stuck; only
//     Resize can break it
//   - held + warm + leaving ≤ capacity whenever a slot is handed out, where leaving is being released at this moment; it
//     bounds the resident memory
//   - an allocation of at least a page succeeds exactly if its rounded size is at most capacity − held and the
//     system gives address space and locks it; or if it fits into a slab
//   - with Options.Lock, live and warm slots are locked, and cold ones are not
//   - the bytes of a slot after the requested length are zero when it is handed out
//   - a slot is freed once: every slot has a generation, odd while it is live, and a Slot names the one it was given
//
// # Rejected
//
// Cutting one region of exactly the capacity into spans of the page sizes in use was tried on paper and dropped: 64 KiB
// holes between pinned 64 KiB slots can then never serve 128 KiB, and moving live slots would need every
// reader's, device's and transfer's consent. Moving the memory of holes together with mremap avoids the page faults, but
// leaves one kernel mapping per piece, of which a process has 65,530. Huge pages for every size were dropped too: a huge
// page shared by slots is resident as a whole, and the kernel fills holes in it again behind our back, so
// that the capacity would no longer bound the memory. Sizes that are a multiple of 2 MiB do not share.
//
// All methods are safe for concurrent use.
type Arena struct {
	mu       sync.Mutex // guards everything below, including the classes, spans and slabs
	released sync.Cond  // leaving went down; L is mu
	capacity int64
	used     int64                  // rounded bytes of live slots
	logical  int64                  // requested bytes of live slots
	held     int64                  // bytes that live slots, slabs and stuck memory occupy
	warm     int64                  // bytes of freed slots that still have memory
	leaving  int64                  // bytes that are being released by a running call
	slots    int64                  // live slots
	users    int64                  // live slots, and calls that may drop the lock half-way: what keeps the memory mapped after Close
	address  int64                  // reserved address space
	refused  int64                  // release calls that the system refused
	locked   int64                  // bytes that are page-locked, those that are stuck left out
	stuck    int64                  // bytes that could not be unlocked
	calls    int64                  // ticks with each allocation, so that classes know which was used last
	classes  map[int64]*class       // of slots that lie in spans
	slabs    map[int64]*class       // of slots that lie in slabs
	locks    map[place]func() error // what unlocks the slots of spans that are locked
	spare    []region               // spans that belong to no class
	regions  []region               // every span there is, for Close
	closed   bool

	lock     func(mem []byte) (unlock func() error, err error) // nil if nothing is to be locked
	piece    int64                                             // bytes that are locked at a time
	giveBack func(b []byte) error                              // returns memory to the system; a test puts itself in between
}

// Options of New.
type Options struct {
	// Lock, if not nil, page-locks memory, of multiples of 4096 bytes, and gives what undoes that. Neither is called under a lock
	// of the arena, but for what Close unlocks. An allocation whose memory cannot be locked fails as one that finds no room.
	Lock func(mem []byte) (unlock func() error, err error)
}

// Usage is a consistent reading of an arena. All fields but Slots are bytes.
type Usage struct {
	Capacity int64 // what the arena may hold
	Used     int64 // live slots, each rounded to the granularity of its size: 64 or 4096
	Logical  int64 // live slots, as requested
	Held     int64 // memory that live slots occupy: Used and the unused rest of slabs
	Free     int64 // Capacity − Held, at least 0: a slot of a page or more fits exactly if its rounded size is at most this
	Warm     int64 // part of Free that still has memory
	Address  int64 // reserved address space; never goes down before Close
	Slots    int64 // live slots
	Refused  int64 // times that the system refused to take memory back; more than Capacity may be resident then
	Locked   int64 // page-locked, the part of Held and Warm that devices can reach
	Stuck    int64 // part of Held that could not be unlocked and serves nobody any more
}

// Slot is the memory of one page. The zero Slot is none. Copies of a Slot mean the same memory.
type Slot struct {
	run   *run
	index uint32
	gen   uint32
	n     uint32 // at most SlotBytesMax
}

// New reserves an arena of capacity bytes, 4096 to CapacityMax, rounded down to a multiple of 4096. It takes no memory yet.
func New(capacity int64, o Options) (*Arena, error) {
	if err := checkCapacity(capacity); err != nil {
		return nil, err
	}
	a := &Arena{
		capacity: capacity / pageBytes * pageBytes, classes: map[int64]*class{}, slabs: map[int64]*class{}, locks: map[place]func() error{},
		lock: o.Lock, giveBack: giveBack,
	}
	if a.lock != nil {
		a.piece = min(max(hugeBytes, capacity/lockPieces/hugeBytes*hugeBytes), capacity/lockPiecesMin/pageBytes*pageBytes)
	}
	a.released.L = &a.mu
	return a, nil
}

func checkCapacity(capacity int64) error {
	if capacity < pageBytes {
		return fmt.Errorf("arena: capacity of %d bytes, at least %d: %w", capacity, pageBytes, txn.ErrInvalid)
	}
	if capacity > CapacityMax {
		return fmt.Errorf("arena: capacity of %d bytes, at most %d: %w", capacity, CapacityMax, txn.ErrTooLarge)
	}
	return nil
}

// slotBytes is the size of the slot for n bytes.
func slotBytes(n int64) int64 {
	if n > pageBytes-lineBytes {
		return (n + pageBytes - 1) &^ (pageBytes - 1)
	}
	return (n + lineBytes - 1) &^ (lineBytes - 1)
}

// Alloc hands out a slot of n bytes, 1 to SlotBytesMax. Its content is undefined. It never waits for room: ErrFull says
// that there is none now, txn.ErrTooLarge that there never is. (It may have to give memory back to the system first,
// or wait for a call that does, which takes milliseconds.)
func (a *Arena) Alloc(n int64) (Slot, error) {
	if n < 1 {
		return Slot{}, fmt.Errorf("arena: slot of %d bytes, at least 1: %w", n, txn.ErrInvalid)
	}
	if n > SlotBytesMax {
		return Slot{}, fmt.Errorf("arena: slot of %d bytes, at most %d: %w", n, SlotBytesMax, txn.ErrTooLarge)
	}
	s, err := a.alloc(n)
	if err != nil {
		return Slot{}, err
	}
	clear(s.Padded()[n:])
	return s, nil
}

func (a *Arena) alloc(n int64) (Slot, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	defer a.verify()
	if a.closed {
		return Slot{}, fmt.Errorf("arena: %w", txn.ErrClosed)
	}
	size := slotBytes(n)
	if size > a.capacity {
		return Slot{}, fmt.Errorf("arena: slot of %d bytes, capacity %d: %w", size, a.capacity, txn.ErrTooLarge)
	}
	a.users++
	take := a.take
	if size < pageBytes || size <= a.piece/2 {
		take = a.takePacked
	}
	at, err := take(size)
	if err != nil {
		a.users--
		a.unmapIfLast()
		return Slot{}, err
	}
	a.slots++
	a.used += size
	a.logical += n
	return Slot{run: at.run, index: at.index, gen: at.run.open(at.index), n: uint32(n)}, nil
}

// Free gives the slot back; its memory may belong to somebody else at once. A slot that was freed before, or that is
// not of this arena, is txn.ErrInvalid and changes nothing; builds with the tag invariants panic instead.
func (a *Arena) Free(s Slot) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	defer a.verify()
	if s.run == nil || s.run.arena != a {
		return misuse("arena: free of a slot that is not of this arena: %w", txn.ErrInvalid)
	}
	if !s.run.shut(s.index, s.gen) {
		return misuse("arena: free of a slot of %d bytes that is not live: %w", s.n, txn.ErrInvalid)
	}
	poison(s)
	a.slots--
	a.used -= s.run.size
	a.logical -= int64(s.n)
	at := place{s.run, s.index}
	if s.run.slab {
		a.givePacked(at)
	} else {
		a.give(at)
	}
	a.users--
	a.unmapIfLast()
	return nil
}

// Bytes is the memory of the slot, of exactly the requested length, aligned to 4096 if it is at least that long and
// to 64 otherwise. It stays where it is until Free; using it after that is a fault that nothing detects.
func (s Slot) Bytes() []byte {
	b := s.Padded()
	return b[:s.n:s.n]
}

// Padded is Bytes with the rest of the slot, up to the next multiple of 4096 (64 for a small slot). The rest was zero when
// the slot was handed out and is to stay so: direct I/O writes it to disk.
func (s Slot) Padded() []byte {
	if s.run == nil {
		return nil
	}
	return s.run.bytes(s.index)
}

// Len is the requested length in bytes.
func (s Slot) Len() int64 { return int64(s.n) }

// IsZero reports whether s is no slot.
func (s Slot) IsZero() bool { return s.run == nil }

// Usage reads the gauges. They are exact at every moment, also while other calls run.
func (a *Arena) Usage() Usage {
	a.mu.Lock()
	defer a.mu.Unlock()
	return Usage{
		Capacity: a.capacity,
		Used:     a.used,
		Logical:  a.logical,
		Held:     a.held,
		Free:     max(0, a.capacity-a.held),
		Warm:     a.warm,
		Address:  a.address,
		Slots:    a.slots,
		Refused:  a.refused,
		Locked:   a.locked,
		Stuck:    a.stuck,
	}
}

// Resize sets the capacity and gives the memory of free slots above it back to the system. If live slots hold more
// than the new capacity, allocations fail until enough of them are freed.
func (a *Arena) Resize(capacity int64) error {
	if err := checkCapacity(capacity); err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	defer a.verify()
	if a.closed {
		return fmt.Errorf("arena: %w", txn.ErrClosed)
	}
	a.capacity = capacity / pageBytes * pageBytes
	a.users++
	a.settle()
	a.users--
	a.unmapIfLast()
	return nil
}

// Close ends allocation and gives all memory back to the system. While slots are live, or calls run, it says so with
// txn.ErrBusy, and the memory goes back with the last of them instead: reading a live slot never faults. Further calls do
// the same.
func (a *Arena) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.closed = true
	a.unmapIfLast()
	if a.users > 0 {
		return fmt.Errorf("arena: close with %d live slots of %d bytes and %d running calls: %w", a.slots, a.used, a.users-a.slots, txn.ErrBusy)
	}
	return nil
}

// unmapIfLast gives everything back once the arena is closed and nothing uses its memory. If some of it cannot be unlocked,
// all stays mapped until the process ends.
func (a *Arena) unmapIfLast() {
	if !a.closed || a.users > 0 {
		return
	}
	for p, unlock := range a.locks {
		a.locked -= p.run.size
		if unlock() != nil {
			a.refused++
			a.stuck += p.run.size
		}
	}
	clear(a.locks)
	if a.stuck > 0 {
		return
	}
	for _, r := range a.regions {
		r.unmap()
	}
	a.regions, a.spare, a.address, a.warm = nil, nil, 0, 0
	clear(a.classes)
	clear(a.slabs)
}
