//go:build !unix

package gpu

import "unsafe"

// mapMemory takes the memory from the Go heap, which the host backend is content with; no other backend exists here.
func mapMemory(bytes int64) ([]byte, func() error, error) {
	raw := make([]byte, bytes+pinAlign)
	skip := alignUp(raw)
	return raw[skip : skip+int(bytes)], func() error { return nil }, nil
}

// alignUp gives how many bytes of raw come before the first multiple of pinAlign.
func alignUp(raw []byte) int {
	return int(-uintptr(unsafe.Pointer(unsafe.SliceData(raw))) & (pinAlign - 1))
}
