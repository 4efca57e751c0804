package db

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

func looseBytes(i, n int) []byte { return content(txn.Key{byte(i), byte(i >> 8), 0x77}, 0, int64(n)) }

func looseName(i int) []byte { return fmt.Appendf(nil, "chunk/%d", i) }

func getLoose(t testing.TB, d *DB, ns *Namespace, i, n int) bool {
	t.Helper()
	l, err := d.GetLoose(context.Background(), nil, ns, looseName(i))
	require.NoError(t, err)
	defer l.Release()
	if l.Found() == 0 {
		require.Nil(t, l.Bytes(0))
		return false
	}
	require.Equal(t, looseBytes(i, n), l.Bytes(0))
	return true
}

// Given loose pages of many sizes, when they are put, got, deleted, and the database is closed and opened, then each is
// itself or a miss, and space and gauges come back to zero.
func TestTheLifeOfLoosePages(t *testing.T) {
	for _, policy := range []WritePolicy{WriteThrough, OnEvict} {
		t.Run(policy.String(), func(t *testing.T) {
			dir := tempDir(t)
			ns, other := testNamespace(t, 1), testNamespace(t, 2)
			d := openDB(t, dir, Options{WritePolicy: policy})
			sizes := []int{1, 63, 64, 4095, 4096, 4097, 100_000}
			var pages []LoosePage
			for i, n := range sizes {
				pages = append(pages, LoosePage{Key: looseName(i), Bytes: looseBytes(i, n)})
			}
			require.NoError(t, d.PutLoose(context.Background(), ns, pages...))
			written := stats(t, d).PagesWritten
			require.NoError(t, d.PutLoose(context.Background(), ns, pages...), "idempotent")
			require.Equal(t, written, stats(t, d).PagesWritten)
			lsn := stats(t, d).LSN
			for i, n := range sizes {
				require.True(t, getLoose(t, d, ns, i, n))
				require.False(t, getLoose(t, d, other, i, n), "nothing crosses a namespace")
			}
			closeDB(t, d)
			d = openDB(t, dir, Options{WritePolicy: policy})
			there, err := d.ExistsLoose(ns, looseName(0), looseName(6), looseName(7))
			require.NoError(t, err)
			require.Equal(t, []bool{true, true, false}, there)
			for i, n := range sizes {
				require.True(t, getLoose(t, d, ns, i, n))
			}
			held, err := d.GetLoose(context.Background(), nil, ns, looseName(6), looseName(9))
			require.NoError(t, err)
			require.Equal(t, 1, held.Found())
			n, err := d.DeleteLoose(context.Background(), ns, looseName(0), looseName(1), looseName(2), looseName(3), looseName(4), looseName(5), looseName(6), looseName(7))
			require.NoError(t, err)
			require.Equal(t, len(sizes), n)
			require.Equal(t, looseBytes(6, 100_000), held.Bytes(0), "deleted under a lease, readable until it ends")
			held.Release()
			require.Nil(t, held.Bytes(0))
			for i, n := range sizes {
				require.False(t, getLoose(t, d, ns, i, n))
			}
			require.Equal(t, lsn, stats(t, d).LSN, "loose pages write no record")
			idle(d)
			s := stats(t, d)
			require.Zero(t, s.RAMUsed)
			require.Zero(t, s.DiskBytes)
			require.Zero(t, s.Leases)
		})
	}
}

// Loose pages and checkpoints share RAM and disk: under pressure both are evicted, and none is ever wrong. With -race.
func TestLoosePagesUnderPressure(t *testing.T) {
	ns := testNamespace(t, 1)
	d := openDB(t, tempDir(t), Options{WritePolicy: OnEvict, RAMBytes: 1 << 20, DiskBytes: 3 << 20, SegmentBytes: 1 << 20})
	var group sync.WaitGroup
	for w := range 4 {
		group.Go(func() {
			for i := range 100 {
				id := w*100 + i
				require.NoError(t, d.PutLoose(context.Background(), ns, LoosePage{Key: looseName(id), Bytes: looseBytes(id, 9000)}))
				getLoose(t, d, ns, w*100+i/2, 9000)
				if i%7 == 0 {
					_, err := d.DeleteLoose(context.Background(), ns, looseName(w*100+i/3))
					require.NoError(t, err)
				}
				if i%10 == 0 {
					s := seqOf(t, ns, tokens(uint64(id), 512))
					publish(t, d, s, 512)
					restoreAt(t, d, s)
				}
			}
		})
	}
	group.Wait()
	checkCatalogue(t, d)
	idle(d)
	require.LessOrEqual(t, stats(t, d).DiskBytes, int64(3<<20))
	require.NotZero(t, stats(t, d).PagesEvicted)
	require.Zero(t, stats(t, d).Leases)
}

// A page that is deleted while somebody looks for it does not come back: neither as a page that is there nor as space that is given
// back twice, whether the delete came before
// the look or after it; and it can be put again at once.
func TestDeletedLoosePageDoesNotComeBack(t *testing.T) {
	ns := testNamespace(t, 1)
	for _, when := range []string{"before the look", "between look and proof"} {
		t.Run(when, func(t *testing.T) {
			d := openDB(t, tempDir(t), Options{})
			require.NoError(t, d.PutLoose(context.Background(), ns, LoosePage{Key: looseName(1), Bytes: looseBytes(1, 9000)}))
			outOfRAM(t, d)
			keys, err := looseKeys(ns, 1, func(int) []byte { return looseName(1) })
			require.NoError(t, err)
			remove := func() {
				n, err := d.DeleteLoose(context.Background(), ns, looseName(1))
				require.NoError(t, err)
				require.Equal(t, 1, n)
			}
			old := d.index.Snapshot()
			defer old.Close()
			if when == "before the look" {
				remove()
			}
			l := &LooseLease{hold: hold{db: d}, at: make([]int, 1)}
			require.NoError(t, d.enterKnownLoose(old, l, keys))
			require.Len(t, l.pages, 1)
			there, err := d.ExistsLoose(ns, looseName(1))
			require.NoError(t, err)
			require.Equal(t, []bool{when != "before the look"}, there)
			put := make(chan error, 1)
			if when == "before the look" { // who puts it anew waits for the proof
				go func() {
					put <- d.PutLoose(context.Background(), ns, LoosePage{Key: looseName(1), Bytes: looseBytes(1, 9000)})
				}()
			} else {
				remove()
			}
			now := d.index.Snapshot()
			require.ErrorIs(t, d.proveLoose(now, l.pages), errChanged)
			require.NoError(t, now.Close())
			d.settleUnproven(l.pages)
			d.residency.unpinAll(l.pages)
			if when == "before the look" {
				require.NoError(t, <-put)
				require.True(t, getLoose(t, d, ns, 1, 9000))
				remove()
			}
			require.False(t, getLoose(t, d, ns, 1, 9000))
			settle(t, d)
			requireEmpty(t, d)
			recount(t, d)
		})
	}
}

// Given loose pages that are deleted, when their index cannot be made durable, then their copies stay where they are, because a crash
// brings their entries back; and once it can, those of later deletions go, and theirs with them (record-before-effect).
func TestCopiesOfLoosePagesGoAfterTheirEntries(t *testing.T) {
	ctx, ns, dir := context.Background(), testNamespace(t, 1), tempDir(t)
	d := openDB(t, dir, Options{})
	for i := range 4 {
		require.NoError(t, d.PutLoose(ctx, ns, LoosePage{Key: looseName(i), Bytes: looseBytes(i, 9000)}))
	}
	closeDB(t, d)

	forget := func(i int) {
		n, err := d.DeleteLoose(ctx, ns, looseName(i))
		require.NoError(t, err)
		require.Equal(t, 1, n)
		idle(d)
	}
	d = openDB(t, dir, Options{})
	used := stats(t, d).DiskBytes
	d.disk.settled = func() error { return ErrNoSpace }
	forget(0)
	require.Equal(t, used, stats(t, d).DiskBytes, "the copy is there, and counts")
	crash(t, d)

	d = openDB(t, dir, Options{})
	require.True(t, getLoose(t, d, ns, 0, 9000), "the deletion was not durable: the page is back, whole")
	flush := d.disk.settled
	d.disk.settled = func() error { return ErrNoSpace }
	forget(0)
	d.disk.settled = flush
	forget(1)
	require.Less(t, stats(t, d).DiskBytes, used-2*8192, "both copies are gone")
	recount(t, d)
	crash(t, d)

	d = openDB(t, dir, Options{})
	for i := range 4 {
		require.Equal(t, i > 1, getLoose(t, d, ns, i, 9000), "page %d: the deletion was durable before the copy went", i)
	}
	r, err := d.Scrub(ctx, ScrubOptions{})
	require.NoError(t, err)
	require.Zero(t, r.Lost)
}

// Many who put, get and delete the same pages, out of RAM and in it: each get is the page or a miss, and the space comes out even.
func TestLoosePagesUnderManyHands(t *testing.T) {
	d := openDB(t, tempDir(t), Options{RAMBytes: 128 << 10})
	ns := testNamespace(t, 1)
	var group sync.WaitGroup
	for w := range 6 {
		group.Go(func() {
			for i := range 150 {
				k := (i*7 + w) % 8
				switch (i + w) % 4 {
				case 0, 1:
					if err := d.PutLoose(context.Background(), ns, LoosePage{Key: looseName(k), Bytes: looseBytes(k, 9000)}); err != nil {
						t.Error(err)
					}
				case 2:
					l, err := d.GetLoose(context.Background(), nil, ns, looseName(k))
					if err != nil {
						t.Error(err)
						continue
					}
					if l.Found() > 0 && !bytes.Equal(looseBytes(k, 9000), l.Bytes(0)) {
						t.Errorf("page %d holds other bytes", k)
					}
					l.Release()
					d.residency.evictClean(1 << 20)
				default:
					if _, err := d.DeleteLoose(context.Background(), ns, looseName(k)); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	group.Wait()
	settle(t, d)
	recount(t, d)
	for k := range 8 {
		_, err := d.DeleteLoose(context.Background(), ns, looseName(k))
		require.NoError(t, err)
	}
	requireEmpty(t, d)
}

// Every disk copy is given back once: also where a page was entered into the table from a reading of the index that is older than its
// deletion, and its first holder still has it.
func TestLoosePageDeletedTwiceIsGivenBackOnce(t *testing.T) {
	for _, leased := range []bool{false, true} {
		t.Run(fmt.Sprintf("leased=%v", leased), func(t *testing.T) {
			d := openDB(t, tempDir(t), Options{})
			ns := testNamespace(t, 1)
			for k := range 2 { // the other one keeps the segment
				require.NoError(t, d.PutLoose(context.Background(), ns, LoosePage{Key: looseName(k), Bytes: looseBytes(k, 9000)}))
			}
			outOfRAM(t, d)
			keys, err := looseKeys(ns, 1, func(int) []byte { return looseName(1) })
			require.NoError(t, err)
			var first *LooseLease
			if leased {
				first, err = d.GetLoose(context.Background(), nil, ns, looseName(1))
				require.NoError(t, err)
			}
			old := d.index.Snapshot()
			defer old.Close()
			n, err := d.DeleteLoose(context.Background(), ns, looseName(1))
			require.NoError(t, err)
			require.Equal(t, 1, n)
			late := &LooseLease{hold: hold{db: d}, at: make([]int, 1)}
			require.NoError(t, d.enterKnownLoose(old, late, keys))
			require.Len(t, late.pages, 1)
			n, err = d.DeleteLoose(context.Background(), ns, looseName(1))
			require.NoError(t, err)
			require.Zero(t, n)
			d.residency.unpinAll(late.pages)
			if leased {
				require.Equal(t, looseBytes(1, 9000), first.Bytes(0))
				first.Release()
			}
			settle(t, d)
			recount(t, d)
			require.True(t, getLoose(t, d, ns, 0, 9000))
		})
	}
}

// Two that put a page, of whom the first has written and evicted it before the second, who had looked before, enters it.
func TestLoosePagePutTwiceHasOneCopy(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	ns := testNamespace(t, 1)
	put := func() {
		slots, err := d.allocate(context.Background(), []int64{9000})
		require.NoError(t, err)
		copy(slots[0].Bytes(), looseBytes(1, 9000))
		keys, err := looseKeys(ns, 1, func(int) []byte { return looseName(1) })
		require.NoError(t, err)
		p, err := d.enterLoose(context.Background(), keys[0], slots)
		require.NoError(t, err)
		require.NoError(t, d.persist(context.Background(), []*page{p}))
		d.residency.unpinAll([]*page{p})
		outOfRAM(t, d)
	}
	put()
	put()
	settle(t, d)
	recount(t, d)
	require.True(t, getLoose(t, d, ns, 1, 9000))
	n, err := d.DeleteLoose(context.Background(), ns, looseName(1))
	require.NoError(t, err)
	require.Equal(t, 1, n)
	settle(t, d)
	requireEmpty(t, d)
}

// A page that is being deleted is not taken for one that is there: who gets it misses it, and who puts it waits.
func TestLoosePagePutWhileItIsDeleted(t *testing.T) {
	d := openDB(t, tempDir(t), Options{WritePolicy: OnEvict})
	ns := testNamespace(t, 1)
	require.NoError(t, d.PutLoose(context.Background(), ns, LoosePage{Key: looseName(1), Bytes: looseBytes(1, 9000)}))
	keys, err := looseKeys(ns, 1, func(int) []byte { return looseName(1) })
	require.NoError(t, err)
	r := d.residency
	r.mu.Lock()
	old := r.pages.get(keys[0])
	old.known = false // as dropLoose does before it changes the index
	r.pin(old)
	r.mu.Unlock()
	put := make(chan error, 1)
	go func() {
		put <- d.PutLoose(context.Background(), ns, LoosePage{Key: looseName(1), Bytes: looseBytes(1, 9000)})
	}()
	require.Eventually(t, func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return old.use != nil && old.use.changed != nil
	}, patience, time.Millisecond)
	require.False(t, getLoose(t, d, ns, 1, 9000))
	r.mu.Lock()
	r.forget(old)
	r.mu.Unlock()
	require.NoError(t, <-put)
	r.unpinAll([]*page{old})
	require.True(t, getLoose(t, d, ns, 1, 9000))
	recount(t, d)
}
