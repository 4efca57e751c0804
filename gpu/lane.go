package gpu

// laneRunner keeps one lane busy with two goroutines: feed pulls chunks from the dispatcher and submits them, reap
// awaits them in the same order. They are two because both calls block: a driver may block in an "asynchronous" copy,
// and the wait for a copy must not delay the next submission. Both end when the dispatcher says so; reap of a lane whose
// device hangs ends only when the device answers.
type laneRunner struct {
	d         *dispatcher
	direction Direction
	lane      lane
	flying    chan *chunk // submitted and not awaited, oldest first; capacity LaneDepth, so that feed never blocks on it

	// Guarded by d.mu.
	depth      int  // chunks given to the lane and not at rest
	stuck      int  // of these, chunks that their transfer has given up
	submitting bool // feed is in the driver, for who knows how long
}

// room reports whether the lane can take a chunk now. Called with d.mu held.
func (r *laneRunner) room() bool {
	return r.stuck == 0 && r.depth < r.d.limits.LaneDepth && !r.submitting
}

func (r *laneRunner) feed() {
	defer close(r.flying)
	for c := r.d.pull(r); c != nil; c = r.d.pull(r) {
		started, err := r.lane.submit(c.runs)
		if !started {
			r.d.landed(c, drained, err)
			continue
		}
		if err != nil {
			r.d.partial(c, err) // before reap can see the chunk, so that it cannot settle as a success
		}
		r.flying <- c
	}
}

func (r *laneRunner) reap() {
	for c := range r.flying {
		v, err := r.lane.await()
		r.d.landed(c, v, err)
	}
}
