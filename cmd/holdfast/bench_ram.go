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

// copyPages copies pieces in turns with so many threads; check also takes the XXH3 of each. What it gives is made of the digests,
// so that they have to be computed.
func copyPages(to [][]byte, from func(i int) []byte, threads int, check bool) (digests uint64) {
	var next atomic.Int64
	var all atomic.Uint64
	var group sync.WaitGroup
	for range threads {
		group.Go(func() {
			for i := next.Add(1); int(i) <= len(to); i = next.Add(1) {
				b := from(int(i) - 1)
				copy(to[i-1], b)
				if check {
					all.Add(xxh3.Hash(b))
				}
			}
		})
	}
	group.Wait()
	return all.Load()
}

// benchRAM measures restores of what is in RAM, into the memory of the caller.
func benchRAM(ctx context.Context, b *bench) (rows []benchRow, err error) {
	for _, pageBytes := range []int64{2 << 20, 64 << 10} {
		for _, check := range []bool{false, true} {
			row, err := b.restoreWarm(ctx, pageBytes, check)
			if err != nil {
				return rows, err
			}
			rows = append(rows, row)
		}
	}
	return rows, nil
}

func (b *bench) restoreWarm(ctx context.Context, pageBytes int64, check bool) (row benchRow, err error) {
	dir, remove, err := b.scratch("ram")
	if err != nil {
		return row, err
	}
	defer remove()
	const total = 64 << 20
	shape := benchShape{ranks: 2, pageTokens: 16, pageBytes: pageBytes}
	s, err := b.openStore(ctx, filepath.Join(dir, "db"), shape, db.Options{RAMBytes: 2 * total, WritePolicy: db.Never})
	if err != nil {
		return row, err
	}
	defer s.close(&err)
	pages := total / pageBytes / int64(shape.ranks)
	seq, err := s.sequence(pages * shape.pageTokens)
	if err != nil {
		return row, err
	}
	if _, _, err := s.publish(ctx, seq, db.PublishRequest{}, s.fillSlot); err != nil {
		return row, err
	}
	// Both sides copy into the same memory, and from memory of the same kind.
	to, unmapTo, err := alignedBytes(total, pageBytes%hugePageBytes == 0)
	if err != nil {
		return row, err
	}
	defer unmapTo()
	from, unmapFrom, err := alignedBytes(total, pageBytes%hugePageBytes == 0)
	if err != nil {
		return row, err
	}
	defer unmapFrom()
	pieces := make([][]byte, total/pageBytes)
	for i := range pieces {
		pieces[i] = to[int64(i)*pageBytes:][:pageBytes]
	}
	threads := runtime.GOMAXPROCS(0)
	turns, err := takeTurns(ctx, either(b, 4*time.Second, 400*time.Millisecond), func() (float64, error) {
		return perSecond(total/mebibyte, func() error {
			r, err := s.restoreAll(ctx, seq)
			if err != nil {
				return err
			}
			defer r.Release()
			var restored []db.Page
			for rank := range shape.ranks {
				restored = append(restored, r.Pages(rank)...)
			}
			copyPages(pieces, func(i int) []byte { return restored[i].Bytes }, threads, check)
			return nil
		})
	}, func() (float64, error) {
		return perSecond(total/mebibyte, func() error {
			copyPages(pieces, func(i int) []byte { return from[int64(i)*pageBytes:][:pageBytes] }, threads, false)
			return nil
		})
	})
	if err != nil {
		return row, err
	}
	name, g := "restore from RAM into the caller's memory", ratioAtLeast(0.9)
	if check {
		name, g = "… each page hashed with XXH3 as well", goal{}
	}
	return ratioRow(fmt.Sprintf("%s, pages of %s", name, humanBytes(pageBytes)), "MiB/s", fmt.Sprintf("memcpy with %d threads", threads), turns, g), nil
}
