package arena

import "errors"

// slabPagesMax bounds a slab to 32 KiB.
const slabPagesMax = 8

// slabBytes is the smallest slab for slots of size bytes of which at most an eighth stays unused.
func slabBytes(size int64) int64 {
	for n := pageBytes; n < slabPagesMax*pageBytes; n += pageBytes {
		if n%size <= n/8 {
			return n
		}
	}
	return slabPagesMax * pageBytes
}

// takeSmall finds a slot of size bytes, a multiple of lineBytes under pageBytes. It may drop the lock meanwhile.
func (a *Arena) takeSmall(size int64) (place, error) {
	if c := a.classes[size]; c != nil {
		if p, ok := c.pop(); ok {
			return p, nil
		}
	}
	want := min(slabBytes(size), a.capacity)
	host, err := a.take(want)
	if errors.Is(err, ErrFull) && want > pageBytes {
		host, err = a.take(pageBytes) // less well used, and better than no room
	}
	if err != nil {
		return place{}, err
	}
	host.run.open(host.index)
	r := newRun(a, host.run.bytes(host.index), size)
	r.slab, r.host = true, host
	c := a.class(size)
	c.join(r)
	p, _ := c.pop()
	return p, nil
}

// giveSmall takes a small slot back, and its slab with it if that was the last.
func (a *Arena) giveSmall(p place) {
	r := p.run
	r.push(p.index)
	a.classes[r.size].link(r)
	if r.idle < r.count {
		return
	}
	a.leave(r)
	host := r.host
	host.run.shut(host.index, host.run.slots[host.index].gen)
	a.give(host)
}
