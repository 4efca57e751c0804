package txn

import (
	"fmt"
	"slices"
)

// Query is a token sequence as the catalogue sees it.
type Query struct {
	Max    int64                  // the longest prefix that is of use, in tokens
	Spine  func(index int64) Key  // digest after index whole blocks
	Prefix func(tokens int64) Key // digest of the exact first tokens, 1…Max

	// Near is a guess at how many blocks of the sequence the catalogue knows, 0 if there is none, and after the query what was
	// found. A guess that is right saves most of the search.
	Near int64
}

// LongestListed finds the longest listed checkpoint that is an exact prefix of the query. A zero generation is a miss. It
// reads O(log n) spine nodes to find how far any listed checkpoint follows the query, and from there one node for each
// block back to the hit; how many checkpoints share a block does not matter.
func LongestListed(v Reader, q *Query) (g Generation, offset int64, err error) {
	err = ListedPrefixes(v, q, func(found Generation, at int64) bool {
		g, offset = found, at
		return false
	})
	return g, offset, err
}

// ListedPrefixes calls fn for every listed checkpoint that is an exact prefix of the query, longest first, until fn says
// no more.
func ListedPrefixes(v Reader, q *Query, fn func(g Generation, offset int64) (more bool)) error {
	if q.Max < 1 {
		return nil
	}
	var node spineEntry
	loaded := int64(-1) // index of node
	last := (q.Max - 1) / BlockTokens
	depth, err := Deepest(last, guess(q.Near, last), func(i int64) (bool, error) {
		ok, err := load(v, key1(tagSpine, q.Spine(i)), &node)
		if ok {
			loaded = i
		}
		return ok, err
	})
	if err != nil {
		return err
	}
	q.Near = depth + 1
	for i := depth; i >= 0; i-- {
		if i != loaded {
			if err := mustLoad(v, key1(tagSpine, q.Spine(i)), &node); err != nil {
				return err
			}
		}
		for _, x := range node.endings {
			n := i*BlockTokens + int64(x.tail)
			if n > q.Max {
				continue
			}
			g, err := readPrefix(v, q.Prefix(n))
			if err != nil {
				return err
			}
			if g.IsZero() {
				continue // ends there after other tokens
			}
			if !fn(g, n) {
				return nil
			}
		}
	}
	return nil
}

// SharedBlocks tells how many whole blocks of the query some listed checkpoint runs through and goes on behind.
func SharedBlocks(v Reader, q *Query) (blocks int64, err error) {
	var node spineEntry
	blocks, err = Deepest(q.Max/BlockTokens, NoGuess, func(i int64) (bool, error) { return load(v, key1(tagSpine, q.Spine(i)), &node) })
	return max(blocks, 0), err
}

// Deepest finds the last i of 0…last for which present holds, −1 if there is none. What is present at i is present at every
// smaller index, and the last index that is asked about and present is the answer. near is a guess at the answer, −1…last, or NoGuess:
// one that is right costs two questions at most. Without one it looks at the end and one before it, because a conversation that
// goes on is known nearly to its end, then doubles its steps back, then halves what is left: it asks about twice the logarithm of
// the distance from the end.
func Deepest(last, near int64, present func(i int64) (bool, error)) (int64, error) {
	low, high := int64(-1), last+1 // present at low, absent at high
	var failed error
	look := func(i int64) (ok bool) {
		if failed != nil {
			return false
		}
		if ok, failed = present(i); ok {
			low = i
		} else {
			high = i
		}
		return ok
	}
	if near >= -1 && near <= last && (near < 0 || look(near)) && near < last {
		look(near + 1)
	}
	if high > last && low < last {
		look(last)
	}
	for end, back := high, int64(1); high-low > 1 && failed == nil; back *= 2 {
		if end-back <= low {
			break
		}
		if look(end - back) {
			break
		}
	}
	for high-low > 1 && failed == nil {
		look(low + (high-low)/2)
	}
	if failed != nil {
		return -1, failed
	}
	return low, nil
}

// NoGuess is what Deepest is given where nothing is known of the answer.
const NoGuess = -2

// guess turns a number of things that may be present, 0 for not known, into a guess for Deepest.
func guess(near, last int64) int64 {
	if near < 1 {
		return NoGuess
	}
	return min(near-1, last)
}

// AttentionShape is what a lookup at page boundaries has to know of one attention group.
type AttentionShape struct {
	PageTokens   int64
	WindowTokens int64 // 0: full attention, a chained group
}

// Needed gives the positions of the pages that a restore at offset needs.
func (s AttentionShape) Needed(offset int64) (first, count int64) {
	last := (offset - 1) / s.PageTokens
	if s.WindowTokens > 0 && offset > s.WindowTokens {
		first = (offset - s.WindowTokens) / s.PageTokens
	}
	return first, last - first + 1
}

// LongestBoundary finds the largest multiple of step, up to max tokens, at which every page that a restore needs belongs
// to a listed checkpoint; 0 is a miss. It is for namespaces in which all groups are attention groups. pageKey gives the
// key of the whole page at a position. step is a multiple of every group's page size.
func LongestBoundary(v Reader, shapes []AttentionShape, step, max int64, pageKey func(group int, position int64) Key) (int64, error) {
	for i, s := range shapes {
		if step < 1 || s.PageTokens < 1 || step%s.PageTokens != 0 {
			return 0, fmt.Errorf("boundaries %d tokens apart, pages of group %d have %d: %w", step, i, s.PageTokens, ErrInvalid)
		}
	}
	if max < step || len(shapes) == 0 {
		return 0, nil
	}
	best := max / step * step
	listed := func(group int, position int64) (bool, error) {
		var p PageEntry
		ok, err := load(v, key1(tagPage, pageKey(group, position)), &p)
		return ok && p.Listed > 0, err
	}
	for i, s := range shapes {
		if s.WindowTokens > 0 || best == 0 {
			continue
		}
		depth, err := Deepest(best/s.PageTokens-1, NoGuess, func(k int64) (bool, error) { return listed(i, k) })
		if err != nil {
			return 0, err
		}
		best = min(best, (depth+1)*s.PageTokens) / step * step
	}
	for ; best > 0; best -= step {
		whole := true
		for i, s := range shapes {
			if s.WindowTokens == 0 {
				continue
			}
			first, count := s.Needed(best)
			for k := first + count - 1; k >= first && whole; k-- { // the last page first: it is the one that is missing most often
				ok, err := listed(i, k)
				if err != nil {
					return 0, err
				}
				whole = ok
			}
		}
		if whole {
			return best, nil
		}
	}
	return 0, nil
}

// ChainPages gives the keys of a chained group from page 0 to the page head, by following parents.
func ChainPages(v Reader, head Key, count int64) ([]Key, error) {
	var p PageEntry
	if err := mustLoad(v, key1(tagPage, head), &p); err != nil {
		return nil, err
	}
	if p.Depth != count-1 {
		return nil, fmt.Errorf("page %s has %d pages before it in the chain instead of %d: %w", head.Short(), p.Depth, count-1, ErrCorrupt)
	}
	keys := []Key{head}
	for depth := p.Depth; depth > 0; depth-- {
		key := p.Parent
		if err := mustLoad(v, key1(tagPage, key), &p); err != nil {
			return nil, err
		}
		if p.Depth != depth-1 {
			return nil, fmt.Errorf("page %s is at depth %d of its chain instead of %d: %w", key.Short(), p.Depth, depth-1, ErrCorrupt)
		}
		keys = append(keys, key)
	}
	slices.Reverse(keys)
	return keys, nil
}

// AnyListed gives a listed checkpoint that needs the page, zero if there is none. It follows one way down the chain, so it
// takes as many steps as the checkpoint has pages after this one.
func AnyListed(v Reader, page Key) (Generation, error) {
	var p PageEntry
	if ok, err := load(v, key1(tagPage, page), &p); err != nil || !ok {
		return Generation{}, err
	}
	for p.Listed > 0 {
		holders, err := edges[Generation](v, key1(tagHold, page))
		if err != nil {
			return Generation{}, err
		}
		for _, g := range holders {
			if s, err := ReadState(v, g); err != nil || (s != nil && s.Status == Listed) {
				return g, err
			}
		}
		children, err := edges[Key](v, key1(tagChild, page))
		if err != nil {
			return Generation{}, err
		}
		depth := p.Depth
		p = PageEntry{}
		for _, c := range children {
			if err := mustLoad(v, key1(tagPage, c), &p); err != nil {
				return Generation{}, err
			}
			if p.Depth != depth+1 { // so that the way ends
				return Generation{}, fmt.Errorf("page %s is at depth %d of its chain instead of %d: %w", c.Short(), p.Depth, depth+1, ErrCorrupt)
			}
			if p.Listed > 0 {
				page = c
				break
			}
		}
		if p.Listed == 0 {
			return Generation{}, refuse(ExactAccounting, ErrCorrupt, "page %s is counted as needed by a listed checkpoint and none needs it", page.Short())
		}
	}
	return Generation{}, nil
}

// OnDisk tells whether every page of a checkpoint, listed or retired, has disk copies.
func OnDisk(v Reader, g Generation) (bool, error) {
	m, err := ReadManifest(v, g)
	if err != nil || m == nil {
		return false, err
	}
	whole := true
	err = m.holds(func(_ *GroupPages, key Key) error {
		p, err := ReadPage(v, key)
		whole = whole && p != nil && p.ChainDurable
		return err
	})
	return whole, err
}

// Dependents gives the generations, listed or retired, that need the page.
func Dependents(v Reader, page Key) ([]Generation, error) {
	var gens []Generation
	seen, passed := map[Generation]bool{}, map[Key]bool{page: true}
	next := []Key{page}
	for len(next) > 0 {
		var key Key
		key, next = next[len(next)-1], next[:len(next)-1]
		holders, err := edges[Generation](v, key1(tagHold, key))
		if err != nil {
			return nil, err
		}
		for _, g := range holders {
			if !seen[g] {
				seen[g] = true
				gens = append(gens, g)
			}
		}
		children, err := edges[Key](v, key1(tagChild, key))
		if err != nil {
			return nil, err
		}
		for _, c := range children {
			if !passed[c] {
				passed[c] = true
				next = append(next, c)
			}
		}
	}
	return gens, nil
}
