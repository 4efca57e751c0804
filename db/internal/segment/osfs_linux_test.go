package segment

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/holdfast-db/holdfast/txn"
)

// mounted gives a directory on a file system of its own, of n bytes, or skips the test.
func mounted(t *testing.T, kind string, n int64) string {
	t.Helper()
	dir := t.TempDir()
	var out []byte
	var err error
	if kind == "tmpfs" {
		err = unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprint("size=", n))
	} else {
		image := filepath.Join(t.TempDir(), "image")
		require.NoError(t, os.WriteFile(image, nil, 0o600))
		require.NoError(t, os.Truncate(image, n))
		if out, err = exec.Command("mkfs."+kind, "-q", image).CombinedOutput(); err == nil {
			out, err = exec.Command("mount", "-o", "loop", image, dir).CombinedOutput()
		}
	}
	if err != nil {
		t.Skipf("cannot mount a %s: %v %s", kind, err, out)
	}
	t.Cleanup(func() {
		require.NoError(t, unix.Unmount(dir, 0))
	})
	return dir
}

// On a real file system that fills up, an append that does not fit is ErrNoSpace and leaves what was there; removing
// makes room again.
func TestRealDiskFillsUp(t *testing.T) {
	for _, kind := range []string{"tmpfs", "ext4"} {
		t.Run(kind, func(t *testing.T) {
			dir := filepath.Join(mounted(t, kind, 8<<20), "data")
			s := open(t, dir)
			defer s.Close() // before the file system goes
			var pages []Page
			var places []txn.Placement
			for i := 0; ; i++ {
				require.Less(t, i, 200, "the disk never is full")
				p := pageOf(uint64(i+1), 100_000, true)
				at, err := s.Append(t.Context(), Own, []Page{p})
				if err != nil {
					require.ErrorIs(t, err, txn.ErrNoSpace)
					require.Nil(t, at)
					break
				}
				pages = append(pages, p)
				places = append(places, at...)
			}
			require.Greater(t, len(pages), 20)
			verifyPages(t, s, pages, places)
			for range 3 { // and goes on being full, without using up what is left
				_, err := s.Append(t.Context(), Own, pages[:1])
				require.ErrorIs(t, err, txn.ErrNoSpace)
			}
			infos := mustSegments(t, s)
			require.NoError(t, s.Remove(infos[0].Number))
			again := write(t, s, Own, pages[0])
			verifyPages(t, s, pages[:1], again)
			if len(infos) > 1 {
				require.NoError(t, s.Free(places[len(places)-1:]))
			}
		})
	}
}
