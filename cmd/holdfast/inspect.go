package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/holdfast-db/holdfast/db"
)

func newInspectCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "inspect DIR",
		Short: "Look into a database: what is there, where it is, and why",
		Long: `Inspect shows what a database holds and changes nothing. Without one of the
commands below it says what database it is, how it is set up and what it holds.

` + lookHelp + `

` + lookStatusHelp,
		Example: `  holdfast inspect /var/cache/model
  holdfast inspect tree /var/cache/model
  holdfast inspect why /var/cache/model 3f9a12bc
  holdfast inspect checkpoints --state superseded --older 1h /var/cache/model`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error { return look(c, args[0], overview(c)) },
	}
	directoryArgs(c)
	c.AddCommand(newInspectNamespacesCommand(), newInspectCheckpointsCommand(), newInspectManifestCommand(), newInspectWALCommand(),
		newInspectSegmentsCommand(), newInspectIndexCommand(), newInspectTreeCommand(), newInspectWhyCommand(), newInspectHistoryCommand(), newInspectLeasesCommand())
	return c
}

type looking func(ctx context.Context, x *db.Inspection, at looked) error

// overviewResult is what inspect prints with --json.
type overviewResult struct {
	looked
	Overview   *db.Overview       `json:"overview"`
	Namespaces []db.NamespaceInfo `json:"namespaces"`
}

func overview(c *cobra.Command) looking {
	return func(ctx context.Context, x *db.Inspection, at looked) error {
		o, err := x.Overview(ctx)
		if err != nil {
			return err
		}
		ns, err := x.Namespaces(ctx)
		if err != nil {
			return err
		}
		if wantsJSON(c) {
			return writeJSON(c.OutOrStdout(), overviewResult{at, o, ns})
		}
		s := newScreen(c.OutOrStdout())
		s.heading(at)
		st := &o.Stats
		set := &o.Settings
		line := func(name, format string, args ...any) {
			s.printf("%s\n", s.clip(s.paint(dim, fmt.Sprintf("%-13s", name))+fmt.Sprintf(format, args...)))
		}
		line("database", "%s, format %d, opened %s", o.ID, o.Format, plural(int64(o.Epoch), "time"))
		line("checkpoints", "%s listed (%s superseded, %s undurable), %s retired", count(st.Checkpoints), count(st.Superseded), count(st.Undurable), count(st.Retired))
		line("pages", "%s, %s over all ranks", count(st.Pages), humanBytes(st.PageBytes))
		if at.Live {
			line("RAM", "%s of %s, %s dirty, %s", humanBytes(st.RAMUsed), humanBytes(st.RAMCapacity), humanBytes(st.RAMDirtyBytes), set.WritePolicy)
			line("open since", "%s ago, after a recovery of %s: %s records replayed, %d checkpoints retired", ago(o.At.Sub(o.Opened)), span(o.Recovered.Duration),
				count(o.Recovered.LogRecords), o.Recovered.NotDurable+o.Recovered.Lost)
		} else if n := o.Recovered.NotDurable + o.Recovered.Lost; n > 0 || o.Recovered.LogRecords > 0 {
			line("next open", "replays %s records and retires %d checkpoints: %d were in RAM only, %d have lost pages", count(o.Recovered.LogRecords), n, o.Recovered.NotDurable, o.Recovered.Lost)
		}
		disk := "unbounded"
		if st.DiskBudget > 0 {
			disk = "of " + humanBytes(st.DiskBudget)
		}
		if !at.Live {
			disk = "budget not known"
		}
		line("disk", "%s in %s, %s", humanBytes(st.DiskBytes), plural(st.Segments, "segment"), disk)
		line("log, index", "%s, %s, LSN %d", humanBytes(st.LogBytes), humanBytes(st.IndexBytes), st.LSN)
		if !o.HistoryFrom.IsZero() {
			line("history", "since %s", o.HistoryFrom.Local().Format(time.DateTime))
		}
		if o.LogError != "" {
			line("log stopped", "%s", s.paint(red, o.LogError))
		}
		s.printf("\n")
		s.namespaces(ns)
		return nil
	}
}

func (s *screen) namespaces(all []db.NamespaceInfo) {
	head := []string{"namespace", "model", "engine", ">listed", ">superseded", ">retired", ">longest"}
	if s.wide() {
		head = append(head, ">ranks", "weights", "adapter", "tenant", "groups")
	}
	c := s.columns(head...)
	for _, n := range all {
		id := &n.Identity
		row := []any{n.ID.Short(), brief(id.Model, 24), brief(id.Engine, 16), count(n.Listed), count(n.Superseded), count(n.Retired), count(n.Tokens)}
		if s.wide() {
			var groups []string
			for _, g := range id.Layout.Groups {
				groups = append(groups, g.Name)
			}
			row = append(row, id.Layout.Ranks, brief(id.Weights, 12), brief(id.Adapter, 12), brief(id.Tenant, 12), brief(strings.Join(groups, " "), 40))
		}
		c.row(row...)
	}
	c.write()
}

// brief cuts text of a user's to so many characters, and makes control characters harmless.
func brief(text string, most int) string {
	r := []rune(strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 {
			return '·'
		}
		return r
	}, text))
	if len(r) > most {
		return string(r[:most-1]) + "…"
	}
	return string(r)
}

func newInspectNamespacesCommand() *cobra.Command {
	return directoryArgs(&cobra.Command{
		Use:   "namespaces DIR",
		Short: "List namespaces and the identity of each",
		Long: `Namespaces lists every identity that something was published under, with how
much is listed in it. --json has all fields of each identity.

` + lookStatusHelp,
		Example: `  holdfast inspect namespaces /var/cache/model
  holdfast inspect namespaces --json DIR | jq '.namespaces[].identity'`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return look(c, args[0], func(ctx context.Context, x *db.Inspection, at looked) error {
				all, err := x.Namespaces(ctx)
				if err != nil {
					return err
				}
				if wantsJSON(c) {
					return writeJSON(c.OutOrStdout(), struct {
						looked
						Namespaces []db.NamespaceInfo `json:"namespaces"`
					}{at, all})
				}
				s := newScreen(c.OutOrStdout())
				s.heading(at)
				s.namespaces(all)
				return nil
			})
		},
	})
}

// filter are the flags that choose checkpoints.
type filter struct {
	namespace, state, tier, request string
	min, max                        byteSize
	older, newer                    time.Duration
}

func (f *filter) flags(c *cobra.Command) {
	c.Flags().StringVar(&f.namespace, "namespace", "", "those of a namespace, `ID` in at least 4 hex digits")
	c.Flags().StringVar(&f.state, "state", "", "`STATE`: listed, current, superseded, undurable or retired")
	c.Flags().StringVar(&f.tier, "tier", "", "`TIER`: ram, disk or both; where the pages are that the manifest names")
	c.Flags().StringVar(&f.request, "request", "", "those of a serving request, by its `ID`")
	c.Flags().Var(&f.min, "min-size", "at least so large, shared pages included")
	c.Flags().Var(&f.max, "max-size", "at most so large")
	c.Flags().DurationVar(&f.older, "older", 0, "published at least so long ago, such as 5s or 24h")
	c.Flags().DurationVar(&f.newer, "newer", 0, "published at most so long ago")
	completeWith(c, "state", "listed", "current", "superseded", "undurable", "retired")
	completeWith(c, "tier", "ram", "disk", "both")
}

func (f *filter) query(ctx context.Context, x db.Inspector) (q db.ListQuery, err error) {
	q = db.ListQuery{State: f.state, Tier: f.tier, Request: f.request, MinBytes: int64(f.min), MaxBytes: int64(f.max), Older: f.older, Newer: f.newer}
	q.Namespace, err = namespaceBy(ctx, x, f.namespace)
	return q, err
}

// checkpointsMost bounds the checkpoints that a command holds in memory.
const checkpointsMost = 1 << 20

func newInspectCheckpointsCommand() *cobra.Command {
	var f filter
	var limit int
	sort := "age"
	c := &cobra.Command{
		Use:     "checkpoints DIR",
		Aliases: []string{"list"},
		Short:   "List checkpoints, by namespace, state, tier, age and size",
		Long: `Checkpoints lists what is listed and what is retired and not deleted yet, the
youngest first. State is current, superseded (goes first when room is needed) or
retired; one that would not survive a crash is marked undurable. Age is that of
its publication.

` + lookStatusHelp,
		Example: `  holdfast inspect checkpoints /var/cache/model
  holdfast inspect checkpoints --tier disk --min-size 1GiB --sort size DIR
  holdfast inspect checkpoints --newer 5m --json DIR | jq '.checkpoints[]'`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if limit < 1 {
				return usageError(fmt.Errorf("--limit %d: want at least 1", limit))
			}
			if !slices.Contains([]string{"age", "size", "tokens"}, sort) {
				return usageError(fmt.Errorf("--sort %q: want age, size or tokens", sort))
			}
			return look(c, args[0], func(ctx context.Context, x *db.Inspection, at looked) error {
				q, err := f.query(ctx, x)
				if err != nil {
					return err
				}
				all, more, err := allCheckpoints(ctx, x, q, checkpointsMost)
				if err != nil {
					return err
				}
				slices.SortFunc(all, func(a, b db.CheckpointInfo) int {
					switch {
					case sort == "size" && a.Bytes != b.Bytes:
						return int(max(min(b.Bytes-a.Bytes, 1), -1))
					case sort == "tokens" && a.Offset != b.Offset:
						return int(b.Offset - a.Offset)
					case a.Published < b.Published:
						return 1
					}
					return -1
				})
				shown := all[:min(len(all), limit)]
				if wantsJSON(c) {
					return writeJSON(c.OutOrStdout(), struct {
						looked
						Matching    int                 `json:"matching"`
						Complete    bool                `json:"complete"`
						Checkpoints []db.CheckpointInfo `json:"checkpoints"`
					}{at, len(all), !more, append([]db.CheckpointInfo{}, shown...)})
				}
				s := newScreen(c.OutOrStdout())
				s.heading(at)
				s.checkpoints(shown, time.Now())
				if n := len(all) - len(shown); n > 0 {
					s.printf("%s\n", s.paint(dim, fmt.Sprintf("and %s more; see --limit", count(int64(n)))))
				}
				return nil
			})
		},
	}
	f.flags(c)
	c.Flags().StringVar(&sort, "sort", sort, "by age, size or tokens")
	c.Flags().IntVar(&limit, "limit", 50, "show at most `N`")
	completeWith(c, "sort", "age", "size", "tokens")
	return directoryArgs(c)
}

func (s *screen) checkpoints(all []db.CheckpointInfo, now time.Time) {
	head := []string{"checkpoint", "state", ">tokens", ">size", "tier", ">age", "kind"}
	if s.wide() {
		head = append(head, "namespace", "request", "previous", "superseded by", ">LSN")
	}
	t := s.columns(head...)
	for i := range all {
		k := &all[i]
		row := []any{k.Generation.String()[:12], s.state(k), count(k.Offset), humanBytes(k.Bytes), k.Tier, age(now, k.After, k.Before), k.Kind}
		if s.wide() {
			row = append(row, k.Namespace.Short(), brief(k.Request, 24), shortOrNone(k.Previous), shortOrNone(k.SupersededBy), k.Published)
		}
		t.row(row...)
	}
	t.write()
}

func shortOrNone(g db.Generation) string {
	if g.IsZero() {
		return ""
	}
	return g.Short()
}

func (s *screen) state(k *db.CheckpointInfo) string {
	text, c := k.State, green
	switch k.State {
	case "superseded":
		c = yellow
	case "retired":
		c = red
	}
	if k.State != "retired" && !k.Durable {
		text += ", undurable"
	}
	return s.paint(c, text)
}

func newInspectManifestCommand() *cobra.Command {
	var first int64
	limit := 40
	c := &cobra.Command{
		Use:     "checkpoint DIR GENERATION",
		Aliases: []string{"manifest"},
		Short:   "Show one checkpoint, its pages, and where each copy of them is",
		Long: `Checkpoint shows a manifest and, page by page, whether it is in RAM (clean,
dirty, being filled, loaded or written), and in which segment and at which
offset the copy of each rank lies. A generation may be cut to some digits.

` + lookStatusHelp,
		Example: `  holdfast inspect checkpoint /var/cache/model 3f9a12bc
  holdfast inspect checkpoint --limit 1000 --json /var/cache/model 3f9a12bc`,
		Args: cobra.ExactArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			return look(c, args[0], func(ctx context.Context, x *db.Inspection, at looked) error {
				g, err := generationOf(ctx, x, args[1])
				if err != nil {
					return err
				}
				m, err := x.Manifest(ctx, db.ManifestQuery{Generation: g, First: first, Limit: limit})
				if err != nil {
					return err
				}
				if wantsJSON(c) {
					return writeJSON(c.OutOrStdout(), struct {
						looked
						Manifest *db.ManifestInfo `json:"manifest"`
					}{at, m})
				}
				s := newScreen(c.OutOrStdout())
				s.heading(at)
				s.manifest(m)
				return nil
			})
		},
	}
	c.Flags().Int64Var(&first, "first", 0, "pass over the first `N` pages")
	c.Flags().IntVar(&limit, "limit", limit, "show at most `N` pages")
	return directoryArgs(c)
}

func (s *screen) manifest(m *db.ManifestInfo) {
	line := func(name, format string, args ...any) {
		s.printf("%s\n", s.clip(s.paint(dim, fmt.Sprintf("%-13s", name))+fmt.Sprintf(format, args...)))
	}
	line("checkpoint", "%s", m.Generation)
	line("namespace", "%s", m.Namespace)
	line("state", "%s, %s, on %s, published by LSN %d %s ago", s.state(&m.CheckpointInfo), m.Kind, m.Tier, m.Published, age(time.Now(), m.After, m.Before))
	line("size", "%s tokens, %s in %s of %s each", count(m.Offset), humanBytes(m.Bytes), plural(m.CheckpointInfo.Pages, "page"), plural(int64(m.Ranks), "rank"))
	if m.Request != "" {
		line("request", "%s", brief(m.Request, 256))
	}
	for _, r := range []struct {
		name string
		g    db.Generation
	}{{"continues", m.Continues}, {"previous", m.Previous}, {"superseded by", m.SupersededBy}} {
		if !r.g.IsZero() {
			line(r.name, "%s", r.g)
		}
	}
	if m.MetaBytes > 0 {
		line("meta", "%d bytes of the engine's", m.MetaBytes)
	}
	s.printf("\n")
	t := s.columns("group", "kind", ">pages", ">page size", ">tokens a page")
	for _, g := range m.Groups {
		t.row(brief(g.Name, 32), g.Kind, count(g.Pages), humanBytes(g.PageBytes), g.PageTokens)
	}
	t.write()
	s.printf("\n")
	head := []string{"page", "group", ">position", "RAM", "on disk: rank segment+offset"}
	t = s.columns(head...)
	for _, p := range m.Pages {
		ram := p.RAM
		if ram == "" {
			ram = "-"
		}
		if p.Pins > 0 {
			ram += fmt.Sprintf(" (%d)", p.Pins)
		}
		if p.Quarantined {
			ram += s.paint(red, " quarantined")
		}
		var disk []string
		for _, d := range p.Disk {
			disk = append(disk, fmt.Sprintf("%d:%d+%d", d.Rank, d.Segment, d.Offset))
		}
		if len(disk) == 0 {
			disk = []string{"-"}
		}
		if n := len(disk); n > 4 && s.width > 0 {
			disk = append(disk[:3], fmt.Sprintf("… %d ranks", n))
		}
		t.row(p.Key.Short(), brief(p.Group, 24), p.Position, ram, strings.Join(disk, " "))
	}
	t.write()
	if m.Next > 0 {
		s.printf("%s\n", s.paint(dim, fmt.Sprintf("and %s more; see --first %d and --limit", count(m.CheckpointInfo.Pages-m.Next), m.Next)))
	}
}

// room gives how many columns a text may take that has so many on a screen of 80.
func (s *screen) room(narrow int) int {
	if s.width == 0 {
		return 200
	}
	return narrow + s.width - screenMin
}

func newInspectHistoryCommand() *cobra.Command {
	var namespace string
	limit := 30
	c := &cobra.Command{
		Use:   "history DIR",
		Short: "List what was retired lately, when, and why",
		Long: `History lists the checkpoints that are not listed any more, the youngest
retirement first, as long as they are remembered (db.Options.HistoryAge), and
counts the reasons.

` + lookStatusHelp,
		Example: `  holdfast inspect history /var/cache/model
  holdfast inspect history --limit 1000 --json /var/cache/model | jq .reasons`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return look(c, args[0], func(ctx context.Context, x *db.Inspection, at looked) error {
				ns, err := namespaceBy(ctx, x, namespace)
				if err != nil {
					return err
				}
				h, err := x.History(ctx, db.HistoryQuery{Namespace: ns, Limit: limit})
				if err != nil {
					return err
				}
				if wantsJSON(c) {
					return writeJSON(c.OutOrStdout(), struct {
						looked
						*db.HistoryInfo
					}{at, h})
				}
				s := newScreen(c.OutOrStdout())
				s.heading(at)
				s.history(h)
				return nil
			})
		},
	}
	c.Flags().StringVar(&namespace, "namespace", "", "those of a namespace, `ID` in at least 4 hex digits")
	c.Flags().IntVar(&limit, "limit", limit, "show at most `N`")
	return directoryArgs(c)
}

func (s *screen) history(h *db.HistoryInfo) {
	if len(h.Reasons) == 0 {
		s.printf("nothing was retired since %s\n", h.From.Local().Format(time.DateTime))
		return
	}
	names := slices.SortedFunc(maps.Keys(h.Reasons), func(a, b string) int { return int(h.Reasons[b] - h.Reasons[a]) })
	var parts []string
	for _, n := range names {
		parts = append(parts, fmt.Sprintf("%s %s", count(h.Reasons[n]), n))
	}
	s.printf("%s\n\n", s.wrap("", "retired since "+h.From.Local().Format(time.DateTime)+": "+strings.Join(parts, ", ")))
	head := []string{"retired", "reason", "checkpoint", ">tokens", ">size", ">LSN"}
	if s.wide() {
		head = append(head, "kind", "namespace", "request", "by")
	}
	t := s.columns(head...)
	for i := range h.Retirements {
		r := &h.Retirements[i]
		row := []any{age(time.Now(), r.After, r.Before) + " ago", r.Reason, r.Generation.String()[:12], count(r.Offset), humanBytes(r.Bytes), r.LSN}
		if s.wide() {
			row = append(row, r.Kind, r.Namespace.Short(), brief(r.Request, 24), shortOrNone(r.By))
		}
		t.row(row...)
	}
	t.write()
}

func newInspectLeasesCommand() *cobra.Command {
	return directoryArgs(&cobra.Command{
		Use:   "leases DIR",
		Short: "List owners, publications under way and restorations held",
		Long: `Leases lists who holds what in a database that is in use, the oldest first, with
the time at which each is taken back. A database that is not in use has none.

` + lookStatusHelp,
		Example: `  holdfast inspect leases /var/cache/model
  holdfast inspect leases --json /var/cache/model | jq '.leases | length'`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return look(c, args[0], func(ctx context.Context, x *db.Inspection, at looked) error {
				l, err := x.Leases(ctx)
				if err != nil {
					return err
				}
				if wantsJSON(c) {
					return writeJSON(c.OutOrStdout(), struct {
						looked
						*db.LeaseList
					}{at, l})
				}
				s := newScreen(c.OutOrStdout())
				s.heading(at)
				s.printf("%s, %s\n", plural(int64(len(l.Owners)), "owner"), plural(int64(len(l.Leases)), "lease"))
				if len(l.Leases) == 0 {
					return nil
				}
				s.printf("\n")
				now := time.Now()
				t := s.columns("owner", "what", "checkpoint", ">tokens", ">pages", ">size", ">held for", ">left")
				for _, x := range l.Leases {
					owner := brief(x.Owner, 24)
					if owner == "" {
						owner = "(the process)"
					}
					t.row(owner, x.Kind, shortOrNone(x.Generation), count(x.Offset), count(int64(x.Pages)), humanBytes(x.Bytes), ago(now.Sub(x.Began)), ago(x.Until.Sub(now)))
				}
				t.write()
				return nil
			})
		},
	})
}
