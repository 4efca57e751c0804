package db

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"

	"github.com/holdfast-db/holdfast/db/internal/arena"
	"github.com/holdfast-db/holdfast/db/internal/index"
	"github.com/holdfast-db/holdfast/db/internal/segment"
	"github.com/holdfast-db/holdfast/txn"
)

// Loose pages are ordinary KV chunks without a checkpoint: put, got, deleted by key. They share RAM, disk and budgets with the
// pages of checkpoints and compete with them by recency, but they are in no manifest: their index is changed without a
// log record, so nothing of theirs waits for a sync that a checkpoint needs, nor the other way round. The price is that a crash
// loses those that were indexed since the last flush of the index. Losing one is an ordinary miss.

// LoosePage is a page to be put. The key names what the page was computed from: equal keys mean equal bytes.
type LoosePage struct {
	Key   []byte // 1…MaxLooseKeyBytes
	Bytes []byte // 1…MaxPageBytes
}

// LooseLease holds pages that were got. Like a Restoration it ends by Release, with the context, at its deadline, or with
// its owner.
type LooseLease struct {
	hold
	at []int // index into pages, −1 for a miss
}

// Bytes gives the bytes of the i-th key that was asked for, read-only; nil for a miss, and once the lease has ended.
func (l *LooseLease) Bytes(i int) []byte {
	l.db.residency.mu.Lock()
	defer l.db.residency.mu.Unlock()
	if l.ended != "" || i < 0 || i >= len(l.at) || l.at[i] < 0 {
		return nil
	}
	return l.pages[l.at[i]].slots[0].Bytes()
}

// Found is the number of keys that were found.
func (l *LooseLease) Found() (n int) {
	for _, i := range l.at {
		if i >= 0 {
			n++
		}
	}
	return n
}

// looseIndex is where loose pages lie on disk. Keys, after index.LooseTag:
//
//	'p' ‖ key            size of the page, then its placement as 5 fixed 64-bit integers
//	'g' ‖ segment        live pages and their allocated bytes in the segment
//	's' ‖ segment ‖ key  nothing: the pages of a segment
//
// All changes of one call are one batch, so the counts are those of the pages at every moment.
type looseIndex struct {
	index *index.Index
	mu    sync.Mutex // held over changes, which touch memory only
}

func looseKey(tag byte, parts ...[]byte) []byte {
	return slices.Concat([]byte{index.LooseTag, tag}, slices.Concat(parts...))
}

func segmentBytes(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

// key is the digest under which the page of a namespace is kept.
func (n *Namespace) looseKey(key []byte) (txn.Key, error) {
	if len(key) == 0 {
		return txn.Key{}, fmt.Errorf("db: loose page without a key: want 1…%d bytes: %w", MaxLooseKeyBytes, ErrInvalid)
	}
	if len(key) > MaxLooseKeyBytes {
		return txn.Key{}, fmt.Errorf("db: key of a loose page has %d bytes: limit %d: %w", len(key), MaxLooseKeyBytes, ErrTooLarge)
	}
	return sha256.Sum256(slices.Concat([]byte("holdfast/loose/1\x00"), n.id[:], key)), nil
}

const looseEntryBytes = 6 * 8

func encodeLoose(bytes int64, p txn.Placement) []byte {
	b := make([]byte, 0, looseEntryBytes)
	for _, v := range []uint64{uint64(bytes), p.Segment, uint64(p.Offset), uint64(p.Stored), uint64(p.Codec), p.Checksum} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return b
}

func decodeLoose(b []byte) (bytes int64, p txn.Placement, err error) {
	if len(b) != looseEntryBytes {
		return 0, p, fmt.Errorf("db: loose index entry of %d bytes: %w", len(b), ErrCorrupt)
	}
	v := func(i int) uint64 { return binary.LittleEndian.Uint64(b[i*8:]) }
	return int64(v(0)), txn.Placement{Segment: v(1), Offset: int64(v(2)), Stored: int64(v(3)), Codec: txn.Codec(v(4)), Checksum: v(5)}, nil
}

func (x *looseIndex) find(v txn.Reader, key txn.Key) (bytes int64, p txn.Placement, ok bool, err error) {
	b, err := v.Get(looseKey('p', key[:]))
	if err != nil || b == nil {
		return 0, p, false, err
	}
	bytes, p, err = decodeLoose(b)
	return bytes, p, err == nil, err
}

// add enters pages that lie on disk now. copyOf gives their copies, and leaves out what was deleted meanwhile. What is entered
// already stays as it is, and is given back.
func (x *looseIndex) add(pages []*page, copyOf func(*page) (txn.Placement, bool), already func(*page, txn.Placement)) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	b := x.index.NewBatch()
	for _, p := range pages {
		at, ok := copyOf(p)
		if !ok {
			continue
		}
		if _, there, entered, err := x.find(b, p.key); err != nil {
			return discard(b, err)
		} else if entered {
			already(p, there)
			continue
		}
		if err := b.Set(looseKey('p', p.key[:]), encodeLoose(p.bytes, at)); err != nil {
			return discard(b, err)
		}
		if err := b.Set(looseKey('s', segmentBytes(at.Segment), p.key[:]), nil); err != nil {
			return discard(b, err)
		}
		if err := x.count(b, at, 1); err != nil {
			return discard(b, err)
		}
	}
	return b.Commit()
}

// remove takes pages out and gives the disk copies that they had. With mu.
func (x *looseIndex) remove(keys []txn.Key) (freed map[txn.Key]txn.Placement, err error) {
	freed = map[txn.Key]txn.Placement{}
	b := x.index.NewBatch()
	for _, key := range keys {
		_, at, ok, err := x.find(b, key)
		if err != nil {
			return nil, discard(b, err)
		}
		if !ok {
			continue
		}
		if err := b.Delete(looseKey('p', key[:])); err != nil {
			return nil, discard(b, err)
		}
		if err := b.Delete(looseKey('s', segmentBytes(at.Segment), key[:])); err != nil {
			return nil, discard(b, err)
		}
		if err := x.count(b, at, -1); err != nil {
			return nil, discard(b, err)
		}
		freed[key] = at
	}
	return freed, b.Commit()
}

func discard(b *index.Batch, err error) error {
	b.Discard()
	return err
}

// count changes the counts of a segment.
func (x *looseIndex) count(b *index.Batch, at txn.Placement, delta int64) error {
	k := looseKey('g', segmentBytes(at.Segment))
	v, err := b.Get(k)
	if err != nil {
		return err
	}
	var pages, bytes int64
	if v != nil {
		if len(v) != 16 {
			return fmt.Errorf("db: loose segment entry of %d bytes: %w", len(v), ErrCorrupt)
		}
		pages, bytes = int64(binary.LittleEndian.Uint64(v)), int64(binary.LittleEndian.Uint64(v[8:]))
	}
	pages, bytes = pages+delta, bytes+delta*at.Allocated()
	if pages == 0 {
		return b.Delete(k)
	}
	out := binary.LittleEndian.AppendUint64(nil, uint64(pages))
	return b.Set(k, binary.LittleEndian.AppendUint64(out, uint64(bytes)))
}

// segments gives what is alive in each segment with loose pages.
func (x *looseIndex) segments(v txn.Reader) (live map[uint64]segmentLive, err error) {
	live = map[uint64]segmentLive{}
	err = v.Scan(looseKey('g'), func(k, b []byte) (bool, error) {
		if len(k) != 10 || len(b) != 16 {
			return false, fmt.Errorf("db: loose segment entry of %d and %d bytes: %w", len(k), len(b), ErrCorrupt)
		}
		live[binary.BigEndian.Uint64(k[2:])] = segmentLive{int64(binary.LittleEndian.Uint64(b)), int64(binary.LittleEndian.Uint64(b[8:]))}
		return true, nil
	})
	return live, err
}

// oldest gives up to n pages of the oldest segment that has any.
func (x *looseIndex) oldest(v txn.Reader, n int) (keys []txn.Key, err error) {
	err = v.Scan(looseKey('s'), func(k, _ []byte) (bool, error) {
		if len(k) != 2+8+32 {
			return false, fmt.Errorf("db: loose page entry of %d bytes: %w", len(k), ErrCorrupt)
		}
		keys = append(keys, txn.Key(k[10:]))
		return len(keys) < n, nil
	})
	return keys, err
}

// PutLoose stores loose pages. The bytes are copied before it returns. Under write-through they are on disk when it returns. A
// page whose key is there already is not stored again.
//
// Errors: ErrInvalid, ErrTooLarge, and then nothing was stored; ErrBusy, ErrNoSpace, ErrIO, ErrClosed, and then the pages
// up to the failing one may have been.
func (d *DB) PutLoose(ctx context.Context, ns *Namespace, pages ...LoosePage) error {
	keys, err := looseKeys(ns, len(pages), func(i int) []byte { return pages[i].Key })
	if err != nil {
		return err
	}
	for i := range pages {
		if err := checkNumber(fmt.Sprintf("size of loose page %d", i), int64(len(pages[i].Bytes)), 1, MaxPageBytes); err != nil {
			return err
		}
	}
	if err := d.enterToWrite(ctx); err != nil {
		return err
	}
	defer d.gate.leave()
	there, err := d.looseThere(keys)
	if err != nil {
		return err
	}
	var put []*page
	defer func() { d.residency.unpinAll(put) }()
	for i := range pages {
		if there[i] {
			continue
		}
		slots, err := d.allocate(ctx, []int64{int64(len(pages[i].Bytes))})
		if err != nil {
			return err
		}
		copy(slots[0].Bytes(), pages[i].Bytes)
		p, err := d.enterLoose(ctx, keys[i], slots)
		if err != nil {
			return err
		}
		if p != nil {
			put = append(put, p)
		}
	}
	if d.options.WritePolicy == WriteThrough && len(put) > 0 {
		return d.persist(ctx, put)
	}
	return nil
}

// enterLoose puts a page into the table, pinned; nil if it is there already. It waits for those who are finding out about one that is
// unproven, or are deleting it.
func (d *DB) enterLoose(ctx context.Context, key txn.Key, slots []arena.Slot) (*page, error) {
	t := d.residency
	for {
		t.mu.Lock()
		p := t.pages.get(key)
		if p == nil {
			p = &page{key: key, bytes: slots[0].Len(), class: segment.Loose, slots: slots, known: true}
			t.pages.put(p)
			delete(t.quarantine, key)
			t.pin(p)
			t.mu.Unlock()
			return p, nil
		}
		if !p.unproven && p.known {
			t.mu.Unlock()
			d.giveBack(slots)
			return nil, nil
		}
		changed := p.wait()
		t.mu.Unlock()
		select {
		case <-changed:
		case <-d.gate.stopping:
			d.giveBack(slots)
			return nil, errClosed
		case <-ctx.Done():
			d.giveBack(slots)
			return nil, fmt.Errorf("db: waiting for a loose page: %w: %w", ErrBusy, context.Cause(ctx))
		}
	}
}

// ExistsLoose tells which of the loose pages are there, in RAM or on disk.
func (d *DB) ExistsLoose(ns *Namespace, keys ...[]byte) ([]bool, error) {
	digests, err := looseKeys(ns, len(keys), func(i int) []byte { return keys[i] })
	if err != nil {
		return nil, err
	}
	if err := d.gate.enter(); err != nil {
		return nil, err
	}
	defer d.gate.leave()
	return d.looseThere(digests)
}

func (d *DB) looseThere(keys []txn.Key) ([]bool, error) {
	there := make([]bool, len(keys))
	d.residency.mu.Lock()
	for i, key := range keys {
		p := d.residency.pages.get(key)
		there[i] = p != nil && p.known && !p.lost && !p.unproven
	}
	d.residency.mu.Unlock()
	snapshot := d.index.Snapshot()
	defer snapshot.Close()
	for i, key := range keys {
		if there[i] {
			continue
		}
		_, _, ok, err := d.loose.find(snapshot, key)
		if err != nil {
			return nil, err
		}
		there[i] = ok
	}
	return there, nil
}

// GetLoose brings loose pages into RAM and pins them; what is not there is a miss for its key, not an error. The owner may be
// nil. Errors: ErrInvalid, ErrBusy, ErrClosed, ErrIO.
func (d *DB) GetLoose(ctx context.Context, owner *Owner, ns *Namespace, keys ...[]byte) (*LooseLease, error) {
	digests, err := looseKeys(ns, len(keys), func(i int) []byte { return keys[i] })
	if err != nil {
		return nil, err
	}
	if err := d.gate.enterWith(ctx); err != nil {
		return nil, err
	}
	defer d.gate.leave()
	if err := d.admit(); err != nil {
		return nil, err
	}
	l := &LooseLease{hold: hold{db: d, what: fmt.Sprintf("%d loose pages", len(keys))}, at: make([]int, len(keys))}
	if err := d.getLoose(ctx, l, digests); err != nil {
		d.counters.leases.Add(-1)
		return nil, err
	}
	if err := l.lease.begin(ctx, d, owner, l, d.options.LeaseTimeout); err != nil {
		l.end("refused")
		return nil, err
	}
	return l, nil
}

func (d *DB) getLoose(ctx context.Context, l *LooseLease, keys []txn.Key) error {
	for try := 0; ; try++ {
		err := d.pinLoose(l, keys)
		if err == nil && len(l.pages) > 0 {
			err = d.load(ctx, l.pages, 1)
		}
		if err == nil {
			return nil
		}
		if _, lost := err.(*lostPages); !lost && err != errChanged || try == restoreTries {
			return err
		}
		l.pages = nil // what was lost is a miss now
	}
}

// pinLoose pins what is there: errChanged, with nothing pinned, if it was deleted or moved meanwhile.
func (d *DB) pinLoose(l *LooseLease, keys []txn.Key) error {
	before := d.index.Snapshot()
	err := d.enterKnownLoose(before, l, keys)
	before.Close()
	if err == nil {
		now := d.index.Snapshot()
		err = d.proveLoose(now, l.pages)
		now.Close()
	}
	if err != nil {
		d.settleUnproven(l.pages)
		d.residency.unpinAll(l.pages)
	}
	return err
}

// enterKnownLoose pins what a reading of the index has, which may be old.
func (d *DB) enterKnownLoose(v txn.Reader, l *LooseLease, keys []txn.Key) error {
	t := d.residency
	for i, key := range keys {
		l.at[i] = -1
		bytes, at, onDisk, err := d.loose.find(v, key)
		if err != nil {
			return err
		}
		t.mu.Lock()
		p := t.pages.get(key)
		if p == nil && onDisk && t.quarantine[key] == nil {
			p = &page{key: key, bytes: bytes, class: segment.Loose, place: []txn.Placement{at}, known: true, unproven: true}
			t.pages.put(p)
		}
		if p != nil && p.known && !p.lost {
			t.pin(p)
			p.reused = true
			l.at[i] = len(l.pages)
			l.pages = append(l.pages, p)
		}
		t.mu.Unlock()
	}
	return nil
}

// proveLoose compares those of the pages that are not in RAM with a reading of the index that is younger than their pins. A delete that
// comes later finds the page in the table.
func (d *DB) proveLoose(v txn.Reader, pages []*page) error {
	t := d.residency
	for _, p := range pages {
		t.mu.Lock()
		ask := p.unproven || p.slots == nil
		t.mu.Unlock()
		if !ask {
			continue
		}
		_, at, ok, err := d.loose.find(v, p.key)
		if err != nil {
			return err
		}
		t.mu.Lock()
		same := ok && len(p.place) == 1 && p.place[0] == at
		if same {
			p.unproven = false
			p.signal()
		} else if (p.unproven || p.slots == nil) && p.known {
			t.detach(p)
		}
		t.mu.Unlock()
		if !same {
			return errChanged
		}
	}
	return nil
}

// settleUnproven takes the pages out of the table that stay unproven, so that nobody waits for them.
func (d *DB) settleUnproven(pages []*page) {
	t := d.residency
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, p := range pages {
		if p.unproven && p.known && !p.lost {
			t.detach(p)
		}
	}
}

// DeleteLoose deletes loose pages and tells how many were there. Those under a lease stay readable until it ends.
func (d *DB) DeleteLoose(ctx context.Context, ns *Namespace, keys ...[]byte) (int, error) {
	digests, err := looseKeys(ns, len(keys), func(i int) []byte { return keys[i] })
	if err != nil {
		return 0, err
	}
	if err := d.enterToWrite(ctx); err != nil {
		return 0, err
	}
	defer d.gate.leave()
	return d.dropLoose(digests)
}

// dropLoose deletes loose pages. While their index changes it keeps them in the table, pinned and unknown: who gets one misses it, who
// puts one waits, and who enters one into the index, for which the index is locked, finds that it must not. A page whose copy the
// index did not name was entered into the table from an old reading: the copy is not its own.
func (d *DB) dropLoose(keys []txn.Key) (n int, err error) {
	t, x := d.residency, d.loose
	x.mu.Lock()
	defer x.mu.Unlock()
	dropped := map[txn.Key]*page{}
	t.mu.Lock()
	for _, key := range keys {
		if p := t.pages.get(key); p != nil && p.known {
			p.known = false
			t.pin(p)
			dropped[key] = p
		}
	}
	t.mu.Unlock()
	freed, err := x.remove(keys)
	var out leftovers
	t.mu.Lock()
	defer func() {
		t.mu.Unlock()
		t.giveBack(&out)
	}()
	if err != nil {
		for _, p := range dropped {
			p.known = true
			p.signal()
			t.unpin(p, &out)
		}
		return 0, err
	}
	for key, at := range freed {
		n++
		// The one in the table may have been entered meanwhile.
		if p := t.pages.get(key); p != nil && p.known && len(p.place) == 1 && p.place[0] == at {
			p.known = false
			t.pin(p)
			dropped[key] = p
		}
		if p := dropped[key]; p == nil || len(p.place) != 1 || p.place[0] != at {
			out.loose = append(out.loose, at)
		}
	}
	for key, p := range dropped {
		at, indexed := freed[key]
		if !indexed && p.slots != nil {
			n++
		}
		if named := indexed && len(p.place) == 1 && p.place[0] == at; !named && !p.unrecorded {
			p.place = nil
		}
		t.forget(p)
		t.unpin(p, &out)
	}
	return n, nil
}

func looseKeys(ns *Namespace, n int, key func(i int) []byte) ([]txn.Key, error) {
	if ns == nil {
		return nil, fmt.Errorf("db: the namespace is nil: %w", ErrInvalid)
	}
	if n > MaxLooseBatch {
		return nil, fmt.Errorf("db: %d loose pages in one call: limit %d: %w", n, MaxLooseBatch, ErrTooLarge)
	}
	keys := make([]txn.Key, n)
	for i := range keys {
		var err error
		if keys[i], err = ns.looseKey(key(i)); err != nil {
			return nil, err
		}
	}
	return keys, nil
}

// splitLoose tells loose pages from those of checkpoints.
func splitLoose(pages []*page) (loose, bound []*page) {
	for _, p := range pages {
		if p.class == segment.Loose {
			loose = append(loose, p)
		} else {
			bound = append(bound, p)
		}
	}
	return loose, bound
}

func keysOf(pages []*page) []txn.Key {
	keys := make([]txn.Key, len(pages))
	for i, p := range pages {
		keys[i] = p.key
	}
	return keys
}

// all calls fn for every loose page on disk.
func (x *looseIndex) all(v txn.Reader, fn func(key txn.Key, bytes int64, at txn.Placement) error) error {
	return x.scan(v, looseKey('p'), fn)
}

// under is all for the keys that begin with b.
func (x *looseIndex) under(v txn.Reader, b byte, fn func(key txn.Key, bytes int64, at txn.Placement) error) error {
	return x.scan(v, looseKey('p', []byte{b}), fn)
}

func (x *looseIndex) scan(v txn.Reader, prefix []byte, fn func(key txn.Key, bytes int64, at txn.Placement) error) error {
	return v.Scan(prefix, func(k, b []byte) (bool, error) {
		if len(k) != 2+len(txn.Key{}) {
			return false, fmt.Errorf("db: loose page entry under a key of %d bytes: %w", len(k), ErrCorrupt)
		}
		bytes, at, err := decodeLoose(b)
		if err != nil {
			return false, err
		}
		return true, fn(txn.Key(k[2:]), bytes, at)
	})
}
