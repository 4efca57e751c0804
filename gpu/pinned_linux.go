package gpu

import "golang.org/x/sys/unix"

// preferHugePages asks for huge pages; without them everything works with more page table entries.
func preferHugePages(mem []byte) { _ = unix.Madvise(mem, unix.MADV_HUGEPAGE) }
