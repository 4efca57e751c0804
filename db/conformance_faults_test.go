package db

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Payload, record and acknowledgement in their order, and what a disk that fails leaves behind.

// The order of a hundred durable publications as the disk sees it: payload written, payload synced, record appended, log synced,
// acknowledged; and a directory synced after each file made or removed in it, before anything relies on that.
func TestOrderOfDurablePublications_B29(t *testing.T) {
	disk := &seam{}
	d := openDB(t, memoryDir(t), Options{SegmentBytes: 1 << 20, segmentFS: disk.segments(), walFS: disk.log()})
	ns, books := testNamespace(t, 2), shelf{}
	books.publish(t, d, seqOf(t, ns, tokens(1000, 80)), 80)
	disk.trace()
	for i := range 100 {
		books.publish(t, d, seqOf(t, ns, tokens(uint64(i), 80)), 80)
		disk.done("acknowledged", fmt.Sprint(i))
	}
	written, unnamed := map[string]bool{}, map[string]bool{} // written and not synced; with entries that are not synced
	appended, acknowledged := false, 0
	var payloads, records, segments int
	for i, e := range disk.noted() {
		switch e.op {
		case "create", "remove", "log mkdir", "log remove":
			unnamed[filepath.Dir(e.path)] = true
			if e.op == "create" {
				segments++
			}
		case "log appender":
			unnamed[e.path] = true
		case "syncdir", "log syncdir":
			delete(unnamed, e.path)
		case "write":
			written[e.path] = true
			payloads++
		case "sync":
			delete(written, e.path)
		case "log append":
			require.Empty(t, written, "event %d: a record before its payload is synced", i)
			require.Empty(t, unnamed, "event %d: a record for a file without a synced name", i)
			appended = true
			records++
		case "log sync":
			appended = false
		case "acknowledged":
			require.Empty(t, written, "event %d", i)
			require.Empty(t, unnamed, "event %d", i)
			require.False(t, appended, "event %d: acknowledged before its record is synced", i)
			acknowledged++
			require.GreaterOrEqual(t, records, acknowledged)
			require.GreaterOrEqual(t, payloads, acknowledged)
		}
	}
	require.Equal(t, 100, acknowledged)
	require.Greater(t, segments, 2, "segments were begun in between")
	require.Len(t, books.requireListedIsReadable(t, d), 101)
}

// sizes gives the size of every file below a directory.
func sizes(t testing.TB, root string) map[string]int64 {
	t.Helper()
	out := map[string]int64{}
	for name, n := range files(t, root) {
		if n >= 0 {
			out[filepath.Join(root, name)] = n
		}
	}
	return out
}

// A sync of the log fails once, though later ones would succeed: the publication fails, the handle takes no writes until it is
// reopened, reads go on, and no clean end is marked. What was not synced may be there or not: nothing is there in part.
func TestFailedLogSyncStopsWrites_B29(t *testing.T) {
	for _, lost := range []bool{false, true} {
		for _, policy := range []WritePolicy{WriteThrough, OnEvict} {
			t.Run(fmt.Sprintf("unsynced bytes lost %v %v", lost, policy), func(t *testing.T) {
				disk := &seam{}
				dir := tempDir(t)
				d := openDB(t, dir, Options{walFS: disk.log(), WritePolicy: policy})
				ns, books := testNamespace(t, 2), shelf{}
				before, a, b := seqOf(t, ns, tokens(1, 100)), seqOf(t, ns, tokens(2, 100)), seqOf(t, ns, tokens(3, 100))
				old, _ := books.publish(t, d, before, 100, durable)
				synced := sizes(t, filepath.Join(dir, walName))

				fails := func(seq *Sequence) {
					p := begin(t, d, seq, 100, durable)
					fill(t, p, 0)
					fill(t, p, 1)
					require.False(t, commit(t, p, 0))
					_, err := p.Commit(context.Background(), 1)
					require.ErrorIs(t, err, ErrIO)
					require.ErrorIs(t, err, syscall.EIO)
					require.Zero(t, lookupAt(t, d, seq))
					books.keep(t, p.Generation(), seq, 100)
				}
				disk.failTimes("log sync", syscall.EIO, 1)
				fails(a)
				fails(b)
				require.ErrorIs(t, d.Retire(context.Background(), old), ErrIO)
				require.ErrorIs(t, d.Delete(context.Background(), old), ErrIO)
				require.EqualValues(t, 100, restoreAt(t, d, before), "reading goes on")
				requireIdle(t, d)
				_, err := d.Close(context.Background())
				require.ErrorIs(t, err, ErrIO)

				if lost {
					for path := range sizes(t, filepath.Join(dir, walName)) {
						if n, ok := synced[path]; ok {
							require.NoError(t, os.Truncate(path, n))
						} else {
							require.NoError(t, os.Remove(path))
						}
					}
				}
				d = openDB(t, dir, Options{})
				require.False(t, d.log.Repair().Clean, "no clean end was marked")
				require.EqualValues(t, 100, restoreAt(t, d, before))
				if lost {
					require.Zero(t, lookupAt(t, d, a))
				} else {
					require.Contains(t, []int64{0, 100}, restoreAt(t, d, a), "absent or complete")
				}
				require.Zero(t, lookupAt(t, d, b), "nothing was written after the failure")
				books.requireListedIsReadable(t, d)
				books.publish(t, d, b, 100)
				require.EqualValues(t, 100, restoreAt(t, d, b))
				requireEmpty(t, d)
			})
		}
	}
}

// A disk that dies at any one of its operations and stays dead: whatever had been acknowledged is there after reopening on a
// disk that works, what had been deleted is not, and all that is listed is readable.
func TestDiskThatDiesAtEveryOperation_B29_PUB07(t *testing.T) {
	step, failures := 2, 0
	if testing.Short() {
		step = 9
	}
	ns := testNamespace(t, 1, shared()...)
	text := tokens(1, 400)
	for nth := 1; ; nth += step {
		disk := &seam{}
		dir := memoryDir(t)
		d := openDB(t, dir, Options{segmentFS: disk.segments(), walFS: disk.log(), WritePolicy: OnEvict})
		disk.dieAt(nth)
		books := shelf{}
		acknowledged, deleted, doubtful := map[int64]Generation{}, map[int64]bool{}, map[int64]bool{}
		var failed error
		publishDurably := func(n int64, change ...func(*PublishRequest)) {
			r := PublishRequest{Sequence: seqOf(t, ns, text), Offset: n, Durable: true}
			for _, c := range change {
				c(&r)
			}
			p, err := d.Begin(context.Background(), r)
			if failed = errors.Join(failed, err); err != nil {
				return
			}
			books.keep(t, p.Generation(), r.Sequence, n)
			fill(t, p, 0)
			if _, err = p.Commit(context.Background(), 0); err != nil {
				failed, doubtful[n] = err, true
				return
			}
			acknowledged[n], deleted[n] = p.Generation(), false
		}
		remove := func(n int64) {
			g, ok := acknowledged[n]
			if !ok {
				return
			}
			if err := d.Delete(context.Background(), g); err != nil {
				failed, doubtful[n] = err, true
				return
			}
			deleted[n] = true
		}
		publishDurably(48)
		publishDurably(96)
		remove(48)
		publishDurably(200, withMeta("a"))
		publishDurably(200, withMeta("b")) // replaces it
		publishDurably(48)
		remove(96)
		publishDurably(400)
		crash(t, d)

		d = openDB(t, dir, Options{})
		offsets := books.requireListedIsReadable(t, d)
		for n := range acknowledged {
			if !doubtful[n] {
				require.Equal(t, !deleted[n], slices.Contains(offsets, n), "operation %d: %d was acknowledged, deleted %v", nth, n, deleted[n])
			}
		}
		requireEmpty(t, d)
		closeDB(t, d)
		if failed != nil {
			failures++
			continue
		}
		if !disk.dead() {
			require.Greater(t, failures, 30/step)
			return
		}
		// What died was an operation that nobody waits for: the return of space.
	}
}

// The page that fills exactly at the end is stored, and what the caller does with its buffers after the commit reaches no
// page, though the disk writes come later.
func TestLastPageAndReusedBuffers_B12(t *testing.T) {
	rounds, batch := 1000, 125
	if testing.Short() {
		rounds, batch = 40, 40
	}
	ns := testNamespace(t, 1, attentionOnly(64, 16)...)
	d := openDB(t, memoryDir(t), Options{WritePolicy: OnEvict})
	var pending []*Sequence
	right := 0
	for round := range rounds {
		seq := seqOf(t, ns, tokens(uint64(round), 1024))
		p := begin(t, d, seq, 1024)
		all := slots(t, p, 0)
		require.Len(t, all, 64)
		buffers := make([][]byte, len(all))
		for i, s := range all {
			buffers[i] = content(s.Key(), 0, s.Size())
			_, err := s.Write(buffers[i])
			require.NoError(t, err)
			clear(buffers[i]) // the instant Write has returned, and before the commit
		}
		require.True(t, commit(t, p, 0))
		for i, s := range all {
			for j := range buffers[i] {
				buffers[i][j] = 0xEE
			}
			_, err := s.Write(buffers[i])
			require.ErrorIs(t, err, ErrConflict)
		}
		if pending = append(pending, seq); len(pending) < batch {
			continue
		}
		require.NotZero(t, stats(t, d).RAMDirtyBytes, "the writes are deferred")
		left, err := d.DropRAM(context.Background())
		require.NoError(t, err)
		require.Zero(t, left)
		d = reopen(t, d, true)
		for _, seq := range pending {
			require.EqualValues(t, 1024, lookupAt(t, d, seq), "not 1008")
			require.EqualValues(t, 1024, restoreAt(t, d, seq))
			right++
		}
		requireEmpty(t, d)
		d = reopen(t, d, false) // makes the index durable, so that the next crash replays its own rounds only
		pending = nil
	}
	require.Equal(t, rounds, right)
}

// Newer and older are told by the log, not by any clock: whatever the time stamps of the files say, over a restart, what was
// published later is newer, and what is evicted is the oldest.
func TestOrderIsThatOfTheLog_B33(t *testing.T) {
	const each = 16 << 10
	d := openDB(t, tempDir(t), Options{DiskBytes: 12 * each, RAMBytes: 1 << 20})
	ns, books := testNamespace(t, 1, attentionOnly(each, 16)...), shelf{}
	var order []Generation
	push := func() {
		g, _ := books.publish(t, d, seqOf(t, ns, tokens(uint64(len(order)), 16)), 16)
		order = append(order, g)
	}
	for range 6 {
		push()
	}
	for i, shift := range []time.Duration{365 * 24 * time.Hour, -365 * 24 * time.Hour, -24 * time.Hour} {
		dir := d.dir.path
		closeDB(t, d)
		for name := range files(t, dir) {
			at := time.Now().Add(shift)
			require.NoError(t, os.Chtimes(filepath.Join(dir, name), at, at))
		}
		d = openDB(t, dir, d.options)
		require.EqualValues(t, 6+2*i, stats(t, d).Checkpoints, "no live checkpoint disappears")
		push()
		push()
	}
	require.EqualValues(t, 12, stats(t, d).Checkpoints)
	require.Equal(t, order, listedInOrder(t, d))
	push() // over the budget
	left := listedInOrder(t, d)
	require.NotEmpty(t, left)
	require.Less(t, len(left), 13)
	require.Equal(t, order[13-len(left):], left, "the oldest went, whatever the clocks say; the newest is not the first victim")
	books.requireListedIsReadable(t, d)
}

// listedInOrder gives the listed checkpoints by LSN; that it is the order of eviction is checked as well.
func listedInOrder(t testing.TB, d *DB) (gens []Generation) {
	t.Helper()
	last := int64(0)
	for c, err := range d.Checkpoints(context.Background()) {
		require.NoError(t, err)
		require.Greater(t, int64(c.Published), last)
		last = int64(c.Published)
		gens = append(gens, c.Generation)
	}
	return gens
}

// Pages of sizes around powers of two, and logical positions beyond 32 bits, come back as they were; sizes and offsets that
// cannot be are refused with the limit and change nothing.
func TestSizesAndOffsetsAreExact_B38(t *testing.T) {
	restarts(t, func(t *testing.T, crashed bool) {
		var groups []Group
		for _, n := range []int64{1, 63, 64, 65, 4095, 4096, 4097, 65535, 65537, 1<<20 + 1} {
			groups = append(groups, Group{Name: fmt.Sprintf("auxiliary:%d", n), Kind: Auxiliary, PageBytes: n, Pages: 3})
		}
		d := openDB(t, tempDir(t), Options{RAMBytes: 64 << 20})
		ns, books := testNamespace(t, 2, groups...), shelf{}
		seq := seqOf(t, ns, tokens(1, 30))
		positions := []int64{1<<31 - 1, 1<<32 + 5, MaxPosition}
		var sets []PageSet
		for _, g := range groups {
			sets = append(sets, PageSet{Group: g.Name, Positions: positions})
		}
		books.publish(t, d, seq, 30, func(r *PublishRequest) { r.Groups = sets })
		books.publish(t, d, seq, 20)
		d = reopen(t, d, crashed)
		r, err := d.Restore(context.Background(), seq, LookupOptions{})
		require.NoError(t, err)
		verify(t, r, 2)
		for rank := range 2 {
			pages := r.Pages(rank)
			require.Len(t, pages, 3*len(groups))
			for i, p := range pages {
				require.Equal(t, positions[i%3], p.Position)
				require.EqualValues(t, groups[i/3].PageBytes, len(p.Bytes))
			}
		}
		r.Release()

		before := still(t, d)
		for _, n := range []int64{0, 31, 1 << 31, 1<<32 + 5, 1<<63 - 1, -1, -1 << 63} {
			_, err := d.Begin(context.Background(), PublishRequest{Sequence: seq, Offset: n})
			require.ErrorIs(t, err, ErrInvalid)
			require.ErrorContains(t, err, fmt.Sprintf("PublishRequest.Offset is %d: the sequence has offsets 1…30", n))
		}
		for _, n := range []int64{0, MaxPageBytes + 1, 1<<31 - 1, 1 << 31, 1<<32 - 1, 1 << 32, 1<<32 + 1} {
			_, err := NewNamespace(testIdentity(1, Group{Name: "a", Kind: Auxiliary, PageBytes: n, Pages: 1}))
			require.Error(t, err)
			require.True(t, errors.Is(err, ErrInvalid) || errors.Is(err, ErrTooLarge))
			require.ErrorContains(t, err, fmt.Sprintf("PageBytes is %d", n))
		}
		big := testNamespace(t, 2, Group{Name: "a", Kind: Auxiliary, PageBytes: MaxPageBytes, Pages: 1})
		_, err = d.Begin(context.Background(), PublishRequest{Sequence: seqOf(t, big, tokens(1, 30)), Offset: 30})
		require.ErrorIs(t, err, ErrTooLarge, "larger than the RAM tier")
		require.ErrorContains(t, err, "67108864")
		_, err = d.Restore(context.Background(), seqOf(t, big, tokens(1, 30)), LookupOptions{})
		require.ErrorIs(t, err, ErrNotFound)
		_, err = d.Restore(context.Background(), ns.NewSequence(), LookupOptions{})
		require.ErrorIs(t, err, ErrNotFound)
		require.Equal(t, before, still(t, d))
		require.Equal(t, []int64{20, 30}, books.requireListedIsReadable(t, d))
		requireEmpty(t, d)
	})
}
