package main

import (
	"fmt"

	"github.com/spf13/cobra"
)

// newCrashCommand is a replay that kills, for whoever wants to see it survive.
func newCrashCommand() *cobra.Command {
	o := defaultReplayOptions()
	o.limit, o.killEvery = 400, 20
	c := &cobra.Command{
		Use:   "crash",
		Short: "Kill a database again and again, and check what is left",
		Long: `Crash drives a database in a process of its own with generated requests, kills
that process with SIGKILL at random points of lookups, publications and openings,
opens the directory again, and checks that everything that is listed is there,
byte for byte. It is holdfast replay with --kill-every; the seed decides where
the kills fall.

` + statusHelp,
		Example: `  holdfast crash
  holdfast crash --seed 7 --kill-every 5 --dir ./kept
  holdfast crash --json | jq .kills_at`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if o.killEvery < 1 {
				return usageError(fmt.Errorf("--kill-every %d: want at least 1", o.killEvery))
			}
			return runReplay(c.Context(), o, c.InOrStdin(), c.OutOrStdout(), c.ErrOrStderr(), wantsJSON(c))
		},
	}
	c.Flags().Uint64Var(&o.seed, "seed", o.seed, "`SEED` of the requests and of where kills fall")
	c.Flags().IntVar(&o.limit, "limit", o.limit, "stop after `N` requests")
	c.Flags().IntVar(&o.killEvery, "kill-every", o.killEvery, "kill after every `N` acknowledged requests")
	c.Flags().StringVar(&o.dir, "dir", o.dir, "directory of the database, `DIR` is kept (default: a temporary one, removed)")
	return c
}
