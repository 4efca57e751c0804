package db

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Given a directory that was filled and left by a killed process, with one foreign file among the segments and one checkpoint that
// was found again last, when it is opened three times, then the accounts are the same each time and those of the files, a
// smaller budget is kept from the first moment on, and what was used last is not the first to go.
func TestAccountsAndRecencySurviveACrash_B19_FSA08_FSA10(t *testing.T) {
	dir, ctx := tempDir(t), context.Background()
	ns := testNamespace(t, 1, Group{Name: "attention:kv", Kind: Attention, PageBytes: 64 << 10, PageTokens: 16})
	d := openDB(t, dir, Options{})
	var seqs []*Sequence
	for i := range 20 {
		seqs = append(seqs, seqOf(t, ns, tokens(uint64(i+1), 64)))
		publish(t, d, seqs[i], 64)
	}
	require.EqualValues(t, 64, lookupAt(t, d, seqs[0]))
	_, err := d.curator.work(ctx)
	require.NoError(t, err)
	used := stats(t, d).DiskBytes
	require.EqualValues(t, 20*4*64<<10, used)
	crash(t, d)
	foreign := filepath.Join(dir, dataName, "00000000000000000001.seg.tmp")
	require.NoError(t, os.WriteFile(foreign, []byte("not yours"), 0))
	for range 3 {
		d = openDB(t, dir, Options{})
		s := stats(t, d)
		require.Equal(t, used, s.DiskBytes)
		require.InEpsilon(t, used, s.SegmentBytes, 0.05, "descriptors and headers are the rest")
		crash(t, d)
	}
	d = openDB(t, dir, Options{DiskBytes: used / 2})
	require.NoError(t, d.disk.trim(ctx))
	idle(d)
	require.LessOrEqual(t, stats(t, d).DiskBytes, used/2)
	require.EqualValues(t, 64, lookupAt(t, d, seqs[0]), "found last, so not the first to go")
	require.Zero(t, lookupAt(t, d, seqs[1]))
	require.FileExists(t, foreign)
}

// docs/recovery.md tells every kind of damage that is tested.
func TestEveryKindOfDamageIsDocumented(t *testing.T) {
	b, err := os.ReadFile(filepath.Join("..", "docs", "recovery.md"))
	require.NoError(t, err)
	for _, k := range damageKinds {
		name, _, _ := strings.Cut(k.name, "_")
		require.Contains(t, string(b), "\n| "+name+" | ", "docs/recovery.md")
	}
}
