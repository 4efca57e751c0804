package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/db"
	"github.com/holdfast-db/holdfast/txn"
)

// asJSON runs a command that must end with the status, and gives what it prints with --json.
func asJSON(t *testing.T, status int, into any, args ...string) {
	t.Helper()
	got, stdout, stderr := holdfast(t, append(args, "--json")...)
	require.Equal(t, status, got, "%v\nstdout: %s\nstderr: %s", args, stdout, stderr)
	d := json.NewDecoder(strings.NewReader(stdout))
	require.NoError(t, d.Decode(into), stdout)
	require.False(t, d.More(), "one object and nothing else")
}

// crowded gives a directory with two namespaces, in one of which the disk was full for a while.
func crowded(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "db")
	replayJSON(t, statusOK, "--limit", "60", "--dir", dir, "--disk", "3MiB")
	replayJSON(t, statusOK, "--limit", "10", "--dir", dir, "--model", "attention")
	return dir
}

// everyCommand walks the commands that do something.
func everyCommand(fn func(path []string, c *cobra.Command)) {
	var walk func(path []string, c *cobra.Command)
	walk = func(path []string, c *cobra.Command) {
		fn(path, c)
		for _, child := range c.Commands() {
			if !child.Hidden && child.Name() != "help" && child.Name() != "completion" {
				walk(append(path[:len(path):len(path)], child.Name()), child)
			}
		}
	}
	walk(nil, newRootCommand())
}

// Every command explains itself in 80 columns: what it does, with examples that begin with its name, how it can end, and that it can
// print JSON.
func TestEveryCommandExplainsItself(t *testing.T) {
	seen := 0
	everyCommand(func(path []string, c *cobra.Command) {
		seen++
		status, stdout, stderr := holdfast(t, append(path, "--help")...)
		require.Equal(t, statusOK, status)
		require.Empty(t, stderr)
		require.Contains(t, stdout, "Examples:\n  ", "%v", path)
		require.Contains(t, stdout, "holdfast "+strings.Join(path, " "), "%v", path)
		require.Contains(t, stdout, "Exit status:\n  0 ", "%v", path)
		require.Contains(t, stdout, "--json", "%v", path)
		for line := range strings.Lines(stdout) {
			require.LessOrEqual(t, len([]rune(strings.TrimRight(line, "\n"))), 80, "%v: %s", path, line)
		}
	})
	require.Greater(t, seen, 25)
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		status, stdout, _ := holdfast(t, "completion", shell)
		require.Equal(t, statusOK, status)
		require.Contains(t, stdout, "holdfast")
	}
	dir := filled(t)
	status, stdout, _ := holdfast(t, "__complete", "inspect", "checkpoint", dir, "")
	require.Equal(t, statusOK, status)
	require.Contains(t, stdout, "\tcurrent at ", "generations are completed")
	_, stdout, _ = holdfast(t, "__complete", "inspect", "checkpoints", "--state", "")
	require.Contains(t, stdout, "superseded")
}

// lookingCommands look at a directory and end with 0.
var lookingCommands = [][]string{
	{"inspect"}, {"inspect", "namespaces"}, {"inspect", "checkpoints"}, {"inspect", "tree"}, {"inspect", "tree", "--gone"}, {"inspect", "wal"},
	{"inspect", "segments"}, {"inspect", "index", "--entries"}, {"inspect", "history"}, {"inspect", "leases"}, {"stats"}, {"top"},
}

// Given a directory that nobody has open, then every command that looks at it answers for people, in as many columns as there are and
// without a colour, and as JSON, says how it looked, and changes nothing.
func TestLookingAtADirectory(t *testing.T) {
	dir := crowded(t)
	before := hashTree(t, dir)
	for _, width := range []int{80, 160} {
		t.Setenv("COLUMNS", strconv.Itoa(width))
		for _, command := range lookingCommands {
			status, stdout, stderr := holdfast(t, append(command, dir)...)
			require.Equal(t, statusOK, status, "%v: %s", command, stderr)
			require.NotContains(t, stdout, "\x1b", "no colour where there is no terminal")
			require.Contains(t, stdout, "opened read-only", "%v", command)
			for line := range strings.Lines(stdout) {
				require.LessOrEqual(t, text.StringWidth(strings.TrimRight(line, "\n")), width, "%v: %s", command, line)
			}
		}
	}
	for _, command := range lookingCommands {
		var r struct {
			Directory string
			Live      *bool
		}
		asJSON(t, statusOK, &r, append(command, dir)...)
		require.NotNil(t, r.Live, "%v", command)
		require.False(t, *r.Live)
		require.NotEmpty(t, r.Directory)
	}
	require.Equal(t, before, hashTree(t, dir))

	var list struct {
		Matching    int
		Checkpoints []db.CheckpointInfo
	}
	asJSON(t, statusOK, &list, "inspect", "checkpoints", "--limit", "1000", dir)
	var stats struct{ Stats map[string]any }
	asJSON(t, statusOK, &stats, "stats", dir)
	require.EqualValues(t, stats.Stats["checkpoints"], len(list.Checkpoints))
	require.Contains(t, stats.Stats, "ram_capacity")
	require.Contains(t, stats.Stats, "lookups_partial")
	sizes := int64(0)
	asJSON(t, statusOK, &list, "inspect", "checkpoints", "--sort", "size", "--min-size", "64KiB", "--older", "0s", "--limit", "5", dir)
	require.Len(t, list.Checkpoints, 5)
	for i, k := range list.Checkpoints {
		require.GreaterOrEqual(t, k.Bytes, int64(64<<10))
		require.True(t, i == 0 || k.Bytes <= sizes)
		sizes = k.Bytes
	}
	g := list.Checkpoints[0]
	status, stdout, _ := holdfast(t, "inspect", "checkpoint", dir, g.Generation.String()[:10])
	require.Equal(t, statusOK, status)
	require.Contains(t, stdout, g.Generation.String())
	var m struct{ Manifest db.ManifestInfo }
	asJSON(t, statusOK, &m, "inspect", "checkpoint", "--limit", "16384", dir, g.Generation.String())
	require.EqualValues(t, m.Manifest.CheckpointInfo.Pages, len(m.Manifest.Pages))
	var trees struct{ Trees []treeRoot }
	asJSON(t, statusOK, &trees, "inspect", "tree", dir)
	require.Len(t, trees.Trees, 2, "a tree for each namespace")
}

// What cannot be looked at is told apart by its exit status.
func TestLookingFailsWithItsStatus(t *testing.T) {
	dir := filled(t)
	for _, c := range []struct {
		status int
		says   string
		args   []string
	}{
		{statusMismatch, "not found", []string{"stats", filepath.Join(dir, "nowhere")}},
		{statusMismatch, "no checkpoint ffffffff", []string{"inspect", "checkpoint", dir, "ffffffff"}},
		{statusMismatch, "no checkpoint ffffffff", []string{"inspect", "why", dir, "ffffffff"}},
		{statusMismatch, "no namespace ffff", []string{"inspect", "tree", "--namespace", "ffff", dir}},
		{statusUsage, "--limit 0", []string{"inspect", "checkpoints", "--limit", "0", dir}},
		{statusUsage, "--sort", []string{"inspect", "checkpoints", "--sort", "colour", dir}},
		{statusUsage, "state", []string{"inspect", "checkpoints", "--state", "lost", dir}},
		{statusUsage, "at least 4", []string{"inspect", "checkpoints", "--namespace", "1", dir}},
		{statusUsage, "no number", []string{"inspect", "why", dir, "one,two"}},
		{statusUsage, "no such file", []string{"inspect", "why", dir, "@" + filepath.Join(dir, "nowhere")}},
		{statusUsage, "--interval", []string{"top", "--interval", "1ms", dir}},
		{statusUsage, "--html", []string{"report", dir}},
		{statusUsage, "--namespace or --all", []string{"clear", dir}},
		{statusUsage, "generations, or flags", []string{"retire", dir}},
		{statusUsage, "generations, or flags", []string{"retire", "--older", "5s", dir, "abcd"}},
		{statusUsage, "want 1…1024", []string{"crash", "--parallel", "0"}},
	} {
		status, _, stderr := holdfast(t, c.args...)
		require.Equal(t, c.status, status, "%v: %s", c.args, stderr)
		require.Contains(t, stderr, c.says, "%v", c.args)
	}
}

// Given a process that has the database open and serves the socket, then every command asks it and says so; what would change the
// database is refused, naming who has it. Without the socket nothing can be looked at, and the error says what would help.
func TestLookingAtADatabaseInUse_B40(t *testing.T) {
	dir := filled(t)
	d, err := db.Open(t.Context(), dir, db.Options{RAMBytes: 16 << 20, Introspection: true, Logger: operatorLog(os.Stderr)})
	require.NoError(t, err)
	before := hashTree(t, dir)
	for _, command := range lookingCommands {
		status, stdout, stderr := holdfast(t, append(command, dir)...)
		require.Equal(t, statusOK, status, "%v: %s", command, stderr)
		require.Contains(t, stdout, fmt.Sprintf("in use by pid %d", os.Getpid()), "%v", command)
	}
	var s struct {
		Live bool
		PID  int
	}
	asJSON(t, statusOK, &s, "stats", dir)
	require.True(t, s.Live)
	require.Equal(t, os.Getpid(), s.PID)
	status, stdout, _ := holdfast(t, "top", "--frames", "2", "--interval", "100ms", dir)
	require.Equal(t, statusOK, status)
	require.Equal(t, 2, strings.Count(stdout, "holdfast top"))
	for _, command := range [][]string{{"clear", "--all", "--yes"}, {"retire", "--state", "listed", "--yes"}, {"clear", "--all", "--dry-run"}, {"scrub", "--yes"}} {
		status, _, stderr := holdfast(t, append(command, dir)...)
		require.Equal(t, statusDatabase, status, "%v", command)
		require.Contains(t, stderr, fmt.Sprintf("in use by pid %d", os.Getpid()), "%v", command)
	}
	require.Equal(t, before, hashTree(t, dir))
	_, err = d.Close(context.Background())
	require.NoError(t, err)

	d, err = db.Open(t.Context(), dir, db.Options{RAMBytes: 16 << 20, Logger: operatorLog(os.Stderr)})
	require.NoError(t, err)
	status, _, stderr := holdfast(t, "stats", dir)
	require.Equal(t, statusDatabase, status)
	require.Contains(t, stderr, "Options.Introspection")
	_, err = d.Close(context.Background())
	require.NoError(t, err)
}

// hashTree digests every file of a directory but the socket and the lock.
func hashTree(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	require.NoError(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(path)
		out[strings.TrimPrefix(path, dir)] = fmt.Sprintf("%x", sha256.Sum256(b))
		return err
	}))
	return out
}

// Given two namespaces and files of somebody else's: without a confirmation and without a terminal nothing is changed; a dry run says how
// many checkpoints and bytes of one namespace would go; the real run removes exactly those; the other namespace and the foreign files
// are as they were, and a second run has nothing to do.
func TestClearIsExactAndAsks_B40(t *testing.T) {
	dir := crowded(t)
	foreign := []string{filepath.Join(dir, "somebody-elses.txt"), filepath.Join(dir, "data", "somebody-elses.bin")}
	for _, name := range foreign {
		require.NoError(t, os.WriteFile(name, []byte(name), 0o600))
	}
	var o overviewResult
	asJSON(t, statusOK, &o, "inspect", dir)
	require.Len(t, o.Namespaces, 2)
	gone, kept := o.Namespaces[0], o.Namespaces[1]
	listOf := func(ns txn.Key) (gens []string) {
		var l struct{ Checkpoints []db.CheckpointInfo }
		asJSON(t, statusOK, &l, "inspect", "checkpoints", "--limit", "100000", "--namespace", ns.String(), dir)
		for _, k := range l.Checkpoints {
			gens = append(gens, k.Generation.String())
		}
		return gens
	}
	keptBefore := listOf(kept.ID)
	before := hashTree(t, dir)

	status, _, stderr := holdfast(t, "clear", "--namespace", gone.ID.String(), dir)
	require.Equal(t, statusUsage, status)
	require.Contains(t, stderr, "nothing was changed: --yes")
	var plan giveUpResult
	asJSON(t, statusOK, &plan, "clear", "--dry-run", "--namespace", gone.ID.String(), dir)
	require.EqualValues(t, gone.Listed, plan.Planned.Checkpoints)
	require.Positive(t, plan.Planned.DiskBytes)
	require.Zero(t, plan.Done)
	require.Equal(t, before, hashTree(t, dir), "nothing is changed unasked, nor by a dry run")

	var done giveUpResult
	asJSON(t, statusOK, &done, "clear", "--yes", "--namespace", gone.ID.String(), dir)
	require.Equal(t, plan.Planned, done.Planned)
	require.Equal(t, plan.Planned.Checkpoints, done.Done.Checkpoints)
	require.Equal(t, plan.Planned.DiskBytes, done.Done.DiskBytes)
	require.Empty(t, listOf(gone.ID))
	require.Equal(t, keptBefore, listOf(kept.ID))
	after := hashTree(t, dir)
	for _, name := range foreign {
		name = strings.TrimPrefix(name, dir)
		require.Equal(t, before[name], after[name])
	}
	status, _, stderr = holdfast(t, "verify", dir)
	require.Equal(t, statusOK, status, stderr)
	status, stdout, _ := holdfast(t, "clear", "--yes", "--namespace", gone.ID.String(), dir)
	require.Equal(t, statusOK, status)
	require.Contains(t, stdout, "nothing to do")
	asJSON(t, statusOK, &done, "clear", "--yes", "--all", dir)
	require.Equal(t, len(keptBefore), done.Done.Checkpoints)
}

// Given checkpoints chosen by digits or by flags, then exactly those go, with as many bytes as were announced.
func TestRetireIsExactAndAsks_B40(t *testing.T) {
	dir := filled(t)
	var l struct{ Checkpoints []db.CheckpointInfo }
	asJSON(t, statusOK, &l, "inspect", "checkpoints", "--limit", "1000", dir)
	all := slices.Clone(l.Checkpoints) // what is decoded next goes into the same memory
	before := hashTree(t, dir)
	status, _, stderr := holdfast(t, "retire", dir, all[0].Generation.String()[:10])
	require.Equal(t, statusUsage, status)
	require.Contains(t, stderr, "--yes")
	require.Equal(t, before, hashTree(t, dir))
	var r giveUpResult
	asJSON(t, statusOK, &r, "retire", "--yes", dir, all[0].Generation.String()[:10], all[1].Generation.String()[:10])
	require.Equal(t, []string{all[0].Generation.String(), all[1].Generation.String()}, r.Targets)
	require.Equal(t, 2, r.Done.Checkpoints)
	require.Equal(t, r.Planned.DiskBytes, r.Done.DiskBytes)
	asJSON(t, statusOK, &l, "inspect", "checkpoints", "--limit", "1000", dir)
	require.Len(t, l.Checkpoints, len(all)-2)
	status, stdout, _ := holdfast(t, "inspect", "why", dir, all[0].Generation.String()[:10])
	require.Equal(t, statusOK, status)
	require.Contains(t, stdout, "retired: requested")
	large := 0
	for _, k := range l.Checkpoints {
		if k.Bytes >= 100<<10 {
			large++
		}
	}
	require.Positive(t, large)
	asJSON(t, statusOK, &r, "retire", "--yes", "--min-size", "100KiB", dir)
	require.Equal(t, large, r.Done.Checkpoints)
	status, stdout, _ = holdfast(t, "retire", "--yes", "--min-size", "1GiB", dir)
	require.Equal(t, statusOK, status)
	require.Contains(t, stdout, "nothing to do")
	status, _, _ = holdfast(t, "verify", dir)
	require.Equal(t, statusOK, status)
}

// Tokens come as an argument, from a file and from standard input, alone or as parts, and an identity that nothing was published under
// is told by the fields that differ.
func TestWhyOnTheCommandLine_OBS02(t *testing.T) {
	dir := filled(t)
	kinds := func(args ...string) (kinds []db.CauseKind) {
		var w struct{ Causes []db.Cause }
		asJSON(t, statusOK, &w, append([]string{"inspect", "why", dir}, args...)...)
		for _, c := range w.Causes {
			kinds = append(kinds, c.Kind)
		}
		return kinds
	}
	file := filepath.Join(t.TempDir(), "tokens")
	for _, content := range []string{"1,2,3", "1 2\n3\n", "[1,2,3]", `[{"tokens":[1,2,3]}]`, `[{"tokens":[1]},{"tokens":[2,3],"content":"` + strings.Repeat("ab", 32) + `"}]`} {
		require.NoError(t, os.WriteFile(file, []byte(content), 0o600))
		require.Equal(t, []db.CauseKind{db.CauseNeverPublished}, kinds("@"+file), content)
		var out, errs bytes.Buffer
		require.Equal(t, statusOK, run(t.Context(), []string{"inspect", "why", dir, "-"}, strings.NewReader(content), &out, &errs), errs.String())
		require.Contains(t, out.String(), "miss  0 of 3 tokens")
	}
	require.Equal(t, []db.CauseKind{db.CauseNeverPublished}, kinds("7,"))
	var o overviewResult
	asJSON(t, statusOK, &o, "inspect", dir)
	id := o.Namespaces[0].Identity
	id.Adapter = "unversioned:lora"
	b, err := json.Marshal(id)
	require.NoError(t, err)
	identity := filepath.Join(t.TempDir(), "identity.json")
	require.NoError(t, os.WriteFile(identity, b, 0o600))
	require.Equal(t, []db.CauseKind{db.CauseNoNamespace}, kinds("1,2,3", "--identity", identity))
	status, _, stderr := holdfast(t, "inspect", "why", dir, "1,2,3", "--identity", file)
	require.Equal(t, statusUsage, status)
	require.Contains(t, stderr, "--identity")
}

// A conversation is a column, branches are indented, and what lost its predecessors hangs from the nearest one that is there.
func TestTreeOfCheckpoints(t *testing.T) {
	g := func(n byte) db.Generation { return db.Generation{0: n, 31: 1} }
	ns := db.NamespaceInfo{ID: txn.Key{0xaa}, Identity: db.Identity{Model: "m\x1b[31m", Engine: "e", Layout: db.Layout{Ranks: 2}}}
	node := func(n, previous byte, offset int64, state string) db.CheckpointInfo {
		k := db.CheckpointInfo{Generation: g(n), Namespace: ns.ID, Offset: offset, State: state, Tier: "disk", Kind: "prompt", Bytes: offset << 10, Durable: true, Published: txn.LSN(n)}
		if previous > 0 {
			k.Previous = g(previous)
		}
		return k
	}
	all := []db.CheckpointInfo{node(1, 0, 512, "current"), node(2, 1, 1024, "superseded"), node(5, 4, 4096, "current"), node(6, 1, 2048, "retired"), node(7, 99, 512, "current")}
	history := []db.Retirement{
		{Generation: g(6), Namespace: ns.ID, Reason: "requested"},
		{Generation: g(4), Previous: g(3), Namespace: ns.ID, Offset: 3072, Reason: "disk pressure", Kind: "prompt"},
		{Generation: g(3), Previous: g(2), Namespace: ns.ID, Offset: 2048, Reason: "disk pressure", Kind: "prompt"},
	}
	draw := func(gone bool) string {
		var b bytes.Buffer
		(&screen{Writer: &b, width: 80}).trees(plant([]db.NamespaceInfo{ns}, all, history, gone), 100)
		return b.String()
	}
	require.Equal(t, `namespace aa000000  m·[31m, e, 2 ranks
├─● 01000000       512 tokens            512 KiB  disk    
│ ├─○ 02000000     1,024 tokens     +512     1 MiB  disk    
│ │ ● 05000000     4,096 tokens   +3,072     4 MiB  disk      after 2 gone
│ └─× 06000000     2,048 tokens   +1,536     2 MiB  requested
└─● 07000000       512 tokens            512 KiB  disk      after 1 gone
`, draw(false))
	require.Equal(t, 2, strings.Count(draw(true), "disk pressure"))
}
