package wal

import (
	"github.com/holdfast-db/holdfast/txn"
)

// Cut removes the oldest directories as long as every record in them is below the given LSN. The newest directory stays, whatever
// it holds, so that the log never forgets its last LSN. A crash may leave some of them, oldest first removed, and at most one
// of them half removed, which the next Open finishes.
//
// An error of a removal leaves the log working and may be tried again; a failed sync of the directory stops it.
func (l *Log) Cut(below txn.LSN) error {
	l.reading.Lock()
	defer l.reading.Unlock()
	for {
		if err := l.writable(); err != nil {
			return err
		}
		oldest, ok := l.cuttable(below)
		if !ok {
			return nil
		}
		if err := l.owned(); err != nil {
			return err
		}
		if err := oldest.remove(l.opts.FS); err != nil {
			return failure("cut "+oldest.path, err)
		}
		// One sync for each: were two removals on their way at once, the newer could reach the disk alone and leave a gap.
		if err := l.opts.FS.SyncDir(l.dir); err != nil {
			return l.fail("sync "+l.dir, err)
		}
		l.mu.Lock()
		l.directories = l.directories[1:]
		l.previous = oldest.last
		l.mu.Unlock()
	}
}

// cuttable gives the oldest directory if all of it may go.
func (l *Log) cuttable(below txn.LSN) (directory, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.directories) < 2 || l.directories[0].last >= below {
		return directory{}, false
	}
	return l.directories[0], true
}
