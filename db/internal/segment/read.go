package segment

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"

	"github.com/holdfast-db/holdfast/txn"
)

const (
	runPagesMax = 64      // pages that one read call brings
	runBytesMax = 4 << 20 // and their bytes, unless one page is larger: checking one run hides behind reading others
)

// ReadRequest asks for one page.
type ReadRequest struct {
	Place txn.Placement
	Key   txn.Key // these two are for messages only
	Rank  uint16
	// Dst gets the page and is exactly as long as it (its logical bytes). Memory aligned to 4096 is read into without a copy,
	// but for the part of a block at the end, and for compressed pages. Its content is undefined after an error.
	Dst []byte
}

// Read reads one page and verifies it. The error names the file, the offset and the page; it is txn.ErrNotFound if the segment
// is gone, txn.ErrCorrupt if the bytes are not those that were written, txn.ErrIO, or txn.ErrBusy if ctx ended
// before the read began. Once begun, a read is waited for, because the device may be writing into Dst.
func (s *Store) Read(ctx context.Context, r ReadRequest) error {
	if errs := s.ReadBatch(ctx, []ReadRequest{r}); errs != nil {
		return errs[0]
	}
	return nil
}

// ReadBatch reads and verifies many pages, several at a time, those that lie side by side with one call. It returns nil if
// all succeeded, otherwise an error or nil for each request; one page that fails does not fail another.
func (s *Store) ReadBatch(ctx context.Context, requests []ReadRequest) []error {
	all := func(err error) []error {
		errs := make([]error, len(requests))
		for i := range errs {
			errs[i] = err
		}
		return errs
	}
	if err := s.enter(); err != nil {
		return all(err)
	}
	defer s.calls.Done()
	b := readBatch{s: s, requests: requests}
	for i := range requests {
		if err := requests[i].check(); err != nil {
			b.fail(i, err)
			continue
		}
		b.order = append(b.order, i)
	}
	slices.SortFunc(b.order, func(i, j int) int {
		p, q := &requests[i].Place, &requests[j].Place
		return cmp.Or(cmp.Compare(p.Segment, q.Segment), cmp.Compare(p.Offset, q.Offset))
	})
	runs := b.runs()
	if len(runs) < 2 {
		for _, run := range runs {
			b.read(ctx, run)
		}
		return b.errs
	}
	var next atomic.Int64
	var workers sync.WaitGroup
	for range min(len(runs), s.o.ReadParallel) {
		workers.Go(func() {
			for i := next.Add(1); int(i) <= len(runs); i = next.Add(1) {
				b.read(ctx, runs[i-1])
			}
		})
	}
	workers.Wait()
	return b.errs
}

func (r *ReadRequest) check() error {
	p := r.Place
	if p.Codec != txn.CodecNone && p.Codec != txn.CodecZstd {
		return fmt.Errorf("segment: read %s: codec %d: %w", r.Key.Short(), p.Codec, txn.ErrUnsupported)
	}
	if p.Segment == 0 || p.Offset < blockBytes || p.Stored < 1 || p.Stored > PageBytesMax || p.Offset%unitOf(p.Stored) != 0 {
		return fmt.Errorf("segment: read %s: no page can lie at %+v: %w", r.Key.Short(), p, txn.ErrCorrupt)
	}
	if !storable(p.Codec, int64(len(r.Dst)), p.Stored) {
		return fmt.Errorf("segment: read %s: %d stored bytes into %d: %w", r.Key.Short(), p.Stored, len(r.Dst), txn.ErrInvalid)
	}
	return nil
}

// readBatch is one ReadBatch under way.
type readBatch struct {
	s        *Store
	requests []ReadRequest
	order    []int // requests to be read, by segment and offset
	once     sync.Once
	errs     []error // made by the first failure
}

func (b *readBatch) fail(i int, err error) {
	b.once.Do(func() { b.errs = make([]error, len(b.requests)) })
	b.errs[i] = err
}

// The ways to bring pages in.
const (
	packed    = iota // small: the blocks around them are read into staging
	inPlace          // from whole blocks into aligned memory, and the end of a page through staging
	throughIt        // through staging, piece by piece, because the memory is not aligned
)

func (r *ReadRequest) way() int {
	switch {
	case r.Place.Stored < blockBytes:
		return packed
	case r.Place.Codec != txn.CodecNone || aligned(r.Dst):
		return inPlace
	}
	return throughIt
}

// target is where the stored bytes go: the caller's memory, or aligned memory to expand them from.
func (r *ReadRequest) target() []byte {
	if r.Place.Codec == txn.CodecNone {
		return r.Dst
	}
	b := make([]byte, r.Place.Stored+blockBytes)
	skip := -uintptr(unsafe.Pointer(unsafe.SliceData(b))) & uintptr(blockBytes-1)
	return b[skip:][:r.Place.Stored]
}

// runs cuts the order into pieces that one call can read.
func (b *readBatch) runs() [][]int {
	var runs [][]int
	for from := 0; from < len(b.order); {
		first := &b.requests[b.order[from]]
		way, bytes, to := first.way(), int64(0), from
		for next := first.Place.Offset; to < len(b.order); to++ {
			r := &b.requests[b.order[to]]
			p := r.Place
			bytes += p.Stored
			if to > from {
				joins := p.Segment == first.Place.Segment && r.way() == way
				switch way {
				case packed:
					joins = joins && roundUp(p.Offset+p.Stored, blockBytes)-first.Place.Offset&^(blockBytes-1) <= readStagingBytes
				case inPlace:
					joins = joins && p.Offset == next && to-from < runPagesMax && bytes <= runBytesMax
				default:
					joins = false
				}
				if !joins {
					break
				}
			}
			next = p.Offset + padded(p.Stored)
		}
		runs = append(runs, b.order[from:to])
		from = to
	}
	return runs
}

// read brings in and verifies one run, page by page if it fails as a whole.
func (b *readBatch) read(ctx context.Context, run []int) {
	staging, err := b.s.turns.take(ctx)
	if err != nil {
		for _, i := range run {
			b.fail(i, b.s.blame(&b.requests[i], err))
		}
		return
	}
	defer b.s.turns.give(staging)
	b.s.precedence.begin()
	defer b.s.precedence.end()
	targets := make([][]byte, len(run))
	for k, i := range run {
		targets[k] = b.requests[i].target()
	}
	err = b.bring(run, targets, staging)
	for k, i := range run {
		one := err
		if one != nil && len(run) > 1 {
			one = b.bring(run[k:k+1], targets[k:k+1], staging)
		}
		if one == nil {
			one = b.s.accept(&b.requests[i], targets[k])
		}
		if one != nil {
			b.fail(i, b.s.blame(&b.requests[i], one))
		}
	}
}

// bring reads the stored bytes of a run into the targets.
func (b *readBatch) bring(run []int, targets [][]byte, staging []byte) error {
	number := b.requests[run[0]].Place.Segment
	g, f, err := b.s.acquire(number)
	if err != nil {
		return err
	}
	err = b.bringFrom(f, run, targets, staging)
	direct := f.Direct()
	b.s.release(g)
	if !direct || !errors.Is(err, unix.EINVAL) {
		return err
	}
	// The file system takes direct I/O at open and refuses it at the first read.
	b.s.directRefused(number)
	b.s.shutIdle(g)
	if f, err = b.s.openFile(number); err != nil {
		return err
	}
	return errors.Join(b.bringFrom(f, run, targets, staging), f.Close())
}

func (b *readBatch) bringFrom(f File, run []int, targets [][]byte, staging []byte) error {
	first := &b.requests[run[0]]
	count := &b.s.count
	switch first.way() {
	case packed:
		last := b.requests[run[len(run)-1]].Place
		from := first.Place.Offset &^ (blockBytes - 1)
		if err := readFull(f, [][]byte{staging[:roundUp(last.Offset+last.Stored, blockBytes)-from]}, from, count); err != nil {
			return err
		}
		for k, i := range run {
			copy(targets[k], staging[b.requests[i].Place.Offset-from:])
		}
	case inPlace:
		var buffers [][]byte
		ends := staging
		for _, t := range targets {
			whole := len(t) &^ int(blockBytes-1)
			buffers = append(buffers, t[:whole])
			if whole < len(t) {
				buffers = append(buffers, ends[:blockBytes])
				ends = ends[blockBytes:]
			}
		}
		if err := readFull(f, buffers, first.Place.Offset, count); err != nil {
			return err
		}
		ends = staging
		for _, t := range targets {
			if whole := len(t) &^ int(blockBytes-1); whole < len(t) {
				copy(t[whole:], ends)
				ends = ends[blockBytes:]
			}
		}
	default:
		for off := int64(0); off < first.Place.Stored; {
			n := min(first.Place.Stored-off, int64(len(staging)))
			if err := readFull(f, [][]byte{staging[:roundUp(n, blockBytes)]}, first.Place.Offset+off, count); err != nil {
				return err
			}
			copy(targets[0][off:], staging[:n])
			off += n
		}
	}
	return nil
}

// accept compares the stored bytes with the checksum of the placement, and expands them if they are compressed.
func (s *Store) accept(r *ReadRequest, stored []byte) error {
	if sum := xxh3.Hash(stored); sum != r.Place.Checksum {
		return fmt.Errorf("checksum is %016x, not %016x: %w", sum, r.Place.Checksum, txn.ErrCorrupt)
	}
	if r.Place.Codec == txn.CodecZstd {
		if err := s.codec.expand(r.Dst, stored); err != nil {
			return err
		}
	}
	s.count.pagesRead.Add(1)
	s.count.bytesRead.Add(r.Place.Stored)
	return nil
}

// blame says which page an error is about.
func (s *Store) blame(r *ReadRequest, err error) error {
	if errors.Is(err, txn.ErrCorrupt) {
		s.count.pagesCorrupt.Add(1)
	}
	return fmt.Errorf("segment: page %s of rank %d, %d bytes at %d of %s: %w",
		r.Key.Short(), r.Rank, r.Place.Stored, r.Place.Offset, s.path(r.Place.Segment), err)
}
