package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/holdfast-db/holdfast/db"
)

// scrubResult is what scrub prints with --json.
type scrubResult struct {
	Seconds    float64 `json:"seconds"`
	PageCopies int64   `json:"page_copies"`
	Bytes      int64   `json:"bytes"`
	Healed     int64   `json:"pages_healed"`
	Lost       int64   `json:"pages_lost"`
	Retired    int64   `json:"checkpoints_retired"`
}

func newScrubCommand() *cobra.Command {
	var rate byteSize
	var yes bool
	c := &cobra.Command{
		Use:   "scrub DIR",
		Short: "Read every page of a database and retire what cannot be restored",
		Long: `Scrub opens the database, reads every page copy on disk, and retires every
checkpoint that needs one that is bad, so that nobody meets it later. A serving
process does the same in the background if its options say so; there, a page
that is in RAM is written anew instead.

The database must not be in use. It is opened and closed as a serving process
does, which replays its log and clears up what a crash left.

` + repairStatusHelp,
		Example: `  holdfast scrub --yes /var/cache/model

  # gently
  holdfast scrub --yes --rate 100MB /var/cache/model`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) (err error) {
			ctx := c.Context()
			if err := confirm(c, yes, fmt.Sprintf("Retire the checkpoints in %s that cannot be restored?", args[0])); err != nil {
				return err
			}
			// Open would make a database where there is none.
			look, err := db.Open(ctx, args[0], db.Options{ReadOnly: true, RAMBytes: db.MinRAMBytes, Logger: operatorLog(c.ErrOrStderr())})
			if err != nil {
				return repairError(ctx, err)
			}
			if _, err := look.Close(ctx); err != nil {
				return repairError(ctx, err)
			}
			d, err := db.Open(ctx, args[0], db.Options{Logger: operatorLog(c.ErrOrStderr())})
			if err != nil {
				return repairError(ctx, err)
			}
			s, err := d.Stats()
			bar := newFraction(c.ErrOrStderr(), "scrub")
			var r db.ScrubReport
			if err == nil {
				r, err = d.Scrub(ctx, db.ScrubOptions{BytesPerSecond: int64(rate), Progress: func(r db.ScrubReport) {
					bar.show(r.Bytes, s.DiskBytes, fmt.Sprintf("%d pages lost", r.Lost))
				}})
			}
			bar.end()
			_, closeErr := d.Close(context.WithoutCancel(ctx))
			if wantsJSON(c) {
				err = errors.Join(err, writeJSON(c.OutOrStdout(), scrubResult{r.Duration.Seconds(), r.Copies, r.Bytes, r.Healed, r.Lost, r.Retired}))
			} else {
				_, printErr := fmt.Fprintf(c.OutOrStdout(), "%s page copies, %s read in %.1f s: %d pages healed, %d lost, %d checkpoints retired\n",
					count(r.Copies), sizeOf(r.Bytes), r.Duration.Seconds(), r.Healed, r.Lost, r.Retired)
				err = errors.Join(err, printErr)
			}
			if err = errors.Join(err, closeErr); err != nil {
				return repairError(ctx, err)
			}
			if r.Lost > 0 {
				return failure{statusMismatch, fmt.Errorf("%d pages were lost", r.Lost)}
			}
			return nil
		},
	}
	c.Flags().Var(&rate, "rate", "read at most so many bytes of pages a second, 0 = unbounded")
	c.Flags().BoolVar(&yes, "yes", false, "do not ask")
	return c
}
