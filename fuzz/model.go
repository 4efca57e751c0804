package fuzz

import (
	"encoding/binary"
	"fmt"
	"maps"

	"github.com/zeebo/xxh3"

	"github.com/holdfast-db/holdfast/db"
	"github.com/holdfast-db/holdfast/txn"
)

// Checkpoint is what the model knows of one published checkpoint.
type Checkpoint struct {
	Generation db.Generation
	Space      int     // which namespace
	Tokens     []int32 // the exact prefix
	Durable    bool    // acknowledged as surviving a crash
	Placed     bool    // the database says that every page is on disk; it is durable once the log is synced after that
}

// Model is the reference: what has to be listed and what may be. A database lists everything that it must, but for what it
// may have given up for want of room or by policy, and nothing that it may not.
//
// May has what was published and not taken back; Must has those of it that were acknowledged and that nothing under way
// takes back. What is not listed when somebody looks has been given up, and never comes back.
//
// A publication that is not durable replaces one of the same prefix with a record that is not durable either. Until a later sync a
// crash may lose both, and then the one that was replaced is back: it is a ghost until then.
type Model struct {
	May, Must, Ghosts map[db.Generation]*Checkpoint
}

// NewModel gives an empty model.
func NewModel() *Model {
	return &Model{May: map[db.Generation]*Checkpoint{}, Must: map[db.Generation]*Checkpoint{}, Ghosts: map[db.Generation]*Checkpoint{}}
}

// Clone copies the model.
func (m *Model) Clone() *Model {
	c := &Model{May: make(map[db.Generation]*Checkpoint, len(m.May)), Must: make(map[db.Generation]*Checkpoint, len(m.Must)), Ghosts: maps.Clone(m.Ghosts)}
	for g, p := range m.May {
		q := *p
		c.May[g] = &q
		if m.Must[g] != nil {
			c.Must[g] = &q
		}
	}
	return c
}

// MayPublish says that a publication is about to be listed: it may be, and one of the same prefix may be replaced by it.
func (m *Model) MayPublish(c *Checkpoint) {
	for g, old := range m.Must {
		if old.Space == c.Space && equal(old.Tokens, c.Tokens) {
			delete(m.Must, g)
		}
	}
	if old := m.May[c.Generation]; old == nil {
		q := *c
		m.May[c.Generation] = &q
	}
}

// Publish says that a publication was acknowledged. One of the same prefix is replaced.
func (m *Model) Publish(c *Checkpoint) {
	for g, old := range m.May {
		if old.Space == c.Space && equal(old.Tokens, c.Tokens) && g != c.Generation {
			m.Drop(g)
			m.Ghosts[g] = old
		}
	}
	if c.Durable {
		m.Synced()
	}
	q := *c
	if old := m.May[c.Generation]; old != nil {
		q.Durable, q.Placed = q.Durable || old.Durable, old.Placed
	}
	m.May[c.Generation], m.Must[c.Generation] = &q, &q
}

// MayDrop says that a checkpoint is about to be taken back.
func (m *Model) MayDrop(g db.Generation) { delete(m.Must, g) }

// Drop says that it was.
func (m *Model) Drop(g db.Generation) {
	delete(m.Must, g)
	delete(m.May, g)
}

// MayDropAll and DropAll are the same for all that match.
func (m *Model) MayDropAll(match func(*Checkpoint) bool) {
	maps.DeleteFunc(m.Must, func(_ db.Generation, c *Checkpoint) bool { return match(c) })
}

// DropAll says that all that match were taken back.
func (m *Model) DropAll(match func(*Checkpoint) bool) {
	m.MayDropAll(match)
	m.Synced()
	maps.DeleteFunc(m.May, func(_ db.Generation, c *Checkpoint) bool { return match(c) })
}

// Doubt says that what is not durable may be given up by now.
func (m *Model) Doubt() {
	m.MayDropAll(func(c *Checkpoint) bool { return !c.Durable && !c.Placed })
}

// Synced says that everything so far is durable.
func (m *Model) Synced() {
	clear(m.Ghosts)
	for _, c := range m.May {
		c.Durable = c.Durable || c.Placed
	}
}

// Crash says that the process died, and with power the machine: what was not durable may be lost.
func (m *Model) Crash(power bool) {
	m.MayDropAll(func(c *Checkpoint) bool { return !c.Durable && (power || !c.Placed) })
	maps.Copy(m.May, m.Ghosts)
	clear(m.Ghosts)
}

// Saw says that somebody looked and saw these listed, and no others.
func (m *Model) Saw(listed map[db.Generation]*Checkpoint) {
	for g := range m.May {
		if listed[g] == nil {
			m.Drop(g)
		}
	}
	for g := range listed {
		m.Must[g] = m.May[g]
	}
}

// Longest gives the offset of the longest of the given checkpoints that is a prefix of the tokens, 0 if there is none.
func Longest(of map[db.Generation]*Checkpoint, space int, tokens []int32) (n int64) {
	for _, c := range of {
		if c.Space == space && len(c.Tokens) <= len(tokens) && equal(c.Tokens, tokens[:len(c.Tokens)]) {
			n = max(n, int64(len(c.Tokens)))
		}
	}
	return n
}

func equal(a, b []int32) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}

// Fill writes what a page of a rank has to hold: a function of its key, so that a stale, foreign or misplaced page is seen.
func Fill(b []byte, key txn.Key, rank int) {
	x := xxh3.Hash(key[:]) ^ uint64(rank+1)*0x9E3779B97F4A7C15
	for len(b) > 0 {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		var word [8]byte
		binary.LittleEndian.PutUint64(word[:], x)
		b = b[copy(b, word[:]):]
	}
}

// Verify compares a page with what it has to hold.
func Verify(b []byte, key txn.Key, rank int) error {
	want := make([]byte, len(b))
	Fill(want, key, rank)
	for i := range b {
		if b[i] != want[i] {
			return fmt.Errorf("page %s of rank %d: byte %d of %d is %#x instead of %#x", key.Short(), rank, i, len(b), b[i], want[i])
		}
	}
	return nil
}
