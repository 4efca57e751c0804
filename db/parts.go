package db

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/holdfast-db/holdfast/txn"
)

// A directory is made in the order marker, index, log, data, and nothing of ours removes the first three. So one of them
// that is missing beside a later one was lost. Making it anew would be a quiet end: an index without manifests calls every
// segment file orphaned, and a log without records takes back what was acknowledged.

// checkParts refuses a directory that lost its index and cannot replay it from the first record on, and one in which a salvage
// has not come to its end. It reads names only.
func (d *directory) checkParts() error {
	if pending, err := d.pendingSalvage(); err != nil {
		return err
	} else if pending != "" {
		return fmt.Errorf("db: %s: a salvage was interrupted after %s was complete; run it again: %w", d.path, pending, ErrCorrupt)
	}
	there, err := d.holdsAny(indexName)
	if err != nil || there {
		return err
	}
	records, err := d.logDirectories()
	if err != nil {
		return err
	}
	data, err := d.holdsAny(dataName)
	if err != nil {
		return err
	}
	if len(records) > 0 && records[0] == 1 || len(records) == 0 && !data {
		return nil // the whole log is there, or nothing ever was
	}
	return fmt.Errorf("db: %s is missing or empty, and the log does not go back to the first record: salvage the directory: %w", d.join(indexName), ErrCorrupt)
}

// checkLog refuses a directory whose index has applied records and that lost its log.
func (d *directory) checkLog(applied txn.LSN) error {
	there, err := d.fs.Exists(d.join(walName))
	if err == nil && !there && applied > 0 {
		return fmt.Errorf("db: %s is missing, and the index has applied %d records of it: salvage the directory: %w", d.join(walName), applied, ErrCorrupt)
	}
	return nil // whatever else is wrong with it, opening it says better
}

// holdsAny reports whether a directory is there and holds anything.
func (d *directory) holdsAny(name string) (bool, error) {
	entries, err := d.fs.ReadDir(d.join(name))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, osError("list", d.join(name), err)
	}
	return len(entries) > 0, nil
}

// logDirectories gives the first LSNs that the names in the log directory state, rising.
func (d *directory) logDirectories() (first []uint64, err error) {
	entries, err := d.fs.ReadDir(d.join(walName))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, osError("list", d.join(walName), err)
	}
	for _, e := range entries {
		var n uint64
		if _, err := fmt.Sscanf(e.Name(), "%020d", &n); err == nil && len(e.Name()) == 20 && e.IsDir() {
			first = append(first, n)
		}
	}
	return first, nil
}

// Salvage works in <dir>/salvage/<n>, n counting from 1 in four digits:
//
//	building   the new index and log, while they are made
//	ready      the same, complete and synced: from here on the salvage only goes forward
//	index wal  what was replaced
const (
	salvageName  = "salvage"
	buildingName = "building"
	readyName    = "ready"
)

// pendingSalvage gives the path of a salvage that is complete and not in place yet, "" if there is none.
func (d *directory) pendingSalvage() (string, error) {
	rooms, err := d.fs.ReadDir(d.join(salvageName))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", osError("list", d.join(salvageName), err)
	}
	for _, r := range rooms {
		path := filepath.Join(d.join(salvageName), r.Name(), readyName)
		if there, _ := d.fs.Exists(path); there {
			return path, nil
		}
	}
	return "", nil
}
