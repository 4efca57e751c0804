package db

import (
	"context"
	"fmt"
	"iter"

	"github.com/holdfast-db/holdfast/txn"
)

// Checkpoint describes one listed checkpoint.
type Checkpoint struct {
	Generation   Generation
	Namespace    txn.Key
	Offset       int64 // tokens
	Kind         CheckpointKind
	Request      string
	Continues    Generation
	Ranks        int
	Pages        int64 // of one rank
	Bytes        int64 // logical, of all ranks, shared pages included
	Meta         []byte
	Durable      bool       // every page has a disk copy
	SupersededBy Generation // zero: current
	Published    txn.LSN    // later is newer
}

// Checkpoints gives every listed checkpoint as of one moment, in the order in which they would be evicted: superseded ones
// first, then by age. Breaking off is fine; Close waits for the loop to end. An error ends the sequence.
func (d *DB) Checkpoints(ctx context.Context) iter.Seq2[Checkpoint, error] {
	return func(yield func(Checkpoint, error) bool) {
		if err := d.gate.enterWith(ctx); err != nil {
			yield(Checkpoint{}, err)
			return
		}
		defer d.gate.leave()
		unproven := d.unproven.active.Load()
		snapshot := d.index.Snapshot()
		defer snapshot.Close()
		var gens []Generation // so that reading them does not go on inside the scan
		err := txn.Checkpoints(snapshot, func(g Generation) (bool, error) {
			gens = append(gens, g)
			return true, nil
		})
		for _, g := range gens {
			if err == nil && ctx.Err() != nil {
				err = fmt.Errorf("db: checkpoints: %w: %w", ErrBusy, context.Cause(ctx))
			}
			if err != nil {
				break
			}
			if unproven {
				var listed bool
				if listed, err = d.isListed(snapshot, g); err != nil {
					break
				}
				if !listed {
					continue
				}
			}
			var c Checkpoint
			if c, err = describe(snapshot, g); err == nil && !yield(c, nil) {
				return
			}
		}
		if err != nil {
			yield(Checkpoint{}, err)
		}
	}
}

// Checkpoint describes one listed checkpoint; ErrNotFound if it is not listed.
func (d *DB) Checkpoint(g Generation) (Checkpoint, error) {
	if err := d.gate.enter(); err != nil {
		return Checkpoint{}, err
	}
	defer d.gate.leave()
	unproven := d.unproven.active.Load()
	snapshot := d.index.Snapshot()
	defer snapshot.Close()
	s, err := txn.ReadState(snapshot, g)
	listed := s != nil && s.Status == txn.Listed
	if err == nil && listed && unproven {
		listed, err = d.unproven.listed(snapshot, g, s)
	}
	if err == nil && !listed {
		err = fmt.Errorf("db: generation %s is not listed: %w", g, ErrNotFound)
	}
	if err != nil {
		return Checkpoint{}, err
	}
	return describe(snapshot, g)
}

// isListed tells whether a checkpoint that the catalogue calls listed is so, while there is something unproven.
func (d *DB) isListed(v txn.Reader, g Generation) (bool, error) {
	s, err := txn.ReadState(v, g)
	if err != nil {
		return false, err
	}
	return d.unproven.listed(v, g, s)
}

func describe(v txn.Reader, g Generation) (c Checkpoint, err error) {
	s, err := txn.ReadState(v, g)
	if err != nil {
		return c, err
	}
	m, err := txn.ReadManifest(v, g)
	if err != nil {
		return c, err
	}
	if s == nil || m == nil {
		return c, fmt.Errorf("db: generation %s is listed and has no manifest: %w", g, ErrCorrupt)
	}
	return Checkpoint{
		Generation: g, Namespace: m.Namespace, Offset: m.Offset, Kind: CheckpointKind(m.Kind), Request: m.Request, Continues: m.Continues,
		Ranks: m.Ranks, Pages: m.Pages(), Bytes: m.Bytes(), Meta: m.Meta, Durable: s.Durable, SupersededBy: s.SupersededBy, Published: s.Published,
	}, nil
}

// Retire delists a checkpoint. Its pages stay until Delete, or until room is needed. ErrNotFound if it is not listed.
func (d *DB) Retire(ctx context.Context, g Generation) error {
	return d.decideEssential(ctx, func(v txn.Reader) (txn.Record, error) {
		rec, err := txn.DecideRetire(v, []Generation{g}, txn.ReasonRequested, false, true)
		if rec == nil || err != nil {
			return nil, err
		}
		return rec, nil
	})
}

// Delete gives up a checkpoint, retiring it first if it is listed. Pages that nothing else needs leave RAM and disk, each once
// the last restoration that holds it is released. ErrNotFound if there is no such checkpoint.
func (d *DB) Delete(ctx context.Context, g Generation) error {
	return d.decideEssential(ctx, func(v txn.Reader) (txn.Record, error) {
		s, err := txn.ReadState(v, g)
		if err != nil {
			return nil, err
		}
		if s != nil && s.Status == txn.Listed {
			rec, err := txn.DecideRetire(v, []Generation{g}, txn.ReasonRequested, true, true)
			if err != nil {
				return nil, err
			}
			return rec, nil
		}
		rec, err := txn.DecideDelete(v, []Generation{g})
		if err != nil {
			return nil, err
		}
		return rec, nil
	})
}

// Supersede marks checkpoints as superseded by a newer listed one of the same namespace: they go first when room is
// needed, and stay listed and restorable until then. A zero by makes them current again. ErrConflict if one of them is not
// listed, ErrInvalid if by is not newer or of another namespace.
func (d *DB) Supersede(ctx context.Context, by Generation, old ...Generation) error {
	return d.decideEssential(ctx, func(v txn.Reader) (txn.Record, error) {
		rec, err := txn.DecideSupersede(v, by, old)
		if rec == nil || err != nil {
			return nil, err
		}
		return rec, nil
	})
}

func (d *DB) decideEssential(ctx context.Context, decide func(v txn.Reader) (txn.Record, error)) error {
	if err := d.enterToWrite(ctx); err != nil {
		return err
	}
	defer d.gate.leave()
	return d.committer.commitEssential(ctx, &transaction{decide: decide})
}

// evictOldestLoose deletes loose pages of the oldest segment, unless a superseded checkpoint goes before them.
func (d *DB) evictOldestLoose() (more bool, err error) {
	snapshot := d.index.Snapshot()
	defer snapshot.Close()
	first, err := txn.FirstGoes(snapshot)
	if err != nil || first {
		return false, err
	}
	keys, err := d.loose.oldest(snapshot, looseEvictAtOnce)
	if err != nil || len(keys) == 0 {
		return false, err
	}
	_, err = d.dropLoose(keys)
	return true, err
}

// looseEvictAtOnce is how many loose pages one round of disk eviction deletes.
const looseEvictAtOnce = 64
