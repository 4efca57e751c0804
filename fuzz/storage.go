package fuzz

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"syscall"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	tidwall "github.com/tidwall/wal"

	"github.com/holdfast-db/holdfast/db"
	"github.com/holdfast-db/holdfast/wal"
)

// Storage gives the disk as the file system of a database.
func (d *Disk) Storage() *db.Storage {
	return &db.Storage{Directory: topFS{d}, Log: logFS{d}, Segments: segmentFS{d}, Index: indexFS{d}}
}

// handle is an open file.
type handle struct {
	d    *Disk
	n    *node
	path string
}

func (d *Disk) open(p string) (*handle, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := d.find(p)
	if n == nil {
		return nil, pathError("open", p, fs.ErrNotExist)
	}
	return &handle{d, n, p}, nil
}

// create makes an empty file; with fresh it replaces one that is there by another, otherwise that is an error.
func (d *Disk) create(p string, fresh bool) (h *handle, err error) {
	err = d.change(Call{"create", p, 0}, func() error {
		dir, name := d.parent(p)
		if dir == nil {
			return pathError("create", p, fs.ErrNotExist)
		}
		if dir.names[name] != nil && !fresh {
			return pathError("create", p, fs.ErrExist)
		}
		h = &handle{d, &node{}, p}
		dir.link(name, h.n)
		return nil
	})
	return h, err
}

func (h *handle) writeAt(b []byte, off int64) (int, error) {
	err := h.d.change(Call{"write", h.path, int64(len(b))}, func() error {
		h.n.write(b, off)
		return nil
	})
	if errors.Is(err, errShort) {
		h.d.mu.Lock()
		defer h.d.mu.Unlock()
		h.n.write(b[:len(b)/2], off)
		return len(b) / 2, pathError("write", h.path, err)
	}
	if err != nil {
		return 0, err
	}
	return len(b), nil
}

func (h *handle) sync() error {
	return h.d.change(Call{"sync", h.path, 0}, func() error {
		h.n.sync()
		return nil
	})
}

func (h *handle) truncate(size int64) error {
	return h.d.change(Call{"truncate", h.path, size}, func() error {
		h.n.truncate(size)
		return nil
	})
}

func (h *handle) reserve(end int64) error {
	return h.d.change(Call{"reserve", h.path, end}, func() error {
		h.n.reserved = max(h.n.reserved, end)
		return nil
	})
}

func (h *handle) size() int64 {
	h.d.mu.Lock()
	defer h.d.mu.Unlock()
	return h.n.size
}

func (h *handle) readAt(b []byte, off int64) (int, error) {
	if err := h.d.reading(h.path); err != nil {
		return 0, err
	}
	h.d.mu.Lock()
	defer h.d.mu.Unlock()
	return h.n.read(b, off), nil
}

func (d *Disk) readFile(p string) ([]byte, error) {
	h, err := d.open(p)
	if err != nil {
		return nil, err
	}
	b := make([]byte, h.size())
	n, err := h.readAt(b, 0)
	return b[:n], err
}

func (d *Disk) mkdir(p string) error {
	return d.change(Call{"mkdir", p, 0}, func() error {
		dir, name := d.parent(p)
		if dir == nil {
			return pathError("mkdir", p, fs.ErrNotExist)
		}
		if dir.names[name] != nil {
			return pathError("mkdir", p, fs.ErrExist)
		}
		dir.link(name, newDir())
		return nil
	})
}

func (d *Disk) remove(p string) error {
	if _, err := d.open(p); err != nil {
		return err
	}
	return d.change(Call{"remove", p, 0}, func() error {
		dir, name := d.parent(p)
		if dir == nil || dir.names[name] == nil {
			return pathError("remove", p, fs.ErrNotExist)
		}
		if n := dir.names[name]; n.dir && len(n.names) > 0 {
			return pathError("remove", p, syscall.ENOTEMPTY)
		}
		dir.link(name, nil)
		return nil
	})
}

func (d *Disk) rename(from, to string) error {
	return d.change(Call{"rename", from, 0}, func() error {
		dir, name := d.parent(from)
		_, target := d.parent(to)
		if path.Dir(from) != path.Dir(to) || dir == nil || dir.names[name] == nil {
			return pathError("rename", from, fs.ErrNotExist)
		}
		dir.set(nameEffect{{name, nil}, {target, dir.names[name]}})
		return nil
	})
}

func (d *Disk) syncDir(p string) error {
	return d.change(Call{"syncdir", p, 0}, func() error {
		n := d.find(p)
		if n == nil {
			return pathError("sync", p, fs.ErrNotExist)
		}
		n.syncNames()
		return nil
	})
}

func (d *Disk) list(p string) ([]fs.DirEntry, error) {
	if err := d.reading(p); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	n := d.find(p)
	if n == nil {
		return nil, pathError("list", p, fs.ErrNotExist)
	}
	var out []fs.DirEntry
	for _, name := range slices.Sorted(maps.Keys(n.names)) {
		out = append(out, entry{name, n.names[name].dir, n.names[name].size})
	}
	return out, nil
}

// entry is a name in a directory, and what Stat tells of it.
type entry struct {
	name string
	dir  bool
	size int64
}

func (e entry) Name() string               { return e.name }
func (e entry) IsDir() bool                { return e.dir }
func (e entry) Type() fs.FileMode          { return e.Mode().Type() }
func (e entry) Info() (fs.FileInfo, error) { return e, nil }
func (e entry) Size() int64                { return e.size }
func (e entry) ModTime() time.Time         { return time.Time{} }
func (e entry) Sys() any                   { return nil }
func (e entry) DeviceID() vfs.DeviceID     { return vfs.DeviceID{} }
func (e entry) Mode() fs.FileMode {
	if e.dir {
		return fs.ModeDir | 0o700
	}
	return 0o600
}

func (d *Disk) stat(p string) (entry, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := d.find(p)
	if n == nil {
		return entry{}, pathError("stat", p, fs.ErrNotExist)
	}
	return entry{path.Base(p), n.dir, n.size}, nil
}

// topFS is the top of the database directory.
type topFS struct{ *Disk }

func (d topFS) Resolve(dir string, create bool) (string, error) {
	_, err := d.stat(dir)
	if errors.Is(err, fs.ErrNotExist) && create {
		err = d.mkdir(dir)
	}
	return dir, err
}

func (d topFS) ReadFile(p string) ([]byte, error)       { return d.readFile(p) }
func (d topFS) ReadDir(p string) ([]fs.DirEntry, error) { return d.list(p) }
func (d topFS) Rename(from, to string) error            { return d.rename(from, to) }
func (d topFS) SyncDir(p string) error                  { return d.syncDir(p) }

func (d topFS) Exists(p string) (bool, error) {
	_, err := d.stat(p)
	return err == nil, nil
}

func (d topFS) WriteFile(p string, content []byte, sync bool) error {
	h, err := d.open(p)
	if err == nil {
		err = h.truncate(0)
	} else {
		h, err = d.create(p, false)
	}
	if err == nil {
		_, err = h.writeAt(content, 0)
	}
	if err == nil && sync {
		err = h.sync()
	}
	return err
}

func (d topFS) Lock(p string, shared bool) (db.DirectoryLock, error) {
	if _, err := d.stat(p); err != nil {
		if shared {
			return nil, err
		}
		if _, err := d.create(p, false); err != nil {
			return nil, err
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.locks[p] {
		return nil, nil
	}
	d.locks[p] = true
	return simulatedLock{d.Disk, p, d.find(p)}, nil
}

type simulatedLock struct {
	d    *Disk
	path string
	n    *node
}

func (l simulatedLock) Check() error {
	l.d.mu.Lock()
	defer l.d.mu.Unlock()
	if l.d.find(l.path) != l.n {
		return errors.New("the lock file was replaced")
	}
	return nil
}

func (l simulatedLock) Close() error {
	l.d.mu.Lock()
	defer l.d.mu.Unlock()
	delete(l.d.locks, l.path)
	return nil
}

// logFS is the file system of the log.
type logFS struct{ *Disk }

func (d logFS) Mkdir(p string) error                    { return d.mkdir(p) }
func (d logFS) ReadDir(p string) ([]fs.DirEntry, error) { return d.list(p) }
func (d logFS) SyncDir(p string) error                  { return d.syncDir(p) }
func (d logFS) Remove(p string) error                   { return d.remove(p) }

func (d logFS) Open(p string) (wal.File, error) {
	h, err := d.open(p)
	if err != nil {
		return nil, err
	}
	return logFile{h}, nil
}

type logFile struct{ *handle }

func (f logFile) Close() error         { return nil }
func (f logFile) Size() (int64, error) { return f.size(), nil }
func (f logFile) ReadAt(b []byte, off int64) (int, error) {
	n, err := f.readAt(b, off)
	if err == nil && n < len(b) {
		err = io.EOF
	}
	return n, err
}

func (d logFS) Truncate(p string, size int64) error {
	h, err := d.open(p)
	if err != nil {
		return err
	}
	return h.truncate(size)
}

func (d logFS) Renew(p string, offset int64) error {
	h, err := d.open(p)
	if err != nil {
		return err
	}
	if rest := h.size() - offset; rest > 0 {
		b := make([]byte, rest)
		if _, err := h.readAt(b, offset); err != nil {
			return err
		}
		if _, err := h.writeAt(b, offset); err != nil {
			return err
		}
	}
	return h.sync()
}

func (d logFS) Reserve(p string, offset, n int64) error {
	h, err := d.open(p)
	if err != nil {
		return err
	}
	return h.reserve(offset + n)
}

// logName is the name of the one file that tidwall/wal has in a directory as the log uses it.
const logName = "00000000000000000001"

// Appender does to the simulated disk what github.com/tidwall/wal does to a real one, as far as the log uses it: one file of entries,
// each with its length before it; reading all of it to open it, refusing what does not end with an entry; one write
// for a batch; no sync but the one that is asked for and the one of Close. Worlds that go on from a real directory compare it
// with the original (recovery.go).
func (d logFS) Appender(dir string) (wal.Appender, uint64, error) {
	p := path.Join(dir, logName)
	h, err := d.open(p)
	if errors.Is(err, fs.ErrNotExist) {
		if h, err = d.create(p, false); err != nil {
			return nil, 0, err
		}
		return &appender{h: h}, 0, nil
	}
	if err != nil {
		return nil, 0, err
	}
	b, err := d.readFile(p)
	if err != nil {
		return nil, 0, err
	}
	entries := uint64(0)
	for len(b) > 0 {
		size, n := binary.Uvarint(b)
		if n <= 0 || uint64(len(b)-n) < size {
			return nil, 0, tidwall.ErrCorrupt
		}
		b = b[n+int(size):]
		entries++
	}
	return &appender{h: h, end: h.size()}, entries, nil
}

type appender struct {
	h      *handle
	end    int64
	closed bool
}

func (a *appender) Append(entries [][]byte) error {
	var b []byte
	for _, e := range entries {
		b = append(binary.AppendUvarint(b, uint64(len(e))), e...)
	}
	n, err := a.h.writeAt(b, a.end)
	a.end += int64(n)
	return err
}

func (a *appender) Sync() error { return a.h.sync() }

func (a *appender) Close() error {
	if a.closed {
		return tidwall.ErrClosed
	}
	if err := a.h.sync(); err != nil {
		return err
	}
	a.closed = true
	return nil
}

// segmentFS is the file system of the segments.
type segmentFS struct{ *Disk }

func (d segmentFS) Mkdir(p string) error {
	err := d.mkdir(p)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return d.syncDir(path.Dir(p))
}

func (d segmentFS) List(p string) ([]db.SegmentListed, error) {
	if err := d.reading(p); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	n := d.find(p)
	if n == nil {
		return nil, pathError("list", p, fs.ErrNotExist)
	}
	var out []db.SegmentListed
	for _, name := range slices.Sorted(maps.Keys(n.names)) {
		out = append(out, n.names[name].listed(name))
	}
	return out, nil
}

func (n *node) listed(name string) db.SegmentListed {
	return db.SegmentListed{Name: name, Regular: !n.dir, Size: n.size, Allocated: n.allocated()}
}

func (d segmentFS) Create(p string, direct bool) (db.SegmentFile, error) {
	h, err := d.create(p, false)
	if err != nil {
		return nil, err
	}
	return segmentFile{h, direct && !d.Buffered}, nil
}

func (d segmentFS) Open(p string, _, direct bool) (db.SegmentFile, error) {
	h, err := d.open(p)
	if err != nil {
		return nil, err
	}
	return segmentFile{h, direct && !d.Buffered}, nil
}

func (d segmentFS) Remove(p string) error  { return d.remove(p) }
func (d segmentFS) SyncDir(p string) error { return d.syncDir(p) }

type segmentFile struct {
	*handle
	direct bool
}

func (f segmentFile) Direct() bool { return f.direct }
func (f segmentFile) Close() error { return nil }
func (f segmentFile) Sync() error  { return f.sync() }

func (f segmentFile) aligned(op string, off int64, buffers [][]byte) error {
	for _, b := range buffers {
		if f.direct && (off%blockBytes != 0 || len(b)%blockBytes != 0) {
			return pathError(op, f.path, fmt.Errorf("%d bytes at %d: %w", len(b), off, syscall.EINVAL))
		}
	}
	return nil
}

func (f segmentFile) ReadAt(buffers [][]byte, off int64) (int, error) {
	if err := f.aligned("read", off, buffers); err != nil {
		return 0, err
	}
	total := 0
	for _, b := range buffers {
		n, err := f.readAt(b, off)
		total, off = total+n, off+int64(n)
		if err != nil || n < len(b) {
			return total, err
		}
	}
	return total, nil
}

func (f segmentFile) WriteAt(buffers [][]byte, off int64) (int, error) {
	if err := f.aligned("write", off, buffers); err != nil {
		return 0, err
	}
	return f.writeAt(slices.Concat(buffers...), off)
}

func (f segmentFile) Preallocate(off, n int64) error { return f.reserve(off + n) }

func (f segmentFile) Punch(off, n int64) error {
	return f.d.change(Call{"punch", f.path, n}, func() error {
		f.n.punch(off, n)
		return nil
	})
}

func (f segmentFile) Truncate(size int64) error { return f.truncate(size) }

func (f segmentFile) Stat() (db.SegmentListed, error) {
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	return f.n.listed(path.Base(f.path)), nil
}

// indexFS is the file system of Pebble.
type indexFS struct{ *Disk }

func (d indexFS) Create(name string, _ vfs.DiskWriteCategory) (vfs.File, error) {
	h, err := d.create(name, true)
	if err != nil {
		return nil, err
	}
	return &indexFile{handle: h}, nil
}

func (d indexFS) Link(string, string) error { return syscall.ENOTSUP }

func (d indexFS) Open(name string, opts ...vfs.OpenOption) (vfs.File, error) {
	h, err := d.open(name)
	if err != nil {
		return nil, err
	}
	f := &indexFile{handle: h}
	for _, o := range opts {
		o.Apply(f)
	}
	return f, nil
}

func (d indexFS) OpenReadWrite(name string, c vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File, error) {
	f, err := d.Open(name, opts...)
	if errors.Is(err, fs.ErrNotExist) {
		return d.Create(name, c)
	}
	return f, err
}

func (d indexFS) OpenDir(name string) (vfs.File, error) { return d.Open(name) }
func (d indexFS) Remove(name string) error              { return d.remove(name) }
func (d indexFS) Rename(from, to string) error          { return d.rename(from, to) }

func (d indexFS) RemoveAll(name string) error {
	names, err := d.List(name)
	if err == nil {
		for _, n := range names {
			if err := d.RemoveAll(path.Join(name, n)); err != nil {
				return err
			}
		}
	}
	if err := d.remove(name); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func (d indexFS) ReuseForWrite(from, to string, c vfs.DiskWriteCategory) (vfs.File, error) {
	if err := d.remove(from); err != nil {
		return nil, err
	}
	return d.Create(to, c)
}

func (d indexFS) MkdirAll(dir string, _ os.FileMode) error {
	err := d.mkdir(dir)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	return err
}

func (d indexFS) Lock(name string) (io.Closer, error) {
	if _, err := d.stat(name); err != nil {
		if _, err := d.create(name, true); err != nil {
			return nil, err
		}
	}
	return io.NopCloser(nil), nil
}

func (d indexFS) List(dir string) (names []string, err error) {
	entries, err := d.list(dir)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names, err
}

func (d indexFS) Stat(name string) (vfs.FileInfo, error) {
	e, err := d.stat(name)
	if err != nil {
		return nil, err
	}
	return e, nil
}

func (d indexFS) PathBase(p string) string       { return path.Base(p) }
func (d indexFS) PathJoin(elem ...string) string { return path.Join(elem...) }
func (d indexFS) PathDir(p string) string        { return path.Dir(p) }
func (d indexFS) Unwrap() vfs.FS                 { return nil }
func (d indexFS) GetDiskUsage(string) (vfs.DiskUsage, error) {
	return vfs.DiskUsage{AvailBytes: 1 << 40, TotalBytes: 1 << 41, UsedBytes: 1 << 40}, nil
}

type indexFile struct {
	*handle
	at int64
}

func (f *indexFile) Close() error { return nil }

func (f *indexFile) Read(b []byte) (int, error) {
	n, err := f.readAt(b, f.at)
	f.at += int64(n)
	if err == nil && n == 0 && len(b) > 0 {
		err = io.EOF
	}
	return n, err
}

func (f *indexFile) ReadAt(b []byte, off int64) (int, error) { return logFile{f.handle}.ReadAt(b, off) }

func (f *indexFile) Write(b []byte) (int, error) {
	n, err := f.writeAt(b, f.at)
	f.at += int64(n)
	return n, err
}

func (f *indexFile) WriteAt(b []byte, off int64) (int, error) { return f.writeAt(b, off) }
func (f *indexFile) Preallocate(int64, int64) error           { return nil }

func (f *indexFile) Stat() (vfs.FileInfo, error) {
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	return entry{path.Base(f.path), f.n.dir, f.n.size}, nil
}

func (f *indexFile) Sync() error {
	if f.n.dir {
		return f.d.syncDir(f.path)
	}
	return f.sync()
}

func (f *indexFile) SyncTo(int64) (bool, error)  { return false, nil }
func (f *indexFile) SyncData() error             { return f.Sync() }
func (f *indexFile) Prefetch(int64, int64) error { return nil }
func (f *indexFile) Fd() uintptr                 { return vfs.InvalidFd }
