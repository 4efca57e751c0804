package main

import (
	"encoding/json"
	"io"
	"strings"

	"github.com/spf13/cobra"
)

// newRootCommand builds the whole tree of commands. Nothing is kept in package variables, so that tests run command
// lines side by side.
func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "holdfast",
		Short: "The command line of the Holdfast checkpoint database",
		Long: `Holdfast is an embedded, crash-safe checkpoint database for LLM serving: a
checkpoint that lookup returns can be restored byte for byte on every rank, or
it is not listed.

Sizes are written like 4096, 64KiB, 1.5GiB (powers of 1024) or 64KB, 24G (powers
of 1000).

` + statusHelp,
		Example: `  holdfast replay
  holdfast replay --trace requests.jsonl --kill-every 500
  holdfast version --json`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE:          func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	// Help is written for terminals of 80 columns; flags are wrapped like the text above them.
	root.SetUsageTemplate(strings.ReplaceAll(root.UsageTemplate(), ".FlagUsages ", ".FlagUsagesWrapped 80 "))
	root.PersistentFlags().Bool("json", false, "print the result as one JSON object on standard output")
	root.AddCommand(newReplayCommand(), newReplayChildCommand(), newBenchOpenChildCommand(), newBenchCommand(), newVersionCommand())
	root.AddCommand(newInspectCommand(), newStatsCommand(), newTopCommand(), newRetireCommand(), newClearCommand())
	root.AddCommand(newReportCommand(), newServeCommand())
	root.AddCommand(newVerifyCommand(), newRecoverCommand(), newSalvageCommand(), newScrubCommand(), newGPUCommand())
	return root
}

// wantsJSON reports whether the command line asked for JSON.
func wantsJSON(c *cobra.Command) bool {
	on, err := c.Flags().GetBool("json")
	return err == nil && on
}

// writeJSON writes v as one indented object and a newline.
func writeJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}
