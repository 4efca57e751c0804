package txn

import (
	"crypto/sha256"
	"fmt"
)

// BlockTokens is the number of tokens in one spine block. It is part of the format.
const BlockTokens = 512

// Bounds of a manifest, in every direction: what is decided on and what is decoded. They are part of the format.
const (
	RanksMax     = 1 << 16
	PageBytesMax = 1 << 30
)

// groupBytesMin is the least an encoded group takes: a flag, two varints, and a head or a page.
const groupBytesMin = 1 + 1 + 1 + 32

// Manifest is the immutable description of one checkpoint: which exact prefix it belongs to and which pages of every
// rank make it up.
type Manifest struct {
	Namespace Key
	Offset    int64 // tokens
	Prefix    Key   // digest of the exact prefix of Offset tokens
	Spine     Key   // digest of the whole blocks before the one it ends in: its spine node
	Ranks     int
	Groups    []GroupPages // one per group of the namespace's layout, in its order
	Meta      []byte       // the engine's own bytes

	// What follows describes how the checkpoint came to be; it is not part of its identity.
	Kind      uint8
	Request   string
	Continues Generation // the checkpoint it went on from; decided when it is published
	Previous  Generation // the longest listed proper prefix at that time
}

// GroupPages names the pages of one group. A chained group (full attention) is named by its last page; the others list
// every page.
type GroupPages struct {
	Chained   bool
	PageBytes int64   // logical size of every page of the group
	Count     int64   // pages of the group at this checkpoint; ≥ 1
	Head      Key     // chained: key of page Count−1
	Positions []int64 // not chained: strictly increasing
	Keys      []Key   // not chained: one per position
}

// SpineIndex is the number of whole blocks before the one in which the checkpoint ends. A checkpoint at a block boundary
// ends in the block before it, so that its tail is never empty.
func (m *Manifest) SpineIndex() int64 { return (m.Offset - 1) / BlockTokens }

// Tail is the number of tokens in the block in which the checkpoint ends: 1…BlockTokens.
func (m *Manifest) Tail() int { return int(m.Offset - m.SpineIndex()*BlockTokens) }

// Pages is the number of pages of one rank.
func (m *Manifest) Pages() (n int64) {
	for i := range m.Groups {
		n += m.Groups[i].Count
	}
	return n
}

// Bytes is the logical size of the checkpoint over all ranks, shared pages included.
func (m *Manifest) Bytes() (n int64) {
	for i := range m.Groups {
		n += m.Groups[i].Count * m.Groups[i].PageBytes
	}
	return n * int64(m.Ranks)
}

// Generation derives the identity of the manifest from its content: namespace, prefix, ranks, pages, meta. Who published
// it, and why, is not content, so publishing the same content again is the same generation.
func (m *Manifest) Generation() Generation {
	e := encoder{b: append(make([]byte, 0, 512), "holdfast/generation/1\x00"...)}
	m.encodeContent(&e)
	return Generation(sha256.Sum256(e.b))
}

func (m *Manifest) encodeContent(e *encoder) {
	e.key(m.Namespace)
	e.int(m.Offset)
	e.key(m.Prefix)
	e.key(m.Spine)
	e.int(int64(m.Ranks))
	e.uint(uint64(len(m.Groups)))
	for i := range m.Groups {
		g := &m.Groups[i]
		e.bool(g.Chained)
		e.int(g.PageBytes)
		e.int(g.Count)
		if g.Chained {
			e.key(g.Head)
			continue
		}
		last := int64(0)
		for j, p := range g.Positions {
			e.int(p - last)
			last = p
			e.key(g.Keys[j])
		}
	}
	e.bytes(m.Meta)
}

func (m *Manifest) encode(e *encoder) {
	m.encodeContent(e)
	e.byte(m.Kind)
	e.bytes([]byte(m.Request))
	e.key(Key(m.Continues))
	e.key(Key(m.Previous))
}

func (m *Manifest) decode(d *decoder) {
	m.Namespace = d.key("namespace")
	m.Offset = d.int("offset")
	m.Prefix = d.key("prefix")
	m.Spine = d.key("spine")
	ranks := d.int("ranks")
	n := d.count("groups", groupBytesMin)
	if d.err != nil || n == 0 || ranks < 1 || ranks > RanksMax || m.Offset < 1 {
		d.fail("manifest head")
		return
	}
	m.Ranks = int(ranks)
	m.Groups = make([]GroupPages, n)
	for i := range m.Groups {
		g := &m.Groups[i]
		g.Chained = d.bool("chained")
		g.PageBytes = d.int("page bytes")
		g.Count = d.int("page count")
		if g.PageBytes < 1 || g.PageBytes > PageBytesMax || g.Count < 1 {
			d.fail("group head")
			return
		}
		if g.Chained {
			g.Head = d.key("head")
			continue
		}
		if g.Count > int64(len(d.b)/33) {
			d.fail("page list")
			return
		}
		g.Positions, g.Keys = make([]int64, g.Count), make([]Key, g.Count)
		last := int64(0)
		for j := range g.Positions {
			step := d.int("position")
			last += step
			if (j > 0 && step == 0) || last < 0 {
				d.fail("position")
				return
			}
			g.Positions[j], g.Keys[j] = last, d.key("page key")
		}
	}
	m.Meta = d.bytes("meta")
	m.Kind = d.byte("kind")
	m.Request = string(d.bytes("request"))
	m.Continues = Generation(d.key("continues"))
	m.Previous = Generation(d.key("previous"))
}

// manifestFormat is the first byte of an encoded manifest.
const manifestFormat = 1

// EncodeManifest gives the bytes that DecodeManifest reads.
func EncodeManifest(m *Manifest) []byte {
	e := encoder{b: make([]byte, 0, 512)}
	e.byte(manifestFormat)
	m.encode(&e)
	return e.b
}

// DecodeManifest reads an encoded manifest and checks that it is the one of generation g.
func DecodeManifest(b []byte, g Generation) (*Manifest, error) {
	d := decoder{b: b, what: "manifest " + Key(g).Short()}
	if v := d.byte("format"); d.err == nil && v != manifestFormat {
		return nil, fmt.Errorf("manifest %s: format %d, this build knows %d: %w", Key(g).Short(), v, manifestFormat, ErrUnsupported)
	}
	m := new(Manifest)
	m.decode(&d)
	if err := d.end(); err != nil {
		return nil, err
	}
	if m.Generation() != g {
		return nil, fmt.Errorf("manifest %s: its content belongs to generation %s: %w", Key(g).Short(), Key(m.Generation()).Short(), ErrCorrupt)
	}
	return m, nil
}
