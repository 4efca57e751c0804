package main

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/holdfast-db/holdfast/db"
	"github.com/holdfast-db/holdfast/txn"
)

// pageHTML is the page. It is one file, asks nobody for anything, and finds its data in itself.
//
//go:embed page.html
var pageHTML []byte

// pageData marks where the data goes, and pageRefresh what says that newer data can be had at /data.json.
var (
	pageData    = []byte("/*DATA*/null")
	pageRefresh = []byte("/*REFRESH*/0")
)

// Bounds of what a page shows; what is over is counted.
const (
	pageCheckpoints = 2000
	pageSegments    = 512
	pageSamples     = 720
	pageRetirements = 200
	pageCells       = 96
)

// page is what the page shows, at one moment.
type page struct {
	looked
	Made       time.Time        `json:"made"`
	Version    string           `json:"version"`
	Overview   *db.Overview     `json:"overview"`
	Stats      map[string]any   `json:"stats"`
	Trees      []treeRoot       `json:"trees"`
	Omitted    bool             `json:"omitted"` // more than pageCheckpoints
	Segments   []db.SegmentInfo `json:"segments"`
	AllSegs    int              `json:"all_segments"`
	History    *db.HistoryInfo  `json:"history"`
	Activity   *db.Activity     `json:"activity"`
	Leases     *db.LeaseList    `json:"leases"`
	Namespaces int              `json:"namespaces"`
}

func takePage(c *cobra.Command, dir string) (p *page, err error) {
	err = look(c, dir, func(ctx context.Context, x *db.Inspection, at looked) (err error) {
		p = &page{looked: at, Made: time.Now().UTC(), Version: buildVersion().String()}
		if p.Overview, err = x.Overview(ctx); err != nil {
			return err
		}
		p.Stats = statsMap(&p.Overview.Stats)
		if p.History, err = x.History(ctx, db.HistoryQuery{Limit: pageRetirements, Samples: pageSamples}); err != nil {
			return err
		}
		namespaces, err := x.Namespaces(ctx)
		if err != nil {
			return err
		}
		p.Namespaces = len(namespaces)
		all, more, err := allCheckpoints(ctx, x, db.ListQuery{}, pageCheckpoints)
		if err != nil {
			return err
		}
		p.Trees, p.Omitted = append([]treeRoot{}, plant(namespaces, all, p.History.Retirements, false)...), more
		m, err := x.Segments(ctx, db.SegmentQuery{Cells: pageCells})
		if err != nil {
			return err
		}
		p.AllSegs = len(m.Segments) + m.Omitted
		p.Segments = m.Segments[max(len(m.Segments)-pageSegments, 0):]
		if p.Activity, err = x.Activity(ctx); err != nil {
			return err
		}
		p.Leases, err = x.Leases(ctx)
		return err
	})
	return p, err
}

// html gives the page with its data in it. encoding/json writes <, > and & so that no text of a database ends the script.
func (p *page) html(refresh time.Duration) ([]byte, error) {
	data, err := json.Marshal(p)
	if err != nil {
		return nil, databaseError(fmt.Errorf("page: %w: %w", txn.ErrInvalid, err))
	}
	b := bytes.Replace(pageHTML, pageData, data, 1)
	return bytes.Replace(b, pageRefresh, fmt.Appendf(nil, "%d", refresh.Milliseconds()), 1), nil
}

func newReportCommand() *cobra.Command {
	var file string
	c := &cobra.Command{
		Use:   "report DIR --html FILE",
		Short: "Write a page that shows a database",
		Long: `Report writes one HTML file that can be kept, sent and opened anywhere: tiers
over time, the checkpoints as a tree, the segment files, latencies, and what
was retired lately and why. It needs no network and asks nobody for anything.
--json prints the same data instead.

` + lookHelp + `

` + lookStatusHelp,
		Example: `  holdfast report /var/cache/model --html report.html
  holdfast report /var/cache/model --html - | gzip > report.html.gz
  holdfast report /var/cache/model --json | jq .history.reasons`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if (file == "") == !wantsJSON(c) {
				return usageError(errors.New("want --html FILE or --json"))
			}
			p, err := takePage(c, args[0])
			if err != nil {
				return err
			}
			if wantsJSON(c) {
				return writeJSON(c.OutOrStdout(), p)
			}
			b, err := p.html(0)
			if err != nil {
				return err
			}
			if file == "-" {
				_, err = c.OutOrStdout().Write(b)
			} else if err = os.WriteFile(file, b, 0o644); err == nil {
				s := newScreen(c.OutOrStdout())
				s.heading(p.looked)
				s.printf("%s: %s\n", file, humanBytes(int64(len(b))))
			}
			if err != nil {
				return databaseError(err)
			}
			return nil
		},
	}
	c.Flags().StringVar(&file, "html", "", "write the page to this `FILE`, - for standard output")
	return directoryArgs(c)
}

// serveRefresh is how often a page that is served asks for newer data; the database is looked at no more often than that, however many
// pages are open.
const serveRefresh = 2 * time.Second

// pageServer serves the page of one directory. Between two looks nothing of the directory is held, so that a process may open it.
type pageServer struct {
	take func() (*page, error)
	host map[string]bool // names under which it may be asked for

	mu    sync.Mutex // guards what follows; held while the database is looked at, so that all who ask share one look
	last  *page
	at    time.Time
	fault error
}

func (s *pageServer) page() (*page, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.at) >= serveRefresh/2 || s.at.IsZero() {
		s.last, s.fault = s.take()
		s.at = time.Now()
	}
	return s.last, s.fault
}

// ServeHTTP answers to / and /data.json and nothing else, to those who ask under the address that is served: a page of somebody else's
// that makes a browser come here under another name gets nothing.
func (s *pageServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	host, _, err := net.SplitHostPort(r.Host)
	if err != nil {
		host = r.Host
	}
	h := w.Header()
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")
	h.Set("Content-Security-Policy", "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
	switch {
	case len(s.host) > 0 && !s.host[host] && net.ParseIP(host) == nil:
		http.Error(w, "not under this name", http.StatusForbidden)
		return
	case r.Method != http.MethodGet && r.Method != http.MethodHead:
		h.Set("Allow", "GET, HEAD")
		http.Error(w, "only to be looked at", http.StatusMethodNotAllowed)
		return
	case r.URL.Path != "/" && r.URL.Path != "/data.json":
		http.NotFound(w, r)
		return
	}
	p, err := s.page()
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	if r.URL.Path == "/data.json" {
		h.Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(p)
		return
	}
	b, err := p.html(serveRefresh)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	h.Set("Content-Type", "text/html; charset=utf-8")
	_, _ = w.Write(b)
}

func newServeCommand() *cobra.Command {
	address := "127.0.0.1:8417"
	c := &cobra.Command{
		Use:   "serve DIR",
		Short: "Serve the page that shows a database, kept up to date",
		Long: `Serve answers HTTP on one address, this machine's own unless another one is
given, with the page of holdfast report, which then keeps itself up to date.
Nothing can be changed through it. Whoever can reach the address sees what is
in the database, prompts and pages excepted. It ends with SIGINT or SIGTERM.

` + lookHelp + `

` + lookStatusHelp,
		Example: `  holdfast serve /var/cache/model
  holdfast serve --http 127.0.0.1:0 /var/cache/model`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error { return runServe(c, args[0], address) },
	}
	c.Flags().StringVar(&address, "http", address, "`ADDRESS` to answer on; without a host it is 127.0.0.1")
	return directoryArgs(c)
}

func runServe(c *cobra.Command, dir, address string) error {
	ctx := c.Context()
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return usageError(fmt.Errorf("--http: %w", err))
	}
	if host == "" {
		host = "127.0.0.1"
	}
	if _, err := takePage(c, dir); err != nil { // a mistake shows now and not in a browser
		return err
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort(host, port))
	if err != nil {
		return usageError(fmt.Errorf("--http: %w", err))
	}
	s := &pageServer{take: func() (*page, error) { return takePage(c, dir) }, host: map[string]bool{host: true, "localhost": true}}
	server := &http.Server{Handler: s, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, WriteTimeout: time.Minute, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10}
	url := "http://" + l.Addr().String() + "/"
	if wantsJSON(c) {
		err = writeJSON(c.OutOrStdout(), map[string]string{"url": url})
	} else {
		_, err = fmt.Fprintf(c.OutOrStdout(), "%s shows %s until it is interrupted\n", url, filepath.Clean(dir))
	}
	if err != nil {
		return databaseError(errors.Join(err, l.Close()))
	}
	if ip := net.ParseIP(host); host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		fmt.Fprintln(c.ErrOrStderr(), "holdfast: others than this machine can see it")
	}
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(l) }()
	select {
	case err := <-ended:
		return databaseError(err)
	case <-ctx.Done():
	}
	err = server.Close()
	<-ended
	if err != nil {
		return databaseError(err)
	}
	return nil
}
