//go:build cgo && linux

package gpu

import "testing"

// What the tests in package gpu_test use, which drive the engine through the database.

// FakeDriver gives the library of a fake driver, with two devices, and what tells which rules of the driver were broken and how
// much memory of it is left, on devices and page-locked.
func FakeDriver(t testing.TB) (library string, violation func() string, left func() int) {
	path, control := installFake(t)
	control.DelayMicroseconds.Store(100)
	return path, control.Violation, func() int { return int(control.Allocations.Load()) }
}

// DeviceLibrary is the library that the tests for a machine with a GPU use; DeviceBytes is how much they copy where n is meant
// for a GPU.
func DeviceLibrary() string { return deviceLibrary() }

func DeviceBytes(n int) int { return deviceBytes(n) }
