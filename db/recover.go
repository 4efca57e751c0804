package db

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/holdfast-db/holdfast/txn"
)

// RecoverOptions of a Recover. The zero value is a dry run.
type RecoverOptions struct {
	Apply  bool          // carry the changes out
	Verify VerifyOptions // how the directory is read; From is not used
	Logger *slog.Logger  // of the database while changes are carried out; nil is slog.Default()
}

// Change is one thing that Recover would do, or has done.
type Change struct {
	Action string `json:"action"` // replay, cut, remove, retire, rewrite
	File   string `json:"file"`
	Bytes  int64  `json:"bytes,omitempty"`
	// Checkpoints that are given up by it, in hex.
	Checkpoints []string `json:"checkpoints,omitempty"`
	Reason      string   `json:"reason"`
}

// RecoverReport says what Recover found, and what it would change or has changed.
type RecoverReport struct {
	Verify       VerifyReport
	Changes      []Change
	NeedsSalvage bool // the catalogue or the log is damaged: recover changes nothing
	Applied      bool
	Retired      int   // checkpoints given up
	Rewritten    int64 // pages written anew
}

// Recover brings a directory that was not closed whole, or is damaged, back to the promise: what a crash left is cleared up as
// an open would do it, checkpoints with a page that cannot be read are retired, and pages that a file no longer describes are
// written anew. It verifies the whole directory first and changes only what that finds, so a healthy directory stays byte for
// byte as it is. Without RecoverOptions.Apply it changes nothing.
//
// Recover does not rebuild a catalogue: if the index or the log themselves are damaged, the report says that Salvage is
// needed, and with Apply the error is ErrCorrupt and nothing has been changed. Other errors: those of Verify and of Open;
// ErrBusy if the context ended, and then what was retired stays retired.
func Recover(ctx context.Context, dir string, o RecoverOptions) (*RecoverReport, error) {
	o.Verify.From = txn.Key{}
	v, err := newVerifier(dir, o.Verify)
	if err != nil {
		return nil, err
	}
	verified, err := v.run(ctx)
	if err != nil {
		return nil, err
	}
	r := &RecoverReport{Verify: *verified}
	if !verified.Complete {
		return r, fmt.Errorf("db: recover: the context ended before everything was read: %w: %w", ErrBusy, context.Cause(ctx))
	}
	for i := range verified.Findings {
		f := &verified.Findings[i]
		r.NeedsSalvage = r.NeedsSalvage || f.Remedy == BySalvage
		r.Changes = append(r.Changes, f.change())
	}
	if r.NeedsSalvage {
		r.Changes = nil
		if o.Apply {
			return r, fmt.Errorf("db: %s: index or log are damaged, recover cannot help: salvage the directory: %w", verified.Directory, ErrCorrupt)
		}
		return r, nil
	}
	if !o.Apply || len(r.Changes) == 0 && verified.Omitted == 0 {
		return r, nil
	}
	return r, v.apply(ctx, o, r)
}

// change says what recover does about a finding.
func (f *Finding) change() Change {
	c := Change{File: f.File, Bytes: f.Bytes, Reason: f.Detail, Checkpoints: hexOf(f.Checkpoints)}
	switch {
	case f.Kind == "log" && f.Offset >= 0, f.Kind == "leftover" && f.Offset >= 0:
		c.Action = "cut"
	case f.Kind == "log":
		c.Action = "replay"
	case f.Kind == "leftover":
		c.Action = "remove"
	case f.Kind == "descriptor", f.Kind == "segment" && f.Offset == 0 && f.Bytes == 0:
		c.Action, c.Bytes = "rewrite", 0
	default:
		c.Action = "retire"
	}
	return c
}

// apply opens the database, which clears up what a crash left, and repairs the rest as logged transactions.
func (v *verifier) apply(ctx context.Context, o RecoverOptions, r *RecoverReport) error {
	d, err := Open(ctx, v.report.Directory, Options{Logger: o.Logger, OpenBudget: MaxOpenBudget})
	if err != nil {
		return err
	}
	r.Applied = true
	err = v.repair(ctx, d, r)
	closed, closeErr := d.Close(context.WithoutCancel(ctx))
	opened := d.RecoveryReport()
	r.Retired += opened.NotDurable + opened.Lost + closed.Retired
	return errors.Join(err, closeErr)
}

func (v *verifier) repair(ctx context.Context, d *DB, r *RecoverReport) error {
	if len(v.lost) > 0 {
		before := d.counters.retired.Load()
		if err := d.retireNeeding(ctx, v.lost); err != nil {
			return err
		}
		if _, err := d.dropLoose(v.lost); err != nil {
			return err
		}
		r.Retired += int(d.counters.retired.Load() - before)
	}
	for number, keys := range v.move {
		for len(keys) > 0 {
			if ctx.Err() != nil {
				return fmt.Errorf("db: recover: %w: %w", ErrBusy, context.Cause(ctx))
			}
			some := keys[:min(len(keys), rewritePages)]
			keys = keys[len(some):]
			if err := d.evacuatePages(ctx, number, some); err != nil {
				return err
			}
		}
	}
	r.Rewritten = d.counters.pagesMoved.Load()
	return nil
}

// rewritePages is how many pages recover writes anew at a time.
const rewritePages = 16

// retireNeeding retires and deletes every checkpoint that needs one of the pages.
func (d *DB) retireNeeding(ctx context.Context, pages []txn.Key) error {
	snapshot := d.index.Snapshot()
	seen := map[Generation]bool{}
	var gens []Generation
	var err error
	for _, key := range pages {
		var more []Generation
		if more, err = txn.Dependents(snapshot, key); err != nil {
			break
		}
		for _, g := range more {
			if !seen[g] {
				seen[g] = true
				gens = append(gens, g)
			}
		}
	}
	if err = errors.Join(err, snapshot.Close()); err != nil {
		return err
	}
	return d.retireAll(ctx, gens, txn.ReasonLost)
}
