package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"
)

// plainInterval is the time between two lines of progress where there is no terminal.
const plainInterval = 5 * time.Second

// notesMax bounds the lines beside the progress: a replay under pressure could write thousands.
const notesMax = 20

// progress shows how far the phases of a replay have come: a bar with rate and time left on a terminal, else a line
// every few seconds. It has no goroutine: it writes when it is told something. One goroutine uses it.
type progress struct {
	w        io.Writer
	terminal bool
	now      func() time.Time
	bar      *progressbar.ProgressBar // of the phase at hand; nil without a terminal
	phase    string
	total    int // steps of the phase, -1 unknown
	done     int
	started  time.Time
	shown    time.Time // when the last line was written
	share    string    // what share of something the phase has found
	notes    int
}

// newProgress shows progress on w. bars allows a bar; without it lines are written on a terminal, too, where other
// lines are expected in between.
func newProgress(w io.Writer, bars bool) *progress {
	f, ok := w.(*os.File)
	return &progress{w: w, terminal: bars && ok && term.IsTerminal(int(f.Fd())), now: time.Now}
}

// begin starts a phase of total steps; -1 says that nobody knows how many.
func (p *progress) begin(phase string, total int) {
	p.phase, p.total, p.done, p.share = phase, total, 0, ""
	p.started = p.now()
	p.shown = p.started
	if p.terminal {
		p.bar = progressbar.NewOptions(total,
			progressbar.OptionSetWriter(p.w),
			progressbar.OptionSetDescription(phase),
			progressbar.OptionSetItsString("req"),
			progressbar.OptionShowIts(),
			progressbar.OptionShowCount(),
			progressbar.OptionFullWidth(),
			progressbar.OptionThrottle(100*time.Millisecond),
			progressbar.OptionSetSpinnerChangeInterval(0), // no goroutine
			progressbar.OptionSetRenderBlankState(true),
			progressbar.OptionClearOnFinish(),
		)
	}
}

// step counts one request done; part of whole is the share found so far.
func (p *progress) step(part, whole int64) {
	p.done++
	if p.bar != nil {
		if whole > 0 && p.done%32 == 0 {
			p.bar.Describe(fmt.Sprintf("%s, hits %s", p.phase, percent(part, whole)))
		}
		_ = p.bar.Add(1)
		return
	}
	if now := p.now(); now.Sub(p.shown) >= plainInterval {
		p.shown = now
		p.share = percent(part, whole)
		p.line(now)
	}
}

// line writes where the phase is.
func (p *progress) line(now time.Time) {
	elapsed := now.Sub(p.started).Seconds()
	of, left := "", ""
	if p.total >= 0 {
		of = " of " + count(int64(p.total))
		if p.done > 0 && p.done < p.total {
			rest := time.Duration(elapsed / float64(p.done) * float64(p.total-p.done) * float64(time.Second))
			left = ", " + rest.Round(time.Second).String() + " left"
		}
	}
	fmt.Fprintf(p.w, "%s: %s%s requests, %s a second%s, %s found\n", p.phase, count(int64(p.done)), of, rate(int64(p.done), elapsed), left, p.share)
}

// note writes a line that stays; after notesMax of them no more.
func (p *progress) note(line string) {
	if p.notes++; p.notes > notesMax {
		return
	}
	if p.notes == notesMax {
		line += "; further ones are only counted"
	}
	if p.bar != nil {
		_ = p.bar.Clear()
	}
	fmt.Fprintln(p.w, line)
	if p.bar != nil {
		_ = p.bar.RenderBlank()
	}
}

// end ends the phase.
func (p *progress) end() {
	if p.bar != nil {
		_ = p.bar.Clear()
		_ = p.bar.Exit()
		p.bar = nil
	}
}
