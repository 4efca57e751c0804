package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"time"

	"github.com/holdfast-db/holdfast/txn"
)

// The format of a trace is that of the traces published with "Mooncake: Trading More Storage for Less Computation"
// (FAST '25): one JSON object a line,
//
//	{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …, 2354]}
//
// with the time in milliseconds, lengths in tokens, and one id for each 512-token block of the input, the last one
// possibly partial. Other fields are left alone. Empty lines are skipped.
const (
	traceLineBytesMax  = 4 << 20 // longest line that is read: about half a million ids, 250 million tokens
	traceTokensMax     = 1 << 30 // longest prompt
	traceTimestampsMax = math.MaxInt64 / int64(time.Millisecond)
)

// traceLine is one line as it is written. Pointers tell an absent field from a zero.
type traceLine struct {
	Timestamp    *int64   `json:"timestamp"`
	InputLength  *int64   `json:"input_length"`
	OutputLength *int64   `json:"output_length"`
	HashIDs      []uint64 `json:"hash_ids"`
}

// openTrace opens a trace file as a source of requests; "-" reads stdin. The file is read as the replay goes on, in
// constant memory. A regular file is read once more beforehand, to count its lines for the progress bar.
//
// Errors wrap txn.ErrInvalid or txn.ErrTooLarge and name file, line and field; errors of the operating system wrap
// txn.ErrIO, and txn.ErrNotFound or txn.ErrPermission where that is what they are.
func openTrace(path string, stdin io.Reader) (source, io.Closer, error) {
	if path == "-" {
		return source{name: "stdin", total: -1, requests: readTrace("stdin", stdin)}, io.NopCloser(nil), nil
	}
	f, err := os.Open(path)
	if err != nil {
		return source{}, nil, fileError("open trace", path, err)
	}
	total, err := countLines(f)
	if err != nil {
		f.Close()
		return source{}, nil, fileError("read trace", path, err)
	}
	return source{name: filepath.Base(path), total: total, requests: readTrace(path, f)}, f, nil
}

// fileError classifies an error of the operating system.
func fileError(doing, path string, err error) error {
	class := txn.ErrIO
	switch {
	case errors.Is(err, os.ErrNotExist):
		class = txn.ErrNotFound
	case errors.Is(err, os.ErrPermission):
		class = txn.ErrPermission
	}
	if pe, ok := errors.AsType[*os.PathError](err); ok {
		err = pe.Err // the path is named already
	}
	return fmt.Errorf("%s %s: %w: %w", doing, path, class, err)
}

// countLines counts the lines of f that are not empty and goes back to its start; -1 for what cannot be read twice.
func countLines(f *os.File) (int, error) {
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return -1, err
	}
	n, inLine := 0, false
	buf := make([]byte, 256<<10)
	for {
		k, err := f.Read(buf)
		for _, c := range buf[:k] {
			switch {
			case c == '\n':
				inLine = false
			case !inLine && c != ' ' && c != '\t' && c != '\r':
				inLine = true
				n++
			}
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return 0, err
		}
	}
	_, err := f.Seek(0, io.SeekStart)
	return n, err
}

// readTrace gives the requests of r, which is called name in errors.
func readTrace(name string, r io.Reader) func(yield func(request, error) bool) {
	return func(yield func(request, error) bool) {
		lines := bufio.NewScanner(r)
		lines.Buffer(make([]byte, 0, 64<<10), traceLineBytesMax)
		index, number := 0, 0
		for lines.Scan() {
			number++
			line := bytes.TrimSpace(lines.Bytes())
			if len(line) == 0 {
				continue
			}
			req, err := parseTraceLine(line)
			if err != nil {
				yield(request{}, fmt.Errorf("trace %s: line %d: %w", name, number, err))
				return
			}
			req.Index = index
			index++
			if !yield(req, nil) {
				return
			}
		}
		switch err := lines.Err(); {
		case errors.Is(err, bufio.ErrTooLong):
			yield(request{}, fmt.Errorf("trace %s: line %d: longer than %d bytes: %w", name, number+1, traceLineBytesMax, txn.ErrTooLarge))
		case err != nil:
			yield(request{}, fileError("read trace", name, err))
		}
	}
}

// parseTraceLine reads one object and keeps the ids of its whole blocks.
func parseTraceLine(line []byte) (request, error) {
	var l traceLine
	if err := json.Unmarshal(line, &l); err != nil {
		if te, ok := errors.AsType[*json.UnmarshalTypeError](err); ok && te.Field != "" {
			return request{}, fmt.Errorf("field %s: a %s does not fit: %w", te.Field, te.Value, txn.ErrInvalid)
		}
		return request{}, fmt.Errorf("not a JSON object (%v): %w", err, txn.ErrInvalid)
	}
	for _, f := range []struct {
		name  string
		value *int64
		limit int64
	}{
		{"timestamp", l.Timestamp, traceTimestampsMax},
		{"input_length", l.InputLength, traceTokensMax},
		{"output_length", l.OutputLength, traceTokensMax},
	} {
		switch {
		case f.value == nil:
			return request{}, fmt.Errorf("field %s: missing: %w", f.name, txn.ErrInvalid)
		case *f.value < 0:
			return request{}, fmt.Errorf("field %s: %d is negative: %w", f.name, *f.value, txn.ErrInvalid)
		case *f.value > f.limit:
			return request{}, fmt.Errorf("field %s: %d is over the limit of %d: %w", f.name, *f.value, f.limit, txn.ErrTooLarge)
		}
	}
	whole, partial := *l.InputLength/blockTokens, *l.InputLength%blockTokens
	want := whole
	if partial > 0 {
		want++
	}
	if got := int64(len(l.HashIDs)); got != want {
		return request{}, fmt.Errorf("field hash_ids: %d ids, want %d for an input_length of %d in blocks of %d: %w",
			got, want, *l.InputLength, blockTokens, txn.ErrInvalid)
	}
	return request{
		At:     time.Duration(*l.Timestamp) * time.Millisecond,
		Input:  *l.InputLength,
		Output: *l.OutputLength,
		Blocks: l.HashIDs[:whole:whole],
	}, nil
}
