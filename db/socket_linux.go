package db

import (
	"fmt"
	"os"
	"path/filepath"
)

// socketPath gives a name for a socket that the system takes, however long the path is: one through a descriptor of its directory. done lets
// go of it.
func socketPath(path string) (name string, done func(), err error) {
	if len(path) <= socketPathMax {
		return path, func() {}, nil
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return "", nil, osError("open", filepath.Dir(path), err)
	}
	return fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path)), func() { _ = dir.Close() }, nil
}
