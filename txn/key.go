package txn

import (
	"encoding/hex"
	"fmt"
)

// Key is a 32-byte SHA-256 digest. Keys of the same kind are equal exactly if what they were computed from is equal.
type Key [32]byte

// IsZero reports whether k is the zero key, which no digest is; it stands for "none".
func (k Key) IsZero() bool { return k == Key{} }

// String gives the key in hex.
func (k Key) String() string { return hex.EncodeToString(k[:]) }

// Short gives the first eight hex digits, for messages that people read.
func (k Key) Short() string { return hex.EncodeToString(k[:4]) }

// ParseKey reads 64 hex digits.
func ParseKey(s string) (Key, error) {
	var k Key
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != len(k) {
		return Key{}, fmt.Errorf("key %.80q: want 64 hex digits: %w", s, ErrInvalid)
	}
	copy(k[:], b)
	return k, nil
}

// MarshalText gives the key in hex, for JSON.
func (k Key) MarshalText() ([]byte, error) { return hex.AppendEncode(nil, k[:]), nil }

// UnmarshalText reads what MarshalText gives.
func (k *Key) UnmarshalText(b []byte) (err error) {
	*k, err = ParseKey(string(b))
	return err
}

// Generation is the identity of one manifest, derived from its content.
type Generation Key

// IsZero reports whether g names no manifest.
func (g Generation) IsZero() bool { return g == Generation{} }

// String gives the generation in hex.
func (g Generation) String() string { return Key(g).String() }

// Short gives the first eight hex digits, for messages that people read.
func (g Generation) Short() string { return Key(g).Short() }

// MarshalText gives the generation in hex, for JSON.
func (g Generation) MarshalText() ([]byte, error) { return Key(g).MarshalText() }

// UnmarshalText reads what MarshalText gives.
func (g *Generation) UnmarshalText(b []byte) error { return (*Key)(g).UnmarshalText(b) }

// LSN is a log sequence number; the first record of a directory has LSN 1, and 0 means "none".
type LSN uint64

// Codec says how the stored bytes of a page relate to its logical bytes.
type Codec uint8

// Codecs. Zero is invalid, so that unwritten space exposes itself.
const (
	CodecNone Codec = 1 // stored as they are
	CodecZstd Codec = 2 // one zstd frame
)

// Placement is where one rank's bytes of a page lie on disk.
type Placement struct {
	Segment  uint64 // number of the segment file; numbers are never used twice
	Offset   int64  // bytes from the start of the segment file
	Stored   int64  // stored bytes, after the codec
	Codec    Codec
	Checksum uint64 // XXH3-64 of the stored bytes
}

// valid reports whether a record can hold the placement.
func (p *Placement) valid() bool {
	return p.Segment != 0 && p.Segment <= intMax && p.Offset >= 0 && p.Stored >= 1 && p.Offset <= intMax && p.Stored <= intMax-p.Offset &&
		(p.Codec == CodecNone || p.Codec == CodecZstd)
}
