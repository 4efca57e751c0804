package db

import (
	"bytes"
	"cmp"
	"context"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/holdfast-db/holdfast/db/internal/index"
	"github.com/holdfast-db/holdfast/txn"
)

// CauseKind is one of the reasons for which something is found or not. docs/guarantees.md says what each means.
type CauseKind string

// The causes. Those that begin with "retired" name the reason of the retirement.
const (
	CauseListed         CauseKind = "listed"          // a checkpoint at exactly this offset
	CauseBoundary       CauseKind = "boundary"        // a page boundary inside a longer checkpoint
	CauseLeftOut        CauseKind = "left out"        // there is more, and the question asked for less
	CauseNeverPublished CauseKind = "never published" // nothing that begins like this, as far as the history goes back
	CauseGoesOn         CauseKind = "goes on differently"
	CauseInside         CauseKind = "inside a longer one"
	CausePending        CauseKind = "being published"
	CauseOtherNamespace CauseKind = "another namespace"
	CauseNoNamespace    CauseKind = "namespace not known"
	CauseForgotten      CauseKind = "forgotten" // retired longer ago than the history goes back, or never published
	CauseRetired        CauseKind = "retired"   // prefix of the next ones
	CauseRequested                = CauseRetired + ": requested"
	CauseReplaced                 = CauseRetired + ": replaced"
	CauseNotDurable               = CauseRetired + ": not durable"
	CauseRAMPressure              = CauseRetired + ": RAM pressure"
	CauseDiskPressure             = CauseRetired + ": disk pressure"
	CauseWriteFailed              = CauseRetired + ": write failed"
	CauseLost                     = CauseRetired + ": page lost"
	CauseShutdown                 = CauseRetired + ": shutdown"
	CauseCleared                  = CauseRetired + ": cleared"
)

// SequencePart is a run of tokens, or with a content one whole media span (Sequence.AppendMedia).
type SequencePart struct {
	Tokens  []int32 `json:"tokens"`
	Content string  `json:"content,omitempty"` // 64 hex digits
}

// WhyQuery asks about a sequence or about a generation.
type WhyQuery struct {
	Parts       []SequencePart `json:"parts,omitempty"`
	Namespace   txn.Key        `json:"namespace,omitzero"` // of the sequence; zero: the only one there is, or that of Identity
	Identity    *Identity      `json:"identity,omitempty"` // of the sequence, which may be one that is not known
	LeaveTokens int64          `json:"leave_tokens,omitempty"`
	Generation  Generation     `json:"generation,omitzero"` // asked about instead of a sequence
}

// Explanation says why.
type Explanation struct {
	Outcome    string     `json:"outcome"` // hit: the whole of what was asked; shorter hit; miss
	Tokens     int64      `json:"tokens"`  // asked for
	Offset     int64      `json:"offset"`  // found
	Generation Generation `json:"generation,omitzero"`
	Namespace  txn.Key    `json:"namespace,omitzero"`
	Causes     []Cause    `json:"causes"`                // what was found first, then what speaks against more
	Omitted    int        `json:"omitted,omitempty"`     // causes beyond MaxCauses
	From       time.Time  `json:"history_from,omitzero"` // retirements before are forgotten
}

// Cause is one part of an explanation.
type Cause struct {
	Kind       CauseKind         `json:"kind"`
	Offset     int64             `json:"offset,omitempty"` // tokens that it is about
	Generation Generation        `json:"generation,omitzero"`
	Namespace  txn.Key           `json:"namespace,omitzero"`   // another one
	Differs    []FieldDifference `json:"differs,omitempty"`    // of that one
	Retirement *Retirement       `json:"retirement,omitempty"` // when, by what record, for what reason
	Text       string            `json:"text"`                 // one sentence, for people
}

// FieldDifference is a field in which two identities differ.
type FieldDifference struct {
	Field string `json:"field"`
	Asked string `json:"asked"`
	Other string `json:"other"`
}

// why gathers an explanation.
type why struct {
	i     inspector
	ctx   context.Context
	v     *index.Snapshot
	clock clock
	out   *Explanation
}

func (w *why) add(c Cause) {
	if len(w.out.Causes) == MaxCauses {
		w.out.Omitted++
		return
	}
	w.out.Causes = append(w.out.Causes, c)
}

func (i inspector) Why(ctx context.Context, q WhyQuery) (*Explanation, error) {
	out := &Explanation{Outcome: "miss", Causes: []Cause{}}
	err := i.look(ctx, func(v *index.Snapshot) error {
		c, err := readClock(v)
		if err != nil {
			return err
		}
		out.From = i.d.history.from(c)
		w := &why{i: i, ctx: ctx, v: v, clock: c, out: out}
		if !q.Generation.IsZero() {
			return w.generation(q.Generation)
		}
		return w.sequence(&q)
	})
	return out, err
}

// generation explains what became of one.
func (w *why) generation(g Generation) error {
	w.out.Generation = g
	s, err := txn.ReadState(w.v, g)
	if err != nil {
		return err
	}
	if s != nil {
		info, _, err := w.i.describe(w.v, w.clock, g, s)
		if err != nil {
			return err
		}
		w.out.Tokens, w.out.Namespace = info.Offset, info.Namespace
		if s.Status == txn.Listed {
			w.out.Outcome, w.out.Offset = "hit", info.Offset
			text := fmt.Sprintf("It is listed at %d tokens and %s, on %s.", info.Offset, info.State, tierText(info.Tier))
			if !info.SupersededBy.IsZero() {
				text += fmt.Sprintf(" %s superseded it, so it goes before current ones when room is needed.", info.SupersededBy.Short())
			}
			w.add(Cause{Kind: CauseListed, Offset: info.Offset, Generation: g, Text: text})
			return nil
		}
	}
	for _, p := range w.i.d.pending.list() {
		if p.gen == g {
			w.out.Tokens, w.out.Namespace = p.manifest.Offset, p.manifest.Namespace
			w.add(Cause{Kind: CausePending, Offset: p.manifest.Offset, Generation: g, Text: "It is being published: not every rank has committed yet."})
		}
	}
	found := false
	if err := retirements(w.v, w.clock, func(r *Retirement) bool {
		if r.Generation == g {
			found = true
			w.out.Tokens, w.out.Namespace = r.Offset, r.Namespace
			w.retired(r)
		}
		return true
	}); err != nil {
		return err
	}
	if len(w.out.Causes) > 0 {
		return nil
	}
	if s != nil && !found {
		w.add(Cause{Kind: CauseForgotten, Generation: g, Offset: w.out.Tokens, Text: "It is retired, for a reason that is forgotten" + w.since() + "."})
		return nil
	}
	w.add(Cause{Kind: CauseForgotten, Generation: g, Text: "It is not known: it was never published here, or retired longer ago than is remembered" + w.since() + "."})
	return nil
}

func tierText(tier string) string {
	switch tier {
	case "both":
		return "disk and in RAM"
	case "ram":
		return "RAM only"
	case "none":
		return "its way between the tiers"
	}
	return tier
}

func (w *why) since() string {
	if w.out.From.IsZero() {
		return ""
	}
	return " (since " + w.out.From.Format("2006-01-02 15:04:05") + " UTC)"
}

func (w *why) retired(r *Retirement) {
	kind := CauseRetired + CauseKind(": "+r.Reason)
	text := fmt.Sprintf("%s, a checkpoint of the first %d tokens, was retired %s by LSN %d: %s", r.Generation.Short(), r.Offset, r.when(), r.LSN, r.reason.Explain())
	if r.reason == txn.ReasonReplaced {
		text += fmt.Sprintf(" That is %s.", r.By.Short())
	}
	x := *r
	w.add(Cause{Kind: kind, Offset: r.Offset, Generation: r.Generation, Retirement: &x, Text: text})
}

// when says in words when it was.
func (r *Retirement) when() string {
	const layout = "2006-01-02 15:04:05"
	switch {
	case r.Before.IsZero():
		return "at a time that is not known"
	case r.After.IsZero():
		return "before " + r.Before.UTC().Format(layout)
	case r.Before.Sub(r.After) <= 2*markInterval:
		return "at " + r.After.UTC().Format(layout)
	}
	return "between " + r.After.UTC().Format(layout) + " and " + r.Before.UTC().Format(layout)
}

// namespace finds the namespace that a query is about.
func (w *why) namespace(q *WhyQuery, known map[txn.Key]*Namespace) (*Namespace, error) {
	switch {
	case q.Identity != nil:
		return NewNamespace(*q.Identity)
	case !q.Namespace.IsZero():
		if ns := known[q.Namespace]; ns != nil {
			return ns, nil
		}
		return nil, fmt.Errorf("db: namespace %s: nothing was published in it, and it cannot be told what it is of; give the identity: %w", q.Namespace, ErrNotFound)
	case len(known) == 1:
		for _, ns := range known {
			return ns, nil
		}
	}
	return nil, fmt.Errorf("db: %d namespaces are known: say which one is meant: %w", len(known), ErrInvalid)
}

func (q *WhyQuery) sequence(ns *Namespace) (*Sequence, error) {
	total := 0
	s := ns.NewSequence()
	for i, p := range q.Parts {
		if total += len(p.Tokens); total > MaxWhyTokens {
			return nil, fmt.Errorf("db: WhyQuery.Parts: more than %d tokens: %w", MaxWhyTokens, ErrTooLarge)
		}
		if p.Content == "" {
			if err := s.Append(p.Tokens); err != nil {
				return nil, err
			}
			continue
		}
		b, err := hex.DecodeString(p.Content)
		if err != nil || len(b) != 32 {
			return nil, fmt.Errorf("db: WhyQuery.Parts[%d].Content %.80q: want 64 hex digits: %w", i, p.Content, ErrInvalid)
		}
		if err := s.AppendMedia([32]byte(b), p.Tokens); err != nil {
			return nil, err
		}
	}
	if total == 0 {
		return nil, fmt.Errorf("db: WhyQuery: neither tokens nor a generation: %w", ErrInvalid)
	}
	return s, nil
}

func (w *why) sequence(q *WhyQuery) error {
	known := map[txn.Key]*Namespace{}
	if err := txn.Namespaces(w.v, func(id txn.Key, encoding []byte) (bool, error) {
		ns, err := ParseNamespace(encoding)
		known[id] = ns
		return true, err
	}); err != nil {
		return err
	}
	ns, err := w.namespace(q, known)
	if err != nil {
		return err
	}
	s, err := q.sequence(ns)
	if err != nil {
		return err
	}
	if err := checkNumber("WhyQuery.LeaveTokens", q.LeaveTokens, 0, s.Len()); err != nil {
		return err
	}
	w.out.Namespace, w.out.Tokens = ns.id, s.Len()-q.LeaveTokens
	c, err := longest(w.v, s, w.out.Tokens, w.out.Tokens)
	if err != nil {
		return err
	}
	w.found(c)
	if c.offset < w.out.Tokens {
		if c.offset > 0 {
			w.out.Outcome = "shorter hit"
		}
		if err := w.notMore(s, c.offset, w.out.Tokens); err != nil {
			return err
		}
	}
	if q.LeaveTokens > 0 {
		all, err := longest(w.v, s, s.Len(), s.Len())
		if err != nil {
			return err
		}
		if all.offset > c.offset {
			w.add(Cause{Kind: CauseLeftOut, Offset: all.offset, Generation: all.gen, Text: fmt.Sprintf(
				"%d tokens could be restored, and the question leaves %d of %d out, as an engine does that has to compute one.", all.offset, q.LeaveTokens, s.Len())})
		}
	}
	if w.out.Outcome == "hit" {
		return nil
	}
	told := len(w.out.Causes)
	if known[ns.id] == nil {
		w.add(Cause{Kind: CauseNoNamespace, Namespace: ns.id, Text: "Nothing was ever published with this identity."})
		told++
	}
	if err := w.elsewhere(q, ns, known, c.offset); err != nil {
		return err
	}
	// Whatever was found elsewhere, here it was not published: that is said if nothing else was.
	if c.offset == 0 && told == 0 {
		w.add(Cause{Kind: CauseNeverPublished, Text: "No checkpoint that this begins with was ever published in this namespace, as far as is remembered" + w.since() + "."})
	}
	return nil
}

func (w *why) found(c candidate) {
	w.out.Offset, w.out.Generation = c.offset, c.gen
	if c.offset == w.out.Tokens {
		w.out.Outcome = "hit"
	}
	switch {
	case c.offset == 0:
	case c.gen.IsZero():
		w.add(Cause{Kind: CauseBoundary, Offset: c.offset, Text: fmt.Sprintf(
			"The first %d tokens end at a page boundary inside a longer listed checkpoint. All groups are attention groups, so that is enough.", c.offset)})
	default:
		w.add(Cause{Kind: CauseListed, Offset: c.offset, Generation: c.gen, Text: fmt.Sprintf("Checkpoint %s is listed at exactly %d tokens.", c.gen.Short(), c.offset)})
	}
}

// notMore says what speaks against more than was found.
func (w *why) notMore(s *Sequence, found, asked int64) error {
	for _, p := range w.i.d.pending.list() {
		m := p.manifest
		if m.Namespace == s.namespace.id && m.Offset > found && m.Offset <= asked && s.prefix(m.Offset) == m.Prefix {
			w.add(Cause{Kind: CausePending, Offset: m.Offset, Generation: p.gen, Text: fmt.Sprintf(
				"Checkpoint %s of the first %d tokens is being published: it is not listed before every rank has committed.", p.gen.Short(), m.Offset)})
		}
	}
	var gone []Retirement
	digests := map[int64]txn.Key{}
	if err := retirements(w.v, w.clock, func(r *Retirement) bool {
		if r.Namespace != s.namespace.id || r.Offset <= found || r.Offset > asked {
			return true
		}
		p, ok := digests[r.Offset]
		if !ok {
			p = s.prefix(r.Offset)
			digests[r.Offset] = p
		}
		if p == r.Prefix {
			gone = append(gone, *r)
		}
		return w.ctx.Err() == nil
	}); err != nil {
		return err
	}
	if err := given(w.ctx, "looking at the history"); err != nil {
		return err
	}
	// The longest first, and of one prefix the last word.
	slices.SortStableFunc(gone, func(a, b Retirement) int { return cmp.Compare(b.Offset, a.Offset) })
	for i := range gone {
		w.retired(&gone[i])
	}
	blocks, err := txn.SharedBlocks(w.v, &txn.Query{Max: asked, Spine: s.spine, Prefix: s.prefix})
	if err != nil {
		return err
	}
	step, _ := s.namespace.identity.Layout.boundaries()
	switch shared := blocks * txn.BlockTokens; {
	case shared > found:
		text := fmt.Sprintf("Longer listed checkpoints run through the first %d tokens (counted in blocks of %d), and none ends between %d and %d of this sequence: ",
			shared, txn.BlockTokens, found+1, asked)
		if step == 0 {
			text += "recurrent and auxiliary state is of use at the exact offset of a checkpoint only."
		} else {
			text += fmt.Sprintf("pages of all groups end together every %d tokens only.", step)
		}
		w.add(Cause{Kind: CauseInside, Offset: shared, Text: text})
	case found > 0 && len(gone) == 0:
		w.add(Cause{Kind: CauseGoesOn, Offset: found, Text: fmt.Sprintf(
			"Behind the first %d tokens it goes on as no checkpoint that is listed or remembered does%s: the rest was never published.", found, w.since())})
	}
	return nil
}

// elsewhere looks for the same tokens in other namespaces.
func (w *why) elsewhere(q *WhyQuery, ns *Namespace, known map[txn.Key]*Namespace, found int64) error {
	for _, id := range slices.SortedFunc(maps.Keys(known), func(a, b txn.Key) int { return bytes.Compare(a[:], b[:]) }) {
		other := known[id]
		if id == ns.id {
			continue
		}
		if err := given(w.ctx, "looking at other namespaces"); err != nil {
			return err
		}
		s, err := q.sequence(other)
		if err != nil {
			return err
		}
		c, err := longest(w.v, s, w.out.Tokens, w.out.Tokens)
		if err != nil {
			return err
		}
		if c.offset <= found {
			continue
		}
		differs := ns.identity.differences(&other.identity)
		text := fmt.Sprintf("In namespace %s %d tokens could be restored. It is another one, and nothing crosses from it: ", id.Short(), c.offset)
		for i, f := range differs {
			if i > 0 {
				text += "; "
			}
			if i == 4 {
				text += fmt.Sprintf("and %d more fields differ", len(differs)-i)
				break
			}
			text += fmt.Sprintf("%s is %.64q there and %.64q here", f.Field, f.Other, f.Asked)
		}
		w.add(Cause{Kind: CauseOtherNamespace, Offset: c.offset, Generation: c.gen, Namespace: id, Differs: differs, Text: text + "."})
	}
	return nil
}

// differences names the fields in which two identities differ.
func (id *Identity) differences(other *Identity) (out []FieldDifference) {
	differ := func(field, a, b string) {
		if a != b {
			out = append(out, FieldDifference{field, a, b})
		}
	}
	theirs := other.texts()
	for i, t := range id.texts() {
		differ(t.name, *t.value, *theirs[i].value)
	}
	keys := maps.Clone(id.Settings)
	if keys == nil {
		keys = map[string]string{}
	}
	maps.Copy(keys, other.Settings)
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		a, ok := id.Settings[key]
		b, there := other.Settings[key]
		if !ok {
			a = "(not set)"
		}
		if !there {
			b = "(not set)"
		}
		differ("Settings."+key, a, b)
	}
	differ("Layout.Ranks", strconv.Itoa(id.Layout.Ranks), strconv.Itoa(other.Layout.Ranks))
	differ("number of Layout.Groups", strconv.Itoa(len(id.Layout.Groups)), strconv.Itoa(len(other.Layout.Groups)))
	for i := range min(len(id.Layout.Groups), len(other.Layout.Groups)) {
		a, b := &id.Layout.Groups[i], &other.Layout.Groups[i]
		field := fmt.Sprintf("Layout.Groups[%d].", i)
		differ(field+"Name", a.Name, b.Name)
		differ(field+"Kind", a.Kind.String(), b.Kind.String())
		differ(field+"PageBytes", strconv.FormatInt(a.PageBytes, 10), strconv.FormatInt(b.PageBytes, 10))
		differ(field+"PageTokens", strconv.FormatInt(a.PageTokens, 10), strconv.FormatInt(b.PageTokens, 10))
		differ(field+"WindowTokens", strconv.FormatInt(a.WindowTokens, 10), strconv.FormatInt(b.WindowTokens, 10))
		differ(field+"Pages", strconv.Itoa(a.Pages), strconv.Itoa(b.Pages))
	}
	return out
}
