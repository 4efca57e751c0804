package main

import (
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestPageContentIsCheckedInEveryByte(t *testing.T) {
	// Sizes around every step of the fill loop: eight-byte words in chunks of four, and a tail.
	for _, size := range []int64{1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 100, 4096} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			p := pageName{prefix: 42, group: 1, position: 3, rank: 2}
			b := make([]byte, size)
			p.fill(b)
			require.NoError(t, p.check(b, size))
			for i := range b {
				for bit := range 8 {
					b[i] ^= 1 << bit
					require.ErrorContains(t, p.check(b, size), fmt.Sprintf(": byte %d of %d is ", i, size))
					b[i] ^= 1 << bit
				}
			}
		})
	}
}

func TestPageContentTellsEveryOtherPageApart(t *testing.T) {
	const size = 64
	p := pageName{prefix: 42, group: 1, position: 3, rank: 2}
	for name, other := range map[string]pageName{
		"another prefix":   {prefix: 43, group: 1, position: 3, rank: 2},
		"another group":    {prefix: 42, group: 0, position: 3, rank: 2},
		"another position": {prefix: 42, group: 1, position: 2, rank: 2},
		"another rank":     {prefix: 42, group: 1, position: 3, rank: 3},
		"fields swapped":   {prefix: 42, group: 2, position: 3, rank: 1},
	} {
		b := make([]byte, size)
		other.fill(b)
		require.Error(t, p.check(b, size), name)
	}

	b := make([]byte, size)
	p.fill(b)
	require.ErrorContains(t, p.check(b[:size-1], size), "63 bytes, want 64")
	require.ErrorContains(t, p.check(append(b, 0), size), "65 bytes, want 64")
	require.Error(t, p.check(make([]byte, size), size), "a page of zeros")

	shifted := make([]byte, size+8)
	p.fill(shifted)
	require.Error(t, p.check(shifted[8:], size), "a page that begins eight bytes late")

	half := make([]byte, size)
	p.fill(half)
	pageName{prefix: 42, group: 1, position: 3, rank: 0}.fill(half[size/2:])
	require.ErrorContains(t, p.check(half, size), ": byte 32 of 64 is ", "half a page of another rank")
}

func TestPageContentIsAFunctionOfItsName(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.Custom(func(t *rapid.T) pageName {
			return pageName{
				prefix:   rapid.Uint64().Draw(t, "prefix"),
				group:    rapid.IntRange(0, 3).Draw(t, "group"),
				position: rapid.Int64Range(0, 1<<20).Draw(t, "position"),
				rank:     rapid.IntRange(0, 7).Draw(t, "rank"),
			}
		})
		p, q := name.Draw(t, "p"), name.Draw(t, "q")
		size := rapid.IntRange(16, 300).Draw(t, "size")
		b := make([]byte, size)
		p.fill(b)
		require.NoError(t, p.check(b, int64(size)))
		require.Equal(t, p == q, q.check(b, int64(size)) == nil)
	})
}

// Kept content must stay what it is: directories that a replay was told to keep are checked by later builds.
func TestContentAndTokensDoNotChange(t *testing.T) {
	b := make([]byte, 16)
	pageName{prefix: 1, group: 1, position: 2, rank: 3}.fill(b)
	require.Equal(t, goldenPage, fmt.Sprintf("%x", b))
	require.Equal(t, goldenTokens, appendTokens(nil, 7)[:4])
	require.Equal(t, goldenPrefix, prefixDigest(prefixDigest(0, 1), 2))
}

func TestTokensAreAFunctionOfTheBlock(t *testing.T) {
	a, b := appendTokens(nil, 7), appendTokens(nil, 8)
	require.Len(t, a, blockTokens)
	require.Equal(t, a, appendTokens(nil, 7))
	same := 0
	for i := range a {
		require.GreaterOrEqual(t, a[i], int32(0))
		require.Less(t, a[i], int32(1<<vocabularyBits))
		if a[i] == b[i] {
			same++
		}
	}
	require.Less(t, same, 4, "different blocks have different tokens")

	r := request{Blocks: []uint64{7, 8}}
	require.Equal(t, append(append([]int32{}, a...), b...), promptTokens(nil, r))
	require.Equal(t, int64(2*blockTokens), r.tokens())
	require.Equal(t, []uint64{prefixDigest(0, 7), prefixDigest(prefixDigest(0, 7), 8)}, prefixDigests(nil, r))
}

func BenchmarkPageContent(b *testing.B) {
	page := make([]byte, 64<<10)
	p := pageName{prefix: 1}
	b.Run("fill", func(b *testing.B) {
		b.SetBytes(int64(len(page)))
		for i := 0; b.Loop(); i++ {
			p.prefix = uint64(i)
			p.fill(page)
		}
	})
	p.fill(page)
	b.Run("check", func(b *testing.B) {
		b.SetBytes(int64(len(page)))
		for b.Loop() {
			if err := p.check(page, int64(len(page))); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("tokens", func(b *testing.B) {
		tokens := make([]int32, 0, blockTokens)
		b.SetBytes(blockTokens * 4)
		for i := 0; b.Loop(); i++ {
			tokens = appendTokens(tokens[:0], binary.LittleEndian.Uint64(page[i%1000*8:]))
		}
	})
}

// Written down from the first version.
const (
	goldenPage          = "591649fb66ebeac8dfd708038be11c06"
	goldenPrefix uint64 = 0xd6440487114a6cc7
)

var goldenTokens = []int32{86738, 117354, 45737, 130860}
