package wal

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/holdfast-db/holdfast/txn"
)

// segmentName is the one file of a numbered directory: tidwall names a file by the index of its first entry, and the indices
// of every directory begin at 1.
const segmentName = "00000000000000000001"

// directory is one numbered directory whose content is known and whole.
type directory struct {
	path  string
	first txn.LSN // also its name
	last  txn.LSN
	size  int64 // bytes of its file
}

func directoryName(first txn.LSN) string { return fmt.Sprintf("%020d", uint64(first)) }

func (d directory) file() string { return filepath.Join(d.path, segmentName) }

// parseName reads the name of a numbered directory or file.
func parseName(name string) (uint64, bool) {
	if len(name) != len(segmentName) {
		return 0, false
	}
	n, err := strconv.ParseUint(name, 10, 64)
	return n, err == nil && n > 0
}

// listDirectories gives the numbered directories of a log in order. Anything else in there is not ours, and left alone.
func listDirectories(fsys FS, dir string) ([]directory, error) {
	entries, err := fsys.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var found []directory
	for _, e := range entries {
		if n, ok := parseName(e.Name()); ok && e.IsDir() {
			found = append(found, directory{path: filepath.Join(dir, e.Name()), first: txn.LSN(n)})
		}
	}
	slices.SortFunc(found, func(a, b directory) int { return cmp.Compare(a.first, b.first) })
	return found, nil
}

// hasFile reports whether a numbered directory holds its file. Anything else in it is damage: it is ours alone, tidwall acts
// on files that it finds beside its own, and a directory that cannot be emptied cannot be removed.
func (d directory) hasFile(fsys FS) (bool, error) {
	entries, err := fsys.ReadDir(d.path)
	if err != nil {
		return false, failure("list "+d.path, err)
	}
	has := false
	for _, e := range entries {
		if e.Name() != segmentName || e.IsDir() {
			return false, &Damage{File: d.path, Reason: fmt.Sprintf("unexpected entry %q", e.Name())}
		}
		has = true
	}
	return has, nil
}

// remove takes a directory away; durable once the directory above is synced. A crash on the way leaves it whole, empty, or
// gone.
func (d directory) remove(fsys FS) error {
	for _, path := range []string{d.file(), d.path} {
		if err := fsys.Remove(path); err != nil && !isNotExist(err) {
			return err
		}
	}
	return nil
}

func isNotExist(err error) bool { return errors.Is(err, fs.ErrNotExist) }
