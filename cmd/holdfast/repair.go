package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/holdfast-db/holdfast/db"
)

// What verify, recover, salvage and scrub share: reading at a rate, showing how far they are, and asking before anything is
// given up.

const repairStatusHelp = `Exit status:
  0    nothing to do, or done
  1    something is damaged, or would be changed
  2    a flag or an argument is wrong, or the change was not confirmed
  3    the database or the operating system gave an error
  130  interrupted by SIGINT or SIGTERM; what was done until then is reported`

// fraction shows how much of a known amount of bytes is done: a bar on a terminal, else a line every few seconds.
type fraction struct {
	w     io.Writer
	bar   *progressbar.ProgressBar
	what  string
	shown time.Time
}

func newFraction(w io.Writer, what string) *fraction {
	f := &fraction{w: w, what: what, shown: time.Now()}
	if file, ok := w.(*os.File); ok && term.IsTerminal(int(file.Fd())) {
		f.bar = progressbar.NewOptions64(-1,
			progressbar.OptionSetWriter(w),
			progressbar.OptionSetDescription(what),
			progressbar.OptionShowBytes(true),
			progressbar.OptionFullWidth(),
			progressbar.OptionThrottle(100*time.Millisecond),
			progressbar.OptionSetSpinnerChangeInterval(0), // no goroutine
			progressbar.OptionClearOnFinish(),
		)
	}
	return f
}

// show says that done of total bytes are done, and what was found until now.
func (f *fraction) show(done, total int64, found string) {
	if f.bar != nil {
		if f.bar.GetMax64() != total && total > 0 {
			f.bar.ChangeMax64(total)
		}
		f.bar.Describe(f.what + ", " + found)
		_ = f.bar.Set64(done)
		return
	}
	if now := time.Now(); now.Sub(f.shown) >= plainInterval {
		f.shown = now
		fmt.Fprintf(f.w, "%s: %s of %s, %s\n", f.what, sizeOf(done), sizeOf(total), found)
	}
}

func (f *fraction) end() {
	if f.bar != nil {
		_ = f.bar.Clear()
		_ = f.bar.Exit()
	}
}

// verifyOptions are those of a pass that reads a directory at a rate and shows on w how far it is.
func verifyOptions(w io.Writer, rate byteSize) (o db.VerifyOptions, end func()) {
	f := newFraction(w, "verify")
	o.BytesPerSecond = int64(rate)
	o.Progress = func(p db.VerifyProgress) { f.show(p.Bytes, p.BytesTotal, fmt.Sprintf("%d findings", p.Findings)) }
	return o, f.end
}

// confirm asks on a terminal whether to go on. Without one nobody is there to ask, and --yes has to have been given.
func confirm(c *cobra.Command, yes bool, question string) error {
	if yes {
		return nil
	}
	in, ok := c.InOrStdin().(*os.File)
	if !ok || !term.IsTerminal(int(in.Fd())) {
		return usageError(errors.New("nothing was changed: --yes is needed where there is no terminal to ask on"))
	}
	fmt.Fprintf(c.ErrOrStderr(), "%s [y/N] ", question)
	line, err := bufio.NewReader(in).ReadString('\n')
	if answer := strings.ToLower(strings.TrimSpace(line)); err != nil || answer != "y" && answer != "yes" {
		return usageError(errors.New("nothing was changed"))
	}
	return nil
}

// repairError gives an error of the database its exit status.
func repairError(ctx context.Context, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, db.ErrBusy) && ctx.Err() != nil:
		return failure{statusInterrupted, err}
	}
	return databaseError(err)
}

// operatorLog passes on what the database has to say to whoever runs the command.
func operatorLog(w io.Writer) *slog.Logger {
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: slog.LevelWarn}))
}

// sizeOf writes a size for people.
func sizeOf(n int64) string { return humanize.IBytes(uint64(max(n, 0))) }
