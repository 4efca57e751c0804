package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/holdfast-db/holdfast/db"
	"github.com/holdfast-db/holdfast/txn"
)

// benchShape is the layout of a namespace that a suite measures with.
type benchShape struct {
	ranks      int
	pageTokens int64
	pageBytes  int64
	stateBytes int64 // of a recurrent state; 0: attention alone
}

// benchStore is a database that a suite measures, and the namespace it publishes in.
type benchStore struct {
	*db.DB
	dir     string
	options db.Options
	shape   benchShape
	ns      *db.Namespace
	random  *rand.Rand
	next    int32  // token that no sequence has yet
	content []byte // random bytes that pages are filled with
}

// openStore opens a database in dir.
func (b *bench) openStore(ctx context.Context, dir string, shape benchShape, o db.Options) (*benchStore, error) {
	groups := []db.Group{{Name: "attention:kv", Kind: db.Attention, PageBytes: shape.pageBytes, PageTokens: shape.pageTokens}}
	if shape.stateBytes > 0 {
		groups = append(groups, db.Group{Name: "recurrent:state", Kind: db.Recurrent, PageBytes: shape.stateBytes, Pages: 1})
	}
	ns, err := db.NewNamespace(db.Identity{
		Model: "bench", Weights: "unversioned:made-up", Tokenizer: "numbers", Engine: "holdfast bench 1", DType: "bytes",
		Layout: db.Layout{Ranks: shape.ranks, Groups: groups},
	})
	if err != nil {
		return nil, err
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.NewTextHandler(io.Discard, nil))
	}
	s := &benchStore{dir: dir, options: o, shape: shape, ns: ns, random: rand.New(rand.NewPCG(1, 2))}
	s.content = make([]byte, max(shape.pageBytes, shape.stateBytes))
	for i := range s.content {
		s.content[i] = byte(s.random.Uint32())
	}
	s.DB, err = db.Open(ctx, dir, o)
	return s, err
}

// close closes the database; an error of a measurement goes before one of the close.
func (s *benchStore) close(err *error) {
	if s.DB == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	_, e := s.Close(ctx)
	s.DB = nil
	*err = errors.Join(*err, e)
}

// extend appends n tokens that no other sequence has in this place.
func (s *benchStore) extend(seq *db.Sequence, n int64) error {
	tokens := make([]int32, n)
	for i := range tokens {
		tokens[i] = s.random.Int32N(1 << 17)
	}
	if n > 0 {
		tokens[0] = s.next
		s.next++
	}
	return seq.Append(tokens)
}

// sequence gives a sequence of n tokens of its own.
func (s *benchStore) sequence(n int64) (*db.Sequence, error) {
	seq := s.ns.NewSequence()
	return seq, s.extend(seq, n)
}

// branch gives a sequence that goes on from the end of seq with n tokens of its own.
func (s *benchStore) branch(seq *db.Sequence, n int64) (*db.Sequence, error) {
	fork, err := seq.Fork(seq.Len())
	if err != nil {
		return nil, err
	}
	return fork, s.extend(fork, n)
}

// fillSlot writes a page as an engine does that copies it from somewhere.
func (s *benchStore) fillSlot(slot *db.Slot) error {
	_, err := slot.Write(s.content[:slot.Size()])
	return err
}

// touchSlot writes the first bytes of a page and calls it full: the page differs, and filling it costs next to nothing.
func (s *benchStore) touchSlot(slot *db.Slot) error {
	copy(slot.Buffer(), slot.Key().String())
	slot.Filled(slot.Size())
	return nil
}

// publish publishes the whole sequence and gives how long the commits took.
func (s *benchStore) publish(ctx context.Context, seq *db.Sequence, r db.PublishRequest, fill func(*db.Slot) error) (g db.Generation, commit time.Duration, err error) {
	r.Sequence, r.Offset = seq, seq.Len()
	p, err := s.Begin(ctx, r)
	if err != nil {
		return g, 0, err
	}
	defer func() {
		if err != nil {
			_ = p.Abort() // what went wrong has been said
		}
	}()
	for rank := range s.shape.ranks {
		slots, err := p.Slots(ctx, rank)
		if err != nil {
			return g, 0, err
		}
		for _, slot := range slots {
			if err := fill(slot); err != nil {
				return g, 0, err
			}
		}
	}
	start := time.Now()
	for rank := range s.shape.ranks {
		if _, err := p.Commit(ctx, rank); err != nil {
			return g, 0, err
		}
	}
	return p.Generation(), time.Since(start), nil
}

// clear deletes everything and waits until the space is given back.
func (s *benchStore) clear(ctx context.Context) error {
	if _, err := s.Clear(ctx, txn.Key{}); err != nil {
		return err
	}
	return nil
}

// restoreAll restores the whole sequence, or says that less was found.
func (s *benchStore) restoreAll(ctx context.Context, seq *db.Sequence) (*db.Restoration, error) {
	r, err := s.Restore(ctx, seq, db.LookupOptions{})
	if err != nil {
		return nil, err
	}
	if r.Offset() != seq.Len() {
		r.Release()
		return nil, fmt.Errorf("restored %d of %d tokens: %w", r.Offset(), seq.Len(), txn.ErrNotFound)
	}
	return r, nil
}
