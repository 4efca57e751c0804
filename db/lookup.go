package db

import (
	"context"
	"fmt"
	"time"

	"github.com/holdfast-db/holdfast/txn"
)

// LookupOptions bound what a lookup or a restore may find. The zero value asks for the longest prefix there is.
type LookupOptions struct {
	// MaxOffset is the longest prefix of use, in tokens; 0 is the whole sequence.
	MaxOffset int64
	// LeaveTokens keeps at least so many tokens of the sequence out of the result. Engines that have to compute one token to
	// get the next one's logits ask for 1.
	LeaveTokens int64
	// Owner holds the restoration; nil is the process itself. It makes no difference to Lookup.
	Owner *Owner
	// Lease is how long the restoration may be held, at most MaxLease; 0 is Options.LeaseTimeout.
	Lease time.Duration
	// Retry says that this request was counted before: by the lookup that the restore follows, or by a try that ended with
	// ErrBusy. It is counted apart, so that hit ratios are of requests and not of calls.
	Retry bool
}

func (o LookupOptions) max(s *Sequence) (int64, error) {
	if err := checkSequence("the sequence", s); err != nil {
		return 0, err
	}
	if o.MaxOffset < 0 || o.MaxOffset > s.Len() {
		return 0, fmt.Errorf("db: LookupOptions.MaxOffset is %d: the sequence has offsets 1…%d: %w", o.MaxOffset, s.Len(), ErrInvalid)
	}
	if o.LeaveTokens < 0 {
		return 0, fmt.Errorf("db: LookupOptions.LeaveTokens is %d: want at least 0: %w", o.LeaveTokens, ErrInvalid)
	}
	limit := s.Len() - o.LeaveTokens
	if o.MaxOffset > 0 {
		limit = min(limit, o.MaxOffset)
	}
	return limit, nil
}

// Match is a restorable prefix.
type Match struct {
	Offset int64 // tokens
	// Generation is the listed checkpoint at exactly this offset, zero if the match is a page boundary inside a longer one.
	Generation Generation
}

// Lookup finds the longest restorable prefix of the sequence: at a listed checkpoint, or, in a namespace without recurrent
// and auxiliary groups, at a page boundary inside one. Equality of tokens is that of 256-bit digests over the exact tokens.
// A miss is ErrNotFound. It changes nothing, waits for no writer and holds no lease: the prefix may be gone by the time
// of a restore.
func (d *DB) Lookup(ctx context.Context, s *Sequence, o LookupOptions) (found Match, err error) {
	ctx, m := d.telemetry.begin(ctx, opLookup)
	defer func() { m.end(err, 0, 0) }()
	limit, err := o.max(s)
	if err != nil {
		return Match{}, err
	}
	if err := d.gate.enterWith(ctx); err != nil {
		return Match{}, err
	}
	defer d.gate.leave()
	unproven := d.unproven.active.Load()
	snapshot := d.index.Snapshot()
	defer snapshot.Close()
	c, err := d.longest(snapshot, s, limit, unproven)
	if err != nil {
		return Match{}, err
	}
	d.telemetry.lookup(o.Retry, limit, c.offset)
	if c.offset == 0 {
		return Match{}, miss(s)
	}
	d.curator.note(c)
	return Match{Offset: c.offset, Generation: c.gen}, nil
}

func miss(s *Sequence) error {
	return fmt.Errorf("db: no restorable prefix of %d tokens: %w", s.Len(), ErrNotFound)
}

// candidate is a prefix that the catalogue calls restorable.
type candidate struct {
	offset int64 // 0: a miss
	gen    Generation
	last   txn.Key // without a generation: a page that only checkpoints of at least this length need
}

// longest finds the longest candidate of at most limit tokens. unproven says that there was something unproven when the reading of
// the catalogue was taken: then what is found is checked.
func (d *DB) longest(v txn.Reader, s *Sequence, limit int64, unproven bool) (c candidate, err error) {
	for exact, boundary := limit, limit; ; {
		c, err = longest(v, s, exact, boundary)
		if err != nil || c.offset == 0 || !unproven {
			return c, err
		}
		whole, below, err := d.unproven.whole(v, s, &c)
		if err != nil || whole {
			return c, err
		}
		if c.gen.IsZero() {
			boundary = below
		} else {
			exact = c.offset - 1
		}
	}
}

// longest finds the longest candidate of at most exact tokens if it is a checkpoint, or at most boundary tokens if it is a page
// boundary inside one.
func longest(v txn.Reader, s *Sequence, exact, boundary int64) (c candidate, err error) {
	if max(exact, boundary) < 1 {
		return c, nil
	}
	q := &txn.Query{Max: exact, Spine: s.spine, Prefix: s.prefix, Near: s.near.Load()}
	if c.gen, c.offset, err = txn.LongestListed(v, q); err != nil {
		return c, err
	}
	s.near.Store(q.Near)
	layout := &s.namespace.identity.Layout
	step, shapes := layout.boundaries()
	if step == 0 || boundary/step*step <= c.offset {
		return c, nil
	}
	at, err := txn.LongestBoundary(v, shapes, step, boundary, func(group int, position int64) txn.Key {
		return s.pageKey(group, position, (position+1)*shapes[group].PageTokens)
	})
	if err == nil && at > c.offset {
		c = candidate{offset: at}
		for i := range shapes {
			if shapes[i].WindowTokens == 0 {
				c.last = s.pageKey(i, at/shapes[i].PageTokens-1, at)
				break
			}
		}
	}
	return c, err
}

// boundaries gives the distance between offsets at which pages of every group end, and the shapes of the groups; 0 if a
// checkpoint is restorable at its exact offset only.
func (l *Layout) boundaries() (step int64, shapes []txn.AttentionShape) {
	step = 1
	for i := range l.Groups {
		g := &l.Groups[i]
		if g.Kind != Attention {
			return 0, nil
		}
		factor := g.PageTokens / greatestCommonDivisor(step, g.PageTokens)
		if factor > MaxSequenceTokens/step {
			return 0, nil // no sequence is long enough
		}
		step *= factor
		shapes = append(shapes, txn.AttentionShape{PageTokens: g.PageTokens, WindowTokens: g.WindowTokens})
	}
	return step, shapes
}
