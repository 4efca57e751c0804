package db

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// The introspection socket answers the questions of Inspector for a process that has the directory open, so that a person can look
// at a database in use. It is HTTP/1.1 over a unix socket, SocketName in the directory, permissions 0600:
//
//	POST /v1/NAME   body: the query as a JSON object, or nothing
//	200             the answer as JSON
//	other           {"class": "not found", "error": "…"}: the class is the text of an error class
//
// The names are those of socketMethods. Queries and answers are the JSON forms of the types of Inspector; fields are added and neither
// renamed nor removed while the path begins with /v1. There is nothing that changes the database. docs/command-line.md has examples.
//
// Everything is bounded: connections, questions answered at once, the size of a question, the entries of an answer (MaxInspectList) and
// the time that it may take. An answer waits for no writer and holds no lock over I/O, but what it reads costs the serving process
// time of one core.
const (
	// SocketName is the name of the introspection socket in the directory.
	SocketName = "SOCKET"
	// MaxSocketConnections bounds the connections to the introspection socket; one more waits to be accepted.
	MaxSocketConnections = 32
	// MaxSocketQuestions bounds the questions that are answered at once; one more waits its turn, and is ErrBusy when its time is over.
	MaxSocketQuestions = 4
	// MaxSocketRequestBytes bounds a question.
	MaxSocketRequestBytes = 32 << 20
	// MaxSocketAnswerBytes bounds what the client reads of an answer.
	MaxSocketAnswerBytes = 256 << 20
	// SocketTimeout bounds the time for one question, from its first byte to the last one of the answer.
	SocketTimeout = 30 * time.Second
	// socketPathMax is the longest path that the operating systems take for a socket.
	socketPathMax = 103
)

// socketMethods are the questions by name.
var socketMethods = map[string]func(ctx context.Context, i Inspector, q []byte) (any, error){
	"overview":   plain(Inspector.Overview),
	"namespaces": plain(Inspector.Namespaces),
	"list":       asked(Inspector.List),
	"resolve":    asked(Inspector.Resolve),
	"manifest":   asked(Inspector.Manifest),
	"log":        asked(Inspector.Log),
	"segments":   asked(Inspector.Segments),
	"index":      asked(Inspector.Index),
	"leases":     plain(Inspector.Leases),
	"activity":   plain(Inspector.Activity),
	"history":    asked(Inspector.History),
	"why":        asked(Inspector.Why),
}

func plain[R any](fn func(Inspector, context.Context) (R, error)) func(context.Context, Inspector, []byte) (any, error) {
	return func(ctx context.Context, i Inspector, _ []byte) (any, error) { return fn(i, ctx) }
}

func asked[Q, R any](fn func(Inspector, context.Context, Q) (R, error)) func(context.Context, Inspector, []byte) (any, error) {
	return func(ctx context.Context, i Inspector, b []byte) (any, error) {
		var q Q
		if len(bytes.TrimSpace(b)) > 0 {
			d := json.NewDecoder(bytes.NewReader(b))
			d.DisallowUnknownFields()
			if err := d.Decode(&q); err != nil {
				return nil, fmt.Errorf("db: question: %w: %w", ErrInvalid, err)
			}
		}
		return fn(i, ctx, q)
	}
}

// introspection is the socket while it is served.
type introspection struct {
	path   string
	info   fs.FileInfo // of the socket that we made
	server *http.Server
	turns  chan struct{}
	done   chan struct{}
}

// introspect serves the socket; nil if it cannot be made, which is warned of.
func (d *DB) introspect() *introspection {
	s := &introspection{path: d.dir.join(SocketName), turns: make(chan struct{}, MaxSocketQuestions), done: make(chan struct{})}
	l, err := s.listen()
	if err != nil {
		d.options.Logger.Warn("no introspection socket", "path", s.path, "error", err)
		return nil
	}
	s.server = &http.Server{
		Handler: s.handler(d.Inspector()), ReadHeaderTimeout: SocketTimeout, ReadTimeout: SocketTimeout, WriteTimeout: 2 * SocketTimeout,
		IdleTimeout: SocketTimeout, MaxHeaderBytes: 16 << 10, ErrorLog: nil,
	}
	go func() {
		defer close(s.done)
		if err := s.server.Serve(&boundedListener{Listener: l, room: make(chan struct{}, MaxSocketConnections), closed: make(chan struct{})}); !errors.Is(err, http.ErrServerClosed) {
			d.options.Logger.Warn("introspection socket ended", "path", s.path, "error", err)
		}
	}()
	return s
}

// listen makes the socket. One that a dead process left behind is removed: the lock of the directory is held, so nobody serves it.
// Anything else of that name is left alone.
func (s *introspection) listen() (net.Listener, error) {
	if info, err := os.Lstat(s.path); err == nil {
		if info.Mode()&fs.ModeSocket == 0 {
			return nil, fmt.Errorf("%s is there and is no socket: %w", s.path, ErrInvalid)
		}
		if err := os.Remove(s.path); err != nil {
			return nil, osError("remove", s.path, err)
		}
	}
	name, done, err := socketPath(s.path)
	if err != nil {
		return nil, err
	}
	defer done()
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		// The file is made with these permissions where the system takes them from the socket; elsewhere they are set below.
		return c.Control(func(fd uintptr) { _ = unix.Fchmod(int(fd), 0o600) })
	}}
	l, err := config.Listen(context.Background(), "unix", name)
	if err != nil {
		return nil, osError("listen on", s.path, err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false) // by its own name, which may not lead there any more
	if err = os.Chmod(s.path, 0o600); err == nil {
		s.info, err = os.Lstat(s.path)
	}
	if err != nil {
		return nil, errors.Join(osError("protect", s.path, err), l.Close())
	}
	return l, nil
}

// close ends the service and removes the socket, if it is still ours.
func (s *introspection) close() {
	if s == nil {
		return
	}
	_ = s.server.Close() // of connections that nobody waits for
	<-s.done
	if info, err := os.Lstat(s.path); err == nil && os.SameFile(info, s.info) {
		_ = os.Remove(s.path) // left behind it is removed by the next open
	}
}

func (s *introspection) handler(i Inspector) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), SocketTimeout)
		defer cancel()
		answer, err := s.answer(ctx, i, r)
		w.Header().Set("Content-Type", "application/json")
		if err != nil {
			w.WriteHeader(http.StatusUnprocessableEntity)
			answer = socketError{Class: classText(err), Error: err.Error()}
		}
		_ = json.NewEncoder(w).Encode(answer) // a client that is gone learns nothing
	})
}

func (s *introspection) answer(ctx context.Context, i Inspector, r *http.Request) (any, error) {
	name, ok := strings.CutPrefix(r.URL.Path, "/v1/")
	method := socketMethods[name]
	if !ok || method == nil {
		return nil, fmt.Errorf("db: question %.80q: %w", r.URL.Path, ErrUnsupported)
	}
	if r.Method != http.MethodPost {
		return nil, fmt.Errorf("db: %s of a question, want POST: %w", r.Method, ErrInvalid)
	}
	select {
	case s.turns <- struct{}{}:
		defer func() { <-s.turns }()
	case <-ctx.Done():
		return nil, fmt.Errorf("db: %d questions are being answered: %w", MaxSocketQuestions, ErrBusy)
	}
	q, err := io.ReadAll(io.LimitReader(r.Body, MaxSocketRequestBytes+1))
	if err != nil {
		return nil, fmt.Errorf("db: question: %w: %w", ErrIO, err)
	}
	if len(q) > MaxSocketRequestBytes {
		return nil, fmt.Errorf("db: question of more than %d bytes: %w", MaxSocketRequestBytes, ErrTooLarge)
	}
	return method(ctx, i, q)
}

// socketError is how an error crosses the socket.
type socketError struct {
	Class string `json:"class"`
	Error string `json:"error"`
}

func classText(err error) string {
	if errors.Is(err, ErrNotFound) {
		return ErrNotFound.Error()
	}
	if i := classOf(err); i > 0 {
		return errorClasses[i-1].Error()
	}
	return ErrIO.Error()
}

// err makes the error that it was of it.
func (e socketError) err() error {
	for _, c := range append(errorClasses[:], ErrNotFound) {
		if c.Error() == e.Class {
			return &distantError{text: e.Error, class: c}
		}
	}
	return &distantError{text: e.Error, class: ErrIO}
}

// distantError is an error of another process, under its own class.
type distantError struct {
	text  string
	class error
}

func (e *distantError) Error() string { return e.text }
func (e *distantError) Unwrap() error { return e.class }

// boundedListener accepts so many connections at once.
type boundedListener struct {
	net.Listener
	room   chan struct{}
	once   sync.Once
	closed chan struct{}
}

func (l *boundedListener) Accept() (net.Conn, error) {
	select {
	case l.room <- struct{}{}:
	case <-l.closed:
		return nil, net.ErrClosed
	}
	c, err := l.Listener.Accept()
	if err != nil {
		<-l.room
		return nil, err
	}
	return &boundedConn{Conn: c, room: l.room}, nil
}

func (l *boundedListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return l.Listener.Close()
}

type boundedConn struct {
	net.Conn
	room chan struct{}
	once sync.Once
}

func (c *boundedConn) Close() error {
	c.once.Do(func() { <-c.room })
	return c.Conn.Close()
}

// distantInspector asks the process that has the directory open.
type distantInspector struct {
	path   string
	client *http.Client
}

// dial connects to the socket of a directory. ErrNotFound if nobody serves one.
func dial(ctx context.Context, path string) (*distantInspector, error) {
	x := &distantInspector{path: filepath.Join(path, SocketName)}
	info, err := os.Lstat(x.path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("db: %s: %w: %w", x.path, ErrNotFound, err)
	case err != nil:
		return nil, osError("look at", x.path, err)
	case info.Mode()&fs.ModeSocket == 0:
		return nil, fmt.Errorf("db: %s is no socket: %w", x.path, ErrNotFound)
	}
	x.client = &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			name, done, err := socketPath(x.path)
			if err != nil {
				return nil, err
			}
			defer done()
			var d net.Dialer
			return d.DialContext(ctx, "unix", name)
		},
		MaxIdleConns: 1, IdleConnTimeout: SocketTimeout / 2, DisableCompression: true,
	}}
	c, err := x.client.Transport.(*http.Transport).DialContext(ctx, "unix", "")
	if errors.Is(err, fs.ErrPermission) {
		return nil, osError("connect to", x.path, err)
	}
	if err != nil {
		return nil, fmt.Errorf("db: %s: nobody answers: %w: %w", x.path, ErrNotFound, err)
	}
	return x, c.Close()
}

// socketCall asks one question. It is a function because methods have no type parameters.
func socketCall[R any](ctx context.Context, x *distantInspector, name string, q any) (r R, err error) {
	b, err := json.Marshal(q)
	if err != nil {
		return r, fmt.Errorf("db: question %s: %w: %w", name, ErrInvalid, err)
	}
	ctx, cancel := context.WithTimeout(ctx, 2*SocketTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://holdfast/v1/"+name, bytes.NewReader(b))
	if err != nil {
		return r, fmt.Errorf("db: question %s: %w: %w", name, ErrInvalid, err)
	}
	response, err := x.client.Do(request)
	if err != nil {
		class := ErrIO
		if ctx.Err() != nil {
			class = ErrBusy
		}
		return r, fmt.Errorf("db: %s: question %s: %w: %w", x.path, name, class, err)
	}
	defer response.Body.Close()
	d := json.NewDecoder(io.LimitReader(response.Body, MaxSocketAnswerBytes))
	if response.StatusCode != http.StatusOK {
		var e socketError
		if err := d.Decode(&e); err != nil {
			return r, fmt.Errorf("db: %s: question %s: status %d: %w", x.path, name, response.StatusCode, ErrIO)
		}
		return r, e.err()
	}
	if err := d.Decode(&r); err != nil {
		return r, fmt.Errorf("db: %s: answer to %s: %w: %w", x.path, name, ErrIO, err)
	}
	return r, nil
}

func (x *distantInspector) Overview(ctx context.Context) (*Overview, error) {
	return socketCall[*Overview](ctx, x, "overview", nil)
}

func (x *distantInspector) Namespaces(ctx context.Context) ([]NamespaceInfo, error) {
	return socketCall[[]NamespaceInfo](ctx, x, "namespaces", nil)
}

func (x *distantInspector) List(ctx context.Context, q ListQuery) (*CheckpointList, error) {
	return socketCall[*CheckpointList](ctx, x, "list", q)
}

func (x *distantInspector) Resolve(ctx context.Context, hex string) ([]Generation, error) {
	return socketCall[[]Generation](ctx, x, "resolve", hex)
}

func (x *distantInspector) Manifest(ctx context.Context, q ManifestQuery) (*ManifestInfo, error) {
	return socketCall[*ManifestInfo](ctx, x, "manifest", q)
}

func (x *distantInspector) Log(ctx context.Context, q LogQuery) (*LogInfo, error) {
	return socketCall[*LogInfo](ctx, x, "log", q)
}

func (x *distantInspector) Segments(ctx context.Context, q SegmentQuery) (*SegmentMap, error) {
	return socketCall[*SegmentMap](ctx, x, "segments", q)
}

func (x *distantInspector) Index(ctx context.Context, q IndexQuery) (*IndexInfo, error) {
	return socketCall[*IndexInfo](ctx, x, "index", q)
}

func (x *distantInspector) Leases(ctx context.Context) (*LeaseList, error) {
	return socketCall[*LeaseList](ctx, x, "leases", nil)
}

func (x *distantInspector) Activity(ctx context.Context) (*Activity, error) {
	return socketCall[*Activity](ctx, x, "activity", nil)
}

func (x *distantInspector) History(ctx context.Context, q HistoryQuery) (*HistoryInfo, error) {
	return socketCall[*HistoryInfo](ctx, x, "history", q)
}

func (x *distantInspector) Why(ctx context.Context, q WhyQuery) (*Explanation, error) {
	return socketCall[*Explanation](ctx, x, "why", q)
}

// Inspection is a database that somebody looks at. It is an Inspector, safe for concurrent use until it is closed.
type Inspection struct {
	Inspector
	live  bool
	close func() error
}

// Live reports whether the answers come from the process that has the database open. If not, it was opened read-only here: what a
// crash left unrestorable is shown as retired, as the next open would find it, and what is in RAM of no process is not there.
func (x *Inspection) Live() bool { return x.live }

// Close lets go of the directory.
func (x *Inspection) Close() error { return x.close() }

// Inspect looks at the database in a directory: through the introspection socket if a process has it open and serves one, else by
// opening it read-only with o, of which ReadOnly is set and RAMBytes may be MinRAMBytes.
//
// Errors: those of Open; ErrLocked if the directory is in use by a process that serves no socket.
func Inspect(ctx context.Context, dir string, o Options) (*Inspection, error) {
	path, err := resolve(osDirectory{}, dir)
	if err != nil {
		return nil, err
	}
	x, err := dial(ctx, path)
	if err == nil {
		return &Inspection{Inspector: x, live: true, close: func() error { x.client.CloseIdleConnections(); return nil }}, nil
	}
	if !errors.Is(err, ErrNotFound) {
		return nil, err
	}
	o.ReadOnly, o.Introspection = true, false
	if o.RAMBytes == 0 {
		o.RAMBytes = MinRAMBytes
	}
	d, err := Open(ctx, path, o)
	if errors.Is(err, ErrLocked) {
		return nil, fmt.Errorf("%w; it can be looked at while it is in use if that process opens it with Options.Introspection", err)
	}
	if err != nil {
		return nil, err
	}
	return &Inspection{Inspector: d.Inspector(), close: func() error {
		_, err := d.Close(context.WithoutCancel(ctx))
		return err
	}}, nil
}
