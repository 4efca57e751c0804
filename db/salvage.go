package db

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/holdfast-db/holdfast/db/internal/index"
	"github.com/holdfast-db/holdfast/db/internal/segment"
	"github.com/holdfast-db/holdfast/recovery"
	"github.com/holdfast-db/holdfast/txn"
	"github.com/holdfast-db/holdfast/wal"
)

// SalvageOptions of a Salvage. The zero value is a dry run.
type SalvageOptions struct {
	Apply  bool          // replace index and log
	Verify VerifyOptions // how the directory is read; From is not used
	Logger *slog.Logger  // nil drops what the parts have to say
}

// SalvageReport says what Salvage can keep, and what is lost.
type SalvageReport struct {
	Directory string
	Duration  time.Duration
	Needed    bool // neither index nor log are damaged: nothing is done
	Finished  bool // an earlier salvage was complete and was put in place; the rest is empty
	Applied   bool
	Marker    bool                      // the marker was damaged: it is made anew first
	Kept      []Generation              // every page of every rank was read
	Lost      []recovery.LostCheckpoint // known to have been listed
	Loose     int64                     // loose pages kept
	Pages     int64                     // distinct pages of the kept checkpoints
	Unused    int64                     // pages that no kept checkpoint needs: deleted before, or of checkpoints that are lost
	Index     string                    // how much of the index could be read
	Log       wal.Remains
	Room      string // where the replaced index and log are kept
}

// Salvage rebuilds index and log from whatever of them can still be read and from what the segment files say about themselves,
// when they are too damaged for Open and Recover. It keeps the checkpoints that are proven whole, by reading every page, and
// reports the others. Manifests are in the index and in the log since its last cut and nowhere else: of a checkpoint whose
// manifest is in neither not even the name is known, and Unused counts the pages that it may have left behind.
//
// Without SalvageOptions.Apply it changes nothing. With it, the new index and log are made beside the old ones, checked, and put
// in their place in steps that a crash may interrupt anywhere: until it has come to its end, Open refuses, and the next Salvage
// finishes it. The old ones are moved to <dir>/salvage/<n>, not removed. Page files are not touched; the next open gives back
// what nothing names. A directory that is not in need of it is left alone.
//
// Errors: those of Verify; ErrNotFound if the marker is damaged and no segment file says which database it is.
func Salvage(ctx context.Context, dir string, o SalvageOptions) (*SalvageReport, error) {
	begun := time.Now()
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	path, err := resolve(osDirectory{}, dir)
	if err != nil {
		return nil, err
	}
	s := &salvage{o: o, report: SalvageReport{Directory: path}}
	defer func() { s.report.Duration = time.Since(begun) }()
	pending, err := (&directory{fs: osDirectory{}, path: path}).pendingSalvage()
	if err != nil {
		return nil, err
	}
	if pending != "" {
		s.report.Needed, s.report.Finished, s.report.Room = true, o.Apply, filepath.Dir(pending)
		if o.Apply {
			err = s.finish(path, filepath.Dir(pending))
		}
		return &s.report, err
	}
	o.Verify.From = txn.Key{}
	v, err := newVerifier(path, o.Verify)
	if err != nil {
		return nil, err
	}
	verified, err := v.run(ctx)
	if err != nil {
		return nil, err
	}
	if !verified.Complete {
		return nil, fmt.Errorf("db: salvage: the context ended before everything was read: %w: %w", ErrBusy, context.Cause(ctx))
	}
	for i := range verified.Findings {
		s.report.Needed = s.report.Needed || verified.Findings[i].Remedy == BySalvage
	}
	s.report.Marker = v.dir == nil
	if !s.report.Needed {
		return &s.report, nil
	}
	if !s.report.Marker || !o.Apply {
		return &s.report, s.run(ctx, path)
	}
	lock, _, err := s.take(ctx, path)
	if err != nil {
		return nil, err
	}
	if err := lock.Close(); err != nil {
		return nil, osError("unlock", path, err)
	}
	r, err := Salvage(ctx, path, o) // what else is damaged shows now
	if r != nil {
		r.Needed, r.Applied, r.Marker = true, true, true
	}
	return r, err
}

// salvage is one Salvage under way.
type salvage struct {
	o        SalvageOptions
	report   SalvageReport
	segments *segment.Store
	loose    map[txn.Key]copyOf
	verdict  *recovery.Verdict
}

func (s *salvage) run(ctx context.Context, path string) (err error) {
	lock, m, err := s.take(ctx, path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	d := &directory{fs: osDirectory{}, path: path, lock: lock, marker: m}
	s.segments, err = segment.Open(d.join(dataName), segment.Options{DatabaseID: m.id, ReadOnly: true, Logger: s.o.Logger})
	if err != nil {
		return fmt.Errorf("db: %w", err)
	}
	defer func() { err = errors.Join(err, s.segments.Close()) }()
	if err := s.gather(ctx, d); err != nil {
		return err
	}
	if !s.o.Apply {
		return nil
	}
	room, err := d.newRoom()
	if err != nil {
		return err
	}
	if err := s.build(ctx, d, room); err != nil {
		return err
	}
	// From here on it only goes forward.
	if err := renameIn(filepath.Join(room, buildingName), filepath.Join(room, readyName)); err != nil {
		return err
	}
	s.report.Applied, s.report.Room = true, room
	return putInPlace(path, room)
}

// take locks the directory, for writing if there is something to write, and reads or, if it is damaged, makes up its marker.
func (s *salvage) take(ctx context.Context, path string) (DirectoryLock, marker, error) {
	name := filepath.Join(path, lockName)
	lock, err := osDirectory{}.Lock(name, !s.o.Apply)
	if err != nil && (s.o.Apply || !errors.Is(err, fs.ErrNotExist)) {
		return nil, marker{}, osError("lock", name, err)
	} else if err == nil && lock == nil {
		return nil, marker{}, locked(osDirectory{}, path)
	}
	if lock == nil {
		lock = noLock{}
	}
	m, err := readMarker(osDirectory{}, path)
	switch {
	case errors.Is(err, ErrCorrupt):
		m, err = s.remark(ctx, path)
	case err == nil && m == nil:
		err = fmt.Errorf("db: %s: there is no database in it: %w", path, ErrNotFound)
	}
	if err != nil {
		return nil, marker{}, errors.Join(err, lock.Close())
	}
	return lock, *m, nil
}

// remark makes the marker anew from what the segment files and the lock file say.
func (s *salvage) remark(ctx context.Context, path string) (*marker, error) {
	id, err := segment.Identify(ctx, filepath.Join(path, dataName))
	if err != nil {
		return nil, fmt.Errorf("db: the marker is damaged: %w", err)
	}
	m := &marker{id: id, epoch: 1}
	if holder, err := os.ReadFile(filepath.Join(path, lockName)); err == nil {
		var pid int
		var host, boot string
		_, _ = fmt.Sscanf(string(holder), "pid %d host %s boot %s epoch %d", &pid, &host, &boot, &m.epoch)
	}
	if !s.o.Apply {
		return m, nil
	}
	return m, replaceFile(osDirectory{}, filepath.Join(path, markerName), m.marshal())
}

// gather collects the evidence and judges it.
func (s *salvage) gather(ctx context.Context, d *directory) error {
	e := recovery.NewEvidence()
	s.loose = map[txn.Key]copyOf{}
	whole, err := s.readIndex(d, e)
	if err != nil {
		return err
	}
	s.report.Log, err = wal.ReadRemains(nil, d.join(walName), func(lsn txn.LSN, kind byte, payload []byte) error {
		if ctx.Err() != nil {
			return fmt.Errorf("db: salvage: %w: %w", ErrBusy, context.Cause(ctx))
		}
		record, err := txn.Decode(txn.Kind(kind), payload)
		if err == nil {
			e.AddRecord(lsn, record, whole)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("db: salvage: %w", err)
	}
	infos, err := s.segments.Segments()
	if err != nil {
		return fmt.Errorf("db: salvage: %w", err)
	}
	for _, info := range infos {
		_, err := s.segments.Scan(ctx, info.Number, func(c segment.Entry) error {
			if c.Class == segment.Loose {
				if !whole {
					s.loose[c.Key] = copyOf{key: c.Key, bytes: c.Logical, at: c.Place, loose: true}
				}
				return nil
			}
			e.AddCopy(c.Key, c.Parent, int(c.Rank), c.Logical, c.Place)
			return nil
		})
		if errors.Is(err, ErrBusy) || errors.Is(err, ErrUnsupported) {
			return fmt.Errorf("db: salvage: %w", err)
		}
	}
	buffer := make([]byte, 0, verifyBytes)
	pause := pacer(s.o.Verify.BytesPerSecond)
	readable := func(key txn.Key, rank int, size int64, at txn.Placement) (bool, error) {
		if size < 1 || size > MaxPageBytes {
			return false, nil
		}
		if int64(cap(buffer)) < size {
			buffer = make([]byte, 0, size)
		}
		err := s.segments.Read(ctx, segment.ReadRequest{Place: at, Key: key, Rank: uint16(rank), Dst: buffer[:size]})
		pause(ctx, at.Stored)
		if ctx.Err() != nil {
			return false, fmt.Errorf("db: salvage: %w: %w", ErrBusy, context.Cause(ctx))
		}
		return err == nil, nil
	}
	if s.verdict, err = e.Judge(readable); err != nil {
		return err
	}
	for key, c := range s.loose {
		ok, err := readable(key, 0, c.bytes, c.at)
		if err != nil {
			return err
		}
		if !ok {
			delete(s.loose, key)
		}
	}
	s.report.Kept, s.report.Lost = s.verdict.Kept, s.verdict.Lost
	s.report.Pages, s.report.Unused, s.report.Loose = s.verdict.Pages, s.verdict.Unused, int64(len(s.loose))
	return nil
}

// readIndex takes what the index can give. whole says that nothing of it had to be left out.
func (s *salvage) readIndex(d *directory, e *recovery.Evidence) (whole bool, err error) {
	there, err := d.holdsAny(indexName)
	if err != nil {
		return false, err
	}
	if !there {
		s.report.Index = "missing"
		return false, nil
	}
	x, err := index.Open(d.join(indexName), index.Options{Logger: s.o.Logger, ReadOnly: true})
	if err != nil {
		s.report.Index = "cannot be opened: " + err.Error()
		return false, nil
	}
	defer func() { err = errors.Join(err, x.Close()) }()
	snapshot := x.Snapshot()
	defer func() { err = errors.Join(err, snapshot.Close()) }()
	p := snapshot.Patchy()
	if err := e.AddIndex(p); err != nil {
		return false, err
	}
	if err := (&looseIndex{index: x}).all(p, func(key txn.Key, bytes int64, at txn.Placement) error {
		s.loose[key] = copyOf{key: key, bytes: bytes, at: at, loose: true}
		return nil
	}); err != nil {
		return false, err
	}
	if p.Skipped > 0 {
		s.report.Index = fmt.Sprintf("in part: %d ranges or entries cannot be read", p.Skipped)
		return false, nil
	}
	s.report.Index = "whole"
	return true, nil
}

// newRoom makes <dir>/salvage/<n>/building, and clears up after a salvage that did not get further than that.
func (d *directory) newRoom() (string, error) {
	top := d.join(salvageName)
	for n := 1; ; n++ {
		room := filepath.Join(top, fmt.Sprintf("%04d", n))
		_, err := os.Lstat(filepath.Join(room, buildingName))
		if err == nil {
			if err := os.RemoveAll(filepath.Join(room, buildingName)); err != nil {
				return "", osError("remove", room, err)
			}
		}
		used, err := d.holdsAny(filepath.Join(salvageName, fmt.Sprintf("%04d", n)))
		if err != nil {
			return "", err
		}
		if used {
			continue
		}
		if err := os.MkdirAll(filepath.Join(room, buildingName), 0o700); err != nil {
			return "", osError("create", room, err)
		}
		for _, dir := range []string{d.path, top, room} {
			if err := syncDirectory(dir); err != nil {
				return "", osError("sync", dir, err)
			}
		}
		return room, nil
	}
}

// build makes the new index and an empty log, and makes them durable.
func (s *salvage) build(ctx context.Context, d *directory, room string) (err error) {
	building := filepath.Join(room, buildingName)
	x, err := index.Open(filepath.Join(building, indexName), index.Options{Logger: s.o.Logger})
	if err != nil {
		return fmt.Errorf("db: salvage: %w", err)
	}
	next, err := s.verdict.Rebuild(catalogue{x})
	s.report.Kept = s.verdict.Kept
	if err == nil {
		err = s.addLoose(x)
	}
	if err == nil {
		err = catalogue{x}.Read(txn.Check)
	}
	if err == nil {
		err = x.Flush()
	}
	if err = errors.Join(err, x.Close()); err != nil {
		return fmt.Errorf("db: salvage: %w", err)
	}
	l, err := wal.Open(filepath.Join(building, walName), wal.Options{FirstLSN: next})
	if err != nil {
		return fmt.Errorf("db: salvage: %w", err)
	}
	if err := l.Close(); err != nil {
		return fmt.Errorf("db: salvage: %w", err)
	}
	if ctx.Err() != nil {
		return fmt.Errorf("db: salvage: %w: %w", ErrBusy, context.Cause(ctx))
	}
	if err := syncDirectory(building); err != nil {
		return osError("sync", building, err)
	}
	return nil
}

func (s *salvage) addLoose(x *index.Index) error {
	var pages []*page
	for key, c := range s.loose {
		pages = append(pages, &page{key: key, bytes: c.bytes})
	}
	return (&looseIndex{index: x}).add(pages, func(p *page) (txn.Placement, bool) { return s.loose[p.key].at, true }, func(*page, txn.Placement) {})
}

// finish puts an earlier salvage in place.
func (s *salvage) finish(path, room string) (err error) {
	lock, _, err := s.take(context.Background(), path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	return putInPlace(path, room)
}

// putInPlace swaps index and log for the ready ones. Every step may have been done before, and a directory is moved away only
// while the one that takes its place is still waiting, so it can be begun anew after a crash anywhere.
func putInPlace(path, room string) error {
	ready := filepath.Join(room, readyName)
	for _, part := range []string{indexName, walName} {
		from, to := filepath.Join(ready, part), filepath.Join(path, part)
		if _, err := os.Lstat(from); errors.Is(err, fs.ErrNotExist) {
			continue
		} else if err != nil {
			return osError("stat", from, err)
		}
		if _, err := os.Lstat(to); err == nil {
			if err := renameIn(to, filepath.Join(room, part)); err != nil {
				return err
			}
		}
		if err := renameIn(from, to); err != nil {
			return err
		}
	}
	if err := os.Remove(ready); err != nil {
		return osError("remove", ready, err)
	}
	if err := syncDirectory(room); err != nil {
		return osError("sync", room, err)
	}
	return nil
}

// renameIn renames and makes that durable in both directories.
func renameIn(from, to string) error {
	if err := os.Rename(from, to); err != nil {
		return osError("rename", from, err)
	}
	for _, dir := range []string{filepath.Dir(to), filepath.Dir(from)} {
		if err := syncDirectory(dir); err != nil {
			return osError("sync", dir, err)
		}
	}
	return nil
}
