package db

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/holdfast-db/holdfast/recovery"
	"github.com/holdfast-db/holdfast/txn"
)

// unproven is what the last process left and nobody has looked at yet. Open serves when the log is replayed and the segment files
// are measured. From then on everything is known that is needed to tell what is restorable, though not everything
// that is not has been retired:
//
//	undurable   checkpoints that were listed while their pages were in RAM only: the catalogue has a list
//	lost        checkpoints with pages in a segment file that is missing or short: to be looked for among all pages
//	stale       checkpoints that were retired, not deleted, and had pages in RAM only: to be looked for among all states
//	leftovers   segment files in which nothing is alive, and ends of files that no record names
//
// Each is a stage of small steps. Open takes steps until its budget is used up, which in an ordinary start is long after the
// last one, and a background loop takes the others. Until the last one is done, whoever looks something up asks here first,
// so that nothing is listed unchecked: a checkpoint that is undurable and older than the handle is passed over, for which its state is
// enough; where files are damaged, the pages of what was found are compared with the sizes of the files. A publication
// that would build on a page that is gone has what needs it retired, and does not build on it.
//
// Rejected: refusing publications until all is done, because the time that takes follows the number of checkpoints; and marking
// what is unproven in the index, because writing that down takes as long as settling it.
type unproven struct {
	db     *DB
	since  txn.LSN          // what was published up to it, is of an earlier process
	short  map[uint64]int64 // size of each damaged segment file, −1: missing
	active atomic.Bool
	stages []*stage // of the pass; one goroutine at a time

	mu     sync.Mutex          // guards what follows
	left   map[Generation]bool // undurable, and listed
	report RecoveryReport
	served time.Time // when Open returned
}

// stage is a part of the pass.
type stage struct {
	name        string
	done, total int64
	step        func(ctx context.Context, s *stage) error // takes one step and moves done on
}

// Stages of an open, as OpenProgress names them, in order.
const (
	StageReplay    = "replay"    // log records
	StageUndurable = "undurable" // checkpoints
	StageLost      = "lost"      // parts of the pages, of 256
	StageStale     = "stale"     // parts of the retired checkpoints, of 256
	StageLeftovers = "leftovers" // segment files
	StageComplete  = "complete"
)

// OpenProgress says how far an Open has come.
type OpenProgress struct {
	Stage       string
	Done, Total int64 // of the stage
	Served      bool  // Open has returned, and this is done in the background
	Elapsed     time.Duration
}

// unprovenAtOnce is how many checkpoints one step of the pass retires.
const unprovenAtOnce = 128

// newUnproven makes the plan into stages. orphans and tails are what a read-write handle clears up.
func (d *DB) newUnproven(plan *recovery.Plan, since txn.LSN, orphans []uint64, tails []recovery.SegmentFile) *unproven {
	u := &unproven{db: d, since: since, short: plan.Short(), left: make(map[Generation]bool, len(plan.Undurable))}
	for _, g := range plan.Undurable {
		u.left[g] = true
	}
	add := func(name string, total int, step func(ctx context.Context, s *stage) error) {
		if total > 0 {
			u.stages = append(u.stages, &stage{name: name, total: int64(total), step: step})
		}
	}
	undurable := plan.Undurable
	add(StageUndurable, len(undurable), func(ctx context.Context, s *stage) error {
		some := undurable[s.done:min(s.done+unprovenAtOnce, s.total)]
		if err := u.retire(ctx, some, txn.ReasonNotDurable); err != nil {
			return err
		}
		s.done += int64(len(some))
		u.note(func(r *RecoveryReport) { r.NotDurable += len(some) })
		return nil
	})
	if len(plan.Damaged) > 0 {
		add(StageLost, 256, func(ctx context.Context, s *stage) error { return u.lost(ctx, s, plan.Damaged) })
	}
	if plan.Retired > 0 {
		add(StageStale, 256, u.stale)
	}
	add(StageLeftovers, len(orphans)+len(tails), func(_ context.Context, s *stage) error {
		if i := int(s.done); i < len(orphans) {
			if err := d.segments.Remove(orphans[i]); err != nil {
				return fmt.Errorf("db: orphaned segment %d: %w", orphans[i], err)
			}
			u.note(func(r *RecoveryReport) { r.OrphanFiles++ })
		} else {
			t := tails[i-len(orphans)]
			if err := d.segments.Truncate(t.Number, t.Size); err != nil && !errors.Is(err, ErrNotFound) { // emptied meanwhile
				return fmt.Errorf("db: end of segment %d: %w", t.Number, err)
			}
			u.note(func(r *RecoveryReport) { r.TrimmedFiles++ })
		}
		s.done++
		return nil
	})
	u.active.Store(true)
	return u
}

// retire retires and deletes those of the checkpoints that have not been published anew since the open.
func (u *unproven) retire(ctx context.Context, gens []Generation, reason txn.Reason) error {
	return u.db.retireThose(ctx, gens, reason, func(s *txn.State) bool { return s.Published <= u.since })
}

// lost looks through one part of the pages.
func (u *unproven) lost(ctx context.Context, s *stage, damaged []recovery.SegmentDamage) error {
	snapshot := u.db.index.Snapshot()
	pages, gens, err := recovery.LostUnder(snapshot, byte(s.done), u.short)
	if err = errors.Join(err, snapshot.Close()); err != nil {
		return err
	}
	if err := u.retire(ctx, gens, txn.ReasonLost); err != nil {
		return err
	}
	u.note(func(r *RecoveryReport) {
		r.Lost += len(gens)
		r.LostPages += int64(len(pages))
	})
	if s.done++; s.done < s.total {
		return nil
	}
	r := u.snapshot()
	u.db.options.Logger.Warn("segment files missing or too short", "files", len(damaged), "pages", r.LostPages, "checkpoints", r.Lost)
	for _, f := range damaged {
		if f.Size < 0 || u.db.options.ReadOnly {
			continue
		}
		select { // what is left in a short file moves, so that the file goes and no later open measures it again
		case u.db.disk.sparse <- f.Number:
		default:
		}
	}
	return nil
}

// stale looks through one part of the states.
func (u *unproven) stale(ctx context.Context, s *stage) error {
	snapshot := u.db.index.Snapshot()
	gens, err := recovery.StaleUnder(snapshot, byte(s.done), u.since)
	if err = errors.Join(err, snapshot.Close()); err != nil {
		return err
	}
	if err := u.retire(ctx, gens, txn.ReasonNotDurable); err != nil {
		return err
	}
	u.note(func(r *RecoveryReport) { r.NotDurable += len(gens) })
	s.done++
	return nil
}

// pass takes steps until all is done or more says to stop.
func (u *unproven) pass(ctx context.Context, tell func(stage string, done, total int64), more func() bool) error {
	for len(u.stages) > 0 {
		s := u.stages[0]
		tell(s.name, s.done, s.total)
		if !more() {
			return nil
		}
		if err := s.step(ctx, s); err != nil {
			return err
		}
		if s.done == s.total {
			u.stages = u.stages[1:]
		}
	}
	u.note(func(r *RecoveryReport) {
		r.Complete = true
		if !u.served.IsZero() {
			r.Background = time.Since(u.served)
		}
	})
	u.active.Store(false)
	u.mu.Lock()
	u.left = nil
	u.mu.Unlock()
	tell(StageComplete, 1, 1)
	return nil
}

// Bounds of the pause after a step of the background pass that failed.
const (
	provePause    = time.Second
	provePauseMax = time.Minute
)

// run takes the rest of the steps in the background. One that fails, on a full disk for instance, is tried again: what it would settle
// stays unproven and is not listed.
func (u *unproven) run(tell func(stage string, done, total int64)) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	stopping := u.db.gate.stopping
	stop := func() bool {
		select {
		case <-stopping:
			return true
		default:
			return false
		}
	}
	go func() {
		select {
		case <-stopping:
			cancel()
		case <-ctx.Done():
		}
	}()
	if u.db.options.holdProof != nil {
		select {
		case <-u.db.options.holdProof:
		case <-stopping:
		}
	}
	for pause := provePause; ; pause = min(2*pause, provePauseMax) {
		err := u.pass(ctx, tell, func() bool { return !stop() })
		u.note(func(r *RecoveryReport) {
			r.Failure = ""
			if err != nil {
				r.Failure = err.Error()
			}
		})
		if err == nil || stop() {
			return
		}
		u.db.options.Logger.Warn("what the last process left is not settled yet", "error", err)
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-stopping:
			timer.Stop()
			return
		}
	}
}

// note changes the report.
func (u *unproven) note(change func(r *RecoveryReport)) {
	u.mu.Lock()
	defer u.mu.Unlock()
	change(&u.report)
}

func (u *unproven) snapshot() RecoveryReport {
	u.mu.Lock()
	defer u.mu.Unlock()
	r := u.report
	r.Unverified = int64(len(u.left))
	return r
}

// count is how many checkpoints are counted as listed and are passed over.
func (u *unproven) count() int64 {
	u.mu.Lock()
	defer u.mu.Unlock()
	return int64(len(u.left))
}

// retired follows the catalogue. On the committer goroutine.
func (u *unproven) retired(gens []Generation) {
	if u == nil || !u.active.Load() || len(gens) == 0 {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, g := range gens {
		delete(u.left, g)
	}
}

// inRAM tells whether the bytes of a page that the catalogue knows are in RAM.
func (u *unproven) inRAM(key txn.Key) bool {
	t := u.db.residency
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.pages.get(key)
	return p != nil && p.known && !p.lost && p.slots != nil
}

func (u *unproven) broken(v txn.Reader, key txn.Key) (first txn.Key, depth int64, err error) {
	return recovery.Broken(v, key, u.short, u.inRAM)
}

// listed tells whether a checkpoint that the catalogue calls listed is so.
func (u *unproven) listed(v txn.Reader, g Generation, s *txn.State) (bool, error) {
	if s == nil || s.Status != txn.Listed || !s.Durable && s.Published <= u.since {
		return false, nil
	}
	if len(u.short) == 0 || s.Published > u.since {
		return true, nil
	}
	m, err := txn.ReadManifest(v, g)
	if err != nil || m == nil {
		return false, err
	}
	for i := range m.Groups {
		keys := m.Groups[i].Keys
		if m.Groups[i].Chained {
			keys = []txn.Key{m.Groups[i].Head}
		}
		for _, key := range keys {
			if first, _, err := u.broken(v, key); err != nil || !first.IsZero() {
				return false, err
			}
		}
	}
	return true, nil
}

// whole tells whether a candidate is restorable. If it is a page boundary inside a checkpoint and is not, no boundary above
// the offset below is.
func (u *unproven) whole(v txn.Reader, s *Sequence, c *candidate) (ok bool, below int64, err error) {
	if !c.gen.IsZero() {
		state, err := txn.ReadState(v, c.gen)
		if err != nil {
			return false, 0, err
		}
		ok, err = u.listed(v, c.gen, state)
		return ok, 0, err
	}
	_, shapes := s.namespace.identity.Layout.boundaries()
	ok, below = true, c.offset-1
	for i, shape := range shapes {
		from, count := shape.Needed(c.offset)
		if shape.WindowTokens == 0 {
			from, count = from+count-1, 1 // the others come before it in its chain
		}
		for k := from; k < from+count; k++ {
			first, depth, err := u.broken(v, s.pageKey(i, k, (k+1)*shape.PageTokens))
			if err != nil {
				return false, 0, err
			}
			if first.IsZero() {
				continue
			}
			ok = false
			if shape.WindowTokens == 0 {
				below = min(below, depth*shape.PageTokens)
			}
		}
	}
	return ok, below, nil
}

// met gives the checkpoints that have to be retired before a publication may go on: its own generation, if it is called listed
// and is not, and those that need a page which it would build on and which is gone.
func (u *unproven) met(v txn.Reader, gen Generation, state *txn.State, bases []txn.Key) (gens []Generation, err error) {
	if state != nil && state.Status == txn.Listed {
		if ok, err := u.listed(v, gen, state); err != nil || !ok {
			return []Generation{gen}, err
		}
	}
	for _, key := range bases {
		first, _, err := u.broken(v, key)
		if err != nil {
			return nil, err
		}
		if first.IsZero() {
			continue
		}
		needed, err := txn.Dependents(v, first)
		if err != nil {
			return nil, err
		}
		gens = append(gens, needed...)
	}
	return gens, nil
}

// settle retires checkpoints that somebody has met before the pass came to them.
func (u *unproven) settle(ctx context.Context, gens []Generation) error {
	var undurable, lost []Generation
	snapshot := u.db.index.Snapshot()
	for _, g := range gens {
		s, err := txn.ReadState(snapshot, g)
		if err != nil {
			return errors.Join(err, snapshot.Close())
		}
		if s != nil && s.Durable {
			lost = append(lost, g)
		} else {
			undurable = append(undurable, g)
		}
	}
	if err := snapshot.Close(); err != nil {
		return err
	}
	if err := u.retire(ctx, undurable, txn.ReasonNotDurable); err != nil {
		return err
	}
	return u.retire(ctx, lost, txn.ReasonLost)
}

// progress gives what tells Options.OpenProgress: every stage, and within one a few times a second at most.
func (d *DB) progress(begun time.Time) func(stage string, done, total int64) {
	tell := d.options.OpenProgress
	if tell == nil {
		return func(string, int64, int64) {}
	}
	var told time.Time
	var last string
	return func(stage string, done, total int64) {
		now := time.Now()
		if stage == last && done < total && now.Sub(told) < tellInterval {
			return
		}
		told, last = now, stage
		served := d.unproven != nil && !d.unproven.snapshotServed().IsZero()
		tell(OpenProgress{Stage: stage, Done: done, Total: total, Served: served, Elapsed: now.Sub(begun)})
	}
}

func (u *unproven) snapshotServed() time.Time {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.served
}

// RecoveryReport says what Open found and did, and how far the rest of it has come in the background.
func (d *DB) RecoveryReport() RecoveryReport { return d.unproven.snapshot() }

// countingCatalogue tells how many batches of records were applied.
type countingCatalogue struct {
	historicalCatalogue
	applied func()
}

func (c countingCatalogue) Update(fn func(v txn.View) error) error {
	err := c.historicalCatalogue.Update(fn)
	c.applied()
	return err
}

// withoutLive leaves out what has loose pages, which are in no record.
func withoutLive(orphans []uint64, live map[uint64]segmentLive) []uint64 {
	return slices.DeleteFunc(orphans, func(n uint64) bool { return live[n].copies > 0 })
}
