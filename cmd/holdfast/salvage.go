package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/holdfast-db/holdfast/db"
)

// salvageResult is what salvage prints with --json.
type salvageResult struct {
	Directory string           `json:"directory"`
	Needed    bool             `json:"needed"`
	Applied   bool             `json:"applied"`
	Finished  bool             `json:"finished_earlier_salvage"`
	Kept      []string         `json:"kept"`
	Lost      []lostCheckpoint `json:"lost"`
	Loose     int64            `json:"loose_pages_kept"`
	Pages     int64            `json:"pages_kept"`
	Unused    int64            `json:"pages_unused"`
	Index     string           `json:"index"`
	Records   int64            `json:"log_records"`
	Missing   []string         `json:"log_missing"`
	Damaged   []string         `json:"log_damaged"`
	Room      string           `json:"replaced_parts,omitempty"`
}

type lostCheckpoint struct {
	Generation string `json:"generation"`
	Offset     int64  `json:"offset,omitempty"`
	Reason     string `json:"reason"`
}

func newSalvageResult(r *db.SalvageReport) salvageResult {
	s := salvageResult{
		Directory: r.Directory, Needed: r.Needed, Applied: r.Applied, Finished: r.Finished, Kept: []string{}, Lost: []lostCheckpoint{},
		Loose: r.Loose, Pages: r.Pages, Unused: r.Unused, Index: r.Index, Records: r.Log.Records, Missing: []string{}, Damaged: []string{}, Room: r.Room,
	}
	for _, g := range r.Kept {
		s.Kept = append(s.Kept, g.String())
	}
	for _, l := range r.Lost {
		s.Lost = append(s.Lost, lostCheckpoint{l.Generation.String(), l.Offset, l.Reason})
	}
	for _, g := range r.Log.Missing {
		s.Missing = append(s.Missing, g.String())
	}
	for i := range r.Log.Damaged {
		s.Damaged = append(s.Damaged, r.Log.Damaged[i].Error())
	}
	return s
}

func newSalvageCommand() *cobra.Command {
	var rate byteSize
	var apply, yes bool
	c := &cobra.Command{
		Use:   "salvage DIR",
		Short: "Rebuild a database whose index or log is damaged",
		Long: `Salvage rebuilds index and log from what can still be read of them and from
what the page files say about themselves. It keeps the checkpoints that it can
prove whole, by reading every page, and names the others. It changes nothing
without --apply, and nothing in a directory that does not need it: see verify
and recover first.

Manifests are kept in the index, and in the log until the index is safe. Of a
checkpoint whose manifest is in neither, nothing is known but that there are
pages that nobody uses; they are counted.

The replaced index and log are kept in DIR/salvage. An interrupted salvage is
finished by the next one; until then the database refuses to open.

` + repairStatusHelp,
		Example: `  # what could be kept
  holdfast salvage /var/cache/model

  # do it
  holdfast salvage --apply --yes /var/cache/model`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			run := func(apply bool) (*db.SalvageReport, error) {
				o, end := verifyOptions(c.ErrOrStderr(), rate)
				defer end()
				return db.Salvage(c.Context(), args[0], db.SalvageOptions{Apply: apply, Verify: o, Logger: operatorLog(c.ErrOrStderr())})
			}
			r, err := run(false)
			if err != nil {
				return repairError(c.Context(), err)
			}
			if apply && r.Needed {
				if err := confirm(c, yes, fmt.Sprintf("Keep %d checkpoints, give up %d, and replace index and log?", len(r.Kept), len(r.Lost))); err != nil {
					return err
				}
				if r, err = run(true); err != nil {
					return repairError(c.Context(), err)
				}
			}
			if wantsJSON(c) {
				err = writeJSON(c.OutOrStdout(), newSalvageResult(r))
			} else {
				err = writeSalvaged(c.OutOrStdout(), r)
			}
			switch {
			case err != nil:
				return databaseError(err)
			case r.Needed && !r.Applied && !r.Finished:
				return failure{statusMismatch, fmt.Errorf("%s needs salvage; nothing was changed without --apply", r.Directory)}
			}
			return nil
		},
	}
	c.Flags().BoolVar(&apply, "apply", false, "replace index and log")
	c.Flags().BoolVar(&yes, "yes", false, "do not ask")
	c.Flags().Var(&rate, "rate", "read at most so many bytes of pages a second, 0 = unbounded")
	return c
}

// writeSalvaged writes the report for people.
func writeSalvaged(w io.Writer, r *db.SalvageReport) error {
	switch {
	case !r.Needed:
		_, err := fmt.Fprintf(w, "%s: nothing to do\n", r.Directory)
		return err
	case r.Finished:
		_, err := fmt.Fprintf(w, "%s: the interrupted salvage is finished; what it replaced is in %s\n", r.Directory, r.Room)
		return err
	case r.Room != "" && !r.Applied:
		_, err := fmt.Fprintf(w, "%s: a salvage was interrupted and would be finished\n", r.Directory)
		return err
	}
	fmt.Fprintf(w, "index   %s\nlog     %s records can be read\n", r.Index, count(r.Log.Records))
	for i := range r.Log.Damaged {
		fmt.Fprintf(w, "        %v\n", &r.Log.Damaged[i])
	}
	for _, g := range r.Log.Missing {
		fmt.Fprintf(w, "        missing: %v\n", g)
	}
	for _, l := range r.Lost {
		fmt.Fprintf(w, "lost    checkpoint %s at %d: %s\n", l.Generation, l.Offset, l.Reason)
	}
	for _, g := range r.Kept {
		fmt.Fprintf(w, "kept    checkpoint %s\n", g)
	}
	_, err := fmt.Fprintf(w, "%s: %s checkpoints with %s pages kept, %s known to be lost, %s loose pages kept, %s pages unused\n",
		r.Directory, count(int64(len(r.Kept))), count(r.Pages), count(int64(len(r.Lost))), count(r.Loose), count(r.Unused))
	if r.Applied {
		_, err = fmt.Fprintf(w, "what was replaced is in %s\n", r.Room)
	}
	return err
}
