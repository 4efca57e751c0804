package gpu

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/holdfast-db/holdfast/txn"
)

// Limits bounds what the engine holds, per device. Zero fields take the default.
type Limits struct {
	// Admitted transfers wait for their turn or are in flight or in quarantine. Submit waits, or refuses, beyond these.
	Transfers int   // default 4096, at most 65,536
	Regions   int   // descriptors over all admitted transfers, also the most in one batch; default 1,048,576
	Bytes     int64 // bytes over all admitted transfers, also the most in one batch; default 16 GiB

	// A chunk is what goes to the device in one call, and so the time a more urgent transfer waits for its turn.
	ChunkBytes int64 // default 8 MiB, at least 4 KiB
	ChunkRuns  int   // default 1024, at most 16,384

	// The window bounds what the device has been given and not finished.
	WindowBytes int64 // default 96 MiB, at least ChunkBytes
	WindowRuns  int   // default 12,288, at least ChunkRuns

	// Lanes are independent streams of chunks in one direction; copies in one direction share the device's copy
	// engine, so more lanes hide the gap between chunks, and a stuck copy, but add no bandwidth.
	Lanes     int // per direction; default 2, at most 8
	LaneDepth int // chunks in one lane; default 3, at most 16
}

// defaultDeadline is how long a transfer may take from Submit, unless Options or its batch say otherwise.
const defaultDeadline = 30 * time.Second

// Options configures an Engine. The zero value works.
type Options struct {
	Limits   Limits
	Deadline time.Duration // from Submit to settled, for batches without a deadline of their own; default 30 s
	Logger   *slog.Logger  // lost devices, quarantine, leaks; default slog.Default()
}

func (o Options) withDefaults() (Options, error) {
	l := &o.Limits
	for _, err := range []error{
		settle("Transfers", &l.Transfers, 4096, 1, 1<<16),
		settle("Regions", &l.Regions, 1<<20, 1, 1<<24),
		settle("Bytes", &l.Bytes, 16<<30, 1, 1<<50),
		settle("ChunkBytes", &l.ChunkBytes, 8<<20, 4<<10, 1<<30),
		settle("ChunkRuns", &l.ChunkRuns, 1024, 1, 1<<14),
	} {
		if err != nil {
			return o, err
		}
	}
	// A window smaller than a chunk would hold that chunk up for ever.
	for _, err := range []error{
		settle("WindowBytes", &l.WindowBytes, max(96<<20, l.ChunkBytes), l.ChunkBytes, 1<<40),
		settle("WindowRuns", &l.WindowRuns, max(12<<10, l.ChunkRuns), l.ChunkRuns, 1<<20),
		settle("Lanes", &l.Lanes, 2, 1, 8),
		settle("LaneDepth", &l.LaneDepth, 3, 1, 16),
	} {
		if err != nil {
			return o, err
		}
	}
	if o.Deadline == 0 {
		o.Deadline = defaultDeadline
	}
	if o.Deadline < 0 {
		return o, fmt.Errorf("gpu: default deadline is %v: want more than 0: %w", o.Deadline, txn.ErrInvalid)
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	return o, nil
}

// settle gives a limit that is 0 its default, and refuses one out of its range.
func settle[N int | int64](name string, value *N, standard, low, high N) error {
	if *value == 0 {
		*value = standard
	}
	if *value < low || *value > high {
		return fmt.Errorf("gpu: limit %s is %d: want %d to %d: %w", name, *value, low, high, txn.ErrInvalid)
	}
	return nil
}
