package fuzz

import "slices"

// Small is a part of the exhaustive set: every history of up to three operations over two checkpoints, one of which
// continues the other, cut off at every call of the disk, with every subset kept of up to SubsetEffects effects that were not
// synced. A part is one history; what comes before its last operation is a history of its own, so only the calls of the last
// operation are gone through.
type Small struct {
	Policy string `json:"policy"`
	Steps  []Step `json:"steps"`
}

// SubsetEffects is how many effects are kept or lost in all combinations: the first so many of those that are pending. The
// others are kept all, and then lost all.
const SubsetEffects = 6

// smallSteps are the operations of the set. The first checkpoint has 20 tokens, the second one 20 more.
var smallSteps = []Step{
	{Do: "publish", More: 20, Seed: 1, Durable: true},
	{Do: "publish", More: 20, Seed: 1},
	{Do: "publish", From: 0, Keep: 100, More: 20, Seed: 2, Durable: true},
	{Do: "publish", From: 0, Keep: 100, More: 20, Seed: 2},
	{Do: "delete", N: 0},
	{Do: "retire", N: 0},
	{Do: "delete", N: 1},
	{Do: "supersede", N: 1, M: 0},
	{Do: "drop-ram"},
	{Do: "clear", Space: 3},
	{Do: "reopen"},
}

// SmallWorlds gives all parts of the set.
func SmallWorlds() (parts []*Small) {
	var grow func(steps []Step)
	grow = func(steps []Step) {
		if len(steps) > 0 {
			for _, policy := range []string{"write-through", "on-evict"} {
				parts = append(parts, &Small{policy, slices.Clone(steps)})
			}
		}
		if len(steps) == 3 {
			return
		}
		for _, s := range smallSteps {
			if len(steps) == 0 && s.Do != "publish" || len(steps) > 0 && s.Keep == 0 && s.Do == "publish" && steps[0].Seed == s.Seed && steps[0].Durable == s.Durable {
				continue // nothing to work on, or nothing to do
			}
			grow(append(slices.Clone(steps), s))
		}
	}
	grow(nil)
	return parts
}

// Run goes through one history.
func (s *Small) Run(sched *Scheduler) *Outcome {
	p := &Program{Policy: s.Policy, RAM: 32 << 20, Replay: 64 << 10, Steps: s.Steps}
	w := newWorld(p, sched, "")
	w.narrow = true
	w.out.Violation = w.guarded(func() { w.exhaust() })
	return w.out
}

// exhaust runs the history and collects images at every call of the last step; then it opens them one by one.
func (w *World) exhaust() {
	w.adopt(w.disk)
	w.open()
	steps := w.program.Steps
	for i := range steps[:len(steps)-1] {
		w.step = i
		w.carryOut(&steps[i])
		w.settle()
		w.check()
	}
	w.step = len(steps) - 1
	var moments []crash
	take := func(d *Disk) {
		m := w.model
		if w.during != nil {
			m = w.during
		}
		moments = append(moments, crash{d, m.Clone()})
	}
	w.disk.Before = func(d *Disk, _ Call) { take(d.clone()) }
	w.carryOut(&steps[len(steps)-1])
	w.settle()
	take(w.disk.Clone())
	w.disk.End()
	w.abandon()
	w.out.Calls += w.disk.Calls()
	seen := map[uint64]bool{}
	for _, at := range moments {
		n := min(at.disk.Pending(), SubsetEffects)
		for bits := range uint64(1) << n {
			for _, rest := range []bool{true, false} {
				if !rest && at.disk.Pending() <= SubsetEffects {
					continue
				}
				image := at.disk.Clone()
				image.PowerCut(&subset{bits: bits, rest: rest, of: uint64(n)})
				d := image.Digest() ^ at.model.digest()
				if seen[d] {
					continue // the same bytes, and the same is expected of them
				}
				seen[d] = true
				w.out.Cycles++
				w.model = at.model.Clone()
				w.model.Crash(true)
				w.faulted = false
				w.tryImage(image)
			}
		}
	}
}
