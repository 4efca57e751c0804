package main

import (
	"cmp"
	"container/heap"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"

	"github.com/holdfast-db/holdfast/txn"
)

// workload is the requests of a trace, in memory.
type workload struct {
	name     string
	requests []request
}

// workloads gives the recorded traces, and the generated requests where recorded is not set or there are none; n bounds each.
func (b *bench) workloads(generated bool, n int) (all []workload, err error) {
	load := func(name string, src source) error {
		w := workload{name: name}
		for r, err := range src.first(n).requests {
			if err != nil {
				return err
			}
			w.requests = append(w.requests, r)
		}
		all = append(all, w)
		return nil
	}
	if b.traces != "" {
		for _, name := range []string{"conversation", "synthetic"} {
			src, closer, err := openTrace(filepath.Join(b.traces, "mooncake_"+name+".jsonl"), nil)
			if err != nil {
				return nil, err
			}
			err = load(name, src)
			if err = errors.Join(err, closer.Close()); err != nil {
				return nil, err
			}
		}
	}
	if generated || b.traces == "" {
		err = load("generated", generate(1, min(cmp.Or(n, 8000), 8000)))
	}
	return all, err
}

// bytes gives the bytes of everything that the workload publishes.
func (w workload) bytes(s setup) int64 {
	l := newLedger(s)
	for _, r := range w.requests {
		l.acknowledge(r)
	}
	return l.uniqueBytes()
}

// simulate gives the share of the blocks asked for that a cache with an order of eviction finds, in percent.
func (w workload) simulate(o simOrder, s setup, capacity int64, future *simFuture) float64 {
	sim := newSimulation(o, s, capacity, future)
	for _, r := range w.requests {
		sim.request(r)
	}
	return sim.percent()
}

func (s *simulation) percent() float64 { return 100 * float64(s.hits) / float64(max(s.asked, 1)) }

// clairvoyant gives the share that a cache finds which knows all requests to come. For attention alone this is Belady's bound: every
// page is kept or not by when it is asked for next. With recurrent states it is the same rule over whole checkpoints, which is
// no bound, because checkpoints have different sizes, but nothing without foresight comes near it.
func (w workload) clairvoyant(s setup, capacity int64, future *simFuture) float64 {
	if s.Model == hybridModel {
		return w.simulate(simOrder{name: "clairvoyant", seer: true, score: func(_ *simulation, e *simEntry) float64 { return -float64(e.next) }}, s, capacity, future)
	}
	kept := beladyHeap{at: map[uint64]int{}}
	var asked, hits int64
	var digests []uint64
	for i, r := range w.requests {
		digests = prefixDigests(digests, r)
		asked += int64(len(digests))
		for _, d := range digests {
			if _, ok := kept.at[d]; !ok {
				break
			}
			hits++
		}
		for depth, d := range digests {
			next := future.asked(d, i)
			kept.set(beladyPage{d, next, depth})
		}
		for int64(len(kept.pages))*s.PageBytes > capacity {
			heap.Pop(&kept)
		}
	}
	return 100 * float64(hits) / float64(max(asked, 1))
}

// beladyHeap has the page on top that is asked for last, and of those the deepest.
type beladyHeap struct {
	pages []beladyPage
	at    map[uint64]int
}

type beladyPage struct {
	digest uint64
	next   int
	depth  int
}

func (h *beladyHeap) set(p beladyPage) {
	if i, ok := h.at[p.digest]; ok {
		h.pages[i] = p
		heap.Fix(h, i)
		return
	}
	heap.Push(h, p)
}

func (h *beladyHeap) Len() int { return len(h.pages) }

func (h *beladyHeap) Less(i, j int) bool {
	return cmp.Or(cmp.Compare(h.pages[j].next, h.pages[i].next), cmp.Compare(h.pages[j].depth, h.pages[i].depth)) < 0
}

func (h *beladyHeap) Swap(i, j int) {
	h.pages[i], h.pages[j] = h.pages[j], h.pages[i]
	h.at[h.pages[i].digest], h.at[h.pages[j].digest] = i, j
}

func (h *beladyHeap) Push(x any) {
	p := x.(beladyPage)
	h.at[p.digest] = len(h.pages)
	h.pages = append(h.pages, p)
}

func (h *beladyHeap) Pop() any {
	p := h.pages[len(h.pages)-1]
	h.pages = h.pages[:len(h.pages)-1]
	delete(h.at, p.digest)
	return p
}

// benchHits replays the traces with little room and compares what is found with what a cache of as many bytes finds that evicts
// whole checkpoints by recency alone.
func benchHits(ctx context.Context, b *bench) (rows []benchRow, err error) {
	workloads, err := b.workloads(false, either(b, 4000, 250))
	if err != nil {
		return nil, err
	}
	for _, w := range workloads {
		for _, percent := range either(b, []int64{10, 25, 50}, []int64{25}) {
			row, err := b.hitRatio(ctx, w, percent)
			if err != nil {
				return rows, err
			}
			rows = append(rows, row)
		}
	}
	return rows, nil
}

func (b *bench) hitRatio(ctx context.Context, w workload, percent int64) (row benchRow, err error) {
	// What is found does not depend on the device, so the directory is in memory where there is such a file system.
	parent := b.dir
	if st, err := os.Stat("/dev/shm"); err == nil && st.IsDir() {
		parent = "/dev/shm"
	}
	dir, err := os.MkdirTemp(parent, "holdfast-bench-hits-")
	if err != nil {
		return row, fileError("make a directory in", parent, err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	s := setup{Dir: filepath.Join(dir, "db"), Model: hybridModel, Ranks: 1, PageBytes: either(b, int64(4<<10), 256), StateBytes: either(b, int64(64<<10), 4<<10), WritePolicy: "on-evict"}
	total := w.bytes(s)
	capacity := total * percent / 100
	s.RAMBytes = max(capacity/10, 1<<20)
	s.DiskBytes = max(capacity-s.RAMBytes, 1<<20)
	capacity = s.RAMBytes + s.DiskBytes
	h, err := openEmbedded(ctx, s)
	if err != nil {
		return row, err
	}
	defer func() { err = errors.Join(err, h.close(ctx)) }()
	r := &report{}
	src := source{name: w.name, total: len(w.requests), requests: func(yield func(request, error) bool) {
		for _, r := range w.requests {
			if !yield(r, nil) {
				return
			}
		}
	}}
	d := &replay{source: src, holder: h, ledger: newLedger(s), fresh: true, progress: newProgress(io.Discard, false), report: r}
	if err := d.run(ctx); err != nil {
		return row, err
	}
	if r.Mismatches > 0 {
		return row, fmt.Errorf("%d mismatches: %w", r.Mismatches, txn.ErrCorrupt)
	}
	future := newSimFuture(w.requests, s.Model)
	lru := w.simulate(simOrder{score: byRecency}, s, capacity, future)
	found := 100 * float64(r.HitBlocks) / float64(max(r.Blocks, 1))
	row = ratioRow(fmt.Sprintf("blocks found, %s, %d %% of its bytes", w.name, percent), "%", "LRU over checkpoints", []turn{{found, lru}}, ratioAtLeast(1))
	// What is in RAM is on disk as well once it has been written or read back, so the two hold less than their sum.
	return row.noted("%s requests; LRU with the bytes of the disk alone finds %.1f %%, one that knows the future %.1f %%, one that never forgets %.1f %%",
		count(r.Requests), w.simulate(simOrder{score: byRecency}, s, s.DiskBytes, future), w.clairvoyant(s, capacity, future),
		100*float64(r.PossibleHitBlocks)/float64(max(r.Blocks, 1))), nil
}

// newBenchOrdersCommand compares orders of eviction by simulation.
func newBenchOrdersCommand() *cobra.Command {
	var o benchOptions
	limit := 0
	c := &cobra.Command{
		Use:   "orders",
		Short: "Simulate orders of eviction on the traces",
		Long: `Bench orders simulates a cache of checkpoints with each of several orders of
eviction, on the recorded traces and on generated requests, for models with and
without recurrent states, at 10, 25 and 50 % of the bytes that the requests
publish. It prints the share of the blocks asked for that is found, and how much
that is above or below LRU.

` + statusHelp,
		Example: `  holdfast bench orders --limit 2000`,
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			b := &bench{traces: traceDirectory(o.traces)}
			workloads, err := b.workloads(true, limit)
			if err != nil {
				return usageError(err)
			}
			return writeOrders(c.Context(), c.OutOrStdout(), workloads)
		},
	}
	c.Flags().StringVar(&o.traces, "traces", o.traces, "`DIR` with recorded traces (default: HOLDFAST_TRACES, or ../shared/traces)")
	c.Flags().IntVar(&limit, "limit", limit, "the first `N` requests of each (default: all, or 8,000 generated ones)")
	return c
}

func writeOrders(ctx context.Context, w io.Writer, workloads []workload) error {
	for _, load := range workloads {
		for _, m := range []model{hybridModel, attentionModel} {
			s := setup{Model: m, Ranks: 1, PageBytes: 4 << 10, StateBytes: 64 << 10}
			if m == attentionModel {
				s.StateBytes = 0
			}
			future, total := newSimFuture(load.requests, m), load.bytes(s)
			if _, err := fmt.Fprintf(w, "\n%s, %s\n\n| order | 10 %% | 25 %% | 50 %% |\n| --- | --- | --- | --- |\n", load.name, m); err != nil {
				return err
			}
			var lru [3]float64
			for _, o := range slices.Concat(simOrders(), []simOrder{{name: "knowing the future"}}) {
				line := "| " + o.name
				for i, percent := range []int64{10, 25, 50} {
					if ctx.Err() != nil {
						return failure{statusInterrupted, errors.New("interrupted")}
					}
					var found float64
					if o.score == nil {
						found = load.clairvoyant(s, total*percent/100, future)
					} else {
						found = load.simulate(o, s, total*percent/100, future)
					}
					if lru[i] == 0 {
						lru[i] = math.Max(found, 1e-9)
					}
					line += fmt.Sprintf(" | %.2f (%+.1f %%)", found, 100*(found/lru[i]-1))
				}
				if _, err := fmt.Fprintln(w, line+" |"); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// peerOpenSeconds is what the nearest peer takes at open for each manifest, under the lock of its directory.
const peerOpenSeconds = 0.0006

// benchOpening measures the time from open to the first lookup; `holdfast bench open` has more of it.
func benchOpening(ctx context.Context, b *bench) ([]benchRow, error) {
	dir, remove, err := b.scratch("open")
	if err != nil {
		return nil, err
	}
	defer remove()
	of := &openBench{dir: dir, quick: b.quick, progress: b.progress}
	found, err := of.long(ctx)
	if err != nil {
		return nil, err
	}
	var rows []benchRow
	for _, x := range found {
		reference, ratio := x.Reference, x.Ratio
		r := benchRow{Name: x.About, Value: x.Value, Unit: x.Unit, Reference: &reference, Against: x.Against, Ratio: &ratio, Turns: openTries}
		switch x.Name {
		case "open.clean":
			r.Goal = valueAtMost(0.25)
		case "open.killed":
			r.Goal = valueAtMost(1)
		default:
			r.Goal = ratioAtMost(2)
		}
		r.Reached = r.Goal.reached(r.goalOf())
		rows = append(rows, r)
		if x.Name == "open.clean" {
			n := of.size(65536)
			goal := ratioAtMost(0.025)
			if b.quick {
				goal = ratioAtMost(1) // what is constant at open is all there is of it
			}
			rows = append(rows, ratioRow(fmt.Sprintf("… against a peer that takes 0.6 ms for each of %s manifests", count(int64(n))), "s", "computed",
				[]turn{{x.Value, peerOpenSeconds * float64(n)}}, goal))
		}
	}
	return rows, nil
}
