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

// Import is device memory of another process, mapped into this one. An exporter that has ended leaves the mapping
// behind, with whatever it held; one that frees the memory while it is imported breaks the driver's rules. So the
// exporter is to be told before it frees, and an import of a dead exporter is to be closed.
type Import struct {
	d       *dispatcher
	address uint64
	bytes   int64
	span    *span

	mu   sync.Mutex
	gone bool
}

// OpenImport maps memory that another process has exported from this device (same UUID). The errors are the
// backend's; ErrUnsupported where it has no such memory, ErrInvalid for a handle that names none, as when the
// exporter is gone.
func (e *Engine) OpenImport(ctx context.Context, device int, h ImportHandle) (*Import, error) {
	if (h.IPC == nil) == (h.File == nil) {
		return nil, fmt.Errorf("gpu: import needs an IPC handle or a file: %w", txn.ErrInvalid)
	}
	if h.File != nil && h.Bytes <= 0 {
		return nil, fmt.Errorf("gpu: import of %d bytes by file: %w", h.Bytes, txn.ErrInvalid)
	}
	if err := e.begin(); err != nil {
		return nil, err
	}
	defer e.end()
	d, err := e.dispatcher(ctx, device)
	if err != nil {
		return nil, err
	}
	address, bytes, err := d.dev.openImport(h)
	if err != nil {
		return nil, fmt.Errorf("gpu: import memory on device %d: %w", device, classified(err))
	}
	s, ok := d.imported.add(address, address+uint64(bytes))
	if !ok {
		// The driver maps an allocation once and counts how often it was opened: this takes back the last opening.
		_ = d.dev.closeImport(address)
		return nil, fmt.Errorf("gpu: import memory on device %d: it is imported already at %#x: %w", device, address, txn.ErrConflict)
	}
	m := &Import{d: d, address: address, bytes: bytes, span: s}
	d.mu.Lock()
	d.opened[m] = struct{}{}
	d.mu.Unlock()
	return m, nil
}

// Address is where the memory begins in this process, for Region.Device.
func (m *Import) Address() uint64 { return m.address }

// Bytes is its size.
func (m *Import) Bytes() int64 { return m.bytes }

// Close unmaps the memory. With transfers that touch it and are not released it fails with ErrBusy and changes nothing.
// Closing again after a success does nothing, nor does closing after the engine has been closed, which closes imports.
func (m *Import) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.gone {
		return nil
	}
	if users := m.d.imported.retire([]*span{m.span}); users > 0 {
		return fmt.Errorf("gpu: close import of %d bytes at %#x: %d transfers use it: %w", m.bytes, m.address, users, txn.ErrBusy)
	}
	m.gone = true
	m.d.mu.Lock()
	delete(m.d.opened, m)
	m.d.mu.Unlock()
	if err := m.d.dev.closeImport(m.address); err != nil {
		return fmt.Errorf("gpu: close import of %d bytes at %#x: %w", m.bytes, m.address, classified(err))
	}
	return nil
}
