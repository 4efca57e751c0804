package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"io"
	"math"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/engine"
	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/enginetest"
	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/gguf"
	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/server"
)

// childVariable makes the test binary be llamaserve.
const childVariable = "HOLDFAST_LLAMASERVE_CHILD"

// patience is how long a test waits for what has to come. It says nothing about speed.
const patience = 2 * time.Minute

func TestMain(m *testing.M) {
	if os.Getenv(childVariable) == "" {
		os.Exit(m.Run())
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// process is a running llamaserve.
type process struct {
	t       *testing.T
	cmd     *exec.Cmd
	url     string
	hello   listening
	lines   chan string // of standard output
	stderr  *lockedBuffer
	stopped bool
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// start starts llamaserve on a port that the kernel chooses, and waits until it listens.
func start(t *testing.T, flags ...string) *process {
	t.Helper()
	p := launch(t, append([]string{"--lib", enginetest.LibraryPath(t)}, flags...)...)
	select {
	case line, ok := <-p.lines:
		require.True(t, ok, "it ended: %s", p.stderr)
		require.NoError(t, json.Unmarshal([]byte(line), &p.hello), line)
	case <-time.After(patience):
		t.Fatalf("it does not listen: %s", p.stderr)
	}
	p.url = "http://" + p.hello.Listening
	return p
}

func launch(t *testing.T, flags ...string) *process {
	t.Helper()
	p := &process{t: t, stderr: &lockedBuffer{}, lines: make(chan string, 16)}
	p.cmd = exec.Command(os.Args[0], append([]string{"--listen", "127.0.0.1:0"}, flags...)...)
	// The library is named by --lib or not at all.
	p.cmd.Env = append(os.Environ(), childVariable+"=1", libraryVariable+"=")
	p.cmd.Stderr = p.stderr
	dieWithParent(p.cmd)
	out, in, err := os.Pipe()
	require.NoError(t, err)
	p.cmd.Stdout = in
	// The kernel's signal comes when the thread ends that started the child; this goroutine keeps its thread until then.
	started, ended := make(chan error, 1), make(chan struct{})
	t.Cleanup(func() {
		p.kill()
		close(ended)
		out.Close()
	})
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		started <- p.cmd.Start()
		<-ended
	}()
	err = <-started
	in.Close()
	require.NoError(t, err)
	go func() {
		defer close(p.lines)
		for s := bufio.NewScanner(out); s.Scan(); {
			p.lines <- s.Text()
		}
	}()
	return p
}

// kill ends it with SIGKILL.
func (p *process) kill() {
	if p.stopped || p.cmd.Process == nil {
		return
	}
	p.stopped = true
	p.cmd.Process.Kill()
	p.cmd.Wait()
}

// stop ends it with SIGTERM and gives its report.
func (p *process) stop() server.ShutdownReport {
	p.t.Helper()
	require.NoError(p.t, p.cmd.Process.Signal(syscall.SIGTERM))
	return p.ended()
}

// ended waits for its end, which has to be in order.
func (p *process) ended() server.ShutdownReport {
	p.t.Helper()
	timer := time.AfterFunc(patience, func() { p.cmd.Process.Kill() })
	defer timer.Stop()
	var last string
	for line := range p.lines {
		last = line
	}
	p.stopped = true
	require.NoError(p.t, p.cmd.Wait(), "%s", p.stderr)
	var report stopped
	require.NoError(p.t, json.Unmarshal([]byte(last), &report), last)
	return report.Stopped
}

// body is a request. Its fields are those of the interface.
type body struct {
	Prompt            any    `json:"prompt"`
	Parent            string `json:"parent,omitempty"`
	Tenant            string `json:"tenant,omitempty"`
	MaxTokens         int    `json:"max_tokens"`
	InstructionTokens int    `json:"instruction_tokens,omitempty"`
	Stream            bool   `json:"stream,omitempty"`
	Logits            bool   `json:"logits,omitempty"`
}

// post sends a request and gives what comes back.
func (p *process) post(request any) (status int, answer []byte) {
	p.t.Helper()
	b, err := json.Marshal(request)
	require.NoError(p.t, err)
	client := http.Client{Timeout: patience}
	r, err := client.Post(p.url+"/v1/completions", "application/json", bytes.NewReader(b))
	require.NoError(p.t, err, "%s", p.stderr)
	defer r.Body.Close()
	answer, err = io.ReadAll(r.Body)
	require.NoError(p.t, err)
	return r.StatusCode, answer
}

// complete sends a request that has to succeed, with all of its checkpoints.
func (p *process) complete(r body) *server.Completion {
	p.t.Helper()
	status, answer := p.post(r)
	require.Equal(p.t, http.StatusOK, status, "%s", answer)
	var c server.Completion
	require.NoError(p.t, json.Unmarshal(answer, &c))
	for _, x := range c.Holdfast.Published {
		require.Empty(p.t, x.Error)
		require.True(p.t, x.Listed)
	}
	require.Equal(p.t, c.Usage.PromptTokens, c.Usage.Details.CachedTokens+c.Holdfast.ComputedTokens)
	require.Equal(p.t, c.Usage.Details.CachedTokens, c.Holdfast.LiveTokens+c.Holdfast.RestoredTokens)
	return &c
}

// stats reads the counters.
func (p *process) stats() (s server.Stats) {
	p.t.Helper()
	r, err := (&http.Client{Timeout: patience}).Get(p.url + "/v1/stats")
	require.NoError(p.t, err)
	defer r.Body.Close()
	require.NoError(p.t, json.NewDecoder(r.Body).Decode(&s))
	return s
}

// logitsOf decodes the logits of an answer.
func logitsOf(t *testing.T, c *server.Completion) (out [][]float32) {
	t.Helper()
	for _, s := range c.Choices[0].Logits {
		b, err := base64.StdEncoding.DecodeString(s)
		require.NoError(t, err)
		logits := make([]float32, len(b)/4)
		for i := range logits {
			logits[i] = math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:]))
		}
		out = append(out, logits)
	}
	return out
}

// judge is an engine that never restores anything.
type judge struct{ context *engine.Context }

func newJudge(t *testing.T, model string) *judge {
	return &judge{enginetest.Context(t, enginetest.Model(t, model))}
}

// uninterrupted computes the parts of a prompt, one after the other, in batches that end at multiples of the batch size, and then
// n tokens of response. With again the last token of the prompt is cut off and computed once more before that.
func (j *judge) uninterrupted(t *testing.T, again bool, n int, parts ...[]int32) (logits [][]float32) {
	t.Helper()
	c := j.context
	c.Clear()
	for _, part := range parts {
		for len(part) > 0 {
			k := min(len(part), enginetest.Batch-c.Len()%enginetest.Batch)
			require.NoError(t, c.Decode(part[:k]))
			part = part[k:]
		}
	}
	if again {
		last := parts[len(parts)-1]
		require.True(t, c.Cut(c.Len()-1))
		require.NoError(t, c.Decode(last[len(last)-1:]))
	}
	for i := range n {
		l, err := c.Logits()
		require.NoError(t, err)
		logits = append(logits, l)
		if i+1 < n {
			require.NoError(t, c.Decode([]int32{likeliest(l)}))
		}
	}
	return logits
}

func likeliest(logits []float32) int32 { return int32(slices.Index(logits, slices.Max(logits))) }

// requireSameBits compares logits bit by bit.
func requireSameBits(t *testing.T, want, got [][]float32, what string) {
	t.Helper()
	require.Len(t, got, len(want), what)
	for i := range want {
		require.Len(t, got[i], len(want[i]))
		for k := range want[i] {
			if math.Float32bits(want[i][k]) != math.Float32bits(got[i][k]) {
				t.Fatalf("%s: step %d, logit %d: %v, the uninterrupted run has %v", what, i, k, got[i][k], want[i][k])
			}
		}
	}
}

// distance gives the largest difference of two steps' logits.
func distance(a, b []float32) (d float64) {
	for i := range a {
		d = max(d, math.Abs(float64(a[i]-b[i])))
	}
	return d
}

// forEachArchitecture runs a test with the model file of each architecture.
func forEachArchitecture(t *testing.T, fn func(t *testing.T, arch, model string)) {
	enginetest.LibraryPath(t)
	for _, arch := range gguf.Architectures() {
		t.Run(arch, func(t *testing.T) { fn(t, arch, enginetest.ModelFile(t, arch, gguf.Options{Seed: 1})) })
	}
}

// join puts token runs together, in memory of its own.
func join(parts ...[]int32) (all []int32) {
	for _, p := range parts {
		all = append(all, p...)
	}
	return all
}

// exact reports whether an architecture has recurrent state.
func exact(arch string) bool { return arch == "mamba2" || arch == "qwen35" || arch == "granitehybrid" }
