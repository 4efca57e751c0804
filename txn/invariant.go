package txn

import "fmt"

// Invariant is the name of a rule that every commit is held to.
type Invariant string

// The invariants. docs/guarantees.md states each of them; the ones about files and threads are kept by package db, the
// others are checked here before a record is made and re-derived by Check.
const (
	CompleteAtPublish      Invariant = "complete-at-publish"
	AllRanks               Invariant = "all-ranks"
	RetireBeforeDelete     Invariant = "retire-before-delete"
	SupersedeIsAPreference Invariant = "supersede-is-a-preference"
	NoDanglingSupersede    Invariant = "no-dangling-supersede"
	PayloadBeforeRecord    Invariant = "payload-before-record"
	RecordBeforeEffect     Invariant = "record-before-effect"
	FencedAttempts         Invariant = "fenced-attempts"
	OneWriter              Invariant = "one-writer"
	MonotoneLSN            Invariant = "monotone-lsn"
	ExactAccounting        Invariant = "exact-accounting"
)

// Violation is the refusal of a transaction that would break an invariant. Nothing was changed.
type Violation struct {
	Invariant Invariant
	Class     error // one of the error classes
	Detail    string
}

// Error implements error.
func (v *Violation) Error() string {
	return fmt.Sprintf("%v: %s (%s)", v.Class, v.Detail, v.Invariant)
}

// Unwrap gives the class, for errors.Is.
func (v *Violation) Unwrap() error { return v.Class }

func refuse(i Invariant, class error, format string, args ...any) error {
	return &Violation{Invariant: i, Class: class, Detail: fmt.Sprintf(format, args...)}
}
