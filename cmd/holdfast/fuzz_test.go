package main

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// carriedOut are the commands that FuzzCommandLine carries out; of the others, which work until they are stopped, or for long, or elsewhere,
// it asks for the help, which is given when all flags before it were understood.
var carriedOut = []string{"inspect", "stats", "verify", "recover", "salvage", "scrub", "retire", "clear", "report", "version"}

// FuzzCommandLine carries out any command line, one argument a line, in a directory that has a database. Whatever it is: it ends, with a
// status that is documented and, if that says that the line was wrong, with a word about what is wrong.
func FuzzCommandLine(f *testing.F) {
	for _, line := range []string{
		"version", "stats\ncheckpoints\n--json", "inspect\ncheckpoints", "inspect\ntree\ncheckpoints", "inspect\nwal\ncheckpoints\n--limit\n3",
		"inspect\nwhy\ncheckpoints\n1,2,3", "inspect\nwhy\ncheckpoints\n@prompt.txt", "inspect\ncheckpoints\ncheckpoints\n--min-size\n1GiB\n--older\n5s", "verify\ncheckpoints\n--rate\n1MiB",
		"recover\ncheckpoints\n--apply\n--yes", "salvage\ncheckpoints\n--yes", "scrub\n--yes\ncheckpoints", "retire\ncheckpoints\n--all\n--yes",
		"clear\n--namespace\nx\ncheckpoints", "report\n--html\nout.html\ncheckpoints", "replay\n--limit\n9999999999999999999", "bench\n--quick\nram\nx",
		"crash\n--seed\n-1", "completion\nbash", "", "\n", "inspect\n--\n-x", "stats\n..", "--json", "help\ninspect\nwhy", "serve\n--http\n:1",
	} {
		f.Add(line)
	}
	whole := filepath.Join(f.TempDir(), "checkpoints")
	require.Zero(f, run(context.Background(), []string{"replay", "--limit", "3", "--page-size", "64", "--state-size", "64", "--dir", whole, "--json"}, nil, io.Discard, io.Discard))
	f.Fuzz(func(t *testing.T, line string) {
		if len(line) > 2000 || strings.ContainsAny(line, "/\x00~$") {
			t.Skip("nothing outside of the directory")
		}
		args := strings.Split(line, "\n")
		if slices.Contains(args, "..") {
			t.Skip("nothing outside of the directory")
		}
		if !slices.Contains(carriedOut, args[0]) {
			args = append(args, "--help")
		}
		dir := t.TempDir()
		t.Chdir(dir)
		require.NoError(t, os.CopyFS("checkpoints", os.DirFS(whole)))
		require.NoError(t, os.WriteFile("prompt.txt", []byte("1, 2, 3"), 0o600))
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		var out, wrong bytes.Buffer
		status := run(ctx, args, strings.NewReader("y\n"), &out, &wrong)
		require.NoError(t, ctx.Err(), "%q does not end", args)
		require.Contains(t, []int{statusOK, statusMismatch, statusUsage, statusDatabase}, status, "%q", args)
		if status == statusUsage {
			require.Contains(t, wrong.String(), "holdfast: ", "%q", args)
		}
	})
}
