// Command llamaserve is a small HTTP serving process: llama.cpp computes, on the processor, and Holdfast keeps what was computed, over
// restarts and crashes. It shows how a serving process embeds the database, and proves with the state of real model architectures
// that what comes back is what was stored. docs/llamaserve.md describes it.
//
//	internal/engine      llama.cpp through its shared library, loaded at run time
//	internal/state       the state of a sequence, cut into pages and put together again
//	internal/server      the service and its HTTP interface
//	internal/gguf        tiny random models
//	internal/enginetest  what tests need of these
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/holdfast-db/holdfast/txn"
)

// Exit statuses.
const (
	statusOK    = 0
	statusUsage = 2 // a flag, an argument or a file is wrong
	statusError = 3 // the engine, the database or the operating system gave an error
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// The first signal asks for an orderly end. It also puts the default handling back, so that a second one ends the process at once.
	context.AfterFunc(ctx, stop)
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// run carries out one command line and gives its exit status.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	root := newRootCommand()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return statusOK
	}
	fmt.Fprintf(stderr, "llamaserve: %v\n", err)
	for _, class := range []error{
		txn.ErrTooLarge, txn.ErrConflict, txn.ErrBusy, txn.ErrNoSpace, txn.ErrReadOnly, txn.ErrPermission, txn.ErrLocked,
		txn.ErrFenced, txn.ErrCorrupt, txn.ErrIO, txn.ErrUnsupported, txn.ErrClosed,
	} {
		if errors.Is(err, class) {
			return statusError
		}
	}
	fmt.Fprintln(stderr, "Run 'llamaserve --help' or 'llamaserve COMMAND --help' for usage.")
	return statusUsage // what has no class is from the parser of the command line
}
