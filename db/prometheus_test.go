package db_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	otelprometheus "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/metric"
	metricsdk "go.opentelemetry.io/otel/sdk/metric"

	"github.com/holdfast-db/holdfast/db"
)

// The function is the example of docs/metrics.md, word for word.

// metrics gives a handler for Prometheus to scrape, and the provider that feeds it.
func metrics() (http.Handler, metric.MeterProvider, error) {
	registry := prometheus.NewRegistry()
	exporter, err := otelprometheus.New(otelprometheus.WithRegisterer(registry))
	if err != nil {
		return nil, nil, err
	}
	handler := promhttp.HandlerFor(registry, promhttp.HandlerOpts{EnableOpenMetrics: true}) // which has exemplars
	return handler, metricsdk.NewMeterProvider(metricsdk.WithReader(exporter)), nil
}

// Metrics go to Prometheus through the exporter of OpenTelemetry. The database itself knows the API alone.
func Example_prometheus() {
	ctx := context.Background()
	dir, remove := temporary()
	defer remove()
	handler, meters, err := metrics()
	must(err)
	store, err := db.Open(ctx, dir, db.Options{RAMBytes: 64 << 20, MeterProvider: meters})
	must(err)
	defer store.Close(ctx)
	server := httptest.NewServer(handler) // yours is http.ListenAndServe
	defer server.Close()

	ns, err := db.NewNamespace(identity())
	must(err)
	seq := ns.NewSequence()
	must(seq.Append(prompt(100)))
	for range 3 {
		_, err = serve(ctx, store, seq, computed)
		must(err)
	}

	answer, err := http.Get(server.URL)
	must(err)
	defer answer.Body.Close()
	page, err := io.ReadAll(answer.Body)
	must(err)
	scopes := regexp.MustCompile(`,?otel_scope_\w+="[^"]*"`) // which database, where there are several
	for line := range strings.Lines(string(page)) {
		if strings.HasPrefix(line, "holdfast_lookup_") || strings.HasPrefix(line, "holdfast_tier_usage") {
			fmt.Print(scopes.ReplaceAllString(line, ""))
		}
	}
	// Output:
	// holdfast_lookup_outcomes_total{holdfast_outcome="full"} 0
	// holdfast_lookup_outcomes_total{holdfast_outcome="miss"} 1
	// holdfast_lookup_outcomes_total{holdfast_outcome="partial"} 2
	// holdfast_lookup_outcomes_total{holdfast_outcome="retry"} 0
	// holdfast_lookup_tokens_asked_total{} 297
	// holdfast_lookup_tokens_found_total{} 192
	// holdfast_tier_usage_bytes{holdfast_tier="disk"} 28672
	// holdfast_tier_usage_bytes{holdfast_tier="ram"} 28672
}

// identity is that of a small model.
func identity() db.Identity {
	return db.Identity{
		Model: "tiny", Weights: "unversioned:example", Tokenizer: "bpe-7", Engine: "engine-1.4", DType: "bf16",
		Layout: db.Layout{Ranks: 1, Groups: []db.Group{{Name: "attention:kv", Kind: db.Attention, PageBytes: 4096, PageTokens: 16}}},
	}
}
