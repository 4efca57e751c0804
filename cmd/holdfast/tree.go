package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/holdfast-db/holdfast/db"
	"github.com/holdfast-db/holdfast/txn"
)

// treeNode is a checkpoint among those that go on from it. What a checkpoint went on from may be gone; it then hangs from the nearest
// one before it that is still there, as far as the history knows the way.
type treeNode struct {
	db.CheckpointInfo
	Reason   string      `json:"reason,omitempty"` // it is gone, and this is why
	Gone     int         `json:"gone,omitempty"`   // checkpoints between it and its parent that are not there any more
	Children []*treeNode `json:"children,omitempty"`
}

// treeRoot is what begins in one namespace.
type treeRoot struct {
	Namespace db.NamespaceInfo `json:"namespace"`
	Roots     []*treeNode      `json:"roots"`
}

// goneMost bounds the steps over checkpoints that are gone.
const goneMost = 1 << 12

// plant makes trees of checkpoints. With gone ones, those that the history remembers are in them too.
func plant(namespaces []db.NamespaceInfo, all []db.CheckpointInfo, history []db.Retirement, gone bool) []treeRoot {
	nodes := map[db.Generation]*treeNode{}
	past := map[db.Generation]*db.Retirement{}
	for i := range all {
		nodes[all[i].Generation] = &treeNode{CheckpointInfo: all[i]}
	}
	for i := range history { // the youngest first
		r := &history[i]
		if past[r.Generation] == nil {
			past[r.Generation] = r
		}
		if nodes[r.Generation] != nil && nodes[r.Generation].State == "retired" {
			nodes[r.Generation].Reason = r.Reason
		}
		if gone && nodes[r.Generation] == nil {
			nodes[r.Generation] = &treeNode{Reason: r.Reason, CheckpointInfo: db.CheckpointInfo{
				Generation: r.Generation, Namespace: r.Namespace, State: "gone", Tier: "none", Offset: r.Offset, Kind: r.Kind, Request: r.Request,
				Previous: r.Previous, Bytes: r.Bytes, Durable: r.Durable, Published: r.Published,
			}}
		}
	}
	roots := map[txn.Key][]*treeNode{}
	for _, n := range nodes {
		at := n.Previous
		for n.Gone < goneMost && !at.IsZero() && nodes[at] == nil {
			n.Gone++
			r := past[at]
			if r == nil {
				at = db.Generation{}
				break
			}
			at = r.Previous
		}
		if p := nodes[at]; p != nil && p != n && p.Offset < n.Offset {
			p.Children = append(p.Children, n)
		} else {
			roots[n.Namespace] = append(roots[n.Namespace], n)
		}
	}
	byTokens := func(a, b *treeNode) int {
		if a.Offset != b.Offset {
			return int(a.Offset - b.Offset)
		}
		return int(a.Published) - int(b.Published)
	}
	for _, n := range nodes {
		slices.SortFunc(n.Children, byTokens)
	}
	var out []treeRoot
	for _, ns := range namespaces {
		r := roots[ns.ID]
		slices.SortFunc(r, byTokens)
		if len(r) > 0 {
			out = append(out, treeRoot{ns, r})
		}
	}
	return out
}

func newInspectTreeCommand() *cobra.Command {
	var namespace string
	var gone bool
	limit := 200
	c := &cobra.Command{
		Use:   "tree DIR",
		Short: "Draw conversations as trees of checkpoints",
		Long: `Tree draws every checkpoint under the one that it goes on from. A conversation
is a column; where it branches, each branch is indented. Shown are its tokens,
how many it adds, its size with all it shares, its tier, its kind and its age.

  ● current   ○ superseded: goes first when room is needed   × retired or gone

A checkpoint whose predecessors are gone hangs from the nearest one that is
there, and says how many are missing between them. --gone draws those that are
remembered as well, with the reason.

` + lookStatusHelp,
		Example: `  holdfast inspect tree /var/cache/model
  holdfast inspect tree --gone --namespace 1f03 /var/cache/model
  holdfast inspect tree --json /var/cache/model | jq '.trees[].roots | length'`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if limit < 1 {
				return usageError(fmt.Errorf("--limit %d: want at least 1", limit))
			}
			return look(c, args[0], func(ctx context.Context, x *db.Inspection, at looked) error {
				trees, more, err := growTrees(ctx, x, namespace, gone, checkpointsMost)
				if err != nil {
					return err
				}
				if wantsJSON(c) {
					return writeJSON(c.OutOrStdout(), struct {
						looked
						Complete bool       `json:"complete"`
						Trees    []treeRoot `json:"trees"`
					}{at, !more, append([]treeRoot{}, trees...)})
				}
				s := newScreen(c.OutOrStdout())
				s.heading(at)
				s.trees(trees, limit)
				return nil
			})
		},
	}
	c.Flags().StringVar(&namespace, "namespace", "", "those of a namespace, `ID` in at least 4 hex digits")
	c.Flags().BoolVar(&gone, "gone", false, "also those that are gone and remembered")
	c.Flags().IntVar(&limit, "limit", limit, "draw at most `N` checkpoints")
	return directoryArgs(c)
}

// growTrees gathers what trees are made of.
func growTrees(ctx context.Context, x db.Inspector, namespace string, gone bool, most int) (trees []treeRoot, more bool, err error) {
	ns, err := namespaceBy(ctx, x, namespace)
	if err != nil {
		return nil, false, err
	}
	namespaces, err := x.Namespaces(ctx)
	if err != nil {
		return nil, false, err
	}
	all, more, err := allCheckpoints(ctx, x, db.ListQuery{Namespace: ns}, most)
	if err != nil {
		return nil, false, err
	}
	h, err := x.History(ctx, db.HistoryQuery{Namespace: ns, Limit: db.MaxInspectList})
	if err != nil {
		return nil, false, err
	}
	return plant(namespaces, all, h.Retirements, gone), more, nil
}

// treeIndentMax bounds how far branches are indented; deeper ones are drawn as if they were not so deep.
const treeIndentMax = 24

func (s *screen) trees(trees []treeRoot, limit int) {
	if len(trees) == 0 {
		s.printf("no checkpoint\n")
		return
	}
	left, total := limit, 0
	for i, t := range trees {
		if i > 0 {
			s.printf("\n")
		}
		id := &t.Namespace.Identity
		s.printf("%s\n", s.clip(fmt.Sprintf("%s  %s, %s, %s", s.paint(bold, "namespace "+t.Namespace.ID.Short()), brief(id.Model, 32), brief(id.Engine, 24), plural(int64(id.Layout.Ranks), "rank"))))
		for n, r := range t.Roots {
			total += s.branch(r, nil, "", n == len(t.Roots)-1, &left)
		}
	}
	if n := total - limit; n > 0 {
		s.printf("%s\n", s.paint(dim, fmt.Sprintf("and %s more; see --limit and --namespace", count(int64(n)))))
	}
}

// branch draws a node and what goes on from it, and gives how many nodes there are. What goes on alone stays in its column.
func (s *screen) branch(n, parent *treeNode, indent string, last bool, left *int) (total int) {
	fork, under := "├─", "│ "
	if last {
		fork, under = "└─", "  "
	}
	for first := true; n != nil; first = false {
		lead := indent + fork
		if !first {
			lead = indent + under
		}
		total++
		if *left > 0 {
			*left--
			s.printf("%s\n", s.clip(s.paint(dim, lead)+s.node(n, parent)))
		}
		parent = n
		switch len(n.Children) {
		case 0:
			return total
		case 1:
			n = n.Children[0]
			continue
		}
		deeper := indent + under
		if len([]rune(deeper)) > treeIndentMax {
			deeper = indent
		}
		for i, c := range n.Children {
			total += s.branch(c, n, deeper, i == len(n.Children)-1, left)
		}
		return total
	}
	return total
}

func (s *screen) node(n, parent *treeNode) string {
	mark, c := "●", green
	switch n.State {
	case "superseded":
		mark, c = "○", yellow
	case "retired", "gone":
		mark, c = "×", red
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s %9s tokens", s.paint(c, mark), n.Generation.Short(), count(n.Offset))
	if parent != nil {
		fmt.Fprintf(&b, " %8s", "+"+count(n.Offset-parent.Offset))
	} else {
		fmt.Fprintf(&b, " %8s", "")
	}
	tier := n.Tier
	if tier == "both" {
		tier = "ram disk"
	}
	fmt.Fprintf(&b, " %9s", humanBytes(n.Bytes))
	if gone := n.State == "retired" || n.State == "gone"; !gone || s.wide() {
		fmt.Fprintf(&b, "  %-8s", tier)
	}
	if s.wide() {
		fmt.Fprintf(&b, "  %-11s", n.Kind)
	} else if n.Kind != db.Prompt.String() {
		fmt.Fprintf(&b, "  %s", n.Kind)
	}
	if n.Reason != "" {
		fmt.Fprintf(&b, "  %s", s.paint(red, n.Reason))
	} else if n.State == "retired" {
		fmt.Fprintf(&b, "  %s", s.paint(red, "retired"))
	}
	if n.Gone > 0 {
		fmt.Fprintf(&b, "  %s", s.paint(dim, fmt.Sprintf("after %d gone", n.Gone)))
	}
	if s.wide() {
		if !n.Before.IsZero() {
			fmt.Fprintf(&b, "  %s", s.paint(dim, age(time.Now(), n.After, n.Before)+" old"))
		}
		if n.Request != "" {
			fmt.Fprintf(&b, "  %s", s.paint(dim, brief(n.Request, 30)))
		}
	}
	return b.String()
}
