package gpu

import (
	"context"
	"errors"
	"fmt"
	"time"
	"unsafe"

	"github.com/holdfast-db/holdfast/txn"
)

// Shape is what a measurement copies: so many scattered blocks of one size. One block is a contiguous copy, whose bare
// speed is the limit of the link if the block is large.
type Shape struct {
	BlockBytes int64
	Blocks     int
}

// Sample says how fast a shape was copied in one direction, in bytes per second.
type Sample struct {
	Shape
	Direction Direction
	Engine    float64            // through the engine, from Submit to Done
	Bare      map[Method]float64 // by one method alone; those that the device has
}

// Measure copies scattered blocks between a device and host memory, each shape and direction through the engine and by
// every bare method in turns, so many times, and gives the best of each. The device's other transfers make it slower,
// and it them. It takes twice the bytes of the largest shape on the device, and as much pinned memory.
//
// ErrInvalid for a shape without bytes, or over Limits.Regions or half of Limits.Bytes; otherwise the errors of Submit and Pin.
func (e *Engine) Measure(ctx context.Context, device int, shapes []Shape, times int) (samples []Sample, err error) {
	var most int64
	for _, s := range shapes {
		if s.BlockBytes <= 0 || s.Blocks <= 0 || s.Blocks > e.limits.Regions || s.BlockBytes > e.limits.Bytes/2/int64(s.Blocks) {
			return nil, fmt.Errorf("gpu: measure %d blocks of %d bytes: limits are %d regions and %d bytes: %w",
				s.Blocks, s.BlockBytes, e.limits.Regions, e.limits.Bytes/2, txn.ErrInvalid)
		}
		most = max(most, 2*s.BlockBytes*int64(s.Blocks))
	}
	if len(shapes) == 0 || times <= 0 {
		return nil, fmt.Errorf("gpu: measure %d shapes %d times: %w", len(shapes), times, txn.ErrInvalid)
	}
	if err := e.begin(); err != nil {
		return nil, err
	}
	defer e.end()
	there, err := e.AllocDevice(ctx, device, most)
	if err != nil {
		return nil, err
	}
	defer func() { err = combined(err, there.Close()) }()
	memory, err := e.AllocPinned(most)
	if err != nil {
		return nil, err
	}
	defer func() { err = combined(err, memory.Unpin()) }()
	for _, s := range shapes {
		for _, dir := range []Direction{Store, Load} {
			sample, err := e.sample(ctx, s, dir, there, memory.Bytes(), times)
			if err != nil {
				return samples, err
			}
			samples = append(samples, sample)
		}
	}
	return samples, nil
}

// sample measures one shape in one direction. Every second block is used at either end, so that no two are merged.
func (e *Engine) sample(ctx context.Context, s Shape, dir Direction, there *DeviceMemory, mem []byte, times int) (Sample, error) {
	d := there.d
	out := Sample{Shape: s, Direction: dir, Bare: map[Method]float64{}}
	regions := make([]Region, s.Blocks)
	for i := range regions {
		at := 2 * int64(i) * s.BlockBytes
		regions[i] = Region{Device: there.Address() + uint64(at), Host: mem[at : at+s.BlockBytes]}
	}
	runs := make([]run, len(regions))
	for i, r := range regions {
		runs[i] = run{device: r.Device, host: unsafe.Pointer(unsafe.SliceData(r.Host)), bytes: int64(len(r.Host))}
	}
	bytes := float64(s.BlockBytes) * float64(s.Blocks)
	for range times {
		for m := MethodSingle; m <= MethodKernel; m++ {
			took, err := d.dev.bare(m, dir, runs)
			if errors.Is(err, txn.ErrUnsupported) {
				continue
			}
			if err != nil {
				return out, fmt.Errorf("gpu: measure %d blocks of %d bytes by %v: %w", s.Blocks, s.BlockBytes, m, classified(err))
			}
			out.Bare[m] = max(out.Bare[m], bytes/took.Seconds())
		}
		begin := time.Now()
		t, err := e.Submit(ctx, Batch{Device: d.index, Direction: dir, Regions: regions})
		if err != nil {
			return out, err
		}
		if err := t.Wait(ctx); err != nil {
			t.Cancel()
			<-t.Done() // by its deadline; if it is in quarantine then, Unpin says so
			return out, err
		}
		out.Engine = max(out.Engine, bytes/time.Since(begin).Seconds())
	}
	return out, nil
}
