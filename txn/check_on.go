//go:build invariants

package txn

func checkAfterApply(v Reader) error { return Check(v) }
