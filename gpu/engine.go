package gpu

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/holdfast-db/holdfast/txn"
)

var errClosed = fmt.Errorf("gpu: engine: %w", txn.ErrClosed)

// Engine copies between devices and host memory. Its methods may be called from any goroutine.
//
// It holds one dispatcher for each device that has been used, which holds everything about that device; what the
// devices share is only the pinned host memory. So a device that is lost, stuck or slow costs the others nothing.
type Engine struct {
	backend  Backend
	infos    []DeviceInfo
	limits   Limits
	deadline time.Duration
	log      *slog.Logger
	pinned   ledger
	pinPiece int // bytes; pinPiece but in tests

	mu          sync.Mutex
	dispatchers []*dispatcher // by device; nil until it is first used
	openings    []*opening    // by device; not nil while it is being opened
	pins        map[*Pinned]struct{}
	closing     bool          // nothing begins any more
	calls       int           // that began before and may be about to take something
	quiet       chan struct{} // closed when closing and calls is 0

	closer chan struct{} // holds a token while Close runs
	closed bool          // the backend has been closed; guarded by closer
}

// Open makes an engine over b, which it owns from now on, also when it returns an error. Devices are opened when they
// are first used, since opening one costs device memory.
func Open(b Backend, o Options) (*Engine, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, combined(err, b.close())
	}
	infos := b.Devices()
	return &Engine{
		backend: b, infos: infos, limits: o.Limits, deadline: o.Deadline, log: o.Logger,
		dispatchers: make([]*dispatcher, len(infos)), openings: make([]*opening, len(infos)), pins: map[*Pinned]struct{}{},
		quiet: make(chan struct{}), closer: make(chan struct{}, 1), pinPiece: pinPiece,
	}, nil
}

// Backend gives the backend the engine was opened with.
func (e *Engine) Backend() Backend { return e.backend }

// MustPin reports whether host memory has to be pinned before it is copied from or to.
func (e *Engine) MustPin() bool { return e.backend.mustPin() }

// Devices describes the devices; Batch.Device is an index into it.
func (e *Engine) Devices() []DeviceInfo { return e.infos }

// DeviceByUUID gives the number of the device with this identity, or ErrNotFound.
func (e *Engine) DeviceByUUID(uuid [16]byte) (int, error) {
	for i, d := range e.infos {
		if d.UUID == uuid {
			return i, nil
		}
	}
	return 0, fmt.Errorf("gpu: device %x: %w", uuid, txn.ErrNotFound)
}

// opening is a device being opened. It has a goroutine of its own, because a driver may hang in it and those who want the
// device wait only until their deadline.
type opening struct {
	done chan struct{}
	d    *dispatcher
	err  error
}

// dispatcher gives the dispatcher of a device and opens the device if this is its first use. Called between begin and its
// end.
func (e *Engine) dispatcher(ctx context.Context, index int) (*dispatcher, error) {
	if index < 0 || index >= len(e.infos) {
		return nil, fmt.Errorf("gpu: device %d: there are %d: %w", index, len(e.infos), txn.ErrInvalid)
	}
	e.mu.Lock()
	d, o := e.dispatchers[index], e.openings[index]
	if d == nil && o == nil {
		o = &opening{done: make(chan struct{})}
		e.openings[index] = o
		go e.openDevice(index, o)
	}
	e.mu.Unlock()
	if d != nil {
		return d, nil
	}
	if !ends(ctx, o.done) {
		return nil, fmt.Errorf("gpu: device %d is still being opened: %w: %w", index, ctx.Err(), txn.ErrBusy)
	}
	return o.d, o.err
}

func (e *Engine) openDevice(index int, o *opening) {
	dev, err := e.backend.open(index, e.limits)
	if err != nil {
		o.err = fmt.Errorf("gpu: open device %d (%s): %w", index, e.infos[index].Name, classified(err))
	} else if o.d, o.err = newDispatcher(e, index, dev); o.err != nil {
		dev.close(!errors.Is(o.err, ErrDeviceLost))
	}
	e.mu.Lock()
	e.dispatchers[index], e.openings[index] = o.d, nil
	e.mu.Unlock()
	close(o.done)
}

// pending gives a device that is being opened, if there is one.
func (e *Engine) pending() *opening {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, o := range e.openings {
		if o != nil {
			return o
		}
	}
	return nil
}

// begin enters a call that may take something which Close gives back, unless Close has begun.
func (e *Engine) begin() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closing {
		return errClosed
	}
	e.calls++
	return nil
}

func (e *Engine) end() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.calls--
	if e.closing && e.calls == 0 {
		close(e.quiet)
	}
}

// Submit checks b, waits for room in the device's budget, and starts it. When ctx ends, the wait ends with ErrBusy, or
// the transfer, if it was admitted, is canceled as by Cancel.
//
// It fails, with nothing moved and no callback called, with ErrInvalid or ErrTooLarge for a batch that breaks a rule,
// ErrBusy when there was no room by the deadline, ErrDeviceLost, or ErrClosed.
func (e *Engine) Submit(ctx context.Context, b Batch) (*Transfer, error) {
	if err := e.begin(); err != nil {
		return nil, err
	}
	defer e.end()
	if b.Deadline.IsZero() {
		b.Deadline = time.Now().Add(e.deadline)
	}
	waiting, stop := context.WithDeadline(ctx, b.Deadline)
	defer stop()
	d, err := e.dispatcher(waiting, b.Device)
	if err != nil {
		return nil, err
	}
	if b.Priority == ByDirection {
		b.Priority = Foreground
		if b.Direction == Store {
			b.Priority = Background
		}
	}
	runs, bytes, err := plan(&b, e.limits, e.pinned.view(), e.backend.mustPin())
	if err != nil {
		return nil, err
	}
	// A failed or never admitted transfer gives back, in any case, what it has taken so far.
	var undo []func()
	defer func() {
		for _, f := range undo {
			f()
		}
	}()
	pins, bare := e.pinned.hold(runs, run.hostAddress, e.backend.mustPin())
	if bare != nil {
		return nil, fmt.Errorf("gpu: host bytes %d at %#x are not pinned: %w", bare.bytes, bare.hostAddress(), txn.ErrInvalid)
	}
	undo = append(undo, func() { e.pinned.drop(pins) })
	memory, _ := d.memory.hold(runs, func(r run) uint64 { return r.device }, false)
	undo = append(undo, func() { d.memory.drop(memory) })
	order, err := e.capture(d, b.After)
	if err != nil {
		return nil, err
	}
	if order != nil {
		undo = append(undo, order.release)
	}

	cost := load{transfers: 1, regions: len(b.Regions), bytes: bytes}
	if err := d.budget.take(waiting, cost, b.Priority, b.NoWait); err != nil {
		return nil, err
	}
	undo = append(undo, func() { d.budget.give(cost) })
	t := &Transfer{
		d: d, direction: b.Direction, priority: b.Priority, cost: cost,
		onRelease: b.Released, onQuarantine: b.Quarantined,
		done: make(chan struct{}), free: make(chan struct{}),
		stage: gated, runs: runs, gate: order, pins: pins, memory: memory,
	}
	if err := d.admit(t, b.Deadline); err != nil {
		return nil, err
	}
	undo = nil
	t.bind(ctx)
	if order == nil {
		d.ready(t, nil)
	} else {
		order.watch(func(err error) { d.ready(t, err) })
	}
	return t, nil
}

// bind cancels t when ctx ends.
func (t *Transfer) bind(ctx context.Context) {
	if ctx.Done() == nil {
		return
	}
	unbind := context.AfterFunc(ctx, t.Cancel)
	t.d.mu.Lock()
	defer t.d.mu.Unlock()
	if t.stage == settled {
		unbind()
		return
	}
	t.unbind = unbind
}

// capture turns an order into gates at this moment; nil if there is nothing to wait for.
func (e *Engine) capture(d *dispatcher, o Order) (gate, error) {
	var all gates
	if o.Transfer != nil {
		if o.Transfer.d.e != e {
			return nil, fmt.Errorf("gpu: ordered after a transfer of another engine: %w", txn.ErrInvalid)
		}
		all = append(all, &transferGate{after: o.Transfer})
	}
	if o.Stream != 0 || o.Event != 0 {
		g, err := d.dev.gate(o)
		if err != nil {
			return nil, fmt.Errorf("gpu: order after stream %#x and event %#x on device %d: %w", o.Stream, o.Event, d.index, classified(err))
		}
		if g != nil {
			all = append(all, g)
		}
	}
	switch len(all) {
	case 0:
		return nil, nil
	case 1:
		return all[0], nil
	}
	return all, nil
}

// gates are passed when all of them are, one after the other.
type gates []gate

func (g gates) watch(f func(error)) {
	if len(g) == 0 {
		f(nil)
		return
	}
	g[0].watch(func(err error) {
		if err != nil {
			f(err)
			return
		}
		g[1:].watch(f)
	})
}

func (g gates) release() {
	for _, one := range g {
		one.release()
	}
}

// Close stops admission and lets what was admitted go on until ctx ends; then it settles the rest with ErrClosed. If
// copies are then not proven finished, it returns an error that says how many transfers and bytes stay in quarantine,
// wrapping ErrBusy, or ErrDeviceLost if that is why; their memory, the lanes they are in, and every pinned range with
// users stay as they are, and Close may be called again to wait further. Otherwise everything is given back, including
// memory that is still pinned, allocated or imported.
func (e *Engine) Close(ctx context.Context) error {
	select {
	case e.closer <- struct{}{}:
		defer func() { <-e.closer }()
	case <-ctx.Done():
		return fmt.Errorf("gpu: close: another call is at it: %w: %w", ctx.Err(), txn.ErrBusy)
	}
	if e.closed {
		return nil
	}
	e.mu.Lock()
	if !e.closing && e.calls == 0 {
		close(e.quiet)
	}
	e.closing = true
	e.mu.Unlock()
	for o := e.pending(); o != nil; o = e.pending() {
		if !ends(ctx, o.done) {
			return fmt.Errorf("gpu: close: a device is still being opened: %w: %w", ctx.Err(), txn.ErrBusy)
		}
	}
	for _, d := range e.opened() {
		d.budget.shut(errClosed)
	}
	if !ends(ctx, e.quiet) { // those that wait for room have been refused; the others end unless the driver hangs
		return fmt.Errorf("gpu: close: calls are in progress: %w: %w", ctx.Err(), txn.ErrBusy)
	}
	var failures []error
	for i, d := range e.opened() { // ctx is common to all, so one after the other takes no longer than the slowest
		left, err := d.drain(ctx)
		if left.transfers == 0 {
			failures = append(failures, err)
			e.mu.Lock()
			e.dispatchers[i] = nil
			e.mu.Unlock()
			continue
		}
		class := txn.ErrBusy
		if d.isLost() {
			class = ErrDeviceLost
		}
		failures = append(failures, fmt.Errorf("gpu: close device %d: %d transfers of %d bytes stay in quarantine: %w", i, left.transfers, left.bytes, class))
	}
	if len(e.opened()) > 0 {
		return combined(failures...)
	}
	for _, p := range e.allPinned() {
		failures = append(failures, p.Unpin())
	}
	failures = append(failures, e.backend.close())
	e.closed = true
	return combined(failures...)
}

// ends waits for c to be closed, and reports false if ctx ended before.
func ends(ctx context.Context, c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
	}
	select {
	case <-c:
		return true
	case <-ctx.Done():
		return false
	}
}

// opened gives the dispatchers by device.
func (e *Engine) opened() map[int]*dispatcher {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := map[int]*dispatcher{}
	for i, d := range e.dispatchers {
		if d != nil {
			all[i] = d
		}
	}
	return all
}
