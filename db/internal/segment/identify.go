package segment

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/holdfast-db/holdfast/txn"
)

// Identify gives the id of the database that the segment files in dir belong to, from the first header that is whole. It is
// for a directory whose marker is damaged. txn.ErrNotFound if no header tells.
func Identify(ctx context.Context, dir string) (id [16]byte, err error) {
	found, err := osFS{}.List(dir)
	if err != nil {
		return id, failure("list "+dir, err)
	}
	for _, l := range found {
		number, ok := parseName(l.Name)
		if !ok || !l.Regular || l.Size < blockBytes || ctx.Err() != nil {
			continue
		}
		f, err := osFS{}.Open(filepath.Join(dir, l.Name), false, false)
		if err != nil {
			continue
		}
		b := make([]byte, blockBytes)
		_, err = f.ReadAt([][]byte{b}, 0)
		if errors.Join(err, f.Close()) != nil || !sumHolds(b) {
			continue
		}
		copy(id[:], b[16:32])
		if _, err := decodeHeader(b, origin{database: id, number: number}); err == nil {
			return id, nil
		}
	}
	return [16]byte{}, fmt.Errorf("segment: no header in %s is whole: %w", dir, txn.ErrNotFound)
}
