package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/holdfast-db/holdfast/db"
	"github.com/holdfast-db/holdfast/txn"
)

// replayOptions are the flags of a replay. The zero value is not useful; defaultReplayOptions is.
type replayOptions struct {
	trace        string
	seed         uint64
	limit        int
	dir          string
	model        string
	ranks        int
	pageSize     byteSize
	stateSize    byteSize
	ram          byteSize
	disk         byteSize
	writePolicy  string
	codec        string
	grace        time.Duration
	restartEvery int
	killEvery    int
	audit        bool
	faults       bool
	checkEvery   int
	verbose      bool
}

func defaultReplayOptions() replayOptions {
	return replayOptions{
		seed: 1, model: string(hybridModel), ranks: 1,
		pageSize: 4 << 10, stateSize: 64 << 10, ram: 1 << 30, writePolicy: "write-through", codec: "none", grace: db.DefaultSupersedeGrace, audit: true,
	}
}

func newReplayCommand() *cobra.Command {
	o := defaultReplayOptions()
	c := &cobra.Command{
		Use:   "replay",
		Short: "Drive a database with a trace of requests and check every byte",
		Long: `Replay drives a real database with the requests of a trace, or of a built-in
generator of agent conversations with branches, retries, aborted turns and side
requests. Every request is looked up; what is found is restored, and every byte
of it checked on every rank; then the checkpoint of the prompt's last whole
block of 512 tokens is published. At the end every checkpoint that is still
listed must be restorable.

With --kill-every a child process holds the database and is killed with SIGKILL
at random points of lookups, publications and openings; the replay goes on from
what had been acknowledged, with the same totals. With --restart-every the
database is closed cleanly and opened again.

A trace has one JSON object a line: timestamp (ms), input_length and
output_length (tokens), and hash_ids, one id per 512-token block of the input;
equal ids mean equal prefixes. Requests are driven one after the other, as fast
as they go.

The latency of a restore ends when all pages are pinned in RAM; that of a
publication contains filling its new pages.

` + statusHelp,
		Example: `  # the built-in workload, in a temporary directory
  holdfast replay

  # a recorded trace, killing the database every 500 acknowledged requests
  holdfast replay --trace requests.jsonl --kill-every 500

  # an attention-only model with little room, in a directory that is kept
  holdfast replay --model attention --ram 256MiB --disk 2GiB --dir ./kept

  # for scripts
  holdfast replay --limit 200 --json | jq .mismatches`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return runReplay(c.Context(), o, c.InOrStdin(), c.OutOrStdout(), c.ErrOrStderr(), wantsJSON(c))
		},
	}
	f := c.Flags()
	f.SortFlags = false
	o.addWorkloadFlags(f)
	f.StringVar(&o.dir, "dir", o.dir, "directory of the database, `DIR` is kept (default: a temporary one, removed)")
	o.addModelFlags(f)
	f.Var(&o.ram, "ram", "size of the RAM tier")
	f.Var(&o.disk, "disk", "size of the disk tier, 0 = unbounded")
	f.StringVar(&o.writePolicy, "write-policy", o.writePolicy, "`WHEN` pages go to disk: "+strings.Join(policyNames(), ", "))
	f.StringVar(&o.codec, "codec", o.codec, "`CODEC` of pages on disk: none, zstd")
	f.DurationVar(&o.grace, "grace", o.grace, "`TIME` for which a superseded checkpoint keeps its place: requests are driven faster than they came, this is not")
	f.IntVar(&o.restartEvery, "restart-every", o.restartEvery, "close and open the database every `N` requests, 0 = never")
	f.IntVar(&o.killEvery, "kill-every", o.killEvery, "kill the database's process every `N` acknowledged requests, 0 = never")
	f.BoolVar(&o.audit, "audit", o.audit, "at the end, restore every checkpoint that is still listed")
	f.BoolVar(&o.faults, "faults", o.faults, "make the disk slow and failing, cancel calls, clear everything now and then")
	f.IntVar(&o.checkEvery, "check-every", o.checkEvery, "every `N` requests restore a sample of all listed checkpoints and recount, 0 = never")
	f.BoolVarP(&o.verbose, "verbose", "v", o.verbose, "write the database's log to standard error")
	completeModel(c)
	completeWith(c, "write-policy", policyNames()...)
	completeWith(c, "codec", "none", "zstd")
	return c
}

// addWorkloadFlags adds the flags that choose the requests.
func (o *replayOptions) addWorkloadFlags(f *pflag.FlagSet) {
	f.StringVar(&o.trace, "trace", o.trace, "replay this `FILE` of JSON lines, - for standard input (default: the generator)")
	f.Uint64Var(&o.seed, "seed", o.seed, "`SEED` of the generated requests and of where kills fall")
	f.IntVar(&o.limit, "limit", o.limit, fmt.Sprintf("stop after `N` requests (default: the whole trace, or %d generated ones)", generatedRequests))
}

// addModelFlags adds the flags that say what a checkpoint is.
func (o *replayOptions) addModelFlags(f *pflag.FlagSet) {
	f.StringVar(&o.model, "model", o.model, "`KIND` of model: hybrid (attention and recurrent state) or attention")
	f.IntVar(&o.ranks, "ranks", o.ranks, "`N` parallel ranks, each with its own pages")
	f.Var(&o.pageSize, "page-size", "bytes of an attention page (512 tokens) of one rank")
	f.Var(&o.stateSize, "state-size", "bytes of a recurrent state of one rank")
}

func completeModel(c *cobra.Command) {
	completeWith(c, "model", string(hybridModel), string(attentionModel))
}

// completeWith gives the shell the values of a flag.
func completeWith(c *cobra.Command, flag string, values ...string) {
	if err := c.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic(err) // the flag does not exist: a mistake in this file
	}
}

func policyNames() []string {
	var names []string
	for p := db.WriteThrough; p <= db.Never; p++ {
		names = append(names, p.String())
	}
	return names
}

// setup gives how the database is opened, or says which flag is wrong.
func (o replayOptions) setup() (setup, error) {
	for _, n := range []struct {
		flag  string
		value int
	}{{"limit", o.limit}, {"restart-every", o.restartEvery}, {"kill-every", o.killEvery}, {"check-every", o.checkEvery}} {
		if n.value < 0 {
			return setup{}, usageError(fmt.Errorf("--%s %d: negative: %w", n.flag, n.value, txn.ErrInvalid))
		}
	}
	if o.killEvery > 0 && (o.faults || o.checkEvery > 0) {
		return setup{}, usageError(fmt.Errorf("--kill-every goes with neither --faults nor --check-every: %w", txn.ErrInvalid))
	}
	if _, err := db.ParseWritePolicy(o.writePolicy); err != nil {
		return setup{}, usageError(fmt.Errorf("--write-policy: %w", err))
	}
	if o.grace < 0 {
		return setup{}, usageError(fmt.Errorf("--grace %v: negative: %w", o.grace, txn.ErrInvalid))
	}
	if _, err := db.ParseCodec(cmp.Or(o.codec, "none")); err != nil {
		return setup{}, usageError(fmt.Errorf("--codec: %w", err))
	}
	if o.ram < db.MinRAMBytes || o.ram > db.MaxRAMBytes {
		low, high := byteSize(db.MinRAMBytes), byteSize(db.MaxRAMBytes)
		return setup{}, usageError(fmt.Errorf("--ram %v: want %v to %v: %w", &o.ram, &low, &high, txn.ErrInvalid))
	}
	s := setup{
		Model:       model(o.model),
		Ranks:       o.ranks,
		PageBytes:   int64(o.pageSize),
		StateBytes:  int64(o.stateSize),
		RAMBytes:    int64(o.ram),
		DiskBytes:   int64(o.disk),
		WritePolicy: o.writePolicy,
		Codec:       o.codec,
		Grace:       cmp.Or(o.grace, -1),
		Log:         o.verbose,
		Faults:      o.faults,
		Seed:        o.seed,
	}
	if s.Model == attentionModel {
		s.StateBytes = 0
	}
	if _, err := namespaceOf(s); err != nil {
		return setup{}, usageError(err)
	}
	return s, nil
}

// source opens what the options replay.
func (o replayOptions) source(stdin io.Reader) (source, io.Closer, error) {
	if o.trace == "" {
		n := o.limit
		if n == 0 {
			n = generatedRequests
		}
		return generate(o.seed, n), io.NopCloser(nil), nil
	}
	s, c, err := openTrace(o.trace, stdin)
	if err != nil {
		return source{}, nil, usageError(err)
	}
	return s.first(o.limit), c, nil
}

// runReplay carries a replay out and writes its report, also of one that did not get to the end.
func runReplay(ctx context.Context, o replayOptions, stdin io.Reader, stdout, stderr io.Writer, asJSON bool) (err error) {
	s, err := o.setup()
	if err != nil {
		return err
	}
	src, closer, err := o.source(stdin)
	if err != nil {
		return err
	}
	defer closer.Close()
	s.Dir = o.dir
	if o.dir == "" {
		if s.Dir, err = os.MkdirTemp("", "holdfast-replay-"); err != nil {
			return databaseError(fmt.Errorf("make a directory: %w: %w", txn.ErrIO, err))
		}
		defer func() { err = errors.Join(err, os.RemoveAll(s.Dir)) }()
	}

	h, kills, err := o.open(ctx, s, stderr)
	if err != nil {
		return err
	}
	r := &report{
		Trace: src.name, Model: s.Model, Ranks: s.Ranks, PageBytes: s.PageBytes, StateBytes: s.StateBytes,
		RAMBytes: s.RAMBytes, DiskBytes: s.DiskBytes, WritePolicy: s.WritePolicy, Codec: s.Codec, Dir: o.dir,
	}
	d := &replay{
		source: src, holder: h, ledger: newLedger(s), restartEvery: o.restartEvery, checkEvery: o.checkEvery, audit: o.audit,
		progress: newProgress(stderr, !o.verbose), report: r,
	}
	before, err := h.census(ctx)
	if err != nil {
		return errors.Join(err, h.close(ctx))
	}
	d.fresh = before.Checkpoints == 0
	err = errors.Join(d.run(ctx), h.close(ctx))
	r.finish(kills(), err)
	write := r.writeTable
	if asJSON {
		write = func(w io.Writer) error { return writeJSON(w, r) }
	}
	if err := errors.Join(err, write(stdout)); err != nil {
		return err
	}
	if status := r.status(); status != statusOK {
		return failure{status, errors.New(r.verdict())}
	}
	return nil
}

// open opens the database in this process, or in a child if that is to be killed. kills gives where it was, so far.
func (o replayOptions) open(ctx context.Context, s setup, stderr io.Writer) (h holder, kills func() map[killPoint]int, err error) {
	if o.killEvery == 0 {
		h, err = openEmbedded(ctx, s)
		return h, func() map[killPoint]int { return nil }, err
	}
	var log io.Writer
	if o.verbose {
		log = stderr
	}
	v, err := newSupervisor(s, o.killEvery, o.seed, childCommand, log)
	return v, func() map[killPoint]int { return v.kills }, err
}

// childCommand is this program again, as the process that holds the database.
func childCommand() *exec.Cmd {
	self, err := os.Executable()
	if err != nil {
		self = os.Args[0]
	}
	return exec.Command(self, "replay-child")
}
