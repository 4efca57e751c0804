package db

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/holdfast-db/holdfast/db/internal/index"
	"github.com/holdfast-db/holdfast/txn"
)

// chronicle remembers, in the index and beside the catalogue, what the catalogue forgets: which checkpoints were retired, by which
// record and for which reason, and when which record was. It is for people who ask why something is not there.
//
//   - A retirement is noted in the batch that carries its record, so the two are durable together, and a crash loses neither
//     without the other: replay notes it again.
//   - A mark says what the clock showed at a record, and how full the tiers were. One is made with the first record that comes a
//     second or more after the last mark, so the records up to the next one lie within a second: the mark's *reach*. One is made
//     after a replay, and is *late*: what was replayed was before it. Records carry no time themselves: the catalogue
//     consults no clock.
//   - Retirements are kept for Options.HistoryAge and at most MaxHistory of them, the youngest. Marks are thinned out as they age,
//     so that their distance stays a thousandth of their age, and never more than MaxMarks are kept. The one before takes over the reach
//     of one that goes.
//
// Keys, after index.HistoryTag, and values; numbers in keys are big endian, those in values varints unless drawn otherwise:
//
//	'r' ‖ LSN ‖ generation   version 1 ‖ namespace 32 ‖ prefix 32 ‖ offset ‖ bytes ‖ kind 1 ‖ published ‖ durable 1 ‖ reason 1 ‖
//	                         previous 32 ‖ by 32 ‖ length of request ‖ request
//	't' ‖ LSN                version 1 ‖ late 1 ‖ unix time in µs ‖ reach in µs ‖ listed ‖ superseded ‖ page bytes ‖ disk bytes ‖ RAM bytes ‖ log bytes
//
// Rejected: keeping old log files, whose records name generations and not what they were, and are mostly placements; entries of the
// catalogue, which would have to be forgotten by records of their own; a file of its own, which would have to agree with the
// log after a crash.
type chronicle struct {
	index *index.Index
	age   time.Duration // 0: nothing is noted
	now   func() time.Time
	gauge func(m *Sample) // what the catalogue does not know

	mu     sync.Mutex // guards what follows; notes come from the committer, or from the replay before there is one
	marked time.Time  // when the last mark was made
	count  int64      // retirements kept; −1 until they were counted
}

const (
	historyVersion = 1
	// markInterval is the least time between two marks.
	markInterval = time.Second
	// markThinning is how many times its distance to the next a mark has to be old to go.
	markThinning = 1000
	// historyInterval is how often old entries are looked for.
	historyInterval = time.Minute
)

// Limits of the history.
const (
	// MaxHistory bounds the retirements that are remembered; the oldest go first.
	MaxHistory = 1 << 17
	// MaxMarks bounds the marks of time; the oldest go first.
	MaxMarks = 1 << 16
)

// Sample is how full the database was at some moment.
type Sample struct {
	At         time.Time `json:"at"`
	LSN        txn.LSN   `json:"lsn"`
	Listed     int64     `json:"listed"`
	Superseded int64     `json:"superseded"`
	PageBytes  int64     `json:"page_bytes"` // logical, of all distinct pages over all ranks
	DiskBytes  int64     `json:"disk_bytes"` // allocated by page copies that the catalogue names
	RAMBytes   int64     `json:"ram_bytes"`
	LogBytes   int64     `json:"log_bytes"`

	late  bool          // made after a replay of this record
	reach time.Duration // the records up to the next mark were made within it
}

// Retirement is one checkpoint that is not listed any more.
type Retirement struct {
	LSN        txn.LSN    `json:"lsn"`            // of the record that retired it
	After      time.Time  `json:"after,omitzero"` // it was retired between these two times
	Before     time.Time  `json:"before,omitzero"`
	Generation Generation `json:"generation"`
	Namespace  txn.Key    `json:"namespace"`
	Prefix     txn.Key    `json:"prefix"`
	Offset     int64      `json:"offset"`
	Bytes      int64      `json:"bytes"`
	Kind       string     `json:"kind"`
	Request    string     `json:"request,omitempty"`
	Published  txn.LSN    `json:"published"`
	Durable    bool       `json:"durable"`
	Reason     string     `json:"reason"`
	Previous   Generation `json:"previous,omitzero"` // the longest checkpoint before it when it was published
	By         Generation `json:"by,omitzero"`       // what took its place, or had superseded it

	reason txn.Reason
}

func historyKey(tag byte, lsn txn.LSN, rest ...byte) []byte {
	b := make([]byte, 0, 2+8+len(rest))
	b = append(b, index.HistoryTag, tag)
	b = binary.BigEndian.AppendUint64(b, uint64(lsn))
	return append(b, rest...)
}

func encodeFarewell(f *txn.Farewell) []byte {
	b := make([]byte, 0, 160+len(f.Request))
	b = append(b, historyVersion)
	b = append(b, f.Namespace[:]...)
	b = append(b, f.Prefix[:]...)
	b = binary.AppendUvarint(b, uint64(f.Offset))
	b = binary.AppendUvarint(b, uint64(f.Bytes))
	b = append(b, f.CheckpointKind)
	b = binary.AppendUvarint(b, uint64(f.Published))
	b = append(b, flag(f.Durable), byte(f.Reason))
	b = append(b, f.Previous[:]...)
	b = append(b, f.By[:]...)
	b = binary.AppendUvarint(b, uint64(len(f.Request)))
	return append(b, f.Request...)
}

func flag(on bool) byte {
	if on {
		return 1
	}
	return 0
}

// noteReader takes the parts of a note from the front. Past the end it gives zeros and sets short.
type noteReader struct {
	rest  []byte
	short bool
}

func (r *noteReader) take(n uint64) []byte {
	if n > uint64(len(r.rest)) {
		r.rest, r.short = nil, true
		return nil
	}
	part := r.rest[:n]
	r.rest = r.rest[n:]
	return part
}

func (r *noteReader) byte() byte {
	if b := r.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (r *noteReader) key() (k txn.Key) {
	copy(k[:], r.take(uint64(len(k))))
	return k
}

func (r *noteReader) int() int64 {
	v, n := binary.Uvarint(r.rest)
	if n <= 0 || v > math.MaxInt64 {
		r.rest, r.short = nil, true
		return 0
	}
	r.rest = r.rest[n:]
	return int64(v)
}

func (r *noteReader) end(what string, key []byte) error {
	if r.short || len(r.rest) > 0 {
		return fmt.Errorf("db: history: %s %x is not one: %w", what, key, ErrCorrupt)
	}
	return nil
}

// begin reads the version.
func (r *noteReader) begin(what string) error {
	if v := r.byte(); v != historyVersion {
		return fmt.Errorf("db: history: %s of version %d, this build knows %d: %w", what, v, historyVersion, ErrUnsupported)
	}
	return nil
}

func decodeRetirement(k, b []byte) (x Retirement, err error) {
	if len(k) != 2+8+32 {
		return x, fmt.Errorf("db: history: key %x is not that of a retirement: %w", k, ErrCorrupt)
	}
	x.LSN, x.Generation = txn.LSN(binary.BigEndian.Uint64(k[2:])), Generation(k[10:])
	r := noteReader{rest: b}
	if err := r.begin("retirement"); err != nil {
		return x, err
	}
	x.Namespace, x.Prefix = r.key(), r.key()
	x.Offset, x.Bytes = r.int(), r.int()
	x.Kind = CheckpointKind(r.byte()).String()
	x.Published = txn.LSN(r.int())
	x.Durable = r.byte() != 0
	x.reason = txn.Reason(r.byte())
	x.Reason = x.reason.String()
	x.Previous, x.By = Generation(r.key()), Generation(r.key())
	x.Request = string(r.take(uint64(r.int())))
	return x, r.end("retirement", k)
}

func encodeSample(s *Sample) []byte {
	b := make([]byte, 0, 48)
	b = append(b, historyVersion, flag(s.late))
	for _, v := range []int64{s.At.UnixMicro(), s.reach.Microseconds(), s.Listed, s.Superseded, s.PageBytes, s.DiskBytes, s.RAMBytes, s.LogBytes} {
		b = binary.AppendUvarint(b, uint64(max(v, 0)))
	}
	return b
}

func decodeSample(k, b []byte) (s Sample, err error) {
	if len(k) != 2+8 {
		return s, fmt.Errorf("db: history: key %x is not that of a mark: %w", k, ErrCorrupt)
	}
	s.LSN = txn.LSN(binary.BigEndian.Uint64(k[2:]))
	r := noteReader{rest: b}
	if err := r.begin("mark"); err != nil {
		return s, err
	}
	s.late = r.byte() != 0
	s.At = time.UnixMicro(r.int()).UTC()
	s.reach = time.Duration(r.int()) * time.Microsecond
	for _, f := range []*int64{&s.Listed, &s.Superseded, &s.PageBytes, &s.DiskBytes, &s.RAMBytes, &s.LogBytes} {
		*f = r.int()
	}
	return s, r.end("mark", k)
}

// noter is a batch of the index.
type noter interface {
	txn.Reader
	Note(key, value []byte) error
}

// note adds to a batch what its record did.
func (h *chronicle) note(b noter, lsn txn.LSN, e *txn.Effects) error {
	if h == nil || h.age <= 0 {
		return nil
	}
	for i := range e.Farewell {
		f := &e.Farewell[i]
		if err := b.Note(historyKey('r', lsn, f.Generation[:]...), encodeFarewell(f)); err != nil {
			return err
		}
	}
	now := h.now()
	h.mu.Lock()
	if h.count >= 0 {
		h.count += int64(len(e.Farewell))
	}
	due := now.Sub(h.marked) >= markInterval || now.Before(h.marked)
	if due {
		h.marked = now
	}
	h.mu.Unlock()
	if !due {
		return nil
	}
	return h.mark(b, lsn, now, false)
}

func (h *chronicle) mark(b noter, lsn txn.LSN, now time.Time, late bool) error {
	a, err := txn.ReadAccounts(b)
	if err != nil {
		return err
	}
	s := Sample{At: now, LSN: lsn, late: late, reach: markInterval, Listed: a.Listed, Superseded: a.Superseded, PageBytes: a.PageBytes, DiskBytes: a.AllocatedBytes}
	if h.gauge != nil {
		h.gauge(&s)
	}
	return b.Note(historyKey('t', lsn), encodeSample(&s))
}

// replayed ends a replay: whatever it brought was before now.
func (h *chronicle) replayed(records int64, last txn.LSN) error {
	if h == nil || h.age <= 0 || records == 0 {
		return nil
	}
	b := h.index.NewBatch()
	if err := h.mark(b, last, h.now(), true); err != nil {
		_ = b.Discard()
		return err
	}
	return b.Commit()
}

// historicalCatalogue is a catalogue whose replay is noted. What is replayed is not marked with the time of the replay.
type historicalCatalogue struct {
	catalogue
	history *chronicle
}

// Applied implements recovery.Historian.
func (c historicalCatalogue) Applied(v txn.View, lsn txn.LSN, e *txn.Effects) error {
	h := c.history
	if h.age <= 0 {
		return nil
	}
	for i := range e.Farewell {
		if err := v.(noter).Note(historyKey('r', lsn, e.Farewell[i].Generation[:]...), encodeFarewell(&e.Farewell[i])); err != nil {
			return err
		}
	}
	return nil
}

// clock answers when a record was.
type clock []Sample

func readClock(v txn.Reader) (c clock, err error) {
	err = v.Scan([]byte{index.HistoryTag, 't'}, func(k, b []byte) (bool, error) {
		s, err := decodeSample(k, b)
		c = append(c, s)
		return true, err
	})
	return c, err
}

// at gives two times between which the record was. Both are zero if nothing is known.
func (c clock) at(lsn txn.LSN) (after, before time.Time) {
	i, found := slices.BinarySearchFunc(c, lsn, func(s Sample, lsn txn.LSN) int {
		switch {
		case s.LSN < lsn:
			return -1
		case s.LSN > lsn:
			return 1
		}
		return 0
	})
	if found && !c[i].late {
		return c[i].At, c[i].At
	}
	if i > 0 {
		after = c[i-1].At
		before = after.Add(c[i-1].reach)
	}
	if i < len(c) && (c[i].late || i == 0 || c[i].At.Before(before)) {
		before = c[i].At
	}
	return after, before
}

// retirements calls fn for what was retired, the youngest first, until fn says no more. The times are filled in.
func retirements(v txn.Reader, c clock, fn func(r *Retirement) (more bool)) error {
	var all []Retirement
	err := v.Scan([]byte{index.HistoryTag, 'r'}, func(k, b []byte) (bool, error) {
		r, err := decodeRetirement(k, b)
		all = append(all, r)
		return true, err
	})
	if err != nil {
		return err
	}
	for i := len(all) - 1; i >= 0; i-- {
		r := &all[i]
		r.After, r.Before = c.at(r.LSN)
		if !fn(r) {
			return nil
		}
	}
	return nil
}

// run forgets what is old, now and then, until the database closes.
func (h *chronicle) run(stopping <-chan struct{}, failed func(error)) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-stopping:
			return
		}
		if err := h.forget(MaxHistory, MaxMarks); err != nil {
			failed(err)
		}
		timer.Reset(historyInterval)
	}
}

// forget deletes retirements that are too old or too many, and thins the marks out.
func (h *chronicle) forget(historyMax, marksMax int64) error {
	snapshot := h.index.Snapshot()
	defer snapshot.Close()
	c, err := readClock(snapshot)
	if err != nil {
		return err
	}
	now := h.now()
	b := h.index.NewBatch()
	if err = h.forgetRetirements(snapshot, b, c, now, historyMax); err == nil {
		err = h.thin(b, c, now, marksMax)
	}
	if err != nil {
		_ = b.Discard()
		return err
	}
	return b.Commit()
}

func (h *chronicle) forgetRetirements(v txn.Seeker, b *index.Batch, c clock, now time.Time, most int64) error {
	// The first record that may be young enough: the one behind the last mark that is too old.
	old, _ := slices.BinarySearchFunc(c, now.Add(-h.age), func(s Sample, t time.Time) int { return s.At.Compare(t) })
	below := txn.LSN(0)
	if old > 0 {
		below = c[old-1].LSN
	}
	h.mu.Lock()
	count := h.count
	h.mu.Unlock()
	if count < 0 || count > most || below > 0 {
		var lsns []txn.LSN
		err := v.ScanFrom([]byte{index.HistoryTag, 'r'}, historyKey('r', below), func(k, _ []byte) (bool, error) {
			lsns = append(lsns, txn.LSN(binary.BigEndian.Uint64(k[2:])))
			return true, nil
		})
		if err != nil {
			return err
		}
		if n := int64(len(lsns)) - most; n > 0 {
			below = lsns[n-1] + 1 // all of one record go together
		}
		kept := int64(0)
		for i := len(lsns) - 1; i >= 0 && lsns[i] >= below; i-- {
			kept++
		}
		h.mu.Lock()
		h.count = kept // what came meanwhile is counted the next time
		h.mu.Unlock()
	}
	if below == 0 {
		return nil
	}
	return b.DeleteRange(historyKey('r', 0), historyKey('r', below))
}

// thin deletes marks that are closer to the one before them than their age calls for. The oldest and the youngest stay.
func (h *chronicle) thin(b *index.Batch, c clock, now time.Time, most int64) error {
	first := max(int64(len(c))-most, 0)
	if first > 0 {
		if err := b.DeleteRange(historyKey('t', 0), historyKey('t', c[first].LSN)); err != nil {
			return err
		}
		c = c[first:]
	}
	for last, i := 0, 1; i < len(c); i++ {
		keep := &c[last]
		// A late mark bounds what was replayed before it from above, and the one before that from below.
		if i < len(c)-1 && !c[i].late && !c[i+1].late && c[i].At.Sub(keep.At) < now.Sub(c[i].At)/markThinning {
			keep.reach = max(keep.reach, c[i].At.Add(c[i].reach).Sub(keep.At))
			if err := b.Delete(historyKey('t', c[i].LSN)); err != nil {
				return err
			}
			continue
		}
		if last < i-1 {
			if err := b.Note(historyKey('t', keep.LSN), encodeSample(keep)); err != nil {
				return err
			}
		}
		last = i
	}
	return nil
}
