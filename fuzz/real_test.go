package fuzz

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/db"
)

// A real process on a real file system: it checks what a parent expects, and then publishes and deletes until it is killed, telling
// the parent before and after each. A checkpoint is known by a number, which is its Request.

const realVariable = "HOLDFAST_CRASH_REAL" // directory that the process works on

type expectation struct {
	Must []int  // listed, for certain
	May  []int  // listed, perhaps
	Next int    // first number that was never used
	Seed uint64 // of what the process does
}

// realTokens gives the tokens of a checkpoint: eight turns make a conversation.
func realTokens(id int) []int32 {
	rng := rand.New(rand.NewPCG(uint64(id/8), 7))
	tokens := make([]int32, 24*(id%8+1)-id%5)
	for i := range tokens {
		tokens[i] = int32(rng.IntN(1000))
	}
	return tokens
}

func realWorker(dir string) {
	fail := func(format string, args ...any) {
		fmt.Printf("violation %q\n", fmt.Sprintf(format, args...))
		os.Exit(1)
	}
	var e expectation
	if err := json.NewDecoder(os.Stdin).Decode(&e); err != nil {
		fail("expectation: %v", err)
	}
	ctx := context.Background()
	d, err := db.Open(ctx, dir, db.Options{RAMBytes: 16 << 20, ReplayBytes: 64 << 10, SegmentBytes: 1 << 20, Logger: slog.New(slog.DiscardHandler)})
	if errors.Is(err, db.ErrNoSpace) {
		fmt.Println("full")
		os.Exit(0)
	}
	if err != nil {
		fail("open: %v", err)
	}
	ns := Spaces()[0]
	sequence := func(id int) *db.Sequence {
		s := ns.NewSequence()
		if err := s.Append(realTokens(id)); err != nil {
			fail("tokens: %v", err)
		}
		return s
	}
	known := map[int]bool{}
	for _, id := range append(e.Must, e.May...) {
		known[id] = true
	}
	listed := map[int]db.Generation{}
	for c, err := range d.Checkpoints(ctx) {
		if err != nil {
			fail("list: %v", err)
		}
		id, err := strconv.Atoi(c.Request)
		if err != nil || !known[id] || int(c.Offset) != len(realTokens(id)) {
			fail("listed, and was never published, or was taken back: %q at %d", c.Request, c.Offset)
		}
		listed[id] = c.Generation
	}
	for _, id := range e.Must {
		if listed[id].IsZero() {
			fail("acknowledged and gone: %d of %d", id, len(e.Must))
		}
	}
	var ids []int
	for id := range listed {
		r, err := d.Restore(ctx, sequence(id), db.LookupOptions{})
		if err != nil {
			fail("listed and not restorable: %d: %v", id, err)
		}
		if int(r.Offset()) != len(realTokens(id)) {
			fail("restored %d tokens of %d", r.Offset(), len(realTokens(id)))
		}
		for rank := range Layouts[0].Ranks {
			for _, p := range r.Pages(rank) {
				if err := Verify(p.Bytes, p.Key, rank); err != nil {
					fail("wrong bytes: %v", err)
				}
			}
		}
		r.Release()
		ids = append(ids, id)
	}
	if err := d.Check(ctx); err != nil {
		fail("recount: %v", err)
	}
	fmt.Printf("checked %s\n", strings.Trim(fmt.Sprint(ids), "[]"))
	rng := rand.New(rand.NewPCG(e.Seed, 9))
	for id := e.Next; ; {
		if len(ids) > 24 || len(ids) > 0 && rng.IntN(4) == 0 {
			i := rng.IntN(len(ids))
			victim := ids[i]
			ids = append(ids[:i], ids[i+1:]...)
			fmt.Printf("delete %d\n", victim)
			if err := d.Delete(ctx, listed[victim]); err == nil {
				fmt.Printf("deleted %d\n", victim)
			} else if !errors.Is(err, db.ErrNoSpace) && !errors.Is(err, db.ErrNotFound) {
				fail("delete: %v", err)
			}
			continue
		}
		fmt.Printf("publish %d\n", id)
		g, err := realPublish(ctx, d, sequence(id), id)
		if err == nil {
			fmt.Printf("published %d\n", id)
			listed[id] = g
			ids = append(ids, id)
		} else if !errors.Is(err, db.ErrNoSpace) && !errors.Is(err, db.ErrIO) {
			fail("publish: %v", err)
		}
		id++
	}
}

func realPublish(ctx context.Context, d *db.DB, s *db.Sequence, id int) (g db.Generation, err error) {
	p, err := d.Begin(ctx, db.PublishRequest{Sequence: s, Offset: s.Len(), Request: strconv.Itoa(id)})
	if err != nil {
		return g, err
	}
	defer p.Abort()
	for rank := range Layouts[0].Ranks {
		slots, err := p.Slots(ctx, rank)
		if err != nil {
			return g, err
		}
		for _, slot := range slots {
			Fill(slot.Buffer(), slot.Key(), rank)
			slot.Filled(slot.Size())
		}
		if _, err := p.Commit(ctx, rank); err != nil {
			return g, err
		}
	}
	return p.Generation(), nil
}

// kills runs processes on a directory, kills each after a random time, and has the next one check what the one before was told.
// between, if set, is called when a process is dead.
func kills(t *testing.T, n int, dir func() string, between func(i int)) {
	must, may, next := map[int]bool{}, map[int]bool{}, 0
	rng := rand.New(rand.NewPCG(1, uint64(n)))
	acknowledged, full := 0, 0
	for i := range n + 1 {
		e := expectation{Next: next, Seed: uint64(i)}
		for id := range must {
			e.Must = append(e.Must, id)
		}
		for id := range may {
			e.May = append(e.May, id)
		}
		in, err := json.Marshal(e)
		require.NoError(t, err)
		self, err := os.Executable()
		require.NoError(t, err)
		cmd := exec.Command(self)
		cmd.Env = append(os.Environ(), realVariable+"="+dir())
		cmd.Stdin = strings.NewReader(string(in))
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		stderr := &tailBuffer{}
		cmd.Stderr = stderr
		require.NoError(t, cmd.Start())
		lines := bufio.NewReader(out)
		checked := false
		var timer *time.Timer
		if rng.IntN(3) == 0 && i < n {
			timer = time.AfterFunc(time.Duration(rng.IntN(60))*time.Millisecond, func() { cmd.Process.Kill() }) // perhaps while it recovers
		}
		for {
			line, err := lines.ReadString('\n')
			if err != nil {
				require.ErrorIs(t, err, io.EOF)
				break
			}
			what, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
			id, _ := strconv.Atoi(rest)
			switch what {
			case "violation":
				cmd.Process.Kill()
				cmd.Wait()
				require.Failf(t, "a promise was broken", "process %d: %s\n%s", i, rest, stderr)
			case "full":
				checked = true
				full++
			case "checked":
				checked = true
				clear(must)
				clear(may)
				for _, f := range strings.Fields(rest) {
					id, err := strconv.Atoi(f)
					require.NoError(t, err)
					must[id] = true
				}
				if timer == nil {
					timer = time.AfterFunc(time.Duration(rng.IntN(40))*time.Millisecond, func() { cmd.Process.Kill() })
				}
			case "publish":
				may[id] = true
				next = id + 1
			case "published":
				delete(may, id)
				must[id] = true
				acknowledged++
			case "delete":
				delete(must, id)
				may[id] = true
			case "deleted":
				delete(may, id)
				acknowledged++
			}
		}
		err = cmd.Wait()
		timer0(timer)
		if !checked {
			require.Truef(t, timer != nil, "process %d ended by itself before it had checked: %v\n%s", i, err, stderr)
		}
		require.Emptyf(t, panicOf(stderr.String()), "process %d", i)
		if between != nil {
			between(i)
		}
	}
	t.Logf("%d kills, %d acknowledged changes, %d times no room to open", n, acknowledged, full)
	require.Positive(t, acknowledged)
}

func timer0(timer *time.Timer) {
	if timer != nil {
		timer.Stop()
	}
}

func panicOf(s string) string {
	if strings.Contains(s, "panic:") || strings.Contains(s, "fatal error:") {
		return s
	}
	return ""
}

// A process that is killed loses nothing that it had acknowledged.
func TestKilledProcessesKeepThePromise(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "d")
	kills(t, 6, func() string { return dir }, nil)
}

// number reads how often something is to be done from the environment; what takes long or needs root is done on demand only.
func number(t *testing.T, variable string) int {
	n, err := strconv.Atoi(os.Getenv(variable))
	if err != nil || n < 1 {
		t.Skipf("%s is not set: see docs/crash-testing.md", variable)
	}
	return n
}
