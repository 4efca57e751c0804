package txn

import (
	"errors"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestDistinctRanksComplete_PUB01(t *testing.T) {
	c, q, _ := hybrid(t)
	wide := newSpace("wide", 4, shape{tokens: 64, bytes: 100}).sequence().plus(run(1, 100)...)
	in := wide.intent("")
	a := NewAttempt(1, in.Manifest.Generation(), 4)
	for _, rank := range []int{0, 0, 1, 2, 2} {
		before := a.HasCommitted(rank)
		first, complete, err := a.Commit(rank)
		require.NoError(t, err)
		require.Equal(t, !before, first)
		require.False(t, complete)
		in.Committed = a.Committed()
		refusedBy(t, c, AllRanks, ErrInvalid, c.decide(in))
		require.Zero(t, c.longest(t, wide))
	}
	for _, rank := range []int{-1, 4, 1 << 40} {
		_, _, err := a.Commit(rank)
		require.ErrorIs(t, err, ErrInvalid)
		require.False(t, a.HasCommitted(rank))
	}
	require.Equal(t, 3, a.Committed())
	first, complete, err := a.Commit(3)
	require.NoError(t, err)
	require.True(t, first && complete)
	in.Committed = a.Committed()
	c.publish(t, in)
	require.EqualValues(t, 100, c.longest(t, wide))

	first, complete, err = a.Commit(3)
	require.NoError(t, err)
	require.False(t, first, "it was there already")
	require.True(t, complete)
	r, err := DecidePublish(c.view, in)
	require.NoError(t, err)
	require.Nil(t, r, "publishing again is no record")
	require.EqualValues(t, 600, c.longest(t, q))
}

func TestRanksOfTwoAttemptsNeverMix_PUB02(t *testing.T) {
	c := newCatalogue()
	q := newSpace("wide", 4, shape{tokens: 64, bytes: 100}).sequence().plus(run(1, 100)...)
	in := q.intent("")
	g := in.Manifest.Generation()
	a, b := NewAttempt(1, g, 4), NewAttempt(2, g, 4)
	commit := func(x *Attempt, ranks ...int) (complete bool) {
		for _, rank := range ranks {
			var err error
			_, complete, err = x.Commit(rank)
			require.NoError(t, err)
		}
		return complete
	}
	require.False(t, commit(a, 0, 1))
	require.False(t, commit(b, 2, 3))
	for _, x := range []*Attempt{a, b} {
		in.Committed = x.Committed()
		refusedBy(t, c, AllRanks, ErrInvalid, c.decide(in))
	}
	require.True(t, a.End("aborted"))
	require.True(t, commit(b, 0, 1))
	in.Committed = b.Committed()
	c.publish(t, in)
	require.EqualValues(t, 100, c.longest(t, q))
}

// TestOneCallCompletes_PUB04: given 8 threads that commit all ranks twice, when all are done, then exactly one call was the
// one that completed the attempt. The attempt is guarded by its owner, as its comment demands.
func TestOneCallCompletes_PUB04(t *testing.T) {
	a := NewAttempt(1, Generation{1}, 4)
	var mu sync.Mutex
	var threads sync.WaitGroup
	completed, firsts := 0, 0
	for thread := range 8 {
		threads.Go(func() {
			for i := range 8 {
				mu.Lock()
				first, complete, err := a.Commit((thread + i) % 4)
				if first {
					firsts++
				}
				if first && complete {
					completed++
				}
				mu.Unlock()
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	threads.Wait()
	require.Equal(t, 4, firsts)
	require.Equal(t, 1, completed)
}

func TestFencedAttempts(t *testing.T) {
	for _, why := range []string{"aborted", "overtaken by attempt 8", "given up: its lease ended"} {
		a := NewAttempt(7, Generation{1}, 2)
		require.NoError(t, a.Alive())
		_, _, err := a.Commit(0)
		require.NoError(t, err)
		require.True(t, a.End(why))

		before := *a
		first, complete, err := a.Commit(1)
		require.False(t, first || complete)
		require.ErrorIs(t, err, ErrConflict)
		var v *Violation
		require.True(t, errors.As(err, &v))
		require.Equal(t, FencedAttempts, v.Invariant)
		require.Contains(t, err.Error(), why)
		require.Contains(t, err.Error(), "attempt 7")
		require.ErrorIs(t, a.Alive(), ErrConflict)
		_, _, err = a.Commit(9) // a stale attempt is told so, whatever else is wrong
		require.ErrorIs(t, err, ErrConflict)
		require.False(t, a.End("aborted twice"), "the first reason stays")
		require.Equal(t, before, *a)
		require.Equal(t, 1, a.Committed())
	}
}
