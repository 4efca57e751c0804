package db

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/db/internal/segment"
	"github.com/holdfast-db/holdfast/txn"
)

// What the conformance tests share: the shelf, which knows all that was ever published and so can read back all that is
// listed, and the still life, which sees any change that a refused call makes.

// tiny is a hybrid layout of pages of a few bytes, for tests that are about names and not about payload.
func tiny() []Group {
	return []Group{
		{Name: "attention:kv", Kind: Attention, PageBytes: 64, PageTokens: 16},
		{Name: "recurrent:state", Kind: Recurrent, PageBytes: 96, Pages: 1},
	}
}

// attentionOnly is a layout of one full-attention group.
func attentionOnly(pageBytes, pageTokens int64) []Group {
	return []Group{{Name: "attention:kv", Kind: Attention, PageBytes: pageBytes, PageTokens: pageTokens}}
}

// shelf is what was published: for each generation the sequence up to its offset.
type shelf map[Generation]*Sequence

// publish publishes the first n tokens and remembers them.
func (s shelf) publish(t testing.TB, d *DB, seq *Sequence, n int64, change ...func(*PublishRequest)) (Generation, int64) {
	t.Helper()
	gen, bytes := publish(t, d, seq, n, change...)
	s.keep(t, gen, seq, n)
	return gen, bytes
}

func (s shelf) keep(t testing.TB, gen Generation, seq *Sequence, n int64) {
	t.Helper()
	f, err := seq.Fork(n)
	require.NoError(t, err)
	s[gen] = f
}

// requireListedIsReadable is the promise, and what has to be true of a database that nobody uses: every listed checkpoint is
// restored byte for byte on every rank, the catalogue adds up, nothing is pending and nothing is held. It gives the offsets
// that are listed, ascending.
func (s shelf) requireListedIsReadable(t testing.TB, d *DB) []int64 {
	t.Helper()
	offsets := []int64{}
	for c, err := range d.Checkpoints(context.Background()) {
		require.NoError(t, err)
		seq := s[c.Generation]
		require.NotNil(t, seq, "listed and never published: %s at %d", c.Generation, c.Offset)
		require.Equal(t, seq.Len(), c.Offset)
		require.Equal(t, seq.Namespace().ID(), c.Namespace)
		r, err := d.Restore(context.Background(), seq, LookupOptions{})
		require.NoError(t, err, "listed and not restorable: %s at %d", c.Generation, c.Offset)
		require.Equal(t, c.Offset, r.Offset())
		require.Equal(t, c.Generation, r.Generation())
		require.Equal(t, c.Meta, r.Meta())
		verify(t, r, c.Ranks)
		r.Release()
		offsets = append(offsets, c.Offset)
	}
	requireIdle(t, d)
	require.EqualValues(t, len(offsets), stats(t, d).Checkpoints)
	checkCatalogue(t, d)
	slices.Sort(offsets)
	return offsets
}

// settle waits for the jobs that outlive the calls which began them, and has the finds so far recorded.
func settle(t testing.TB, d *DB) {
	t.Helper()
	require.NoError(t, d.gate.wait(context.Background()))
	_, err := d.curator.work(context.Background())
	if d.log.Err() == nil {
		require.NoError(t, err)
	}
	idle(d)
}

// eventually waits for what background work brings about. What does not come about is seen by the check that follows.
func eventually(done func() bool) {
	for deadline := time.Now().Add(patience); !done() && time.Now().Before(deadline); {
		runtime.Gosched()
	}
}

// awaitNothing waits until nothing is left in either tier. Evacuation may have moved pages that were deleted meanwhile.
func awaitNothing(t testing.TB, d *DB) {
	t.Helper()
	settle(t, d)
	eventually(func() bool { return d.arena.Usage().Used == 0 && d.disk.inUse() == 0 })
	s := stats(t, d)
	require.Zero(t, s.RAMUsed)
	require.Zero(t, s.DiskBytes)
}

// requireIdle checks the gauges of a database that nobody uses.
func requireIdle(t testing.TB, d *DB) {
	t.Helper()
	settle(t, d)
	s := stats(t, d)
	require.Zero(t, s.Pending)
	require.Zero(t, s.Leases)
	eventually(func() bool { return d.residency.counts().pinned == 0 }) // evacuation pins what it moves
	c := d.residency.counts()
	require.Zero(t, c.pinned, "pages with pins")
	require.Zero(t, c.filling, "pages being filled")
	requireTableFollowsCatalogue(t, d)
}

// requireTableFollowsCatalogue checks, while nothing goes on, that the table of pages in RAM says what the catalogue says: a page
// that it takes for known is known, and its disk copies are those that the catalogue names. A page left over from before it
// was deleted would be shared by the next publication together with disk copies that are gone.
func requireTableFollowsCatalogue(t testing.TB, d *DB) {
	t.Helper()
	snapshot := d.index.Snapshot()
	defer snapshot.Close()
	d.residency.mu.Lock()
	defer d.residency.mu.Unlock()
	require.Empty(t, d.residency.basis, "pages that nobody builds on")
	for p := range d.residency.pages.all() {
		key := p.key
		if p.class == segment.Loose {
			continue
		}
		e, err := txn.ReadPage(snapshot, key)
		require.NoError(t, err)
		require.True(t, p.known && !p.lost, "a page that nobody holds is in the table and not known")
		require.NotNil(t, e, "a page in RAM is taken for known and the catalogue has dropped it")
		if p.placed() {
			require.Equal(t, e.Place, p.place, "disk copies")
		} else {
			require.Empty(t, e.Place, "a page is taken for dirty and has disk copies")
		}
	}
}

// requireEmpty deletes everything and checks that nothing is left in any tier.
func requireEmpty(t testing.TB, d *DB) {
	t.Helper()
	var gens []Generation
	for c, err := range d.Checkpoints(context.Background()) {
		require.NoError(t, err)
		gens = append(gens, c.Generation)
	}
	for _, g := range gens {
		require.NoError(t, d.Delete(context.Background(), g))
	}
	_, err := d.Clear(context.Background(), txn.Key{}) // what is retired
	require.NoError(t, err)
	awaitNothing(t, d)
	s := stats(t, d)
	require.Zero(t, s.Checkpoints)
	require.Zero(t, s.Retired)
	require.Zero(t, s.Pages)
	require.Zero(t, s.PageBytes)
	require.Zero(t, s.RAMDirtyBytes)
	requireIdle(t, d)
	checkCatalogue(t, d)
}

// stillLife is everything about a database that a refused call must leave alone: the gauges, and the names and sizes of all
// files but those of the index, which Pebble tidies when it likes.
type stillLife struct {
	gauges map[string]int64
	files  map[string]int64
}

func still(t testing.TB, d *DB) stillLife {
	t.Helper()
	settle(t, d)
	return stillLife{gauges: gauges(stats(t, d)), files: files(t, d.dir.path)}
}

// gauges gives the fields of Stats before Published, the first counter.
func gauges(s Stats) map[string]int64 {
	out := map[string]int64{}
	v := reflect.ValueOf(s)
	for i := range v.NumField() {
		name := v.Type().Field(i).Name
		switch f := v.Field(i); {
		case name == "Published":
			return out
		case name == "IndexBytes":
		case f.CanInt():
			out[name] = f.Int()
		case f.CanUint():
			out[name] = int64(f.Uint())
		}
	}
	return out
}

func files(t testing.TB, root string) map[string]int64 {
	t.Helper()
	out := map[string]int64{}
	require.NoError(t, filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, _ := filepath.Rel(root, path)
		if strings.HasPrefix(name, indexName+string(filepath.Separator)) {
			return nil
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		out[name] = -1
		if info.Mode().IsRegular() {
			out[name] = info.Size()
		}
		return nil
	}))
	return out
}

// allocated is what du says of a directory: the blocks of its files.
func allocated(t testing.TB, root string) (bytes int64) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		bytes += info.Sys().(*syscall.Stat_t).Blocks * 512
		return nil
	}))
	return bytes
}

// begin begins a publication that has something to write.
func begin(t testing.TB, d *DB, seq *Sequence, n int64, change ...func(*PublishRequest)) *Publication {
	t.Helper()
	r := PublishRequest{Sequence: seq, Offset: n}
	for _, c := range change {
		c(&r)
	}
	p, err := d.Begin(context.Background(), r)
	require.NoError(t, err)
	require.False(t, p.Listed())
	return p
}

// commit commits a rank and says whether that listed the checkpoint.
func commit(t testing.TB, p *Publication, rank int) bool {
	t.Helper()
	listed, err := p.Commit(context.Background(), rank)
	require.NoError(t, err)
	return listed
}

// slots gives the slots of a rank.
func slots(t testing.TB, p *Publication, rank int) []*Slot {
	t.Helper()
	s, err := p.Slots(context.Background(), rank)
	require.NoError(t, err)
	return s
}

func withMeta(meta string) func(*PublishRequest) {
	return func(r *PublishRequest) { r.Meta = []byte(meta) }
}

func durable(r *PublishRequest) { r.Durable = true }

// reopen closes the database, or leaves it as a killed process would, and opens it again.
func reopen(t testing.TB, d *DB, crashed bool) *DB {
	t.Helper()
	dir, o := d.dir.path, d.options
	if crashed {
		crash(t, d)
	} else {
		closeDB(t, d)
	}
	return openDB(t, dir, o)
}

// restarts runs a test with a clean close and with a crash.
func restarts(t *testing.T, test func(t *testing.T, crashed bool)) {
	t.Run("close", func(t *testing.T) { test(t, false) })
	t.Run("crash", func(t *testing.T) { test(t, true) })
}

// listedPrefixes gives the offsets of all listed checkpoints that are prefixes of the sequence, longest first.
func listedPrefixes(t testing.TB, d *DB, s *Sequence) (offsets []int64) {
	t.Helper()
	snapshot := d.index.Snapshot()
	defer snapshot.Close()
	q := &txn.Query{Max: s.Len(), Spine: s.spine, Prefix: s.prefix}
	require.NoError(t, txn.ListedPrefixes(snapshot, q, func(_ Generation, at int64) bool {
		offsets = append(offsets, at)
		return true
	}))
	return offsets
}

// memoryDir is a temporary directory on a file system without a disk, where there is one, for tests of many syncs.
func memoryDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "holdfast-db")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	return dir
}
