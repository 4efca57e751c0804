package segment

import (
	"bytes"
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

// softPage is a page that compresses to about a quarter.
func softPage(number uint64, n int) Page {
	p := pageOf(number, n, true)
	for i := range p.Bytes {
		if i%4 != 0 {
			p.Bytes[i] = byte(number)
		}
	}
	p.Codec = txn.CodecZstd
	return p
}

func TestCompressedPagesComeBack(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	var pages []Page
	for i, n := range []int{1, 200, 4096, 5000, 12_000, 64 << 10, 300_001, 2 << 20} {
		hard := pageOf(uint64(100+i), n, i%2 == 0)
		hard.Codec = txn.CodecZstd
		pages = append(pages, softPage(uint64(i+1), n), hard)
	}
	places := write(t, s, Own, pages...)
	for i, p := range places {
		n := int64(len(pages[i].Bytes))
		if i%2 == 0 && n > 200 {
			require.Equal(t, txn.CodecZstd, p.Codec, "%d bytes", n)
			require.Less(t, p.Stored, n/2)
		}
		if i%2 == 1 {
			require.Equal(t, txn.CodecNone, p.Codec, "%d bytes that compression does not shrink", n)
			require.Equal(t, n, p.Stored)
		}
	}
	require.NoError(t, s.Close())
	s = open(t, dir)
	batch := make([]ReadRequest, len(pages))
	for i, p := range pages {
		batch[i] = reading(p, places[i], i%3 == 0)
		r := reading(p, places[i], true)
		require.NoError(t, s.Read(t.Context(), r))
		require.Equal(t, p.Bytes, r.Dst)
	}
	require.Nil(t, s.ReadBatch(t.Context(), batch))
	for i, p := range pages {
		require.True(t, bytes.Equal(p.Bytes, batch[i].Dst))
	}
	_, err := s.Scan(t.Context(), 1, func(e Entry) error {
		for i, p := range pages {
			if p.Key == e.Key {
				require.EqualValues(t, len(p.Bytes), e.Logical)
				require.Equal(t, places[i], e.Place)
			}
		}
		return nil
	})
	require.NoError(t, err)

	r := reading(pages[10], places[10], true)
	r.Dst = r.Dst[:len(r.Dst)-1]
	require.ErrorIs(t, s.Read(t.Context(), r), txn.ErrCorrupt, "the frame holds another length")
	r = reading(pages[10], places[10], true)
	r.Dst = r.Dst[:places[10].Stored]
	require.ErrorIs(t, s.Read(t.Context(), r), txn.ErrInvalid)
}

func TestCompressionIsBounded(t *testing.T) {
	s := open(t, t.TempDir())
	release, err := s.codec.reserve(t.Context(), PageBytesMax)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = s.Append(ctx, Own, []Page{softPage(1, 5000)})
	require.ErrorIs(t, err, txn.ErrBusy)
	plain := pageOf(2, 5000, true)
	verifyPages(t, s, []Page{plain}, write(t, s, Own, plain))
	release()
	write(t, s, Own, softPage(1, 5000))
}
