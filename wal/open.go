package wal

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"

	"github.com/holdfast-db/holdfast/txn"
	"github.com/holdfast-db/holdfast/txn/mutant"
)

// Limits and defaults of Options.
const (
	RotateBytesDefault  = 16 << 20
	RotateBytesMax      = 256 << 20
	ReserveBytesDefault = 1 << 20
	ReserveBytesMax     = 256 << 20
)

// Options of a log. The zero value is usable.
type Options struct {
	// RotateBytes is when a new directory is begun: before the first batch after the current one holds so much.
	// 0 = RotateBytesDefault, at most RotateBytesMax. A smaller value cuts sooner and syncs more often.
	RotateBytes int64
	// ReserveBytes is how much disk space is kept for essential records. 0 = ReserveBytesDefault, at most
	// ReserveBytesMax.
	ReserveBytes int64
	// FirstLSN is a floor for the next LSN; 0 = none. It is for a caller whose own durable state is ahead of the log,
	// which a crash may leave so: numbers that the caller has seen are not given out again, and the next record says
	// which were skipped.
	FirstLSN txn.LSN
	// Fence is asked before anything is written and before anything is acknowledged, by several goroutines; an error means
	// that this process does not own the directory any more. The log then stops with ErrFenced. nil = never fenced.
	Fence func() error
	// FS is the file system; nil = the operating system's.
	FS FS
	// Logger gets the warning about a repaired tail and the error that stops the log; nil = none.
	Logger *slog.Logger
	// ReadOnly changes nothing on disk: a torn tail is not read and not cut, and every write is ErrReadOnly.
	ReadOnly bool
}

func (o Options) withDefaults() (Options, error) {
	if o.RotateBytes < 0 || o.RotateBytes > RotateBytesMax {
		return o, fmt.Errorf("wal: RotateBytes %d, want 0…%d: %w", o.RotateBytes, int64(RotateBytesMax), txn.ErrInvalid)
	}
	if o.ReserveBytes < 0 || o.ReserveBytes > ReserveBytesMax {
		return o, fmt.Errorf("wal: ReserveBytes %d, want 0…%d: %w", o.ReserveBytes, int64(ReserveBytesMax), txn.ErrInvalid)
	}
	if o.FirstLSN > MaxLSN {
		return o, fmt.Errorf("wal: FirstLSN %d, at most %d: %w", o.FirstLSN, MaxLSN, txn.ErrInvalid)
	}
	if o.RotateBytes == 0 {
		o.RotateBytes = RotateBytesDefault
	}
	if o.ReserveBytes == 0 {
		o.ReserveBytes = ReserveBytesDefault
	}
	if o.Fence == nil {
		o.Fence = func() error { return nil }
	}
	if o.FS == nil {
		o.FS = diskFS{}
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o, nil
}

// RepairReport says what Open found at the end of the log and did about it.
type RepairReport struct {
	File   string // what was cut or removed; "" = nothing was wrong
	Offset int64  // where the good bytes end
	Cut    int64  // bytes
	Reason string
	// Clean: the log ends in the seal of a Close that had synced everything, or holds nothing at all.
	Clean bool
}

// survey is what reading the whole log found, before anything is changed.
type survey struct {
	whole     []directory // in order; the last one is the newest, without what is to be cut from it
	leftover  *directory  // the oldest, half removed when Cut was interrupted
	frameless *directory  // the newest, begun and without one frame that counts
	entries   uint64      // in the newest whole directory, seals included
	attested  int64       // bytes of its file that its last frame knows to be durable
	previous  txn.LSN     // of the first record
	report    RepairReport
}

// Open reads the whole log, checks every byte of it, repairs the end of the newest directory, makes what it found durable and
// opens it for appending. One process at a time may have a log open for writing; the caller's lock sees to that.
//
// A missing directory is made, its parent synced. ErrCorrupt (a *Damage) and ErrUnsupported mean that nothing was changed, as
// does ErrIO from reading. A repair is told with one warning and in Repair. The time is that of reading the log once, so the
// caller bounds it with Cut; memory is bounded by the newest directory and the largest record.
func Open(dir string, o Options) (*Log, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	found, err := listDirectories(o.FS, dir)
	if isNotExist(err) && !o.ReadOnly {
		err = o.FS.Mkdir(dir)
	}
	switch {
	case isNotExist(err):
		return nil, fmt.Errorf("wal: open %s: %w: %w", dir, txn.ErrNotFound, err)
	case err != nil:
		return nil, failure("open "+dir, err)
	}
	s, err := inspect(o.FS, found)
	if err != nil {
		return nil, err
	}
	l := newLog(dir, o, s)
	if o.ReadOnly {
		return l, nil
	}
	if err := o.Fence(); err != nil {
		return nil, fenced(dir, err)
	}
	if err := s.repair(o.FS, dir); err != nil {
		return nil, failure("repair "+dir, err)
	}
	if s.report.File != "" {
		o.Logger.Warn("wal: tail cut", "file", s.report.File, "offset", s.report.Offset, "bytes", s.report.Cut,
			"reason", s.report.Reason, "last_lsn", uint64(l.next-1))
	}
	if err := l.openTail(s.entries); err != nil {
		return nil, err
	}
	return l, nil
}

// inspect reads everything and changes nothing.
func inspect(fsys FS, found []directory) (survey, error) {
	var s survey
	s.report.Clean = len(found) == 0
	sc := &scanner{}
	for i, d := range found {
		newest := i == len(found)-1
		has, err := d.hasFile(fsys)
		switch {
		case err != nil:
			return survey{}, err
		case has:
			err = s.read(fsys, d, newest, sc)
		case newest:
			s.drop(d, 0, "directory without a file")
		case i == 0:
			s.leftover = &d
		default:
			err = &Damage{File: d.path, Reason: "its file is missing"}
		}
		if err != nil {
			return survey{}, err
		}
	}
	return s, nil
}

// read scans one directory and adds it to the survey.
func (s *survey) read(fsys FS, d directory, newest bool, sc *scanner) error {
	file, err := fsys.Open(d.file())
	if err != nil {
		return failure("open "+d.file(), err)
	}
	defer func() { _ = file.Close() }() // nothing was written through it
	size, err := file.Size()
	if err != nil {
		return failure("size of "+d.file(), err)
	}
	sc.begin(file, d.file(), size)
	var damage *Damage
	var attested uint32
	for {
		h, _, err := sc.next()
		if errors.Is(err, io.EOF) {
			break
		}
		if errors.As(err, &damage) {
			break
		}
		if err != nil {
			return err
		}
		attested = h.durable
		if sc.entries == 1 {
			if h.lsn != d.first {
				return &Damage{File: d.file(), Reason: fmt.Sprintf("first record is %d, the directory says %d", h.lsn, d.first)}
			}
			if len(s.whole) == 0 {
				s.previous = h.previous
			}
		}
	}
	if damage != nil {
		if err := settle(damage, newest, sc); err != nil {
			return err
		}
	}
	switch {
	case sc.entries == 0 && !newest:
		return &Damage{File: d.file(), Reason: "no record"}
	case sc.entries == 0 && damage == nil:
		s.drop(d, 0, "file without a record")
		return nil
	case sc.entries == 0:
		s.drop(d, size, damage.Reason)
		return nil
	}
	if damage != nil {
		s.report = RepairReport{File: d.file(), Offset: sc.off, Cut: size - sc.off, Reason: damage.Reason}
	}
	d.last, d.size = sc.last, sc.off
	s.whole = append(s.whole, d)
	s.entries, s.attested = sc.entries, int64(attested)
	s.report.Clean = damage == nil && sc.sealed
	return nil
}

// settle decides what bytes that are no entry mean: nil if they are a torn tail, which may be cut, and an error if they are
// damage, which may not.
func settle(d *Damage, newest bool, sc *scanner) error {
	if !newest || d.contradiction {
		return d
	}
	at, found, err := sc.witness()
	if err != nil {
		return err
	}
	if found {
		d.Reason += fmt.Sprintf(", and the frame at offset %d says that it had been durable", at)
		return d
	}
	return nil
}

// drop notes that the newest directory holds nothing that counts.
func (s *survey) drop(d directory, bytes int64, reason string) {
	s.frameless = &d
	s.report = RepairReport{File: d.path, Cut: bytes, Reason: reason}
}

// repair makes the disk agree with the survey. Each step may be interrupted and done again.
func (s *survey) repair(fsys FS, dir string) error {
	for _, d := range []*directory{s.leftover, s.frameless} {
		if d == nil {
			continue
		}
		if err := d.remove(fsys); err != nil {
			return err
		}
		if err := fsys.SyncDir(dir); err != nil {
			return err
		}
	}
	if len(s.whole) == 0 {
		// The directory may be as new as its emptiness suggests, made now or by a process that died before this sync.
		return fsys.SyncDir(filepath.Dir(dir))
	}
	// What was read may be in the page cache only, left there by a process that died or whose sync failed. It is taken for
	// good from here on, and must not be lost to a later power failure. What the last frame knows to be durable is.
	newest := s.whole[len(s.whole)-1]
	if s.report.File == newest.file() && !mutant.On("torn end of the log is not cut") {
		if err := fsys.Truncate(newest.file(), newest.size); err != nil {
			return err
		}
	}
	if mutant.On("end of the log is not written anew") {
		return nil
	}
	if err := fsys.Renew(newest.file(), s.attested); err != nil {
		return err
	}
	if err := fsys.SyncDir(newest.path); err != nil {
		return err
	}
	return fsys.SyncDir(dir)
}
