//go:build cgo && linux

package driver

import (
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/gpu/internal/fakecuda"
)

// The shim and the fake driver are C, of which Go's race detector sees nothing; so they are run as a C program under
// ThreadSanitizer, which finds no race in either.
func TestShimAndFakeUnderThreadSanitizer(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles C with a sanitizer")
	}
	compiler, err := fakecuda.Compiler()
	if err != nil {
		t.Skip("needs a C compiler: ", err)
	}
	dir := t.TempDir()
	const sanitizer = "-fsanitize=thread"
	object, err := fakecuda.Compile(dir, sanitizer)
	require.NoError(t, err)
	library := filepath.Join(dir, "built.so")
	require.NoError(t, fakecuda.Link(object, library, sanitizer))
	installed := filepath.Join(dir, "libcuda.so.1")
	control, err := fakecuda.Install(library, installed)
	require.NoError(t, err)
	control.DelayMicroseconds.Store(50)

	program := filepath.Join(dir, "stress")
	out, err := exec.Command(compiler, "-std=gnu11", "-O1", "-g", "-pthread", sanitizer, "-I.", "-o", program,
		"shim.c", "testdata/stress.c", "-ldl").CombinedOutput()
	require.NoError(t, err, "%s", out)
	out, err = exec.Command(program, installed, "30").CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Empty(t, string(out))
	require.Zero(t, control.Violations.Load(), control.Violation())
	require.Zero(t, control.Streams.Load())
}
