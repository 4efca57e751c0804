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

	"github.com/gofrs/flock"
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
	path   string // absolute, symbolic links resolved
	lock   *flock.Flock
	marker marker
	held   *os.File // the marker file of our epoch; nil if it was only looked at
}

// openDirectory creates the directory if it is not there, takes its lock and enters a new epoch. A directory that is not
// ours, or of another format version, is refused before anything in it is changed.
func openDirectory(dir string) (*directory, error) {
	if dir == "" {
		return nil, fmt.Errorf("db: name of the directory is empty: %w", ErrInvalid)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, osError("create", dir, err)
	}
	path, err := filepath.Abs(dir)
	if err == nil {
		path, err = filepath.EvalSymlinks(path)
	}
	if err != nil {
		return nil, osError("resolve", dir, err)
	}
	// Look before the lock file is created, so that a foreign directory is left as it is.
	if _, err := readMarker(path); err != nil {
		return nil, err
	}
	d := &directory{path: path, lock: flock.New(filepath.Join(path, lockName), flock.SetPermissions(0o600))}
	ok, err := d.lock.TryLock()
	if err != nil {
		return nil, osError("lock", d.lock.Path(), err)
	}
	if !ok {
		return nil, locked(path)
	}
	if err := d.enter(); err != nil {
		return nil, errors.Join(err, d.lock.Close())
	}
	return d, nil
}

// enter begins a new epoch under the lock.
func (d *directory) enter() error {
	m, err := readMarker(d.path)
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
	if err := os.WriteFile(d.lock.Path(), []byte(holder), 0o600); err != nil {
		return osError("write", d.lock.Path(), err)
	}
	name := filepath.Join(d.path, markerName)
	if err := replaceFile(name, m.marshal()); err != nil {
		return err
	}
	if d.held, err = os.Open(name); err != nil {
		return osError("open", name, err)
	}
	return nil
}

// check tells whether the directory is still ours: the file that is locked is the one in the directory, and so is the marker,
// which holds our epoch. A new epoch is a new file, and an open one keeps its identity from being given to another.
func (d *directory) check() error {
	if err := d.sameFile("lock", d.lock.Path(), d.lock.Stat); err != nil || d.held == nil {
		return err
	}
	if err := d.sameFile("marker", d.held.Name(), d.held.Stat); err != nil {
		return err
	}
	b := make([]byte, markerBytes)
	if _, err := d.held.ReadAt(b, 0); err != nil {
		return fmt.Errorf("db: %s: marker: %w: %w", d.path, ErrFenced, err)
	}
	if m, err := parseMarker(b); err != nil || m != d.marker {
		return fmt.Errorf("db: %s: the marker names database %s and epoch %d, ours are %s and %d: %w", d.path, m.id, m.epoch, d.marker.id, d.marker.epoch, ErrFenced)
	}
	return nil
}

func (d *directory) sameFile(what, path string, held func() (fs.FileInfo, error)) error {
	ours, err := held()
	if err != nil {
		return fmt.Errorf("db: %s: %s: %w: %w", d.path, what, ErrFenced, err)
	}
	there, err := os.Stat(path)
	if err != nil || !os.SameFile(ours, there) {
		return fmt.Errorf("db: %s: the %s file was replaced: %w", d.path, what, ErrFenced)
	}
	return nil
}

func (d *directory) close() error {
	err := d.lock.Close()
	if d.held != nil {
		err = errors.Join(err, d.held.Close())
	}
	return err
}

func (d *directory) join(name string) string { return filepath.Join(d.path, name) }

// readMarker gives nil without an error for a directory that is empty but for a lock file and what an open that was cut
// short left behind.
func readMarker(path string) (*marker, error) {
	b, err := os.ReadFile(filepath.Join(path, markerName))
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
	entries, err := os.ReadDir(path)
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
func replaceFile(path string, content []byte) error {
	tmp := path + temporarySuffix
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_TRUNC|os.O_WRONLY|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return osError("create", tmp, err)
	}
	_, err = f.Write(content)
	if err == nil {
		err = f.Sync()
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err == nil {
		err = syncDirectory(filepath.Dir(path))
	}
	if err != nil {
		return osError("replace", path, err)
	}
	return nil
}

func syncDirectory(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

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
