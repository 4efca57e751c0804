package main

import (
	"encoding/binary"
	"fmt"
	"math/bits"

	"github.com/zeebo/xxh3"
)

// The bytes of a page are a function of everything that tells the page from another one: the exact prefix it was
// computed from, its group, its position and its rank. That is what a page key of the database stands for, and it is
// derived here from the request, not from the key the database hands out: so a page that was mixed up anywhere on the
// way, in the database's own keys too, is as visible as a flipped bit.
//
// Content is a stream of 64-bit words in little-endian order, the last one cut to fit. A word is the folded 128-bit
// product of a counter and a constant of the stream (the construction of wyrand): two multiplications' worth of work
// for eight bytes, and any two streams differ in about half of their bits at every place. Hashing the bytes instead
// would be faster to check and could not say which byte is wrong.

// Streams of words with the same name are kept apart by what they are for.
const (
	tokenStream = 0x746f6b656e73 // tokens of a block
	pageStream  = 0x7061676573   // bytes of a page
)

// Odd constants with well mixed bits (fractions of the golden ratio and of the square root of two).
const (
	wordStep = 0x9e3779b97f4a7c15
	wordFold = 0x6a09e667f3bcc909
)

// wordStream is an endless deterministic sequence of words.
type wordStream struct{ state, fold uint64 }

// newWordStream gives the stream that name has for a purpose.
func newWordStream(name, purpose uint64) wordStream {
	var b [16]byte
	binary.LittleEndian.PutUint64(b[0:], name)
	binary.LittleEndian.PutUint64(b[8:], purpose)
	h := xxh3.Hash128(b[:])
	// A stream has both its start and its constant to itself: two streams never run into each other.
	return wordStream{state: h.Lo, fold: h.Hi ^ wordFold}
}

func (s *wordStream) next() uint64 {
	s.state += wordStep
	hi, lo := bits.Mul64(s.state, s.state^s.fold)
	return hi ^ lo
}

// prefixDigest names the exact prefix that ends with a block, from the digest of the prefix before it; 0 is the empty
// prefix.
func prefixDigest(before, id uint64) uint64 {
	var b [16]byte
	binary.LittleEndian.PutUint64(b[0:], before)
	binary.LittleEndian.PutUint64(b[8:], id)
	return xxh3.Hash(b[:])
}

// prefixDigests gives the digests of every prefix of r's whole blocks, in dst's memory if it is large enough: element
// k is the digest of blocks 0…k.
func prefixDigests(dst []uint64, r request) []uint64 {
	dst = dst[:0]
	var d uint64
	for _, id := range r.Blocks {
		d = prefixDigest(d, id)
		dst = append(dst, d)
	}
	return dst
}

// pageName identifies one rank's bytes of one page.
type pageName struct {
	prefix   uint64 // digest of the prefix up to the last token the page was computed from
	group    int
	position int64
	rank     int
}

func (p pageName) stream() wordStream {
	var b [32]byte
	binary.LittleEndian.PutUint64(b[0:], p.prefix)
	binary.LittleEndian.PutUint64(b[8:], uint64(p.group))
	binary.LittleEndian.PutUint64(b[16:], uint64(p.position))
	binary.LittleEndian.PutUint64(b[24:], uint64(p.rank))
	return newWordStream(xxh3.Hash(b[:]), pageStream)
}

// fill writes the content of the page over b.
func (p pageName) fill(b []byte) {
	words := p.stream()
	for len(b) >= 32 {
		chunk := b[:32:32]
		binary.LittleEndian.PutUint64(chunk[0:], words.next())
		binary.LittleEndian.PutUint64(chunk[8:], words.next())
		binary.LittleEndian.PutUint64(chunk[16:], words.next())
		binary.LittleEndian.PutUint64(chunk[24:], words.next())
		b = b[32:]
	}
	for ; len(b) >= 8; b = b[8:] {
		binary.LittleEndian.PutUint64(b, words.next())
	}
	if len(b) > 0 {
		var last [8]byte
		binary.LittleEndian.PutUint64(last[:], words.next())
		copy(b, last[:])
	}
}

// check compares every byte of b with the content of a page of size bytes. It returns nil, or what is wrong first.
func (p pageName) check(b []byte, size int64) error {
	if int64(len(b)) != size {
		return fmt.Errorf("%v: %d bytes, want %d", p, len(b), size)
	}
	words := p.stream()
	rest := b
	for len(rest) >= 32 {
		chunk := rest[:32:32]
		before := words
		wrong := binary.LittleEndian.Uint64(chunk[0:]) ^ words.next()
		wrong |= binary.LittleEndian.Uint64(chunk[8:]) ^ words.next()
		wrong |= binary.LittleEndian.Uint64(chunk[16:]) ^ words.next()
		wrong |= binary.LittleEndian.Uint64(chunk[24:]) ^ words.next()
		if wrong != 0 {
			return p.firstWrong(b, len(b)-len(rest), before)
		}
		rest = rest[32:]
	}
	return p.firstWrong(b, len(b)-len(rest), words)
}

// firstWrong names the first wrong byte of b at or after offset from, where words has arrived, or returns nil.
func (p pageName) firstWrong(b []byte, from int, words wordStream) error {
	var word [8]byte
	for i := from; i < len(b); i++ {
		if (i-from)%8 == 0 {
			binary.LittleEndian.PutUint64(word[:], words.next())
		}
		if want := word[(i-from)%8]; b[i] != want {
			return fmt.Errorf("%v: byte %d of %d is %#02x, want %#02x", p, i, len(b), b[i], want)
		}
	}
	return nil
}

func (p pageName) String() string {
	return fmt.Sprintf("page %d of group %d on rank %d (prefix %016x)", p.position, p.group, p.rank, p.prefix)
}
