//go:build cgo && linux

package gpu

import (
	_ "embed"
	"errors"
	"fmt"
	"time"
	"unsafe"
)

//go:embed cuda_kernel.ptx
var kernelPTX string

// Sizes that the calibration tries, and how often. 64 blocks are what a page of a few layers is cut into.
var calibrationBytes = []int64{4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10}

const (
	calibrationBlocks = 64
	calibrationTimes  = 3
	// calibrationGain is how much faster the kernel has to be, since it takes processors from computing.
	calibrationGain = 1.1
)

// calibrate finds the largest block of a load that the kernel copies faster than the copy engines do, both as the engine
// would use them; 0 if there is none. It moves some 15 MiB each way. A calibration that fails without the device being
// lost leaves the kernel unused.
func (d *cudaDevice) calibrate() (int64, error) {
	threshold, err := d.tryCalibrate()
	if errors.Is(err, ErrDeviceLost) {
		return 0, fmt.Errorf("calibrate the copy kernel: %w", err)
	}
	if err != nil {
		return 0, nil
	}
	return threshold, nil
}

func (d *cudaDevice) tryCalibrate() (threshold int64, err error) {
	most := calibrationBytes[len(calibrationBytes)-1]
	// Every second block is used at either end, so that the runs are what is left after merging.
	device, err := d.ctx.Alloc(2 * most * calibrationBlocks)
	if err != nil {
		return 0, driverError(err)
	}
	defer func() {
		if !errors.Is(err, ErrDeviceLost) {
			err = combined(err, driverError(d.ctx.Free(device)))
		}
	}()
	host, err := d.ctx.HostAlloc(int(2 * most * calibrationBlocks))
	if err != nil {
		return 0, driverError(err)
	}
	defer func() {
		if !errors.Is(err, ErrDeviceLost) {
			err = combined(err, driverError(d.ctx.HostFree(host)))
		}
	}()
	l, err := d.newLane(Load, MethodAuto, 1, calibrationBlocks)
	if err != nil {
		return 0, driverError(err)
	}
	defer func() {
		if !errors.Is(err, ErrDeviceLost) {
			l.close()
		}
	}()
	for _, n := range calibrationBytes {
		runs := make([]run, calibrationBlocks)
		for i := range runs {
			at := 2 * int64(i) * n
			runs[i] = run{device: device + uint64(at), host: unsafe.Add(host, at), bytes: n}
		}
		var best [2]time.Duration
		for way, kernelBytes := range []int64{0, n} {
			d.kernelBytes = kernelBytes
			for range calibrationTimes + 1 { // the first warms up
				begin := time.Now()
				if err = l.once(runs); err != nil {
					return 0, err
				}
				if took := time.Since(begin); best[way] == 0 || took < best[way] {
					best[way] = took
				}
			}
		}
		if float64(best[0]) < calibrationGain*float64(best[1]) {
			break
		}
		threshold = n
	}
	return threshold, nil
}

// once copies runs and waits.
func (l *cudaLane) once(runs []run) error {
	if started, err := l.submit(runs); !started {
		return err
	}
	switch v, err := l.await(); v {
	case copied:
		return nil
	case drained:
		return err
	default:
		return fmt.Errorf("%w: %w", err, ErrDeviceLost)
	}
}
