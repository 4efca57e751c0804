package txn

import "fmt"

// Kind is the type of a record. Zero is invalid, so that unwritten space exposes itself.
type Kind uint8

// The kinds of record.
const (
	KindPublish   Kind = 1
	KindSupersede Kind = 2
	KindRetire    Kind = 3
	KindDelete    Kind = 4
	KindPersist   Kind = 5
	KindMark      Kind = 6
)

// String gives the name used in logs and in the documentation.
func (k Kind) String() string {
	switch k {
	case KindPublish:
		return "publish"
	case KindSupersede:
		return "supersede"
	case KindRetire:
		return "retire"
	case KindDelete:
		return "delete"
	case KindPersist:
		return "persist"
	case KindMark:
		return "mark"
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// Reason says why checkpoints were retired.
type Reason uint8

// The reasons. Zero is invalid.
const (
	ReasonRequested    Reason = 1 // the application asked for it
	ReasonReplaced     Reason = 2 // another manifest was published for the same prefix
	ReasonNotDurable   Reason = 3 // found at open without a complete disk copy
	ReasonRAMPressure  Reason = 4 // its pages left RAM before they had a disk copy
	ReasonDiskPressure Reason = 5 // evicted to keep the disk within its budget
	ReasonWriteFailed  Reason = 6 // its pages could not be written
	ReasonLost         Reason = 7 // a page turned out missing or corrupt
	ReasonShutdown     Reason = 8 // close had no time left to write it
	ReasonCleared      Reason = 9 // a forced clear
)

var reasonNames = [...]string{
	ReasonRequested: "requested", ReasonReplaced: "replaced", ReasonNotDurable: "not durable", ReasonRAMPressure: "RAM pressure",
	ReasonDiskPressure: "disk pressure", ReasonWriteFailed: "write failed", ReasonLost: "page lost", ReasonShutdown: "shutdown",
	ReasonCleared: "cleared",
}

// String gives the reason in words.
func (r Reason) String() string {
	if r == 0 || int(r) >= len(reasonNames) {
		return fmt.Sprintf("reason(%d)", uint8(r))
	}
	return reasonNames[r]
}

var reasonExplained = [...]string{
	ReasonRequested: "the application asked for it.", ReasonReplaced: "another manifest was published for the same prefix.",
	ReasonNotDurable:   "it was listed while pages of it were in RAM only, and the process ended before they were written.",
	ReasonRAMPressure:  "RAM was needed, and pages of it had no disk copy that the write policy would have made.",
	ReasonDiskPressure: "the disk tier was full and it was first in the order of eviction.",
	ReasonWriteFailed:  "its pages could not be written.", ReasonLost: "a page of it turned out missing or corrupt.",
	ReasonShutdown: "the database was closed before its pages were written.", ReasonCleared: "everything of its namespace, or everything, was cleared by force.",
}

// Explain says what the reason means, in a sentence.
func (r Reason) Explain() string {
	if r == 0 || int(r) >= len(reasonExplained) {
		return "for a reason that this build does not know."
	}
	return reasonExplained[r]
}

// Record is one decided transaction, as it stands in the log.
type Record interface {
	Kind() Kind
	encode(e *encoder)
	decode(d *decoder)
}

// Publish lists a checkpoint.
type Publish struct {
	Manifest   Manifest
	Encoding   []byte       // canonical namespace encoding, in the first publication of a namespace only
	Spine      []Key        // spine nodes that become known: the last is Manifest.Spine
	SpineRoot  Key          // parent of Spine[0]; zero if that is the first block of the sequence
	Pages      []NewPage    // pages that become known, parents before children
	Replaced   []Generation // listed for the same prefix until now; retired and deleted by this record
	Supersedes []Generation // what the supersession policy chose
}

// NewPage declares a page to the catalogue. Place is empty (RAM only) or has one entry for every rank.
type NewPage struct {
	Key    Key
	Parent Key // previous page of the chain; zero for the first page of a chain and for unchained pages
	Bytes  int64
	Place  []Placement
}

// Supersede marks checkpoints as superseded by another one, or, with a zero By, makes them current again.
type Supersede struct {
	By          Generation
	Generations []Generation
}

// MarkKind says what a Mark record changes. Zero is invalid.
type MarkKind uint8

// The marks. They change the order of eviction and nothing else.
const (
	MarkUsed     MarkKind = 1 // found by a lookup or a restore: youngest again
	MarkEndGrace MarkKind = 2 // superseded and continued from; its time of grace is over
)

// Mark changes where checkpoints stand in the order of eviction.
type Mark struct {
	Mark        MarkKind
	Generations []Generation
}

// Retire delists checkpoints; with Delete set their pages are given up in the same record.
type Retire struct {
	Reason      Reason
	Delete      bool
	Generations []Generation
}

// Delete gives up the pages of retired checkpoints.
type Delete struct {
	Generations []Generation
}

// Persist says where pages lie on disk.
type Persist struct {
	Pages []PlacedPage
}

// PlacedPage is the disk copy of one page, one placement for every rank.
type PlacedPage struct {
	Key   Key
	Place []Placement
}

// Kind implements Record.
func (*Publish) Kind() Kind { return KindPublish }

// Kind implements Record.
func (*Supersede) Kind() Kind { return KindSupersede }

// Kind implements Record.
func (*Retire) Kind() Kind { return KindRetire }

// Kind implements Record.
func (*Delete) Kind() Kind { return KindDelete }

// Kind implements Record.
func (*Persist) Kind() Kind { return KindPersist }

// Kind implements Record.
func (*Mark) Kind() Kind { return KindMark }

// recordFormat is the first byte of every encoded record.
const recordFormat = 1

// Encode gives the payload of the record's log frame, appended to dst. The kind travels in the frame.
func Encode(dst []byte, r Record) []byte {
	e := encoder{b: dst}
	e.byte(recordFormat)
	r.encode(&e)
	return e.b
}

// Decode reads the payload of a log frame. It never panics and never allocates more than the payload is long, whatever
// the payload holds.
func Decode(kind Kind, payload []byte) (Record, error) {
	var r Record
	switch kind {
	case KindPublish:
		r = new(Publish)
	case KindSupersede:
		r = new(Supersede)
	case KindRetire:
		r = new(Retire)
	case KindDelete:
		r = new(Delete)
	case KindPersist:
		r = new(Persist)
	case KindMark:
		r = new(Mark)
	default:
		return nil, fmt.Errorf("record: %v is not a kind of record: %w", kind, ErrUnsupported)
	}
	d := decoder{b: payload, what: kind.String() + " record"}
	if v := d.byte("format"); d.err == nil && v != recordFormat {
		return nil, fmt.Errorf("%v record: format %d, this build knows %d: %w", kind, v, recordFormat, ErrUnsupported)
	}
	r.decode(&d)
	if err := d.end(); err != nil {
		return nil, err
	}
	return r, nil
}

func encodeKeys[K ~[32]byte](e *encoder, keys []K) {
	e.uint(uint64(len(keys)))
	for _, k := range keys {
		e.key(Key(k))
	}
}

func decodeKeys[K ~[32]byte](d *decoder, field string) []K {
	n := d.count(field, len(Key{}))
	if n == 0 {
		return nil
	}
	keys := make([]K, n)
	for i := range keys {
		keys[i] = K(d.key(field))
	}
	return keys
}

// placementBytesMin is the least an encoded placement takes: four varints of one byte and the checksum.
const placementBytesMin = 4 + 8

func encodePlacements(e *encoder, places []Placement) {
	e.uint(uint64(len(places)))
	for _, p := range places {
		e.uint(p.Segment)
		e.int(p.Offset)
		e.int(p.Stored)
		e.byte(byte(p.Codec))
		e.fixed(p.Checksum)
	}
}

func decodePlacements(d *decoder) []Placement {
	n := d.count("placements", placementBytesMin)
	if n == 0 {
		return nil
	}
	places := make([]Placement, n)
	for i := range places {
		p := &places[i]
		p.Segment, p.Offset, p.Stored = d.uint("segment"), d.int("offset"), d.int("stored bytes")
		p.Codec = Codec(d.byte("codec"))
		p.Checksum = d.fixed("checksum")
		if d.err == nil && !p.valid() {
			d.fail("placement")
		}
	}
	return places
}

func (r *Publish) encode(e *encoder) {
	r.Manifest.encode(e)
	e.bytes(r.Encoding)
	encodeKeys(e, r.Spine)
	e.key(r.SpineRoot)
	e.uint(uint64(len(r.Pages)))
	prev := Key{}
	for i := range r.Pages {
		p := &r.Pages[i]
		e.key(p.Key)
		e.bool(p.Parent == prev) // pages of a chain follow each other, so the parent is nearly always the page before
		if p.Parent != prev {
			e.key(p.Parent)
		}
		e.int(p.Bytes)
		encodePlacements(e, p.Place)
		prev = p.Key
	}
	encodeKeys(e, r.Replaced)
	encodeKeys(e, r.Supersedes)
}

func (r *Publish) decode(d *decoder) {
	r.Manifest.decode(d)
	r.Encoding = d.bytes("namespace encoding")
	r.Spine = decodeKeys[Key](d, "spine")
	r.SpineRoot = d.key("spine root")
	if n := d.count("pages", 35); n > 0 {
		r.Pages = make([]NewPage, n)
	}
	prev := Key{}
	for i := range r.Pages {
		p := &r.Pages[i]
		p.Key = d.key("page key")
		p.Parent = prev
		if !d.bool("parent flag") {
			p.Parent = d.key("page parent")
			if d.err == nil && p.Parent == prev {
				d.fail("page parent")
			}
		}
		p.Bytes = d.int("page bytes")
		p.Place = decodePlacements(d)
		if d.err != nil {
			return
		}
		prev = p.Key
	}
	r.Replaced = decodeKeys[Generation](d, "replaced")
	r.Supersedes = decodeKeys[Generation](d, "supersedes")
}

func (r *Supersede) encode(e *encoder) {
	e.key(Key(r.By))
	encodeKeys(e, r.Generations)
}

func (r *Supersede) decode(d *decoder) {
	r.By = Generation(d.key("by"))
	r.Generations = decodeKeys[Generation](d, "generations")
}

func (r *Mark) encode(e *encoder) {
	e.byte(byte(r.Mark))
	encodeKeys(e, r.Generations)
}

func (r *Mark) decode(d *decoder) {
	if r.Mark = MarkKind(d.byte("mark")); d.err == nil && r.Mark != MarkUsed && r.Mark != MarkEndGrace {
		d.fail("mark")
	}
	r.Generations = decodeKeys[Generation](d, "generations")
}

func (r *Retire) encode(e *encoder) {
	e.byte(byte(r.Reason))
	e.bool(r.Delete)
	encodeKeys(e, r.Generations)
}

func (r *Retire) decode(d *decoder) {
	r.Reason = Reason(d.byte("reason"))
	if d.err == nil && r.Reason == 0 {
		d.fail("reason")
	}
	r.Delete = d.bool("delete")
	r.Generations = decodeKeys[Generation](d, "generations")
}

func (r *Delete) encode(e *encoder) { encodeKeys(e, r.Generations) }

func (r *Delete) decode(d *decoder) { r.Generations = decodeKeys[Generation](d, "generations") }

func (r *Persist) encode(e *encoder) {
	e.uint(uint64(len(r.Pages)))
	for i := range r.Pages {
		e.key(r.Pages[i].Key)
		encodePlacements(e, r.Pages[i].Place)
	}
}

func (r *Persist) decode(d *decoder) {
	n := d.count("pages", 33)
	if n == 0 {
		return
	}
	r.Pages = make([]PlacedPage, n)
	for i := range r.Pages {
		r.Pages[i].Key = d.key("page key")
		r.Pages[i].Place = decodePlacements(d)
		if d.err != nil {
			return
		}
	}
}
