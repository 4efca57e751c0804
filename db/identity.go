package db

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/holdfast-db/holdfast/txn"
)

// Identity is everything that decides whether bytes may be reused. A change of one field is another namespace, and
// nothing crosses from one namespace to another. Texts are UTF-8 without NUL and are compared byte by byte: case,
// composition and trailing blanks all make a difference. The limits are the Max constants of this package.
type Identity struct {
	Model     string // human name, not empty
	Weights   string // content revision of the weights, not empty; see below
	Draft     string // content revision of the draft model's weights; "" = no draft model
	Tokenizer string // revision or digest of tokenizer and chat template, not empty
	Engine    string // engine build, not empty
	DType     string // type of the cached numbers, not empty
	Parallel  string // parallel geometry beyond the number of ranks: tp/pp/cp degrees, interleave
	Adapter   string // content revision of the adapter; "" = no adapter
	Tenant    string // tenant salt; "" is a value of its own

	// Settings holds every other setting that changes bytes. Nil and empty are the same.
	Settings map[string]string

	Layout Layout
}

// A content revision is 40 or 64 lower-case hexadecimal digits. A name that can come to mean other bytes, such as a branch,
// is refused: pages made from the old bytes would be served for the new ones. Whoever has no revision says so with this
// prefix and something after it, and answers for changing it; that is never equal to a real revision.
const unversionedPrefix = "unversioned:"

// identityText describes one text field of an Identity.
type identityText struct {
	name     string
	value    *string
	min, max int  // bytes
	revision bool // a content revision, unless it is empty
}

// texts lists the text fields of id in the order of the canonical encoding. Validating, encoding and parsing all go by
// this list, so that none of them can forget a field that another one knows.
func (id *Identity) texts() [9]identityText {
	return [...]identityText{
		{"Model", &id.Model, 1, MaxModelBytes, false},
		{"Weights", &id.Weights, 1, MaxRevisionBytes, true},
		{"Draft", &id.Draft, 0, MaxRevisionBytes, true},
		{"Tokenizer", &id.Tokenizer, 1, MaxTokenizerBytes, false},
		{"Engine", &id.Engine, 1, MaxEngineBytes, false},
		{"DType", &id.DType, 1, MaxDTypeBytes, false},
		{"Parallel", &id.Parallel, 0, MaxParallelBytes, false},
		{"Adapter", &id.Adapter, 0, MaxRevisionBytes, true},
		{"Tenant", &id.Tenant, 0, MaxTenantBytes, false},
	}
}

// validate refuses an identity that breaks a limit or a rule, naming the field.
func (id *Identity) validate() error {
	for _, t := range id.texts() {
		field := "Identity." + t.name
		if err := checkText(field, *t.value, t.min, t.max); err != nil {
			return err
		}
		if t.revision && *t.value != "" {
			if err := checkRevision(field, *t.value); err != nil {
				return err
			}
		}
	}
	if err := checkNumber("number of Identity.Settings", int64(len(id.Settings)), 0, MaxSettings); err != nil {
		return err
	}
	for _, key := range slices.Sorted(maps.Keys(id.Settings)) {
		if err := checkText("key of Identity.Settings", key, 1, MaxSettingKeyBytes); err != nil {
			return err
		}
		field := fmt.Sprintf("Identity.Settings[%.80q]", key)
		if err := checkText(field, id.Settings[key], 0, MaxSettingValueBytes); err != nil {
			return err
		}
	}
	return id.Layout.validate()
}

// checkRevision refuses a revision that is neither a digest nor marked as none.
func checkRevision(field, value string) error {
	if reason, marked := strings.CutPrefix(value, unversionedPrefix); marked && reason != "" {
		return nil
	}
	if (len(value) == 40 || len(value) == 64) && strings.Trim(value, "0123456789abcdef") == "" {
		return nil
	}
	return fmt.Errorf("db: %s %.80q: want 40 or 64 lower-case hex digits, or %q and something after it: %w",
		field, value, unversionedPrefix, ErrInvalid)
}

// clone gives a copy that shares nothing with id. No settings are always nil, so that equal identities are deeply equal.
func (id Identity) clone() Identity {
	if len(id.Settings) == 0 {
		id.Settings = nil
	}
	id.Settings = maps.Clone(id.Settings)
	id.Layout = id.Layout.clone()
	return id
}

// The canonical encoding of an identity. Integers are little endian; a text is a uint32 length and its bytes.
//
//	magic "HFNS" | version uint32 = 1
//	Model | Weights | Draft | Tokenizer | Engine | DType | Parallel | Adapter | Tenant      (texts)
//	number of settings uint32, then for each in ascending order of the key's bytes: key | value      (texts)
//	Ranks uint32
//	number of groups uint32, then for each:
//	  Name (text) | Kind uint8 | PageBytes uint64 | PageTokens uint64 | WindowTokens uint64 | Pages uint32
//
// Every part has a fixed width or states its length, so no two identities have the same encoding, and there is one way to
// write each, so no identity has two. The version also covers how sequences and pages are hashed: both start from the
// digest of these bytes.
const (
	namespaceMagic       = "HFNS"
	namespaceVersion     = 1
	namespaceHeaderBytes = len(namespaceMagic) + 4
)

// encode gives the canonical encoding of a valid identity.
func (id *Identity) encode() []byte {
	le := binary.LittleEndian
	text := func(b []byte, s string) []byte { return append(le.AppendUint32(b, uint32(len(s))), s...) }

	b := le.AppendUint32([]byte(namespaceMagic), namespaceVersion)
	for _, t := range id.texts() {
		b = text(b, *t.value)
	}
	b = le.AppendUint32(b, uint32(len(id.Settings)))
	for _, key := range slices.Sorted(maps.Keys(id.Settings)) {
		b = text(text(b, key), id.Settings[key])
	}
	b = le.AppendUint32(b, uint32(id.Layout.Ranks))
	b = le.AppendUint32(b, uint32(len(id.Layout.Groups)))
	for _, g := range id.Layout.Groups {
		b = append(text(b, g.Name), byte(g.Kind))
		b = le.AppendUint64(b, uint64(g.PageBytes))
		b = le.AppendUint64(b, uint64(g.PageTokens))
		b = le.AppendUint64(b, uint64(g.WindowTokens))
		b = le.AppendUint32(b, uint32(g.Pages))
	}
	return b
}

// Namespace is a validated Identity with its digest. It is immutable and safe for concurrent use.
type Namespace struct {
	identity Identity
	encoding []byte
	id       txn.Key
	seed     txn.Key // spine(0) of every sequence of the namespace
}

// NewNamespace validates an identity and copies it. The error is ErrInvalid or ErrTooLarge and names the field, the value
// and the limit.
func NewNamespace(id Identity) (*Namespace, error) {
	if err := id.validate(); err != nil {
		return nil, err
	}
	n := &Namespace{identity: id.clone(), encoding: id.encode()}
	n.id = sha256.Sum256(n.encoding)
	n.seed = sha256.Sum256(append([]byte{tagSeed}, n.id[:]...))
	return n, nil
}

// ID gives the SHA-256 of the canonical encoding.
func (n *Namespace) ID() txn.Key { return n.id }

// Identity gives a copy of the identity that the caller may change.
func (n *Namespace) Identity() Identity { return n.identity.clone() }

// Layout gives a copy of the layout that the caller may change.
func (n *Namespace) Layout() Layout { return n.identity.Layout.clone() }

// Encoding gives a copy of the canonical encoding, at most MaxNamespaceBytes bytes; ParseNamespace reads it.
func (n *Namespace) Encoding() []byte { return bytes.Clone(n.encoding) }

// NewSequence gives an empty sequence.
func (n *Namespace) NewSequence() *Sequence {
	return &Sequence{namespace: n, head: n.seed, near: new(atomic.Int64)}
}

// ParseNamespace reads a canonical encoding. Anything but the exact bytes that Encoding gives is ErrCorrupt; a version that
// this build does not know is ErrUnsupported. What it allocates is bounded by a small multiple of len(encoding).
func ParseNamespace(encoding []byte) (*Namespace, error) {
	r := namespaceReader{rest: encoding}
	if magic := r.take(len(namespaceMagic)); string(magic) != namespaceMagic {
		return nil, fmt.Errorf("db: namespace encoding of %d bytes: begins with %q, want %q: %w",
			len(encoding), magic, namespaceMagic, ErrCorrupt)
	}
	switch version := r.uint32(); {
	case version == 0: // or cut short
		return nil, fmt.Errorf("db: namespace encoding of %d bytes: no version: %w", len(encoding), ErrCorrupt)
	case version != namespaceVersion:
		return nil, fmt.Errorf("db: namespace encoding of version %d: this build knows %d: %w", version, namespaceVersion, ErrUnsupported)
	}
	var id Identity
	for _, t := range id.texts() {
		*t.value = r.text()
	}
	id.Settings = make(map[string]string)
	for count := r.uint32(); count > 0 && !r.short; count-- {
		key := r.text()
		id.Settings[key] = r.text()
	}
	id.Layout.Ranks = int(r.uint32())
	for count := r.uint32(); count > 0 && !r.short; count-- {
		id.Layout.Groups = append(id.Layout.Groups, Group{
			Name:         r.text(),
			Kind:         GroupKind(r.uint8()),
			PageBytes:    int64(r.uint64()),
			PageTokens:   int64(r.uint64()),
			WindowTokens: int64(r.uint64()),
			Pages:        int(r.uint32()),
		})
	}
	if r.short {
		return nil, fmt.Errorf("db: namespace encoding of %d bytes: cut short: %w", len(encoding), ErrCorrupt)
	}
	n, err := NewNamespace(id)
	if err != nil {
		return nil, fmt.Errorf("db: namespace encoding of %d bytes: %v: %w", len(encoding), err, ErrCorrupt)
	}
	// One comparison finds trailing bytes, settings that repeat or are out of order, and whatever else is not canonical.
	if !bytes.Equal(n.encoding, encoding) {
		return nil, fmt.Errorf("db: namespace encoding of %d bytes: not canonical: %w", len(encoding), ErrCorrupt)
	}
	return n, nil
}

// namespaceReader reads the parts of an encoding from the front. Past the end it gives zeros and sets short.
type namespaceReader struct {
	rest  []byte
	short bool
}

func (r *namespaceReader) take(n int) []byte {
	if n < 0 || n > len(r.rest) {
		r.rest, r.short = nil, true
		return nil
	}
	part := r.rest[:n]
	r.rest = r.rest[n:]
	return part
}

func (r *namespaceReader) uint8() uint8 {
	if b := r.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (r *namespaceReader) uint32() uint32 {
	if b := r.take(4); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

func (r *namespaceReader) uint64() uint64 {
	if b := r.take(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

func (r *namespaceReader) text() string { return string(r.take(int(r.uint32()))) }
