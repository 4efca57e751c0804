package segment

import (
	"fmt"
	"io"
	"slices"
	"unsafe"

	"github.com/holdfast-db/holdfast/txn"
)

// buffersMax is the most buffers that one call takes on Linux (IOV_MAX).
const buffersMax = 1024

// vector collects the pieces of a batch, which follow each other in the file, and writes many of them with one call. What
// is whole blocks of aligned memory is written from where it is; the rest goes through staging. Every piece is a
// multiple of 4096 bytes, so that a flush may come between any two.
type vector struct {
	f       File
	off     int64 // where the first piece goes
	pieces  [][]byte
	bytes   int64 // of the pieces together
	staging []byte
	staged  int64 // bytes of staging that pieces use
	count   *counters
	reads   *precedence // whom writes make way for; nil: nobody
}

// stage gives n bytes of undefined content, a multiple of 4096 and at most the staging memory, to be filled before the
// next call; they are written next.
func (w *vector) stage(n int64) ([]byte, error) {
	if w.staged+n > int64(len(w.staging)) || len(w.pieces) == buffersMax {
		if err := w.flush(); err != nil {
			return nil, err
		}
	}
	b := w.staging[w.staged : w.staged+n : w.staged+n]
	w.staged += n
	w.pieces = append(w.pieces, b)
	w.bytes += n
	return b, nil
}

// add takes b, which is whole blocks and must not change before the flush, to be written next.
func (w *vector) add(b []byte) error {
	if len(w.pieces) == buffersMax {
		if err := w.flush(); err != nil {
			return err
		}
	}
	w.pieces = append(w.pieces, b)
	w.bytes += int64(len(b))
	return nil
}

// page takes a page of at least a block, and zeros up to the end of its last block.
func (w *vector) page(b []byte) error {
	whole := int64(len(b)) &^ (blockBytes - 1)
	if !w.f.Direct() || aligned(b) {
		if err := w.add(b[:whole]); err != nil {
			return err
		}
		b = b[whole:]
	}
	for len(b) > 0 {
		n := min(int64(len(b)), int64(len(w.staging)))
		t, err := w.stage(roundUp(n, blockBytes))
		if err != nil {
			return err
		}
		copy(t, b[:n])
		clear(t[n:])
		w.count.copied.Add(n)
		b = b[n:]
	}
	return nil
}

// flush writes the pieces.
func (w *vector) flush() error {
	calls := &w.count.bufferedWrites
	if w.f.Direct() {
		calls = &w.count.directWrites
	}
	pieces := w.pieces
	for left := w.bytes; left > 0; {
		some := pieces
		if w.reads != nil {
			some = front(pieces, w.reads.giveWay())
		}
		n, err := w.f.WriteAt(some, w.off)
		calls.Add(1)
		if err == nil && (n <= 0 || int64(n) > left) {
			err = io.ErrShortWrite
		}
		if err != nil {
			return failure(fmt.Sprintf("write %d bytes at %d", left, w.off), err)
		}
		w.off += int64(n)
		left -= int64(n)
		pieces = skip(pieces, n)
	}
	w.pieces, w.bytes, w.staged = w.pieces[:0], 0, 0
	return nil
}

// front gives the first n bytes of the buffers, n a positive multiple of 4096, and all of them if there are fewer.
func front(buffers [][]byte, n int64) [][]byte {
	for i, b := range buffers {
		if int64(len(b)) <= n {
			n -= int64(len(b))
			continue
		}
		some := slices.Clone(buffers[:i])
		if n > 0 {
			some = append(some, b[:n])
		}
		return some
	}
	return buffers
}

// skip drops the first n bytes of the buffers, in place.
func skip(buffers [][]byte, n int) [][]byte {
	for n > 0 && n >= len(buffers[0]) {
		n -= len(buffers[0])
		buffers = buffers[1:]
	}
	if n > 0 {
		buffers[0] = buffers[0][n:]
	}
	return buffers
}

func aligned(b []byte) bool {
	return uintptr(unsafe.Pointer(unsafe.SliceData(b)))&uintptr(blockBytes-1) == 0
}

// readFull fills the buffers from offset off, or says why it cannot: a file that ends before is corrupt.
func readFull(f File, buffers [][]byte, off int64, count *counters) error {
	calls := &count.bufferedReads
	if f.Direct() {
		calls = &count.directReads
	}
	var left int
	for _, b := range buffers {
		left += len(b)
	}
	for left > 0 {
		n, err := f.ReadAt(buffers, off)
		calls.Add(1)
		switch {
		case err != nil:
			return fmt.Errorf("read %d bytes at %d: %w: %w", left, off, classOf(err), err)
		case n <= 0 || n > left:
			return fmt.Errorf("read %d bytes at %d: the file ends: %w", left, off, txn.ErrCorrupt)
		}
		off += int64(n)
		left -= n
		buffers = skip(buffers, n)
	}
	return nil
}
