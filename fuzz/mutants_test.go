//go:build mutants

package fuzz

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// mutantLimit is how much simulation may be needed to find a mutant.
const mutantLimit = time.Minute

// Every mutant is found. HOLDFAST_MUTANTS names a file that gets the table of docs/crash-testing.md.
func TestEveryMutantIsFound(t *testing.T) {
	table := ""
	for _, m := range Mutants {
		t.Run(m, func(t *testing.T) {
			c := campaign(t, 2)
			c.Environ = append(c.Environ, "HOLDFAST_MUTANT="+m)
			c.Duration, c.HangAfter = mutantLimit, 20*time.Second
			totals, found, err := c.Run(context.Background())
			require.NoError(t, err)
			require.NotNil(t, found, "not found in %d crashes", totals.Cycles)
			detail := firstLine(found.Detail)
			t.Logf("%.1f s, %d crashes: %s", totals.Seconds, totals.Cycles, detail)
			table += fmt.Sprintf("| %s | %s | %.1f s | %d |\n", m, detail, totals.Seconds, totals.Programs)
		})
	}
	if path := os.Getenv("HOLDFAST_MUTANTS"); path != "" {
		require.NoError(t, os.WriteFile(path, []byte(table), 0o600))
	}
}

func firstLine(s string) string {
	s, _, _ = strings.Cut(s, "\n")
	return s
}
