//go:build cgo && linux

package gpu

import (
	"slices"
	"sync"
	"time"

	"github.com/holdfast-db/holdfast/gpu/internal/driver"
)

// cudaGate is an event of the caller, or one of ours that was recorded on a stream of the caller.
type cudaGate struct {
	w     *gateWatcher
	event uintptr
	ours  bool
	f     func(error)
	gone  bool // guarded by w.mu
}

// gateWatcher asks, for all gates of a device at once, whether their events have happened: some 20 µs after the last
// change, then ever more rarely, up to every millisecond. It asks because the driver tells only threads that wait for one
// event each; a thread per gate is not bounded, a few threads for all would let one hung producer hold up
// the orders of the others, and either could not be closed while a producer hangs.
type gateWatcher struct {
	ctx *driver.Context

	mu      sync.Mutex
	gates   []*cudaGate
	free    []uintptr // events that were recorded and can be again
	running bool
	closed  bool
	wake    chan struct{} // tells a running watch about a new gate, or the end
	end     sync.WaitGroup
}

const (
	gatePollMin = 20 * time.Microsecond
	gatePollMax = time.Millisecond
)

func (d *cudaDevice) gate(o Order) (gate, error) {
	var all gates
	if o.Stream != 0 {
		g, err := d.gates.capture(o.Stream)
		if err != nil {
			return nil, driverError(err)
		}
		all = append(all, g)
	}
	if o.Event != 0 {
		all = append(all, &cudaGate{w: &d.gates, event: o.Event})
	}
	return all, nil
}

// capture records an event on a stream.
func (w *gateWatcher) capture(stream uintptr) (*cudaGate, error) {
	w.mu.Lock()
	var event uintptr
	if n := len(w.free); n > 0 {
		event = w.free[n-1]
		w.free = w.free[:n-1]
	}
	w.mu.Unlock()
	if event == 0 {
		e, err := w.ctx.Event()
		if err != nil {
			return nil, err
		}
		event = e
	}
	g := &cudaGate{w: w, event: event, ours: true}
	if err := w.ctx.EventRecord(event, stream); err != nil {
		g.release()
		return nil, err
	}
	return g, nil
}

func (g *cudaGate) watch(f func(error)) {
	w := g.w
	w.mu.Lock()
	defer w.mu.Unlock()
	if g.gone {
		return
	}
	g.f = f
	w.gates = append(w.gates, g)
	if !w.running {
		w.running = true
		w.wake = make(chan struct{}, 1)
		w.end.Go(w.run)
	}
	w.poke()
}

// poke makes a running watch look at once. Called with mu held.
func (w *gateWatcher) poke() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

func (g *cudaGate) release() {
	w := g.w
	w.mu.Lock()
	defer w.mu.Unlock()
	if g.gone {
		return
	}
	g.gone = true
	w.gates = slices.DeleteFunc(w.gates, func(o *cudaGate) bool { return o == g })
	if g.ours {
		// It may not have happened yet; recording it again is allowed all the same.
		w.free = append(w.free, g.event)
	}
}

// run watches until there is nothing to watch.
func (w *gateWatcher) run() {
	wait := gatePollMin
	timer := time.NewTimer(0)
	defer timer.Stop()
	var events []uintptr
	var results []driver.Code
	for {
		w.mu.Lock()
		if len(w.gates) == 0 || w.closed {
			w.running = false
			w.mu.Unlock()
			return
		}
		gates := slices.Clone(w.gates)
		events = events[:0]
		for _, g := range gates {
			events = append(events, g.event)
		}
		results = slices.Grow(results[:0], len(gates))[:len(gates)]
		err := w.ctx.EventQuery(events, results) // under mu, so that no event is released meanwhile
		var over []*cudaGate
		for i, g := range gates {
			if err != nil || results[i] != driver.NotReady {
				over = append(over, g)
			}
		}
		w.gates = slices.DeleteFunc(w.gates, func(g *cudaGate) bool { return slices.Contains(over, g) })
		w.mu.Unlock()

		for i, g := range gates {
			switch {
			case err != nil:
				g.f(driverError(err))
			case results[i] == 0:
				g.f(nil)
			case results[i] != driver.NotReady:
				g.f(driverError(results[i]))
			}
		}
		if len(over) > 0 {
			wait = gatePollMin
			continue
		}
		timer.Reset(wait)
		select {
		case <-timer.C:
			wait = min(2*wait, gatePollMax)
		case <-w.wake:
			wait = gatePollMin
		}
	}
}

// close ends the watch and, if the device is well, gives the events back.
func (w *gateWatcher) close(drained bool) {
	w.mu.Lock()
	w.closed = true
	if w.running {
		w.poke()
	}
	w.mu.Unlock()
	w.end.Wait()
	if drained {
		for _, e := range w.free {
			_ = w.ctx.EventDestroy(e)
		}
	}
	w.free = nil
}
