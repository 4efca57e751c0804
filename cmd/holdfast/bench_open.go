package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/holdfast-db/holdfast/db"
	"github.com/holdfast-db/holdfast/txn"
)

// Bench open measures how long a directory takes from the call of Open to the answer of the first lookup. Directories are made
// and opened by child processes, so that neither the memory nor the file handles of who made one, nor of who measured
// before, are there when it is opened. They are as warm in the page cache as a process that restarts finds them.
const (
	openPageTokens   = 16
	openPageBytes    = 64   // pages are counted at open, if at all: their bytes do not matter
	openLongPages    = 61   // of a long checkpoint: 60 attention pages, and the recurrent state
	openFillers      = 8    // at a time, that fill a replay window: they overshoot little
	openPublishers   = 96   // at a time, so that they share syncs
	openTries        = 5    // openings of a directory; the median counts
	openTurns        = 16   // checkpoints of a conversation in a directory of turns
	openTurnTokens   = 16   // that a turn adds: one attention page, and one state
	openBytesPerPage = 512  // of Options.ReplayBytes that a page counts for
	openQuick        = 1024 // divides all sizes with --quick, but for a least of 64
)

// openShape is what a directory holds.
type openShape struct {
	Checkpoints int  `json:"checkpoints"`
	Turns       bool `json:"turns"` // conversations whose turns share prefixes, two new pages each; else long ones that share nothing
}

func (s openShape) namespace() (*db.Namespace, error) {
	ranks := 2
	if s.Turns {
		ranks = 1
	}
	return db.NewNamespace(db.Identity{
		Model: "bench-open", Weights: "unversioned:made-up", Tokenizer: "random numbers", Engine: "holdfast bench open 1", DType: "bytes",
		Layout: db.Layout{Ranks: ranks, Groups: []db.Group{
			{Name: "attention:kv", Kind: db.Attention, PageBytes: openPageBytes, PageTokens: openPageTokens},
			{Name: "recurrent:state", Kind: db.Recurrent, PageBytes: openPageBytes, Pages: 1},
		}},
	})
}

// perSequence is how many checkpoints one sequence has.
func (s openShape) perSequence() int {
	if s.Turns {
		return openTurns
	}
	return 1
}

// tokens are those of the sequence with a number.
func (s openShape) tokens(number int) []int32 {
	n := (openLongPages - 1) * openPageTokens
	if s.Turns {
		n = openTurns * openTurnTokens
	}
	r := rand.New(rand.NewPCG(uint64(number), 0x6f70656e))
	t := make([]int32, n)
	for i := range t {
		t[i] = r.Int32()
	}
	return t
}

// openTask is what a child process is to do.
type openTask struct {
	Dir   string    `json:"dir"`
	Shape openShape `json:"shape"`
	From  int       `json:"from"` // publish sequences from here on; less than 0: publish nothing and measure an opening
	// Log says to publish until an opening has as much to replay as an Options.ReplayBytes of so many bytes allows, whatever the shape
	// says, and then to end without closing.
	Log int64 `json:"log,omitempty"`
	// Abandon ends the process without closing.
	Abandon bool `json:"abandon,omitempty"`
}

// openResult is what it found.
type openResult struct {
	Seconds    float64 `json:"seconds"` // to the answer of the first lookup
	Open       float64 `json:"open_seconds"`
	Replay     float64 `json:"replay_seconds"`
	LogRecords int64   `json:"log_records"`
	Offset     int64   `json:"offset"`
	Unverified int64   `json:"unverified"`
	Memory     int64   `json:"memory_bytes"` // resident, after the first lookup
	Error      string  `json:"error,omitempty"`
}

// newBenchOpenChildCommand is the process that makes or opens a directory. People have no use for it.
func newBenchOpenChildCommand() *cobra.Command {
	return &cobra.Command{
		Use: "open-child TASK", Hidden: true, Args: cobra.ExactArgs(1), Short: "Make or open a directory for bench open",
		RunE: func(c *cobra.Command, args []string) error {
			var task openTask
			if err := json.Unmarshal([]byte(args[0]), &task); err != nil {
				return usageError(err)
			}
			r, err := task.run(c.Context())
			if err != nil {
				r.Error = err.Error()
			}
			if err := json.NewEncoder(c.OutOrStdout()).Encode(r); err != nil {
				return databaseError(err)
			}
			if task.Abandon || task.Log > 0 {
				killSelf()
			}
			return nil
		},
	}
}

// killSelf ends this process as SIGKILL does, nothing of it runs any more.
func killSelf() {
	if p, err := os.FindProcess(os.Getpid()); err == nil {
		_ = p.Kill()
	}
	select {} // until it arrives
}

func (t openTask) run(ctx context.Context) (r openResult, err error) {
	ns, err := t.Shape.namespace()
	if err != nil {
		return r, err
	}
	sequence := func(number int) (*db.Sequence, error) {
		s := ns.NewSequence()
		return s, s.Append(t.Shape.tokens(number))
	}
	o := db.Options{RAMBytes: 256 << 20, Logger: slog.New(slog.DiscardHandler)}
	if t.Shape.Turns {
		o.WritePolicy, o.RAMBytes = db.OnEvict, 1<<30 // many are made sooner if their pages are written together when it closes
	}
	if t.Log > 0 {
		o.ReplayBytes = 2 * t.Log // half of it begins a flush, and then the window would begin to shrink
	}
	probe, err := sequence(t.Shape.Checkpoints / t.Shape.perSequence() / 2)
	if err != nil {
		return r, err
	}
	start := time.Now()
	d, err := db.Open(ctx, t.Dir, o)
	if err != nil {
		return r, err
	}
	r.Open = time.Since(start).Seconds()
	if t.From < 0 {
		m, err := d.Lookup(ctx, probe, db.LookupOptions{})
		r.Seconds = time.Since(start).Seconds()
		if err != nil && !errors.Is(err, db.ErrNotFound) {
			return r, err
		}
		report := d.RecoveryReport()
		r.Offset, r.LogRecords, r.Replay, r.Unverified, r.Memory = m.Offset, report.LogRecords, report.Replay.Seconds(), report.Unverified, residentBytes()
	} else if err := t.publish(ctx, d, sequence); err != nil {
		return r, err
	}
	if t.Abandon || t.Log > 0 {
		return r, nil
	}
	stats, err := d.Stats()
	if err == nil && stats.Checkpoints < int64(t.Shape.Checkpoints/t.Shape.perSequence()*t.Shape.perSequence()) {
		err = fmt.Errorf("%d checkpoints are listed instead of %d: %w", stats.Checkpoints, t.Shape.Checkpoints, txn.ErrConflict)
	}
	closed, e := d.Close(ctx)
	if err = errors.Join(err, e); err == nil && closed.Retired > 0 {
		err = fmt.Errorf("%d checkpoints were not written: %w", closed.Retired, txn.ErrIO)
	}
	return r, err
}

// publish publishes sequences, many at a time.
func (t openTask) publish(ctx context.Context, d *db.DB, sequence func(int) (*db.Sequence, error)) error {
	before, err := d.Stats()
	if err != nil {
		return err
	}
	var next atomic.Int64
	next.Store(int64(t.From))
	var group sync.WaitGroup
	errs := make([]error, openPublishers)
	publishers := openPublishers
	if t.Log > 0 {
		publishers = openFillers
	}
	for w := range publishers {
		group.Go(func() {
			for errs[w] == nil {
				n := int(next.Add(1)) - 1
				switch {
				case t.Log == 0 && (n+1)*t.Shape.perSequence() > t.Shape.Checkpoints:
					return
				case t.Log > 0:
					// What is being published meanwhile comes to less than a tenth.
					s, err := d.Stats()
					if err != nil || 10*(s.LogWritten-before.LogWritten) >= 9*t.Log || 10*(s.Pages-before.Pages) >= 9*t.Log/openBytesPerPage {
						errs[w] = err
						return
					}
				}
				s, err := sequence(n)
				if err == nil {
					err = t.publishSequence(ctx, d, s)
				}
				errs[w] = err
			}
		})
	}
	group.Wait()
	return errors.Join(errs...)
}

// publishSequence publishes the checkpoints of one sequence.
func (t openTask) publishSequence(ctx context.Context, d *db.DB, s *db.Sequence) error {
	each := s.Len() / int64(t.Shape.perSequence())
	for at := each; at <= s.Len(); at += each {
		p, err := d.Begin(ctx, db.PublishRequest{Sequence: s, Offset: at})
		if err != nil {
			return err
		}
		for rank := range s.Namespace().Layout().Ranks {
			slots, err := p.Slots(ctx, rank)
			if err != nil {
				return err
			}
			for _, slot := range slots {
				slot.Filled(slot.Size())
			}
			if _, err := p.Commit(ctx, rank); err != nil {
				return err
			}
		}
	}
	return nil
}

// residentBytes is what this process has in memory, 0 where that cannot be told.
func residentBytes() int64 {
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	if f := strings.Fields(string(b)); len(f) > 1 {
		pages, _ := strconv.ParseInt(f[1], 10, 64)
		return pages * int64(os.Getpagesize())
	}
	return 0
}

// openChild runs a task in a process of its own.
func openChild(ctx context.Context, t openTask) (r openResult, err error) {
	task, err := json.Marshal(t)
	if err != nil {
		return r, err
	}
	self, err := os.Executable()
	if err != nil {
		self = os.Args[0]
	}
	c := exec.CommandContext(ctx, self, "open-child", string(task))
	dieWithParent(c)
	out, err := c.Output()
	if len(out) == 0 {
		return r, fmt.Errorf("the process that opens %s: %w: %w", t.Dir, txn.ErrIO, err)
	}
	if err := json.Unmarshal(out, &r); err != nil {
		return r, fmt.Errorf("the process that opens %s: %w: %w", t.Dir, txn.ErrIO, err)
	}
	if r.Error != "" {
		return r, fmt.Errorf("the process that opens %s: %s: %w", t.Dir, r.Error, txn.ErrIO)
	}
	return r, nil
}

// openRow is one figure of bench open.
type openRow struct {
	Name      string  `json:"name"`
	About     string  `json:"about"`
	Value     float64 `json:"value"`
	Unit      string  `json:"unit"`
	Reference float64 `json:"reference"` // 0: none
	Against   string  `json:"against"`
	Ratio     float64 `json:"ratio"`
	Goal      string  `json:"goal"`
	Reached   bool    `json:"reached"`
}

// openBench measures openings inside a directory.
type openBench struct {
	dir      string
	quick    bool
	progress io.Writer
}

func (b *openBench) size(n int) int {
	if b.quick {
		return max(n/openQuick, 64)
	}
	return n
}

// openSuite is a selectable part of bench open.
type openSuite struct {
	name, about string
	run         func(b *openBench, ctx context.Context) ([]openRow, error)
}

func openSuites() []openSuite {
	return []openSuite{
		{"long", "65,536 checkpoints of 61 pages: closed, and killed", (*openBench).long},
		{"scale", "50,000 and 100,000 checkpoints", (*openBench).scale},
		{"turns1m", "1,000,000 checkpoints of conversations: takes long to build", (*openBench).turns1m},
	}
}

// make makes a directory and says how long that took.
func (b *openBench) make(ctx context.Context, name string, shape openShape) (string, error) {
	dir := filepath.Join(b.dir, name)
	start := time.Now()
	_, err := openChild(ctx, openTask{Dir: dir, Shape: shape})
	fmt.Fprintf(b.progress, "bench open: made %s, %s checkpoints, in %.1f s\n", name, count(int64(shape.Checkpoints)), time.Since(start).Seconds())
	return dir, err
}

// median opens directories in turns, so that a machine that becomes slower does so for all of them, and gives the median of each.
// The first turn warms up and does not count. prepare gives the task of a turn.
func (b *openBench) median(ctx context.Context, prepare ...func(turn int) (openTask, error)) ([]openResult, error) {
	all := make([][]openResult, len(prepare))
	for turn := range openTries + 1 {
		for i, of := range prepare {
			t, err := of(turn)
			if err != nil {
				return nil, err
			}
			r, err := openChild(ctx, t)
			if err != nil {
				return nil, err
			}
			if t.Shape.Checkpoints > 0 && r.Offset == 0 {
				return nil, fmt.Errorf("%s: the first lookup found nothing: %w", t.Dir, txn.ErrNotFound)
			}
			if turn > 0 {
				all[i] = append(all[i], r)
			}
		}
	}
	medians := make([]openResult, len(prepare))
	for i, rs := range all {
		slices.SortFunc(rs, func(a, b openResult) int { return int((a.Seconds - b.Seconds) * 1e9) })
		medians[i] = rs[len(rs)/2]
	}
	return medians, nil
}

// closed is the task of opening a directory that was closed.
func closed(dir string, shape openShape) func(int) (openTask, error) {
	return func(int) (openTask, error) { return openTask{Dir: dir, Shape: shape, From: -1}, nil }
}

// killed is the task of opening a copy of a directory that was not.
func (b *openBench) killed(dir string, shape openShape) func(int) (openTask, error) {
	return func(int) (openTask, error) {
		copied := dir + "-copy"
		if err := os.RemoveAll(copied); err != nil {
			return openTask{}, fileError("remove", copied, err)
		}
		return openTask{Dir: copied, Shape: shape, From: -1, Abandon: true}, cloneDatabase(dir, copied)
	}
}

// cloneDatabase copies a database that nobody has open. Files that are never changed once they are whole are shared.
func cloneDatabase(from, to string) error {
	return filepath.WalkDir(from, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return fileError("walk", path, err)
		}
		name, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		at := filepath.Join(to, name)
		switch ext := filepath.Ext(name); {
		case e.IsDir():
			err = os.MkdirAll(at, 0o700)
		case ext == ".sst" || ext == ".seg":
			err = os.Link(path, at)
		default:
			var b []byte
			if b, err = os.ReadFile(path); err == nil {
				err = os.WriteFile(at, b, 0o600)
			}
		}
		if err != nil {
			return fileError("copy", path, err)
		}
		return nil
	})
}

// row compares an opening with a reference.
func row(name, about string, r, reference openResult, against string, value func(openResult) float64, unit string, goal string, reached func(value, ratio float64) bool) openRow {
	x := openRow{Name: name, About: about, Value: value(r), Unit: unit, Reference: value(reference), Against: against, Goal: goal}
	if x.Reference > 0 {
		x.Ratio = x.Value / x.Reference
	}
	x.Reached = reached(x.Value, x.Ratio)
	return x
}

func inSeconds(r openResult) float64 { return r.Seconds }
func inMiB(r openResult) float64     { return float64(r.Memory) / (1 << 20) }

func within(seconds float64) (string, func(value, ratio float64) bool) {
	return fmt.Sprintf("value <= %g", seconds), func(value, _ float64) bool { return value <= seconds }
}

func atMost(bound float64) (string, func(value, ratio float64) bool) {
	return fmt.Sprintf("ratio <= %g", bound), func(_, ratio float64) bool { return ratio > 0 && ratio <= bound }
}

func (b *openBench) long(ctx context.Context) ([]openRow, error) {
	shape := openShape{Checkpoints: b.size(65536)}
	dir, err := b.make(ctx, "long", shape)
	if err != nil {
		return nil, err
	}
	small := openShape{Checkpoints: max(shape.Checkpoints/16, 1)}
	smallDir, err := b.make(ctx, "short", small)
	if err != nil {
		return nil, err
	}
	empty, err := b.make(ctx, "empty", openShape{})
	if err != nil {
		return nil, err
	}
	rs, err := b.median(ctx, closed(dir, shape), closed(smallDir, small), closed(empty, openShape{}))
	if err != nil {
		return nil, err
	}
	// A window is full when the log has as many bytes that the index lacks as Options.ReplayBytes allows.
	full := int64(db.DefaultReplayBytes)
	if b.quick {
		full /= 4
	}
	if _, err := openChild(ctx, openTask{Dir: dir, Shape: shape, From: shape.Checkpoints, Log: full}); err != nil {
		return nil, err
	}
	ks, err := b.median(ctx, b.killed(dir, shape), closed(empty, openShape{}))
	if err != nil {
		return nil, err
	}
	quarter, q := within(0.25)
	second, s := within(1)
	twice, m := atMost(2)
	about := fmt.Sprintf("%s checkpoints of %d pages on 2 ranks", count(int64(shape.Checkpoints)), openLongPages)
	fmt.Fprintf(b.progress, "bench open: killed: %s records replayed in %.3f s\n", count(ks[0].LogRecords), ks[0].Replay)
	return []openRow{
		row("open.clean", "first lookup after a clean close, "+about, rs[0], rs[2], "an empty database", inSeconds, "s", quarter, q),
		row("open.killed", "first lookup after SIGKILL with a full replay window, "+about, ks[0], ks[1], "an empty database", inSeconds, "s", second, s),
		row("open.memory", "resident memory after the first lookup, "+about, rs[0], rs[1], "a sixteenth of them", inMiB, "MiB", twice, m),
	}, nil
}

func (b *openBench) scale(ctx context.Context) ([]openRow, error) {
	half, whole := openShape{Checkpoints: b.size(50_000), Turns: true}, openShape{Checkpoints: b.size(100_000), Turns: true}
	halfDir, err := b.make(ctx, "half", half)
	if err != nil {
		return nil, err
	}
	wholeDir, err := b.make(ctx, "whole", whole)
	if err != nil {
		return nil, err
	}
	rs, err := b.median(ctx, closed(wholeDir, whole), closed(halfDir, half))
	if err != nil {
		return nil, err
	}
	goal, reached := atMost(2.2)
	return []openRow{row("open.scale", fmt.Sprintf("first lookup, %s checkpoints", count(int64(whole.Checkpoints))), rs[0], rs[1], "half of them", inSeconds, "s", goal, reached)}, nil
}

func (b *openBench) turns1m(ctx context.Context) ([]openRow, error) {
	shape := openShape{Checkpoints: b.size(1_000_000), Turns: true}
	dir, err := b.make(ctx, "turns", shape)
	if err != nil {
		return nil, err
	}
	empty, err := b.make(ctx, "empty", openShape{})
	if err != nil {
		return nil, err
	}
	rs, err := b.median(ctx, closed(dir, shape), closed(empty, openShape{}))
	if err != nil {
		return nil, err
	}
	goal, reached := within(2)
	return []openRow{
		row("open.turns1m", fmt.Sprintf("first lookup, %s checkpoints of conversations of %d turns", count(int64(shape.Checkpoints)), openTurns), rs[0], rs[1], "an empty database", inSeconds, "s", goal, reached),
	}, nil
}

// openReport is the result of bench open.
type openReport struct {
	Quick bool      `json:"quick"`
	Rows  []openRow `json:"rows"`
}

func (r openReport) writeTable(w io.Writer) error {
	t := newTable()
	t.AppendHeader(table.Row{"what", "measured", "reference in the same run", "ratio", "goal"})
	for _, x := range r.Rows {
		verdict := "missed"
		if x.Reached {
			verdict = "reached"
		}
		t.AppendRow(table.Row{x.Name + ": " + x.About, fmt.Sprintf("%.3g %s", x.Value, x.Unit), fmt.Sprintf("%.3g %s, %s", x.Reference, x.Unit, x.Against),
			fmt.Sprintf("%.2f", x.Ratio), x.Goal + ": " + verdict})
	}
	_, err := fmt.Fprintln(w, t.Render())
	return err
}

func newBenchOpenCommand() *cobra.Command {
	b := &openBench{}
	var words []string
	for _, s := range openSuites() {
		words = append(words, fmt.Sprintf("  %-8s %s", s.name, strings.ReplaceAll(wrapAt(s.about, 66), "\n", "\n           ")))
	}
	c := &cobra.Command{
		Use:   "open [WORD]...",
		Short: "Measure the time from opening to the first lookup",
		Long: `Bench open makes databases of some sizes and measures, in a process of its own
each time, how long it takes from the call of Open until the first lookup is
answered. Words select what is measured; without words it is all but turns1m.

` + strings.Join(words, "\n") + `

` + statusHelp,
		Example: `  holdfast bench open
  holdfast bench open turns1m --dir /var/tmp --json`,
		Args: cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, args []string) error {
			b.progress = c.ErrOrStderr()
			return b.runWords(c.Context(), args, c.OutOrStdout(), wantsJSON(c))
		},
	}
	f := c.Flags()
	f.SortFlags = false
	f.StringVar(&b.dir, "dir", b.dir, "make the databases inside `DIR` (default: where temporary files go)")
	f.BoolVar(&b.quick, "quick", b.quick, "small sizes, to see that it works")
	return c
}

func (b *openBench) runWords(ctx context.Context, words []string, stdout io.Writer, asJSON bool) (err error) {
	suites := openSuites()
	var names []string
	for _, s := range suites {
		names = append(names, s.name)
	}
	for _, w := range words {
		if !slices.Contains(names, w) {
			return usageError(fmt.Errorf("bench open %.40q: the words are %s: %w", w, strings.Join(names, ", "), txn.ErrInvalid))
		}
	}
	if len(words) == 0 {
		words = slices.DeleteFunc(names, func(n string) bool { return n == "turns1m" })
	}
	root, err := os.MkdirTemp(b.dir, "holdfast-bench-open-")
	if err != nil {
		return databaseError(fmt.Errorf("make a directory: %w: %w", txn.ErrIO, err))
	}
	defer func() { err = errors.Join(err, os.RemoveAll(root)) }()
	r := openReport{Quick: b.quick, Rows: []openRow{}}
	for _, s := range suites {
		if !slices.Contains(words, s.name) {
			continue
		}
		of := &openBench{dir: filepath.Join(root, s.name), quick: b.quick, progress: b.progress}
		if err := os.Mkdir(of.dir, 0o700); err != nil {
			return databaseError(fileError("make", of.dir, err))
		}
		rows, err := s.run(of, ctx)
		if err != nil {
			if ctx.Err() != nil {
				return failure{statusInterrupted, errors.New("interrupted")}
			}
			return databaseError(err)
		}
		r.Rows = append(r.Rows, rows...)
		for _, x := range rows {
			fmt.Fprintf(b.progress, "bench open: %s %.3g %s, reference %.3g\n", x.Name, x.Value, x.Unit, x.Reference)
		}
		if err := os.RemoveAll(of.dir); err != nil {
			return databaseError(fileError("remove", of.dir, err))
		}
	}
	if asJSON {
		return writeJSON(stdout, r)
	}
	return r.writeTable(stdout)
}
