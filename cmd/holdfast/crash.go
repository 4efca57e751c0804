package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/holdfast-db/holdfast/fuzz"
)

// crashResult is what crash prints with --json.
type crashResult struct {
	fuzz.Totals
	Parallel  int    `json:"parallel"`
	Violation string `json:"violation,omitempty"`
	File      string `json:"file,omitempty"` // a program that shows it
}

// crashWorker is the hidden command of a worker process.
const crashWorker = "crash-worker"

// crashReplays is how often a history is run again at most until it shows its violation.
const crashReplays = 10

// crashShrinkTries bounds the programs that are run to make one smaller.
const crashShrinkTries = 300

func newCrashWorkerCommand() *cobra.Command {
	return &cobra.Command{Use: crashWorker, Hidden: true, Args: cobra.NoArgs, Run: func(*cobra.Command, []string) { fuzz.WorkerMain() }}
}

func newCrashCommand() *cobra.Command {
	var o struct {
		duration    time.Duration
		count       int64
		seed        uint64
		replay, out string
		parallel    int
		exhaustive  bool
	}
	c := &cobra.Command{
		Use:   "crash",
		Short: "Look for what breaks the promise: operations, faults, crashes",
		Long: `Crash leads databases on simulated disks through generated histories of
operations, faults, killed processes and power failures, and holds each against
a model after every step and after every recovery. The database is the real one;
the disk keeps of what was not synced whatever a file system may keep.

A history follows from its seed. The first violation ends the run: its history
is made smaller and written to a file, which --replay runs again.

` + statusHelp,
		Example: `  holdfast crash --duration 10m
  holdfast crash --count 20000 --seed 1 --json
  holdfast crash --exhaustive
  holdfast crash --replay crash-17.json`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			self, err := os.Executable()
			if err != nil {
				return databaseError(err)
			}
			if o.parallel < 1 || o.parallel > 1024 {
				return usageError(fmt.Errorf("--parallel %d: want 1…1024", o.parallel))
			}
			if o.count < 0 || o.duration < 0 {
				return usageError(errors.New("--count and --duration are not negative"))
			}
			if o.count == 0 && o.duration == 0 && !o.exhaustive {
				o.duration = time.Minute
			}
			scratch, err := os.MkdirTemp("", "holdfast-crash")
			if err != nil {
				return databaseError(err)
			}
			defer os.RemoveAll(scratch)
			campaign := fuzz.Campaign{
				Worker: []string{self, crashWorker}, Parallel: o.parallel, Seed: o.seed, Cycles: o.count, Duration: o.duration, Small: o.exhaustive, Scratch: scratch,
			}
			if o.replay != "" {
				return replayCrash(c, &campaign, o.replay)
			}
			line := &crashLine{w: c.ErrOrStderr()}
			campaign.Progress = line.show
			totals, found, err := campaign.Run(c.Context())
			line.end()
			if err != nil {
				return databaseError(err)
			}
			r := crashResult{Totals: totals, Parallel: o.parallel}
			if found != nil {
				r.Violation = found.Detail
				if found.Program == nil { // of the exhaustive set: its steps are the program
					found.Program = &fuzz.Program{Policy: found.Small.Policy, RAM: 32 << 20, Steps: found.Small.Steps, Problem: found.Detail}
				} else {
					fmt.Fprintln(c.ErrOrStderr(), "violation, making it smaller")
					found.Program = campaign.Shrink(c.Context(), found.Program, crashShrinkTries)
				}
				r.File = o.out
				if r.File == "" {
					r.File = fmt.Sprintf("crash-%d.json", found.Program.Seed)
				}
				if err := os.WriteFile(r.File, found.Program.JSON(), 0o644); err != nil {
					return databaseError(err)
				}
			}
			if err := printCrash(c, &r); err != nil {
				return databaseError(err)
			}
			if found != nil {
				return failure{statusMismatch, fmt.Errorf("a promise was broken; holdfast crash --replay %s shows it again", r.File)}
			}
			if c.Context().Err() != nil {
				return failure{statusInterrupted, context.Cause(c.Context())}
			}
			return nil
		},
	}
	f := c.Flags()
	f.DurationVar(&o.duration, "duration", 0, "stop after this time; a minute, if no count is given")
	f.Int64Var(&o.count, "count", 0, "stop after so many crashes")
	f.Uint64Var(&o.seed, "seed", 1, "seed of the first history; the others follow")
	f.StringVar(&o.replay, "replay", "", "run the history in this file, up to ten times")
	f.StringVar(&o.out, "out", "", "write the history of a violation to this file")
	f.IntVar(&o.parallel, "parallel", runtime.NumCPU(), "histories at a time, each in a process of its own")
	f.BoolVar(&o.exhaustive, "exhaustive", false, "instead of generated histories, every small one, cut off everywhere")
	return c
}

func replayCrash(c *cobra.Command, campaign *fuzz.Campaign, path string) error {
	p, err := fuzz.ReadProgram(path)
	if err != nil {
		return usageError(err)
	}
	begun := time.Now()
	var o *fuzz.Outcome
	for range crashReplays { // what goroutines do between two calls of the disk is not decided by the seed
		if o, err = campaign.Replay(c.Context(), p); err != nil {
			return databaseError(err)
		}
		if o.Violation != nil {
			break
		}
	}
	r := crashResult{Parallel: 1, File: path}
	r.Totals = fuzz.Totals{
		Cycles: int64(o.Cycles), Programs: 1, Calls: int64(o.Calls), Seed: p.Seed, Seconds: time.Since(begun).Seconds(), Steps: o.Steps, Faults: o.Faults, Checks: o.Checks,
	}
	r.PerSecond = float64(r.Cycles) / r.Seconds
	if o.Violation != nil {
		r.Violations, r.Violation = 1, o.Violation.Error()
	}
	if err := printCrash(c, &r); err != nil {
		return databaseError(err)
	}
	if o.Violation != nil {
		return failure{statusMismatch, errors.New("a promise was broken")}
	}
	return nil
}

func printCrash(c *cobra.Command, r *crashResult) error {
	if wantsJSON(c) {
		return writeJSON(c.OutOrStdout(), r)
	}
	faults := 0
	for _, n := range r.Faults {
		faults += n
	}
	_, err := fmt.Fprintf(c.OutOrStdout(), "%s crashes recovered from in %s histories, %.1f s, %.0f a second; %s faults of %d kinds; seed %d; violations: %d\n",
		humanize.Comma(r.Cycles), humanize.Comma(r.Programs), r.Seconds, r.PerSecond, humanize.Comma(int64(faults)), len(r.Faults), r.Seed, r.Violations)
	if err == nil && r.Violation != "" {
		_, err = fmt.Fprintln(c.OutOrStdout(), r.Violation)
	}
	return err
}

// crashLine is the line on a terminal that tells how far a run is.
type crashLine struct {
	w     io.Writer
	shown time.Time
	width int
}

func (l *crashLine) show(t fuzz.Totals) {
	f, ok := l.w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) || time.Since(l.shown) < 200*time.Millisecond {
		return
	}
	l.shown = time.Now()
	s := fmt.Sprintf("%s crashes, %.0f a second, %s histories, %d kinds of check, %d of fault, %d of step", humanize.Comma(t.Cycles), t.PerSecond,
		humanize.Comma(t.Programs), len(t.Checks), len(t.Faults), len(t.Steps))
	fmt.Fprintf(l.w, "\r%s%s", s, strings.Repeat(" ", max(0, l.width-len(s))))
	l.width = len(s)
}

func (l *crashLine) end() {
	if l.width > 0 {
		fmt.Fprintln(l.w)
	}
}
