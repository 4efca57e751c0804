package main

import (
	"io"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// BenchmarkReplayAgainstBareLoop replays the recorded conversation trace, or the generated workload where it is not at
// hand, and reports the ratio to a bare append-and-sync loop. One iteration is a whole trace: run it with -benchtime 1x.
func BenchmarkReplayAgainstBareLoop(b *testing.B) {
	o := defaultReplayOptions()
	o.ranks = 2
	const trace = "../../../shared/traces/mooncake_conversation.jsonl"
	if _, err := os.Stat(trace); err == nil {
		o.trace = trace
	}
	s, err := o.setup()
	require.NoError(b, err)
	for b.Loop() {
		src, closer, err := o.source(nil)
		require.NoError(b, err)
		c, err := compare(b.Context(), src, s, b.TempDir(), 500, newProgress(io.Discard, false))
		require.NoError(b, err)
		require.NoError(b, closer.Close())
		require.Zero(b, c.Mismatches)
		b.ReportMetric(c.Ratio, "ratio")
		b.ReportMetric(c.BareSeconds, "bare-s")
		b.ReportMetric(c.ReplaySeconds, "replay-s")
	}
}

// Both sides of the comparison do the same requests, and the bare loop writes exactly the new bytes.
func TestComparisonIsOfTheSameWork(t *testing.T) {
	s := testSetup(hybridModel)
	dir := t.TempDir()
	const requests = 45
	c, err := compare(t.Context(), generate(1, requests), s, dir, 10, newProgress(io.Discard, false))
	require.NoError(t, err)
	want := newLedger(s)
	var hits int64
	for r := range generate(1, requests).requests {
		hits += int64(want.possible(r))
		want.acknowledge(r)
	}
	require.Equal(t, int64(requests), c.Requests)
	require.Equal(t, want.uniqueBytes(), c.NewBytes)
	require.Equal(t, hits, c.HitBlocks)
	require.Zero(t, c.Mismatches)
	require.Positive(t, c.Ratio)
	require.InDelta(t, c.BareSeconds/c.ReplaySeconds, c.Ratio, 1e-9)
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, entries, "both directories are removed")
}

func TestBareLoopWritesAndSyncsWhatItSays(t *testing.T) {
	dir := t.TempDir()
	b, err := newBareLoop(dir)
	require.NoError(t, err)
	for _, n := range []int64{10, 3000, 1} {
		b.reserve(n)
		require.NoError(t, b.commit(n))
	}
	require.NoError(t, b.close())
	for name, want := range map[string]int64{"data": 3011, "commits": 300} {
		st, err := os.Stat(dir + "/" + name)
		require.NoError(t, err)
		require.Equal(t, want, st.Size(), name)
		require.Equal(t, os.FileMode(0o600), st.Mode().Perm())
	}
	require.Error(t, b.commit(1), "closed")
	_, err = newBareLoop(dir)
	require.Error(t, err, "it does not write over anything")
}

func TestBenchReplayCommand(t *testing.T) {
	status, stdout, stderr := holdfast(t, "bench", "replay", "--limit", "20", "--page-size", "64", "--state-size", "64", "--dir", t.TempDir())
	require.Equal(t, statusOK, status, stderr)
	require.Contains(t, stdout, "of the bare loop's speed")
	status, stdout, stderr = holdfast(t, "bench", "replay", "--limit", "20", "--page-size", "64", "--state-size", "64", "--json")
	require.Equal(t, statusOK, status, stderr)
	require.Contains(t, stdout, `"ratio": `)
}
