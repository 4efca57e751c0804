//go:build cgo && linux

package driver

import "fmt"

// Code is a result of the driver other than success.
type Code int

// Results that the caller of the driver tells apart.
const (
	InvalidValue   Code = 1
	OutOfMemory    Code = 2
	NoDevice       Code = 100
	InvalidDevice  Code = 101
	InvalidContext Code = 201
	InvalidHandle  Code = 400
	NotReady       Code = 600
	NotPermitted   Code = 800
	NotSupported   Code = 801
)

var codeNames = map[Code]string{
	1: "invalid value", 2: "out of memory", 3: "not initialized", 4: "deinitialized", 46: "device unavailable", 100: "no device",
	101: "invalid device", 201: "invalid context", 214: "uncorrectable memory error", 218: "invalid PTX", 220: "NVLink error",
	221: "no JIT compiler", 222: "PTX version not supported", 304: "operating system call failed", 400: "invalid handle",
	500: "not found", 600: "not ready", 700: "illegal address", 702: "launch timed out", 709: "context is destroyed",
	710: "assertion", 712: "already registered", 713: "not registered", 714: "hardware stack error", 715: "illegal instruction",
	716: "misaligned address", 717: "invalid address space", 718: "invalid program counter", 719: "launch failed",
	800: "not permitted", 801: "not supported", 802: "system not ready", 999: "unknown error",
}

// Error gives the result's name and number.
func (c Code) Error() string {
	name := codeNames[c]
	if name == "" {
		name = "error"
	}
	return fmt.Sprintf("CUDA driver: %s (%d)", name, int(c))
}

// Fatal reports whether the result means that the context is lost: every later call in it fails too.
func (c Code) Fatal() bool {
	switch c {
	case 4, 46, 214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719:
		return true
	}
	return false
}

// Features is what a driver can do beyond what every driver can.
type Features int

// The features, as in shim.h.
const (
	BatchV1   Features = 1
	BatchV2   Features = 2
	Kernel    Features = 4
	Plane     Features = 8
	IPC       Features = 16
	Shareable Features = 32
)

// LoadError says why a driver cannot be used.
type LoadError struct {
	Reason string
	Code   Code // 1 if the library is missing or incomplete, else what the driver said
}

func (e *LoadError) Error() string { return e.Reason }

// Device describes a device.
type Device struct {
	Handle        int
	Name          string
	UUID          [16]byte
	Bytes         int64
	CopyEngines   int
	NUMANode      int // -1 if unknown
	HostPointerOK bool
	POSIXFD       bool
}
