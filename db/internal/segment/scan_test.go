package segment

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

// scan walks a segment and returns the keys it found.
func scan(t testing.TB, s *Store, number uint64) (Scanned, []txn.Key) {
	t.Helper()
	var keys []txn.Key
	sum, err := s.Scan(t.Context(), number, func(e Entry) error {
		keys = append(keys, e.Key)
		return nil
	})
	require.NoError(t, err)
	return sum, keys
}

func TestScanFindsEveryPage(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, func(o *Options) { o.SegmentBytes = 64 << 20 })
	byKey := map[txn.Key]Page{}
	var pages []Page
	for i := range 1200 { // more than one descriptor holds
		p := pageOf(uint64(i+1), pageSizes[i%8], true)
		pages = append(pages, p)
		byKey[p.Key] = p
	}
	places := write(t, s, Shared, pages[:1100]...)
	for i := 1100; i < 1200; i++ {
		places = append(places, write(t, s, Shared, pages[i])...)
	}
	want := map[txn.Key]txn.Placement{}
	for i, p := range pages {
		want[p.Key] = places[i]
	}
	require.NoError(t, s.Close())

	s = open(t, dir)
	found := 0
	sum, err := s.Scan(t.Context(), 1, func(e Entry) error {
		p := byKey[e.Key]
		require.Equal(t, Entry{Key: p.Key, Parent: p.Parent, Rank: p.Rank, Class: Shared, Logical: int64(len(p.Bytes)), Place: want[p.Key]}, e)
		require.NoError(t, s.Read(t.Context(), reading(p, e.Place, true)), "a page can be read during the walk")
		found++
		return nil
	})
	require.NoError(t, err)
	require.Equal(t, len(pages), found)
	require.Equal(t, Scanned{Class: Shared, Batches: 103, Entries: 1200}, sum)

	stop := errors.New("enough")
	_, err = s.Scan(t.Context(), 1, func(Entry) error { return stop })
	require.Equal(t, stop, err)
	_, err = s.Scan(t.Context(), 2, nil)
	require.ErrorIs(t, err, txn.ErrNotFound)
}

func TestClassOfAnySegment(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	write(t, s, Own, pageOf(1, 4096, true))
	write(t, s, Loose, pageOf(2, 4096, true))
	write(t, s, Shared, pageOf(3, 4096, true))
	want := map[uint64]Class{1: Own, 2: Loose, 3: Shared}
	for range 2 { // as the lanes know it, and after opening
		for number, class := range want {
			got, err := s.Class(t.Context(), number)
			require.NoError(t, err)
			require.Equal(t, class, got)
		}
		require.NoError(t, s.Close())
		s = open(t, dir)
	}
	_, err := s.Class(t.Context(), 4)
	require.ErrorIs(t, err, txn.ErrNotFound)

	require.NoError(t, s.Close())
	require.NoError(t, os.Truncate(s.path(1), 100))
	b, err := os.ReadFile(s.path(2))
	require.NoError(t, err)
	b[6] ^= 1
	require.NoError(t, os.WriteFile(s.path(2), b, 0o600))
	s = open(t, dir)
	for _, number := range []uint64{1, 2} {
		_, err := s.Class(t.Context(), number)
		require.ErrorIs(t, err, txn.ErrCorrupt)
		require.ErrorContains(t, err, s.path(number))
	}
	reads := func() int64 { return s.Stats().DirectReads + s.Stats().BufferedReads }
	before := reads()
	for range 3 {
		class, err := s.Class(t.Context(), 3)
		require.NoError(t, err)
		require.Equal(t, Shared, class)
	}
	require.EqualValues(t, 1, reads()-before, "read once")
}

// threeBatches writes a segment of three batches and returns its bytes, with the pages and their places.
func threeBatches(t testing.TB, dir string) ([]byte, []Page, []txn.Placement) {
	s := open(t, dir)
	batches := [][]Page{
		{pageOf(1, 5000, true), pageOf(2, 100, true)},
		{pageOf(3, 4096, true), pageOf(4, 1, true), pageOf(5, 64, true)},
		{pageOf(6, 4096, true)},
	}
	var pages []Page
	var places []txn.Placement
	for _, b := range batches {
		places = append(places, write(t, s, Own, b...)...)
		pages = append(pages, b...)
	}
	require.NoError(t, s.Close())
	image, err := os.ReadFile(s.path(1))
	require.NoError(t, err)
	return image, pages, places
}

func TestScanStepsOverDamage_B27(t *testing.T) {
	dir := t.TempDir()
	image, pages, places := threeBatches(t, dir)
	second := places[2].Offset - blockBytes
	key := func(i ...int) (k []txn.Key) {
		for _, i := range i {
			k = append(k, pages[i].Key)
		}
		return k
	}
	for _, c := range []struct {
		name   string
		damage func(b []byte) []byte
		want   Scanned
		keys   []txn.Key
	}{
		{"none", func(b []byte) []byte { return b }, Scanned{Class: Own, Batches: 3, Entries: 6}, key(0, 1, 2, 3, 4, 5)},
		{"a descriptor in the middle", func(b []byte) []byte { b[second+100]++; return b },
			Scanned{Class: Own, Batches: 2, Entries: 3, Skipped: 3 * blockBytes, SkippedAt: second}, key(0, 1, 5)},
		{"the last descriptor", func(b []byte) []byte { b[places[5].Offset-1]++; return b },
			Scanned{Class: Own, Batches: 2, Entries: 5, Torn: 2 * blockBytes}, key(0, 1, 2, 3, 4)},
		{"half a block at the end", func(b []byte) []byte { return append(b, make([]byte, 100)...) },
			Scanned{Class: Own, Batches: 3, Entries: 6, Torn: 100}, key(0, 1, 2, 3, 4, 5)},
		{"zeros at the end", func(b []byte) []byte { return append(b, make([]byte, 1<<20)...) },
			Scanned{Class: Own, Batches: 3, Entries: 6, Torn: 1 << 20}, key(0, 1, 2, 3, 4, 5)},
		{"the end of the last page", func(b []byte) []byte { return b[:len(b)-4096] },
			Scanned{Class: Own, Batches: 3, Entries: 5, Missing: 1}, key(0, 1, 2, 3, 4)},
		{"a copy of a batch at another place", func(b []byte) []byte { return append(b, b[second:second+3*blockBytes]...) },
			Scanned{Class: Own, Batches: 3, Entries: 6, Torn: 3 * blockBytes}, key(0, 1, 2, 3, 4, 5)},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			require.NoError(t, os.WriteFile(dir+"/00000000000000000001.seg", c.damage(append([]byte(nil), image...)), 0o600))
			sum, keys := scan(t, open(t, dir), 1)
			require.Equal(t, c.want, sum)
			require.Equal(t, c.keys, keys)
		})
	}
}

func TestScanOfForeignSegments(t *testing.T) {
	dir := t.TempDir()
	image, _, _ := threeBatches(t, dir)

	s := open(t, dir, func(o *Options) { o.DatabaseID[0]++ })
	sum, keys := scan(t, s, 1)
	require.Empty(t, keys, "another database")
	require.ErrorIs(t, sum.Header, txn.ErrCorrupt)
	require.ErrorContains(t, sum.Header, "belongs to database")

	renamed := t.TempDir()
	require.NoError(t, os.WriteFile(renamed+"/00000000000000000002.seg", image, 0o600))
	sum, keys = scan(t, open(t, renamed), 2)
	require.Empty(t, keys, "another number")
	require.ErrorContains(t, sum.Header, "belongs to segment 1")

	newer := t.TempDir()
	b := append([]byte(nil), image...)
	b[4] = 2
	putSum(b[:blockBytes])
	require.NoError(t, os.WriteFile(newer+"/00000000000000000001.seg", b, 0o600))
	_, err := open(t, newer).Scan(t.Context(), 1, func(Entry) error { return nil })
	require.ErrorIs(t, err, txn.ErrUnsupported)

	for _, n := range []int64{0, 1, 4095} {
		short := t.TempDir()
		require.NoError(t, os.WriteFile(short+"/00000000000000000001.seg", image[:n], 0o600))
		sum, keys := scan(t, open(t, short), 1)
		require.Empty(t, keys)
		require.ErrorIs(t, sum.Header, txn.ErrCorrupt)
	}
}

// Whatever bit of a segment flips: every page comes back as it was written or is reported corrupt, a walk gives
// no page that was not written, and what it gives otherwise can be read.
func TestBitFlipsNeverGiveWrongBytes_B27(t *testing.T) {
	image, pages, places := threeBatches(t, t.TempDir())
	dir := t.TempDir()
	path := dir + "/00000000000000000001.seg"
	require.NoError(t, os.WriteFile(path, image, 0o600))
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	s := open(t, dir, func(o *Options) { o.Direct = DirectOff })
	byKey := map[txn.Key]int{}
	batch := make([]ReadRequest, len(pages))
	for i, p := range pages {
		byKey[p.Key] = i
		batch[i] = reading(p, places[i], true)
	}
	corrupt, lost := 0, 0
	for off := range image {
		_, err := f.WriteAt([]byte{image[off] ^ 1<<(off%8)}, int64(off))
		require.NoError(t, err)
		errs := s.ReadBatch(t.Context(), batch)
		for i, p := range places {
			switch hit := int64(off) >= p.Offset && int64(off) < p.Offset+p.Stored; {
			case hit:
				require.ErrorIs(t, errs[i], txn.ErrCorrupt, "byte %d", off)
				require.ErrorContains(t, errs[i], fmt.Sprintf("%d of %s", p.Offset, path))
				corrupt++
			case errs != nil && errs[i] != nil:
				require.NoError(t, errs[i], "byte %d is not of page %d", off, i)
			}
		}
		sum, err := s.Scan(t.Context(), 1, func(e Entry) error {
			i, ok := byKey[e.Key]
			if !ok || e.Place != places[i] || e.Rank != pages[i].Rank || e.Parent != pages[i].Parent {
				return fmt.Errorf("%+v was never written", e)
			}
			return nil
		})
		require.NoError(t, err, "byte %d", off)
		if sum.Entries < len(pages) {
			lost++
			require.GreaterOrEqual(t, sum.Entries, len(pages)-3, "a flip took more than its batch")
		}
		_, err = f.WriteAt(image[off:off+1], int64(off))
		require.NoError(t, err)
	}
	require.Equal(t, 5000+100+4096+1+64+4096, corrupt)
	require.Equal(t, 3*4096, lost, "some byte of a descriptor is not covered by its checksum")
}

func TestTruncatedAndOversizedSegments_B26(t *testing.T) {
	image, pages, places := threeBatches(t, t.TempDir())
	for _, n := range []int{len(image) - 1, len(image) - 4096, len(image) / 2, 4096, 100, 0, len(image) + 1, len(image) + 4096} {
		for _, direct := range []DirectMode{DirectAuto, DirectOff} {
			dir := t.TempDir()
			grown := append(append([]byte(nil), image...), make([]byte, 4096)...)
			require.NoError(t, os.WriteFile(dir+"/00000000000000000001.seg", grown[:n], 0o600))
			s := open(t, dir, func(o *Options) { o.Direct = direct })
			require.EqualValues(t, n, mustSegments(t, s)[0].Size, "the owner compares this with what it knows")
			for i, p := range pages {
				r := reading(p, places[i], true)
				err := s.Read(t.Context(), r)
				switch end := places[i].Offset + places[i].Stored; {
				case int64(n) >= roundUp(end, blockBytes):
					require.NoError(t, err)
					require.Equal(t, p.Bytes, r.Dst)
				case int64(n) < end:
					require.ErrorIs(t, err, txn.ErrCorrupt, "%d of %d bytes, page %d", n, len(image), i)
				case err == nil:
					require.Equal(t, p.Bytes, r.Dst)
				default:
					require.ErrorIs(t, err, txn.ErrCorrupt)
				}
			}
		}
	}
}

func FuzzDescriptor(f *testing.F) {
	o := origin{database: database, number: 1, class: Own}
	for _, sizes := range [][]int64{{1}, {4096}, {5000, 100, 63}, {1 << 30, 64}} {
		entries := make([]Entry, len(sizes))
		for i, n := range sizes {
			entries[i] = Entry{Key: keyOf(uint64(i + 1)), Logical: n, Place: txn.Placement{Stored: n, Codec: txn.CodecNone, Checksum: 7}}
		}
		b := make([]byte, descriptorBytes(len(entries)))
		encodeDescriptor(b, o, 1, 8192, entries, layOut(1, 8192, entries))
		f.Add(b, int64(8192))
		f.Add(b[:100], int64(8192))
		b[56]++
		putSum(b)
		f.Add(b, int64(8192))
	}
	f.Fuzz(func(t *testing.T, b []byte, at int64) {
		at = at & (1<<50 - 1) &^ (blockBytes - 1)
		// The sum is made to hold, or the rules behind it would hardly ever be reached.
		if n := len(b) / int(blockBytes) * int(blockBytes); n > 0 {
			b = b[:n]
			putSum(b)
		}
		d, err := decodeDescriptor(b, o, at)
		if err != nil {
			require.ErrorIs(t, err, txn.ErrCorrupt)
			return
		}
		// What is accepted is exactly what the encoder makes of it.
		again := make([]byte, descriptorBytes(len(d.entries)))
		entries := append([]Entry(nil), d.entries...)
		require.Equal(t, d.end, layOut(1, at, entries))
		require.Equal(t, d.entries, entries)
		encodeDescriptor(again, origin{database: database, number: 1, class: d.class}, d.sequence, at, entries, d.end)
		require.Equal(t, b[:len(again)], again)
	})
}

// FuzzSegmentImage scans and reads any bytes as a segment file. A page that reads back is one that was written with this checksum;
// whatever else is in the file is reported as damage, and what the scan finds lies in the file.
func FuzzSegmentImage(f *testing.F) {
	image, pages, places := threeBatches(f, f.TempDir())
	f.Add(image)
	f.Add(image[:len(image)-5000])
	f.Add(append(bytes.Clone(image[:8192]), image[12288:]...))
	f.Add(append(bytes.Clone(image), image[4096:]...))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 1<<20 {
			t.Skip()
		}
		dir := t.TempDir()
		require.NoError(t, os.WriteFile(dir+"/00000000000000000001.seg", b, 0o600))
		s := open(t, dir, func(o *Options) { o.Direct = DirectOff })
		found := 0
		sum, err := s.Scan(t.Context(), 1, func(e Entry) error {
			found++
			require.Positive(t, e.Place.Stored)
			return nil
		})
		if err != nil {
			require.ErrorIs(t, err, txn.ErrUnsupported)
		}
		require.Equal(t, found, int(sum.Entries))
		for i, p := range pages {
			r := reading(p, places[i], true)
			if err := s.Read(t.Context(), r); err == nil {
				require.Equal(t, p.Bytes, r.Dst)
			} else {
				require.ErrorIs(t, err, txn.ErrCorrupt)
			}
		}
	})
}
