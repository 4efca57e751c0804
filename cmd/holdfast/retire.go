package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/holdfast-db/holdfast/db"
	"github.com/holdfast-db/holdfast/txn"
)

const giveUpStatusHelp = `Exit status:
  0    done, or nothing to do
  1    what was asked for is not there, or leases kept some of it
  2    a flag or an argument is wrong, or it was not confirmed: nothing changed
  3    the database is in use, or it or the operating system gave an error
  130  interrupted by SIGINT or SIGTERM; what was done until then is reported`

// giveUpResult is what retire and clear print with --json.
type giveUpResult struct {
	Directory string       `json:"directory"`
	Namespace string       `json:"namespace,omitempty"` // of clear; empty: all
	DryRun    bool         `json:"dry_run"`
	Planned   db.Rehearsal `json:"planned"`
	Done      db.Rehearsal `json:"done"` // checkpoints and disk bytes that were given up
	Held      int          `json:"held"` // pages that leases still hold
	Targets   []string     `json:"generations,omitempty"`
}

// readOnly opens a database for a look before something is given up. Unlike Inspect it does not ask a process that has it open: what is
// in use cannot be changed from here.
func readOnly(ctx context.Context, c *cobra.Command, dir string) (*db.DB, error) {
	return db.Open(ctx, dir, db.Options{ReadOnly: true, RAMBytes: db.MinRAMBytes, Logger: operatorLog(c.ErrOrStderr())})
}

// writable opens a database to give something up. What the history remembers stays as long as it can.
func writable(ctx context.Context, c *cobra.Command, dir string) (*db.DB, error) {
	return db.Open(ctx, dir, db.Options{RAMBytes: giveUpRAMBytes, HistoryAge: db.MaxHistoryAge, Logger: operatorLog(c.ErrOrStderr())})
}

// giveUpRAMBytes is the RAM tier of a command that reads no page.
const giveUpRAMBytes = 16 << 20

func newRetireCommand() *cobra.Command {
	var f filter
	var yes, dryRun bool
	c := &cobra.Command{
		Use:   "retire DIR [GENERATION...]",
		Short: "Retire and delete chosen checkpoints",
		Long: `Retire delists checkpoints and gives their pages up, as far as no other
checkpoint needs them. Named are the generations, cut to some digits if need
be, or the flags choose them; without either nothing is retired. It shows how
many there are and how many bytes come back, and asks.

The database must not be in use. It is opened and closed as a serving process
does, which replays its log and clears up what a crash left.

` + giveUpStatusHelp,
		Example: `  holdfast retire --dry-run /var/cache/model 3f9a12bc 77e0
  holdfast retire --namespace 1f03 --older 24h /var/cache/model
  holdfast retire --yes --state superseded /var/cache/model`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			chosen := f != filter{}
			if chosen == (len(args) > 1) {
				return usageError(errors.New("want generations, or flags that choose them, and not both"))
			}
			return giveUp(c, args[0], yes, dryRun, func(ctx context.Context, x db.Inspector) (ns txn.Key, gens []db.Generation, err error) {
				for _, digits := range args[1:] {
					g, err := generationOf(ctx, x, digits)
					if err != nil {
						return ns, nil, err
					}
					gens = append(gens, g)
				}
				if !chosen {
					return ns, gens, nil
				}
				q, err := f.query(ctx, x)
				if err != nil {
					return ns, nil, err
				}
				all, more, err := allCheckpoints(ctx, x, q, checkpointsMost)
				if err == nil && more {
					err = usageError(fmt.Errorf("more than %d checkpoints: choose fewer at a time", checkpointsMost))
				}
				for i := range all {
					gens = append(gens, all[i].Generation)
				}
				return ns, gens, err
			}, false)
		},
	}
	f.flags(c)
	giveUpFlags(c, &yes, &dryRun)
	return directoryArgs(c)
}

func newClearCommand() *cobra.Command {
	var namespace string
	var everything, yes, dryRun bool
	c := &cobra.Command{
		Use:   "clear DIR",
		Short: "Give up every checkpoint of one namespace, or of all",
		Long: `Clear retires and deletes every checkpoint of exactly one namespace, or with
--all of all of them. It shows how many there are and how many bytes come back,
and asks. Other namespaces, and files that are not the database's, are left
alone; so are loose pages.

The database must not be in use. It is opened and closed as a serving process
does, which replays its log and clears up what a crash left.

` + giveUpStatusHelp,
		Example: `  holdfast clear --dry-run --namespace 1f03 /var/cache/model
  holdfast clear --yes --all /var/cache/model`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if everything == (namespace != "") {
				return usageError(errors.New("want --namespace or --all"))
			}
			return giveUp(c, args[0], yes, dryRun, func(ctx context.Context, x db.Inspector) (ns txn.Key, gens []db.Generation, err error) {
				ns, err = namespaceBy(ctx, x, namespace)
				return ns, nil, err
			}, true)
		},
	}
	c.Flags().StringVar(&namespace, "namespace", "", "the namespace, `ID` in at least 4 hex digits")
	c.Flags().BoolVar(&everything, "all", false, "all namespaces")
	giveUpFlags(c, &yes, &dryRun)
	return directoryArgs(c)
}

func giveUpFlags(c *cobra.Command, yes, dryRun *bool) {
	c.Flags().BoolVar(yes, "yes", false, "do not ask")
	c.Flags().BoolVar(dryRun, "dry-run", false, "only show what would be given up")
}

// giveUp shows what would go, asks, and does it: the checkpoints that choose gives, or with clear all of the namespace.
func giveUp(c *cobra.Command, dir string, yes, dryRun bool, choose func(ctx context.Context, x db.Inspector) (txn.Key, []db.Generation, error), clear bool) error {
	ctx := c.Context()
	d, err := readOnly(ctx, c, dir)
	if err != nil {
		return repairError(ctx, err)
	}
	r := giveUpResult{DryRun: dryRun}
	ns, gens, err := choose(ctx, d.Inspector())
	if err == nil {
		var o *db.Overview
		if o, err = d.Inspector().Overview(ctx); err == nil {
			r.Directory = o.Directory
		}
	}
	if err == nil && (clear || len(gens) > 0) {
		r.Planned, err = d.Rehearse(ctx, ns, gens...)
	}
	if _, closeErr := d.Close(context.WithoutCancel(ctx)); err == nil {
		err = closeErr
	}
	if err != nil {
		return lookError(ctx, err)
	}
	scope := "every namespace"
	if !ns.IsZero() {
		r.Namespace, scope = ns.String(), "namespace "+ns.String()
	}
	if !clear {
		scope = "those that were chosen"
		for _, g := range gens {
			r.Targets = append(r.Targets, g.String())
		}
	}
	s := newScreen(c.OutOrStdout())
	if !wantsJSON(c) {
		s.printf("%s: %s of %s, %s of pages, of which %s on disk\n", r.Directory, plural(int64(r.Planned.Checkpoints), "checkpoint"), scope, humanBytes(r.Planned.Bytes), humanBytes(r.Planned.DiskBytes))
	}
	if r.Planned.Checkpoints > 0 && !dryRun {
		if err := confirm(c, yes, fmt.Sprintf("Give up %s and %s on disk?", plural(int64(r.Planned.Checkpoints), "checkpoint"), humanBytes(r.Planned.DiskBytes))); err != nil {
			return err
		}
		err = r.carryOut(ctx, c, dir, ns, gens)
	}
	switch {
	case wantsJSON(c):
		err = errors.Join(err, writeJSON(c.OutOrStdout(), r))
	case dryRun:
		s.printf("nothing was changed: --dry-run\n")
	case r.Planned.Checkpoints == 0:
		s.printf("nothing to do\n")
	default:
		s.printf("given up: %s, %s on disk\n", plural(int64(r.Done.Checkpoints), "checkpoint"), humanBytes(r.Done.DiskBytes))
	}
	if err != nil {
		return repairError(ctx, err)
	}
	if r.Held > 0 {
		return failure{statusMismatch, fmt.Errorf("%d pages are held by leases; their space comes back when they are let go", r.Held)}
	}
	return nil
}

// carryOut gives up what was shown.
func (r *giveUpResult) carryOut(ctx context.Context, c *cobra.Command, dir string, ns txn.Key, gens []db.Generation) (err error) {
	d, err := writable(ctx, c, dir)
	if err != nil {
		return err
	}
	defer func() {
		_, closeErr := d.Close(context.WithoutCancel(ctx))
		err = errors.Join(err, closeErr)
	}()
	if len(gens) == 0 {
		x, err := d.Clear(ctx, ns)
		r.Done.Checkpoints, r.Done.DiskBytes, r.Held = x.Checkpoints, x.Bytes, x.Held
		return err
	}
	x, err := d.DeleteAll(ctx, gens...)
	r.Done.Checkpoints, r.Done.DiskBytes, r.Held = x.Checkpoints, x.Bytes, x.Held
	return err
}
