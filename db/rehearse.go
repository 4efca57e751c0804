package db

import (
	"context"
	"fmt"

	"github.com/holdfast-db/holdfast/txn"
)

// Rehearsal says what giving checkpoints up would do, or did.
type Rehearsal struct {
	Checkpoints int   `json:"checkpoints"`
	Bytes       int64 `json:"bytes"`      // logical, of all ranks, each shared page counted once
	DiskBytes   int64 `json:"disk_bytes"` // allocated page copies that the catalogue gives up
	Pages       int64 `json:"pages"`
}

// Rehearse finds out what Clear of a namespace (of all, if ns is the zero key), or with generations a Delete of each of them, would give up,
// by doing it in the memory of a read-only handle, which is of no use for anything else afterwards. The disk is left alone.
//
// Errors: ErrInvalid for a handle that is not read-only; ErrNotFound for a generation that is neither listed nor retired; ErrBusy, ErrClosed,
// ErrCorrupt, ErrIO.
func (d *DB) Rehearse(ctx context.Context, ns txn.Key, gens ...Generation) (r Rehearsal, err error) {
	if !d.options.ReadOnly {
		return r, fmt.Errorf("db: rehearsal on a handle that is not read-only: %w", ErrInvalid)
	}
	if err := d.gate.enterWith(ctx); err != nil {
		return r, err
	}
	defer d.gate.leave()
	before, all, err := d.everything(ctx, ns)
	if err != nil {
		return r, err
	}
	if len(gens) > 0 {
		known := make(map[Generation]bool, len(all))
		for _, g := range all {
			known[g] = true
		}
		for _, g := range gens {
			if !known[g] {
				return r, fmt.Errorf("db: generation %s is neither listed nor retired: %w", g, ErrNotFound)
			}
		}
		all = gens
	}
	if err := d.retireAll(ctx, all, txn.ReasonRequested); err != nil {
		return r, err
	}
	after, _, err := d.everything(ctx, ns)
	r = Rehearsal{
		Checkpoints: len(all), Bytes: before.PageBytes - after.PageBytes, DiskBytes: before.AllocatedBytes - after.AllocatedBytes, Pages: before.Pages - after.Pages,
	}
	return r, err
}

// DeleteAll gives up many checkpoints, in as few records as it takes; those that are gone are passed over. It is Clear of what is named.
func (d *DB) DeleteAll(ctx context.Context, gens ...Generation) (r ClearReport, err error) {
	if err := d.enterToWrite(ctx); err != nil {
		return r, err
	}
	defer d.gate.leave()
	before, _, err := d.everything(ctx, txn.Key{})
	if err != nil {
		return r, err
	}
	err = d.retireAll(ctx, gens, txn.ReasonRequested)
	after, _, laterErr := d.everything(context.WithoutCancel(ctx), txn.Key{})
	r.Checkpoints = int(before.Listed + before.Retired - after.Listed - after.Retired)
	r.Bytes = before.AllocatedBytes - after.AllocatedBytes
	r.Held = d.residency.heldAndGone()
	if err == nil {
		err = laterErr
	}
	return r, err
}
