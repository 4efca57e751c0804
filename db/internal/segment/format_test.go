package segment

import (
	"encoding/hex"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

var update = flag.Bool("update", false, "rewrite the files in testdata")

// The bytes of version 1, as a dump in which a star stands for repetitions of a line.
func TestFormatVersion1IsGolden(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, func(o *Options) { o.Floor = 6 })
	text := func(n uint64, s string) Page {
		return Page{Key: keyOf(n), Parent: keyOf(n - 1), Rank: uint16(n), Bytes: []byte(s)}
	}
	block := text(3, strings.Repeat("holdfast", 4096/8)+"!")
	block.Parent = txn.Key{}
	places := write(t, s, Shared, text(1, "first"), text(2, strings.Repeat("second", 11)), block)
	places = append(places, write(t, s, Shared, text(4, "fourth"))...)
	require.NoError(t, s.Close())
	image, err := os.ReadFile(s.path(7))
	require.NoError(t, err)

	var dump strings.Builder
	last, starred := "", false
	for line := range strings.Lines(hex.Dump(image)) {
		again := line[8:] == last
		if !again {
			dump.WriteString(line)
		} else if !starred {
			dump.WriteString("*\n")
		}
		last, starred = line[8:], again
	}
	golden := filepath.Join("testdata", "segment-v1.txt")
	if *update {
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(golden, []byte(dump.String()), 0o644))
	}
	want, err := os.ReadFile(golden)
	require.NoError(t, err)
	require.Equal(t, string(want), dump.String())
	require.Equal(t, []txn.Placement{
		{Segment: 7, Offset: 16384, Stored: 5, Codec: 1, Checksum: places[0].Checksum},
		{Segment: 7, Offset: 16448, Stored: 66, Codec: 1, Checksum: places[1].Checksum},
		{Segment: 7, Offset: 8192, Stored: 4097, Codec: 1, Checksum: places[2].Checksum},
		{Segment: 7, Offset: 24576, Stored: 6, Codec: 1, Checksum: places[3].Checksum},
	}, places)
}

func TestNamesOfSegments(t *testing.T) {
	s := &Store{dir: "data"}
	for _, n := range []uint64{1, 42, 1<<63 - 1} {
		got, ok := parseName(filepath.Base(s.path(n)))
		require.True(t, ok)
		require.Equal(t, n, got)
	}
	for _, name := range []string{
		"", ".seg", "1.seg", "00000000000000000000.seg", "09223372036854775808.seg", "99999999999999999999.seg",
		"00000000000000000001.SEG", "00000000000000000001.seg~", "+0000000000000000001.seg", "0000000000000000000１.seg",
	} {
		_, ok := parseName(name)
		require.False(t, ok, name)
	}
}
