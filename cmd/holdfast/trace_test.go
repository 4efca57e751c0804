package main

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

// read collects a source up to its end or its error.
func read(s func(func(request, error) bool)) (all []request, err error) {
	for r, err := range s {
		if err != nil {
			return all, err
		}
		all = append(all, r)
	}
	return all, nil
}

func TestTraceReadsWholeBlocks(t *testing.T) {
	all, err := read(readTrace("t", strings.NewReader(`
{"timestamp": 0, "input_length": 1024, "output_length": 7, "hash_ids": [1, 2]}

{"timestamp": 250, "input_length": 1025, "output_length": 0, "hash_ids": [1, 2, 18446744073709551615], "turn": 3}
{"timestamp": 251, "input_length": 511, "output_length": 1, "hash_ids": [9]}
  {"timestamp": 251, "input_length": 0, "output_length": 1, "hash_ids": []}`)))
	require.NoError(t, err)
	require.Equal(t, []request{
		{Index: 0, Input: 1024, Output: 7, Blocks: []uint64{1, 2}},
		{Index: 1, At: 250 * time.Millisecond, Input: 1025, Blocks: []uint64{1, 2}},
		{Index: 2, At: 251 * time.Millisecond, Input: 511, Output: 1, Blocks: []uint64{}},
		{Index: 3, At: 251 * time.Millisecond, Output: 1, Blocks: []uint64{}},
	}, all)
}

func TestTraceErrorsNameLineAndField(t *testing.T) {
	good := `{"timestamp": 0, "input_length": 512, "output_length": 7, "hash_ids": [1]}`
	for _, c := range []struct {
		line, says string
		class      error
	}{
		{`{"input_length": 512, "output_length": 7, "hash_ids": [1]}`, "field timestamp: missing", txn.ErrInvalid},
		{`{"timestamp": 0, "output_length": 7, "hash_ids": [1]}`, "field input_length: missing", txn.ErrInvalid},
		{`{"timestamp": 0, "input_length": 512, "hash_ids": [1]}`, "field output_length: missing", txn.ErrInvalid},
		{`{"timestamp": 0, "input_length": 512, "output_length": 7}`, "field hash_ids: 0 ids, want 1", txn.ErrInvalid},
		{`{"timestamp": 0, "input_length": 513, "output_length": 7, "hash_ids": [1]}`, "field hash_ids: 1 ids, want 2", txn.ErrInvalid},
		{`{"timestamp": 0, "input_length": 512, "output_length": 7, "hash_ids": [1, 2]}`, "field hash_ids: 2 ids, want 1", txn.ErrInvalid},
		{`{"timestamp": -1, "input_length": 512, "output_length": 7, "hash_ids": [1]}`, "field timestamp: -1 is negative", txn.ErrInvalid},
		{`{"timestamp": 0, "input_length": -512, "output_length": 7, "hash_ids": [1]}`, "field input_length: -512 is negative", txn.ErrInvalid},
		{`{"timestamp": 0, "input_length": 2000000000, "output_length": 7, "hash_ids": [1]}`, "field input_length: 2000000000 is over the limit", txn.ErrTooLarge},
		{`{"timestamp": 0, "input_length": 512, "output_length": 9223372036854775807, "hash_ids": [1]}`, "field output_length: 9223372036854775807 is over", txn.ErrTooLarge},
		{`{"timestamp": 0, "input_length": 512, "output_length": 9223372036854775808, "hash_ids": [1]}`, "field output_length: a number", txn.ErrInvalid},
		{`{"timestamp": 9223372036854775807, "input_length": 512, "output_length": 7, "hash_ids": [1]}`, "field timestamp: 9223372036854775807 is over", txn.ErrTooLarge},
		{`{"timestamp": 0, "input_length": "512", "output_length": 7, "hash_ids": [1]}`, "field input_length: a string does not fit", txn.ErrInvalid},
		{`{"timestamp": 0, "input_length": 512, "output_length": 7, "hash_ids": [-1]}`, "field hash_ids", txn.ErrInvalid},
		{`{"timestamp": 0, "input_length": 512, "output_length": 7, "hash_ids": 1}`, "field hash_ids: a number does not fit", txn.ErrInvalid},
		{`{"timestamp": 0, "input_length": 512`, "not a JSON object", txn.ErrInvalid},
		{`[1]`, "not a JSON object", txn.ErrInvalid},
		{`null`, "field timestamp: missing", txn.ErrInvalid},
		{good + good, "not a JSON object", txn.ErrInvalid},
		{strings.Repeat(" ", traceLineBytesMax+1), "longer than 4194304 bytes", txn.ErrTooLarge},
	} {
		all, err := read(readTrace("requests.jsonl", strings.NewReader(good+"\n"+c.line+"\n"+good)))
		require.Len(t, all, 1, c.says)
		require.ErrorIs(t, err, c.class, c.says)
		require.ErrorContains(t, err, "trace requests.jsonl: line 2: "+c.says)
	}
}

func TestTraceReadErrorIsNotTheEnd(t *testing.T) {
	good := `{"timestamp": 0, "input_length": 512, "output_length": 7, "hash_ids": [1]}` + "\n"
	broken := errors.New("the disk is gone")
	all, err := read(readTrace("t", io.MultiReader(strings.NewReader(good), iotest.ErrReader(broken))))
	require.Len(t, all, 1)
	require.ErrorIs(t, err, broken)
	require.ErrorIs(t, err, txn.ErrIO)
}

func TestOpenTraceCountsRequests(t *testing.T) {
	line := `{"timestamp": 0, "input_length": 512, "output_length": 7, "hash_ids": [1]}`
	path := filepath.Join(t.TempDir(), "t.jsonl")
	require.NoError(t, os.WriteFile(path, []byte("\n"+line+"\n \n"+line+"\n"+line), 0o600))
	s, c, err := openTrace(path, nil)
	require.NoError(t, err)
	defer c.Close()
	require.Equal(t, 3, s.total)
	require.Equal(t, "t.jsonl", s.name)
	all, err := read(s.requests)
	require.NoError(t, err)
	require.Len(t, all, 3)

	s, c, err = openTrace("-", strings.NewReader(line))
	require.NoError(t, err)
	defer c.Close()
	require.Equal(t, -1, s.total)
	all, err = read(s.requests)
	require.NoError(t, err)
	require.Len(t, all, 1)

	_, _, err = openTrace(filepath.Join(t.TempDir(), "missing"), nil)
	require.ErrorIs(t, err, txn.ErrNotFound)
	_, _, err = openTrace(t.TempDir(), nil)
	require.NoError(t, err, "a directory opens, and cannot be read")
}

func TestFirstCutsASource(t *testing.T) {
	for _, c := range []struct{ n, limit, want int }{{10, 0, 10}, {10, 3, 3}, {10, 10, 10}, {10, 11, 10}} {
		s := generate(1, c.n).first(c.limit)
		all, err := read(s.requests)
		require.NoError(t, err)
		require.Len(t, all, c.want)
		require.Equal(t, c.want, s.total)
	}
	s := generate(1, 10)
	s.total = -1
	require.Equal(t, -1, s.first(3).total)
	for range s.first(3).requests { // the consumer may stop as well
		break
	}
}
