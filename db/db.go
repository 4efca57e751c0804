package db

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/holdfast-db/holdfast/db/internal/arena"
	"github.com/holdfast-db/holdfast/db/internal/index"
	"github.com/holdfast-db/holdfast/db/internal/segment"
	"github.com/holdfast-db/holdfast/recovery"
	"github.com/holdfast-db/holdfast/txn"
	"github.com/holdfast-db/holdfast/wal"
)

// DB is an open database. All methods are safe for concurrent use.
//
// The way of a checkpoint through it:
//
//	Begin       publish.go    claim the pages that are not there, reserve RAM (room.go, residency.go)
//	Slots       publish.go    the caller fills them
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

	lateWrites atomic.Int64 // writes under way that take longer than makeRoom waits for: the disk lags

	owners    ownerSet
	leases    leaseSet
	recovered RecoveryReport
	scrubbed  atomic.Pointer[ScrubReport]

	closeOnce sync.Once
	closed    CloseReport
	closeErr  error
}

var errClosed = fmt.Errorf("db: %w", ErrClosed)

// RecoveryReport says what Open found and did.
type RecoveryReport struct {
	Duration     time.Duration
	LogRecords   int64 // replayed
	LogBytesCut  int64 // torn end of the log
	NotDurable   int   // checkpoints retired because their pages had been in RAM only
	Lost         int   // checkpoints retired because a segment file was missing or too short
	LostPages    int64
	OrphanFiles  int // segment files removed in which nothing was alive
	TrimmedFiles int // segment files whose unrecorded end was cut off
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
	d := &DB{options: o, pending: newPending(), owners: ownerSet{all: map[*Owner]bool{}}, leases: leaseSet{all: map[*lease]leaseTerm{}}, gate: newGate(), admission: admission{turn: make(chan struct{}, 1)}}
	var undo []func() error
	defer func() {
		for i := len(undo) - 1; i >= 0 && err != nil; i-- {
			if e := undo[i](); e != nil {
				err = errors.Join(err, e)
			}
		}
	}()
	if d.dir, err = takeDirectory(dir, o.ReadOnly); err != nil {
		return nil, err
	}
	undo = append(undo, d.dir.close)
	if d.telemetry, err = newTelemetry(&d.options, d); err != nil {
		return nil, fmt.Errorf("db: telemetry: %w: %w", ErrInvalid, err)
	}
	undo = append(undo, d.telemetry.close)
	ctx, m := d.telemetry.begin(ctx, opRecover)
	defer func() {
		if m.span.IsRecording() {
			m.span.SetAttributes(attribute.Int64(keyRecords, d.recovered.LogRecords), attribute.Int(keyRetired, d.recovered.NotDurable+d.recovered.Lost))
		}
		m.end(err, d.recovered.LostPages, 0)
	}()
	if err = d.dir.checkParts(); err != nil {
		return nil, err
	}
	if d.index, err = index.Open(d.dir.join(indexName), index.Options{Logger: o.Logger, ReadOnly: o.ReadOnly}); err != nil {
		return nil, fmt.Errorf("db: %w", err)
	}
	undo = append(undo, d.index.Close)
	d.loose = &looseIndex{index: d.index}
	d.history = &chronicle{index: d.index, age: o.HistoryAge, now: time.Now, count: -1}
	if err = d.openLog(ctx); err != nil {
		return nil, err
	}
	undo = append(undo, d.log.Close)
	if err = d.openTiers(); err != nil {
		return nil, err
	}
	undo = append(undo, d.arena.Close, d.segments.Close)
	if err = d.reconcile(ctx, &undo); err != nil {
		return nil, err
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
	d.recovered.Duration = time.Since(begun)
	d.begun = begun
	if o.Introspection {
		d.serving = d.introspect()
	}
	return d, nil
}

// openLog opens the log and replays what the index lacks.
func (d *DB) openLog(ctx context.Context) (err error) {
	var applied txn.LSN
	catalogue := catalogue{d.index}
	if err := catalogue.Read(func(v txn.Reader) (err error) {
		applied, err = txn.ReadApplied(v)
		return err
	}); err != nil {
		return fmt.Errorf("db: %w", err)
	}
	if err = d.dir.checkLog(applied); err != nil {
		return err
	}
	d.log, err = wal.Open(d.dir.join(walName), wal.Options{
		FirstLSN: applied + 1, Fence: d.dir.check, FS: d.options.walFS, Logger: d.options.Logger, ReadOnly: d.options.ReadOnly,
	})
	if err != nil {
		return fmt.Errorf("db: %w", err)
	}
	r, err := recovery.Replay(ctx, d.log, historicalCatalogue{catalogue, d.history})
	if err == nil {
		err = d.history.replayed(r.Records, r.To)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("db: %w", err), d.log.Close())
	}
	d.recovered.LogRecords = r.Records
	d.recovered.LogBytesCut = d.log.Repair().Cut
	d.events = newStream(max(applied, d.log.Next()-1))
	return nil
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
	if d.arena, err = arena.New(d.options.RAMBytes, arena.Options{}); err != nil {
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

// reconcile makes catalogue and payload agree, starts the committer and the return of disk space, and retires what is not
// restorable.
func (d *DB) reconcile(ctx context.Context, undo *[]func() error) error {
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
	orphans := slices.DeleteFunc(plan.Orphans, func(n uint64) bool { return live[n].copies > 0 }) // loose pages are in no record
	if d.options.ReadOnly {
		orphans, plan.Tails = nil, nil
	}
	for _, n := range orphans {
		if err := d.segments.Remove(n); err != nil {
			return fmt.Errorf("db: orphaned segment %d: %w", n, err)
		}
	}
	for _, t := range plan.Tails {
		if err := d.segments.Truncate(t.Number, t.Size); err != nil {
			return fmt.Errorf("db: end of segment %d: %w", t.Number, err)
		}
	}
	d.history.gauge = func(s *Sample) { s.RAMBytes, s.LogBytes = d.arena.Usage().Used, d.log.Size() }
	d.disk = newDiskSpace(d.segments, d.options.DiskBytes, live, d.options.Logger)
	d.disk.evict = d.evictFromDisk
	d.residency = newResidency(d.arena, d.disk.free)
	if d.options.ReadOnly {
		d.residency.disk = func([]txn.Placement) {} // what nothing needs any more stays where it is
		d.committer = newPrivateCommitter(d.log, d.index, d.history, d.options.Logger, d.follow)
	} else if d.committer, err = newCommitter(d.log, d.index, d.history, d.options.ReplayBytes, d.options.Logger, d.follow); err != nil {
		return fmt.Errorf("db: %w", err)
	}
	d.committer.told = d.events.tell
	d.curator = newCurator(d, d.options.SupersedeGrace)
	go d.disk.run()
	*undo = append(*undo, func() error {
		d.committer.stop()
		d.disk.close()
		return nil
	})
	d.recovered.NotDurable, d.recovered.Lost, d.recovered.LostPages = len(plan.Undurable), len(plan.Lost), plan.LostPages
	d.recovered.OrphanFiles, d.recovered.TrimmedFiles = len(orphans), len(plan.Tails)
	if len(plan.Damaged) > 0 {
		d.options.Logger.Warn("segment files missing or too short", "files", len(plan.Damaged), "pages", plan.LostPages, "checkpoints", len(plan.Lost))
	}
	if err := d.retireAll(ctx, plan.Lost, txn.ReasonLost); err != nil {
		return err
	}
	for _, s := range plan.Damaged {
		if s.Size < 0 || d.options.ReadOnly {
			continue
		}
		select { // what is left in a short file moves, so that the file goes and no later open measures it again
		case d.disk.sparse <- s.Number:
		default:
		}
	}
	if err := d.retireAll(ctx, plan.Undurable, txn.ReasonNotDurable); err != nil {
		return err
	}
	var graced []Generation
	if err := (catalogue{d.index}).Read(func(v txn.Reader) error {
		return txn.InGrace(v, func(g Generation) (bool, error) {
			graced = append(graced, g)
			return true, nil
		})
	}); err != nil {
		return fmt.Errorf("db: %w", err)
	}
	if len(graced) > 0 {
		d.curator.spare(graced)
	}
	return nil
}

// retireAtOnce bounds the generations of one retire record.
const retireAtOnce = 1024

// retireAll retires and deletes checkpoints, in as many records as it takes. What is retired already is deleted; what is gone
// is passed over.
func (d *DB) retireAll(ctx context.Context, gens []Generation, reason txn.Reason) error {
	for len(gens) > 0 {
		n := min(len(gens), retireAtOnce)
		some := gens[:n]
		gens = gens[n:]
		err := d.committer.commitEssential(ctx, &transaction{decide: func(v txn.Reader) (txn.Record, error) {
			rec, err := txn.DecideRetire(v, some, reason, true, false)
			if rec == nil || err != nil {
				return nil, err
			}
			return rec, nil
		}})
		if err == nil {
			err = d.committer.commitEssential(ctx, &transaction{decide: func(v txn.Reader) (txn.Record, error) {
				var left []Generation
				for _, g := range some {
					if s, err := txn.ReadState(v, g); err != nil {
						return nil, err
					} else if s != nil && s.Status == txn.Retired {
						left = append(left, g)
					}
				}
				rec, err := txn.DecideDelete(v, left)
				if rec == nil || err != nil {
					return nil, err
				}
				return rec, nil
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
		d.disk.free(e.Freed)
	}
}

// Recovered says what Open found and did.
func (d *DB) Recovered() RecoveryReport { return d.recovered }

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
