package fuzz

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/holdfast-db/holdfast/db"
	"github.com/holdfast-db/holdfast/txn"
)

type publication struct {
	p       *db.Publication
	c       *Checkpoint
	rank    int
	durable bool
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
		if trace != nil {
			fmt.Fprintln(trace, "acknowledged")
		}
		ack(w.model)
	case w.sick():
		w.model.Failed(during)
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
	if trace != nil {
		fmt.Fprintf(trace, "step %d %+v\n", w.step, *s)
	}
	ctx := context.Background()
	switch s.Do {
	case "publish":
		if p := w.begin(ctx, s); p != nil {
			w.complete(ctx, p)
		}
	case "cancel": // the context ends after N calls of the disk
		ctx, stop := w.cancelAfter(ctx, s.N)
		defer stop()
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
			if s.N > 0 { // a first time with a context that ends after N calls of the disk
				ctx, stop := w.cancelAfter(ctx, s.N)
				_, err = w.db.DropRAM(ctx)
				stop()
				w.dies()
				w.classed(err)
				w.accept(s.Do, err, db.ErrBusy)
				w.settle()
			}
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
			key := looseKey(s.N + i)
			pages = append(pages, db.LoosePage{Key: []byte(key), Bytes: looseBytes(key)})
			w.loose[key] = true
		}
		err := w.db.PutLoose(ctx, w.spaces[0], pages...)
		w.dies()
		w.classed(err)
		w.accept("put of loose pages", err, db.ErrBusy, db.ErrNoSpace, db.ErrTooLarge)
	case "get-loose":
		l, err := w.db.GetLoose(ctx, nil, w.spaces[0], []byte(looseKey(s.N)))
		w.dies()
		w.accept("get of a loose page", err, db.ErrBusy)
		if err == nil {
			w.verifyLoose(looseKey(s.N), l)
		}
	case "delete-loose":
		_, err := w.db.DeleteLoose(ctx, w.spaces[0], []byte(looseKey(s.N)))
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
	case "patch":
		w.shut(ctx)
		if files := w.disk.Files(s.Area); len(files) > 0 && w.disk.Patch(files[s.N%len(files)], s.Bytes, s.Patch, s.End) {
			w.damaged = true
			w.disorder = w.disorder || s.Area != Data
		}
		return w.open()
	case "read-only":
		return w.lookAside(ctx)
	case "steal":
		return w.steal(ctx)
	}
	return true
}

// steal takes the lock file away, as a file system that forgets locks lets another process do. Nothing durable is acknowledged
// after that, and the history goes on as the other process.
func (w *World) steal(ctx context.Context) bool {
	w.out.Checks["a stolen lock acknowledges nothing"]++
	w.disk.mu.Lock()
	w.disk.find(Root).link("LOCK", &node{})
	w.disk.mu.Unlock()
	before := w.model.Clone()
	if g, ok := w.some(0); ok {
		err := w.do(func(m *Model) { m.MayDrop(g) }, func() error { return w.db.Delete(ctx, g) }, func(*Model) {})
		if err == nil {
			w.fail("acknowledged a deletion after the lock was lost")
		}
		if !errors.Is(err, db.ErrFenced) && !w.sick() {
			w.fail("after the lock was lost: %v", err)
		}
		before.MayDrop(g)
	}
	w.model = before
	if w.crashing == nil {
		w.crashing, w.armed = &Step{Do: "kill"}, []int{0}
	}
	return w.recover()
}

// cancelAfter gives a context that ends after n calls of the disk, or by stop.
func (w *World) cancelAfter(ctx context.Context, n int) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	at := w.disk.Calls() + n
	w.cancel = func(calls int) {
		if calls >= at {
			cancel()
		}
	}
	return ctx, func() {
		w.cancel = nil
		cancel()
	}
}

func ctx2s(ctx context.Context) context.Context {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	context.AfterFunc(ctx, cancel)
	return ctx
}

// looseKeys is how many loose pages the histories know.
const looseKeys = 8

func looseKey(n int) string { return fmt.Sprint("loose ", n%looseKeys) }

// verifyLoose ends a lease after comparing what it has got.
func (w *World) verifyLoose(key string, l *db.LooseLease) {
	if b := l.Bytes(0); b != nil && (!w.loose[key] || string(b) != string(looseBytes(key))) {
		w.fail("loose page %q has other bytes than were put", key)
	}
	l.Release()
}

func looseBytes(key string) []byte {
	b := make([]byte, 100+int(key[len(key)-1]-'0')*1371)
	var k txn.Key
	copy(k[:], key)
	Fill(b, k, 0)
	return b
}
