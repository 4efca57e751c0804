package db

import (
	"encoding/binary"
	"iter"

	"github.com/holdfast-db/holdfast/txn"
)

// pageTable finds pages by key. It is a hash table with open addressing whose slots are single pointers: a Go map of the same
// pages has the 32 bytes of the key beside each, and never gives memory back. Keys are digests, so their own bits are as
// good as any hash of them.
//
// Invariants: at most three quarters of the slots are taken, and, above the least size, at least an eighth; between the slot
// that a key's bits name and the one its page is in, none is free.
type pageTable struct {
	slots []*page
	n     int
}

const pageTableLeast = 64 // slots

func (t *pageTable) home(key *txn.Key) int {
	return int(binary.LittleEndian.Uint64(key[:]) & uint64(len(t.slots)-1))
}

// find gives the slot that the key's page is in, or the free one where it would be.
func (t *pageTable) find(key *txn.Key) int {
	i := t.home(key)
	for t.slots[i] != nil && t.slots[i].key != *key {
		i = (i + 1) & (len(t.slots) - 1)
	}
	return i
}

// get gives the page of the key, nil if there is none.
func (t *pageTable) get(key txn.Key) *page {
	if t.n == 0 {
		return nil
	}
	return t.slots[t.find(&key)]
}

// put enters a page in the place of any other one with its key.
func (t *pageTable) put(p *page) {
	if 4*(t.n+1) > 3*len(t.slots) {
		t.resize(max(2*len(t.slots), pageTableLeast))
	}
	i := t.find(&p.key)
	if t.slots[i] == nil {
		t.n++
	}
	t.slots[i] = p
}

// drop takes the page of the key out, if there is one.
func (t *pageTable) drop(key txn.Key) {
	if t.n == 0 {
		return
	}
	hole := t.find(&key)
	if t.slots[hole] == nil {
		return
	}
	t.slots[hole] = nil
	t.n--
	// What lies behind the hole moves into it, unless it would come to lie before its home.
	mask := len(t.slots) - 1
	for i := (hole + 1) & mask; t.slots[i] != nil; i = (i + 1) & mask {
		if home := t.home(&t.slots[i].key); (i-home)&mask >= (i-hole)&mask {
			t.slots[hole], t.slots[i] = t.slots[i], nil
			hole = i
		}
	}
	if 8*t.n < len(t.slots) && len(t.slots) > pageTableLeast {
		t.resize(len(t.slots) / 2)
	}
}

func (t *pageTable) resize(slots int) {
	old := t.slots
	t.slots, t.n = make([]*page, slots), 0
	for _, p := range old {
		if p != nil {
			t.slots[t.find(&p.key)] = p
			t.n++
		}
	}
}

func (t *pageTable) len() int { return t.n }

// all gives every page. The table must not change meanwhile.
func (t *pageTable) all() iter.Seq[*page] {
	return func(yield func(*page) bool) {
		for _, p := range t.slots {
			if p != nil && !yield(p) {
				return
			}
		}
	}
}
