package txn

import "fmt"

// Attempt is one try at publishing a generation. Commits and aborts name it, so that a producer which was taken for
// dead, or which was overtaken, can change nothing any more (fenced-attempts). It is used by one goroutine at a time.
//
// An attempt lives in memory only: a restart ends it. The ranks of two attempts never mix, even if both are for the same
// generation.
type Attempt struct {
	Number     uint64 // fencing number: later attempts have higher ones
	Generation Generation
	committed  []bool
	left       int
	ended      string // why it ended; empty while it is alive
}

// NewAttempt begins an attempt for the given number of ranks.
func NewAttempt(number uint64, g Generation, ranks int) *Attempt {
	return &Attempt{Number: number, Generation: g, committed: make([]bool, ranks), left: ranks}
}

// Commit records that a rank is done. first is false if it had committed before; complete is true once all have.
func (a *Attempt) Commit(rank int) (first, complete bool, err error) {
	if err := a.Alive(); err != nil {
		return false, false, err
	}
	if rank < 0 || rank >= len(a.committed) {
		return false, false, fmt.Errorf("rank %d: the checkpoint has ranks 0…%d: %w", rank, len(a.committed)-1, ErrInvalid)
	}
	if !a.committed[rank] {
		a.committed[rank] = true
		a.left--
		first = true
	}
	return first, a.left == 0, nil
}

// Committed is the number of distinct ranks that have committed.
func (a *Attempt) Committed() int { return len(a.committed) - a.left }

// HasCommitted tells whether the rank has committed; one that the checkpoint does not have has not.
func (a *Attempt) HasCommitted(rank int) bool {
	return rank >= 0 && rank < len(a.committed) && a.committed[rank]
}

// End ends the attempt; why is named in the refusals that follow. It reports whether the attempt was alive.
func (a *Attempt) End(why string) bool {
	if a.ended != "" {
		return false
	}
	a.ended = why
	return true
}

// Alive refuses with fenced-attempts once the attempt has ended.
func (a *Attempt) Alive() error {
	if a.ended == "" {
		return nil
	}
	return refuse(FencedAttempts, ErrConflict, "attempt %d for generation %s was %s", a.Number, Key(a.Generation).Short(), a.ended)
}
