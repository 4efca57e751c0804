package db

import (
	"context"
	"os"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// Given checkpoints in RAM only that are older than those on disk, when the disk runs full, then what makes room there goes, and
// not what has nothing there.
func TestDiskPressureSparesWhatIsInRAMOnly(t *testing.T) {
	ns := testNamespace(t, 1, Group{Name: "attention:kv", Kind: Attention, PageBytes: 64 << 10, PageTokens: 16})
	d := openDB(t, tempDir(t), Options{WritePolicy: OnEvict, DiskBytes: 10 * 4 * 64 << 10})
	durable := func(r *PublishRequest) { r.Durable = true }
	seq := func(i int) *Sequence { return seqOf(t, ns, tokens(uint64(i), 64)) }
	for i := range 5 {
		publish(t, d, seq(i), 64)
	}
	for i := 5; i < 25; i++ {
		publish(t, d, seq(i), 64, durable)
	}
	for i := range 5 {
		require.EqualValues(t, 64, restoreAt(t, d, seq(i)), "checkpoint %d is in RAM, and the disk has nothing of it", i)
	}
	for i := 5; i < 15; i++ {
		require.Zero(t, lookupAt(t, d, seq(i)))
	}
	for i := 15; i < 25; i++ {
		require.EqualValues(t, 64, restoreAt(t, d, seq(i)))
	}
	require.LessOrEqual(t, stats(t, d).DiskBytes, int64(10*4*64<<10))
	checkCatalogue(t, d)
}

// Given a checkpoint on disk whose only users left are longer ones in RAM, when the disk runs full, then they go, because nothing
// else makes room.
func TestDiskPressureTakesWhatIsOnDiskInPart(t *testing.T) {
	ns := testNamespace(t, 1, Group{Name: "attention:kv", Kind: Attention, PageBytes: 64 << 10, PageTokens: 16})
	d := openDB(t, tempDir(t), Options{WritePolicy: OnEvict, DiskBytes: 4 * 64 << 10})
	durable := func(r *PublishRequest) { r.Durable = true }
	base := seqOf(t, ns, tokens(1, 64))
	g, _ := publish(t, d, base, 64, durable)
	for i := range 2 {
		longer, err := base.Fork(64)
		require.NoError(t, err)
		require.NoError(t, longer.Append(tokens(uint64(10+i), 64)))
		publish(t, d, longer, 128)
	}
	require.NoError(t, d.Delete(context.Background(), g))
	other := seqOf(t, ns, tokens(2, 64))
	publish(t, d, other, 64, durable)
	require.EqualValues(t, 64, restoreAt(t, d, other))
	require.Zero(t, lookupAt(t, d, base))
	checkCatalogue(t, d)
}

// Given pages below, at and above the size of a block, published one by one and many at a time, when the database is opened again, then
// what it says its segment files take is what they take; and the pages are counted exactly.
func TestAccountsAreThoseOfTheDisk_B19_FSA10(t *testing.T) {
	dir := tempDir(t)
	d := openDB(t, dir, Options{})
	for i, size := range []int64{1, 100, 4095, 4096, 5000, 70000} {
		ns := testNamespace(t, 2,
			Group{Name: "attention:kv", Kind: Attention, PageBytes: size, PageTokens: 16},
			Group{Name: "recurrent:state", Kind: Recurrent, PageBytes: size + 1, Pages: 1})
		seq := seqOf(t, ns, tokens(uint64(i), 320))
		publish(t, d, seq, 16)
		publish(t, d, seq, 320)
		g, _ := publish(t, d, seqOf(t, ns, tokens(uint64(100+i), 320)), 320)
		require.NoError(t, d.Delete(context.Background(), g))
	}
	idle(d)
	used := stats(t, d).DiskBytes
	for _, end := range []func(){func() { crash(t, d) }, func() { closeDB(t, d) }} {
		end()
		d = openDB(t, dir, Options{})
		settled(t, d)
		s := stats(t, d)
		require.Equal(t, used, s.DiskBytes, "page copies, exactly")
		require.Equal(t, s.DiskBytes, liveBytes(t, d))
		require.InEpsilon(t, blocksOf(t, dir), s.SegmentBytes, 0.01, "what the files take")
		require.NoError(t, d.Check(context.Background()))
	}
}

// blocksOf adds up the disk blocks of the segment files, as du does.
func blocksOf(t testing.TB, dir string) (bytes int64) {
	t.Helper()
	entries, err := os.ReadDir(dir + "/" + dataName)
	require.NoError(t, err)
	for _, e := range entries {
		info, err := e.Info()
		require.NoError(t, err)
		bytes += blockBytesOf(info)
	}
	return bytes
}

// A directory that comes back with a smaller budget gives up what does not fit in the background, oldest first, and what is written
// meanwhile stays within it.
func TestSmallerBudgetTrimsInTheBackground_B19(t *testing.T) {
	dir := tempDir(t)
	ns := testNamespace(t, 1, Group{Name: "attention:kv", Kind: Attention, PageBytes: 64 << 10, PageTokens: 16})
	d := openDB(t, dir, Options{})
	seq := func(i int) *Sequence { return seqOf(t, ns, tokens(uint64(i), 64)) }
	for i := range 20 {
		publish(t, d, seq(i), 64)
	}
	crash(t, d)
	const budget = 5 * 4 * 64 << 10
	d = openDB(t, dir, Options{DiskBytes: budget})
	for i := 20; i < 23; i++ { // the budget holds for the first write
		publish(t, d, seq(i), 64)
		require.LessOrEqual(t, stats(t, d).DiskBytes, int64(budget))
	}
	require.NoError(t, d.disk.trim(context.Background()))
	var there []bool
	for i := range 23 {
		there = append(there, lookupAt(t, d, seq(i)) == 64)
	}
	require.True(t, !slices.Contains(there[slices.Index(there, true):], false), "the oldest go: %v", there)
	require.False(t, there[17])
	for i := 20; i < 23; i++ {
		require.EqualValues(t, 64, restoreAt(t, d, seq(i)))
	}
	checkCatalogue(t, d)
}
