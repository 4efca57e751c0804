package segment

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/holdfast-db/holdfast/txn"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var database = [16]byte{0xda, 0x7a, 0xba, 0x5e}

// open opens a store in dir with small segments and closes it at the end of the test.
func open(t testing.TB, dir string, change ...func(*Options)) *Store {
	t.Helper()
	o := Options{DatabaseID: database, SegmentBytes: 1 << 20}
	for _, c := range change {
		c(&o)
	}
	s, err := Open(dir, o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

// pageOf is a page whose content follows from its number and length, in memory of the given alignment.
func pageOf(number uint64, n int, aligned bool) Page {
	b := memory(n, aligned)
	r := rand.NewChaCha8([32]byte(binary.LittleEndian.AppendUint64(make([]byte, 24), number)))
	_, _ = r.Read(b)
	return Page{Key: keyOf(number), Parent: keyOf(number - 1), Rank: uint16(number), Bytes: b}
}

func keyOf(number uint64) (k txn.Key) {
	binary.BigEndian.PutUint64(k[:], number)
	k[31] = 1
	return k
}

// memory is n bytes that are aligned to a block, or certainly not.
func memory(n int, wantAligned bool) []byte {
	b := make([]byte, n+2*int(blockBytes))
	for !aligned(b) {
		b = b[1:]
	}
	if !wantAligned {
		b = b[8:]
	}
	return b[:n:n]
}

func reading(p Page, at txn.Placement, aligned bool) ReadRequest {
	return ReadRequest{Place: at, Key: p.Key, Rank: p.Rank, Dst: memory(len(p.Bytes), aligned)}
}

func write(t testing.TB, s *Store, class Class, pages ...Page) []txn.Placement {
	t.Helper()
	places, err := s.Append(t.Context(), class, pages)
	require.NoError(t, err)
	require.Len(t, places, len(pages))
	return places
}

// verifyPages reads every page alone, into aligned memory and into other, and all of them together.
func verifyPages(t testing.TB, s *Store, pages []Page, places []txn.Placement) {
	t.Helper()
	for _, aligned := range []bool{true, false} {
		batch := make([]ReadRequest, len(pages))
		for i, p := range pages {
			r := reading(p, places[i], aligned)
			require.NoError(t, s.Read(t.Context(), r))
			require.Equal(t, p.Bytes, r.Dst, "page %d of %d bytes", i, len(p.Bytes))
			batch[i] = reading(p, places[i], aligned)
		}
		rand.Shuffle(len(batch), func(i, j int) { batch[i], batch[j] = batch[j], batch[i] })
		require.Nil(t, s.ReadBatch(t.Context(), batch))
		for _, r := range batch {
			n := binary.BigEndian.Uint64(r.Key[:])
			require.Equal(t, pageOf(n, len(r.Dst), true).Bytes, r.Dst)
		}
	}
}

var pageSizes = []int{1, 63, 64, 65, 4095, 4096, 4097, 8192, 64 << 10, 64<<10 + 1, 300_000, 2<<20 + 1}

func TestPagesOfAllSizesComeBack_B38(t *testing.T) {
	for _, direct := range []DirectMode{DirectAuto, DirectOff} {
		for _, aligned := range []bool{true, false} {
			t.Run(fmt.Sprintf("direct=%v/aligned=%v", direct == DirectAuto, aligned), func(t *testing.T) {
				dir := t.TempDir()
				s := open(t, dir, func(o *Options) { o.Direct = direct })
				var pages []Page
				var places []txn.Placement
				for i, n := range pageSizes { // one by one, then all in one call
					p := pageOf(uint64(i+1), n, aligned)
					pages = append(pages, p)
					places = append(places, write(t, s, Own, p)...)
				}
				again := make([]Page, len(pageSizes))
				for i, n := range pageSizes {
					again[i] = pageOf(uint64(100+i), n, aligned)
				}
				pages = append(pages, again...)
				places = append(places, write(t, s, Shared, again...)...)
				for i, p := range places {
					require.Zero(t, p.Offset%unitOf(p.Stored))
					require.EqualValues(t, len(pages[i].Bytes), p.Stored)
					require.Equal(t, txn.CodecNone, p.Codec)
				}
				verifyPages(t, s, pages, places)
				require.NoError(t, s.Close())
				verifyPages(t, open(t, dir, func(o *Options) { o.Direct = direct }), pages, places)
			})
		}
	}
}

func TestUnusableRequestsAreRefused_B38(t *testing.T) {
	s := open(t, t.TempDir())
	huge := make([]byte, PageBytesMax+1) // never touched
	for _, c := range []struct {
		name  string
		class Class
		pages []Page
		want  error
	}{
		{"class", 0, []Page{pageOf(1, 64, true)}, txn.ErrInvalid},
		{"class", 4, []Page{pageOf(1, 64, true)}, txn.ErrInvalid},
		{"empty page", Own, []Page{pageOf(1, 64, true), {Key: keyOf(2)}}, txn.ErrInvalid},
		{"codec", Own, []Page{{Key: keyOf(1), Bytes: []byte{1}, Codec: 3}}, txn.ErrUnsupported},
		{"zero key", Own, []Page{{Bytes: []byte{1}}}, txn.ErrInvalid},
		{"over 1 GiB", Own, []Page{{Key: keyOf(1), Bytes: huge}}, txn.ErrTooLarge},
		{"too many", Own, make([]Page, AppendPagesMax+1), txn.ErrTooLarge},
	} {
		_, err := s.Append(t.Context(), c.class, c.pages)
		require.ErrorIs(t, err, c.want, c.name)
	}
	places, err := s.Append(t.Context(), Own, nil)
	require.NoError(t, err)
	require.Empty(t, places)
	infos, err := s.Segments()
	require.NoError(t, err)
	require.Empty(t, infos, "a refused append left a file")

	p := pageOf(1, 5000, true)
	at := write(t, s, Own, p)[0]
	for _, c := range []struct {
		name   string
		change func(*ReadRequest)
		want   error
	}{
		{"short buffer", func(r *ReadRequest) { r.Dst = r.Dst[1:] }, txn.ErrInvalid},
		{"codec", func(r *ReadRequest) { r.Place.Codec = 0 }, txn.ErrUnsupported},
		{"no segment", func(r *ReadRequest) { r.Place.Segment = 0 }, txn.ErrCorrupt},
		{"unknown segment", func(r *ReadRequest) { r.Place.Segment = 99 }, txn.ErrNotFound},
		{"in the header", func(r *ReadRequest) { r.Place.Offset = 0 }, txn.ErrCorrupt},
		{"negative", func(r *ReadRequest) { r.Place.Offset = -4096 }, txn.ErrCorrupt},
		{"unaligned", func(r *ReadRequest) { r.Place.Offset++ }, txn.ErrCorrupt},
		{"elsewhere", func(r *ReadRequest) { r.Place.Offset = 4096 }, txn.ErrCorrupt},
		{"behind the end", func(r *ReadRequest) { r.Place.Offset = 1 << 40 }, txn.ErrCorrupt},
		{"checksum", func(r *ReadRequest) { r.Place.Checksum++ }, txn.ErrCorrupt},
	} {
		r := reading(p, at, true)
		c.change(&r)
		require.ErrorIs(t, s.Read(t.Context(), r), c.want, c.name)
	}
	require.ErrorContains(t, s.Read(t.Context(), func() ReadRequest { r := reading(p, at, true); r.Place.Checksum++; return r }()),
		fmt.Sprintf("page %s of rank 1, 5000 bytes at %d of %s", p.Key.Short(), at.Offset, s.path(at.Segment)))
}

func TestOptionsOutsideTheirLimitsAreRefused(t *testing.T) {
	for _, o := range []Options{
		{SegmentBytes: SegmentBytesMin - 1}, {SegmentBytes: SegmentBytesMax + 1}, {SegmentBytes: -1},
		{QueueLimit: -1}, {ReadParallel: 1 << 20}, {OpenFiles: -5}, {Direct: 7},
	} {
		_, err := Open(t.TempDir(), o)
		require.ErrorIs(t, err, txn.ErrInvalid, "%+v", o)
	}
}

// Offsets beyond 4 GiB keep their value, on disk too.
func TestSegmentBeyond4GiB_B38(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, func(o *Options) { o.SegmentBytes = 8 << 30 })
	before := pageOf(1, 70_000, true)
	places := write(t, s, Own, before)
	out := s.lanes[Own-1].out // the lane is idle, and the next Append is after this
	out.tail, out.allocated = 5<<30, 5<<30
	after := []Page{pageOf(2, 100_000, true), pageOf(3, 100, true)}
	places = append(places, write(t, s, Own, after...)...)
	require.Greater(t, places[1].Offset, int64(1)<<32)
	pages := append([]Page{before}, after...)
	verifyPages(t, s, pages, places)
	require.NoError(t, s.Close())

	s = open(t, dir)
	verifyPages(t, s, pages, places)
	infos, err := s.Segments()
	require.NoError(t, err)
	require.Len(t, infos, 1)
	require.Greater(t, infos[0].Size, int64(5)<<30)
	require.Less(t, infos[0].Allocated, int64(32)<<20)
	require.NoError(t, s.Free(places[1:]))
	require.ErrorIs(t, s.Read(t.Context(), reading(pages[1], places[1], true)), txn.ErrCorrupt)
	verifyPages(t, s, pages[:1], places[:1])
}

func TestLargePageHasASegmentToItself(t *testing.T) {
	s := open(t, t.TempDir(), func(o *Options) { o.SegmentBytes = 256 << 10 })
	pages := []Page{pageOf(1, 10_000, true), pageOf(2, 1<<20, true), pageOf(3, 10_000, true), pageOf(4, 9<<20, false)}
	places := write(t, s, Own, pages...)
	for i := range places {
		require.EqualValues(t, i+1, places[i].Segment)
	}
	verifyPages(t, s, pages, places)
}

func TestSegmentsRotateAndNumbersAreNeverReused(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, func(o *Options) { o.SegmentBytes = 256 << 10; o.Floor = 40 })
	var pages []Page
	for i := range 30 {
		pages = append(pages, pageOf(uint64(i+1), 30_000, true))
	}
	places := write(t, s, Own, pages[:20]...)
	for _, p := range pages[20:] {
		places = append(places, write(t, s, Own, p)...)
	}
	verifyPages(t, s, pages, places)
	infos, err := s.Segments()
	require.NoError(t, err)
	require.EqualValues(t, 41, infos[0].Number)
	for i, g := range infos {
		require.LessOrEqual(t, g.Size, int64(256<<10))
		class, err := s.Class(t.Context(), g.Number)
		require.NoError(t, err)
		require.Equal(t, Own, class)
		require.Equal(t, i < len(infos)-1, g.Sealed)
		if g.Sealed {
			require.LessOrEqual(t, g.Allocated, g.Size)
		}
	}
	last := infos[len(infos)-1].Number
	require.ErrorIs(t, s.Remove(last), txn.ErrBusy)
	require.NoError(t, s.Seal(t.Context()))
	require.NoError(t, s.Remove(last))
	require.NoError(t, s.Remove(last), "removing what is gone")
	require.ErrorIs(t, s.Read(t.Context(), reading(pages[29], places[29], true)), txn.ErrNotFound)
	at := write(t, s, Own, pages[29])[0]
	require.Equal(t, last+1, at.Segment)
	require.Equal(t, last+1, s.Highest())
	require.NoError(t, s.Close())

	// A start begins a new file, also where the highest was removed, if the caller knows it.
	require.NoError(t, os.Remove(filepath.Join(dir, fmt.Sprintf("%020d.seg", last+1))))
	s = open(t, dir, func(o *Options) { o.Floor = last + 1 })
	require.Equal(t, last+2, write(t, s, Own, pages[0])[0].Segment)
	verifyPages(t, s, pages[:10], places[:10])
}

func TestClassesHaveTheirOwnSegments(t *testing.T) {
	s := open(t, t.TempDir())
	a, b := write(t, s, Shared, pageOf(1, 100, true)), write(t, s, Own, pageOf(2, 100, true))
	c, d := write(t, s, Shared, pageOf(3, 100, true)), write(t, s, Own, pageOf(4, 100, true))
	require.Equal(t, a[0].Segment, c[0].Segment)
	require.Equal(t, b[0].Segment, d[0].Segment)
	require.NotEqual(t, a[0].Segment, b[0].Segment)
}

func TestManyCallersShareSyncs(t *testing.T) {
	const callers, each = 16, 20
	s := open(t, t.TempDir(), func(o *Options) { o.SegmentBytes = 4 << 20; o.QueueLimit = 4; o.OpenFiles = 1; o.ReadParallel = 2 })
	pages := make([]Page, callers*each)
	places := make([]txn.Placement, len(pages))
	var wg sync.WaitGroup
	for c := range callers {
		wg.Go(func() {
			for i := c * each; i < (c+1)*each; i++ {
				pages[i] = pageOf(uint64(i+1), pageSizes[i%(len(pageSizes)-1)], i%3 != 0)
				at, err := s.Append(t.Context(), Class(1+c%2), pages[i:i+1])
				if err != nil {
					t.Errorf("append %d: %v", i, err)
					return
				}
				places[i] = at[0]
				r := reading(pages[i], places[i], i%2 == 0)
				if err := s.Read(t.Context(), r); err != nil || string(r.Dst) != string(pages[i].Bytes) {
					t.Errorf("read %d: %v", i, err)
				}
			}
		})
	}
	wg.Wait()
	verifyPages(t, s, pages, places)
	n := s.Stats()
	require.EqualValues(t, len(pages), n.PagesWritten)
	require.Less(t, n.Syncs, int64(len(pages)), "nothing was grouped")
	var stored int64
	for _, p := range places {
		stored += p.Stored
	}
	require.Equal(t, stored, n.PayloadBytes)
	infos, err := s.Segments()
	require.NoError(t, err)
	var size int64
	for _, g := range infos {
		size += g.Size
	}
	require.Equal(t, size, n.PayloadBytes+n.DescriptorBytes+n.PaddingBytes, "bytes written, by kind, are not the bytes there")
}

func TestCancelledAppendIsNotWritten(t *testing.T) {
	s := open(t, t.TempDir())
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := s.Append(ctx, Own, []Page{pageOf(1, 64, true)})
	require.ErrorIs(t, err, txn.ErrBusy)
	require.ErrorIs(t, err, context.Canceled)
	require.Zero(t, s.Stats().PagesWritten)
}

func TestClosedStoreRefuses(t *testing.T) {
	s := open(t, t.TempDir())
	p := pageOf(1, 64, true)
	at := write(t, s, Own, p)[0]
	require.NoError(t, s.Close())
	require.NoError(t, s.Close())
	_, err := s.Append(t.Context(), Own, []Page{p})
	require.ErrorIs(t, err, txn.ErrClosed)
	require.ErrorIs(t, s.Read(t.Context(), reading(p, at, true)), txn.ErrClosed)
	require.ErrorIs(t, s.Free([]txn.Placement{at}), txn.ErrClosed)
	require.ErrorIs(t, s.Remove(1), txn.ErrClosed)
	require.ErrorIs(t, s.Truncate(1, 4096), txn.ErrClosed)
	require.ErrorIs(t, s.Seal(t.Context()), txn.ErrClosed)
	_, err = s.Segments()
	require.ErrorIs(t, err, txn.ErrClosed)
	_, err = s.Scan(t.Context(), 1, func(Entry) error { return nil })
	require.ErrorIs(t, err, txn.ErrClosed)
}

func TestReadOnlyStoreChangesNothing_B32(t *testing.T) {
	parent := t.TempDir()
	readOnly := func(o *Options) { o.ReadOnly = true }
	dir := filepath.Join(parent, "data")
	none := open(t, dir, readOnly)
	infos, err := none.Segments()
	require.NoError(t, err)
	require.Empty(t, infos)
	require.NoDirExists(t, dir)

	p := pageOf(1, 5000, true)
	w := open(t, dir)
	at := write(t, w, Own, p)[0]
	require.NoError(t, w.Close())
	require.NoError(t, os.Chmod(filepath.Join(dir, "00000000000000000001.seg"), 0o400))
	s := open(t, dir, readOnly)
	verifyPages(t, s, []Page{p}, []txn.Placement{at})
	_, err = s.Append(t.Context(), Own, []Page{p})
	require.ErrorIs(t, err, txn.ErrReadOnly)
	require.ErrorIs(t, s.Free([]txn.Placement{at}), txn.ErrReadOnly)
	require.ErrorIs(t, s.Remove(1), txn.ErrReadOnly)
	require.ErrorIs(t, s.Truncate(1, 4096), txn.ErrReadOnly)
	require.ErrorIs(t, s.Seal(t.Context()), txn.ErrReadOnly)
}

func TestModesOfFilesAndDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	s := open(t, dir)
	write(t, s, Own, pageOf(1, 64, true))
	d, err := os.Stat(dir)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o700), d.Mode().Perm())
	f, err := os.Stat(s.path(1))
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), f.Mode().Perm())
}

// Names and things that are not ours are neither counted nor touched, and never followed.
func TestForeignFilesAreLeftAlone_FSA08_B36(t *testing.T) {
	dir := t.TempDir()
	outside := filepath.Join(t.TempDir(), "outside")
	require.NoError(t, os.WriteFile(outside, []byte("precious"), 0o600))
	foreign := []string{"note.txt", "1.seg", "00000000000000000007.seg.tmp", "0000000000000000000x.seg", "00000000000000000000.seg", "99999999999999999999.seg"}
	for _, n := range foreign {
		require.NoError(t, os.WriteFile(filepath.Join(dir, n), []byte(n), 0o600))
	}
	require.NoError(t, os.Mkdir(filepath.Join(dir, "00000000000000000003.seg"), 0o700))
	require.NoError(t, os.Symlink(outside, filepath.Join(dir, "00000000000000000004.seg")))

	s := open(t, dir)
	infos, err := s.Segments()
	require.NoError(t, err)
	require.Empty(t, infos)
	p := pageOf(1, 64, true)
	// A link that turns up where the next segment would go is stepped over.
	require.NoError(t, os.Symlink(outside, filepath.Join(dir, "00000000000000000005.seg")))
	at := write(t, s, Own, p)[0]
	require.EqualValues(t, 6, at.Segment)
	require.NoError(t, s.Remove(4), "not a segment")
	link := at
	link.Segment = 4
	require.ErrorIs(t, s.Read(t.Context(), reading(p, link, true)), txn.ErrNotFound)

	// A segment that is replaced by a link, or by a pipe, while the store is open is refused.
	for name, replace := range map[string]func(path string) error{
		"link": func(path string) error { return os.Symlink(outside, path) },
		"pipe": mkfifo,
	} {
		require.NoError(t, s.Seal(t.Context()))
		at := write(t, s, Own, p)[0]
		require.NoError(t, s.Seal(t.Context()))
		require.NoError(t, os.Remove(s.path(at.Segment)))
		require.NoError(t, replace(s.path(at.Segment)))
		require.ErrorIs(t, s.Read(t.Context(), reading(p, at, true)), txn.ErrCorrupt, name)
		require.ErrorIs(t, s.Truncate(at.Segment, 4096), txn.ErrCorrupt, name)
		require.ErrorIs(t, s.Free([]txn.Placement{at}), txn.ErrCorrupt, name)
		require.NoError(t, s.Remove(at.Segment), "which removes the name, not what it leads to")
	}
	require.NoError(t, s.Close())

	for _, n := range foreign {
		b, err := os.ReadFile(filepath.Join(dir, n))
		require.NoError(t, err)
		require.Equal(t, n, string(b))
	}
	require.DirExists(t, filepath.Join(dir, "00000000000000000003.seg"))
	b, err := os.ReadFile(outside)
	require.NoError(t, err)
	require.Equal(t, "precious", string(b))
}
