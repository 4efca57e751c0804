package segment

import (
	"context"
	"errors"
	"fmt"

	"github.com/holdfast-db/holdfast/txn"
)

// Scanned sums up a Scan.
type Scanned struct {
	Class     Class // of the header; 0 if the header is damaged
	Header    error // what is wrong with the header, nil if nothing; the batches stand for themselves
	Batches   int
	Entries   int   // given to the callback
	Missing   int   // entries not given, because the file ends before their page does
	Skipped   int64 // bytes between the first and the last batch, or before it, that belong to no intact batch
	SkippedAt int64 // where the first of them are; 0 if there are none
	Torn      int64 // bytes after the last intact batch: what a crash, or damage, has left
}

// Scan walks the batches of a segment for salvage, and calls fn with each page in it, in the order of the file. The
// descriptors are verified, the pages are not: Read does that. Pages that were freed or never acknowledged
// are among them. After a damaged descriptor the walk goes on at the next block that holds an intact one of this database,
// segment and offset. It stops with the error of fn, if there is one; txn.ErrIO and the like are of the file,
// txn.ErrUnsupported of a newer format. Damage is no error, but is reported. Memory is bounded whatever the content.
func (s *Store) Scan(ctx context.Context, number uint64, fn func(Entry) error) (Scanned, error) {
	var sum Scanned
	if err := s.enter(); err != nil {
		return sum, err
	}
	defer s.calls.Done()
	blame := func(err error) error { return fmt.Errorf("segment: scan %s: %w", s.path(number), err) }
	g, f, err := s.acquire(number)
	if err != nil {
		return sum, blame(err)
	}
	defer s.release(g)
	staging, err := s.turns.take(ctx)
	if err != nil {
		return sum, blame(err)
	}
	defer s.turns.give(staging)

	s.mu.Lock()
	total := g.size
	s.mu.Unlock()
	size := total &^ (blockBytes - 1)
	w := window{f: f, size: size, staging: staging, count: &s.count}

	o := s.origin(number, 0)
	head, err := w.at(0, blockBytes)
	if err != nil {
		return sum, blame(err)
	}
	if int64(len(head)) < blockBytes {
		sum.Header = fmt.Errorf("file of %d bytes has no header: %w", total, txn.ErrCorrupt)
		return sum, nil
	}
	if sum.Class, sum.Header = decodeHeader(head, o); errors.Is(sum.Header, txn.ErrUnsupported) {
		return sum, blame(sum.Header)
	}
	s.mu.Lock()
	if g.class == 0 {
		g.class = sum.Class
	}
	s.mu.Unlock()

	var skipped, skippedAt int64 // since the last intact batch
	for off := blockBytes; off < size; {
		if err := ctx.Err(); err != nil {
			return sum, blame(fmt.Errorf("%w: %w", txn.ErrBusy, err))
		}
		b, err := w.at(off, descriptorBytesMax)
		if err != nil {
			return sum, blame(err)
		}
		d, err := decodeDescriptor(b, o, off)
		if err != nil {
			if skipped == 0 {
				skippedAt = off
			}
			skipped += blockBytes
			off += blockBytes
			continue
		}
		if skipped > 0 {
			if sum.Skipped == 0 {
				sum.SkippedAt = skippedAt
			}
			sum.Skipped += skipped
			skipped = 0
		}
		sum.Batches++
		for _, e := range d.entries {
			if e.Place.Offset+e.Place.Stored > size {
				sum.Missing++
				continue
			}
			sum.Entries++
			if err := fn(e); err != nil {
				return sum, err
			}
		}
		off = d.end
	}
	sum.Torn = skipped + total - size
	return sum, nil
}

// window reads forward through a file, some staging memory at a time.
type window struct {
	f       File
	size    int64
	staging []byte
	from    int64
	have    []byte // bytes of the file from there
	count   *counters
}

// at gives up to n bytes of the file from off, a multiple of 4096: fewer at its end.
func (w *window) at(off, n int64) ([]byte, error) {
	n = min(n, w.size-off)
	if off < w.from || off+n > w.from+int64(len(w.have)) {
		b := w.staging[:min(int64(len(w.staging)), w.size-off)]
		w.have = nil
		if err := readFull(w.f, [][]byte{b}, off, w.count); err != nil {
			return nil, err
		}
		w.from, w.have = off, b
	}
	return w.have[off-w.from:][:n], nil
}
