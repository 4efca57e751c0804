package gpu

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"
)

// fairTurns is how many chunks of higher classes go first while a lower class has work, before it gets one.
const fairTurns = 16

// chunk is what goes to the device in one call: a stretch of a transfer's runs.
type chunk struct {
	t         *Transfer
	lane      *laneRunner
	runs      []run
	size      load
	abandoned bool // its transfer settled without it: it no longer counts against the window. Guarded by dispatcher.mu
}

// dispatcher decides, for one device, which chunk goes next. It is the one place where the state of the device's
// transfers is changed.
//
// Transfers whose order is met stand in queues by direction and class. Lanes pull: a lane with room asks for the next
// chunk, and gets it if the transfer whose turn it is, over all lanes with room, goes in its direction, and the chunk
// fits into the window. A turn that does not fit is waited for and not passed over, so large chunks do not starve.
//
//   - A chunk is in exactly one of: not issued, in flight in one lane, at rest.
//   - The window counts chunks in flight whose transfer has not given them up. A lane that holds one given up is stuck:
//     it gets nothing more until that chunk is at rest. The device's other lanes go on.
//   - Nothing of a transfer is issued after it failed, was canceled or settled.
//   - After the loss of the device nothing is issued, and transfers with nothing in flight settle released.
//
// Pushing chunks to lanes at submission, in the order of arrival, was the first design: a restore then waits for every
// store submitted before it, and stream priorities do not help, since copies in one direction share an engine.
type dispatcher struct {
	e       *Engine
	index   int
	dev     device
	limits  Limits
	budget  budget
	memory  ledger // of the device, that the engine has taken
	lanes   []*laneRunner
	running sync.WaitGroup // goroutines of the lanes

	mu     sync.Mutex
	cond   sync.Cond // signalled when a lane may find something to do, or has to stop
	queues [2][priorities][]*Transfer
	active map[*Transfer]struct{} // admitted and not released
	taken  map[*DeviceMemory]struct{}
	window load
	passed int           // chunks that went before a lower class with work, in a row
	lost   error         // why the device is lost
	ending bool          // lanes stop when they are idle
	idle   chan struct{} // made by drain, closed when active is empty or the device is lost
	stats  DeviceStats
}

func newDispatcher(e *Engine, index int, dev device) (*dispatcher, error) {
	l := e.limits
	d := &dispatcher{
		e: e, index: index, dev: dev, limits: l,
		budget: budget{limit: load{l.Transfers, l.Regions, l.Bytes}},
		active: map[*Transfer]struct{}{}, taken: map[*DeviceMemory]struct{}{},
	}
	d.cond.L = &d.mu
	for _, dir := range []Direction{Load, Store} {
		for range l.Lanes {
			s, err := dev.openLane(dir)
			if err != nil {
				for _, r := range d.lanes {
					r.lane.close()
				}
				return nil, fmt.Errorf("gpu: open a %v lane on device %d: %w", dir, index, classified(err))
			}
			d.lanes = append(d.lanes, &laneRunner{d: d, direction: dir, lane: s, flying: make(chan *chunk, l.LaneDepth)})
		}
	}
	for _, r := range d.lanes {
		d.running.Go(r.feed)
		d.running.Go(r.reap)
	}
	return d, nil
}

// admit takes t, whose load has been taken from the budget. From here on t settles and is released by itself.
func (d *dispatcher) admit(t *Transfer, deadline time.Time) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.lost != nil {
		return d.lost
	}
	if d.ending {
		return errClosed
	}
	d.active[t] = struct{}{}
	d.stats.Submitted++
	d.stats.Regions += int64(t.cost.regions)
	t.timer = time.AfterFunc(time.Until(deadline), func() { t.end(ErrDeadline) })
	return nil
}

// ready puts t, whose order is met, into its queue; err says that the order never will be.
func (d *dispatcher) ready(t *Transfer, err error) {
	d.mu.Lock()
	switch {
	case t.stage != gated:
	case err != nil:
		t.fail(fmt.Errorf("what it was ordered after: %w", err))
		t.finish()
	case len(t.runs) == 0:
		t.stage = issued
		t.finish()
	default:
		t.stage = ready
		q := d.queue(t)
		*q = append(*q, t)
		d.cond.Broadcast()
	}
	t.unlock()
}

func (d *dispatcher) queue(t *Transfer) *[]*Transfer { return &d.queues[t.direction-1][t.priority-1] }

// dequeue takes t out of its queue. Called with mu held.
func (d *dispatcher) dequeue(t *Transfer) {
	q := d.queue(t)
	*q = slices.DeleteFunc(*q, func(o *Transfer) bool { return o == t })
	d.cond.Broadcast()
}

// turn gives the transfer that is to issue a chunk next, over the directions with a lane that has room, and whether a
// lower class is passed over for it. Called with mu held.
func (d *dispatcher) turn() (t *Transfer, passes bool) {
	var high, low *Transfer
	for p := range priorities {
		for _, dir := range []Direction{Load, Store} {
			q := d.queues[dir-1][p]
			if len(q) == 0 || !d.room(dir) {
				continue
			}
			if high == nil {
				high = q[0]
			}
			low = q[0]
		}
	}
	if high == nil || high.priority == low.priority {
		return high, false
	}
	if d.passed >= fairTurns {
		return low, false
	}
	return high, true
}

// room reports whether a lane of the direction can take a chunk. Called with mu held.
func (d *dispatcher) room(dir Direction) bool {
	for _, r := range d.lanes {
		if r.direction == dir && r.room() {
			return true
		}
	}
	return false
}

// pull waits for the next chunk for r; nil means that the lane is to stop.
func (d *dispatcher) pull(r *laneRunner) *chunk {
	d.mu.Lock()
	defer d.mu.Unlock()
	r.submitting = false
	for {
		if d.lost != nil || d.ending && len(d.active) == 0 {
			return nil
		}
		if r.room() {
			if t, passes := d.turn(); t != nil && t.direction == r.direction {
				if c := t.peek(d.limits); d.window.plus(c.size).within(load{bytes: d.limits.WindowBytes, regions: d.limits.WindowRuns}) {
					d.issue(c, r, passes)
					return c
				}
			}
		}
		d.cond.Wait()
	}
}

// peek cuts the next chunk off the runs that are not issued.
func (t *Transfer) peek(l Limits) *chunk {
	c := &chunk{t: t}
	end := t.next
	for ; end < len(t.runs) && end-t.next < l.ChunkRuns; end++ {
		if n := t.runs[end].bytes; c.size.bytes+n <= l.ChunkBytes {
			c.size.bytes += n
			continue
		}
		break
	}
	c.runs = t.runs[t.next:end:end]
	c.size.regions = len(c.runs)
	return c
}

// issue accounts for c going into lane r. Called with mu held.
func (d *dispatcher) issue(c *chunk, r *laneRunner, passes bool) {
	t := c.t
	c.lane = r
	r.depth++
	r.submitting = true
	d.window = d.window.plus(c.size)
	d.stats.InFlightBytesMax = max(d.stats.InFlightBytesMax, d.window.bytes)
	d.stats.InFlightRunsMax = max(d.stats.InFlightRunsMax, d.window.regions)
	d.stats.Chunks++
	d.stats.Runs += int64(len(c.runs))
	if passes {
		d.passed++
	} else {
		d.passed = 0
	}
	t.inFlight = append(t.inFlight, c)
	t.next += len(c.runs)
	if t.next == len(t.runs) {
		d.dequeue(t)
		t.stage = issued
	}
	d.cond.Broadcast() // the turn has passed on
}

// landed takes the verdict on a chunk that was in flight.
func (d *dispatcher) landed(c *chunk, v verdict, err error) {
	t := c.t
	d.mu.Lock()
	if v != unproven { // otherwise it stays in flight, and its transfer in quarantine
		c.lane.depth--
		if c.abandoned {
			c.lane.stuck--
		} else {
			d.window = d.window.minus(c.size)
		}
		if v == copied {
			d.stats.CopiedBytes[t.direction-1] += c.size.bytes
		} else {
			t.fail(err)
		}
		t.inFlight = slices.DeleteFunc(t.inFlight, func(o *chunk) bool { return o == c })
		t.finish()
		d.cond.Broadcast()
	}
	t.unlock()
	if v == unproven || errors.Is(err, ErrDeviceLost) {
		d.lose(err)
	}
}

// partial notes that only a part of c was started: its transfer fails once that part is at rest.
func (d *dispatcher) partial(c *chunk, err error) {
	d.mu.Lock()
	c.t.fail(err)
	c.t.unlock()
	if errors.Is(err, ErrDeviceLost) {
		d.lose(err)
	}
}

// lose marks the device as lost, fails what is admitted and refuses what comes. The first reason stays.
func (d *dispatcher) lose(err error) {
	d.mu.Lock()
	if d.lost != nil {
		d.mu.Unlock()
		return
	}
	if err == nil || !errors.Is(err, ErrDeviceLost) {
		err = fmt.Errorf("gpu: device %d: copies not proven finished: %v: %w", d.index, err, ErrDeviceLost)
	}
	d.lost = err
	d.budget.shut(err)
	all := make([]*Transfer, 0, len(d.active))
	for t := range d.active {
		all = append(all, t)
	}
	d.stats.Lost = true
	d.cond.Broadcast()
	d.mu.Unlock()

	d.e.log.Error("gpu device lost", "device", d.index, "transfers", len(all), "reason", err)
	for _, t := range all {
		t.end(err)
		d.mu.Lock()
		stays := !t.released
		d.mu.Unlock()
		if stays {
			t.wake(err)
		}
	}
	d.mu.Lock()
	d.signalIdle()
	d.mu.Unlock()
}

func (d *dispatcher) isLost() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.lost != nil
}

// quarantine gives up the chunks of t that are in flight: they count no longer against the window, and the lanes they
// lie in get nothing more until they are at rest. Called with mu held.
func (d *dispatcher) quarantine(t *Transfer) {
	for _, c := range t.inFlight {
		c.abandoned = true
		c.lane.stuck++
		d.window = d.window.minus(c.size)
	}
	d.stats.Quarantined++
	d.stats.QuarantinedBytes += t.cost.bytes
	d.cond.Broadcast()
}

// forget drops t, which has been released.
func (d *dispatcher) forget(t *Transfer, fromQuarantine bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if fromQuarantine {
		d.stats.Quarantined--
		d.stats.QuarantinedBytes -= t.cost.bytes
	}
	delete(d.active, t)
	if len(d.active) == 0 {
		d.cond.Broadcast()
		d.signalIdle()
	}
}

// signalIdle tells drain that there is nothing more to wait for. Called with mu held.
func (d *dispatcher) signalIdle() {
	if d.idle != nil {
		close(d.idle)
		d.idle = nil
	}
}

// count books the outcome of t. Called with mu held.
func (d *dispatcher) count(t *Transfer) {
	switch {
	case t.err == nil:
		d.stats.Completed++
	case errors.Is(t.err, ErrCanceled):
		d.stats.Canceled++
	case errors.Is(t.err, ErrDeadline):
		d.stats.Expired++
	default:
		d.stats.Failed++
	}
}

// drain ends the dispatcher: nothing more is admitted, and what is has until ctx ends to settle in its own time. Then
// it is ended by force, in quarantine where copies are in flight. It reports what is left there; with nothing left, the
// lanes and the memory taken are closed and the device is given back. It may be called again, one call at a time.
func (d *dispatcher) drain(ctx context.Context) (left load, err error) {
	d.budget.shut(errClosed)
	idle := make(chan struct{})
	d.mu.Lock()
	d.ending = true
	d.cond.Broadcast()
	d.idle = idle
	if len(d.active) == 0 || d.lost != nil {
		d.signalIdle()
	}
	d.mu.Unlock()

	if !ends(ctx, idle) {
		d.mu.Lock()
		all := slices.Collect(maps.Keys(d.active))
		d.mu.Unlock()
		for _, t := range all {
			t.end(errClosed)
		}
	}
	d.mu.Lock()
	for t := range d.active {
		if !t.released {
			left = left.plus(t.cost)
		}
	}
	lost := d.lost != nil
	d.mu.Unlock()
	if left.transfers > 0 {
		if lost {
			d.dev.close(false)
		}
		return left, nil
	}
	d.running.Wait()
	for _, r := range d.lanes {
		r.lane.close()
	}
	d.lanes = nil
	d.mu.Lock()
	taken := slices.Collect(maps.Keys(d.taken))
	d.mu.Unlock()
	for _, m := range taken {
		err = combined(err, m.Close())
	}
	d.dev.close(true)
	return left, err
}
