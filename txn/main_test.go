package txn

import (
	"flag"
	"testing"

	"go.uber.org/goleak"
)

// TestMain makes random histories long enough to hold a few dozen checkpoints, unless the flag says otherwise.
func TestMain(m *testing.M) {
	flag.Parse()
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "rapid.steps" })
	if !given {
		flag.Set("rapid.steps", "60")
	}
	goleak.VerifyTestMain(m)
}
