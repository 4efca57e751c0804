package db

import (
	"fmt"
	"runtime/debug"
	"time"
)

// loopRestartDelay is how long a background loop that panicked is left alone; it doubles up to loopRestartDelayMax.
const (
	loopRestartDelay    = 10 * time.Millisecond
	loopRestartDelayMax = 10 * time.Second
)

// loop runs a background loop in its own goroutine until it returns. One that panics is logged, counted and started again, after
// a pause, so that no error ends eviction or the return of space for the life of the process. Close waits
// for it to return.
func (d *DB) loop(name string, run func()) {
	d.loops.Go(func() {
		for pause := loopRestartDelay; ; pause = min(2*pause, loopRestartDelayMax) {
			if d.guard(name, run) {
				return
			}
			d.counters.loopsRestarted.Add(1)
			timer := time.NewTimer(pause)
			select {
			case <-timer.C:
			case <-d.gate.stopping:
				timer.Stop()
				return
			}
		}
	})
}

// guard reports whether run returned.
func (d *DB) guard(name string, run func()) (returned bool) {
	defer func() {
		if p := recover(); p != nil {
			d.options.Logger.Error("background loop failed", "loop", name, "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
		}
	}()
	run()
	return true
}
