package db

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	otelprometheus "go.opentelemetry.io/otel/exporters/prometheus"
	metricsdk "go.opentelemetry.io/otel/sdk/metric"
)

// metricRow is a row of docs/metrics.md: name | type | unit | attributes | in Prometheus | question.
var metricRow = regexp.MustCompile("(?m)^\\| `(holdfast\\.[a-z._]+)` \\| (\\w+) \\| `([^`]+)` \\| ([^|]*) \\| `(\\w+)` \\| ([^|]+\\?) \\|$")

// scraped gives what Prometheus gets of a database that did something of everything: the type of each family, and the values of
// each label of a family.
func scraped(t *testing.T) (types map[string]string, labels map[string]map[string][]string) {
	t.Helper()
	registry := prometheus.NewRegistry()
	exporter, err := otelprometheus.New(otelprometheus.WithRegisterer(registry))
	require.NoError(t, err)
	d := openDB(t, tempDir(t), Options{DiskBytes: 128 << 10, RAMBytes: 64 << 10, MeterProvider: metricsdk.NewMeterProvider(metricsdk.WithReader(exporter))})
	ns := testNamespace(t, 1, attention)
	for i := range uint64(5) {
		publish(t, d, seqOf(t, ns, tokens(i, 160)), 160)
	}
	lookupAt(t, d, seqOf(t, ns, tokens(4, 160)))
	require.EqualValues(t, 160, restoreAt(t, d, seqOf(t, ns, tokens(4, 160))))
	_, err = d.Begin(context.Background(), PublishRequest{Sequence: seqOf(t, ns, tokens(4, 160))})
	require.ErrorIs(t, err, ErrInvalid)

	answer := httptest.NewRecorder()
	promhttp.HandlerFor(registry, promhttp.HandlerOpts{}).ServeHTTP(answer, httptest.NewRequest("GET", "/metrics", nil))
	types, labels = map[string]string{}, map[string]map[string][]string{}
	sample, label := regexp.MustCompile(`^(\w+)\{(.*)\} \S+$`), regexp.MustCompile(`(\w+)="([^"]*)"`)
	for line := range strings.Lines(answer.Body.String()) {
		line = strings.TrimSpace(line)
		if rest, ok := strings.CutPrefix(line, "# TYPE "); ok {
			name, kind, _ := strings.Cut(rest, " ")
			types[name] = kind
		}
		if m := sample.FindStringSubmatch(line); m != nil {
			if labels[m[1]] == nil {
				labels[m[1]] = map[string][]string{}
			}
			for _, l := range label.FindAllStringSubmatch(m[2], -1) {
				if !slices.Contains(labels[m[1]][l[1]], l[2]) {
					labels[m[1]][l[1]] = append(labels[m[1]][l[1]], l[2])
				}
			}
		}
	}
	return types, labels
}

// docs/metrics.md lists every instrument with its type, unit and attributes as they are in the code, under the name by which
// Prometheus gets it, and asks a question that it answers.
func TestMetricsAreDocumented(t *testing.T) {
	text, err := os.ReadFile("../docs/metrics.md")
	require.NoError(t, err)
	types, _ := scraped(t)
	rows := map[string][]string{}
	for _, m := range metricRow.FindAllStringSubmatch(string(text), -1) {
		require.NotContains(t, rows, m[1], "twice")
		rows[m[1]] = m[2:]
		want := map[string]string{"counter": "counter", "updowncounter": "gauge", "gauge": "gauge", "histogram": "histogram"}[m[2]]
		require.Equal(t, want, types[m[5]], "%s in Prometheus", m[5])
		delete(types, m[5])
	}
	delete(types, "target_info")
	require.Empty(t, types, "scraped and not documented")
	for _, in := range instruments {
		values := map[string][]string{}
		var keys []string
		in.read(&Stats{DiskBudget: 1}, func(_ int64, attrs ...attribute.KeyValue) {
			for _, a := range attrs {
				if !slices.Contains(keys, string(a.Key)) {
					keys = append(keys, string(a.Key))
				}
				values[string(a.Key)] = append(values[string(a.Key)], a.Value.AsString())
			}
		})
		said := ""
		for _, key := range keys {
			said += "`" + key + "`: " + strings.Join(values[key], ", ")
		}
		require.Contains(t, rows, in.name)
		require.Equal(t, []string{string(in.kind), in.unit, said}, rows[in.name][:3], in.name)
		delete(rows, in.name)
	}
	said := "`" + keyOperation + "`, `" + keyError + "`"
	for name, unit := range map[string]string{durationName: "s", sizeName: "By"} {
		require.Contains(t, rows, name)
		require.Equal(t, []string{"histogram", unit, said}, rows[name][:3])
		delete(rows, name)
	}
	require.Empty(t, rows, "documented and not there")
	for _, name := range operations {
		require.Contains(t, string(text), "\n| `"+name+"` |", "an operation")
	}
	for _, class := range errorClasses {
		require.Contains(t, string(text), "`"+class.Error()+"`")
	}
	for _, key := range []string{keyDirectory, keyPages, keyBytes, keyEnd, keyRecords, keyRetired} {
		require.Contains(t, string(text), "`"+key+"`")
	}
}

// Every expression of the dashboard is about series that Prometheus gets, and selects by labels and values that they have.
func TestDashboardShowsWhatIsMeasured(t *testing.T) {
	b, err := os.ReadFile("../docs/grafana-dashboard.json")
	require.NoError(t, err)
	var dashboard struct {
		Title  string
		UID    string `json:"uid"`
		Panels []struct {
			ID          int
			Type, Title string
			Description string
			GridPos     struct{ H, W, X, Y int }
			FieldConfig struct{ Defaults struct{ Unit string } }
			Targets     []struct{ Expr, RefID string }
		}
		Templating struct {
			List []struct{ Name, Type, Query string }
		}
	}
	require.NoError(t, json.Unmarshal(b, &dashboard))
	require.NotEmpty(t, dashboard.Title)
	_, labels := scraped(t)
	name, selector := regexp.MustCompile(`holdfast_\w+\b`), regexp.MustCompile(`(holdfast_\w+)\{([^}]*)\}`)
	used := map[string]bool{}
	ids := map[int]bool{}
	cells := map[string]string{}
	for _, p := range dashboard.Panels {
		require.False(t, ids[p.ID], "panel %d twice", p.ID)
		ids[p.ID] = true
		for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
			for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
				at := fmt.Sprint(x, ",", y)
				require.Empty(t, cells[at], "%s lies over another panel", p.Title)
				cells[at] = p.Title
			}
		}
		require.LessOrEqual(t, p.GridPos.X+p.GridPos.W, 24, p.Title)
		if p.Type == "row" {
			continue
		}
		require.NotEmpty(t, p.Description, p.Title)
		require.NotEmpty(t, p.FieldConfig.Defaults.Unit, p.Title)
		require.NotEmpty(t, p.Targets, p.Title)
		for _, target := range p.Targets {
			found := selector.FindAllStringSubmatch(target.Expr, -1)
			require.NotEmpty(t, found, target.Expr)
			for _, m := range found {
				require.Contains(t, labels, m[1], "%s: %s", p.Title, target.Expr)
				used[m[1]] = true
				for _, l := range regexp.MustCompile(`(\w+)(=~?|!=)"([^"]*)"`).FindAllStringSubmatch(m[2], -1) {
					require.Contains(t, labels[m[1]], l[1], "%s: %s", p.Title, target.Expr)
					if l[3] != "" && !strings.Contains(l[3], "$") {
						for _, value := range strings.Split(l[3], "|") {
							require.Contains(t, labels[m[1]][l[1]], value, "%s: %s", p.Title, target.Expr)
						}
					}
				}
			}
			for _, by := range regexp.MustCompile(`by \(([^)]*)\)`).FindAllStringSubmatch(target.Expr, -1) {
				for _, l := range strings.Split(by[1], ",") {
					require.Contains(t, labels[found[0][1]], strings.TrimSpace(l), "%s: %s", p.Title, target.Expr)
				}
			}
		}
	}
	require.Greater(t, len(used), 20)
	for _, v := range dashboard.Templating.List {
		for _, n := range name.FindAllString(v.Query, -1) {
			require.Contains(t, labels, n, v.Name)
		}
	}
	require.NotContains(t, string(b), "http://")
}

// The alerts of docs/operations.md are about series that Prometheus gets.
func TestAlertsAreAboutWhatIsMeasured(t *testing.T) {
	text, err := os.ReadFile("../docs/operations.md")
	require.NoError(t, err)
	_, labels := scraped(t)
	found := regexp.MustCompile(`holdfast_\w+`).FindAllString(string(text), -1)
	require.Greater(t, len(found), 8)
	for _, n := range found {
		if _, label := labels["holdfast_checkpoint_retired_total"][n]; label {
			continue
		}
		require.Contains(t, labels, n)
	}
	for _, m := range regexp.MustCompile(`(holdfast_\w+)\{(\w+)(?:=~?)"([^"]*)"`).FindAllStringSubmatch(string(text), -1) {
		for _, value := range strings.Split(m[3], "|") {
			require.Contains(t, labels[m[1]][m[2]], value)
		}
	}
}

// The library needs the API of OpenTelemetry alone: no SDK, and no exporter.
func TestOnlyTestsImportAnSDK(t *testing.T) {
	for _, dir := range []string{".", "internal/arena", "internal/index", "internal/segment", "../wal", "../txn", "../gpu", "../recovery", "../cmd/holdfast"} {
		files, err := os.ReadDir(dir)
		require.NoError(t, err)
		for _, f := range files {
			if !strings.HasSuffix(f.Name(), ".go") || strings.HasSuffix(f.Name(), "_test.go") {
				continue
			}
			text, err := os.ReadFile(dir + "/" + f.Name())
			require.NoError(t, err)
			for _, path := range []string{"go.opentelemetry.io/otel/sdk", "go.opentelemetry.io/otel/exporters", "github.com/prometheus"} {
				require.NotContains(t, string(text), `"`+path, f.Name())
			}
		}
	}
}
