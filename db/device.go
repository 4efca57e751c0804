package db

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/holdfast-db/holdfast/gpu"
)

// DeviceBlock is a run of device memory that holds a part of a page.
type DeviceBlock struct {
	Address uint64 // as the engine's backend names it
	Bytes   int64
}

// DeviceRank says where one rank keeps its pages in device memory. Paged caches scatter a page over blocks; the blocks of a
// page, in order, have to add up to its size.
type DeviceRank struct {
	Device int       // index in the devices of Options.Engine
	After  gpu.Order // the copy begins after this; zero is at once
	// Deadline is when the copy is given up at the latest; zero is the engine's own.
	Deadline time.Time
	// Blocks gives the blocks of a page.
	Blocks func(group int, position int64) []DeviceBlock
}

var errNoEngine = fmt.Errorf("db: Options.Engine is nil: there is nothing to copy with: %w", ErrUnsupported)

// pageLock gives what page-locks memory of the RAM tier for the devices of e, nil if that is not asked for.
func pageLock(e *gpu.Engine, log *slog.Logger) func(mem []byte) (func() error, error) {
	if e == nil || !e.MustPin() {
		return nil
	}
	return func(mem []byte) (func() error, error) {
		p, err := e.Pin(mem)
		if err != nil {
			return nil, err
		}
		return func() error {
			err := p.Unpin()
			if err != nil {
				log.Error("memory stays page-locked and is not used again", "bytes", len(mem), "error", err)
			}
			return err
		}, nil
	}
}

// FillFromDevice fills all slots of a rank from device memory and returns when they are full; the rank can be committed then.
// Until the engine proves that it has finished, the slots are under a Transfer: should the publication end, or ctx, they are
// given to nobody.
//
// Errors: those of Slots and Transfer; ErrInvalid for blocks that do not add up to their page; ErrUnsupported without an
// engine; ErrBusy while another copy into the slots of the rank is not finished; those of the engine, among them
// gpu.ErrDeviceLost. After an error the slots are as they were before, to be filled again, unless the publication
// has ended.
func (p *Publication) FillFromDevice(ctx context.Context, rank int, from DeviceRank) error {
	engine := p.db.options.Engine
	if engine == nil {
		return errNoEngine
	}
	slots, err := p.Slots(ctx, rank)
	if err != nil || len(slots) == 0 {
		return err
	}
	var regions []gpu.Region
	for _, s := range slots {
		if regions, err = from.regions(regions, s.Group(), s.Position(), s.Buffer()); err != nil {
			return err
		}
	}
	t, err := p.soleTransfer(rank)
	if err != nil {
		return err
	}
	if err := from.copy(ctx, engine, gpu.Store, regions, t); err != nil {
		return err
	}
	for _, s := range slots {
		s.Filled(s.Size())
	}
	return nil
}

// soleTransfer is Transfer if no other copy into the slots of the rank may be under way, which could end after the new one.
func (p *Publication) soleTransfer(rank int) (*Transfer, error) {
	t, err := p.Transfer(rank)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	others := p.transfers[rank] - 1
	p.mu.Unlock()
	if others > 0 {
		t.Done()
		return nil, fmt.Errorf("db: rank %d: %d copies are not finished: %w", rank, others, ErrBusy)
	}
	return t, nil
}

// CopyToDevice copies the pages of a rank into device memory and returns when they are there. Until the engine proves that
// it has finished, the pages stay pinned, also past the end of the lease. Blocks of a page may be nil: then it is left out.
//
// Errors: ErrInvalid for a rank that does not exist or blocks that do not add up, ErrConflict if the lease has ended,
// ErrUnsupported without an engine; those of the engine.
func (r *Restoration) CopyToDevice(ctx context.Context, rank int, to DeviceRank) error {
	engine := r.db.options.Engine
	if engine == nil {
		return errNoEngine
	}
	t, err := r.Transfer() // first, so that the pages stay while they are looked at
	if err != nil {
		return err
	}
	var regions []gpu.Region
	pages := r.Pages(rank)
	if len(pages) == 0 {
		t.Done()
		return fmt.Errorf("db: rank %d: the restoration has no pages of it: %w", rank, ErrInvalid)
	}
	for _, p := range pages {
		if to.Blocks(p.Group, p.Position) == nil {
			continue
		}
		if regions, err = to.regions(regions, p.Group, p.Position, p.Bytes); err != nil {
			t.Done()
			return err
		}
	}
	return to.copy(ctx, engine, gpu.Load, regions, t)
}

// regions adds the regions of one page.
func (d *DeviceRank) regions(regions []gpu.Region, group int, position int64, host []byte) ([]gpu.Region, error) {
	left := host
	for _, b := range d.Blocks(group, position) {
		if b.Bytes < 1 || b.Bytes > int64(len(left)) {
			return nil, fmt.Errorf("db: group %d, page %d: block of %d bytes with %d of %d left: %w", group, position, b.Bytes, len(left), len(host), ErrInvalid)
		}
		regions = append(regions, gpu.Region{Device: b.Address, Host: left[:b.Bytes]})
		left = left[b.Bytes:]
	}
	if len(left) > 0 {
		return nil, fmt.Errorf("db: group %d, page %d: its blocks hold %d of %d bytes: %w", group, position, len(host)-len(left), len(host), ErrInvalid)
	}
	return regions, nil
}

// copy has the engine carry out one batch and waits for it. The transfer is done when the engine has proven that no copy
// touches either end any more, which may be after copy has returned, and never if the device is lost.
func (d *DeviceRank) copy(ctx context.Context, engine *gpu.Engine, direction gpu.Direction, regions []gpu.Region, t *Transfer) error {
	moving, err := engine.Submit(ctx, gpu.Batch{
		Device: d.Device, Direction: direction, Regions: regions, After: d.After, Deadline: d.Deadline, Released: t.Done,
	})
	if err != nil {
		t.Done() // refused: nothing was begun
		return fmt.Errorf("db: %w", err)
	}
	if err := moving.Wait(ctx); err != nil {
		return fmt.Errorf("db: copy of %d regions: %w", len(regions), err)
	}
	return nil
}
