package gpu

import (
	"context"
	"fmt"
	"os"
	"sync"

	"github.com/holdfast-db/holdfast/txn"
)

// ImportHandle names device memory of another process. Exactly one of IPC and File is set.
type ImportHandle struct {
	// IPC is what the exporter got from cuIpcGetMemHandle (cudaIpcGetMemHandle). The import begins at the start of the
	// allocation that the exporter's pointer was in; offsets are the exporter's to tell.
	IPC *[64]byte
	// File is what the exporter got from cuMemExportToShareableHandle as a POSIX file descriptor, passed on through a
	// socket. It stays the caller's. Bytes is the size of the allocation, which the descriptor does not tell.
	File  *os.File
	Bytes int64
}

// DeviceMemory is memory of a device that the engine has allocated, or imported from another process. Copies may name other
// memory too, as that of the serving framework; what is special here is that it cannot be closed under a copy.
//
// An exporter that has ended leaves an import behind, with whatever it held; one that frees the memory while it is
// imported breaks the driver's rules. So the exporter is to be told before it frees, and an import of a dead exporter is
// to be closed.
type DeviceMemory struct {
	d    *dispatcher
	span *span
	give func() error

	mu   sync.Mutex
	gone bool
}

// OpenImport maps memory that another process has exported from this device (same UUID). The errors are the
// backend's; ErrUnsupported where it has no such memory, ErrInvalid for a handle that names none, as when the
// exporter is gone.
func (e *Engine) OpenImport(ctx context.Context, index int, h ImportHandle) (*DeviceMemory, error) {
	if (h.IPC == nil) == (h.File == nil) {
		return nil, fmt.Errorf("gpu: import needs an IPC handle or a file: %w", txn.ErrInvalid)
	}
	if h.File != nil && h.Bytes <= 0 {
		return nil, fmt.Errorf("gpu: import of %d bytes by file: %w", h.Bytes, txn.ErrInvalid)
	}
	return e.takeMemory(ctx, index, "import", func(d device) (uint64, int64, func() error, error) { return d.openImport(h) })
}

// AllocDevice allocates memory on a device, at most Limits.Bytes. Serving frameworks have memory of their own; this is for
// tests and measurements. The content is undefined. The errors are the backend's; ErrInvalid for a size out of range.
func (e *Engine) AllocDevice(ctx context.Context, index int, bytes int64) (*DeviceMemory, error) {
	if bytes <= 0 || bytes > e.limits.Bytes {
		return nil, fmt.Errorf("gpu: allocate %d bytes on device %d: want 1 to %d: %w", bytes, index, e.limits.Bytes, txn.ErrInvalid)
	}
	return e.takeMemory(ctx, index, "allocate", func(d device) (uint64, int64, func() error, error) {
		address, free, err := d.allocate(bytes)
		return address, bytes, free, err
	})
}

// takeMemory enters memory that take gets from a device in the books.
func (e *Engine) takeMemory(ctx context.Context, index int, what string, take func(device) (address uint64, bytes int64, give func() error, err error)) (*DeviceMemory, error) {
	if err := e.begin(); err != nil {
		return nil, err
	}
	defer e.end()
	d, err := e.dispatcher(ctx, index)
	if err != nil {
		return nil, err
	}
	address, bytes, give, err := take(d.dev)
	if err != nil {
		return nil, fmt.Errorf("gpu: %s memory on device %d: %w", what, index, classified(err))
	}
	s, ok := d.memory.add(address, address+uint64(bytes))
	if !ok {
		// The driver maps an import once and counts how often it was opened: this takes back the last opening.
		_ = give()
		return nil, fmt.Errorf("gpu: %s memory on device %d: it is open already at %#x: %w", what, index, address, txn.ErrConflict)
	}
	m := &DeviceMemory{d: d, span: s, give: give}
	d.mu.Lock()
	d.taken[m] = struct{}{}
	d.mu.Unlock()
	return m, nil
}

// Address is where the memory begins, for Region.Device.
func (m *DeviceMemory) Address() uint64 { return m.span.start }

// Bytes is its size.
func (m *DeviceMemory) Bytes() int64 { return int64(m.span.end - m.span.start) }

// Close frees what was allocated, and unmaps what was imported. With transfers that touch it and are not released it fails
// with ErrBusy and changes nothing. Closing again after a success does nothing, nor does closing after the engine has been
// closed, which closes all.
func (m *DeviceMemory) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.gone {
		return nil
	}
	if users := m.d.memory.retire([]*span{m.span}); users > 0 {
		return fmt.Errorf("gpu: close device memory of %d bytes at %#x: %d transfers use it: %w", m.Bytes(), m.Address(), users, txn.ErrBusy)
	}
	m.gone = true
	m.d.mu.Lock()
	delete(m.d.taken, m)
	m.d.mu.Unlock()
	if err := m.give(); err != nil {
		return fmt.Errorf("gpu: close device memory of %d bytes at %#x: %w", m.Bytes(), m.Address(), classified(err))
	}
	return nil
}
