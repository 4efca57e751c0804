package main

import (
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
	"golang.org/x/term"
)

// screen is what a command writes to: how wide it is, and whether it shows colours. A pipe or a file has no width, and gets
// everything and no colours.
type screen struct {
	io.Writer
	width   int // columns; 0: unbounded
	colours bool
}

// screenMin is the narrowest terminal that output is made for.
const screenMin = 80

// newScreen looks at what w is. COLUMNS overrides the width, NO_COLOR (whatever its value) and TERM=dumb take the colours away.
func newScreen(w io.Writer) *screen {
	s := &screen{Writer: w}
	if f, ok := w.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		s.colours = os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
		if width, _, err := term.GetSize(int(f.Fd())); err == nil && width > 0 {
			s.width = max(width, screenMin)
		}
	}
	if n, err := strconv.Atoi(os.Getenv("COLUMNS")); err == nil && n > 0 {
		s.width = max(n, screenMin)
	}
	return s
}

// wide reports whether there is room for columns that one can do without.
func (s *screen) wide() bool { return s.width == 0 || s.width >= 120 }

// A colour is a parameter of the escape sequence that turns it on.
type colour string

const (
	bold   colour = "1"
	dim    colour = "2"
	red    colour = "31"
	green  colour = "32"
	yellow colour = "33"
	blue   colour = "34"
	cyan   colour = "36"
)

// paint gives the text in a colour, where there are colours.
func (s *screen) paint(c colour, text string) string {
	if !s.colours || text == "" {
		return text
	}
	return "\x1b[" + string(c) + "m" + text + "\x1b[0m"
}

func (s *screen) printf(format string, args ...any) { fmt.Fprintf(s, format, args...) }

// clip cuts a line to the width, counting what is seen.
func (s *screen) clip(line string) string {
	if s.width == 0 || text.StringWidthWithoutEscSequences(line) <= s.width {
		return line
	}
	return text.Trim(line, s.width-1) + "…"
}

// path cuts the front of a path off that leaves no room for so many columns beside it.
func (s *screen) path(name string, beside int) string {
	r := []rune(name)
	if most := max(s.width-beside, 16); s.width > 0 && len(r) > most {
		return "…" + string(r[len(r)-most+1:])
	}
	return name
}

// wrap breaks text at blanks into lines that fit behind an indent.
func (s *screen) wrap(indent, body string) string {
	width := s.width
	if width == 0 {
		width = 100
	}
	return indent + strings.ReplaceAll(wrapAt(body, min(width, 120)-len([]rune(indent))), "\n", "\n"+indent)
}

// columns is a table without lines: a head, and rows under it. Numbers go to the right.
type columns struct {
	screen *screen
	t      table.Writer
}

func (s *screen) columns(head ...string) *columns {
	c := &columns{screen: s, t: table.NewWriter()}
	style := table.StyleDefault
	style.Options = table.OptionsNoBordersAndSeparators
	style.Box.PaddingLeft, style.Box.PaddingRight = "", "  "
	style.Format.Header = text.FormatDefault
	c.t.SetStyle(style)
	row := make(table.Row, len(head))
	var configs []table.ColumnConfig
	for i, h := range head {
		align := text.AlignLeft
		if strings.HasPrefix(h, ">") {
			h, align = h[1:], text.AlignRight
		}
		row[i] = s.paint(dim, h)
		configs = append(configs, table.ColumnConfig{Number: i + 1, Align: align, AlignHeader: align})
	}
	c.t.AppendHeader(row)
	c.t.SetColumnConfigs(configs)
	return c
}

func (c *columns) row(cells ...any) { c.t.AppendRow(table.Row(cells)) }

func (c *columns) write() {
	for line := range strings.Lines(c.t.Render()) {
		fmt.Fprintln(c.screen, c.screen.clip(strings.TrimRight(line, " \n")))
	}
}

// bar draws how much of a whole is taken, in so many columns.
func (s *screen) bar(part, whole int64, width int, c colour) string {
	n := 0
	if whole > 0 {
		n = int(min(part*int64(width)/whole, int64(width)))
		if part > 0 && n == 0 {
			n = 1
		}
	}
	return s.paint(c, strings.Repeat("█", n)) + s.paint(dim, strings.Repeat("·", width-n))
}

// ago writes how long ago something was, in two units at most.
func ago(d time.Duration) string {
	switch {
	case d < 0:
		return "0s"
	case d < time.Minute:
		return d.Truncate(time.Second).String()
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
	case d < 24*time.Hour:
		return fmt.Sprintf("%dh%02dm", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%dd%02dh", int(d.Hours())/24, int(d.Hours())%24)
}

// age writes how old something is that was made between two times.
func age(now, after, before time.Time) string {
	switch {
	case before.IsZero():
		return "?"
	case after.IsZero():
		return ">" + ago(now.Sub(before))
	}
	return ago(now.Sub(after.Add(before.Sub(after) / 2)))
}

// plural counts things.
func plural(n int64, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return count(n) + " " + thing + "s"
}

// span writes a duration with three digits.
func span(d time.Duration) string { return micros(float64(d.Nanoseconds()) / 1e3) }
