package gpu

import (
	"slices"
	"sort"
	"sync"
)

// span is a range of addresses that somebody else must not take away while transfers use it: a pinned piece of host
// memory, or device memory imported from another process.
type span struct {
	start, end uint64
	users      int // transfers that are not released; guarded by ledger.mu
}

// ledger keeps spans, which do not overlap, in order of address, and who uses them.
type ledger struct {
	mu    sync.RWMutex
	spans spans // replaced, never changed in place, so that a view stays valid
}

// spans are in order of address.
type spans []*span

// add enters a range; false if it overlaps one that is there.
func (l *ledger) add(start, end uint64) (*span, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := l.spans.search(start)
	if i < len(l.spans) && l.spans[i].start < end {
		return nil, false
	}
	s := &span{start: start, end: end}
	l.spans = slices.Insert(slices.Clone(l.spans), i, s)
	return s, true
}

// overlaps reports whether a span shares an address with the range.
func (l *ledger) overlaps(start, end uint64) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	i := l.spans.search(start)
	return i < len(l.spans) && l.spans[i].start < end
}

// view gives the spans as they are now.
func (l *ledger) view() spans {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.spans
}

// find gives the span that holds address, or nil.
func (s spans) find(address uint64) *span {
	i := s.search(address)
	if i < len(s) && s[i].start <= address {
		return s[i]
	}
	return nil
}

// search gives the place of the first span that ends behind address.
func (s spans) search(address uint64) int {
	return sort.Search(len(s), func(i int) bool { return s[i].end > address })
}

// hold makes the transfer of runs a user of every span that one of them touches, once for each. With covered, every run
// has to lie within one span; the first that does not is returned and nothing is held.
func (l *ledger) hold(runs []run, address func(run) uint64, covered bool) (held []*span, bare *run) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.spans) == 0 && !covered {
		return nil, nil
	}
	for k, r := range runs {
		a, end := address(r), address(r)+uint64(r.bytes)
		i := l.spans.search(a)
		if covered && (i == len(l.spans) || l.spans[i].start > a || l.spans[i].end < end) {
			l.dropLocked(held)
			return nil, &runs[k]
		}
		for ; i < len(l.spans) && l.spans[i].start < end; i++ {
			s := l.spans[i]
			if len(held) > 0 && held[len(held)-1] == s || slices.Contains(held, s) {
				continue
			}
			s.users++
			held = append(held, s)
		}
	}
	return held, nil
}

// drop ends what hold began.
func (l *ledger) drop(held []*span) {
	if len(held) == 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dropLocked(held)
}

func (l *ledger) dropLocked(held []*span) {
	for _, s := range held {
		s.users--
	}
}

// retire takes spans out if none of them has a user, and reports how many users there are otherwise.
func (l *ledger) retire(spans []*span) (users int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range spans {
		users += s.users
	}
	if users == 0 {
		l.spans = slices.DeleteFunc(slices.Clone(l.spans), func(s *span) bool { return slices.Contains(spans, s) })
	}
	return users
}
