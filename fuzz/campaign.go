package fuzz

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Campaign runs programs in worker processes.
type Campaign struct {
	// Worker is the command of a worker process: one that calls WorkerMain. Environ is added to its environment.
	Worker  []string
	Environ []string
	// Parallel is the number of workers, at least 1.
	Parallel int
	// Seed is that of the first generated program; the others follow.
	Seed uint64
	// Cycles ends the campaign once so many crashes were recovered from; 0 is not at all.
	Cycles int64
	// Duration ends it after a time; 0 is not at all.
	Duration time.Duration
	// Small has the exhaustive set run, instead of generated programs.
	Small bool
	// HangAfter is how long one program may take before its worker is taken for hanging; 0 is two minutes.
	HangAfter time.Duration
	// Scratch is a directory in which now and then an image is opened as a real one; empty: never.
	Scratch string
	// Progress, if set, is called now and then.
	Progress func(Totals)
}

// Totals add up what a campaign has done.
type Totals struct {
	Cycles     int64          `json:"cycles"`
	Programs   int64          `json:"programs"`
	Calls      int64          `json:"calls"` // changes of the simulated disks
	Violations int            `json:"violations"`
	Seconds    float64        `json:"seconds"`
	PerSecond  float64        `json:"cycles_per_second"`
	Seed       uint64         `json:"seed"`
	Steps      map[string]int `json:"steps"`
	Faults     map[string]int `json:"faults"`
	Checks     map[string]int `json:"checks"`
	Digest     uint64         `json:"digest"` // of all traces, in no order: the same programs have the same
}

// Finding is the first violation of a campaign.
type Finding struct {
	Program *Program
	Small   *Small // instead of the program, of the exhaustive set
	Detail  string
}

func (t *Totals) add(o *Outcome) {
	t.Cycles += int64(o.Cycles)
	t.Programs++
	t.Calls += int64(o.Calls)
	t.Digest ^= o.Trace * 0x9E3779B97F4A7C15
	for _, m := range []struct{ to, from map[string]int }{{t.Steps, o.Steps}, {t.Faults, o.Faults}, {t.Checks, o.Checks}} {
		for k, n := range m.from {
			m.to[k] += n
		}
	}
}

// Run runs until the first violation, or as long as it is asked to. The error is about workers that cannot be run, or that ctx
// has ended.
func (c *Campaign) Run(ctx context.Context) (Totals, *Finding, error) {
	t := Totals{Seed: c.Seed, Steps: map[string]int{}, Faults: map[string]int{}, Checks: map[string]int{}}
	begun := time.Now()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	if c.Duration > 0 {
		timer := time.AfterFunc(c.Duration, stop)
		defer timer.Stop()
	}
	jobs := make(chan Job)
	go c.feed(ctx, jobs)
	var mu sync.Mutex // guards t, found, failed
	var found *Finding
	var failed error
	var workers sync.WaitGroup
	for range max(c.Parallel, 1) {
		workers.Go(func() {
			for job := range jobs {
				w, err := c.start()
				if err != nil {
					mu.Lock()
					failed = errors.Join(failed, err)
					mu.Unlock()
					stop()
					return
				}
				for more := true; more; {
					o, err := w.do(ctx, job, c.hangAfter())
					mu.Lock()
					detail := ""
					switch {
					case ctx.Err() != nil && (err != nil || o == nil):
					case err != nil:
						detail = err.Error()
					case o.Violation != nil:
						t.add(o)
						detail = o.Violation.Error()
					default:
						t.add(o)
					}
					if detail != "" {
						t.Violations++
						if found == nil {
							found = &Finding{Program: job.Program, Small: job.Small, Detail: detail}
							if job.Program == nil && job.Small == nil {
								found.Program = Generate(job.Seed)
							}
							if found.Program != nil {
								found.Program.Problem = detail
							}
						}
						stop()
					}
					if c.Cycles > 0 && t.Cycles >= c.Cycles {
						stop()
					}
					t.Seconds = time.Since(begun).Seconds()
					t.PerSecond = float64(t.Cycles) / t.Seconds
					if c.Progress != nil {
						c.Progress(t)
					}
					mu.Unlock()
					if err != nil {
						break
					}
					job, more = <-jobs
				}
				w.stop()
			}
		})
	}
	workers.Wait()
	return t, found, failed
}

func (c *Campaign) hangAfter() time.Duration {
	if c.HangAfter > 0 {
		return c.HangAfter
	}
	return 2 * time.Minute
}

func (c *Campaign) feed(ctx context.Context, jobs chan<- Job) {
	defer close(jobs)
	send := func(j Job) bool {
		select {
		case jobs <- j:
			return true
		case <-ctx.Done():
			return false
		}
	}
	if c.Small {
		for i, s := range SmallWorlds() {
			if ctx.Err() != nil || !send(Job{Seed: uint64(i), Small: s}) {
				return
			}
		}
		return
	}
	for seed := c.Seed; ctx.Err() == nil && send(Job{Seed: seed}); seed++ {
	}
}

// Replay runs one program in a worker of its own.
func (c *Campaign) Replay(ctx context.Context, p *Program) (*Outcome, error) {
	w, err := c.start()
	if err != nil {
		return nil, err
	}
	defer w.stop()
	o, err := w.do(ctx, Job{Seed: p.Seed, Program: p}, c.hangAfter())
	if err != nil && ctx.Err() == nil {
		return &Outcome{Violation: &Violation{-1, err.Error()}}, nil
	}
	return o, err
}

// Shrink gives a smaller program that breaks the promise as well. tries bounds the programs that are run for it.
func (c *Campaign) Shrink(ctx context.Context, p *Program, tries int) *Program {
	best := *p
	fails := func(q *Program) bool {
		if tries--; tries < 0 || ctx.Err() != nil {
			return false
		}
		o, err := c.Replay(ctx, q)
		if err != nil || o == nil || o.Violation == nil {
			return false
		}
		q.Problem = o.Violation.Error()
		return true
	}
	for size := len(best.Steps) / 2; size > 0; size /= 2 {
		for at := 0; at+size <= len(best.Steps); {
			q := best
			q.Steps = append(append([]Step(nil), best.Steps[:at]...), best.Steps[at+size:]...)
			if fails(&q) {
				best = q
			} else {
				at += size
			}
		}
	}
	for i := range best.Steps {
		for _, simpler := range []func(s *Step){
			func(s *Step) { s.Images = 0 }, func(s *Step) { s.In = s.In[:min(len(s.In), 1)] }, func(s *Step) { s.Meta = 0 },
			func(s *Step) { s.Request, s.Kind = "", 0 }, func(s *Step) { s.More = min(s.More, 5) },
		} {
			q := best
			q.Steps = append([]Step(nil), best.Steps...)
			before := fmt.Sprintf("%+v", q.Steps[i])
			simpler(&q.Steps[i])
			if fmt.Sprintf("%+v", q.Steps[i]) != before && fails(&q) {
				best = q
			}
		}
	}
	return &best
}

// worker is a worker process.
type worker struct {
	cmd     *exec.Cmd
	jobs    io.WriteCloser
	reports *bufio.Reader
	pipe    *os.File
	stderr  *tailBuffer
}

func (c *Campaign) start() (*worker, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(c.Worker[0], c.Worker[1:]...)
	cmd.Env = append(append(os.Environ(), scratchVariable+"="+c.Scratch), c.Environ...)
	cmd.ExtraFiles = []*os.File{w}
	stderr := &tailBuffer{}
	cmd.Stderr = stderr
	jobs, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	w.Close()
	if err != nil {
		r.Close()
		return nil, fmt.Errorf("fuzz: worker: %w", err)
	}
	return &worker{cmd, jobs, bufio.NewReaderSize(r, 1<<16), r, stderr}, nil
}

func (w *worker) stop() {
	w.jobs.Close()
	w.cmd.Process.Kill()
	w.cmd.Wait()
	w.pipe.Close()
}

// do has a job done. An error says that the worker died or hung, and what it left as its last words.
func (w *worker) do(ctx context.Context, j Job, limit time.Duration) (*Outcome, error) {
	b, err := json.Marshal(j)
	if err != nil {
		return nil, err
	}
	var hung bool
	timer := time.AfterFunc(limit, func() {
		hung = true
		w.cmd.Process.Signal(syscall.SIGQUIT)
	})
	defer timer.Stop()
	detach := context.AfterFunc(ctx, func() { w.cmd.Process.Kill() })
	defer detach()
	_, err = w.jobs.Write(append(b, '\n'))
	for err == nil {
		var line []byte
		if line, err = w.reports.ReadBytes('\n'); err != nil {
			break
		}
		var r report
		if err = json.Unmarshal(line, &r); err == nil && r.Outcome != nil {
			return r.Outcome, nil
		}
	}
	w.cmd.Wait()
	timer.Stop()
	what := "the process died"
	if hung {
		what = fmt.Sprintf("nothing moved for %v", limit)
	}
	return nil, fmt.Errorf("%s: %w\n%s", what, err, w.stderr)
}

// tailBuffer keeps the beginning of what is written to it, where a panic says what it is.
type tailBuffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (t *tailBuffer) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if room := 16<<10 - t.b.Len(); room > 0 {
		t.b.Write(b[:min(room, len(b))])
	}
	return len(b), nil
}

func (t *tailBuffer) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.b.String()
}
