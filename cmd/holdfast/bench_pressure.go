package main

import (
	"context"
	"path/filepath"
	"sync"
	"time"

	"github.com/holdfast-db/holdfast/db"
)

// benchPressure measures what deferred writes cost when RAM is full, and what they cost those who restore meanwhile.
func benchPressure(ctx context.Context, b *bench) (rows []benchRow, err error) {
	row, err := b.evictionRate(ctx)
	if err != nil {
		return rows, err
	}
	rows = append(rows, row)
	more, err := b.restoreDuringBurst(ctx)
	return append(rows, more...), err
}

// evictionRate publishes into a RAM tier that is full of dirty pages, so that every new page waits until an old one is written.
func (b *bench) evictionRate(ctx context.Context) (row benchRow, err error) {
	dir, remove, err := b.scratch("eviction")
	if err != nil {
		return row, err
	}
	defer remove()
	const pageBytes, each = 2 << 20, 8 // pages of a checkpoint
	const ram = 256 << 20
	total := int64(either(b, 512<<20, 128<<20)) // of one turn
	shape := benchShape{ranks: 1, pageTokens: 16, pageBytes: pageBytes}
	deferred, err := b.openStore(ctx, filepath.Join(dir, "deferred"), shape, db.Options{RAMBytes: ram, WritePolicy: db.OnEvict})
	if err != nil {
		return row, err
	}
	defer deferred.close(&err)
	through, err := b.openStore(ctx, filepath.Join(dir, "through"), shape, db.Options{RAMBytes: ram})
	if err != nil {
		return row, err
	}
	defer through.close(&err)
	side := func(s *benchStore, pages int64) func() (float64, error) {
		return func() (float64, error) {
			return perSecond(total/mebibyte, func() error {
				for range total / pageBytes / pages {
					seq, err := s.sequence(pages * shape.pageTokens)
					if err != nil {
						return err
					}
					if _, _, err := s.publish(ctx, seq, db.PublishRequest{}, s.touchSlot); err != nil {
						return err
					}
				}
				return nil
			})
		}
	}
	if _, err := side(deferred, each)(); err != nil { // fills RAM
		return row, err
	}
	turns, err := takeTurns(ctx, either(b, 15*time.Second, 1500*time.Millisecond), side(deferred, each), side(through, persistBytes/pageBytes))
	if err != nil {
		return row, err
	}
	return ratioRow("publish with RAM full of dirty pages", "MiB/s", "write-through in pieces of 64 MiB", turns, ratioAtLeast(0.9)), nil
}

// restoreDuringBurst restores small checkpoints, from disk and from RAM, while nothing else goes on and while a burst of
// publications has to be written.
func (b *bench) restoreDuringBurst(ctx context.Context) (rows []benchRow, err error) {
	dir, remove, err := b.scratch("burst")
	if err != nil {
		return nil, err
	}
	defer remove()
	const pageBytes, pages = 64 << 10, 32 // of a checkpoint that is restored
	const kept = 16                       // such checkpoints
	const burstPages = 128                // of a publication of the burst
	burst := int64(either(b, 4<<30, 256<<20))
	shape := benchShape{ranks: 1, pageTokens: 16, pageBytes: pageBytes}
	s, err := b.openStore(ctx, filepath.Join(dir, "db"), shape, db.Options{RAMBytes: 256 << 20, WritePolicy: db.OnEvict})
	if err != nil {
		return nil, err
	}
	defer s.close(&err)
	var checkpoints []*db.Sequence
	for range kept {
		seq, err := s.sequence(pages * shape.pageTokens)
		if err != nil {
			return nil, err
		}
		if _, _, err := s.publish(ctx, seq, db.PublishRequest{Durable: true}, s.fillSlot); err != nil {
			return nil, err
		}
		checkpoints = append(checkpoints, seq)
	}
	// One checkpoint after the other is restored, and the first one again each time from RAM, where its lease holds it.
	if _, err := s.DropRAM(ctx); err != nil {
		return nil, err
	}
	held, err := s.restoreAll(ctx, checkpoints[0])
	if err != nil {
		return nil, err
	}
	defer held.Release()
	restore := func(seq *db.Sequence) (float64, error) {
		start := time.Now()
		r, err := s.restoreAll(ctx, seq)
		took := time.Since(start)
		if err != nil {
			return 0, err
		}
		r.Release()
		return float64(took.Nanoseconds()) / 1e3, nil
	}
	sample := func(n int, until <-chan struct{}, drop bool) (disk, ram []float64, err error) {
		for i := 0; i < n || until != nil; i++ {
			select {
			case <-until:
				return disk, ram, nil
			case <-ctx.Done():
				return nil, nil, ctx.Err()
			default:
			}
			if drop {
				if _, err := s.DropRAM(ctx); err != nil {
					return nil, nil, err
				}
			}
			us, err := restore(checkpoints[1+i%(kept-1)])
			if err != nil {
				return nil, nil, err
			}
			disk = append(disk, us)
			if us, err = restore(checkpoints[0]); err != nil {
				return nil, nil, err
			}
			ram = append(ram, us)
		}
		return disk, ram, nil
	}
	// In the burst what was restored is evicted by what is published: RAM holds a few of the publications. What it still
	// holds is not read from disk, so these restores are told apart by the counter of pages read.
	idleDisk, idleRAM, err := sample(either(b, 1000, 200), nil, true)
	if err != nil {
		return nil, err
	}
	done := make(chan struct{})
	var group sync.WaitGroup
	var failed error // by the burst; read once it has ended
	var took time.Duration
	group.Go(func() {
		defer close(done)
		start := time.Now()
		for range burst / burstPages / pageBytes {
			seq, err := s.sequence(burstPages * shape.pageTokens)
			if err == nil {
				_, _, err = s.publish(ctx, seq, db.PublishRequest{}, s.touchSlot)
			}
			if err != nil {
				failed = err
				return
			}
		}
		took = time.Since(start)
	})
	var busyDisk, busyRAM []float64
	for i := 0; err == nil; i++ {
		select {
		case <-done:
		default:
			var before, after db.Stats
			var us float64
			if before, err = s.Stats(); err != nil {
				break
			}
			if us, err = restore(checkpoints[1+i%(kept-1)]); err != nil {
				break
			}
			if after, err = s.Stats(); err != nil {
				break
			}
			if after.PagesRead-before.PagesRead >= pages {
				busyDisk = append(busyDisk, us)
			}
			if us, err = restore(checkpoints[0]); err == nil {
				busyRAM = append(busyRAM, us)
			}
			continue
		}
		break
	}
	group.Wait()
	if err == nil {
		err = failed
	}
	if err != nil {
		return nil, err
	}
	rate := float64(burst) / mebibyte / took.Seconds()
	for _, c := range []struct {
		name       string
		idle, busy []float64
		unit       float64
	}{{"restore of 2 MiB from disk, p99 during a burst of writes", idleDisk, busyDisk, 1}, {"restore of 2 MiB from RAM, p99 during a burst of writes", idleRAM, busyRAM, 1}} {
		rows = append(rows, ratioRow(c.name, "µs", "p99 idle", []turn{{quantile(c.busy, 0.99), quantile(c.idle, 0.99)}}, ratioAtMost(2)).
			noted("%d restores during %s at %.0f MiB/s; medians %.0f and idle %.0f µs", len(c.busy), humanBytes(burst), rate, quantile(c.busy, 0.5), quantile(c.idle, 0.5)))
	}
	return rows, nil
}
