package gpu

// CUDAOptions configures a CUDA backend. The zero value works.
type CUDAOptions struct {
	Library string // the driver library; default libcuda.so.1
	// Devices chooses devices by UUID, and numbers them in this order. Empty: all, as the driver numbers them.
	Devices [][16]byte
	Method  Method
	// KernelBytes is the largest block of a Load that the kernel copies: 0 finds it by a calibration of some 10 ms when a
	// device is opened, less than 0 is never. Stores are left to the copy engines, which do not disturb computing.
	KernelBytes int64
	// KernelBlocks is the kernel's grid, and so how many of the device's processors it takes from computing at most.
	// Default 12.
	KernelBlocks int
}
