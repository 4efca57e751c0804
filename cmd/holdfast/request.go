package main

import (
	"iter"
	"time"
)

// blockTokens is the length of a block: the unit in which traces name prefixes, and the tokens that an attention page
// of the replay holds.
const blockTokens = 512

// request is one call to a serving process, as far as its checkpoints are concerned.
type request struct {
	Index  int           // 0, 1, 2, … in the order of the source
	At     time.Duration // when it arrived, since the beginning of the source; a replay does not wait for it
	Input  int64         // tokens of the prompt
	Output int64         // tokens of the response
	Blocks []uint64      // ids of the whole blocks of the prompt. An id stands for the whole prefix up to its end: equal ids mean equal prefixes
}

// tokens is the offset of the checkpoint that the request publishes: its last whole block. 0 means it publishes none.
func (r request) tokens() int64 { return int64(len(r.Blocks)) * blockTokens }

// source is a stream of requests. The stream ends at the first error.
type source struct {
	name     string // for reports
	total    int    // requests it will give, -1 if that is not known
	requests iter.Seq2[request, error]
}

// first cuts s after n requests; n <= 0 leaves it whole.
func (s source) first(n int) source {
	if n <= 0 || s.total >= 0 && s.total <= n {
		return s
	}
	all := s.requests
	// A source of unknown length may end before n, so its total stays unknown.
	if s.total >= 0 {
		s.total = n
	}
	s.requests = func(yield func(request, error) bool) {
		left := n
		for r, err := range all {
			if !yield(r, err) {
				return
			}
			if left--; left == 0 {
				return
			}
		}
	}
	return s
}
