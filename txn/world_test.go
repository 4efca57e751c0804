package txn

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/stretchr/testify/require"
)

// space is a namespace of the tests: how its checkpoints are laid out, and digests that are computed the way the format
// wants them, each from everything before it.
type space struct {
	name   string
	id     Key
	ranks  int
	groups []shape
}

// shape is one group of a space. tokens > 0 is attention: chained if window is 0. Otherwise it is count pages of state.
type shape struct {
	tokens, window int64
	count          int64
	bytes          int64
}

func (s shape) attention() AttentionShape {
	return AttentionShape{PageTokens: s.tokens, WindowTokens: s.window}
}

func newSpace(name string, ranks int, groups ...shape) *space {
	return &space{name: name, id: derive("namespace", Key{}, []byte(name)), ranks: ranks, groups: groups}
}

func (s *space) encoding() []byte { return []byte("encoding of " + s.name) }

// attentionOnly tells whether checkpoints can be looked up at page boundaries.
func (s *space) attentionOnly() bool {
	for _, g := range s.groups {
		if g.tokens == 0 {
			return false
		}
	}
	return true
}

// step is the distance of the boundaries: all page sizes of the tests are powers of two.
func (s *space) step() (step int64) {
	for _, g := range s.groups {
		step = max(step, g.tokens)
	}
	return step
}

func derive(what string, k Key, more []byte) Key {
	b := append(make([]byte, 0, 96), what...)
	b = append(b, k[:]...)
	return Key(sha256.Sum256(append(b, more...)))
}

// sequence is a list of tokens with the digest of each of its prefixes.
type sequence struct {
	*space
	tokens  []int32
	digests []Key // digests[n]: first n tokens
}

func (s *space) sequence() *sequence {
	return &sequence{space: s, digests: []Key{derive("seed", s.id, nil)}}
}

// GoString keeps what rapid prints of a failed history short.
func (q *sequence) GoString() string {
	var runs []string
	for i, n := 0, 0; i < len(q.tokens); i += n {
		for n = 1; i+n < len(q.tokens) && q.tokens[i+n] == q.tokens[i]; n++ {
		}
		runs = append(runs, fmt.Sprintf("%d*%d", q.tokens[i], n))
	}
	return fmt.Sprintf("%s(%s)", q.name, strings.Join(runs, ", "))
}

// run gives n times the same token.
func run(token int32, n int) []int32 {
	tokens := make([]int32, n)
	for i := range tokens {
		tokens[i] = token
	}
	return tokens
}

// plus gives the sequence with more tokens at its end.
func (q *sequence) plus(tokens ...int32) *sequence {
	n := len(q.tokens)
	r := &sequence{space: q.space, tokens: append(q.tokens[:n:n], tokens...), digests: q.digests[: n+1 : n+1]}
	var b [36]byte
	for _, t := range tokens {
		copy(b[:], r.digests[len(r.digests)-1][:])
		binary.LittleEndian.PutUint32(b[32:], uint32(t))
		r.digests = append(r.digests, sha256.Sum256(b[:]))
	}
	return r
}

// first gives the sequence of the first n tokens.
func (q *sequence) first(n int64) *sequence {
	return &sequence{space: q.space, tokens: q.tokens[:n:n], digests: q.digests[: n+1 : n+1]}
}

func (q *sequence) len() int64 { return int64(len(q.tokens)) }

func (q *sequence) spine(i int64) Key { return derive("spine", q.digests[i*BlockTokens], nil) }

func (q *sequence) prefix(n int64) Key { return derive("prefix", q.digests[n], nil) }

func (q *sequence) page(group int, position, end int64) Key {
	return derive("page", q.digests[end], binary.LittleEndian.AppendUint64([]byte{byte(group)}, uint64(position)))
}

// pageAt gives the key of a page of a checkpoint at the end of the sequence.
func (q *sequence) pageAt(group int, position int64) Key {
	if t := q.groups[group].tokens; t > 0 {
		return q.page(group, position, min((position+1)*t, q.len()))
	}
	return q.page(group, position, q.len())
}

// positions gives the pages that a restore at the end of the sequence needs.
func (q *sequence) positions(group int) (first, count int64) {
	if s := q.groups[group]; s.tokens > 0 {
		return s.attention().Needed(q.len())
	}
	return 0, q.groups[group].count
}

// manifest describes the checkpoint at the end of the sequence.
func (q *sequence) manifest(meta string) *Manifest {
	m := &Manifest{Namespace: q.id, Offset: q.len(), Prefix: q.prefix(q.len()), Ranks: q.ranks, Kind: 1, Request: "request"}
	if meta != "" {
		m.Meta = []byte(meta)
	}
	m.Spine = q.spine(m.SpineIndex())
	for i, s := range q.groups {
		first, count := q.positions(i)
		g := GroupPages{PageBytes: s.bytes, Count: count}
		if s.tokens > 0 && s.window == 0 {
			g.Chained, g.Head = true, q.pageAt(i, count-1)
		} else {
			for k := first; k < first+count; k++ {
				g.Positions = append(g.Positions, k)
				g.Keys = append(g.Keys, q.pageAt(i, k))
			}
		}
		m.Groups = append(m.Groups, g)
	}
	return m
}

// pageInfo is a page that a checkpoint needs, the ones that its manifest does not name included.
type pageInfo struct {
	key, parent Key
	depth       int64
	bytes       int64
	ranks       int64
	label       string
}

// pages gives every page of the checkpoint at the end of the sequence, parents first.
func (q *sequence) pages() (pages []pageInfo) {
	for i, s := range q.groups {
		first, count := q.positions(i)
		parent := Key{}
		for k := first; k < first+count; k++ {
			p := pageInfo{key: q.pageAt(i, k), bytes: s.bytes, ranks: int64(q.ranks), label: fmt.Sprintf("%d.%d", i, k)}
			if s.tokens > 0 && s.window == 0 {
				p.parent, p.depth = parent, k
				parent = p.key
			}
			pages = append(pages, p)
		}
	}
	return pages
}

// intent asks for the publication of the checkpoint at the end of the sequence, with every page in memory.
func (q *sequence) intent(meta string) *PublishIntent {
	m := q.manifest(meta)
	return &PublishIntent{
		Manifest:  m,
		Committed: m.Ranks,
		Encoding:  q.encoding(),
		SpineKey:  q.spine,
		ChainKey:  q.pageAt,
		Have:      func(Key) ([]Placement, bool) { return nil, true },
	}
}

// query looks for prefixes of the sequence.
func (q *sequence) query() *Query {
	return &Query{Max: q.len(), Spine: q.spine, Prefix: q.prefix}
}

// disk hands out room in segments, one page copy after the other.
type disk struct{ next map[uint64]int64 }

func newDisk() *disk { return &disk{next: map[uint64]int64{}} }

// copies places a page of every rank.
func (d *disk) copies(segment uint64, ranks, bytes int64) (places []Placement) {
	for range ranks {
		p := Placement{Segment: segment, Offset: d.next[segment], Stored: bytes, Codec: CodecNone, Checksum: uint64(d.next[segment]) * 7}
		d.next[segment] += p.Allocated()
		places = append(places, p)
	}
	return places
}

// catalogue is a view with the log that made it.
type catalogue struct {
	view *Memory
	lsn  LSN
	log  []logged
}

type logged struct {
	lsn     LSN
	kind    Kind
	payload []byte
}

func newCatalogue() *catalogue { return &catalogue{view: NewMemory()} }

// commit appends a record to the log and applies it. What is applied is what the log gives back.
func (c *catalogue) commit(t require.TestingT, r Record) *Effects {
	effects := c.append(r).apply(t, c.view)
	require.NoError(t, Check(c.view))
	return effects
}

func (c *catalogue) append(r Record) *logged {
	c.lsn++
	c.log = append(c.log, logged{lsn: c.lsn, kind: r.Kind(), payload: Encode(nil, r)})
	return &c.log[len(c.log)-1]
}

func (l *logged) apply(t require.TestingT, v View) *Effects {
	r, err := Decode(l.kind, l.payload)
	require.NoError(t, err)
	effects, err := Apply(v, l.lsn, r)
	require.NoError(t, err)
	return effects
}

// publish lists the checkpoint at the end of the sequence.
func (c *catalogue) publish(t require.TestingT, in *PublishIntent) (Generation, *Effects) {
	r, err := DecidePublish(c.view, in)
	require.NoError(t, err)
	require.NotNil(t, r)
	return in.Manifest.Generation(), c.commit(t, r)
}

func (c *catalogue) retire(t require.TestingT, alsoDelete bool, gens ...Generation) *Effects {
	r, err := DecideRetire(c.view, gens, ReasonRequested, alsoDelete, true)
	require.NoError(t, err)
	return c.commit(t, r)
}

func (c *catalogue) persist(t require.TestingT, pages ...PersistIntent) *Effects {
	r, unused, err := DecidePersist(c.view, pages)
	require.NoError(t, err)
	require.Empty(t, unused)
	return c.commit(t, r)
}

func hash(t require.TestingT, v Reader) Key {
	h, err := Hash(v)
	require.NoError(t, err)
	return h
}

// listed gives the listed checkpoints in the order of eviction.
func (c *catalogue) listed(t require.TestingT) (gens []Generation) {
	require.NoError(t, Checkpoints(c.view, func(g Generation) (bool, error) {
		gens = append(gens, g)
		return true, nil
	}))
	return gens
}

// longest gives the offset of the longest listed checkpoint that is a prefix of the sequence, 0 if there is none.
func (c *catalogue) longest(t require.TestingT, q *sequence) int64 {
	_, offset, err := LongestListed(c.view, q.query())
	require.NoError(t, err)
	return offset
}
