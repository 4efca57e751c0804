//go:build cgo && linux

package gpu

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/gpu/internal/driver"
	"github.com/holdfast-db/holdfast/gpu/internal/fakecuda"
)

func init() {
	rigs = append(rigs, func() (rig, bool) { return fakeRig(CUDAOptions{KernelBytes: -1}, nil), deviceLibrary() == "" })
}

// fakeObject compiles the fake driver once for all tests.
var fakeObject = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "fakecuda")
	if err != nil {
		return "", err
	}
	cleanups = append(cleanups, func() { _ = os.RemoveAll(dir) })
	return fakecuda.Compile(dir)
})

// fakeLibrary is the fake driver with all its functions.
var fakeLibrary = sync.OnceValues(func() (string, error) {
	object, err := fakeObject()
	if err != nil {
		return "", err
	}
	library := filepath.Join(filepath.Dir(object), "libcuda.so.1")
	return library, fakecuda.Link(object, library)
})

// fakes are installed drivers that nobody uses. They are used again, since one that was loaded stays for the life of the
// process.
var fakes struct {
	mu        sync.Mutex
	installed int
	idle      []fakeInstall
}

type fakeInstall struct {
	path    string
	control *fakecuda.Control
}

// installFake gives a fake driver to a test.
func installFake(t testing.TB) (string, *fakecuda.Control) {
	if _, err := fakecuda.Compiler(); err != nil {
		t.Skip("the fake CUDA driver is built by a C compiler: ", err)
	}
	library, err := fakeLibrary()
	require.NoError(t, err)
	fakes.mu.Lock()
	defer fakes.mu.Unlock()
	var f fakeInstall
	if n := len(fakes.idle); n > 0 {
		f = fakes.idle[n-1]
		fakes.idle = fakes.idle[:n-1]
		f.control.Reset()
	} else {
		fakes.installed++
		f.path = fmt.Sprintf("%s.%d", library, fakes.installed)
		f.control, err = fakecuda.Install(library, f.path)
		require.NoError(t, err)
	}
	t.Cleanup(func() {
		if f.control.Idle() {
			fakes.mu.Lock()
			defer fakes.mu.Unlock()
			fakes.idle = append(fakes.idle, f)
		}
	})
	return f.path, f.control
}

// fakeMachine is the unmodified CUDA backend on the fake driver.
type fakeMachine struct {
	e    *Engine
	b    *cuda
	c    *fakecuda.Control
	base uint64 // calls when counting began

	injected bool // a call was made to fail, so what it was to give back may be left
}

func fakeRig(o CUDAOptions, set func(*fakecuda.Control)) rig {
	return rig{name: "cuda on fake", hands: true, open: func(t testing.TB, engine Options) machine {
		path, c := installFake(t)
		c.DelayMicroseconds.Store(300)
		c.Seed.Store(1)
		if set != nil {
			set(c)
		}
		o.Library = path
		b, err := OpenCUDA(o)
		require.NoError(t, err)
		if engine.Logger == nil {
			engine.Logger = quiet
		}
		m := &fakeMachine{b: b.(*cuda), c: c}
		m.e, err = Open(b, engine)
		require.NoError(t, err)
		m.base = c.Calls.Load()
		t.Cleanup(func() {
			m.letGo()
			if c.Lost[0].Load()|c.Lost[1].Load() != 0 {
				_ = m.e.Close(t.Context())
				return
			}
			closeEngine(t, m.e)
			m.verify(t)
			if m.injected {
				return
			}
			for name, left := range map[string]uint64{
				"contexts": c.Contexts.Load(), "streams": c.Streams.Load(), "events": c.Events.Load(),
			} {
				require.Zero(t, left, "%s that were not given back", name)
			}
		})
		return m
	}}
}

func (m *fakeMachine) engine() *Engine { return m.e }

func (m *fakeMachine) ctx(t testing.TB, device int) *driver.Context {
	c, err := m.b.context(device)
	require.NoError(t, err)
	return c
}

// quietly does what a test does beside the engine, without a failure meant for the engine hitting it.
func (m *fakeMachine) quietly(f func()) {
	at := m.c.FailAt.Swap(0)
	before := m.c.Calls.Load()
	f()
	if at > before {
		at += m.c.Calls.Load() - before
	}
	m.c.FailAt.Store(at)
}

func (m *fakeMachine) alloc(t testing.TB, device, bytes int) (address uint64) {
	m.quietly(func() {
		a, err := m.ctx(t, device).Alloc(int64(bytes))
		require.NoError(t, err)
		address = a
	})
	return address
}

func (m *fakeMachine) poke(t testing.TB, device int, address uint64, b []byte) {
	m.quietly(func() { require.NoError(t, m.ctx(t, device).Copy(int(Load), address, b)) })
}

func (m *fakeMachine) peek(t testing.TB, device int, address uint64, b []byte) {
	m.quietly(func() { require.NoError(t, m.ctx(t, device).Copy(int(Store), address, b)) })
}

func (m *fakeMachine) hold()           { m.c.Hold.Store(1) }
func (m *fakeMachine) letGo()          { m.c.Hold.Store(0) }
func (m *fakeMachine) lose(device int) { m.c.Lost[device].Store(1) }
func (m *fakeMachine) calls() int      { return int(m.c.Calls.Load() - m.base) }

func (m *fakeMachine) failCall(k int) {
	if k > 0 {
		m.injected = true
		m.c.FailAt.Store(m.c.Calls.Load() + uint64(k))
	}
}

func (m *fakeMachine) verify(t testing.TB) {
	require.Zero(t, m.c.Violations.Load(), m.c.Violation())
}

// fakeStream is a stream of the caller; what is held on it are its fills, by their values.
type fakeStream struct {
	m      *fakeMachine
	t      testing.TB
	ctx    *driver.Context
	stream uintptr
	held   uint64
}

func (m *fakeMachine) newStream(t testing.TB, device int) testStream {
	ctx := m.ctx(t, device)
	s, err := ctx.Stream(false)
	require.NoError(t, err)
	return &fakeStream{m: m, t: t, ctx: ctx, stream: s}
}

func (s *fakeStream) handle() uintptr { return s.stream }

func (s *fakeStream) fill(address uint64, bytes int, value byte) {
	bit := uint64(1) << (value % 64)
	s.held |= bit
	s.m.c.HoldFills.Or(bit)
	require.NoError(s.t, s.ctx.Fill(s.stream, address, value, int64(bytes)))
}

func (s *fakeStream) start() {
	s.m.c.HoldFills.And(^s.held)
}

func (s *fakeStream) close() {
	s.start()
	require.NoError(s.t, s.ctx.StreamWait(s.stream))
	require.NoError(s.t, s.ctx.StreamDestroy(s.stream))
}
