//go:build unix

package gpu

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/holdfast-db/holdfast/txn"
)

// mapMemory maps anonymous memory and gives it with what unmaps it.
func mapMemory(bytes int64) ([]byte, func() error, error) {
	mem, err := unix.Mmap(-1, 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return nil, nil, fmt.Errorf("gpu: map %d bytes: %w: %w", bytes, err, txn.ErrNoSpace)
	}
	preferHugePages(mem)
	return mem, func() error {
		if err := unix.Munmap(mem); err != nil {
			return fmt.Errorf("gpu: unmap %d bytes: %w: %w", bytes, err, txn.ErrIO)
		}
		return nil
	}, nil
}
