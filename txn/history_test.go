package txn

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"
)

// TestHistories runs the histories under testdata/history. "go test -rewrite" writes what happens over what was expected.
//
//	namespace NAME ranks=N            groups, one a line: chained tokens= bytes=, sliding tokens= window= bytes=, state pages= bytes=
//	publish NAME in=NAMESPACE seq=(TOKEN*COUNT, ...)
//	        committed=N  durable  meta=TEXT  disk=SEGMENT  missing=(GROUP.POSITION, ...)  supersedes=(NAME, ...)
//	        request=NAME  kind=prompt|response|tail|instruction  continues=NAME: any of these asks the supersession policy
//	        bytes=(GROUP, BYTES), count=(GROUP, PAGES), without=GROUP, ranks=N: the manifest says so, whatever the namespace does
//	retire NAME ... [delete] [strict]     delete NAME ...     supersede NAME ... by=NAME     current NAME ...
//	used NAME ...                         end-grace NAME ...
//	persist PAGE ... to=SEGMENT [move]    persist all to=SEGMENT: what has no disk copy
//	lookup, prefixes, boundary  in=NAMESPACE seq=(...)        list, accounts, dump, check, hash
//
// A page is called after the checkpoint that brought it: a:0.3 is the page at position 3 of group 0 that a brought.
func TestHistories(t *testing.T) {
	datadriven.Walk(t, "testdata/history", func(t *testing.T, path string) {
		h := &history{catalogue: newCatalogue(), disk: newDisk(), spaces: map[string]*space{}, names: map[string]Generation{}, keys: map[string]Key{}}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string { return h.run(t, d) })
	})
}

type history struct {
	*catalogue
	disk   *disk
	spaces map[string]*space
	names  map[string]Generation
	keys   map[string]Key // by label
	labels []string       // in the order in which they were given
}

func (h *history) label(name string, key Key) {
	if _, ok := h.keys[name]; !ok && h.nameOf(key) == "" {
		h.keys[name] = key
		h.labels = append(h.labels, name)
	}
}

func (h *history) nameOf(key Key) string {
	for _, name := range h.labels {
		if h.keys[name] == key {
			return name
		}
	}
	return ""
}

// words puts labels in the place of digests.
func (h *history) words(s string) string {
	for _, name := range h.labels {
		s = strings.ReplaceAll(s, h.keys[name].String(), name)
		s = strings.ReplaceAll(s, h.keys[name].Short(), name)
	}
	return s
}

func (h *history) run(t *testing.T, d *datadriven.TestData) string {
	var out strings.Builder
	switch d.Cmd {
	case "namespace":
		h.namespace(t, d)
	case "publish":
		h.publish(t, d, &out)
	case "retire":
		r, err := DecideRetire(h.view, h.generations(t, d), ReasonRequested, d.HasArg("delete"), d.HasArg("strict"))
		h.decided(t, &out, r, r == nil, err)
	case "delete":
		r, err := DecideDelete(h.view, h.generations(t, d))
		h.decided(t, &out, r, r == nil, err)
	case "supersede", "current":
		by := Generation{}
		if d.Cmd == "supersede" {
			by = h.generation(t, value(t, d, "by"))
		}
		r, err := DecideSupersede(h.view, by, h.generations(t, d))
		h.decided(t, &out, r, r == nil, err)
	case "used", "end-grace":
		mark := map[string]MarkKind{"used": MarkUsed, "end-grace": MarkEndGrace}[d.Cmd]
		r, err := DecideMark(h.view, mark, h.generations(t, d))
		h.decided(t, &out, r, r == nil, err)
	case "persist":
		h.persistPages(t, d, &out)
	case "lookup":
		q := h.sequence(t, d)
		g, offset, err := LongestListed(h.view, q.query())
		require.NoError(t, err)
		if g.IsZero() {
			out.WriteString("miss")
		} else {
			fmt.Fprintf(&out, "%s@%d", h.nameOf(Key(g)), offset)
		}
	case "prefixes":
		q := h.sequence(t, d)
		require.NoError(t, ListedPrefixes(h.view, q.query(), func(g Generation, offset int64) bool {
			fmt.Fprintf(&out, "%s@%d\n", h.nameOf(Key(g)), offset)
			return true
		}))
	case "boundary":
		h.boundary(t, d, &out)
	case "list":
		for _, g := range h.listed(t) {
			h.describe(t, &out, g)
		}
	case "accounts":
		h.accounts(t, &out)
	case "dump":
		h.dump(t, &out)
	case "check":
		require.NoError(t, Check(h.view))
		out.WriteString("ok")
	case "hash":
		out.WriteString(hash(t, h.view).String())
	default:
		d.Fatalf(t, "unknown command")
	}
	return out.String()
}

func value(t *testing.T, d *datadriven.TestData, key string) string {
	arg, ok := d.Arg(key)
	if !ok || len(arg.Vals) != 1 {
		d.Fatalf(t, "want %s=…", key)
	}
	return arg.Vals[0]
}

func number(t *testing.T, d *datadriven.TestData, s string) int64 {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		d.Fatalf(t, "%v", err)
	}
	return n
}

func (h *history) namespace(t *testing.T, d *datadriven.TestData) {
	name := d.CmdArgs[0].Key
	var groups []shape
	for line := range strings.Lines(d.Input) {
		kind, args, err := datadriven.ParseLine(line)
		require.NoError(t, err)
		fields := map[string]int64{}
		for _, a := range args {
			fields[a.Key] = number(t, d, a.Vals[0])
		}
		s := shape{tokens: fields["tokens"], window: fields["window"], count: fields["pages"], bytes: fields["bytes"]}
		if want := map[string]bool{"chained": s.tokens > 0 && s.window == 0, "sliding": s.window > 0, "state": s.count > 0}; !want[kind] {
			d.Fatalf(t, "group %q", line)
		}
		groups = append(groups, s)
	}
	h.spaces[name] = newSpace(name, int(number(t, d, value(t, d, "ranks"))), groups...)
	h.label(name, h.spaces[name].id)
}

func (h *history) sequence(t *testing.T, d *datadriven.TestData) *sequence {
	s := h.spaces[value(t, d, "in")]
	if s == nil {
		d.Fatalf(t, "unknown namespace")
	}
	q := s.sequence()
	arg, _ := d.Arg("seq")
	for _, part := range arg.Vals {
		token, count, found := strings.Cut(part, "*")
		if !found {
			count = "1"
		}
		q = q.plus(run(int32(number(t, d, token)), int(number(t, d, count)))...)
	}
	return q
}

func (h *history) generation(t *testing.T, name string) Generation {
	g, ok := h.names[name]
	if !ok {
		g = Generation(derive("unknown", Key{}, []byte(name)))
		h.label(name, Key(g))
		h.names[name] = g
	}
	return g
}

func (h *history) generations(t *testing.T, d *datadriven.TestData) (gens []Generation) {
	for _, a := range d.CmdArgs {
		if len(a.Vals) == 0 && a.Key != "delete" && a.Key != "strict" {
			gens = append(gens, h.generation(t, a.Key))
		}
	}
	return gens
}

func (h *history) publish(t *testing.T, d *datadriven.TestData, out *strings.Builder) {
	name := d.CmdArgs[0].Key
	q := h.sequence(t, d)
	meta := ""
	if d.HasArg("meta") {
		meta = value(t, d, "meta")
	}
	in := q.intent(meta)
	if d.HasArg("committed") {
		in.Committed = int(number(t, d, value(t, d, "committed")))
	}
	if d.HasArg("ranks") {
		in.Manifest.Ranks = int(number(t, d, value(t, d, "ranks")))
		in.Committed = in.Manifest.Ranks
	}
	if a, ok := d.Arg("bytes"); ok {
		in.Manifest.Groups[number(t, d, a.Vals[0])].PageBytes = number(t, d, a.Vals[1])
	}
	if a, ok := d.Arg("count"); ok {
		in.Manifest.Groups[number(t, d, a.Vals[0])].Count = number(t, d, a.Vals[1])
	}
	if d.HasArg("without") { // a group
		i := int(number(t, d, value(t, d, "without")))
		in.Manifest.Groups = slices.Delete(in.Manifest.Groups, i, i+1)
	}
	if a, ok := d.Arg("supersedes"); ok {
		for _, old := range a.Vals {
			in.Supersedes = append(in.Supersedes, h.generation(t, old))
		}
	}
	if d.HasArg("request") || d.HasArg("kind") || d.HasArg("continues") {
		in.PrefixKey = q.prefix
		in.Manifest.Request = ""
	}
	if d.HasArg("request") {
		in.Manifest.Request = value(t, d, "request")
	}
	if d.HasArg("kind") {
		in.Manifest.Kind = map[string]uint8{"prompt": PromptKind, "response": 2, "tail": 3, "instruction": InstructionKind}[value(t, d, "kind")]
	}
	if d.HasArg("continues") {
		in.Manifest.Continues = h.generation(t, value(t, d, "continues"))
	}
	in.Durable = d.HasArg("durable")
	missing, _ := d.Arg("missing")
	pages := q.pages()
	in.Have = func(key Key) ([]Placement, bool) {
		i := slices.IndexFunc(pages, func(p pageInfo) bool { return p.key == key })
		if i < 0 || slices.Contains(missing.Vals, pages[i].label) {
			return nil, false
		}
		p := pages[i]
		if !d.HasArg("disk") {
			return nil, true
		}
		return h.disk.copies(uint64(number(t, d, value(t, d, "disk"))), p.ranks, p.bytes), true
	}
	labels := len(h.labels)
	h.label(name, Key(in.Manifest.Generation()))
	for _, p := range pages {
		h.label(name+":"+p.label, p.key)
	}
	for i := in.Manifest.SpineIndex(); i >= 0; i-- {
		h.label(fmt.Sprintf("%s/%d", name, i), q.spine(i))
	}
	h.label(name+"@", in.Manifest.Prefix)
	r, err := DecidePublish(h.view, in)
	h.decided(t, out, r, r == nil, err)
	if err == nil {
		require.Contains(t, []Generation{{}, in.Manifest.Generation()}, h.names[name], "%s names another checkpoint", name)
		h.names[name] = in.Manifest.Generation()
		return
	}
	for _, name := range h.labels[labels:] { // what was refused has no name
		delete(h.keys, name)
	}
	h.labels = h.labels[:labels]
}

func (h *history) persistPages(t *testing.T, d *datadriven.TestData, out *strings.Builder) {
	segment := uint64(number(t, d, value(t, d, "to")))
	var keys []Key
	if d.HasArg("all") {
		require.NoError(t, h.view.Scan([]byte{tagPage}, func(k, b []byte) (bool, error) {
			var p PageEntry
			require.NoError(t, p.unmarshal(b))
			if len(p.Place) == 0 {
				keys = append(keys, Key(k[1:]))
			}
			return true, nil
		}))
	}
	for _, a := range d.CmdArgs {
		if strings.Contains(a.Key, ":") {
			keys = append(keys, h.keys[a.Key])
		}
	}
	var pages []PersistIntent
	for _, key := range keys {
		p, err := ReadPage(h.view, key)
		require.NoError(t, err)
		if p == nil {
			p = &PageEntry{Ranks: 1, Bytes: 1}
		}
		pages = append(pages, PersistIntent{Key: key, Place: h.disk.copies(segment, p.Ranks, p.Bytes), Moved: d.HasArg("move")})
	}
	r, unused, err := DecidePersist(h.view, pages)
	for _, u := range unused {
		fmt.Fprintf(out, "unused %s\n", h.nameOf(u.Key))
	}
	h.decided(t, out, r, r == nil, err)
}

func (h *history) boundary(t *testing.T, d *datadriven.TestData, out *strings.Builder) {
	q := h.sequence(t, d)
	var shapes []AttentionShape
	for _, s := range q.groups {
		shapes = append(shapes, s.attention())
	}
	n, err := LongestBoundary(h.view, shapes, q.step(), q.len(), func(group int, position int64) Key {
		return q.page(group, position, (position+1)*q.groups[group].tokens)
	})
	require.NoError(t, err)
	fmt.Fprintf(out, "%d", n)
}

// decided prints a refusal, or commits a record and prints what it did.
func (h *history) decided(t *testing.T, out *strings.Builder, r Record, none bool, err error) {
	before := hash(t, h.view)
	if err != nil {
		var v *Violation
		if errors.As(err, &v) {
			fmt.Fprintf(out, "refused by %s: ", v.Invariant)
			err = fmt.Errorf("%s: %w", v.Detail, v.Class)
		} else {
			out.WriteString("refused: ")
		}
		out.WriteString(h.words(err.Error()))
		require.Equal(t, before, hash(t, h.view))
		return
	}
	if none {
		out.WriteString("nothing to do")
		return
	}
	if p, ok := r.(*Publish); ok {
		fmt.Fprintf(out, "new: %d blocks;", len(p.Spine))
		for _, page := range p.Pages {
			fmt.Fprintf(out, " %s", h.nameOf(page.Key))
		}
		out.WriteString("\n")
		if g := p.Manifest.Continues; !g.IsZero() {
			fmt.Fprintf(out, "continues %s\n", h.nameOf(Key(g)))
		}
		for _, g := range p.Supersedes {
			fmt.Fprintf(out, "supersedes %s\n", h.nameOf(Key(g)))
		}
	}
	effects := h.commit(t, r)
	fmt.Fprintf(out, "LSN %d: %v, %d bytes\n", h.lsn, r.Kind(), len(h.log[len(h.log)-1].payload))
	h.effects(out, effects)
}

func (h *history) effects(out *strings.Builder, e *Effects) {
	for _, x := range []struct {
		what string
		gens []Generation
	}{{"listed", e.Listed}, {"retired", e.Retired}, {"deleted", e.Deleted}, {"durable", e.Durable}, {"grace for", e.Graced}} {
		if len(x.gens) == 0 {
			continue
		}
		out.WriteString(x.what)
		for _, g := range x.gens {
			fmt.Fprintf(out, " %s", h.nameOf(Key(g)))
		}
		out.WriteString("\n")
	}
	for _, p := range e.Dropped {
		fmt.Fprintf(out, "dropped %s: %d B × %d%s\n", h.nameOf(p.Key), p.Bytes, p.Ranks, where(p.Place))
	}
	for _, x := range []struct {
		what string
		keys []Key
	}{{"cooled", e.Cooled}, {"warmed", e.Warmed}} {
		if len(x.keys) == 0 {
			continue
		}
		var names []string
		for _, key := range x.keys {
			names = append(names, h.nameOf(key))
		}
		slices.Sort(names)
		fmt.Fprintf(out, "%s %s\n", x.what, strings.Join(names, " "))
	}
	if len(e.Freed) > 0 {
		fmt.Fprintf(out, "freed%s\n", where(e.Freed))
	}
}

// where prints placements as segment/offset+stored.
func where(places []Placement) (s string) {
	for _, p := range places {
		s += fmt.Sprintf(" %d/%d+%d", p.Segment, p.Offset, p.Stored)
	}
	return s
}

func (h *history) describe(t *testing.T, out *strings.Builder, g Generation) {
	s, err := ReadState(h.view, g)
	require.NoError(t, err)
	m, err := ReadManifest(h.view, g)
	require.NoError(t, err)
	fmt.Fprintf(out, "%s@%d %v LSN %d", h.nameOf(Key(g)), m.Offset, s.Status, s.Published)
	if s.Used != s.Published {
		fmt.Fprintf(out, " used %d", s.Used)
	}
	if s.Durable {
		out.WriteString(" durable")
	}
	if s.Superseded() {
		fmt.Fprintf(out, " superseded by %s", h.nameOf(Key(s.SupersededBy)))
	}
	if s.Continued {
		out.WriteString(" continued")
	}
	if s.Grace {
		out.WriteString(" in grace")
	}
	out.WriteString("\n")
}

func (h *history) accounts(t *testing.T, out *strings.Builder) {
	a, err := ReadAccounts(h.view)
	require.NoError(t, err)
	fmt.Fprintf(out, "checkpoints: %d listed (%d superseded, %d not durable), %d retired, %d namespaces\n", a.Listed, a.Superseded, a.Undurable, a.Retired, a.Namespaces)
	fmt.Fprintf(out, "pages: %d of %d bytes; on disk %d of %d bytes in %d\n", a.Pages, a.PageBytes, a.PlacedPages, a.StoredBytes, a.AllocatedBytes)
	require.NoError(t, Segments(h.view, func(n uint64, use SegmentUse) (bool, error) {
		fmt.Fprintf(out, "segment %d: %d copies, %d bytes, end %d\n", n, use.LivePages, use.LiveBytes, use.End)
		return true, nil
	}))
}

// dump prints every entry of the catalogue.
func (h *history) dump(t *testing.T, out *strings.Builder) {
	require.NoError(t, h.view.Scan(nil, func(k, b []byte) (bool, error) {
		name := func(from int) string { return h.nameOf(Key(k[from : from+32])) }
		switch k[0] {
		case tagAccounts:
			h.accounts(t, out)
		case tagSpine:
			var s spineEntry
			require.NoError(t, s.unmarshal(b))
			fmt.Fprintf(out, "block %s: index %d after %q, %d children, endings %v\n", name(1), s.index, h.nameOf(s.parent), s.children, s.endings)
		case tagChild:
			fmt.Fprintf(out, "child %s → %s\n", name(1), name(33))
		case tagPrefix:
			fmt.Fprintf(out, "prefix %s: %s\n", name(1), h.nameOf(Key(b)))
		case tagSegment: // among the accounts
		case tagHold:
			fmt.Fprintf(out, "hold %s → %s\n", name(1), name(33))
		case tagManifest:
			fmt.Fprintf(out, "manifest %s: %d bytes\n", name(1), len(b))
		case tagNamespace:
			fmt.Fprintf(out, "namespace %s: %q\n", name(1), b)
		case tagOrder:
			fmt.Fprintf(out, "order %d %d: %s\n", k[1], binary.BigEndian.Uint64(k[2:]), name(10))
		case tagPage:
			var p PageEntry
			require.NoError(t, p.unmarshal(b))
			fmt.Fprintf(out, "page %s: depth %d after %q, %d B × %d, held %d, listed %d, current %d, chain durable %v%s\n",
				name(1), p.Depth, h.nameOf(p.Parent), p.Bytes, p.Ranks, p.Held, p.Listed, p.Current, p.ChainDurable, where(p.Place))
		case tagState:
			out.WriteString("state ")
			h.describe(t, out, Generation(k[1:]))
		case tagWaiting:
			fmt.Fprintf(out, "waiting %s: %d\n", name(1), b[0])
		case tagSupersede:
			fmt.Fprintf(out, "supersede %s ← %s\n", name(33), name(1))
		case tagGrace:
			fmt.Fprintf(out, "grace %s\n", name(1))
		case tagRequest:
			fmt.Fprintf(out, "request of %s in %s\n", name(65), name(1))
		case tagApplied:
			fmt.Fprintf(out, "applied %d\n", binary.BigEndian.Uint64(b))
		}
		return true, nil
	}))
}

// A checkpoint that replaces another one, with the same prefix and other metadata, supersedes what that had superseded: it stays superseded
// throughout, so that its time of grace does not begin anew, and one that is over stays over.
func TestReplacementBeginsNoNewGrace(t *testing.T) {
	for _, over := range []bool{false, true} {
		c := newCatalogue()
		q := newSpace("chain", 2, shape{tokens: 16, bytes: 4096}).sequence().plus(run(1, 32)...)
		first, _ := c.publish(t, q.intent(""))
		longer := q.plus(run(2, 16)...)
		superseding := func(meta string) (Generation, *Effects) {
			in := longer.intent(meta)
			r, err := DecidePublish(c.view, in)
			require.NoError(t, err)
			r.Manifest.Continues, r.Supersedes = first, []Generation{first}
			return in.Manifest.Generation(), c.commit(t, r)
		}
		second, effects := superseding("")
		require.Equal(t, []Generation{first}, effects.Graced)
		if over {
			c.commit(t, &Mark{Mark: MarkEndGrace, Generations: []Generation{first}})
		}
		third, effects := superseding("other")
		require.Equal(t, []Generation{second}, effects.Retired)
		require.Empty(t, effects.Graced)
		s, err := ReadState(c.view, first)
		require.NoError(t, err)
		require.Equal(t, third, s.SupersededBy)
		require.Equal(t, !over, s.Grace)
	}
}
