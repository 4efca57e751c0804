package db

import (
	"bytes"
	"context"
	"testing"

	"github.com/stretchr/testify/require"
)

// What compresses takes less on disk and comes back as it was, whatever the codec of the handle that reads it; the catalogue, the files
// and the budget agree on what it takes, and a check of the directory finds it whole.
func TestCompressedPagesComeBack(t *testing.T) {
	dir := tempDir(t)
	d := openDB(t, dir, Options{Codec: CodecZstd})
	ns := testNamespace(t, 2, sevenPages(64<<10)...)
	seq := seqOf(t, ns, tokens(1, 48))
	page := func(at int64, n int) []byte { return bytes.Repeat([]byte{byte(at), 1, 2, byte(at >> 8)}, n/4) }
	p := begin(t, d, seq, 48)
	var payload int64
	for rank := range 2 {
		for _, s := range slots(t, p, rank) {
			_, err := s.Write(page(s.Position()+int64(rank)<<8, int(s.Size())))
			require.NoError(t, err)
			payload += s.Size()
		}
		_, err := p.Commit(context.Background(), rank)
		require.NoError(t, err)
	}
	require.Equal(t, payload, stats(t, d).PayloadWritten, "logical bytes")
	require.Less(t, stats(t, d).SegmentWritten, payload/4)
	require.Less(t, stats(t, d).DiskBytes, payload/4)
	recount(t, d)
	closeDB(t, d)

	d = openDB(t, dir, Options{})
	r, err := d.Restore(context.Background(), seq, LookupOptions{})
	require.NoError(t, err)
	for rank := range 2 {
		for _, q := range r.Pages(rank) {
			require.True(t, bytes.Equal(page(q.Position+int64(rank)<<8, len(q.Bytes)), q.Bytes), "rank %d, page %d", rank, q.Position)
		}
	}
	r.Release()
	recount(t, d)
	closeDB(t, d)
	requireClass(t, func() error { _, err := ParseCodec("lz4"); return err }(), ErrInvalid)
	_, err = Open(context.Background(), dir, Options{Codec: 3})
	requireClass(t, err, ErrInvalid)
}
