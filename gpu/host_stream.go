package gpu

import (
	"fmt"
	"sync"

	"github.com/holdfast-db/holdfast/txn"
)

// HostEvent is something that happens once: what a CUDA event is to a device.
type HostEvent struct {
	host   *Host
	handle uintptr

	mu      sync.Mutex
	over    bool
	err     error
	watches map[*hostGate]func(error)
}

// NewEvent makes an event that has not happened.
func (h *Host) NewEvent() *HostEvent {
	e := newHostEvent()
	e.host = h
	e.handle = h.register(e)
	return e
}

func newHostEvent() *HostEvent { return &HostEvent{watches: map[*hostGate]func(error){}} }

// Handle names the event in Order.Event.
func (e *HostEvent) Handle() uintptr { return e.handle }

// Signal makes the event happen, with nil, or with why what it stands for failed. Only the first call counts.
func (e *HostEvent) Signal(err error) {
	e.mu.Lock()
	if e.over {
		e.mu.Unlock()
		return
	}
	e.over, e.err = true, err
	watches := e.watches
	e.watches = nil
	e.mu.Unlock()
	for _, f := range watches {
		f(err)
	}
}

// Close forgets the handle.
func (e *HostEvent) Close() { e.host.unregister(e.handle) }

func (e *HostEvent) mark() *HostEvent { return e }

// HostStream runs functions one after the other on a goroutine: what a CUDA stream is to a device.
type HostStream struct {
	host   *Host
	handle uintptr
	ended  chan struct{}

	mu     sync.Mutex
	work   sync.Cond
	queue  []func()
	closed bool
}

// NewStream makes a stream. Close ends it.
func (h *Host) NewStream() *HostStream {
	s := &HostStream{host: h, ended: make(chan struct{})}
	s.work.L = &s.mu
	s.handle = h.register(s)
	go s.run()
	return s
}

// Handle names the stream in Order.Stream.
func (s *HostStream) Handle() uintptr { return s.handle }

// Do queues f.
func (s *HostStream) Do(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.queue = append(s.queue, f)
	s.work.Signal()
}

// Close waits for what is queued and ends the stream.
func (s *HostStream) Close() {
	s.host.unregister(s.handle)
	s.mu.Lock()
	s.closed = true
	s.work.Signal()
	s.mu.Unlock()
	<-s.ended
}

func (s *HostStream) mark() *HostEvent {
	e := newHostEvent()
	s.Do(func() { e.Signal(nil) })
	return e
}

func (s *HostStream) run() {
	defer close(s.ended)
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		for len(s.queue) == 0 {
			if s.closed {
				return
			}
			s.work.Wait()
		}
		f := s.queue[0]
		s.queue = s.queue[1:]
		s.mu.Unlock()
		f()
		s.mu.Lock()
	}
}

func (h *Host) register(o hostOrder) uintptr {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.last++
	h.handles[h.last] = o
	return h.last
}

func (h *Host) unregister(handle uintptr) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.handles, handle)
}

func (d *hostDevice) gate(o Order) (gate, error) {
	if err := d.host.fault(HostCall{Op: HostGate, Device: d.index}); err != nil {
		return nil, err
	}
	var all gates
	for _, handle := range []uintptr{o.Stream, o.Event} {
		if handle == 0 {
			continue
		}
		d.host.mu.Lock()
		order := d.host.handles[handle]
		d.host.mu.Unlock()
		if order == nil {
			return nil, fmt.Errorf("no stream or event %#x: %w", handle, txn.ErrInvalid)
		}
		all = append(all, &hostGate{event: order.mark()})
	}
	return all, nil
}

// hostGate waits for one event.
type hostGate struct {
	event *HostEvent
	gone  bool // guarded by event.mu
}

func (g *hostGate) watch(f func(error)) {
	e := g.event
	e.mu.Lock()
	switch {
	case g.gone:
		e.mu.Unlock()
	case e.over:
		e.mu.Unlock()
		f(e.err)
	default:
		e.watches[g] = f
		e.mu.Unlock()
	}
}

func (g *hostGate) release() {
	g.event.mu.Lock()
	defer g.event.mu.Unlock()
	g.gone = true
	delete(g.event.watches, g)
}
