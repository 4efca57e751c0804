package segment

import (
	"encoding/binary"
	"encoding/hex"
	"flag"
	"os"
	"path/filepath"
	"slices"
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

// Beside headers, descriptors and pages a segment holds zeros, whatever staging memory and the caller's held before.
func TestPaddingIsZero(t *testing.T) {
	for _, aligned := range []bool{true, false} {
		s := open(t, t.TempDir(), func(o *Options) { o.SegmentBytes = 64 << 20 })
		dirty := pageOf(1, laneStagingBytes-3*int(blockBytes), false) // through staging, all of it
		pages := []Page{pageOf(2, 4097, aligned), pageOf(3, 70_001, aligned), pageOf(4, 5, aligned), pageOf(5, 130, aligned)}
		write(t, s, Own, dirty)
		write(t, s, Own, pages...)
		require.NoError(t, s.Seal(t.Context()))
		image, err := os.ReadFile(s.path(1))
		require.NoError(t, err)
		for off := blockBytes; off < int64(len(image)); {
			d, err := decodeDescriptor(image[off:], s.origin(1, 0), off)
			require.NoError(t, err)
			clear(image[off:][:descriptorBytes(len(d.entries))])
			for _, e := range d.entries {
				clear(image[e.Place.Offset:][:e.Place.Stored])
			}
			off = d.end
		}
		require.True(t, zero(image[blockBytes:]))
	}
}

// Every rule of the format refuses a descriptor that breaks it, also under a checksum that holds.
func TestDescriptorRules(t *testing.T) {
	o := origin{database: database, number: 1, class: Own}
	const at = 3 * blockBytes
	descriptorOf := func(sizes ...int64) []byte {
		entries := make([]Entry, len(sizes))
		for i, n := range sizes {
			entries[i] = Entry{Key: keyOf(uint64(i + 1)), Logical: n, Place: txn.Placement{Stored: n, Codec: txn.CodecNone, Checksum: 7}}
		}
		b := make([]byte, descriptorBytes(len(entries)))
		encodeDescriptor(b, o, 1, at, entries, layOut(1, at, entries))
		return b
	}
	_, err := decodeDescriptor(descriptorOf(8192, 5000, 100, 63), o, at)
	require.NoError(t, err)
	_, err = decodeDescriptor(descriptorOf(100, 8192), o, at)
	require.ErrorIs(t, err, txn.ErrCorrupt, "small before large")
	_, err = decodeDescriptor(descriptorOf(8192), o, at+blockBytes)
	require.ErrorIs(t, err, txn.ErrCorrupt, "at another offset")
	long := descriptorOf(slices.Repeat([]int64{64}, 39)...)
	require.Len(t, long, 2*int(blockBytes))
	for _, n := range []int{0, 1, 4095, 4096, 8191} {
		_, err = decodeDescriptor(long[:n], o, at)
		require.ErrorIs(t, err, txn.ErrCorrupt, "%d bytes of it", n)
	}
	const entry = prefixBytes + entryBytes // the second
	for _, c := range []struct {
		name  string
		off   int
		value uint64
		bytes int
	}{
		{"magic", 0, 'X', 1}, {"version", 4, 2, 2}, {"class zero", 6, 0, 1}, {"class four", 6, 4, 1}, {"reserved", 7, 1, 1},
		{"number", 8, 2, 8}, {"database", 16, 1, 1}, {"sequence", 32, 0, 8}, {"offset", 40, uint64(at - blockBytes), 8}, {"payload", 48, 4096, 8},
		{"no pages", 56, 0, 4}, {"more pages than there are", 56, 5, 4}, {"fewer", 56, 3, 4}, {"far too many", 56, 1<<32 - 1, 4}, {"reserved", 60, 1, 4},
		{"zero key", entry, 0, 32}, {"zero codec", entry + 66, 0, 1}, {"unknown codec", entry + 66, 3, 1}, {"zstd that saves nothing", entry + 66, 2, 1},
		{"reserved", entry + 67, 1, 1}, {"reserved", entry + 71, 1, 1}, {"no bytes", entry + 72, 0, 16}, {"logical", entry + 72, 4999, 8},
		{"stored", entry + 80, 5001, 8}, {"stored over 1 GiB", entry + 80, 1<<30 + 1, 8}, {"negative", entry + 80, 1 << 63, 8},
		{"place", entry + 88, uint64(at + 4*blockBytes), 8}, {"rest", prefixBytes + 4*entryBytes, 1, 1},
	} {
		b := descriptorOf(8192, 5000, 100, 63)
		var v [32]byte
		binary.LittleEndian.PutUint64(v[:], c.value)
		copy(b[c.off:], v[:c.bytes])
		putSum(b)
		_, err := decodeDescriptor(b, o, at)
		require.ErrorIs(t, err, txn.ErrCorrupt, "%s at %d", c.name, c.off)
	}
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
