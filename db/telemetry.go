package db

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/holdfast-db/holdfast/txn"
)

// scope names the instrumentation.
const scope = "github.com/holdfast-db/holdfast/db"

// operation is what is measured: its duration here and in a histogram of OpenTelemetry, and as a span.
type operation uint8

const (
	opPublish   operation = iota // from Begin to the listing, the filling by the caller included
	opBegin                      // one Begin
	opCommit                     // one Commit, the last one with the writing and the record
	opLookup                     // one Lookup
	opRestore                    // one Restore
	opPersist                    // pages written, synced and recorded
	opAdmission                  // a wait for room in RAM
	opEvictRAM                   // a round of making room in RAM
	opEvictDisk                  // a round of making room on disk
	opRecover                    // one Open
)

var operations = [...]string{
	opPublish: "publish", opBegin: "begin", opCommit: "commit", opLookup: "lookup", opRestore: "restore", opPersist: "persist",
	opAdmission: "admission", opEvictRAM: "evict_ram", opEvictDisk: "evict_disk", opRecover: "recover",
}

var spanNames = func() (names [len(operations)]string) {
	for op, name := range operations {
		names[op] = "holdfast." + name
	}
	return names
}()

// The keys of attributes. Those that are not Holdfast's own are of the semantic conventions.
const (
	keyOperation = "db.operation.name"
	keyError     = "error.type"
	keyDirectory = "db.namespace" // of the scope: the directory
	keyTier      = "holdfast.tier"
	keyState     = "holdfast.state"
	keyOutcome   = "holdfast.outcome"
	keyReason    = "holdfast.reason"
	keyFile      = "holdfast.file"
	keyPages     = "holdfast.pages"
	keyBytes     = "holdfast.bytes"
	keyEnd       = "holdfast.end"
	keyRecords   = "holdfast.log.records"
	keyRetired   = "holdfast.checkpoints.retired"
)

// errorClasses are the values of error.type. A miss is none.
var errorClasses = [...]error{
	ErrBusy, ErrNoSpace, ErrConflict, ErrInvalid, ErrTooLarge, ErrClosed, ErrIO, ErrCorrupt, ErrFenced, ErrReadOnly, ErrUnsupported, ErrLocked, ErrPermission,
}

// classOf gives the place in errorClasses plus one; 0 for what is no error.
func classOf(err error) int {
	if err == nil || errors.Is(err, ErrNotFound) {
		return 0
	}
	for i, class := range errorClasses {
		if errors.Is(err, class) {
			return i + 1
		}
	}
	return 0
}

// slowAfter is the duration from which on an operation is logged although it succeeded.
const slowAfter = 10 * time.Second

// telemetry measures operations and counts what requests ask and get. It offers that to OpenTelemetry through its API only: the embedding
// process chooses where it goes. Without an SDK what is left of an operation is two readings of the clock and a histogram of our
// own; it allocates nothing.
//
// Counters and gauges are instruments that are read by callback, so they cost nothing while nobody looks.
type telemetry struct {
	tracer trace.Tracer
	unset  trace.TracerProvider // the global provider, while it is the one that no SDK has replaced; nil if spans are always begun
	logger *slog.Logger
	slow   time.Duration

	latencies [len(operations)]histogram

	replays, rejected, ended     atomic.Int64
	full, partial, missed, again atomic.Int64
	asked, found                 atomic.Int64
	restored, restoredCold       atomic.Int64 // pages
	restoredBytes                atomic.Int64

	duration   metric.Float64Histogram
	size       metric.Int64Histogram
	attributes [len(operations)][len(errorClasses) + 1][]metric.RecordOption
	observed   metric.Registration
}

// newTelemetry makes the instruments.
func newTelemetry(o *Options, d *DB) (*telemetry, error) {
	t := &telemetry{logger: o.Logger, slow: slowAfter}
	where := attribute.NewSet(attribute.String(keyDirectory, d.dir.path))
	tracers := o.TracerProvider
	if tracers == nil {
		tracers = otel.GetTracerProvider()
		// The provider that stands in until there is one hands its spans on to nobody. Making them would cost every lookup a few
		// allocations. It is told by its name, which is all that it has; were that to change, spans would be made.
		if fmt.Sprintf("%T", tracers) == "*global.tracerProvider" {
			t.unset = tracers
		}
	}
	t.tracer = tracers.Tracer(scope, trace.WithInstrumentationAttributeSet(where))
	meters := o.MeterProvider
	if meters == nil {
		meters = otel.GetMeterProvider()
	}
	m := meters.Meter(scope, metric.WithInstrumentationAttributeSet(where))
	for op := range t.attributes {
		for class := range t.attributes[op] {
			attrs := []attribute.KeyValue{attribute.String(keyOperation, operations[op])}
			if class > 0 {
				attrs = append(attrs, attribute.String(keyError, errorClasses[class-1].Error()))
			}
			t.attributes[op][class] = []metric.RecordOption{metric.WithAttributeSet(attribute.NewSet(attrs...))}
		}
	}
	var errs []error
	var err error
	if t.duration, err = m.Float64Histogram(durationName, metric.WithUnit("s"), metric.WithDescription(durationAbout),
		metric.WithExplicitBucketBoundaries(durationBounds...)); err != nil {
		errs = append(errs, err)
	}
	if t.size, err = m.Int64Histogram(sizeName, metric.WithUnit("By"), metric.WithDescription(sizeAbout),
		metric.WithExplicitBucketBoundaries(sizeBounds...)); err != nil {
		errs = append(errs, err)
	}
	if t.observed, err = observe(m, d); err != nil {
		errs = append(errs, err)
	}
	return t, errors.Join(errs...)
}

func (t *telemetry) close() error {
	if t.observed == nil {
		return nil
	}
	return t.observed.Unregister()
}

// measured is one operation under way.
type measured struct {
	t     *telemetry
	op    operation
	begun time.Time
	ctx   context.Context // with the span, so that histograms can name it as an exemplar
	span  trace.Span
}

// begin begins an operation. The context carries its span.
func (t *telemetry) begin(ctx context.Context, op operation) (context.Context, measured) {
	m := measured{t: t, op: op, begun: time.Now(), span: noop.Span{}}
	if t.unset == nil || otel.GetTracerProvider() != t.unset {
		ctx, m.span = t.tracer.Start(ctx, spanNames[op])
	}
	m.ctx = ctx
	return ctx, m
}

// within makes ctx a part of the operation: spans that are begun in it are its children.
func (m *measured) within(ctx context.Context) context.Context {
	if m.span == nil || !m.span.IsRecording() {
		return ctx
	}
	return trace.ContextWithSpan(ctx, m.span)
}

// end ends the operation with its outcome and what it was about: pages of one rank, and bytes. Sizes of 0 are not recorded: what
// moved nothing says nothing about moving.
func (m *measured) end(err error, pages, bytes int64) {
	took := time.Since(m.begun)
	m.t.latencies[m.op].add(took)
	attributes := m.t.attributes[m.op][classOf(err)]
	m.t.duration.Record(m.ctx, took.Seconds(), attributes...)
	if bytes > 0 {
		m.t.size.Record(m.ctx, bytes, attributes...)
	}
	m.close(err, pages, bytes)
	if took >= m.t.slow && m.op != opPublish {
		m.t.logger.Warn("operation took long", "operation", operations[m.op], "seconds", took.Seconds(), "pages", pages, "bytes", bytes, "error", err)
	}
}

// close ends the span alone, for what ended in a way whose duration says nothing.
func (m *measured) close(err error, pages, bytes int64) {
	if m.span.IsRecording() {
		m.span.SetAttributes(attribute.Int64(keyPages, pages), attribute.Int64(keyBytes, bytes))
		if class := classOf(err); class > 0 {
			m.span.SetAttributes(attribute.String(keyError, errorClasses[class-1].Error()))
			m.span.SetStatus(codes.Error, err.Error())
		}
	}
	m.span.End()
}

// lookup counts one lookup or restore: how many tokens were of use at most, and how many were found. One that repeats an
// earlier one of the same request is counted apart, so that a ratio of the others is one of requests.
func (t *telemetry) lookup(again bool, asked, found int64) {
	if again {
		t.again.Add(1)
		return
	}
	switch {
	case found == 0:
		t.missed.Add(1)
	case found == asked:
		t.full.Add(1)
	default:
		t.partial.Add(1)
	}
	t.asked.Add(asked)
	t.found.Add(found)
}

// handedOut counts the pages of a restoration, and those of them that had to be read.
func (t *telemetry) handedOut(pages, cold, bytes int64) {
	t.restored.Add(pages)
	t.restoredCold.Add(cold)
	t.restoredBytes.Add(bytes)
}

const (
	durationName  = "holdfast.operation.duration"
	durationAbout = "How long operations took."
	sizeName      = "holdfast.operation.size"
	sizeAbout     = "Page bytes that operations were about, of all ranks, those of 0 left out."
)

// Bounds of the buckets, in seconds from 10 µs to 100 s, and in bytes from 4 KiB to 64 GiB.
var (
	durationBounds = []float64{
		1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100,
	}
	sizeBounds = []float64{1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28, 1 << 30, 1 << 32, 1 << 34, 1 << 36}
)

// instrumentKind is the type of an instrument, as docs/metrics.md names it.
type instrumentKind string

const (
	counter       instrumentKind = "counter"
	upDownCounter instrumentKind = "updowncounter" // sums over its attributes mean something
	gauge         instrumentKind = "gauge"
)

// instrument is one that is read by callback.
type instrument struct {
	name  string
	kind  instrumentKind
	unit  string
	about string
	read  func(s *Stats, put func(v int64, attrs ...attribute.KeyValue))
}

// one reads a single value without attributes.
func one(of func(s *Stats) int64) func(*Stats, func(int64, ...attribute.KeyValue)) {
	return func(s *Stats, put func(int64, ...attribute.KeyValue)) { put(of(s)) }
}

// instruments are all that are read by callback. docs/metrics.md lists them, and a test compares.
var instruments = []instrument{
	{"holdfast.checkpoint.count", upDownCounter, "{checkpoint}", "Checkpoints: current and superseded ones are listed, retired ones wait to be deleted.",
		func(s *Stats, put func(int64, ...attribute.KeyValue)) {
			put(s.Checkpoints-s.Superseded, attribute.String(keyState, "current"))
			put(s.Superseded, attribute.String(keyState, "superseded"))
			put(s.Retired, attribute.String(keyState, "retired"))
		}},
	{"holdfast.checkpoint.undurable", upDownCounter, "{checkpoint}", "Listed checkpoints without a complete disk copy.", one(func(s *Stats) int64 { return s.Undurable })},
	{"holdfast.checkpoint.unverified", upDownCounter, "{checkpoint}", "Checkpoints that the last process left incomplete, not listed and not retired yet.", one(func(s *Stats) int64 { return s.Unverified })},
	{"holdfast.namespace.count", upDownCounter, "{namespace}", "Namespaces that something was ever published in.", one(func(s *Stats) int64 { return s.Namespaces })},
	{"holdfast.page.count", upDownCounter, "{page}", "Distinct pages of all checkpoints, ranks not counted.",
		func(s *Stats, put func(int64, ...attribute.KeyValue)) {
			put(s.PlacedPages, attribute.String(keyState, "placed"))
			put(s.Pages-s.PlacedPages, attribute.String(keyState, "dirty"))
		}},
	{"holdfast.page.size", upDownCounter, "By", "Logical bytes of these pages, all ranks.", one(func(s *Stats) int64 { return s.PageBytes })},
	{"holdfast.page.quarantined", upDownCounter, "{page}", "Lost pages that were not published again.", one(func(s *Stats) int64 { return s.Quarantined })},
	{"holdfast.tier.usage", upDownCounter, "By", "Bytes in use in a tier.",
		func(s *Stats, put func(int64, ...attribute.KeyValue)) {
			put(s.RAMUsed, attribute.String(keyTier, "ram"))
			put(s.DiskBytes, attribute.String(keyTier, "disk"))
		}},
	{"holdfast.tier.limit", upDownCounter, "By", "Budget of a tier. An unbounded disk has none.",
		func(s *Stats, put func(int64, ...attribute.KeyValue)) {
			put(s.RAMCapacity, attribute.String(keyTier, "ram"))
			if s.DiskBudget > 0 {
				put(s.DiskBudget, attribute.String(keyTier, "disk"))
			}
		}},
	{"holdfast.tier.dirty", upDownCounter, "By", "Bytes in RAM without a disk copy.", one(func(s *Stats) int64 { return s.RAMDirtyBytes })},
	{"holdfast.file.count", upDownCounter, "{file}", "Segment files.", one(func(s *Stats) int64 { return s.Segments })},
	{"holdfast.file.size", upDownCounter, "By", "What files take on disk.",
		func(s *Stats, put func(int64, ...attribute.KeyValue)) {
			put(s.SegmentBytes, attribute.String(keyFile, "segment"))
			put(s.LogBytes, attribute.String(keyFile, "log"))
			put(s.IndexBytes, attribute.String(keyFile, "index"))
		}},
	{"holdfast.publication.pending", upDownCounter, "{publication}", "Publications that have begun and not ended.", one(func(s *Stats) int64 { return s.Pending })},
	{"holdfast.lease.count", upDownCounter, "{lease}", "Restorations that are held.", one(func(s *Stats) int64 { return s.Leases })},
	{"holdfast.owner.count", upDownCounter, "{owner}", "Owners that are registered and alive.", one(func(s *Stats) int64 { return s.Owners })},
	{"holdfast.transfer.count", upDownCounter, "{transfer}", "Copies by devices that are not proven finished.", one(func(s *Stats) int64 { return s.Transfers })},
	{"holdfast.log.lsn", gauge, "{record}", "Log sequence number of the last record.", one(func(s *Stats) int64 { return int64(s.LSN) })},

	{"holdfast.publication.outcomes", counter, "{publication}", "Publications by how they ended: listed, replay, rejected, unlisted.",
		func(s *Stats, put func(int64, ...attribute.KeyValue)) {
			put(s.Published, attribute.String(keyOutcome, "listed"))
			put(s.Replays, attribute.String(keyOutcome, "replay"))
			put(s.Rejected, attribute.String(keyOutcome, "rejected"))
			put(s.Unlisted, attribute.String(keyOutcome, "unlisted"))
		}},
	{"holdfast.lookup.outcomes", counter, "{lookup}", "Lookups and restores by what they found: full, partial, miss; and retries of either.",
		func(s *Stats, put func(int64, ...attribute.KeyValue)) {
			put(s.LookupsFull, attribute.String(keyOutcome, "full"))
			put(s.LookupsPartial, attribute.String(keyOutcome, "partial"))
			put(s.LookupsMissed, attribute.String(keyOutcome, "miss"))
			put(s.LookupsRetried, attribute.String(keyOutcome, "retry"))
		}},
	{"holdfast.lookup.tokens.asked", counter, "{token}", "Tokens that lookups and restores could have found, without retries.", one(func(s *Stats) int64 { return s.TokensAsked })},
	{"holdfast.lookup.tokens.found", counter, "{token}", "Tokens that they found.", one(func(s *Stats) int64 { return s.TokensFound })},
	{"holdfast.restore.pages", counter, "{page}", "Pages that restores handed out, ranks not counted, by where they were.",
		func(s *Stats, put func(int64, ...attribute.KeyValue)) {
			put(s.PagesRestored-s.PagesRestoredCold, attribute.String(keyTier, "ram"))
			put(s.PagesRestoredCold, attribute.String(keyTier, "disk"))
		}},
	{"holdfast.restore.io", counter, "By", "Bytes that restores handed out, all ranks.", one(func(s *Stats) int64 { return s.BytesRestored })},
	{"holdfast.checkpoint.retired", counter, "{checkpoint}", "Checkpoints retired, by reason.",
		func(s *Stats, put func(int64, ...attribute.KeyValue)) {
			for r := Reason(1); int(r) < reasonsMax; r++ {
				put(s.RetiredBy[r.String()], attribute.String(keyReason, r.String()))
			}
		}},
	{"holdfast.checkpoint.deleted", counter, "{checkpoint}", "Checkpoints whose pages were given up.", one(func(s *Stats) int64 { return s.DeletedTotal })},
	{"holdfast.checkpoint.revived", counter, "{checkpoint}", "Superseded checkpoints that a lookup or a restore made current again.", one(func(s *Stats) int64 { return s.FoundAgain })},
	{"holdfast.page.written", counter, "{page}", "Page copies written, every rank's counted.", one(func(s *Stats) int64 { return s.PagesWritten })},
	{"holdfast.page.read", counter, "{page}", "Page copies read, every rank's counted.", one(func(s *Stats) int64 { return s.PagesRead })},
	{"holdfast.page.moved", counter, "{page}", "Pages moved out of segments of which little was left.", one(func(s *Stats) int64 { return s.PagesMoved })},
	{"holdfast.page.evicted", counter, "{page}", "Pages evicted from RAM with their disk copies left.", one(func(s *Stats) int64 { return s.PagesEvicted })},
	{"holdfast.page.lost", counter, "{page}", "Pages that could not be read back.", one(func(s *Stats) int64 { return s.FailedReads })},
	{"holdfast.page.io", counter, "By", "Logical bytes of the page copies written.", one(func(s *Stats) int64 { return s.PayloadWritten })},
	{"holdfast.file.io", counter, "By", "Bytes written to files, headers and padding included.",
		func(s *Stats, put func(int64, ...attribute.KeyValue)) {
			put(s.SegmentWritten, attribute.String(keyFile, "segment"))
			put(s.LogWritten, attribute.String(keyFile, "log"))
		}},
	{"holdfast.write.failed", counter, "{write}", "Writes of pages that failed and were tried again or given up.", one(func(s *Stats) int64 { return s.WritesFailed })},
	{"holdfast.write.late", counter, "{write}", "Writes of pages that took longer than the making of room waits for.", one(func(s *Stats) int64 { return s.WritesLate })},
	{"holdfast.admission.waits", counter, "{wait}", "Allocations that had to wait for room in RAM.", one(func(s *Stats) int64 { return s.AdmissionWaits })},
	{"holdfast.admission.timeouts", counter, "{wait}", "Of these, how many got none in time.", one(func(s *Stats) int64 { return s.AdmissionTimeouts })},
	{"holdfast.lease.expired", counter, "{lease}", "Publications and restorations ended by their deadline.", one(func(s *Stats) int64 { return s.LeasesExpired })},
	{"holdfast.owner.expired", counter, "{owner}", "Owners taken for dead.", one(func(s *Stats) int64 { return s.OwnersExpired })},
	{"holdfast.find.dropped", counter, "{find}", "Finds that were not recorded in the order of eviction.", one(func(s *Stats) int64 { return s.FindsDropped })},
	{"holdfast.loop.restarts", counter, "{restart}", "Background loops that failed and were started again.", one(func(s *Stats) int64 { return s.LoopsRestarted })},
}

// observe makes the instruments that are read by callback.
func observe(m metric.Meter, d *DB) (metric.Registration, error) {
	made := make([]metric.Int64Observable, len(instruments))
	all := make([]metric.Observable, len(instruments))
	for i := range instruments {
		in := &instruments[i]
		var err error
		unit, about := metric.WithUnit(in.unit), metric.WithDescription(in.about)
		switch in.kind {
		case counter:
			made[i], err = m.Int64ObservableCounter(in.name, unit, about)
		case upDownCounter:
			made[i], err = m.Int64ObservableUpDownCounter(in.name, unit, about)
		case gauge:
			made[i], err = m.Int64ObservableGauge(in.name, unit, about)
		}
		if err != nil {
			return nil, err
		}
		all[i] = made[i]
	}
	return m.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		if !d.opened.Load() {
			return nil // somebody reads while it is being opened
		}
		s, err := d.Stats()
		if err != nil {
			return nil // closed: there is nothing to observe
		}
		for i := range instruments {
			instruments[i].read(&s, func(v int64, attrs ...attribute.KeyValue) {
				o.ObserveInt64(made[i], v, metric.WithAttributes(attrs...))
			})
		}
		return nil
	}, all...)
}

// weight gives the pages that are not in RAM, and the bytes of all of them on all ranks. The caller has them pinned.
func (r *residency) weight(pages []*page, ranks int) (cold, bytes int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range pages {
		if p.slots == nil {
			cold++
		}
		bytes += p.bytes * int64(ranks)
	}
	return cold, bytes
}

// unwritten gives the pages that have no disk copy, and their bytes on all ranks.
func (r *residency) unwritten(pages []*page) (n, bytes int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range pages {
		if p.place == nil {
			n++
			bytes += p.bytes * int64(len(p.slots))
		}
	}
	return n, bytes
}

// allocatedBytes is what page copies take on disk.
func allocatedBytes(dropped []txn.DroppedPage) (bytes int64) {
	for _, d := range dropped {
		for _, at := range d.Place {
			bytes += at.Allocated()
		}
	}
	return bytes
}
