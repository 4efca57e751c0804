package db

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/db/internal/segment"
	"github.com/holdfast-db/holdfast/txn"
	"github.com/holdfast-db/holdfast/wal"
)

// What the tests of the tiers share, and the sequences from the field.

// valve is a disk whose operations can be made to wait or to take their time: read, write, sync; and of the log: log sync.
type valve struct {
	mu    sync.Mutex // guards what follows
	shut  map[string]chan struct{}
	delay map[string]time.Duration
	came  chan string // operations that have met a shut valve
}

func newValve() *valve {
	return &valve{shut: map[string]chan struct{}{}, delay: map[string]time.Duration{}, came: make(chan string, 1<<16)}
}

// close makes an operation wait until the function that it gives is called.
func (v *valve) close(op string) (open func()) {
	v.mu.Lock()
	defer v.mu.Unlock()
	c := make(chan struct{})
	v.shut[op] = c
	return sync.OnceFunc(func() {
		v.mu.Lock()
		defer v.mu.Unlock()
		delete(v.shut, op)
		close(c)
	})
}

// slow makes an operation take so long.
func (v *valve) slow(op string, delay time.Duration) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.delay[op] = delay
}

func (v *valve) pass(op string) {
	v.mu.Lock()
	c, delay := v.shut[op], v.delay[op]
	v.mu.Unlock()
	if delay > 0 {
		time.Sleep(delay) // the disk's own time, which nobody hopes for
	}
	if c != nil {
		v.came <- op
		<-c
	}
}

// waitFor waits until an operation has met the shut valve.
func (v *valve) waitFor(t testing.TB, op string) {
	t.Helper()
	limit := time.After(patience)
	for {
		select {
		case got := <-v.came:
			if got == op {
				return
			}
		case <-limit:
			require.FailNow(t, "nobody came to "+op)
		}
	}
}

func (v *valve) segments() segment.FS { return valveSegments{segment.OS(), v} }

func (v *valve) log() wal.FS { return valveLog{wal.OS(), v} }

type valveSegments struct {
	segment.FS
	v *valve
}

func (f valveSegments) Create(path string, direct bool) (segment.File, error) {
	file, err := f.FS.Create(path, direct)
	return valveFile{file, f.v}, err
}

func (f valveSegments) Open(path string, write, direct bool) (segment.File, error) {
	file, err := f.FS.Open(path, write, direct)
	return valveFile{file, f.v}, err
}

type valveFile struct {
	segment.File
	v *valve
}

func (f valveFile) WriteAt(buffers [][]byte, off int64) (int, error) {
	f.v.pass("write")
	return f.File.WriteAt(buffers, off)
}

func (f valveFile) ReadAt(buffers [][]byte, off int64) (int, error) {
	f.v.pass("read")
	return f.File.ReadAt(buffers, off)
}

func (f valveFile) Sync() error {
	f.v.pass("sync")
	return f.File.Sync()
}

type valveLog struct {
	wal.FS
	v *valve
}

func (f valveLog) Appender(dir string) (wal.Appender, uint64, error) {
	a, n, err := f.FS.Appender(dir)
	return valveAppender{a, f.v}, n, err
}

type valveAppender struct {
	wal.Appender
	v *valve
}

func (a valveAppender) Sync() error {
	a.v.pass("log sync")
	return a.Appender.Sync()
}

// sevenPages is a layout of seven pages a rank at 48 tokens, of every kind, each of so many bytes.
func sevenPages(bytes int64) []Group {
	return []Group{
		{Name: "attention:kv", Kind: Attention, PageBytes: bytes, PageTokens: 16},
		{Name: "recurrent:state", Kind: Recurrent, PageBytes: bytes, Pages: 1},
		{Name: "auxiliary:draft", Kind: Auxiliary, PageBytes: bytes, Pages: 2},
		{Name: "auxiliary:rest", Kind: Auxiliary, PageBytes: bytes, Pages: 1},
	}
}

// onDiskBytes counts the copies that the catalogue and the table know.
func onDiskBytes(t testing.TB, d *DB) (bytes int64) {
	t.Helper()
	snapshot := d.index.Snapshot()
	defer snapshot.Close()
	accounts, err := txn.ReadAccounts(snapshot)
	require.NoError(t, err)
	loose, err := d.loose.segments(snapshot)
	require.NoError(t, err)
	bytes = accounts.AllocatedBytes
	for _, l := range loose {
		bytes += l.bytes
	}
	d.residency.mu.Lock()
	defer d.residency.mu.Unlock()
	for p := range d.residency.pages.all() {
		for _, at := range p.place {
			if p.unrecorded {
				bytes += at.Allocated()
			}
		}
	}
	return bytes
}

// recount compares every gauge with what counting everything gives. The database is not in use; an evacuation in the background is
// waited for, and the next one does not begin meanwhile.
func recount(t testing.TB, d *DB) {
	t.Helper()
	settle(t, d)
	d.evacuating.Lock()
	defer d.evacuating.Unlock()
	for begun := time.Now(); time.Since(begun) < patience; time.Sleep(time.Millisecond) {
		idle(d)
		if d.residency.counts().pinned == 0 && onDiskBytes(t, d) == stats(t, d).DiskBytes {
			break
		}
	}
	requireIdle(t, d)
	checkCatalogue(t, d) // the accounts of the catalogue, from its entries
	disk := onDiskBytes(t, d)
	r := d.residency
	r.mu.Lock()
	used, dirty, listed := int64(0), int64(0), 0
	for _, l := range []*pageList{&r.cleanCool, &r.clean, &r.dirtyCool, &r.dirty} {
		for p := l.first(); p != nil; p = l.after(p) {
			listed++
			require.Same(t, p, r.pages.get(p.key), "an evictable page that the table does not have")
			require.Same(t, l, r.listOf(p), "in the wrong list")
		}
	}
	require.Equal(t, listed, r.pages.len(), "pages that nobody holds and nobody can evict")
	for p := range r.pages.all() {
		for _, s := range p.slots {
			used += int64(len(s.Padded()))
		}
		if p.dirty() {
			dirty += p.bytes * int64(len(p.slots))
		}
	}
	r.mu.Unlock()
	s := stats(t, d)
	require.Equal(t, used, s.RAMUsed, "bytes in RAM")
	require.Equal(t, dirty, s.RAMDirtyBytes, "dirty bytes")
	require.Equal(t, disk, s.DiskBytes, "bytes on disk")
	require.Zero(t, s.Transfers)
	require.LessOrEqual(t, s.RAMUsed, s.RAMCapacity)
}

// briefly is a context with a deadline.
func briefly(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// patience is how long a test waits for what has to come.
const patience = time.Minute

// timely checks that what begun at a moment has taken at most so long, where HOLDFAST_TIMING says that the machine is quiet enough.
// Elsewhere that it has ended at all has to be enough: what it must not wait for is made to last for ever.
func timely(t testing.TB, begun time.Time, most time.Duration) {
	t.Helper()
	if os.Getenv("HOLDFAST_TIMING") != "" {
		require.LessOrEqual(t, time.Since(begun), most)
	}
}

// outOfRAM evicts every page that is clean.
func outOfRAM(t testing.TB, d *DB) {
	t.Helper()
	left, err := d.DropRAM(context.Background())
	require.NoError(t, err)
	require.Zero(t, left)
}

// A caller that gives up while its dirty pages are being written leaves copies that no record names. Such pages must not leave RAM as if
// they were clean: whoever evicts them next records them first, so what is listed is restored from disk, also after a crash.
func TestCopiesWithoutARecordAreNotClean_WOE02_EVE01(t *testing.T) {
	restarts(t, func(t *testing.T, crashed bool) {
		v, books := newValve(), shelf{}
		d := openDB(t, tempDir(t), Options{WritePolicy: OnEvict, RAMBytes: 1 << 20, segmentFS: v.segments()})
		ns := testNamespace(t, 1, sevenPages(64<<10)...)
		seq := seqOf(t, ns, tokens(1, 48))
		books.publish(t, d, seq, 48)
		open := v.close("write")
		ctx, cancel := context.WithCancel(context.Background())
		dropped := make(chan error, 1)
		go func() {
			_, err := d.DropRAM(ctx)
			dropped <- err
		}()
		v.waitFor(t, "write")
		cancel()
		require.ErrorIs(t, <-dropped, ErrBusy)
		open()
		settle(t, d)
		require.EqualValues(t, 7, stats(t, d).PagesWritten, "the write goes on without its caller")
		require.EqualValues(t, 7*64<<10, stats(t, d).RAMDirtyBytes)
		recount(t, d)
		require.Equal(t, []int64{48}, books.requireListedIsReadable(t, d))
		outOfRAM(t, d)
		require.EqualValues(t, 7, stats(t, d).PagesWritten, "written once")
		require.Equal(t, []int64{48}, books.requireListedIsReadable(t, d))
		d = reopen(t, d, crashed)
		require.Equal(t, []int64{48}, books.requireListedIsReadable(t, d))
		recount(t, d)
		requireEmpty(t, d)
	})
}

// The same for a loose page under write-through whose caller gave up.
func TestLooseCopiesWithoutAnEntryAreNotClean_WOE02(t *testing.T) {
	v := newValve()
	d := openDB(t, tempDir(t), Options{segmentFS: v.segments()})
	ns := testNamespace(t, 1)
	open := v.close("write")
	ctx, cancel := context.WithCancel(context.Background())
	put := make(chan error, 1)
	go func() { put <- d.PutLoose(ctx, ns, LoosePage{Key: looseName(1), Bytes: looseBytes(1, 9000)}) }()
	v.waitFor(t, "write")
	cancel()
	require.ErrorIs(t, <-put, ErrBusy)
	open()
	settle(t, d)
	outOfRAM(t, d)
	require.True(t, getLoose(t, d, ns, 1, 9000))
	recount(t, d)
	n, err := d.DeleteLoose(context.Background(), ns, looseName(1))
	require.NoError(t, err)
	require.Equal(t, 1, n)
	requireEmpty(t, d)
}

// A key that is asked for twice in one call is read once; a page that was lost and is put again is there again.
func TestLooseKeysTwiceAndHealed_RST10(t *testing.T) {
	s := &seam{}
	d := openDB(t, tempDir(t), Options{segmentFS: s.segments()})
	ns := testNamespace(t, 1)
	put := func() {
		require.NoError(t, d.PutLoose(context.Background(), ns, LoosePage{Key: looseName(1), Bytes: looseBytes(1, 9000)}))
		outOfRAM(t, d)
	}
	put()
	l, err := d.GetLoose(context.Background(), nil, ns, looseName(1), looseName(2), looseName(1))
	require.NoError(t, err)
	require.Equal(t, looseBytes(1, 9000), l.Bytes(0))
	require.Nil(t, l.Bytes(1))
	require.Equal(t, looseBytes(1, 9000), l.Bytes(2))
	require.EqualValues(t, 1, stats(t, d).PagesRead)
	l.Release()
	recount(t, d)
	outOfRAM(t, d)
	damage(t, d)
	require.False(t, getLoose(t, d, ns, 1, 9000), "a lost page is a miss")
	require.EqualValues(t, 1, stats(t, d).Quarantined)
	put()
	require.Zero(t, stats(t, d).Quarantined)
	require.True(t, getLoose(t, d, ns, 1, 9000))
	recount(t, d)
}

// A restore whose pages are partly in RAM and partly on disk is one call: 12 in RAM, 32 on disk.
func TestMixedTierRestoreIsOneCall_RST08(t *testing.T) {
	for _, ranks := range []int{1, 2} {
		d := openDB(t, tempDir(t), Options{})
		ns := testNamespace(t, ranks, attentionOnly(8192, 16)...)
		seq := seqOf(t, ns, tokens(1, 44*16))
		publish(t, d, seq, seq.Len())
		_, evicted := d.residency.evictClean(int64(32 * ranks * 8192))
		require.EqualValues(t, 32, evicted)
		require.EqualValues(t, 12*ranks*8192, stats(t, d).RAMUsed)
		r, err := d.Restore(context.Background(), seq, LookupOptions{})
		require.NoError(t, err)
		require.EqualValues(t, 44*16, r.Offset())
		require.Len(t, r.Pages(0), 44)
		verify(t, r, ranks)
		require.EqualValues(t, 32*ranks, stats(t, d).PagesRead, "what is in RAM is not read")
		r.Release()
		recount(t, d)
	}
}

// Publishers, restorers, evictors, clears and owners that die, all at once, under every policy with small tiers: whatever is
// listed stays readable, and in the end every gauge is what counting gives. Meant for -race.
func TestEverythingAtOnce(t *testing.T) {
	rounds := 60
	if testing.Short() {
		rounds = 12
	}
	for _, policy := range []WritePolicy{WriteThrough, OnEvict, OnReuse, Never} {
		t.Run(policy.String(), func(t *testing.T) {
			d := openDB(t, memoryDir(t), Options{
				WritePolicy: policy, RAMBytes: 1 << 20, DiskBytes: 3 << 20, SegmentBytes: 1 << 20, SupersedeGrace: time.Millisecond, AdmissionTimeout: 2 * time.Second,
			})
			ns := testNamespace(t, 2, sevenPages(8<<10)...)
			var mu sync.Mutex
			books := shelf{}
			conversation := func(r *rand.Rand) *Sequence {
				return seqOf(t, ns, tokens(uint64(r.IntN(6)), 48), tokens(uint64(100+r.IntN(4)), 48), tokens(uint64(200+r.IntN(2)), 48))
			}
			allowed := func(err error) {
				if err != nil && !errors.Is(err, ErrBusy) && !errors.Is(err, ErrConflict) && !errors.Is(err, ErrNotFound) {
					t.Error(err)
				}
			}
			one := func(r *rand.Rand) {
				owner, err := d.NewOwner("worker", 10*time.Millisecond+time.Duration(r.IntN(20))*time.Millisecond)
				if err != nil {
					t.Error(err)
					return
				}
				defer owner.Close()
				if r.IntN(3) > 0 {
					defer heartbeats(owner)() // or it dies on the way
				}
				ctx, cancel := context.WithTimeout(context.Background(), time.Duration(1+r.IntN(400))*time.Millisecond)
				defer cancel()
				seq := conversation(r)
				switch r.IntN(8) {
				case 0, 1, 2: // publish
					at := int64(48 * (1 + r.IntN(3)))
					p, err := d.Begin(ctx, PublishRequest{Sequence: seq, Offset: at, Owner: owner, Request: fmt.Sprint(r.IntN(9))})
					if err != nil {
						allowed(err)
						return
					}
					mu.Lock()
					books.keep(t, p.Generation(), seq, at)
					mu.Unlock()
					for rank := range 2 {
						slots, err := p.Slots(ctx, rank)
						for _, s := range slots {
							s.Write(content(s.Key(), rank, s.Size()))
						}
						if err == nil {
							_, err = p.Commit(ctx, rank)
						}
						if err != nil && !errors.Is(err, ErrInvalid) { // a slot that another one's death has handed over is not full
							allowed(err)
						}
					}
					p.Abort()
				case 3, 4, 5: // restore
					h, err := d.Restore(ctx, seq, LookupOptions{Owner: owner})
					if err != nil {
						allowed(err)
						return
					}
					copied, err := h.Transfer()
					if err == nil {
						for rank := range 2 {
							for _, p := range h.Pages(rank) { // nil if the owner has died meanwhile; what it gave stays under the copy
								if string(content(p.Key, rank, int64(len(p.Bytes)))) != string(p.Bytes) {
									t.Errorf("rank %d, group %d, page %d: wrong bytes", rank, p.Group, p.Position)
								}
							}
						}
						copied.Done()
					}
					h.Release()
				case 6:
					if r.IntN(2) == 0 {
						_, err = d.DropRAM(ctx)
					} else if err = d.SetDiskBytes(int64(2+r.IntN(2)) << 20); err == nil {
						err = d.SetRAMBytes(ctx, int64(700<<10+r.IntN(300<<10)))
					}
					allowed(err)
				case 7:
					if r.IntN(6) == 0 {
						_, err = d.Clear(ctx, ns.ID())
						allowed(err)
						return
					}
					for c, err := range d.Checkpoints(ctx) {
						if err == nil && r.IntN(4) == 0 {
							err = d.Delete(ctx, c.Generation)
						}
						allowed(err)
					}
				}
			}
			var group sync.WaitGroup
			for w := range 8 {
				group.Go(func() {
					r := rand.New(rand.NewPCG(uint64(policy), uint64(w)))
					for range rounds {
						one(r)
					}
				})
			}
			group.Wait()
			require.NoError(t, d.SetRAMBytes(context.Background(), 1<<20))
			settle(t, d)
			recount(t, d)
			books.requireListedIsReadable(t, d)
			recount(t, d)
			require.Zero(t, stats(t, d).Owners)
			d = reopen(t, d, policy == WriteThrough)
			books.requireListedIsReadable(t, d)
			recount(t, d)
			requireEmpty(t, d)
		})
	}
}

// heartbeats keeps an owner alive until the function that it gives is called.
func heartbeats(o *Owner) (stop func()) {
	tick, done := time.NewTicker(o.ttl/4), make(chan struct{})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-tick.C:
				o.Heartbeat()
			case <-done:
				return
			}
		}
	}()
	return func() {
		tick.Stop()
		close(done)
		<-ended
	}
}
