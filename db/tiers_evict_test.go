package db

import (
	"context"
	"math/bits"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/db/internal/segment"
	"github.com/holdfast-db/holdfast/txn"
)

// Eviction from RAM and disk, and what its errors do.

// What leaves RAM has a synced copy and a synced record first; then none of it is in RAM, and it restores.
func TestFlushThenGone_EVE01(t *testing.T) {
	s := &seam{}
	d := openDB(t, tempDir(t), Options{WritePolicy: OnEvict, segmentFS: s.segments(), walFS: s.log()})
	seq, books := seqOf(t, testNamespace(t, 1, sevenPages(4096)...), tokens(1, 48)), shelf{}
	books.publish(t, d, seq, 48)
	s.trace()
	outOfRAM(t, d)
	var payload, record int
	for i, e := range s.noted() {
		switch {
		case e.op == "sync" && strings.HasSuffix(e.path, ".seg"):
			payload = i
			require.Zero(t, record, "a record before the payload")
		case e.op == "log sync":
			record = i
		}
	}
	require.NotZero(t, payload)
	require.Greater(t, record, payload)
	require.EqualValues(t, 7, stats(t, d).PagesWritten)
	require.Zero(t, d.residency.counts().pages)
	require.Equal(t, []int64{48}, books.requireListedIsReadable(t, d))
	recount(t, d)
}

// A write that fails and succeeds when it is tried again loses nothing. One that goes on failing, in part or altogether, is tried a bounded
// number of times with growing pauses; then what could not be written is retired, and only that, and the RAM is released.
func TestFailedFlush_EVE02(t *testing.T) {
	for _, x := range []struct {
		name  string
		times int
		keeps bool
	}{{"once", 1, true}, {"twice", 2, true}, {"for ever", -1, false}} {
		for _, op := range []string{"write", "sync", "create"} {
			for _, class := range []string{"EIO", "ENOSPC"} {
				t.Run(x.name+" "+op+" "+class, func(t *testing.T) {
					s := &seam{}
					d := openDB(t, tempDir(t), Options{WritePolicy: OnEvict, segmentFS: s.segments()})
					ns, books := testNamespace(t, 1, attentionOnly(4096, 16)...), shelf{}
					safe, seq := seqOf(t, ns, tokens(1, 48)), seqOf(t, ns, tokens(2, 48))
					books.publish(t, d, safe, 48, durable)
					books.publish(t, d, seq, 48)
					require.NoError(t, d.segments.Seal(context.Background()))
					s.failTimes(op, errno(t, class), x.times)
					begun := time.Now()
					outOfRAM(t, d)
					n := stats(t, d).WritesFailed
					if x.keeps {
						require.EqualValues(t, x.times, n)
						require.EqualValues(t, 48, restoreAt(t, d, seq))
					} else {
						require.EqualValues(t, writeTries, n)
						require.GreaterOrEqual(t, time.Since(begun), 3*writeBackoff, "20 ms and 40 ms")
						require.Zero(t, lookupAt(t, d, seq))
						require.EqualValues(t, 1, stats(t, d).RetiredTotal)
					}
					s.fail("", nil)
					require.EqualValues(t, 48, restoreAt(t, d, safe))
					books.requireListedIsReadable(t, d)
					recount(t, d)
					books.publish(t, d, seq, 48)
					outOfRAM(t, d)
					require.Equal(t, []int64{48, 48}, books.requireListedIsReadable(t, d))
					recount(t, d)
				})
			}
		}
	}
}

// When one lifetime class is written and the other fails, the copies that were written are used: the next try writes the missing ones
// only.
func TestPartialFlush_EVE02(t *testing.T) {
	v, books := newValve(), shelf{}
	fails := atomic.Bool{}
	d := openDB(t, tempDir(t), Options{WritePolicy: OnEvict, segmentFS: largeWritesFail{v.segments(), &fails}})
	ns := testNamespace(t, 1, Group{Name: "attention:kv", Kind: Attention, PageBytes: 4096, PageTokens: 16},
		Group{Name: "recurrent:state", Kind: Recurrent, PageBytes: 1 << 20, Pages: 1})
	seq := seqOf(t, ns, tokens(1, 48))
	gen, _ := books.publish(t, d, seq, 48)
	fails.Store(true)
	pages := d.residency.oldest(&d.residency.dirty, 1<<30)
	require.Len(t, pages, 4)
	require.ErrorIs(t, d.persist(context.Background(), pages), ErrIO)
	require.EqualValues(t, 3, stats(t, d).PagesWritten)
	fails.Store(false)
	require.NoError(t, d.persist(context.Background(), pages))
	d.residency.unpinAll(pages)
	require.EqualValues(t, 4, stats(t, d).PagesWritten, "only the missing copy")
	c, err := d.Checkpoint(gen)
	require.NoError(t, err)
	require.True(t, c.Durable)
	outOfRAM(t, d)
	require.Equal(t, []int64{48}, books.requireListedIsReadable(t, d))
	recount(t, d)
}

// largeWritesFail fails the writes of a mebibyte and more.
type largeWritesFail struct {
	segment.FS
	on *atomic.Bool
}

func (f largeWritesFail) Create(path string, direct bool) (segment.File, error) {
	file, err := f.FS.Create(path, direct)
	return largeWritesFailFile{file, f.on}, err
}

func (f largeWritesFail) Open(path string, write, direct bool) (segment.File, error) {
	file, err := f.FS.Open(path, write, direct)
	return largeWritesFailFile{file, f.on}, err
}

type largeWritesFailFile struct {
	segment.File
	on *atomic.Bool
}

func (f largeWritesFailFile) WriteAt(buffers [][]byte, off int64) (int, error) {
	n := 0
	for _, b := range buffers {
		n += len(b)
	}
	if f.on.Load() && n >= 1<<20 {
		return 0, os.ErrDeadlineExceeded
	}
	return f.File.WriteAt(buffers, off)
}

// Without a disk nothing is dropped while it is listed, and a page that is pinned between its choice and its write stays in RAM.
func TestNothingListedIsDropped_EVE03_SUP12(t *testing.T) {
	v, books := newValve(), shelf{}
	d := openDB(t, tempDir(t), Options{WritePolicy: OnEvict, segmentFS: v.segments()})
	ns := testNamespace(t, 4, attentionOnly(4096, 16)...)
	seq := seqOf(t, ns, tokens(1, 28*16))
	books.publish(t, d, seq, seq.Len())
	open := v.close("write")
	dropped := make(chan int64, 1)
	go func() {
		left, err := d.DropRAM(context.Background())
		require.NoError(t, err)
		dropped <- left
	}()
	v.waitFor(t, "write")
	r, err := d.Restore(context.Background(), seq, LookupOptions{MaxOffset: 16})
	require.NoError(t, err)
	open()
	require.EqualValues(t, 4*4096, <-dropped, "27 of 28 pages of all ranks went, the pinned one stayed")
	verify(t, r, 4)
	r.Release()
	outOfRAM(t, d)
	require.EqualValues(t, seq.Len(), restoreAt(t, d, seq))
	books.requireListedIsReadable(t, d)
	recount(t, d)

	gone := openDB(t, tempDir(t), Options{WritePolicy: Never})
	publish(t, gone, seq, seq.Len())
	outOfRAM(t, gone)
	require.Zero(t, lookupAt(t, gone, seq), "retired before it was dropped")
	require.EqualValues(t, 1, stats(t, gone).RetiredTotal)
	require.Zero(t, stats(t, gone).PagesWritten)
	recount(t, gone)
}

// Making room frees what is needed: nothing if there is enough, some if some is missing.
func TestEvictionFreesWhatIsNeeded_EVE05(t *testing.T) {
	d := openDB(t, tempDir(t), Options{RAMBytes: 8 << 20})
	ns := testNamespace(t, 1, attentionOnly(1<<20, 16)...)
	for i := range 6 {
		publish(t, d, seqOf(t, ns, tokens(uint64(i), 16)), 16)
	}
	publish(t, d, seqOf(t, ns, tokens(100, 16)), 16)
	require.Zero(t, stats(t, d).PagesEvicted)
	publish(t, d, seqOf(t, ns, tokens(101, 48)), 48)
	require.EqualValues(t, 2, stats(t, d).PagesEvicted)
	recount(t, d)
}

// A publication that was given up leaves nothing to be written; the others of the same batch are.
func TestAbandonedPagesAreNotWritten_EVE06(t *testing.T) {
	d := openDB(t, tempDir(t), Options{WritePolicy: OnEvict})
	ns, books := testNamespace(t, 1, sevenPages(4096)...), shelf{}
	kept, lost := seqOf(t, ns, tokens(1, 48)), seqOf(t, ns, tokens(2, 48))
	p := begin(t, d, lost, 48)
	fill(t, p, 0)
	books.publish(t, d, kept, 48)
	expires(&p.lease, shortly)
	becomes(t, d, 0, pendingOf, "pending")
	outOfRAM(t, d)
	require.EqualValues(t, 7, stats(t, d).PagesWritten)
	require.Zero(t, lookupAt(t, d, lost))
	require.Equal(t, []int64{48}, books.requireListedIsReadable(t, d))
	recount(t, d)
}

// A background loop that fails is logged, counted and started again; it ends with the database and not before.
func TestLoopsSurvive_EVE07(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	var passes atomic.Int64
	third := make(chan struct{})
	d.loop("test", func() {
		switch passes.Add(1) {
		case 1, 2:
			panic("one pass fails")
		case 3:
			close(third)
		}
		<-d.gate.stopping
	})
	select {
	case <-third:
	case <-time.After(patience):
		require.FailNow(t, "not started again")
	}
	require.EqualValues(t, 2, stats(t, d).LoopsRestarted)
	seq := seqOf(t, testNamespace(t, 1, tiny()...), tokens(1, 16))
	publish(t, d, seq, 16)
	require.EqualValues(t, 16, restoreAt(t, d, seq))
	closeDB(t, d)
	require.EqualValues(t, 3, passes.Load())
}

// Options have documented defaults, and what cannot be is refused before anything is made.
func TestEvictionOptions_EVE08(t *testing.T) {
	o, err := Options{}.withDefaults()
	require.NoError(t, err)
	require.EqualValues(t, DefaultRAMBytes, o.RAMBytes)
	require.Zero(t, o.DiskBytes)
	require.Equal(t, WriteThrough, o.WritePolicy)
	require.Equal(t, DefaultAdmissionTimeout, o.AdmissionTimeout)
	require.Equal(t, DefaultLeaseTimeout, o.LeaseTimeout)
	require.Equal(t, DefaultLoadTimeout, o.LoadTimeout)
	require.Equal(t, DefaultSupersedeGrace, o.SupersedeGrace)
	for _, bad := range []Options{{WritePolicy: 4}, {RAMBytes: MinRAMBytes - 1}, {RAMBytes: MaxRAMBytes + 1}, {DiskBytes: -1}, {SegmentBytes: 1}, {AdmissionTimeout: time.Hour + 1}} {
		_, err := bad.withDefaults()
		require.Error(t, err, "%+v", bad)
	}
}

// Deleting and evicting while the same pages are being read, and files that somebody removes: full correct bytes or a clean miss, and the
// disk gauge falls by exactly what was deleted.
func TestEvictionWhileReading_B14(t *testing.T) {
	v, books := newValve(), shelf{}
	d := openDB(t, tempDir(t), Options{segmentFS: v.segments()})
	seq, gen := onDisk(t, d, books, 1)
	other, _ := onDisk(t, d, books, 2)
	before := stats(t, d).DiskBytes
	open := v.close("read")
	answer := make(chan *Restoration, 1)
	go func() {
		r, err := d.Restore(context.Background(), seq, LookupOptions{})
		if err != nil {
			require.ErrorIs(t, err, ErrNotFound)
		}
		answer <- r
	}()
	v.waitFor(t, "read")
	require.NoError(t, d.Delete(context.Background(), gen))
	_, err := d.DropRAM(context.Background())
	require.NoError(t, err)
	open()
	r := <-answer
	require.NotNil(t, r, "its lease defers the removal")
	verify(t, r, 2)
	require.Equal(t, before, stats(t, d).DiskBytes)
	r.Release()
	settle(t, d)
	idle(d)
	require.Equal(t, before-2*7*4096, stats(t, d).DiskBytes)
	infos, err := d.segments.Segments()
	require.NoError(t, err)
	for _, info := range infos {
		require.NoError(t, os.Remove(segmentOf(d, info.Number)))
	}
	_, err = d.Clear(context.Background(), other.Namespace().ID())
	require.NoError(t, err, "removing what is gone already succeeds")
	require.Zero(t, restoreAt(t, d, other))
	recount(t, d)
	requireEmpty(t, d)
}

// The same by the thousand, at random.
func TestReadersAndEvictors_B14(t *testing.T) {
	rounds := 2500
	if testing.Short() {
		rounds = 300
	}
	d := openDB(t, memoryDir(t), Options{RAMBytes: 256 << 10, SegmentBytes: 1 << 20})
	ns := testNamespace(t, 1, sevenPages(4096)...)
	var group sync.WaitGroup
	for w := range 4 {
		group.Go(func() {
			r := rand.New(rand.NewPCG(uint64(w), 14))
			for range rounds {
				seq := seqOf(t, ns, tokens(uint64(r.IntN(4)), 48))
				switch r.IntN(4) {
				case 0:
					p, err := d.Begin(context.Background(), PublishRequest{Sequence: seq, Offset: 48})
					if err != nil {
						t.Error(err)
						return
					}
					slots, err := p.Slots(context.Background(), 0)
					for _, s := range slots {
						s.Write(content(s.Key(), 0, s.Size()))
					}
					if err == nil {
						p.Commit(context.Background(), 0)
					}
					p.Abort()
				case 1:
					for c, err := range d.Checkpoints(context.Background()) {
						if err == nil {
							d.Delete(context.Background(), c.Generation)
						}
						break
					}
				default:
					if r.IntN(2) == 0 {
						d.residency.evictClean(1 << 20)
					}
					restoreAt(t, d, seq)
				}
			}
		})
	}
	group.Wait()
	settle(t, d)
	recount(t, d)
	require.Zero(t, stats(t, d).FailedReads, "nothing that is alive is ever removed")
	requireEmpty(t, d)
}

// Very many tiny pages are a few files; finding one among a hundred times as many takes a few readings of the index more, and no longer;
// asking whether pages exist lists no directory; and a disk without room for one more name is ErrNoSpace and shows in the counters.
// HOLDFAST_BIG=1 goes on to a million pages.
func TestManyTinyPages_B20(t *testing.T) {
	sizes := []int64{1000, 10_000, 100_000}
	if os.Getenv("HOLDFAST_BIG") != "" {
		sizes = []int64{10_000, 100_000, 1_000_000}
	} else if testing.Short() {
		sizes = []int64{1000, 10_000}
	}
	ns := testNamespace(t, 1, attentionOnly(64, 1)...)
	s := &listings{FS: segment.OS()}
	full := &seam{}
	d := openDB(t, memoryDir(t), Options{RAMBytes: 128 << 20, segmentFS: s.over(full)})
	total := int64(0)
	measure := func(n int64) (reads int, median time.Duration) {
		seq := seqOf(t, ns, tokens(uint64(n), int(n)))
		for at := min(n, MaxPublicationCopies); ; at = min(n, at+MaxPublicationCopies) {
			publish(t, d, seq, at)
			if at == n {
				break
			}
		}
		total += n
		v := &countedReads{Reader: d.index.Snapshot()}
		defer v.Reader.(interface{ Close() error }).Close()
		c, err := longest(v, seq, n, n)
		require.NoError(t, err)
		require.Equal(t, n, c.offset)
		var took []time.Duration
		for range 51 {
			begun := time.Now()
			require.Equal(t, n, lookupAt(t, d, seq))
			took = append(took, time.Since(begun))
		}
		slices.Sort(took)
		t.Logf("%d pages: %d reads, %v a lookup", n, v.reads, took[25])
		return v.reads, took[25]
	}
	reads, median := measure(sizes[0])
	for _, n := range sizes[1:] {
		more, longer := measure(n)
		require.LessOrEqual(t, more, reads+2*bits.Len64(uint64(n/sizes[0])), "a binary search over depth")
		if os.Getenv("HOLDFAST_TIMING") != "" {
			require.LessOrEqual(t, longer, 2*median)
		}
	}
	infos, err := d.segments.Segments()
	require.NoError(t, err)
	require.LessOrEqual(t, int64(len(infos)), total/64)
	listed := s.count.Load()
	keys := make([][]byte, 64)
	for i := range keys {
		keys[i] = looseName(i)
	}
	there, err := d.ExistsLoose(ns, keys...)
	require.NoError(t, err)
	require.NotContains(t, there, true)
	require.Equal(t, listed, s.count.Load())
	require.NoError(t, d.segments.Seal(context.Background()))
	full.fail("create", errno(t, "ENOSPC"))
	p := begin(t, d, seqOf(t, ns, tokens(7, 10)), 10)
	fill(t, p, 0)
	_, err = p.Commit(context.Background(), 0)
	requireClass(t, err, ErrNoSpace)
	require.NotZero(t, stats(t, d).WritesFailed)
	full.fail("", nil)
	recount(t, d)
}

// countedReads counts the readings of a catalogue.
type countedReads struct {
	txn.Reader
	reads int
}

func (c *countedReads) Get(key []byte) ([]byte, error) {
	c.reads++
	return c.Reader.Get(key)
}

func (c *countedReads) Scan(prefix []byte, fn func(key, value []byte) (bool, error)) error {
	return c.Reader.Scan(prefix, func(key, value []byte) (bool, error) {
		c.reads++
		return fn(key, value)
	})
}

// listings counts the listings of directories.
type listings struct {
	segment.FS
	count atomic.Int64
}

func (l *listings) List(dir string) ([]segment.Listed, error) {
	l.count.Add(1)
	return l.FS.List(dir)
}

// over puts the seam above it.
func (l *listings) over(s *seam) segment.FS { return seamSegments{l, s} }
