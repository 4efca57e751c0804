package arena

import (
	"cmp"
	"fmt"
	"slices"
	"unsafe"
)

// run is a piece of memory cut into slots of one size: a span, or a slab of small slots.
type run struct {
	arena *Arena // nil once the run is gone, so that a Slot of an earlier use is foreign
	mem   []byte
	size  int64  // bytes of one slot
	slots []slot // grows as slots are used for the first time
	count uint32 // slots that fit
	free  uint32 // head of the list of cold slots that were used before; noSlot if there is none
	idle  uint32 // cold slots, those never used included
	at    int    // position in class.runs while some slot is cold, else -1
	slab  bool
	host  place  // of a slab: the slot it lies in
	span  region // of a span: what it was cut from
}

// slot is what is kept per slot: 8 bytes.
type slot struct {
	gen  uint32 // odd while live
	next uint32 // next in the list of cold slots
}

const noSlot = ^uint32(0)

// place names a slot without regard to its generation.
type place struct {
	run   *run
	index uint32
}

func newRun(a *Arena, mem []byte, size int64) *run {
	n := uint32(int64(len(mem)) / size)
	return &run{arena: a, mem: mem, size: size, count: n, idle: n, free: noSlot, at: -1}
}

func (r *run) bytes(i uint32) []byte {
	from := int64(i) * r.size
	return r.mem[from : from+r.size : from+r.size]
}

// open begins a new generation of a slot.
func (r *run) open(i uint32) uint32 {
	r.slots[i].gen++
	return r.slots[i].gen
}

// shut ends a generation, or reports that it is not the live one.
func (r *run) shut(i, gen uint32) bool {
	if int64(i) >= int64(len(r.slots)) || r.slots[i].gen != gen || gen%2 == 0 {
		return false
	}
	r.slots[i].gen++
	return true
}

// pop takes a cold slot.
func (r *run) pop() uint32 {
	r.idle--
	if i := r.free; i != noSlot {
		r.free = r.slots[i].next
		return i
	}
	r.slots = append(r.slots, slot{next: noSlot})
	return uint32(len(r.slots) - 1)
}

// push makes a slot cold.
func (r *run) push(i uint32) {
	r.slots[i].next = r.free
	r.free = i
	r.idle++
}

// class is the slots of one size that lie in spans, or those that lie in slabs.
type class struct {
	size int64
	runs []*run // those with a cold slot
	all  int    // runs there are
	warm warmList
	last int64 // Arena.calls at the last allocation
}

func (c *class) link(r *run) {
	if r.at < 0 {
		r.at = len(c.runs)
		c.runs = append(c.runs, r)
	}
}

func (c *class) unlink(r *run) {
	if r.at < 0 {
		return
	}
	last := c.runs[len(c.runs)-1]
	c.runs[r.at] = last
	last.at = r.at
	c.runs = c.runs[:len(c.runs)-1]
	r.at = -1
}

// pop takes a cold slot of some run, or reports that there is none.
func (c *class) pop() (place, bool) {
	if len(c.runs) == 0 {
		return place{}, false
	}
	r := c.runs[len(c.runs)-1]
	i := r.pop()
	if r.idle == 0 {
		c.unlink(r)
	}
	return place{r, i}, true
}

// warmList holds free slots that have memory, in the order they were freed.
type warmList struct {
	places []place
	head   int
}

func (w *warmList) len() int { return len(w.places) - w.head }

func (w *warmList) push(p place) { w.places = append(w.places, p) }

func (w *warmList) newest() place {
	p := w.places[len(w.places)-1]
	w.places = w.places[:len(w.places)-1]
	w.trim()
	return p
}

func (w *warmList) oldest() place {
	p := w.places[w.head]
	w.head++
	w.trim()
	return p
}

// trim drops the taken front once it is the larger part, so that the list stays proportional to what it holds.
func (w *warmList) trim() {
	if w.head > len(w.places)/2 {
		w.places = slices.Delete(w.places, 0, w.head)
		w.head = 0
	}
	if cap(w.places) > 64 && len(w.places) < cap(w.places)/4 {
		w.places = slices.Clip(slices.Clone(w.places))
	}
}

// classOf is the class of size bytes among those given, which is about to be used.
func (a *Arena) classOf(classes map[int64]*class, size int64) *class {
	c := classes[size]
	if c == nil {
		c = &class{size: size}
		classes[size] = c
	}
	a.calls++
	c.last = a.calls
	return c
}

// join gives the class another run, all of it cold.
func (c *class) join(r *run) {
	c.all++
	c.link(r)
}

// leave takes a run that is cold as a whole from its class, and drops the class with its last run.
func (a *Arena) leave(r *run) {
	classes := a.classes
	if r.slab {
		classes = a.slabs
	}
	c := classes[r.size]
	c.unlink(r)
	r.arena = nil
	if c.all--; c.all == 0 {
		delete(classes, c.size)
	}
}

// take finds a slot of size bytes, a multiple of pageBytes, and counts it as held. It may drop the lock meanwhile.
func (a *Arena) take(size int64) (place, error) {
	if free := a.capacity - a.held; size > free {
		return place{}, fmt.Errorf("arena: slot of %d bytes, %d free of %d: %w", size, max(0, free), a.capacity, ErrFull)
	}
	c := a.classOf(a.classes, size)
	if c.warm.len() > 0 {
		a.held += size
		a.warm -= size
		return c.warm.newest(), nil
	}
	p, ok := c.pop()
	if !ok {
		r, err := a.newSpan(size)
		if err != nil {
			if c.all == 0 {
				delete(a.classes, size)
			}
			return place{}, fmt.Errorf("arena: reserve %d bytes of address space beside %d: %w: %w", spanBytes, a.address, err, ErrFull)
		}
		c.join(r)
		p, _ = c.pop()
	}
	a.held += size
	a.settle()
	if a.held > a.capacity { // memory got stuck, or Resize lowered the capacity meanwhile
		a.abandon(p)
		return place{}, fmt.Errorf("arena: slot of %d bytes, %d held of %d: %w", size, a.held, a.capacity, ErrFull)
	}
	if err := a.lockIt(p); err != nil {
		a.abandon(p)
		return place{}, fmt.Errorf("arena: page-lock %d bytes beside %d: %v: %w", size, a.locked, err, ErrFull)
	}
	return p, nil
}

// abandon makes a slot cold that was taken and not handed out.
func (a *Arena) abandon(p place) {
	a.held -= p.run.size
	a.leaving += p.run.size
	a.release([]place{p})
}

// lockIt page-locks a slot that was cold, if that is asked for. It drops the lock meanwhile.
func (a *Arena) lockIt(p place) error {
	if a.lock == nil {
		return nil
	}
	a.mu.Unlock()
	unlock, err := a.lock(p.run.bytes(p.index))
	a.mu.Lock()
	if err == nil {
		a.locks[p] = unlock
		a.locked += p.run.size
	}
	return err
}

// give takes a slot back, with its memory.
func (a *Arena) give(p place) {
	a.held -= p.run.size
	a.warm += p.run.size
	a.classes[p.run.size].warm.push(p)
	a.settle() // for a capacity that Resize has lowered meanwhile
}

// settle releases warm slots until what is resident fits the capacity. It drops the lock while the system works,
// and waits for other calls that are releasing what it needs. The caller is counted in a.users.
func (a *Arena) settle() {
	for a.held+a.warm+a.leaving > a.capacity {
		excess := a.held + a.warm - a.capacity
		switch {
		case excess > 0 && a.warm > 0:
			a.release(a.victims(excess))
		case a.leaving > 0:
			a.released.Wait()
		default:
			return // live slots alone are over the capacity, after Resize
		}
	}
}

// victims takes warm slots of together at least n bytes, or all there are, off their lists.
func (a *Arena) victims(n int64) []place {
	var places []place
	for n > 0 && a.warm > 0 {
		var c *class
		for _, o := range a.classes {
			if o.warm.len() > 0 && (c == nil || o.last < c.last) {
				c = o
			}
		}
		for n > 0 && c.warm.len() > 0 {
			places = append(places, c.warm.oldest())
			n -= c.size
			a.warm -= c.size
			a.leaving += c.size
		}
	}
	return places
}

// release gives the memory of places, which are on no list, back to the system, and makes them cold.
func (a *Arena) release(places []place) {
	places = a.unlockAll(places)
	a.mu.Unlock()
	var refused int64
	for _, b := range adjoin(places) {
		if err := a.giveBack(b); err != nil {
			refused++
		}
	}
	a.mu.Lock()
	a.refused += refused
	for _, p := range places {
		r, c := p.run, a.classes[p.run.size]
		a.leaving -= r.size
		r.push(p.index)
		c.link(r)
		if r.idle == r.count {
			a.leave(r)
			a.spare = append(a.spare, r.span)
		}
	}
	a.released.Broadcast()
}

// unlockAll unlocks places that are locked, and gives those that are not any more; the others are stuck. It drops the lock
// meanwhile.
func (a *Arena) unlockAll(places []place) (unlocked []place) {
	if len(a.locks) == 0 {
		return places
	}
	unlocks := make([]func() error, len(places))
	for i, p := range places {
		if unlocks[i] = a.locks[p]; unlocks[i] != nil {
			delete(a.locks, p)
			a.locked -= p.run.size
		}
	}
	a.mu.Unlock()
	stuck := make([]bool, len(places))
	for i, unlock := range unlocks {
		stuck[i] = unlock != nil && unlock() != nil
	}
	a.mu.Lock()
	for i, p := range places {
		if !stuck[i] {
			unlocked = append(unlocked, p)
			continue
		}
		a.refused++
		a.leaving -= p.run.size
		a.held += p.run.size
		a.stuck += p.run.size
	}
	return unlocked
}

// adjoin makes one piece of slots that lie side by side, since every piece costs a system call.
func adjoin(places []place) [][]byte {
	slices.SortFunc(places, func(x, y place) int {
		if x.run != y.run {
			return cmp.Compare(uintptr(unsafe.Pointer(&x.run.mem[0])), uintptr(unsafe.Pointer(&y.run.mem[0])))
		}
		return cmp.Compare(x.index, y.index)
	})
	var pieces [][]byte
	for i := 0; i < len(places); {
		first, j := places[i], i+1
		for j < len(places) && places[j].run == first.run && places[j].index == places[j-1].index+1 {
			j++
		}
		from, to := int64(first.index)*first.run.size, int64(places[j-1].index+1)*first.run.size
		pieces = append(pieces, first.run.mem[from:to])
		i = j
	}
	return pieces
}

// newSpan gives a class a span that no class has, or a new one.
func (a *Arena) newSpan(size int64) (*run, error) {
	var g region
	if n := len(a.spare); n > 0 {
		g = a.spare[n-1]
		a.spare = a.spare[:n-1]
	} else {
		var err error
		if g, err = mapRegion(spanBytes); err != nil {
			return nil, err
		}
		a.regions = append(a.regions, g)
		a.address += int64(len(g.raw))
	}
	g.advise(size%hugeBytes == 0)
	r := newRun(a, g.mem, size)
	r.span = g
	return r, nil
}
