package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"path/filepath"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/holdfast-db/holdfast/txn"
)

// bareRecordBytes is the size of the commit record of the bare loop.
const bareRecordBytes = 100

// comparison is a replay beside a bare loop over the same requests in the same run. The bare loop is the least that
// makes a checkpoint durable: it appends the bytes of the request that no earlier one had to one file, syncs it, appends
// a commit record to another, and syncs that. It has no lookup, no restore, no check, no content to compute and nothing
// to do for a request that brings nothing new.
//
// The two take turns in slices of some hundred requests, and take turns in going first, so that a disk that becomes
// slower or faster does so for both.
type comparison struct {
	Trace         string  `json:"trace"`
	Model         model   `json:"model"`
	Ranks         int     `json:"ranks"`
	PageBytes     int64   `json:"page_bytes"`
	StateBytes    int64   `json:"state_bytes"`
	Requests      int64   `json:"requests"`
	NewBytes      int64   `json:"new_bytes"` // what the bare loop wrote, commit records apart
	BareSeconds   float64 `json:"bare_seconds"`
	ReplaySeconds float64 `json:"replay_seconds"`
	Ratio         float64 `json:"ratio"` // bare time over replay time: 1 is as fast as the bare loop
	HitBlocks     int64   `json:"hit_blocks"`
	Mismatches    int64   `json:"mismatches"`
	Interrupted   bool    `json:"interrupted"`
}

// bareLoop appends and syncs.
type bareLoop struct {
	data, commits *os.File
	content       []byte // written again and again; no file system here looks at it
}

func newBareLoop(dir string) (*bareLoop, error) {
	b := &bareLoop{}
	for _, f := range []struct {
		file **os.File
		name string
	}{{&b.data, "data"}, {&b.commits, "commits"}} {
		var err error
		if *f.file, err = os.OpenFile(filepath.Join(dir, f.name), os.O_CREATE|os.O_EXCL|os.O_WRONLY|os.O_APPEND, 0o600); err != nil {
			return nil, errors.Join(fileError("create", f.name, err), b.close())
		}
	}
	return b, nil
}

// reserve makes room for an append of n bytes, outside of what is measured.
func (b *bareLoop) reserve(n int64) {
	if n = max(n, bareRecordBytes); n > int64(len(b.content)) {
		b.content = make([]byte, n)
		rand.Read(b.content)
	}
}

// commit makes n bytes durable, and then says so durably.
func (b *bareLoop) commit(n int64) error {
	for _, f := range []struct {
		file *os.File
		n    int64
	}{{b.data, n}, {b.commits, bareRecordBytes}} {
		if _, err := f.file.Write(b.content[:f.n]); err != nil {
			return fileError("write", f.file.Name(), err)
		}
		if err := f.file.Sync(); err != nil {
			return fileError("sync", f.file.Name(), err)
		}
	}
	return nil
}

func (b *bareLoop) close() error {
	var errs []error
	for _, f := range []*os.File{b.data, b.commits} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}

// compare replays src in a database and in a bare loop, in slices, in two directories that it makes inside dir and
// removes.
func compare(ctx context.Context, src source, s setup, dir string, slice int, p *progress) (c comparison, err error) {
	c = comparison{Trace: src.name, Model: s.Model, Ranks: s.Ranks, PageBytes: s.PageBytes, StateBytes: s.StateBytes}
	root, err := os.MkdirTemp(dir, "holdfast-bench-")
	if err != nil {
		return c, databaseError(fmt.Errorf("make a directory: %w: %w", txn.ErrIO, err))
	}
	defer func() { err = errors.Join(err, os.RemoveAll(root)) }()
	bareDir := filepath.Join(root, "bare")
	if err := os.Mkdir(bareDir, 0o700); err != nil {
		return c, databaseError(fileError("make", bareDir, err))
	}
	bare, err := newBareLoop(bareDir)
	if err != nil {
		return c, databaseError(err)
	}
	defer func() { err = errors.Join(err, bare.close()) }()
	s.Dir = filepath.Join(root, "db")
	h, err := openEmbedded(ctx, s)
	if err != nil {
		return c, err
	}
	defer func() { err = errors.Join(err, h.close(ctx)) }()

	d := &replay{source: src, holder: h, ledger: newLedger(s), fresh: true, progress: p, report: &report{}}
	known := newLedger(s) // to the bare loop
	next, stop := iter.Pull2(src.requests)
	defer stop()
	p.begin("bench", src.total)
	defer p.end()
	var bareTime, replayTime time.Duration
	for bareFirst := false; ctx.Err() == nil; bareFirst = !bareFirst {
		var requests []request
		var sizes []int64
		for len(requests) < slice {
			r, err, ok := next()
			if !ok {
				break
			}
			if err != nil {
				return c, usageError(err)
			}
			requests, sizes = append(requests, r), append(sizes, known.newBytes(r))
			known.acknowledge(r)
			bare.reserve(sizes[len(sizes)-1])
		}
		if len(requests) == 0 {
			break
		}
		runBare := func() error {
			defer func(start time.Time) { bareTime += time.Since(start) }(time.Now())
			for _, n := range sizes {
				if n == 0 {
					continue
				}
				if err := bare.commit(n); err != nil {
					return databaseError(err)
				}
				c.NewBytes += n
			}
			return nil
		}
		runReplay := func() error {
			defer func(start time.Time) { replayTime += time.Since(start) }(time.Now())
			for _, r := range requests {
				if err := d.request(ctx, r); err != nil {
					return err
				}
			}
			return nil
		}
		turns := []func() error{runReplay, runBare}
		if bareFirst {
			turns[0], turns[1] = turns[1], turns[0]
		}
		for _, run := range turns {
			if err := run(); err != nil {
				return c, err
			}
		}
		for range requests {
			p.step(d.report.HitBlocks, d.report.Blocks)
		}
	}
	c.Requests, c.HitBlocks, c.Mismatches = d.report.Requests, d.report.HitBlocks, d.report.Mismatches
	c.BareSeconds, c.ReplaySeconds = bareTime.Seconds(), replayTime.Seconds()
	if replayTime > 0 {
		c.Ratio = c.BareSeconds / c.ReplaySeconds
	}
	c.Interrupted = ctx.Err() != nil
	return c, nil
}

// writeTable writes the comparison for people.
func (c comparison) writeTable(w io.Writer) error {
	t := newTable()
	t.AppendRow(table.Row{"trace", c.Trace})
	t.AppendRow(table.Row{"model", describeModel(c.Model, c.PageBytes, c.StateBytes, c.Ranks)})
	t.AppendRow(table.Row{"requests", count(c.Requests)})
	t.AppendRow(table.Row{"new bytes", humanBytes(c.NewBytes)})
	t.AppendSeparator()
	t.AppendRow(table.Row{"bare append and sync", fmt.Sprintf("%s, %s a second", seconds(c.BareSeconds), rate(c.Requests, c.BareSeconds))})
	t.AppendRow(table.Row{"replay", fmt.Sprintf("%s, %s a second", seconds(c.ReplaySeconds), rate(c.Requests, c.ReplaySeconds))})
	t.AppendRow(table.Row{"ratio", fmt.Sprintf("%.2f of the bare loop's speed", c.Ratio)})
	t.AppendRow(table.Row{"mismatches", count(c.Mismatches)})
	_, err := fmt.Fprintln(w, t.Render())
	return err
}

func newBenchReplayCommand() *cobra.Command {
	o := defaultReplayOptions()
	o.ranks = 2
	slice := 500
	c := &cobra.Command{
		Use:   "replay",
		Short: "Compare a write-through replay with a bare append-and-sync loop",
		Long: `Bench replay drives a database with a trace, as replay does, and, taking turns
in slices, a bare loop with the same requests. For a request that brings new
bytes the bare loop appends them to one file, syncs it, appends a commit record
of 100 bytes to another, and syncs that. It looks nothing up, restores and
checks nothing. The ratio says how near the database comes to it: 1 is as fast
as the bare loop.

` + statusHelp,
		Example: `  holdfast bench replay
  holdfast bench replay --trace requests.jsonl --json | jq .ratio`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if slice < 1 {
				return usageError(fmt.Errorf("--slice %d: want at least 1: %w", slice, txn.ErrInvalid))
			}
			return runBenchReplay(c.Context(), o, slice, c.InOrStdin(), c.OutOrStdout(), c.ErrOrStderr(), wantsJSON(c))
		},
	}
	f := c.Flags()
	f.SortFlags = false
	o.addWorkloadFlags(f)
	o.addModelFlags(f)
	f.StringVar(&o.dir, "dir", o.dir, "make both directories inside `DIR` (default: where temporary files go)")
	f.Var(&o.ram, "ram", "size of the RAM tier")
	f.IntVar(&slice, "slice", slice, "take turns every `N` requests")
	completeModel(c)
	return c
}

func runBenchReplay(ctx context.Context, o replayOptions, slice int, stdin io.Reader, stdout, stderr io.Writer, asJSON bool) error {
	s, err := o.setup()
	if err != nil {
		return err
	}
	src, closer, err := o.source(stdin)
	if err != nil {
		return err
	}
	defer closer.Close()
	result, err := compare(ctx, src, s, o.dir, slice, newProgress(stderr, true))
	if err != nil {
		return err
	}
	write := result.writeTable
	if asJSON {
		write = func(w io.Writer) error { return writeJSON(w, result) }
	}
	if err := write(stdout); err != nil {
		return err
	}
	switch {
	case result.Mismatches > 0:
		return failure{statusMismatch, fmt.Errorf("%s mismatches", count(result.Mismatches))}
	case result.Interrupted:
		return failure{statusInterrupted, errors.New("interrupted")}
	}
	return nil
}
