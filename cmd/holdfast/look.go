package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/holdfast-db/holdfast/db"
	"github.com/holdfast-db/holdfast/txn"
)

// What the commands share that look at a database: finding it, in use or not, and saying which.

const lookStatusHelp = `Exit status:
  0    done
  1    what was asked for is not there
  2    a flag or an argument is wrong
  3    the database is in use by a process that serves no introspection socket,
       cannot be read, or is damaged
  130  interrupted by SIGINT or SIGTERM`

const lookHelp = `The directory may be in use: then the process that has it open answers, if it
serves the introspection socket (db.Options.Introspection). Otherwise it is
opened read-only; what a crash left unrestorable is shown as the next open would
find it, and nothing is in RAM.`

// looked is where the answers come from.
type looked struct {
	Directory string `json:"directory"`
	Live      bool   `json:"live"`          // the process that has it open answered
	PID       int    `json:"pid,omitempty"` // of that process
}

// how says how it was looked at.
func (l looked) how() string {
	if l.Live {
		return fmt.Sprintf("in use by pid %d, which answers", l.PID)
	}
	return "not in use, opened read-only"
}

// look opens a database for looking, calls fn and lets go of it.
func look(c *cobra.Command, dir string, fn func(ctx context.Context, x *db.Inspection, at looked) error) error {
	ctx := c.Context()
	x, err := db.Inspect(ctx, dir, db.Options{Logger: operatorLog(c.ErrOrStderr())})
	if err != nil {
		return lookError(ctx, err)
	}
	o, err := x.Overview(ctx)
	if err == nil {
		at := looked{Directory: o.Directory, Live: x.Live()}
		if at.Live {
			at.PID = o.PID
		}
		err = fn(ctx, x, at)
	}
	if closeErr := x.Close(); err == nil {
		err = closeErr
	}
	return lookError(ctx, err)
}

// lookError gives an error its exit status.
func lookError(ctx context.Context, err error) error {
	_, decided := errors.AsType[failure](err)
	switch {
	case err == nil || decided:
		return err
	case ctx.Err() != nil:
		return failure{statusInterrupted, err}
	case errors.Is(err, db.ErrNotFound):
		return failure{statusMismatch, err}
	case errors.Is(err, db.ErrInvalid), errors.Is(err, db.ErrTooLarge):
		return usageError(err)
	}
	return databaseError(err)
}

// heading says where the answers come from, for people.
func (s *screen) heading(at looked) {
	s.printf("%s\n", s.paint(dim, s.path(at.Directory, len(at.how())+2)+", "+at.how()))
}

// directoryArgs completes the first argument with directories, and others with what next gives.
func directoryArgs(c *cobra.Command) *cobra.Command {
	c.ValidArgsFunction = func(c *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
		if len(args) == 0 {
			return nil, cobra.ShellCompDirectiveFilterDirs
		}
		return completeGenerations(c, args[0], prefix)
	}
	return c
}

// completeGenerations gives the checkpoints of a database that begin like this.
func completeGenerations(c *cobra.Command, dir, prefix string) ([]string, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	x, err := db.Inspect(ctx, dir, db.Options{Logger: operatorLog(c.ErrOrStderr())})
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	defer x.Close()
	var out []string
	if len(prefix) < 4 {
		l, err := x.List(ctx, db.ListQuery{Limit: 100})
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		for _, k := range l.Checkpoints {
			out = append(out, fmt.Sprintf("%s\t%s at %d", k.Generation.String()[:12], k.State, k.Offset))
		}
		return out, cobra.ShellCompDirectiveNoFileComp
	}
	gens, _ := x.Resolve(ctx, prefix)
	for _, g := range gens {
		out = append(out, g.String())
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}

// generationOf finds the one generation that is meant by some hex digits.
func generationOf(ctx context.Context, x db.Inspector, digits string) (db.Generation, error) {
	found, err := x.Resolve(ctx, digits)
	switch {
	case err != nil:
		return db.Generation{}, err
	case len(found) == 0 && len(digits) == 64:
		k, err := txn.ParseKey(digits)
		return db.Generation(k), err
	case len(found) == 0:
		return db.Generation{}, failure{statusMismatch, fmt.Errorf("no checkpoint %s, listed, retired or remembered", digits)}
	case len(found) > 1:
		return db.Generation{}, usageError(fmt.Errorf("%d checkpoints or more begin with %s: give more digits", len(found), digits))
	}
	return found[0], nil
}

// namespaceBy finds the namespace that is meant by some hex digits; the zero key for none.
func namespaceBy(ctx context.Context, x db.Inspector, digits string) (txn.Key, error) {
	if digits == "" {
		return txn.Key{}, nil
	}
	all, err := x.Namespaces(ctx)
	if err != nil {
		return txn.Key{}, err
	}
	var found []txn.Key
	for _, n := range all {
		if id := n.ID.String(); len(digits) >= 4 && len(digits) <= len(id) && id[:len(digits)] == digits {
			found = append(found, n.ID)
		}
	}
	switch {
	case len(digits) < 4:
		return txn.Key{}, usageError(fmt.Errorf("namespace %q: want at least 4 hex digits", digits))
	case len(found) == 0:
		return txn.Key{}, failure{statusMismatch, fmt.Errorf("no namespace %s", digits)}
	case len(found) > 1:
		return txn.Key{}, usageError(fmt.Errorf("%d namespaces begin with %s: give more digits", len(found), digits))
	}
	return found[0], nil
}

// allCheckpoints gathers a listing, part by part, up to most entries; more tells that there are others.
func allCheckpoints(ctx context.Context, x db.Inspector, q db.ListQuery, most int) (all []db.CheckpointInfo, more bool, err error) {
	for q.Limit = db.MaxInspectList; ; {
		l, err := x.List(ctx, q)
		if err != nil {
			return nil, false, err
		}
		all = append(all, l.Checkpoints...)
		if len(all) > most {
			return all[:most], true, nil
		}
		if l.Next.IsZero() {
			return all, false, nil
		}
		q.After = l.Next
	}
}
