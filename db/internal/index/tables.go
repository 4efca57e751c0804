package index

import (
	"context"
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2/sstable"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/holdfast-db/holdfast/txn"
)

// CheckTables verifies every block of every table that the index consists of, filters included, which no scan reads. It
// calls damaged for each table that is not what was written, with its path. Errors: txn.ErrBusy if ctx ended.
func (x *Index) CheckTables(ctx context.Context, damaged func(path string, err error)) error {
	levels, err := x.db.SSTables()
	if err != nil {
		return classify(err)
	}
	for _, level := range levels {
		for _, t := range level {
			if err := ctx.Err(); err != nil {
				return fmt.Errorf("index %s: %w: %w", x.dir, txn.ErrBusy, err)
			}
			path := x.fs.PathJoin(x.dir, fmt.Sprintf("%s.sst", t.FileNum))
			if err := x.checkTable(ctx, path); err != nil {
				damaged(path, err)
			}
		}
	}
	return nil
}

func (x *Index) checkTable(ctx context.Context, path string) (err error) {
	defer func() {
		if p := recover(); p != nil { // a decoder that met what it does not expect
			err = fmt.Errorf("%v: %w", p, txn.ErrCorrupt)
		}
	}()
	f, err := x.fs.Open(path, vfs.SequentialReadsOption)
	if err != nil {
		return classify(err)
	}
	readable, err := sstable.NewSimpleReadable(f)
	if err != nil {
		return errors.Join(classify(err), f.Close())
	}
	r, err := sstable.NewReader(ctx, readable, x.tables)
	if err != nil {
		return errors.Join(classify(err), readable.Close())
	}
	return errors.Join(classify(r.ValidateBlockChecksums()), r.Close())
}
