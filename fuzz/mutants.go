package fuzz

// Mutants are the ways in which a build with the tag "mutants" can break the database, by the promise that each breaks. The
// environment variable HOLDFAST_MUTANT switches one of them on.
var Mutants = []string{
	"a failed sync is tried again",
	"a file in use is taken for an orphan",
	"a lease is never over",
	"a lookup misses the longest",
	"a rank is forgotten",
	"a record is not replayed",
	"copies count before they are recorded",
	"deletions are not durable before their effect",
	"directory of the index is not synced before a marker",
	"directory of the log is not synced",
	"directory of the segments is not synced",
	"durable publications do not wait for a sync",
	"end of the log is not written anew",
	"fence is not asked",
	"frames are not checked",
	"holes take the neighbours with them",
	"log is cut before the index is durable",
	"log is not synced",
	"log numbers are given out again",
	"marker is not synced",
	"marker is written in place",
	"pages are not checked",
	"segments are cut too short",
	"segments are not synced",
	"space is counted twice",
	"torn end of the log is not cut",
	"what a crash took stays listed",
	"what is replaced stays listed",
}
