//go:build linux

// Package fakecuda builds and controls a CUDA driver library without a GPU, for the tests of the CUDA backend. How it
// behaves is said in c/cuda.c. It measures nothing: no figure taken with it says anything about a GPU.
package fakecuda

import (
	"embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

//go:embed c/cuda.c c/control.h
var source embed.FS

// Control is the memory that a test shares with a library, the same as struct control in c/control.h.
type Control struct {
	Devices, Version, BatchABIs, InitResult, Hold, HoldFills, FailAt, FailMore, FailWith, DelayMicroseconds, Seed atomic.Uint64
	Lost                                                                                                          [8]atomic.Uint64
	ModuleResult                                                                                                  atomic.Uint64

	Calls, Copies, Batches, Batched, Planes, Kernels, KernelRuns, Allocations, Streams, Events, Imports, Contexts, Violations atomic.Uint64
	violation                                                                                                                 [256]byte
}

// Violation gives the first rule that was broken, "" if none was.
func (c *Control) Violation() string {
	if c.Violations.Load() == 0 {
		return ""
	}
	return unix.ByteSliceToString(c.violation[:])
}

// Compiler finds a C compiler, or says that there is none.
func Compiler() (string, error) {
	for _, name := range []string{"gcc", "cc"} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("no C compiler")
}

// Compile compiles the library's source in dir and gives the object file.
func Compile(dir string, flags ...string) (string, error) {
	for _, name := range []string{"cuda.c", "control.h"} {
		text, err := source.ReadFile("c/" + name)
		if err != nil {
			return "", err
		}
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			return "", err
		}
	}
	object := filepath.Join(dir, "cuda.o")
	return object, run(append([]string{"-std=gnu11", "-O1", "-g", "-fPIC", "-pthread", "-c", "-o", object, filepath.Join(dir, "cuda.c")}, flags...)...)
}

// Link makes a library of an object file.
func Link(object, library string, flags ...string) error {
	return run(append([]string{"-shared", "-pthread", "-o", library, object}, flags...)...)
}

// LinkWithout makes a library that lacks symbols, as an older driver does.
func LinkWithout(object, library string, symbols ...string) error {
	script := "{ global: *; local:"
	for _, symbol := range symbols {
		script += " " + symbol + ";"
	}
	name := library + ".symbols"
	if err := os.WriteFile(name, []byte(script+" };\n"), 0o600); err != nil {
		return err
	}
	return Link(object, library, "-Wl,--version-script="+name)
}

func run(args ...string) error {
	compiler, err := Compiler()
	if err != nil {
		return err
	}
	if out, err := exec.Command(compiler, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("build the fake driver: %w: %s", err, out)
	}
	return nil
}

// Install copies a built library to path, where it is another driver when it is loaded, and gives the memory by which to
// control it. The memory stays mapped while the process lives, as the library does.
func Install(library, path string) (*Control, error) {
	text, err := os.ReadFile(library)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(path, text, 0o700); err != nil {
		return nil, err
	}
	if err := os.WriteFile(path+".control", make([]byte, unsafe.Sizeof(Control{})), 0o600); err != nil {
		return nil, err
	}
	c, err := Attach(path)
	if err != nil {
		return nil, err
	}
	c.Reset()
	return c, nil
}

// Reset makes the driver that of version 13.0 with two devices, with nothing held, failing or counted.
func (c *Control) Reset() {
	for _, zero := range []*atomic.Uint64{
		&c.InitResult, &c.Hold, &c.HoldFills, &c.FailAt, &c.FailMore, &c.DelayMicroseconds, &c.Seed, &c.ModuleResult,
		&c.Calls, &c.Copies, &c.Batches, &c.Batched, &c.Planes, &c.Kernels, &c.KernelRuns, &c.Violations,
	} {
		zero.Store(0)
	}
	c.Devices.Store(2)
	c.Version.Store(13000)
	c.BatchABIs.Store(3)
	c.FailWith.Store(999)
}

// Idle reports whether nothing is left of those who have used the driver but memory.
func (c *Control) Idle() bool {
	for i := range c.Lost {
		if c.Lost[i].Load() != 0 {
			return false
		}
	}
	return c.Contexts.Load()+c.Streams.Load()+c.Events.Load()+c.Imports.Load() == 0
}

// Attach gives the memory by which to control an installed library.
func Attach(path string) (*Control, error) {
	f, err := os.OpenFile(path+".control", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	mem, err := unix.Mmap(int(f.Fd()), 0, int(unsafe.Sizeof(Control{})), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	return (*Control)(unsafe.Pointer(unsafe.SliceData(mem))), nil
}
