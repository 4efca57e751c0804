package segment

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/holdfast-db/holdfast/txn"
	"github.com/holdfast-db/holdfast/txn/mutant"
)

// Free gives back the disk blocks of pages that nothing refers to any more, by punching holes. Freeing a place again, or
// one in a segment that is gone, succeeds. Blocks that a small page shares with pages that are not freed in the same call stay
// until the segment is removed, as do all where the file system has no call for holes (Stats counts those). A page
// that was freed reads as corrupt, or not at all.
func (s *Store) Free(places []txn.Placement) error {
	if err := s.enterToWrite(); err != nil {
		return err
	}
	defer s.calls.Done()
	return s.free(places)
}

func (s *Store) free(places []txn.Placement) error {
	s.count.pagesFreed.Add(int64(len(places)))
	places = slices.Clone(places)
	slices.SortFunc(places, func(a, b txn.Placement) int {
		return cmp.Or(cmp.Compare(a.Segment, b.Segment), cmp.Compare(a.Offset, b.Offset))
	})
	var errs []error
	for len(places) > 0 {
		n := 1
		for n < len(places) && places[n].Segment == places[0].Segment {
			n++
		}
		if err := s.punchAll(places[:n]); err != nil && !errors.Is(err, txn.ErrNotFound) {
			errs = append(errs, err)
		}
		places = places[n:]
	}
	return errors.Join(errs...)
}

// punchAll punches the places, which are sorted and in one segment.
func (s *Store) punchAll(places []txn.Placement) error {
	if !s.punch.Load() {
		s.count.punchRefused.Add(1)
		return nil
	}
	g, f, err := s.acquire(places[0].Segment)
	if err != nil {
		return fmt.Errorf("segment: punch: %w", err)
	}
	defer s.release(g)
	s.mu.Lock()
	size := g.size
	s.mu.Unlock()
	for _, h := range holes(places, size) {
		err := f.Punch(h.from, h.to-h.from)
		if errors.Is(err, errors.ErrUnsupported) {
			s.punch.Store(false)
			s.count.punchRefused.Add(1)
			s.log.Info("segments keep the space of deleted pages", "reason", "the file system has no holes", "file", s.path(g.number))
			return nil
		}
		if err != nil {
			return failure("punch", err)
		}
		s.count.bytesPunched.Add(h.to - h.from)
	}
	return nil
}

// hole is a range of whole blocks.
type hole struct{ from, to int64 }

// holes are the blocks of a segment of size bytes that the sorted places cover.
func holes(places []txn.Placement, size int64) []hole {
	var hs []hole
	var from, to int64 // covered without a gap
	add := func() {
		h := hole{roundUp(from, blockBytes), to &^ (blockBytes - 1)}
		if mutant.On("holes take the neighbours with them") {
			h = hole{from &^ (blockBytes - 1), roundUp(to, blockBytes) + blockBytes}
		}
		if h.from < h.to {
			hs = append(hs, h)
		}
	}
	for _, p := range places {
		if p.Offset < blockBytes || p.Stored < 1 || p.Stored > PageBytesMax || p.Offset > size-p.Stored {
			continue // no page lies there: truncated since, or never did
		}
		if p.Offset > to {
			add()
			from = p.Offset
		}
		to = max(to, p.Offset+padded(p.Stored))
	}
	add()
	return hs
}
