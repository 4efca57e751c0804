package segment

// FS is the file system as segments need it: the one place where faults are injected and power loss is simulated. The
// default is the operating system's. Paths are those of the store's directory or directly under it. Methods are called
// from several goroutines.
type FS interface {
	// Mkdir makes the directory with mode 0700 if it is missing, and makes that durable in its parent, which exists.
	Mkdir(dir string) error
	// List reads the names in the directory and the size of each, without opening any. A name that vanishes meanwhile
	// is left out.
	List(dir string) ([]Listed, error)
	// Create makes a file of mode 0600 that must not exist in any form, links included, open for reading and writing. If
	// direct is asked for and refused, the file is buffered and says so.
	Create(path string, direct bool) (File, error)
	// Open opens a regular file and follows no link.
	Open(path string, write, direct bool) (File, error)
	// Remove unlinks the file. Open files keep their content.
	Remove(path string) error
	// SyncDir makes earlier Create and Remove calls in the directory durable.
	SyncDir(dir string) error
}

// Listed is one name in a directory.
type Listed struct {
	Name      string
	Regular   bool  // a plain file, not a link, a directory or a device
	Size      int64 // bytes up to the end of the file
	Allocated int64 // bytes of disk blocks that it has, st_blocks × 512
}

// File is an open file. ReadAt and WriteAt are called from several goroutines; the rest from one at a time.
type File interface {
	// Direct reports whether offsets, lengths and memory have to be aligned to 4096.
	Direct() bool
	// ReadAt fills the buffers in turn from offset off and returns the bytes read. It may return less than fits
	// without an error; 0 and no error is the end of the file.
	ReadAt(buffers [][]byte, off int64) (int, error)
	// WriteAt writes the buffers in turn at offset off and returns the bytes written, which may be fewer without an error.
	WriteAt(buffers [][]byte, off int64) (int, error)
	// Sync makes the bytes written, and the size, durable. After an error nothing is known about either.
	Sync() error
	// Preallocate gives the range blocks without changing the size of the file.
	Preallocate(off, n int64) error
	// Punch takes the blocks of the range away, which reads as zeros from then on; the size stays.
	Punch(off, n int64) error
	// Truncate sets the size and gives blocks beyond it back.
	Truncate(size int64) error
	// Stat returns the size and the allocated bytes.
	Stat() (Listed, error)
	Close() error
}
