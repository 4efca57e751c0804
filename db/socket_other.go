//go:build !linux

package db

import "fmt"

// socketPath gives a name for a socket that the system takes. done lets go of it.
func socketPath(path string) (name string, done func(), err error) {
	if len(path) <= socketPathMax {
		return path, func() {}, nil
	}
	return "", nil, fmt.Errorf("db: %s: %d bytes, and a socket's path has at most %d here: %w", path, len(path), socketPathMax, ErrUnsupported)
}
