//go:build !linux

package arena

import (
	"os"

	"golang.org/x/sys/unix"
)

// region is address space from the system.
type region struct {
	raw []byte
	mem []byte
}

// mapRegion reserves n bytes of address space. This is the fallback for systems other than Linux: mapped the same way,
// aligned to the system's pages only.
func mapRegion(n int64) (region, error) {
	raw, err := unix.Mmap(-1, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return region{}, os.NewSyscallError("mmap", err)
	}
	return region{raw: raw, mem: raw}, nil
}

func (g region) unmap() { _ = unix.Munmap(g.raw) }

// advise does nothing: there is no call to ask for huge pages.
func (g region) advise(bool) {}

// giveBack lets the system take the memory under b when it needs some; until then it counts as resident.
func giveBack(b []byte) error {
	if b = wholePages(b); len(b) == 0 {
		return nil
	}
	return unix.Madvise(b, unix.MADV_FREE)
}
