package main

import (
	"errors"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The references that touch a device: loops that do nothing but the system calls. They use direct I/O where the file system
// takes it, as the database does, so that neither measures the page cache.

// hugePageBytes is the size of a huge page. The database has pages of a multiple of it in huge pages, where the system has
// them, and others not; devices and caches take large pieces of memory faster, so a reference has memory of the same kind.
const hugePageBytes = 2 << 20

// alignedBytes gives n bytes of memory outside the Go heap, aligned to pages and resident; huge asks for huge pages.
func alignedBytes(n int, huge bool) ([]byte, func(), error) {
	b, err := unix.Mmap(-1, 0, n+hugePageBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, nil, fileError("map", "memory", err)
	}
	all := b
	b = b[-uintptr(unsafe.Pointer(unsafe.SliceData(b)))%hugePageBytes:][:n:n]
	if huge {
		adviseHuge(b)
	}
	for i := 0; i < n; i += 4096 {
		b[i] = byte(i >> 12)
	}
	return b, func() { _ = unix.Munmap(all) }, nil
}

// bareWriter writes one file from the front to the back.
type bareWriter struct {
	f   *os.File
	off int64
}

func newBareWriter(path string) (*bareWriter, error) {
	f, err := openDirect(path, os.O_CREATE|os.O_WRONLY)
	if err != nil {
		return nil, fileError("create", path, err)
	}
	return &bareWriter{f: f}, nil
}

// write writes b in chunks and syncs once, and gives how long that took. Space is set aside first, as the database does.
func (w *bareWriter) write(b []byte, chunk int) (time.Duration, error) {
	start := time.Now()
	preallocate(w.f, w.off, int64(len(b)))
	for len(b) > 0 {
		n, err := w.f.WriteAt(b[:min(chunk, len(b))], w.off)
		if err != nil {
			return 0, fileError("write", w.f.Name(), err)
		}
		w.off += int64(n)
		b = b[n:]
	}
	if err := syncData(w.f); err != nil {
		return 0, fileError("sync", w.f.Name(), err)
	}
	return time.Since(start), nil
}

func (w *bareWriter) close() error { return w.f.Close() }

// bareRead reads the files to their ends into b, which is used again and again, in chunks and with so many threads, and
// gives how many bytes there were and how long that took.
func bareRead(paths []string, b []byte, chunk, threads int) (int64, time.Duration, error) {
	type piece struct {
		f   *os.File
		off int64
	}
	var pieces []piece
	var total int64
	for _, path := range paths {
		f, err := openDirect(path, os.O_RDONLY)
		if err != nil {
			return 0, 0, fileError("open", path, err)
		}
		defer f.Close()
		st, err := f.Stat()
		if err != nil {
			return 0, 0, fileError("stat", path, err)
		}
		total += st.Size()
		for off := int64(0); off < st.Size(); off += int64(chunk) {
			pieces = append(pieces, piece{f, off})
		}
	}
	start := time.Now()
	var next atomic.Int64
	var group sync.WaitGroup
	var mu sync.Mutex // guards failed
	var failed error
	for t := range threads {
		own := b[t*chunk : (t+1)*chunk]
		group.Go(func() {
			for i := next.Add(1); int(i) <= len(pieces); i = next.Add(1) {
				p := pieces[i-1]
				if _, err := p.f.ReadAt(own, p.off); err != nil && err != io.EOF {
					mu.Lock()
					failed = errors.Join(failed, fileError("read", p.f.Name(), err))
					mu.Unlock()
				}
			}
		})
	}
	group.Wait()
	return total, time.Since(start), failed
}
