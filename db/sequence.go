package db

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash"
	"slices"
	"sort"
	"sync/atomic"
	"unsafe"

	"github.com/holdfast-db/holdfast/txn"
)

// Everything below is SHA-256 over the bytes drawn here. Integers are little endian, a token is a uint32, prev and prefix
// are digests of 32 bytes. The first byte tells what is hashed; it is never 0, and never the 'H' that the encoding of an
// identity begins with, so no digest can stand for one of another kind.
//
//	spine(0)          tagSeed        | namespace id
//	spine(i+1)        tagBlock       | spine(i) | the 512 tokens of block i
//	  with media      tagBlockMedia  | spine(i) | the 512 tokens of block i | records | number of records uint32
//	prefix(n)         tagPrefix      | spine(⌊(n−1)/512⌋) | the 1…512 tokens after it
//	  with media      tagPrefixMedia | spine(⌊(n−1)/512⌋) | the 1…512 tokens after it | records | number of records uint32
//	page key          tagPage        | prefix(end) | group index uint32 | kind uint8 | length of name uint32 | name | position uint64
//
// A record tells of one media span that the hashed tokens have a part of; records are in the order of the spans.
//
//	record            part's first token, counted from the first hashed one, uint32 | part's number of tokens uint32 |
//	                  span's first token, counted from the start of the sequence, uint64 | span's number of tokens uint64 |
//	                  content 32 bytes
//
// The record names the whole span and its content even if the hashed tokens have a small part of it, because an encoder
// computes each token of an image from the whole image.
const (
	tagSeed        = 1
	tagBlock       = 2
	tagBlockMedia  = 3
	tagPrefix      = 4
	tagPrefixMedia = 5
	tagPage        = 6
)

const (
	hashBlockTokens  = 512 // tokens per hash block of the spine; part of the format
	tokenBytes       = 4
	hashHeaderBytes  = 1 + len(txn.Key{}) // tag and digest of what comes before
	mediaRecordBytes = 4 + 4 + 8 + 8 + 32

	// slabBlocks is how many blocks at most are allocated at once. They fill one 32 KiB object of the allocator, and a fork that
	// keeps one block of a slab alive keeps no more than that.
	slabBlocks = 16

	// aheadTokens is the length from which on the whole blocks of an append are checked and copied by a goroutine of their own
	// while they are hashed: 80 µs of hashing, which is well above the cost of starting one. It has ended when the append returns.
	aheadTokens = 32 << 10
)

// tokenBlock holds the 512 tokens of a whole block, or the first of them in a tail.
type tokenBlock [hashBlockTokens]int32

// wholeBlock is a block that is hashed, and the digest of everything before it.
type wholeBlock struct {
	tokens *tokenBlock
	before txn.Key
}

// hostIsLittleEndian says that tokens lie in memory the way they are hashed.
var hostIsLittleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

// encodeTokens writes tokens to the front of to, which has room for them, and gives the part written.
func encodeTokens(to []byte, tokens []int32) []byte {
	for i, t := range tokens {
		binary.LittleEndian.PutUint32(to[i*tokenBytes:], uint32(t))
	}
	return to[:len(tokens)*tokenBytes]
}

// viewTokens gives the same bytes on a little-endian host, without a copy; token by token it would take a quarter of the time
// that hashing takes.
func viewTokens(tokens []int32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(tokens))), len(tokens)*tokenBytes)
}

// mediaSpan is a run of placeholder tokens that stand for something that is not text.
type mediaSpan struct {
	start, end int64    // the tokens of the sequence that belong to it
	length     int64    // tokens of the whole span: more than end−start in a fork that ends inside it
	content    [32]byte // digest of what the tokens stand for
}

// Sequence is an append-only list of tokens that is hashed while it grows. It is kept over the turns of a conversation:
// appending a turn costs the turn, whatever came before. It is not safe for concurrent mutation; between mutations any
// number of readers may share it, Fork included. It is used by pointer and not copied.
//
// Stages. Tokens collect in the tail block. When the tail has 512 of them it is hashed once, together with the digest
// of all before it, and joins the whole blocks; the digest becomes the head that the next block starts from. The digests
// between the blocks are the spine. The digest of a prefix at any offset is one hash over the spine before its last
// block and the tokens from there, so a lookup costs one hash for each block that it looks into.
//
// Invariants. len(whole) = ⌊length/512⌋; tail is nil exactly if 512 divides length; head = spine(len(whole)). Whole blocks
// never change, nor do media spans, so forks share them: a fork's slices have no spare capacity, hence its first
// append to them moves to an array of its own. A digest depends on the namespace, the tokens and the media spans before
// the offset alone: not on how they were split over calls, nor on what follows.
//
// Rejected. One slice of tokens: a fork would copy the whole prefix on its first append, and not 40 bytes a block. Hashing
// the copy of a long append: the copy and the checks would be a fifth of the time; a goroutine beside the hash hides them.
// Blocks of 256 tokens: a tenth more time to hash; of 1024: twice the time for the key of a page. Digests of
// aligned chunks without a chain: a reader would have to compare every chunk to know that a prefix is the same. Keeping
// the hash function's state at each block, so that prefix(n) has no block to repeat: it saves hashing half a block on
// average and makes the spine three times as large. A digest over the tokens with media digests put in their place: a text
// could then be made that hashes like an image.
type Sequence struct {
	namespace *Namespace
	length    int64
	whole     []wholeBlock
	tail      *tokenBlock
	head      txn.Key
	media     []mediaSpan // ascending, disjoint

	// near is how many blocks of the sequence some catalogue knew when it was last asked: where the next search begins. It is a
	// guess, shared with forks, and no part of the sequence.
	near *atomic.Int64
}

// Namespace gives the namespace of the sequence.
func (s *Sequence) Namespace() *Namespace { return s.namespace }

// Len gives the number of tokens.
func (s *Sequence) Len() int64 { return s.length }

// Append adds tokens of text, 0…MaxToken each; no tokens are no change. A token outside that range is ErrInvalid, naming
// its index and value; more than MaxSequenceTokens in all is ErrTooLarge. On error nothing is appended. The tokens are
// copied; they must not change during the call.
func (s *Sequence) Append(tokens []int32) error {
	return s.extend(tokens, nil)
}

// AppendMedia adds one whole media span: the placeholder tokens that stand for an image, a sound or the like, and the digest
// of its content. The content must be a digest of what the encoder saw together with every setting that changes what it
// makes of it, and not an id of the request: two requests with the same id would be given each other's pages. All zero is
// refused, and so is a span without tokens, whose content would have no effect. Otherwise as Append.
func (s *Sequence) AppendMedia(content [32]byte, tokens []int32) error {
	if content == ([32]byte{}) {
		return fmt.Errorf("db: media content is all zero: want a digest: %w", ErrInvalid)
	}
	if len(tokens) == 0 {
		return fmt.Errorf("db: media span of 0 tokens: want at least 1: %w", ErrInvalid)
	}
	n := int64(len(tokens))
	return s.extend(tokens, &mediaSpan{start: s.length, end: s.length + n, length: n, content: content})
}

// checkSequence refuses a sequence that no namespace made.
func checkSequence(field string, s *Sequence) error {
	if s == nil {
		return fmt.Errorf("db: %s is nil: %w", field, ErrInvalid)
	}
	if s.namespace == nil || s.namespace.id.IsZero() {
		return fmt.Errorf("db: %s is not of a namespace: make it with NewSequence of one from NewNamespace: %w", field, ErrInvalid)
	}
	return nil
}

// extend adds tokens, and the span that they are if they are one, or refuses them and changes nothing.
func (s *Sequence) extend(tokens []int32, span *mediaSpan) error {
	if n := int64(len(tokens)); n > MaxSequenceTokens-s.length {
		return fmt.Errorf("db: sequence of %d tokens and %d more: want at most %d: %w", s.length, n, MaxSequenceTokens, ErrTooLarge)
	}
	// What an append writes lies behind what s has, so that s as it was takes it all back.
	before := *s
	if span != nil {
		s.media = append(s.media, *span)
	}
	if i := s.take(tokens); i >= 0 {
		*s = before
		return fmt.Errorf("db: token %d of %d is %d: want 0…%d: %w", i, len(tokens), tokens[i], MaxToken, ErrInvalid)
	}
	return nil
}

// take adds tokens and gives −1. If one is negative it gives the index of the first of them, and s has a part of the tokens.
func (s *Sequence) take(tokens []int32) int {
	rest := tokens
	if fill := int(s.length % hashBlockTokens); fill > 0 {
		n := min(hashBlockTokens-fill, len(rest))
		if i := firstNegative(rest[:n]); i >= 0 {
			return i
		}
		copy(s.tail[fill:], rest[:n])
		s.length += int64(n)
		rest = rest[n:]
		if fill+n < hashBlockTokens {
			return -1
		}
		s.whole = append(s.whole, wholeBlock{tokens: s.tail})
		s.tail = nil
		s.link(s.whole[len(s.whole)-1:], s.whole[len(s.whole)-1].tokens[:])
	}
	if blocks := len(rest) / hashBlockTokens; blocks > 0 {
		old := len(s.whole)
		s.whole = slices.Grow(s.whole, blocks)[:old+blocks]
		added, aligned := s.whole[old:], rest[:blocks*hashBlockTokens]
		bad := -1
		if len(aligned) < aheadTokens {
			if bad = keep(added, aligned); bad < 0 {
				s.link(added, aligned)
			}
		} else {
			kept := make(chan int, 1)
			go func() { kept <- keep(added, aligned) }()
			s.link(added, aligned)
			bad = <-kept
		}
		if bad >= 0 {
			return len(tokens) - len(rest) + bad
		}
		s.length += int64(len(aligned))
		rest = rest[len(aligned):]
	}
	if len(rest) > 0 {
		if i := firstNegative(rest); i >= 0 {
			return len(tokens) - len(rest) + i
		}
		s.tail = new(tokenBlock)
		copy(s.tail[:], rest)
		s.length += int64(len(rest))
	}
	return -1
}

// keep copies the tokens of whole blocks to memory of their own and gives −1, or the index of the first negative one.
func keep(blocks []wholeBlock, tokens []int32) int {
	for from := 0; from < len(blocks); from += slabBlocks {
		to := min(from+slabBlocks, len(blocks))
		part := tokens[from*hashBlockTokens : to*hashBlockTokens]
		if i := firstNegative(part); i >= 0 {
			return from*hashBlockTokens + i
		}
		slab := slices.Clone(part) // other than make it does not clear what is written next
		for i := range to - from {
			blocks[from+i].tokens = (*tokenBlock)(slab[i*hashBlockTokens:])
		}
	}
	return -1
}

// link hashes blocks, the last ones of s.whole, whose tokens are given, and moves the head to their end. It does not look at
// the copies of the tokens, which may be under way.
func (s *Sequence) link(blocks []wholeBlock, tokens []int32) {
	start := int64(len(s.whole)-len(blocks)) * hashBlockTokens
	for i := range blocks {
		blocks[i].before = s.head
		s.head = s.digest(tagBlock, tagBlockMedia, &blocks[i].before, tokens[i*hashBlockTokens:][:hashBlockTokens], start)
		start += hashBlockTokens
	}
}

// firstNegative gives the index of the first negative token, or −1. It looks at eight at a time, because it runs over
// every token that is hashed.
func firstNegative(tokens []int32) int {
	rest := tokens
	for ; len(rest) >= 8; rest = rest[8:] {
		if t := (*[8]int32)(rest); t[0]|t[1]|t[2]|t[3]|t[4]|t[5]|t[6]|t[7] < 0 {
			break
		}
	}
	for i, t := range rest {
		if t < 0 {
			return len(tokens) - len(rest) + i
		}
	}
	return -1
}

// Fork gives an independent sequence of the first n tokens, 0…Len, otherwise ErrInvalid. It shares what cannot change
// and copies less than one block of tokens. A fork that ends inside a media span keeps the part before its end, with the
// digests that the prefix has in s; what is appended to it is not part of the span.
func (s *Sequence) Fork(n int64) (*Sequence, error) {
	if n < 0 || n > s.length {
		return nil, fmt.Errorf("db: fork of %d tokens: want 0…%d: %w", n, s.length, ErrInvalid)
	}
	blocks := int(n / hashBlockTokens)
	f := &Sequence{namespace: s.namespace, length: n, whole: s.whole[:blocks:blocks], head: s.spine(int64(blocks)), near: s.near}
	if rest := int(n % hashBlockTokens); rest > 0 {
		f.tail = new(tokenBlock)
		copy(f.tail[:rest], s.block(int64(blocks))[:])
	}
	spans := sort.Search(len(s.media), func(i int) bool { return s.media[i].start >= n })
	f.media = s.media[:spans:spans]
	if spans > 0 && f.media[spans-1].end > n {
		f.media = slices.Clone(f.media)
		f.media[spans-1].end = n
	}
	return f, nil
}

// block gives hash block i, which has at least one token.
func (s *Sequence) block(i int64) *tokenBlock {
	if i == int64(len(s.whole)) && s.tail != nil {
		return s.tail
	}
	return s.whole[i].tokens
}

// spine gives the chained digest of the first i whole hash blocks, 0…⌊Len/512⌋.
func (s *Sequence) spine(i int64) txn.Key {
	if i == int64(len(s.whole)) {
		return s.head
	}
	return s.whole[i].before
}

// prefix gives the digest of the exact first n tokens, 1…Len, media included. Callers check n where it enters: a request
// for another n is a mistake in this package.
func (s *Sequence) prefix(n int64) txn.Key {
	if n < 1 || n > s.length {
		panic(fmt.Sprintf("db: prefix of %d tokens in a sequence of %d", n, s.length))
	}
	i := (n - 1) / hashBlockTokens
	before := s.spine(i)
	return s.digest(tagPrefix, tagPrefixMedia, &before, s.block(i)[:n-i*hashBlockTokens], i*hashBlockTokens)
}

// digest hashes tokens, the first of which is at start, with what comes before them and with the media spans that they have
// a part of.
func (s *Sequence) digest(plain, withMedia byte, before *txn.Key, tokens []int32, start int64) (k txn.Key) {
	end := start + int64(len(tokens))
	media := s.mediaWithin(start, end)
	var header [hashHeaderBytes]byte
	header[0] = plain
	if len(media) > 0 {
		header[0] = withMedia
	}
	copy(header[1:], before[:])
	h := sha256.New()
	h.Write(header[:])
	if hostIsLittleEndian {
		h.Write(viewTokens(tokens)) // where they lie
	} else {
		var room [hashBlockTokens * tokenBytes]byte
		h.Write(encodeTokens(room[:], tokens))
	}
	if len(media) > 0 {
		le := binary.LittleEndian
		var record [mediaRecordBytes]byte
		for i := range media {
			m := &media[i]
			from := max(m.start, start)
			le.PutUint32(record[0:], uint32(from-start))
			le.PutUint32(record[4:], uint32(min(m.end, end)-from))
			le.PutUint64(record[8:], uint64(m.start))
			le.PutUint64(record[16:], uint64(m.length))
			copy(record[24:], m.content[:])
			h.Write(record[:])
		}
		h.Write(le.AppendUint32(record[:0], uint32(len(media))))
	}
	h.Sum(k[:0])
	return k
}

// mediaWithin gives the spans that have a part of the tokens start…end−1.
func (s *Sequence) mediaWithin(start, end int64) []mediaSpan {
	if n := len(s.media); n == 0 || s.media[n-1].end <= start {
		return nil
	}
	first := sort.Search(len(s.media), func(i int) bool { return s.media[i].end > start })
	after := first
	for after < len(s.media) && s.media[after].start < end {
		after++
	}
	return s.media[first:after]
}

// pageKey gives the content key of the page at a position of a group whose last token is end−1, 1…Len. All ranks share it.
func (s *Sequence) pageKey(group int, position, end int64) txn.Key {
	return s.namespace.pageKey(s.prefix(end), group, position)
}

// pageKeys calls fn with the keys of count pages of a group, the first one at position first, in a checkpoint at offset. The
// pages that end in one hash block share the hashing of it: each takes the tokens after the one before it, and not all since
// the block's beginning. That halves the time of a restore from RAM.
func (s *Sequence) pageKeys(layout *Layout, group int, first, count, offset int64, fn func(position int64, key txn.Key)) {
	var h hash.Hash
	var prefix txn.Key
	block, hashed := int64(-1), int64(0) // the tokens of the block that h has taken
	for k := first; k < first+count; k++ {
		end := layout.pageEnd(group, k, offset)
		i := (end - 1) / hashBlockTokens
		if !hostIsLittleEndian || len(s.mediaWithin(i*hashBlockTokens, end)) > 0 {
			fn(k, s.pageKey(group, k, end))
			continue
		}
		if i != block {
			var header [hashHeaderBytes]byte
			header[0] = tagPrefix
			before := s.spine(i)
			copy(header[1:], before[:])
			h = sha256.New()
			h.Write(header[:])
			block, hashed = i, 0
		}
		h.Write(viewTokens(s.block(i)[hashed : end-i*hashBlockTokens]))
		hashed = end - i*hashBlockTokens
		h.Sum(prefix[:0])
		fn(k, s.namespace.pageKey(prefix, group, k))
	}
}

// pageKey gives the content key of a page that was computed from a prefix. It is for callers that need the keys of many
// groups at one offset and would rather hash the prefix once.
func (n *Namespace) pageKey(prefix txn.Key, group int, position int64) txn.Key {
	g := &n.identity.Layout.Groups[group]
	var room [hashHeaderBytes + 4 + 1 + 4 + MaxGroupNameBytes + 8]byte
	le := binary.LittleEndian
	buf := append(room[:0], tagPage)
	buf = append(buf, prefix[:]...)
	buf = le.AppendUint32(buf, uint32(group))
	buf = append(buf, byte(g.Kind))
	buf = le.AppendUint32(buf, uint32(len(g.Name)))
	buf = append(buf, g.Name...)
	buf = le.AppendUint64(buf, uint64(position))
	return sha256.Sum256(buf)
}
