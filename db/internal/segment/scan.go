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

	total := s.sizeOf(g)
	size := total &^ (blockBytes - 1)
	w := window{f: f, size: size, staging: staging, count: &s.count}
	if sum.Class, err = s.header(g, &w); err != nil && !errors.Is(err, txn.ErrCorrupt) {
		return sum, blame(err)
	}
	sum.Header = err
	o := s.origin(number, 0)

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

func (s *Store) sizeOf(g *segment) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return g.size
}

// header reads the header and remembers the class in it.
func (s *Store) header(g *segment, w *window) (Class, error) {
	head, err := w.at(0, blockBytes)
	if err != nil {
		return 0, err
	}
	if int64(len(head)) < blockBytes {
		return 0, fmt.Errorf("file has no header: %w", txn.ErrCorrupt)
	}
	class, err := decodeHeader(head, s.origin(g.number, 0))
	if err != nil {
		return 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	g.class = class
	return class, nil
}

// Class gives the lifetime class of a segment. It reads the header once if nothing has since Open; the error is about that:
// txn.ErrNotFound, txn.ErrCorrupt, txn.ErrUnsupported, txn.ErrIO, or txn.ErrBusy if ctx ended first.
func (s *Store) Class(ctx context.Context, number uint64) (Class, error) {
	if err := s.enter(); err != nil {
		return 0, err
	}
	defer s.calls.Done()
	s.mu.Lock()
	g := s.segments[number]
	if g != nil && g.class != 0 {
		defer s.mu.Unlock()
		return g.class, nil
	}
	s.mu.Unlock()
	blame := func(err error) error { return fmt.Errorf("segment: class of %s: %w", s.path(number), err) }
	g, f, err := s.acquire(number)
	if err != nil {
		return 0, blame(err)
	}
	defer s.release(g)
	staging, err := s.turns.take(ctx)
	if err != nil {
		return 0, blame(err)
	}
	defer s.turns.give(staging)
	class, err := s.header(g, &window{f: f, size: min(s.sizeOf(g)&^(blockBytes-1), blockBytes), staging: staging, count: &s.count})
	if err != nil {
		return 0, blame(err)
	}
	return class, nil
}
