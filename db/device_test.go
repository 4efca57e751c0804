package db

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/gpu"
)

// deviceCache plays a paged cache in device memory: every page is scattered over blocks in reverse order.
type deviceCache struct {
	engine *gpu.Engine
	memory []byte
	base   uint64
	at     map[claim]int
	sizes  map[claim]int64
}

const deviceBlock = 1024

func newDeviceCache(t *testing.T, h *gpu.Host, e *gpu.Engine, bytes int) *deviceCache {
	t.Helper()
	c := &deviceCache{engine: e, memory: make([]byte, bytes), at: map[claim]int{}, sizes: map[claim]int64{}}
	base, err := h.Expose(0, c.memory)
	require.NoError(t, err)
	c.base = base
	return c
}

// blocks gives the blocks of a page, allotted at first use.
func (c *deviceCache) blocks(size func(group int) int64) func(int, int64) []DeviceBlock {
	return func(group int, position int64) []DeviceBlock {
		id := claim{group, position}
		n := int((size(group) + deviceBlock - 1) / deviceBlock)
		if _, ok := c.at[id]; !ok {
			next := 0
			for other, at := range c.at {
				next = max(next, at+int((c.sizes[other]+deviceBlock-1)/deviceBlock))
			}
			c.at[id], c.sizes[id] = next, size(group)
		}
		var blocks []DeviceBlock
		left := size(group)
		for i := range n {
			b := min(left, deviceBlock)
			blocks = append(blocks, DeviceBlock{Address: c.base + uint64((c.at[id]+n-1-i)*deviceBlock), Bytes: b})
			left -= b
		}
		return blocks
	}
}

// bytes gathers a page from its blocks.
func (c *deviceCache) bytes(blocks []DeviceBlock) (b []byte) {
	for _, x := range blocks {
		b = append(b, c.memory[x.Address-c.base:][:x.Bytes]...)
	}
	return b
}

// Given pages scattered over device memory, when a publication is filled from them and a restoration is copied back into other
// device memory, then every byte is where it belongs, and no transfer is left open.
func TestCheckpointFromAndToDeviceMemory(t *testing.T) {
	h, err := gpu.NewHost(gpu.HostOptions{})
	require.NoError(t, err)
	engine, err := gpu.Open(h, gpu.Options{})
	require.NoError(t, err)
	defer func() { require.NoError(t, engine.Close(context.Background())) }()
	ns := testNamespace(t, 2)
	d := openDB(t, tempDir(t), Options{})
	seq := seqOf(t, ns, tokens(1, 200))
	size := func(group int) int64 { return ns.identity.Layout.Groups[group].PageBytes }
	ctx := context.Background()

	p, err := d.Begin(ctx, PublishRequest{Sequence: seq, Offset: 200})
	require.NoError(t, err)
	for rank := range 2 {
		cache := newDeviceCache(t, h, engine, 1<<20)
		blocks := cache.blocks(size)
		slots, err := p.Slots(ctx, rank)
		require.NoError(t, err)
		for _, s := range slots {
			left := content(s.Key(), rank, s.Size())
			for _, b := range blocks(s.Group(), s.Position()) {
				left = left[copy(cache.memory[b.Address-cache.base:][:b.Bytes], left):]
			}
		}
		from := DeviceRank{Engine: engine, Blocks: func(int, int64) []DeviceBlock { return []DeviceBlock{{Address: cache.base, Bytes: 10}} }}
		require.ErrorIs(t, p.FillFromDevice(ctx, rank, from), ErrInvalid, "blocks that do not add up")
		_, err = p.Commit(ctx, rank)
		require.ErrorIs(t, err, ErrInvalid, "nothing was filled")
		from.Blocks = blocks
		require.NoError(t, p.FillFromDevice(ctx, rank, from))
		_, err = p.Commit(ctx, rank)
		require.NoError(t, err)
	}
	r, err := d.Restore(ctx, seq, LookupOptions{})
	require.NoError(t, err)
	verify(t, r, 2)
	for rank := range 2 {
		cache := newDeviceCache(t, h, engine, 1<<20)
		blocks := cache.blocks(size)
		require.NoError(t, r.CopyToDevice(ctx, rank, DeviceRank{Engine: engine, Blocks: blocks}))
		for _, page := range r.Pages(rank) {
			require.Equal(t, content(page.Key, rank, int64(len(page.Bytes))), cache.bytes(blocks(page.Group, page.Position)))
		}
	}
	require.ErrorIs(t, r.CopyToDevice(ctx, 2, DeviceRank{Engine: engine}), ErrInvalid)
	r.Release()
	require.ErrorIs(t, r.CopyToDevice(ctx, 0, DeviceRank{Engine: engine}), ErrConflict)
	s := stats(t, d)
	require.Zero(t, s.Transfers)
	require.Zero(t, s.Leases)
	require.Zero(t, s.Pending)
}
