package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/holdfast-db/holdfast/db"
	"github.com/holdfast-db/holdfast/txn"
)

func newInspectWALCommand() *cobra.Command {
	var from uint64
	limit := 20
	c := &cobra.Command{
		Use:     "wal DIR",
		Aliases: []string{"log"},
		Short:   "Show the log: its files, how far it is safe, and its records",
		Long: `Wal shows the files of the log and its last records, or those from an LSN on.
Every record is one transaction of the catalogue: publish, supersede, retire,
delete, persist, mark. What the index holds safely is cut from the log.

` + lookStatusHelp,
		Example: `  holdfast inspect wal /var/cache/model
  holdfast inspect wal --from 1200 --limit 100 --json /var/cache/model`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return look(c, args[0], func(ctx context.Context, x *db.Inspection, at looked) error {
				l, err := x.Log(ctx, db.LogQuery{From: txn.LSN(from), Limit: limit})
				if err != nil {
					return err
				}
				if wantsJSON(c) {
					return writeJSON(c.OutOrStdout(), struct {
						looked
						Log *db.LogInfo `json:"log"`
					}{at, l})
				}
				s := newScreen(c.OutOrStdout())
				s.heading(at)
				s.log(l)
				return nil
			})
		},
	}
	c.Flags().Uint64Var(&from, "from", 0, "begin at this `LSN` (default: the last ones)")
	c.Flags().IntVar(&limit, "limit", limit, "show at most `N` records, -1 for none")
	return directoryArgs(c)
}

func (s *screen) log(l *db.LogInfo) {
	s.printf("%s%s in %s, next LSN %d\n", s.paint(dim, "log          "), humanBytes(l.Bytes), plural(int64(len(l.Files)), "file"), l.Next)
	s.printf("%ssynced to LSN %d, in the index to %d, safely to %d\n", s.paint(dim, "progress     "), l.Synced, l.Applied, l.Durable)
	if l.Cut > 0 {
		s.printf("%s%d bytes of a torn end were cut off when it was opened\n", s.paint(dim, "repaired     "), l.Cut)
	}
	s.printf("\n")
	if len(l.Records) == 0 {
		s.printf("%s\n", s.paint(dim, "no record: the index has them all, and the log was cut"))
		return
	}
	t := s.columns(">LSN", "record", ">bytes", "what", "checkpoints")
	for i := range l.Records {
		r := &l.Records[i]
		var gens []string
		most := 2
		if s.wide() {
			most = 6
		}
		for n, g := range r.Generations {
			if n == most {
				gens = append(gens, fmt.Sprintf("+%d", r.Count-most))
				break
			}
			gens = append(gens, g.Short())
		}
		t.row(r.LSN, r.Kind, count(int64(r.Bytes)), brief(r.Detail, s.room(52)), strings.Join(gens, " "))
	}
	t.write()
}

func newInspectSegmentsCommand() *cobra.Command {
	limit := 60
	c := &cobra.Command{
		Use:   "segments DIR",
		Short: "Draw the segment files: what is alive, dead and free",
		Long: `Segments draws each segment file as a bar from its beginning to its end. A cell
is full where all of it is alive, lighter where less is, and a dot where its
space was given back to the file system. What is dead is neither: headers, and
pages that nothing needs any more and whose space was not given back yet.

` + lookStatusHelp,
		Example: `  holdfast inspect segments /var/cache/model
  holdfast inspect segments --json DIR | jq '.segments[].dead_bytes'`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return look(c, args[0], func(ctx context.Context, x *db.Inspection, at looked) error {
				s := newScreen(c.OutOrStdout())
				cells := min(max(s.room(28), 20), 100)
				m, err := x.Segments(ctx, db.SegmentQuery{Cells: cells})
				if err != nil {
					return err
				}
				if wantsJSON(c) {
					return writeJSON(c.OutOrStdout(), struct {
						looked
						*db.SegmentMap
					}{at, m})
				}
				s.heading(at)
				s.segments(m, limit)
				return nil
			})
		},
	}
	c.Flags().IntVar(&limit, "limit", limit, "draw at most the `N` youngest")
	return directoryArgs(c)
}

var segmentCells = map[rune]string{'0': "░", '1': "░", '2': "░", '3': "▒", '4': "▒", '5': "▒", '6': "▓", '7': "▓", '8': "▓", '9': "█", '.': "·"}

func (s *screen) segments(m *db.SegmentMap, limit int) {
	var live, dead, free int64
	for _, x := range m.Segments {
		live, dead, free = live+x.Live, dead+x.Dead, free+x.Free
	}
	s.printf("%s: %s alive, %s dead, %s given back\n\n", plural(int64(len(m.Segments)+m.Omitted), "file"), s.paint(green, humanBytes(live)), s.paint(yellow, humanBytes(dead)), humanBytes(free))
	t := s.columns(">segment", "class", ">alive", ">dead", ">free", "map")
	for _, x := range m.Segments[max(len(m.Segments)-limit, 0):] {
		var b, run strings.Builder
		last := dim
		for _, r := range x.Map {
			c := green
			switch {
			case r == '.':
				c = dim
			case r < '3':
				c = yellow
			}
			if c != last {
				b.WriteString(s.paint(last, run.String()))
				run.Reset()
				last = c
			}
			run.WriteString(segmentCells[r])
		}
		b.WriteString(s.paint(last, run.String()))
		t.row(x.Number, x.Class, humanBytes(x.Live), humanBytes(x.Dead), humanBytes(x.Free), b.String())
	}
	t.write()
	s.printf("%s\n", s.paint(dim, "█ alive  ▒ in part  ░ dead  · given back"))
}

func newInspectIndexCommand() *cobra.Command {
	var entries bool
	c := &cobra.Command{
		Use:   "index DIR",
		Short: "Show the index: its size, its levels, its entries",
		Long: `Index shows what the catalogue takes in memory and on disk, and with --entries
how many entries of each sort there are, for which all are read.

` + lookStatusHelp,
		Example: `  holdfast inspect index /var/cache/model
  holdfast inspect index --entries --json /var/cache/model`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return look(c, args[0], func(ctx context.Context, x *db.Inspection, at looked) error {
				i, err := x.Index(ctx, db.IndexQuery{Count: entries})
				if err != nil {
					return err
				}
				if wantsJSON(c) {
					return writeJSON(c.OutOrStdout(), struct {
						looked
						Index *db.IndexInfo `json:"index"`
					}{at, i})
				}
				s := newScreen(c.OutOrStdout())
				s.heading(at)
				s.printf("%s%s on disk, %s in memory tables, %s cached\n", s.paint(dim, "index        "), humanBytes(i.DiskBytes), humanBytes(i.MemTableBytes), humanBytes(i.CacheBytes))
				s.printf("%s%s of %s blocks were in the cache\n", s.paint(dim, "reads        "), percent(i.CacheHits, i.CacheHits+i.CacheMisses), count(i.CacheHits+i.CacheMisses))
				s.printf("%sLSN %d, safely %d\n\n", s.paint(dim, "progress     "), i.Applied, i.Durable)
				t := s.columns(">level", ">files", ">size")
				for n, l := range i.Levels {
					if l.Files > 0 {
						t.row(n, l.Files, humanBytes(l.Bytes))
					}
				}
				t.write()
				if entries {
					s.printf("\n")
					t = s.columns("entries", ">number")
					for _, name := range slices.Sorted(maps.Keys(i.Entries)) {
						t.row(name, count(i.Entries[name]))
					}
					t.write()
				}
				return nil
			})
		},
	}
	c.Flags().BoolVar(&entries, "entries", false, "count the entries of each sort")
	return directoryArgs(c)
}
