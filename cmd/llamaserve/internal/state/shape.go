// Package state cuts the state of an engine's sequence into the pages of a checkpoint, and puts it together again.
//
// The library gives the state of a sequence as one string of bytes:
//
//	head | cache of all tokens | cache of the tokens inside the window | recurrent state
//
// of which a model has some: attention models the first cache, with a window both, hybrids the first cache and recurrent state,
// recurrent models nothing else. A cache is
//
//	streams uint32 | cells uint32 | the cells: position int32, sequences uint32, … | 0 uint32 | layers uint32
//	for each layer, its keys:   type int32 | bytes of a row uint64 | one row for each cell
//	for each layer, its values: type int32 | bytes of a row uint64 | one row for each cell
//	0 uint32 for each other stream
//
// so the bytes of one token stand in as many places as there are columns, and two states of one conversation have nothing in
// common at the same offset. A page holds the cells and rows of a run of tokens, column by column. What is between the rows follows
// from the model and the number of cells, and is not stored. The recurrent state is a string of constant length.
//
// The shape is learned from the engine when a model is loaded, and every state is held against it: a library that writes another
// format is refused, and its bytes are never taken for something that they are not.
package state

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/engine"
	"github.com/holdfast-db/holdfast/txn"
)

// Shape is what the states of a model in contexts of one kind look like.
type Shape struct {
	head       []byte
	caches     []*cache // the second one, if any, is that of the window
	window     int      // tokens, 0 = none
	tail       int      // bytes of recurrent state, 0 = none
	Vocabulary int
}

// cache is the format of one cache. Column 0 holds the cells, the others rows.
type cache struct {
	heads   [][]byte // what comes before each column; the number of cells is at countAt of the first
	rows    []int    // bytes of a token in each column
	trailer []byte
}

const (
	countAt      = 4
	cellBytesMax = 128
	rowBytesMax  = 1 << 24
	learnTokens  = 5 // tokens of the states that the shape is learned from, and once more as many
)

// Exact reports whether a state is of use at its exact length only.
func (s *Shape) Exact() bool { return s.tail > 0 }

// Window is the length of the attention window in tokens, 0 if there is none.
func (s *Shape) Window() int { return s.window }

// TokenBytes is what a token adds to a state; windowed tokens are counted as long as they are inside the window.
func (s *Shape) TokenBytes() int {
	n := 0
	for _, c := range s.caches {
		n += c.tokenBytes()
	}
	return n
}

// RecurrentBytes is the length of the recurrent state.
func (s *Shape) RecurrentBytes() int { return s.tail }

func (c *cache) tokenBytes() int {
	n := 0
	for _, r := range c.rows {
		n += r
	}
	return n
}

// moduleBytes is the length of a cache of n cells.
func (c *cache) moduleBytes(n int) int {
	size := len(c.trailer) + n*c.tokenBytes()
	for _, h := range c.heads {
		size += len(h)
	}
	return size
}

// Text gives the format in words, for an identity: two contexts with the same text read each other's states.
func (s *Shape) Text() string {
	var b bytes.Buffer
	fmt.Fprintf(&b, "head %x", s.head)
	for _, c := range s.caches {
		fmt.Fprintf(&b, "; cache")
		for i, h := range c.heads {
			if i == 0 {
				h = h[:countAt]
			}
			fmt.Fprintf(&b, " %x+%d", h, c.rows[i])
		}
		fmt.Fprintf(&b, " %x", c.trailer)
	}
	fmt.Fprintf(&b, "; window %d; recurrent %d", s.window, s.tail)
	return b.String()
}

// Learn finds the shape, with an empty context of the kind; it leaves it empty. ErrUnsupported if the states look like nothing that
// is known here.
func Learn(c *engine.Context, info engine.ModelInfo) (*Shape, error) {
	defer c.Clear()
	s := &Shape{Vocabulary: info.Vocabulary}
	for n := learnTokens; n <= 2*learnTokens; n += learnTokens {
		tokens := make([]int32, learnTokens)
		for i := range tokens {
			tokens[i] = int32((n + i) % info.Vocabulary)
		}
		if err := c.Decode(tokens); err != nil {
			return nil, err
		}
		whole, err := c.State(engine.Whole)
		if err != nil {
			return nil, err
		}
		partial, err := c.State(engine.Partial)
		if err != nil {
			return nil, err
		}
		if n == learnTokens {
			if err := s.learn(whole, partial, info, n); err != nil {
				return nil, err
			}
		}
		// The second state was not learned from: it shows whether the first was understood.
		if _, err := s.parse(whole, n); err != nil {
			return nil, fmt.Errorf("%w: %w", unknown(info, "what was learned from %d tokens does not go for %d", learnTokens, n), err)
		}
		if s.tail > 0 && !bytes.HasSuffix(whole, partial[len(s.head):]) {
			return nil, unknown(info, "the partial state is no part of the whole one")
		}
	}
	return s, nil
}

func unknown(info engine.ModelInfo, format string, args ...any) error {
	return fmt.Errorf("state: the states of %s (%s) cannot be cut into pages: %s: %w", info.Name, info.Architecture, fmt.Sprintf(format, args...), txn.ErrUnsupported)
}

func (s *Shape) learn(whole, partial []byte, info engine.ModelInfo, n int) error {
	if info.Recurrent {
		s.tail = len(whole)
		return nil
	}
	if info.Hybrid && info.Window > 0 {
		return unknown(info, "both a window and recurrent state")
	}
	// Older releases have no head.
	for _, head := range []int{8, 0} {
		rest := len(whole) - head // of the caches
		switch {
		case info.Hybrid:
			s.tail = len(partial) - head
			rest -= s.tail
		case info.Window > 0:
			rest -= len(partial) - head
		}
		if rest <= 0 || head > len(partial) || !bytes.Equal(whole[:head], partial[:head]) {
			continue
		}
		first := learnCache(whole[head:head+rest], info.Layers, n)
		if first == nil {
			continue
		}
		s.head, s.caches = bytes.Clone(whole[:head]), []*cache{first}
		if info.Window > 0 {
			second := learnCache(whole[head+rest:], info.Layers, n)
			if second == nil {
				continue
			}
			s.window, s.caches = info.Window, append(s.caches, second)
		}
		return nil
	}
	return unknown(info, "%d bytes for %d tokens are no format that is known", len(whole), n)
}

// learnCache finds the one size of cells with which the bytes are a cache of n cells at positions 0…n−1; nil if there is none.
func learnCache(b []byte, layers, n int) *cache {
	var found *cache
	for cell := 8; cell <= cellBytesMax; cell += 4 {
		if c := tryCache(b, layers, n, cell); c != nil {
			if found != nil {
				return nil
			}
			found = c
		}
	}
	return found
}

func tryCache(b []byte, layers, n, cell int) *cache {
	le := binary.LittleEndian
	if len(b) < 8+n*cell+8 {
		return nil
	}
	streams := int(le.Uint32(b))
	if streams < 1 || streams > 1<<16 || le.Uint32(b[countAt:]) != uint32(n) || len(b) < 4*(streams-1) {
		return nil
	}
	for i := range n {
		if le.Uint32(b[8+i*cell:]) != uint32(i) || le.Uint32(b[8+i*cell+4:]) != 1 {
			return nil
		}
	}
	end := len(b) - 4*(streams-1)
	c := &cache{heads: [][]byte{bytes.Clone(b[:8])}, rows: []int{cell}, trailer: bytes.Clone(b[end:])}
	if len(bytes.Trim(c.trailer, "\x00")) > 0 {
		return nil
	}
	at := 8 + n*cell
	transposed, count := le.Uint32(b[at:]), int(le.Uint32(b[at+4:]))
	if transposed != 0 || count < 1 || count > layers {
		return nil
	}
	from := at
	at += 8
	for at < end {
		if end-at < 12 {
			return nil
		}
		kind, row := le.Uint32(b[at:]), le.Uint64(b[at+4:])
		if kind > 1<<10 || row < 1 || row > rowBytesMax {
			return nil
		}
		at += 12
		c.heads, c.rows = append(c.heads, bytes.Clone(b[from:at])), append(c.rows, int(row))
		if at += n * int(row); at > end {
			return nil
		}
		from = at
	}
	if columns := len(c.rows) - 1; columns < count || columns > 2*count {
		return nil
	}
	return c
}

// typeNames are the types of cached numbers that are named; the others go by number.
var typeNames = map[uint32]string{0: "f32", 1: "f16", 2: "q4_0", 8: "q8_0", 30: "bf16"}

// Types names the types of the cached numbers, each once, in the order of their columns.
func (s *Shape) Types() string {
	var names []string
	for _, c := range s.caches {
		for _, h := range c.heads[1:] {
			kind := binary.LittleEndian.Uint32(h[len(h)-12:])
			name := typeNames[kind]
			if name == "" {
				name = fmt.Sprintf("type %d", kind)
			}
			if !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	if s.tail > 0 {
		names = append(names, "recurrent")
	}
	return strings.Join(names, " ")
}
