package main

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/holdfast-db/holdfast/txn"
)

func TestSizes(t *testing.T) {
	for text, want := range map[string]byteSize{
		"0": 0, "1": 1, "4096": 4096, "4KiB": 4096, "4 KiB": 4096, "4kib": 4096, "64KiB": 64 << 10,
		"1.5GiB": 3 << 29, "24GiB": 24 << 30, "24G": 24e9, "64KB": 64e3, "2TiB": 2 << 40,
	} {
		var b byteSize
		require.NoError(t, b.Set(text), text)
		require.Equal(t, want, b, text)
	}
	for text, class := range map[string]error{
		"": txn.ErrInvalid, "-1": txn.ErrInvalid, "x": txn.ErrInvalid, "4furlongs": txn.ErrInvalid, "1e3": txn.ErrInvalid, "NaN": txn.ErrInvalid,
		"8EiB": txn.ErrTooLarge, "10EB": txn.ErrTooLarge, "99EiB": txn.ErrInvalid,
	} {
		b := byteSize(7)
		require.ErrorIs(t, b.Set(text), class, text)
		require.Equal(t, byteSize(7), b, "an error changes nothing")
	}
}

func TestSizesReadBackWhatTheyWrite(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		// Sizes of up to 2^53 bytes are exact in every form; larger ones in the binary units that divide them.
		b := byteSize(rapid.Int64Range(0, 1<<53).Draw(t, "bytes"))
		if rapid.Bool().Draw(t, "round") {
			b <<= 9
		}
		var back byteSize
		require.NoError(t, back.Set(b.String()))
		require.Equal(t, b, back)
	})
}

func TestSizesForPeople(t *testing.T) {
	for n, want := range map[int64]string{
		0: "0 B", 64: "64 B", 1023: "1023 B", 4096: "4 KiB", 65536: "64 KiB", 1 << 30: "1 GiB", 1477468749: "1.38 GiB", 100 << 20: "100 MiB", 99837542: "95.2 MiB",
	} {
		require.Equal(t, want, humanBytes(n))
	}
}
