package db

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/db/internal/segment"
	"github.com/holdfast-db/holdfast/txn"
)

// The guarantees of a disk tier on a file system, on segments.

// blockBytesOf is what a file takes on disk.
func blockBytesOf(info fs.FileInfo) int64 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return int64(st.Blocks) * 512
	}
	return info.Size()
}

// What is there is not written again: publishing it once more has nothing to write, and no byte of the segment files changes, nor after a
// restart.
func TestWhatIsCompleteIsNeverReplaced_FSA01(t *testing.T) {
	dir := tempDir(t)
	d := openDB(t, dir, Options{})
	ns := testNamespace(t, 2)
	seq := seqOf(t, ns, tokens(1, 1000))
	g, bytes := publish(t, d, seq, 1000)
	require.Positive(t, bytes)
	for range 2 {
		places := placesOf(t, d, g, 0)
		written := stats(t, d).SegmentWritten
		p, err := d.Begin(context.Background(), PublishRequest{Sequence: seq, Offset: 1000})
		require.NoError(t, err)
		require.True(t, p.Listed())
		for rank := range 2 {
			slots, err := p.Slots(context.Background(), rank)
			require.NoError(t, err)
			require.Empty(t, slots)
			listed, err := p.Commit(context.Background(), rank)
			require.NoError(t, err)
			require.False(t, listed)
		}
		require.Equal(t, written, stats(t, d).SegmentWritten)
		require.Equal(t, places, placesOf(t, d, g, 0))
		closeDB(t, d)
		d = openDB(t, dir, Options{})
	}
	require.EqualValues(t, 1000, restoreAt(t, d, seq))
	_, err := os.Stat(filepath.Join(dir, markerName+temporarySuffix))
	require.ErrorIs(t, err, fs.ErrNotExist, "nothing temporary is left")
}

// Of eight that publish the same at the same time one lists it, its pages are written once, whole, and all eight see it listed.
func TestOneOfManyWritersWins_FSA02_FSA04(t *testing.T) {
	dir := tempDir(t)
	d := openDB(t, dir, Options{})
	ns := testNamespace(t, 1, Group{Name: "attention:kv", Kind: Attention, PageBytes: 512 << 10, PageTokens: 16})
	var won atomic.Int64
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			seq := seqOf(t, ns, tokens(1, 64))
			p, err := d.Begin(context.Background(), PublishRequest{Sequence: seq, Offset: 64})
			if err != nil {
				t.Error(err)
				return
			}
			slots, err := p.Slots(context.Background(), 0)
			for _, s := range slots {
				if _, err := s.Write(content(s.Key(), 0, s.Size())); err != nil {
					t.Error(err)
				}
			}
			listed := false
			if err == nil {
				listed, err = p.Commit(context.Background(), 0)
			}
			if err != nil {
				t.Error(err)
			}
			if listed {
				won.Add(1)
			}
			if _, err := d.Checkpoint(p.Generation()); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	require.EqualValues(t, 1, won.Load())
	s := stats(t, d)
	require.EqualValues(t, 4, s.PagesWritten)
	require.EqualValues(t, 2<<20, s.PayloadWritten)
	require.EqualValues(t, 64, restoreAt(t, d, seqOf(t, ns, tokens(1, 64))))
	entries, err := os.ReadDir(filepath.Join(dir, dataName))
	require.NoError(t, err)
	require.Len(t, entries, 1, "one segment file and nothing temporary")

	// Loose pages: four stores of one key.
	loose := LoosePage{Key: []byte("k"), Bytes: content([32]byte{1}, 0, 4<<20)}
	for range 4 {
		group.Go(func() {
			if err := d.PutLoose(context.Background(), ns, loose); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	require.EqualValues(t, 6<<20, stats(t, d).PayloadWritten, "stored once")
}

// Every page lies with its checksum and its length, in the catalogue and in the file beside it, and both are checked when it is read: one
// byte of content, one of the checksum, a byte less, and another page's place all fail, each alone.
func TestStoredWithChecksumAndLength_FSA05_FSA06(t *testing.T) {
	dir := tempDir(t)
	d := openDB(t, dir, Options{})
	ns := testNamespace(t, 1, Group{Name: "attention:kv", Kind: Attention, PageBytes: 16 << 10, PageTokens: 16})
	g, _ := publish(t, d, seqOf(t, ns, tokens(1, 64)), 64)
	places := placesOf(t, d, g, 0)
	require.Len(t, places, 4)
	described := 0
	_, err := d.segments.Scan(context.Background(), places[0].Segment, func(e segment.Entry) error {
		require.Contains(t, places, e.Place, "the file says what the catalogue says, checksum and length included")
		described++
		return nil
	})
	require.NoError(t, err)
	require.Equal(t, 4, described)
	snapshot := d.index.Snapshot()
	m, err := txn.ReadManifest(snapshot, g)
	require.NoError(t, err)
	keys, err := txn.ChainPages(snapshot, m.Groups[0].Head, m.Groups[0].Count)
	require.NoError(t, err)
	require.NoError(t, snapshot.Close())
	read := func(i int, change func(r *segment.ReadRequest)) error {
		r := segment.ReadRequest{Place: places[i], Key: keys[i], Dst: make([]byte, 16<<10)}
		change(&r)
		return d.segments.Read(context.Background(), r)
	}
	require.NoError(t, read(0, func(*segment.ReadRequest) {}))
	require.ErrorIs(t, read(0, func(r *segment.ReadRequest) { r.Place.Checksum ^= 1 }), ErrCorrupt)
	require.ErrorIs(t, read(0, func(r *segment.ReadRequest) { r.Place.Stored, r.Dst = r.Place.Stored-1, r.Dst[1:] }), ErrCorrupt)
	require.ErrorIs(t, read(0, func(r *segment.ReadRequest) { r.Place.Offset = places[1].Offset }), ErrCorrupt)
	flip(t, segmentFile(dir, places[2].Segment), places[2].Offset+1000)
	require.ErrorIs(t, read(2, func(*segment.ReadRequest) {}), ErrCorrupt)
	for _, i := range []int{0, 1, 3} {
		require.NoError(t, read(i, func(*segment.ReadRequest) {}), "page %d", i)
	}
}
