package state

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"github.com/holdfast-db/holdfast/txn"
)

// rows are the tokens first…first+count−1 of a cache, column by column.
type rows struct {
	cache        *cache
	first, count int
	columns      [][]byte
}

// parts is a state taken apart. It shares the memory of the state.
type parts struct {
	caches []*rows
	tail   []byte
}

// parse takes apart a whole state of n tokens, holding every byte that is not a cell, a row or recurrent state against the shape.
func (s *Shape) parse(whole []byte, n int) (*parts, error) {
	p := &parts{}
	rest, ok := bytes.CutPrefix(whole, s.head)
	if !ok || len(rest) < s.tail {
		return nil, malformed("begins with %x, want %x", whole[:min(len(whole), len(s.head))], s.head)
	}
	rest, p.tail = rest[:len(rest)-s.tail], rest[len(rest)-s.tail:]
	for _, c := range s.caches {
		r, size, err := c.parse(rest, n)
		if err != nil {
			return nil, err
		}
		p.caches = append(p.caches, r)
		rest = rest[size:]
	}
	if len(rest) > 0 {
		return nil, malformed("has %d bytes too many", len(rest))
	}
	if len(s.caches) > 0 && p.caches[0].first != 0 {
		return nil, malformed("begins at token %d", p.caches[0].first)
	}
	return p, nil
}

// parsePartial takes the cells inside the window, or the recurrent state, out of a partial state of n tokens.
func (s *Shape) parsePartial(partial []byte, n int) (*parts, error) {
	rest, ok := bytes.CutPrefix(partial, s.head)
	if !ok {
		return nil, malformed("begins with %x, want %x", partial[:min(len(partial), len(s.head))], s.head)
	}
	if s.window == 0 {
		return &parts{tail: rest}, nil
	}
	r, size, err := s.caches[1].parse(rest, n)
	if err == nil && size != len(rest) {
		err = malformed("has %d bytes too many", len(rest)-size)
	}
	return &parts{caches: []*rows{nil, r}}, err
}

func malformed(format string, args ...any) error {
	return fmt.Errorf("state: a state that the engine gave %s: %w", fmt.Sprintf(format, args...), txn.ErrUnsupported)
}

// parse takes a cache of a sequence of n tokens from the front of b. Its cells may be in any order; they are the last ones of
// the sequence.
func (c *cache) parse(b []byte, n int) (r *rows, size int, err error) {
	if len(b) < countAt+4 {
		return nil, 0, malformed("ends before a cache")
	}
	count := int(binary.LittleEndian.Uint32(b[countAt:]))
	if count > n || c.moduleBytes(count) > len(b) {
		return nil, 0, malformed("has %d cells in %d bytes for %d tokens", count, len(b), n)
	}
	r = &rows{cache: c, first: n - count, count: count}
	at := 0
	for i, h := range c.heads {
		want := h
		if i == 0 {
			want = binary.LittleEndian.AppendUint32(bytes.Clone(h[:countAt]), uint32(count))
		}
		if got := b[at : at+len(h)]; !bytes.Equal(got, want) {
			return nil, 0, malformed("has %x before column %d of %d cells, want %x", got, i, count, want)
		}
		at += len(h)
		r.columns = append(r.columns, b[at:at+count*c.rows[i]])
		at += count * c.rows[i]
	}
	if got := b[at : at+len(c.trailer)]; !bytes.Equal(got, c.trailer) {
		return nil, 0, malformed("has %x after a cache, want %x", got, c.trailer)
	}
	return r, at + len(c.trailer), r.order()
}

// order sorts the tokens by position, and refuses positions that are not exactly first…first+count−1.
func (r *rows) order() error {
	cell := r.cache.rows[0]
	at := make([]int, r.count) // at[i]: where token first+i stands
	for i := range at {
		at[i] = -1
	}
	inOrder := true
	for i := range r.count {
		position := int(int32(binary.LittleEndian.Uint32(r.columns[0][i*cell:])))
		k := position - r.first
		if k < 0 || k >= r.count || at[k] >= 0 {
			return malformed("has a cell at position %d among the last %d of %d tokens", position, r.count, r.first+r.count)
		}
		at[k] = i
		inOrder = inOrder && k == i
	}
	if inOrder {
		return nil
	}
	for j, column := range r.columns {
		row := r.cache.rows[j]
		sorted := make([]byte, 0, len(column))
		for _, i := range at {
			sorted = append(sorted, column[i*row:(i+1)*row]...)
		}
		r.columns[j] = sorted
	}
	return nil
}

func (r *rows) end() int { return r.first + r.count }

// part gives tokens from…to−1, sharing memory.
func (r *rows) part(from, to int) *rows {
	p := &rows{cache: r.cache, first: from, count: to - from}
	for j, column := range r.columns {
		row := r.cache.rows[j]
		p.columns = append(p.columns, column[(from-r.first)*row:(to-r.first)*row])
	}
	return p
}

// join gives r and what next has beyond it, in memory of its own. They must touch or overlap.
func (r *rows) join(next *rows) (*rows, error) {
	if r == nil {
		r = &rows{cache: next.cache, first: next.first, columns: make([][]byte, len(next.columns))}
	}
	if next.first > r.end() {
		return nil, fmt.Errorf("state: the tokens %d…%d left the window unseen: %w", r.end(), next.first-1, txn.ErrConflict)
	}
	out := &rows{cache: r.cache, first: r.first, count: max(next.end(), r.end()) - r.first}
	more := next.part(min(max(r.end(), next.first), next.end()), next.end())
	for j := range r.columns {
		out.columns = append(out.columns, append(append([]byte(nil), r.columns[j]...), more.columns[j]...))
	}
	return out, nil
}

// appendModule writes the cache as the engine reads it.
func (r *rows) appendModule(b []byte) []byte {
	for j, h := range r.cache.heads {
		at := len(b)
		b = append(b, h...)
		if j == 0 {
			binary.LittleEndian.PutUint32(b[at+countAt:], uint32(r.count))
		}
		b = append(b, r.columns[j]...)
	}
	return append(b, r.cache.trailer...)
}
