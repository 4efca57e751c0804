// Command holdfast is the command line of Holdfast, the crash-safe checkpoint database for LLM serving.
//
// Its main job is `holdfast replay`: it drives a real database in a real directory with a trace of serving requests,
// checks every byte that comes back, and kills the process that holds the database as often as it is asked to.
//
// The parts, in the order in which a request meets them:
//
//	trace.go, generator.go, transcript.go   where requests come from: a file, or made up from a seed
//	tokens.go, content.go                   what they stand for: the tokens of a block, the bytes of a page
//	replay.go, ledger.go                    the driver, and what it knows without asking the database
//	holder.go                               the seam: whoever holds the open database for the driver
//	embedded.go                             … in this process
//	supervisor.go, protocol.go, child.go    … in a child process that is killed and started again
//	progress.go, report.go                  what a person or a script sees
//	bench.go                                the same replay beside a bare append-and-sync loop
//
// Results go to standard output and nothing else does; progress, warnings and errors go to standard error.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

// Exit statuses, the same for every command.
const (
	statusOK          = 0   // done, and everything was as promised
	statusMismatch    = 1   // done, and something was not as promised: a wrong byte, or a listed checkpoint that cannot be restored
	statusUsage       = 2   // a flag, an argument or an input file is wrong; nothing was done to a database
	statusDatabase    = 3   // the database or the operating system gave an error
	statusInterrupted = 130 // SIGINT or SIGTERM; what was done until then is reported
)

const statusHelp = `Exit status:
  0    done, and everything was as promised
  1    a mismatch: a wrong byte, or a listed checkpoint that cannot be restored
  2    a flag, an argument or an input file is wrong
  3    the database or the operating system gave an error
  130  interrupted by SIGINT or SIGTERM; what was done until then is reported`

// failure is an error that has decided its exit status.
type failure struct {
	status int
	err    error
}

func (f failure) Error() string { return f.err.Error() }
func (f failure) Unwrap() error { return f.err }

// usageError is a failure that the caller can repair by calling differently.
func usageError(err error) error { return failure{statusUsage, err} }

// databaseError is a failure of what lies below the command line.
func databaseError(err error) error { return failure{statusDatabase, err} }

// exitStatus gives the status that err stands for. What has not decided otherwise comes from the parser of the command
// line and is about usage.
func exitStatus(err error) int {
	if err == nil {
		return statusOK
	}
	if f, ok := errors.AsType[failure](err); ok {
		return f.status
	}
	return statusUsage
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// The first signal asks for an orderly end. It also puts the default handling back, so that a second one ends
	// the process at once, whatever it is waiting for.
	context.AfterFunc(ctx, stop)
	os.Exit(run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// run carries out one command line and returns its exit status.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	root := newRootCommand()
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	status := exitStatus(err)
	if err != nil && err.Error() != "" {
		fmt.Fprintf(stderr, "holdfast: %v\n", err)
	}
	if status == statusUsage {
		fmt.Fprintln(stderr, "Run 'holdfast --help' or 'holdfast COMMAND --help' for usage.")
	}
	return status
}
