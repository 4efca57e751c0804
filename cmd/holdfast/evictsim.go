package main

import (
	"container/heap"
	"math"
	"sort"
	"time"
)

// A simulation of a cache of checkpoints that share pages, to compare orders of eviction. It has no tiers, no writes and no
// failures: so many bytes, and an order in which whole checkpoints go. What a checkpoint gives back when it goes are its
// state and the pages that no other one has.

// simEntry is a checkpoint in the cache.
type simEntry struct {
	prefixes []uint64 // digests of its prefixes; the last one is its own
	last     float64  // clock at its last use
	uses     float64  // how often it was found
	cost     float64  // blocks that are not computed when it is found, over those of the checkpoint before it
	bytes    float64  // that came with it
	behind   bool     // superseded, and the time of grace is over
	grace    time.Duration
	parent   bool // a later checkpoint went on from it
	next     int  // the next request that would find it, for the clairvoyant order

	score float64 // the least goes first
	at    int     // position in the heap, −1 outside
	main  bool    // of S3-FIFO: it is in the main queue
}

type simPage struct{ holders []*simEntry }

type simHeap []*simEntry

func (h simHeap) Len() int           { return len(h) }
func (h simHeap) Less(i, j int) bool { return h[i].score < h[j].score }
func (h simHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].at, h[j].at = i, j
}

func (h *simHeap) Push(x any) {
	e := x.(*simEntry)
	e.at = len(*h)
	*h = append(*h, e)
}

func (h *simHeap) Pop() any {
	e := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	e.at = -1
	return e
}

// simulation is one cache with one order of eviction.
type simulation struct {
	order    simOrder
	setup    setup
	capacity float64
	used     float64
	clock    float64 // requests so far
	now      time.Duration
	entries  map[uint64]*simEntry // by the digest of the whole prefix
	pages    map[uint64]*simPage
	queue    simHeap
	graced   []*simEntry
	floor    float64 // of the orders with ageing: the score of what went last
	digests  []uint64
	future   *simFuture

	asked, hits int64
}

// simOrder scores an entry when it comes, is found, or changes; what scores least goes first.
type simOrder struct {
	name  string
	score func(s *simulation, e *simEntry) float64
	evict func(s *simulation) *simEntry // nil: the least score
	seer  bool
}

// behindFirst puts superseded checkpoints before all others, as the catalogue does.
func behindFirst(score func(s *simulation, e *simEntry) float64) func(s *simulation, e *simEntry) float64 {
	return func(s *simulation, e *simEntry) float64 {
		if e.behind {
			return e.last - 1e12
		}
		return score(s, e)
	}
}

func byRecency(_ *simulation, e *simEntry) float64 { return e.last }

// simFuture knows the requests to come.
type simFuture struct {
	asks map[uint64][]int // by the digest of a prefix: the requests that have it, ascending
	uses map[uint64][]int // … the requests of which it is the longest checkpoint before, if nothing is ever forgotten
}

func newSimFuture(requests []request, m model) *simFuture {
	f := &simFuture{asks: map[uint64][]int{}, uses: map[uint64][]int{}}
	published := map[uint64]bool{}
	var digests []uint64
	for i, r := range requests {
		digests = prefixDigests(digests, r)
		if m == attentionModel {
			for _, d := range digests {
				f.asks[d] = append(f.asks[d], i)
			}
			continue
		}
		for k := len(digests); k > 0; k-- {
			if d := digests[k-1]; published[d] {
				f.uses[d] = append(f.uses[d], i)
				break
			}
		}
		if n := len(digests); n > 0 {
			published[digests[n-1]] = true
		}
	}
	return f
}

// asked gives the first request after i that has the prefix, used the first that finds it.
func (f *simFuture) asked(d uint64, i int) int { return firstAfter(f.asks[d], i) }
func (f *simFuture) used(d uint64, i int) int  { return firstAfter(f.uses[d], i) }

func firstAfter(all []int, i int) int {
	at := sort.SearchInts(all, i+1)
	if at == len(all) {
		return math.MaxInt
	}
	return all[at]
}

// simOrders are the orders that are compared. A turnover is as many requests as there are checkpoints in the cache.
func simOrders() []simOrder {
	later := func(bonus func(e *simEntry) float64) func(s *simulation, e *simEntry) float64 {
		return func(s *simulation, e *simEntry) float64 { return e.last + bonus(e)*float64(len(s.entries)) }
	}
	worth := func(s *simulation, e *simEntry) float64 { return e.cost / e.bytes * float64(s.setup.PageBytes) }
	return []simOrder{
		{name: "LRU", score: byRecency},
		{name: "superseded first, then LRU (what the database does)", score: behindFirst(byRecency)},
		{name: "S3-FIFO", score: byRecency, evict: s3FIFO},
		{name: "LFU with ageing", score: func(s *simulation, e *simEntry) float64 { return s.floor + 1 + e.uses + e.last*1e-9 }},
		{name: "finds × blocks saved ÷ bytes, with ageing (GDSF)", score: func(s *simulation, e *simEntry) float64 {
			return s.floor + (1+e.uses)*worth(s, e) + e.last*1e-9
		}},
		{name: "LRU, blocks saved ÷ bytes of a turnover later", score: func(s *simulation, e *simEntry) float64 {
			return e.last + math.Min(1, worth(s, e))*float64(len(s.entries))
		}},
		{name: "LRU, prefixes of others a turnover later", score: later(func(e *simEntry) float64 {
			if e.parent {
				return 1
			}
			return 0
		})},
		{name: "LRU, log₂(1 + finds) half turnovers later", score: later(func(e *simEntry) float64 { return math.Log2(1+e.uses) / 2 })},
		{name: "LRU, a quarter of log₂(1 + finds) and of blocks saved ÷ bytes, prefixes of others a tenth earlier", score: func(s *simulation, e *simEntry) float64 {
			n := math.Log2(1+e.uses)/4 + math.Min(1, worth(s, e))/4
			if e.parent {
				n -= 0.1
			}
			return e.last + n*float64(len(s.entries))
		}},
	}
}

// s3FIFO picks by S3-FIFO (Yang et al., SOSP '23): a small queue of a tenth of the bytes from which only what was found
// goes on to the main queue, in which what was found goes round again.
func s3FIFO(s *simulation) *simEntry {
	for {
		var small, main *simEntry
		var smallBytes float64
		for _, e := range s.queue {
			if e.main {
				if main == nil || e.score < main.score {
					main = e
				}
			} else {
				smallBytes += e.bytes
				if small == nil || e.score < small.score {
					small = e
				}
			}
		}
		if small != nil && (smallBytes > s.capacity/10 || main == nil) {
			if small.uses > 0 {
				small.main, small.uses = true, 0
				small.score = s.clock
				heap.Fix(&s.queue, small.at)
				continue
			}
			return small
		}
		if main.uses > 0 {
			main.uses = math.Min(main.uses, 3) - 1
			main.score = s.clock
			s.clock += 1e-6
			heap.Fix(&s.queue, main.at)
			continue
		}
		return main
	}
}

func newSimulation(o simOrder, s setup, capacity int64, future *simFuture) *simulation {
	return &simulation{
		order: o, setup: s, capacity: float64(capacity), entries: map[uint64]*simEntry{}, pages: map[uint64]*simPage{}, future: future,
	}
}

// request looks a request up and publishes its checkpoint.
func (s *simulation) request(r request) {
	s.clock = math.Floor(s.clock) + 1
	s.now = r.At
	s.endGrace()
	s.digests = prefixDigests(s.digests, r)
	n := len(s.digests)
	s.asked += int64(n)
	var found *simEntry
	for k := n; k > 0 && found == nil; k-- {
		if e := s.entries[s.digests[k-1]]; e != nil {
			found = e
		} else if p := s.pages[s.digests[k-1]]; p != nil && s.setup.Model == attentionModel {
			found = p.holders[len(p.holders)-1]
		}
		if found != nil {
			s.hits += int64(k)
		}
	}
	if found != nil {
		found.uses++
		found.last = s.clock
		found.behind, found.grace = false, 0
		s.rescore(found, r.Index)
	}
	if n == 0 {
		return
	}
	if e := s.entries[s.digests[n-1]]; e != nil {
		return // it was there
	}
	s.publish(found, r.Index)
}

// rescore scores an entry after a change.
func (s *simulation) rescore(e *simEntry, index int) {
	if s.order.seer {
		e.next = s.future.used(e.prefixes[len(e.prefixes)-1], index)
	}
	if s.order.evict == nil {
		e.score = s.order.score(s, e)
	}
	if e.at >= 0 {
		heap.Fix(&s.queue, e.at)
	}
}

const simGrace = 300 * time.Second

func (s *simulation) endGrace() {
	for len(s.graced) > 0 && s.graced[0].grace <= s.now {
		e := s.graced[0]
		s.graced = s.graced[1:]
		if e.grace > 0 && e.at >= 0 {
			e.behind = true
			s.rescore(e, int(s.clock)-1)
		}
	}
}

func (s *simulation) publish(from *simEntry, index int) {
	n := len(s.digests)
	e := &simEntry{prefixes: append([]uint64(nil), s.digests...), last: s.clock + 0.5, at: -1} // after what was found
	// What it goes past is superseded, but for what it went on from.
	previous := 0
	for k := n - 1; k > 0; k-- {
		old := s.entries[s.digests[k-1]]
		if old == nil {
			continue
		}
		previous = max(previous, k)
		if old == from {
			old.parent = true
			s.rescore(old, index)
			continue
		}
		if old.behind || old.grace > 0 {
			break
		}
		if old.parent {
			old.grace = s.now + simGrace
			s.graced = append(s.graced, old)
		} else {
			old.behind = true
			s.rescore(old, index)
		}
	}
	for _, d := range s.digests {
		p := s.pages[d]
		if p == nil {
			p = &simPage{}
			s.pages[d] = p
			e.bytes += float64(s.setup.PageBytes)
		}
		p.holders = append(p.holders, e)
	}
	if s.setup.Model == hybridModel {
		e.bytes += float64(s.setup.StateBytes)
	}
	e.cost = float64(n - previous)
	s.used += e.bytes
	e.bytes = math.Max(e.bytes, 1)
	s.entries[s.digests[n-1]] = e
	if s.order.evict != nil {
		e.score = s.clock
	}
	heap.Push(&s.queue, e)
	s.rescore(e, index)
	for s.used > s.capacity && len(s.queue) > 0 {
		victim := s.queue[0]
		if s.order.evict != nil {
			victim = s.order.evict(s)
		}
		s.evict(victim)
	}
}

func (s *simulation) evict(e *simEntry) {
	if s.order.evict == nil {
		s.floor = math.Max(s.floor, e.score)
	}
	heap.Remove(&s.queue, e.at)
	delete(s.entries, e.prefixes[len(e.prefixes)-1])
	if s.setup.Model == hybridModel {
		s.used -= float64(s.setup.StateBytes)
	}
	for _, d := range e.prefixes {
		p := s.pages[d]
		for i, h := range p.holders {
			if h == e {
				p.holders = append(p.holders[:i], p.holders[i+1:]...)
				break
			}
		}
		if len(p.holders) == 0 {
			delete(s.pages, d)
			s.used -= float64(s.setup.PageBytes)
		}
	}
}
