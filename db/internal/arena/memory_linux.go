package arena

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// region is address space from the system.
type region struct {
	raw []byte // what was mapped
	mem []byte // the part of it that is aligned to huge pages
}

// mapRegion reserves n bytes of address space, readable and writable, that get memory page by page when they are touched.
// Their content stays out of core dumps: it belongs to the tenants of the server, and there may be terabytes of it.
func mapRegion(n int64) (region, error) {
	raw, err := unix.Mmap(-1, 0, int(n+hugeBytes), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return region{}, os.NewSyscallError("mmap", err)
	}
	_ = unix.Madvise(raw, unix.MADV_DONTDUMP)
	skip := -int64(uintptr(unsafe.Pointer(&raw[0]))) & (hugeBytes - 1)
	return region{raw: raw, mem: raw[skip : skip+n : skip+n]}, nil
}

func (g region) unmap() { _ = unix.Munmap(g.raw) }

// advise asks for huge pages, or for none: without the latter a system that gives them to everybody would make
// two mebibytes resident for a slot of 4 KiB. Kernels without huge pages refuse either, which is as good.
func (g region) advise(huge bool) {
	advice := unix.MADV_NOHUGEPAGE
	if huge {
		advice = unix.MADV_HUGEPAGE
	}
	_ = unix.Madvise(g.mem, advice)
}

// giveBack returns the memory under b; the addresses stay ours and read as zero. On systems with pages over 4 KiB, those
// that b shares with its neighbours stay.
func giveBack(b []byte) error {
	if b = wholePages(b); len(b) == 0 {
		return nil
	}
	err := unix.Madvise(b, unix.MADV_DONTNEED)
	if err == unix.EINVAL { // the process has locked its memory (mlockall)
		err = unix.Madvise(b, unix.MADV_DONTNEED_LOCKED)
	}
	return err
}
