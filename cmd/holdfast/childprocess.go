package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/holdfast-db/holdfast/txn"
)

const (
	// answerTimeout bounds the wait for an answer. Inside the child every answer has a shorter bound.
	answerTimeout = openTimeout + closeTimeout + requestTimeout
	// saidBytesMax bounds what is kept of a child's standard error: the beginning, where a panic says what it is.
	saidBytesMax = 8 << 10
	// endGrace is how long a child that failed has for ending by itself.
	endGrace = time.Second
)

// errKilled says that the driver killed the child before it answered.
var errKilled = errors.New("killed by the driver")

// childProcess is the driver's end of one child. One goroutine uses it.
type childProcess struct {
	cmd       *exec.Cmd
	questions io.WriteCloser
	answers   chan answer // closed at the end of the child's output
	exit      chan error  // receives how the child ended, and is closed
	said      *beginning  // of its standard error
	killed    bool        // by the driver
	ended     bool        // waited for
}

// startChild starts the child, and the goroutine that owns it and ends with it.
func startChild(cmd *exec.Cmd, log io.Writer) (*childProcess, error) {
	c := &childProcess{cmd: cmd, answers: make(chan answer, 1), exit: make(chan error, 1), said: &beginning{also: log}}
	questions, err := cmd.StdinPipe()
	if err != nil {
		return nil, c.failed("start", err)
	}
	output, err := cmd.StdoutPipe()
	if err != nil {
		return nil, c.failed("start", err)
	}
	c.questions = questions
	cmd.Stderr = c.said
	dieWithParent(cmd)

	started := make(chan error)
	go func() {
		// Where the kernel ends a child with its parent, the parent is the thread that started it. So the thread is
		// kept for as long as the child lives.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		for d := json.NewDecoder(output); ; {
			var a answer
			if d.Decode(&a) != nil {
				break // the end, or half an answer of a child that was killed
			}
			c.answers <- a
		}
		close(c.answers)
		c.exit <- cmd.Wait()
		close(c.exit)
	}()
	if err := <-started; err != nil {
		return nil, c.failed("start", err)
	}
	return c, nil
}

// send writes one question.
func (c *childProcess) send(q question) error {
	b, err := json.Marshal(q)
	if err != nil {
		return c.failed("ask", err)
	}
	if pipe, ok := c.questions.(*os.File); ok {
		_ = pipe.SetWriteDeadline(time.Now().Add(answerTimeout)) // a child that reads nothing; where pipes know no deadline there is none
	}
	if _, err := c.questions.Write(append(b, '\n')); err != nil {
		return c.failed("ask", fmt.Errorf("%w; it ended with %s", err, c.end()))
	}
	return nil
}

// receive waits for the answer. If killer fires first it calls kill and takes what the child had still answered, or
// gives errKilled.
func (c *childProcess) receive(want verb, killer <-chan time.Time, kill func()) (answer, error) {
	timeout := time.NewTimer(answerTimeout)
	defer timeout.Stop()
	doing := fmt.Sprintf("wait for %q from", want)
	for {
		select {
		case a, ok := <-c.answers:
			switch {
			case !ok && c.killed:
				return answer{}, errKilled
			case !ok:
				return answer{}, c.failed(doing, fmt.Errorf("it ended by itself, %s", c.end()))
			case a.Is == isFailed:
				c.end()
				return answer{}, a.err()
			case a.Is != want:
				c.end()
				return answer{}, c.failed(doing, fmt.Errorf("it answered %q", a.Is))
			}
			return a, nil
		case <-killer:
			killer = nil
			kill()
		case <-timeout.C:
			c.end()
			return answer{}, c.failed(doing, fmt.Errorf("no answer in %v", answerTimeout))
		}
	}
}

// kill ends the child as a crash would: nothing of it runs any more.
func (c *childProcess) kill() {
	c.killed = true
	_ = c.cmd.Process.Kill() // an error says that it has ended already
}

// wait waits until the child has ended, and reports an end that was not asked for.
func (c *childProcess) wait() error {
	c.ended = true
	c.questions.Close()
	for range c.answers { // to nobody
	}
	if err := <-c.exit; err != nil && !c.killed {
		return c.failed("wait for the end of", err)
	}
	return nil
}

// end makes sure that the child has ended, and gives how it did. It may end by itself for a moment before it is made to.
func (c *childProcess) end() string {
	c.ended = true
	c.questions.Close()
	defer time.AfterFunc(endGrace, func() { _ = c.cmd.Process.Kill() }).Stop()
	for range c.answers { // to nobody
	}
	<-c.exit
	return c.cmd.ProcessState.String()
}

// failed is an error of the child or of talking to it, with what the child said.
func (c *childProcess) failed(doing string, err error) error {
	said := strings.TrimSpace(c.said.String())
	if said != "" {
		said = "\n" + said
	}
	return databaseError(fmt.Errorf("%s the process that holds the database: %w: %w%s", doing, txn.ErrIO, err, said))
}

// beginning keeps the first bytes written to it and passes everything on.
type beginning struct {
	also io.Writer // nil: to nobody
	mu   sync.Mutex
	kept []byte
}

func (b *beginning) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.kept = append(b.kept, p[:min(len(p), saidBytesMax-len(b.kept))]...)
	if b.also != nil {
		return b.also.Write(p)
	}
	return len(p), nil
}

func (b *beginning) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return string(b.kept)
}
