package txn

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"slices"
	"sort"
)

// Memory is a View in plain memory, for tests and for the reference model.
type Memory struct {
	keys   []string // sorted, unless unsorted is set
	values map[string][]byte

	unsorted bool // keys were added out of order since they were last read in order
}

// NewMemory gives an empty catalogue.
func NewMemory() *Memory { return &Memory{values: map[string][]byte{}} }

// Get implements Reader.
func (m *Memory) Get(key []byte) ([]byte, error) { return m.values[string(key)], nil }

// Set implements View.
func (m *Memory) Set(key, value []byte) error {
	if _, ok := m.values[string(key)]; !ok {
		if n := len(m.keys); n > 0 && m.keys[n-1] > string(key) {
			m.unsorted = true
		}
		m.keys = append(m.keys, string(key))
	}
	m.values[string(key)] = append([]byte{}, value...)
	return nil
}

// Delete implements View.
func (m *Memory) Delete(key []byte) error {
	if _, ok := m.values[string(key)]; ok {
		m.sort()
		i, _ := slices.BinarySearch(m.keys, string(key))
		m.keys = slices.Delete(m.keys, i, i+1)
		delete(m.values, string(key))
	}
	return nil
}

// Scan implements Reader.
func (m *Memory) Scan(prefix []byte, fn func(key, value []byte) (bool, error)) error {
	m.sort()
	for i := sort.SearchStrings(m.keys, string(prefix)); i < len(m.keys); i++ {
		key := []byte(m.keys[i])
		if !bytes.HasPrefix(key, prefix) {
			return nil
		}
		if more, err := fn(key, m.values[m.keys[i]]); err != nil || !more {
			return err
		}
	}
	return nil
}

// sort puts the keys in order.
func (m *Memory) sort() {
	if m.unsorted {
		slices.Sort(m.keys)
		m.unsorted = false
	}
}

// Len is the number of entries.
func (m *Memory) Len() int { return len(m.keys) }

// Clone gives an independent copy.
func (m *Memory) Clone() *Memory {
	c := &Memory{keys: slices.Clone(m.keys), unsorted: m.unsorted, values: make(map[string][]byte, len(m.values))}
	for k, v := range m.values {
		c.values[k] = v // values are replaced, never changed
	}
	return c
}

// Hash digests every entry of a catalogue in key order: two catalogues with the same hash are byte-identical.
func Hash(v Reader) (Key, error) {
	h := sha256.New()
	var n [8]byte
	put := func(b []byte) {
		binary.LittleEndian.PutUint64(n[:], uint64(len(b)))
		h.Write(n[:])
		h.Write(b)
	}
	err := v.Scan(nil, func(k, b []byte) (bool, error) {
		put(k)
		put(b)
		return true, nil
	})
	return Key(h.Sum(nil)), err
}
