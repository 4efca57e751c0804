//go:build invariants

package arena

import (
	"fmt"
	"sync/atomic"
)

// misuse panics: a slot freed twice is a fault of the caller that has to be found, not survived, in tests.
func misuse(format string, args ...any) error { panic(fmt.Errorf(format, args...)) }

// poison makes reads of a freed slot visible.
func poison(s Slot) {
	b := s.Bytes()
	b[0] = 0xdb
	for n := 1; n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
}

// recount says when verify is due: seldom enough that its cost per call stays the same, however many slots are free.
var recount atomic.Int64

// verify counts everything again. The caller holds the lock.
func (a *Arena) verify() {
	entries := int64(len(a.classes))
	for _, c := range a.classes {
		entries += int64(c.warm.len() + len(c.runs))
	}
	if recount.Add(1)%(1+entries/64) != 0 {
		return
	}
	var warm int64
	for size, c := range a.classes {
		if c.size != size || c.all == 0 {
			panic(fmt.Sprintf("arena: class %d: size %d, %d runs", size, c.size, c.all))
		}
		warm += int64(c.warm.len()) * size
		for i, r := range c.runs {
			if r.at != i || r.idle == 0 || r.arena != a {
				panic(fmt.Sprintf("arena: class %d: run %d of %d is misplaced", size, i, len(c.runs)))
			}
		}
		for _, p := range c.warm.places[c.warm.head:] {
			if p.run.size != size || p.run.slots[p.index].gen%2 != 0 {
				panic(fmt.Sprintf("arena: class %d: a live or foreign slot is on the warm list", size))
			}
		}
	}
	switch {
	case warm != a.warm:
		panic(fmt.Sprintf("arena: warm is %d, counted %d", a.warm, warm))
	case a.used < a.logical || a.held < a.used || a.logical < a.slots || a.users < a.slots || a.leaving < 0:
		panic(fmt.Sprintf("arena: used %d, logical %d, held %d, slots %d", a.used, a.logical, a.held, a.slots))
	}
}
