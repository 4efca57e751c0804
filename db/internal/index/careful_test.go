package index

import (
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

// watched is a file system in memory that notes what is made and synced, and fails writes of chosen files.
type watched struct {
	vfs.FS
	mu    sync.Mutex // guards what follows
	calls []string
	fails string // prefix of the names of files that cannot be written
	left  int    // failures; less than 0: no end of them
}

func (w *watched) note(call string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.calls = append(w.calls, call)
}

func (w *watched) fail(prefix string, times int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.fails, w.left = prefix, times
}

func (w *watched) failing(name string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	base := w.PathBase(name)
	if w.fails == "" || w.left == 0 || !strings.HasPrefix(base, w.fails) && !strings.HasSuffix(base, w.fails) {
		return false
	}
	w.left--
	return true
}

func (w *watched) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	w.note("create " + w.PathBase(name))
	f, err := w.FS.Create(name, c)
	return &watchedFile{f, w, name}, err
}

func (w *watched) OpenDir(name string) (vfs.File, error) {
	f, err := w.FS.OpenDir(name)
	return &watchedFile{f, w, name}, err
}

func (w *watched) Remove(name string) error {
	w.note("remove " + w.PathBase(name))
	return w.FS.Remove(name)
}

type watchedFile struct {
	vfs.File
	w    *watched
	name string
}

func (f *watchedFile) Write(b []byte) (int, error) {
	if f.w.failing(f.name) {
		return 0, syscall.EIO
	}
	return f.File.Write(b)
}

func (f *watchedFile) Sync() error {
	f.w.note("sync " + f.w.PathBase(f.name))
	return f.File.Sync()
}

func openWatched(t *testing.T) (*watched, *Index) {
	w := &watched{FS: vfs.NewMem()}
	x, err := Open("index", Options{FS: w})
	require.NoError(t, err)
	return w, x
}

func commitOne(t *testing.T, x *Index) {
	b := x.NewBatch()
	require.NoError(t, b.Set([]byte("k"), []byte("v")))
	require.NoError(t, b.Commit())
}

// Between a manifest and the marker that names it the directory is synced: no power failure leaves a marker of nothing.
func TestDirectoryIsSyncedBeforeAMarker(t *testing.T) {
	w, x := openWatched(t)
	require.NoError(t, x.Close())
	manifests := 0
	for i, call := range w.calls {
		if !strings.HasPrefix(call, "create "+markerPrefix+"manifest") {
			continue
		}
		manifests++
		made := 0
		for j, before := range w.calls[:i] {
			if strings.HasPrefix(before, "create "+manifestPrefix) {
				made = j
			}
		}
		require.Contains(t, w.calls[made:i], "sync index")
	}
	require.Positive(t, manifests)
}

// Between a marker and the removal of the one before it the directory is synced: no power failure leaves none.
func TestDirectoryIsSyncedBeforeAMarkerIsRemoved(t *testing.T) {
	w, x := openWatched(t)
	require.NoError(t, x.Close())
	x, err := Open("index", Options{FS: w})
	require.NoError(t, err)
	require.NoError(t, x.Close())
	removed := 0
	for i, call := range w.calls {
		if !strings.HasPrefix(call, "remove "+markerPrefix) {
			continue
		}
		removed++
		made := 0
		for j, before := range w.calls[:i] {
			if strings.HasPrefix(before, "create "+markerPrefix) {
				made = j
			}
		}
		require.Contains(t, w.calls[made:i], "sync index")
	}
	require.Positive(t, removed)
}

// A manifest that cannot be written stops the index, and nothing else: what is in it can be read, the process lives.
func TestFailedManifestStopsTheIndex(t *testing.T) {
	w, x := openWatched(t)
	commitOne(t, x)
	w.fail(manifestPrefix, -1)
	require.ErrorIs(t, x.Flush(), txn.ErrIO)
	require.ErrorIs(t, x.Err(), txn.ErrIO)
	s := x.Snapshot()
	v, err := s.Get([]byte("k"))
	require.NoError(t, err)
	require.Equal(t, "v", string(v))
	require.NoError(t, s.Close())
	w.fail("", 0)
	_ = x.Close() // its error is about what could not be written
	x, err = Open("index", Options{FS: w.FS})
	require.NoError(t, err)
	require.NoError(t, x.Err())
	require.NoError(t, x.Close())
}

// A flush that fails is tried again, a bounded number of times for whoever waits, and goes through once the disk is well.
func TestFailedFlushIsTriedAgain(t *testing.T) {
	w, x := openWatched(t)
	commitOne(t, x)
	w.fail(".sst", -1)
	require.ErrorIs(t, x.Flush(), txn.ErrIO)
	require.NoError(t, x.Err())
	w.fail("", 0)
	require.NoError(t, x.Flush())
	require.NoError(t, x.Close())
}
