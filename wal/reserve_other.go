//go:build !linux && !darwin

package wal

import (
	"errors"
	"os"
)

// reserve is not known on this system. The log then has no reserve: a full disk stops it until it is opened again.
func reserve(*os.File, int64, int64) error { return errors.ErrUnsupported }
