package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"runtime/pprof"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/holdfast-db/holdfast/txn"
)

// A suite measures rows that belong together. Every row has its reference measured in the same run, on the same file
// system, taking turns with it. To add one, write a function of this shape and enter it in benchSuites.
type suite struct {
	name  string // the word that selects it
	about string
	run   func(ctx context.Context, b *bench) ([]benchRow, error)
}

// benchSuites are all suites in the order in which they run.
func benchSuites() []suite {
	return []suite{
		{"persist", "durable publication of what is all new", benchPersist},
		{"restore", "restore from disk, checksums verified", benchRestore},
		{"ram", "restore from RAM into the caller's memory", benchRAM},
		{"publish", "publications of two new pages on 61", benchPublish},
		{"lookup", "lookups of long prompts among many checkpoints", benchLookup},
		{"pressure", "eviction of dirty pages, and restores meanwhile", benchPressure},
		{"memory", "Go heap and pauses of the garbage collector", benchMemory},
		{"amplification", "bytes written for a byte published", benchAmplification},
		{"hits", "what is found with little room", benchHits},
		{"opening", "from open to the first lookup", benchOpening},
	}
}

// bench is what a suite has to work with.
type bench struct {
	dir      string // scratch space on the file system that is measured; what lies in it is removed afterwards
	quick    bool   // a minute for everything: small sizes, few turns
	traces   string // directory of recorded traces, empty if there are none
	progress io.Writer
}

// either gives the first for a full run and the second for a quick one.
func either[T any](b *bench, full, quick T) T {
	if b.quick {
		return quick
	}
	return full
}

// scratch makes an empty directory and gives the function that removes it.
func (b *bench) scratch(name string) (dir string, remove func(), err error) {
	dir, err = os.MkdirTemp(b.dir, name+"-")
	if err != nil {
		return "", nil, fileError("make", filepath.Join(b.dir, name), err)
	}
	return dir, func() { _ = os.RemoveAll(dir) }, nil // what is left goes with b.dir
}

// turnsMin is the least number of turns of a measurement, whatever its budget.
const turnsMin = 3

// takeTurns measures both sides in turns, A B, B A, A B, …, until the budget is used up, and gives what each turn gave. A side
// returns its figure. The first turn warms up and does not count.
func takeTurns(ctx context.Context, budget time.Duration, value, reference func() (float64, error)) ([]turn, error) {
	var turns []turn
	begun := time.Now()
	for n := 0; len(turns) < turnsMin || time.Since(begun) < budget; n++ {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		var t turn
		sides := []struct {
			to   *float64
			side func() (float64, error)
		}{{&t.value, value}, {&t.reference, reference}}
		if n%2 == 1 {
			slices.Reverse(sides)
		}
		for _, s := range sides {
			var err error
			if *s.to, err = s.side(); err != nil {
				return nil, err
			}
		}
		if n > 0 {
			turns = append(turns, t)
		}
	}
	return turns, nil
}

// perSecond gives how many of n a side did in a second.
func perSecond(n int64, fn func() error) (float64, error) {
	start := time.Now()
	err := fn()
	return float64(n) / time.Since(start).Seconds(), err
}

const mebibyte = 1 << 20

// benchOptions are the flags of bench.
type benchOptions struct {
	dir      string
	traces   string
	quick    bool
	markdown bool
	profile  string // file for a CPU profile
}

func newBenchCommand() *cobra.Command {
	var o benchOptions
	var words []string
	for _, s := range benchSuites() {
		words = append(words, fmt.Sprintf("  %-14s %s", s.name, s.about))
	}
	c := &cobra.Command{
		Use:   "bench [WORD]...",
		Short: "Measure against a reference in the same run",
		Long: `Bench measures what Holdfast is for, each figure beside a reference that takes
turns with it in the same run on the same file system, and prints ratios. Words
select what is measured:

` + strings.Join(words, "\n") + `

Without words all is measured, which takes at most ten minutes, and with --quick
at most one. Figures count on a machine that does nothing else. A figure that
misses its goal is no failure of the command.

` + statusHelp,
		Example: `  holdfast bench
  holdfast bench --quick
  holdfast bench lookup memory --json | jq '.rows[] | select(.reached | not)'
  holdfast bench replay --limit 2000`,
		Args: cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, args []string) error {
			return runBench(c.Context(), o, args, c.OutOrStdout(), c.ErrOrStderr(), wantsJSON(c))
		},
	}
	f := c.Flags()
	f.SortFlags = false
	f.BoolVar(&o.quick, "quick", o.quick, "small sizes and few turns: a minute for everything")
	f.StringVar(&o.dir, "dir", o.dir, "measure the file system of `DIR` (default: where temporary files go)")
	f.StringVar(&o.traces, "traces", o.traces, "`DIR` with recorded traces (default: HOLDFAST_TRACES, or ../shared/traces)")
	f.BoolVar(&o.markdown, "markdown", o.markdown, "print the table of docs/benchmarks.md")
	f.StringVar(&o.profile, "cpu-profile", o.profile, "write a CPU profile of what is measured to `FILE`")
	c.AddCommand(newBenchReplayCommand(), newBenchOpenCommand(), newBenchOrdersCommand())
	return c
}

// selectSuites gives the suites that words name, in their order; all without words.
func selectSuites(words []string) ([]suite, error) {
	all := benchSuites()
	if len(words) == 0 {
		return all, nil
	}
	var names []string
	for _, s := range all {
		names = append(names, s.name)
	}
	for _, w := range words {
		if !slices.Contains(names, w) {
			return nil, usageError(fmt.Errorf("bench %.40q: the words are %s: %w", w, strings.Join(names, ", "), txn.ErrInvalid))
		}
	}
	return slices.DeleteFunc(all, func(s suite) bool { return !slices.Contains(words, s.name) }), nil
}

// traceDirectory gives where recorded traces are, or nothing.
func traceDirectory(flag string) string {
	for _, dir := range []string{flag, os.Getenv("HOLDFAST_TRACES"), "../shared/traces"} {
		if dir == "" {
			continue
		}
		if st, err := os.Stat(dir); err == nil && st.IsDir() {
			return dir
		}
		if dir == flag {
			break
		}
	}
	return ""
}

func runBench(ctx context.Context, o benchOptions, words []string, stdout, stderr io.Writer, asJSON bool) (err error) {
	suites, err := selectSuites(words)
	if err != nil {
		return err
	}
	b := &bench{quick: o.quick, traces: traceDirectory(o.traces), progress: stderr}
	if o.traces != "" && b.traces == "" {
		return usageError(fmt.Errorf("--traces %s: no such directory: %w", o.traces, txn.ErrNotFound))
	}
	if b.dir, err = os.MkdirTemp(o.dir, "holdfast-bench-"); err != nil {
		return databaseError(fmt.Errorf("make a directory: %w: %w", txn.ErrIO, err))
	}
	defer func() { err = errors.Join(err, os.RemoveAll(b.dir)) }()
	if o.profile != "" {
		stop, err := profileTo(o.profile)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, stop()) }()
	}
	r := &benchReport{Machine: describeMachine(b.dir), Quick: o.quick, Rows: []benchRow{}}
	begun := time.Now()
	for i, s := range suites {
		if ctx.Err() != nil {
			break
		}
		fmt.Fprintf(stderr, "bench: %s (%d of %d, %v)\n", s.name, i+1, len(suites), time.Since(begun).Round(time.Second))
		debug.FreeOSMemory() // what the one before left behind is not this one's to collect
		rows, err := s.run(ctx, b)
		if err != nil && ctx.Err() == nil {
			r.Errors = append(r.Errors, fmt.Sprintf("%s: %v", s.name, err))
		}
		for i := range rows {
			rows[i].Suite = s.name
		}
		r.Rows = append(r.Rows, rows...)
	}
	r.Interrupted = ctx.Err() != nil
	r.Seconds = math.Round(time.Since(begun).Seconds()*10) / 10
	r.finite()
	write := r.writeTable
	switch {
	case asJSON:
		write = func(w io.Writer) error { return writeJSON(w, r) }
	case o.markdown:
		write = r.writeMarkdown
	}
	if err := write(stdout); err != nil {
		return err
	}
	switch {
	case r.Interrupted:
		return failure{statusInterrupted, errors.New("interrupted")}
	case len(r.Errors) > 0:
		return databaseError(errors.New(strings.Join(r.Errors, "; ")))
	}
	return nil
}

// profileTo writes a CPU profile to a file until it is stopped.
func profileTo(path string) (stop func() error, err error) {
	f, err := os.Create(path)
	if err != nil {
		return nil, usageError(fileError("create", path, err))
	}
	if err := pprof.StartCPUProfile(f); err != nil {
		return nil, errors.Join(usageError(fmt.Errorf("--cpu-profile: %w: %w", txn.ErrConflict, err)), f.Close())
	}
	return func() error {
		pprof.StopCPUProfile()
		if err := f.Close(); err != nil {
			return fileError("write", path, err)
		}
		return nil
	}, nil
}

// describeMachine says what the figures were measured on.
func describeMachine(dir string) string {
	return fmt.Sprintf("%d processors of %s, %s/%s, %s, file system %s", runtime.GOMAXPROCS(0), processorName(), runtime.GOOS, runtime.GOARCH, runtime.Version(), fileSystemName(dir))
}

// processorName gives the model name of the processor where the system tells it.
func processorName() string {
	info, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(info)) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return "an unknown kind"
}

// fileSystemName gives type and device of the file system that dir is on, where the system tells them.
func fileSystemName(dir string) string {
	mounts, _ := os.ReadFile("/proc/self/mounts")
	best, name := "", "unknown"
	for line := range strings.Lines(string(mounts)) {
		f := strings.Fields(line)
		if len(f) < 3 || len(f[1]) < len(best) {
			continue
		}
		if rel, err := filepath.Rel(f[1], dir); err == nil && rel != ".." && !strings.HasPrefix(rel, "../") {
			best, name = f[1], f[2]+" on "+f[0]
		}
	}
	return name
}
