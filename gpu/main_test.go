package gpu

import (
	"os"
	"testing"

	"go.uber.org/goleak"
)

// cleanups run after the last test.
var cleanups []func()

func TestMain(m *testing.M) {
	if library := os.Getenv("HOLDFAST_GPU_TEST_EXPORT"); library != "" {
		exportMain(library)
	}
	code := m.Run()
	for _, f := range cleanups {
		f()
	}
	if code == 0 {
		if err := goleak.Find(); err != nil {
			println(err.Error())
			code = 1
		}
	}
	os.Exit(code)
}
