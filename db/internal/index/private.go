package index

import (
	"errors"
	"io"
	"os"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// private makes files and directories that only their owner may read, as all others of a database are, whatever the umask.
type private struct{ vfs.FS }

// Create implements vfs.FS.
func (p private) Create(name string, category vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := p.FS.Create(name, category)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(name, 0o600); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// Lock implements vfs.FS.
func (p private) Lock(name string) (io.Closer, error) {
	l, err := p.FS.Lock(name)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(name, 0o600); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// MkdirAll implements vfs.FS.
func (p private) MkdirAll(dir string, _ os.FileMode) error { return p.FS.MkdirAll(dir, 0o700) }

// Unwrap implements vfs.FS.
func (p private) Unwrap() vfs.FS { return p.FS }
