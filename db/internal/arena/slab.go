package arena

import "errors"

// slabPagesMax bounds a slab to 32 KiB where nothing is locked.
const slabPagesMax = 8

// slabBytes is how large a slab for slots of size bytes is where there is room. It wastes an eighth at most.
func (a *Arena) slabBytes(size int64) int64 {
	if a.lock == nil { // the smallest
		for n := pageBytes; n < slabPagesMax*pageBytes; n += pageBytes {
			if n%size <= n/8 {
				return n
			}
		}
		return slabPagesMax * pageBytes
	}
	if a.piece%size <= a.piece/8 { // that of other sizes too, which may have one to spare
		return a.piece
	}
	return (a.piece/size*size + pageBytes - 1) &^ (pageBytes - 1)
}

// takePacked finds a slot of size bytes in a slab, or, if it is of whole pages and there is no room for more, one that lies
// alone. It may drop the lock meanwhile.
func (a *Arena) takePacked(size int64) (place, error) {
	if c := a.slabs[size]; c != nil {
		if p, ok := c.pop(); ok {
			return p, nil
		}
	}
	least := max(size, pageBytes)
	want := max(a.slabBytes(size), least)
	host, err := a.take(want)
	for errors.Is(err, ErrFull) && want > least { // less well used, and better than no room
		want = max(want/2/least*least, least)
		host, err = a.take(want)
	}
	if err != nil || want == size {
		return host, err
	}
	host.run.open(host.index)
	r := newRun(a, host.run.bytes(host.index), size)
	r.slab, r.host = true, host
	c := a.classOf(a.slabs, size)
	c.join(r)
	p, _ := c.pop()
	return p, nil
}

// givePacked takes a slot of a slab back, and the slab with it if that was the last.
func (a *Arena) givePacked(p place) {
	r := p.run
	r.push(p.index)
	a.slabs[r.size].link(r)
	if r.idle < r.count {
		return
	}
	a.leave(r)
	host := r.host
	host.run.shut(host.index, host.run.slots[host.index].gen)
	a.give(host)
}
