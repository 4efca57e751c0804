package index

import (
	"bytes"
	"encoding/binary"
	"sync"
	"sync/atomic"

	"github.com/zeebo/xxh3"
)

// recent remembers small entries of the catalogue that were read or written lately, and keys that have none. A publication asks for
// the same ones in every step: whether a page is there when it begins, once it is claimed, when it is decided; and the one after it asks
// for what this one has written. Absent ones cost Pebble a search of every memtable.
//
// Every entry is what the catalogue says now, and has since some version of it; versions are counted by commits. Who reads at an older
// version than that asks Pebble. What was read enters only if nothing of its shard has changed since.
//
// The entries lie in flat memory without pointers, so that they cost the garbage collector nothing, and their number is fixed: a key
// has a set of recentWays slots, and a new one takes the place of the one that was not asked for the longest.
type recent struct {
	// version is twice the number of commits that changed the catalogue, and one more while such a commit is under way.
	version atomic.Uint64
	shards  [recentShards]recentShard
}

const (
	recentShards    = 64
	recentSets      = 128 // of a shard
	recentWays      = 4
	recentSlotBytes = 256
	recentBytes     = recentShards * recentSets * recentWays * recentSlotBytes // 8 MiB, taken as it is filled

	// A slot: version since which (0: empty), when it was last asked for, length of the key, length of the value, both.
	slotSince, slotUsed, slotKey, slotValue, slotHead = 0, 8, 16, 17, 19

	absent = 0xffff // length of the value of a key that has none
	never  = 0      // version of a reading that may have a commit half; real ones begin with firstVersion
)

const firstVersion = 2

type recentShard struct {
	mu      sync.Mutex
	changed uint64 // version of the last commit that changed an entry of the shard
	clock   uint64
	slots   []byte // nil until the first entry
}

func newRecent() *recent {
	r := &recent{}
	r.version.Store(firstVersion)
	return r
}

// now gives the version of a reading that begin takes; never if a commit was under way meanwhile.
func (r *recent) now(begin func()) uint64 {
	before := r.version.Load()
	begin()
	if before%2 != 0 || r.version.Load() != before {
		return never
	}
	return before
}

// set finds the shard of a key and its set of slots. ok is false for what is not remembered.
func (r *recent) set(key []byte) (s *recentShard, at int, ok bool) {
	if len(key) == 0 || key[0] >= LooseTag || len(key) > recentSlotBytes-slotHead {
		return nil, 0, false
	}
	h := xxh3.Hash(key)
	return &r.shards[h%recentShards], int(h/recentShards%recentSets) * recentWays * recentSlotBytes, true
}

// find gives the slot of the key, nil if there is none. With s.mu.
func (s *recentShard) find(at int, key []byte) []byte {
	if s.slots == nil {
		return nil
	}
	for way := range recentWays {
		slot := s.slots[at+way*recentSlotBytes:][:recentSlotBytes]
		if n := int(slot[slotKey]); n == len(key) && binary.LittleEndian.Uint64(slot[slotSince:]) != 0 && bytes.Equal(slot[slotHead:slotHead+n], key) {
			return slot
		}
	}
	return nil
}

// get gives the value that the key had at a version, nil if it had none; it lies in buf, grown if need be. known is false if that is not
// remembered.
func (r *recent) get(key []byte, version uint64, buf []byte) (value []byte, known bool) {
	if version == never {
		return nil, false
	}
	s, at, ok := r.set(key)
	if !ok {
		return nil, false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	slot := s.find(at, key)
	if slot == nil || binary.LittleEndian.Uint64(slot[slotSince:]) > version {
		return nil, false
	}
	s.clock++
	binary.LittleEndian.PutUint64(slot[slotUsed:], s.clock)
	n := int(binary.LittleEndian.Uint16(slot[slotValue:]))
	if n == absent {
		return nil, true
	}
	if buf == nil {
		buf = make([]byte, 0, n)
	}
	return append(buf[:0], slot[slotHead+len(key):][:n]...), true
}

// saw remembers what was read at a version.
func (r *recent) saw(key, value []byte, version uint64) {
	if version == never {
		return
	}
	s, at, ok := r.set(key)
	if !ok {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.changed <= version && s.find(at, key) == nil {
		s.enter(at, key, value, version)
	}
}

// enter puts an entry into its slot, or into the one of its set that was not asked for the longest. With s.mu.
func (s *recentShard) enter(at int, key, value []byte, version uint64) {
	if len(key)+len(value) > recentSlotBytes-slotHead {
		s.forget(at, key)
		return
	}
	slot := s.find(at, key)
	if s.slots == nil {
		s.slots = make([]byte, recentBytes/recentShards)
	}
	if slot == nil {
		for way := range recentWays {
			other := s.slots[at+way*recentSlotBytes:][:recentSlotBytes]
			if slot == nil || binary.LittleEndian.Uint64(other[slotUsed:]) < binary.LittleEndian.Uint64(slot[slotUsed:]) {
				slot = other
			}
		}
	}
	s.clock++
	binary.LittleEndian.PutUint64(slot[slotSince:], version)
	binary.LittleEndian.PutUint64(slot[slotUsed:], s.clock)
	slot[slotKey] = byte(len(key))
	copy(slot[slotHead:], key)
	n := absent
	if value != nil {
		n = copy(slot[slotHead+len(key):], value)
	}
	binary.LittleEndian.PutUint16(slot[slotValue:], uint16(n))
}

// forget drops what is remembered of a key. With s.mu.
func (s *recentShard) forget(at int, key []byte) {
	if slot := s.find(at, key); slot != nil {
		clear(slot[:slotHead])
	}
}

// commit commits changes of the catalogue, by one caller at a time, and remembers them. What a commit that failed has done is not known.
func (r *recent) commit(changes map[string][]byte, commit func() error) error {
	version := r.version.Add(1) + 1
	err := commit()
	for k, value := range changes {
		key := []byte(k)
		s, at, ok := r.set(key)
		if !ok {
			continue
		}
		s.mu.Lock()
		s.changed = version
		if err == nil {
			s.enter(at, key, value, version)
		} else {
			s.forget(at, key)
		}
		s.mu.Unlock()
	}
	r.version.Store(version)
	return err
}
