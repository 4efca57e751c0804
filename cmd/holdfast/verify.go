package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/holdfast-db/holdfast/db"
	"github.com/holdfast-db/holdfast/txn"
)

const verifyStatusHelp = `Exit status:
  0    everything is as it was written
  1    damage was found
  2    could not look: the arguments are wrong, the directory is in use, is not
       Holdfast's or cannot be read
  130  interrupted by SIGINT or SIGTERM before everything was read`

// verifyResult is what verify prints with --json.
type verifyResult struct {
	Directory   string       `json:"directory"`
	Damaged     bool         `json:"damaged"`
	Complete    bool         `json:"complete"`
	Resume      string       `json:"resume,omitempty"` // for --resume, if it is not complete
	Seconds     float64      `json:"seconds"`
	Checkpoints int64        `json:"checkpoints"`
	Pages       int64        `json:"pages"`
	LoosePages  int64        `json:"loose_pages"`
	PageCopies  int64        `json:"page_copies"`
	Bytes       int64        `json:"bytes"`
	Segments    int          `json:"segments"`
	LogRecords  int64        `json:"log_records"`
	Findings    []db.Finding `json:"findings"`
	Omitted     int          `json:"findings_omitted,omitempty"`
	Affected    []string     `json:"affected_checkpoints"`
}

func newVerifyResult(r *db.VerifyReport) verifyResult {
	v := verifyResult{
		Directory: r.Directory, Damaged: r.Damaged(), Complete: r.Complete, Seconds: r.Duration.Seconds(), Checkpoints: r.Checkpoints,
		Pages: r.Pages, LoosePages: r.Loose, PageCopies: r.Copies, Bytes: r.Bytes, Segments: r.Segments, LogRecords: r.LogRecords,
		Findings: append([]db.Finding{}, r.Findings...), Omitted: r.Omitted, Affected: []string{},
	}
	for _, g := range r.Affected {
		v.Affected = append(v.Affected, g.String())
	}
	if !r.Complete {
		v.Resume = r.Next.String()
	}
	return v
}

func newVerifyCommand() *cobra.Command {
	var rate byteSize
	var resume string
	c := &cobra.Command{
		Use:   "verify DIR",
		Short: "Read a whole database and say what is damaged",
		Long: `Verify reads every frame of the log, every block of the index, every descriptor
of the segment files and every page copy, checks them against their checksums
and against each other, and changes nothing. What it finds is told with file,
offset, page, rank, group and every checkpoint that cannot be restored because
of it.

The directory must not be in use by a writer.

` + verifyStatusHelp,
		Example: `  holdfast verify /var/cache/model

  # gently, and for scripts
  holdfast verify --rate 100MB --json /var/cache/model`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			o, end := verifyOptions(c.ErrOrStderr(), rate)
			if resume != "" {
				from, err := txn.ParseKey(resume)
				if err != nil {
					return usageError(fmt.Errorf("--resume: %w", err))
				}
				o.From = from
			}
			r, err := db.Verify(c.Context(), args[0], o)
			end()
			if err != nil {
				return failure{statusUsage, err}
			}
			if wantsJSON(c) {
				err = writeJSON(c.OutOrStdout(), newVerifyResult(r))
			} else {
				err = writeVerified(c.OutOrStdout(), r)
			}
			switch {
			case err != nil:
				return databaseError(err)
			case r.Damaged():
				return failure{statusMismatch, fmt.Errorf("%s is damaged", r.Directory)}
			case !r.Complete:
				return failure{statusInterrupted, fmt.Errorf("interrupted; go on with --resume %s", r.Next)}
			}
			return nil
		},
	}
	c.Flags().Var(&rate, "rate", "read at most so many bytes of pages a second, 0 = unbounded")
	c.Flags().StringVar(&resume, "resume", "", "go on at the page `KEY` that an interrupted run named")
	return c
}

// writeVerified writes the report for people.
func writeVerified(w io.Writer, r *db.VerifyReport) error {
	for i := range r.Findings {
		f := &r.Findings[i]
		how := "damage"
		if !f.Damage() {
			how = "note"
		}
		if _, err := fmt.Fprintf(w, "%s  %s\n", how, f); err != nil {
			return err
		}
		for _, g := range f.Checkpoints {
			if _, err := fmt.Fprintf(w, "        checkpoint %s\n", g); err != nil {
				return err
			}
		}
	}
	if r.Omitted > 0 {
		fmt.Fprintf(w, "        and %d findings more\n", r.Omitted)
	}
	state := "clean"
	switch {
	case r.Damaged():
		state = fmt.Sprintf("damaged, %d checkpoints cannot be restored", len(r.Affected))
	case !r.Complete:
		state = "clean as far as it was read"
	}
	_, err := fmt.Fprintf(w, "%s: %s\n%s checkpoints, %s pages in %s copies, %s read in %.1f s\n",
		r.Directory, state, count(r.Checkpoints), count(r.Pages), count(r.Copies), sizeOf(r.Bytes), r.Duration.Seconds())
	return err
}
