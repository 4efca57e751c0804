package txn

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// samples are records of every kind, with every field that has more than one form in each of its forms.
func samples() map[string]Record {
	k := func(name string) Key { return derive("sample", Key{}, []byte(name)) }
	g := func(name string) Generation { return Generation(k(name)) }
	place := []Placement{
		{Segment: 1, Offset: 0, Stored: 1, Codec: CodecNone, Checksum: 0x0102030405060708},
		{Segment: 1 << 40, Offset: 1 << 40, Stored: 4097, Codec: CodecZstd, Checksum: 1<<64 - 1},
	}
	whole := Manifest{
		Namespace: k("namespace"), Offset: 1000, Prefix: k("prefix"), Spine: k("spine"), Ranks: 2,
		Groups: []GroupPages{
			{Chained: true, PageBytes: 65536, Count: 63, Head: k("head")},
			{PageBytes: 4096, Count: 2, Positions: []int64{60, 62}, Keys: []Key{k("w60"), k("w62")}},
			{PageBytes: 1, Count: 1, Positions: []int64{0}, Keys: []Key{k("state")}},
		},
		Meta: []byte("engine"), Kind: 2, Request: "request-1", Continues: g("before"), Previous: g("shorter"),
	}
	plain := Manifest{Namespace: k("namespace"), Offset: 1, Prefix: k("prefix"), Spine: k("spine"), Ranks: 1,
		Groups: []GroupPages{{Chained: true, PageBytes: 1, Count: 1, Head: k("p0")}}}
	return map[string]Record{
		"publish-first": &Publish{
			Manifest: whole, Encoding: []byte("namespace encoding"), Spine: []Key{k("b0"), k("b1"), k("b2"), k("spine")},
			Pages: []NewPage{
				{Key: k("p61"), Parent: k("p60"), Bytes: 65536, Place: place},
				{Key: k("head"), Parent: k("p61"), Bytes: 65536},
				{Key: k("w60"), Bytes: 4096},
				{Key: k("state"), Bytes: 1, Place: place},
			},
			Replaced: []Generation{g("old")}, Supersedes: []Generation{g("s1"), g("s2")},
		},
		"publish-more":   &Publish{Manifest: plain, Spine: []Key{k("spine")}, SpineRoot: k("b2"), Pages: []NewPage{{Key: k("p0"), Bytes: 1}}},
		"publish-relist": &Publish{Manifest: plain},
		"supersede":      &Supersede{By: g("by"), Generations: []Generation{g("s1"), g("s2")}},
		"current":        &Supersede{Generations: []Generation{g("s1")}},
		"retire":         &Retire{Reason: ReasonLost, Generations: []Generation{g("r1")}},
		"retire-delete":  &Retire{Reason: ReasonRequested, Delete: true, Generations: []Generation{g("r1"), g("r2")}},
		"delete":         &Delete{Generations: []Generation{g("d1")}},
		"persist":        &Persist{Pages: []PlacedPage{{Key: k("p1"), Place: place}, {Key: k("p2"), Place: place[:1]}}},
		"persist-none":   &Persist{},
		"mark-used":      &Mark{Mark: MarkUsed, Generations: []Generation{g("u1"), g("u2")}},
		"mark-grace":     &Mark{Mark: MarkEndGrace, Generations: []Generation{g("g1")}},
	}
}

func sampleNames() []string {
	var names []string
	for name := range samples() {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// TestEncodingsAreStable: what released builds have written stays readable, and is written the same way. A change of
// testdata/encodings is a change of the format.
func TestEncodingsAreStable(t *testing.T) {
	seen := map[string]bool{}
	datadriven.RunTest(t, "testdata/encodings", func(t *testing.T, d *datadriven.TestData) string {
		name := d.CmdArgs[0].Key
		seen[name] = true
		r := samples()[name]
		require.NotNil(t, r)
		encoded := Encode(nil, r)
		if d.Cmd == "manifest" {
			m := r.(*Publish).Manifest
			encoded = EncodeManifest(&m)
			return fmt.Sprintf("generation %s\n%s", Key(m.Generation()), lines(encoded))
		}
		if !rewriting() {
			golden, err := hex.DecodeString(strings.Join(strings.Fields(d.Expected), ""))
			require.NoError(t, err)
			decoded, err := Decode(r.Kind(), golden)
			require.NoError(t, err)
			require.Equal(t, r, decoded)
		}
		return lines(encoded)
	})
	for name := range samples() {
		require.True(t, seen[name], name)
	}
}

// rewriting tells that the golden files are to be written anew.
func rewriting() bool { return flag.Lookup("rewrite").Value.String() == "true" }

// lines prints bytes in hex, 48 a line.
func lines(b []byte) (s string) {
	for part := range slices.Chunk(b, 48) {
		s += hex.EncodeToString(part) + "\n"
	}
	return s
}

// TestDamagedEncodings: given an encoded record or manifest, when any one bit of it is flipped or its end is cut off
// anywhere, then decoding fails, or gives something that is encoded in just these bytes; it takes no more memory than a
// small multiple of the input.
func TestDamagedEncodings(t *testing.T) {
	for _, name := range sampleNames() {
		r := samples()[name]
		encoded := Encode(nil, r)
		for n := range encoded {
			_, err := Decode(r.Kind(), encoded[:n])
			require.ErrorIs(t, err, ErrCorrupt, "%s cut to %d bytes", name, n)
		}
		_, err := Decode(r.Kind(), append(slices.Clone(encoded), 0))
		require.ErrorIs(t, err, ErrCorrupt, "%s with a byte more", name)
		for i := range encoded {
			decodeAny(t, r.Kind(), flips(encoded, i)...)
		}
		p, ok := r.(*Publish)
		if !ok {
			continue
		}
		g := p.Manifest.Generation()
		encoded = EncodeManifest(&p.Manifest)
		for n := range encoded {
			_, err := DecodeManifest(encoded[:n], g)
			require.ErrorIs(t, err, ErrCorrupt, "manifest of %s cut to %d bytes", name, n)
		}
		content := encoder{}
		p.Manifest.encodeContent(&content)
		for i := range encoded {
			for _, damaged := range flips(encoded, i) {
				m := decodeAnyManifest(t, damaged, g)
				require.False(t, m != nil && i <= len(content.b), "manifest of %s: a flip in byte %d is not noticed", name, i)
			}
		}
	}
}

// flips gives copies of b in which one bit of byte i is another one.
func flips(b []byte, i int) (damaged [][]byte) {
	for bit := range 8 {
		d := slices.Clone(b)
		d[i] ^= 1 << bit
		damaged = append(damaged, d)
	}
	return damaged
}

// decodeAny decodes bytes that may be anything.
func decodeAny(t require.TestingT, kind Kind, payloads ...[]byte) {
	records, errs := make([]Record, len(payloads)), make([]error, len(payloads))
	most := uint64(0)
	for _, p := range payloads {
		most += allocationMax(len(p))
	}
	allocated := allocatedBytes(func() {
		for i, p := range payloads {
			records[i], errs[i] = Decode(kind, p)
		}
	})
	require.LessOrEqual(t, allocated, most, "decoding %d payloads of %d bytes", len(payloads), len(payloads[0]))
	for i, r := range records {
		if errs[i] != nil {
			classified(t, errs[i])
			continue
		}
		require.Equal(t, kind, r.Kind())
		require.Equal(t, payloads[i], Encode(nil, r))
	}
}

func decodeAnyManifest(t require.TestingT, b []byte, g Generation) *Manifest {
	m, err := DecodeManifest(b, g)
	if err != nil {
		classified(t, err)
		return nil
	}
	require.Equal(t, g, m.Generation())
	require.Equal(t, b, EncodeManifest(m))
	return m
}

func classified(t require.TestingT, err error) {
	if errors.Is(err, ErrCorrupt) == errors.Is(err, ErrUnsupported) {
		require.Failf(t, "an error of no class, or of two", "%v", err)
	}
}

// allocationMax is what decoding n bytes may allocate: a decoded item is at most 4 times as large as its encoding, deriving
// the generation of a manifest encodes it once more, and an error message takes a little.
func allocationMax(n int) uint64 { return uint64(8*n) + 8192 }

func allocatedBytes(fn func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	fn()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// TestHugeCounts: given a payload that claims as many items as a check against its length lets pass, when it is decoded,
// then it is refused before much is allocated.
func TestHugeCounts(t *testing.T) {
	const size = 128 << 10
	fill := func(prefix []byte, count uint64) []byte {
		b := binary.AppendUvarint(prefix, count)
		return append(b, bytes.Repeat([]byte{0xff}, size-len(b))...)
	}
	p := samples()["publish-relist"].(*Publish)
	content := encoder{}
	p.Manifest.encode(&content)
	head := append([]byte{recordFormat}, content.b[:32+1+32+32+1]...) // up to the number of groups
	whole := append([]byte{recordFormat}, content.b...)               // up to the namespace encoding
	for _, itemBytes := range []uint64{1, 3, 12, 32, 33, 35, 36} {
		for _, count := range []uint64{size / itemBytes, size/itemBytes - 10, size/itemBytes - 100} {
			decodeAny(t, KindPublish, fill(slices.Clone(head), count))
			decodeAny(t, KindPublish, fill(append(slices.Clone(head), 1, 0, 1), count))              // positions of one group
			decodeAny(t, KindPublish, fill(slices.Clone(whole), count))                              // encoding
			decodeAny(t, KindPublish, fill(append(slices.Clone(whole), 0), count))                   // spine
			decodeAny(t, KindPublish, fill(append(slices.Clone(whole), make([]byte, 34)...), count)) // pages
			decodeAny(t, KindSupersede, fill(append([]byte{recordFormat}, make([]byte, 32)...), count))
			decodeAny(t, KindRetire, fill([]byte{recordFormat, 1, 0}, count))
			decodeAny(t, KindDelete, fill([]byte{recordFormat}, count))
			decodeAny(t, KindMark, fill([]byte{recordFormat, 1}, count))
			decodeAny(t, KindPersist, fill([]byte{recordFormat}, count))
			decodeAny(t, KindPersist, fill(append([]byte{recordFormat, 1}, make([]byte, 32)...), count)) // placements
		}
	}
}

// TestOneSpelling: what could be written in two ways is read in one.
func TestOneSpelling(t *testing.T) {
	r := samples()["publish-more"].(*Publish)
	encoded := Encode(nil, r)
	at := bytes.Index(encoded, append(slices.Clone(r.Pages[0].Key[:]), 1)) + len(Key{})
	require.EqualValues(t, 1, encoded[at], "the parent is the page before: none")
	spelled := slices.Concat(encoded[:at], []byte{0}, make([]byte, len(Key{})), encoded[at+1:])
	_, err := Decode(KindPublish, spelled)
	require.ErrorIs(t, err, ErrCorrupt)
}

// TestUnknownChoices: a choice that no build writes is damage.
func TestUnknownChoices(t *testing.T) {
	for _, x := range []struct {
		kind    Kind
		payload []byte
	}{
		{KindMark, []byte{recordFormat, 0, 0}},
		{KindMark, []byte{recordFormat, 3, 0}},
		{KindRetire, []byte{recordFormat, 0, 0, 0}},
		{KindRetire, []byte{recordFormat, 1, 2, 0}},
	} {
		_, err := Decode(x.kind, x.payload)
		require.ErrorIs(t, err, ErrCorrupt, "%v %x", x.kind, x.payload)
	}
}

// TestUnknownKindsAndFormats: what another build has written is refused as such, not taken for damage.
func TestUnknownKindsAndFormats(t *testing.T) {
	for _, kind := range []Kind{0, KindMark + 1, 255} {
		_, err := Decode(kind, Encode(nil, &Delete{}))
		require.ErrorIs(t, err, ErrUnsupported)
	}
	for _, format := range []byte{0, 2, 255} {
		encoded := Encode(nil, &Delete{})
		encoded[0] = format
		_, err := Decode(KindDelete, encoded)
		require.ErrorIs(t, err, ErrUnsupported)
		m := samples()["publish-relist"].(*Publish).Manifest
		encoded = EncodeManifest(&m)
		encoded[0] = format
		_, err = DecodeManifest(encoded, m.Generation())
		require.ErrorIs(t, err, ErrUnsupported)
	}
	_, err := Apply(NewMemory(), 1, nil)
	require.ErrorIs(t, err, ErrUnsupported)
}

func drawKey(t *rapid.T) Key {
	return Key(rapid.SliceOfN(rapid.Byte(), 32, 32).Draw(t, "key"))
}

func drawKeys[K ~[32]byte](t *rapid.T) (keys []K) {
	for range rapid.IntRange(0, 3).Draw(t, "keys") {
		keys = append(keys, K(drawKey(t)))
	}
	return keys
}

func drawPlacements(t *rapid.T) (places []Placement) {
	for range rapid.IntRange(0, 3).Draw(t, "placements") {
		places = append(places, Placement{
			Segment:  rapid.Uint64Range(1, intMax).Draw(t, "segment"),
			Offset:   rapid.Int64Range(0, intMax/2).Draw(t, "offset"),
			Stored:   rapid.Int64Range(1, intMax/2).Draw(t, "stored"),
			Codec:    rapid.SampledFrom([]Codec{CodecNone, CodecZstd}).Draw(t, "codec"),
			Checksum: rapid.Uint64().Draw(t, "checksum"),
		})
	}
	return places
}

func drawBytes(t *rapid.T, label string) []byte {
	if b := rapid.SliceOfN(rapid.Byte(), 0, 200).Draw(t, label); len(b) > 0 {
		return b
	}
	return nil
}

func drawManifest(t *rapid.T) Manifest {
	m := Manifest{
		Namespace: drawKey(t), Offset: rapid.Int64Range(1, intMax).Draw(t, "offset"), Prefix: drawKey(t), Spine: drawKey(t),
		Ranks: rapid.IntRange(1, RanksMax).Draw(t, "ranks"), Meta: drawBytes(t, "meta"),
		Kind: rapid.Byte().Draw(t, "kind"), Request: string(drawBytes(t, "request")), Continues: Generation(drawKey(t)), Previous: Generation(drawKey(t)),
	}
	for range rapid.IntRange(1, 3).Draw(t, "groups") {
		g := GroupPages{PageBytes: rapid.Int64Range(1, PageBytesMax).Draw(t, "page bytes")}
		if g.Chained = rapid.Bool().Draw(t, "chained"); g.Chained {
			g.Count, g.Head = rapid.Int64Range(1, intMax).Draw(t, "count"), drawKey(t)
		} else {
			g.Count = rapid.Int64Range(1, 4).Draw(t, "count")
			last := rapid.Int64Range(0, 1000).Draw(t, "first")
			for range g.Count {
				g.Positions, g.Keys = append(g.Positions, last), append(g.Keys, drawKey(t))
				last += rapid.Int64Range(1, intMax/8).Draw(t, "step")
			}
		}
		m.Groups = append(m.Groups, g)
	}
	return m
}

func drawRecord(t *rapid.T) Record {
	switch rapid.SampledFrom([]Kind{KindPublish, KindSupersede, KindRetire, KindDelete, KindPersist, KindMark}).Draw(t, "record") {
	case KindPublish:
		r := &Publish{Manifest: drawManifest(t), Encoding: drawBytes(t, "encoding"), Spine: drawKeys[Key](t), SpineRoot: drawKey(t),
			Replaced: drawKeys[Generation](t), Supersedes: drawKeys[Generation](t)}
		before := Key{}
		for range rapid.IntRange(0, 3).Draw(t, "pages") {
			p := NewPage{Key: drawKey(t), Parent: before, Bytes: rapid.Int64Range(1, PageBytesMax).Draw(t, "bytes"), Place: drawPlacements(t)}
			if rapid.Bool().Draw(t, "other parent") {
				p.Parent = drawKey(t)
			}
			before = p.Key
			r.Pages = append(r.Pages, p)
		}
		return r
	case KindSupersede:
		return &Supersede{By: Generation(drawKey(t)), Generations: drawKeys[Generation](t)}
	case KindRetire:
		return &Retire{Reason: Reason(rapid.IntRange(1, 9).Draw(t, "reason")), Delete: rapid.Bool().Draw(t, "delete"), Generations: drawKeys[Generation](t)}
	case KindDelete:
		return &Delete{Generations: drawKeys[Generation](t)}
	case KindMark:
		return &Mark{Mark: rapid.SampledFrom([]MarkKind{MarkUsed, MarkEndGrace}).Draw(t, "mark"), Generations: drawKeys[Generation](t)}
	}
	r := &Persist{}
	for range rapid.IntRange(0, 3).Draw(t, "pages") {
		r.Pages = append(r.Pages, PlacedPage{Key: drawKey(t), Place: drawPlacements(t)})
	}
	return r
}

// TestRecordsRoundTrip: what is encoded decodes to the same record, and appending to a buffer leaves what is in it alone.
func TestRecordsRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := drawRecord(t)
		encoded := Encode([]byte("before"), r)
		require.Equal(t, "before", string(encoded[:6]))
		decoded, err := Decode(r.Kind(), encoded[6:])
		require.NoError(t, err)
		require.Equal(t, r, decoded)
		clear(encoded) // what is decoded outlives the buffer
		require.Equal(t, r, decoded)
	})
}

// TestGenerationFollowsContent_ID06: equal content is the same generation whoever published it and why; any other content
// is another one.
func TestGenerationFollowsContent_ID06(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := drawManifest(t)
		g := m.Generation()
		decoded, err := DecodeManifest(EncodeManifest(&m), g)
		require.NoError(t, err)
		require.Equal(t, &m, decoded)

		again := *decoded
		again.Kind, again.Request, again.Continues = again.Kind+1, again.Request+"x", Generation{1}
		again.Previous = Generation{2}
		require.Equal(t, g, again.Generation())

		for name, change := range map[string]func(m *Manifest){
			"namespace":  func(m *Manifest) { m.Namespace[0]++ },
			"offset":     func(m *Manifest) { m.Offset ^= 1 },
			"prefix":     func(m *Manifest) { m.Prefix[31]++ },
			"spine":      func(m *Manifest) { m.Spine[5]++ },
			"ranks":      func(m *Manifest) { m.Ranks ^= 1 },
			"meta":       func(m *Manifest) { m.Meta = append(slices.Clone(m.Meta), 0) },
			"page bytes": func(m *Manifest) { m.Groups[0].PageBytes ^= 1 },
			"groups":     func(m *Manifest) { m.Groups = append(slices.Clone(m.Groups), m.Groups[0]) },
			"pages": func(m *Manifest) {
				if m.Groups[0].Chained {
					m.Groups[0].Head[7]++
				} else {
					m.Groups[0].Keys[0][7]++
				}
			},
		} {
			other, err := DecodeManifest(EncodeManifest(&m), g)
			require.NoError(t, err)
			change(other)
			require.NotEqual(t, g, other.Generation(), name)
			_, err = DecodeManifest(EncodeManifest(other), g)
			require.ErrorIs(t, err, ErrCorrupt, name)
		}
	})
}

// TestSeedCorpora keeps the seeds of the fuzz targets in step with the samples; -rewrite writes them.
func TestSeedCorpora(t *testing.T) {
	for _, name := range sampleNames() {
		r := samples()[name]
		seeds := map[string]string{"FuzzRecord": fmt.Sprintf("go test fuzz v1\nbyte('\\x%02x')\n[]byte(%q)\n", byte(r.Kind()), Encode(nil, r))}
		if p, ok := r.(*Publish); ok {
			seeds["FuzzManifest"] = fmt.Sprintf("go test fuzz v1\n[]byte(%q)\n", EncodeManifest(&p.Manifest))
		}
		for target, seed := range seeds {
			path := filepath.Join("testdata", "fuzz", target, name)
			if rewriting() {
				require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
				require.NoError(t, os.WriteFile(path, []byte(seed), 0o600))
			}
			have, err := os.ReadFile(path)
			require.NoError(t, err)
			require.Equal(t, seed, string(have))
		}
	}
}

// FuzzRecord decodes any bytes as a record of any kind, and applies what decodes to a small catalogue.
func FuzzRecord(f *testing.F) {
	c := newCatalogue()
	q := testSpaces()[2].sequence().plus(run(1, 300)...)
	c.publish(f, q.intent(""))
	f.Fuzz(func(t *testing.T, kind byte, payload []byte) {
		decodeAny(t, Kind(kind), payload)
		r, err := Decode(Kind(kind), payload)
		if err != nil {
			return
		}
		v := c.view.Clone()
		if _, err := Apply(v, c.lsn+1, r); err == nil {
			_, err := Hash(v)
			require.NoError(t, err)
		}
	})
}

// FuzzManifest decodes any bytes as a manifest, under the generation that they would have.
func FuzzManifest(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		allocated := allocatedBytes(func() { _, err := DecodeManifest(b, Generation{}); require.Error(t, err) })
		require.LessOrEqual(t, allocated, allocationMax(len(b)))
		d := decoder{b: b, what: "manifest"}
		d.byte("format")
		m := new(Manifest)
		if m.decode(&d); d.end() == nil && b[0] == manifestFormat {
			require.NotNil(t, decodeAnyManifest(t, b, m.Generation()))
		}
	})
}
