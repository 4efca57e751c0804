// Package fuzz looks for the sequence of operations, faults and crashes that breaks the promise of a Holdfast database: listed
// means restorable. docs/crash-testing.md says what it simulates, what was run and what it found.
//
//	disk.go, storage.go    the simulated disk, and the file systems of a database over it
//	schedule.go            the order in which goroutines get at it, by a seed
//	program.go, world.go   histories as data, and a database being led through one (steps.go, recovery.go, checks.go)
//	model.go               the promise in plain Go
//	exhaustive.go          every small history, cut off everywhere
//	worker.go, campaign.go processes that run programs, and who starts them, and makes a violation smaller
//	mutants.go             the ways in which the database can be broken to test all this
package fuzz
