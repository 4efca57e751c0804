package db

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	metricsdk "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	tracesdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/holdfast-db/holdfast/txn"
)

// collected gives what an SDK collects of the counters and gauges, one line each: name{attribute=value} value.
func collected(t testing.TB, r *metricsdk.ManualReader) (lines []string) {
	t.Helper()
	for _, m := range gathered(t, r) {
		sum, points := "", []metricdata.DataPoint[int64](nil)
		switch data := m.Data.(type) {
		case metricdata.Sum[int64]:
			points = data.DataPoints
			require.Equal(t, metricdata.CumulativeTemporality, data.Temporality)
		case metricdata.Gauge[int64]:
			points = data.DataPoints
		}
		for _, p := range points {
			var attrs []string
			for _, a := range p.Attributes.ToSlice() {
				attrs = append(attrs, string(a.Key)+"="+a.Value.String())
			}
			sum = m.Name
			if len(attrs) > 0 {
				sum += "{" + strings.Join(attrs, ",") + "}"
			}
			lines = append(lines, fmt.Sprintf("%s %d", sum, p.Value))
		}
	}
	slices.Sort(lines)
	return lines
}

func gathered(t testing.TB, r *metricsdk.ManualReader) []metricdata.Metrics {
	t.Helper()
	var all metricdata.ResourceMetrics
	require.NoError(t, r.Collect(context.Background(), &all))
	require.Len(t, all.ScopeMetrics, 1)
	require.Equal(t, scope, all.ScopeMetrics[0].Scope.Name)
	return all.ScopeMetrics[0].Metrics
}

// measuring opens a database under an SDK that keeps everything.
func measuring(t testing.TB, o Options) (*DB, *metricsdk.ManualReader, *tracetest.InMemoryExporter) {
	t.Helper()
	reader, spans := metricsdk.NewManualReader(), tracetest.NewInMemoryExporter()
	o.MeterProvider = metricsdk.NewMeterProvider(metricsdk.WithReader(reader))
	o.TracerProvider = tracesdk.NewTracerProvider(tracesdk.WithSyncer(spans))
	return openDB(t, tempDir(t), o), reader, spans
}

// readings checks that counters never fall and that nothing falls below zero.
type readings struct{ last Stats }

func (r *readings) take(t *testing.T, d *DB) Stats {
	t.Helper()
	s := stats(t, d)
	now, before, counts := reflect.ValueOf(s), reflect.ValueOf(r.last), false
	for i := range now.NumField() {
		name := now.Type().Field(i).Name
		if counts = counts || name == "Published"; !now.Field(i).CanInt() {
			continue
		}
		require.GreaterOrEqual(t, now.Field(i).Int(), int64(0), name)
		if counts {
			require.GreaterOrEqual(t, now.Field(i).Int(), before.Field(i).Int(), name)
		}
	}
	r.last = s
	return s
}

// A script of lookups, retries, reads that fail, publications, evictions and a delete moves every counter by exactly what happened, and
// the gauges are the sums over what is listed, also after the database was opened again.
func TestCountersAreExact_B39(t *testing.T) {
	d, reader, _ := measuring(t, Options{})
	ns := testNamespace(t, 1, attention)
	ctx := context.Background()
	var r readings
	seq := func(seed uint64, n int) *Sequence { return seqOf(t, ns, tokens(seed, n)) }

	// 5 publications: 3 listed, 1 replay, 1 rejected.
	publish(t, d, seq(3, 100), 100)
	publish(t, d, seq(1, 100), 100)
	b, _ := publish(t, d, seq(2, 100), 100)
	publish(t, d, seq(1, 100), 100)
	_, err := d.Begin(ctx, PublishRequest{Sequence: seq(4, 100)})
	require.ErrorIs(t, err, ErrInvalid)
	r.take(t, d)

	// 10 lookups: 4 full, 3 partial, 3 misses. Each is repeated as a retry of the same request.
	more := func(seed uint64, n int) *Sequence { return seqOf(t, ns, tokens(seed, 100), tokens(99, n)) }
	for _, l := range []struct {
		s     *Sequence
		found int64
	}{
		{seq(1, 100), 100}, {seq(2, 100), 100}, {seq(3, 100), 100}, {seq(1, 48), 48},
		{more(1, 50), 100}, {more(2, 20), 100}, {seq(3, 90), 80},
		{seq(7, 50), 0}, {seq(8, 50), 0}, {seq(9, 50), 0},
	} {
		for _, retry := range []bool{false, true} {
			m, err := d.Lookup(ctx, l.s, LookupOptions{Retry: retry})
			require.Equal(t, l.found, m.Offset)
			require.Equal(t, l.found == 0, err != nil)
		}
	}
	r.take(t, d)

	// 2 evictions: the two pages that were used longest ago leave RAM. Their copies are broken, so that 2 reads fail; they go into
	// quarantine, and the checkpoint that needs them is retired. The request had been counted when it looked up.
	some, err := d.makeRoom(ctx, 2*4096)
	require.NoError(t, err)
	require.True(t, some)
	spoilCold(t, d, 2)
	_, err = d.Restore(ctx, seq(3, 100), LookupOptions{Retry: true})
	require.ErrorIs(t, err, ErrNotFound)
	r.take(t, d)

	require.NoError(t, d.Delete(ctx, b))
	settle(t, d)
	last := r.take(t, d)

	want := []string{
		"holdfast.admission.timeouts 0",
		"holdfast.admission.waits 0",
		"holdfast.checkpoint.count{holdfast.state=current} 1",
		"holdfast.checkpoint.count{holdfast.state=retired} 0",
		"holdfast.checkpoint.count{holdfast.state=superseded} 0",
		"holdfast.checkpoint.deleted 2",
		"holdfast.checkpoint.retired{holdfast.reason=RAM pressure} 0",
		"holdfast.checkpoint.retired{holdfast.reason=cleared} 0",
		"holdfast.checkpoint.retired{holdfast.reason=disk pressure} 0",
		"holdfast.checkpoint.retired{holdfast.reason=not durable} 0",
		"holdfast.checkpoint.retired{holdfast.reason=page lost} 1",
		"holdfast.checkpoint.retired{holdfast.reason=replaced} 0",
		"holdfast.checkpoint.retired{holdfast.reason=requested} 1",
		"holdfast.checkpoint.retired{holdfast.reason=shutdown} 0",
		"holdfast.checkpoint.retired{holdfast.reason=write failed} 0",
		"holdfast.checkpoint.revived 0",
		"holdfast.checkpoint.undurable 0",
		"holdfast.checkpoint.unverified 0",
		"holdfast.file.count 1", // so few bytes share one
		"holdfast.find.dropped 0",
		"holdfast.lease.count 0",
		"holdfast.lease.expired 0",
		"holdfast.lookup.outcomes{holdfast.outcome=full} 4",
		"holdfast.lookup.outcomes{holdfast.outcome=miss} 3",
		"holdfast.lookup.outcomes{holdfast.outcome=partial} 3",
		"holdfast.lookup.outcomes{holdfast.outcome=retry} 11",
		"holdfast.lookup.tokens.asked 858",
		"holdfast.lookup.tokens.found 628",
		"holdfast.loop.restarts 0",
		"holdfast.namespace.count 1",
		"holdfast.owner.count 0",
		"holdfast.owner.expired 0",
		"holdfast.page.count{holdfast.state=dirty} 0",
		"holdfast.page.count{holdfast.state=placed} 7",
		"holdfast.page.evicted 2",
		"holdfast.page.io 86016", // 21 pages of 4 KiB
		"holdfast.page.lost 2",
		"holdfast.page.moved 0",
		"holdfast.page.quarantined 2",
		"holdfast.page.read 2",
		"holdfast.page.size 28672",
		"holdfast.page.written 21",
		"holdfast.publication.outcomes{holdfast.outcome=listed} 3",
		"holdfast.publication.outcomes{holdfast.outcome=rejected} 1",
		"holdfast.publication.outcomes{holdfast.outcome=replay} 1",
		"holdfast.publication.outcomes{holdfast.outcome=unlisted} 0",
		"holdfast.publication.pending 0",
		"holdfast.restore.io 0",
		"holdfast.restore.pages{holdfast.tier=disk} 0",
		"holdfast.restore.pages{holdfast.tier=ram} 0",
		"holdfast.tier.dirty 0",
		"holdfast.tier.limit{holdfast.tier=ram} 16777216",
		"holdfast.tier.usage{holdfast.tier=disk} 28672",
		"holdfast.tier.usage{holdfast.tier=ram} 28672",
		"holdfast.transfer.count 0",
		"holdfast.write.failed 0",
		"holdfast.write.late 0",
	}
	exact := slices.DeleteFunc(collected(t, reader), func(line string) bool { // what depends on the formats and on when finds were recorded
		return strings.HasPrefix(line, "holdfast.file.size") || strings.HasPrefix(line, "holdfast.file.io") || strings.HasPrefix(line, "holdfast.log.lsn")
	})
	require.Equal(t, want, exact)
	require.Greater(t, last.SegmentWritten, last.PayloadWritten)
	require.Greater(t, last.LogWritten, int64(0))
	require.Less(t, last.TokensFound, last.TokensAsked)

	sum := func(d *DB) (bytes int64) {
		for c, err := range d.Checkpoints(ctx) {
			require.NoError(t, err)
			bytes += c.Bytes
		}
		return bytes
	}
	require.Equal(t, sum(d), last.RAMUsed)
	require.Equal(t, sum(d), last.DiskBytes)
	require.Equal(t, sum(d), last.PageBytes)
	before := gauges(last)
	closeDB(t, d)
	d = openDB(t, d.dir.path, Options{})
	require.EqualValues(t, 100, restoreAt(t, d, seq(1, 100)))
	settle(t, d)
	after := stats(t, d)
	require.Equal(t, sum(d), after.RAMUsed)
	require.EqualValues(t, 7, after.PagesRestoredCold)
	require.EqualValues(t, 7, after.PagesRestored)
	require.EqualValues(t, 28672, after.BytesRestored)
	again := gauges(after)
	for _, name := range []string{"LSN", "LogBytes", "SegmentBytes", "Segments"} { // they tell of the past
		delete(before, name)
		delete(again, name)
	}
	before["Quarantined"] = 0 // it was needed for what is gone
	require.Equal(t, before, again)
}

// spoilCold breaks the copies of the pages that are on disk alone, of which there have to be n.
func spoilCold(t testing.TB, d *DB, n int) {
	t.Helper()
	snapshot := d.index.Snapshot()
	defer snapshot.Close()
	spoiled := 0
	require.NoError(t, txn.Pages(snapshot, func(key txn.Key, e *txn.PageEntry) (bool, error) {
		d.residency.mu.Lock()
		p := d.residency.pages.get(key)
		d.residency.mu.Unlock()
		if p == nil {
			overwrite(t, segmentFile(d.dir.path, e.Place[0].Segment), e.Place[0].Offset, []byte("not what was written"))
			spoiled++
		}
		return true, nil
	}))
	require.Equal(t, n, spoiled)
}

// Superseded checkpoints, and pages of 100 and of 50 bytes, are counted one by one, with what they take in each tier.
func TestGaugesOfSupersededAndResidentPages_OBS01(t *testing.T) {
	d, reader, _ := measuring(t, Options{WritePolicy: OnEvict, SupersedeGrace: -1})
	ns := testNamespace(t, 1, Group{Name: "recurrent:a", Kind: Recurrent, PageBytes: 100, Pages: 1}, Group{Name: "recurrent:b", Kind: Recurrent, PageBytes: 50, Pages: 1})
	old, _ := publish(t, d, seqOf(t, ns, tokens(1, 10)), 10)
	current, _ := publish(t, d, seqOf(t, ns, tokens(2, 10)), 10)
	require.NoError(t, d.Supersede(context.Background(), current, old))
	lines := collected(t, reader)
	for _, line := range []string{
		"holdfast.checkpoint.count{holdfast.state=current} 1", "holdfast.checkpoint.count{holdfast.state=superseded} 1",
		"holdfast.checkpoint.undurable 2", "holdfast.page.count{holdfast.state=dirty} 4", "holdfast.page.count{holdfast.state=placed} 0",
		"holdfast.page.size 300", "holdfast.tier.dirty 300", "holdfast.tier.usage{holdfast.tier=disk} 0",
	} {
		require.Contains(t, lines, line)
	}

	// Room in RAM: the superseded one goes and is never written, the current one is written and evicted.
	left, err := d.DropRAM(context.Background())
	require.NoError(t, err)
	require.Zero(t, left)
	settle(t, d)
	lines = collected(t, reader)
	for _, line := range []string{
		"holdfast.checkpoint.count{holdfast.state=current} 1", "holdfast.checkpoint.count{holdfast.state=superseded} 0",
		"holdfast.checkpoint.undurable 0", "holdfast.page.count{holdfast.state=dirty} 0", "holdfast.page.count{holdfast.state=placed} 2",
		"holdfast.page.size 150", "holdfast.page.io 150", "holdfast.page.written 2", "holdfast.page.evicted 2",
		"holdfast.checkpoint.retired{holdfast.reason=RAM pressure} 1", "holdfast.tier.dirty 0", "holdfast.tier.usage{holdfast.tier=ram} 0",
	} {
		require.Contains(t, lines, line)
	}
	disk := int64(0)
	snapshot := d.index.Snapshot()
	defer snapshot.Close()
	require.NoError(t, txn.Pages(snapshot, func(_ txn.Key, e *txn.PageEntry) (bool, error) {
		disk += e.Place[0].Allocated()
		return true, nil
	}))
	require.Contains(t, lines, fmt.Sprintf("holdfast.tier.usage{holdfast.tier=disk} %d", disk))
}

// A restore that gives up at its deadline is said once, with how many tokens, for how many ranks and for whom; so is a lease that
// is over; and what took long although it succeeded is said as well.
func TestRestorePastItsDeadlineIsSaidOnce_OBS03(t *testing.T) {
	var out bytes.Buffer
	v := newValve()
	d := openDB(t, tempDir(t), Options{
		LoadTimeout: 20 * time.Millisecond, segmentFS: v.segments(), Logger: slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelInfo})),
	})
	ns := testNamespace(t, 2)
	seq := seqOf(t, ns, tokens(1, 100))
	publish(t, d, seq, 100)
	_, err := d.DropRAM(context.Background())
	require.NoError(t, err)
	open := v.close("read")
	defer open()
	worker, err := d.NewOwner("worker 3", time.Hour)
	require.NoError(t, err)
	_, err = d.Restore(context.Background(), seq, LookupOptions{Owner: worker})
	require.ErrorIs(t, err, ErrBusy)
	open()
	require.NoError(t, d.gate.wait(context.Background()))
	require.Equal(t, 1, strings.Count(out.String(), "\n"), out.String())
	require.Regexp(t, `level=WARN msg="restore gave up" tokens=100 ranks=2 owner="worker 3" seconds=\S+ error=`, out.String())

	out.Reset()
	d.options.LoadTimeout = time.Minute
	r, err := d.Restore(context.Background(), seq, LookupOptions{Owner: worker, Lease: time.Millisecond})
	require.NoError(t, err)
	require.Eventually(t, func() bool { return r.Err() != nil && stats(t, d).Leases == 0 }, time.Minute, time.Millisecond)
	require.Equal(t, 1, strings.Count(out.String(), "\n"), out.String())
	require.Contains(t, out.String(), `level=WARN msg="lease over" of="restoration at 100" owner="worker 3" after=1ms`)

	out.Reset()
	d.telemetry.slow = 0
	require.EqualValues(t, 100, restoreAt(t, d, seq))
	require.Equal(t, 1, strings.Count(out.String(), "\n"), out.String())
	require.Regexp(t, `level=WARN msg="operation took long" operation=restore seconds=\S+ pages=8 bytes=82034 error=<nil>`, out.String())
}

// What is pending, held, registered and on its way can be read at any time, with what was taken back; and nothing is left of it.
func TestStateOfPublicationsAndLeases_OBS04(t *testing.T) {
	d, reader, _ := measuring(t, Options{})
	ns := testNamespace(t, 2)
	ctx := context.Background()
	seq := seqOf(t, ns, tokens(1, 100))
	publish(t, d, seq, 100)
	owner, err := d.NewOwner("worker 3", time.Hour)
	require.NoError(t, err)
	aborted := begin(t, d, seqOf(t, ns, tokens(2, 50)), 50)
	begin(t, d, seqOf(t, ns, tokens(3, 50)), 50, func(r *PublishRequest) { r.Owner = owner })
	held, err := d.Restore(ctx, seq, LookupOptions{Owner: owner})
	require.NoError(t, err)
	copying, err := held.Transfer()
	require.NoError(t, err)
	state := func() (lines []string) {
		for _, line := range collected(t, reader) {
			for _, name := range []string{"publication.pending", "lease.", "owner.", "transfer."} {
				if strings.HasPrefix(line, "holdfast."+name) {
					lines = append(lines, line)
				}
			}
		}
		return lines
	}
	require.Equal(t, []string{
		"holdfast.lease.count 1", "holdfast.lease.expired 0", "holdfast.owner.count 1", "holdfast.owner.expired 0", "holdfast.publication.pending 2", "holdfast.transfer.count 1",
	}, state())

	require.NoError(t, aborted.Abort())
	owner.expire()
	short, err := d.Restore(ctx, seq, LookupOptions{Lease: time.Millisecond})
	require.NoError(t, err)
	require.Eventually(t, func() bool { return short.Err() != nil && stats(t, d).Leases == 0 }, time.Minute, time.Millisecond)
	copying.Done()
	require.Equal(t, []string{
		"holdfast.lease.count 0", "holdfast.lease.expired 1", "holdfast.owner.count 0", "holdfast.owner.expired 1", "holdfast.publication.pending 0", "holdfast.transfer.count 0",
	}, state())
	require.EqualValues(t, 2, stats(t, d).Unlisted)
	requireIdle(t, d)
}

// Each counter counts one thing: writes that failed are not pages written, a publication that brings nothing new gives no sample of
// sizes, a restore from RAM reads nothing, and a miss is no error.
func TestEachCounterCountsOneThing_OBS06(t *testing.T) {
	disk := &seam{}
	d, reader, _ := measuring(t, Options{segmentFS: disk.segments()})
	ns := testNamespace(t, 1, attention)
	seq := seqOf(t, ns, tokens(1, 100))
	disk.failTimes("write", errno(t, "EIO"), 2)
	publish(t, d, seq, 100)
	s := stats(t, d)
	require.EqualValues(t, []int64{2, 7, 28672}, []int64{s.WritesFailed, s.PagesWritten, s.PayloadWritten})
	publish(t, d, seq, 100)
	publish(t, d, seq, 100, withMeta("another, of the same pages"))
	require.EqualValues(t, 100, restoreAt(t, d, seq))
	require.Zero(t, restoreAt(t, d, seqOf(t, ns, tokens(2, 100))))
	s = stats(t, d)
	require.EqualValues(t, []int64{2, 7, 0, 7, 0}, []int64{s.WritesFailed, s.PagesWritten, s.PagesRead, s.PagesRestored, s.PagesRestoredCold})

	durations, sizes := map[string]uint64{}, map[string]uint64{}
	for _, m := range gathered(t, reader) {
		switch data := m.Data.(type) {
		case metricdata.Histogram[float64]:
			require.Equal(t, durationName, m.Name)
			for _, p := range data.DataPoints {
				require.False(t, p.Attributes.HasValue(keyError))
				op, _ := p.Attributes.Value(keyOperation)
				durations[op.AsString()] = p.Count
				require.Equal(t, durationBounds, p.Bounds)
			}
		case metricdata.Histogram[int64]:
			require.Equal(t, sizeName, m.Name)
			for _, p := range data.DataPoints {
				op, _ := p.Attributes.Value(keyOperation)
				sizes[op.AsString()] = p.Count
				require.EqualValues(t, 28672, p.Sum)
			}
		}
	}
	require.Equal(t, map[string]uint64{"recover": 1, "publish": 2, "begin": 3, "commit": 3, "persist": 1, "restore": 2}, durations)
	require.Equal(t, map[string]uint64{"publish": 1, "begin": 1, "persist": 1, "restore": 1}, sizes)

	for _, l := range d.Latencies() {
		require.EqualValues(t, durations[l.Operation], l.Count, l.Operation)
	}
}

// Every operation is a span under that of its caller, with pages and bytes, and with its error if it failed.
func TestOperationsAreSpans(t *testing.T) {
	d, _, spans := measuring(t, Options{RAMBytes: 64 << 10, DiskBytes: 128 << 10})
	ns := testNamespace(t, 1, attention)
	ctx, request := tracesdk.NewTracerProvider(tracesdk.WithSyncer(spans)).Tracer("test").Start(context.Background(), "request")
	seq := func(seed uint64) *Sequence { return seqOf(t, ns, tokens(seed, 160)) }
	p, err := d.Begin(ctx, PublishRequest{Sequence: seq(1), Offset: 160})
	require.NoError(t, err)
	fill(t, p, 0)
	_, err = p.Commit(ctx, 0)
	require.NoError(t, err)
	for i := range uint64(4) {
		publish(t, d, seq(2+i), 160)
	}
	_, err = d.Lookup(ctx, seq(5), LookupOptions{})
	require.NoError(t, err)
	r, err := d.Restore(ctx, seq(5), LookupOptions{})
	require.NoError(t, err)
	r.Release()
	_, err = d.Begin(ctx, PublishRequest{Sequence: seq(9)})
	require.ErrorIs(t, err, ErrInvalid)
	request.End()

	byName := map[string][]tracetest.SpanStub{}
	parents := map[string]string{}
	names := map[string]string{}
	for _, s := range spans.GetSpans() {
		byName[s.Name] = append(byName[s.Name], s)
		names[s.SpanContext.SpanID().String()] = s.Name
	}
	for _, s := range spans.GetSpans() {
		if parent := names[s.Parent.SpanID().String()]; s.Parent.TraceID() == request.SpanContext().TraceID() {
			parents[s.Name] = parent
		}
	}
	require.Equal(t, map[string]string{
		"holdfast.publish": "request", "holdfast.begin": "holdfast.publish", "holdfast.commit": "holdfast.publish", "holdfast.persist": "holdfast.commit",
		"holdfast.lookup": "request", "holdfast.restore": "request",
	}, parents)
	attrs := func(s tracetest.SpanStub) map[string]string {
		m := map[string]string{}
		for _, a := range s.Attributes {
			m[string(a.Key)] = a.Value.String()
		}
		return m
	}
	ten := map[string]string{keyPages: "10", keyBytes: "40960"}
	published := maps.Clone(ten)
	published[keyEnd] = "published"
	require.Equal(t, published, attrs(byName["holdfast.publish"][0]))
	require.Equal(t, ten, attrs(byName["holdfast.restore"][0]))
	require.Equal(t, ten, attrs(byName["holdfast.persist"][0]))
	require.Len(t, byName["holdfast.recover"], 1)
	require.NotEmpty(t, byName["holdfast.evict_ram"])
	evicted := int64(0)
	for _, s := range byName["holdfast.evict_ram"] {
		for _, a := range s.Attributes {
			if a.Key == keyPages {
				evicted += a.Value.AsInt64()
			}
		}
	}
	require.Equal(t, stats(t, d).PagesEvicted, evicted)
	require.NotEmpty(t, byName["holdfast.evict_disk"])
	require.Equal(t, ten, attrs(byName["holdfast.evict_disk"][0]))
	refused := byName["holdfast.begin"][len(byName["holdfast.begin"])-1]
	require.Equal(t, codes.Error, refused.Status.Code)
	require.Equal(t, "invalid", attrs(refused)[keyError])
}

// A duration in a histogram leads to the trace that it is of.
func TestDurationsCarryExemplars(t *testing.T) {
	d, reader, spans := measuring(t, Options{})
	_, err := d.Lookup(context.Background(), seqOf(t, testNamespace(t, 1), tokens(1, 10)), LookupOptions{})
	require.ErrorIs(t, err, ErrNotFound)
	traces := map[string]bool{}
	for _, s := range spans.GetSpans() {
		id := s.SpanContext.TraceID()
		traces[string(id[:])] = true
	}
	found := 0
	for _, m := range gathered(t, reader) {
		if data, ok := m.Data.(metricdata.Histogram[float64]); ok {
			for _, p := range data.DataPoints {
				for _, e := range p.Exemplars {
					require.True(t, traces[string(e.TraceID)])
					found++
				}
			}
		}
	}
	require.Equal(t, 2, found, "the lookup and the opening")
}

// Without an SDK an operation allocates nothing for being measured, and makes no span.
func TestMeasuringAllocatesNothing(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	ctx := context.Background()
	for op := range operations {
		for _, err := range []error{nil, ErrBusy, ErrNotFound} {
			require.Zero(t, testing.AllocsPerRun(100, func() {
				inside, m := d.telemetry.begin(ctx, operation(op))
				if inside != ctx {
					panic("a span")
				}
				m.end(err, 7, 28672)
			}))
		}
	}
	require.Zero(t, testing.AllocsPerRun(100, func() { d.telemetry.lookup(false, 100, 50) }))
	e := &transaction{lsn: 1, record: &txn.Retire{Reason: ReasonCleared, Generations: make([]Generation, 16), Delete: true}, effects: &txn.Effects{}}
	d.events.tell(e)
	require.Zero(t, testing.AllocsPerRun(100, func() { d.events.tell(e) }), "events that nobody subscribed to")
}

// What the measuring of one publication and one restore takes without an SDK, beside what they take themselves.
func BenchmarkMeasuring(b *testing.B) {
	d := openDB(b, tempDir(b), Options{})
	ctx := context.Background()
	ns := testNamespace(b, 1)
	b.Run("operation", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			_, m := d.telemetry.begin(ctx, opLookup)
			m.end(nil, 7, 28672)
		}
	})
	b.Run("events", func(b *testing.B) {
		b.ReportAllocs()
		e := &transaction{lsn: 1, record: &txn.Publish{Manifest: txn.Manifest{Ranks: 1}}, effects: &txn.Effects{}}
		for b.Loop() {
			d.events.tell(e)
		}
	})
	seq := seqOf(b, ns, tokens(1, 100))
	publish(b, d, seq, 100)
	b.Run("restore", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			r, err := d.Restore(ctx, seq, LookupOptions{})
			if err != nil {
				b.Fatal(err)
			}
			r.Release()
		}
	})
	for _, policy := range []WritePolicy{OnEvict, WriteThrough} {
		b.Run("publish/"+policy.String(), func(b *testing.B) {
			d := openDB(b, tempDir(b), Options{WritePolicy: policy, RAMBytes: 1 << 30})
			b.ReportAllocs()
			seed := uint64(0)
			for b.Loop() {
				seed++
				publish(b, d, seqOf(b, ns, tokens(seed, 100)), 100)
			}
		})
	}
}

// A latency is in a bucket that is no more than a fifth wider than it, and quantiles are bounds of such buckets.
func TestLatencyHistogram(t *testing.T) {
	for bucket := range latencyBuckets {
		bound := latencyBound(bucket)
		if bucket < latencyBuckets-1 {
			require.Equal(t, bucket+1, latencyBucket(int64(bound)), bound)
		}
		require.Equal(t, bucket, latencyBucket(int64(bound)-1), bound)
		if bucket > 0 {
			require.LessOrEqual(t, float64(bound), 1.26*float64(latencyBound(bucket-1)))
		}
	}
	var h histogram
	empty := h.read("x")
	require.Zero(t, empty.Quantile(0.5))
	for i := range 1000 {
		h.add(time.Duration(i+1) * time.Millisecond)
	}
	h.add(-1)
	h.add(100 * time.Hour)
	l := h.read("x")
	require.EqualValues(t, 1002, l.Count)
	require.Equal(t, 100*time.Hour, l.Max)
	require.Equal(t, 100*time.Hour+500500*time.Millisecond, l.Sum)
	require.InEpsilon(t, 500*time.Millisecond, l.Quantile(0.5), 0.26)
	require.InEpsilon(t, 990*time.Millisecond, l.Quantile(0.99), 0.26)
	require.Equal(t, latencyBound(0), l.Quantile(0))
	require.True(t, slices.IsSortedFunc(l.Buckets, func(a, b LatencyBucket) int { return cmp.Compare(a.Below, b.Below) }))
}

// Names and units follow the semantic conventions, and no two instruments share a name.
func TestInstrumentNames(t *testing.T) {
	seen := map[string]bool{durationName: true, sizeName: true}
	for _, in := range instruments {
		require.Regexp(t, `^holdfast\.[a-z]+(\.[a-z]+)+$`, in.name)
		require.Regexp(t, `^(By|s|\{[a-z]+\})$`, in.unit)
		require.Regexp(t, `^[A-Z].*\.$`, in.about)
		require.False(t, seen[in.name], in.name)
		seen[in.name] = true
	}
	for _, key := range []attribute.Key{keyTier, keyState, keyOutcome, keyReason, keyFile, keyPages, keyBytes, keyEnd, keyRecords, keyRetired} {
		require.True(t, strings.HasPrefix(string(key), "holdfast."))
	}
}
