package fuzz

import (
	"os"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if os.Getenv(workerVariable) != "" {
		WorkerMain()
	}
	if dir := os.Getenv(realVariable); dir != "" {
		realWorker(dir)
	}
	goleak.VerifyTestMain(m)
}
