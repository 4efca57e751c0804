package db

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/holdfast-db/holdfast/db/internal/arena"
	"github.com/holdfast-db/holdfast/db/internal/index"
	"github.com/holdfast-db/holdfast/db/internal/segment"
	"github.com/holdfast-db/holdfast/recovery"
	"github.com/holdfast-db/holdfast/txn"
	"github.com/holdfast-db/holdfast/txn/mutant"
	"github.com/holdfast-db/holdfast/wal"
)

// DB is an open database. All methods are safe for concurrent use.
//
// The way of a checkpoint through it:
//
//	Begin       claim.go      claim the pages that are not there, reserve RAM (room.go, residency.go)
//	Slots       slot.go       the caller fills them
//	Commit      publish.go    write them, if the policy says so (persist.go, space.go); list it (commit.go)
//	Lookup      lookup.go     find the longest prefix
//	Restore     restore.go    pin its pages, read what is not in RAM
//	Retire …    checkpoint.go delist, delete; what nothing needs is given back (residency.go, space.go)
type DB struct {
	options   Options
	dir       *directory
	log       *wal.Log
	index     *index.Index
	segments  *segment.Store
	arena     *arena.Arena
	residency *residency
	disk      *diskSpace
	committer *committer
	pending   *pendingPublications
	gate      *gate
	admission admission
	curator   *curator
	loose     *looseIndex
	history   *chronicle
	serving   *introspection // nil without Options.Introspection
	begun     time.Time
	loops     sync.WaitGroup // background loops; they end when the gate shuts
	telemetry *telemetry
	events    *stream
	counters  counters

	opened     atomic.Bool  // Open has come to its end: everything above is there
	lateWrites atomic.Int64 // writes under way that take longer than makeRoom waits for: the disk lags

	evacuating longLock // held while a segment is evacuated, so that whoever counts everything can keep it still

	owners   ownerSet
	leases   leaseSet
	unproven *unproven
	scrubbed atomic.Pointer[ScrubReport]

	closeOnce sync.Once
	closed    CloseReport
	closeErr  error
}

var errClosed = fmt.Errorf("db: %w", ErrClosed)

// RecoveryReport says what Open found and did, and what it left to the background.
type RecoveryReport struct {
	Duration     time.Duration // until it served
	Replay       time.Duration // of that, reading and replaying the log
	LogRecords   int64         // replayed
	LogBytesCut  int64         // torn end of the log
	NotDurable   int           // checkpoints retired because their pages had been in RAM only
	Lost         int           // checkpoints retired because a segment file was missing or too short
	LostPages    int64
	OrphanFiles  int // segment files removed in which nothing was alive
	TrimmedFiles int // segment files whose unrecorded end was cut off

	Complete   bool          // everything that the last process left is settled
	Unverified int64         // checkpoints known to be incomplete and not retired yet; they are not listed
	Background time.Duration // from when it served until everything was settled
	Failure    string        // of the last try to go on in the background
}

// CloseReport says what Close did.
type CloseReport struct {
	Persisted      int64 // pages written
	PersistedBytes int64
	Retired        int // checkpoints given up because their pages were not written
	Aborted        int // publications that had not ended
	Leases         int // restorations still held; their memory stays until they are released
	Transfers      int // copies that are not proven finished; their memory stays until they are
}

// Open opens the database in dir, creating it if the directory is empty or not there. One process, and in it one handle,
// owns a directory at a time.
//
// Errors: ErrLocked naming the holder; ErrUnsupported for a directory that is not Holdfast's or of another format version,
// which is left untouched; ErrPermission; ErrCorrupt for damage that does not heal by itself; ErrInvalid, ErrTooLarge for
// options; ErrNoSpace, ErrIO.
func Open(ctx context.Context, dir string, o Options) (*DB, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("db: the context ended before the call: %w: %w", ErrBusy, context.Cause(ctx))
	}
	begun := time.Now()
	d := &DB{options: o, pending: newPending(), evacuating: newLongLock(), owners: ownerSet{all: map[*Owner]bool{}}, leases: leaseSet{all: map[*lease]leaseTerm{}}, gate: newGate(), admission: admission{turn: make(chan struct{}, 1)}}
	var undo []func() error
	defer func() {
		for i := len(undo) - 1; i >= 0 && err != nil; i-- {
			if e := undo[i](); e != nil {
				err = errors.Join(err, e)
			}
		}
	}()
	if d.dir, err = takeDirectory(d.options.storage.Directory, dir, o.ReadOnly); err != nil {
		return nil, err
	}
	undo = append(undo, d.dir.close)
	if d.telemetry, err = newTelemetry(&d.options, d); err != nil {
		return nil, fmt.Errorf("db: telemetry: %w: %w", ErrInvalid, err)
	}
	undo = append(undo, d.telemetry.close)
	ctx, m := d.telemetry.begin(ctx, opRecover)
	defer func() {
		var r RecoveryReport
		if d.unproven != nil {
			r = d.RecoveryReport()
		}
		if m.span.IsRecording() {
			m.span.SetAttributes(attribute.Int64(keyRecords, r.LogRecords), attribute.Int(keyRetired, r.NotDurable+r.Lost))
		}
		m.end(err, r.LostPages, 0)
	}()
	if err = d.dir.checkParts(); err != nil {
		return nil, err
	}
	if d.index, err = index.Open(d.dir.join(indexName), index.Options{FS: d.options.storage.Index, Logger: o.Logger, ReadOnly: o.ReadOnly}); err != nil {
		return nil, fmt.Errorf("db: %w", err)
	}
	undo = append(undo, d.index.Close)
	d.loose = &looseIndex{index: d.index}
	d.history = &chronicle{index: d.index, age: o.HistoryAge, now: time.Now, count: -1}
	var replayed RecoveryReport
	if replayed, err = d.openLog(ctx, begun); err != nil {
		return nil, err
	}
	undo = append(undo, d.log.Close)
	if err = d.openTiers(); err != nil {
		return nil, err
	}
	undo = append(undo, d.arena.Close, d.segments.Close)
	if err = d.reconcile(&undo, replayed); err != nil {
		return nil, err
	}
	tell := d.progress(begun)
	if err = d.unproven.pass(ctx, tell, func() bool { return time.Since(begun) < o.OpenBudget }); err != nil {
		return nil, err
	}
	d.unproven.note(func(r *RecoveryReport) {
		d.unproven.served = time.Now()
		r.Duration = d.unproven.served.Sub(begun)
	})
	if d.unproven.active.Load() {
		d.loop("prove", func() { d.unproven.run(tell) })
	}
	if !o.ReadOnly {
		d.loop("curator", d.curator.run)
		d.loop("evacuate", d.evacuateLoop)
		if d.history.age > 0 {
			d.loop("history", func() {
				d.history.run(d.gate.stopping, func(err error) { d.options.Logger.Warn("history not trimmed", "error", err) })
			})
		}
		if o.ScrubBytesPerSecond > 0 {
			d.loop("scrub", d.scrubLoop)
		}
		if d.options.DiskBytes > 0 {
			d.trim() // the budget may be smaller than it was
		}
	}
	d.begun = begun
	d.opened.Store(true)
	d.index.Begin()
	if o.Introspection {
		d.serving = d.introspect()
	}
	return d, nil
}

// openLog opens the log and replays what the index lacks.
func (d *DB) openLog(ctx context.Context, begun time.Time) (report RecoveryReport, err error) {
	start := time.Now()
	var applied txn.LSN
	catalogue := catalogue{d.index}
	if err := catalogue.Read(func(v txn.Reader) (err error) {
		applied, err = txn.ReadApplied(v)
		return err
	}); err != nil {
		return report, fmt.Errorf("db: %w", err)
	}
	if err = d.dir.checkLog(applied); err != nil {
		return report, err
	}
	first := applied + 1
	if mutant.On("log numbers are given out again") {
		first = 0
	}
	d.log, err = wal.Open(d.dir.join(walName), wal.Options{
		RotateBytes: min(wal.RotateBytesDefault, d.options.ReplayBytes),
		FirstLSN:    first, Fence: d.dir.check, FS: d.options.walFS, Logger: d.options.Logger, ReadOnly: d.options.ReadOnly,
	})
	if err != nil {
		return report, fmt.Errorf("db: %w", err)
	}
	tell, done, total := d.progress(begun), int64(0), int64(d.log.Next()-1-applied)
	tell(StageReplay, 0, total)
	r, err := recovery.Replay(ctx, d.log, countingCatalogue{historicalCatalogue{catalogue, d.history}, func() {
		done = min(done+recovery.ReplayBatch, total)
		tell(StageReplay, done, total)
	}})
	if err == nil {
		err = d.history.replayed(r.Records, r.To)
	}
	if err != nil {
		return report, errors.Join(fmt.Errorf("db: %w", err), d.log.Close())
	}
	d.events = newStream(max(applied, d.log.Next()-1))
	return RecoveryReport{LogRecords: r.Records, LogBytesCut: d.log.Repair().Cut, Replay: time.Since(start)}, nil
}

// openTiers opens the RAM tier and the segment files.
func (d *DB) openTiers() (err error) {
	var accounts txn.Accounts
	if err := (catalogue{d.index}).Read(func(v txn.Reader) (err error) {
		accounts, err = txn.ReadAccounts(v)
		return err
	}); err != nil {
		return fmt.Errorf("db: %w", err)
	}
	if d.arena, err = arena.New(d.options.RAMBytes, arena.Options{Lock: pageLock(d.options.Engine, d.options.Logger)}); err != nil {
		return fmt.Errorf("db: %w", err)
	}
	d.segments, err = segment.Open(d.dir.join(dataName), segment.Options{
		SegmentBytes: d.options.SegmentBytes, DatabaseID: d.dir.marker.id, Floor: uint64(accounts.LastSegment), FS: d.options.segmentFS, Logger: d.options.Logger,
		ReadOnly: d.options.ReadOnly,
	})
	if err != nil {
		return errors.Join(fmt.Errorf("db: %w", err), d.arena.Close())
	}
	return nil
}

// reconcile compares catalogue and payload, and starts the committer and the return of disk space. What does not agree is
// for the pass of unproven.
func (d *DB) reconcile(undo *[]func() error, replayed RecoveryReport) error {
	infos, err := d.segments.Segments()
	if err != nil {
		return fmt.Errorf("db: %w", err)
	}
	files := make([]recovery.SegmentFile, len(infos))
	for i, info := range infos {
		files[i] = recovery.SegmentFile{Number: info.Number, Size: info.Size}
	}
	plan, err := recovery.Reconcile(catalogue{d.index}, files)
	if err != nil {
		return fmt.Errorf("db: %w", err)
	}
	var live map[uint64]segmentLive
	if err := (catalogue{d.index}).Read(func(v txn.Reader) error {
		if live, err = d.loose.segments(v); err != nil {
			return err
		}
		return txn.Segments(v, func(n uint64, use txn.SegmentUse) (bool, error) {
			live[n] = segmentLive{use.LivePages, use.LiveBytes}
			return true, nil
		})
	}); err != nil {
		return fmt.Errorf("db: %w", err)
	}
	orphans, tails := withoutLive(plan.Orphans, live), plan.Tails
	if mutant.On("a file in use is taken for an orphan") && len(infos) > 0 {
		orphans = append(orphans, infos[0].Number)
	}
	for i := range tails {
		if mutant.On("segments are cut too short") {
			tails[i].Size -= 4096
		}
	}
	if mutant.On("what a crash took stays listed") {
		plan.Undurable = nil
	}
	if d.options.ReadOnly {
		orphans, tails = nil, nil
	}
	d.history.gauge = func(s *Sample) { s.RAMBytes, s.LogBytes = d.arena.Usage().Used, d.log.Size() }
	d.unproven = d.newUnproven(&plan, d.log.Next()-1, orphans, tails)
	d.unproven.report = replayed
	d.disk = newDiskSpace(d.segments, d.options.DiskBytes, live, d.options.Logger)
	d.disk.evict = d.evictFromDisk
	d.disk.settled = d.index.Flush
	d.disk.halted = func() bool { return d.log.Err() != nil || d.index.Err() != nil }
	d.residency = newResidency(d.arena, d.disk.free)
	if d.options.ReadOnly {
		d.residency.disk = func(_, _ []txn.Placement) {} // what nothing needs any more stays where it is
		d.committer = newPrivateCommitter(d.log, d.index, d.history, d.options.Logger, d.follow)
	} else if d.committer, err = newCommitter(d.log, d.index, d.history, d.options.ReplayBytes, d.options.Logger, d.follow); err != nil {
		return fmt.Errorf("db: %w", err)
	}
	d.committer.told = d.events.tell
	if replayed.LogRecords > 0 {
		d.committer.flushSoon()
	}
	d.curator = newCurator(d, d.options.SupersedeGrace, d.unproven.since)
	go d.disk.run()
	*undo = append(*undo, func() error {
		d.committer.stop()
		d.disk.close()
		return nil
	})
	return nil
}

// retireAtOnce bounds the generations of one retire record.
const retireAtOnce = 1024

// retireAll retires and deletes checkpoints, in as many records as it takes. What is retired already is deleted; what is gone
// is passed over.
func (d *DB) retireAll(ctx context.Context, gens []Generation, reason txn.Reason) error {
	return d.retireThose(ctx, gens, reason, func(*txn.State) bool { return true })
}

// retireThose is retireAll for those of the checkpoints whose state, when the turn has come, is such.
func (d *DB) retireThose(ctx context.Context, gens []Generation, reason txn.Reason, such func(*txn.State) bool) error {
	for len(gens) > 0 {
		n := min(len(gens), retireAtOnce)
		some := gens[:n]
		gens = gens[n:]
		those := func(v txn.Reader, status txn.Status) (found []Generation, err error) {
			for _, g := range some {
				if s, err := txn.ReadState(v, g); err != nil {
					return nil, err
				} else if s != nil && s.Status == status && such(s) {
					found = append(found, g)
				}
			}
			return found, nil
		}
		err := d.committer.commitEssential(ctx, &transaction{decide: func(v txn.Reader) (txn.Record, error) {
			listed, err := those(v, txn.Listed)
			if err != nil {
				return nil, err
			}
			return optional(txn.DecideRetire(v, listed, reason, true, false))
		}})
		if err == nil {
			err = d.committer.commitEssential(ctx, &transaction{decide: func(v txn.Reader) (txn.Record, error) {
				left, err := those(v, txn.Retired)
				if err != nil {
					return nil, err
				}
				return optional(txn.DecideDelete(v, left))
			}})
		}
		if err != nil {
			return fmt.Errorf("db: retiring %d checkpoints (%v): %w", n, reason, err)
		}
	}
	return nil
}

// follow tells the tiers what a record changed. On the committer goroutine.
func (d *DB) follow(e *txn.Effects) {
	d.counters.published.Add(int64(len(e.Listed)))
	d.counters.retired.Add(int64(len(e.Retired)))
	d.counters.deleted.Add(int64(len(e.Deleted)))
	d.unproven.retired(e.Retired)
	d.residency.setCool(e.Cooled, true)
	d.residency.setCool(e.Warmed, false)
	if len(e.Dropped) > 0 {
		d.residency.dropped(e.Dropped)
	}
	if len(e.Graced) > 0 {
		d.curator.spare(e.Graced)
	}
	if n := len(e.Listed); n > 0 {
		d.curator.listed(e.Listed[n-1])
	}
	if len(e.Freed) > 0 {
		d.disk.free(e.Freed, nil)
	}
}

// Close ends the database. It admits nothing new, waits for pending publications, writes what is in RAM only and worth
// keeping, retires what did not make it before the context ended, and makes the index durable, so that the next open has
// nothing to replay. Whatever the context, what it acknowledged stays acknowledged. Closing again gives the same report.
//
// Errors: that of the write or sync that failed, if one did; ErrBusy if a call was still inside when the context ended,
// because of a disk that hangs, and then the directory stays locked until the process ends. Either way the next open recovers.
func (d *DB) Close(ctx context.Context) (CloseReport, error) {
	d.closeOnce.Do(func() { d.closeErr = d.close(ctx) })
	return d.closed, d.closeErr
}

func (d *DB) close(ctx context.Context) error {
	d.serving.close()
	defer d.events.close() // at the end: what Close retires is told
	d.closed.Aborted = d.pending.close(ctx)
	within(ctx, d.owners.close)
	if err := d.gate.close(ctx); err != nil {
		return err // a disk that hangs: what is below cannot be taken away from who is in it
	}
	d.loops.Wait()
	errs := []error{d.persistRest(ctx)}
	if err := d.gate.wait(ctx); err != nil {
		return errors.Join(append(errs, err)...)
	}
	errs = append(errs, d.committer.close())
	d.disk.close()
	d.closed.Leases, d.closed.Transfers = int(d.counters.leases.Load()), int(d.counters.transfers.Load())
	errs = append(errs, d.telemetry.close(), d.segments.Close(), d.index.Close(), d.log.Close())
	d.residency.clear()
	if err := d.arena.Close(); err != nil && d.closed.Leases+d.closed.Transfers == 0 {
		errs = append(errs, err)
	}
	return errors.Join(append(errs, d.dir.close())...)
}

// within calls fn and waits for it, but no longer than the context lasts: a log that hangs holds up whoever is in it.
func within(ctx context.Context, fn func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		fn()
	}()
	select {
	case <-done:
	case <-ctx.Done():
	}
}

// persistRest writes the dirty pages that the policy keeps, those of current checkpoints first, until the context ends, and
// retires what is not restorable without the others.
func (d *DB) persistRest(ctx context.Context) error {
	var held []*page // pinned, so that nothing is offered twice
	defer func() { d.residency.unpinAll(held) }()
	var failed error
	for _, list := range []*pageList{&d.residency.dirty, &d.residency.dirtyCool} {
		for ctx.Err() == nil && failed == nil {
			pages := d.residency.oldest(list, writeBackBytes)
			if len(pages) == 0 {
				break
			}
			held = append(held, pages...)
			keep, _ := d.sortDirty(pages)
			if failed = d.persist(ctx, keep); failed == nil {
				d.closed.Persisted += int64(len(keep))
				for _, p := range keep {
					d.closed.PersistedBytes += p.bytes * int64(len(p.slots))
				}
			}
		}
	}
	var undurable []Generation
	err := catalogue{d.index}.Read(func(v txn.Reader) error {
		return txn.Undurable(v, func(g Generation) (bool, error) {
			undurable = append(undurable, g)
			return true, nil
		})
	})
	d.closed.Retired = len(undurable)
	if err == nil && ctx.Err() == nil && d.log.Err() == nil {
		err = d.retireAll(ctx, undurable, txn.ReasonShutdown)
	}
	return errors.Join(failed, err) // what is not retired here is retired by the next open
}

// catalogue shows the index to package recovery.
type catalogue struct{ index *index.Index }

func (c catalogue) Read(fn func(v txn.Reader) error) error {
	s := c.index.Snapshot()
	return errors.Join(fn(s), s.Close())
}

func (c catalogue) Update(fn func(v txn.View) error) error {
	b := c.index.NewBatch()
	if err := fn(b); err != nil {
		return errors.Join(err, b.Discard())
	}
	return b.Commit()
}
