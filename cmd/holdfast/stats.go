package main

import (
	"context"
	"fmt"
	"reflect"
	"strings"
	"unicode"

	"github.com/spf13/cobra"

	"github.com/holdfast-db/holdfast/db"
)

func newStatsCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "stats DIR",
		Short: "Print all counters and gauges of a database",
		Long: `Stats prints every counter and gauge, those of latencies included. Counters
begin at zero when a process opens the database, so those of one that is not in
use say nothing; the gauges are exact either way.

` + lookHelp + `

` + lookStatusHelp,
		Example: `  holdfast stats /var/cache/model
  holdfast stats --json /var/cache/model | jq .stats.ram_used`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return look(c, args[0], func(ctx context.Context, x *db.Inspection, at looked) error {
				o, err := x.Overview(ctx)
				if err != nil {
					return err
				}
				a, err := x.Activity(ctx)
				if err != nil {
					return err
				}
				if wantsJSON(c) {
					return writeJSON(c.OutOrStdout(), struct {
						looked
						Stats     map[string]any   `json:"stats"`
						Latencies []db.LatencyInfo `json:"latencies"`
					}{at, statsMap(&o.Stats), a.Latencies})
				}
				s := newScreen(c.OutOrStdout())
				s.heading(at)
				s.stats(&o.Stats, a)
				return nil
			})
		},
	}
	return directoryArgs(c)
}

// snake writes the name of a field as JSON has it: RAMUsed is ram_used.
func snake(name string) string {
	var b strings.Builder
	r := []rune(name)
	for i, c := range r {
		if unicode.IsUpper(c) && i > 0 && (unicode.IsLower(r[i-1]) || i+1 < len(r) && unicode.IsLower(r[i+1])) {
			b.WriteByte('_')
		}
		b.WriteRune(unicode.ToLower(c))
	}
	return b.String()
}

// eachStat calls fn for every field of Stats in order, so that none that is added is forgotten.
func eachStat(s *db.Stats, fn func(name string, v reflect.Value)) {
	v := reflect.ValueOf(s).Elem()
	for i := range v.NumField() {
		fn(snake(v.Type().Field(i).Name), v.Field(i))
	}
}

func statsMap(s *db.Stats) map[string]any {
	out := map[string]any{}
	eachStat(s, func(name string, v reflect.Value) { out[name] = v.Interface() })
	return out
}

// stats prints as many columns of names and numbers as there is room for.
func (s *screen) stats(st *db.Stats, a *db.Activity) {
	var cells []string
	eachStat(st, func(name string, v reflect.Value) {
		number := fmt.Sprint(v.Interface())
		switch {
		case v.CanInt():
			number = count(v.Int())
			if n := v.Int(); n >= 1<<10 && isBytes(name) {
				number = humanBytes(n)
			}
		case v.CanUint():
			number = count(int64(v.Uint()))
		case v.Kind() == reflect.Map:
			return // told by reason below
		}
		cells = append(cells, s.paint(dim, fmt.Sprintf("%-20s", name))+fmt.Sprintf("%14s", number))
	})
	const cell = 34 + 4
	across := 1
	if s.width > 0 {
		across = max(s.width/cell, 1)
	}
	rows := (len(cells) + across - 1) / across
	for r := range rows {
		var line []string
		for i := r; i < len(cells); i += rows {
			line = append(line, cells[i])
		}
		s.printf("%s\n", strings.Join(line, "    "))
	}
	for reason, n := range st.RetiredBy {
		s.printf("%s%14s\n", s.paint(dim, fmt.Sprintf("%-20s", "retired, "+reason)), count(n))
	}
	if len(a.Latencies) > 0 {
		s.printf("\n")
		s.latencies(a.Latencies)
	}
}

func isBytes(name string) bool {
	for _, part := range []string{"bytes", "ram_", "disk_", "written"} {
		if strings.Contains(name, part) && name != "pages_written" {
			return true
		}
	}
	return false
}

func (s *screen) latencies(all []db.LatencyInfo) {
	t := s.columns("operation", ">count", ">p50", ">p99", ">max", ">mean")
	for _, l := range all {
		t.row(l.Operation, count(l.Count), span(l.P50), span(l.P99), span(l.Max), span(l.Sum/max(1, timeOf(l.Count))))
	}
	t.write()
}
