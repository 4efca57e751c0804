package main

import (
	"encoding/json"
	"os"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
)

// The benchmark makes and opens its directories in processes of its own, finds what it made in each, replays what was killed, and
// leaves nothing behind. Its figures are for an idle machine and are not judged here.
func TestBenchOpenCommand(t *testing.T) {
	dir := t.TempDir()
	status, stdout, stderr := holdfast(t, "bench", "open", "--quick", "--json", "--dir", dir, "long", "scale", "turns1m")
	require.Equal(t, statusOK, status, stderr)
	var r openReport
	require.NoError(t, json.Unmarshal([]byte(stdout), &r))
	require.True(t, r.Quick)
	var names []string
	for _, x := range r.Rows {
		names = append(names, x.Name)
		if x.Unit != "MiB" || runtime.GOOS == "linux" { // elsewhere the memory of a process cannot be told
			require.Positive(t, x.Value, x.Name)
		}
		require.NotEmpty(t, x.Goal, x.Name)
	}
	require.Equal(t, []string{"open.clean", "open.killed", "open.memory", "open.scale", "open.turns1m"}, names)
	require.Regexp(t, `killed: [1-9]\d* records replayed`, stderr)
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, entries)

	status, _, stderr = holdfast(t, "bench", "open", "everything")
	require.Equal(t, statusUsage, status)
	require.Contains(t, stderr, "long, scale, turns1m")
}
