package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/db"
	"github.com/holdfast-db/holdfast/txn"
)

// totals are the figures of a report that no kill and no restart may change.
type totals struct {
	Requests, Blocks, HitBlocks, PossibleHitBlocks, Checkpoints, RestoredPages, Mismatches, UniquePayloadBytes, Audited, Lost int64
}

func totalsOf(r report) totals {
	return totals{r.Requests, r.Blocks, r.HitBlocks, r.PossibleHitBlocks, r.Checkpoints, r.RestoredPages, r.Mismatches, r.UniquePayloadBytes, r.AuditedCheckpoints, r.Lost}
}

var smallPages = []string{"--page-size", "64", "--state-size", "256", "--ram", "64MiB", "--ranks", "2"}

// Given a workload, when the process that holds the database is killed again and again and the database reopened in
// between, then what is found is what an undisturbed replay finds, which is what a cache that never forgets finds.
func TestKillsAndRestartsChangeNoTotal(t *testing.T) {
	for _, m := range []string{"hybrid", "attention"} {
		args := append([]string{"--model", m, "--limit", "90"}, smallPages...)
		calm := replayJSON(t, statusOK, args...)
		require.Zero(t, calm.Mismatches)
		require.Equal(t, calm.PossibleHitBlocks, calm.HitBlocks)
		require.Equal(t, calm.Checkpoints, calm.AuditedCheckpoints)
		require.Positive(t, calm.HitBlocks)

		restarted := replayJSON(t, statusOK, append(args, "--restart-every", "30")...)
		require.Equal(t, totalsOf(calm), totalsOf(restarted))
		require.Equal(t, int64(3), restarted.Restarts)

		killed := replayJSON(t, statusOK, append(args, "--kill-every", "9", "--restart-every", "40")...)
		require.Equal(t, totalsOf(calm), totalsOf(killed))
		require.Equal(t, int64(2), killed.Restarts)
		require.GreaterOrEqual(t, killed.Kills, int64(6))
	}
}

// Given each point in the life of a request, when the child is killed there, then no total changes.
func TestKillAtEveryPoint(t *testing.T) {
	const requests = 24
	s := testSetup(hybridModel)
	want := newLedger(s)
	var hits int64
	for r := range generate(1, requests).requests {
		hits += int64(want.possible(r))
		want.acknowledge(r)
	}
	for _, at := range []killPoint{whenAsked, inLookup, whenFound, inPublish, whenPublished, inOpen} {
		t.Run(string(at), func(t *testing.T) {
			s := s
			s.Dir = filepath.Join(t.TempDir(), "db")
			v, err := newSupervisor(s, 4, 1, childCommand, nil)
			require.NoError(t, err)
			v.points = []killPoint{at}
			d := driver(v, s, requests)
			require.NoError(t, d.run(t.Context()))
			require.NoError(t, v.close(t.Context()))

			require.Equal(t, hits, d.report.HitBlocks)
			require.Equal(t, hits, d.report.PossibleHitBlocks)
			require.Equal(t, int64(len(want.checkpoints)), d.report.Checkpoints)
			require.Equal(t, d.report.Checkpoints, d.report.AuditedCheckpoints)
			require.Zero(t, d.report.Mismatches, d.report.Faults)
			require.Zero(t, d.report.Lost)
			require.Positive(t, v.kills[at], "%v", v.kills)
		})
	}
}

func TestSupervisorGivesTheChildsError(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "letter.txt"), []byte("somebody else's"), 0o600))
	status, stdout, stderr := holdfast(t, append([]string{"replay", "--dir", dir, "--kill-every", "5", "--limit", "10"}, smallPages...)...)
	require.Equal(t, statusDatabase, status)
	require.Empty(t, stdout)
	require.Contains(t, stderr, dir, "the database says why")

	inProcess, _, said := holdfast(t, append([]string{"replay", "--dir", dir, "--limit", "10"}, smallPages...)...)
	require.Equal(t, statusDatabase, inProcess)
	require.Equal(t, said, stderr, "with and without a child alike")
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 1, "left as it was")
}

// A child that ends by itself, or says what it should not, is an error of the database and no kill.
func TestChildThatMisbehaves(t *testing.T) {
	for name, c := range map[string]struct{ script, says string }{
		"dies at once":         {`echo 'panic: out of luck' >&2; exit 2`, "out of luck"},
		"dies after an answer": {`read q; echo '{"is":"opened"}'; exit 0`, "process that holds the database"},
		"answers nonsense":     {`read q; echo 'hello'; read q`, "process that holds the database"},
		"answers another":      {`read q; echo '{"is":"closed"}'; read q`, `it answered "closed"`},
	} {
		command := func() *exec.Cmd { return exec.Command("/bin/sh", "-c", c.script) }
		v, err := newSupervisor(testSetup(hybridModel), 0, 1, command, nil)
		if err == nil {
			_, err = v.find(t.Context(), request{Blocks: []uint64{1}})
		}
		require.ErrorIs(t, err, txn.ErrIO, name)
		require.ErrorContains(t, err, c.says, name)
		require.Equal(t, statusDatabase, exitStatus(err), name)
		require.NoError(t, v.close(t.Context()), "it is gone already")
	}
	_, err := newSupervisor(testSetup(hybridModel), 0, 1, func() *exec.Cmd { return exec.Command("/nonexistent/holdfast") }, nil)
	require.ErrorContains(t, err, "/nonexistent/holdfast")
	require.Equal(t, statusDatabase, exitStatus(err))
}

// testParent is a driver that starts a child, says so, and then does nothing until it is killed.
func testParent() int {
	v, err := newSupervisor(setup{
		Dir: os.Args[2], Model: hybridModel, Ranks: 1, PageBytes: 64, StateBytes: 64, RAMBytes: 64 << 20, WritePolicy: "write-through",
	}, 0, 1, childCommand, nil)
	if err != nil {
		os.Stderr.WriteString(err.Error())
		return 1
	}
	os.Stdout.WriteString("started\n")
	_, _ = io.Copy(io.Discard, os.Stdin)
	_ = v.close(context.Background())
	return 0
}

// Given a driver with a child, when the driver is killed, then the child ends as well, and its directory can be opened.
func TestChildDiesWithItsDriver(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "db")
	// Driver and child inherit the writing end of this pipe; it ends when both are dead.
	lives, held, err := os.Pipe()
	require.NoError(t, err)
	defer lives.Close()
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(self, "test-parent", dir)
	cmd.ExtraFiles = []*os.File{held}
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	defer stdin.Close()
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	cmd.Stderr = os.Stderr
	require.NoError(t, cmd.Start())
	held.Close()
	started := make([]byte, len("started\n"))
	_, err = io.ReadFull(stdout, started)
	require.NoError(t, err)

	require.NoError(t, cmd.Process.Kill())
	_, err = io.Copy(io.Discard, lives)
	require.NoError(t, err)
	require.Error(t, cmd.Wait(), "it was killed")

	d, err := db.Open(t.Context(), dir, db.Options{})
	require.NoError(t, err)
	_, err = d.Close(t.Context())
	require.NoError(t, err)
}

// Given a replay with a child, when it is interrupted, then it closes the database, reports what was done, and ends
// with its own status.
func TestInterruptReportsWhatWasDone(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	for _, extra := range [][]string{nil, {"--kill-every", "1000"}} {
		dir := filepath.Join(t.TempDir(), "db")
		args := append([]string{"replay", "--json", "--trace", "-", "--dir", dir}, smallPages...)
		cmd := exec.Command(self, append(args, extra...)...)
		stdin, err := cmd.StdinPipe()
		require.NoError(t, err)
		stdout, err := cmd.StdoutPipe()
		require.NoError(t, err)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		require.NoError(t, cmd.Start())
		// More lines than the pipe and the reader's buffer hold: when they are written, some have been replayed.
		line := []byte(`{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}` + "\n")
		for written := 0; written < 256<<10; written += len(line) {
			_, err := stdin.Write(line)
			require.NoError(t, err)
		}
		require.NoError(t, cmd.Process.Signal(os.Interrupt))
		stdin.Close()
		var r report
		require.NoError(t, json.NewDecoder(stdout).Decode(&r))
		var exit *exec.ExitError
		require.ErrorAs(t, cmd.Wait(), &exit)
		require.Equal(t, statusInterrupted, exit.ExitCode(), stderr.String())
		require.True(t, r.Interrupted)
		require.Positive(t, r.Requests)
		require.Equal(t, int64(1), r.Checkpoints)
		require.Equal(t, 2*(r.Requests-1), r.HitBlocks)
		require.Zero(t, r.Mismatches)

		again := replayJSON(t, statusOK, append([]string{"--limit", "1", "--dir", dir}, smallPages...)...)
		require.Equal(t, int64(2), again.Checkpoints, "the directory is kept and whole")
	}
}
