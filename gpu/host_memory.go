package gpu

import (
	"fmt"
	"slices"
	"sort"
	"sync"

	"github.com/holdfast-db/holdfast/txn"
)

// hostGap lies between two exposed buffers and belongs to nobody.
const hostGap = 1 << 20

// hostMemory is the address space of a device that the host backend plays.
type hostMemory struct {
	mu      sync.RWMutex
	next    uint64
	buffers []hostBuffer // in order of address
}

type hostBuffer struct {
	address uint64
	mem     []byte
}

func (m *hostMemory) add(mem []byte) uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	b := hostBuffer{address: m.next, mem: mem}
	m.buffers = append(m.buffers, b)
	m.next += (uint64(len(mem))+hostGap-1)&^(hostGap-1) + hostGap
	return b.address
}

func (m *hostMemory) remove(address uint64) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	before := len(m.buffers)
	m.buffers = slices.DeleteFunc(m.buffers, func(b hostBuffer) bool { return b.address == address })
	return len(m.buffers) < before
}

// slice gives the memory behind a range of addresses, which has to lie in one buffer.
func (m *hostMemory) slice(address uint64, bytes int64) ([]byte, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	i := sort.Search(len(m.buffers), func(i int) bool { return m.buffers[i].address > address }) - 1
	if i >= 0 {
		b := m.buffers[i]
		if off := address - b.address; off <= uint64(len(b.mem)) && uint64(bytes) <= uint64(len(b.mem))-off {
			return b.mem[off : off+uint64(bytes)], nil
		}
	}
	return nil, fmt.Errorf("no device memory of %d bytes at %#x: %w", bytes, address, txn.ErrInvalid)
}
