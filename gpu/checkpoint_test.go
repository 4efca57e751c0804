//go:build cgo && linux

package gpu_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/db"
	"github.com/holdfast-db/holdfast/gpu"
)

// cache plays the paged cache of one rank: a piece of device memory cut into blocks, of which the pages of a checkpoint take
// the next ones, in an order that leaves no two side by side.
type cache struct {
	memory *gpu.DeviceMemory
	layout db.Layout
	block  int64
	next   int64
	pages  map[[2]int64][]db.DeviceBlock
}

func newCache(t *testing.T, e *gpu.Engine, device int, bytes int64, layout db.Layout, block int64) *cache {
	t.Helper()
	m, err := e.AllocDevice(t.Context(), device, bytes)
	require.NoError(t, err)
	t.Cleanup(func() { _ = m.Close() })
	return &cache{memory: m, layout: layout, block: block, pages: map[[2]int64][]db.DeviceBlock{}}
}

func (c *cache) blocks(group int, position int64) []db.DeviceBlock {
	id := [2]int64{int64(group), position}
	if b := c.pages[id]; b != nil {
		return b
	}
	left := c.layout.Groups[group].PageBytes
	n := (left + c.block - 1) / c.block
	var all []db.DeviceBlock
	for i := range n {
		all = append(all, db.DeviceBlock{Address: c.memory.Address() + uint64((c.next+n-1-i)*c.block), Bytes: min(left, c.block)})
		left -= c.block
	}
	c.next += n
	c.pages[id] = all
	return all
}

// fill writes bytes that depend on the seed into the memory, and bytes reads it.
func (c *cache) fill(t *testing.T, e *gpu.Engine, device int, seed uint64) []byte {
	t.Helper()
	p, err := e.AllocPinned(c.memory.Bytes())
	require.NoError(t, err)
	b := p.Bytes()[:c.memory.Bytes()]
	_, _ = rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)}).Read(b)
	want := append([]byte(nil), b...)
	c.copy(t, e, gpu.Batch{Device: device, Direction: gpu.Load}, b)
	require.NoError(t, p.Unpin())
	return want
}

func (c *cache) bytes(t *testing.T, e *gpu.Engine, device int) []byte {
	t.Helper()
	p, err := e.AllocPinned(c.memory.Bytes())
	require.NoError(t, err)
	b := p.Bytes()[:c.memory.Bytes()]
	c.copy(t, e, gpu.Batch{Device: device, Direction: gpu.Store}, b)
	got := append([]byte(nil), b...)
	require.NoError(t, p.Unpin())
	return got
}

func (c *cache) copy(t *testing.T, e *gpu.Engine, b gpu.Batch, host []byte) {
	t.Helper()
	b.Regions = []gpu.Region{{Device: c.memory.Address(), Host: host}}
	x, err := e.Submit(t.Context(), b)
	require.NoError(t, err)
	require.NoError(t, x.Wait(t.Context()))
}

// at gives what the blocks of a page hold, of bytes that fill or bytes gave.
func (c *cache) at(all []byte, group int, position int64) (page []byte) {
	for _, b := range c.blocks(group, position) {
		page = append(page, all[b.Address-c.memory.Address():][:b.Bytes]...)
	}
	return page
}

func openEngine(t *testing.T, library string) *gpu.Engine {
	t.Helper()
	b, err := gpu.OpenCUDA(gpu.CUDAOptions{Library: library})
	if err != nil {
		t.Skip("no GPU: ", err)
	}
	e, err := gpu.Open(b, gpu.Options{Logger: slog.New(slog.NewTextHandler(io.Discard, nil)), Deadline: time.Minute})
	require.NoError(t, err)
	return e
}

func namespace(t *testing.T, ranks int, groups ...db.Group) *db.Namespace {
	t.Helper()
	ns, err := db.NewNamespace(db.Identity{
		Model: "tiny", Weights: "4f1c6b0e9d2a7358c1e0b4f69a7d83521c0e5b7f", Tokenizer: "bpe-7", Engine: "engine-1.4", DType: "bf16",
		Layout: db.Layout{Ranks: ranks, Groups: groups},
	})
	require.NoError(t, err)
	return ns
}

func sequence(t *testing.T, ns *db.Namespace, seed uint64, tokens int64) *db.Sequence {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 0))
	s := ns.NewSequence()
	all := make([]int32, tokens)
	for i := range all {
		all[i] = r.Int32()
	}
	require.NoError(t, s.Append(all))
	return s
}

// Given a database whose RAM tier is page-locked for the devices and too small for what is published, when checkpoints with pages
// of several sizes are filled from the memory of two devices and restored into other memory of them, from RAM and from disk,
// then every byte is where it belongs, no rule of the driver was broken, and nothing stays locked.
func TestCUDACheckpointsOverTheDatabase(t *testing.T) {
	library, violation, left := gpu.FakeDriver(t)
	e := openEngine(t, library)
	before := left()
	ctx := t.Context()
	store, err := db.Open(ctx, t.TempDir(), db.Options{RAMBytes: 8 << 20, WritePolicy: db.OnEvict, Engine: e, Logger: slog.New(slog.NewTextHandler(io.Discard, nil))})
	require.NoError(t, err)
	const tokens, block, memory = 160, 4096, 2 << 20
	type published struct {
		seq    *db.Sequence
		caches [2]*cache
		bytes  [2][]byte
	}
	var all []published
	for i, pageBytes := range []int64{64 << 10, 100 << 10, 40, 96 << 10, 64 << 10, 4096} { // the memory of one goes to another
		ns := namespace(t, 2,
			db.Group{Name: "attention:kv", Kind: db.Attention, PageBytes: pageBytes, PageTokens: 16},
			db.Group{Name: "recurrent:state", Kind: db.Recurrent, PageBytes: 300<<10 + int64(i), Pages: 1})
		p := published{seq: sequence(t, ns, uint64(i), tokens)}
		publication, err := store.Begin(ctx, db.PublishRequest{Sequence: p.seq, Offset: tokens})
		require.NoError(t, err)
		for rank := range 2 {
			p.caches[rank] = newCache(t, e, rank, memory, ns.Layout(), block)
			p.bytes[rank] = p.caches[rank].fill(t, e, rank, uint64(2*i+rank))
			require.NoError(t, publication.FillFromDevice(ctx, rank, db.DeviceRank{Device: rank, Blocks: p.caches[rank].blocks}))
			_, err = publication.Commit(ctx, rank)
			require.NoError(t, err)
		}
		all = append(all, p)
	}
	stats, err := store.Stats()
	require.NoError(t, err)
	require.NotZero(t, stats.PagesEvicted, "the RAM tier holds all of it: the test shows little")
	for i, p := range append(all, all[0]) {
		r, err := store.Restore(ctx, p.seq, db.LookupOptions{})
		require.NoError(t, err, "checkpoint %d", i)
		require.EqualValues(t, tokens, r.Offset())
		for rank := range 2 {
			target := newCache(t, e, rank, memory, p.seq.Namespace().Layout(), block)
			target.next = 3 // other blocks than it came from
			require.NoError(t, r.CopyToDevice(ctx, rank, db.DeviceRank{Device: rank, Blocks: target.blocks}))
			got := target.bytes(t, e, rank)
			for _, page := range r.Pages(rank) {
				want := p.caches[rank].at(p.bytes[rank], page.Group, page.Position)
				require.Equal(t, want, page.Bytes, "checkpoint %d, rank %d, group %d, page %d", i, rank, page.Group, page.Position)
				require.Equal(t, want, target.at(got, page.Group, page.Position))
			}
			require.NoError(t, target.memory.Close())
		}
		r.Release()
	}
	report, err := store.Close(ctx)
	require.NoError(t, err)
	require.Zero(t, report.Transfers)
	require.NoError(t, e.Close(ctx))
	require.Empty(t, violation())
	require.Equal(t, before, left(), "memory that is still allocated or locked")
}

// Page-locks that fail are no room, and no more than that: what fits into the memory that is locked goes on being published.
func TestCUDAPageLockThatFails(t *testing.T) {
	library, violation, _ := gpu.FakeDriver(t)
	e := openEngine(t, library)
	ctx := t.Context()
	store, err := db.Open(ctx, t.TempDir(), db.Options{RAMBytes: 1 << 20, AdmissionTimeout: 50 * time.Millisecond, Engine: e, Logger: slog.New(slog.NewTextHandler(io.Discard, nil))})
	require.NoError(t, err)
	require.NoError(t, e.Close(ctx)) // so that nothing can be locked
	ns := namespace(t, 1, db.Group{Name: "attention:kv", Kind: db.Attention, PageBytes: 4096, PageTokens: 16})
	_, err = store.Begin(ctx, db.PublishRequest{Sequence: sequence(t, ns, 1, 16), Offset: 16})
	require.ErrorIs(t, err, db.ErrBusy)
	require.ErrorContains(t, err, "page-lock")
	_, err = store.Close(ctx)
	require.NoError(t, err)
	require.Empty(t, violation())
}

// TestDeviceCheckpoint publishes a checkpoint of 2 GiB, in blocks of 64 KiB as those of a paged cache, from device memory, and
// restores it into device memory, and compares. Each is done twice, since the first time page-locks the memory.
func TestDeviceCheckpoint(t *testing.T) {
	if os.Getenv("HOLDFAST_GPU_SWEEP") == "" {
		t.Skip("part of check.sh")
	}
	e := openEngine(t, gpu.DeviceLibrary())
	ctx := context.Background()
	const block, pageBytes, pageTokens = 64 << 10, 1 << 20, 256
	total := int64(gpu.DeviceBytes(2 << 30))
	ns := namespace(t, 1, db.Group{Name: "attention:kv", Kind: db.Attention, PageBytes: pageBytes, PageTokens: pageTokens})
	tokens := total / pageBytes * pageTokens
	store, err := db.Open(ctx, t.TempDir(), db.Options{RAMBytes: total + total/4, WritePolicy: db.Never, Engine: e, Logger: slog.New(slog.NewTextHandler(io.Discard, nil))})
	require.NoError(t, err)
	source, target := newCache(t, e, 0, total, ns.Layout(), block), newCache(t, e, 0, total, ns.Layout(), block)
	want := source.fill(t, e, 0, 1)
	speed := func(f func()) float64 {
		begun := time.Now()
		f()
		return float64(total) / time.Since(begun).Seconds() / 1e9
	}
	var publish, restore [2]float64
	for i := range 2 {
		seq := sequence(t, ns, uint64(i), tokens)
		var gen db.Generation
		publish[i] = speed(func() {
			p, err := store.Begin(ctx, db.PublishRequest{Sequence: seq, Offset: tokens})
			require.NoError(t, err)
			require.NoError(t, p.FillFromDevice(ctx, 0, db.DeviceRank{Blocks: source.blocks}))
			listed, err := p.Commit(ctx, 0)
			require.NoError(t, err)
			require.True(t, listed)
			gen = p.Generation()
		})
		r, err := store.Restore(ctx, seq, db.LookupOptions{})
		require.NoError(t, err)
		require.Equal(t, tokens, r.Offset())
		restore[i] = speed(func() { require.NoError(t, r.CopyToDevice(ctx, 0, db.DeviceRank{Blocks: target.blocks})) })
		r.Release()
		require.NoError(t, store.Delete(ctx, gen))
	}
	got := target.bytes(t, e, 0)
	for position := range total / pageBytes {
		require.Equal(t, source.at(want, 0, position), target.at(got, 0, position), "page %d", position)
	}
	fmt.Printf("\ncheckpoint of %d MiB in blocks of 64 KiB on %s, GB/s: published %.1f, at first, with page-locking, %.1f; restored %.1f, at first %.1f\n",
		total>>20, e.Devices()[0].Name, publish[1], publish[0], restore[1], restore[0])
	require.NoError(t, source.memory.Close())
	require.NoError(t, target.memory.Close())
	_, err = store.Close(ctx)
	require.NoError(t, err)
	require.NoError(t, e.Close(ctx))
}
