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
	for _, f := range []struct {
		name                 string
		value                *int
		standard, low, upper int
	}{
		{"Transfers", &l.Transfers, 4096, 1, 1 << 16},
		{"Regions", &l.Regions, 1 << 20, 1, 1 << 24},
		{"ChunkRuns", &l.ChunkRuns, 1024, 1, 1 << 14},
		{"WindowRuns", &l.WindowRuns, max(12<<10, l.ChunkRuns), max(1, l.ChunkRuns), 1 << 20},
		{"Lanes", &l.Lanes, 2, 1, 8},
		{"LaneDepth", &l.LaneDepth, 3, 1, 16},
	} {
		if *f.value == 0 {
			*f.value = f.standard
		}
		if *f.value < f.low || *f.value > f.upper {
			return o, fmt.Errorf("gpu: limit %s is %d: want %d to %d: %w", f.name, *f.value, f.low, f.upper, txn.ErrInvalid)
		}
	}
	for _, f := range []struct {
		name                 string
		value                *int64
		standard, low, upper int64
	}{
		{"Bytes", &l.Bytes, 16 << 30, 1, 1 << 50},
		{"ChunkBytes", &l.ChunkBytes, 8 << 20, 4 << 10, 1 << 30},
		{"WindowBytes", &l.WindowBytes, max(96<<20, l.ChunkBytes), max(4<<10, l.ChunkBytes), 1 << 40},
	} {
		if *f.value == 0 {
			*f.value = f.standard
		}
		if *f.value < f.low || *f.value > f.upper {
			return o, fmt.Errorf("gpu: limit %s is %d bytes: want %d to %d: %w", f.name, *f.value, f.low, f.upper, txn.ErrInvalid)
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
