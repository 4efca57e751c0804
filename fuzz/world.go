package fuzz

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"time"

	metricnoop "go.opentelemetry.io/otel/metric/noop"
	tracenoop "go.opentelemetry.io/otel/trace/noop"

	"github.com/holdfast-db/holdfast/db"
	"github.com/holdfast-db/holdfast/txn"
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
	opened   bool // once at least
	real     string

	out *Outcome
}

type publication struct {
	p       *db.Publication
	c       *Checkpoint
	rank    int
	durable bool
}

// crash is what a crash left: the disk and what may be true of it.
type crash struct {
	disk  *Disk
	model *Model
}

// stop unwinds a step whose process has died.
type stop struct{}

// Run leads a database through the program. With a scheduler it has to be called by the scheduler's Run. scratch, if not empty,
// is a real directory in which images are opened as well, now and then.
func Run(p *Program, s *Scheduler, scratch string) *Outcome {
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
		WritePolicy: policy, RAMBytes: p.RAM, DiskBytes: p.Disk, ReplayBytes: max(p.Replay, 64<<10), SegmentBytes: 1 << 20,
		SupersedeGrace: time.Duration(max(p.Grace, 1)) * time.Millisecond, Logger: slog.New(slog.DiscardHandler),
		MeterProvider: metricnoop.NewMeterProvider(), TracerProvider: tracenoop.NewTracerProvider(),
	}
	w.budget = p.Disk > 0
	if s != nil {
		s.Seed(p.Seed)
	}
	w.out.Violation = w.run()
	w.out.Calls += w.disk.Calls()
	w.out.Trace = w.out.Trace*31 + w.disk.Trace()
	return w.out
}

func (w *World) fail(format string, args ...any) {
	panic(&Violation{w.step, fmt.Sprintf(format, args...)})
}

func (w *World) run() (found *Violation) {
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
	w.adopt(w.disk)
	if !w.open() {
		return nil
	}
	for i := range w.program.Steps {
		w.step = i
		s := &w.program.Steps[i]
		w.out.Steps[s.Do]++
		if !w.take(s) {
			return nil // the database is damaged beyond opening, and says so
		}
	}
	w.step = len(w.program.Steps)
	if w.crashing != nil && !w.recover() {
		return nil
	}
	return nil
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

// capture makes the crash happen now.
func (w *World) capture(image *Disk) {
	m := w.model
	if w.during != nil {
		m = w.during
	}
	w.crashed = &crash{image, m.Clone()}
}

// abandon closes the handle of a world that has ended.
func (w *World) abandon() {
	for _, r := range w.held {
		r.Release()
	}
	for _, p := range w.pubs {
		_ = p.p.Abort()
	}
	w.held, w.pubs = nil, nil
	if w.db == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	w.db.Close(ctx) // on a disk that has ended, whatever it says
	w.db = nil
}

// recover goes on from the crash: every image of it is opened and checked, the last one is kept. false ends the history.
func (w *World) recover() bool {
	for {
		if w.crashed == nil {
			w.capture(w.disk.Clone())
		}
		s, c := w.crashing, w.crashed
		old := w.disk
		old.End()
		w.abandon()
		w.out.Calls += old.Calls()
		w.out.Trace = w.out.Trace*31 + old.Trace()
		if Debug != nil {
			fmt.Fprintln(Debug, "crashed")
		}
		w.noteFaults(old)
		w.crashed, w.during = nil, nil
		if len(w.armed) > 0 {
			w.armed = w.armed[1:]
		}
		if len(w.armed) == 0 {
			w.crashing = nil
		}
		images := max(s.Images, 1)
		for i := range images {
			image := c.disk
			if i < images-1 {
				image = c.disk.Clone()
			}
			if s.Do == "crash" {
				image.PowerCut(RandomChoice(s.Seed + uint64(i)<<32 + uint64(len(w.armed))<<48))
			}
			w.out.Cycles++
			w.model = c.model.Clone()
			w.model.Crash(s.Do == "crash")
			if i < images-1 {
				crashing, armed := w.crashing, w.armed
				w.crashing, w.armed = nil, nil
				w.tryImage(image)
				w.crashing, w.armed = crashing, armed
				continue
			}
			if w.real != "" && w.out.Cycles%32 == 1 {
				w.tryReal(image)
			}
			w.adopt(image)
		}
		w.faulted = false
		alive := true
		if w.survives(func() {
			if alive = w.open(); alive {
				w.settle()
				w.check()
			}
		}) {
			continue // it died again
		}
		return alive
	}
}

// tryImage opens an image and checks it, and leaves it.
func (w *World) tryImage(d *Disk) {
	model := w.model.Clone()
	w.adopt(d)
	if w.open() {
		w.settle()
		w.check()
	}
	d.End()
	w.abandon()
	w.out.Calls += d.Calls()
	w.out.Trace = w.out.Trace*31 + d.Trace()
	w.model = model
}

// tryReal opens an image in a real directory, where github.com/tidwall/wal and the operating system do what the simulated
// disk otherwise does in their place.
func (w *World) tryReal(d *Disk) {
	dir := filepath.Join(w.real, fmt.Sprint(w.program.Seed, "-", w.out.Cycles))
	defer os.RemoveAll(dir)
	if err := d.Materialize(dir); err != nil {
		w.fail("writing an image to a real directory: %v", err)
	}
	if w.disorder {
		return
	}
	model := w.model.Clone()
	d, err := w.openAt(dir, nil)
	_ = d
	if err != nil {
		w.fail("a real directory with what a crash left cannot be opened: %v", err)
	}
	w.check()
	if _, err := w.db.Close(context.Background()); err != nil {
		w.fail("close of a real directory: %v", err)
	}
	w.db = nil
	w.model = model
	w.out.Checks["real directory"]++
}

func (w *World) openAt(dir string, s *db.Storage) (*Disk, error) {
	o := w.options
	o.Storage = s
	d, err := db.Open(context.Background(), dir, o)
	w.db = d
	return nil, err
}

// open opens the database. false: it says that it is damaged, and it is.
func (w *World) open() bool {
	for try := 0; ; try++ {
		_, err := w.openAt(Root, w.disk.Storage())
		if w.crashed != nil {
			panic(stop{})
		}
		if err == nil {
			w.opened = true
			if !w.options.ReadOnly {
				w.model.Synced() // an open makes durable what it found
			}
			return true
		}
		w.db = nil
		if w.disorder && (errors.Is(err, db.ErrCorrupt) || errors.Is(err, db.ErrUnsupported)) {
			return false
		}
		if len(w.disk.Fired()) == 0 || try == 1 {
			w.fail("open: %v", err)
		}
		w.noteFaults(w.disk)
		w.disk.Inject()
		w.classed(err)
	}
}

// noteFaults counts what went wrong on a disk.
func (w *World) noteFaults(d *Disk) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, f := range d.fired {
		w.out.Faults[f[:indexByte(f, '/')-1]]++
	}
	if len(d.fired) > 0 {
		w.faulted = true
	}
	d.fired = nil
}

func indexByte(s string, c byte) int {
	for i := range len(s) {
		if s[i] == c {
			return i
		}
	}
	return len(s)
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

// do makes a call that changes the catalogue. relax changes the model to what may be true while it is under way; ack to
// what is true once it has succeeded. Errors are the caller's to judge, but for those of a bad disk, after which anything that may
// be true may be true.
func (w *World) do(relax func(m *Model), call func() error, ack func(m *Model)) error {
	during := w.model.Clone()
	relax(during)
	w.during = during
	err := call()
	w.dies()
	w.during = nil
	w.classed(err)
	switch {
	case err == nil:
		if Debug != nil {
			fmt.Fprintln(Debug, "acknowledged")
		}
		ack(w.model)
	case w.sick():
		w.model = during
	}
	return err
}

// accept fails unless the error is nil, or of one of the classes, or the disk is bad.
func (w *World) accept(what string, err error, allowed ...error) {
	if err == nil || w.sick() || slices.ContainsFunc(allowed, func(c error) bool { return errors.Is(err, c) }) {
		return
	}
	w.fail("%s: %v", what, err)
}

// tokens gives the sequence that a step means and remembers it.
func (w *World) tokens(s *Step) []int32 {
	var tokens []int32
	if len(w.walks) > 0 && s.Keep > 0 {
		from := w.walks[s.From%len(w.walks)]
		tokens = slices.Clone(from[:len(from)*s.Keep/100])
	}
	rng := rand.New(rand.NewPCG(s.Seed, 1))
	for range s.More {
		tokens = append(tokens, int32(rng.IntN(3)))
	}
	if len(tokens) == 0 {
		tokens = []int32{1}
	}
	if len(tokens) > 400 {
		tokens = tokens[:400]
	}
	w.walks = append(w.walks, tokens)
	if len(w.walks) > 10 {
		w.walks = w.walks[1:]
	}
	return tokens
}

func (w *World) sequence(space int, tokens []int32) *db.Sequence {
	s := w.spaces[space].NewSequence()
	if err := s.Append(tokens); err != nil {
		w.fail("append of tokens: %v", err)
	}
	return s
}

// some gives a listed checkpoint.
func (w *World) some(n int) (db.Generation, bool) {
	var gens []db.Generation
	for c, err := range w.db.Checkpoints(context.Background()) {
		if err != nil {
			w.accept("list of checkpoints", err)
			return db.Generation{}, false
		}
		gens = append(gens, c.Generation)
	}
	if len(gens) == 0 {
		return db.Generation{}, false
	}
	return gens[n%len(gens)], true
}

// begin begins a publication.
func (w *World) begin(ctx context.Context, s *Step) *publication {
	space := s.Space % len(w.spaces)
	tokens := w.tokens(s)
	seq := w.sequence(space, tokens)
	kind := db.CheckpointKind(s.Kind % 5)
	p, err := w.db.Begin(ctx, db.PublishRequest{
		Sequence: seq, Offset: seq.Len(), Request: s.Request, Kind: kind, Meta: make([]byte, s.Meta), Durable: s.Durable,
	})
	w.dies()
	if err != nil {
		w.classed(err)
		w.accept("begin", err, db.ErrBusy, db.ErrTooLarge)
		return nil
	}
	durable := s.Durable || w.options.WritePolicy == db.WriteThrough
	if p.Listed() {
		return nil // and is in the model, or the next check says so
	}
	return &publication{p: p, durable: durable, c: &Checkpoint{Generation: p.Generation(), Space: space, Tokens: tokens, Durable: durable}}
}

// fill fills the slots of the next rank and commits it. done: the publication has come to an end.
func (w *World) fill(ctx context.Context, p *publication) (done bool) {
	slots, err := p.p.Slots(ctx, p.rank)
	w.dies()
	if err != nil {
		w.classed(err)
		w.accept("slots", err, db.ErrBusy, db.ErrConflict)
		return errors.Is(err, db.ErrConflict)
	}
	for _, slot := range slots {
		b := slot.Buffer()
		if b == nil {
			return true // it ended meanwhile
		}
		Fill(b, slot.Key(), p.rank)
		slot.Filled(slot.Size())
	}
	last := p.rank == Layouts[p.c.Space].Ranks-1
	commit := func() error {
		_, err := p.p.Commit(ctx, p.rank)
		return err
	}
	if !last {
		err = commit()
		w.dies()
		w.classed(err)
		w.accept("commit of a rank", err, db.ErrBusy, db.ErrConflict)
		if err == nil {
			p.rank++
		}
		return err != nil && !errors.Is(err, db.ErrBusy)
	}
	err = w.do(func(m *Model) { m.MayPublish(p.c) }, commit, func(m *Model) { m.Publish(p.c) })
	w.accept("commit", err, db.ErrBusy, db.ErrConflict, db.ErrTooLarge, db.ErrNoSpace)
	if err != nil {
		_ = p.p.Abort()
		w.dies()
	}
	return true
}

// complete fills and commits all ranks that are left.
func (w *World) complete(ctx context.Context, p *publication) {
	for range Layouts[p.c.Space].Ranks + 2 {
		if w.fill(ctx, p) {
			return
		}
	}
	_ = p.p.Abort()
}

// carryOut does what a step says. false ends the history.
func (w *World) carryOut(s *Step) bool {
	if Debug != nil {
		fmt.Fprintf(Debug, "step %d %+v\n", w.step, *s)
	}
	ctx := context.Background()
	switch s.Do {
	case "publish":
		if p := w.begin(ctx, s); p != nil {
			w.complete(ctx, p)
		}
	case "cancel": // the context ends after N calls of the disk
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		at := w.disk.Calls() + s.N
		w.cancel = func(calls int) {
			if calls >= at {
				cancel()
			}
		}
		defer func() { w.cancel = nil }()
		if p := w.begin(ctx, s); p != nil {
			w.complete(ctx, p)
		}
	case "begin":
		if len(w.pubs) < 3 {
			if p := w.begin(ctx, s); p != nil {
				w.pubs = append(w.pubs, p)
			}
		}
	case "commit", "abort":
		if len(w.pubs) == 0 {
			break
		}
		i := s.N % len(w.pubs)
		p := w.pubs[i]
		if s.Do == "abort" {
			w.classed(p.p.Abort())
		} else if !w.fill(ctx, p) {
			break
		}
		w.pubs = slices.Delete(w.pubs, i, i+1)
	case "hold":
		r, err := w.db.Restore(ctx, w.sequence(s.Space%len(w.spaces), w.tokens(s)), db.LookupOptions{})
		w.dies()
		w.accept("restore", err, db.ErrNotFound, db.ErrBusy)
		if err == nil {
			w.held = append(w.held, r)
		}
	case "release":
		if len(w.held) > 0 {
			i := s.N % len(w.held)
			w.held[i].Release()
			w.held = slices.Delete(w.held, i, i+1)
		}
	case "retire", "delete":
		g, ok := w.some(s.N)
		if !ok {
			break
		}
		call := w.db.Retire
		if s.Do == "delete" {
			call = w.db.Delete
		}
		err := w.do(func(m *Model) { m.MayDrop(g) }, func() error { return call(ctx, g) }, func(m *Model) { m.Drop(g); m.Synced() })
		w.accept(s.Do, err, db.ErrNotFound)
	case "supersede":
		a, ok := w.some(s.N)
		b, _ := w.some(s.M)
		if ok && a != b {
			err := w.do(func(*Model) {}, func() error { return w.db.Supersede(ctx, a, b) }, func(m *Model) { m.Synced() })
			w.accept("supersede", err, db.ErrInvalid, db.ErrConflict)
		}
	case "drop-ram", "set-ram":
		if !w.keepsAll() {
			w.model.Doubt()
		}
		err := error(nil)
		if s.Do == "drop-ram" {
			_, err = w.db.DropRAM(ctx)
		} else if err = w.db.SetRAMBytes(ctx2s(ctx), max(s.Bytes, db.MinRAMBytes)); err == nil {
			w.options.RAMBytes = max(s.Bytes, db.MinRAMBytes)
		}
		w.dies()
		w.classed(err)
		w.accept(s.Do, err, db.ErrBusy)
		if s.Do == "set-ram" && s.Bytes < 32<<20 {
			w.options.RAMBytes = s.Bytes
		}
	case "set-disk":
		w.accept("set-disk", w.db.SetDiskBytes(max(s.Bytes, 256<<10)))
		w.options.DiskBytes = max(s.Bytes, 256<<10)
		w.budget = true
	case "clear":
		all, space := s.Space%(len(w.spaces)+1) == len(w.spaces), s.Space%(len(w.spaces)+1)
		ns := txn.Key{}
		if !all {
			ns = w.spaces[space].ID()
		}
		mine := func(c *Checkpoint) bool { return all || c.Space == space }
		err := w.do(func(m *Model) { m.MayDropAll(mine) }, func() error { _, err := w.db.Clear(ctx, ns); return err }, func(m *Model) { m.DropAll(mine) })
		w.accept("clear", err)
	case "scrub":
		r, err := w.db.Scrub(ctx, db.ScrubOptions{})
		w.dies()
		w.accept("scrub", err)
		if r.Lost > 0 && !w.sick() {
			w.fail("scrub lost %d pages of a healthy disk", r.Lost)
		}
	case "put-loose":
		var pages []db.LoosePage
		for i := range s.M {
			key := fmt.Sprint("loose ", (s.N+i)%8)
			pages = append(pages, db.LoosePage{Key: []byte(key), Bytes: looseBytes(key)})
			w.loose[key] = true
		}
		err := w.db.PutLoose(ctx, w.spaces[0], pages...)
		w.dies()
		w.classed(err)
		w.accept("put of loose pages", err, db.ErrBusy, db.ErrNoSpace, db.ErrTooLarge)
	case "get-loose":
		key := fmt.Sprint("loose ", s.N%8)
		l, err := w.db.GetLoose(ctx, nil, w.spaces[0], []byte(key))
		w.dies()
		w.accept("get of a loose page", err, db.ErrBusy)
		if err == nil {
			if b := l.Bytes(0); b != nil && (!w.loose[key] || string(b) != string(looseBytes(key))) {
				w.fail("loose page %q has other bytes than were put", key)
			}
			l.Release()
		}
	case "delete-loose":
		_, err := w.db.DeleteLoose(ctx, w.spaces[0], []byte(fmt.Sprint("loose ", s.N%8)))
		w.dies()
		w.accept("delete of a loose page", err)
	case "sleep":
		time.Sleep(min(time.Duration(s.Bytes), time.Hour))
	case "reopen":
		return w.reopen(ctx)
	case "crash", "kill":
		w.crashing, w.armed = s, slices.Clone(s.In)
		if len(w.armed) == 0 {
			w.armed = []int{0}
		}
	case "fault":
		f := *s.Fault
		if f.Kind == "slow" {
			f.Delay = min(f.Delay, time.Minute)
		}
		w.disk.Inject(&f)
		if f.Kind == "read" {
			w.damaged = true // what cannot be read is retired
		}
	case "flip":
		if files := w.disk.Files(s.Area); len(files) > 0 && w.disk.Flip(files[s.N%len(files)], s.Bytes>>3, uint(s.Bytes)) {
			w.damaged = true
			w.disorder = w.disorder || s.Area != Data
		}
	case "read-only", "verify":
		return w.lookAside(ctx, s.Do)
	}
	return true
}

func ctx2s(ctx context.Context) context.Context {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	context.AfterFunc(ctx, cancel)
	return ctx
}

func looseBytes(key string) []byte {
	b := make([]byte, 100+int(key[len(key)-1]-'0')*1371)
	var k txn.Key
	copy(k[:], key)
	Fill(b, k, 0)
	return b
}

// keepsAll tells whether the write policy writes what has to leave RAM.
func (w *World) keepsAll() bool {
	return w.options.WritePolicy == db.WriteThrough || w.options.WritePolicy == db.OnEvict
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
	w.close(ctx)
	w.noteFaults(w.disk)
	w.disk.Inject()
	if w.faulted {
		w.model.Doubt()
	}
	w.faulted = false
	return w.open()
}

// lookAside closes the database, looks at it through a read-only handle, and opens it again.
func (w *World) lookAside(ctx context.Context, how string) bool {
	w.close(ctx)
	w.noteFaults(w.disk)
	w.disk.Inject()
	if w.faulted {
		w.model.Doubt()
	}
	w.faulted = false
	before := w.disk.Calls()
	o := w.options
	w.options.ReadOnly = true
	ok := w.open()
	if ok {
		w.check()
		_, err := w.db.Close(ctx)
		w.accept("close of a read-only handle", err)
		w.db = nil
	}
	w.options = o
	if n := w.disk.Calls() - before; n > 0 {
		w.fail("a read-only handle changed the disk: %d calls", n)
	}
	return ok && w.open()
}

// check holds the database against the model.
func (w *World) check() {
	ctx := context.Background()
	listed := map[db.Generation]*Checkpoint{}
	w.out.Checks["listed is known"]++
	for c, err := range w.db.Checkpoints(ctx) {
		if err != nil {
			w.accept("list of checkpoints", err)
			return
		}
		known := w.model.May[c.Generation]
		if known == nil {
			w.fail("listed, and was never published, or was taken back: %s at %d", c.Generation, c.Offset)
		}
		if int64(len(known.Tokens)) != c.Offset {
			w.fail("listed at %d, was published at %d: %s", c.Offset, len(known.Tokens), c.Generation)
		}
		known.Placed = c.Durable
		listed[c.Generation] = known
	}
	w.dies()
	if !w.damaged && !w.budget {
		for g, c := range w.model.Must {
			w.out.Checks["acknowledged is there"]++
			if listed[g] == nil && (c.Durable || c.Placed || !w.sick() && w.options.RAMBytes >= 32<<20) {
				w.fail("acknowledged and gone: %s at %d, durable %v", g, len(c.Tokens), c.Durable)
			}
		}
	}
	if Debug != nil {
		for _, g := range sorted(listed) {
			fmt.Fprintf(Debug, "listed %v space %d at %d durable %v\n", g, listed[g].Space, len(listed[g].Tokens), listed[g].Durable)
		}
	}
	w.model.Saw(listed)
	for _, g := range sorted(listed) {
		w.restore(listed, listed[g])
		w.settle()
	}
	if w.damaged {
		return
	}
	for space := range w.spaces {
		for _, tokens := range w.walks {
			w.out.Checks["lookup is the longest"]++
			m, err := w.db.Lookup(ctx, w.sequence(space, tokens), db.LookupOptions{})
			w.settle()
			w.accept("lookup", err, db.ErrNotFound)
			want := Longest(listed, space, tokens)
			if space == 1 && m.Offset < want || space != 1 && m.Offset != want {
				if w.sick() {
					continue // something may have been given up meanwhile
				}
				w.fail("lookup found %d tokens of %d, the longest listed prefix has %d", m.Offset, len(tokens), want)
			}
		}
	}
	if w.sick() {
		return
	}
	w.settle()
	s, err := w.db.Stats()
	if err != nil {
		w.fail("stats: %v", err)
	}
	w.out.Checks["nothing is left held"]++
	alive := 0
	for _, r := range w.held {
		if r.Err() == nil {
			alive++
		}
	}
	if int(s.Leases) != alive {
		w.fail("%d leases, %d are held", s.Leases, alive)
	}
	if s.Pending > int64(len(w.pubs)) {
		w.fail("%d pending publications, %d are known", s.Pending, len(w.pubs))
	}
	if s.RAMUsed > s.RAMCapacity && alive == 0 && s.Pending == 0 {
		w.fail("%d bytes of RAM in use, the tier has %d", s.RAMUsed, s.RAMCapacity)
	}
	w.out.Checks["accounting equals recount"]++
	if err := w.db.Check(ctx); err != nil {
		w.fail("recount: %v", err)
	}
}

func sorted(m map[db.Generation]*Checkpoint) []db.Generation {
	return slices.SortedFunc(maps.Keys(m), func(a, b db.Generation) int { return slices.Compare(a[:], b[:]) })
}

// restore restores a listed checkpoint on all ranks and compares every byte.
func (w *World) restore(listed map[db.Generation]*Checkpoint, c *Checkpoint) {
	w.out.Checks["listed is restorable"]++
	r, err := w.db.Restore(context.Background(), w.sequence(c.Space, c.Tokens), db.LookupOptions{})
	w.dies()
	if err != nil {
		w.classed(err)
		if errors.Is(err, db.ErrBusy) && (len(w.pubs) > 0 || len(w.held) > 0) || w.sick() {
			return // no room, or a bad disk
		}
		w.fail("listed and not restorable: %s at %d: %v", c.Generation, len(c.Tokens), err)
	}
	defer r.Release()
	if want := int64(len(c.Tokens)); r.Offset() != want && !w.sick() && !w.damaged {
		w.fail("restored %d tokens of a listed checkpoint of %d", r.Offset(), want)
	}
	for rank := range Layouts[c.Space].Ranks {
		pages := r.Pages(rank)
		if len(pages) == 0 {
			w.fail("restored no page of rank %d", rank)
		}
		for _, p := range pages {
			if err := Verify(p.Bytes, p.Key, rank); err != nil {
				w.fail("wrong bytes: %v", err)
			}
		}
	}
}
