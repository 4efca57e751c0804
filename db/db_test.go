package db

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
)

// Given a checkpoint on two ranks, when it is published, restored, survives a close and a crash, is retired and deleted, then
// each step shows exactly what the promise says.
func TestTheLifeOfACheckpoint(t *testing.T) {
	dir := tempDir(t)
	ns := testNamespace(t, 2)
	d := openDB(t, dir, Options{})
	seq := seqOf(t, ns, tokens(1, 1000))
	require.Zero(t, lookupAt(t, d, seq))
	gen, bytes := publish(t, d, seq, 1000)
	require.EqualValues(t, 2*(63*4096+12345), bytes)
	require.EqualValues(t, 1000, lookupAt(t, d, seq))
	require.EqualValues(t, 1000, restoreAt(t, d, seq))

	again, bytes := publish(t, d, seq, 1000)
	require.Equal(t, gen, again)
	require.Zero(t, bytes, "an exact republication writes nothing")

	report := closeDB(t, d)
	require.Zero(t, report.Persisted, "write-through leaves nothing to be written")
	d = openDB(t, dir, Options{})
	require.Zero(t, d.RecoveryReport().LogRecords)
	require.EqualValues(t, 1000, restoreAt(t, d, seq))

	require.NoError(t, seq.Append(tokens(2, 500)))
	_, bytes = publish(t, d, seq, 1500)
	// Page 62 was partial at 1000; pages 62…93 are new, and the state.
	require.EqualValues(t, 2*(32*4096+12345), bytes)
	crash(t, d)
	d = openDB(t, dir, Options{})
	require.NotZero(t, d.RecoveryReport().LogRecords)
	require.EqualValues(t, 1500, restoreAt(t, d, seq))
	checkCatalogue(t, d)

	require.NoError(t, d.Retire(context.Background(), gen))
	require.ErrorIs(t, d.Retire(context.Background(), gen), ErrNotFound)
	require.NoError(t, d.Delete(context.Background(), gen))
	require.ErrorIs(t, d.Delete(context.Background(), gen), ErrNotFound)
	require.EqualValues(t, 1500, restoreAt(t, d, seq), "what a longer checkpoint shares stays")
	var last Generation
	for c, err := range d.Checkpoints(context.Background()) {
		require.NoError(t, err)
		last = c.Generation
	}
	require.NoError(t, d.Delete(context.Background(), last))
	require.Zero(t, lookupAt(t, d, seq))
	idle(d)
	s := stats(t, d)
	require.Zero(t, s.Checkpoints)
	require.Zero(t, s.Pages)
	require.Zero(t, s.DiskBytes)
	require.Zero(t, s.RAMUsed)
	checkCatalogue(t, d)
}
