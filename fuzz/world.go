package fuzz

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	metricnoop "go.opentelemetry.io/otel/metric/noop"
	tracenoop "go.opentelemetry.io/otel/trace/noop"

	"github.com/holdfast-db/holdfast/db"
)

// Layouts are those of the namespaces of a World: a hybrid model on two ranks, one with attention alone, and one with a state that is large
// beside a segment file.
var Layouts = []db.Layout{
	{Ranks: 2, Groups: []db.Group{
		{Name: "attention:kv", Kind: db.Attention, PageBytes: 512, PageTokens: 16},
		{Name: "attention:window", Kind: db.Attention, PageBytes: 700, PageTokens: 16, WindowTokens: 64},
		{Name: "recurrent:state", Kind: db.Recurrent, PageBytes: 5000, Pages: 1},
	}},
	{Ranks: 1, Groups: []db.Group{{Name: "attention:kv", Kind: db.Attention, PageBytes: 2048, PageTokens: 32}}},
	{Ranks: 1, Groups: []db.Group{
		{Name: "attention:kv", Kind: db.Attention, PageBytes: 4096, PageTokens: 64},
		{Name: "recurrent:state", Kind: db.Recurrent, PageBytes: 120000, Pages: 1},
	}},
}

// Spaces makes the namespaces of the layouts.
func Spaces() (spaces []*db.Namespace) {
	for i, layout := range Layouts {
		ns, err := db.NewNamespace(db.Identity{
			Model: "m", Weights: "unversioned:w", Tokenizer: "t", Engine: "e", DType: "d", Tenant: string(rune('a' + i)), Layout: layout,
		})
		if err != nil {
			panic(err) // a constant
		}
		spaces = append(spaces, ns)
	}
	return spaces
}

// Violation is a broken promise.
type Violation struct {
	Step   int    // of the program
	Detail string // what was found
}

func (v *Violation) Error() string { return fmt.Sprintf("step %d: %s", v.Step, v.Detail) }

// Outcome is what running a program found.
type Outcome struct {
	Cycles    int            `json:"cycles"` // crashes that were recovered from, every image counted
	Calls     int            `json:"calls"`  // changes of the disk
	Trace     uint64         `json:"trace"`  // digest of them
	Steps     map[string]int `json:"steps"`
	Faults    map[string]int `json:"faults"`
	Checks    map[string]int `json:"checks"`
	Violation *Violation     `json:"violation,omitempty"`
}

// World is a database on a simulated disk beside its model, being led through a program.
type World struct {
	program *Program
	sched   *Scheduler
	disk    *Disk
	db      *db.DB
	options db.Options
	spaces  []*db.Namespace
	model   *Model
	during  *Model // while a call is under way: what may be true if everything ended now
	walks   [][]int32
	step    int

	pubs  []*publication
	held  []*db.Restoration
	loose map[string]bool

	armed    []int // calls until each of the crashes to come
	crashing *Step
	crashed  *crash
	cancel   func(left int) // called before every change

	faulted  bool // a fault happened since the database was opened
	damaged  bool // bytes on disk were changed, or could not be read, since the beginning
	disorder bool // the log or the index may be damaged
	budget   bool // there is a disk budget
	narrow   bool // one namespace is looked at
	real     string

	out *Outcome
}

// stop unwinds a step whose process has died.
type stop struct{}

// Run leads a database through the program. With a scheduler it has to be called by the scheduler's Run. scratch, if not empty,
// is a real directory in which images are opened as well, now and then.
func Run(p *Program, s *Scheduler, scratch string) *Outcome {
	w := newWorld(p, s, scratch)
	w.out.Violation = w.guarded(w.run)
	w.out.Calls += w.disk.Calls()
	w.out.Trace = w.out.Trace*31 + w.disk.Trace()
	return w.out
}

func newWorld(p *Program, s *Scheduler, scratch string) *World {
	policy, err := db.ParseWritePolicy(p.Policy)
	if err != nil {
		panic(err) // checked by who read it
	}
	w := &World{
		program: p, sched: s, disk: NewDisk(), spaces: Spaces(), model: NewModel(), loose: map[string]bool{}, real: scratch,
		out: &Outcome{Steps: map[string]int{}, Faults: map[string]int{}, Checks: map[string]int{}},
	}
	w.disk.root.link("d", newDir())
	w.disk.root.syncNames()
	w.options = db.Options{
		WritePolicy: policy, RAMBytes: max(p.RAM, 1<<20), DiskBytes: max(p.Disk, 0), ReplayBytes: max(p.Replay, 64<<10), SegmentBytes: 1 << 20,
		SupersedeGrace: time.Duration(max(p.Grace, 1)) * time.Millisecond, Logger: slog.New(slog.DiscardHandler),
		MeterProvider: metricnoop.NewMeterProvider(), TracerProvider: tracenoop.NewTracerProvider(),
	}
	w.budget = p.Disk > 0
	w.disk.Buffered = !p.Direct
	if s != nil {
		s.Seed(p.Seed)
	}
	return w
}

func (w *World) fail(format string, args ...any) {
	panic(&Violation{w.step, fmt.Sprintf(format, args...)})
}

// guarded calls fn and gives the violation that it ran into.
func (w *World) guarded(fn func()) (found *Violation) {
	defer func() {
		p := recover()
		v, ok := p.(*Violation)
		if p != nil && !ok {
			panic(p) // the process ends, and whoever started it sees the stack
		}
		found = v
		w.disk.End()
		w.abandon()
	}()
	fn()
	return nil
}

func (w *World) run() {
	w.adopt(w.disk)
	if !w.open() {
		return
	}
	for i := range w.program.Steps {
		w.step = i
		s := &w.program.Steps[i]
		w.out.Steps[s.Do]++
		if !w.take(s) {
			return // the database is damaged beyond opening, and says so
		}
	}
	w.step = len(w.program.Steps)
	if w.crashing != nil {
		w.recover()
	}
}

// take does one step and checks everything. If the crash that is armed comes in between, it goes on from there. false ends the
// history.
func (w *World) take(s *Step) bool {
	if (s.Do == "crash" || s.Do == "kill") && w.crashing != nil && !w.recover() { // the one armed before has not happened: it happens now
		return false
	}
	alive := true
	died := w.survives(func() {
		alive = w.carryOut(s)
		if alive {
			w.settle()
			w.check()
		}
	})
	if died {
		return w.recover()
	}
	return alive
}

// survives calls fn and tells whether the process died meanwhile.
func (w *World) survives(fn func()) (died bool) {
	defer func() {
		if p := recover(); p != nil {
			if _, ok := p.(stop); !ok {
				panic(p)
			}
			died = true
		}
	}()
	fn()
	w.dies()
	return false
}

// dies unwinds if the crash has happened.
func (w *World) dies() {
	if w.crashed != nil {
		panic(stop{})
	}
}

func (w *World) settle() {
	if w.sched != nil {
		w.sched.Settle()
	}
	w.dies()
}

// adopt goes on with a disk.
func (w *World) adopt(d *Disk) {
	w.disk = d
	d.Schedule = w.sched
	d.Before = w.before
}

// before is called before every change of the disk.
func (w *World) before(d *Disk, _ Call) {
	if w.cancel != nil {
		w.cancel(d.calls)
	}
	if w.crashing == nil || w.crashed != nil || len(w.armed) == 0 {
		return
	}
	if w.armed[0]--; w.armed[0] < 0 {
		w.capture(d.clone())
	}
}

// sick tells whether errors are to be expected.
func (w *World) sick() bool {
	if len(w.disk.Fired()) > 0 {
		w.faulted = true
	}
	return w.faulted || w.damaged
}

var classes = []error{
	db.ErrInvalid, db.ErrTooLarge, db.ErrNotFound, db.ErrConflict, db.ErrBusy, db.ErrNoSpace, db.ErrReadOnly, db.ErrPermission, db.ErrLocked, db.ErrFenced,
	db.ErrCorrupt, db.ErrIO, db.ErrUnsupported, db.ErrClosed,
}

// classed checks that an error has a class.
func (w *World) classed(err error) {
	if err != nil && !slices.ContainsFunc(classes, func(c error) bool { return errors.Is(err, c) }) {
		w.fail("error without a class: %v", err)
	}
}

// close closes the database in good order.
func (w *World) close(ctx context.Context) {
	for _, r := range w.held {
		r.Release()
	}
	for _, p := range w.pubs {
		_ = p.p.Abort()
	}
	w.held, w.pubs = nil, nil
	if !w.keepsAll() {
		w.model.Doubt()
	}
	w.during = w.model.Clone()
	w.during.Doubt()
	_, err := w.db.Close(ctx)
	w.dies()
	w.during = nil
	w.classed(err)
	w.accept("close", err)
	if err != nil {
		w.model.Doubt()
	} else {
		w.model.Synced()
	}
	w.db = nil
}

func (w *World) reopen(ctx context.Context) bool {
	w.shut(ctx)
	return w.open()
}

// shut closes the database in good order and takes its faults from the disk.
func (w *World) shut(ctx context.Context) {
	w.close(ctx)
	w.noteFaults(w.disk)
	w.disk.Inject()
	if w.faulted {
		w.model.Doubt()
	}
	w.faulted = false
}
