package db

import (
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// attentionLayout has one full-attention group for each page size.
func attentionLayout(pageTokens ...int64) Layout {
	l := Layout{Ranks: 1}
	for i, n := range pageTokens {
		l.Groups = append(l.Groups, Group{Name: fmt.Sprintf("attention:%d", i), Kind: Attention, PageBytes: 1, PageTokens: n})
	}
	return l
}

func TestGroupKindNames(t *testing.T) {
	require.Equal(t, "attention recurrent auxiliary GroupKind(0) GroupKind(4)",
		fmt.Sprint(Attention, " ", Recurrent, " ", Auxiliary, " ", GroupKind(0), " ", GroupKind(4)))
}

// Page sizes around every power of two that a narrower integer would wrap at: accepted and kept exactly, or refused with
// the limit.
func TestPageBytesAreExactOrRefused_B38(t *testing.T) {
	for _, c := range []struct {
		bytes int64
		want  error
	}{
		{math.MinInt64, ErrInvalid},
		{-1, ErrInvalid},
		{0, ErrInvalid},
		{1, nil},
		{4095, nil},
		{4096, nil},
		{4097, nil},
		{MaxPageBytes, nil},
		{MaxPageBytes + 1, ErrTooLarge},
		{1<<31 - 1, ErrTooLarge},
		{1 << 31, ErrTooLarge},
		{1<<32 - 1, ErrTooLarge},
		{1 << 32, ErrTooLarge},
		{1<<32 + 1, ErrTooLarge},
		{math.MaxInt64, ErrTooLarge},
	} {
		t.Run(fmt.Sprint(c.bytes), func(t *testing.T) {
			id := sampleIdentity()
			id.Layout.Groups[1].PageBytes = c.bytes
			n, err := NewNamespace(id)
			if c.want != nil {
				requireRefused(t, err, c.want, "Layout.Groups[1].PageBytes", fmt.Sprint(c.bytes), fmt.Sprint(MaxPageBytes))
				return
			}
			require.NoError(t, err)
			again, err := ParseNamespace(n.Encoding())
			require.NoError(t, err)
			require.Equal(t, c.bytes, again.Layout().Groups[1].PageBytes)
		})
	}
}

func TestLayoutIsCheckedAtTheEdge_B38(t *testing.T) {
	for _, c := range []struct {
		name  string
		spoil func(l *Layout)
		want  error
		says  []string
	}{
		{"no ranks", func(l *Layout) { l.Ranks = 0 }, ErrInvalid, []string{"Layout.Ranks", "0", "1024"}},
		{"negative ranks", func(l *Layout) { l.Ranks = -1 }, ErrInvalid, []string{"Layout.Ranks", "-1", "1024"}},
		{"ranks", func(l *Layout) { l.Ranks = MaxRanks + 1 }, ErrTooLarge, []string{"Layout.Ranks", "1025", "1024"}},
		{"no groups", func(l *Layout) { l.Groups = nil }, ErrInvalid, []string{"Layout.Groups", "0", "4096"}},
		{"groups", func(l *Layout) { l.Groups = make([]Group, MaxGroups+1) }, ErrTooLarge, []string{"Layout.Groups", "4097", "4096"}},
		{"no name", func(l *Layout) { l.Groups[0].Name = "" }, ErrInvalid, []string{"Layout.Groups[0].Name", "256"}},
		{"two of a name", func(l *Layout) { l.Groups[2].Name = l.Groups[0].Name }, ErrInvalid, []string{"Layout.Groups[2].Name", "group 0"}},
		{"no kind", func(l *Layout) { l.Groups[0].Kind = 0 }, ErrInvalid, []string{"Layout.Groups[0].Kind", "0"}},
		{"unknown kind", func(l *Layout) { l.Groups[0].Kind = 4 }, ErrInvalid, []string{"Layout.Groups[0].Kind", "4"}},
		{"no page tokens", func(l *Layout) { l.Groups[0].PageTokens = 0 }, ErrInvalid, []string{"Layout.Groups[0].PageTokens", "0", "65536"}},
		{"page tokens", func(l *Layout) { l.Groups[0].PageTokens = MaxPageTokens + 1 }, ErrTooLarge, []string{"Layout.Groups[0].PageTokens", "65537", "65536"}},
		{"negative window", func(l *Layout) { l.Groups[0].WindowTokens = -1 }, ErrInvalid, []string{"Layout.Groups[0].WindowTokens", "-1"}},
		{"window", func(l *Layout) { l.Groups[0].WindowTokens = 1 << 32 }, ErrTooLarge, []string{"Layout.Groups[0].WindowTokens", "4294967296", "1073741824"}},
		{"attention with pages", func(l *Layout) { l.Groups[0].Pages = 1 }, ErrInvalid, []string{"Layout.Groups[0].Pages", "1", "attention"}},
		{"no pages", func(l *Layout) { l.Groups[2].Pages = 0 }, ErrInvalid, []string{"Layout.Groups[2].Pages", "0", "65536"}},
		{"pages", func(l *Layout) { l.Groups[2].Pages = MaxGroupPages + 1 }, ErrTooLarge, []string{"Layout.Groups[2].Pages", "65537", "65536"}},
		{"recurrent with page tokens", func(l *Layout) { l.Groups[2].PageTokens = 16 }, ErrInvalid, []string{"Layout.Groups[2].PageTokens", "16", "recurrent"}},
		{"recurrent with window", func(l *Layout) { l.Groups[2].WindowTokens = 16 }, ErrInvalid, []string{"Layout.Groups[2].WindowTokens", "16", "recurrent"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			id := sampleIdentity()
			c.spoil(&id.Layout)
			_, err := NewNamespace(id)
			requireRefused(t, err, c.want, c.says...)
		})
	}
}

func TestLayoutAtItsLimitsIsAccepted(t *testing.T) {
	id := sampleIdentity()
	id.Layout.Ranks = MaxRanks
	id.Layout.Groups[0].PageTokens = MaxPageTokens
	id.Layout.Groups[0].WindowTokens = MaxWindowTokens
	id.Layout.Groups[2].Pages = MaxGroupPages
	n, err := NewNamespace(id)
	require.NoError(t, err)
	require.Equal(t, id.Layout, n.Layout())
}

func TestHybridHasRecurrentState(t *testing.T) {
	require.True(t, sampleIdentity().Layout.hybrid())
	l := attentionLayout(16)
	require.False(t, l.hybrid())
	l.Groups = append(l.Groups, Group{Name: "auxiliary:0", Kind: Auxiliary, PageBytes: 1, Pages: 1})
	require.False(t, l.hybrid())
}

func TestPagesOfTheSampleLayout(t *testing.T) {
	l := sampleIdentity().Layout // 0: attention of 16, 1: window 100 of 64, 2: recurrent × 3, 3: auxiliary × 1
	for _, c := range []struct {
		group        int
		offset       int64
		first, count int64
	}{
		{0, 0, 0, 0}, {0, 1, 0, 1}, {0, 16, 0, 1}, {0, 17, 0, 2}, {0, 1000, 0, 63},
		{1, 1, 0, 1}, {1, 100, 0, 2}, {1, 163, 0, 3}, {1, 164, 1, 2}, {1, 1000, 14, 2},
		{2, 1, 0, 3}, {2, 1000, 0, 3},
		{3, 1, 0, 1}, {3, 1000, 0, 1},
	} {
		first, count := l.pagesAt(c.group, c.offset)
		require.Equal(t, [2]int64{c.first, c.count}, [2]int64{first, count}, "group %d at %d", c.group, c.offset)
	}
	require.EqualValues(t, 16, l.pageEnd(0, 0, 1000))
	require.EqualValues(t, 1000, l.pageEnd(0, 62, 1000))
	require.EqualValues(t, 992, l.pageEnd(0, 61, 992))
	require.EqualValues(t, 1000, l.pageEnd(2, 0, 1000))
	require.EqualValues(t, 1000, l.pageEnd(3, 0, 1000))
}

// The pages of a restore are exactly those that hold a token of the window, and end where their tokens do.
func TestPagesAreThoseOfTheWindow(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := attentionLayout(rapid.Int64Range(1, 40).Draw(t, "pageTokens"))
		g := &l.Groups[0]
		g.WindowTokens = rapid.Int64Range(0, 200).Draw(t, "window")
		offset := rapid.Int64Range(1, 300).Draw(t, "offset")

		needed := map[int64]int64{} // position → end, token by token
		for token := range offset {
			if g.WindowTokens == 0 || token >= offset-g.WindowTokens {
				needed[token/g.PageTokens] = token + 1
			}
		}
		first, count := l.pagesAt(0, offset)
		got := map[int64]int64{}
		for position := first; position < first+count; position++ {
			got[position] = l.pageEnd(0, position, offset)
		}
		require.Equal(t, needed, got)
	})
}

func TestBoundary(t *testing.T) {
	for _, c := range []struct {
		pageTokens   []int64
		offset, want int64
	}{
		{[]int64{16}, 0, 0},
		{[]int64{16}, 15, 0},
		{[]int64{16}, 16, 16},
		{[]int64{16}, 1000, 992},
		{[]int64{16, 64}, 1000, 960},
		{[]int64{6, 10, 15}, 29, 0},
		{[]int64{6, 10, 15}, 30, 30},
		{[]int64{6, 10, 15}, 119, 90},
		// The product of these primes is 4.6·10^19, over 2^63, though each factor is small.
		{[]int64{65521, 65519, 65497, 65479, 65449}, math.MaxInt64, 0},
		{[]int64{65521, 65519, 65497, 32749}, math.MaxInt64, math.MaxInt64 - math.MaxInt64%(65521*65519*65497*32749)},
	} {
		require.Equal(t, c.want, attentionLayout(c.pageTokens...).boundary(c.offset), "%v at %d", c.pageTokens, c.offset)
	}

	mixed := attentionLayout(16)
	mixed.Groups = append(mixed.Groups, Group{Name: "auxiliary:0", Kind: Auxiliary, PageBytes: 1, Pages: 1})
	require.Zero(t, mixed.boundary(1000), "auxiliary pages exist at the exact offset alone")
	require.Zero(t, sampleIdentity().Layout.boundary(1000), "and so do recurrent ones")
}

func TestBoundaryIsTheLargestCommonMultiple(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sizes := rapid.SliceOfN(rapid.Int64Range(1, 24), 1, 4).Draw(t, "pageTokens")
		offset := rapid.Int64Range(0, 2000).Draw(t, "offset")
		want := offset
		for ; want > 0; want-- {
			whole := true
			for _, n := range sizes {
				whole = whole && want%n == 0
			}
			if whole {
				break
			}
		}
		require.Equal(t, want, attentionLayout(sizes...).boundary(offset))
	})
}

// Offsets that no sequence can have are still computed exactly, so that a check of them never sees a wrapped value.
func TestOffsetsBeyond32BitsAreExact_B38(t *testing.T) {
	l := attentionLayout(16)
	windowed := attentionLayout(16)
	windowed.Groups[0].WindowTokens = 100
	for _, c := range []struct{ offset, pages, boundary, windowFirst int64 }{
		{1<<31 - 1, 1 << 27, 1<<31 - 16, 134217721},
		{1 << 31, 1 << 27, 1 << 31, 134217721},
		{1<<32 + 5, 1<<28 + 1, 1 << 32, 268435450},
		{math.MaxInt64, 1 << 59, math.MaxInt64 - 15, (math.MaxInt64 - 100) / 16},
	} {
		first, count := l.pagesAt(0, c.offset)
		require.Zero(t, first)
		require.Equal(t, c.pages, count)
		require.Equal(t, c.offset, l.pageEnd(0, count-1, c.offset))
		require.Equal(t, (count-1)*16, l.pageEnd(0, count-2, c.offset))
		require.Equal(t, c.offset, l.pageEnd(0, math.MaxInt64, c.offset))
		require.Equal(t, c.boundary, l.boundary(c.offset))
		first, _ = windowed.pagesAt(0, c.offset)
		require.Equal(t, c.windowFirst, first)
	}
}
