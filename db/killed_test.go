package db

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestMendingIsKilledAnywhere runs one mending in a child process, and kills that at a random point, again and again, until one
// gets through. Each time the directory is right or refuses, and in the end everything is back.
func TestMendingIsKilledAnywhere_B21(t *testing.T) {
	if what := os.Getenv("HOLDFAST_TEST_MEND"); what != "" {
		mend(t, what, os.Getenv("HOLDFAST_TEST_DIR"))
		return
	}
	root, err := os.MkdirTemp("", "holdfast-models-")
	require.NoError(t, err)
	models.root = root
	t.Cleanup(func() {
		models.closed, models.killed, models.cut = nil, nil, nil
		require.NoError(t, os.RemoveAll(root))
	})
	kills := 50
	if v := os.Getenv("HOLDFAST_KILLS"); v == "" || testing.Short() {
		kills = 4 // of each; HOLDFAST_KILLS=1 makes it 50
	}
	for what, c := range map[string]struct {
		model  string
		damage func(t *testing.T, m *model)
		kept   [3]int64
	}{
		"open": {"killed", func(*testing.T, *model) {}, all},
		"recover": {"killed", func(t *testing.T, m *model) {
			path, at := stateOf(m, 1, 0)
			flip(t, path, at.Offset)
		}, [3]int64{600, 600, 700}},
		"salvage": {"closed", func(t *testing.T, m *model) {
			require.NoError(t, os.RemoveAll(m.path(walName)))
		}, all},
	} {
		t.Run(what, func(t *testing.T) {
			r := rand.New(rand.NewPCG(21, uint64(len(what))))
			m := modelOf(t, c.model)
			c.damage(t, m)
			fresh := filepath.Join(tempDir(t), "fresh")
			require.NoError(t, copyTree(m.dir, fresh))
			// How long it takes when nobody interferes, from the moment at which the child begins.
			child, begun := begunMender(t, what, m.dir)
			require.NoError(t, child.Wait())
			span := time.Since(begun)
			restart := func() {
				require.NoError(t, os.RemoveAll(m.dir))
				require.NoError(t, copyTree(fresh, m.dir))
			}
			restart()
			for range kills {
				child, _ := begunMender(t, what, m.dir)
				timer := time.AfterFunc(time.Duration(r.Int64N(int64(span))), func() { _ = child.Process.Kill() })
				err := child.Wait()
				timer.Stop()
				m.requireRightOrRefused(t, c.kept)
				if err == nil { // it got through
					restart()
				}
			}
			out, err := mender(t, what, m.dir).CombinedOutput()
			require.NoError(t, err, "%s", out)
			require.Empty(t, damageOf(verifyDir(t, m.dir)))
			d := openDB(t, m.dir, Options{})
			m.requirePromise(t, d, c.kept)
			stock(t, d)
			m.requirePromise(t, d, all)
		})
	}
}

// requireRightOrRefused opens a copy.
func (m *model) requireRightOrRefused(t *testing.T, kept [3]int64) {
	t.Helper()
	copied := filepath.Join(tempDir(t), "copy")
	require.NoError(t, copyTree(m.dir, copied))
	d, err := Open(context.Background(), copied, Options{RAMBytes: 16 << 20, Logger: quiet})
	if err != nil {
		require.True(t, errors.Is(err, ErrCorrupt), "%v", err)
		return
	}
	m.requirePromise(t, d, kept)
	closeDB(t, d)
}

func mender(t *testing.T, what, dir string) *exec.Cmd {
	self, err := os.Executable()
	require.NoError(t, err)
	c := exec.CommandContext(t.Context(), self, "-test.run", "^TestMendingIsKilledAnywhere_B21$")
	c.Env = append(os.Environ(), "HOLDFAST_TEST_MEND="+what, "HOLDFAST_TEST_DIR="+dir)
	return c
}

// begunMender starts a mender and waits until it begins.
func begunMender(t *testing.T, what, dir string) (*exec.Cmd, time.Time) {
	child := mender(t, what, dir)
	said, err := child.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, child.Start())
	line, err := bufio.NewReader(said).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "begun\n", line)
	go io.Copy(io.Discard, said) // ends with the child
	return child, time.Now()
}

// mend does what a child process is for.
func mend(t *testing.T, what, dir string) {
	ctx := context.Background()
	fmt.Println("begun")
	switch what {
	case "open":
		d := openDB(t, dir, Options{})
		closeDB(t, d)
	case "recover":
		_, err := Recover(ctx, dir, RecoverOptions{Apply: true, Logger: quiet})
		require.NoError(t, err)
	case "salvage":
		r, err := Salvage(ctx, dir, SalvageOptions{Apply: true})
		require.NoError(t, err)
		require.True(t, r.Applied || r.Finished || !r.Needed)
	}
}
