package segment

import (
	"errors"
	"os"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

func gosched() { runtime.Gosched() }

func allocated(t testing.TB, s *Store, number uint64) int64 {
	t.Helper()
	for _, g := range mustSegments(t, s) {
		if g.Number == number {
			return g.Allocated
		}
	}
	t.Fatalf("no segment %d", number)
	return 0
}

func TestFreeGivesBlocksBack(t *testing.T) {
	s := open(t, t.TempDir())
	var pages []Page
	for i := range 8 {
		pages = append(pages, pageOf(uint64(i+1), 64<<10, true))
	}
	for i := range 200 {
		pages = append(pages, pageOf(uint64(100+i), 100, true))
	}
	places := write(t, s, Own, pages...)
	require.NoError(t, s.Seal(t.Context()))
	whole := allocated(t, s, 1)
	require.NoError(t, s.Free(places[2:4]))
	if s.Stats().PunchRefused > 0 {
		t.Skip("the file system of the temporary directory has no holes")
	}
	require.EqualValues(t, 128<<10, whole-allocated(t, s, 1))
	require.NoError(t, s.Free(places[2:4]), "twice")
	require.EqualValues(t, 128<<10, whole-allocated(t, s, 1))
	require.EqualValues(t, 4, s.Stats().PagesFreed)
	for i, p := range places[2:4] {
		require.ErrorIs(t, s.Read(t.Context(), reading(pages[2+i], p, true)), txn.ErrCorrupt)
	}
	// Small pages that go together give their blocks back, but for the last one, which may have neighbours.
	require.NoError(t, s.Free(places[8:]))
	require.EqualValues(t, 128<<10+(200*128)&^4095, whole-allocated(t, s, 1))
	verifyPages(t, s, pages[:2], places[:2])
	verifyPages(t, s, pages[4:8], places[4:8])
	// The descriptor stays, so that the walk does not lose its way.
	sum, _ := scan(t, s, 1)
	require.Equal(t, Scanned{Class: Own, Batches: 1, Entries: 208}, sum)

	size := mustSegments(t, s)[0].Size
	require.NoError(t, s.Free([]txn.Placement{
		{Segment: 1, Offset: 0, Stored: 4096}, {Segment: 1, Offset: -4096, Stored: 4096}, {Segment: 1, Offset: 4096, Stored: 1 << 40},
		{Segment: 1, Offset: size, Stored: 4096}, {Segment: 1, Offset: 1<<63 - 4096, Stored: 1 << 30}, {Segment: 9, Offset: 4096, Stored: 4096},
	}))
	require.Equal(t, size, mustSegments(t, s)[0].Size)
	verifyPages(t, s, pages[:2], places[:2])
}

func TestHolesAreWholeBlocksOfWhatIsFreed(t *testing.T) {
	at := func(off, n int64) txn.Placement { return txn.Placement{Segment: 1, Offset: off, Stored: n} }
	const size = 1 << 20
	for _, c := range []struct {
		name   string
		places []txn.Placement
		want   []hole
	}{
		{"one page", []txn.Placement{at(8192, 5000)}, []hole{{8192, 16384}}},
		{"neighbours", []txn.Placement{at(8192, 4096), at(12288, 4097)}, []hole{{8192, 20480}}},
		{"apart", []txn.Placement{at(8192, 4096), at(16384, 4096)}, []hole{{8192, 12288}, {16384, 20480}}},
		{"the same twice", []txn.Placement{at(8192, 4096), at(8192, 4096)}, []hole{{8192, 12288}}},
		{"a small one alone", []txn.Placement{at(8192, 64)}, nil},
		{"part of a block", []txn.Placement{at(8192, 4000), at(8192+4032, 1)}, []hole{{8192, 12288}}},
		{"a gap in a block", []txn.Placement{at(8192, 64), at(8320, 3968)}, nil},
		{"over a block", []txn.Placement{at(8192+64, 4032), at(12288, 4032), at(16320, 64)}, []hole{{12288, 16384}}},
	} {
		require.Equal(t, c.want, holes(c.places, size), c.name)
	}
}

func TestFreeWithoutHoles(t *testing.T) {
	s, f := openFaulty(t, t.TempDir())
	p := pageOf(1, 8192, true)
	at := write(t, s, Own, p)
	f.set(func(op, _ string) error {
		if op == "punch" {
			return errors.ErrUnsupported
		}
		return nil
	})
	require.NoError(t, s.Free(at))
	require.NoError(t, s.Free(at))
	require.EqualValues(t, 2, s.Stats().PunchRefused)
	require.Zero(t, s.Stats().BytesPunched)
	verifyPages(t, s, []Page{p}, at) // and the space comes back with the segment
	require.NoError(t, s.Seal(t.Context()))
	require.NoError(t, s.Remove(1))
}

// What a crash leaves preallocated behind the end of a file is given back at Open, and nothing else changes.
func TestOpenGivesBackPreallocatedTail(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	p := pageOf(1, 100_000, true)
	at := write(t, s, Own, p)
	before, err := os.ReadFile(s.path(1))
	require.NoError(t, err)
	if allocated(t, s, 1) <= int64(len(before)) {
		t.Skip("the file system of the temporary directory does not preallocate")
	}
	s2 := open(t, dir) // as after a crash: the first one was not closed
	require.LessOrEqual(t, allocated(t, s2, 1), int64(len(before)))
	after, err := os.ReadFile(s.path(1))
	require.NoError(t, err)
	require.Equal(t, before, after)
	verifyPages(t, s2, []Page{p}, at)
}

func TestTruncateCutsToABatch(t *testing.T) {
	dir := t.TempDir()
	image, pages, places := threeBatches(t, dir)
	s := open(t, dir)
	end := places[5].Offset - blockBytes
	for _, n := range []int64{-4096, 0, end - 1, int64(len(image)) + 4096} {
		require.ErrorIs(t, s.Truncate(1, n), txn.ErrInvalid, "%d", n)
	}
	require.NoError(t, s.Truncate(1, int64(len(image))))
	require.NoError(t, s.Truncate(1, end))
	require.Equal(t, end, mustSegments(t, s)[0].Size)
	verifyPages(t, s, pages[:5], places[:5])
	require.ErrorIs(t, s.Read(t.Context(), reading(pages[5], places[5], true)), txn.ErrCorrupt)
	sum, keys := scan(t, s, 1)
	require.Zero(t, sum.Torn)
	require.Len(t, keys, 5)
	require.ErrorIs(t, s.Truncate(2, 4096), txn.ErrNotFound)
	write(t, s, Own, pages[0])
	require.ErrorIs(t, s.Truncate(2, 4096), txn.ErrBusy)
}
