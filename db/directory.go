package db

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/google/uuid"
)

// What a database directory holds. Everything else in it is foreign: it is never read, changed or removed, and a directory
// that holds foreign things but no marker is refused.
const (
	markerName = "HOLDFAST"
	lockName   = "LOCK"
	walName    = "wal"
	indexName  = "index"
	dataName   = "data"
)

// The marker file says that the directory is a Holdfast database and which one. 64 bytes, little endian:
//
//	magic    8  "HOLDFAST"
//	version  4  uint32, format of the directory
//	flags    4  zero
//	uuid    16  of the database
//	epoch    8  uint64, one more for every read-write open: the fencing number of its owner
//	zero    20
//	crc      4  CRC-32C of the 60 bytes before
//
// It is replaced by writing a temporary file, syncing it, renaming it and syncing the directory.
const (
	markerMagic   = "HOLDFAST"
	markerBytes   = 64
	formatVersion = 1
)

type marker struct {
	id    uuid.UUID
	epoch uint64
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func (m marker) marshal() []byte {
	b := make([]byte, 0, markerBytes)
	b = append(b, markerMagic...)
	b = binary.LittleEndian.AppendUint32(b, formatVersion)
	b = binary.LittleEndian.AppendUint32(b, 0)
	b = append(b, m.id[:]...)
	b = binary.LittleEndian.AppendUint64(b, m.epoch)
	b = append(b, make([]byte, 20)...)
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

func parseMarker(b []byte) (m marker, err error) {
	if len(b) < 12 || !bytes.Equal(b[:8], []byte(markerMagic)) {
		return m, fmt.Errorf("not a Holdfast marker: %w", ErrCorrupt)
	}
	if v := binary.LittleEndian.Uint32(b[8:]); v != formatVersion {
		return m, fmt.Errorf("directory format %d, this build knows %d: %w", v, formatVersion, ErrUnsupported)
	}
	if len(b) != markerBytes || binary.LittleEndian.Uint32(b[60:]) != crc32.Checksum(b[:60], castagnoli) {
		return m, fmt.Errorf("marker of %d bytes fails its checksum: %w", len(b), ErrCorrupt)
	}
	copy(m.id[:], b[16:32])
	m.epoch = binary.LittleEndian.Uint64(b[32:])
	return m, nil
}

// directory is the owned database directory: its lock is held and its epoch is ours.
type directory struct {
	fs     DirectoryFS
	path   string // absolute, symbolic links resolved
	lock   DirectoryLock
	marker marker
}

// openDirectory creates the directory if it is not there, takes its lock and enters a new epoch. A directory that is not
// ours, or of another format version, is refused before anything in it is changed.
func openDirectory(fsys DirectoryFS, dir string) (*directory, error) {
	if dir == "" {
		return nil, fmt.Errorf("db: name of the directory is empty: %w", ErrInvalid)
	}
	path, err := fsys.Resolve(dir, true)
	if err != nil {
		return nil, osError("create", dir, err)
	}
	// Look before the lock file is created, so that a foreign directory is left as it is.
	if _, err := readMarker(fsys, path); err != nil {
		return nil, err
	}
	d := &directory{fs: fsys, path: path}
	if d.lock, err = fsys.Lock(d.join(lockName), false); err != nil {
		return nil, osError("lock", d.join(lockName), err)
	}
	if d.lock == nil {
		return nil, locked(fsys, path)
	}
	if err := d.enter(); err != nil {
		return nil, errors.Join(err, d.lock.Close())
	}
	return d, nil
}

// enter begins a new epoch under the lock.
func (d *directory) enter() error {
	m, err := readMarker(d.fs, d.path)
	if err != nil {
		return err
	}
	if m == nil {
		m = &marker{id: uuid.New()}
	}
	m.epoch++
	d.marker = *m
	host, _ := os.Hostname()
	boot, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	holder := fmt.Sprintf("pid %d host %s boot %s epoch %d\n", os.Getpid(), host, bytes.TrimSpace(boot), m.epoch)
	if err := d.fs.WriteFile(d.join(lockName), []byte(holder), false); err != nil {
		return osError("write", d.join(lockName), err)
	}
	return replaceFile(d.fs, d.join(markerName), m.marshal())
}

// check tells whether the directory is still ours: the file that is locked is the one in the directory.
func (d *directory) check() error {
	if err := d.lock.Check(); err != nil {
		return fmt.Errorf("db: %s: lock: %w: %w", d.path, ErrFenced, err)
	}
	return nil
}

func (d *directory) close() error { return d.lock.Close() }

func (d *directory) join(name string) string { return filepath.Join(d.path, name) }

// readMarker gives nil without an error for a directory that is empty but for a lock file and what an open that was cut
// short left behind.
func readMarker(fsys DirectoryFS, path string) (*marker, error) {
	b, err := fsys.ReadFile(filepath.Join(path, markerName))
	if err == nil {
		m, err := parseMarker(b)
		if err != nil {
			return nil, fmt.Errorf("db: %s: %w", filepath.Join(path, markerName), err)
		}
		return &m, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return nil, osError("read", filepath.Join(path, markerName), err)
	}
	entries, err := fsys.ReadDir(path)
	if err != nil {
		return nil, osError("list", path, err)
	}
	for _, e := range entries {
		switch e.Name() {
		case lockName, markerName + temporarySuffix, "lost+found":
		default:
			return nil, fmt.Errorf("db: %s holds %q and no %s marker: not a Holdfast directory: %w", path, e.Name(), markerName, ErrUnsupported)
		}
	}
	return nil, nil
}

const temporarySuffix = ".new"

// replaceFile puts content at path so that a crash leaves the old content or the new, never a mixture.
func replaceFile(fsys DirectoryFS, path string, content []byte) error {
	tmp := path + temporarySuffix
	err := fsys.WriteFile(tmp, content, true)
	if err == nil {
		err = fsys.Rename(tmp, path)
	}
	if err == nil {
		err = fsys.SyncDir(filepath.Dir(path))
	}
	if err != nil {
		return osError("replace", path, err)
	}
	return nil
}

func syncDirectory(path string) error { return osDirectory{}.SyncDir(path) }

// osError gives an error of the operating system its class.
func osError(what, path string, err error) error {
	class := ErrIO
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		class = ErrNoSpace
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		class = ErrPermission
	case errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.EINVAL), errors.Is(err, syscall.ENAMETOOLONG):
		class = ErrInvalid
	}
	return fmt.Errorf("db: %s %s: %w: %w", what, path, class, err)
}
