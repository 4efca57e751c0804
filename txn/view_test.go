package txn

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// failingView fails one call and answers the others.
type failingView struct {
	View
	left int // calls that succeed before the one that fails
}

func (v *failingView) next() error {
	v.left--
	if v.left == -1 {
		return fmt.Errorf("block 7 is unreadable: %w", ErrIO)
	}
	return nil
}

func (v *failingView) Get(key []byte) ([]byte, error) {
	if err := v.next(); err != nil {
		return nil, err
	}
	return v.View.Get(key)
}

func (v *failingView) Set(key, value []byte) error {
	if err := v.next(); err != nil {
		return err
	}
	return v.View.Set(key, value)
}

func (v *failingView) Delete(key []byte) error {
	if err := v.next(); err != nil {
		return err
	}
	return v.View.Delete(key)
}

func (v *failingView) Scan(prefix []byte, fn func(key, value []byte) (bool, error)) error {
	if err := v.next(); err != nil {
		return err
	}
	return v.View.Scan(prefix, fn)
}

// TestStorageErrorsArePassedOn: given a view of which any one call fails, when a transaction is decided on or applied, or
// anything is looked up, then the error of the storage comes back: none is taken for an answer.
func TestStorageErrorsArePassedOn(t *testing.T) {
	c, q, base := hybrid(t)
	turn := func(q *sequence, meta, request string) *PublishIntent {
		in := q.intent(meta)
		in.PrefixKey, in.Manifest.Request = q.prefix, request
		return in
	}
	more := q.plus(run(1, 300)...)
	c.publish(t, turn(more, "", "a"))
	last := more.plus(run(1, 10)...)
	newest, _ := c.publish(t, turn(last, "", "b"))
	side, _ := c.publish(t, turn(more.plus(2, 2), "", "b"))
	retired, _ := c.publish(t, q.plus(9).intent(""))
	c.retire(t, false, retired)
	plain := newSpace("plain", 1, shape{tokens: 64, bytes: 1}, shape{tokens: 64, window: 64, bytes: 1}).sequence().plus(run(1, 200)...)
	c.publish(t, plain.intent(""))
	d := newDisk()

	applying := func(r Record, err error) func(v View) error {
		require.NoError(t, err)
		return func(v View) error { _, err := apply(v, c.lsn+1, r); return err }
	}
	gens := func(Generation) (bool, error) { return true, nil }
	persist, _, err := DecidePersist(c.view, []PersistIntent{{Key: q.pageAt(0, 0), Place: d.copies(1, 2, 9)}, {Key: q.pageAt(0, 1), Place: d.copies(1, 2, 9)}})
	require.NoError(t, err)
	replace, err := DecidePublish(c.view, turn(last, "other", "b"))
	require.NoError(t, err)
	require.NotEmpty(t, replace.Replaced)
	goOn, err := DecidePublish(c.view, turn(last.plus(run(1, 600)...), "", "c"))
	require.NoError(t, err)
	require.Contains(t, goOn.Supersedes, side, "a sibling")
	supersede, err := DecideSupersede(c.view, newest, []Generation{side})
	require.ErrorIs(t, err, ErrInvalid, "it is younger")
	require.Nil(t, supersede)
	supersede, err = DecideSupersede(c.view, Generation{}, []Generation{base})
	require.NoError(t, err)
	require.NotNil(t, supersede)
	retire, err := DecideRetire(c.view, []Generation{newest, base}, ReasonRequested, true, true)
	require.NoError(t, err)

	for name, fn := range map[string]func(v View) error{
		"decide publish": func(v View) error { _, err := DecidePublish(v, turn(last.plus(run(1, 600)...), "", "c")); return err },
		"decide publish continuing": func(v View) error {
			in := turn(last.plus(3), "", "c")
			in.Manifest.Continues = base
			_, err := DecidePublish(v, in)
			return err
		},
		"decide supersede": func(v View) error { _, err := DecideSupersede(v, newest, []Generation{base}); return err },
		"decide retire":    func(v View) error { _, err := DecideRetire(v, []Generation{base}, ReasonLost, true, true); return err },
		"decide delete":    func(v View) error { _, err := DecideDelete(v, []Generation{retired}); return err },
		"decide mark":      func(v View) error { _, err := DecideMark(v, MarkUsed, []Generation{base}); return err },
		"decide persist":   func(v View) error { _, _, err := DecidePersist(v, []PersistIntent{{Key: Key{1}}}); return err },
		"publish":          applying(goOn, nil),
		"replace":          applying(replace, nil),
		"supersede":        applying(supersede, nil),
		"retire":           applying(retire, nil),
		"delete":           applying(&Delete{Generations: []Generation{retired}}, nil),
		"mark":             applying(&Mark{Mark: MarkUsed, Generations: []Generation{base}}, nil),
		"persist":          applying(persist, nil),
		"lookup":           func(v View) error { _, _, err := LongestListed(v, last.plus(4).query()); return err },
		"boundary": func(v View) error {
			shapes := []AttentionShape{plain.groups[0].attention(), plain.groups[1].attention()}
			_, err := LongestBoundary(v, shapes, 64, 200, func(g int, k int64) Key { return plain.page(g, k, (k+1)*64) })
			return err
		},
		"chain pages": func(v View) error { _, err := ChainPages(v, q.pageAt(0, 4), 5); return err },
		"dependents":  func(v View) error { _, err := Dependents(v, q.pageAt(0, 0)); return err },
		"any listed":  func(v View) error { _, err := AnyListed(v, q.pageAt(0, 0)); return err },
		"check":       func(v View) error { return Check(v) },
		"hash":        func(v View) error { _, err := Hash(v); return err },
		"accounts":    func(v View) error { _, err := ReadAccounts(v); return err },
		"page":        func(v View) error { _, err := ReadPage(v, q.pageAt(0, 0)); return err },
		"state":       func(v View) error { _, err := ReadState(v, base); return err },
		"manifest":    func(v View) error { _, err := ReadManifest(v, base); return err },
		"namespace":   func(v View) error { _, err := ReadNamespace(v, q.id); return err },
		"applied":     func(v View) error { _, err := ReadApplied(v); return err },
		"namespaces":  func(v View) error { return Namespaces(v, func(Key, []byte) (bool, error) { return true, nil }) },
		"checkpoints": func(v View) error { return Checkpoints(v, gens) },
		"first goes":  func(v View) error { _, err := FirstGoes(v); return err },
		"undurable":   func(v View) error { return Undurable(v, gens) },
		"in grace":    func(v View) error { return InGrace(v, gens) },
		"states":      func(v View) error { return States(v, func(Generation, *State) (bool, error) { return true, nil }) },
		"pages":       func(v View) error { return Pages(v, func(Key, *PageEntry) (bool, error) { return true, nil }) },
		"pages under": func(v View) error {
			return PagesUnder(v, nil, func(Key, *PageEntry) (bool, error) { return true, nil })
		},
		"manifests": func(v View) error {
			return Manifests(v, func(Generation, *Manifest, error) (bool, error) { return true, nil })
		},
		"spines":   func(v View) error { return Spines(v, func(Key, SpineNode) (bool, error) { return true, nil }) },
		"segments": func(v View) error { return Segments(v, func(uint64, SegmentUse) (bool, error) { return true, nil }) },
	} {
		counting := &failingView{View: c.view.Clone(), left: 1 << 30}
		require.NoError(t, fn(counting), name)
		calls := 1<<30 - counting.left
		require.Positive(t, calls, name)
		for i := range calls {
			require.ErrorIs(t, fn(&failingView{View: c.view.Clone(), left: i}), ErrIO, "%s, call %d of %d", name, i, calls)
		}
	}
}

// TestWhatIsNotThere: the answer to a question about something unknown is nothing, not an error.
func TestWhatIsNotThere(t *testing.T) {
	for _, v := range []*Memory{NewMemory(), func() *Memory { c, _, _ := hybrid(t); return c.view }()} {
		page, err := ReadPage(v, Key{1})
		require.NoError(t, err)
		require.Nil(t, page)
		state, err := ReadState(v, Generation{1})
		require.NoError(t, err)
		require.Nil(t, state)
		manifest, err := ReadManifest(v, Generation{1})
		require.NoError(t, err)
		require.Nil(t, manifest)
		encoding, err := ReadNamespace(v, Key{1})
		require.NoError(t, err)
		require.Empty(t, encoding)
		g, err := AnyListed(v, Key{1})
		require.NoError(t, err)
		require.Zero(t, g)
		require.NoError(t, Check(v))
	}
	applied, err := ReadApplied(NewMemory())
	require.NoError(t, err)
	require.Zero(t, applied)

	c, q, _ := hybrid(t)
	encoding, err := ReadNamespace(c.view, q.id)
	require.NoError(t, err)
	require.Equal(t, q.encoding(), encoding)
	seen := 0
	require.NoError(t, Namespaces(c.view, func(ns Key, encoding []byte) (bool, error) {
		require.Equal(t, q.id, ns)
		require.Equal(t, q.encoding(), encoding)
		seen++
		return true, nil
	}))
	require.Equal(t, 1, seen)
}

// TestScansGiveEverything: each scan gives every entry of its sort in the order of keys, and ends when it is told to.
func TestScansGiveEverything(t *testing.T) {
	c, _, _ := rich(t)
	under := func(prefix ...byte) (ends []Key) {
		require.NoError(t, c.view.Scan(prefix, func(k, _ []byte) (bool, error) {
			ends = append(ends, Key(k[len(k)-32:]))
			return true, nil
		}))
		return ends
	}
	var damaged []Generation
	scans := map[string]struct {
		want []Key
		scan func(v Reader, fn func(k Key) (bool, error)) error
	}{
		"namespaces": {under(tagNamespace), func(v Reader, fn func(k Key) (bool, error)) error {
			return Namespaces(v, func(k Key, _ []byte) (bool, error) { return fn(k) })
		}},
		"checkpoints": {under(tagOrder), func(v Reader, fn func(k Key) (bool, error)) error {
			return Checkpoints(v, func(g Generation) (bool, error) { return fn(Key(g)) })
		}},
		"undurable": {under(tagWaiting), func(v Reader, fn func(k Key) (bool, error)) error {
			return Undurable(v, func(g Generation) (bool, error) { return fn(Key(g)) })
		}},
		"in grace": {under(tagGrace), func(v Reader, fn func(k Key) (bool, error)) error {
			return InGrace(v, func(g Generation) (bool, error) { return fn(Key(g)) })
		}},
		"states": {under(tagState), func(v Reader, fn func(k Key) (bool, error)) error {
			return States(v, func(g Generation, _ *State) (bool, error) { return fn(Key(g)) })
		}},
		"pages": {under(tagPage), func(v Reader, fn func(k Key) (bool, error)) error {
			return Pages(v, func(k Key, _ *PageEntry) (bool, error) { return fn(k) })
		}},
		"pages under all": {under(tagPage), func(v Reader, fn func(k Key) (bool, error)) error {
			return PagesUnder(v, nil, func(k Key, _ *PageEntry) (bool, error) { return fn(k) })
		}},
		"manifests": {under(tagManifest), func(v Reader, fn func(k Key) (bool, error)) error {
			return Manifests(v, func(g Generation, m *Manifest, damage error) (bool, error) {
				if m == nil {
					require.ErrorIs(t, damage, ErrCorrupt)
					damaged = append(damaged, g)
				}
				return fn(Key(g))
			})
		}},
		"spines": {under(tagSpine), func(v Reader, fn func(k Key) (bool, error)) error {
			return Spines(v, func(k Key, _ SpineNode) (bool, error) { return fn(k) })
		}},
	}
	for name, x := range scans {
		require.NotEmpty(t, x.want, name)
		for most := 1; most <= len(x.want); most++ {
			var have []Key
			require.NoError(t, x.scan(c.view, func(k Key) (bool, error) {
				have = append(have, k)
				return len(have) < most, nil
			}))
			require.Equal(t, x.want[:most], have, name)
		}
		require.ErrorIs(t, x.scan(c.view, func(Key) (bool, error) { return true, ErrIO }), ErrIO, name)
	}
	require.Empty(t, damaged)

	// The parts of a scan of pages are the whole of it.
	var parts []Key
	for b := range 256 {
		require.NoError(t, PagesUnder(c.view, []byte{byte(b)}, func(k Key, _ *PageEntry) (bool, error) {
			require.EqualValues(t, b, k[0])
			parts = append(parts, k)
			return true, nil
		}))
	}
	require.Equal(t, under(tagPage), parts)

	// A damaged manifest is told from the others.
	g := Generation(under(tagManifest)[1])
	require.NoError(t, c.view.Set(key1(tagManifest, g), []byte{manifestFormat, 1, 2}))
	require.NoError(t, scans["manifests"].scan(c.view, func(Key) (bool, error) { return true, nil }))
	require.Equal(t, []Generation{g}, damaged)

	roots := 0
	require.NoError(t, Spines(c.view, func(key Key, node SpineNode) (bool, error) {
		require.Equal(t, node.Index == 0, node.Parent.IsZero())
		if node.Index == 0 {
			roots++
		}
		return true, nil
	}))
	require.Equal(t, 1, roots)
}

// TestMemoryIsAView: what Memory gives back is a copy's worth: it does not change with the buffers it was made from, nor
// with clones of it.
func TestMemoryIsAView(t *testing.T) {
	m := NewMemory()
	key, value := []byte("b"), []byte("value")
	require.NoError(t, m.Set(key, value))
	require.NoError(t, m.Set([]byte("a"), nil))
	require.NoError(t, m.Set([]byte("bb"), []byte{1}))
	key[0], value[0] = 'x', 'x'
	got, err := m.Get([]byte("b"))
	require.NoError(t, err)
	require.Equal(t, "value", string(got))
	got, err = m.Get([]byte("a"))
	require.NoError(t, err)
	require.NotNil(t, got, "an empty value is not the absence of one")
	got, err = m.Get([]byte("x"))
	require.NoError(t, err)
	require.Nil(t, got)

	clone := m.Clone()
	before := hash(t, m)
	require.NoError(t, clone.Delete([]byte("b")))
	require.NoError(t, clone.Delete([]byte("b")))
	require.NoError(t, clone.Set([]byte("c"), nil))
	require.Equal(t, before, hash(t, m))
	require.Equal(t, 3, m.Len())
	require.Equal(t, 3, clone.Len())

	var keys []string
	scan := func(prefix string, most int) []string {
		keys = nil
		require.NoError(t, m.Scan([]byte(prefix), func(k, _ []byte) (bool, error) {
			keys = append(keys, string(k))
			return len(keys) < most, nil
		}))
		return keys
	}
	require.Equal(t, []string{"a", "b", "bb"}, scan("", 9))
	require.Equal(t, []string{"b", "bb"}, scan("b", 9))
	require.Equal(t, []string{"b"}, scan("b", 1))
	require.Empty(t, scan("c", 9))
	require.ErrorIs(t, m.Scan(nil, func([]byte, []byte) (bool, error) { return true, ErrIO }), ErrIO)
	require.NotEqual(t, hash(t, m), hash(t, clone))
}

func TestKeys(t *testing.T) {
	k := derive("key", Key{}, nil)
	parsed, err := ParseKey(k.String())
	require.NoError(t, err)
	require.Equal(t, k, parsed)
	require.Equal(t, k.String()[:8], k.Short())
	require.True(t, Key{}.IsZero())
	require.False(t, k.IsZero())
	for _, bad := range []string{"", "00", k.String() + "00", k.String()[:63] + "g", "no digest at all"} {
		_, err := ParseKey(bad)
		require.ErrorIs(t, err, ErrInvalid)
	}
	for _, p := range []struct{ stored, allocated int64 }{{1, 64}, {64, 64}, {65, 128}, {4095, 4096}, {4096, 4096}, {4097, 8192}, {1 << 30, 1 << 30}} {
		require.Equal(t, p.allocated, Placement{Stored: p.stored}.Allocated())
	}
}

// TestNames: everything that is printed in logs has a name, and what has none is printed as a number.
func TestNames(t *testing.T) {
	for k := KindPublish; k <= KindMark; k++ {
		require.NotContains(t, k.String(), "kind(")
	}
	require.Equal(t, "kind(0)", Kind(0).String())
	require.Equal(t, "kind(7)", (KindMark + 1).String())
	for r := ReasonRequested; r <= ReasonCleared; r++ {
		require.NotContains(t, r.String(), "reason(")
		require.NotEmpty(t, r.String())
	}
	require.Equal(t, "reason(0)", Reason(0).String())
	require.Equal(t, "reason(10)", (ReasonCleared + 1).String())
	require.Equal(t, "listed", Listed.String())
	require.Equal(t, "retired", Retired.String())
	require.Equal(t, "status(0)", Status(0).String())
}
