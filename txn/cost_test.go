package txn

import (
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"
)

// counts is how often a view was called.
type counts struct{ gets, scans, scanned, sets, deletes int }

// countingView counts the calls that reach a view.
type countingView struct {
	View
	counts
}

func (v *countingView) Get(key []byte) ([]byte, error) { v.gets++; return v.View.Get(key) }

func (v *countingView) Set(key, value []byte) error { v.sets++; return v.View.Set(key, value) }

func (v *countingView) Delete(key []byte) error { v.deletes++; return v.View.Delete(key) }

func (v *countingView) Scan(prefix []byte, fn func(key, value []byte) (bool, error)) error {
	v.scans++
	return v.View.Scan(prefix, func(key, value []byte) (bool, error) { v.scanned++; return fn(key, value) })
}

// cost is what one transaction took: to decide on it, to apply it, and in the log.
type cost struct {
	decide, apply counts
	log           int
}

// measure decides and applies without the check of the whole catalogue, which is made afterwards.
func (c *catalogue) measure(t *testing.T, decide func(v View) (Record, error)) (x cost, effects *Effects) {
	v := &countingView{View: c.view}
	r, err := decide(v)
	require.NoError(t, err)
	x.decide, v.counts = v.counts, counts{}
	l := c.append(r)
	decoded, err := Decode(l.kind, l.payload)
	require.NoError(t, err)
	effects, err = apply(v, l.lsn, decoded)
	require.NoError(t, err)
	x.apply, x.log = v.counts, len(l.payload)
	require.NoError(t, Check(c.view))
	return x, effects
}

// conversation publishes a checkpoint of so many pages of 16 tokens, with 2 ranks, and gives it with its page size.
func conversation(t *testing.T, pages int) (*catalogue, *sequence, Generation) {
	c := newCatalogue()
	q := newSpace("chain", 2, shape{tokens: 16, bytes: 65536}).sequence().plus(run(1, pages*16)...)
	g, _ := c.publish(t, q.intent(""))
	return c, q, g
}

func publishing(in *PublishIntent) func(v View) (Record, error) {
	return func(v View) (Record, error) { return DecidePublish(v, in) }
}

func retiring(alsoDelete bool, gens ...Generation) func(v View) (Record, error) {
	return func(v View) (Record, error) { return DecideRetire(v, gens, ReasonRequested, alsoDelete, true) }
}

// TestOneMorePageCostsOnePage: given checkpoints of 32 and of 4096 pages and 2 ranks, when one more page of each rank is
// published, retired and deleted, then both take the same calls and the same log bytes, but for the digits of their
// lengths, and far less than 4 KiB of log.
func TestOneMorePageCostsOnePage(t *testing.T) {
	for _, placed := range []bool{false, true} {
		var publish, retire, delete []cost
		for _, pages := range []int{32, 4096} { // both end at the edge of a block of tokens
			c, q, _ := conversation(t, pages)
			more := q.plus(run(1, 16)...)
			in := more.intent("")
			g := in.Manifest.Generation()
			segments := 0
			if placed {
				segments = 1
				d := newDisk()
				in.Have = func(Key) ([]Placement, bool) { return d.copies(7, 2, 65536), true }
			}
			x, effects := c.measure(t, publishing(in))
			require.Equal(t, &Effects{Listed: []Generation{g}}, effects)
			x.log -= len(binary.AppendUvarint(nil, uint64(more.len()))) + len(binary.AppendUvarint(nil, uint64(pages+1)))
			publish = append(publish, x)
			// Read: own state, namespace, the new page and the one before, the new block and the one before, prefix.
			require.Equal(t, counts{gets: 7}, x.decide)
			// Read: the same, applied LSN and accounts. Written: applied LSN and accounts, both pages, their
			// child edge and a hold edge, both blocks, manifest, state, order, request, prefix, and that a copy of what came before is
			// waited for.
			require.Equal(t, counts{gets: 9 + segments, sets: 14 + segments}, x.apply)

			x, _ = c.measure(t, retiring(false, g))
			retire = append(retire, x)
			require.Equal(t, counts{gets: 1}, x.decide)
			require.Equal(t, counts{gets: 8, scans: 1, sets: 6, deletes: 5}, x.apply)

			x, effects = c.measure(t, func(v View) (Record, error) { return DecideDelete(v, []Generation{g}) })
			delete = append(delete, x)
			require.Len(t, effects.Dropped, 1)
			require.Equal(t, counts{gets: 1}, x.decide)
			require.Equal(t, counts{gets: 6 + segments, sets: 3, deletes: 5 + segments}, x.apply)
		}
		for _, x := range [][]cost{publish, retire, delete} {
			require.Equal(t, x[0], x[1])
		}
		require.LessOrEqual(t, publish[0].log, 500)
		require.Equal(t, 36, retire[0].log)
		require.Equal(t, 34, delete[0].log)
	}
}

// TestPolicyCostsAFewSteps: asking the supersession policy costs the same after 32 pages and after 4096, and after 3 turns
// and after 60.
func TestPolicyCostsAFewSteps(t *testing.T) {
	turn := func(q *sequence, n int) *PublishIntent {
		in := q.intent("")
		in.PrefixKey = q.prefix
		in.Manifest.Request = string(rune('a' + n%26))
		return in
	}
	var costs []cost
	for _, pages := range []int{32, 4096} {
		c, q, g := conversation(t, pages)
		q = q.plus(run(1, 16)...)
		x, _ := c.measure(t, publishing(turn(q, 1)))
		// Besides what it costs without: the block that is not there and the last one, the prefix that ends there,
		// state and manifest of that, and its siblings.
		require.Equal(t, counts{gets: 12, scans: 1, scanned: 1}, x.decide)
		s, err := ReadState(c.view, g)
		require.NoError(t, err)
		require.True(t, s.Continued)
		x.log -= len(binary.AppendUvarint(nil, uint64(q.len()))) + len(binary.AppendUvarint(nil, uint64(pages+1)))
		costs = append(costs, x)
	}
	require.Equal(t, costs[0], costs[1])

	c, q, _ := conversation(t, 4)
	costs = nil
	for n := range 60 {
		q = q.plus(run(int32(n), 128)...)
		x, _ := c.measure(t, publishing(turn(q, n)))
		x.log = 0
		costs = append(costs, x)
		if n > 3 && n < 26 {
			require.LessOrEqual(t, x.decide.gets, costs[3].decide.gets+2)
			require.LessOrEqual(t, x.apply.gets+x.apply.sets+x.apply.deletes, costs[3].apply.gets+costs[3].apply.sets+costs[3].apply.deletes+2)
		}
	}
}

// TestPolicyLooksAtSomeSiblings: a request with very many checkpoints does not make the next publication dear.
func TestPolicyLooksAtSomeSiblings(t *testing.T) {
	c := newCatalogue()
	q := newSpace("state", 1, shape{count: 1, bytes: 1}).sequence().plus(1, 2, 3)
	for n := range int32(2 * supersedeSiblingsMax) {
		in := q.plus(n).intent("")
		in.Manifest.Request = "busy"
		r, err := DecidePublish(c.view, in)
		require.NoError(t, err)
		c.append(r).apply(t, c.view)
	}
	next := q.plus(0, 1).intent("")
	next.PrefixKey, next.Manifest.Request = q.plus(0, 1).prefix, "next"
	v := &countingView{View: c.view}
	r, err := DecidePublish(v, next)
	require.NoError(t, err)
	require.Equal(t, supersedeSiblingsMax, v.scanned)
	require.InDelta(t, supersedeSiblingsMax, len(r.Supersedes), 1, "but for the one it continues")
	c.commit(t, r)
}

// TestOneMoreTokenCostsNoBlock: a checkpoint that ends in the block of another one touches that block alone, however many
// blocks come before.
func TestOneMoreTokenCostsNoBlock(t *testing.T) {
	var costs []cost
	for _, pages := range []int{33, 4097} {
		c, q, _ := conversation(t, pages)
		x, _ := c.measure(t, publishing(q.plus(1).intent("")))
		x.log = 0
		costs = append(costs, x)
		require.Equal(t, counts{gets: 6}, x.decide)
		require.Equal(t, counts{gets: 8, sets: 13}, x.apply)
	}
	require.Equal(t, costs[0], costs[1])
}

// TestOneTurnOfALongConversation_B05: given a conversation of many turns, when a turn is published, then exactly its own
// pages are written; when it is published again, nothing; when any turn is retired and deleted, then the cost is that of
// what it alone has, wherever it is.
func TestOneTurnOfALongConversation_B05(t *testing.T) {
	const turns, pagesPerTurn = 64, 4
	c := newCatalogue()
	s := newSpace("hybrid", 2, shape{tokens: 128, bytes: 4096}, shape{count: 1, bytes: 8192})
	q := s.sequence()
	var gens []Generation
	var first cost
	for turn := range turns {
		q = q.plus(run(int32(turn), pagesPerTurn*128)...)
		in := q.intent("")
		r, err := DecidePublish(c.view, in)
		require.NoError(t, err)
		require.Len(t, r.Pages, pagesPerTurn+1)
		payload := int64(0)
		for _, p := range r.Pages {
			payload += p.Bytes * 2
		}
		require.EqualValues(t, 2*(pagesPerTurn*4096+8192), payload, "what is new, and nothing else")
		x, _ := c.measure(t, publishing(in))
		gens = append(gens, in.Manifest.Generation())
		if turn == 2 {
			first = x
		}
		if turn > 2 {
			require.Equal(t, []counts{first.decide, first.apply}, []counts{x.decide, x.apply}, "turn %d", turn)
			require.LessOrEqual(t, x.log-first.log, 4, "digits")
		}
		for range 10 {
			r, err := DecidePublish(c.view, in)
			require.NoError(t, err)
			require.Nil(t, r)
		}
	}
	for _, turn := range []int{10, 0, 62, 33} {
		x, effects := c.measure(t, retiring(true, gens[turn]))
		require.Equal(t, 36, x.log)
		require.Len(t, effects.Dropped, 1, "its state; the turns after it need its chain")
		require.LessOrEqual(t, x.apply.gets, 14)
		require.LessOrEqual(t, x.apply.sets+x.apply.deletes, 15)
		require.Equal(t, 1, x.apply.scans)
		require.Zero(t, x.apply.scanned)
	}
	x, effects := c.measure(t, retiring(true, gens[63]))
	require.Len(t, effects.Dropped, 1+2*pagesPerTurn, "turn 63, and turn 62 that was retired before")
	require.LessOrEqual(t, x.apply.gets+x.apply.sets+x.apply.deletes, 60)
}

// TestPersistCostsItsPages: placing one page costs the same wherever its chain began, and a page becomes durable with all
// before it once: the search goes on from there only through pages that have copies already.
func TestPersistCostsItsPages(t *testing.T) {
	var costs []cost
	for _, pages := range []int64{16, 1024} {
		c, q, g := conversation(t, int(pages))
		d := newDisk()
		persisting := func(first, last int64) func(v View) (Record, error) {
			var in []PersistIntent
			for k := first; k < last; k++ {
				in = append(in, PersistIntent{Key: q.pageAt(0, k), Place: d.copies(1, 2, 65536)})
			}
			return func(v View) (Record, error) { r, _, err := DecidePersist(v, in); return r, err }
		}
		x, effects := c.measure(t, persisting(0, pages-1))
		require.Empty(t, effects.Durable)
		require.LessOrEqual(t, x.apply.sets, int(pages)+3)
		x, effects = c.measure(t, persisting(pages-1, pages))
		require.Equal(t, []Generation{g}, effects.Durable)
		x.log = 0
		costs = append(costs, x)
		require.Equal(t, counts{gets: 1}, x.decide)
		// Read: applied LSN, accounts, the page and the one before, the segment, what waits, the state.
		// Written: the page, the segment, order, state, applied LSN, accounts; what waited is deleted.
		require.Equal(t, counts{gets: 7, scans: 2, scanned: 1, sets: 6, deletes: 1}, x.apply)
	}
	require.Equal(t, costs[0], costs[1])
}

// TestPersistLooksAtBranches: given a page that many branches follow, when it gets its disk copy, then the branches without
// one are looked at and not written.
func TestPersistLooksAtBranches(t *testing.T) {
	const branches = 100
	c, q, _ := conversation(t, 1)
	for i := range int32(branches) {
		c.publish(t, q.plus(i+2).intent(""))
	}
	x, effects := c.measure(t, func(v View) (Record, error) {
		r, _, err := DecidePersist(v, []PersistIntent{{Key: q.pageAt(0, 0), Place: newDisk().copies(1, 2, 65536)}})
		return r, err
	})
	require.Len(t, effects.Durable, 1)
	require.Equal(t, counts{gets: 6 + branches, scans: 2, scanned: 1 + branches, sets: 6, deletes: 1}, x.apply)
}
