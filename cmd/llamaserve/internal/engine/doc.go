// Package engine drives llama.cpp through its shared library, which is loaded at run time: neither its headers nor the library
// are needed to build. Without cgo, and on other systems than Linux on amd64 and arm64, Load refuses with txn.ErrUnsupported.
//
// A Context holds the state of one token sequence, number 0, at positions 0, 1, 2, … It is not safe for concurrent use; different
// contexts of one model are. What llama.cpp asserts it asserts by ending the process: it must not be given state that anybody
// else may have changed. A checksum of its own it has not.
package engine

// Part says which part of a sequence's state is meant.
type Part uint32

// The parts of a state, with the numbers that the library gives them.
const (
	Whole   Part = 0
	Partial Part = 1 // without what a longer sequence has too: recurrent state, and the cells inside an attention window
)

// ContextOptions of NewContext.
type ContextOptions struct {
	Tokens    int      // the longest sequence, 1…
	Batch     int      // tokens of the largest decode
	Sequences int      // the state of one sequence does not fit a context of another number
	Threads   int      // other numbers give other last bits
	Adapter   *Adapter // nil: none
}

// ModelInfo describes a model.
type ModelInfo struct {
	Name         string // as the file says; may be empty
	Architecture string
	Vocabulary   int // tokens, and so logits of a step
	Layers       int
	Window       int // tokens of an attention window, 0 = none
	Recurrent    bool
	Hybrid       bool
	TrainTokens  int  // the longest sequence that it was made for
	Text         bool // has a tokenizer
}
