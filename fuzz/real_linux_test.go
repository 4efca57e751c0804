package fuzz

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// Killed processes on real file systems in images: with room, and with so little that they are full again and again.
// HOLDFAST_KILLS says how many for each; it needs root, loop devices and the mkfs programs.
func TestKilledProcessesOnFileSystems(t *testing.T) {
	n := number(t, "HOLDFAST_KILLS")
	for _, f := range []struct {
		name, size string
		mkfs       []string
	}{
		{"ext4", "256M", []string{"mkfs.ext4", "-q"}},
		{"xfs", "320M", []string{"mkfs.xfs", "-q"}},
		{"btrfs", "256M", []string{"mkfs.btrfs", "-q"}},
		{"ext4 that is full", "4M", []string{"mkfs.ext4", "-q", "-O", "^has_journal", "-m", "0"}},
	} {
		t.Run(f.name, func(t *testing.T) {
			base := t.TempDir()
			image, mnt := filepath.Join(base, "image"), filepath.Join(base, "mnt")
			run := func(name string, args ...string) {
				out, err := exec.Command(name, args...).CombinedOutput()
				require.NoErrorf(t, err, "%s: %s", name, out)
			}
			require.NoError(t, os.Mkdir(mnt, 0o700))
			run("truncate", "-s", f.size, image)
			run(f.mkfs[0], append(f.mkfs[1:], image)...)
			run("mount", "-o", "loop", image, mnt)
			t.Cleanup(func() { run("umount", mnt) })
			count := n
			if f.size == "4M" {
				count = max(1, n/5)
			}
			kills(t, count, func() string { return filepath.Join(mnt, "d") }, nil)
		})
	}
}
