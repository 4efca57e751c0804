package db

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Close: what it keeps, what it waits for, and when it returns.

// Close writes what is current, then what is superseded, and both restore after it. With no time left it writes nothing, what was not written
// is retired by the next open, and nothing is listed that cannot be read.
func TestCloseWritesWhatItHasTimeFor_SHD01(t *testing.T) {
	for _, budget := range []time.Duration{time.Minute, 0} {
		d := openDB(t, tempDir(t), Options{WritePolicy: OnEvict, SupersedeGrace: -1})
		ns, books := testNamespace(t, 2, sevenPages(4096)...), shelf{}
		older, current := seqOf(t, ns, tokens(1, 48)), seqOf(t, ns, tokens(2, 48))
		a, _ := books.publish(t, d, older, 48)
		b, _ := books.publish(t, d, current, 48)
		require.NoError(t, d.Supersede(context.Background(), b, a))
		ctx, cancel := context.WithTimeout(context.Background(), budget)
		report, err := d.Close(ctx)
		cancel()
		want := int64(48)
		if budget == 0 {
			want = 0
			require.NoError(t, err, "what was said to be lost is not an error")
			require.Zero(t, report.Persisted)
			require.Equal(t, 2, report.Retired)
		} else {
			require.NoError(t, err)
			require.EqualValues(t, 2*7, report.Persisted)
			require.EqualValues(t, 2*2*7*4096, report.PersistedBytes)
			require.Zero(t, report.Retired)
		}
		d = openDB(t, d.dir.path, Options{})
		require.Equal(t, want, restoreAt(t, d, older))
		require.Equal(t, want, restoreAt(t, d, current))
		books.requireListedIsReadable(t, d)
		recount(t, d)
	}
}

// The order of what is written at the end: current before superseded.
func TestCloseWritesCurrentFirst_SHD01(t *testing.T) {
	v := newValve()
	d := openDB(t, tempDir(t), Options{WritePolicy: OnEvict, SupersedeGrace: -1, RAMBytes: 128 << 20, SegmentBytes: 64 << 20, segmentFS: v.segments()})
	ns, books := testNamespace(t, 1, sevenPages(3<<20)...), shelf{}
	older, current := seqOf(t, ns, tokens(1, 48)), seqOf(t, ns, tokens(2, 48))
	a, _ := books.publish(t, d, older, 48)
	b, _ := books.publish(t, d, current, 48)
	require.NoError(t, d.Supersede(context.Background(), b, a))
	// Time for one of the two: the disk takes its time with every batch, and they go in pieces of writeBackBytes.
	v.slow("sync", 300*time.Millisecond)
	report, err := d.Close(briefly(t, 1500*time.Millisecond))
	v.slow("sync", 0)
	if err != nil {
		crash(t, d) // a write was under way at the deadline
	}
	d = openDB(t, d.dir.path, Options{RAMBytes: 64 << 20})
	x, y := restoreAt(t, d, older), restoreAt(t, d, current)
	require.LessOrEqual(t, x, y, "never the superseded one without the current one; %+v", report)
	books.requireListedIsReadable(t, d)
	recount(t, d)
}

// Close lets a publication in flight finish, for a bounded time that ends as soon as none is left, and counts those that it ends.
func TestCloseDrainsPublications_SHD02(t *testing.T) {
	for _, finishes := range []bool{true, false} {
		d := openDB(t, tempDir(t), Options{WritePolicy: OnEvict})
		seq, books := seqOf(t, testNamespace(t, 2, sevenPages(4096)...), tokens(1, 48)), shelf{}
		p := begin(t, d, seq, 48)
		fill(t, p, 0)
		fill(t, p, 1)
		require.False(t, commit(t, p, 0))
		budget := 5 * patience
		if !finishes {
			budget = 3 * time.Second // of which a third is given to what is pending
		}
		type result struct {
			report CloseReport
			err    error
		}
		closed := make(chan result, 1)
		begun := time.Now()
		go func() {
			r, err := d.Close(briefly(t, budget))
			closed <- result{r, err}
		}()
		require.Eventually(t, func() bool {
			d.pending.mu.Lock()
			defer d.pending.mu.Unlock()
			return d.pending.closed
		}, patience, time.Millisecond)
		_, err := d.Begin(context.Background(), PublishRequest{Sequence: seq, Offset: 20})
		requireClass(t, err, ErrClosed)
		if finishes {
			require.True(t, commit(t, p, 1))
		}
		got := <-closed
		require.NoError(t, got.err)
		d = openDB(t, d.dir.path, Options{})
		if finishes {
			timely(t, begun, time.Second) // it ends as soon as none is left
			require.Zero(t, got.report.Aborted)
			require.EqualValues(t, 7, got.report.Persisted)
			require.EqualValues(t, 48, restoreAt(t, d, seq))
		} else {
			require.Equal(t, 1, got.report.Aborted)
			require.Zero(t, restoreAt(t, d, seq))
			_, err = p.Commit(context.Background(), 1)
			require.Error(t, err)
		}
		books.keep(t, p.Generation(), seq, 48)
		books.requireListedIsReadable(t, d)
		recount(t, d)
	}
}

// Close does not take memory from under a copy: the publication is given up, its memory stays until the copy is proven finished.
func TestCloseLeavesMemoryUnderACopy_SHD03(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	seq := seqOf(t, testNamespace(t, 1, sevenPages(4096)...), tokens(1, 48))
	p := begin(t, d, seq, 48)
	of := slots(t, p, 0)
	under := of[0].Buffer()
	copied, err := p.Transfer(0)
	require.NoError(t, err)
	_, err = p.Commit(context.Background(), 0)
	require.Error(t, err, "not while the copy runs")
	report, err := d.Close(briefly(t, 1500*time.Millisecond)) // of which a third is given to what is pending
	require.NoError(t, err)
	require.Equal(t, 1, report.Aborted)
	require.Equal(t, 1, report.Transfers)
	for i := range under {
		under[i] = 1
	}
	require.NotZero(t, d.arena.Usage().Slots)
	copied.Done()
	require.Zero(t, d.arena.Usage().Slots)
	d = openDB(t, d.dir.path, Options{})
	require.Zero(t, lookupAt(t, d, seq))
	publish(t, d, seq, 48)
	require.EqualValues(t, 48, restoreAt(t, d, seq))
	recount(t, d)
}

// A disk that hangs, the one of the pages or the one of the log, holds up Close until its deadline and no longer, whoever is inside at
// that time; what the hanging operation does later harms nobody.
func TestCloseReturnsAtItsDeadline_SHD04_B30(t *testing.T) {
	for _, op := range []string{"write", "sync", "read", "log sync"} {
		t.Run(op, func(t *testing.T) {
			v, books := newValve(), shelf{}
			d := openDB(t, tempDir(t), Options{segmentFS: v.segments(), walFS: v.log()})
			seq, gen := onDisk(t, d, books, 1)
			next := seqOf(t, seq.Namespace(), tokens(2, 48))
			owner := newOwner(t, d, time.Hour)
			p := begin(t, d, next, 48, func(r *PublishRequest) { r.Owner = owner })
			fill(t, p, 0)
			fill(t, p, 1)
			require.False(t, commit(t, p, 0))
			open := v.close(op)
			committed, restored := make(chan error, 1), make(chan error, 1)
			go func() {
				_, err := p.Commit(context.Background(), 1)
				committed <- err
			}()
			go func() {
				r, err := d.Restore(context.Background(), seq, LookupOptions{})
				if err == nil {
					r.Release()
				}
				restored <- err
			}()
			v.waitFor(t, op)
			begun := time.Now()
			_, err := d.Close(briefly(t, 500*time.Millisecond))
			timely(t, begun, 550*time.Millisecond)
			if op != "read" { // it may be over by then
				requireClass(t, err, ErrBusy)
			}
			_, again := d.Close(context.Background())
			require.Equal(t, err, again, "the same answer")
			open()
			<-committed
			<-restored
			if err != nil {
				crash(t, d)
			}
			d = openDB(t, d.dir.path, Options{})
			books.keep(t, p.Generation(), next, 48)
			books.requireListedIsReadable(t, d)
			require.EqualValues(t, 48, restoreAt(t, d, seq))
			require.NoError(t, d.Delete(context.Background(), gen))
			recount(t, d)
		})
	}
}

// A process that publishes, supersedes, evicts and deletes is killed at any moment, many times over: what is listed after each
// restores byte for byte on all ranks.
func TestKilledAtAnyMoment_SHD05(t *testing.T) {
	const variable = "HOLDFAST_TEST_DIRECTORY"
	ns := testNamespace(t, 2, sevenPages(4096)...)
	conversation := func(i int) *Sequence {
		return seqOf(t, ns, tokens(uint64(i/3), 48), tokens(uint64(1000+i%3), 48))
	}
	const conversations = 24
	if dir := os.Getenv(variable); dir != "" {
		d := openDB(t, dir, Options{WritePolicy: WritePolicy(time.Now().UnixNano() % 2), RAMBytes: 512 << 10, DiskBytes: 1 << 20, SegmentBytes: 1 << 20})
		fmt.Println("ready")
		for i := 0; ; i = (i + 5) % conversations {
			seq := conversation(i)
			for _, n := range []int64{48, 96} {
				publish(t, d, seq, n)
			}
			restoreAt(t, d, conversation((i+7)%conversations))
		}
	}
	rounds := 8
	if testing.Short() {
		rounds = 3
	}
	dir := tempDir(t)
	found := 0
	for round := 0; round < rounds || found == 0 && round < 100; round++ { // longer on a machine that is too slow to publish
		child := exec.Command(os.Args[0], "-test.run=^TestKilledAtAnyMoment_SHD05$")
		child.Env = append(os.Environ(), variable+"="+dir)
		out, err := child.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, child.Start())
		ready := make([]byte, len("ready"))
		_, err = out.Read(ready)
		require.NoError(t, err)
		require.Equal(t, "ready", string(ready))
		timer := time.NewTimer(time.Duration(20+round*37) * time.Millisecond) // any moment
		<-timer.C
		require.NoError(t, child.Process.Kill())
		var exit *exec.ExitError
		require.True(t, errors.As(child.Wait(), &exit))
		d := openDB(t, dir, Options{DiskBytes: 1 << 20, SegmentBytes: 1 << 20})
		books := shelf{}
		for i := range conversations {
			for _, n := range []int64{48, 96} {
				seq := conversation(i)
				m, err := d.Lookup(context.Background(), seq, LookupOptions{MaxOffset: n})
				if err != nil {
					require.ErrorIs(t, err, ErrNotFound)
					continue
				}
				books.keep(t, m.Generation, seq, m.Offset)
			}
		}
		found += len(books.requireListedIsReadable(t, d))
		recount(t, d)
		closeDB(t, d)
	}
	require.NotZero(t, found, "something survived")
}
