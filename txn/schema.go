package txn

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
)

// View is what the catalogue lives in: a sorted map of byte strings whose reads see the writes made through it before.
// It is used by one goroutine at a time. Errors are those of the storage below and are passed on as they are.
type View interface {
	Reader
	Set(key, value []byte) error
	Delete(key []byte) error
}

// Reader is the part of a View that looks things up.
type Reader interface {
	// Get gives the value of key, nil if there is none. It is valid until the next call and must not be changed.
	Get(key []byte) ([]byte, error)
	// Scan calls fn in key order for every entry whose key begins with prefix, until fn says no more. fn must not write
	// to the view; key and value are valid during the call only.
	Scan(prefix []byte, fn func(key, value []byte) (more bool, err error)) error
}

// First bytes of the keys; doc.go draws them.
const (
	tagAccounts  = 'a'
	tagSpine     = 'b'
	tagChild     = 'c'
	tagPrefix    = 'e'
	tagSegment   = 'g'
	tagHold      = 'h'
	tagManifest  = 'm'
	tagNamespace = 'n'
	tagOrder     = 'o'
	tagPage      = 'p'
	tagState     = 's'
	tagWaiting   = 'u'
	tagSupersede = 'v'
	tagApplied   = 'z'
	tagGrace     = 'w'
	tagRequest   = 'q'
)

// key1 and key2 build a key of a tag and one or two digests.
func key1[K ~[32]byte](tag byte, k K) []byte {
	b := make([]byte, 1, 1+len(k))
	b[0] = tag
	return append(b, k[:]...)
}

func key2[K, L ~[32]byte](tag byte, k K, l L) []byte {
	b := make([]byte, 1, 1+len(k)+len(l))
	b[0] = tag
	b = append(b, k[:]...)
	return append(b, l[:]...)
}

func segmentKey(n uint64) []byte {
	return binary.BigEndian.AppendUint64([]byte{tagSegment}, n)
}

// orderKey places a listed checkpoint in the order of eviction.
func orderKey(g Generation, s *State) []byte {
	class := byte(1)
	if s.GoesFirst() {
		class = 0
	}
	b := binary.BigEndian.AppendUint64([]byte{tagOrder, class}, uint64(s.Used))
	return append(b, g[:]...)
}

// requestPrefix begins the keys of all listed checkpoints of one serving request.
func requestPrefix(ns Key, request string) []byte {
	return key2(tagRequest, ns, Key(sha256.Sum256([]byte(request))))
}

func requestKey(m *Manifest, g Generation) []byte {
	return append(requestPrefix(m.Namespace, m.Request), g[:]...)
}

// keyBytes is the length of the keys of each tag.
var keyBytes = map[byte]int{
	tagAccounts: 1, tagSpine: 33, tagChild: 65, tagPrefix: 33, tagSegment: 9, tagHold: 65, tagManifest: 33, tagNamespace: 33,
	tagOrder: 42, tagPage: 33, tagState: 33, tagWaiting: 33, tagSupersede: 65, tagApplied: 1,
	tagGrace: 33, tagRequest: 97,
}

// endOf gives the digest that a key ends in.
func endOf[K ~[32]byte](key []byte) (K, error) {
	if len(key) <= len(K{}) || len(key) != keyBytes[key[0]] {
		return K{}, fmt.Errorf("catalogue key %x has %d bytes: %w", key, len(key), ErrCorrupt)
	}
	return K(key[len(key)-len(K{}):]), nil
}

// edges gives the far ends of the child, hold or supersede edges whose keys begin with prefix.
func edges[K ~[32]byte](v Reader, prefix []byte) (ends []K, err error) {
	err = v.Scan(prefix, func(k, _ []byte) (bool, error) {
		end, err := endOf[K](k)
		ends = append(ends, end)
		return true, err
	})
	return ends, err
}

// Status is where in its life a manifest is. Zero is invalid; what has no entry is absent or deleted.
type Status uint8

// The states of a manifest.
const (
	Listed  Status = 1
	Retired Status = 2
)

// String gives the state in words.
func (s Status) String() string {
	switch s {
	case Listed:
		return "listed"
	case Retired:
		return "retired"
	}
	return fmt.Sprintf("status(%d)", uint8(s))
}

// State is the part of a checkpoint that changes.
type State struct {
	Status       Status
	Durable      bool       // every page has a disk copy
	Published    LSN        // of the record that listed it; later is newer, whatever the clocks said
	Used         LSN        // of the record that listed it or last marked it as used
	SupersededBy Generation // zero: current
	Continued    bool       // a later publication went on from it
	Grace        bool       // superseded, and in its time of grace: it does not go first yet
}

// Superseded reports whether a later checkpoint has taken its place.
func (s *State) Superseded() bool { return !s.SupersededBy.IsZero() }

// GoesFirst reports whether the checkpoint goes before all current ones when room is needed.
func (s *State) GoesFirst() bool { return s.Superseded() && !s.Grace }

func (s *State) marshal() []byte {
	e := encoder{b: make([]byte, 0, 48)}
	e.byte(byte(s.Status))
	e.bool(s.Durable)
	e.uint(uint64(s.Published))
	e.uint(uint64(s.Used))
	e.key(Key(s.SupersededBy))
	e.bool(s.Continued)
	e.bool(s.Grace)
	return e.b
}

func (s *State) unmarshal(b []byte) error {
	d := decoder{b: b, what: "state entry"}
	s.Status = Status(d.byte("status"))
	s.Durable = d.bool("durable")
	s.Published = LSN(d.uint("published"))
	s.Used = LSN(d.uint("used"))
	s.SupersededBy = Generation(d.key("superseded by"))
	s.Continued = d.bool("continued")
	s.Grace = d.bool("grace")
	if d.err == nil && s.Status != Listed && s.Status != Retired {
		d.fail("status")
	}
	return d.end()
}

// PageEntry is what the catalogue knows of a page.
type PageEntry struct {
	Parent       Key
	Depth        int64       // pages before it in the chain; 0 if it has no parent
	Bytes        int64       // logical size of one rank's copy
	Ranks        int64       // ranks that each have a copy of their own
	Held         int64       // child and hold edges that lead here
	Listed       int64       // of those, how many lead to a listed checkpoint
	Current      int64       // of those, how many lead to one that does not go first (State.GoesFirst)
	ChainDurable bool        // this page and all before it in the chain have disk copies
	Place        []Placement // one for every rank, or none
}

func (p *PageEntry) marshal() []byte {
	e := encoder{b: make([]byte, 0, 64+len(p.Place)*24)}
	e.key(p.Parent)
	e.int(p.Depth)
	e.int(p.Bytes)
	e.int(p.Ranks)
	e.int(p.Held)
	e.int(p.Listed)
	e.int(p.Current)
	e.bool(p.ChainDurable)
	encodePlacements(&e, p.Place)
	return e.b
}

func (p *PageEntry) unmarshal(b []byte) error {
	d := decoder{b: b, what: "page entry"}
	p.Parent = d.key("parent")
	p.Depth = d.int("depth")
	p.Bytes, p.Ranks = d.int("bytes"), d.int("ranks")
	p.Held, p.Listed, p.Current = d.int("held"), d.int("listed"), d.int("current")
	p.ChainDurable = d.bool("chain durable")
	p.Place = decodePlacements(&d)
	return d.end()
}

// ending says how many listed checkpoints end after so many tokens of a block.
type ending struct {
	tail  int // 1…BlockTokens
	count int64
}

// spineEntry is one block of tokens that a listed checkpoint runs through or ends in.
type spineEntry struct {
	parent   Key
	index    int64
	children int64
	endings  []ending // by falling tail
}

func (s *spineEntry) marshal() []byte {
	e := encoder{b: make([]byte, 0, 64)}
	e.key(s.parent)
	e.int(s.index)
	e.int(s.children)
	e.uint(uint64(len(s.endings)))
	for _, x := range s.endings {
		e.uint(uint64(x.tail))
		e.int(x.count)
	}
	return e.b
}

func (s *spineEntry) unmarshal(b []byte) error {
	d := decoder{b: b, what: "spine entry"}
	s.parent = d.key("parent")
	s.index, s.children = d.int("index"), d.int("children")
	n := d.count("endings", 2)
	s.endings = nil
	if n > 0 {
		s.endings = make([]ending, n)
	}
	below := uint64(BlockTokens + 1)
	for i := range s.endings {
		tail, count := d.uint("tail"), d.int("count")
		if d.err == nil && (tail < 1 || tail >= below || count < 1) {
			d.fail("ending")
		}
		s.endings[i], below = ending{tail: int(tail), count: count}, tail
	}
	return d.end()
}

// add changes the number of checkpoints that end after tail tokens, and gives the new one.
func (s *spineEntry) add(tail int, delta int64) int64 {
	i := 0
	for i < len(s.endings) && s.endings[i].tail > tail {
		i++
	}
	if i == len(s.endings) || s.endings[i].tail != tail {
		s.endings = append(s.endings, ending{})
		copy(s.endings[i+1:], s.endings[i:])
		s.endings[i] = ending{tail: tail}
	}
	s.endings[i].count += delta
	count := s.endings[i].count
	if count == 0 {
		s.endings = append(s.endings[:i], s.endings[i+1:]...)
	}
	return count
}

func (s *spineEntry) empty() bool { return s.children == 0 && len(s.endings) == 0 }

// SegmentUse is what the catalogue knows of one segment file.
type SegmentUse struct {
	LiveBytes int64 // allocated bytes of live page copies
	LivePages int64 // live page copies, each rank's counted
	End       int64 // first byte after the last copy ever recorded
}

func (s *SegmentUse) marshal() []byte {
	e := encoder{b: make([]byte, 0, 16)}
	e.int(s.LiveBytes)
	e.int(s.LivePages)
	e.int(s.End)
	return e.b
}

func (s *SegmentUse) unmarshal(b []byte) error {
	d := decoder{b: b, what: "segment entry"}
	s.LiveBytes, s.LivePages, s.End = d.int("live bytes"), d.int("live pages"), d.int("end")
	return d.end()
}

// Accounts are the totals over the catalogue. They equal the sums over its entries at every moment (exact-accounting).
type Accounts struct {
	Listed         int64 // checkpoints
	Superseded     int64 // of the listed ones
	Undurable      int64 // of the listed ones
	Retired        int64 // checkpoints retired and not deleted yet
	Namespaces     int64
	Pages          int64 // distinct pages, ranks not counted
	PageBytes      int64 // logical bytes of them over all ranks
	PlacedPages    int64 // pages with disk copies
	StoredBytes    int64 // stored bytes of the disk copies over all ranks
	AllocatedBytes int64 // what they take in the segment files, alignment included
	LastSegment    int64 // highest segment number ever recorded
}

func (a *Accounts) fields() []*int64 {
	return []*int64{&a.Listed, &a.Superseded, &a.Undurable, &a.Retired, &a.Namespaces, &a.Pages, &a.PageBytes, &a.PlacedPages, &a.StoredBytes, &a.AllocatedBytes, &a.LastSegment}
}

func (a *Accounts) marshal() []byte {
	e := encoder{b: make([]byte, 0, 64)}
	for _, f := range a.fields() {
		e.int(*f)
	}
	return e.b
}

func (a *Accounts) unmarshal(b []byte) error {
	d := decoder{b: b, what: "accounts entry"}
	for _, f := range a.fields() {
		*f = d.int("total")
	}
	return d.end()
}

type entry interface{ unmarshal(b []byte) error }

// load reads the entry of key; ok is false if there is none.
func load(v Reader, key []byte, into entry) (ok bool, err error) {
	b, err := v.Get(key)
	if err != nil || b == nil {
		return false, err
	}
	if err := into.unmarshal(b); err != nil {
		return false, fmt.Errorf("catalogue key %x: %w", key, err)
	}
	return true, nil
}

// mustLoad reads an entry that the structure of the catalogue says is there.
func mustLoad(v Reader, key []byte, into entry) error {
	ok, err := load(v, key, into)
	if err == nil && !ok {
		err = fmt.Errorf("catalogue key %x is missing: %w", key, ErrCorrupt)
	}
	return err
}

// Allocated is what a placement takes in its segment: page copies of 4 KiB and more lie in whole 4 KiB blocks, so that
// direct I/O can move them, smaller ones in steps of 64 bytes.
func (p Placement) Allocated() int64 {
	if p.Stored >= 4096 {
		return (p.Stored + 4095) &^ 4095
	}
	return (p.Stored + 63) &^ 63
}

// ReadAccounts gives the totals.
func ReadAccounts(v Reader) (a Accounts, err error) {
	_, err = load(v, []byte{tagAccounts}, &a)
	return a, err
}

// ReadPage looks a page up; nil if the catalogue does not know it.
func ReadPage(v Reader, key Key) (*PageEntry, error) {
	p := new(PageEntry)
	ok, err := load(v, key1(tagPage, key), p)
	if err != nil || !ok {
		return nil, err
	}
	return p, nil
}

// ReadState looks the state of a generation up; nil if the catalogue does not know it.
func ReadState(v Reader, g Generation) (*State, error) {
	s := new(State)
	ok, err := load(v, key1(tagState, g), s)
	if err != nil || !ok {
		return nil, err
	}
	return s, nil
}

// ReadManifest looks a manifest up, listed or retired; nil if the catalogue does not know it.
func ReadManifest(v Reader, g Generation) (*Manifest, error) {
	b, err := v.Get(key1(tagManifest, g))
	if err != nil || b == nil {
		return nil, err
	}
	return DecodeManifest(b, g)
}

// ReadNamespace gives the canonical encoding of a namespace, nil if the catalogue does not know it.
func ReadNamespace(v Reader, ns Key) ([]byte, error) {
	b, err := v.Get(key1(tagNamespace, ns))
	return append([]byte(nil), b...), err
}

// Namespaces calls fn for every namespace that a publication has named.
func Namespaces(v Reader, fn func(ns Key, encoding []byte) (more bool, err error)) error {
	return v.Scan([]byte{tagNamespace}, func(k, b []byte) (bool, error) {
		ns, err := endOf[Key](k)
		if err != nil {
			return false, err
		}
		return fn(ns, append([]byte(nil), b...))
	})
}

// Checkpoints calls fn for every listed checkpoint in the order of eviction: superseded ones first, then by age.
func Checkpoints(v Reader, fn func(g Generation) (more bool, err error)) error {
	return scanGenerations(v, tagOrder, fn)
}

// FirstGoes tells whether there is a checkpoint that goes before all current ones.
func FirstGoes(v Reader) (found bool, err error) {
	err = v.Scan([]byte{tagOrder, 0}, func([]byte, []byte) (bool, error) {
		found = true
		return false, nil
	})
	return found, err
}

// InGrace calls fn for every superseded checkpoint whose time of grace is not over.
func InGrace(v Reader, fn func(g Generation) (more bool, err error)) error {
	return scanGenerations(v, tagGrace, fn)
}

// States calls fn for every checkpoint, listed or retired.
func States(v Reader, fn func(g Generation, s *State) (more bool, err error)) error {
	return StatesUnder(v, nil, fn)
}

// StatesUnder is States for the generations that begin with a prefix.
func StatesUnder(v Reader, prefix []byte, fn func(g Generation, s *State) (more bool, err error)) error {
	return v.Scan(append([]byte{tagState}, prefix...), func(k, b []byte) (bool, error) {
		g, err := endOf[Generation](k)
		if err != nil {
			return false, err
		}
		s := new(State)
		if err := s.unmarshal(b); err != nil {
			return false, fmt.Errorf("catalogue key %x: %w", k, err)
		}
		return fn(g, s)
	})
}

// Seeker is a Reader that can begin a scan in the middle.
type Seeker interface {
	Reader
	// ScanFrom is Scan for the entries whose keys are at or above from.
	ScanFrom(prefix, from []byte, fn func(key, value []byte) (more bool, err error)) error
}

// StatesAfter calls fn for every checkpoint, listed or retired, behind after in the order of generations; a zero after begins
// with the first.
func StatesAfter(v Seeker, after Generation, fn func(g Generation, s *State) (more bool, err error)) error {
	from := []byte{tagState}
	if !after.IsZero() {
		from = append(key1(tagState, after), 0)
	}
	return v.ScanFrom([]byte{tagState}, from, func(k, b []byte) (bool, error) {
		g, err := endOf[Generation](k)
		if err != nil {
			return false, err
		}
		s := new(State)
		if err := s.unmarshal(b); err != nil {
			return false, fmt.Errorf("catalogue key %x: %w", k, err)
		}
		return fn(g, s)
	})
}

// EntryKinds names the entries of the catalogue by the first byte of their keys.
func EntryKinds() map[byte]string {
	return map[byte]string{
		tagAccounts: "accounts", tagSpine: "spine nodes", tagChild: "child edges", tagPrefix: "prefixes", tagSegment: "segments",
		tagHold: "hold edges", tagManifest: "manifests", tagNamespace: "namespaces", tagOrder: "order of eviction", tagPage: "pages",
		tagState: "states", tagWaiting: "undurable", tagSupersede: "supersede edges", tagApplied: "applied LSN", tagGrace: "in grace", tagRequest: "requests",
	}
}

// Undurable calls fn for every listed checkpoint that has pages without a disk copy.
func Undurable(v Reader, fn func(g Generation) (more bool, err error)) error {
	return scanGenerations(v, tagWaiting, fn)
}

func scanGenerations(v Reader, tag byte, fn func(g Generation) (more bool, err error)) error {
	return v.Scan([]byte{tag}, func(k, _ []byte) (bool, error) {
		g, err := endOf[Generation](k)
		if err != nil {
			return false, err
		}
		return fn(g)
	})
}

// readPrefix gives the generation listed for exactly this prefix, zero if there is none.
func readPrefix(v Reader, prefix Key) (g Generation, err error) {
	b, err := v.Get(key1(tagPrefix, prefix))
	if err != nil || b == nil {
		return g, err
	}
	if len(b) != len(g) {
		return g, fmt.Errorf("prefix entry of %d bytes: %w", len(b), ErrCorrupt)
	}
	return Generation(b), nil
}

// Pages calls fn for every page, in the order of their keys.
func Pages(v Reader, fn func(key Key, entry *PageEntry) (more bool, err error)) error {
	return v.Scan([]byte{tagPage}, func(k, b []byte) (bool, error) {
		key, err := endOf[Key](k)
		if err != nil {
			return false, err
		}
		entry := new(PageEntry)
		if err := entry.unmarshal(b); err != nil {
			return false, fmt.Errorf("catalogue key %x: %w", k, err)
		}
		return fn(key, entry)
	})
}

// Segments calls fn for every segment that was ever recorded and not forgotten.
func Segments(v Reader, fn func(number uint64, use SegmentUse) (more bool, err error)) error {
	return v.Scan([]byte{tagSegment}, func(k, b []byte) (bool, error) {
		var use SegmentUse
		if len(k) != keyBytes[tagSegment] {
			return false, fmt.Errorf("catalogue key %x is not that of a segment: %w", k, ErrCorrupt)
		}
		if err := use.unmarshal(b); err != nil {
			return false, fmt.Errorf("catalogue key %x: %w", k, err)
		}
		return fn(binary.BigEndian.Uint64(k[1:]), use)
	})
}

// ReadApplied gives the LSN of the last record whose changes the view holds.
func ReadApplied(v Reader) (LSN, error) {
	b, err := v.Get([]byte{tagApplied})
	if err != nil || b == nil {
		return 0, err
	}
	if len(b) != 8 {
		return 0, fmt.Errorf("applied LSN: %d bytes instead of 8: %w", len(b), ErrCorrupt)
	}
	return LSN(binary.BigEndian.Uint64(b)), nil
}

func writeApplied(v View, lsn LSN) error {
	return v.Set([]byte{tagApplied}, binary.BigEndian.AppendUint64(nil, uint64(lsn)))
}
