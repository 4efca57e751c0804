package db

import (
	"context"
	"encoding/binary"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/holdfast-db/holdfast/txn"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// quiet is a logger for tests that provoke warnings.
var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

// testIdentity is a small model: hybrid unless changed.
func testIdentity(ranks int, groups ...Group) Identity {
	if len(groups) == 0 {
		groups = []Group{
			{Name: "attention:kv", Kind: Attention, PageBytes: 4096, PageTokens: 16},
			{Name: "recurrent:state", Kind: Recurrent, PageBytes: 12345, Pages: 1},
		}
	}
	return Identity{
		Model: "test", Weights: "0123456789abcdef0123456789abcdef01234567", Tokenizer: "t1", Engine: "e1", DType: "f16",
		Layout: Layout{Ranks: ranks, Groups: groups},
	}
}

func testNamespace(t testing.TB, ranks int, groups ...Group) *Namespace {
	t.Helper()
	ns, err := NewNamespace(testIdentity(ranks, groups...))
	require.NoError(t, err)
	return ns
}

// tokens gives n tokens that depend on the seed.
func tokens(seed uint64, n int) []int32 {
	r := rand.New(rand.NewPCG(seed, 0))
	out := make([]int32, n)
	for i := range out {
		out[i] = r.Int32()
	}
	return out
}

func seqOf(t testing.TB, ns *Namespace, parts ...[]int32) *Sequence {
	t.Helper()
	s := ns.NewSequence()
	for _, p := range parts {
		require.NoError(t, s.Append(p))
	}
	return s
}

// content is what a page of a rank has to hold: a function of its key, so that any wrong byte is seen.
func content(key txn.Key, rank int, n int64) []byte {
	var seed [32]byte = key
	binary.LittleEndian.PutUint64(seed[:8], binary.LittleEndian.Uint64(seed[:8])^uint64(rank+1)*0x9E3779B97F4A7C15)
	b := make([]byte, n)
	rand.NewChaCha8(seed).Read(b)
	return b
}

func openDB(t testing.TB, dir string, o Options) *DB {
	t.Helper()
	if o.RAMBytes == 0 {
		o.RAMBytes = 16 << 20
	}
	if o.SegmentBytes == 0 {
		o.SegmentBytes = 4 << 20
	}
	if o.Logger == nil {
		o.Logger = quiet
	}
	d, err := Open(context.Background(), dir, o)
	require.NoError(t, err)
	t.Cleanup(func() { d.Close(context.Background()) })
	return d
}

func closeDB(t testing.TB, d *DB) CloseReport {
	t.Helper()
	r, err := d.Close(context.Background())
	require.NoError(t, err)
	return r
}

// crash leaves the directory as a killed process would: nothing is flushed, the lock is gone.
func crash(t testing.TB, d *DB) {
	t.Helper()
	d.gate.close(context.Background())
	d.loops.Wait()
	d.committer.group.Close()
	d.disk.close()
	require.NoError(t, d.telemetry.close())
	require.NoError(t, d.segments.Close())
	require.NoError(t, d.index.Close())
	d.log.Close()
	d.residency.clear()
	d.arena.Close()
	require.NoError(t, d.dir.close())
	d.closeOnce.Do(func() {})
}

// fill writes all slots of a rank and gives the bytes written.
func fill(t testing.TB, p *Publication, rank int) (n int64) {
	t.Helper()
	slots, err := p.Slots(context.Background(), rank)
	require.NoError(t, err)
	for _, s := range slots {
		w, err := s.Write(content(s.Key(), rank, s.Size()))
		require.NoError(t, err)
		n += int64(w)
	}
	return n
}

// publish publishes the first n tokens and gives the new bytes.
func publish(t testing.TB, d *DB, s *Sequence, n int64, change ...func(*PublishRequest)) (Generation, int64) {
	t.Helper()
	r := PublishRequest{Sequence: s, Offset: n}
	for _, c := range change {
		c(&r)
	}
	p, err := d.Begin(context.Background(), r)
	require.NoError(t, err)
	bytes, ranks, replay := int64(0), s.Namespace().identity.Layout.Ranks, p.Listed()
	for rank := range ranks {
		bytes += fill(t, p, rank)
		listed, err := p.Commit(context.Background(), rank)
		require.NoError(t, err)
		require.Equal(t, rank == ranks-1 && !replay, listed)
	}
	return p.Generation(), bytes
}

// verify checks every byte of a restoration on all ranks.
func verify(t testing.TB, r *Restoration, ranks int) {
	t.Helper()
	for rank := range ranks {
		pages := r.Pages(rank)
		require.NotEmpty(t, pages)
		for _, p := range pages {
			require.Equal(t, content(p.Key, rank, int64(len(p.Bytes))), p.Bytes, "rank %d, group %d, page %d", rank, p.Group, p.Position)
		}
	}
}

// restoreAt restores the longest prefix, checks it and gives its offset; 0 for a miss.
func restoreAt(t testing.TB, d *DB, s *Sequence) int64 {
	t.Helper()
	r, err := d.Restore(context.Background(), s, LookupOptions{})
	if err != nil {
		require.ErrorIs(t, err, ErrNotFound)
		return 0
	}
	defer r.Release()
	verify(t, r, s.Namespace().identity.Layout.Ranks)
	return r.Offset()
}

func lookupAt(t testing.TB, d *DB, s *Sequence) int64 {
	t.Helper()
	m, err := d.Lookup(context.Background(), s, LookupOptions{})
	if err != nil {
		require.ErrorIs(t, err, ErrNotFound)
		return 0
	}
	return m.Offset
}

func stats(t testing.TB, d *DB) Stats {
	t.Helper()
	s, err := d.Stats()
	require.NoError(t, err)
	return s
}

// checkCatalogue re-derives the whole catalogue.
func checkCatalogue(t testing.TB, d *DB) {
	t.Helper()
	snapshot := d.index.Snapshot()
	defer snapshot.Close()
	require.NoError(t, txn.Check(snapshot))
}

// idle waits until freed disk space is given back.
func idle(d *DB) {
	d.disk.mu.Lock()
	c := d.disk.idle
	d.disk.mu.Unlock()
	<-c
}

func tempDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp(t.TempDir(), "db")
	require.NoError(t, err)
	return dir
}
