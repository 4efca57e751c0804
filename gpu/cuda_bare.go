//go:build cgo && linux

package gpu

import (
	"fmt"
	"time"

	"github.com/holdfast-db/holdfast/gpu/internal/driver"
	"github.com/holdfast-db/holdfast/txn"
)

// bare makes a lane for the runs alone, so that what is timed is one submission and the wait for its event.
func (d *cudaDevice) bare(m Method, dir Direction, runs []run) (time.Duration, error) {
	f := d.c.d.Features()
	if m == MethodBatch && d.c.batch() == 0 || m == MethodPlane && f&driver.Plane == 0 || m == MethodKernel && d.kernel == 0 {
		return 0, fmt.Errorf("gpu: copies by %v: %w", m, txn.ErrUnsupported)
	}
	l, err := d.newLane(dir, m, 1, len(runs))
	if err != nil {
		return 0, driverError(err)
	}
	begin := time.Now()
	if err := l.once(runs); err != nil {
		return 0, err // and the lane stays, since nobody knows what is on it
	}
	took := time.Since(begin)
	l.close()
	return took, nil
}
