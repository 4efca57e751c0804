package fuzz

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"testing"
	"testing/synctest"
)

// A worker is a process that runs programs one after the other in one bubble of time. It is a process of its own so that one that
// panics or hangs is a violation like any other, and because a bubble has to itself what libraries pool.
//
// Its standard input has one job a line, its third file gets one report a line: the number of the job when it begins, and
// what came of it when it ends.

// Job is what a worker is asked to do: the program of a seed, or a given one, or a part of the exhaustive set.
type Job struct {
	Seed    uint64   `json:"seed"`
	Program *Program `json:"program,omitempty"`
	Small   *Small   `json:"small,omitempty"`
}

type report struct {
	Began   bool     `json:"began,omitempty"`
	Seed    uint64   `json:"seed"`
	Outcome *Outcome `json:"outcome,omitempty"`
}

// WorkerMain is the main function of a worker process; it does not return.
func WorkerMain() {
	runtime.GOMAXPROCS(1)
	debug.SetGCPercent(300)
	reports := os.NewFile(3, "reports")
	scratch := os.Getenv(scratchVariable)
	jobs := os.Stdin
	// Package testing has the only door to a bubble, and wants its own command line.
	os.Args = []string{os.Args[0], "-test.timeout=0"}
	testing.Main(func(string, string) (bool, error) { return true, nil }, []testing.InternalTest{{Name: "Worker", F: func(t *testing.T) {
		synctest.Test(t, func(*testing.T) {
			s := NewScheduler()
			s.Run(func() { work(jobs, reports, s, scratch) })
		})
	}}}, nil, nil)
}

const scratchVariable = "HOLDFAST_CRASH_SCRATCH"

func work(jobs io.Reader, reports io.Writer, s *Scheduler, scratch string) {
	in := bufio.NewReader(jobs)
	out := json.NewEncoder(reports)
	for {
		line, err := in.ReadBytes('\n')
		if err != nil {
			return
		}
		var j Job
		if err := json.Unmarshal(line, &j); err != nil {
			fmt.Fprintln(os.Stderr, "crash worker:", err)
			return
		}
		if out.Encode(report{Began: true, Seed: j.Seed}) != nil {
			return
		}
		var o *Outcome
		switch {
		case j.Small != nil:
			o = j.Small.Run(s)
		case j.Program != nil:
			o = Run(j.Program, s, scratch)
		default:
			o = Run(Generate(j.Seed), s, scratch)
		}
		if out.Encode(report{Seed: j.Seed, Outcome: o}) != nil {
			return
		}
	}
}
