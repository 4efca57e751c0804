package main

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"github.com/holdfast-db/holdfast/db"
)

const (
	persistBytes   = 64 << 20 // of one publication
	bareWriteChunk = 64 << 20 // as large as what the database writes with one call: smaller chunks are slower
	bareReadChunk  = 4 << 20
	readThreads    = 8 // as many reads at a time as the database has
)

// benchPersist measures how fast a publication becomes durable that is new from its first page to its last.
func benchPersist(ctx context.Context, b *bench) (rows []benchRow, err error) {
	for _, c := range []struct {
		pageBytes int64
		goal      float64
	}{{2 << 20, 0.95}, {64 << 10, 0.85}} {
		row, err := b.persist(ctx, c.pageBytes, c.goal)
		if err != nil {
			return rows, err
		}
		rows = append(rows, row)
	}
	return rows, nil
}

func (b *bench) persist(ctx context.Context, pageBytes int64, g float64) (row benchRow, err error) {
	dir, remove, err := b.scratch("persist")
	if err != nil {
		return row, err
	}
	defer remove()
	total := int64(persistBytes)
	shape := benchShape{ranks: 1, pageTokens: 16, pageBytes: pageBytes}
	s, err := b.openStore(ctx, filepath.Join(dir, "db"), shape, db.Options{RAMBytes: 4 * total})
	if err != nil {
		return row, err
	}
	defer s.close(&err)
	bare, err := newBareWriter(filepath.Join(dir, "bare"))
	if err != nil {
		return row, err
	}
	defer bare.close()
	memory, unmap, err := alignedBytes(int(total), pageBytes%hugePageBytes == 0)
	if err != nil {
		return row, err
	}
	defer unmap()
	for i := range memory {
		memory[i] = s.content[i%len(s.content)]
	}
	turns, err := takeTurns(ctx, either(b, 15*time.Second, 1500*time.Millisecond), func() (float64, error) {
		seq, err := s.sequence(total / pageBytes * shape.pageTokens)
		if err != nil {
			return 0, err
		}
		_, took, err := s.publish(ctx, seq, db.PublishRequest{Durable: true}, s.fillSlot)
		return float64(total) / mebibyte / took.Seconds(), err
	}, func() (float64, error) {
		took, err := bare.write(memory, bareWriteChunk)
		return float64(total) / mebibyte / took.Seconds(), err
	})
	if err != nil {
		return row, err
	}
	return ratioRow(fmt.Sprintf("persist, pages of %s", humanBytes(pageBytes)), "MiB/s", "bare direct writes and fdatasync", turns, ratioAtLeast(g)), nil
}

// benchRestore measures restores from disk, with nothing of them in RAM.
func benchRestore(ctx context.Context, b *bench) (rows []benchRow, err error) {
	for _, c := range []struct {
		pageBytes int64
		goal      float64
	}{{2 << 20, 0.95}, {64 << 10, 0.85}} {
		row, err := b.restoreCold(ctx, c.pageBytes, c.goal)
		if err != nil {
			return rows, err
		}
		rows = append(rows, row)
	}
	return rows, nil
}

func (b *bench) restoreCold(ctx context.Context, pageBytes int64, g float64) (row benchRow, err error) {
	dir, remove, err := b.scratch("restore")
	if err != nil {
		return row, err
	}
	defer remove()
	total := int64(either(b, 2*persistBytes, persistBytes))
	shape := benchShape{ranks: 1, pageTokens: 16, pageBytes: pageBytes}
	s, err := b.openStore(ctx, filepath.Join(dir, "db"), shape, db.Options{RAMBytes: 2 * total})
	if err != nil {
		return row, err
	}
	defer s.close(&err)
	seq, err := s.sequence(total / pageBytes * shape.pageTokens)
	if err != nil {
		return row, err
	}
	if _, _, err := s.publish(ctx, seq, db.PublishRequest{Durable: true}, s.fillSlot); err != nil {
		return row, err
	}
	segments, err := filepath.Glob(filepath.Join(dir, "db", "data", "*"))
	if err != nil || len(segments) == 0 {
		return row, fmt.Errorf("no segment files in %s: %w", dir, err)
	}
	memory, unmap, err := alignedBytes(readThreads*bareReadChunk, pageBytes%hugePageBytes == 0)
	if err != nil {
		return row, err
	}
	defer unmap()
	turns, err := takeTurns(ctx, either(b, 10*time.Second, 1500*time.Millisecond), func() (float64, error) {
		if _, err := s.DropRAM(ctx); err != nil {
			return 0, err
		}
		start := time.Now()
		r, err := s.restoreAll(ctx, seq)
		if err != nil {
			return 0, err
		}
		took := time.Since(start)
		r.Release()
		return float64(total) / mebibyte / took.Seconds(), nil
	}, func() (float64, error) {
		n, took, err := bareRead(segments, memory, bareReadChunk, readThreads)
		return float64(n) / mebibyte / took.Seconds(), err
	})
	if err != nil {
		return row, err
	}
	return ratioRow(fmt.Sprintf("restore from disk, verified, pages of %s", humanBytes(pageBytes)), "MiB/s", "bare direct reads of the same files", turns, ratioAtLeast(g)), nil
}
