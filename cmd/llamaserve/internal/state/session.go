package state

import (
	"fmt"

	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/engine"
	"github.com/holdfast-db/holdfast/txn"
)

// Session is an engine context with what has to be known about the sequence in it. It is not safe for concurrent use.
//
// Invariants: the context holds exactly the tokens of live; logits are those after the last of them, or nil if they are not
// known. With a window, seen holds the windowed rows of all tokens from a page boundary on that is not after the window's begin, so that
// every page that a checkpoint needs can be filled: the engine gives the cells inside the window only, and the first page of
// a window reaches back further. Hence no batch is longer than the window. After an error the session is empty.
type Session struct {
	context *engine.Context
	pages   *Pages
	batch   int
	live    []int32
	logits  []float32
	seen    *rows
}

// NewSession takes over an empty context whose largest decode is batch tokens.
func NewSession(c *engine.Context, p *Pages, batch int) *Session {
	if p.shape.window > 0 {
		batch = min(batch, p.shape.window)
	}
	return &Session{context: c, pages: p, batch: batch}
}

// Close frees the context.
func (s *Session) Close() { s.context.Close() }

// Len is the number of tokens in the context.
func (s *Session) Len() int { return len(s.live) }

// Logits gives the logits after the last token, nil if they are not known. The caller does not change them.
func (s *Session) Logits() []float32 { return s.logits }

// Reset empties the session.
func (s *Session) Reset() {
	s.context.Clear()
	s.live, s.logits, s.seen = nil, nil, nil
}

// Common gives the length of the prefix that the context and tokens have in common.
func (s *Session) Common(tokens []int32) int {
	n := min(len(s.live), len(tokens))
	for i := range n {
		if s.live[i] != tokens[i] {
			return i
		}
	}
	return n
}

// Decode computes tokens after those that are there, in batches that end at multiples of the batch size, so that the bits of the
// result do not depend on where a prompt was gone on from, if it was such a multiple.
func (s *Session) Decode(tokens []int32) error {
	for len(tokens) > 0 {
		n := s.NextBatch(len(tokens))
		if err := s.step(tokens[:n]); err != nil {
			s.Reset()
			return err
		}
		tokens = tokens[n:]
	}
	return nil
}

// NextBatch gives how many of n tokens the next batch takes.
func (s *Session) NextBatch(n int) int { return min(n, s.batch-len(s.live)%s.batch) }

func (s *Session) step(tokens []int32) error {
	if err := s.context.Decode(tokens); err != nil {
		return err
	}
	s.live = append(s.live, tokens...)
	var err error
	if s.logits, err = s.context.Logits(); err != nil {
		return err
	}
	if s.pages.shape.window == 0 || s.seen != nil && len(s.live)-s.seen.end() < s.pages.shape.window && len(s.live)%s.batch != 0 {
		return nil // nothing has left the window unseen, and nothing will before the next batch is over
	}
	return s.look()
}

// look keeps the rows inside the window.
func (s *Session) look() error {
	n := len(s.live)
	partial, err := s.context.State(engine.Partial)
	if err != nil {
		return err
	}
	p, err := s.pages.shape.parsePartial(partial, n)
	if err != nil {
		return err
	}
	return s.keep(p.caches[1])
}

// keep adds rows to those that were seen, and gives up what no page needs.
func (s *Session) keep(r *rows) error {
	seen, err := s.seen.join(r)
	if err != nil {
		return err
	}
	first := max(0, len(s.live)-s.pages.shape.window) / s.pages.Tokens * s.pages.Tokens
	s.seen = seen.part(max(seen.first, min(first, seen.end())), seen.end())
	return nil
}

// Snapshot copies the state of the sequence out of the engine.
func (s *Session) Snapshot() (*Snapshot, error) {
	n := len(s.live)
	if n == 0 {
		return nil, fmt.Errorf("state: nothing to take a snapshot of: %w", txn.ErrInvalid)
	}
	whole, err := s.context.State(engine.Whole)
	if err != nil {
		return nil, err
	}
	p, err := s.pages.shape.parse(whole, n)
	if err != nil {
		return nil, err
	}
	if s.pages.shape.window > 0 {
		if err := s.keep(p.caches[1]); err != nil {
			return nil, err
		}
		p.caches[1] = s.seen
	}
	return &Snapshot{pages: s.pages, Tokens: n, Bytes: len(whole), parts: p, logits: s.logits}, nil
}

// Restore puts a checkpoint in the place of what is in the context. tokens are those of the checkpoint.
func (s *Session) Restore(r *Restored, tokens []int32) error {
	return s.put(r, tokens, engine.Whole, r.encode(s.pages.shape))
}

// RestorePartial is Restore for a context that holds the tokens of the checkpoint and goes on after them: only the recurrent
// state, or the cells inside the window, go to the engine, and the tokens after them are cut off. False if the engine does not
// take it so; then the session is empty.
func (s *Session) RestorePartial(r *Restored) (bool, error) {
	tokens := s.live[:r.Tokens]
	if err := s.put(r, tokens, engine.Partial, r.encodePartial(s.pages.shape)); err != nil {
		return false, err
	}
	if !s.context.Cut(r.Tokens) || s.context.Len() != r.Tokens {
		s.Reset()
		return false, nil
	}
	return true, nil
}

func (s *Session) put(r *Restored, tokens []int32, part engine.Part, state []byte) error {
	if len(tokens) != r.Tokens {
		return fmt.Errorf("state: %d tokens for a checkpoint of %d: %w", len(tokens), r.Tokens, txn.ErrInvalid)
	}
	tokens = append([]int32(nil), tokens...)
	if part == engine.Whole {
		s.Reset()
	}
	if err := s.context.SetState(part, state); err != nil {
		s.Reset()
		return err
	}
	s.live, s.logits, s.seen = tokens, r.Logits, nil
	if s.pages.shape.window > 0 {
		s.seen = r.parts.caches[1]
	}
	return nil
}

// Trim cuts the sequence to its first n tokens. False, and nothing changed, if the state cannot be cut: with recurrent state never,
// with a window by one token only, because what was before the window is gone.
func (s *Session) Trim(n int) bool {
	if n == len(s.live) {
		return true
	}
	if s.pages.shape.tail > 0 || n < 0 || n > len(s.live) || s.pages.shape.window > 0 && n < len(s.live)-1 {
		return false
	}
	if !s.context.Cut(n) {
		return false
	}
	if s.context.Len() != n {
		s.Reset()
		return false
	}
	s.live, s.logits = s.live[:n], nil
	if s.seen != nil {
		s.seen = s.seen.part(min(s.seen.first, n), min(s.seen.end(), n))
	}
	return true
}
