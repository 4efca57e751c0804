package db

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

// What may be taken away and when: a page is there as long as somebody holds it, and gone after that.

// A restoration keeps its bytes through retire, delete, and the republication of other content in the space around it; the
// space comes back after the release.
func TestHeldPagesOutliveTheirCheckpoint_PUB08(t *testing.T) {
	for _, policy := range []WritePolicy{WriteThrough, OnEvict, Never} {
		for _, cold := range []bool{false, true} {
			if cold && policy == Never {
				continue // nothing outlives a restart
			}
			t.Run(fmt.Sprintf("%v cold %v", policy, cold), func(t *testing.T) {
				d := openDB(t, tempDir(t), Options{WritePolicy: policy, RAMBytes: 1 << 20})
				ns, books := testNamespace(t, 2), shelf{}
				seq := seqOf(t, ns, tokens(1, 320))
				gen, bytes := books.publish(t, d, seq, 320)
				if cold {
					d = reopen(t, d, false)
				}
				a, err := d.Restore(context.Background(), seq, LookupOptions{})
				require.NoError(t, err)
				b, err := d.Restore(context.Background(), seq, LookupOptions{})
				require.NoError(t, err)
				require.NoError(t, d.Retire(context.Background(), gen))
				verify(t, a, 2)
				require.NoError(t, d.Delete(context.Background(), gen))
				require.Zero(t, lookupAt(t, d, seq))
				for i := range 6 { // fills the tier several times over
					other := seqOf(t, ns, tokens(uint64(10+i), 640))
					g, _ := books.publish(t, d, other, 640)
					require.NoError(t, d.Delete(context.Background(), g))
				}
				verify(t, a, 2)
				s := stats(t, d)
				require.EqualValues(t, 2, s.Leases)
				require.GreaterOrEqual(t, s.RAMUsed, bytes)
				if policy == WriteThrough || cold {
					idle(d)
					require.NotZero(t, stats(t, d).DiskBytes, "the disk copies count until the space is given back")
				}
				a.Release()
				a.Release()
				require.Nil(t, a.Pages(0))
				verify(t, b, 2)
				b.Release()
				awaitNothing(t, d)
				require.Empty(t, books.requireListedIsReadable(t, d))
				requireEmpty(t, d)
			})
		}
	}
}

// A crash while pages of a deleted checkpoint are held: the delete stands, and the space is found by the next open.
func TestCrashWhileDeletedPagesAreHeld_PUB09(t *testing.T) {
	restarts(t, func(t *testing.T, crashed bool) {
		d := openDB(t, tempDir(t), Options{})
		ns, books := testNamespace(t, 2), shelf{}
		gone, stays := seqOf(t, ns, tokens(1, 320)), seqOf(t, ns, tokens(2, 320))
		gen, _ := books.publish(t, d, gone, 320)
		books.publish(t, d, stays, 320)
		r, err := d.Restore(context.Background(), gone, LookupOptions{})
		require.NoError(t, err)
		require.NoError(t, d.Delete(context.Background(), gen))
		used := stats(t, d).DiskBytes
		next := reopen(t, d, crashed)
		verify(t, r, 2) // not even the end of the handle takes the memory away
		r.Release()
		require.Nil(t, r.Pages(0))
		require.Zero(t, lookupAt(t, next, gone))
		require.Equal(t, []int64{320}, books.requireListedIsReadable(t, next))
		require.Less(t, stats(t, next).DiskBytes, used)
		requireEmpty(t, next)
	})
}

// A publication that builds on a checkpoint which is retired and deleted meanwhile, and on its ancestor too, is listed all the
// same and is whole: it has custody of what it builds on. If it gives up, the pages go.
func TestPublicationKeepsWhatItBuildsOn_DED02(t *testing.T) {
	for _, policy := range []WritePolicy{WriteThrough, OnEvict} {
		for _, when := range []string{"begun", "half committed"} {
			for _, aborts := range []bool{false, true} {
				for _, cold := range []bool{false, true} {
					t.Run(fmt.Sprintf("%v %s aborts %v cold %v", policy, when, aborts, cold), func(t *testing.T) {
						d := openDB(t, tempDir(t), Options{WritePolicy: policy})
						seq, books := seqOf(t, testNamespace(t, 2, shared()...), tokens(1, 480)), shelf{}
						var older []Generation
						for _, n := range []int64{160, 320} {
							g, _ := books.publish(t, d, seq, n)
							older = append(older, g)
						}
						if cold {
							d = reopen(t, d, false)
						}
						p := begin(t, d, seq, 480)
						if when == "half committed" {
							fill(t, p, 0)
							require.False(t, commit(t, p, 0))
						}
						require.NoError(t, d.Retire(context.Background(), older[1]))
						for _, g := range older {
							require.NoError(t, d.Delete(context.Background(), g))
						}
						require.Zero(t, lookupAt(t, d, seq))
						if aborts {
							require.NoError(t, p.Abort())
							requireEmpty(t, d)
							return
						}
						for rank := range 2 {
							fill(t, p, rank)
							require.Equal(t, rank == 1, commit(t, p, rank))
						}
						books.keep(t, p.Generation(), seq, 480)
						require.Equal(t, []int64{480}, books.requireListedIsReadable(t, d))
						d = reopen(t, d, policy == WriteThrough)
						require.Equal(t, []int64{480}, books.requireListedIsReadable(t, d))
						requireEmpty(t, d)
					})
				}
			}
		}
	}
}

// Deletes that are decided in the same batch as the publication which builds on what they take: whatever the order, the
// publication is listed and whole.
func TestDeleteInTheBatchOfThePublication_DED02(t *testing.T) {
	rounds := 60
	if testing.Short() {
		rounds = 15
	}
	d := openDB(t, memoryDir(t), Options{})
	ns, books := testNamespace(t, 1, shared()...), shelf{}
	for round := range rounds {
		seq := seqOf(t, ns, tokens(uint64(round), 200))
		var older []Generation
		for _, n := range []int64{48, 96, 144} {
			g, _ := books.publish(t, d, seq, n)
			older = append(older, g)
		}
		p := begin(t, d, seq, 200)
		fill(t, p, 0)
		hold := make(chan struct{})
		failed := make(chan error, 5)
		// A transaction that waits on the committer goroutine gathers all others into one batch behind it.
		go func() {
			failed <- d.committer.commit(context.Background(), &transaction{decide: waitFor(hold)}, true)
		}()
		for _, g := range older {
			go func() { failed <- d.Delete(context.Background(), g) }()
		}
		go func() {
			listed, err := p.Commit(context.Background(), 0)
			if err == nil && !listed {
				err = ErrConflict
			}
			failed <- err
		}()
		close(hold)
		for range 5 {
			require.NoError(t, <-failed)
		}
		books.keep(t, p.Generation(), seq, 200)
		require.EqualValues(t, 200, restoreAt(t, d, seq))
	}
	require.Len(t, books.requireListedIsReadable(t, d), rounds)
	d = reopen(t, d, true)
	require.Len(t, books.requireListedIsReadable(t, d), rounds)
	requireEmpty(t, d)
}

// What was retired, or deleted, can be published again: it is listed anew, and what is left of it is used.
func TestRepublicationAfterRetireAndDelete_DED01(t *testing.T) {
	for _, policy := range []WritePolicy{WriteThrough, OnEvict} {
		for _, deleted := range []bool{false, true} {
			for _, restart := range []string{"", "close", "crash"} {
				if policy == OnEvict && restart == "crash" {
					continue // nothing is left to be published again
				}
				t.Run(fmt.Sprintf("%v deleted %v %s", policy, deleted, restart), func(t *testing.T) {
					d := openDB(t, tempDir(t), Options{WritePolicy: policy})
					ns, text, books := testNamespace(t, 2, shared()...), tokens(1, 480), shelf{}
					seq := seqOf(t, ns, text)
					gen, all := books.publish(t, d, seq, 320)
					require.NoError(t, d.Retire(context.Background(), gen))
					if deleted {
						require.NoError(t, d.Delete(context.Background(), gen))
					}
					if restart != "" {
						d = reopen(t, d, restart == "crash")
					}
					require.Zero(t, lookupAt(t, d, seq))
					again, bytes := books.publish(t, d, seq, 320)
					require.Equal(t, gen, again)
					if deleted {
						require.Equal(t, all, bytes)
					} else {
						require.Zero(t, bytes, "its pages are still there")
					}
					require.EqualValues(t, 320, restoreAt(t, d, seq))
					require.Zero(t, stats(t, d).Retired)

					// And a longer one on top of what is retired.
					require.NoError(t, d.Retire(context.Background(), gen))
					books.publish(t, d, seq, 480)
					require.Equal(t, []int64{480}, books.requireListedIsReadable(t, d))
					require.NoError(t, d.Delete(context.Background(), gen))
					require.Equal(t, []int64{480}, books.requireListedIsReadable(t, d))
					d = reopen(t, d, policy == WriteThrough)
					require.Equal(t, []int64{480}, books.requireListedIsReadable(t, d))
					requireEmpty(t, d)
				})
			}
		}
	}
}

// waitFor is a decision that has nothing to do and holds the committer until the channel is closed.
func waitFor(hold <-chan struct{}) func(txn.Reader) (txn.Record, error) {
	return func(txn.Reader) (txn.Record, error) {
		<-hold
		return nil, nil
	}
}

// A page turns out corrupt while a publication that builds on it, through a checkpoint that was retired, is being committed.
// Whichever comes first, nothing is listed that needs the page; once published again, everything is whole.
func TestLossWhileBuildingOnIt_PUB06(t *testing.T) {
	rounds := 30
	if testing.Short() {
		rounds = 10
	}
	d := openDB(t, memoryDir(t), Options{})
	ns, books := testNamespace(t, 1, attentionOnly(4096, 16)...), shelf{}
	for round := range rounds {
		seq := seqOf(t, ns, tokens(uint64(round), 200))
		books.publish(t, d, seq, 48)
		older, _ := books.publish(t, d, seq, 96)
		require.NoError(t, d.Retire(context.Background(), older))
		p := begin(t, d, seq, 200)
		fill(t, p, 0)
		books.keep(t, p.Generation(), seq, 200)
		_, err := d.DropRAM(context.Background())
		require.NoError(t, err)
		corrupt(t, d, seq.pageKey(0, 1, 32))

		hold := make(chan struct{})
		done := make(chan error, 3)
		go func() {
			done <- d.committer.commit(context.Background(), &transaction{decide: waitFor(hold)}, true)
		}()
		go func() {
			short, err := seq.Fork(48)
			if err == nil {
				var r *Restoration
				if r, err = d.Restore(context.Background(), short, LookupOptions{}); err == nil {
					r.Release() // at page 0, which is good
				}
			}
			if errors.Is(err, ErrNotFound) {
				err = nil
			}
			done <- err
		}()
		eventually(func() bool { return d.residency.counts().quarantined > 0 })
		go func() {
			_, err := p.Commit(context.Background(), 0)
			if errors.Is(err, ErrConflict) || errors.Is(err, ErrBusy) {
				err = nil
			}
			done <- err
		}()
		close(hold)
		for range 3 {
			require.NoError(t, <-done)
		}
		p.Abort()
		require.Less(t, lookupAt(t, d, seq), int64(48), "the page is needed from there on")
		books.publish(t, d, seq, 200)
		require.EqualValues(t, 200, restoreAt(t, d, seq))
		require.Zero(t, stats(t, d).Quarantined)
	}
	books.requireListedIsReadable(t, d)
	d = reopen(t, d, true)
	books.requireListedIsReadable(t, d)
	requireEmpty(t, d)
}

// corrupt changes a byte of the disk copies of a page.
func corrupt(t testing.TB, d *DB, key txn.Key) {
	t.Helper()
	snapshot := d.index.Snapshot()
	defer snapshot.Close()
	e, err := txn.ReadPage(snapshot, key)
	require.NoError(t, err)
	require.NotEmpty(t, e.Place)
	for _, at := range e.Place {
		f, err := os.OpenFile(filepath.Join(d.dir.path, dataName, fmt.Sprintf("%020d.seg", at.Segment)), os.O_RDWR, 0)
		require.NoError(t, err)
		b := make([]byte, 1)
		_, err = f.ReadAt(b, at.Offset+at.Stored/2)
		require.NoError(t, err)
		b[0] ^= 1
		_, err = f.WriteAt(b, at.Offset+at.Stored/2)
		require.NoError(t, err)
		require.NoError(t, f.Close())
	}
}
