package gpu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// machine is what a backend under test drives, with the hands of a test on it. The conformance suite is written against
// it, so that every backend has to pass the same tests.
type machine interface {
	engine() *Engine
	// alloc gives device memory that is filled with poison.
	alloc(t testing.TB, device int, bytes int) uint64
	// poke and peek reach device memory past the engine.
	poke(t testing.TB, device int, address uint64, b []byte)
	peek(t testing.TB, device int, address uint64, b []byte)
	// hold keeps copies from moving bytes until letGo.
	hold()
	letGo()
	// failCall makes the k-th call that the backend makes from now on fail, without harm to the device; calls counts them.
	failCall(k int)
	calls() int
	// lose makes copies on the device fail from now on in the way that a device does not come back from.
	lose(device int)
	// newStream makes a stream of the caller.
	newStream(t testing.TB, device int) testStream
	// verify checks what the machine has seen: rules of the driver that were broken.
	verify(t testing.TB)
}

// testStream is a stream of the caller on which work waits until start.
type testStream interface {
	handle() uintptr
	fill(address uint64, bytes int, value byte)
	start()
	close()
}

const poison = 0xA5

// rig makes machines.
type rig struct {
	name  string
	host  bool // the host backend
	hands bool // its machines can hold, fail and lose
	// open starts a machine, with two devices unless it is real. It is closed, and verified, at the end of the test.
	open func(t testing.TB, o Options) machine
}

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

// closeEngine ends a machine in which every copy can end.
func closeEngine(t testing.TB, e *Engine) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	require.NoError(t, e.Close(ctx))
}

// hostMachine is the host backend with faults.
type hostMachine struct {
	e    *Engine
	host *Host

	count  atomic.Int64
	failAt atomic.Int64
	lost   [2]atomic.Bool

	mu   sync.Mutex
	held chan struct{} // copies wait for it to be closed; nil if they need not
}

var errInjected = errors.New("injected failure")

func (m *hostMachine) fault(c HostCall) error {
	if c.Op == HostCopy {
		m.mu.Lock()
		held := m.held
		m.mu.Unlock()
		if held != nil {
			<-held
		}
		if m.lost[c.Device].Load() {
			return fmt.Errorf("device %d fell off the bus: %w", c.Device, ErrDeviceLost)
		}
	}
	if n := m.count.Add(1); n == m.failAt.Load() {
		return errInjected
	}
	return nil
}

func hostRig(name string, seed uint64) rig {
	return rig{name: name, host: true, hands: true, open: func(t testing.TB, o Options) machine {
		m := &hostMachine{}
		h, err := NewHost(HostOptions{Devices: 2, Seed: seed, Fault: m.fault})
		require.NoError(t, err)
		m.host = h
		if o.Logger == nil {
			o.Logger = quiet
		}
		m.e, err = Open(h, o)
		require.NoError(t, err)
		t.Cleanup(func() {
			m.letGo()
			if !m.lost[0].Load() && !m.lost[1].Load() {
				closeEngine(t, m.e)
				return
			}
			_ = m.e.Close(t.Context()) // what is lost stays; its goroutines have ended
		})
		return m
	}}
}

func (m *hostMachine) engine() *Engine { return m.e }

func (m *hostMachine) alloc(t testing.TB, device, n int) uint64 {
	a, err := m.host.Expose(device, bytes.Repeat([]byte{poison}, n))
	require.NoError(t, err)
	return a
}

func (m *hostMachine) poke(t testing.TB, device int, address uint64, b []byte) {
	mem, err := m.host.devices[device].memory.slice(address, int64(len(b)))
	require.NoError(t, err)
	copy(mem, b)
}

func (m *hostMachine) peek(t testing.TB, device int, address uint64, b []byte) {
	mem, err := m.host.devices[device].memory.slice(address, int64(len(b)))
	require.NoError(t, err)
	copy(b, mem)
}

func (m *hostMachine) hold() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.held == nil {
		m.held = make(chan struct{})
	}
}

func (m *hostMachine) letGo() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.held != nil {
		close(m.held)
		m.held = nil
	}
}

func (m *hostMachine) failCall(k int)      { m.failAt.Store(m.count.Load() + int64(k)) }
func (m *hostMachine) calls() int          { return int(m.count.Load()) }
func (m *hostMachine) lose(device int)     { m.lost[device].Store(true) }
func (m *hostMachine) verify(t testing.TB) {}

type hostTestStream struct {
	m       *hostMachine
	device  int
	s       *HostStream
	started chan struct{}
	once    sync.Once
}

func (m *hostMachine) newStream(t testing.TB, device int) testStream {
	s := &hostTestStream{m: m, device: device, s: m.host.NewStream(), started: make(chan struct{})}
	s.s.Do(func() { <-s.started })
	return s
}

func (s *hostTestStream) handle() uintptr { return s.s.Handle() }
func (s *hostTestStream) start()          { s.once.Do(func() { close(s.started) }) }

func (s *hostTestStream) close() {
	s.start()
	s.s.Close()
}

func (s *hostTestStream) fill(address uint64, bytes int, value byte) {
	s.s.Do(func() {
		mem, err := s.m.host.devices[s.device].memory.slice(address, int64(bytes))
		if err != nil {
			panic(err)
		}
		for i := range mem {
			mem[i] = value
		}
	})
}
