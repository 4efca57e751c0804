//go:build !linux

package segment

import (
	"errors"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// The fallback for systems other than Linux: buffered I/O, one buffer at a time, no preallocation, no holes. Space of
// deleted pages comes back with their segment.
const directFlag = 0

// errIrregular is what O_NOFOLLOW gives for a link, used for the other things that are no plain file too.
var errIrregular = unix.ELOOP

func directFits(*os.File) bool { return false }

func (f *osFile) ReadAt(buffers [][]byte, off int64) (int, error) {
	n, err := f.File.ReadAt(buffers[0], off)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return n, err
}

func (f *osFile) WriteAt(buffers [][]byte, off int64) (int, error) {
	return f.File.WriteAt(buffers[0], off)
}

func (f *osFile) Preallocate(int64, int64) error { return f.fail("preallocate", errors.ErrUnsupported) }

func (f *osFile) Punch(int64, int64) error { return f.fail("punch", errors.ErrUnsupported) }
