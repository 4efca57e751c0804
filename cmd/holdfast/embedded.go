package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/holdfast-db/holdfast/db"
	"github.com/holdfast-db/holdfast/txn"
)

// Groups of the replay's layout, in this order.
const (
	attentionGroup = 0
	recurrentGroup = 1
)

// embedded is a holder whose database is open in this process.
type embedded struct {
	setup     setup
	namespace *db.Namespace
	options   db.Options
	db        *db.DB  // nil while it is closed
	before    written // by this process, before the last reopening
	soak      *soak   // nil without faults or checks

	// The sequence of the request at hand, built for find and used again by publish.
	sequence *db.Sequence
	of       int // its index
	tokens   []int32
	digests  []uint64
}

// namespaceOf validates a setup and gives the namespace its checkpoints are published in.
func namespaceOf(s setup) (*db.Namespace, error) {
	groups := []db.Group{{Name: "attention:kv", Kind: db.Attention, PageBytes: s.PageBytes, PageTokens: blockTokens}}
	switch s.Model {
	case attentionModel:
	case hybridModel:
		groups = append(groups, db.Group{Name: "recurrent:state", Kind: db.Recurrent, PageBytes: s.StateBytes, Pages: 1})
	default:
		return nil, fmt.Errorf("model %.40q: want %q or %q: %w", s.Model, hybridModel, attentionModel, txn.ErrInvalid)
	}
	return db.NewNamespace(db.Identity{
		Model:     "replay-" + string(s.Model),
		Weights:   "unversioned:made-up",
		Tokenizer: "holdfast replay tokens 1", // see appendTokens
		Engine:    "holdfast replay pages 1",  // see pageName.fill
		DType:     "bytes",
		Layout:    db.Layout{Ranks: s.Ranks, Groups: groups},
	})
}

// openEmbedded opens the database of a setup.
func openEmbedded(ctx context.Context, s setup) (holder, error) {
	ns, err := namespaceOf(s)
	if err != nil {
		return nil, usageError(err)
	}
	policy, err := db.ParseWritePolicy(s.WritePolicy)
	if err != nil {
		return nil, usageError(err)
	}
	codec, err := db.ParseCodec(cmp.Or(s.Codec, "none"))
	if err != nil {
		return nil, usageError(err)
	}
	var log io.Writer = io.Discard
	if s.Log {
		log = os.Stderr
	}
	e := &embedded{
		soak:      newSoak(s),
		setup:     s,
		namespace: ns,
		options: db.Options{
			RAMBytes: s.RAMBytes, DiskBytes: s.DiskBytes, WritePolicy: policy, Codec: codec,
			SupersedeGrace: s.Grace,
			Logger:         slog.New(slog.NewTextHandler(log, nil)), Introspection: true,
		},
		of: -1,
	}
	if s.Faults {
		e.options.Faults = soakFaults(s.Seed)
	}
	return e, e.open(ctx)
}

func (e *embedded) open(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), openTimeout)
	defer cancel()
	d, err := db.Open(ctx, e.setup.Dir, e.options)
	if err != nil {
		return databaseError(err)
	}
	e.db = d
	return nil
}

// sequenceOf gives the tokens of r as the database wants them.
func (e *embedded) sequenceOf(r request) (*db.Sequence, error) {
	if e.of != r.Index || e.sequence.Len() != r.tokens() {
		e.tokens = promptTokens(e.tokens, r)
		s := e.namespace.NewSequence()
		if err := s.Append(e.tokens); err != nil {
			return nil, databaseError(err)
		}
		e.sequence, e.of = s, r.Index
	}
	e.digests = prefixDigests(e.digests, r)
	return e.sequence, nil
}

func (e *embedded) find(ctx context.Context, r request) (found, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), requestTimeout)
	defer cancel()
	s, err := e.sequenceOf(r)
	if err != nil {
		return found{}, err
	}
	var f found
	start := time.Now()
	m, err := e.db.Lookup(ctx, s, db.LookupOptions{})
	f.Lookup = time.Since(start)
	switch {
	case errors.Is(err, txn.ErrNotFound):
		return f, nil
	case err != nil:
		return f, databaseError(err)
	}

	start = time.Now()
	rushed, cancel := e.soak.hurry(ctx)
	defer cancel()
	restored, err := e.db.Restore(rushed, s, db.LookupOptions{})
	f.Restore = time.Since(start)
	switch {
	case errors.Is(err, txn.ErrBusy):
		f.Busy = err.Error()
		return f, nil
	case errors.Is(err, txn.ErrNotFound):
	case err != nil:
		return f, databaseError(err)
	default:
		defer restored.Release()
		f.Offset = restored.Offset()
		if g := restored.Generation(); !g.IsZero() {
			f.Generation = g.String()
		}
		e.check(&f, restored.Pages)
		if err := restored.Err(); err != nil { // the context ended, and with it the lease, while the pages were looked at
			f = found{Lookup: f.Lookup, Busy: err.Error()}
			return f, nil
		}
	}
	if f.Offset < m.Offset {
		// It may have been retired in between. Then it is not listed now.
		switch again, err := e.db.Lookup(ctx, s, db.LookupOptions{}); {
		case err != nil && !errors.Is(err, txn.ErrNotFound):
			return f, databaseError(err)
		case err == nil && again.Offset == m.Offset:
			f.mismatch(fmt.Sprintf("offset %d is listed, and only %d could be restored", m.Offset, f.Offset))
		default:
			f.Lost = true
		}
	}
	return f, nil
}

// check compares every byte of what was restored at f.Offset with what it must be. pages gives the pages of a rank.
func (e *embedded) check(f *found, pages func(rank int) []db.Page) {
	blocks := f.Offset / blockTokens
	if f.Offset%blockTokens != 0 || blocks < 1 || blocks > int64(len(e.digests)) {
		f.mismatch(fmt.Sprintf("restored offset %d, and only multiples of %d up to %d were asked for", f.Offset, blockTokens, len(e.digests)*blockTokens))
		return
	}
	want := blocks
	if e.setup.Model == hybridModel {
		want++
	}
	for rank := range e.setup.Ranks {
		restored := pages(rank)
		if int64(len(restored)) != want {
			f.mismatch(fmt.Sprintf("offset %d: %d pages on rank %d, want %d", f.Offset, len(restored), rank, want))
			continue
		}
		for i, p := range restored {
			// Pages come in the order of groups and positions.
			group, position, size := attentionGroup, int64(i), e.setup.PageBytes
			if position == blocks {
				group, position, size = recurrentGroup, 0, e.setup.StateBytes
			}
			name := e.name(group, position, rank, blocks)
			f.Pages++
			f.Bytes += int64(len(p.Bytes))
			if p.Group != group || p.Position != position {
				f.mismatch(fmt.Sprintf("offset %d: %v came as position %d of group %d", f.Offset, name, p.Position, p.Group))
			} else if err := name.check(p.Bytes, size); err != nil {
				f.mismatch(fmt.Sprintf("offset %d: %v", f.Offset, err))
			}
		}
	}
}

// name gives the page of a checkpoint at the end of blocks.
func (e *embedded) name(group int, position int64, rank int, blocks int64) pageName {
	last := blocks - 1 // a state comes from the whole prefix
	if group == attentionGroup {
		last = position
	}
	return pageName{prefix: e.digests[last], group: group, position: position, rank: rank}
}

func (e *embedded) publish(ctx context.Context, r request, from found) (published, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), requestTimeout)
	defer cancel()
	s, err := e.sequenceOf(r)
	if err != nil {
		return published{}, err
	}
	var continues db.Generation
	if from.Generation != "" {
		key, err := txn.ParseKey(from.Generation)
		if err != nil {
			return published{}, databaseError(err)
		}
		continues = db.Generation(key)
	}
	start := time.Now()
	rushed, cancelRush := e.soak.hurry(ctx)
	defer cancelRush()
	generation, repeated, err := e.publishPages(rushed, s, db.PublishRequest{
		Sequence:  s,
		Offset:    r.tokens(),
		Kind:      db.Prompt,
		Request:   fmt.Sprintf("request-%d", r.Index),
		Continues: continues,
	})
	p := published{Repeated: repeated, Publish: time.Since(start)}
	switch {
	case errors.Is(err, txn.ErrBusy), errors.Is(err, txn.ErrNoSpace), e.setup.Faults && (errors.Is(err, txn.ErrIO) || errors.Is(err, txn.ErrConflict)):
		p.Refused = err.Error()
	case err != nil:
		return p, databaseError(err)
	}
	if err == nil {
		if err := e.soak.published(ctx, e, generation, r); err != nil {
			return p, databaseError(err)
		}
	}
	if !e.setup.CountEach {
		return p, nil
	}
	p.Written, err = e.written()
	return p, err
}

// publishPages publishes one checkpoint, every rank on a goroutine of its own, as the ranks of a model are computed. It reports whether it was listed already.
func (e *embedded) publishPages(ctx context.Context, s *db.Sequence, r db.PublishRequest) (g db.Generation, repeated bool, err error) {
	p, err := e.db.Begin(ctx, r)
	if err != nil {
		return g, false, err
	}
	defer func() {
		if err != nil {
			if abort := p.Abort(); !errors.Is(abort, txn.ErrConflict) { // which says that it has ended by itself
				err = errors.Join(err, abort)
			}
		}
	}()
	g = p.Generation()
	if p.Listed() {
		return g, true, nil
	}
	var listings atomic.Int64 // ranks whose commit listed the checkpoint
	var ranks errgroup.Group
	for rank := range e.setup.Ranks {
		ranks.Go(func() error {
			listed, err := e.publishRank(ctx, p, rank, r.Offset/blockTokens)
			if listed {
				listings.Add(1)
			}
			return err
		})
	}
	if err := ranks.Wait(); err != nil {
		return g, false, err
	}
	if n := listings.Load(); n != 1 {
		return g, false, fmt.Errorf("%d ranks committed and %d of them listed the checkpoint: %w", e.setup.Ranks, n, txn.ErrConflict)
	}
	return g, false, nil
}

// publishRank fills the pages of one rank and commits it.
func (e *embedded) publishRank(ctx context.Context, p *db.Publication, rank int, blocks int64) (listed bool, err error) {
	slots, err := p.Slots(ctx, rank)
	if err != nil {
		return false, err
	}
	for _, slot := range slots {
		b := slot.Buffer()
		if b == nil { // the publication has ended: its context did, or its rank's time
			return false, fmt.Errorf("slot of rank %d: closed while it was being filled: %w", rank, txn.ErrConflict)
		}
		e.name(slot.Group(), slot.Position(), rank, blocks).fill(b)
		slot.Filled(slot.Size())
	}
	return p.Commit(ctx, rank)
}

func (e *embedded) reopen(ctx context.Context) error {
	if err := e.close(ctx); err != nil {
		return err
	}
	return e.open(ctx)
}

func (e *embedded) close(ctx context.Context) error {
	if e.db == nil {
		return nil // it could not be opened again, and that has been said
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	w, err := e.written()
	if _, closeErr := e.db.Close(ctx); closeErr != nil {
		err = errors.Join(err, databaseError(closeErr))
	}
	e.db, e.before = nil, w
	return err
}

func (e *embedded) census(ctx context.Context) (census, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), requestTimeout)
	defer cancel()
	var c census
	for _, err := range e.db.Checkpoints(ctx) {
		if err != nil {
			return census{}, databaseError(err)
		}
		c.Checkpoints++
	}
	s, err := e.db.Stats()
	if err != nil {
		return census{}, databaseError(err)
	}
	c.RAMBytes, c.DiskBytes = s.RAMUsed, s.DiskBytes
	c.Written = e.before.add(writtenOf(s))
	return c, nil
}

// written gives what this process has written so far.
func (e *embedded) written() (written, error) {
	s, err := e.db.Stats()
	if err != nil {
		return written{}, databaseError(err)
	}
	return e.before.add(writtenOf(s)), nil
}

func writtenOf(s db.Stats) written {
	return written{Payload: s.PayloadWritten, Own: s.OwnWritten, Left: s.LeftRAM, Other: max(s.SegmentWritten-s.PayloadWritten, 0), Log: s.LogWritten}
}
