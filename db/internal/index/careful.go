package index

import (
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// careful is the file system that Pebble gets.
//
// Pebble makes a manifest, writes and syncs it, and makes a marker file that names it; then it syncs the directory. Nothing
// says that of two names that were made since the last sync of a directory the first survives if the second does, so a
// power failure in between may leave a marker of a manifest that is not there, and no index that opens. So the directory
// is synced before a marker is made as well.
type careful struct{ vfs.FS }

const markerPrefix = "marker."

// Create implements vfs.FS.
func (c careful) Create(name string, category vfs.DiskWriteCategory) (vfs.File, error) {
	if base := c.PathBase(name); strings.HasPrefix(base, markerPrefix) {
		if err := c.syncDir(c.PathDir(name)); err != nil {
			return nil, err
		}
	}
	return c.FS.Create(name, category)
}

func (c careful) syncDir(dir string) error {
	d, err := c.OpenDir(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if e := d.Close(); err == nil {
		err = e
	}
	return err
}

// Unwrap implements vfs.FS.
func (c careful) Unwrap() vfs.FS { return c.FS }
