package db

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"path/filepath"
	"slices"
	"time"

	"github.com/holdfast-db/holdfast/db/internal/index"
	"github.com/holdfast-db/holdfast/db/internal/segment"
	"github.com/holdfast-db/holdfast/recovery"
	"github.com/holdfast-db/holdfast/txn"
	"github.com/holdfast-db/holdfast/wal"
)

// VerifyOptions bound a Verify. The zero value reads everything as fast as it can.
type VerifyOptions struct {
	// BytesPerSecond bounds the rate at which page copies are read; 0 is unbounded.
	BytesPerSecond int64
	// From goes on with the page copies of an earlier pass, at its VerifyReport.Next. Everything else is checked anew.
	From txn.Key
	// Progress is told how far it has come, on the caller's goroutine, a few times a second at most.
	Progress func(VerifyProgress)
	// Logger receives what the parts below have to say; nil drops it.
	Logger *slog.Logger
}

// VerifyProgress says how far a Verify has come.
type VerifyProgress struct {
	Pages, PagesTotal int64 // distinct pages; the total leaves loose ones out
	Bytes, BytesTotal int64 // stored bytes of their copies
	Findings          int
}

// VerifyReport says what Verify looked at and found.
type VerifyReport struct {
	Directory   string
	Duration    time.Duration
	Checkpoints int64 // listed
	Pages       int64 // distinct pages whose copies were read
	Copies      int64 // page copies read
	Bytes       int64 // their stored bytes
	Loose       int64 // of the pages, loose ones
	Segments    int   // files
	LogRecords  int64 // in the log and not in the index yet
	Findings    []Finding
	Omitted     int          // findings beyond MaxFindings
	Affected    []Generation // listed checkpoints that cannot be restored
	Complete    bool         // false if the context ended before everything was read:
	Next        txn.Key      // where to go on, as VerifyOptions.From
}

// Damaged reports whether something was found that the next open does not clear up by itself.
func (r *VerifyReport) Damaged() bool {
	return r.Omitted > 0 || slices.ContainsFunc(r.Findings, func(f Finding) bool { return f.Damage() })
}

// Verify reads a whole database and changes nothing: every frame of the log, every block of the index, the catalogue derived
// anew and compared, every descriptor of the segment files against the catalogue, and every page copy against its checksum.
// It holds the directory shared, so it runs beside readers and never beside a writer.
//
// What is damaged is in the report, whatever it is. An error means that it could not look: ErrLocked naming the holder,
// ErrNotFound, ErrPermission, ErrUnsupported for a directory of another format or not Holdfast's, ErrIO, ErrInvalid. If the
// context ends, the report says so, how far it came and where to go on, and there is no error.
func Verify(ctx context.Context, dir string, o VerifyOptions) (*VerifyReport, error) {
	v, err := newVerifier(dir, o)
	if err != nil {
		return nil, err
	}
	return v.run(ctx)
}

// verifier is one Verify under way, and what recover makes its plan from.
type verifier struct {
	o      VerifyOptions
	begun  time.Time
	report VerifyReport

	dir      *directory
	index    *index.Index // nil if it cannot be opened
	log      *wal.Log     // nil if it cannot be opened
	segments *segment.Store
	loose    *looseIndex

	total    txn.Accounts
	files    map[uint64]int64               // size of each segment file
	short    map[uint64]*Finding            // files that are missing or too short
	lost     []txn.Key                      // pages with a copy that cannot be read
	move     map[uint64][]txn.Key           // pages of checkpoints in files that no longer describe themselves
	losing   map[uint64]map[Generation]bool // listed checkpoints that need what files in short have lost
	affected map[Generation]bool            // listed checkpoints
	names    map[txn.Key]*Namespace         // by id, for the names of groups
	matched  map[uint64]int64               // live copies that descriptors describe, by segment
	told     time.Time                      // last progress
	pause    func(context.Context, int64)   // keeps the rate
}

func newVerifier(dir string, o VerifyOptions) (*verifier, error) {
	if err := checkNumber("VerifyOptions.BytesPerSecond", o.BytesPerSecond, 0, 1<<50); err != nil {
		return nil, err
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	v := &verifier{
		o: o, begun: time.Now(), files: map[uint64]int64{}, short: map[uint64]*Finding{}, affected: map[Generation]bool{},
		names: map[txn.Key]*Namespace{}, move: map[uint64][]txn.Key{}, losing: map[uint64]map[Generation]bool{}, matched: map[uint64]int64{}, pause: pacer(o.BytesPerSecond),
	}
	path, err := resolve(osDirectory{}, dir)
	if err != nil {
		return nil, err
	}
	v.report.Directory = path
	v.dir, err = lookDirectory(osDirectory{}, path)
	if errors.Is(err, ErrCorrupt) {
		v.find(Finding{Kind: "marker", File: filepath.Join(path, markerName), Offset: -1, Detail: err.Error(), Remedy: BySalvage})
		return v, nil
	}
	if err != nil {
		return nil, err
	}
	return v, nil
}

// pacer waits so that no more than so many bytes pass in a second.
func pacer(perSecond int64) func(context.Context, int64) {
	if perSecond == 0 {
		return func(context.Context, int64) {}
	}
	begun, passed := time.Now(), int64(0)
	return func(ctx context.Context, n int64) {
		passed += n
		ahead := time.Duration(float64(passed)/float64(perSecond)*float64(time.Second)) - time.Since(begun)
		if ahead <= 0 {
			return
		}
		timer := time.NewTimer(ahead)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
	}
}

func (v *verifier) find(f Finding) {
	slices.SortFunc(f.Checkpoints, func(a, b Generation) int { return bytes.Compare(a[:], b[:]) })
	for _, g := range f.Checkpoints {
		v.affected[g] = true
	}
	if len(v.report.Findings) >= MaxFindings {
		v.report.Omitted++
		return
	}
	v.report.Findings = append(v.report.Findings, f)
}

// close lets go of the directory.
func (v *verifier) close() error {
	var errs []error
	if v.segments != nil {
		errs = append(errs, v.segments.Close())
	}
	if v.index != nil {
		errs = append(errs, v.index.Close())
	}
	if v.log != nil {
		errs = append(errs, v.log.Close())
	}
	if v.dir != nil {
		errs = append(errs, v.dir.close())
	}
	return errors.Join(errs...)
}

func (v *verifier) run(ctx context.Context) (_ *VerifyReport, err error) {
	defer func() { err = errors.Join(err, v.close()) }()
	if v.dir != nil {
		err = v.look(ctx)
	}
	if errors.Is(err, ErrBusy) && ctx.Err() != nil {
		err = nil
	} else if err == nil {
		v.report.Complete = ctx.Err() == nil
	}
	for g := range v.affected {
		v.report.Affected = append(v.report.Affected, g)
	}
	slices.SortFunc(v.report.Affected, func(a, b Generation) int { return bytes.Compare(a[:], b[:]) })
	v.report.Duration = time.Since(v.begun)
	return &v.report, err
}

// look does the passes, from what is small to what is large.
func (v *verifier) look(ctx context.Context) error {
	if err := v.leftovers(); err != nil {
		return err
	}
	if err := v.openIndex(); err != nil {
		return err
	}
	if err := v.openLog(ctx); err != nil {
		return err
	}
	if err := v.openSegments(); err != nil {
		return err
	}
	if v.index == nil {
		return v.scanSegments(ctx, nil)
	}
	if err := v.index.CheckTables(ctx, func(path string, err error) {
		v.find(Finding{Kind: "index", File: path, Offset: -1, Detail: err.Error(), Remedy: BySalvage})
	}); err != nil {
		return err
	}
	snapshot := v.index.Snapshot()
	defer snapshot.Close()
	if err := v.catalogue(snapshot); err != nil {
		return v.unreadable(err)
	}
	if err := v.scanSegments(ctx, snapshot); err != nil {
		return v.unreadable(err)
	}
	return v.unreadable(v.readPages(ctx, snapshot))
}

// unreadable turns damage that a pass over the index ran into into a finding: the pass ends there and the others go on.
func (v *verifier) unreadable(err error) error {
	if !errors.Is(err, ErrCorrupt) {
		return err
	}
	v.find(Finding{Kind: "index", File: v.dir.join(indexName), Offset: -1, Detail: err.Error(), Remedy: BySalvage})
	return nil
}

func (v *verifier) openIndex() (err error) {
	if err = v.dir.checkParts(); err == nil {
		v.index, err = index.Open(v.dir.join(indexName), index.Options{Logger: v.o.Logger, ReadOnly: true})
	}
	if errors.Is(err, ErrPermission) {
		return err
	}
	if err != nil { // whatever it is, the catalogue cannot be read
		v.find(Finding{Kind: "index", File: v.dir.join(indexName), Offset: -1, Detail: err.Error(), Remedy: BySalvage})
		return nil
	}
	v.loose = &looseIndex{index: v.index}
	return nil
}

// openLog reads the log, and brings the index up to date in memory.
func (v *verifier) openLog(ctx context.Context) error {
	var applied txn.LSN
	if v.index != nil {
		if err := (catalogue{v.index}).Read(func(r txn.Reader) (err error) {
			applied, err = txn.ReadApplied(r)
			return err
		}); err != nil {
			return v.unreadable(err)
		}
	}
	damaged := func(err error) error {
		f := Finding{Kind: "log", File: v.dir.join(walName), Offset: -1, Detail: err.Error(), Remedy: BySalvage}
		var d *wal.Damage
		switch {
		case errors.As(err, &d):
			f.File, f.Offset, f.Detail = d.File, d.Offset, d.Reason
		case !errors.Is(err, ErrCorrupt):
			return err
		}
		v.find(f)
		return nil
	}
	if err := v.dir.checkLog(applied); err != nil {
		return damaged(err)
	}
	var err error
	v.log, err = wal.Open(v.dir.join(walName), wal.Options{FirstLSN: applied + 1, ReadOnly: true})
	if errors.Is(err, ErrNotFound) {
		return nil // there was none yet
	}
	if err != nil {
		return damaged(err)
	}
	if r := v.log.Repair(); r.File != "" {
		v.find(Finding{Kind: "log", File: r.File, Offset: r.Offset, Bytes: r.Cut, Detail: "torn end: " + r.Reason, Remedy: ByOpen})
	}
	if v.index == nil {
		return nil
	}
	r, err := recovery.Replay(ctx, v.log, catalogue{v.index})
	v.report.LogRecords = r.Records
	if err != nil {
		return damaged(err)
	}
	if r.Records > 0 {
		v.find(Finding{Kind: "log", File: v.dir.join(walName), Offset: -1, Remedy: ByOpen,
			Detail: fmt.Sprintf("%d records, LSN %d to %d, are not in the index yet", r.Records, r.From, r.To)})
	}
	return nil
}

// catalogue derives the catalogue anew and compares it with the sizes of the segment files.
func (v *verifier) catalogue(r txn.Reader) error {
	var err error
	if v.total, err = txn.ReadAccounts(r); err != nil {
		return err
	}
	v.report.Checkpoints = v.total.Listed
	if err := txn.Check(r); err != nil {
		v.find(Finding{Kind: "catalogue", File: v.dir.join(indexName), Offset: -1, Detail: err.Error(), Remedy: BySalvage})
	}
	var files []recovery.SegmentFile
	for n, size := range v.files {
		files = append(files, recovery.SegmentFile{Number: n, Size: size})
	}
	plan, err := recovery.Reconcile(catalogue{v.index}, files)
	if err != nil {
		return err
	}
	loose, err := v.loose.segments(r)
	if err != nil {
		return err
	}
	for _, d := range plan.Damaged {
		f := &Finding{Kind: "segment", File: v.file(d.Number), Offset: d.Size, Bytes: d.Needed - max(d.Size, 0), Detail: "cut short", Remedy: ByRecover}
		if d.Size < 0 {
			f.Detail = "missing"
		}
		v.short[d.Number] = f
		if d.Size >= 0 { // what is left in it moves, so that the file goes and nobody measures it again
			if err := v.toMove(r, d.Number); err != nil {
				return err
			}
		}
	}
	for n := range loose { // their ends are recorded nowhere: a short file is found by reading
		if _, there := v.files[n]; !there && v.short[n] == nil {
			v.short[n] = &Finding{Kind: "segment", File: v.file(n), Offset: -1, Detail: "missing, with loose pages in it", Remedy: ByRecover}
		}
	}
	for _, n := range plan.Orphans {
		if loose[n].copies == 0 {
			v.find(Finding{Kind: "leftover", File: v.file(n), Offset: -1, Bytes: v.files[n], Detail: "segment file in which nothing is alive", Remedy: ByOpen})
		}
	}
	for _, t := range plan.Tails {
		v.find(Finding{Kind: "leftover", File: v.file(t.Number), Offset: t.Size, Bytes: v.files[t.Number] - t.Size, Detail: "end of a segment file that no record names", Remedy: ByOpen})
	}
	for b := 0; b < 256 && plan.Retired > 0; b++ {
		stale, err := recovery.StaleUnder(r, byte(b), math.MaxInt64)
		if err != nil {
			return err
		}
		plan.Undurable = append(plan.Undurable, stale...)
	}
	for _, g := range plan.Undurable {
		v.find(Finding{Kind: "checkpoint", File: v.dir.join(indexName), Offset: -1, Remedy: ByOpen,
			Detail: fmt.Sprintf("generation %s was in RAM when the process ended: it is retired", g)})
	}
	return nil
}

// Bounds of what is read at a time.
const (
	verifyCopies = 256
	verifyBytes  = 16 << 20
)

// tellInterval is the time between two calls of Progress.
const tellInterval = 100 * time.Millisecond

func (v *verifier) tell() {
	if v.o.Progress == nil || time.Since(v.told) < tellInterval {
		return
	}
	v.told = time.Now()
	v.o.Progress(VerifyProgress{
		Pages: v.report.Pages, PagesTotal: v.total.PlacedPages, Bytes: v.report.Bytes, BytesTotal: v.total.StoredBytes, Findings: len(v.report.Findings),
	})
}
