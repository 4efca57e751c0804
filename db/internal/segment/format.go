package segment

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/holdfast-db/holdfast/txn"
)

const (
	// PageBytesMax is the largest page, logical and stored: 1 GiB.
	PageBytesMax int64 = 1 << 30

	formatVersion = 1
	headerMagic   = "HFSH"
	batchMagic    = "HFSB"

	blockBytes int64 = 4096 // unit of direct I/O and of punched holes
	lineBytes  int64 = 64   // unit of small pages

	prefixBytes        = 64 // of a descriptor, before the entries
	entryBytes         = 104
	sumBytes           = 4
	batchPagesMax      = 512
	descriptorBytesMax = (prefixBytes + batchPagesMax*entryBytes + sumBytes + blockBytes - 1) / blockBytes * blockBytes
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Class is the lifetime class of pages. Each has a segment of its own open, so that pages that die together lie together.
type Class uint8

// Classes. Zero is invalid, and means "not known yet" in an Info.
const (
	Shared Class = 1 // pages that prefixes share
	Own    Class = 2 // pages that only one checkpoint has
	Loose  Class = 3 // pages without a checkpoint
)

func (c Class) valid() bool { return c >= Shared && c <= Loose }

// String names the class as logs do.
func (c Class) String() string {
	switch c {
	case Shared:
		return "shared"
	case Own:
		return "own"
	case Loose:
		return "loose"
	}
	return fmt.Sprintf("class %d", uint8(c))
}

// Entry is what a segment says about one page in it.
type Entry struct {
	Key     txn.Key
	Parent  txn.Key // the page before it; zero if there is none
	Rank    uint16
	Class   Class
	Logical int64 // bytes of the page
	Place   txn.Placement
}

// origin is what every header and descriptor of a segment repeats, so that neither a file under a wrong name nor a
// block at a wrong place passes.
type origin struct {
	database [16]byte
	number   uint64
	class    Class // zero when decoding: any
}

func roundUp(n, unit int64) int64 { return (n + unit - 1) &^ (unit - 1) }

// padded is what a page of stored bytes takes in the file.
func padded(stored int64) int64 { return roundUp(stored, unitOf(stored)) }

// unitOf is what the place of a page of stored bytes begins and ends at a multiple of.
func unitOf(stored int64) int64 {
	if stored >= blockBytes {
		return blockBytes
	}
	return lineBytes
}

// descriptorBytes is the length of the descriptor of n pages.
func descriptorBytes(n int) int64 {
	return roundUp(prefixBytes+int64(n)*entryBytes+sumBytes, blockBytes)
}

// encodeHeader fills one block.
func encodeHeader(b []byte, o origin) {
	clear(b)
	putOrigin(b, headerMagic, o)
	putSum(b)
}

// decodeHeader checks one block against the database id and number of o and returns the class it names.
func decodeHeader(b []byte, o origin) (Class, error) {
	if !sumHolds(b) {
		return 0, fmt.Errorf("header checksum does not hold: %w", txn.ErrCorrupt)
	}
	if v := binary.LittleEndian.Uint16(b[4:]); string(b[:4]) == headerMagic && v != formatVersion {
		return 0, fmt.Errorf("format version %d, this build knows %d: %w", v, formatVersion, txn.ErrUnsupported)
	}
	return checkOrigin(b, headerMagic, o)
}

func putOrigin(b []byte, magic string, o origin) {
	copy(b, magic)
	binary.LittleEndian.PutUint16(b[4:], formatVersion)
	b[6] = byte(o.class)
	binary.LittleEndian.PutUint64(b[8:], o.number)
	copy(b[16:], o.database[:])
}

func checkOrigin(b []byte, magic string, o origin) (Class, error) {
	class := Class(b[6])
	switch {
	case string(b[:4]) != magic || binary.LittleEndian.Uint16(b[4:]) != formatVersion || b[7] != 0 || !class.valid():
		return 0, fmt.Errorf("starts with %x, not with %q of version %d: %w", b[:8], magic, formatVersion, txn.ErrCorrupt)
	case binary.LittleEndian.Uint64(b[8:]) != o.number:
		return 0, fmt.Errorf("belongs to segment %d: %w", binary.LittleEndian.Uint64(b[8:]), txn.ErrCorrupt)
	case [16]byte(b[16:32]) != o.database:
		return 0, fmt.Errorf("belongs to database %x: %w", b[16:32], txn.ErrCorrupt)
	}
	return class, nil
}

func putSum(b []byte) {
	n := len(b) - sumBytes
	binary.LittleEndian.PutUint32(b[n:], crc32.Checksum(b[:n], castagnoli))
}

func sumHolds(b []byte) bool {
	n := len(b) - sumBytes
	return binary.LittleEndian.Uint32(b[n:]) == crc32.Checksum(b[:n], castagnoli)
}

// descriptor is a decoded batch descriptor.
type descriptor struct {
	class    Class
	sequence uint64
	entries  []Entry
	end      int64 // where the batch ends in the file
}

// encodeDescriptor fills b, which is descriptorBytes(len(entries)) long, for a batch at offset at. The entries are in the
// order of the payload, with their places filled in by layOut.
func encodeDescriptor(b []byte, o origin, sequence uint64, at int64, entries []Entry, end int64) {
	clear(b)
	putOrigin(b, batchMagic, o)
	binary.LittleEndian.PutUint64(b[32:], sequence)
	binary.LittleEndian.PutUint64(b[40:], uint64(at))
	binary.LittleEndian.PutUint64(b[48:], uint64(end-at-int64(len(b))))
	binary.LittleEndian.PutUint32(b[56:], uint32(len(entries)))
	for i := range entries {
		e, p := &entries[i], b[prefixBytes+i*entryBytes:]
		copy(p, e.Key[:])
		copy(p[32:], e.Parent[:])
		binary.LittleEndian.PutUint16(p[64:], e.Rank)
		p[66] = byte(e.Place.Codec)
		binary.LittleEndian.PutUint64(p[72:], uint64(e.Logical))
		binary.LittleEndian.PutUint64(p[80:], uint64(e.Place.Stored))
		binary.LittleEndian.PutUint64(p[88:], uint64(e.Place.Offset))
		binary.LittleEndian.PutUint64(p[96:], e.Place.Checksum)
	}
	putSum(b)
}

// layOut gives the entries of a batch whose descriptor is at offset at their places, and returns where the batch ends.
func layOut(number uint64, at int64, entries []Entry) int64 {
	pos := at + descriptorBytes(len(entries))
	for i := range entries {
		p := &entries[i].Place
		p.Segment = number
		p.Offset = pos
		pos += padded(p.Stored)
	}
	return roundUp(pos, blockBytes)
}

// decodeDescriptor decodes the descriptor at the start of b, which was read from offset at. b may be longer than the
// descriptor, and need not be: descriptorBytesMax is always enough. Every rule of the format is checked.
func decodeDescriptor(b []byte, o origin, at int64) (descriptor, error) {
	if len(b) < int(blockBytes) {
		return descriptor{}, fmt.Errorf("descriptor of %d bytes: %w", len(b), txn.ErrCorrupt)
	}
	class, err := checkOrigin(b, batchMagic, o)
	if err != nil {
		return descriptor{}, err
	}
	n := binary.LittleEndian.Uint32(b[56:])
	if n < 1 || n > batchPagesMax || descriptorBytes(int(n)) > int64(len(b)) {
		return descriptor{}, fmt.Errorf("descriptor names %d pages in %d bytes: %w", n, len(b), txn.ErrCorrupt)
	}
	b = b[:descriptorBytes(int(n))]
	if !sumHolds(b) {
		return descriptor{}, fmt.Errorf("descriptor checksum does not hold: %w", txn.ErrCorrupt)
	}
	d := descriptor{class: class, sequence: binary.LittleEndian.Uint64(b[32:]), entries: make([]Entry, n)}
	if d.sequence == 0 || binary.LittleEndian.Uint64(b[40:]) != uint64(at) || binary.LittleEndian.Uint32(b[60:]) != 0 {
		return descriptor{}, fmt.Errorf("descriptor of batch %d names offset %d: %w",
			d.sequence, binary.LittleEndian.Uint64(b[40:]), txn.ErrCorrupt)
	}
	pos, small := at+int64(len(b)), false
	for i := range d.entries {
		e, p := &d.entries[i], b[prefixBytes+i*entryBytes:]
		*e = Entry{
			Key: txn.Key(p[:32]), Parent: txn.Key(p[32:64]), Rank: binary.LittleEndian.Uint16(p[64:]),
			Class: class, Logical: int64(binary.LittleEndian.Uint64(p[72:])),
			Place: txn.Placement{
				Segment: o.number, Offset: int64(binary.LittleEndian.Uint64(p[88:])), Stored: int64(binary.LittleEndian.Uint64(p[80:])),
				Codec: txn.Codec(p[66]), Checksum: binary.LittleEndian.Uint64(p[96:]),
			},
		}
		valid := !e.Key.IsZero() && [5]byte(p[67:72]) == [5]byte{} && storable(e.Place.Codec, e.Logical, e.Place.Stored)
		valid = valid && e.Place.Offset == pos && !(small && e.Place.Stored >= blockBytes)
		if !valid {
			return descriptor{}, fmt.Errorf("entry %d of batch %d breaks the format: %w", i, d.sequence, txn.ErrCorrupt)
		}
		pos += padded(e.Place.Stored)
		small = e.Place.Stored < blockBytes
	}
	d.end = roundUp(pos, blockBytes)
	if rest := b[prefixBytes+int(n)*entryBytes : len(b)-sumBytes]; !zero(rest) || binary.LittleEndian.Uint64(b[48:]) != uint64(d.end-at)-uint64(len(b)) {
		return descriptor{}, fmt.Errorf("descriptor of batch %d names a payload of %d bytes, not %d: %w",
			d.sequence, binary.LittleEndian.Uint64(b[48:]), d.end-at-int64(len(b)), txn.ErrCorrupt)
	}
	return d, nil
}

// storable reports whether a page can have these sizes under the codec.
func storable(c txn.Codec, logical, stored int64) bool {
	if logical < 1 || logical > PageBytesMax || stored < 1 || stored > PageBytesMax {
		return false
	}
	switch c {
	case txn.CodecNone:
		return logical == stored
	case txn.CodecZstd:
		return stored < logical
	}
	return false
}

func zero(b []byte) bool {
	for _, x := range b {
		if x != 0 {
			return false
		}
	}
	return true
}
