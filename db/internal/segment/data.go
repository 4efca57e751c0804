package segment

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// Range is a part of a file, in bytes.
type Range struct{ Offset, Bytes int64 }

// dataRangesMax bounds what Data gives.
const dataRangesMax = 1 << 16

// Data gives the parts of a segment file that have blocks on disk, in order, at most dataRangesMax of them; what lies between them
// was given back. Of a file system that keeps no account of holes it is the whole file. It opens the file by itself and moves
// no position that others use.
func (s *Store) Data(number uint64) ([]Range, error) {
	f, err := os.OpenFile(s.path(number), os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, failure("open", err)
	}
	defer func() { _ = f.Close() }() // nothing was written through it
	fi, err := f.Stat()
	if err != nil {
		return nil, failure("stat", err)
	}
	var out []Range
	for at := int64(0); at < fi.Size() && len(out) < dataRangesMax; {
		from, err := f.Seek(at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break // nothing but a hole behind at
		}
		if err != nil {
			return []Range{{0, fi.Size()}}, nil
		}
		to, err := f.Seek(from, unix.SEEK_HOLE)
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, fmt.Errorf("%w: %w", classOf(err), err)
		}
		out = append(out, Range{from, to - from})
		at = to
	}
	return out, nil
}
