package db

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// Whoever has lost the directory, because its lock was replaced, or its marker was replaced, overwritten or removed, acknowledges
// nothing any more, and what it acknowledged before is there.
func TestLostDirectoryAcknowledgesNothing(t *testing.T) {
	for what, lose := range map[string]func(t *testing.T, d *DB){
		"lock replaced": func(t *testing.T, d *DB) {
			require.NoError(t, replaceFile(filepath.Join(d.dir.path, lockName), []byte("somebody else")))
		},
		"next epoch": func(t *testing.T, d *DB) {
			next := d.dir.marker
			next.epoch++
			require.NoError(t, replaceFile(filepath.Join(d.dir.path, markerName), next.marshal()))
		},
		"marker overwritten": func(t *testing.T, d *DB) {
			next := d.dir.marker
			next.epoch++
			require.NoError(t, os.WriteFile(filepath.Join(d.dir.path, markerName), next.marshal(), 0o600))
		},
		"marker removed": func(t *testing.T, d *DB) {
			require.NoError(t, os.Rename(filepath.Join(d.dir.path, markerName), filepath.Join(t.TempDir(), markerName)))
		},
	} {
		t.Run(what, func(t *testing.T) {
			d := openDB(t, tempDir(t), Options{})
			ns := testNamespace(t, 1, tiny()...)
			before, after := seqOf(t, ns, tokens(1, 16)), seqOf(t, ns, tokens(2, 16))
			publish(t, d, before, 16)
			marker := d.dir.marker
			lose(t, d)
			p := begin(t, d, after, 16)
			fill(t, p, 0)
			_, err := p.Commit(context.Background(), 0)
			requireClass(t, err, ErrFenced)
			_, _ = d.Close(context.Background())
			require.NoError(t, replaceFile(filepath.Join(d.dir.path, markerName), marker.marshal()))
			d = openDB(t, d.dir.path, Options{})
			require.Zero(t, lookupAt(t, d, after))
			require.EqualValues(t, 16, restoreAt(t, d, before))
		})
	}
}
