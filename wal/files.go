package wal

import "github.com/holdfast-db/holdfast/txn"

// FileInfo describes one file of the log.
type FileInfo struct {
	Path        string
	First, Last txn.LSN
	Bytes       int64
}

// Files describes the files of the log, the oldest first. The last one is being written to.
func (l *Log) Files() []FileInfo {
	l.mu.Lock()
	defer l.mu.Unlock()
	files := make([]FileInfo, len(l.directories))
	for i, d := range l.directories {
		files[i] = FileInfo{Path: d.file(), First: d.first, Last: d.last, Bytes: d.size}
	}
	return files
}
