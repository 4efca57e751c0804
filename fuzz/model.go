package fuzz

import (
	"encoding/binary"
	"fmt"

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
}

// Model is the reference: the checkpoints that were acknowledged as listed and not taken back since. A database may have
// fewer of them, where the model says that it may have given some up; it never has others.
type Model struct {
	Listed map[db.Generation]*Checkpoint
}

// NewModel gives an empty model.
func NewModel() *Model { return &Model{Listed: map[db.Generation]*Checkpoint{}} }

// Publish adds a checkpoint. One of the same prefix is replaced.
func (m *Model) Publish(c *Checkpoint) {
	for g, old := range m.Listed {
		if old.Space == c.Space && equal(old.Tokens, c.Tokens) {
			delete(m.Listed, g)
		}
	}
	m.Listed[c.Generation] = c
}

// Crash takes back what a crash may take: what was not durable.
func (m *Model) Crash() {
	for g, c := range m.Listed {
		if !c.Durable {
			delete(m.Listed, g)
		}
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
