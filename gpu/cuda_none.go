//go:build !cgo || !linux

package gpu

import (
	"fmt"

	"github.com/holdfast-db/holdfast/txn"
)

// OpenCUDA opens the CUDA driver. This build has no CUDA backend: it needs Linux and cgo.
func OpenCUDA(CUDAOptions) (Backend, error) {
	return nil, fmt.Errorf("gpu: built without the CUDA backend, which needs Linux and cgo: %w", txn.ErrUnsupported)
}
