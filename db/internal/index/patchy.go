package index

import (
	"bytes"
	"encoding/binary"
	"errors"

	"github.com/cockroachdb/pebble/v2"

	"github.com/holdfast-db/holdfast/txn"
)

// Patchy reads an index of which some blocks cannot be read, for salvage: it leaves out what it cannot get, and counts. It
// implements txn.Reader.
type Patchy struct {
	snapshot *Snapshot
	Skipped  int // times that a scan had to leave something out, or a lookup failed
}

// Patchy gives the reader; the snapshot is the caller's to close.
func (s *Snapshot) Patchy() *Patchy { return &Patchy{snapshot: s} }

// Get implements txn.Reader. What cannot be read is not there.
func (p *Patchy) Get(key []byte) ([]byte, error) {
	v, err := p.snapshot.Get(key)
	if err != nil {
		p.Skipped++
		return nil, nil
	}
	return v, nil
}

// Scan implements txn.Reader. Where a block cannot be read it goes on at the next key that differs in the two bytes after the
// first, which is far enough to leave the block sooner or later and near enough to miss little of what is behind it.
func (p *Patchy) Scan(prefix []byte, fn func(key, value []byte) (bool, error)) error {
	from, end := bytes.Clone(prefix), after(prefix)
	for {
		last, done, err := p.scanFrom(from, end, fn)
		if err != nil || done {
			return err
		}
		p.Skipped++
		if bytes.Compare(last, from) < 0 {
			last = from
		}
		if from = skipAhead(last); from == nil || !bytes.HasPrefix(from, prefix) {
			return nil
		}
	}
}

// scanFrom scans until the end or the first entry that cannot be read. last is the key of the last one that could be.
func (p *Patchy) scanFrom(from, end []byte, fn func(key, value []byte) (bool, error)) (last []byte, done bool, err error) {
	it, err := p.snapshot.src.NewIter(&pebble.IterOptions{LowerBound: from, UpperBound: end})
	if err != nil {
		return nil, false, nil
	}
	defer it.Close()
	for ok := it.First(); ok; ok = it.Next() {
		v, err := it.ValueAndErr()
		if err != nil {
			return last, false, nil
		}
		last = append(last[:0], it.Key()...)
		more, err := fn(it.Key(), v)
		if errors.Is(err, txn.ErrCorrupt) {
			p.Skipped++ // an entry that does not decode is left out like one that cannot be read
			continue
		}
		if err != nil || !more {
			return nil, true, err
		}
	}
	return last, it.Error() == nil, nil
}

// skipAhead gives the first key after k that differs in its second and third byte, nil if there is none under the same first.
func skipAhead(k []byte) []byte {
	var b [3]byte
	copy(b[:], k)
	if n := binary.BigEndian.Uint16(b[1:]); n < 1<<16-1 {
		binary.BigEndian.PutUint16(b[1:], n+1)
		return b[:]
	}
	return nil
}
