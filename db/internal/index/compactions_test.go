package index

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

// tables makes so many tables of the newest level.
func tables(t *testing.T, x *Index, from, n int) {
	t.Helper()
	for i := range n {
		apply(t, x, txn.LSN(from+i))
		require.NoError(t, x.Flush())
	}
}

// Given an index that has compactions to do, when it is opened, then none of them begins before Begin, and then they are done.
func TestCompactionsWaitForBegin(t *testing.T) {
	mem := vfs.NewMem()
	x := openTest(t, mem)
	tables(t, x, 1, 12)
	require.EqualValues(t, 12, x.Shape().Levels[0].Files)
	require.NoError(t, x.Close())
	x = openTest(t, mem)
	require.EqualValues(t, 12, x.Shape().Levels[0].Files)
	x.Begin()
	require.Eventually(t, func() bool { return x.Shape().Levels[0].Files < 4 }, time.Minute, time.Millisecond)
	require.NoError(t, x.Close())
}

// Writes that have to wait for a compaction do not wait for Begin.
func TestCompactionsBeginWhereWritesWait(t *testing.T) {
	x := openTest(t, vfs.NewMem())
	tables(t, x, 1, 60)
	require.Less(t, x.Shape().Levels[0].Files, int64(60))
	require.NoError(t, x.Close())
}

// asked is a database that always has a compaction waiting, and takes every grant or none.
type asked struct {
	takes  atomic.Bool
	grants atomic.Int64
}

func (*asked) GetAllowedWithoutPermission() int { return 1 }

func (*asked) GetWaitingCompaction() (bool, pebble.WaitingCompaction) {
	return true, pebble.WaitingCompaction{}
}

func (a *asked) Schedule(pebble.CompactionGrantHandle) bool {
	if a.takes.Load() {
		a.grants.Add(1)
		return true
	}
	a.takes.Store(true) // the next one
	return false
}

// One compaction runs at a time, what was refused is asked for again, and after one that failed the next waits for the pause.
func TestCompactionsRunOneAtATimeAndPauseAfterAFailure(t *testing.T) {
	c, a := newCompactions(), &asked{}
	c.Register(2, a)
	ok, _ := c.TrySchedule()
	require.False(t, ok, "before Begin")
	c.begin()
	require.EqualValues(t, 1, a.grants.Load())
	ok, _ = c.TrySchedule()
	require.False(t, ok, "one is running")
	c.grant()
	require.EqualValues(t, 1, a.grants.Load())
	for n := range int64(4) {
		begun := time.Now()
		c.ended(pebble.CompactionInfo{Err: errors.New("cannot be read")})
		c.Done()
		require.Eventually(t, func() bool { return a.grants.Load() == n+2 }, time.Minute, time.Millisecond)
		require.GreaterOrEqual(t, time.Since(begun), pauseMin<<n)
	}
	c.ended(pebble.CompactionInfo{})
	c.Done()
	require.EqualValues(t, 6, a.grants.Load(), "a success ends the pauses")
	c.ended(pebble.CompactionInfo{Err: errors.New("cannot be read")})
	c.Done()
	c.Unregister()
	ok, _ = c.TrySchedule()
	require.False(t, ok, "it is closing")
}

// What the index makes is for its owner only.
func TestFilesAreForTheirOwner(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "index")
	x, err := Open(dir, Options{})
	require.NoError(t, err)
	tables(t, x, 1, 3)
	n := 0
	require.NoError(t, filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		info, statErr := os.Stat(path)
		if errors.Is(statErr, fs.ErrNotExist) {
			return nil // gone by now
		}
		require.NoError(t, errors.Join(err, statErr))
		require.Zero(t, info.Mode().Perm()&0o077, path)
		n++
		return nil
	}))
	require.Greater(t, n, 6)
	require.NoError(t, x.Close())
}
