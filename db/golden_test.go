package db

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// Golden directories, one of each released format and way of ending. They are written once and then kept as they are:
// HOLDFAST_GOLDEN=1 writes those that are not there.
var goldenDirectories = []struct {
	name  string
	found [2]int64 // of the two sequences
	end   func(testing.TB, *DB)
}{
	{"format-1-closed", [2]int64{100, 64}, func(t testing.TB, d *DB) { closeDB(t, d) }},
	{"format-1-killed", [2]int64{48, 64}, crash}, // the checkpoint at 100 was in RAM only
}

func goldenNamespace(t testing.TB) *Namespace {
	return testNamespace(t, 2,
		Group{Name: "attention:kv", Kind: Attention, PageBytes: 300, PageTokens: 16},
		Group{Name: "attention:window", Kind: Attention, PageBytes: 5000, PageTokens: 32, WindowTokens: 40},
		Group{Name: "recurrent:state", Kind: Recurrent, PageBytes: 700, Pages: 1})
}

func goldenSequences(t testing.TB) [2]*Sequence {
	ns := goldenNamespace(t)
	return [2]*Sequence{seqOf(t, ns, tokens(1, 100)), seqOf(t, ns, tokens(2, 64))}
}

// A directory of every released format is verified, read, opened, used and closed by this build, and finds what was written then.
func TestGoldenDirectories(t *testing.T) {
	ctx := context.Background()
	for _, g := range goldenDirectories {
		t.Run(g.name, func(t *testing.T) {
			golden := filepath.Join("testdata", "golden", g.name)
			if _, err := os.Stat(golden); err != nil && os.Getenv("HOLDFAST_GOLDEN") != "" {
				writeGolden(t, golden, g.end)
			}
			dir := filepath.Join(tempDir(t), "db")
			require.NoError(t, copyTree(golden, dir))
			require.Empty(t, damageOf(verifyDir(t, dir)))
			seqs := goldenSequences(t)
			for _, readOnly := range []bool{true, false, false} {
				d := openDB(t, dir, Options{ReadOnly: readOnly})
				require.Equal(t, g.found, [2]int64{restoreAt(t, d, seqs[0]), restoreAt(t, d, seqs[1])})
				l, err := d.GetLoose(ctx, nil, goldenNamespace(t), []byte("k"))
				require.NoError(t, err)
				if g.found[0] == 100 || l.Found() > 0 { // a crash may lose it
					require.Equal(t, []byte("loose"), l.Bytes(0))
				}
				l.Release()
				checkCatalogue(t, d)
				closeDB(t, d)
			}
			d := openDB(t, dir, Options{})
			publish(t, d, seqs[0], 100)
			longer, err := seqs[1].Fork(64)
			require.NoError(t, err)
			require.NoError(t, longer.Append(tokens(3, 64)))
			publish(t, d, longer, 128)
			closeDB(t, d)
			require.Empty(t, verifyDir(t, dir).Findings)
			d = openDB(t, dir, Options{})
			require.EqualValues(t, 100, restoreAt(t, d, seqs[0]))
			require.EqualValues(t, 128, restoreAt(t, d, longer))
		})
	}
}

func writeGolden(t testing.TB, golden string, end func(testing.TB, *DB)) {
	dir := filepath.Join(tempDir(t), "db")
	d := openDB(t, dir, Options{WritePolicy: OnEvict})
	seqs := goldenSequences(t)
	publish(t, d, seqs[0], 48, func(r *PublishRequest) { r.Durable, r.Meta, r.Request = true, []byte("meta"), "request" })
	publish(t, d, seqs[1], 64, func(r *PublishRequest) { r.Durable = true })
	g, _ := publish(t, d, seqs[1], 32, func(r *PublishRequest) { r.Durable = true })
	require.NoError(t, d.PutLoose(context.Background(), goldenNamespace(t), LoosePage{Key: []byte("k"), Bytes: []byte("loose")}))
	publish(t, d, seqs[0], 100)
	require.NoError(t, d.Delete(context.Background(), g))
	idle(d)
	end(t, d)
	require.NoError(t, os.Remove(filepath.Join(dir, lockName))) // names a process and a machine, and is made anew
	require.NoError(t, copyTree(dir, golden))
}
