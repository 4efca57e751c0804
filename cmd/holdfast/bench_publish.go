package main

import (
	"context"
	"fmt"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/holdfast-db/holdfast/db"
)

// A publication of the benchmarks has 61 pages on each of two ranks, of which two are new: the last one of 60 attention
// pages, and the recurrent state. All of them branch off one prefix of 59 pages.
const (
	benchRanks    = 2
	benchTokens   = 64 // of an attention page
	benchPrefix   = 59 // pages
	benchNewPages = 2
)

// publishers publishes n checkpoints by so many callers, each two pages on a prefix, and gives how many a second.
func (s *benchStore) publishers(ctx context.Context, prefix *db.Sequence, callers, n int, r db.PublishRequest, fill func(*db.Slot) error) (float64, error) {
	sequences := make([]*db.Sequence, n)
	for i := range sequences {
		var err error
		if sequences[i], err = s.branch(prefix, s.shape.pageTokens); err != nil {
			return 0, err
		}
	}
	var next atomic.Int64
	var group sync.WaitGroup
	errs := make(chan error, callers)
	start := time.Now()
	for range callers {
		group.Go(func() {
			for i := next.Add(1); int(i) <= n; i = next.Add(1) {
				if _, _, err := s.publish(ctx, sequences[i-1], r, fill); err != nil {
					errs <- err
					return
				}
			}
		})
	}
	group.Wait()
	took := time.Since(start)
	close(errs)
	return float64(n) / took.Seconds(), <-errs
}

// prefix publishes what all branches go on from.
func (s *benchStore) prefix(ctx context.Context, pages int64) (*db.Sequence, error) {
	seq, err := s.sequence(pages * s.shape.pageTokens)
	if err != nil {
		return nil, err
	}
	_, _, err = s.publish(ctx, seq, db.PublishRequest{Kind: db.Instruction}, s.fillSlot)
	return seq, err
}

// benchPublish measures publications that are durable, that are written later, and that go on from long checkpoints.
func benchPublish(ctx context.Context, b *bench) (rows []benchRow, err error) {
	durable, err := b.publishDurable(ctx)
	rows = append(rows, durable...)
	if err != nil {
		return rows, err
	}
	for _, measure := range []func(context.Context) (benchRow, error){b.publishDeferred, b.publishLong} {
		row, err := measure(ctx)
		if err != nil {
			return rows, err
		}
		rows = append(rows, row)
	}
	return rows, nil
}

func (b *bench) publishDurable(ctx context.Context) (rows []benchRow, err error) {
	dir, remove, err := b.scratch("publish")
	if err != nil {
		return nil, err
	}
	defer remove()
	shape := benchShape{ranks: benchRanks, pageTokens: benchTokens, pageBytes: 4 << 10, stateBytes: 4 << 10}
	s, err := b.openStore(ctx, filepath.Join(dir, "db"), shape, db.Options{RAMBytes: 256 << 20})
	if err != nil {
		return nil, err
	}
	defer s.close(&err)
	prefix, err := s.prefix(ctx, benchPrefix)
	if err != nil {
		return nil, err
	}
	bare, err := newBareLoop(dir)
	if err != nil {
		return nil, err
	}
	defer bare.close()
	newBytes := benchRanks * (shape.pageBytes + shape.stateBytes)
	bare.reserve(newBytes)
	reference := func() (float64, error) {
		n := either(b, 64, 16)
		return perSecond(int64(n), func() error {
			for range n {
				if err := bare.commit(newBytes); err != nil {
					return err
				}
			}
			return nil
		})
	}
	for _, c := range []struct {
		callers, each int
		goal          float64
	}{{1, 64, 0.9}, {64, 32, 20}, {256, 32, 60}} {
		n := c.callers * either(b, c.each, max(c.each/c.callers, 1))
		turns, err := takeTurns(ctx, either(b, 8*time.Second, 400*time.Millisecond), func() (float64, error) {
			return s.publishers(ctx, prefix, c.callers, n, db.PublishRequest{Durable: true}, s.fillSlot)
		}, reference)
		if err != nil {
			return rows, err
		}
		rows = append(rows, ratioRow(fmt.Sprintf("durable publish, %d callers", c.callers), "/s", "append, fsync, append record, fsync by one caller", turns, ratioAtLeast(c.goal)))
	}
	return rows, nil
}

func (b *bench) publishDeferred(ctx context.Context) (row benchRow, err error) {
	dir, remove, err := b.scratch("deferred")
	if err != nil {
		return row, err
	}
	defer remove()
	const pageBytes, each = 64 << 10, 1000
	newBytes := int64(benchRanks * benchNewPages * pageBytes)
	shape := benchShape{ranks: benchRanks, pageTokens: benchTokens, pageBytes: pageBytes, stateBytes: pageBytes}
	s, err := b.openStore(ctx, filepath.Join(dir, "db"), shape, db.Options{RAMBytes: 2 * each * newBytes, WritePolicy: db.Never})
	if err != nil {
		return row, err
	}
	defer s.close(&err)
	memory, unmap, err := alignedBytes(int(newBytes)*each, false)
	if err != nil {
		return row, err
	}
	defer unmap()
	turns, err := takeTurns(ctx, either(b, 5*time.Second, 500*time.Millisecond), func() (float64, error) {
		if err := s.clear(ctx); err != nil {
			return 0, err
		}
		prefix, err := s.prefix(ctx, benchPrefix)
		if err != nil {
			return 0, err
		}
		rate, err := s.publishers(ctx, prefix, 1, each, db.PublishRequest{}, s.fillSlot)
		return 1e6 / rate, err
	}, func() (float64, error) {
		start := time.Now()
		var sum uint64
		for i := range each * benchRanks * benchNewPages {
			page := memory[i*pageBytes:][:pageBytes]
			copy(page, s.content)
			sum += xxh3.Hash(page)
		}
		runtime.KeepAlive(sum)
		return float64(time.Since(start).Microseconds()) / each, nil
	})
	if err != nil {
		return row, err
	}
	for i := range turns { // as speeds, so that 1 is as fast
		turns[i] = turn{1e6 / turns[i].value, 1e6 / turns[i].reference}
	}
	return ratioRow("publish with deferred writes, 1 caller, 64 KiB pages", "/s", "copy and checksum of the new pages", turns, ratioAtLeast(0.5)), nil
}

func (b *bench) publishLong(ctx context.Context) (row benchRow, err error) {
	dir, remove, err := b.scratch("long")
	if err != nil {
		return row, err
	}
	defer remove()
	const short, long = 16, 4096
	each := either(b, 400, 100)
	shape := benchShape{ranks: benchRanks, pageTokens: benchTokens, pageBytes: 1 << 10, stateBytes: 1 << 10}
	s, err := b.openStore(ctx, filepath.Join(dir, "db"), shape, db.Options{RAMBytes: 256 << 20, WritePolicy: db.Never})
	if err != nil {
		return row, err
	}
	defer s.close(&err)
	side := func(pages int64) func() (float64, error) {
		return func() (float64, error) {
			if err := s.clear(ctx); err != nil {
				return 0, err
			}
			prefix, err := s.prefix(ctx, pages)
			if err != nil {
				return 0, err
			}
			rate, err := s.publishers(ctx, prefix, 1, each, db.PublishRequest{}, s.fillSlot)
			return 1e6 / rate, err
		}
	}
	turns, err := takeTurns(ctx, either(b, 5*time.Second, time.Second), side(long), side(short))
	if err != nil {
		return row, err
	}
	return ratioRow("publish of one more page pair onto 4,096 pages", "µs", "onto 16 pages", turns, ratioAtMost(1.5)), nil
}
