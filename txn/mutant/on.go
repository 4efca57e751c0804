//go:build mutants

// Package mutant breaks the database on purpose, one promise at a time, so that what looks for broken promises can be tested.
package mutant

import "os"

var chosen = os.Getenv("HOLDFAST_MUTANT")

// On reports whether the mutant of this name is the one that the environment variable HOLDFAST_MUTANT switches on.
func On(name string) bool { return name == chosen }
