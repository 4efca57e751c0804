package segment

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/zeebo/xxh3"

	"github.com/holdfast-db/holdfast/txn"
)

// Page is a page to be written.
type Page struct {
	Key    txn.Key
	Parent txn.Key // the page before it, zero if there is none; for salvage
	Rank   uint16
	// Bytes are the page, 1 to PageBytesMax. They must not change until Append returns. Memory aligned to 4096 is
	// written without a copy, but for the part of a block at the end.
	Bytes []byte
	// Codec is how the page is to be stored; zero means txn.CodecNone. A page that txn.CodecZstd does not make smaller in the
	// file is stored as it is: its placement says so.
	Codec txn.Codec
}

// request is one Append, or one Seal, in a lane's queue.
type request struct {
	entries []Entry // places are filled in by the lane
	bytes   [][]byte
	state   atomic.Int32
	err     error         // valid once done is closed
	done    chan struct{} // closed by the lane
}

// The states of a request. Only a queued one can be cancelled.
const (
	queued int32 = iota
	taken
	cancelled
)

// Append writes pages and returns their places, in order, once they are synced. Calls in the same class are written and
// synced together. On an error nothing is placed; the class is txn.ErrNoSpace for a full disk, txn.ErrIO, txn.ErrBusy if ctx
// ended before the lane took the request. Once it is taken, Append waits for the outcome whatever ctx says,
// because the device may still be reading the memory.
func (s *Store) Append(ctx context.Context, class Class, pages []Page) ([]txn.Placement, error) {
	if !class.valid() {
		return nil, fmt.Errorf("segment: append to class %d: %w", class, txn.ErrInvalid)
	}
	if len(pages) > AppendPagesMax {
		return nil, fmt.Errorf("segment: append of %d pages, at most %d: %w", len(pages), AppendPagesMax, txn.ErrTooLarge)
	}
	for i := range pages {
		if err := pages[i].check(); err != nil {
			return nil, fmt.Errorf("segment: append: page %d of %d: %w", i, len(pages), err)
		}
	}
	if err := s.enterToWrite(); err != nil {
		return nil, err
	}
	defer s.calls.Done()
	if len(pages) == 0 {
		return nil, nil
	}
	var compressed int64
	for i := range pages {
		if pages[i].Codec == txn.CodecZstd {
			compressed += int64(len(pages[i].Bytes))
		}
	}
	release, err := s.codec.reserve(ctx, compressed)
	if err != nil {
		return nil, err
	}
	defer release()
	r := &request{entries: make([]Entry, len(pages)), bytes: make([][]byte, len(pages)), done: make(chan struct{})}
	for i, p := range pages {
		stored, codec := p.Bytes, txn.CodecNone
		if p.Codec == txn.CodecZstd {
			if stored, codec, err = s.codec.compress(p.Bytes); err != nil {
				return nil, err
			}
		}
		r.bytes[i] = stored
		r.entries[i] = Entry{
			Key: p.Key, Parent: p.Parent, Rank: p.Rank, Class: class, Logical: int64(len(p.Bytes)),
			Place: txn.Placement{Stored: int64(len(stored)), Codec: codec, Checksum: xxh3.Hash(stored)},
		}
	}
	l, err := s.lane(class)
	if err != nil {
		return nil, err
	}
	if err := l.submit(ctx, r); err != nil {
		return nil, err
	}
	places := make([]txn.Placement, len(r.entries))
	for i := range r.entries {
		places[i] = r.entries[i].Place
	}
	return places, nil
}

func (p *Page) check() error {
	switch n := int64(len(p.Bytes)); {
	case n == 0:
		return fmt.Errorf("%s has no bytes: %w", p.Key.Short(), txn.ErrInvalid)
	case n > PageBytesMax:
		return fmt.Errorf("%s has %d bytes, at most %d: %w", p.Key.Short(), n, PageBytesMax, txn.ErrTooLarge)
	case p.Key.IsZero():
		return fmt.Errorf("key is zero: %w", txn.ErrInvalid)
	case p.Codec > txn.CodecZstd:
		return fmt.Errorf("%s has codec %d: %w", p.Key.Short(), p.Codec, txn.ErrUnsupported)
	}
	return nil
}

// Seal ends the open segments, so that the next Append begins new ones, after what is queued before it.
func (s *Store) Seal(ctx context.Context) error {
	if err := s.enterToWrite(); err != nil {
		return err
	}
	defer s.calls.Done()
	s.mu.Lock()
	lanes := s.lanes
	s.mu.Unlock()
	for _, l := range lanes {
		if l == nil {
			continue
		}
		if err := l.submit(ctx, &request{done: make(chan struct{})}); err != nil {
			return err
		}
	}
	return nil
}

// submit queues a request and waits for it.
func (l *lane) submit(ctx context.Context, r *request) error {
	busy := func() error {
		return fmt.Errorf("segment: append waits behind %d others of class %s: %w: %w", len(l.queue), l.class, txn.ErrBusy, context.Cause(ctx))
	}
	if ctx.Err() != nil {
		return busy()
	}
	select {
	case l.queue <- r:
	case <-ctx.Done():
		return busy()
	}
	select {
	case <-r.done:
	case <-ctx.Done():
		if r.state.CompareAndSwap(queued, cancelled) {
			return busy()
		}
		<-r.done
	}
	return r.err
}
