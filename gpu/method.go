package gpu

import "fmt"

// Method is a way to make the copies of a chunk.
type Method uint8

const (
	// MethodAuto: the kernel for small blocks of a Load, then one batch call, or where the driver has none, 2-D copies for
	// regular strides and a call for each of the rest.
	MethodAuto   Method = 0
	MethodSingle Method = 1 // a call per run
	MethodBatch  Method = 2 // one call for all
	MethodPlane  Method = 3 // 2-D copies where strides are regular, else a call per run
	MethodKernel Method = 4 // the kernel for whatever is aligned to 16 bytes, also in a Store
)

func (m Method) String() string {
	switch m {
	case MethodAuto:
		return "auto"
	case MethodSingle:
		return "single"
	case MethodBatch:
		return "batch"
	case MethodPlane:
		return "plane"
	case MethodKernel:
		return "kernel"
	}
	return fmt.Sprintf("method %d", uint8(m))
}
