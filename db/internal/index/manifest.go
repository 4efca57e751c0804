package index

import (
	"errors"
	"fmt"
	"io"

	"github.com/cockroachdb/pebble/v2/record"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/atomicfs"

	"github.com/holdfast-db/holdfast/txn"
)

// firstManifest is that of an index that was made and has never been opened again.
const firstManifest = "MANIFEST-000001"

// checkManifest refuses a manifest whose second record is damaged. Pebble takes the first record that it cannot read for the end, which
// is right for one that a crash tore, but the first two are synced before anything names the file: the first has the tables, and only
// the second says how far their sequence numbers go. Without it Pebble would give the numbers out again, take what is old for new, and
// end the process when a compaction meets the same number twice. What else is lost with a record that is damaged later on is found: the
// log does not go back so far, or tables are gone.
func checkManifest(fs vfs.FS, dir string) error {
	name, err := atomicfs.ReadMarker(fs, dir, "manifest")
	if err != nil || name == "" || name == firstManifest {
		return nil // there is none yet, or opening says what is wrong
	}
	f, err := fs.Open(fs.PathJoin(dir, name))
	if err != nil {
		return nil
	}
	defer f.Close()
	records := record.NewReader(f, 0)
	for i := range 2 {
		r, err := records.Next()
		if err == nil {
			_, err = io.Copy(io.Discard, r)
		}
		switch {
		case err == nil:
		case i == 0: // no tables, then, and everything comes from the log if that is whole
			return nil
		case errors.Is(err, io.EOF), record.IsInvalidRecord(err):
			return fmt.Errorf("%s: record %d cannot be read: %w: %w", name, i, txn.ErrCorrupt, err)
		default:
			return classify(err)
		}
	}
	return nil
}
