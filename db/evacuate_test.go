package db

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
)

// Given segments of which almost everything is dead, when they are evacuated, then what is alive is restored from its new place,
// also after a crash, and the files are gone.
func TestSparseSegmentsAreEvacuated(t *testing.T) {
	dir := tempDir(t)
	ns := testNamespace(t, 2)
	o := Options{SegmentBytes: 1 << 20}
	d := openDB(t, dir, o)
	kept := seqOf(t, ns, tokens(1, 256))
	publish(t, d, kept, 256)
	var dead []Generation
	for i := range 12 {
		g, _ := publish(t, d, seqOf(t, ns, tokens(uint64(10+i), 512)), 512)
		dead = append(dead, g)
	}
	// A new handle has sealed what the old one wrote, and nothing in RAM.
	closeDB(t, d)
	d = openDB(t, dir, o)
	before, err := d.segments.Segments()
	require.NoError(t, err)
	for _, g := range dead {
		require.NoError(t, d.Delete(context.Background(), g))
	}
	idle(d)
	left, err := d.segments.Segments()
	require.NoError(t, err)
	for _, info := range left {
		require.NoError(t, d.evacuate(context.Background(), info.Number)) // as the loop does, in case it was not told
	}
	idle(d)
	require.NotZero(t, stats(t, d).PagesMoved)
	after, err := d.segments.Segments()
	require.NoError(t, err)
	require.Less(t, len(after), len(before))
	for _, info := range after {
		for _, old := range before {
			require.NotEqual(t, old.Number, info.Number, "every old file is gone")
		}
	}
	checkCatalogue(t, d)
	require.EqualValues(t, 256, restoreAt(t, d, kept))
	crash(t, d)
	d = openDB(t, dir, o)
	require.EqualValues(t, 256, restoreAt(t, d, kept))
	checkCatalogue(t, d)
	require.Zero(t, stats(t, d).FailedReads)
}
