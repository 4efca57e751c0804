package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/holdfast-db/holdfast/db"
)

// topInterval bounds are those of the time between two looks.
const (
	topIntervalMin = 100 * time.Millisecond
	topIntervalMax = time.Hour
)

func timeOf(n int64) time.Duration { return time.Duration(n) }

func newTopCommand() *cobra.Command {
	interval, frames := time.Second, 0
	c := &cobra.Command{
		Use:   "top DIR",
		Short: "Watch a database in use, as it changes",
		Long: `Top shows a database in use, anew every second: how full the tiers are, what is
asked of it and how long that takes, what waits, who holds leases, and what
happened last. q or Control-C ends it.

On anything but a terminal, and with --frames, it prints so many frames one
after the other and ends: one, if none was said.

` + lookHelp + `

` + lookStatusHelp,
		Example: `  holdfast top /var/cache/model
  holdfast top --interval 5s /var/cache/model
  holdfast top --frames 2 --json /var/cache/model`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if interval < topIntervalMin || interval > topIntervalMax {
				return usageError(fmt.Errorf("--interval %v: want %v to %v", interval, topIntervalMin, topIntervalMax))
			}
			if frames < 0 {
				return usageError(fmt.Errorf("--frames %d: negative", frames))
			}
			return runTop(c, args[0], interval, frames)
		},
	}
	c.Flags().DurationVar(&interval, "interval", interval, "time between two looks")
	c.Flags().IntVar(&frames, "frames", frames, "print `N` frames and end")
	return directoryArgs(c)
}

// frame is what top shows at one moment.
type frame struct {
	looked
	Overview *db.Overview  `json:"overview"`
	Activity *db.Activity  `json:"activity"`
	Leases   *db.LeaseList `json:"leases"`
}

func takeFrame(c *cobra.Command, dir string) (f *frame, err error) {
	err = look(c, dir, func(ctx context.Context, x *db.Inspection, at looked) (err error) {
		f = &frame{looked: at}
		if f.Overview, err = x.Overview(ctx); err != nil {
			return err
		}
		if f.Activity, err = x.Activity(ctx); err != nil {
			return err
		}
		f.Leases, err = x.Leases(ctx)
		return err
	})
	return f, err
}

func runTop(c *cobra.Command, dir string, interval time.Duration, frames int) error {
	ctx := c.Context()
	out := c.OutOrStdout()
	file, _ := out.(*os.File)
	live := frames == 0 && file != nil && term.IsTerminal(int(file.Fd())) && !wantsJSON(c)
	if frames == 0 && !live {
		frames = 1
	}
	ctx, quit := context.WithCancel(ctx)
	defer quit()
	if live {
		defer takeScreen(out, c.InOrStdin(), quit)()
	}
	var before *frame
	timer := time.NewTicker(interval)
	defer timer.Stop()
	for n := 1; ; n++ {
		f, err := takeFrame(c, dir)
		switch {
		case err != nil && (before == nil || !live):
			return err
		case err != nil:
			// The process may be restarting: what was there is shown until it is back.
			fmt.Fprintf(out, "\x1b[H\x1b[7m%s\x1b[0m\x1b[K", newScreen(out).clip(brief(err.Error(), 400)))
		case wantsJSON(c):
			if err := writeJSON(out, f); err != nil {
				return databaseError(err)
			}
		default:
			s := newScreen(out)
			var b bytes.Buffer
			s.Writer = &b
			s.top(f, before)
			text := b.String()
			if live {
				text = fit(text, file)
			}
			if _, err := io.WriteString(out, text); err != nil {
				return databaseError(err)
			}
		}
		if f != nil {
			before = f
		}
		if frames > 0 && n == frames {
			return nil
		}
		select {
		case <-timer.C:
		case <-ctx.Done():
			if c.Context().Err() != nil && !live {
				return failure{statusInterrupted, context.Cause(c.Context())}
			}
			return nil
		}
	}
}

// takeScreen turns to the terminal's other screen, and calls quit when q is pressed. What it gives puts the terminal back.
func takeScreen(out io.Writer, stdin io.Reader, quit func()) (back func()) {
	_, _ = io.WriteString(out, "\x1b[?1049h\x1b[?25l")
	restore := func() {}
	if in, ok := stdin.(*os.File); ok && term.IsTerminal(int(in.Fd())) {
		if state, err := term.MakeRaw(int(in.Fd())); err == nil {
			restore = func() { _ = term.Restore(int(in.Fd()), state) }
			go func() { // ends with the process: a terminal cannot be read with a deadline
				var b [1]byte
				for {
					n, err := in.Read(b[:])
					if err != nil || n == 1 && (b[0] == 'q' || b[0] == 'Q' || b[0] == 3) {
						quit()
						return
					}
				}
			}()
		}
	}
	return func() {
		restore()
		_, _ = io.WriteString(out, "\x1b[?25h\x1b[?1049l")
	}
}

// fit makes a frame of a text: each line in its place, no more than there is room for, and nothing left of the frame before.
func fit(text string, file *os.File) string {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	if _, height, err := term.GetSize(int(file.Fd())); err == nil && height > 0 && len(lines) > height {
		lines = lines[:height]
	}
	return "\x1b[H" + strings.Join(lines, "\x1b[K\r\n") + "\x1b[K\x1b[J"
}

// top writes one frame.
func (s *screen) top(f, before *frame) {
	o := f.Overview
	st := &o.Stats
	state, c := f.how(), yellow
	if f.Live {
		state, c = fmt.Sprintf("in use by pid %d, open for %s", f.PID, ago(o.At.Sub(o.Opened))), green
	}
	const title = "holdfast top"
	s.printf("%s  %s  %s\n", s.paint(bold, title), s.path(o.Directory, len(title)+len(state)+4), s.paint(c, state))
	if o.LogError != "" {
		s.printf("%s\n", s.clip(s.paint(red, "the log is stopped: "+o.LogError)))
	}
	width := min(max(s.room(24), 20), 60)
	tier := func(name string, used, whole int64, c colour, more string) {
		of := "unbounded"
		if whole > 0 {
			of = "of " + humanBytes(whole)
		} else {
			whole = max(used, 1) * 2
		}
		s.printf("%s\n", s.clip(fmt.Sprintf("%s %s %s %s%s", s.paint(dim, fmt.Sprintf("%-5s", name)), s.bar(used, whole, width, c), humanBytes(used), of, more)))
	}
	tier("RAM", st.RAMUsed, st.RAMCapacity, cyan, fmt.Sprintf(", %s dirty", humanBytes(st.RAMDirtyBytes)))
	tier("disk", st.DiskBytes, st.DiskBudget, blue, ", "+plural(st.Segments, "segment"))
	s.printf("%s\n\n", s.clip(fmt.Sprintf("%s %s listed, %s superseded, %s undurable, %s retired; log %s, index %s, LSN %d", s.paint(dim, "held "),
		count(st.Checkpoints), count(st.Superseded), count(st.Undurable), count(st.Retired), humanBytes(st.LogBytes), humanBytes(st.IndexBytes), st.LSN)))
	s.rates(f, before)
	if len(f.Activity.Latencies) > 0 {
		s.printf("\n")
		s.latencies(f.Activity.Latencies)
	}
	set := &o.Settings
	s.printf("\n%s\n", s.clip(fmt.Sprintf("%s publications %d/%d  restorations %d/%d  copies %d  waits for room %s (%s in vain)", s.paint(dim, "queues"),
		st.Pending, set.PublicationsMax, st.Leases, set.LeasesMax, st.Transfers, count(st.AdmissionWaits), count(st.AdmissionTimeouts))))
	s.holders(f)
	s.events(f)
}

func (s *screen) rates(f, before *frame) {
	st := &f.Overview.Stats
	var seconds float64
	old := db.Stats{}
	if before != nil && before.Live == f.Live && before.PID == f.PID && before.Overview.Opened.Equal(f.Overview.Opened) {
		seconds, old = f.Overview.At.Sub(before.Overview.At).Seconds(), before.Overview.Stats
	}
	per := func(now, then int64) string {
		if seconds <= 0 {
			return "-"
		}
		return rate(now-then, seconds)
	}
	lookups := func(x *db.Stats) int64 { return x.LookupsFull + x.LookupsPartial + x.LookupsMissed }
	t := s.columns("", ">a second", ">since open", "")
	t.row("lookups", per(lookups(st), lookups(&old)), count(lookups(st)),
		fmt.Sprintf("%s full, %s in part, %s missed; %s of tokens found", count(st.LookupsFull), count(st.LookupsPartial), count(st.LookupsMissed), percent(st.TokensFound, st.TokensAsked)))
	t.row("published", per(st.Published, old.Published), count(st.Published), fmt.Sprintf("%s replays, %s rejected", count(st.Replays), count(st.Rejected)))
	t.row("retired", per(st.RetiredTotal, old.RetiredTotal), count(st.RetiredTotal), s.reasons(st.RetiredBy))
	t.row("pages written", per(st.PagesWritten, old.PagesWritten), count(st.PagesWritten), fmt.Sprintf("%s; %s failed, %s late", humanBytes(st.PayloadWritten), count(st.WritesFailed), count(st.WritesLate)))
	t.row("pages read", per(st.PagesRead, old.PagesRead), count(st.PagesRead), fmt.Sprintf("%s failed, %s in quarantine", count(st.FailedReads), count(st.Quarantined)))
	t.row("evicted from RAM", per(st.PagesEvicted, old.PagesEvicted), count(st.PagesEvicted), fmt.Sprintf("%s moved on disk", count(st.PagesMoved)))
	t.write()
}

func (s *screen) reasons(by map[string]int64) string {
	var parts []string
	for reason, n := range by {
		parts = append(parts, fmt.Sprintf("%s %s", count(n), reason))
	}
	slices.Sort(parts)
	return strings.Join(parts, ", ")
}

// holdersMost and eventsMost bound the lines of top.
const (
	holdersMost = 5
	eventsMost  = 8
)

// holders sums leases up by owner.
func (s *screen) holders(f *frame) {
	type sum struct {
		owner                      string
		publications, restorations int
		bytes                      int64
		oldest                     time.Time
	}
	by := map[string]*sum{}
	for _, l := range f.Leases.Leases {
		x := by[l.Owner]
		if x == nil {
			x = &sum{owner: l.Owner, oldest: l.Began}
			by[l.Owner] = x
		}
		if l.Kind == "publication" {
			x.publications++
		} else {
			x.restorations++
		}
		x.bytes += l.Bytes
		if l.Began.Before(x.oldest) {
			x.oldest = l.Began
		}
	}
	var all []*sum
	for _, x := range by {
		all = append(all, x)
	}
	slices.SortFunc(all, func(a, b *sum) int { return a.oldest.Compare(b.oldest) })
	if len(all) == 0 {
		return
	}
	s.printf("\n")
	t := s.columns("leases by owner", ">publications", ">restorations", ">size", ">oldest")
	for _, x := range all[:min(len(all), holdersMost)] {
		owner := brief(x.owner, 28)
		if owner == "" {
			owner = "(the process)"
		}
		t.row(owner, x.publications, x.restorations, humanBytes(x.bytes), ago(f.Overview.At.Sub(x.oldest)))
	}
	t.write()
	if n := len(all) - holdersMost; n > 0 {
		s.printf("%s\n", s.paint(dim, fmt.Sprintf("and %d owners more", n)))
	}
}

func (s *screen) events(f *frame) {
	all := f.Activity.Events
	if len(all) == 0 {
		return
	}
	s.printf("\n%s\n", s.paint(dim, "last events"))
	for _, e := range all[max(len(all)-eventsMost, 0):] {
		s.printf("%s\n", s.clip(s.event(&e)))
	}
}

func (s *screen) event(e *db.EventInfo) string {
	c := green
	switch e.Kind {
	case "retired", "deleted":
		c = red
	case "superseded", "grace ended":
		c = yellow
	case "used", "persisted", "durable":
		c = dim
	}
	at := "        "
	if !e.At.IsZero() {
		at = e.At.Local().Format(time.TimeOnly)
	}
	line := fmt.Sprintf("%s  %s", at, s.paint(c, fmt.Sprintf("%-11s", e.Kind)))
	if !e.Generation.IsZero() {
		line += " " + e.Generation.Short()
	}
	if e.Offset > 0 {
		line += fmt.Sprintf(" at %s tokens", count(e.Offset))
	}
	if e.Pages > 0 {
		line += fmt.Sprintf(", %s pages", count(e.Pages))
		if e.NewPages > 0 {
			line += fmt.Sprintf(" (%s new)", count(e.NewPages))
		}
	}
	if e.Reason != "" {
		line += ": " + e.Reason
	}
	if !e.By.IsZero() {
		line += " by " + e.By.Short()
	}
	return line
}
