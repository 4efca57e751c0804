package wal

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

// once fails the nth operation of a name, and no other.
func once(name string, nth int, err error) func(operation) error {
	calls := 0
	return func(op operation) error {
		if op.name == name {
			if calls++; calls == nth {
				return err
			}
		}
		return nil
	}
}

// A sync that fails once, though later ones would succeed, stops the log until it is opened again; what was not acknowledged
// is absent or whole; no mark of a clean shutdown is left.
func TestSyncErrorStopsTheLog_B29(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "wal")
	log := &logged{}
	l := open(t, dir, Options{Logger: slog.New(log), FS: newSeam(once("fsync", 3, syscall.EIO))})
	put(t, l, "A", "B")
	_, err := l.Append([]Record{record("C")})
	require.NoError(t, err)
	err = l.Sync()
	require.ErrorIs(t, err, txn.ErrIO)
	require.ErrorIs(t, err, syscall.EIO)
	require.ErrorContains(t, err, newest(t, dir))
	for range 3 {
		require.ErrorIs(t, l.Sync(), txn.ErrIO)
		_, err = l.Append([]Record{record("D")})
		require.ErrorIs(t, err, txn.ErrIO)
		require.ErrorIs(t, l.Cut(2), txn.ErrIO)
	}
	require.ErrorIs(t, l.Err(), txn.ErrIO)
	require.Equal(t, txn.LSN(2), l.Synced())
	require.ErrorIs(t, l.Close(), txn.ErrIO)
	require.Len(t, log.warnings(), 1, "the error is logged once")

	require.NoError(t, os.Truncate(newest(t, dir), 2*entryBytes(1))) // what a power failure keeps
	l = open(t, dir, Options{})
	require.Equal(t, []string{"A", "B"}, payloads(replayed(t, l, 1)))
	require.False(t, l.Repair().Clean)
	put(t, l, "D")
}

// Every operation that writes, failed at every place where it happens: the call that meets it fails, the log is stopped with
// the same class, and opening it again finds all that was acknowledged and then at most what was on its way.
func TestEveryFailedWriteStopsTheLog_B29(t *testing.T) {
	for _, name := range []string{"mkdir", "appender", "append", "fsync", "syncdir", "reserve", "truncate", "close"} {
		for _, c := range []struct{ err, class error }{
			{syscall.EIO, txn.ErrIO},
			{syscall.EACCES, txn.ErrPermission},
		} {
			for nth := 1; ; nth++ {
				dir := filepath.Join(memoryDir(t), "wal")
				calls, closing := 0, false
				l, err := Open(dir, Options{RotateBytes: 100, FS: newSeam(func(op operation) error {
					if op.name == name && !closing {
						if calls++; calls == nth {
							return c.err
						}
					}
					return nil
				})})
				var acknowledged []string
				for i := 0; err == nil && i < 8; i++ {
					payload := fmt.Sprintf("record %d", i)
					if _, err = l.Append([]Record{record(payload)}); err != nil {
						break
					}
					if err = l.Sync(); err == nil {
						acknowledged = append(acknowledged, payload)
					}
				}
				if calls < nth {
					require.NoError(t, err)
					closing = true
					require.NoError(t, l.Close())
					require.Greater(t, nth, 2, name)
					break
				}
				require.ErrorIs(t, err, c.class, "%s %d", name, nth)
				if l != nil {
					_, err = l.Append([]Record{record("later")})
					require.ErrorIs(t, err, c.class)
					require.ErrorIs(t, l.Sync(), c.class)
					require.ErrorIs(t, l.Close(), c.class)
				}
				l = open(t, dir, Options{})
				got := payloads(replayed(t, l, 0))
				require.GreaterOrEqual(t, len(got), len(acknowledged), "%s %d", name, nth)
				require.Equal(t, acknowledged, append([]string(nil), got[:len(acknowledged)]...))
				require.LessOrEqual(t, len(got), len(acknowledged)+1)
				put(t, l, "later")
				require.NoError(t, l.Close())
			}
		}
	}
}

// The order of a hundred durable commits, as the file system sees it: no record is acknowledged before its file was synced
// after it, and no record in a new directory before that directory and the one above were synced after the file was made.
func TestOrderOfWritesAndSyncs_B29(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "wal")
	var trace []operation
	l := open(t, dir, Options{RotateBytes: 1000, FS: newSeam(func(op operation) error {
		trace = append(trace, op)
		return nil
	})})
	for i := range 100 {
		put(t, l, fmt.Sprintf("record %d", i))
		trace = append(trace, operation{name: "acknowledged"})
	}
	var acknowledged, created int
	lastOf := func(name, path string, before int) int {
		for i := before - 1; i >= 0; i-- {
			if trace[i].name == name && (path == "" || trace[i].path == path) {
				return i
			}
		}
		return -1
	}
	for i, op := range trace {
		switch op.name {
		case "acknowledged":
			acknowledged++
			written := lastOf("append", "", i)
			file := trace[written].path
			require.Greater(t, lastOf("fsync", file, i), written, "file synced after the write")
			made := lastOf("appender", filepath.Dir(file), i)
			require.Greater(t, lastOf("syncdir", filepath.Dir(file), i), made, "its directory synced after it was made")
			require.Greater(t, lastOf("syncdir", dir, i), made, "and the directory above")
		case "mkdir":
			if op.path == dir {
				require.Greater(t, lastOf("syncdir", filepath.Dir(dir), len(trace)), i)
				continue
			}
			created++
			if written := lastOf("append", "", i); written >= 0 {
				require.Greater(t, lastOf("fsync", trace[written].path, i), written, "the old file whole before a new one exists")
			}
		}
	}
	require.Equal(t, 100, acknowledged)
	require.Greater(t, created, 4)
	require.NoError(t, l.Close())
	last := len(trace) - 1
	require.Equal(t, "close", trace[last].name)
	require.Equal(t, "fsync", trace[last-1].name)
	require.Equal(t, "append", trace[last-2].name, "the seal")
	require.Equal(t, "acknowledged", trace[last-3].name)
}

// A process that lost its directory writes nothing more and acknowledges nothing more.
func TestFencedLogStops(t *testing.T) {
	for _, lostAt := range []int{1, 2, 3, 4, 5} {
		dir := filepath.Join(t.TempDir(), "wal")
		asked := 0
		l, err := Open(dir, Options{Fence: func() error {
			if asked++; asked > lostAt {
				return errors.New("epoch 8 holds the lock, not 7")
			}
			return nil
		}})
		require.NoError(t, err)
		acknowledged := 0
		for err == nil {
			if _, err = l.Append([]Record{record("mine")}); err == nil {
				if err = l.Sync(); err == nil {
					acknowledged++
				}
			}
		}
		require.ErrorIs(t, err, txn.ErrFenced)
		require.ErrorContains(t, err, "epoch 8")
		require.Equal(t, (lostAt-1)/2, acknowledged)
		before := fingerprint(t, dir)
		_, err = l.Append([]Record{record("not mine")})
		require.ErrorIs(t, err, txn.ErrFenced)
		require.ErrorIs(t, l.Sync(), txn.ErrFenced)
		require.ErrorIs(t, l.Cut(100), txn.ErrFenced)
		require.ErrorIs(t, l.Close(), txn.ErrFenced)
		require.Equal(t, before, fingerprint(t, dir), "no seal either")
	}
	_, err := Open(filepath.Join(t.TempDir(), "wal"), Options{Fence: func() error { return txn.ErrLocked }})
	require.ErrorIs(t, err, txn.ErrFenced)
	require.NotErrorIs(t, err, txn.ErrLocked, "one class")
}

// full makes the file system refuse what costs space: blocks that a file does not have yet, and new directories.
type full struct {
	*seam
	now      bool
	reserved map[string]int64
}

func newFull() *full {
	return &full{seam: newSeam(func(operation) error { return nil }), reserved: map[string]int64{}}
}

func (f *full) Reserve(path string, offset, n int64) error {
	if f.now && offset+n > f.reserved[path] {
		return &os.PathError{Op: "reserve", Path: path, Err: syscall.ENOSPC}
	}
	f.reserved[path] = max(f.reserved[path], offset+n)
	return nil
}

func (f *full) Mkdir(path string) error {
	if f.now {
		return &os.PathError{Op: "mkdir", Path: path, Err: syscall.EDQUOT}
	}
	return f.seam.Mkdir(path)
}

// On a full disk ordinary records are refused before anything is written, essential ones go on into the reserve until that is
// used up, and nothing is stopped: when there is room again, everything is as before.
func TestReserveOnAFullDisk(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "wal")
	disk := newFull()
	const reserve = 1000
	o := Options{FS: disk, ReserveBytes: reserve}
	l := open(t, dir, o)
	put(t, l, "A")
	disk.now = true
	filler := strings.Repeat("f", 10_000)
	var err error
	for err == nil {
		_, err = l.Append([]Record{record(filler)})
	}
	require.ErrorIs(t, err, txn.ErrNoSpace)
	require.ErrorIs(t, err, syscall.ENOSPC)
	require.NoError(t, l.Err())
	for err = nil; err == nil; { // what is between the refused filler and the reserve
		_, err = l.Append([]Record{record("ordinary"), {Kind: 2, Payload: []byte("x"), Essential: true}})
	}
	require.ErrorIs(t, err, txn.ErrNoSpace, "a batch is as essential as its least essential record")
	size, next := l.Size(), l.Next()

	essential := Record{Kind: 2, Payload: []byte("retire"), Essential: true}
	var used int64
	for {
		if _, err = l.Append([]Record{essential}); err != nil {
			break
		}
		require.NoError(t, l.Sync())
		used += entryBytes(len(essential.Payload))
	}
	require.ErrorIs(t, err, txn.ErrNoSpace)
	require.NoError(t, l.Err())
	require.GreaterOrEqual(t, used, int64(reserve)-entryBytes(len(essential.Payload)))
	require.Equal(t, size+used, l.Size())
	require.Greater(t, l.Next(), next+10)
	require.NoError(t, l.Close(), "no room for the seal is no failure")

	o.RotateBytes = 1 // a new directory is due, and there is no room for it
	l = open(t, dir, o)
	_, err = l.Append([]Record{essential})
	require.ErrorIs(t, err, txn.ErrNoSpace)
	found, err := listDirectories(disk, dir)
	require.NoError(t, err)
	require.Len(t, found, 1)
	disk.now = false
	put(t, l, "B")
	require.NoError(t, l.Close())
	l = open(t, dir, Options{})
	got := payloads(replayed(t, l, 1))
	require.Equal(t, "A", got[0])
	require.Equal(t, "B", got[len(got)-1])
	require.Len(t, got, int(l.Next())-1)
}

// With no room for a new directory the old one stretches, up to its limit, and the attempt leaves nothing behind.
func TestFullDiskDefersRotation(t *testing.T) {
	for _, name := range []string{"mkdir", "appender", "reserve"} {
		dir := filepath.Join(t.TempDir(), "wal")
		var noRoom bool
		first := filepath.Join(dir, directoryName(1))
		l := open(t, dir, Options{RotateBytes: 500, FS: newSeam(func(op operation) error {
			if noRoom && op.name == name && !strings.HasPrefix(op.path, first) {
				return syscall.ENOSPC
			}
			return nil
		})})
		for l.Size() < 500 {
			put(t, l, "before")
		}
		noRoom = true
		var err error
		for err == nil {
			_, err = l.Append([]Record{record("stretched")})
		}
		require.ErrorIs(t, err, txn.ErrNoSpace)
		require.NoError(t, l.Err())
		require.LessOrEqual(t, l.Size(), int64(stretchMax*500))
		require.Greater(t, l.Size(), int64(stretchMax*500)-100)
		require.Equal(t, []string{filepath.Base(first)}, names(t, dir), "failed at %s", name)
		noRoom = false
		put(t, l, "after")
		require.Len(t, names(t, dir), 2)
		require.NoError(t, l.Close())
		l = open(t, dir, Options{})
		require.Len(t, replayed(t, l, 1), int(l.Next())-1)
	}
}

func names(t testing.TB, dir string) []string {
	t.Helper()
	list, err := os.ReadDir(dir)
	require.NoError(t, err)
	var got []string
	for _, e := range list {
		got = append(got, e.Name())
	}
	return got
}

// Without a way to claim blocks a full disk is met by the write itself, and stops the log with ErrNoSpace.
func TestFileSystemWithoutReserve(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "wal")
	var noRoom bool
	log := &logged{}
	l := open(t, dir, Options{Logger: slog.New(log), FS: newSeam(func(op operation) error {
		switch {
		case op.name == "reserve":
			return errors.ErrUnsupported
		case noRoom && op.name == "append":
			return syscall.ENOSPC
		}
		return nil
	})})
	put(t, l, "A", "B")
	require.Len(t, log.warnings(), 1, "told once")
	noRoom = true
	_, err := l.Append([]Record{record("C")})
	require.ErrorIs(t, err, txn.ErrNoSpace)
	noRoom = false
	_, err = l.Append([]Record{record("C")})
	require.ErrorIs(t, err, txn.ErrNoSpace)
	require.ErrorIs(t, l.Err(), txn.ErrNoSpace)
}
