package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/holdfast-db/holdfast/db"
)

// recoverResult is what recover prints with --json.
type recoverResult struct {
	Directory    string      `json:"directory"`
	Applied      bool        `json:"applied"`
	NeedsSalvage bool        `json:"needs_salvage"`
	Changes      []db.Change `json:"changes"`
	Retired      int         `json:"retired"`
	Rewritten    int64       `json:"pages_rewritten"`
}

func newRecoverCommand() *cobra.Command {
	var rate byteSize
	var apply, yes bool
	c := &cobra.Command{
		Use:   "recover DIR",
		Short: "Show, and with --apply make, what brings a damaged database back",
		Long: `Recover reads the whole directory as verify does and shows every change that
would bring it back to the promise that a listed checkpoint can be restored: the
log replayed, torn ends cut, leftovers removed, checkpoints with a page that
cannot be read retired, pages that a file no longer describes written anew. It
changes nothing without --apply, and never anything in a healthy directory.

If the index or the log themselves are damaged it says so and changes nothing:
that is for salvage.

` + repairStatusHelp,
		Example: `  # what would be done
  holdfast recover /var/cache/model

  # do it
  holdfast recover --apply --yes /var/cache/model`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			show := func(r *db.RecoverReport) error {
				if wantsJSON(c) {
					return writeJSON(c.OutOrStdout(), recoverResult{
						Directory: r.Verify.Directory, Applied: r.Applied, NeedsSalvage: r.NeedsSalvage,
						Changes: append([]db.Change{}, r.Changes...), Retired: r.Retired, Rewritten: r.Rewritten,
					})
				}
				return writeRecovered(c.OutOrStdout(), r)
			}
			run := func(apply bool) (*db.RecoverReport, error) {
				o, end := verifyOptions(c.ErrOrStderr(), rate)
				defer end()
				return db.Recover(c.Context(), args[0], db.RecoverOptions{Apply: apply, Verify: o, Logger: operatorLog(c.ErrOrStderr())})
			}
			r, err := run(false)
			if err != nil {
				return repairError(c.Context(), err)
			}
			if apply && !r.NeedsSalvage && len(r.Changes) > 0 {
				if !wantsJSON(c) {
					if err := writeRecovered(c.OutOrStdout(), r); err != nil {
						return databaseError(err)
					}
				}
				if err := confirm(c, yes, fmt.Sprintf("Make these %d changes?", len(r.Changes))); err != nil {
					return err
				}
				if r, err = run(true); err != nil {
					return repairError(c.Context(), err)
				}
			}
			if err := show(r); err != nil {
				return databaseError(err)
			}
			switch {
			case r.NeedsSalvage:
				return failure{statusMismatch, fmt.Errorf("%s: index or log are damaged; see holdfast salvage", r.Verify.Directory)}
			case len(r.Changes) > 0 && !r.Applied:
				return failure{statusMismatch, fmt.Errorf("%d changes would be made with --apply", len(r.Changes))}
			}
			return nil
		},
	}
	c.Flags().BoolVar(&apply, "apply", false, "make the changes")
	c.Flags().BoolVar(&yes, "yes", false, "do not ask")
	c.Flags().Var(&rate, "rate", "read at most so many bytes of pages a second, 0 = unbounded")
	return c
}

// writeRecovered writes the report for people.
func writeRecovered(w io.Writer, r *db.RecoverReport) error {
	for _, x := range r.Changes {
		size := ""
		if x.Bytes > 0 {
			size = ", " + sizeOf(x.Bytes)
		}
		if _, err := fmt.Fprintf(w, "%-8s%s%s: %s\n", x.Action, x.File, size, x.Reason); err != nil {
			return err
		}
		for _, g := range x.Checkpoints {
			if _, err := fmt.Fprintf(w, "        gives up checkpoint %s\n", g); err != nil {
				return err
			}
		}
	}
	var err error
	switch {
	case r.NeedsSalvage:
		for i := range r.Verify.Findings {
			if f := &r.Verify.Findings[i]; f.Remedy == db.BySalvage {
				fmt.Fprintf(w, "damage  %s\n", f)
			}
		}
		_, err = fmt.Fprintf(w, "%s: nothing was changed\n", r.Verify.Directory)
	case r.Applied:
		_, err = fmt.Fprintf(w, "%s: %d changes made, %d checkpoints retired, %d pages written anew\n", r.Verify.Directory, len(r.Changes), r.Retired, r.Rewritten)
	case len(r.Changes) == 0:
		_, err = fmt.Fprintf(w, "%s: nothing to do\n", r.Verify.Directory)
	}
	return err
}
