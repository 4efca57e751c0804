package fuzz

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const workerVariable = "HOLDFAST_CRASH_WORKER"

// campaign gives one whose workers are this test binary.
func campaign(t *testing.T, parallel int) *Campaign {
	self, err := os.Executable()
	require.NoError(t, err)
	return &Campaign{Worker: []string{self}, Environ: []string{workerVariable + "=1"}, Parallel: parallel, Seed: 1, Scratch: t.TempDir()}
}

// Simulated crashes break no promise.
func TestSimulatedCrashesKeepThePromise(t *testing.T) {
	c := campaign(t, 2)
	c.Cycles = 1200
	totals, found, err := c.Run(context.Background())
	require.NoError(t, err)
	if found != nil {
		path := filepath.Join(os.TempDir(), fmt.Sprintf("crash-%d.json", found.Program.Seed))
		require.NoError(t, os.WriteFile(path, found.Program.JSON(), 0o600))
		require.Failf(t, "a promise was broken", "%s\nholdfast crash --replay %s shows it again", found.Detail, path)
	}
	require.GreaterOrEqual(t, totals.Cycles, int64(1200))
	for _, check := range []string{"listed is restorable", "acknowledged is there", "lookup is the longest", "accounting equals recount", "listed is known"} {
		require.Positive(t, totals.Checks[check], check)
	}
}

// A program in a file means what it meant when it was generated.
func TestProgramsSurviveTheirFile(t *testing.T) {
	for seed := range uint64(50) {
		p := Generate(seed)
		q, err := ParseProgram(p.JSON())
		require.NoError(t, err)
		require.Equal(t, p.JSON(), q.JSON())
	}
	for _, bad := range []string{"", "{}", `{"policy":"never","steps":[{"do":"nothing"}]}`, `{"policy":"never","steps":[{"do":"publish","keep":101}]}`} {
		_, err := ParseProgram([]byte(bad))
		require.Error(t, err, bad)
	}
}

// A power failure keeps what was synced and any part of the rest, and nothing else.
func TestPowerCutKeepsWhatWasSynced(t *testing.T) {
	make := func() *Disk {
		d := NewDisk()
		require.NoError(t, d.mkdir(Root))
		require.NoError(t, d.syncDir("/"))
		h, err := d.create(Root+"/a", false)
		require.NoError(t, err)
		_, err = h.writeAt([]byte("synced"), 0)
		require.NoError(t, err)
		require.NoError(t, h.sync())
		require.NoError(t, d.syncDir(Root))
		_, err = h.writeAt([]byte("SYNCED and not"), 0)
		require.NoError(t, err)
		require.NoError(t, d.rename(Root+"/a", Root+"/b"))
		return d
	}
	n := make().Pending()
	require.Equal(t, 3, n, "a block, a size, a name")
	seen := map[string]bool{}
	for bits := range uint64(1 << n) {
		d := make()
		d.PowerCut(&subset{bits: bits, of: uint64(n)})
		names := d.Files(Top)
		require.Len(t, names, 1)
		b, err := d.readFile(names[0])
		require.NoError(t, err)
		seen[filepath.Base(names[0])+" "+string(b)] = true
	}
	want := map[string]bool{}
	for _, name := range []string{"a ", "b "} {
		for _, content := range []string{"synced", "SYNCED", "SYNCED and not", "synced\x00\x00\x00\x00\x00\x00\x00\x00"} {
			want[name+content] = true
		}
	}
	require.Equal(t, want, seen)
}

// Histories that once broke a promise, by the name of the invariant, break none any more.
func TestFoundHistoriesKeepThePromise(t *testing.T) {
	paths, err := filepath.Glob("testdata/programs/*.json")
	require.NoError(t, err)
	require.NotEmpty(t, paths)
	for _, path := range paths {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".json"), func(t *testing.T) {
			p, err := ReadProgram(path)
			require.NoError(t, err)
			o, err := campaign(t, 1).Replay(context.Background(), p)
			require.NoError(t, err)
			require.Nil(t, o.Violation)
			require.Positive(t, o.Calls)
		})
	}
}
