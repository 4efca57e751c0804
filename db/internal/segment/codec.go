package segment

import (
	"context"
	"fmt"
	"sync"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sync/semaphore"

	"github.com/holdfast-db/holdfast/txn"
)

// codecBytesMax bounds the pages that are being compressed, or are compressed and not yet written, by all Append calls
// together: so much heap can the compressed forms take. A larger page goes alone.
const codecBytesMax = 256 << 20

// codec compresses and expands pages. The coders are made at first use, since few stores have any.
type codec struct {
	room    *semaphore.Weighted
	encoder func() (*zstd.Encoder, error)
	decoder func() (*zstd.Decoder, error)
}

func newCodec(decoders int) codec {
	return codec{
		room: semaphore.NewWeighted(codecBytesMax),
		encoder: sync.OnceValues(func() (*zstd.Encoder, error) {
			return zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderCRC(false))
		}),
		decoder: sync.OnceValues(func() (*zstd.Decoder, error) {
			return zstd.NewReader(nil, zstd.WithDecoderConcurrency(decoders), zstd.WithDecoderMaxMemory(uint64(PageBytesMax)))
		}),
	}
}

// compress gives the stored form of a page and its codec: the page itself where compression saves no space in the file.
func (c *codec) compress(page []byte) ([]byte, txn.Codec, error) {
	e, err := c.encoder()
	if err != nil {
		return nil, 0, fmt.Errorf("segment: zstd: %w: %w", txn.ErrUnsupported, err)
	}
	stored := e.EncodeAll(page, make([]byte, 0, len(page)))
	if padded(int64(len(stored))) >= padded(int64(len(page))) {
		return page, txn.CodecNone, nil
	}
	return stored, txn.CodecZstd, nil
}

// expand puts the page whose stored form is given into dst. The checksum of stored has been verified.
func (c *codec) expand(dst, stored []byte) error {
	d, err := c.decoder()
	if err != nil {
		return fmt.Errorf("zstd: %w: %w", txn.ErrUnsupported, err)
	}
	page, err := d.DecodeAll(stored, dst[:0:len(dst)])
	if err != nil {
		return fmt.Errorf("zstd: %w: %w", txn.ErrCorrupt, err)
	}
	if len(page) != len(dst) {
		return fmt.Errorf("expands to %d bytes, not %d: %w", len(page), len(dst), txn.ErrCorrupt)
	}
	if &page[0] != &dst[0] { // the decoder wanted more room than the page takes
		copy(dst, page)
	}
	return nil
}

// reserve waits for heap to compress n bytes with.
func (c *codec) reserve(ctx context.Context, n int64) (release func(), err error) {
	n = min(n, codecBytesMax)
	if n == 0 {
		return func() {}, nil
	}
	if err := c.room.Acquire(ctx, n); err != nil {
		return nil, fmt.Errorf("segment: append waits to compress %d bytes: %w: %w", n, txn.ErrBusy, err)
	}
	return func() { c.room.Release(n) }, nil
}
