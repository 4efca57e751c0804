package wal

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-db/holdfast/txn"
)

// BenchmarkCommit compares durable commits through a Group with what anybody could do by hand: append the same bytes to a
// file and sync it, one after the other. Both run in turns against the same file system, so that what else the machine does
// meets both. ratio is the rate of the commits over the rate of the bare loop; the promise is at least 0.9 for one
// caller, 20 for 64 and 60 for 256.
//
// One iteration is one round: a slice of the bare loop, then a slice of commits of every caller.
func BenchmarkCommit(b *testing.B) {
	for _, size := range []int{512, 4096} {
		for _, callers := range []int{1, 8, 64, 256} {
			b.Run(fmt.Sprintf("bytes=%d/callers=%d", size, callers), func(b *testing.B) {
				benchmarkCommit(b, size, callers)
			})
		}
	}
}

func benchmarkCommit(b *testing.B, size, callers int) {
	const bareCommits, groupSyncs = 10, 10
	dir := b.TempDir()
	payload := make([]byte, size)
	for i := range payload {
		payload[i] = byte(i*7 + 1)
	}
	bare, err := os.OpenFile(filepath.Join(dir, "bare"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = bare.Close() }()
	l, err := Open(filepath.Join(dir, "wal"), Options{})
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	g, err := NewGroup(l, Hooks[[]byte]{
		Prepare: func(r *Request[[]byte], _ txn.LSN) (Record, error) { return Record{Kind: 1, Payload: r.Payload}, nil },
		Apply:   func([]*Request[[]byte]) error { return nil },
		Discard: func([]*Request[[]byte], error) {},
	}, GroupOptions{})
	if err != nil {
		b.Fatal(err)
	}
	defer g.Close()

	var ratios []float64
	var commits int
	var spent time.Duration
	for b.Loop() {
		begin := time.Now()
		for range bareCommits {
			if _, err := bare.Write(payload); err != nil {
				b.Fatal(err)
			}
			if err := bare.Sync(); err != nil {
				b.Fatal(err)
			}
		}
		perBare := time.Since(begin) / bareCommits

		begin = time.Now()
		var done sync.WaitGroup
		for range callers {
			done.Go(func() {
				for range groupSyncs {
					if err := g.Commit(context.Background(), &Request[[]byte]{Payload: payload, Durable: true}); err != nil {
						b.Error(err)
						return
					}
				}
			})
		}
		done.Wait()
		elapsed := time.Since(begin)
		spent += elapsed
		commits += callers * groupSyncs
		ratios = append(ratios, float64(perBare)*float64(callers*groupSyncs)/float64(elapsed))
	}
	slices.Sort(ratios)
	b.ReportMetric(ratios[len(ratios)/2], "ratio")
	b.ReportMetric(float64(commits)/spent.Seconds(), "commits/s")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkReplay reads a log back; its reference is reading the same files without looking at them.
func BenchmarkReplay(b *testing.B) {
	const records, size = 50_000, 1 << 10
	dir := filepath.Join(b.TempDir(), "wal")
	l, err := Open(dir, Options{})
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	batch := make([]Record, 1000)
	for i := range batch {
		batch[i] = Record{Kind: 1, Payload: make([]byte, size)}
	}
	for range records / len(batch) {
		if _, err := l.Append(batch); err != nil {
			b.Fatal(err)
		}
	}
	b.SetBytes(l.Size())
	var bare, replay time.Duration
	for b.Loop() {
		begin := time.Now()
		for _, d := range l.directories {
			if _, err := os.ReadFile(d.file()); err != nil {
				b.Fatal(err)
			}
		}
		bare += time.Since(begin)
		begin = time.Now()
		if err := l.Replay(context.Background(), 1, func(txn.LSN, byte, []byte) error { return nil }); err != nil {
			b.Fatal(err)
		}
		replay += time.Since(begin)
	}
	b.ReportMetric(float64(bare)/float64(replay), "ratio")
}
