package db

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand"
	"reflect"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

const (
	sampleRevision = "0123456789abcdef0123456789abcdef01234567"
	otherRevision  = "0123456789abcdef0123456789abcdef0123456701234567890123456789abcd"
)

// sampleIdentity is a valid identity with something in every field; the caller owns it.
func sampleIdentity() Identity {
	return Identity{
		Model:     "example/hybrid-7b",
		Weights:   sampleRevision,
		Draft:     otherRevision,
		Tokenizer: "sha256:77",
		Engine:    "engine 1.2.3+cuda12",
		DType:     "bfloat16",
		Parallel:  "tp=2 pp=1",
		Adapter:   "unversioned:lora-a",
		Tenant:    "tenant-a",
		Settings:  map[string]string{"rope.scale": "1", "kv.layout": "NHD"},
		Layout: Layout{Ranks: 2, Groups: []Group{
			{Name: "attention:full", Kind: Attention, PageBytes: 65536, PageTokens: 16},
			{Name: "attention:window", Kind: Attention, PageBytes: 65536, PageTokens: 64, WindowTokens: 100},
			{Name: "recurrent:state", Kind: Recurrent, PageBytes: 1 << 20, Pages: 3},
			{Name: "auxiliary:logits", Kind: Auxiliary, PageBytes: 4096, Pages: 1},
		}},
	}
}

func mustNamespace(t testing.TB, id Identity) *Namespace {
	t.Helper()
	n, err := NewNamespace(id)
	require.NoError(t, err)
	return n
}

// requireRefused checks that err is of one class and no other, and says what it must.
func requireRefused(t *testing.T, err, class error, says ...string) {
	t.Helper()
	require.Error(t, err)
	for _, c := range []error{
		ErrInvalid, ErrTooLarge, ErrNotFound, ErrConflict, ErrBusy, ErrNoSpace, ErrReadOnly,
		ErrPermission, ErrLocked, ErrFenced, ErrCorrupt, ErrIO, ErrUnsupported, ErrClosed,
	} {
		require.Equal(t, c == class, errors.Is(err, c), "%v: is it %v?", err, c)
	}
	for _, s := range says {
		require.Contains(t, err.Error(), s)
	}
	require.Less(t, len(err.Error()), 600, "a message is for people")
}

// changed gives, for every field that an identity is made of, an identity that differs from sampleIdentity in that field
// alone. It finds the fields by reflection, so that a new field is asked for its effect by itself.
func changed(t *testing.T) map[string]Identity {
	t.Helper()
	result := map[string]Identity{}
	number := map[string]int64{
		"Layout.Ranks": 4, "Group.Kind": int64(Auxiliary), "Group.PageBytes": 12345, "Group.PageTokens": 32,
		"Group.WindowTokens": 200, "Group.Pages": 2,
	}
	text := map[string]string{
		"Identity.Weights": otherRevision, "Identity.Draft": sampleRevision, "Identity.Adapter": "unversioned:lora-b",
	}
	// walk changes each field of the struct that at finds in an identity.
	var walk func(path string, kind reflect.Type, at func(*Identity) reflect.Value)
	walk = func(path string, kind reflect.Type, at func(*Identity) reflect.Value) {
		for i := range kind.NumField() {
			name := kind.Name() + "." + kind.Field(i).Name
			key := path + "." + kind.Field(i).Name
			id := sampleIdentity()
			v := at(&id).Field(i)
			switch v.Kind() {
			case reflect.String:
				v.SetString(v.String() + "x")
				if s, ok := text[name]; ok {
					v.SetString(s)
				}
			case reflect.Int, reflect.Int64:
				if v.Int() == 0 && kind == reflect.TypeFor[Group]() {
					continue // must stay 0 in this kind of group
				}
				require.Contains(t, number, name)
				v.SetInt(number[name])
			case reflect.Uint8:
				if v.Uint() != uint64(Recurrent) {
					continue // the others are not valid with another kind alone
				}
				v.SetUint(uint64(number[name]))
			case reflect.Map:
				m := sampleIdentity().Settings
				m["kv.layout"] = "HND"
				v.Set(reflect.ValueOf(m))
			case reflect.Struct:
				walk(key, v.Type(), func(id *Identity) reflect.Value { return at(id).Field(i) })
				continue
			case reflect.Slice:
				for g := range v.Len() {
					walk(fmt.Sprintf("%s[%d]", key, g), v.Type().Elem(), func(id *Identity) reflect.Value { return at(id).Field(i).Index(g) })
				}
				continue
			default:
				t.Fatalf("field %s of kind %s: say here how to change it", key, v.Kind())
			}
			result[key] = id
		}
	}
	walk("Identity", reflect.TypeFor[Identity](), func(id *Identity) reflect.Value { return reflect.ValueOf(id).Elem() })

	// Changes that are not of one field.
	set := func(name string, change func(id *Identity)) {
		id := sampleIdentity()
		change(&id)
		result[name] = id
	}
	set("a setting more", func(id *Identity) { id.Settings["extra"] = "" })
	set("a setting less", func(id *Identity) { delete(id.Settings, "kv.layout") })
	set("another key", func(id *Identity) { delete(id.Settings, "kv.layout"); id.Settings["kv.layous"] = "NHD" })
	set("no settings", func(id *Identity) { id.Settings = nil })
	set("key and value moved", func(id *Identity) { delete(id.Settings, "kv.layout"); id.Settings["kv.layoutN"] = "HD" })
	set("no draft", func(id *Identity) { id.Draft = "" })
	set("no adapter", func(id *Identity) { id.Adapter = "" })
	set("no tenant", func(id *Identity) { id.Tenant = "" })
	set("text moved", func(id *Identity) { id.Tokenizer, id.Engine = id.Tokenizer+id.Engine[:1], id.Engine[1:] })
	set("group less", func(id *Identity) { id.Layout.Groups = id.Layout.Groups[:3] })
	set("groups in another order", func(id *Identity) {
		g := id.Layout.Groups
		g[0], g[1] = g[1], g[0]
	})
	return result
}

func TestAnyChangeIsAnotherNamespace_ID01(t *testing.T) {
	ids := map[txn.Key]string{}
	cases := changed(t)
	// Texts, settings, ranks; of the groups 4 names, 4 + 2 + 1 + 2 numbers and a kind; and the changes of more than one field.
	require.Len(t, cases, 9+1+1+14+11)
	cases["unchanged"] = sampleIdentity()
	for name, id := range cases {
		n := mustNamespace(t, id)
		require.Equal(t, txn.Key(sha256.Sum256(n.Encoding())), n.ID())
		require.Equal(t, n.ID(), mustNamespace(t, n.Identity()).ID(), "re-encoding is stable")
		require.NotContains(t, ids, n.ID(), "%s", name)
		ids[n.ID()] = name
	}
}

func TestSettingsHaveNoOrder_ID01(t *testing.T) {
	entries := rand.New(rand.NewSource(1)).Perm(MaxSettings)
	var want txn.Key
	for range 20 {
		id := sampleIdentity()
		id.Settings = map[string]string{}
		rand.Shuffle(len(entries), func(i, j int) { entries[i], entries[j] = entries[j], entries[i] })
		for _, e := range entries {
			id.Settings[fmt.Sprintf("key %d", e)] = fmt.Sprint(e * e)
		}
		got := mustNamespace(t, id).ID()
		if want.IsZero() {
			want = got
		}
		require.Equal(t, want, got)
	}

	none, empty := sampleIdentity(), sampleIdentity()
	none.Settings, empty.Settings = nil, map[string]string{}
	require.Equal(t, mustNamespace(t, none).ID(), mustNamespace(t, empty).ID())
}

func TestRequiredFieldsAreRequired_ID02(t *testing.T) {
	for field, clear := range map[string]func(id *Identity){
		"Identity.Model":     func(id *Identity) { id.Model = "" },
		"Identity.Weights":   func(id *Identity) { id.Weights = "" },
		"Identity.Tokenizer": func(id *Identity) { id.Tokenizer = "" },
		"Identity.Engine":    func(id *Identity) { id.Engine = "" },
		"Identity.DType":     func(id *Identity) { id.DType = "" },
		"Layout.Ranks":       func(id *Identity) { id.Layout.Ranks = 0 },
		"Layout.Groups":      func(id *Identity) { id.Layout.Groups = nil },
	} {
		id := sampleIdentity()
		clear(&id)
		n, err := NewNamespace(id)
		require.Nil(t, n)
		requireRefused(t, err, ErrInvalid, field)
	}

	id := Identity{Model: "m", Weights: sampleRevision, Tokenizer: "t", Engine: "e", DType: "d", Layout: attentionLayout(16)}
	mustNamespace(t, id) // and nothing else is
}

func TestRevisionsAreDigestsOrMarked_ID02(t *testing.T) {
	fields := map[string]func(id *Identity) *string{
		"Identity.Weights": func(id *Identity) *string { return &id.Weights },
		"Identity.Draft":   func(id *Identity) *string { return &id.Draft },
		"Identity.Adapter": func(id *Identity) *string { return &id.Adapter },
	}
	for field, at := range fields {
		for _, bad := range []string{
			"main", "v1.0", "latest",
			sampleRevision[:39], sampleRevision + "0", otherRevision[:63], otherRevision + "0",
			strings.ToUpper(sampleRevision), sampleRevision[:39] + "g", " " + sampleRevision[1:],
			"unversioned", "unversioned:", "Unversioned:x", " unversioned:x",
		} {
			id := sampleIdentity()
			*at(&id) = bad
			_, err := NewNamespace(id)
			requireRefused(t, err, ErrInvalid, field, fmt.Sprintf("%q", bad), "unversioned:")
		}
		for _, good := range []string{sampleRevision, otherRevision, "unversioned:main", "unversioned: "} {
			id := sampleIdentity()
			*at(&id) = good
			mustNamespace(t, id)
		}
	}
}

// Identity part: seven changed fields give seven other namespaces and no key in common; an unversioned identity is never
// equal to a real one.
func TestChangedBuildSharesNothing_B34(t *testing.T) {
	keysOf := func(id Identity) []txn.Key {
		n := mustNamespace(t, id)
		s := n.NewSequence()
		require.NoError(t, s.Append(ramp(0, 1000)))
		return []txn.Key{n.ID(), s.spine(0), s.spine(1), s.prefix(1000), s.pageKey(0, 61, 992), s.pageKey(2, 0, 1000)}
	}
	seen := map[txn.Key]string{}
	add := func(name string, id Identity) {
		for i, k := range keysOf(id) {
			require.NotContains(t, seen, k, "%s, key %d", name, i)
			seen[k] = name
		}
	}
	base := sampleIdentity()
	base.Adapter = sampleRevision
	require.Equal(t, keysOf(base), keysOf(base.clone()))
	add("base", base)
	for name, change := range map[string]func(id *Identity){
		"weights under the same name": func(id *Identity) { id.Weights = otherRevision },
		"tokenizer or template":       func(id *Identity) { id.Tokenizer = "sha256:78" },
		"dtype":                       func(id *Identity) { id.DType = "fp8_e4m3" },
		"page size":                   func(id *Identity) { id.Layout.Groups[0].PageTokens = 32 },
		"engine build":                func(id *Identity) { id.Engine += "+1" },
		"rank count":                  func(id *Identity) { id.Layout.Ranks = 1 },
		"adapter":                     func(id *Identity) { id.Adapter = otherRevision },
		"marked unversioned":          func(id *Identity) { id.Weights = "unversioned:" + sampleRevision },
	} {
		id := base.clone()
		change(&id)
		add(name, id)
	}

	id := base.clone()
	id.Weights = ""
	_, err := NewNamespace(id)
	requireRefused(t, err, ErrInvalid, "Identity.Weights")
}

// Identity part: legal ids of every kind are accepted and distinct wherever they stand, and what names files has one length.
func TestLegalIdsAreDistinct_B36(t *testing.T) {
	long := "/" + strings.Repeat("models/", 18) + "seven.x"
	require.Len(t, long, 134)
	legal := []string{
		long, strings.Repeat("s", 128), "a/b", "a-SEP-b", "a_b", `a\b`, "@@x", "@x", ".", "..", "...", "CON", "con", "NUL", "CON.txt",
		"x", "x.", "x ", " x", "x\t", "x\n", "Model", "model", "MODEL", "\u00e9", "e\u0301", "😀", "😀\ufe0f", "\u200b", "%2e", "a%2fb", "-",
	}
	fields := map[string]func(id *Identity, s string){
		"Model":     func(id *Identity, s string) { id.Model = s },
		"Tokenizer": func(id *Identity, s string) { id.Tokenizer = s },
		"Engine":    func(id *Identity, s string) { id.Engine = s },
		"DType":     func(id *Identity, s string) { id.DType = s },
		"Parallel":  func(id *Identity, s string) { id.Parallel = s },
		"Tenant":    func(id *Identity, s string) { id.Tenant = s },
		"key":       func(id *Identity, s string) { id.Settings = map[string]string{s: ""} },
		"value":     func(id *Identity, s string) { id.Settings = map[string]string{"k": s} },
		"group":     func(id *Identity, s string) { id.Layout.Groups[0].Name = s },
		"weights":   func(id *Identity, s string) { id.Weights = unversionedPrefix + s },
	}
	seen := map[txn.Key]string{}
	for field, set := range fields {
		for _, s := range legal {
			id := sampleIdentity()
			set(&id, s)
			n := mustNamespace(t, id)
			require.NotContains(t, seen, n.ID(), "%s %q", field, s)
			seen[n.ID()] = field + s
			require.Len(t, n.ID().String(), 64, "fits any file system")
			again, err := ParseNamespace(n.Encoding())
			require.NoError(t, err)
			require.Equal(t, id, again.Identity())
		}
	}
}

func TestIllegalIdsAreRefused_B36(t *testing.T) {
	type field struct {
		name     string
		set      func(id *Identity, s string)
		min, max int
	}
	fields := []field{
		{"Identity.Model", func(id *Identity, s string) { id.Model = s }, 1, 1024},
		{"Identity.Tokenizer", func(id *Identity, s string) { id.Tokenizer = s }, 1, 1024},
		{"Identity.Engine", func(id *Identity, s string) { id.Engine = s }, 1, 1024},
		{"Identity.DType", func(id *Identity, s string) { id.DType = s }, 1, 256},
		{"Identity.Parallel", func(id *Identity, s string) { id.Parallel = s }, 0, 1024},
		{"Identity.Tenant", func(id *Identity, s string) { id.Tenant = s }, 0, 256},
		{"key of Identity.Settings", func(id *Identity, s string) { id.Settings = map[string]string{s: ""} }, 1, 256},
		{`Identity.Settings["k"]`, func(id *Identity, s string) { id.Settings = map[string]string{"k": s} }, 0, 4096},
		{"Layout.Groups[0].Name", func(id *Identity, s string) { id.Layout.Groups[0].Name = s }, 1, 256},
	}
	unversioned := func(s string) string {
		if s == "" {
			return ""
		}
		return unversionedPrefix + s
	}
	fields = append(fields,
		field{"Identity.Weights", func(id *Identity, s string) { id.Weights = unversioned(s) }, 1, 1024 - len(unversionedPrefix)},
		field{"Identity.Draft", func(id *Identity, s string) { id.Draft = unversioned(s) }, 0, 1024 - len(unversionedPrefix)},
		field{"Identity.Adapter", func(id *Identity, s string) { id.Adapter = unversioned(s) }, 0, 1024 - len(unversionedPrefix)},
	)
	try := func(f field, s string) error {
		id := sampleIdentity()
		f.set(&id, s)
		_, err := NewNamespace(id)
		return err
	}
	for _, f := range fields {
		t.Run(f.name, func(t *testing.T) {
			require.NoError(t, try(f, strings.Repeat("x", max(f.min, 1))))
			require.NoError(t, try(f, strings.Repeat("x", f.max)))
			require.NoError(t, try(f, strings.Repeat("é", f.max/2)), "limits are in bytes")
			requireRefused(t, try(f, strings.Repeat("x", f.max+1)), ErrInvalid, f.name, "xxx", "want")
			requireRefused(t, try(f, strings.Repeat("é", f.max/2+1)), ErrInvalid, f.name, "éé", "want")
			requireRefused(t, try(f, strings.Repeat("x", 1<<20)), ErrInvalid, f.name, "1048", "want")
			requireRefused(t, try(f, "a\x00b"), ErrInvalid, f.name, `a\x00b`)
			requireRefused(t, try(f, "\x00"), ErrInvalid, f.name, `\x00`)
			requireRefused(t, try(f, "a\xff"), ErrInvalid, f.name, `a\xff`)
			requireRefused(t, try(f, "\xed\xa0\x80"), ErrInvalid, f.name, `\xed`) // a surrogate
			if f.min == 0 {
				require.NoError(t, try(f, ""))
			} else {
				requireRefused(t, try(f, ""), ErrInvalid, f.name)
			}
		})
	}

	id := sampleIdentity()
	for i := range MaxSettings + 1 {
		id.Settings[fmt.Sprint(i)] = ""
	}
	_, err := NewNamespace(id)
	requireRefused(t, err, ErrTooLarge, "Identity.Settings", fmt.Sprint(MaxSettings))
}

func TestNamespaceSharesNothingWithItsCallers(t *testing.T) {
	id := sampleIdentity()
	n := mustNamespace(t, id)
	want := n.ID()

	scribble := func(id Identity) {
		id.Settings["kv.layout"] = "scribbled"
		id.Layout.Groups[0].Name = "scribbled"
	}
	scribble(id)
	scribble(n.Identity())
	n.Layout().Groups[0].Name = "scribbled"
	clear(n.Encoding())

	require.Equal(t, sampleIdentity(), n.Identity())
	require.Equal(t, sampleIdentity().Layout, n.Layout())
	require.Equal(t, want, txn.Key(sha256.Sum256(n.Encoding())))
	require.Equal(t, want, n.ID())
}

// largestIdentity has every field at its limit.
func largestIdentity() Identity {
	revision := unversionedPrefix + strings.Repeat("r", MaxRevisionBytes-len(unversionedPrefix))
	id := Identity{
		Model: strings.Repeat("m", MaxModelBytes), Weights: revision, Draft: revision, Adapter: revision,
		Tokenizer: strings.Repeat("t", MaxTokenizerBytes), Engine: strings.Repeat("e", MaxEngineBytes),
		DType: strings.Repeat("d", MaxDTypeBytes), Parallel: strings.Repeat("p", MaxParallelBytes),
		Tenant: strings.Repeat("s", MaxTenantBytes), Settings: map[string]string{}, Layout: Layout{Ranks: MaxRanks},
	}
	for i := range MaxSettings {
		id.Settings[fmt.Sprintf("%0*d", MaxSettingKeyBytes, i)] = strings.Repeat("v", MaxSettingValueBytes)
	}
	for i := range MaxGroups {
		id.Layout.Groups = append(id.Layout.Groups, Group{
			Name: fmt.Sprintf("%0*d", MaxGroupNameBytes, i), Kind: Recurrent, PageBytes: MaxPageBytes, Pages: MaxGroupPages,
		})
	}
	return id
}

func TestLargestIdentity(t *testing.T) {
	n := mustNamespace(t, largestIdentity())
	require.Len(t, n.Encoding(), MaxNamespaceBytes)
	again, err := ParseNamespace(n.Encoding())
	require.NoError(t, err)
	require.Equal(t, largestIdentity(), again.Identity())

	s := n.NewSequence()
	require.NoError(t, s.Append(ramp(0, 1)))
	require.False(t, s.pageKey(MaxGroups-1, MaxGroupPages-1, 1).IsZero())
}

func TestParseNamespaceRefusesWhatIsNotCanonical(t *testing.T) {
	good := mustNamespace(t, sampleIdentity()).Encoding()
	edit := func(change func(b []byte) []byte) []byte { return change(bytes.Clone(good)) }
	refused := func(b []byte, class error, says ...string) {
		t.Helper()
		n, err := ParseNamespace(b)
		require.Nil(t, n)
		requireRefused(t, err, class, says...)
	}

	for cut := range good {
		refused(good[:cut], ErrCorrupt)
	}
	refused(nil, ErrCorrupt)
	refused(append(bytes.Clone(good), 0), ErrCorrupt, "not canonical")
	refused(edit(func(b []byte) []byte { b[0] = 'h'; return b }), ErrCorrupt, "HFNS")
	refused(edit(func(b []byte) []byte { b[4] = 0; return b }), ErrCorrupt, "version")
	refused(edit(func(b []byte) []byte { b[4] = 2; return b }), ErrUnsupported, "2")
	refused(edit(func(b []byte) []byte { b[7] = 1; return b }), ErrUnsupported, "16777217")
	refused(edit(func(b []byte) []byte { b[11] = 0xff; return b }), ErrCorrupt, "cut short")

	settings := bytes.Index(good, []byte("kv.layout")) - 4
	first := good[settings : settings+4+9+4+3]
	second := good[settings+len(first) : settings+len(first)+4+10+4+1]
	require.Contains(t, string(second), "rope.scale")
	swapped := bytes.Replace(good, append(bytes.Clone(first), second...), append(bytes.Clone(second), first...), 1)
	refused(swapped, ErrCorrupt, "not canonical")
	refused(bytes.Replace(good, second, first, 1), ErrCorrupt, "not canonical") // a key twice

	ranks := settings + len(first) + len(second)
	withUint32 := func(at int, v uint32) []byte {
		return edit(func(b []byte) []byte { binary.LittleEndian.PutUint32(b[at:], v); return b })
	}
	refused(withUint32(settings-4, 1<<32-1), ErrCorrupt) // number of settings
	refused(withUint32(ranks, 1<<31), ErrCorrupt, "Ranks")
	refused(withUint32(ranks+4, 1<<32-1), ErrCorrupt, "cut short") // number of groups
	refused(bytes.Replace(good, []byte(sampleRevision), []byte(strings.ToUpper(sampleRevision)), 1), ErrCorrupt, "Weights")
}

func FuzzParseNamespace(f *testing.F) {
	good := mustNamespace(f, sampleIdentity()).Encoding()
	f.Add(good)
	f.Add(good[:len(good)/2])
	f.Add([]byte(namespaceMagic + "\x02\x00\x00\x00"))
	minimal := Identity{Model: "m", Weights: sampleRevision, Tokenizer: "t", Engine: "e", DType: "d", Layout: attentionLayout(1)}
	f.Add(mustNamespace(f, minimal).Encoding())
	f.Fuzz(func(t *testing.T, encoding []byte) {
		n, err := ParseNamespace(encoding)
		if err != nil {
			require.Nil(t, n)
			require.True(t, errors.Is(err, ErrCorrupt) != errors.Is(err, ErrUnsupported), "%v", err)
			return
		}
		require.Equal(t, encoding, n.Encoding())
		require.Equal(t, txn.Key(sha256.Sum256(encoding)), n.ID())
		again, err := NewNamespace(n.Identity())
		require.NoError(t, err)
		require.Equal(t, n, again)
	})
}

// The golden vectors: identities to ids, token sequences to digests and page keys. They fix the format; a difference means
// that every database written before is lost. After a change of format on purpose: go test ./db -run TestGolden -rewrite.
//
//	identity [encoding]          the input is JSON; gives the id and, if asked, the encoding in hex
//	append from=N count=N        tokens N, N+1, …; gives the length
//	media content=TEXT token=N count=N
//	                             a span of the same token; its content is the SHA-256 of the text
//	fork n=N                     goes on with a fork
//	spine i=N | prefix n=N | page group=N position=N end=N
func TestGoldenIdentity_ID01_ID07_MMR02(t *testing.T) {
	datadriven.Walk(t, "testdata/identity", func(t *testing.T, path string) {
		var n *Namespace
		var s *Sequence
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			arg := func(name string) (v int64) {
				d.ScanArgs(t, name, &v)
				return v
			}
			switch d.Cmd {
			case "identity":
				var id Identity
				decoder := json.NewDecoder(strings.NewReader(d.Input))
				decoder.DisallowUnknownFields()
				require.NoError(t, decoder.Decode(&id))
				n = mustNamespace(t, id)
				s = n.NewSequence()
				out := fmt.Sprintf("id %s\n", n.ID())
				if d.HasArg("encoding") {
					out += hex.Dump(n.Encoding())
				}
				return out
			case "append":
				require.NoError(t, s.Append(ramp(int32(arg("from")), int(arg("count")))))
				return fmt.Sprintf("length %d\n", s.Len())
			case "media":
				var text string
				d.ScanArgs(t, "content", &text)
				tokens := make([]int32, arg("count"))
				for i := range tokens {
					tokens[i] = int32(arg("token"))
				}
				require.NoError(t, s.AppendMedia(sha256.Sum256([]byte(text)), tokens))
				return fmt.Sprintf("length %d\n", s.Len())
			case "fork":
				var err error
				s, err = s.Fork(arg("n"))
				require.NoError(t, err)
				return fmt.Sprintf("length %d\n", s.Len())
			case "spine":
				return s.spine(arg("i")).String() + "\n"
			case "prefix":
				return s.prefix(arg("n")).String() + "\n"
			case "page":
				return s.pageKey(int(arg("group")), arg("position"), arg("end")).String() + "\n"
			}
			d.Fatalf(t, "unknown command")
			return ""
		})
	})
}
