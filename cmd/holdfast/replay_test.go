package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

// memoryHolder is the obvious checkpoint cache: it remembers what was published and finds the longest of it. Its hooks
// make it break its promises, to see that the driver notices.
type memoryHolder struct {
	ledger     *ledger
	onFind     func(r request, f *found) error
	onPublish  func(r request, p *published) error
	forget     bool // publications are acknowledged and listed, and never found
	opens      int
	closes     int
	finds      int
	publishes  int
	extra      int64 // checkpoints listed beyond those there are
	writtenNow written
}

func newMemoryHolder(s setup) *memoryHolder { return &memoryHolder{ledger: newLedger(s), opens: 1} }

func (h *memoryHolder) find(_ context.Context, r request) (found, error) {
	h.finds++
	f := found{Lookup: time.Microsecond}
	if n := h.ledger.possible(r); n > 0 && !h.forget {
		f.Offset, f.Pages, f.Bytes = int64(n)*blockTokens, int64(n), int64(n)*h.ledger.setup.PageBytes
		f.Restore = time.Duration(n) * time.Microsecond
		f.Generation = txn.Key{1}.String()
	}
	if h.onFind != nil {
		return f, h.onFind(r, &f)
	}
	return f, nil
}

func (h *memoryHolder) publish(_ context.Context, r request, _ found) (published, error) {
	h.publishes++
	h.writtenNow.Payload += h.ledger.newBytes(r)
	p := published{Publish: time.Millisecond, Written: h.writtenNow}
	if h.onPublish != nil {
		if err := h.onPublish(r, &p); err != nil || p.Refused != "" {
			return p, err
		}
	}
	h.ledger.acknowledge(r)
	return p, nil
}

func (h *memoryHolder) reopen(context.Context) error { h.opens++; h.closes++; return nil }

func (h *memoryHolder) census(context.Context) (census, error) {
	return census{Checkpoints: int64(len(h.ledger.checkpoints)) + h.extra, Written: h.writtenNow}, nil
}

func (h *memoryHolder) close(context.Context) error { h.closes++; return nil }

func testSetup(m model) setup {
	s := setup{Model: m, Ranks: 2, PageBytes: 64, StateBytes: 128, RAMBytes: 64 << 20, WritePolicy: "write-through"}
	if m == attentionModel {
		s.StateBytes = 0
	}
	return s
}

// driver gives a replay of n generated requests on h.
func driver(h holder, s setup, n int) *replay {
	return &replay{
		source: generate(1, n), holder: h, ledger: newLedger(s), audit: true, fresh: true,
		progress: newProgress(io.Discard, false), report: &report{},
	}
}

func TestReplayAccountsForEveryRequest(t *testing.T) {
	for _, m := range []model{hybridModel, attentionModel} {
		s := testSetup(m)
		h := newMemoryHolder(s)
		d := driver(h, s, 300)
		d.restartEvery = 40
		require.NoError(t, d.run(t.Context()))

		oracle := newLedger(s)
		var blocks, hits int64
		for r := range d.source.requests {
			blocks += int64(len(r.Blocks))
			hits += int64(oracle.possible(r))
			oracle.acknowledge(r)
		}
		r := d.report
		require.Equal(t, int64(300), r.Requests)
		require.Equal(t, blocks, r.Blocks)
		require.Equal(t, hits, r.HitBlocks)
		require.Equal(t, hits, r.PossibleHitBlocks)
		require.Equal(t, hits, r.RestoredPages)
		require.Equal(t, hits*s.PageBytes, r.RestoredBytes)
		require.Equal(t, int64(len(oracle.checkpoints)), r.Checkpoints)
		require.Equal(t, r.Checkpoints, r.AuditedCheckpoints)
		require.Equal(t, oracle.uniqueBytes(), r.UniquePayloadBytes)
		require.Equal(t, oracle.uniqueBytes(), r.Written.Payload)
		require.Equal(t, int64(300/40), r.Restarts)
		require.Equal(t, 1+300/40, h.opens)
		require.Zero(t, r.Mismatches)
		require.Equal(t, 300, r.Latencies.Lookup.Count)
		require.Equal(t, percentiles{Count: 300, P50: 1000, P99: 1000, Max: 1000}, r.Latencies.Publish)
		require.Equal(t, statusOK, r.status())
	}
}

func TestReplayCountsRequestsWithoutAWholeBlockAndDoesNothingElse(t *testing.T) {
	s := testSetup(hybridModel)
	h := newMemoryHolder(s)
	d := driver(h, s, 0)
	d.source = source{total: 2, requests: func(yield func(request, error) bool) {
		_ = yield(request{Index: 0, Input: 511}, nil) && yield(request{Index: 1}, nil)
	}}
	require.NoError(t, d.run(t.Context()))
	require.Equal(t, int64(2), d.report.Requests)
	require.Zero(t, d.report.Blocks)
	require.Zero(t, h.finds)
	require.Zero(t, h.publishes)
}

// A database that breaks its promise in any way that the driver can see ends a replay with status 1.
func TestReplaySeesBrokenPromises(t *testing.T) {
	s := testSetup(hybridModel)
	for name, c := range map[string]struct {
		breakIt func(h *memoryHolder)
		fault   string
		count   int64
	}{
		"a wrong byte": {func(h *memoryHolder) {
			h.onFind = func(r request, f *found) error {
				if r.Index == 20 && h.publishes == 20 {
					f.mismatch("byte 3 is wrong")
				}
				return nil
			}
		}, "request 20: byte 3 is wrong", 1},
		"more than was published": {func(h *memoryHolder) {
			h.onFind = func(r request, f *found) error {
				if r.Index == 0 && h.publishes == 0 {
					f.Offset = blockTokens
				}
				return nil
			}
		}, "request 0: found 1 blocks, and only 0 were ever published", 1},
		"listed and not found": {func(h *memoryHolder) {
			h.onFind = func(r request, f *found) error {
				if h.publishes == 100 && r.Index == 0 { // in the audit
					f.Offset -= blockTokens
				}
				return nil
			}
		}, "checkpoints are listed and only", 1},
		"listed and never any room": {func(h *memoryHolder) {
			h.onFind = func(r request, f *found) error {
				if h.publishes == 100 && r.Index == 0 {
					*f = found{Busy: "the catalogue changed"}
				}
				return nil
			}
		}, "audit of request 0: 1920 bytes are listed, and cannot be restored into 67108864: the catalogue changed", 1},
		"listed and never published": {func(h *memoryHolder) { h.extra = 2 }, "checkpoints are listed and only", 2},
	} {
		h := newMemoryHolder(s)
		c.breakIt(h)
		d := driver(h, s, 100)
		require.NoError(t, d.run(t.Context()), name)
		require.Equal(t, c.count, d.report.Mismatches, name)
		require.Len(t, d.report.Faults, 1, name)
		require.Contains(t, d.report.Faults[0], c.fault, name)
		require.Equal(t, statusMismatch, d.report.status(), name)
	}
}

func TestReplayDescribesABoundedNumberOfFaultsAndCountsAll(t *testing.T) {
	s := testSetup(hybridModel)
	h := newMemoryHolder(s)
	h.onFind = func(_ request, f *found) error {
		for i := range faultsMax + 5 {
			f.mismatch(fmt.Sprint(i))
		}
		return nil
	}
	d := driver(h, s, 10)
	d.audit = false
	require.NoError(t, d.run(t.Context()))
	require.Equal(t, int64(10*(faultsMax+5)), d.report.Mismatches)
	require.Len(t, d.report.Faults, reportFaultsMax)
}

// What a cache may do under pressure is counted, and is no mismatch.
func TestReplayTellsPressureFromBrokenPromises(t *testing.T) {
	s := testSetup(hybridModel)
	h := newMemoryHolder(s)
	h.onFind = func(r request, f *found) error {
		switch {
		case h.publishes == 100: // the audit: room comes when it is asked for again
			if r.Index%3 == 0 && h.finds%2 == 0 {
				*f = found{Busy: "no room"}
			}
		case f.Offset > 0 && r.Index%10 == 3:
			*f = found{Busy: "no room", Lookup: f.Lookup}
		case f.Offset > 0 && r.Index%10 == 4:
			*f = found{Lost: true, Lookup: f.Lookup}
		}
		return nil
	}
	h.onPublish = func(r request, p *published) error {
		if r.Index%10 == 5 {
			p.Refused = "no space"
		}
		return nil
	}
	d := driver(h, s, 100)
	require.NoError(t, d.run(t.Context()))
	require.Positive(t, d.report.Busy)
	require.Positive(t, d.report.Lost)
	require.Equal(t, int64(10), d.report.Refused)
	require.Zero(t, d.report.Mismatches)
	require.Equal(t, int64(len(h.ledger.checkpoints)), d.report.Checkpoints)
	require.Less(t, d.report.HitBlocks, d.report.PossibleHitBlocks)
}

func TestReplayEndsAtTheFirstErrorAndReportsWhatWasDone(t *testing.T) {
	s := testSetup(hybridModel)
	broken := databaseError(fmt.Errorf("disk: %w", txn.ErrIO))
	for name, breakIt := range map[string]func(h *memoryHolder, d *replay){
		"find": func(h *memoryHolder, _ *replay) {
			h.onFind = func(r request, _ *found) error { return errIf(r.Index == 7, broken) }
		},
		"publish": func(h *memoryHolder, _ *replay) {
			h.onPublish = func(r request, _ *published) error { return errIf(r.Index == 7, broken) }
		},
		"source": func(_ *memoryHolder, d *replay) {
			all := d.source.requests
			d.source.requests = func(yield func(request, error) bool) {
				for r := range all {
					if !yield(r, errIf(r.Index == 8, txn.ErrInvalid)) || r.Index == 8 {
						return
					}
				}
			}
		},
	} {
		h := newMemoryHolder(s)
		d := driver(h, s, 100)
		breakIt(h, d)
		err := d.run(t.Context())
		require.Error(t, err, name)
		require.Equal(t, int64(8), d.report.Requests, name)
		require.Positive(t, d.report.UniquePayloadBytes, name)
		if name == "source" {
			require.Equal(t, statusUsage, exitStatus(err))
		} else {
			require.Equal(t, statusDatabase, exitStatus(err))
			require.ErrorContains(t, err, "request 7: disk", name)
			require.ErrorIs(t, err, txn.ErrIO)
		}
	}
}

func errIf(yes bool, err error) error {
	if yes {
		return err
	}
	return nil
}

func TestReplayFinishesTheRequestAtHandWhenInterrupted(t *testing.T) {
	s := testSetup(hybridModel)
	ctx, cancel := context.WithCancel(t.Context())
	h := newMemoryHolder(s)
	h.onFind = func(r request, _ *found) error {
		if r.Index == 9 {
			cancel()
		}
		return nil
	}
	d := driver(h, s, 100)
	require.NoError(t, d.run(ctx))
	require.Equal(t, int64(10), d.report.Requests)
	require.Equal(t, 10, h.publishes, "what was found is published as well")
	require.Equal(t, int64(len(h.ledger.checkpoints)), d.report.Checkpoints)
	require.Zero(t, d.report.AuditedCheckpoints)
	require.True(t, d.report.Interrupted)
	require.Equal(t, statusInterrupted, d.report.status())
}

func TestPercentilesAreExact(t *testing.T) {
	var samples []time.Duration
	for i := range 200 {
		samples = append(samples, time.Duration(200-i)*time.Microsecond)
	}
	require.Equal(t, percentiles{Count: 200, P50: 100, P99: 198, Max: 200}, percentilesOf(samples))
	require.Equal(t, percentiles{Count: 1, P50: 0.5, P99: 0.5, Max: 0.5}, percentilesOf([]time.Duration{511}))
	require.Equal(t, percentiles{}, percentilesOf(nil))
}

// Scripts read these fields. A field may be added to the file; renaming or removing one breaks them.
func TestReportFields(t *testing.T) {
	b, err := json.Marshal(report{Dir: "d", Error: "e", Faults: []string{"f"}, KillsAt: map[killPoint]int{inPublish: 1}})
	require.NoError(t, err)
	var m map[string]any
	require.NoError(t, json.Unmarshal(b, &m))
	var fields []string
	var walk func(prefix string, m map[string]any)
	walk = func(prefix string, m map[string]any) {
		for _, k := range slices.Sorted(maps.Keys(m)) {
			if inner, ok := m[k].(map[string]any); ok && k != "kills_at" {
				walk(prefix+k+".", inner)
			} else {
				fields = append(fields, prefix+k)
			}
		}
	}
	walk("", m)
	want, err := os.ReadFile("testdata/report-fields.txt")
	require.NoError(t, err)
	got := ""
	for _, f := range fields {
		got += f + "\n"
	}
	require.Equal(t, string(want), got)
}

func TestProgressInPlainLines(t *testing.T) {
	var out lines
	p := newProgress(&out, true)
	require.False(t, p.terminal, "not a terminal")
	now := time.Unix(0, 0)
	p.now = func() time.Time { return now }
	p.begin("replay", 1000)
	for i := range 12 {
		now = now.Add(time.Second)
		p.step(int64(i+1), 24)
	}
	for i := range notesMax + 5 {
		p.note(fmt.Sprintf("note %d", i))
	}
	p.end()
	p.begin("audit", -1)
	now = now.Add(time.Minute)
	p.step(0, 0)
	p.end()
	require.Len(t, out, 3+notesMax)
	require.Equal(t, "note 0\n", out[2])
	require.Equal(t, fmt.Sprintf("note %d; further ones are only counted\n", notesMax-1), out[1+notesMax])
	require.Equal(t, lines{
		"replay: 5 of 1,000 requests, 1 a second, 16m35s left, 20.8 % found\n",
		"replay: 10 of 1,000 requests, 1 a second, 16m30s left, 41.7 % found\n",
		"audit: 1 requests, 0 a second, - found\n",
	}, slices.Delete(out, 2, 2+notesMax))
}

// lines keeps what is written to it, write by write.
type lines []string

func (l *lines) Write(p []byte) (int, error) { *l = append(*l, string(p)); return len(p), nil }

// The promise of the protocol, without a process: one question, one answer, and an end that is told apart.
func TestChildAnswersEachQuestionOnce(t *testing.T) {
	s := testSetup(hybridModel)
	questions, ask := io.Pipe()
	answers, answered := io.Pipe()
	h := newMemoryHolder(s)
	ended := make(chan error, 1)
	go func() {
		ended <- serveChild(context.Background(), questions, answered,
			func(_ context.Context, got setup) (holder, error) { h.ledger.setup = got; return h, nil },
			func() { panic("not an orphan") })
	}()
	in, out := json.NewEncoder(ask), json.NewDecoder(answers)
	say := func(q question) (a answer) {
		require.NoError(t, in.Encode(q))
		require.NoError(t, out.Decode(&a))
		require.NoError(t, a.err())
		return a
	}
	r := request{Index: 3, Blocks: []uint64{1, 2}}
	require.Equal(t, isOpened, say(question{Do: doOpen, Setup: &s}).Is)
	require.Equal(t, found{Lookup: time.Microsecond}, *say(question{Do: doFind, Request: &r}).Found)
	require.Equal(t, int64(2*(2*64+128)), say(question{Do: doPublish, Request: &r, From: &found{}}).Published.Written.Payload)
	require.Equal(t, int64(2*blockTokens), say(question{Do: doFind, Request: &r}).Found.Offset)
	require.Equal(t, isReopened, say(question{Do: doReopen}).Is)
	require.Equal(t, int64(1), say(question{Do: doCensus}).Census.Checkpoints)
	require.Equal(t, isClosed, say(question{Do: doClose}).Is)
	require.NoError(t, <-ended)
	require.Equal(t, 2, h.closes)
	ask.Close()
}

func TestChildReportsAnErrorAndEnds(t *testing.T) {
	s := testSetup(hybridModel)
	r := request{Blocks: []uint64{1}}
	for name, c := range map[string]struct {
		questions []question
		status    int
		says      string
	}{
		"open fails":          {[]question{{Do: doOpen, Setup: &setup{Dir: "bad"}}}, statusDatabase, "cannot open"},
		"find fails":          {[]question{{Do: doOpen, Setup: &s}, {Do: doFind, Request: &r}}, statusDatabase, "cannot find"},
		"unknown":             {[]question{{Do: doOpen, Setup: &s}, {Do: "dance"}}, statusUsage, `question "dance": unknown or incomplete`},
		"find of nothing":     {[]question{{Do: doOpen, Setup: &s}, {Do: doFind}}, statusUsage, "incomplete"},
		"open twice":          {[]question{{Do: doOpen, Setup: &s}, {Do: doOpen, Setup: &s}}, statusUsage, "open already"},
		"open without setup":  {[]question{{Do: doOpen}}, statusUsage, "without a setup"},
		"find before an open": {[]question{{Do: doFind, Request: &r}}, statusUsage, "nothing is open"},
	} {
		questions, ask := io.Pipe()
		answers, answered := io.Pipe()
		ended := make(chan error, 1)
		go func() {
			ended <- serveChild(context.Background(), questions, answered, func(_ context.Context, s setup) (holder, error) {
				if s.Dir == "bad" {
					return nil, databaseError(errors.New("cannot open"))
				}
				h := newMemoryHolder(s)
				h.onFind = func(request, *found) error { return databaseError(errors.New("cannot find")) }
				return h, nil
			}, func() {})
		}()
		out := json.NewDecoder(answers)
		var a answer
		for _, q := range c.questions {
			require.NoError(t, json.NewEncoder(ask).Encode(q), name)
			require.NoError(t, out.Decode(&a), name)
		}
		require.Equal(t, isFailed, a.Is, name)
		require.Equal(t, c.status, exitStatus(a.err()), name)
		require.ErrorContains(t, a.err(), c.says, name)
		err := <-ended
		require.Equal(t, c.status, exitStatus(err), name)
		require.Empty(t, err.Error(), "the driver says it")
		ask.Close()
	}
}

func TestChildWithoutADriverIsAnOrphan(t *testing.T) {
	questions, ask := io.Pipe()
	_, answered := io.Pipe() // nobody reads: the child is stuck in the middle of its answer
	orphaned := make(chan struct{})
	ended := make(chan error, 1)
	s := testSetup(hybridModel)
	go func() {
		ended <- serveChild(context.Background(), questions, answered,
			func(context.Context, setup) (holder, error) { return newMemoryHolder(s), nil },
			func() { close(orphaned) })
	}()
	require.NoError(t, json.NewEncoder(ask).Encode(question{Do: doOpen, Setup: &s}))
	ask.Close()
	<-orphaned
	answered.Close()
	require.Error(t, <-ended)
}
