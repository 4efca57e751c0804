package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// filled gives a directory with the checkpoints of a short replay.
func filled(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "db")
	replayJSON(t, statusOK, "--limit", "20", "--dir", dir)
	return dir
}

// Given a healthy database, then every repair command says that there is nothing to do, and changes nothing.
func TestRepairOfAHealthyDatabase_B40(t *testing.T) {
	dir := filled(t)
	status, stdout, stderr := holdfast(t, "verify", dir)
	require.Equal(t, statusOK, status, stderr)
	require.Contains(t, stdout, ": clean\n")
	for _, command := range []string{"recover", "salvage"} {
		status, stdout, stderr = holdfast(t, command, "--apply", dir)
		require.Equal(t, statusOK, status, stderr)
		require.Contains(t, stdout, "nothing to do")
	}
}

// Given one flipped bit in a page, then verify tells it with status 1, recover shows and asks, and does it with --yes.
func TestRepairOfADamagedPage_B27_B40(t *testing.T) {
	dir := filled(t)
	files, err := filepath.Glob(filepath.Join(dir, "data", "*.seg"))
	require.NoError(t, err)
	b, err := os.ReadFile(files[0])
	require.NoError(t, err)
	b[len(b)-4096] ^= 1
	require.NoError(t, os.WriteFile(files[0], b, 0o600))

	status, stdout, _ := holdfast(t, "verify", "--json", dir)
	require.Equal(t, statusMismatch, status)
	var v verifyResult
	require.NoError(t, json.Unmarshal([]byte(strings.ReplaceAll(stdout, `"findings"`, `"ignored"`)), &v))
	require.True(t, v.Damaged)
	require.NotEmpty(t, v.Affected)
	require.Contains(t, stdout, files[0])

	status, stdout, _ = holdfast(t, "recover", dir)
	require.Equal(t, statusMismatch, status)
	require.Contains(t, stdout, "retire")
	status, _, stderr := holdfast(t, "recover", "--apply", dir)
	require.Equal(t, statusUsage, status)
	require.Contains(t, stderr, "--yes")
	status, _, _ = holdfast(t, "scrub", dir)
	require.Equal(t, statusUsage, status)
	still, err := os.ReadFile(files[0])
	require.NoError(t, err)
	require.Equal(t, b, still, "nothing is changed unasked")

	status, stdout, stderr = holdfast(t, "recover", "--apply", "--yes", dir)
	require.Equal(t, statusOK, status, stderr)
	require.Contains(t, stdout, "changes made")
	status, _, _ = holdfast(t, "verify", dir)
	require.Equal(t, statusOK, status)
	status, _, stderr = holdfast(t, "scrub", "--yes", dir)
	require.Equal(t, statusOK, status, stderr)
}

// Given a database without its log, then recover says that it is for salvage, and salvage rebuilds it.
func TestSalvageOfALostLog(t *testing.T) {
	dir := filled(t)
	require.NoError(t, os.RemoveAll(filepath.Join(dir, "wal")))
	status, _, stderr := holdfast(t, "recover", dir)
	require.Equal(t, statusMismatch, status)
	require.Contains(t, stderr, "salvage")
	status, _, _ = holdfast(t, "salvage", dir)
	require.Equal(t, statusMismatch, status)
	status, _, stderr = holdfast(t, "salvage", "--apply", dir)
	require.Equal(t, statusUsage, status, stderr)
	status, stdout, stderr := holdfast(t, "salvage", "--apply", "--yes", "--json", dir)
	require.Equal(t, statusOK, status, stderr)
	var s salvageResult
	require.NoError(t, json.Unmarshal([]byte(stdout), &s))
	require.True(t, s.Applied)
	require.NotEmpty(t, s.Kept)
	require.Empty(t, s.Lost)
	status, _, _ = holdfast(t, "verify", dir)
	require.Equal(t, statusOK, status)
}

// What cannot be looked at is neither clean nor damaged.
func TestVerifyOfWhatIsNotADatabase(t *testing.T) {
	status, _, stderr := holdfast(t, "verify", filepath.Join(t.TempDir(), "nowhere"))
	require.Equal(t, 2, status)
	require.Contains(t, stderr, "not found")
	status, _, _ = holdfast(t, "scrub", "--yes", filepath.Join(t.TempDir(), "nowhere"))
	require.Equal(t, statusDatabase, status)
}
