package db

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

// Only the last distinct rank lists the checkpoint; ranks that repeat, and ranks that do not exist, count for nothing.
func TestListedByTheLastDistinctRank_PUB01(t *testing.T) {
	restarts(t, func(t *testing.T, crashed bool) {
		d := openDB(t, tempDir(t), Options{})
		seq, books := seqOf(t, testNamespace(t, 4, tiny()...), tokens(1, 100)), shelf{}
		p := begin(t, d, seq, 100)
		for _, rank := range []int{0, 0, 1, 2, 2} {
			fill(t, p, rank)
			require.False(t, commit(t, p, rank))
			require.Zero(t, lookupAt(t, d, seq))
			require.Zero(t, restoreAt(t, d, seq))
		}
		_, err := p.Commit(context.Background(), 4)
		require.ErrorIs(t, err, ErrInvalid)
		require.Zero(t, lookupAt(t, d, seq))
		fill(t, p, 3)
		require.True(t, commit(t, p, 3))
		require.EqualValues(t, 100, lookupAt(t, d, seq))
		require.False(t, commit(t, p, 3))
		books.keep(t, p.Generation(), seq, 100)
		d = reopen(t, d, crashed)
		require.Equal(t, []int64{100}, books.requireListedIsReadable(t, d))
	})
}

// Two producers of one prefix never make a checkpoint together: the ranks of one and those of the other are different sets.
// When one gives up, the other goes on with what the first had finished.
func TestRanksOfTwoProducersNeverMix_PUB02(t *testing.T) {
	for _, same := range []bool{false, true} { // the very same checkpoint, or one with other meta
		d := openDB(t, tempDir(t), Options{})
		seq, books := seqOf(t, testNamespace(t, 4, tiny()...), tokens(1, 100)), shelf{}
		a := begin(t, d, seq, 100)
		b := begin(t, d, seq, 100, func(r *PublishRequest) {
			if !same {
				r.Meta = []byte("b")
			}
		})
		require.Equal(t, same, a.Generation() == b.Generation())
		for _, rank := range []int{0, 1} {
			fill(t, a, rank)
			require.False(t, commit(t, a, rank))
		}
		for _, rank := range []int{2, 3} {
			_, err := b.Commit(context.Background(), rank)
			require.ErrorIs(t, err, ErrBusy, "the pages are the first one's to fill")
			ctx, cancel := context.WithTimeout(context.Background(), 1)
			_, err = b.Slots(ctx, rank)
			cancel()
			require.ErrorIs(t, err, ErrBusy)
		}
		require.Zero(t, lookupAt(t, d, seq))
		require.NoError(t, a.Abort())
		for rank := range 4 {
			n := fill(t, b, rank)
			if rank < 2 {
				require.Zero(t, n, "rank %d was finished by the first", rank)
			}
			require.Equal(t, rank == 3, commit(t, b, rank))
		}
		books.keep(t, b.Generation(), seq, 100)
		_, err := a.Commit(context.Background(), 2)
		require.ErrorIs(t, err, ErrConflict)
		require.Equal(t, []int64{100}, books.requireListedIsReadable(t, d))
		requireEmpty(t, d)
	}
}

// A second generation of the same exact prefix replaces the first in the record that lists it: before, the first is found,
// after, the second, at no time neither or both.
func TestReplacementIsAtomic_PUB03(t *testing.T) {
	restarts(t, func(t *testing.T, crashed bool) {
		d := openDB(t, tempDir(t), Options{})
		seq, books := seqOf(t, testNamespace(t, 4, tiny()...), tokens(1, 100)), shelf{}
		found := func() Generation {
			m, err := d.Lookup(context.Background(), seq, LookupOptions{})
			require.NoError(t, err)
			return m.Generation
		}
		a, _ := books.publish(t, d, seq, 100, withMeta("a"))
		p := begin(t, d, seq, 100, withMeta("b"))
		b := p.Generation()
		books.keep(t, b, seq, 100)
		require.NotEqual(t, a, b)
		for rank := range 4 {
			require.Equal(t, a, found())
			require.Zero(t, fill(t, p, rank), "both have the same pages")
			require.Equal(t, rank == 3, commit(t, p, rank))
		}
		require.Equal(t, b, found())
		_, err := d.Checkpoint(a)
		require.ErrorIs(t, err, ErrNotFound)
		d = reopen(t, d, crashed)
		require.Equal(t, b, found())
		require.ErrorIs(t, d.Retire(context.Background(), a), ErrNotFound, "a late retire of the first does not touch the second")
		require.ErrorIs(t, d.Delete(context.Background(), a), ErrNotFound)
		require.Equal(t, b, found())
		require.Equal(t, []int64{100}, books.requireListedIsReadable(t, d))
		require.NoError(t, d.Retire(context.Background(), b))
		require.Zero(t, lookupAt(t, d, seq))
		require.Empty(t, books.requireListedIsReadable(t, d))
		require.NoError(t, d.Delete(context.Background(), b))
		requireEmpty(t, d)
	})
}

// However many threads commit the ranks however often, one call reports that the checkpoint is listed.
func TestOneCallReportsTheListing_PUB04(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	seq, books := seqOf(t, testNamespace(t, 4, tiny()...), tokens(1, 100)), shelf{}
	p := begin(t, d, seq, 100)
	var reports atomic.Int64
	var group sync.WaitGroup
	for rank := range 4 {
		fill(t, p, rank)
	}
	for range 8 {
		group.Go(func() {
			for i := range 8 {
				listed, err := p.Commit(context.Background(), i%4)
				if err != nil {
					reports.Add(1000)
				} else if listed {
					reports.Add(1)
				}
				p.Listed()
				p.Generation()
			}
		})
	}
	group.Wait()
	require.EqualValues(t, 1, reports.Load())
	require.False(t, p.Listed(), "it was not when it began")
	books.keep(t, p.Generation(), seq, 100)
	require.Equal(t, []int64{100}, books.requireListedIsReadable(t, d))
}

// Of two publications of the very same checkpoint, each is a success and one of them listed it.
func TestTwinsListOnce_PUB04_DED01(t *testing.T) {
	for _, policy := range []WritePolicy{WriteThrough, OnEvict} {
		d := openDB(t, tempDir(t), Options{WritePolicy: policy})
		seq, books := seqOf(t, testNamespace(t, 2, tiny()...), tokens(1, 100)), shelf{}
		a, b := begin(t, d, seq, 100), begin(t, d, seq, 100, durable)
		require.Equal(t, a.Generation(), b.Generation())
		for rank := range 2 {
			fill(t, a, rank)
			require.Equal(t, rank == 1, commit(t, a, rank))
		}
		for rank := range 2 {
			require.Zero(t, fill(t, b, rank))
			require.False(t, commit(t, b, rank), "it was listed by the other")
		}
		books.keep(t, a.Generation(), seq, 100)
		s := stats(t, d)
		require.EqualValues(t, 1, s.Published)
		require.EqualValues(t, 1, s.Replays)
		require.Zero(t, s.Undurable, "the second asked for a disk copy")
		d = reopen(t, d, true)
		require.Equal(t, []int64{100}, books.requireListedIsReadable(t, d))
	}
}

// A slot that is filled with another number of bytes than was declared is refused when the rank commits, a group of another
// shape when the publication begins; nothing is reserved or listed by either.
func TestDeclaredShapeIsBinding_PUB05(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	ns := testNamespace(t, 4, tiny()...)
	seq := seqOf(t, ns, tokens(1, 100))
	before := still(t, d)
	_, err := d.Begin(context.Background(), PublishRequest{Sequence: seq, Offset: 100, Groups: []PageSet{
		{Group: "attention:kv", Positions: []int64{0, 1, 2}}, {Group: "recurrent:state", Positions: []int64{0}},
	}})
	require.ErrorIs(t, err, ErrInvalid)
	require.Equal(t, before, still(t, d))

	p := begin(t, d, seq, 100)
	for rank := range 4 {
		fill(t, p, rank)
	}
	doubled := slots(t, p, 2)[0]
	doubled.Filled(2 * doubled.Size())
	for range 2 {
		_, err = p.Commit(context.Background(), 2)
		require.ErrorIs(t, err, ErrInvalid)
		require.ErrorContains(t, err, "128 of 64 bytes")
	}
	require.Zero(t, lookupAt(t, d, seq))
	require.NoError(t, p.Abort())
	require.Equal(t, before, still(t, d))
	requireEmpty(t, d)
}

// One failed rank fails all: whatever the others did, nothing is listed, no byte of it stays, and the ranks that come late are
// told so.
func TestOneFailedRankFailsAll_PUB06(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	seq := seqOf(t, testNamespace(t, 4, tiny()...), tokens(1, 100))
	before := still(t, d)
	p := begin(t, d, seq, 100)
	for rank := range 4 {
		fill(t, p, rank)
	}
	require.False(t, commit(t, p, 0))
	require.NoError(t, p.Abort(), "rank 1 failed")
	for _, rank := range []int{2, 3, 0, 1} {
		_, err := p.Commit(context.Background(), rank)
		require.ErrorIs(t, err, ErrConflict)
		_, err = p.Slots(context.Background(), rank)
		require.ErrorIs(t, err, ErrConflict)
		_, err = p.Transfer(rank)
		require.ErrorIs(t, err, ErrConflict)
	}
	require.Zero(t, lookupAt(t, d, seq))
	require.Equal(t, before, still(t, d))
	requireEmpty(t, d)
}

// When the tier fails the write, the error comes out of the commit, nothing is visible or held, and the same checkpoint can be
// begun again at once.
func TestFailedTierFailsTheCommit_PUB07(t *testing.T) {
	disk := &seam{}
	d := openDB(t, tempDir(t), Options{segmentFS: disk.segments()})
	seq, books := seqOf(t, testNamespace(t, 2, tiny()...), tokens(1, 100)), shelf{}
	for _, c := range []struct{ failure, class error }{{syscall.EIO, ErrIO}, {syscall.ENOSPC, ErrNoSpace}} {
		for _, op := range []string{"create", "write", "sync"} {
			p := begin(t, d, seq, 100)
			fill(t, p, 0)
			fill(t, p, 1)
			require.False(t, commit(t, p, 0))
			disk.fail(op, c.failure)
			_, err := p.Commit(context.Background(), 1)
			disk.fail("", nil)
			require.ErrorIs(t, err, c.class, op)
			require.ErrorIs(t, err, c.failure, op)
			require.Zero(t, lookupAt(t, d, seq))
			_, err = p.Commit(context.Background(), 1)
			require.ErrorIs(t, err, ErrConflict)
			require.Empty(t, books.requireListedIsReadable(t, d))
			awaitNothing(t, d)
			require.NoError(t, d.segments.Seal(context.Background()))
		}
	}
	books.publish(t, d, seq, 100)
	d = reopen(t, d, true)
	require.Equal(t, []int64{100}, books.requireListedIsReadable(t, d))
	requireEmpty(t, d)
}

// End to end: nothing before the last rank, then every rank reads back exactly its own bytes, and nothing stays held.
func TestEveryRankReadsItsOwnBytes_PUB08(t *testing.T) {
	restarts(t, func(t *testing.T, crashed bool) {
		d := openDB(t, tempDir(t), Options{})
		seq, books := seqOf(t, testNamespace(t, 4), tokens(1, 500)), shelf{}
		p := begin(t, d, seq, 500, withMeta("blob"))
		for rank := range 4 {
			require.Zero(t, restoreAt(t, d, seq))
			fill(t, p, rank)
			require.Equal(t, rank == 3, commit(t, p, rank))
		}
		books.keep(t, p.Generation(), seq, 500)
		require.EqualValues(t, 500, restoreAt(t, d, seq))
		d = reopen(t, d, crashed)
		require.Equal(t, []int64{500}, books.requireListedIsReadable(t, d))
	})
}

// What was pending at a restart is gone, what was listed is there, and the publication of before the restart cannot list
// anything any more.
func TestRestartDiscardsWhatWasPending_PUB09(t *testing.T) {
	restarts(t, func(t *testing.T, crashed bool) {
		d := openDB(t, tempDir(t), Options{})
		seq, books := seqOf(t, testNamespace(t, 2, tiny()...), []int32{1, 2, 3}), shelf{}
		books.publish(t, d, seq, 2)
		p := begin(t, d, seq, 3)
		fill(t, p, 0)
		require.False(t, commit(t, p, 0))
		require.EqualValues(t, 1, stats(t, d).Checkpoints)
		require.EqualValues(t, 1, stats(t, d).Pending)

		dir := d.dir.path
		if crashed {
			crash(t, d)
		} else {
			ctx, cancel := context.WithTimeout(context.Background(), 1500*time.Millisecond) // of which a third is given to what is pending
			defer cancel()
			report, err := d.Close(ctx)
			require.NoError(t, err)
			require.Equal(t, 1, report.Aborted)
		}
		_, err := p.Commit(context.Background(), 1)
		require.ErrorIs(t, err, ErrClosed)
		d = openDB(t, dir, Options{})
		require.EqualValues(t, 2, lookupAt(t, d, seq))
		_, err = p.Commit(context.Background(), 1)
		require.ErrorIs(t, err, ErrClosed)
		require.Equal(t, []int64{2}, books.requireListedIsReadable(t, d))
		require.EqualValues(t, 1, stats(t, d).Checkpoints)
	})
}

// A rank is always named, and a rank that another handle or another publication committed is not this one's.
func TestRanksAreNamedAndOwned_PUB10(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	seq, books := seqOf(t, testNamespace(t, 2, tiny()...), tokens(1, 100)), shelf{}
	p := begin(t, d, seq, 100)
	for _, rank := range []int{-1, 2, 1 << 40} {
		_, err := p.Slots(context.Background(), rank)
		require.ErrorIs(t, err, ErrInvalid)
		_, err = p.Commit(context.Background(), rank)
		require.ErrorIs(t, err, ErrInvalid)
		_, err = p.Transfer(rank)
		require.ErrorIs(t, err, ErrInvalid)
	}
	fill(t, p, 0)
	fill(t, p, 1)
	require.False(t, commit(t, p, 0))
	require.False(t, commit(t, p, 0), "the same rank again is no second rank")
	require.Empty(t, slots(t, p, 0))
	require.True(t, commit(t, p, 1))
	books.keep(t, p.Generation(), seq, 100)
	require.Equal(t, []int64{100}, books.requireListedIsReadable(t, d))
}

// A commit or an abort of an attempt that has ended is refused and changes nothing, also while a new attempt at the very same
// checkpoint is under way; and what the old attempt writes late reaches no page.
func TestLateCommitAndAbortChangeNothing_PUB09_DED05(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	seq, books := seqOf(t, testNamespace(t, 2, tiny()...), tokens(1, 100)), shelf{}
	old := begin(t, d, seq, 100)
	stale := slots(t, old, 0)
	fill(t, old, 1)
	require.NoError(t, old.Abort())

	p := begin(t, d, seq, 100)
	require.Equal(t, old.Generation(), p.Generation())
	fill(t, p, 0)
	late := func() {
		before := still(t, d)
		for rank := range 2 {
			_, err := old.Commit(context.Background(), rank)
			require.ErrorIs(t, err, ErrConflict)
			require.ErrorContains(t, err, string(txn.FencedAttempts))
		}
		require.NoError(t, old.Abort(), "aborting again does nothing")
		for _, s := range stale {
			n, err := s.Write(make([]byte, s.Size()))
			require.ErrorIs(t, err, ErrConflict)
			require.Zero(t, n)
			require.Nil(t, s.Buffer())
			s.Filled(s.Size())
		}
		require.Equal(t, before, still(t, d))
	}
	late()
	require.False(t, commit(t, p, 0))
	late()
	own := slots(t, p, 1)
	fill(t, p, 1)
	require.True(t, commit(t, p, 1))
	late()
	require.ErrorIs(t, p.Abort(), ErrConflict, "it is listed")
	for _, s := range own {
		_, err := s.Write([]byte{1})
		require.ErrorIs(t, err, ErrConflict)
		require.Nil(t, s.Buffer())
	}
	books.keep(t, p.Generation(), seq, 100)
	require.Equal(t, []int64{100}, books.requireListedIsReadable(t, d))
}

// Once a rank has committed, its slots take nothing more, though the publication goes on.
func TestCommittedRankIsClosed_PUB01(t *testing.T) {
	d := openDB(t, tempDir(t), Options{WritePolicy: OnEvict})
	seq, books := seqOf(t, testNamespace(t, 2, tiny()...), tokens(1, 100)), shelf{}
	p := begin(t, d, seq, 100)
	first := slots(t, p, 0)
	fill(t, p, 0)
	_, err := first[0].Write([]byte{1})
	require.ErrorIs(t, err, ErrTooLarge)
	require.NotNil(t, first[0].Buffer())
	require.False(t, commit(t, p, 0))
	for _, s := range first {
		_, err := s.Write(nil)
		require.ErrorIs(t, err, ErrConflict)
		require.ErrorContains(t, err, "rank 0 has committed")
		require.Nil(t, s.Buffer())
		s.Filled(0)
	}
	fill(t, p, 1)
	require.True(t, commit(t, p, 1))
	books.keep(t, p.Generation(), seq, 100)
	require.Equal(t, []int64{100}, books.requireListedIsReadable(t, d))
}

// A rank that is not full stays open: the refusal of its commit leaves all its slots as they were.
func TestUnfilledRankStaysOpen_B03_PUB05(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	seq, books := seqOf(t, testNamespace(t, 1, tiny()...), tokens(1, 100)), shelf{}
	p := begin(t, d, seq, 100)
	all := slots(t, p, 0)
	for i, s := range all {
		b := content(s.Key(), 0, s.Size())
		_, err := p.Commit(context.Background(), 0)
		require.ErrorIs(t, err, ErrInvalid)
		require.ErrorContains(t, err, "0 of")
		n, err := s.Write(b[:len(b)-1])
		require.NoError(t, err)
		require.Equal(t, len(b)-1, n)
		_, err = p.Commit(context.Background(), 0)
		require.ErrorIs(t, err, ErrInvalid)
		require.False(t, errors.Is(err, ErrBusy))
		_, err = s.Write(b[len(b)-1:])
		require.NoError(t, err, "slot %d of %d", i, len(all))
	}
	require.True(t, commit(t, p, 0))
	books.keep(t, p.Generation(), seq, 100)
	require.Equal(t, []int64{100}, books.requireListedIsReadable(t, d))
}
