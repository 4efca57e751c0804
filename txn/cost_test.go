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

// TestOneMorePageCostsOnePage: given checkpoints of 16 and of 4096 pages and 2 ranks, when one more page of each rank is
// published, then both write the same entries and the same log bytes, but for the digits of their lengths, and at most
// 4 KiB. Retiring and deleting it costs the same for both, too.
func TestOneMorePageCostsOnePage(t *testing.T) {
	for _, durable := range []bool{false, true} {
		var publish, retire, delete []cost
		for _, pages := range []int{16, 4096} {
			c, q, _ := conversation(t, pages)
			more := q.plus(run(1, 16)...)
			in := more.intent("")
			d := newDisk()
			if durable {
				d.next[7] = 1 << 40
				in.Have = func(Key) ([]Placement, bool) { return d.copies(7, 2, 65536), true }
			}
			x, effects := c.measure(t, publishing(in))
			digits := len(binary.AppendUvarint(nil, uint64(more.len()))) + len(binary.AppendUvarint(nil, uint64(pages+1)))
			x.log -= digits
			publish = append(publish, x)
			g := in.Manifest.Generation()
			require.Equal(t, &Effects{Listed: []Generation{g}}, effects)

			x, _ = c.measure(t, retiring(false, g))
			retire = append(retire, x)
			x, effects = c.measure(t, func(v View) (Record, error) { return DecideDelete(v, []Generation{g}) })
			delete = append(delete, x)
			require.Len(t, effects.Dropped, 1)
		}
		for _, x := range [][]cost{publish, retire, delete} {
			// 4096 pages end at the edge of a block and one page more is in the next, as are 16 pages and one more.
			require.Equal(t, x[0], x[1])
		}
		require.LessOrEqual(t, publish[0].log, 500)
		writes := counts{
			gets: publish[0].apply.gets,
			// child and hold edge, parent and new page, block before and new block, manifest, order, state, prefix, accounts, applied,
			// and what waits for a copy: the chain before the new page does
			sets: 13,
		}
		if durable {
			writes.sets++ // the segment
		}
		require.Equal(t, writes, publish[0].apply)
		require.LessOrEqual(t, publish[0].apply.gets, 12)
		require.Equal(t, counts{gets: 8}, publish[0].decide) // state, namespace, 2 pages, 2 blocks, prefix… see below
		require.LessOrEqual(t, retire[0].apply.sets+retire[0].apply.deletes, 12)
		require.LessOrEqual(t, delete[0].apply.sets+delete[0].apply.deletes, 9)
		require.LessOrEqual(t, retire[0].log+delete[0].log, 100)
	}
}
