package segment

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/holdfast-db/holdfast/txn"
)

// faultFS notes every call that changes or syncs something, and lets a test answer in the file system's place.
type faultFS struct {
	FS
	mu    sync.Mutex
	trace []string
	// hook is asked before a call is made; an error is returned instead of making it.
	hook func(op, name string) error
	// write is the most bytes that one write call takes; 0 means all.
	write int
}

func (f *faultFS) call(op, path string) error {
	name := filepath.Base(path)
	f.mu.Lock()
	defer f.mu.Unlock()
	if op != "read" && op != "open" && op != "opened" {
		f.trace = append(f.trace, strings.TrimLeft(op+" "+strings.TrimLeft(strings.TrimSuffix(name, ".seg"), "0"), " "))
	}
	hook := f.hook
	if hook == nil {
		return nil
	}
	f.mu.Unlock() // a hook may block
	err := hook(op, name)
	f.mu.Lock()
	return err
}

func (f *faultFS) set(hook func(op, name string) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.hook = hook
}

// takeTrace returns the calls noted since the last time.
func (f *faultFS) takeTrace() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	t := f.trace
	f.trace = nil
	return t
}

func (f *faultFS) Create(path string, direct bool) (File, error) {
	if err := f.call("create", path); err != nil {
		return nil, err
	}
	file, err := f.FS.Create(path, direct)
	if err != nil {
		return nil, err
	}
	return &faultFile{file, f, path}, nil
}

func (f *faultFS) Open(path string, write, direct bool) (File, error) {
	if err := f.call("open", path); err != nil {
		return nil, err
	}
	file, err := f.FS.Open(path, write, direct)
	if err != nil {
		return nil, err
	}
	if err := f.call("opened", path); err != nil {
		return nil, err
	}
	return &faultFile{file, f, path}, nil
}

func (f *faultFS) Remove(path string) error {
	if err := f.call("remove", path); err != nil {
		return err
	}
	return f.FS.Remove(path)
}

func (f *faultFS) SyncDir(dir string) error {
	if err := f.call("syncdir", ""); err != nil {
		return err
	}
	return f.FS.SyncDir(dir)
}

type faultFile struct {
	File
	fs   *faultFS
	path string
}

func (f *faultFile) ReadAt(b [][]byte, off int64) (int, error) {
	if err := f.fs.call("read", f.path); err != nil {
		return 0, err
	}
	return f.File.ReadAt(b, off)
}

func (f *faultFile) WriteAt(b [][]byte, off int64) (int, error) {
	if err := f.fs.call("write", f.path); err != nil {
		return 0, err
	}
	if f.fs.write > 0 {
		b = [][]byte{b[0][:min(len(b[0]), f.fs.write)]}
	}
	return f.File.WriteAt(b, off)
}

func (f *faultFile) Sync() error {
	if err := f.fs.call("sync", f.path); err != nil {
		return err
	}
	return f.File.Sync()
}

func (f *faultFile) Preallocate(off, n int64) error {
	if err := f.fs.call("preallocate", f.path); err != nil {
		return err
	}
	return f.File.Preallocate(off, n)
}

func (f *faultFile) Punch(off, n int64) error {
	if err := f.fs.call("punch", f.path); err != nil {
		return err
	}
	return f.File.Punch(off, n)
}

func (f *faultFile) Truncate(size int64) error {
	if err := f.fs.call("truncate", f.path); err != nil {
		return err
	}
	return f.File.Truncate(size)
}

func openFaulty(t testing.TB, dir string, change ...func(*Options)) (*Store, *faultFS) {
	f := &faultFS{FS: osFS{}}
	return open(t, dir, append([]func(*Options){func(o *Options) { o.FS = f }}, change...)...), f
}

// failOnce answers the nth call of op with err.
func failOnce(op string, nth int, err error) func(string, string) error {
	var mu sync.Mutex
	return func(o, _ string) error {
		mu.Lock()
		defer mu.Unlock()
		if o == op {
			if nth--; nth == 0 {
				return err
			}
		}
		return nil
	}
}

// blockFirst lets the first call of op wait until the gate is closed; blocked is closed once it waits.
func blockFirst(op string) (hook func(string, string) error, blocked, gate chan struct{}) {
	var first atomic.Bool
	blocked, gate = make(chan struct{}), make(chan struct{})
	return func(o, _ string) error {
		if o == op && first.CompareAndSwap(false, true) {
			close(blocked)
			<-gate
		}
		return nil
	}, blocked, gate
}

// Bytes and names are durable before an Append returns, whatever is new.
func TestEverythingIsSyncedBeforeItIsPlaced_B29(t *testing.T) {
	dir := t.TempDir()
	s, f := openFaulty(t, dir, func(o *Options) { o.SegmentBytes = SegmentBytesMin })
	seen := map[string]bool{}
	for i := range 100 {
		write(t, s, Own, pageOf(uint64(i+1), 20_000, true))
		dirty, undurable := false, false
		calls := f.takeTrace()
		for _, c := range calls {
			switch op, _, _ := strings.Cut(c, " "); op {
			case "create":
				require.False(t, seen[c], "%s again", c)
				seen[c] = true
				undurable = true
			case "write":
				dirty = true
			case "sync":
				dirty = false
			case "syncdir":
				require.False(t, dirty, "directory synced before the header: %v", calls)
				undurable = false
			}
		}
		require.Contains(t, strings.Join(calls, ","), "write")
		require.False(t, dirty || undurable, "append %d returned before a sync: %v", i, calls)
	}
	require.Greater(t, len(seen), 30)
	require.Equal(t, []string(nil), f.takeTrace())
}

func TestFailedWriteOrSyncEndsTheSegment_B29(t *testing.T) {
	for _, c := range []struct {
		name  string
		op    string
		nth   int // after the first append
		err   error
		class error
	}{
		{"write", "write", 1, unix.EIO, txn.ErrIO},
		{"sync", "sync", 1, unix.EIO, txn.ErrIO},
		{"full", "write", 1, unix.ENOSPC, txn.ErrNoSpace},
		{"quota", "write", 1, unix.EDQUOT, txn.ErrNoSpace},
		{"full at sync", "sync", 1, unix.ENOSPC, txn.ErrNoSpace},
		{"remounted", "write", 1, unix.EROFS, txn.ErrReadOnly},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			var log bytes.Buffer
			s, f := openFaulty(t, dir, func(o *Options) { o.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
			good := pageOf(1, 10_000, true)
			at := write(t, s, Own, good)
			f.set(failOnce(c.op, c.nth, &os.PathError{Op: c.op, Path: "x", Err: c.err}))
			f.takeTrace()
			lost := pageOf(2, 20_000, true)
			places, err := s.Append(t.Context(), Own, []Page{lost, pageOf(3, 64, true)})
			require.ErrorIs(t, err, c.class)
			require.ErrorIs(t, err, c.err)
			require.Nil(t, places)
			require.LessOrEqual(t, strings.Count(strings.Join(f.takeTrace(), ","), "sync 1"), 1, "the sync was tried again")
			require.Equal(t, 1, strings.Count(log.String(), "segment failed"))

			// The next one succeeds elsewhere; the failed segment keeps what was synced, and nothing else.
			again := write(t, s, Own, lost)
			require.EqualValues(t, 2, again[0].Segment)
			for _, call := range f.takeTrace() {
				require.NotContains(t, call, " 1", "the failed segment was touched")
			}
			verifyPages(t, s, []Page{good, lost}, append(at, again...))
			require.EqualValues(t, 1, s.Stats().SegmentsFailed)
			require.NoError(t, s.Close())
			s = open(t, dir)
			verifyPages(t, s, []Page{good, lost}, append(at, again...))
			sum, keys := scan(t, s, 1)
			require.Zero(t, sum.Torn)
			require.Equal(t, []txn.Key{good.Key}, keys)
		})
	}
}

func TestFailedBeginningLeavesNothing_B29(t *testing.T) {
	for _, c := range []struct {
		op    string
		nth   int
		class error
		err   error
	}{
		{"create", 1, txn.ErrNoSpace, unix.ENOSPC}, // a directory that is full (B20)
		{"create", 1, txn.ErrPermission, unix.EACCES},
		{"create", 1, txn.ErrBusy, unix.EMFILE},
		{"write", 1, txn.ErrIO, unix.EIO},
		{"write", 2, txn.ErrIO, unix.EIO},
		{"sync", 1, txn.ErrIO, unix.EIO},
		{"sync", 2, txn.ErrIO, unix.EIO},
		{"syncdir", 1, txn.ErrIO, unix.EIO},
	} {
		t.Run(fmt.Sprint(c.op, c.nth, c.err), func(t *testing.T) {
			s, f := openFaulty(t, t.TempDir())
			f.set(failOnce(c.op, c.nth, c.err))
			p := pageOf(1, 5000, true)
			_, err := s.Append(t.Context(), Own, []Page{p})
			require.ErrorIs(t, err, c.class)
			infos, err := s.Segments()
			require.NoError(t, err)
			require.Empty(t, infos)
			left, err := os.ReadDir(s.dir)
			require.NoError(t, err)
			require.Empty(t, left, "a failed beginning left a file")
			at := write(t, s, Own, p)
			require.EqualValues(t, 2, at[0].Segment, "a number was used twice")
			verifyPages(t, s, []Page{p}, at)
		})
	}
}

func TestShortWritesAreContinued_FSA03(t *testing.T) {
	for _, c := range []struct {
		direct DirectMode
		write  int
	}{{DirectOff, 3}, {DirectOff, 4097}, {DirectAuto, 4096}} {
		dir := t.TempDir()
		s, f := openFaulty(t, dir, func(o *Options) { o.Direct = c.direct })
		f.write = c.write
		pages := []Page{pageOf(1, 10_000, true), pageOf(2, 64, true), pageOf(3, 5000, false)}
		places := write(t, s, Own, pages...)
		verifyPages(t, s, pages, places)
		require.NoError(t, s.Close())
		s = open(t, dir)
		verifyPages(t, s, pages, places)
		_, keys := scan(t, s, 1)
		require.Len(t, keys, 3)
	}
}

func TestWriteWithoutProgressIsAnError(t *testing.T) {
	s := open(t, t.TempDir(), func(o *Options) { o.FS = noProgress{osFS{}} })
	_, err := s.Append(t.Context(), Own, []Page{pageOf(1, 64, true)})
	require.ErrorIs(t, err, txn.ErrIO)
}

// noProgress takes no bytes and reports no error.
type noProgress struct{ FS }

func (n noProgress) Create(path string, direct bool) (File, error) {
	f, err := n.FS.Create(path, direct)
	return noProgressFile{f}, err
}

type noProgressFile struct{ File }

func (noProgressFile) WriteAt([][]byte, int64) (int, error) { return 0, nil }

// A group that fills a segment keeps what it had synced there if the next segment fails, for the requests that are
// complete; a request that is not gets an error and its space back.
func TestGroupThatFailsInItsSecondSegment(t *testing.T) {
	s, f := openFaulty(t, t.TempDir(), func(o *Options) { o.SegmentBytes = 256 << 10 })
	hook, blocked, gate := blockFirst("sync")
	f.set(hook)
	type result struct {
		at  []txn.Placement
		err error
	}
	var group [3]result
	var wg sync.WaitGroup
	submit := func(i int, pages ...Page) {
		wg.Go(func() { group[i].at, group[i].err = s.Append(t.Context(), Own, pages) })
	}
	submit(0, pageOf(1, 64, true)) // blocks the lane, so that the others become one group
	<-blocked
	first := []Page{pageOf(2, 100_000, true)}
	submit(1, first...)
	waitQueued(t, s, Own, 1)
	submit(2, pageOf(3, 100_000, true), pageOf(4, 100_000, true))
	waitQueued(t, s, Own, 2)
	f.set(func(op, name string) error {
		if op == "create" && strings.HasSuffix(name, "2.seg") {
			return unix.ENOSPC
		}
		return nil
	})
	close(gate)
	wg.Wait()
	require.NoError(t, group[0].err)
	require.NoError(t, group[1].err)
	verifyPages(t, s, first, group[1].at)
	require.ErrorIs(t, group[2].err, txn.ErrNoSpace)
	require.EqualValues(t, roundUp(100_000, blockBytes), s.Stats().BytesPunched)
}

// All requests of a group whose write fails get the error.
func TestFailureReachesEveryRequestOfTheGroup(t *testing.T) {
	s, f := openFaulty(t, t.TempDir())
	hook, blocked, gate := blockFirst("sync")
	f.set(hook)
	errs := make([]error, 4)
	var wg sync.WaitGroup
	submit := func(i int) {
		wg.Go(func() { _, errs[i] = s.Append(t.Context(), Own, []Page{pageOf(uint64(i+1), 5000, true)}) })
	}
	submit(0)
	<-blocked
	for i := 1; i < 4; i++ {
		submit(i)
	}
	waitQueued(t, s, Own, 3)
	f.set(failOnce("sync", 2, unix.EIO)) // the first is that of the batch before, of which the header's was blocked
	close(gate)
	wg.Wait()
	require.NoError(t, errs[0])
	for _, err := range errs[1:] {
		require.ErrorIs(t, err, txn.ErrIO)
	}
}

// waitQueued waits until n requests are in the queue of the class.
func waitQueued(t testing.TB, s *Store, c Class, n int) {
	t.Helper()
	l, err := s.lane(c)
	require.NoError(t, err)
	for len(l.queue) != n {
		// The sender is running; there is nothing to wait on that tells when it has sent.
		gosched()
	}
}

func TestQueuedAppendCanBeCancelled_B30(t *testing.T) {
	s, f := openFaulty(t, t.TempDir(), func(o *Options) { o.QueueLimit = 1 })
	write(t, s, Own, pageOf(1, 64, true))
	hook, blocked, gate := blockFirst("write")
	f.set(hook)
	var wg sync.WaitGroup
	var ended [3]chan struct{}
	errs := make([]error, 3)
	ctxs := make([]context.Context, 3)
	cancels := make([]context.CancelFunc, 3)
	appendPage := func(i int) {
		ctxs[i], cancels[i] = context.WithCancel(t.Context())
		ended[i] = make(chan struct{})
		wg.Go(func() {
			defer close(ended[i])
			_, errs[i] = s.Append(ctxs[i], Own, []Page{pageOf(uint64(10+i), 64, true)})
		})
	}
	appendPage(0) // being written
	<-blocked
	appendPage(1) // queued
	waitQueued(t, s, Own, 1)
	appendPage(2) // waits for a place in the queue
	for i := range 3 {
		cancels[i]()
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := s.Append(ctx, Own, []Page{pageOf(20, 64, true)})
	require.ErrorIs(t, err, txn.ErrBusy)
	// Another class does not wait for the stuck one, nor do reads.
	other := pageOf(30, 64, true)
	at := write(t, s, Shared, other)
	verifyPages(t, s, []Page{other}, at)
	<-ended[1] // before the gate opens: what is taken from the queue by then would be written all the same
	<-ended[2]
	close(gate)
	wg.Wait()
	require.NoError(t, errs[0], "what is being written is waited for")
	require.ErrorIs(t, errs[1], txn.ErrBusy)
	require.ErrorIs(t, errs[2], txn.ErrBusy)
	require.EqualValues(t, 3, s.Stats().PagesWritten)
}

// A file system that takes the flag and refuses the access is read and written buffered from then on.
func TestDirectRefusedLate(t *testing.T) {
	s, f := openFaulty(t, t.TempDir())
	if !directHere(t) {
		t.Skip("no direct I/O on the file system of the temporary directory")
	}
	f.set(failOnce("write", 1, unix.EINVAL))
	p := pageOf(1, 10_000, true)
	at := write(t, s, Own, p)
	require.EqualValues(t, 2, at[0].Segment)
	n := s.Stats()
	require.EqualValues(t, 1, n.DirectRefused)
	require.EqualValues(t, 2, n.BufferedWrites)
	require.Positive(t, s.Stats().BufferedWrites)
	require.Len(t, mustSegments(t, s), 1)
	verifyPages(t, s, []Page{p}, at)
	require.Zero(t, s.Stats().DirectReads)

	s, f = openFaulty(t, s.dir)
	f.set(failOnce("read", 1, unix.EINVAL))
	verifyPages(t, s, []Page{p}, at)
	require.EqualValues(t, 1, s.Stats().DirectRefused)
	require.Positive(t, s.Stats().BufferedReads)
}

func directHere(t testing.TB) bool {
	f, err := openFile(filepath.Join(t.TempDir(), "probe"), os.O_RDWR|os.O_CREATE, true)
	require.NoError(t, err)
	defer f.Close()
	return f.Direct()
}

func mustSegments(t testing.TB, s *Store) []Info {
	t.Helper()
	infos, err := s.Segments()
	require.NoError(t, err)
	return infos
}

func TestReadErrorIsNotCorruption(t *testing.T) {
	s, f := openFaulty(t, t.TempDir())
	pages := []Page{pageOf(1, 4096, true), pageOf(2, 8192, true), pageOf(3, 4096, true), pageOf(4, 64, true), pageOf(5, 64, true)}
	places := write(t, s, Own, pages...)
	batch := func() (rs []ReadRequest) {
		for i, p := range pages {
			rs = append(rs, reading(p, places[i], true))
		}
		return rs
	}
	f.set(func(op, _ string) error {
		if op == "read" {
			return unix.EIO
		}
		return nil
	})
	errs := s.ReadBatch(t.Context(), batch())
	require.Len(t, errs, len(pages))
	for _, err := range errs {
		require.ErrorIs(t, err, txn.ErrIO)
		require.NotErrorIs(t, err, txn.ErrCorrupt)
	}
	// A run that fails once is read page by page.
	f.set(failOnce("read", 1, unix.EIO))
	require.Nil(t, s.ReadBatch(t.Context(), batch()))
	f.set(failOnce("read", 2, unix.EIO))
	require.Nil(t, s.ReadBatch(t.Context(), batch()))
	require.Zero(t, s.Stats().PagesCorrupt)
}

// A page that is read while its segment is removed comes back whole.
func TestRemoveWaitsForReaders_B14(t *testing.T) {
	s, f := openFaulty(t, t.TempDir())
	p := pageOf(1, 100_000, true)
	at := write(t, s, Own, p)
	require.NoError(t, s.Seal(t.Context()))
	hook, blocked, gate := blockFirst("read")
	f.set(hook)
	r, done := reading(p, at[0], true), make(chan error)
	go func() { done <- s.Read(t.Context(), r) }()
	<-blocked
	require.NoError(t, s.Remove(at[0].Segment))
	require.ErrorIs(t, s.Read(t.Context(), reading(p, at[0], true)), txn.ErrNotFound)
	close(gate)
	require.NoError(t, <-done)
	require.Equal(t, p.Bytes, r.Dst)
	require.Zero(t, s.open, "the removed file is still open, and its blocks with it")
	require.NoError(t, s.Free(at), "freeing what is gone")
}

// A file that was opened while its segment was removed is not kept: its blocks would not come back.
func TestRemoveDuringOpen_B14(t *testing.T) {
	s, f := openFaulty(t, t.TempDir())
	p := pageOf(1, 100_000, true)
	at := write(t, s, Own, p)
	require.NoError(t, s.Seal(t.Context()))
	hook, blocked, gate := blockFirst("opened")
	f.set(hook)
	done := make(chan error)
	go func() { done <- s.Read(t.Context(), reading(p, at[0], true)) }()
	<-blocked
	require.NoError(t, s.Remove(at[0].Segment))
	close(gate)
	require.ErrorIs(t, <-done, txn.ErrNotFound)
	require.Zero(t, s.open)
}

func TestReadWaitsForItsTurnNoLongerThanItsContext(t *testing.T) {
	s, f := openFaulty(t, t.TempDir(), func(o *Options) { o.ReadParallel = 1 })
	p := pageOf(1, 64, true)
	at := write(t, s, Own, p)
	hook, blocked, gate := blockFirst("read")
	f.set(hook)
	done := make(chan error)
	go func() { done <- s.Read(t.Context(), reading(p, at[0], true)) }()
	<-blocked
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := s.Read(ctx, reading(p, at[0], true))
	require.ErrorIs(t, err, txn.ErrBusy)
	require.ErrorIs(t, err, context.Canceled)
	close(gate)
	require.NoError(t, <-done)
}

func TestPreallocationThatFailsIsNoError(t *testing.T) {
	for _, refusal := range []error{unix.ENOSPC, errors.ErrUnsupported} {
		s, f := openFaulty(t, t.TempDir())
		f.set(func(op, _ string) error {
			if op == "preallocate" {
				return refusal
			}
			return nil
		})
		p := pageOf(1, 100_000, true)
		verifyPages(t, s, []Page{p}, write(t, s, Own, p))
		verifyPages(t, s, []Page{p}, write(t, s, Own, p))
		want := int64(2)
		if refusal == errors.ErrUnsupported {
			want = 1
		}
		require.Equal(t, want, s.Stats().PreallocRefused)
	}
}
