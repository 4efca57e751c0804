package segment

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

const directFlag = unix.O_DIRECT

// errIrregular is what O_NOFOLLOW gives for a link, used for the other things that are no plain file too.
var errIrregular = unix.ELOOP

// directFits reports whether direct I/O in units of 4096 bytes works on f, and takes the flag off if it does not. A kernel
// that cannot say (before 6.1) is believed; a refusal shows at the first access then.
func directFits(f *os.File) bool {
	var st unix.Statx_t
	err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st)
	if err != nil || st.Mask&unix.STATX_DIOALIGN == 0 {
		return true
	}
	if st.Dio_mem_align > 0 && st.Dio_mem_align <= uint32(blockBytes) && st.Dio_offset_align > 0 && st.Dio_offset_align <= uint32(blockBytes) {
		return true
	}
	flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0)
	if err == nil {
		_, err = unix.FcntlInt(f.Fd(), unix.F_SETFL, flags&^unix.O_DIRECT)
	}
	return err != nil
}

func (f *osFile) ReadAt(buffers [][]byte, off int64) (int, error) {
	for {
		n, err := unix.Preadv(int(f.Fd()), buffers[:min(len(buffers), buffersMax)], off)
		if err != unix.EINTR {
			return max(n, 0), f.fail("preadv", err)
		}
	}
}

func (f *osFile) WriteAt(buffers [][]byte, off int64) (int, error) {
	for {
		n, err := unix.Pwritev(int(f.Fd()), buffers[:min(len(buffers), buffersMax)], off)
		if err != unix.EINTR {
			return max(n, 0), f.fail("pwritev", err)
		}
	}
}

func (f *osFile) Sync() error {
	for {
		err := unix.Fdatasync(int(f.Fd()))
		if err != unix.EINTR {
			return f.fail("fdatasync", err)
		}
	}
}

// forget drops synced bytes from the page cache. It is a hint: what the system makes of it changes no byte.
func (f *osFile) forget(off, n int64) {
	_ = unix.Fadvise(int(f.Fd()), off, n, unix.FADV_DONTNEED)
}

func (f *osFile) Preallocate(off, n int64) error {
	return f.fail("fallocate", unsupported(unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, off, n)))
}

func (f *osFile) Punch(off, n int64) error {
	return f.fail("punch", unsupported(unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)))
}

// unsupported makes one error of the two ways in which a file system says that it has no such call.
func unsupported(err error) error {
	if err == unix.EOPNOTSUPP || err == unix.ENOSYS {
		return errors.ErrUnsupported
	}
	return err
}
