package main

import (
	"context"
	"math"
	"path/filepath"
	"runtime"
	"runtime/metrics"
	"time"

	"github.com/holdfast-db/holdfast/db"
)

// memoryReplayBytes keeps the log short: what it keeps of its newest file in memory, at most as much as an open replays, is neither
// pages nor checkpoints.
const memoryReplayBytes = 64 << 10

// heapBytes gives what is alive on the Go heap.
func heapBytes() float64 {
	runtime.GC()
	runtime.GC() // what the first one's finalizers let go of
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc)
}

// benchMemory measures the Go heap: how much more of it there is after so many more pages or checkpoints. The constant
// part, which is caches and buffers, is in neither end of a difference.
func benchMemory(ctx context.Context, b *bench) (rows []benchRow, err error) {
	for _, measure := range []func(context.Context) (benchRow, error){b.heapPerRAMPage, b.heapPerDiskPage, b.heapPerCheckpoint, b.pauses} {
		row, err := measure(ctx)
		if err != nil {
			return rows, err
		}
		rows = append(rows, row)
	}
	return rows, nil
}

// grow publishes checkpoints of so many new pages each, in steps of the same number, and gives the growth of the heap per step.
func (s *benchStore) grow(ctx context.Context, checkpoints int, pages int64, r db.PublishRequest) (bytes float64, err error) {
	var before float64
	for step := range 3 { // the first step fills what is constant
		if step == 1 {
			before = heapBytes()
		}
		for range checkpoints {
			seq, err := s.sequence(pages * s.shape.pageTokens)
			if err != nil {
				return 0, err
			}
			if _, _, err := s.publish(ctx, seq, r, s.touchSlot); err != nil {
				return 0, err
			}
		}
	}
	bytes = (heapBytes() - before) / 2
	runtime.KeepAlive(s)
	return bytes, nil
}

func (b *bench) memoryStore(ctx context.Context, o db.Options) (s *benchStore, closer func(*error), err error) {
	dir, remove, err := b.scratch("memory")
	if err != nil {
		return nil, nil, err
	}
	s, err = b.openStore(ctx, filepath.Join(dir, "db"), benchShape{ranks: 2, pageTokens: 16, pageBytes: 4 << 10}, o)
	if err != nil {
		remove()
		return nil, nil, err
	}
	return s, func(err *error) {
		s.close(err)
		remove()
	}, nil
}

func (b *bench) heapPerRAMPage(ctx context.Context) (row benchRow, err error) {
	const pages = 256
	n := either(b, 200, 50)
	s, closer, err := b.memoryStore(ctx, db.Options{RAMBytes: int64(4*n) * pages * 2 * (4 << 10), WritePolicy: db.Never, ReplayBytes: memoryReplayBytes})
	if err != nil {
		return row, err
	}
	defer closer(&err)
	grown, err := s.grow(ctx, n, pages, db.PublishRequest{})
	return valueRow("Go heap per page in RAM, 2 ranks", "B", grown/float64(n*pages), n*pages, valueAtMost(256)), err
}

// heapPerDiskPage opens the same directory with so many pages on disk, and with so many more.
func (b *bench) heapPerDiskPage(ctx context.Context) (row benchRow, err error) {
	const pages = 256
	n := either(b, 200, 50)
	s, closer, err := b.memoryStore(ctx, db.Options{RAMBytes: 16 << 20})
	if err != nil {
		return row, err
	}
	defer closer(&err)
	var heap [3]float64
	for i := range heap {
		for range n {
			seq, err := s.sequence(pages * s.shape.pageTokens)
			if err != nil {
				return row, err
			}
			if _, _, err := s.publish(ctx, seq, db.PublishRequest{}, s.touchSlot); err != nil {
				return row, err
			}
		}
		if s.close(&err); err != nil {
			return row, err
		}
		if s.DB, err = db.Open(ctx, s.dir, s.options); err != nil {
			return row, err
		}
		heap[i] = heapBytes()
	}
	grown := (heap[2] - heap[0]) / 2
	return valueRow("Go heap per page on disk only, 2 ranks", "B", max(grown, 0)/float64(n*pages), n*pages, valueAtMost(16)), nil
}

func (b *bench) heapPerCheckpoint(ctx context.Context) (row benchRow, err error) {
	n := either(b, 10_000, 2000)
	s, closer, err := b.memoryStore(ctx, db.Options{RAMBytes: int64(4*n) * 2 * (4 << 10), WritePolicy: db.Never, ReplayBytes: memoryReplayBytes})
	if err != nil {
		return row, err
	}
	defer closer(&err)
	grown, err := s.grow(ctx, n, 1, db.PublishRequest{})
	return valueRow("Go heap per checkpoint in RAM, with its one page", "B", grown/float64(n), n, valueAtMost(1024)), err
}

// pauses publishes, looks up and restores, and reads how long the collector stopped everything.
func (b *bench) pauses(ctx context.Context) (row benchRow, err error) {
	const pages = 64
	s, closer, err := b.memoryStore(ctx, db.Options{RAMBytes: 512 << 20, WritePolicy: db.OnEvict})
	if err != nil {
		return row, err
	}
	defer closer(&err)
	read := func() *metrics.Float64Histogram {
		sample := []metrics.Sample{{Name: "/sched/pauses/total/gc:seconds"}}
		metrics.Read(sample)
		return sample[0].Value.Float64Histogram()
	}
	before := read()
	end := time.Now().Add(either(b, 8*time.Second, time.Second))
	for n := 0; n == 0 || time.Now().Before(end); n++ {
		seq, err := s.sequence(pages * s.shape.pageTokens)
		if err != nil {
			return row, err
		}
		if _, _, err := s.publish(ctx, seq, db.PublishRequest{}, s.touchSlot); err != nil {
			return row, err
		}
		r, err := s.restoreAll(ctx, seq)
		if err != nil {
			return row, err
		}
		r.Release()
	}
	runtime.GC()
	after := read()
	p99, n := histogramQuantile(before, after, 0.99)
	return valueRow("pauses of the garbage collector, p99", "ms", 1e3*p99, n, valueAtMost(1)).noted("%d pauses while publishing and restoring", n), nil
}

// histogramQuantile gives the q-quantile of what came into a histogram between two readings: the upper bound of its bucket.
func histogramQuantile(before, after *metrics.Float64Histogram, q float64) (float64, int) {
	var total uint64
	for i := range after.Counts {
		total += after.Counts[i] - before.Counts[i]
	}
	want, sum := uint64(math.Ceil(q*float64(total))), uint64(0)
	for i := range after.Counts {
		if sum += after.Counts[i] - before.Counts[i]; sum >= want && total > 0 {
			return after.Buckets[i+1], int(total)
		}
	}
	return math.NaN(), 0
}
