package db

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

// askWhy asks about tokens of a namespace.
func askWhy(t testing.TB, d *DB, ns *Namespace, asked []int32, change ...func(*WhyQuery)) *Explanation {
	t.Helper()
	id := ns.Identity()
	q := WhyQuery{Identity: &id, Parts: []SequencePart{{Tokens: asked}}}
	for _, c := range change {
		c(&q)
	}
	x, err := d.Inspector().Why(t.Context(), q)
	require.NoError(t, err)
	return x
}

func kindsOf(x *Explanation) (kinds []CauseKind) {
	for _, c := range x.Causes {
		kinds = append(kinds, c.Kind)
	}
	return kinds
}

// requireRetired checks that the explanation names the retirement of g, the record that made it, and a time that brackets it.
func requireRetired(t testing.TB, d *DB, x *Explanation, g Generation, reason txn.Reason, since time.Time) {
	t.Helper()
	require.Equal(t, "miss", x.Outcome)
	require.Contains(t, kindsOf(x), CauseRetired+CauseKind(": "+reason.String()))
	for _, c := range x.Causes {
		if c.Retirement == nil || c.Generation != g {
			continue
		}
		r := c.Retirement
		require.Equal(t, reason.String(), r.Reason)
		require.Positive(t, r.LSN)
		require.Greater(t, r.LSN, r.Published)
		require.False(t, r.Before.Before(r.After))
		require.False(t, r.Before.Before(since.Truncate(time.Microsecond).Add(-markInterval)), "%v, begun at %v", r.Before, since)
		require.False(t, r.After.After(time.Now()))
		require.Contains(t, c.Text, reason.Explain())
		// The same of the generation.
		of, err := d.Inspector().Why(t.Context(), WhyQuery{Generation: g})
		require.NoError(t, err)
		require.Contains(t, kindsOf(of), c.Kind)
		return
	}
	t.Fatalf("%s is not explained: %+v", g.Short(), x.Causes)
}

// whyKinds provokes every cause there is.
var whyKinds = map[CauseKind]func(t *testing.T){
	CauseListed: func(t *testing.T) {
		d, ns := openDB(t, tempDir(t), Options{}), testNamespace(t, 1)
		g, _ := publish(t, d, seqOf(t, ns, tokens(1, 700)), 700)
		x := askWhy(t, d, ns, tokens(1, 700))
		require.Equal(t, "hit", x.Outcome)
		require.Equal(t, []CauseKind{CauseListed}, kindsOf(x))
		require.Equal(t, g, x.Causes[0].Generation)
		of, err := d.Inspector().Why(t.Context(), WhyQuery{Generation: g})
		require.NoError(t, err)
		require.Equal(t, "hit", of.Outcome)
		require.EqualValues(t, 700, of.Offset)
	},
	CauseBoundary: func(t *testing.T) {
		d, ns := openDB(t, tempDir(t), Options{}), testNamespace(t, 1, Group{Name: "a", Kind: Attention, PageBytes: 4096, PageTokens: 16})
		publish(t, d, seqOf(t, ns, tokens(1, 700)), 700)
		x := askWhy(t, d, ns, tokens(1, 100))
		require.Equal(t, "shorter hit", x.Outcome)
		require.EqualValues(t, 96, x.Offset)
		require.Equal(t, CauseBoundary, x.Causes[0].Kind)
	},
	CauseLeftOut: func(t *testing.T) {
		d, ns := openDB(t, tempDir(t), Options{}), testNamespace(t, 1)
		publish(t, d, seqOf(t, ns, tokens(1, 700)), 700)
		x := askWhy(t, d, ns, tokens(1, 700), func(q *WhyQuery) { q.LeaveTokens = 1 })
		require.Equal(t, "miss", x.Outcome)
		require.Contains(t, kindsOf(x), CauseLeftOut)
		require.NotContains(t, kindsOf(x), CauseNeverPublished)
	},
	CauseNeverPublished: func(t *testing.T) {
		d, ns := openDB(t, tempDir(t), Options{}), testNamespace(t, 1)
		publish(t, d, seqOf(t, ns, tokens(1, 700)), 700)
		x := askWhy(t, d, ns, tokens(2, 700))
		require.Equal(t, "miss", x.Outcome)
		require.Equal(t, []CauseKind{CauseNeverPublished}, kindsOf(x))
	},
	CauseGoesOn: func(t *testing.T) {
		d, ns := openDB(t, tempDir(t), Options{}), testNamespace(t, 1)
		publish(t, d, seqOf(t, ns, tokens(1, 700)), 700)
		x := askWhy(t, d, ns, append(tokens(1, 700), tokens(3, 50)...))
		require.Equal(t, "shorter hit", x.Outcome)
		require.EqualValues(t, 700, x.Offset)
		require.Equal(t, []CauseKind{CauseListed, CauseGoesOn}, kindsOf(x))
	},
	CauseInside: func(t *testing.T) {
		d, ns := openDB(t, tempDir(t), Options{}), testNamespace(t, 1)
		publish(t, d, seqOf(t, ns, tokens(1, 2000)), 2000)
		x := askWhy(t, d, ns, tokens(1, 1500))
		require.Equal(t, "miss", x.Outcome)
		require.Equal(t, []CauseKind{CauseInside}, kindsOf(x))
		require.EqualValues(t, 1024, x.Causes[0].Offset)
	},
	CausePending: func(t *testing.T) {
		d, ns := openDB(t, tempDir(t), Options{}), testNamespace(t, 2)
		s := seqOf(t, ns, tokens(1, 700))
		p, err := d.Begin(t.Context(), PublishRequest{Sequence: s, Offset: 700})
		require.NoError(t, err)
		fill(t, p, 0)
		_, err = p.Commit(t.Context(), 0)
		require.NoError(t, err)
		x := askWhy(t, d, ns, tokens(1, 700))
		require.Equal(t, "miss", x.Outcome)
		require.Equal(t, CausePending, x.Causes[0].Kind)
		require.Equal(t, p.Generation(), x.Causes[0].Generation)
		of, err := d.Inspector().Why(t.Context(), WhyQuery{Generation: p.Generation()})
		require.NoError(t, err)
		require.Equal(t, []CauseKind{CausePending}, kindsOf(of))
		require.NoError(t, p.Abort())
	},
	CauseOtherNamespace: func(t *testing.T) {
		d, ns := openDB(t, tempDir(t), Options{}), testNamespace(t, 1)
		g, _ := publish(t, d, seqOf(t, ns, tokens(1, 700)), 700)
		id := ns.Identity()
		id.Weights, id.Tenant, id.Settings = "ffffffffffffffffffffffffffffffffffffffff", "somebody else", map[string]string{"rope": "2"}
		other, err := NewNamespace(id)
		require.NoError(t, err)
		publish(t, d, seqOf(t, other, tokens(9, 10)), 10)
		x := askWhy(t, d, other, tokens(1, 700))
		require.Equal(t, "miss", x.Outcome)
		require.Equal(t, []CauseKind{CauseOtherNamespace, CauseNeverPublished}, kindsOf(x))
		require.Equal(t, g, x.Causes[0].Generation)
		require.Equal(t, []FieldDifference{
			{"Weights", id.Weights, ns.identity.Weights}, {"Tenant", "somebody else", ""}, {"Settings.rope", "2", "(not set)"},
		}, x.Causes[0].Differs)
	},
	CauseNoNamespace: func(t *testing.T) {
		d, ns := openDB(t, tempDir(t), Options{}), testNamespace(t, 1)
		publish(t, d, seqOf(t, ns, tokens(1, 700)), 700)
		x := askWhy(t, d, testNamespace(t, 2), tokens(1, 700))
		require.Equal(t, []CauseKind{CauseNoNamespace, CauseOtherNamespace}, kindsOf(x))
		require.Equal(t, []FieldDifference{{"Layout.Ranks", "2", "1"}}, x.Causes[1].Differs)
	},
	CauseForgotten: func(t *testing.T) {
		d, ns := openDB(t, tempDir(t), Options{}), testNamespace(t, 1)
		g, _ := publish(t, d, seqOf(t, ns, tokens(1, 700)), 700)
		require.NoError(t, d.Delete(t.Context(), g))
		d.history.now = func() time.Time { return time.Now().Add(DefaultHistoryAge + time.Hour) }
		publish(t, d, seqOf(t, ns, tokens(2, 700)), 700) // a mark behind the retirement, later than its age
		require.NoError(t, d.history.forget(MaxHistory, MaxMarks))
		d.history.now = func() time.Time { return time.Now().Add(2*DefaultHistoryAge + 2*time.Hour) }
		require.NoError(t, d.history.forget(MaxHistory, MaxMarks))
		x, err := d.Inspector().Why(t.Context(), WhyQuery{Generation: g})
		require.NoError(t, err)
		require.Equal(t, []CauseKind{CauseForgotten}, kindsOf(x))
		require.Equal(t, []CauseKind{CauseNeverPublished}, kindsOf(askWhy(t, d, ns, tokens(1, 700))))
	},
	CauseRequested: func(t *testing.T) {
		d, ns, since := openDB(t, tempDir(t), Options{}), testNamespace(t, 1), time.Now()
		g, _ := publish(t, d, seqOf(t, ns, tokens(1, 700)), 700)
		require.NoError(t, d.Retire(t.Context(), g))
		requireRetired(t, d, askWhy(t, d, ns, tokens(1, 700)), g, txn.ReasonRequested, since)
		require.NoError(t, d.Delete(t.Context(), g))
		requireRetired(t, d, askWhy(t, d, ns, tokens(1, 700)), g, txn.ReasonRequested, since)
	},
	CauseReplaced: func(t *testing.T) {
		d, ns := openDB(t, tempDir(t), Options{}), testNamespace(t, 1)
		s := seqOf(t, ns, tokens(1, 700))
		old, _ := publish(t, d, s, 700)
		by, _ := publish(t, d, s, 700, func(r *PublishRequest) { r.Meta = []byte("another") })
		require.NotEqual(t, old, by)
		x, err := d.Inspector().Why(t.Context(), WhyQuery{Generation: old})
		require.NoError(t, err)
		require.Equal(t, []CauseKind{CauseReplaced}, kindsOf(x))
		require.Equal(t, by, x.Causes[0].Retirement.By)
	},
	CauseNotDurable: func(t *testing.T) {
		dir, ns, since := tempDir(t), testNamespace(t, 1), time.Now()
		d := openDB(t, dir, Options{WritePolicy: OnEvict})
		g, _ := publish(t, d, seqOf(t, ns, tokens(1, 700)), 700)
		crash(t, d)
		d = openDB(t, dir, Options{})
		requireRetired(t, d, askWhy(t, d, ns, tokens(1, 700)), g, txn.ReasonNotDurable, since)
	},
	CauseRAMPressure: func(t *testing.T) {
		d, ns, since := openDB(t, tempDir(t), Options{WritePolicy: Never}), testNamespace(t, 1), time.Now()
		g, _ := publish(t, d, seqOf(t, ns, tokens(1, 700)), 700)
		_, err := d.DropRAM(t.Context())
		require.NoError(t, err)
		requireRetired(t, d, askWhy(t, d, ns, tokens(1, 700)), g, txn.ReasonRAMPressure, since)
	},
	CauseDiskPressure: func(t *testing.T) {
		d, ns, since := openDB(t, tempDir(t), Options{DiskBytes: 1 << 20}), testNamespace(t, 1), time.Now()
		g, _ := publish(t, d, seqOf(t, ns, tokens(1, 2000)), 2000)
		publish(t, d, seqOf(t, ns, tokens(2, 2000)), 2000)
		publish(t, d, seqOf(t, ns, tokens(3, 2000)), 2000)
		requireRetired(t, d, askWhy(t, d, ns, tokens(1, 2000)), g, txn.ReasonDiskPressure, since)
	},
	CauseWriteFailed: func(t *testing.T) {
		d, ns, since := openDB(t, tempDir(t), Options{WritePolicy: OnEvict, Faults: &Faults{WriteErrors: 1}}), testNamespace(t, 1), time.Now()
		g, _ := publish(t, d, seqOf(t, ns, tokens(1, 700)), 700)
		_, err := d.DropRAM(t.Context())
		require.NoError(t, err)
		requireRetired(t, d, askWhy(t, d, ns, tokens(1, 700)), g, txn.ReasonWriteFailed, since)
	},
	CauseLost: func(t *testing.T) {
		dir, ns, since := tempDir(t), testNamespace(t, 1), time.Now()
		d := openDB(t, dir, Options{})
		s := seqOf(t, ns, tokens(1, 700))
		g, _ := publish(t, d, s, 700)
		at := placesOf(t, d, g, 1)[0]
		closeDB(t, d)
		flip(t, segmentFile(dir, at.Segment), at.Offset+100)
		d = openDB(t, dir, Options{})
		require.Zero(t, restoreAt(t, d, s))
		requireRetired(t, d, askWhy(t, d, ns, tokens(1, 700)), g, txn.ReasonLost, since)
	},
	CauseShutdown: func(t *testing.T) {
		dir, ns, since := tempDir(t), testNamespace(t, 1), time.Now()
		d := openDB(t, dir, Options{WritePolicy: Never})
		g, _ := publish(t, d, seqOf(t, ns, tokens(1, 700)), 700)
		require.Equal(t, 1, closeDB(t, d).Retired)
		d = openDB(t, dir, Options{})
		requireRetired(t, d, askWhy(t, d, ns, tokens(1, 700)), g, txn.ReasonShutdown, since)
	},
	CauseCleared: func(t *testing.T) {
		d, ns, since := openDB(t, tempDir(t), Options{}), testNamespace(t, 1), time.Now()
		g, _ := publish(t, d, seqOf(t, ns, tokens(1, 700)), 700)
		_, err := d.Clear(t.Context(), ns.ID())
		require.NoError(t, err)
		requireRetired(t, d, askWhy(t, d, ns, tokens(1, 700)), g, txn.ReasonCleared, since)
	},
}

// Given one miss, hit or shorter hit of every kind, then the explanation names the kind, and what is needed to act on it: the other
// namespace and the fields that differ; when, by which record and for which reason something was retired. The kinds
// are those that docs/guarantees.md lists.
func TestWhyExplainsEveryKind_OBS02(t *testing.T) {
	for kind, provoke := range whyKinds {
		t.Run(strings.ReplaceAll(string(kind), ": ", "/"), provoke)
	}
	b, err := os.ReadFile(filepath.Join("..", "docs", "guarantees.md"))
	require.NoError(t, err)
	_, section, _ := strings.Cut(string(b), "## Kinds of miss")
	section, _, _ = strings.Cut(section, "\nNot misses")
	documented := map[CauseKind]bool{}
	for _, m := range regexp.MustCompile(`(?m)^\| ([a-zA-Z: ]+) \| `).FindAllStringSubmatch(section, -1) {
		if m[1] != "cause" {
			documented[CauseKind(m[1])] = true
		}
	}
	for kind := range whyKinds {
		require.True(t, documented[kind], "docs/guarantees.md: %q", kind)
	}
	require.Len(t, documented, len(whyKinds))
	source, err := os.ReadFile("why.go")
	require.NoError(t, err)
	declared := regexp.MustCompile(`(?m)^\tCause[A-Z]\w+ .*=`).FindAllString(string(source), -1)
	require.Len(t, declared, len(whyKinds)+1, "all but the prefix CauseRetired")
	for r := txn.ReasonRequested; r <= txn.ReasonCleared; r++ {
		require.NotNil(t, whyKinds[CauseRetired+CauseKind(": "+r.String())], "%v", r)
	}
}

// What was asked wrongly is refused, and says what is wrong.
func TestWhyRefusesWhatCannotBeAnswered(t *testing.T) {
	d, ns := openDB(t, tempDir(t), Options{}), testNamespace(t, 1)
	i := d.Inspector()
	ask := func(q WhyQuery) error {
		_, err := i.Why(t.Context(), q)
		return err
	}
	require.ErrorIs(t, ask(WhyQuery{Parts: []SequencePart{{Tokens: tokens(1, 5)}}}), ErrInvalid, "no namespace")
	publish(t, d, seqOf(t, ns, tokens(1, 700)), 700)
	require.NoError(t, ask(WhyQuery{Parts: []SequencePart{{Tokens: tokens(1, 5)}}}), "the only one there is")
	require.ErrorIs(t, ask(WhyQuery{}), ErrInvalid)
	require.ErrorIs(t, ask(WhyQuery{Parts: []SequencePart{{Tokens: []int32{-1}}}}), ErrInvalid)
	require.ErrorIs(t, ask(WhyQuery{Parts: []SequencePart{{Tokens: []int32{1}, Content: "ab"}}}), ErrInvalid)
	require.ErrorIs(t, ask(WhyQuery{Parts: []SequencePart{{Tokens: make([]int32, MaxWhyTokens+1)}}}), ErrTooLarge)
	require.ErrorIs(t, ask(WhyQuery{Parts: []SequencePart{{Tokens: tokens(1, 5)}}, LeaveTokens: 6}), ErrTooLarge)
	require.ErrorIs(t, ask(WhyQuery{Parts: []SequencePart{{Tokens: tokens(1, 5)}}, Namespace: txn.Key{1}}), ErrNotFound)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := i.Why(ctx, WhyQuery{Generation: Generation{1}})
	require.ErrorIs(t, err, ErrBusy)
}

// Given retirements and a crash, then they are remembered as they were, replay does not change the time that is told, and what is
// too old or too many is forgotten, the oldest first.
func TestHistorySurvivesACrashAndIsBounded(t *testing.T) {
	dir, ns := tempDir(t), testNamespace(t, 1)
	d := openDB(t, dir, Options{})
	begun := time.Now()
	var gens []Generation
	for i := range 8 {
		g, _ := publish(t, d, seqOf(t, ns, tokens(uint64(i), 100)), 100)
		require.NoError(t, d.Delete(t.Context(), g))
		gens = append(gens, g)
	}
	history := func(d *DB) *HistoryInfo {
		h, err := d.Inspector().History(t.Context(), HistoryQuery{Samples: 100})
		require.NoError(t, err)
		return h
	}
	before := history(d)
	require.Len(t, before.Retirements, len(gens))
	require.EqualValues(t, map[string]int64{"requested": 8}, before.Reasons)
	for i, r := range before.Retirements {
		require.Equal(t, gens[len(gens)-1-i], r.Generation, "the youngest first")
	}
	crash(t, d)
	d = openDB(t, dir, Options{})
	require.Positive(t, d.RecoveryReport().LogRecords)
	after := history(d)
	require.Len(t, after.Retirements, len(gens))
	for i, r := range after.Retirements {
		want := before.Retirements[i]
		require.Equal(t, want.LSN, r.LSN)
		require.Equal(t, want.Generation, r.Generation)
		require.False(t, r.Before.Before(begun.Truncate(time.Microsecond)), "it was not before it began")
		require.False(t, r.Before.After(time.Now()))
	}
	require.NoError(t, d.history.forget(3, MaxMarks))
	few := history(d)
	require.Len(t, few.Retirements, 3)
	require.Equal(t, after.Retirements[:3], few.Retirements)
	closeDB(t, d)

	d = openDB(t, dir, Options{HistoryAge: -1})
	g, _ := publish(t, d, seqOf(t, ns, tokens(77, 100)), 100)
	require.NoError(t, d.Delete(t.Context(), g))
	require.Len(t, history(d).Retirements, 3, "nothing is noted")
	_, err := Open(t.Context(), tempDir(t), Options{HistoryAge: MaxHistoryAge + 1})
	require.ErrorIs(t, err, ErrTooLarge)
}

// Given marks of a long time, then thinning them keeps every answer about when a record was true.
func TestThinnedMarksStillBracketEveryRecord(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	start := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	lsn, now := txn.LSN(1000), start
	times := map[txn.LSN]time.Time{}
	b := d.index.NewBatch()
	h := &chronicle{index: d.index, age: DefaultHistoryAge, now: func() time.Time { return now }}
	for i := range 4000 {
		lsn++
		times[lsn] = now
		require.NoError(t, h.note(b, lsn, &txn.Effects{}))
		now = now.Add(time.Duration(100+i%7*400) * time.Millisecond)
		if i == 2000 {
			now = now.Add(time.Hour)
		}
	}
	require.NoError(t, b.Commit())
	count := func() int {
		v := d.index.Snapshot()
		defer v.Close()
		c, err := readClock(v)
		require.NoError(t, err)
		for lsn, at := range times {
			after, before := c.at(lsn)
			require.False(t, at.Before(after), "LSN %d", lsn)
			require.False(t, at.After(before), "LSN %d: %v, bracketed by %v and %v", lsn, at, after, before)
		}
		return len(c)
	}
	all := count()
	h.count = 0
	for _, age := range []time.Duration{time.Hour, 24 * time.Hour, 30 * 24 * time.Hour} {
		now = start.Add(age)
		require.NoError(t, h.forget(MaxHistory, MaxMarks))
		fewer := count()
		require.Less(t, fewer, all)
		all = fewer
	}
	require.NoError(t, h.forget(MaxHistory, 5))
	v := d.index.Snapshot()
	defer v.Close()
	c, err := readClock(v)
	require.NoError(t, err)
	require.LessOrEqual(t, len(c), 5)
}

// Bytes that are no note are refused, whatever they are.
func FuzzHistory(f *testing.F) {
	x := txn.Farewell{Namespace: txn.Key{1}, Prefix: txn.Key{2}, Offset: 3, Bytes: 4, CheckpointKind: 1, Request: "r", Published: 5, Reason: txn.ReasonLost, By: Generation{6}}
	f.Add(encodeFarewell(&x))
	f.Add(encodeSample(&Sample{At: time.UnixMicro(1), Listed: 2}))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		key := historyKey('r', 7, make([]byte, 32)...)
		if r, err := decodeRetirement(key, b); err == nil {
			require.Equal(t, txn.LSN(7), r.LSN)
		}
		if s, err := decodeSample(historyKey('t', 7), b); err == nil {
			require.Equal(t, txn.LSN(7), s.LSN)
		}
	})
	got, err := decodeRetirement(historyKey('r', 9, make([]byte, 32)...), encodeFarewell(&x))
	require.NoError(f, err)
	require.Equal(f, Retirement{LSN: 9, Namespace: txn.Key{1}, Prefix: txn.Key{2}, Offset: 3, Bytes: 4, Kind: "prompt", Request: "r", Published: 5, Reason: "page lost", By: Generation{6}, reason: txn.ReasonLost}, got)
}
