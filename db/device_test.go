package db

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

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

// heldDevice is a host backend with the hands of a test on it.
type heldDevice struct {
	engine *gpu.Engine
	cache  *deviceCache
	fails  atomic.Pointer[error] // of copies

	mu   sync.Mutex
	held chan struct{} // copies wait for it; nil if they need not
}

func newHeldDevice(t *testing.T) *heldDevice {
	t.Helper()
	h := &heldDevice{}
	host, err := gpu.NewHost(gpu.HostOptions{Fault: func(c gpu.HostCall) error {
		if c.Op != gpu.HostCopy {
			return nil
		}
		h.mu.Lock()
		held := h.held
		h.mu.Unlock()
		if held != nil {
			<-held
		}
		if err := h.fails.Load(); err != nil {
			return *err
		}
		return nil
	}})
	require.NoError(t, err)
	h.engine, err = gpu.Open(host, gpu.Options{Logger: quiet})
	require.NoError(t, err)
	t.Cleanup(func() {
		h.letGo()
		_ = h.engine.Close(context.Background()) // what was lost stays
	})
	h.cache = newDeviceCache(t, host, h.engine, 1<<20)
	return h
}

func (h *heldDevice) hold() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.held = make(chan struct{})
}

func (h *heldDevice) letGo() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.held != nil {
		close(h.held)
		h.held = nil
	}
}

// inFlight waits until a copy is on the device.
func (h *heldDevice) inFlight(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool { return h.engine.Stats()[0].InFlightBytes > 0 }, patience, time.Millisecond)
}

// produce computes the pages of a rank in device memory, and says where they are.
func (h *heldDevice) produce(t *testing.T, p *Publication, rank int) DeviceRank {
	t.Helper()
	layout := &p.layout
	where := DeviceRank{Blocks: h.cache.blocks(func(group int) int64 { return layout.Groups[group].PageBytes })}
	for _, s := range slots(t, p, rank) {
		left := content(s.Key(), rank, s.Size())
		for _, b := range where.Blocks(s.Group(), s.Position()) {
			left = left[copy(h.cache.memory[b.Address-h.cache.base:][:b.Bytes], left):]
		}
	}
	return where
}

// Given a copy into the slots of a publication of which nobody knows whether it has finished, because its deadline or its context
// ended before, then its slots are filled by nobody else and committed by nobody, and given to nobody once the publication has
// ended, until the copy has. What is published meanwhile has memory of its own.
func TestCopyIntoSlotsKeepsThem_GPU01_GPU09(t *testing.T) {
	for _, how := range []string{"deadline", "context"} {
		t.Run(how, func(t *testing.T) {
			h, books := newHeldDevice(t), shelf{}
			d := openDB(t, tempDir(t), Options{Engine: h.engine})
			seq := seqOf(t, testNamespace(t, 2, tiny()...), tokens(1, 16))
			p := begin(t, d, seq, 16)
			from := h.produce(t, p, 0)
			h.hold()
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			ended := make(chan error, 1)
			// A deadline that is over before the copy has begun leaves nothing behind; then it gets a later one.
			for wait := shortly; stats(t, d).Transfers == 0; wait *= 2 {
				if how == "deadline" {
					from.Deadline = time.Now().Add(wait)
				}
				go func() { ended <- p.FillFromDevice(ctx, 0, from) }()
				if how == "context" {
					h.inFlight(t)
					cancel()
				}
				requireClass(t, <-ended, ErrBusy)
			}
			require.EqualValues(t, 1, stats(t, d).Transfers)
			requireClass(t, p.FillFromDevice(context.Background(), 0, from), ErrBusy)
			_, err := p.Commit(context.Background(), 0)
			requireClass(t, err, ErrBusy)
			p.Abort()
			require.NotZero(t, stats(t, d).RAMUsed, "given to nobody")
			used := stats(t, d).RAMUsed
			books.publish(t, d, seq, 16)
			require.Greater(t, stats(t, d).RAMUsed, used)

			h.letGo()
			becomes(t, d, 0, func(s Stats) int64 { return s.Transfers }, "transfers")
			require.EqualValues(t, 16, restoreAt(t, d, seq))
			require.Equal(t, []int64{16}, books.requireListedIsReadable(t, d))
			require.Less(t, stats(t, d).RAMUsed, 2*used)
			requireEmpty(t, d)
		})
	}
}

// A copy that fails and is at rest is an error and nothing else: the slots can be filled again, and the checkpoint published.
func TestCopyThatFailedCanBeMadeAgain_GPU01(t *testing.T) {
	h := newHeldDevice(t)
	d := openDB(t, tempDir(t), Options{Engine: h.engine})
	seq := seqOf(t, testNamespace(t, 1, tiny()...), tokens(1, 16))
	p := begin(t, d, seq, 16)
	from := h.produce(t, p, 0)
	broken := errors.New("a cosmic ray")
	h.fails.Store(&broken)
	requireClass(t, p.FillFromDevice(context.Background(), 0, from), ErrIO, broken.Error())
	require.Zero(t, stats(t, d).Transfers)
	_, err := p.Commit(context.Background(), 0)
	requireClass(t, err, ErrInvalid, "0 of 64 bytes written")
	require.Zero(t, lookupAt(t, d, seq))
	h.fails.Store(nil)
	require.NoError(t, p.FillFromDevice(context.Background(), 0, from))
	require.True(t, commit(t, p, 0))
	require.EqualValues(t, 16, restoreAt(t, d, seq))
}

// The memory under copies of a lost device stays what it is, on both ways, for the life of the process; the database goes on.
func TestLostDeviceKeepsItsPages_GPU01(t *testing.T) {
	h, books := newHeldDevice(t), shelf{}
	d := openDB(t, tempDir(t), Options{Engine: h.engine})
	ns := testNamespace(t, 1, tiny()...)
	listed, pending := seqOf(t, ns, tokens(1, 16)), seqOf(t, ns, tokens(2, 16))
	books.publish(t, d, listed, 16)
	r, err := d.Restore(context.Background(), listed, LookupOptions{})
	require.NoError(t, err)
	p := begin(t, d, pending, 16)
	from := h.produce(t, p, 0)
	h.hold()
	lost := fmt.Errorf("fell off the bus: %w", gpu.ErrDeviceLost)
	h.fails.Store(&lost)
	ended := make(chan error, 2)
	go func() { ended <- p.FillFromDevice(context.Background(), 0, from) }()
	go func() { ended <- r.CopyToDevice(context.Background(), 0, from) }()
	require.Eventually(t, func() bool { return h.engine.Stats()[0].Chunks == 2 }, patience, time.Millisecond)
	h.letGo()
	for range 2 {
		err := <-ended
		requireClass(t, err, ErrIO)
		require.ErrorIs(t, err, gpu.ErrDeviceLost)
	}
	p.Abort()
	r.Release()
	require.EqualValues(t, 2, stats(t, d).Transfers)
	_, err = d.DropRAM(context.Background())
	require.NoError(t, err)
	require.NotZero(t, stats(t, d).RAMUsed)
	require.EqualValues(t, 16, restoreAt(t, d, listed))
	books.publish(t, d, pending, 16)
	require.EqualValues(t, 16, restoreAt(t, d, pending))
	require.ErrorIs(t, h.engine.Close(context.Background()), gpu.ErrDeviceLost)
	require.Equal(t, 2, closeDB(t, d).Transfers)
}

// Nothing reads the bytes of a slot before the copy into it has ended: until then the rank cannot be committed, and what is
// committed then is what the device held.
func TestBytesAreReadOnceTheCopyHasEnded_GPU05(t *testing.T) {
	h := newHeldDevice(t)
	d := openDB(t, tempDir(t), Options{Engine: h.engine})
	seq := seqOf(t, testNamespace(t, 1, tiny()...), tokens(1, 16))
	p := begin(t, d, seq, 16)
	from := h.produce(t, p, 0)
	h.hold()
	ended := make(chan error, 1)
	go func() { ended <- p.FillFromDevice(context.Background(), 0, from) }()
	h.inFlight(t)
	_, err := p.Commit(context.Background(), 0)
	requireClass(t, err, ErrBusy)
	h.letGo()
	require.NoError(t, <-ended)
	require.True(t, commit(t, p, 0))
	outOfRAM(t, d)
	r, err := d.Restore(context.Background(), seq, LookupOptions{})
	require.NoError(t, err)
	verify(t, r, 1)
	r.Release()
}

// The layout is part of the namespace, so that ranks cannot differ in it; blocks that do not fit it are refused. A rank that never
// comes holds nobody up, and its publication ends with its lease.
func TestRankThatNeverComesHoldsNobodyUp_GPU07(t *testing.T) {
	h, books := newHeldDevice(t), shelf{}
	d := openDB(t, tempDir(t), Options{Engine: h.engine})
	ns := testNamespace(t, 2, tiny()...)
	seq, other := seqOf(t, ns, tokens(1, 16)), seqOf(t, ns, tokens(2, 16))
	owner := newOwner(t, d, time.Hour)
	p := begin(t, d, seq, 16, func(r *PublishRequest) { r.Owner = owner })
	from := h.produce(t, p, 0)
	wrong := DeviceRank{Blocks: func(group int, position int64) []DeviceBlock { return from.Blocks(group, position)[:0] }}
	requireClass(t, p.FillFromDevice(context.Background(), 0, wrong), ErrInvalid)
	requireClass(t, p.FillFromDevice(context.Background(), 2, from), ErrInvalid)
	require.NoError(t, p.FillFromDevice(context.Background(), 0, from))
	require.False(t, commit(t, p, 0))
	books.publish(t, d, other, 16)
	require.EqualValues(t, 16, restoreAt(t, d, other))
	require.Zero(t, lookupAt(t, d, seq))
	owner.Close()
	becomes(t, d, 0, pendingOf, "pending")
	require.Zero(t, lookupAt(t, d, seq))
	books.publish(t, d, seq, 16)
	require.Equal(t, []int64{16, 16}, books.requireListedIsReadable(t, d))
}

// Without an engine device memory is refused, and everything else works.
func TestWithoutAnEngine(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	seq := seqOf(t, testNamespace(t, 1, tiny()...), tokens(1, 16))
	p := begin(t, d, seq, 16)
	requireClass(t, p.FillFromDevice(context.Background(), 0, DeviceRank{}), ErrUnsupported)
	fill(t, p, 0)
	require.True(t, commit(t, p, 0))
	r, err := d.Restore(context.Background(), seq, LookupOptions{})
	require.NoError(t, err)
	requireClass(t, r.CopyToDevice(context.Background(), 0, DeviceRank{}), ErrUnsupported)
	r.Release()
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
	d := openDB(t, tempDir(t), Options{Engine: engine})
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
		from := DeviceRank{Blocks: func(int, int64) []DeviceBlock { return []DeviceBlock{{Address: cache.base, Bytes: 10}} }}
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
		require.NoError(t, r.CopyToDevice(ctx, rank, DeviceRank{Blocks: blocks}))
		for _, page := range r.Pages(rank) {
			require.Equal(t, content(page.Key, rank, int64(len(page.Bytes))), cache.bytes(blocks(page.Group, page.Position)))
		}
	}
	require.ErrorIs(t, r.CopyToDevice(ctx, 2, DeviceRank{}), ErrInvalid)
	r.Release()
	require.ErrorIs(t, r.CopyToDevice(ctx, 0, DeviceRank{}), ErrConflict)
	s := stats(t, d)
	require.Zero(t, s.Transfers)
	require.Zero(t, s.Leases)
	require.Zero(t, s.Pending)
}
