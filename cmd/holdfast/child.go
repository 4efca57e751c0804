package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"

	"github.com/spf13/cobra"

	"github.com/holdfast-db/holdfast/txn"
)

// newReplayChildCommand is the process that holds the database of a replay with kills. People have no use for it.
func newReplayChildCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "replay-child",
		Short:  "Hold the database for a replay that kills this process",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			// An interrupt from the terminal reaches the whole group of processes. It is for the driver, which then
			// asks for a clean close.
			signal.Ignore(os.Interrupt)
			orphaned := func() { os.Exit(statusDatabase) }
			return serveChild(context.WithoutCancel(c.Context()), c.InOrStdin(), c.OutOrStdout(), openEmbedded, orphaned)
		},
	}
}

// serveChild answers questions until it is told to close, or something fails. open opens the database; orphaned is
// called, on a goroutine of its own, when the questions end without a close, whatever is going on then.
func serveChild(ctx context.Context, in io.Reader, out io.Writer, open func(context.Context, setup) (holder, error), orphaned func()) error {
	questions := make(chan question)
	ended := make(chan struct{})
	end := sync.OnceFunc(func() { close(ended) }) // from here on, the end of the questions is as it should be
	defer end()
	go func() {
		defer close(questions)
		for d := json.NewDecoder(in); ; {
			var q question
			if err := d.Decode(&q); err != nil {
				break
			}
			select {
			case questions <- q:
			case <-ended:
				return
			}
		}
		select {
		case <-ended:
		default:
			orphaned()
		}
	}()

	answers := json.NewEncoder(out)
	var h holder
	for q := range questions {
		var a answer
		var err error
		switch {
		case q.Do == doOpen && q.Setup == nil:
			err = usageError(errors.New("open: without a setup"))
		case q.Do == doOpen && h != nil:
			err = usageError(errors.New("open: it is open already"))
		case q.Do == doOpen:
			h, err = open(ctx, *q.Setup)
			a.Is = isOpened
		case h == nil:
			err = usageError(fmt.Errorf("%s: nothing is open", q.Do))
		default:
			a, err = ask(ctx, h, q)
		}
		if err != nil {
			// The child ends with the status of the error, silently: the driver will say it.
			end()
			status := exitStatus(err)
			return errors.Join(failure{status, errors.New("")}, answers.Encode(answer{Is: isFailed, Error: err.Error(), Status: status}))
		}
		if q.Do == doClose {
			end()
		}
		if err := answers.Encode(a); err != nil {
			return databaseError(fmt.Errorf("answer the driver: %w: %w", txn.ErrIO, err))
		}
		if q.Do == doClose {
			return nil
		}
	}
	return databaseError(fmt.Errorf("the driver is gone: %w", txn.ErrIO))
}

// ask puts one question to the holder.
func ask(ctx context.Context, h holder, q question) (answer, error) {
	switch {
	case q.Do == doFind && q.Request != nil:
		f, err := h.find(ctx, *q.Request)
		return answer{Is: isFound, Found: &f}, err
	case q.Do == doPublish && q.Request != nil && q.From != nil:
		p, err := h.publish(ctx, *q.Request, *q.From)
		return answer{Is: isPublished, Published: &p}, err
	case q.Do == doReopen:
		return answer{Is: isReopened}, h.reopen(ctx)
	case q.Do == doCensus:
		c, err := h.census(ctx)
		return answer{Is: isCounted, Census: &c}, err
	case q.Do == doClose:
		return answer{Is: isClosed}, h.close(ctx)
	}
	return answer{}, usageError(fmt.Errorf("question %q: unknown or incomplete", q.Do))
}
