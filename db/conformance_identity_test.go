package db

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

// Given checkpoints at offsets of every alignment, when sequences that share some of them ask, then each gets the longest one
// that it shares exactly, and strangers get nothing; also after a restart.
func TestLongestSharedPrefixAtAnyOffset_ID04(t *testing.T) {
	restarts(t, func(t *testing.T, crashed bool) {
		d := openDB(t, tempDir(t), Options{})
		ns, text, books := testNamespace(t, 2, tiny()...), tokens(1, 20000), shelf{}
		for _, n := range []int64{17, 4096, 8193, 17408} {
			books.publish(t, d, seqOf(t, ns, text), n)
		}
		d = reopen(t, d, crashed)
		for _, c := range []struct{ shared, found int64 }{{18, 17}, {4096, 4096}, {8960, 8193}, {18000, 17408}, {20000, 17408}, {16, 0}, {17, 17}} {
			seq := seqOf(t, ns, text[:c.shared], tokens(99, 3))
			require.Equal(t, c.found, lookupAt(t, d, seq), "%d tokens shared", c.shared)
			require.Equal(t, c.found, restoreAt(t, d, seq))
		}
		changed := slices.Clone(text)
		changed[0]++
		require.Zero(t, lookupAt(t, d, seqOf(t, ns, changed)))
		other := testIdentity(2, tiny()...)
		other.Tenant = "other"
		stranger, err := NewNamespace(other)
		require.NoError(t, err)
		require.Zero(t, lookupAt(t, d, seqOf(t, stranger, text)))
		require.Equal(t, []int64{17, 4096, 8193, 17408}, books.requireListedIsReadable(t, d))
	})
}

// The generation follows from content alone: the same twice, another one for one byte of meta more or one token less.
func TestGenerationIsContent_ID06(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	seq := seqOf(t, testNamespace(t, 2, tiny()...), tokens(1, 4500))
	generation := func(n int64, change ...func(*PublishRequest)) Generation {
		p := begin(t, d, seq, n, change...)
		defer func() { require.NoError(t, p.Abort()) }()
		require.LessOrEqual(t, len(p.Generation().String()), 128)
		return p.Generation()
	}
	first := generation(4500, withMeta("payload"))
	require.Equal(t, first, generation(4500, withMeta("payload")))
	require.Equal(t, first, generation(4500, withMeta("payload"), durable, func(r *PublishRequest) {
		r.Request, r.Kind = "another request", Response // how it came to be is not content
	}))
	require.NotEqual(t, first, generation(4500, withMeta("payload.")))
	require.NotEqual(t, first, generation(4499, withMeta("payload")))
	d = reopen(t, d, true)
	require.Equal(t, first, generation(4500, withMeta("payload")), "after a restart")
	requireEmpty(t, d)
}

// Given a checkpoint that ends two tokens into a hash block, a query that differs in namespace, in an earlier block, in where the
// tokens stand, in the last token, or that is shorter, misses.
func TestNearMissesAreMisses_ID08(t *testing.T) {
	d := openDB(t, tempDir(t), Options{WritePolicy: Never})
	ns, block, books := testNamespace(t, 1, tiny()...), tokens(1, hashBlockTokens), shelf{}
	books.publish(t, d, seqOf(t, ns, block, []int32{1, 2}), hashBlockTokens+2)
	require.EqualValues(t, hashBlockTokens+2, lookupAt(t, d, seqOf(t, ns, block, []int32{1, 2})))

	salted := testIdentity(1, tiny()...)
	salted.Tenant = "salt"
	other, err := NewNamespace(salted)
	require.NoError(t, err)
	for name, seq := range map[string]*Sequence{
		"namespace":     seqOf(t, other, block, []int32{1, 2}),
		"earlier block": seqOf(t, ns, tokens(2, hashBlockTokens), []int32{1, 2}),
		"start":         seqOf(t, ns, block, block, []int32{1, 2}),
		"last token":    seqOf(t, ns, block, []int32{1, 3}),
		"shorter":       seqOf(t, ns, block, []int32{1}),
	} {
		require.Zero(t, lookupAt(t, d, seq), name)
	}
	books.requireListedIsReadable(t, d)
}

// Tokens are compared whole: digits that run together make no match.
func TestWholeTokensOnly_ID09(t *testing.T) {
	ns := testNamespace(t, 1, tiny()...)
	for _, c := range []struct {
		stored, asked []int32
		found         int64
	}{
		{[]int32{1, 2}, []int32{1, 2}, 2}, {[]int32{1, 2}, []int32{1, 2, 3}, 2}, {[]int32{1, 2}, []int32{1, 20}, 0},
		{[]int32{1}, []int32{12, 3}, 0}, {[]int32{12}, []int32{1, 2, 3}, 0},
		{[]int32{1, 0}, []int32{256, 0}, 0}, {[]int32{1 << 16}, []int32{1, 0}, 0}, // bytes that run together neither
	} {
		d := openDB(t, tempDir(t), Options{WritePolicy: Never, RAMBytes: 1 << 20})
		publish(t, d, seqOf(t, ns, c.stored), int64(len(c.stored)))
		require.Equal(t, c.found, lookupAt(t, d, seqOf(t, ns, c.asked)), "stored %v, asked %v", c.stored, c.asked)
		closeDB(t, d)
	}
}

// The longest prefix wins by its total length, also over the edge of a hash block, where the longer one has the shorter tail.
func TestLongestWins_ID10(t *testing.T) {
	d := openDB(t, tempDir(t), Options{WritePolicy: Never})
	ns, books := testNamespace(t, 1, tiny()...), shelf{}
	short := []int32{1, 2, 3, 4}
	books.publish(t, d, seqOf(t, ns, short), 2)
	books.publish(t, d, seqOf(t, ns, short), 3)
	require.EqualValues(t, 3, lookupAt(t, d, seqOf(t, ns, short)))

	const edge = 2 * hashBlockTokens
	long := tokens(3, edge+100)
	books.publish(t, d, seqOf(t, ns, long), edge-2) // all but two tokens of its block
	books.publish(t, d, seqOf(t, ns, long), edge+2) // two tokens of the next
	require.EqualValues(t, edge+2, lookupAt(t, d, seqOf(t, ns, long[:edge+3])))
	require.EqualValues(t, edge-2, lookupAt(t, d, seqOf(t, ns, long[:edge+1])))
	books.publish(t, d, seqOf(t, ns, long), edge) // the end of its block
	require.EqualValues(t, edge, lookupAt(t, d, seqOf(t, ns, long[:edge+1])))
	require.Equal(t, []int64{2, 3, edge - 2, edge, edge + 2}, books.requireListedIsReadable(t, d))
}

// Many checkpoints that end in one hash block are candidates, and digests decide: true prefixes among as many decoys of the
// same lengths, and three that only look alike.
func TestManyEndingsInOneBlock_ID11(t *testing.T) {
	d := openDB(t, tempDir(t), Options{WritePolicy: Never})
	ns, text, books := testNamespace(t, 1, tiny()...), tokens(1, 300), shelf{}
	for n := int64(1); n <= 295; n += 7 {
		books.publish(t, d, seqOf(t, ns, text), n)
		decoy := slices.Clone(text[:n])
		decoy[n-1] ^= 1
		books.publish(t, d, seqOf(t, ns, decoy), n)
	}
	require.Len(t, books, 86)
	require.EqualValues(t, 295, lookupAt(t, d, seqOf(t, ns, text)))
	for n := int64(300); n >= 1; n-- {
		require.Equal(t, (n-1)/7*7+1, lookupAt(t, d, seqOf(t, ns, text[:n])), "%d tokens", n)
	}
	books.requireListedIsReadable(t, d)

	d = openDB(t, tempDir(t), Options{WritePolicy: Never})
	for _, stored := range [][]int32{{1, 2}, {1, 20}, {12}} {
		publish(t, d, seqOf(t, ns, stored), int64(len(stored)))
	}
	require.EqualValues(t, 2, lookupAt(t, d, seqOf(t, ns, []int32{1, 2, 3})))
	require.Zero(t, lookupAt(t, d, seqOf(t, ns, []int32{1, 3})))
}

// The ancestors of a sequence are its listed proper prefixes and nothing that only resembles them. Listing them changes
// neither order nor state; namespaces do not mix; an unknown generation is not found.
func TestAncestorsAreExactPrefixes_ID12(t *testing.T) {
	d := openDB(t, tempDir(t), Options{WritePolicy: Never})
	ns, books := testNamespace(t, 1, tiny()...), shelf{}
	for _, stored := range [][]int32{{1}, {1, 2}, {1, 2, 3}, {1, 9}, {12}, {1, 20}} {
		books.publish(t, d, seqOf(t, ns, stored), int64(len(stored)))
	}
	before := still(t, d)
	order := func() (gens []Generation) {
		for c, err := range d.Checkpoints(context.Background()) {
			require.NoError(t, err)
			gens = append(gens, c.Generation)
		}
		return gens
	}
	was := order()
	require.Equal(t, []int64{3, 2, 1}, listedPrefixes(t, d, seqOf(t, ns, []int32{1, 2, 3, 4})))
	require.Equal(t, []int64{2, 1}, listedPrefixes(t, d, seqOf(t, ns, []int32{1, 2})))
	require.Equal(t, []int64{2, 1}, listedPrefixes(t, d, seqOf(t, ns, []int32{1, 9, 3})))
	require.Equal(t, was, order(), "the order of eviction is that of publication")
	require.Equal(t, before, still(t, d))

	salted := testIdentity(1, tiny()...)
	salted.Tenant = "salt"
	other, err := NewNamespace(salted)
	require.NoError(t, err)
	foreign, _ := books.publish(t, d, seqOf(t, other, []int32{1, 2, 3, 4}), 4)
	require.Equal(t, []int64{3, 2, 1}, listedPrefixes(t, d, seqOf(t, ns, []int32{1, 2, 3, 4})), "other namespaces are not seen")
	require.ErrorIs(t, d.Supersede(context.Background(), foreign, was[0]), ErrInvalid)
	_, err = d.Checkpoint(Generation{1})
	require.ErrorIs(t, err, ErrNotFound)
	books.requireListedIsReadable(t, d)
}

// What belongs to different ranks, prefixes or tenants never shares bytes: ranks have the same keys and their own copies;
// state of another offset, and everything of another tenant, has other keys.
func TestPagesOfDifferentOwnersAreDisjoint_ID13(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	keys := func(id Identity, n int64) (of map[txn.Key]bool) {
		ns, err := NewNamespace(id)
		require.NoError(t, err)
		seq := seqOf(t, ns, tokens(1, 200))
		publish(t, d, seq, n)
		r, err := d.Restore(context.Background(), seq, LookupOptions{MaxOffset: n})
		require.NoError(t, err)
		defer r.Release()
		verify(t, r, 2) // content depends on the rank, so bytes of the other rank would be seen
		first, second := r.Pages(0), r.Pages(1)
		of = map[txn.Key]bool{}
		for i := range first {
			of[first[i].Key] = true
			require.Equal(t, first[i].Key, second[i].Key)
			require.NotEqual(t, first[i].Bytes, second[i].Bytes)
			require.NotSame(t, &first[i].Bytes[0], &second[i].Bytes[0])
		}
		require.Len(t, of, len(first))
		return of
	}
	common := func(a, b map[txn.Key]bool) (n int) {
		for k := range a {
			if b[k] {
				n++
			}
		}
		return n
	}
	id := testIdentity(2, tiny()...)
	salted := id
	salted.Tenant = "salt"
	a, longer, b := keys(id, 160), keys(id, 176), keys(salted, 160)
	require.Len(t, a, 11)
	require.Equal(t, 10, common(a, longer), "whole attention pages are shared, state is not")
	require.Zero(t, common(a, b))
}

// A directory of another format version, and one that is not ours, is refused and left as it is.
func TestUnknownFormatIsRefused_ID14(t *testing.T) {
	dir := tempDir(t)
	d := openDB(t, dir, Options{})
	books := shelf{}
	books.publish(t, d, seqOf(t, testNamespace(t, 1, tiny()...), tokens(1, 100)), 100)
	closeDB(t, d)
	path := filepath.Join(dir, markerName)
	marker, err := os.ReadFile(path)
	require.NoError(t, err)
	for _, version := range []byte{0, 2, 255} {
		other := slices.Clone(marker)
		other[8] = version
		require.NoError(t, os.WriteFile(path, other, 0o600))
		before := files(t, dir)
		_, err = Open(context.Background(), dir, Options{Logger: quiet})
		require.ErrorIs(t, err, ErrUnsupported)
		require.ErrorContains(t, err, fmt.Sprint(version))
		require.Equal(t, before, files(t, dir))
		now, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Equal(t, other, now)
	}
	require.NoError(t, os.WriteFile(path, marker, 0o600))
	require.Equal(t, []int64{100}, books.requireListedIsReadable(t, openDB(t, dir, Options{})))
}

// Bytes computed with an adapter that the namespace does not authenticate can neither be published nor found: there is no
// namespace for a name that may come to mean other weights.
func TestUnauthenticatedAdapterHasNoNamespace_ID15(t *testing.T) {
	d := openDB(t, tempDir(t), Options{WritePolicy: Never})
	id := testIdentity(1, tiny()...)
	plain, err := NewNamespace(id)
	require.NoError(t, err)
	publish(t, d, seqOf(t, plain, tokens(1, 64)), 64)
	id.Adapter = "my-adapter"
	before := still(t, d)
	_, err = NewNamespace(id)
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorContains(t, err, "Identity.Adapter")
	id.Adapter = "unversioned:my-adapter@2026-07-01"
	marked, err := NewNamespace(id)
	require.NoError(t, err)
	require.Zero(t, lookupAt(t, d, seqOf(t, marked, tokens(1, 64))))
	require.Equal(t, before, still(t, d))
}

// A checkpoint before the first image is found by every conversation of the same text, whatever the images; one behind an
// image only with the same image.
func TestImagesDecideFromTheirFirstToken_MMR01_MMR02(t *testing.T) {
	restarts(t, func(t *testing.T, crashed bool) {
		d := openDB(t, tempDir(t), Options{})
		ns, text, books := testNamespace(t, 2, tiny()...), tokens(1, 300), shelf{}
		with := func(content [32]byte) *Sequence {
			s := seqOf(t, ns, text[:20])
			require.NoError(t, s.AppendMedia(content, text[20:60]))
			require.NoError(t, s.Append(text[60:]))
			return s
		}
		plain, cat, dog := seqOf(t, ns, text), with(image("cat", "")), with(image("dog", ""))
		books.publish(t, d, plain, 20)
		books.publish(t, d, cat, 100)
		books.publish(t, d, cat, 300)
		d = reopen(t, d, crashed)
		require.EqualValues(t, 300, restoreAt(t, d, with(image("cat", ""))))
		require.EqualValues(t, 20, restoreAt(t, d, dog))
		require.EqualValues(t, 20, restoreAt(t, d, plain), "the same placeholder tokens as text are not an image")

		longer := with(image("cat", ""))
		require.NoError(t, longer.AppendMedia(image("dog", ""), text[:40]))
		require.EqualValues(t, 300, restoreAt(t, d, longer), "a later image changes nothing before it")
		books.requireListedIsReadable(t, d)
	})
}

// Two conversations with the same text of 15,000 tokens and different images restore their own.
func TestConversationsWithOtherImages_MMR03(t *testing.T) {
	d := openDB(t, tempDir(t), Options{WritePolicy: OnEvict})
	ns, text, books := testNamespace(t, 1, tiny()...), tokens(1, 15000), shelf{}
	conversation := func(content [32]byte, more int) *Sequence {
		s := seqOf(t, ns, text)
		require.NoError(t, s.AppendMedia(content, make([]int32, 400)))
		require.NoError(t, s.Append(tokens(5, more)))
		return s
	}
	a, b := conversation(image("cat", ""), 10), conversation(image("dog", ""), 29)
	books.publish(t, d, a, 15410)
	require.Zero(t, lookupAt(t, d, b))
	_, bytes := books.publish(t, d, b, 15429)
	require.EqualValues(t, (15429+15)/16*64-15000/16*64+96, bytes, "the pages of the text are shared")
	d = reopen(t, d, false)
	require.EqualValues(t, 15410, restoreAt(t, d, a))
	require.EqualValues(t, 15429, restoreAt(t, d, b))
	require.Zero(t, lookupAt(t, d, conversation(image("cow", ""), 29)))
	books.requireListedIsReadable(t, d)
}

// Given a checkpoint under one identity, when exactly one field is changed, then nothing is found; published under the changed
// identity too, both live side by side, with their own bytes, over a restart.
func TestEveryFieldOfTheIdentityIsolates_B34(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	text, books := tokens(1, 1000), shelf{}
	first := testIdentity(2, tiny()...)
	changes := map[string]func(*Identity){
		"weights":   func(id *Identity) { id.Weights = "1123456789abcdef0123456789abcdef01234567" },
		"tokenizer": func(id *Identity) { id.Tokenizer = "t2" },
		"dtype":     func(id *Identity) { id.DType = "bf16" },
		"page size": func(id *Identity) { id.Layout.Groups[0].PageBytes++ },
		"engine":    func(id *Identity) { id.Engine = "e2" },
		"ranks":     func(id *Identity) { id.Layout.Ranks = 3 },
		"adapter":   func(id *Identity) { id.Adapter = strings.Repeat("a", 40) },
		"setting":   func(id *Identity) { id.Settings = map[string]string{"kv-scale": "1"} },
		"draft":     func(id *Identity) { id.Draft = strings.Repeat("b", 64) },
	}
	ns := func(id Identity) *Namespace {
		n, err := NewNamespace(id)
		require.NoError(t, err)
		return n
	}
	books.publish(t, d, seqOf(t, ns(first), text), 1000)
	d = reopen(t, d, false)
	for name, change := range changes {
		other := first.clone()
		change(&other)
		require.Zero(t, lookupAt(t, d, seqOf(t, ns(other), text)), name)
		require.EqualValues(t, 1000, lookupAt(t, d, seqOf(t, ns(first), text)), name)
		books.publish(t, d, seqOf(t, ns(other), text), 1000)
		require.EqualValues(t, 1000, restoreAt(t, d, seqOf(t, ns(other), text)), name)
	}
	d = reopen(t, d, true)
	require.Len(t, books, 1+len(changes))
	require.Len(t, books.requireListedIsReadable(t, d), len(books))
	require.EqualValues(t, len(books), stats(t, d).Namespaces)

	unmarked := first.clone()
	unmarked.Weights = ""
	_, err := NewNamespace(unmarked)
	require.ErrorIs(t, err, ErrInvalid)
}

// Every legal id gives a checkpoint of its own, whatever the file system thinks of the name: no id is a file name. What is not
// legal is refused before anything is touched; a link where a file would go is not followed.
func TestEveryLegalIdHasItsOwnBytes_B36(t *testing.T) {
	outside := filepath.Join(tempDir(t), "outside")
	require.NoError(t, os.WriteFile(outside, []byte("not ours"), 0o600))
	dir := tempDir(t)
	d := openDB(t, dir, Options{})
	text, books := tokens(1, 40), shelf{}
	ids := []string{
		strings.Repeat("org/", 32) + "models", "a/b", "a-SEP-b", "@@x", ".", "..", "CON", "trailing.", "trailing ", "Model", "model",
		"\u00e9", "e\u0301", "😀", strings.Repeat("x", 1024), "../../etc/passwd", "a\nb", "-rf", "a\\b", "a:b",
	}
	var spaces []*Namespace
	for _, id := range ids {
		for _, field := range []func(*Identity){
			func(i *Identity) { i.Model = id },
			func(i *Identity) { i.Tenant = id[:min(len(id), 128)] },
		} {
			identity := testIdentity(1, tiny()...)
			field(&identity)
			ns, err := NewNamespace(identity)
			require.NoError(t, err, "%.20q", id)
			spaces = append(spaces, ns)
			books.publish(t, d, seqOf(t, ns, text), 40, func(r *PublishRequest) { r.Request = id[:min(len(id), MaxRequestBytes)] })
		}
	}
	require.Len(t, books, 2*len(ids), "all are distinct")

	before := still(t, d)
	for _, id := range []string{"nul\x00byte", "\xff\xfe", strings.Repeat("x", 4096)} {
		identity := testIdentity(1, tiny()...)
		identity.Model = id
		_, err := NewNamespace(identity)
		require.ErrorIs(t, err, ErrInvalid, "%.20q", id)
		_, err = d.Begin(context.Background(), PublishRequest{Sequence: seqOf(t, spaces[0], text), Offset: 39, Request: id})
		require.ErrorIs(t, err, ErrInvalid, "%.20q", id)
	}
	require.Equal(t, before, still(t, d))

	require.NoError(t, d.segments.Seal(context.Background()))
	highest := d.segments.Highest()
	for i := uint64(1); i <= 2; i++ {
		require.NoError(t, os.Symlink(outside, filepath.Join(dir, dataName, fmt.Sprintf("%020d.seg", highest+i))))
	}
	books.publish(t, d, seqOf(t, spaces[0], text, tokens(2, 40)), 80)
	d = reopen(t, d, false)
	require.Len(t, books.requireListedIsReadable(t, d), 2*len(ids)+1)
	content, err := os.ReadFile(outside)
	require.NoError(t, err)
	require.Equal(t, "not ours", string(content))
	for name := range files(t, dir) {
		require.LessOrEqual(t, len(filepath.Base(name)), 255)
	}
}
