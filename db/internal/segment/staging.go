package segment

import (
	"context"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/holdfast-db/holdfast/txn"
)

const (
	laneStagingBytes = 4 << 20   // of each lane: descriptors, small pages, ends of pages, pages in unaligned memory
	readStagingBytes = 256 << 10 // of each concurrent read
)

// mapStaging gives aligned memory outside the Go heap, where direct I/O can reach it and the collector need not look.
func mapStaging(n int64) ([]byte, error) {
	b, err := unix.Mmap(-1, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return nil, fmt.Errorf("segment: map %d bytes of staging: %w: %w", n, txn.ErrBusy, os.NewSyscallError("mmap", err))
	}
	return b, nil
}

func unmapStaging(b []byte) { _ = unix.Munmap(b) }

// readTurns holds one staging buffer per read that may run at a time; taking it is taking a turn.
type readTurns chan []byte

func newReadTurns(n int) (readTurns, error) {
	t := make(readTurns, n)
	for range n {
		b, err := mapStaging(readStagingBytes)
		if err != nil {
			t.close()
			return nil, err
		}
		t <- b
	}
	return t, nil
}

func (t readTurns) take(ctx context.Context) ([]byte, error) {
	if ctx.Err() == nil {
		select {
		case b := <-t:
			return b, nil
		case <-ctx.Done():
		}
	}
	return nil, fmt.Errorf("read waits for its turn: %w: %w", txn.ErrBusy, context.Cause(ctx))
}

func (t readTurns) give(b []byte) { t <- b }

// close unmaps the buffers; all of them are in the channel.
func (t readTurns) close() {
	for {
		select {
		case b := <-t:
			unmapStaging(b)
		default:
			return
		}
	}
}
