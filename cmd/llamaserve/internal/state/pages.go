package state

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/holdfast-db/holdfast/db"
	"github.com/holdfast-db/holdfast/txn"
)

// Names of the groups.
const (
	GroupTokens    = "attention:tokens"
	GroupWindow    = "attention:window"
	GroupRecurrent = "recurrent:state"
	GroupLogits    = "auxiliary:logits"
)

// Bounds of the choice of page sizes.
const (
	pageBytesAim       = 64 << 10
	pageTokensMin      = 16
	pageTokensMax      = 128
	recurrentPageBytes = 1 << 20
)

// Pages says how the states of a shape are cut into pages.
//
// Groups: attention:tokens has one page for each run of tokens, all layers together; the last one may be filled in part, the rest
// of it is zero. attention:window is the same for the layers with a window. recurrent:state is the recurrent state, cut evenly.
// auxiliary:logits are the logits after the last token, in namespaces with recurrent state alone: going on from there without them would take the
// state one token earlier, and there is none. Without recurrent state the last token is cut off and computed once more, and
// every page boundary inside a checkpoint is restorable, which a page for each checkpoint would prevent.
type Pages struct {
	shape  *Shape
	Layout db.Layout
	Tokens int // of an attention page

	window, recurrent, logits int // indices of groups, −1 = none; attention:tokens is the first if there is any
}

// NewPages chooses the layout. With tokens = 0 a page has as many tokens as make about 64 KiB, 16…128 and a power of two.
func NewPages(s *Shape, tokens int) *Pages {
	p := &Pages{shape: s, Tokens: tokens, window: -1, recurrent: -1, logits: -1, Layout: db.Layout{Ranks: 1}}
	if p.Tokens == 0 {
		p.Tokens = pageTokensMax
		for p.Tokens > pageTokensMin && p.Tokens*s.TokenBytes() > pageBytesAim {
			p.Tokens /= 2
		}
	}
	add := func(g db.Group) int {
		p.Layout.Groups = append(p.Layout.Groups, g)
		return len(p.Layout.Groups) - 1
	}
	for i, c := range s.caches {
		g := db.Group{Name: GroupTokens, Kind: db.Attention, PageBytes: int64(p.Tokens * c.tokenBytes()), PageTokens: int64(p.Tokens)}
		if i == 1 {
			g.Name, g.WindowTokens = GroupWindow, int64(s.window)
		}
		if at := add(g); i == 1 {
			p.window = at
		}
	}
	if s.tail > 0 {
		n := (s.tail + recurrentPageBytes - 1) / recurrentPageBytes
		p.recurrent = add(db.Group{Name: GroupRecurrent, Kind: db.Recurrent, PageBytes: int64((s.tail + n - 1) / n), Pages: n})
		p.logits = add(db.Group{Name: GroupLogits, Kind: db.Auxiliary, PageBytes: int64(4 * s.Vocabulary), Pages: 1})
	}
	return p
}

// Shape gives the shape that the pages are cut from.
func (p *Pages) Shape() *Shape { return p.shape }

// Snapshot is a state of n tokens, taken apart and ready to fill pages. It is immutable.
type Snapshot struct {
	pages  *Pages
	Tokens int
	Bytes  int // of the state as the engine gives it
	parts  *parts
	logits []float32
}

// Fill writes the page at a position of a group into buf, which is exactly as long. What no token is there for is zero.
func (s *Snapshot) Fill(group int, position int64, buf []byte) error {
	clear(buf)
	switch group {
	case s.pages.recurrent:
		if from := int(position) * len(buf); from < len(s.parts.tail) {
			copy(buf, s.parts.tail[from:])
		}
		return nil
	case s.pages.logits:
		for i, v := range s.logits {
			binary.LittleEndian.PutUint32(buf[4*i:], math.Float32bits(v))
		}
		return nil
	}
	r := s.parts.caches[group] // attention groups come first, in the order of the caches
	from := int(position) * s.pages.Tokens
	to := min(from+s.pages.Tokens, s.Tokens)
	if from < r.first || to > r.end() {
		return fmt.Errorf("state: page %d of group %q has tokens %d…%d: at hand are %d…%d: %w",
			position, s.pages.Layout.Groups[group].Name, from, to-1, r.first, r.end()-1, txn.ErrConflict)
	}
	at := 0
	for j, column := range r.part(from, to).columns {
		copy(buf[at:], column)
		at += s.pages.Tokens * r.cache.rows[j]
	}
	return nil
}

// Restored is a checkpoint put together again. It is in memory of its own.
type Restored struct {
	Tokens int
	parts  *parts
	Logits []float32 // after the last token; nil without recurrent state
}

// Join puts together the pages of a restoration at offset n.
func (p *Pages) Join(pages []db.Page, n int) (*Restored, error) {
	out := &Restored{Tokens: n, parts: &parts{caches: make([]*rows, len(p.shape.caches)), tail: make([]byte, 0, p.shape.tail)}}
	for i, c := range p.shape.caches {
		r := &rows{cache: c}
		for _, w := range c.rows {
			r.columns = append(r.columns, make([]byte, 0, n*w))
		}
		out.parts.caches[i] = r
	}
	for _, page := range pages {
		switch page.Group {
		case p.recurrent:
			left := p.shape.tail - len(out.parts.tail)
			out.parts.tail = append(out.parts.tail, page.Bytes[:min(left, len(page.Bytes))]...)
			continue
		case p.logits:
			out.Logits = make([]float32, p.shape.Vocabulary)
			for i := range out.Logits {
				out.Logits[i] = math.Float32frombits(binary.LittleEndian.Uint32(page.Bytes[4*i:]))
			}
			continue
		}
		r := out.parts.caches[page.Group]
		from := int(page.Position) * p.Tokens
		to := min(from+p.Tokens, n)
		if r.count == 0 {
			r.first = from
		}
		if from != r.end() {
			return nil, fmt.Errorf("state: page %d of group %q after token %d: %w", page.Position, p.Layout.Groups[page.Group].Name, r.end(), txn.ErrCorrupt)
		}
		at := 0
		for j, w := range r.cache.rows {
			r.columns[j] = append(r.columns[j], page.Bytes[at:at+(to-from)*w]...)
			at += p.Tokens * w
		}
		r.count += to - from
	}
	for i, r := range out.parts.caches {
		if r.end() != n || (i == 0 && r.first != 0) {
			return nil, fmt.Errorf("state: the pages of group %q have tokens %d…%d of %d: %w", p.Layout.Groups[i].Name, r.first, r.end()-1, n, txn.ErrCorrupt)
		}
	}
	if len(out.parts.tail) != p.shape.tail {
		return nil, fmt.Errorf("state: %d bytes of recurrent state, want %d: %w", len(out.parts.tail), p.shape.tail, txn.ErrCorrupt)
	}
	return out, nil
}

// inWindow gives the cells that the engine keeps of a sequence of n tokens: the last ones, as many as the window has.
func (s *Shape) inWindow(r *rows, n int) *rows { return r.part(max(r.first, n-s.window), n) }

// encode gives the whole state as the engine reads it.
func (r *Restored) encode(s *Shape) []byte {
	size := len(s.head) + s.tail
	for _, c := range r.parts.caches {
		size += c.cache.moduleBytes(c.count)
	}
	b := append(make([]byte, 0, size), s.head...)
	for i, c := range r.parts.caches {
		if i == 1 {
			c = s.inWindow(c, r.Tokens)
		}
		b = c.appendModule(b)
	}
	return append(b, r.parts.tail...)
}

// encodePartial gives the partial state as the engine reads it.
func (r *Restored) encodePartial(s *Shape) []byte {
	b := append([]byte(nil), s.head...)
	if s.window > 0 {
		b = s.inWindow(r.parts.caches[1], r.Tokens).appendModule(b)
	}
	return append(b, r.parts.tail...)
}
