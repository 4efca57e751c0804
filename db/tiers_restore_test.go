package db

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// damage flips a bit in every block of every segment but the headers.
func damage(t testing.TB, d *DB) {
	t.Helper()
	infos, err := d.segments.Segments()
	require.NoError(t, err)
	for _, info := range infos {
		damageFrom(t, segmentOf(d, info.Number), 4096)
	}
}

func damageFrom(t testing.TB, path string, from int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	info, err := f.Stat()
	require.NoError(t, err)
	for at := from; at < info.Size(); at += 4096 {
		var b [1]byte
		_, err := f.ReadAt(b[:], at)
		require.NoError(t, err)
		b[0] ^= 1
		_, err = f.WriteAt(b[:], at)
		require.NoError(t, err)
	}
}

// segmentOf is the path of a segment.
func segmentOf(d *DB, number uint64) string {
	return filepath.Join(d.dir.join(dataName), fmt.Sprintf("%020d.seg", number))
}
