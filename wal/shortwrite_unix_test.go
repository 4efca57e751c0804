//go:build unix

package wal

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/holdfast-db/holdfast/txn"
)

func init() { children["short-write"] = shortWriteChild }

// A real write that the kernel cuts short, in a process of its own because the limit that does it is the process's.
func TestShortWriteStopsTheLog(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "wal")
	child := exec.Command(os.Args[0])
	child.Env = append(os.Environ(), childVariable+"=short-write", "WAL_TEST_DIR="+dir)
	out, err := child.CombinedOutput()
	require.NoError(t, err, string(out))
	var acknowledged int
	_, err = fmt.Sscanf(string(out), "acknowledged %d", &acknowledged)
	require.NoError(t, err, string(out))

	log := &logged{}
	l := open(t, dir, Options{Logger: slog.New(log)})
	require.Equal(t, acknowledged, len(replayed(t, l, 1)))
	require.Positive(t, l.Repair().Cut, "part of the record that failed was there")
	require.Len(t, log.warnings(), 1)
	put(t, l, "after")
	require.Len(t, replayed(t, l, 1), acknowledged+1)
}

func shortWriteChild() {
	check := func(ok bool, format string, args ...any) {
		if !ok {
			fmt.Printf(format+"\n", args...)
			os.Exit(1)
		}
	}
	var limit unix.Rlimit
	check(unix.Getrlimit(unix.RLIMIT_FSIZE, &limit) == nil, "getrlimit")
	low := limit
	low.Cur = 100_000
	check(unix.Setrlimit(unix.RLIMIT_FSIZE, &low) == nil, "setrlimit")
	l, err := Open(os.Getenv("WAL_TEST_DIR"), Options{FS: newSeam(func(op operation) error {
		if op.name == "reserve" {
			return errors.ErrUnsupported // would meet the limit first
		}
		return nil
	})})
	check(err == nil, "open: %v", err)
	acknowledged := 0
	for ; err == nil && acknowledged < 1000; acknowledged++ {
		if _, err = l.Append([]Record{record(strings.Repeat("s", 7000))}); err == nil {
			err = l.Sync()
		}
	}
	acknowledged--
	check(errors.Is(err, txn.ErrIO) && errors.Is(err, syscall.EFBIG), "first error: %v", err)
	check(unix.Setrlimit(unix.RLIMIT_FSIZE, &limit) == nil, "setrlimit back")
	_, err = l.Append([]Record{record("x")})
	check(errors.Is(err, txn.ErrIO), "after the short write: %v", err)
	check(errors.Is(l.Sync(), txn.ErrIO), "sync after the short write")
	check(errors.Is(l.Close(), txn.ErrIO), "close after the short write")
	fmt.Printf("acknowledged %d\n", acknowledged)
}
