package wal

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/holdfast-db/holdfast/txn"
)

// smallDisk mounts a new ext4 file system of the given size, or skips the test.
func smallDisk(t *testing.T, size int64) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("mounting a file system needs root")
	}
	dir := t.TempDir()
	image, mount := filepath.Join(dir, "image"), filepath.Join(dir, "mount")
	require.NoError(t, os.WriteFile(image, nil, 0o600))
	require.NoError(t, os.Truncate(image, size))
	require.NoError(t, os.Mkdir(mount, 0o700))
	if out, err := exec.Command("mkfs.ext4", "-q", "-m", "0", image).CombinedOutput(); err != nil {
		t.Skipf("no mkfs.ext4: %v: %s", err, out)
	}
	if out, err := exec.Command("mount", "-o", "loop", image, mount).CombinedOutput(); err != nil {
		t.Skipf("no loop mount: %v: %s", err, out)
	}
	t.Cleanup(func() {
		out, err := exec.Command("umount", mount).CombinedOutput()
		require.NoError(t, err, string(out))
	})
	return mount
}

// fill uses up every free block of a file system.
func fill(t *testing.T, dir string) string {
	t.Helper()
	path := filepath.Join(dir, "filler")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	require.NoError(t, err)
	for size := 1 << 20; size > 0; size /= 2 {
		for err = nil; err == nil; {
			_, err = f.Write(bytes.Repeat([]byte{1}, size))
		}
		require.ErrorIs(t, err, syscall.ENOSPC)
		require.NoError(t, f.Sync())
	}
	require.NoError(t, f.Close())
	return path
}

// On a file system without one free block: ordinary records are refused, retire and delete go through and are durable, also
// after opening again, also when a new directory is due; with room again everything goes on.
func TestRetireAndDeleteOnAFullDisk(t *testing.T) {
	mount := smallDisk(t, 24<<20)
	dir := filepath.Join(mount, "wal")
	o := Options{ReserveBytes: 256 << 10, RotateBytes: 100 << 10}
	l := open(t, dir, o)
	put(t, l, "A")
	filler := fill(t, mount)

	var err error
	for err == nil {
		_, err = l.Append([]Record{record(strings.Repeat("o", 8000))})
	}
	require.ErrorIs(t, err, txn.ErrNoSpace)
	require.NoError(t, l.Err())
	require.NoError(t, l.Sync())

	essential := Record{Kind: 2, Payload: []byte(strings.Repeat("d", 500)), Essential: true}
	written := 0
	appendEssential := func(n int) {
		for range n {
			_, err := l.Append([]Record{essential})
			require.NoError(t, err)
			require.NoError(t, l.Sync())
			written++
		}
	}
	appendEssential(100)
	require.NoError(t, l.Close())
	l = open(t, dir, o)
	require.True(t, l.Repair().Clean)
	appendEssential(100)
	abandon(t, l)
	l = open(t, dir, o)
	appendEssential(100)
	require.Greater(t, l.Size(), o.RotateBytes, "a new directory was due")
	for err = nil; err == nil; written++ {
		_, err = l.Append([]Record{essential})
	}
	written--
	require.ErrorIs(t, err, txn.ErrNoSpace)
	require.NoError(t, l.Err())
	require.Greater(t, int64(written)*entryBytes(500), o.ReserveBytes*9/10, "the reserve was there")

	require.NoError(t, os.Remove(filler))
	unix.Sync() // ext4 gives freed blocks out again after its next commit
	put(t, l, "B")
	put(t, l, "C")
	require.NoError(t, l.Close())
	l = open(t, dir, o)
	got := replayed(t, l, 1)
	require.Len(t, got, int(l.Next())-1)
	require.Equal(t, "C", got[len(got)-1].payload)
	essentials := 0
	for _, e := range got {
		if e.kind == 2 {
			essentials++
		}
	}
	require.Equal(t, written, essentials)
}

// The reserve is real blocks, it moves along with the end of the log, and older directories keep none of it.
func TestReserveIsAllocated(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "wal")
	const reserve = 2 << 20
	l := open(t, dir, Options{ReserveBytes: reserve, RotateBytes: 1 << 20})
	for range 5 {
		put(t, l, strings.Repeat("r", 500<<10))
		require.GreaterOrEqual(t, allocated(t, newest(t, dir)), l.directories[len(l.directories)-1].size+reserve)
	}
	found, err := listDirectories(diskFS{}, dir)
	require.NoError(t, err)
	require.Len(t, found, 2)
	old := contents(t, found[0].file())
	require.LessOrEqual(t, allocated(t, found[0].file()), int64(len(old))+64<<10)
}

func allocated(t *testing.T, path string) int64 {
	t.Helper()
	var stat unix.Stat_t
	require.NoError(t, unix.Stat(path, &stat))
	return stat.Blocks * 512
}
