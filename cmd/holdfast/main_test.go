package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// TestMain lets the test binary stand in for the program: called with a command instead of test flags, as a replay
// calls its child, it is holdfast.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && !strings.HasPrefix(os.Args[1], "-") {
		if os.Args[1] == "test-parent" {
			os.Exit(testParent())
		}
		main()
	}
	goleak.VerifyTestMain(m)
}

// holdfast runs one command line in this process.
func holdfast(t *testing.T, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	var out, err bytes.Buffer
	status = run(t.Context(), args, strings.NewReader(""), &out, &err)
	return status, out.String(), err.String()
}

// replayJSON runs a replay that must end with the status, and gives its report.
func replayJSON(t *testing.T, status int, args ...string) report {
	t.Helper()
	got, stdout, stderr := holdfast(t, append([]string{"replay", "--json"}, args...)...)
	require.Equal(t, status, got, "stdout: %s\nstderr: %s", stdout, stderr)
	var r report
	require.NoError(t, json.Unmarshal([]byte(stdout), &r))
	return r
}

func TestVersion(t *testing.T) {
	status, stdout, stderr := holdfast(t, "version")
	require.Equal(t, statusOK, status)
	require.Empty(t, stderr)
	require.Regexp(t, `^holdfast \S+( \([0-9a-f]+(, modified)?\))? go\S+ \w+/\w+\n$`, stdout)

	status, stdout, _ = holdfast(t, "version", "--json")
	require.Equal(t, statusOK, status)
	var v version
	require.NoError(t, json.Unmarshal([]byte(stdout), &v))
	require.Equal(t, buildVersion(), v)
}

func TestUsageErrorsNameTheFlagAndEndWithStatus2(t *testing.T) {
	missing := t.TempDir() + "/missing"
	for _, c := range []struct{ args, says string }{
		{"frobnicate", `unknown command "frobnicate"`},
		{"version extra", `unknown command "extra"`},
		{"replay --nonsense", "unknown flag: --nonsense"},
		{"replay --limit x", `invalid argument "x" for "--limit"`},
		{"replay --limit -1", "--limit -1: negative"},
		{"replay --kill-every -1", "--kill-every -1: negative"},
		{"replay --restart-every -1", "--restart-every -1: negative"},
		{"replay --page-size 4furlongs", `size "4furlongs": want a number of bytes`},
		{"replay --page-size 0", "PageBytes"},
		{"replay --page-size 2GiB", "PageBytes"},
		{"replay --ranks 0", "Ranks"},
		{"replay --model transformer", `model "transformer": want "hybrid" or "attention"`},
		{"replay --write-policy later", `write policy "later"`},
		{"replay --ram 1", "--ram 1: want 64KiB to 16TiB"},
		{"replay --ram 17TiB", "--ram 17TiB: want 64KiB to 16TiB"},
		{"replay --trace " + missing, "open trace " + missing},
		{"bench replay --slice 0", "--slice 0: want at least 1"},
		{"bench replay --model x", `model "x"`},
	} {
		status, stdout, stderr := holdfast(t, strings.Fields(c.args)...)
		require.Equal(t, statusUsage, status, "%s: %s", c.args, stderr)
		require.Empty(t, stdout, c.args)
		require.Contains(t, stderr, c.says, c.args)
		require.Contains(t, stderr, "--help", c.args)
	}
}

// Every command explains itself, with examples, and the ones that can end in several ways say how.
func TestHelpHasExamplesAndExitStatuses(t *testing.T) {
	for _, command := range [][]string{{}, {"replay"}, {"bench"}, {"bench", "replay"}, {"version"}} {
		status, stdout, stderr := holdfast(t, append(command, "--help")...)
		require.Equal(t, statusOK, status)
		require.Empty(t, stderr)
		require.Contains(t, stdout, "Examples:\n  ", "%v", command)
		if n := len(command); n > 0 && command[n-1] == "replay" || n == 0 {
			require.Contains(t, stdout, statusHelp, "%v", command)
		}
		for line := range strings.Lines(stdout) {
			require.LessOrEqual(t, len([]rune(strings.TrimRight(line, "\n"))), 80, "%v: %s", command, line)
		}
	}
}

func TestExitStatusOfWrappedErrors(t *testing.T) {
	require.Equal(t, statusOK, exitStatus(nil))
	require.Equal(t, statusUsage, exitStatus(io.EOF), "what the command line's parser says is about usage")
	require.Equal(t, statusDatabase, exitStatus(fmt.Errorf("request 3: %w", databaseError(io.EOF))))
	require.ErrorIs(t, databaseError(io.EOF), io.EOF)
	require.Equal(t, context.Canceled.Error(), usageError(context.Canceled).Error())
}
