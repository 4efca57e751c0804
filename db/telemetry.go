package db

import (
	"context"
	"errors"
	"sync/atomic"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"
)

// scope names the instrumentation.
const scope = "github.com/holdfast-db/holdfast/db"

// telemetry counts what requests ask and get, and offers it to OpenTelemetry through its API only: the embedding process
// chooses where it goes.
type telemetry struct {
	tracer trace.Tracer

	replays, rejected     atomic.Int64
	full, partial, missed atomic.Int64
	asked, found          atomic.Int64

	lookups  metric.Int64Counter
	tokens   metric.Int64Counter
	restored metric.Int64Counter
	observed metric.Registration
}

// newTelemetry makes the instruments. The gauges are read by callback, so they cost nothing while nobody looks.
func newTelemetry(o *Options, d *DB) (*telemetry, error) {
	meters, tracers := o.MeterProvider, o.TracerProvider
	if meters == nil {
		meters = otel.GetMeterProvider()
	}
	if tracers == nil {
		tracers = otel.GetTracerProvider()
	}
	t := &telemetry{tracer: tracers.Tracer(scope)}
	m := meters.Meter(scope)
	var errs []error
	note := func(err error) {
		if err != nil {
			errs = append(errs, err)
		}
	}
	var err error
	t.lookups, err = m.Int64Counter("holdfast.lookups", metric.WithUnit("{lookup}"), metric.WithDescription("Lookups and restores by outcome: full, partial, miss."))
	note(err)
	t.tokens, err = m.Int64Counter("holdfast.lookup.tokens", metric.WithUnit("{token}"), metric.WithDescription("Tokens of lookups and restores: asked, found."))
	note(err)
	t.restored, err = m.Int64Counter("holdfast.restored.pages", metric.WithUnit("{page}"), metric.WithDescription("Pages handed out by restores, of one rank."))
	note(err)
	checkpoints, err := m.Int64ObservableGauge("holdfast.checkpoints", metric.WithUnit("{checkpoint}"), metric.WithDescription("Checkpoints by state: listed, superseded, undurable, retired."))
	note(err)
	bytes, err := m.Int64ObservableGauge("holdfast.tier.bytes", metric.WithUnit("By"), metric.WithDescription("Bytes in use by tier: ram, disk."))
	note(err)
	if t.observed, err = m.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		s, err := d.Stats()
		if err != nil {
			return nil // closed: there is nothing to observe
		}
		state := func(v int64, name string) {
			o.ObserveInt64(checkpoints, v, metric.WithAttributes(attribute.String("holdfast.checkpoint.state", name)))
		}
		state(s.Checkpoints, "listed")
		state(s.Superseded, "superseded")
		state(s.Undurable, "undurable")
		state(s.Retired, "retired")
		tier := func(v int64, name string) {
			o.ObserveInt64(bytes, v, metric.WithAttributes(attribute.String("holdfast.tier", name)))
		}
		tier(s.RAMUsed, "ram")
		tier(s.DiskBytes, "disk")
		return nil
	}, checkpoints, bytes); err != nil {
		note(err)
	}
	return t, errors.Join(errs...)
}

func (t *telemetry) close() error {
	if t.observed == nil {
		return nil
	}
	return t.observed.Unregister()
}

func (t *telemetry) span(ctx context.Context, name string) (context.Context, trace.Span) {
	return t.tracer.Start(ctx, name)
}

var (
	outcomeFull    = metric.WithAttributeSet(attribute.NewSet(attribute.String("holdfast.outcome", "full")))
	outcomePartial = metric.WithAttributeSet(attribute.NewSet(attribute.String("holdfast.outcome", "partial")))
	outcomeMiss    = metric.WithAttributeSet(attribute.NewSet(attribute.String("holdfast.outcome", "miss")))
	tokensAsked    = metric.WithAttributeSet(attribute.NewSet(attribute.String("holdfast.tokens", "asked")))
	tokensFound    = metric.WithAttributeSet(attribute.NewSet(attribute.String("holdfast.tokens", "found")))
)

// lookup counts one lookup or restore: how many tokens were of use at most, and how many were found.
func (t *telemetry) lookup(ctx context.Context, asked, found int64) {
	count, outcome := &t.partial, outcomePartial
	switch {
	case found == 0:
		count, outcome = &t.missed, outcomeMiss
	case found == asked:
		count, outcome = &t.full, outcomeFull
	}
	count.Add(1)
	t.asked.Add(asked)
	t.found.Add(found)
	t.lookups.Add(ctx, 1, outcome)
	t.tokens.Add(ctx, asked, tokensAsked)
	t.tokens.Add(ctx, found, tokensFound)
}

func (t *telemetry) restore(ctx context.Context, asked int64, r *Restoration) {
	t.lookup(ctx, asked, r.offset)
	t.restored.Add(ctx, int64(len(r.where)))
}
