package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/holdfast-db/holdfast/db"
	"github.com/holdfast-db/holdfast/txn"
)

// What --faults does: the shares and distances are such that every kind happens many times in a recorded trace.
const (
	hurryShare    = 0.01                 // of the restores and publications, how many are cancelled …
	hurryMax      = 3 * time.Millisecond // … at a random moment within this time
	dropRAMEvery  = 400                  // publications between two orders to empty the RAM tier
	clearEvery    = 3000                 // publications between two orders to delete every checkpoint
	inspectSample = 8                    // checkpoints restored by one check
	recountEvery  = 10                   // checks between two that count everything anew
)

// soakFaults is how the disk misbehaves.
func soakFaults(seed uint64) *db.Faults {
	return &db.Faults{Seed: seed, WriteErrors: 0.01, SlowWrites: 0.02, SlowReads: 0.002, Delay: 10 * time.Millisecond}
}

// inspector is a holder that can check what is listed while a replay goes on.
type inspector interface {
	// inspect restores a sample of all listed checkpoints and has the database count itself anew.
	inspect(ctx context.Context) (found, error)
}

// soak is what an embedded remembers and does to make life hard for its database.
type soak struct {
	faults       bool
	rand         *rand.Rand
	requests     map[db.Generation]request // of every publication that was acknowledged
	publications int
	inspections  int
}

func newSoak(s setup) *soak {
	return &soak{faults: s.Faults, rand: rand.New(rand.NewPCG(s.Seed, 0x736f616b)), requests: map[db.Generation]request{}}
}

// hurry cancels a call now and then.
func (s *soak) hurry(ctx context.Context) (context.Context, context.CancelFunc) {
	if !s.faults || s.rand.Float64() >= hurryShare {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, time.Duration(s.rand.Int64N(int64(hurryMax))))
}

// published enters a publication, and gives the orders that are due.
func (s *soak) published(ctx context.Context, e *embedded, g db.Generation, r request) error {
	s.requests[g] = r
	if s.publications++; !s.faults {
		return nil
	}
	if s.publications%dropRAMEvery == 0 {
		if _, err := e.db.DropRAM(ctx); err != nil && !errors.Is(err, txn.ErrBusy) {
			return err
		}
	}
	if s.publications%clearEvery == 0 {
		if _, err := e.db.Clear(ctx, e.namespace.ID()); err != nil && !errors.Is(err, txn.ErrBusy) {
			return err
		}
	}
	return nil
}

// inspect implements inspector.
func (e *embedded) inspect(ctx context.Context) (f found, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), requestTimeout)
	defer cancel()
	if e.soak.inspections++; e.soak.inspections%recountEvery == 1 { // it reads the whole index
		if err := e.db.Check(ctx); err != nil {
			f.mismatch(err.Error())
		}
	}
	var listed []db.Checkpoint
	for c, err := range e.db.Checkpoints(ctx) {
		if err != nil {
			return f, databaseError(err)
		}
		listed = append(listed, c)
	}
	stats, err := e.db.Stats()
	if err != nil {
		return f, databaseError(err)
	}
	if stats.Leases != 0 || stats.Pending != 0 {
		f.mismatch(fmt.Sprintf("%d leases and %d publications are open, and nothing is going on", stats.Leases, stats.Pending))
	}
	for range min(inspectSample, len(listed)) {
		c := listed[e.soak.rand.IntN(len(listed))]
		r, ok := e.soak.requests[c.Generation]
		if !ok {
			continue // published by an earlier process
		}
		if err := e.inspectOne(ctx, &f, c, r); err != nil {
			return f, err
		}
	}
	return f, nil
}

// inspectOne restores one checkpoint that was listed a moment ago. If it cannot be, it must not be listed any more.
func (e *embedded) inspectOne(ctx context.Context, f *found, c db.Checkpoint, r request) error {
	s, err := e.sequenceOf(r)
	if err != nil {
		return err
	}
	restored, err := e.db.Restore(ctx, s, db.LookupOptions{})
	switch {
	case errors.Is(err, txn.ErrBusy):
		return nil // no room, which is not loss
	case err != nil && !errors.Is(err, txn.ErrNotFound):
		return databaseError(err)
	case err == nil:
		defer restored.Release()
		one := found{Offset: restored.Offset()}
		e.check(&one, restored.Pages)
		for _, fault := range one.Faults {
			f.mismatch(fault)
		}
		if restored.Offset() >= c.Offset {
			return nil
		}
	}
	if _, err := e.db.Checkpoint(c.Generation); !errors.Is(err, txn.ErrNotFound) {
		f.mismatch(fmt.Sprintf("generation %s at %d is listed and cannot be restored: %v", c.Generation, c.Offset, err))
	}
	return nil
}
