package db

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/holdfast-db/holdfast/txn"
)

// ramp gives the tokens from, from+1, … .
func ramp(from int32, count int) []int32 {
	tokens := make([]int32, count)
	for i := range tokens {
		tokens[i] = from + int32(i)
	}
	return tokens
}

// image gives the content digest of an image as an engine would compute it: pixels and encoder settings.
func image(pixels, settings string) [32]byte {
	return sha256.Sum256([]byte(settings + "\x00" + pixels))
}

func sampleSequence(t testing.TB) *Sequence {
	t.Helper()
	return mustNamespace(t, sampleIdentity()).NewSequence()
}

func sequenceOf(t testing.TB, tokens []int32) *Sequence {
	t.Helper()
	s := sampleSequence(t)
	require.NoError(t, s.Append(tokens))
	return s
}

// plainSequence is the definition of the digests, written down a second time with nothing shared, chained or kept.
type plainSequence struct {
	namespace *Namespace
	tokens    []int32
	media     []mediaSpan
}

func (p *plainSequence) fork(n int64) *plainSequence {
	f := &plainSequence{namespace: p.namespace, tokens: slices.Clone(p.tokens[:n])}
	for _, m := range p.media {
		if m.end = min(m.end, n); m.start < m.end {
			f.media = append(f.media, m)
		}
	}
	return f
}

// hash gives the digest of tokens start…end−1 after before.
func (p *plainSequence) hash(plain, withMedia byte, before txn.Key, start, end int64) (k txn.Key) {
	body, records, count := []byte{}, []byte{}, uint32(0)
	for _, t := range p.tokens[start:end] {
		body = binary.LittleEndian.AppendUint32(body, uint32(t))
	}
	for _, m := range p.media {
		var part []int64
		for i := start; i < end; i++ {
			if m.start <= i && i < m.end {
				part = append(part, i)
			}
		}
		if len(part) > 0 {
			count++
			records = binary.LittleEndian.AppendUint32(records, uint32(part[0]-start))
			records = binary.LittleEndian.AppendUint32(records, uint32(len(part)))
			records = binary.LittleEndian.AppendUint64(records, uint64(m.start))
			records = binary.LittleEndian.AppendUint64(records, uint64(m.length))
			records = append(records, m.content[:]...)
		}
	}
	h := sha256.New()
	if count == 0 {
		h.Write([]byte{plain})
	} else {
		h.Write([]byte{withMedia})
		records = binary.LittleEndian.AppendUint32(records, count)
	}
	h.Write(before[:])
	h.Write(body)
	h.Write(records)
	return txn.Key(h.Sum(nil))
}

func (p *plainSequence) spine(i int64) txn.Key {
	id := p.namespace.ID()
	k := txn.Key(sha256.Sum256(append([]byte{1}, id[:]...)))
	for block := range i {
		k = p.hash(2, 3, k, block*512, block*512+512)
	}
	return k
}

func (p *plainSequence) prefix(n int64) txn.Key {
	i := (n - 1) / 512
	return p.hash(4, 5, p.spine(i), i*512, n)
}

func (p *plainSequence) pageKey(group int, position, end int64) txn.Key {
	g := p.namespace.Layout().Groups[group]
	prefix := p.prefix(end)
	h := sha256.New()
	h.Write([]byte{6})
	h.Write(prefix[:])
	h.Write(binary.LittleEndian.AppendUint32(nil, uint32(group)))
	h.Write([]byte{byte(g.Kind)})
	h.Write(binary.LittleEndian.AppendUint32(nil, uint32(len(g.Name))))
	h.Write([]byte(g.Name))
	h.Write(binary.LittleEndian.AppendUint64(nil, uint64(position)))
	return txn.Key(h.Sum(nil))
}

// requireSame checks the invariants of s, and its digests against the definition: the ends of all blocks and every offset
// near a block's or a span's edge.
func requireSame(t require.TestingT, p *plainSequence, s *Sequence) {
	length := int64(len(p.tokens))
	require.Equal(t, length, s.Len())
	require.Len(t, s.whole, int(length/hashBlockTokens))
	require.Equal(t, length%hashBlockTokens == 0, s.tail == nil)
	require.Equal(t, p.spine(length/hashBlockTokens), s.head)
	for i := range length/hashBlockTokens + 1 {
		require.Equal(t, p.spine(i), s.spine(i), "spine %d", i)
	}
	edges := []int64{1, length / 2, length}
	for i := int64(0); i <= length; i += hashBlockTokens {
		edges = append(edges, i)
	}
	for _, m := range p.media {
		edges = append(edges, m.start, m.end)
	}
	for _, edge := range edges {
		for n := max(edge-1, 1); n <= min(edge+1, length); n++ {
			require.Equal(t, p.prefix(n), s.prefix(n), "prefix %d", n)
		}
	}
}

func TestAnySplitAndForkEqualsFresh(t *testing.T) {
	n := mustNamespace(t, sampleIdentity())
	type pair struct {
		s *Sequence
		p *plainSequence
	}
	rapid.Check(t, func(t *rapid.T) {
		pairs := []pair{{n.NewSequence(), &plainSequence{namespace: n}}}
		// Lengths that meet the edges of blocks often.
		length := rapid.OneOf(rapid.IntRange(1, 5), rapid.IntRange(1, 1400), rapid.SampledFrom([]int{511, 512, 513, 1024}))
		for range rapid.IntRange(1, 12).Draw(t, "steps") {
			i := rapid.IntRange(0, len(pairs)-1).Draw(t, "sequence")
			at := pairs[i]
			switch rapid.SampledFrom([]string{"append", "fill", "media", "fork"}).Draw(t, "step") {
			case "append":
				tokens := ramp(rapid.Int32Range(0, 3).Draw(t, "from"), length.Draw(t, "count"))
				at.p.tokens = append(at.p.tokens, tokens...)
				for len(tokens) > 0 { // in pieces
					k := rapid.IntRange(1, len(tokens)).Draw(t, "piece")
					require.NoError(t, at.s.Append(tokens[:k]))
					require.NoError(t, at.s.Append(nil))
					tokens = tokens[k:]
				}
			case "fill": // up to the end of the block
				tokens := ramp(9, int(hashBlockTokens-at.s.Len()%hashBlockTokens))
				at.p.tokens = append(at.p.tokens, tokens...)
				require.NoError(t, at.s.Append(tokens))
			case "media":
				content := image(rapid.SampledFrom([]string{"cat", "dog"}).Draw(t, "content"), "")
				tokens := make([]int32, length.Draw(t, "count"))
				start := int64(len(at.p.tokens))
				at.p.tokens = append(at.p.tokens, tokens...)
				at.p.media = append(at.p.media, mediaSpan{start, int64(len(at.p.tokens)), int64(len(tokens)), content})
				require.NoError(t, at.s.AppendMedia(content, tokens))
			case "fork":
				k := rapid.Int64Range(0, at.s.Len()).Draw(t, "n")
				f, err := at.s.Fork(k)
				require.NoError(t, err)
				require.Same(t, n, f.Namespace())
				pairs = append(pairs, pair{f, at.p.fork(k)})
			}
		}
		for _, at := range pairs { // at the end, so that a later step on one sequence shows in another
			requireSame(t, at.p, at.s)
		}
	})
}

// Given 20,000 tokens, the roots that lookups start from grow linearly, and so does what is held: nothing is kept per offset.
func TestRootsAreLinear_ID03(t *testing.T) {
	tokens := ramp(0, 20000)
	s := sequenceOf(t, tokens)
	p := &plainSequence{namespace: s.Namespace(), tokens: tokens}

	roots, tails := 0, 0
	seen := map[txn.Key]int64{}
	for start := int64(0); start < s.Len(); start += hashBlockTokens {
		root := s.spine(start / hashBlockTokens)
		require.NotContains(t, seen, root)
		seen[root] = start
		roots++
		tails += int(min(hashBlockTokens, s.Len()-start))
	}
	require.Equal(t, 40, roots)
	require.Equal(t, 20000, tails)
	require.Equal(t, 39, len(s.whole), "the rest of the tokens is in the tail")
	require.Equal(t, p.prefix(20000), s.prefix(20000))

	held := int(unsafe.Sizeof(tokenBlock{})+unsafe.Sizeof(wholeBlock{})) * (len(s.whole) + 1)
	require.Less(t, held, 20000*tokenBytes*105/100)
}

// Appending a turn touches nothing before the tail: the whole blocks are taken away, and it does not notice.
func TestAppendCostsTheTurn_ID03(t *testing.T) {
	tokens := ramp(7, 100_000)
	want := sequenceOf(t, tokens)

	s := sequenceOf(t, tokens[:99_000])
	before := len(s.whole)
	clear(s.whole)
	require.NoError(t, s.Append(tokens[99_000:99_500]))
	require.NoError(t, s.Append(tokens[99_500:]))
	require.Equal(t, want.head, s.head)
	require.Equal(t, want.prefix(100_000), s.prefix(100_000))
	for _, b := range s.whole[:before] {
		require.Zero(t, b, "nor does it write there")
	}
}

// Both ways to write tokens give the bytes of the format; a host uses one of them alone.
func TestTokensAreLittleEndian(t *testing.T) {
	tokens := []int32{0, 1, 0x01020304, MaxToken}
	want := []byte{0, 0, 0, 0, 1, 0, 0, 0, 4, 3, 2, 1, 0xff, 0xff, 0xff, 0x7f}
	require.Equal(t, want, encodeTokens(make([]byte, 100), tokens))
	if hostIsLittleEndian {
		require.Equal(t, want, viewTokens(tokens))
	}
}

func TestFirstNegativeAtEveryPlace_ID05(t *testing.T) {
	for length := range 20 {
		tokens := ramp(0, length)
		require.Equal(t, -1, firstNegative(tokens))
		for i := length - 1; i >= 0; i-- {
			tokens[i] = -1 // and all after it
			require.Equal(t, i, firstNegative(tokens), "of %d", length)
		}
	}
}

func TestTokensOutsideTheRangeAreRefused_ID05(t *testing.T) {
	// Not a number, fractions and numbers from 2^31 on cannot be written in the type.
	s := sequenceOf(t, ramp(0, 300))
	before := s.prefix(300)
	for _, c := range []struct {
		tokens []int32
		says   []string
	}{
		{[]int32{-1}, []string{"token 0 of 1 is -1"}},
		{[]int32{1, 2, -1 << 31, -5}, []string{"token 2 of 4 is -2147483648"}},
		{append(ramp(0, 600), -7), []string{"token 600 of 601 is -7"}},
	} {
		requireRefused(t, s.Append(c.tokens), ErrInvalid, append(c.says, "2147483647")...)
		requireRefused(t, s.AppendMedia(image("cat", ""), c.tokens), ErrInvalid, append(c.says, "2147483647")...)
		require.EqualValues(t, 300, s.Len(), "nothing appended")
		require.Equal(t, before, s.prefix(300))
		require.Empty(t, s.media)
	}
	require.NoError(t, s.Append([]int32{0, MaxToken}))
	require.EqualValues(t, 302, s.Len())
	require.Equal(t, sequenceOf(t, append(ramp(0, 300), 0, MaxToken)).prefix(302), s.prefix(302))
}

// A long append, whose tokens are checked and copied beside the hashing, gives the digests of many short ones; if any token is
// refused it leaves nothing, wherever that is.
func TestLongAppendEqualsShortOnes_ID05(t *testing.T) {
	tokens := ramp(3, aheadTokens+3*hashBlockTokens+7)
	s, short := sequenceOf(t, ramp(0, 100)), sequenceOf(t, ramp(0, 100))
	for _, i := range []int{0, 411, 412, 413, aheadTokens, len(tokens) - 1} {
		bad := slices.Clone(tokens)
		bad[i], bad[len(bad)-1] = -9, -8
		says := fmt.Sprintf("token %d of %d is %d", i, len(bad), bad[i])
		requireRefused(t, s.AppendMedia(image("cat", ""), bad), ErrInvalid, says)
		requireRefused(t, s.Append(bad), ErrInvalid, says)
		requireSame(t, &plainSequence{namespace: s.Namespace(), tokens: ramp(0, 100)}, s)
		require.Empty(t, s.media, "nothing appended")
	}
	given := slices.Clone(tokens)
	require.NoError(t, s.Append(given))
	clear(given) // the caller's again
	for piece := range slices.Chunk(tokens, 777) {
		require.NoError(t, short.Append(piece))
	}
	requireSame(t, &plainSequence{namespace: s.Namespace(), tokens: append(ramp(0, 100), tokens...)}, s)
	require.Equal(t, short.whole[1:], s.whole[1:])
	require.Equal(t, short.prefix(short.Len()), s.prefix(s.Len()))
}

func TestSequenceLengthIsLimited_B38(t *testing.T) {
	s := sequenceOf(t, ramp(0, 10))
	s.length = MaxSequenceTokens - 2 // as if; the refusal comes before anything looks at the blocks
	for _, err := range []error{s.Append(ramp(0, 3)), s.AppendMedia(image("cat", ""), ramp(0, 3))} {
		requireRefused(t, err, ErrTooLarge, "1073741822", "3 more", "1073741824")
	}
	require.EqualValues(t, MaxSequenceTokens-2, s.length)
	require.Empty(t, s.media)
}

func TestForkOutsideTheSequenceIsRefused_B38(t *testing.T) {
	s := sequenceOf(t, ramp(0, 300))
	for _, n := range []int64{-1, 301, 1 << 31, 1<<32 + 5, 1<<32 + 300} {
		f, err := s.Fork(n)
		require.Nil(t, f)
		requireRefused(t, err, ErrInvalid, fmt.Sprint(n), "300")
	}
}

func TestPageKeys_ID07(t *testing.T) {
	tokens := ramp(100, 9000)
	s := sequenceOf(t, tokens)
	last := slices.Clone(tokens)
	last[8999]++
	other := sequenceOf(t, last)
	again := sequenceOf(t, tokens)
	plain := &plainSequence{namespace: s.Namespace(), tokens: tokens}

	seen := map[txn.Key]string{}
	for _, end := range []int64{4096, 4097, 8192, 8193, 9000} {
		for group := range s.Namespace().Layout().Groups {
			for position := range int64(2) {
				k := s.pageKey(group, position, end)
				name := fmt.Sprintf("group %d position %d end %d", group, position, end)
				require.Len(t, k.String(), 64)
				require.Equal(t, k, again.pageKey(group, position, end), "stable")
				require.Equal(t, k, plain.pageKey(group, position, end), "by the definition")
				require.Equal(t, k, s.Namespace().pageKey(s.prefix(end), group, position), "from a prefix that is shared")
				require.NotContains(t, seen, k, "%s", name)
				seen[k] = name
				require.Equal(t, end < 9000, k == other.pageKey(group, position, end), "%s: only the last token is another", name)
			}
		}
	}
}

// The key of a full attention page does not depend on the checkpoint that it is named in; the key of a page that is not full does.
func TestFullPagesAreSharedByLongerCheckpoints_ID07(t *testing.T) {
	s := sequenceOf(t, ramp(0, 1000))
	l := s.Namespace().Layout()
	key := func(group int, position, offset int64) txn.Key {
		return s.pageKey(group, position, l.pageEnd(group, position, offset))
	}
	for position := range int64(31) {
		require.Equal(t, key(0, position, 500), key(0, position, 1000))
	}
	require.NotEqual(t, key(0, 31, 500), key(0, 31, 1000), "500 is inside page 31")
	require.NotEqual(t, key(2, 0, 500), key(2, 0, 1000), "recurrent state is of one offset")
}

func TestTextOnlyPrefixesKeepTheirNames_MMR01(t *testing.T) {
	tokens := ramp(0, 800)
	plain := sequenceOf(t, tokens)

	s := sampleSequence(t)
	require.NoError(t, s.Append(tokens[:20]))
	require.NoError(t, s.AppendMedia(image("cat", ""), tokens[20:60]))
	require.NoError(t, s.Append(tokens[60:200]))
	atHundred := s.prefix(100)
	require.NoError(t, s.AppendMedia(image("dog", ""), tokens[200:240]))
	require.NoError(t, s.Append(tokens[240:]))

	for n := int64(1); n <= 20; n++ {
		require.Equal(t, plain.prefix(n), s.prefix(n))
	}
	for n := int64(21); n <= 800; n++ {
		require.NotEqual(t, plain.prefix(n), s.prefix(n), "prefix %d", n)
	}
	require.Equal(t, plain.spine(0), s.spine(0))
	require.NotEqual(t, plain.spine(1), s.spine(1))
	require.Equal(t, atHundred, s.prefix(100), "what follows does not change it")
}

func TestContentDecides_MMR02(t *testing.T) {
	with := func(content [32]byte) *Sequence {
		s := sampleSequence(t)
		require.NoError(t, s.Append(ramp(0, 20)))
		require.NoError(t, s.AppendMedia(content, make([]int32, 40)))
		require.NoError(t, s.Append(ramp(0, 540)))
		return s
	}
	s := with(image("cat", "336px"))
	same, otherImage, otherSetting := with(image("cat", "336px")), with(image("dog", "336px")), with(image("cat", "448px"))
	for n := int64(1); n <= 600; n++ {
		require.Equal(t, s.prefix(n), same.prefix(n))
		// From the first token of the span on, which was computed from the whole image.
		require.Equal(t, n > 20, s.prefix(n) != otherImage.prefix(n), "prefix %d", n)
		require.Equal(t, n > 20, s.prefix(n) != otherSetting.prefix(n), "prefix %d", n)
		require.Equal(t, n > 20, otherImage.prefix(n) != otherSetting.prefix(n), "prefix %d", n)
	}
	require.Equal(t, s.spine(1), same.spine(1))
	require.NotEqual(t, s.spine(1), otherImage.spine(1))
	require.NotEqual(t, s.spine(1), otherSetting.spine(1))
}

// Identity part: two conversations of the same long text and different images are told apart from the image on, and what is
// not a digest is refused.
func TestSameTextOtherImages_MMR03(t *testing.T) {
	text := ramp(0, 15000)
	conversation := func(content [32]byte, imageTokens, more int) *Sequence {
		s := sampleSequence(t)
		require.NoError(t, s.Append(text))
		require.NoError(t, s.AppendMedia(content, make([]int32, imageTokens)))
		require.NoError(t, s.Append(ramp(0, more)))
		return s
	}
	a, b := conversation(image("cat", ""), 400, 10), conversation(image("dog", ""), 400, 29)
	require.EqualValues(t, 15410, a.Len())
	require.EqualValues(t, 15429, b.Len())
	require.Equal(t, a.prefix(15000), b.prefix(15000))
	for n := int64(15001); n <= a.Len(); n++ {
		require.NotEqual(t, a.prefix(n), b.prefix(n), "prefix %d", n)
	}
	require.NotEqual(t, a.pageKey(2, 0, 15410), b.pageKey(2, 0, 15410))

	requireRefused(t, a.AppendMedia([32]byte{}, ramp(0, 3)), ErrInvalid, "zero")
	requireRefused(t, a.AppendMedia(image("cat", ""), nil), ErrInvalid, "0 tokens")
	require.EqualValues(t, 15410, a.Len())
}

// What looks alike as tokens and is not the same has different digests at every offset from the first difference on.
func TestSpansThatOnlyLookAlike_MMR02(t *testing.T) {
	cat := image("cat", "")
	type step struct {
		media  bool
		tokens int
	}
	build := func(lead int, steps ...step) *Sequence {
		s := sampleSequence(t)
		require.NoError(t, s.Append(ramp(0, lead)))
		for _, st := range steps {
			if st.media {
				require.NoError(t, s.AppendMedia(cat, make([]int32, st.tokens)))
			} else {
				require.NoError(t, s.Append(make([]int32, st.tokens)))
			}
		}
		return s
	}
	for _, lead := range []int{0, 20, 400, 511, 512, 1000} {
		const width = 1200
		alike := map[string]*Sequence{
			"one span":           build(lead, step{true, width}),
			"text":               build(lead, step{false, width}),
			"two spans":          build(lead, step{true, width / 2}, step{true, width / 2}),
			"span, then text":    build(lead, step{true, width / 2}, step{false, width / 2}),
			"one token less":     build(lead, step{true, width - 1}, step{false, 1}),
			"a longer one":       build(lead, step{true, width + 1}),
			"a token later":      build(lead, step{false, 1}, step{true, width - 1}),
			"fork, then text":    nil,
			"fork, then a span":  nil,
			"fork at a block":    nil,
			"fork one token in":  nil,
			"fork one token off": nil,
		}
		fork := func(name string, n int, media bool) {
			f, err := alike["one span"].Fork(int64(n))
			require.NoError(t, err)
			rest := make([]int32, lead+width-n)
			if media {
				require.NoError(t, f.AppendMedia(cat, rest))
			} else {
				require.NoError(t, f.Append(rest))
			}
			alike[name] = f
		}
		fork("fork, then text", lead+width/2, false)
		fork("fork, then a span", lead+width/2, true)
		fork("fork at a block", (lead/512+2)*512, false)
		fork("fork one token in", lead+1, false)
		fork("fork one token off", lead+width-1, false)

		seen := map[txn.Key]string{}
		for name, s := range alike {
			k := s.prefix(int64(lead + width))
			require.NotContains(t, seen, k, "%s after %d", name, lead)
			seen[k] = name
		}
	}
}

func TestForkInsideASpanKeepsItsDigests(t *testing.T) {
	s := sampleSequence(t)
	require.NoError(t, s.Append(ramp(0, 400)))
	require.NoError(t, s.AppendMedia(image("cat", ""), make([]int32, 800)))
	require.NoError(t, s.Append(ramp(0, 100)))
	for _, n := range []int64{400, 401, 511, 512, 513, 1023, 1024, 1025, 1199, 1200, 1201} {
		f, err := s.Fork(n)
		require.NoError(t, err)
		g, err := f.Fork(n - 1)
		require.NoError(t, err)
		for k := int64(390); k <= n; k++ {
			require.Equal(t, s.prefix(k), f.prefix(k), "prefix %d of fork %d", k, n)
			if k < n {
				require.Equal(t, s.prefix(k), g.prefix(k), "prefix %d of a fork of fork %d", k, n)
			}
		}
	}
	require.EqualValues(t, 1200, s.media[0].end, "forks changed nothing")
}

// Any number of readers and forks share a sequence between its mutations; the race detector looks on.
func TestReadersShareASequence(t *testing.T) {
	s := sampleSequence(t)
	require.NoError(t, s.Append(ramp(0, 1100)))
	require.NoError(t, s.AppendMedia(image("cat", ""), make([]int32, 60)))
	want := sampleSequence(t)
	require.NoError(t, want.Append(ramp(0, 1100)))
	require.NoError(t, want.AppendMedia(image("cat", ""), make([]int32, 60)))
	require.NoError(t, want.Append(ramp(5, 1000)))

	var readers sync.WaitGroup
	results := make([]txn.Key, 8)
	for i := range results {
		readers.Go(func() {
			s.prefix(1150)
			s.spine(2)
			s.pageKey(0, 0, 16)
			f, err := s.Fork(s.Len())
			if err == nil && f.Append(ramp(5, 1000)) == nil {
				results[i] = f.prefix(2160)
			}
		})
	}
	readers.Wait()
	require.NoError(t, s.Append(ramp(5, 1000)))
	for _, k := range append(results, s.prefix(2160)) {
		require.Equal(t, want.prefix(2160), k)
	}
}

func TestPrefixOutsideTheSequenceIsAMistake(t *testing.T) {
	s := sequenceOf(t, ramp(0, 300))
	for _, n := range []int64{-1, 0, 301} {
		require.Panics(t, func() { s.prefix(n) })
	}
}

// BenchmarkSequenceHash appends 1,000,000 tokens to an empty sequence and compares with two references over the same
// 4,000,000 bytes, all taking turns in one run. The ratios are of speeds, by the fastest turn of each, because whatever else
// the machine does only ever adds to a turn; 1 is as fast as the reference:
//
//	×sha256        one SHA-256 over all the bytes
//	×sha256-calls  the calls of SHA-256 that the format asks for, one for each block, and nothing around them
//	×copy+sha256   one SHA-256 over all the bytes and a copy of them in fresh memory, as a sequence keeps its tokens
func BenchmarkSequenceHash(b *testing.B) {
	const count = 1_000_000
	tokens := ramp(0, count)
	raw := make([]byte, count*tokenBytes)
	encodeTokens(raw, tokens)
	n := mustNamespace(b, sampleIdentity())
	for _, piece := range []int{count, 512} {
		b.Run(fmt.Sprintf("piece=%d", piece), func(b *testing.B) {
			fastest := func(d *time.Duration, f func()) {
				start := time.Now()
				f()
				*d = min(*d, time.Since(start))
			}
			ours, bare, calls, kept := time.Hour, time.Hour, time.Hour, time.Hour
			var block [hashHeaderBytes + hashBlockTokens*tokenBytes]byte
			for b.Loop() {
				fastest(&ours, func() {
					s := n.NewSequence()
					for chunk := range slices.Chunk(tokens, piece) {
						if err := s.Append(chunk); err != nil {
							b.Fatal(err)
						}
					}
				})
				fastest(&bare, func() { sha256.Sum256(raw) })
				fastest(&calls, func() {
					for range count / hashBlockTokens {
						sha256.Sum256(block[:])
					}
				})
				fastest(&kept, func() { sha256.Sum256(bytes.Clone(raw)) })
			}
			b.ReportMetric(0, "ns/op") // of all together: says nothing
			b.ReportMetric(float64(ours)/count, "ns/token")
			b.ReportMetric(float64(bare)/float64(ours), "×sha256")
			b.ReportMetric(float64(calls)/float64(ours), "×sha256-calls")
			b.ReportMetric(float64(kept)/float64(ours), "×copy+sha256")
		})
	}
}

// BenchmarkAppendTurn appends turns of 512 tokens to a sequence that has few or many already.
func BenchmarkAppendTurn(b *testing.B) {
	turn := ramp(0, 512)
	for _, before := range []int{1000, 1_000_000} {
		b.Run(fmt.Sprintf("before=%d", before), func(b *testing.B) {
			base := sequenceOf(b, ramp(0, before))
			s, turns := base, 0
			for b.Loop() {
				if turns++; turns%1000 == 0 { // keeps the length near before
					s, _ = base.Fork(int64(before))
				}
				if err := s.Append(turn); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkFork(b *testing.B) {
	s := sequenceOf(b, ramp(0, 1_000_000))
	for b.Loop() {
		if _, err := s.Fork(999_999); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkPageKey(b *testing.B) {
	s := sequenceOf(b, ramp(0, 1_000_000))
	b.ReportAllocs()
	for b.Loop() {
		s.pageKey(0, 62499, 1_000_000)
	}
}

// The keys of many pages are those of each.
func TestPageKeysTogetherAreThoseOfEach(t *testing.T) {
	for _, pageTokens := range []int64{1, 16, 100, 512, 700} {
		ns := testNamespace(t, 1, Group{Name: "attention:kv", Kind: Attention, PageBytes: 64, PageTokens: pageTokens})
		layout := ns.Layout()
		s := seqOf(t, ns, tokens(1, 1100))
		require.NoError(t, s.AppendMedia([32]byte{7}, tokens(2, 300)))
		require.NoError(t, s.Append(tokens(3, 900)))
		for _, offset := range []int64{1, 16, 511, 512, 513, 1099, 1100, 1200, 1400, 1777, 2300} {
			first, count := layout.pagesAt(0, offset)
			next := first
			s.pageKeys(&layout, 0, first, count, offset, func(position int64, key txn.Key) {
				require.Equal(t, next, position)
				require.Equal(t, s.pageKey(0, position, layout.pageEnd(0, position, offset)), key, "page %d of %d tokens at %d", position, pageTokens, offset)
				next++
			})
			require.Equal(t, first+count, next)
		}
	}
}
