package fuzz

import (
	"context"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"github.com/stretchr/testify/require"
)

// mounted is a Disk as a file system of the operating system: what a real process does to it is what the simulation remembers, and
// forgets when the power fails.
type mounted struct {
	fs.Inode
	d    *Disk
	n    *node
	inos *inodes
}

type inodes struct {
	mu   sync.Mutex
	last uint64
	of   map[*node]uint64
}

func (i *inodes) number(n *node) uint64 {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.of[n] == 0 {
		i.last++
		i.of[n] = i.last + 1
	}
	return i.of[n]
}

var (
	_ fs.NodeLookuper  = (*mounted)(nil)
	_ fs.NodeGetattrer = (*mounted)(nil)
	_ fs.NodeSetattrer = (*mounted)(nil)
	_ fs.NodeReaddirer = (*mounted)(nil)
	_ fs.NodeOpener    = (*mounted)(nil)
	_ fs.NodeReader    = (*mounted)(nil)
	_ fs.NodeWriter    = (*mounted)(nil)
	_ fs.NodeFsyncer   = (*mounted)(nil)
	_ fs.NodeCreater   = (*mounted)(nil)
	_ fs.NodeMkdirer   = (*mounted)(nil)
	_ fs.NodeUnlinker  = (*mounted)(nil)
	_ fs.NodeRmdirer   = (*mounted)(nil)
	_ fs.NodeRenamer   = (*mounted)(nil)
	_ fs.NodeAllocater = (*mounted)(nil)
	_ fs.NodeFlusher   = (*mounted)(nil)
	_ fs.NodeStatfser  = (*mounted)(nil)
)

func (m *mounted) mode() uint32 {
	if m.n.dir {
		return syscall.S_IFDIR | 0o700
	}
	return syscall.S_IFREG | 0o600
}

func (m *mounted) fill(a *fuse.Attr) {
	a.Mode, a.Size, a.Blocks, a.Nlink, a.Blksize = m.mode(), uint64(m.n.size), uint64(m.n.allocated()/512), 1, blockBytes
	a.Ino = m.inos.number(m.n)
}

func (m *mounted) child(ctx context.Context, n *node, out *fuse.EntryOut) *fs.Inode {
	c := &mounted{d: m.d, n: n, inos: m.inos}
	c.fill(&out.Attr)
	return m.NewInode(ctx, c, fs.StableAttr{Mode: c.mode(), Ino: m.inos.number(n)})
}

func (m *mounted) lock() func() {
	m.d.mu.Lock()
	return m.d.mu.Unlock
}

func (m *mounted) Lookup(ctx context.Context, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	defer m.lock()()
	n := m.n.names[name]
	if n == nil {
		return nil, syscall.ENOENT
	}
	return m.child(ctx, n, out), 0
}

func (m *mounted) Getattr(_ context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	defer m.lock()()
	m.fill(&out.Attr)
	return 0
}

func (m *mounted) Setattr(_ context.Context, _ fs.FileHandle, in *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	defer m.lock()()
	if size, ok := in.GetSize(); ok {
		m.n.truncate(int64(size))
	}
	m.fill(&out.Attr)
	return 0
}

func (m *mounted) Readdir(context.Context) (fs.DirStream, syscall.Errno) {
	defer m.lock()()
	var list []fuse.DirEntry
	for _, name := range slices.Sorted(maps.Keys(m.n.names)) {
		c := mounted{n: m.n.names[name]}
		list = append(list, fuse.DirEntry{Name: name, Mode: c.mode(), Ino: m.inos.number(c.n)})
	}
	return fs.NewListDirStream(list), 0
}

func (m *mounted) Open(context.Context, uint32) (fs.FileHandle, uint32, syscall.Errno) {
	return nil, 0, 0
}
func (m *mounted) Flush(context.Context, fs.FileHandle) syscall.Errno { return 0 }

func (m *mounted) Read(_ context.Context, _ fs.FileHandle, dest []byte, off int64) (fuse.ReadResult, syscall.Errno) {
	defer m.lock()()
	n := m.n.read(dest, off)
	return fuse.ReadResultData(dest[:n]), 0
}

func (m *mounted) Write(_ context.Context, _ fs.FileHandle, data []byte, off int64) (uint32, syscall.Errno) {
	defer m.lock()()
	m.n.write(data, off)
	return uint32(len(data)), 0
}

func (m *mounted) Fsync(context.Context, fs.FileHandle, uint32) syscall.Errno {
	defer m.lock()()
	if m.n.dir {
		m.n.syncNames()
	} else {
		m.n.sync()
	}
	return 0
}

func (m *mounted) Create(ctx context.Context, name string, _ uint32, _ uint32, out *fuse.EntryOut) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) {
	defer m.lock()()
	if m.n.names[name] != nil {
		return nil, nil, 0, syscall.EEXIST
	}
	n := &node{}
	m.n.link(name, n)
	return m.child(ctx, n, out), nil, 0, 0
}

func (m *mounted) Mkdir(ctx context.Context, name string, _ uint32, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	defer m.lock()()
	if m.n.names[name] != nil {
		return nil, syscall.EEXIST
	}
	n := newDir()
	m.n.link(name, n)
	return m.child(ctx, n, out), 0
}

func (m *mounted) Unlink(_ context.Context, name string) syscall.Errno {
	defer m.lock()()
	if m.n.names[name] == nil {
		return syscall.ENOENT
	}
	m.n.link(name, nil)
	return 0
}

func (m *mounted) Rmdir(ctx context.Context, name string) syscall.Errno {
	m.d.mu.Lock()
	n := m.n.names[name]
	full := n != nil && len(n.names) > 0
	m.d.mu.Unlock()
	if full {
		return syscall.ENOTEMPTY
	}
	return m.Unlink(ctx, name)
}

func (m *mounted) Rename(_ context.Context, name string, to fs.InodeEmbedder, target string, _ uint32) syscall.Errno {
	defer m.lock()()
	if to.(*mounted).n != m.n {
		return syscall.EXDEV
	}
	m.n.set(nameEffect{{name, nil}, {target, m.n.names[name]}})
	return 0
}

func (m *mounted) Allocate(_ context.Context, _ fs.FileHandle, off, size uint64, mode uint32) syscall.Errno {
	defer m.lock()()
	switch mode {
	case 1: // keep the size
		m.n.reserved = max(m.n.reserved, int64(off+size))
	case 3: // punch a hole
		m.n.punch(int64(off), int64(size))
	default:
		return syscall.EOPNOTSUPP
	}
	return 0
}

func (m *mounted) Statfs(_ context.Context, out *fuse.StatfsOut) syscall.Errno {
	out.Bsize, out.Frsize, out.Blocks, out.Bfree, out.Bavail, out.NameLen = blockBytes, blockBytes, 1<<20, 1<<19, 1<<19, 255
	return 0
}

// Real processes on a file system that forgets what was not synced when the power fails. HOLDFAST_POWER_CUTS says how often; it
// needs root and /dev/fuse.
func TestPowerCutsOnRealProcesses(t *testing.T) {
	n := number(t, "HOLDFAST_POWER_CUTS")
	mnt := filepath.Join(t.TempDir(), "mnt")
	require.NoError(t, os.Mkdir(mnt, 0o700))
	disk := NewDisk()
	disk.root.link("d", newDir())
	disk.root.syncNames()
	var server *fuse.Server
	mount := func() {
		root := &mounted{d: disk, n: disk.root, inos: &inodes{of: map[*node]uint64{}}}
		var err error
		server, err = fs.Mount(mnt, root, &fs.Options{MountOptions: fuse.MountOptions{DirectMount: true, FsName: "holdfast-power", MaxWrite: 128 << 10}})
		require.NoError(t, err)
	}
	mount()
	lost := 0
	defer func() {
		if server != nil {
			require.NoError(t, server.Unmount())
		}
	}()
	kills(t, n, func() string { return path.Join(mnt, "d") }, func(i int) {
		require.NoError(t, server.Unmount())
		server.Wait()
		lost += disk.Pending()
		disk.PowerCut(RandomChoice(uint64(i)))
		mount()
	})
	t.Logf("%d effects were not synced when the power failed", lost)
	require.Positive(t, lost)
}
