package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
)

// benchRow is one figure of `holdfast bench`. Its JSON form is an interface: fields are added, and neither renamed nor
// removed.
type benchRow struct {
	Suite     string   `json:"suite"` // the word that selects it
	Name      string   `json:"name"`
	Value     float64  `json:"value"`     // median over the turns
	Unit      string   `json:"unit"`      // of value and reference
	Reference *float64 `json:"reference"` // median over the turns; null for a figure that stands for itself
	Against   string   `json:"against"`   // what the reference is
	Ratio     *float64 `json:"ratio"`     // value over reference: the median of the ratios of the turns
	Low       *float64 `json:"ratio_low"` // first and third quartile of them
	High      *float64 `json:"ratio_high"`
	Turns     int      `json:"turns"` // how often both sides took their turn; samples, where there are no turns
	Goal      goal     `json:"goal"`
	Reached   bool     `json:"reached"`
	Note      string   `json:"note,omitempty"`
}

// goal is what a row has to reach. Its text is like "ratio >= 0.95" or "value <= 256". The zero goal is none: what has none is
// there for comparison, and counts as reached.
type goal struct {
	of      string // goalRatio, goalValue or goalDifference
	atLeast bool
	bound   float64
}

const (
	goalRatio      = "ratio"
	goalValue      = "value"
	goalDifference = "value - reference"
)

func ratioAtLeast(bound float64) goal { return goal{goalRatio, true, bound} }
func ratioAtMost(bound float64) goal  { return goal{goalRatio, false, bound} }
func valueAtMost(bound float64) goal  { return goal{goalValue, false, bound} }

// overReferenceAtMost bounds by how much the value is above the reference, in the unit of both.
func overReferenceAtMost(bound float64) goal { return goal{goalDifference, false, bound} }

func (g goal) String() string {
	if g.of == "" {
		return ""
	}
	sign := "<="
	if g.atLeast {
		sign = ">="
	}
	return fmt.Sprintf("%s %s %s", g.of, sign, strconv.FormatFloat(g.bound, 'g', -1, 64))
}

// MarshalText implements encoding.TextMarshaler.
func (g goal) MarshalText() ([]byte, error) { return []byte(g.String()), nil }

// reached tells whether n is as good as the goal or better. What could not be computed reaches nothing.
func (g goal) reached(n float64) bool {
	switch {
	case g.of == "":
		return true
	case math.IsNaN(n), math.IsInf(n, 0):
		return false
	case g.atLeast:
		return n >= g.bound
	}
	return n <= g.bound
}

// turn is what one turn of both sides gave, in the unit of the row.
type turn struct{ value, reference float64 }

// ratioRow is a row of turns against a reference. The ratio is the median of the ratios of single turns, so that a machine
// which becomes slower meanwhile does so for both sides of each.
func ratioRow(name, unit, against string, turns []turn, g goal) benchRow {
	var values, references, ratios []float64
	for _, t := range turns {
		values, references = append(values, t.value), append(references, t.reference)
		ratios = append(ratios, t.value/t.reference)
	}
	reference, ratio := quantile(references, 0.5), quantile(ratios, 0.5)
	low, high := quantile(ratios, 0.25), quantile(ratios, 0.75)
	r := benchRow{
		Name: name, Value: quantile(values, 0.5), Unit: unit, Reference: &reference, Against: against,
		Ratio: &ratio, Low: &low, High: &high, Turns: len(turns), Goal: g,
	}
	r.Reached = g.reached(r.goalOf())
	return r
}

// valueRow is a row without a reference.
func valueRow(name, unit string, value float64, samples int, g goal) benchRow {
	r := benchRow{Name: name, Value: value, Unit: unit, Turns: samples, Goal: g}
	r.Reached = g.reached(r.goalOf())
	return r
}

// noted adds a note.
func (r benchRow) noted(format string, args ...any) benchRow {
	r.Note = fmt.Sprintf(format, args...)
	return r
}

func (r benchRow) goalOf() float64 {
	switch {
	case r.Goal.of == goalValue:
		return r.Value
	case r.Goal.of == goalDifference && r.Reference != nil:
		return r.Value - *r.Reference
	case r.Ratio != nil:
		return *r.Ratio
	}
	return math.NaN()
}

// quantile gives the q-quantile of samples, interpolated; NaN without any. It leaves them as they are.
func quantile(samples []float64, q float64) float64 {
	if len(samples) == 0 {
		return math.NaN()
	}
	s := slices.Sorted(slices.Values(samples))
	at := q * float64(len(s)-1)
	below := int(at)
	if below+1 >= len(s) {
		return s[len(s)-1]
	}
	return s[below] + (at-float64(below))*(s[below+1]-s[below])
}

// benchReport is the result of `holdfast bench`.
type benchReport struct {
	Machine     string     `json:"machine"` // processors, system, file system
	Quick       bool       `json:"quick"`
	Seconds     float64    `json:"seconds"`
	Rows        []benchRow `json:"rows"`
	Errors      []string   `json:"errors,omitempty"` // suites that could not be measured, and why
	Interrupted bool       `json:"interrupted,omitempty"`
}

// finite makes the report fit for JSON, which knows no NaN.
func (r *benchReport) finite() {
	for i := range r.Rows {
		row := &r.Rows[i]
		for _, p := range []**float64{&row.Reference, &row.Ratio, &row.Low, &row.High} {
			if *p != nil && (math.IsNaN(**p) || math.IsInf(**p, 0)) {
				*p = nil
			}
		}
		if math.IsNaN(row.Value) || math.IsInf(row.Value, 0) {
			row.Value = 0
		}
	}
}

// figure writes a number with three digits.
func figure(n float64) string {
	switch a := math.Abs(n); {
	case math.IsNaN(n), math.IsInf(n, 0):
		return "-"
	case a >= 1e5:
		return strings.ReplaceAll(count(int64(math.Round(n))), ",", " ")
	case a >= 100:
		return strconv.FormatFloat(n, 'f', 0, 64)
	case a == 0:
		return "0"
	}
	return strconv.FormatFloat(n, 'g', 3, 64)
}

// cells gives the columns of a row.
func (r benchRow) cells() (cells [5]string) {
	cells[0] = r.Name
	cells[1] = figure(r.Value) + " " + r.Unit
	if r.Reference != nil {
		cells[2] = figure(*r.Reference) + " " + r.Unit + ", " + r.Against
	}
	cells[3] = "-"
	if r.Ratio != nil {
		cells[3] = figure(*r.Ratio)
		if r.Low != nil && r.High != nil && r.Turns > 1 {
			cells[3] += fmt.Sprintf(" (%s…%s)", figure(*r.Low), figure(*r.High))
		}
	}
	of := ""
	switch r.Goal.of {
	case "":
		cells[4] = "-"
		return cells
	case goalValue:
		of = " " + r.Unit
	case goalDifference:
		of = " " + r.Unit + " above the reference"
	}
	sign := "≤ "
	if r.Goal.atLeast {
		sign = "≥ "
	}
	verdict := "missed"
	if r.Reached {
		verdict = "reached"
	}
	cells[4] = sign + strconv.FormatFloat(r.Goal.bound, 'g', -1, 64) + of + ": " + verdict
	return cells
}

// writeTable writes the report for people.
func (r *benchReport) writeTable(w io.Writer) error {
	t := table.NewWriter()
	t.SetStyle(table.StyleRounded)
	t.SetColumnConfigs([]table.ColumnConfig{
		{Number: 1, WidthMax: 44, WidthMaxEnforcer: text.WrapSoft}, {Number: 3, WidthMax: 34, WidthMaxEnforcer: text.WrapSoft},
	})
	t.AppendHeader(table.Row{"what", "measured", "reference in the same run", "ratio (quartiles)", "goal"})
	suite := ""
	for _, row := range r.Rows {
		if row.Suite != suite {
			t.AppendSeparator()
			suite = row.Suite
		}
		c := row.cells()
		t.AppendRow(table.Row{c[0], c[1], c[2], c[3], c[4]})
	}
	out := t.Render() + "\n" + r.remarks("") + r.Machine + "\n"
	_, err := io.WriteString(w, out)
	return err
}

// writeMarkdown writes the rows as the table of docs/benchmarks.md.
func (r *benchReport) writeMarkdown(w io.Writer) error {
	var b strings.Builder
	b.WriteString("| what | measured | reference in the same run | ratio (quartiles) | goal |\n| --- | --- | --- | --- | --- |\n")
	for _, row := range r.Rows {
		c := row.cells()
		fmt.Fprintf(&b, "| %s |\n", strings.Join(c[:], " | "))
	}
	fmt.Fprintf(&b, "\n%s%s\n", r.remarks("- "), r.Machine)
	_, err := io.WriteString(w, b.String())
	return err
}

// remarks gives the notes of the rows and what failed, a line each.
func (r *benchReport) remarks(bullet string) string {
	var b strings.Builder
	for _, row := range r.Rows {
		if row.Note != "" {
			fmt.Fprintf(&b, "%s%s: %s\n", bullet, row.Name, row.Note)
		}
	}
	for _, e := range r.Errors {
		fmt.Fprintf(&b, "%snot measured: %s\n", bullet, e)
	}
	if b.Len() > 0 {
		b.WriteString("\n")
	}
	return b.String()
}
