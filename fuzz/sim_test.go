package fuzz

import (
	"fmt"
	"os"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestScratch(t *testing.T) {
	n, _ := strconv.Atoi(os.Getenv("N"))
	if n == 0 {
		n = 30
	}
	from, _ := strconv.Atoi(os.Getenv("FROM"))
	dir := t.TempDir()
	begun := time.Now()
	total := &Outcome{}
	synctest.Test(t, func(*testing.T) {
		s := NewScheduler()
		s.Run(func() {
			for seed := from; seed < from+n; seed++ {
				fmt.Fprint(os.Stderr, seed, " ")
				o := Run(Generate(uint64(seed)), s, dir)
				total.Cycles += o.Cycles
				total.Calls += o.Calls
				if o.Violation != nil {
					fmt.Fprintln(os.Stderr, "\nseed", seed, o.Violation)
				}
				if os.Getenv("TWICE") != "" {
					p := Run(Generate(uint64(seed)), s, dir)
					require.Equal(t, o.Trace, p.Trace)
				}
			}
		})
	})
	fmt.Println(total.Cycles, total.Calls, time.Since(begun))
}

func TestOne(t *testing.T) {
	seed, _ := strconv.Atoi(os.Getenv("SEED"))
	if os.Getenv("SEED") == "" {
		t.Skip()
	}
	for i := range 2 {
		f, _ := os.Create(fmt.Sprintf("/tmp/one.%d", i))
		synctest.Test(t, func(*testing.T) {
			s := NewScheduler()
			s.Run(func() {
				p := Generate(uint64(seed))
				fmt.Fprintf(f, "%s", p.JSON())
				Debug = f
				o := Run(p, s, "")
				fmt.Fprintln(f, o.Violation)
			})
		})
		f.Close()
	}
}
