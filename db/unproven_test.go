package db

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metricsdk "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/holdfast-db/holdfast/txn"
)

// listedIn gives the generations that are listed.
func listedIn(t testing.TB, d *DB) (gens []Generation) {
	t.Helper()
	for c, err := range d.Checkpoints(context.Background()) {
		require.NoError(t, err)
		gens = append(gens, c.Generation)
	}
	return gens
}

// settled waits until what the last process left is settled.
func settled(t testing.TB, d *DB) RecoveryReport {
	t.Helper()
	require.Eventually(t, func() bool { return d.RecoveryReport().Complete }, 30*time.Second, time.Millisecond)
	return d.RecoveryReport()
}

// Given a directory whose writer was killed with checkpoints in RAM only and one retired on top of them, when it is opened with a
// budget that covers nothing and the background does not get to it, then what is durable is found and restored, and of the rest
// nothing is listed, found or built upon; a publication that meets it goes through; and when the background has been, everything
// is settled, and the report says so.
func TestWhatTheBudgetDoesNotCoverIsNotListed_B21(t *testing.T) {
	for _, readOnly := range []bool{false, true} {
		t.Run(map[bool]string{true: "read-only", false: "read-write"}[readOnly], func(t *testing.T) {
			dir, ctx := tempDir(t), context.Background()
			ns := testNamespace(t, 2)
			d := openDB(t, dir, Options{WritePolicy: OnEvict})
			durable := func(r *PublishRequest) { r.Durable = true }
			long, ram, stale := seqOf(t, ns, tokens(1, 1000)), seqOf(t, ns, tokens(2, 900)), seqOf(t, ns, tokens(3, 900))
			kept, _ := publish(t, d, long, 600, durable)
			gone, _ := publish(t, d, long, 1000)
			publish(t, d, ram, 500)
			publish(t, d, ram, 900)
			retired, _ := publish(t, d, stale, 700)
			require.NoError(t, d.Retire(ctx, retired))
			crash(t, d)

			hold := make(chan struct{})
			var progress []OpenProgress
			var mu sync.Mutex
			d = openDB(t, dir, Options{WritePolicy: OnEvict, ReadOnly: readOnly, OpenBudget: 1, holdProof: hold, OpenProgress: func(p OpenProgress) {
				mu.Lock()
				defer mu.Unlock()
				progress = append(progress, p)
			}})
			r := d.RecoveryReport()
			require.False(t, r.Complete)
			require.EqualValues(t, 3, r.Unverified)
			require.Zero(t, r.NotDurable)
			require.Positive(t, r.LogRecords)
			require.EqualValues(t, 600, lookupAt(t, d, long))
			require.EqualValues(t, 600, restoreAt(t, d, long))
			require.Zero(t, lookupAt(t, d, ram))
			require.Zero(t, restoreAt(t, d, ram))
			require.Equal(t, []Generation{kept}, listedIn(t, d))
			_, err := d.Checkpoint(gone)
			require.ErrorIs(t, err, ErrNotFound)
			s := stats(t, d)
			require.EqualValues(t, 1, s.Checkpoints)
			require.EqualValues(t, 3, s.Unverified)
			require.Zero(t, s.Undurable)

			want := []Generation{kept}
			if !readOnly {
				// The same again, longer on top of what is gone, and on top of what was retired.
				require.NoError(t, ram.Append(tokens(4, 300)))
				require.NoError(t, stale.Append(tokens(5, 300)))
				again, bytes := publish(t, d, long, 1000)
				require.Equal(t, gone, again)
				require.Positive(t, bytes)
				on, _ := publish(t, d, ram, 1200)
				over, _ := publish(t, d, stale, 1200)
				want = []Generation{kept, again, on, over}
				require.EqualValues(t, 1000, restoreAt(t, d, long))
				require.EqualValues(t, 1200, restoreAt(t, d, ram))
				require.EqualValues(t, 1200, restoreAt(t, d, stale))
				require.ElementsMatch(t, want, listedIn(t, d))
			}
			close(hold)
			r = settled(t, d)
			require.Zero(t, r.Unverified)
			require.Empty(t, r.Failure)
			require.ElementsMatch(t, want, listedIn(t, d))
			require.EqualValues(t, len(want), stats(t, d).Checkpoints)
			require.Zero(t, stats(t, d).Retired)
			checkCatalogue(t, d)
			closeDB(t, d)
			mu.Lock()
			defer mu.Unlock()
			require.Equal(t, StageReplay, progress[0].Stage)
			require.False(t, progress[0].Served)
			last := progress[len(progress)-1]
			require.Equal(t, StageComplete, last.Stage)
			require.True(t, last.Served)
			if !readOnly {
				require.Empty(t, verifyDir(t, dir).Findings)
			}
		})
	}
}

// The same for attention alone, where every page boundary inside a checkpoint can be found: the boundaries that are on disk are
// found, the others are not.
func TestBoundariesThatTheBudgetDoesNotCover(t *testing.T) {
	dir := tempDir(t)
	ns := testNamespace(t, 1,
		Group{Name: "attention:kv", Kind: Attention, PageBytes: 512, PageTokens: 16},
		Group{Name: "attention:window", Kind: Attention, PageBytes: 512, PageTokens: 16, WindowTokens: 64})
	d := openDB(t, dir, Options{WritePolicy: OnEvict})
	durable := func(r *PublishRequest) { r.Durable = true }
	long := seqOf(t, ns, tokens(1, 1000))
	publish(t, d, long, 500, durable)
	publish(t, d, long, 1000)
	other := seqOf(t, ns, tokens(2, 1000))
	publish(t, d, other, 1000)
	crash(t, d)
	hold := make(chan struct{})
	d = openDB(t, dir, Options{WritePolicy: OnEvict, OpenBudget: 1, holdProof: hold})
	require.EqualValues(t, 500, lookupAt(t, d, long))
	require.EqualValues(t, 500, restoreAt(t, d, long))
	short, err := long.Fork(499)
	require.NoError(t, err)
	require.EqualValues(t, 496, lookupAt(t, d, short), "31 whole pages inside the checkpoint that is there")
	require.EqualValues(t, 496, restoreAt(t, d, short))
	require.Zero(t, lookupAt(t, d, other))
	require.NoError(t, other.Append(tokens(3, 100)))
	publish(t, d, other, 1100)
	require.EqualValues(t, 1100, restoreAt(t, d, other))
	close(hold)
	settled(t, d)
	require.EqualValues(t, 500, restoreAt(t, d, long))
	require.EqualValues(t, 1100, restoreAt(t, d, other))
	checkCatalogue(t, d)
}

// Given a directory in which a segment file is missing, when it is opened with a budget that covers nothing, then what needs the
// file is not listed, though no page was looked for yet, what does not is restored, and a publication on top of what is
// missing goes through.
func TestDamageThatTheBudgetDoesNotCoverIsNotListed_FSA09_B26(t *testing.T) {
	dir := tempDir(t)
	ns := testNamespace(t, 2)
	d := openDB(t, dir, Options{SegmentBytes: 1 << 20})
	long := seqOf(t, ns, tokens(1, 3000))
	first, _ := publish(t, d, long, 600)
	second, _ := publish(t, d, long, 3000) // 150 pages of 4 KiB on two ranks: a segment of its own
	other := seqOf(t, ns, tokens(2, 700))
	third, _ := publish(t, d, other, 700)
	places := placesOf(t, d, second, 0)
	file := places[2*180].Segment
	var needs []Generation
	for _, g := range []Generation{first, second, third} {
		for _, at := range append(placesOf(t, d, g, 0), placesOf(t, d, g, 1)...) {
			if at.Segment == file {
				needs = append(needs, g)
				break
			}
		}
	}
	require.Equal(t, []Generation{second}, needs[:1])
	closeDB(t, d)
	require.NoError(t, os.Remove(segmentFile(dir, file)))
	hold := make(chan struct{})
	d = openDB(t, dir, Options{OpenBudget: 1, holdProof: hold})
	require.False(t, d.RecoveryReport().Complete)
	require.EqualValues(t, 600, lookupAt(t, d, long))
	require.EqualValues(t, 600, restoreAt(t, d, long))
	listed := listedIn(t, d)
	require.Contains(t, listed, first)
	require.NotContains(t, listed, second)
	_, err := d.Checkpoint(second)
	require.ErrorIs(t, err, ErrNotFound)
	require.NoError(t, long.Append(tokens(3, 100)))
	publish(t, d, long, 3100)
	require.EqualValues(t, 3100, restoreAt(t, d, long))
	publish(t, d, long, 3000)
	close(hold)
	r := settled(t, d)
	require.Empty(t, r.Failure)
	require.EqualValues(t, 3100, restoreAt(t, d, long))
	if restoreAt(t, d, other) == 0 {
		publish(t, d, other, 700)
	}
	checkCatalogue(t, d)
	closeDB(t, d)
	require.Empty(t, damageOf(verifyDir(t, dir)))
	require.NoFileExists(t, filepath.Join(dir, dataName, filepath.Base(segmentFile(dir, file))))
}

// Traffic and the background pass get along: lookups never see what is not restorable, and closing in the middle is fine.
func TestTrafficDuringTheBackgroundPass(t *testing.T) {
	dir, ctx := tempDir(t), context.Background()
	ns := testNamespace(t, 1)
	d := openDB(t, dir, Options{WritePolicy: OnEvict})
	const n = 300
	seq := func(i int) *Sequence { return seqOf(t, ns, tokens(uint64(i), 64)) }
	for i := range n {
		publish(t, d, seq(i), 64, func(r *PublishRequest) { r.Durable = i%3 == 0 })
	}
	crash(t, d)
	crash(t, openDB(t, dir, Options{WritePolicy: OnEvict, OpenBudget: 1})) // wherever it has come to
	d = openDB(t, dir, Options{WritePolicy: OnEvict, OpenBudget: 1})
	var group sync.WaitGroup
	for w := range 4 {
		group.Go(func() {
			for i := w; i < n; i += 4 {
				m, err := d.Lookup(ctx, seq(i), LookupOptions{})
				if i%3 == 0 {
					if err != nil {
						t.Errorf("checkpoint %d is lost: %v", i, err)
					}
					continue
				}
				if err == nil {
					t.Errorf("checkpoint %d is listed at %d", i, m.Offset)
				}
				if i%3 == 1 {
					p, err := d.Begin(ctx, PublishRequest{Sequence: seq(i), Offset: 64})
					if err != nil || p.Listed() {
						t.Errorf("checkpoint %d: %v", i, err)
						continue
					}
					p.Abort()
				}
			}
		})
	}
	group.Wait()
	settled(t, d)
	require.EqualValues(t, n/3, stats(t, d).Checkpoints)
	checkCatalogue(t, d)
	require.NoError(t, (catalogue{d.index}).Read(func(v txn.Reader) error {
		a, err := txn.ReadAccounts(v)
		require.Zero(t, a.Undurable)
		return err
	}))
}

// Who collects metrics while a database is being opened gets none of it, and no panic; and all of it afterwards.
func TestMetricsAreReadDuringAnOpen(t *testing.T) {
	dir := tempDir(t)
	d := openDB(t, dir, Options{WritePolicy: OnEvict})
	publish(t, d, seqOf(t, testNamespace(t, 1), tokens(1, 100)), 100)
	crash(t, d)
	reader := metricsdk.NewManualReader()
	asked := 0
	d = openDB(t, dir, Options{MeterProvider: metricsdk.NewMeterProvider(metricsdk.WithReader(reader)), OpenProgress: func(OpenProgress) {
		asked++
		var m metricdata.ResourceMetrics
		require.NoError(t, reader.Collect(context.Background(), &m))
		for _, scope := range m.ScopeMetrics {
			for _, metric := range scope.Metrics {
				require.NotEqual(t, "holdfast.checkpoint.unverified", metric.Name)
			}
		}
	}})
	require.Positive(t, asked)
	require.Contains(t, collected(t, reader), "holdfast.checkpoint.unverified 0")
	closeDB(t, d)
}
