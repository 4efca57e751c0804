package index

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/atomicfs"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

func openTest(t *testing.T, fs vfs.FS) *Index {
	t.Helper()
	x, err := Open("index", Options{FS: fs})
	require.NoError(t, err)
	return x
}

func retire(n byte) txn.Record {
	return &txn.Supersede{Generations: []txn.Generation{}, By: txn.Generation{n}}
}

// apply commits one batch that holds nothing but the applied LSN.
func apply(t *testing.T, x *Index, lsn txn.LSN) {
	t.Helper()
	b := x.NewBatch()
	_, err := txn.Apply(b, lsn, retire(0))
	require.NoError(t, err)
	require.NoError(t, b.Commit())
}

// Given batches of which some were flushed, when the machine loses power, then the index holds exactly the records up to
// the LSN that it called durable.
func TestDurableAppliedIsWhatACrashLeaves(t *testing.T) {
	fs := vfs.NewCrashableMem()
	x := openTest(t, fs)
	for lsn := txn.LSN(1); lsn <= 10; lsn++ {
		apply(t, x, lsn)
	}
	durable, err := x.DurableApplied()
	require.NoError(t, err)
	require.Zero(t, durable)
	require.NoError(t, x.Flush())
	durable, err = x.DurableApplied()
	require.NoError(t, err)
	require.EqualValues(t, 10, durable)
	for lsn := txn.LSN(11); lsn <= 15; lsn++ {
		apply(t, x, lsn)
	}
	s := x.Snapshot()
	applied, err := txn.ReadApplied(s)
	require.NoError(t, err)
	require.EqualValues(t, 15, applied)
	require.NoError(t, s.Close())
	durable, err = x.DurableApplied()
	require.NoError(t, err)
	require.EqualValues(t, 10, durable)

	crashed := fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 0})
	require.NoError(t, x.Close())
	y := openTest(t, crashed)
	s = y.Snapshot()
	applied, err = txn.ReadApplied(s)
	require.NoError(t, err)
	require.EqualValues(t, 10, applied)
	require.NoError(t, s.Close())
	require.NoError(t, y.Close())
}

func TestBatchReadsItsOwnWrites(t *testing.T) {
	x := openTest(t, vfs.NewMem())
	defer func() { require.NoError(t, x.Close()) }()
	b := x.NewBatch()
	for i := range 5 {
		require.NoError(t, b.Set(fmt.Appendf(nil, "k%d", i), []byte{byte(i)}))
	}
	require.NoError(t, b.Delete([]byte("k3")))
	var keys []string
	scan := func(r txn.Reader) []string {
		keys = nil
		require.NoError(t, r.Scan([]byte("k"), func(k, _ []byte) (bool, error) {
			keys = append(keys, string(k))
			return true, nil
		}))
		return keys
	}
	require.Equal(t, []string{"k0", "k1", "k2", "k4"}, scan(b))
	before := x.Snapshot()
	require.NoError(t, b.Commit())
	require.Empty(t, scan(before), "a snapshot does not see later batches")
	require.NoError(t, before.Close())
	s := x.Snapshot()
	require.Equal(t, []string{"k0", "k1", "k2", "k4"}, scan(s))
	v, err := s.Get([]byte("k3"))
	require.NoError(t, err)
	require.Nil(t, v)
	require.NoError(t, s.Close())

	b = x.NewBatch()
	require.NoError(t, b.Delete([]byte("k0")))
	require.NoError(t, b.Discard())
	s = x.Snapshot()
	require.Len(t, scan(s), 4, "a discarded batch changes nothing")
	require.NoError(t, s.Close())
}

func TestPrefixEnd(t *testing.T) {
	require.Equal(t, []byte{'b'}, after([]byte{'a'}))
	require.Equal(t, []byte{'a', 1}, after([]byte{'a', 0, 0xff}))
	require.Nil(t, after([]byte{0xff, 0xff}))
	require.Nil(t, after(nil))
}

// Whatever bit of the manifest flips, the index does not open, or is as it was at some flush, and goes on: sequence numbers are not given
// out twice, which would end the process in the next compaction (no panic leaves the library).
func TestFlippedManifest(t *testing.T) {
	fs := vfs.NewCrashableMem()
	x := openTest(t, fs)
	for lsn := txn.LSN(1); lsn <= 5; lsn++ {
		apply(t, x, lsn)
	}
	require.NoError(t, x.Flush())
	require.NoError(t, x.Close())
	require.NoError(t, openTest(t, fs).Close()) // a manifest that begins with tables
	name, err := atomicfs.ReadMarker(fs, "index", "manifest")
	require.NoError(t, err)
	path := "index/" + name
	f, err := fs.Open(path)
	require.NoError(t, err)
	whole, err := io.ReadAll(f)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	refused := 0
	try := func(i int, more txn.LSN) {
		clone := fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 0})
		f, err := clone.Create(path, vfs.WriteCategoryUnspecified)
		require.NoError(t, err)
		flipped := bytes.Clone(whole)
		if i < len(whole) {
			flipped[i] ^= 1 << (i % 8)
		}
		_, err = f.Write(flipped)
		require.NoError(t, err)
		require.NoError(t, f.Close())
		x, err := Open("index", Options{FS: clone})
		if err != nil {
			require.ErrorIs(t, err, txn.ErrCorrupt)
			require.Less(t, i, len(whole))
			refused++
			return
		}
		x.Begin()
		s := x.Snapshot()
		applied, err := txn.ReadApplied(s)
		require.NoError(t, err)
		require.NoError(t, s.Close())
		require.Contains(t, []txn.LSN{0, 5}, applied)
		for range more {
			applied++
			apply(t, x, applied)
		}
		require.NoError(t, x.Flush())
		require.NoError(t, x.db.Compact(context.Background(), []byte{0}, []byte{0xff}, false))
		s = x.Snapshot()
		now, err := txn.ReadApplied(s)
		require.NoError(t, err)
		require.Equal(t, applied, now)
		require.NoError(t, s.Close())
		require.NoError(t, x.Close())
	}
	for i := range len(whole) + 1 { // the last time without a flip
		for more := range txn.LSN(8) { // a number that is given out again is met in one of these
			try(i, more+1)
		}
	}
	require.Positive(t, refused)
}
