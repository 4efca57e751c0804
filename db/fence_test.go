package db

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
)

// Whoever has lost the directory, because its lock was replaced, acknowledges nothing any more, and what it acknowledged before is there.
func TestLostDirectoryAcknowledgesNothing(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	ns := testNamespace(t, 1, tiny()...)
	before, after := seqOf(t, ns, tokens(1, 16)), seqOf(t, ns, tokens(2, 16))
	publish(t, d, before, 16)
	require.NoError(t, replaceFile(osDirectory{}, d.dir.join(lockName), []byte("somebody else")))
	p := begin(t, d, after, 16)
	fill(t, p, 0)
	_, err := p.Commit(context.Background(), 0)
	requireClass(t, err, ErrFenced)
	_, _ = d.Close(context.Background())
	d = openDB(t, d.dir.path, Options{})
	require.Zero(t, lookupAt(t, d, after))
	require.EqualValues(t, 16, restoreAt(t, d, before))
}
