package main

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/db"
)

// The page asks nobody for anything: no address but the name of a namespace of XML is in it, and nothing that loads a file.
func TestPageIsSelfContained(t *testing.T) {
	for _, m := range regexp.MustCompile(`(?i)https?://[^"' ]+`).FindAllString(string(pageHTML), -1) {
		require.Equal(t, "http://www.w3.org/2000/svg", m)
	}
	for _, loads := range []string{"src=", "@import", "url(", "<iframe", "<object", "innerHTML", "eval("} {
		require.NotContains(t, string(pageHTML), loads)
	}
	require.Equal(t, 1, strings.Count(string(pageHTML), string(pageData)))
	require.Equal(t, 1, strings.Count(string(pageHTML), string(pageRefresh)))
}

// Given text of a user's that would end the script or begin another one, then it stays text.
func TestPageKeepsTextAsText(t *testing.T) {
	p := &page{looked: looked{Directory: `</script><script>alert(1)</script><!--`}}
	b, err := p.html(0)
	require.NoError(t, err)
	require.Equal(t, strings.Count(string(pageHTML), "<script"), strings.Count(string(b), "<script"))
	require.NotContains(t, string(b), "alert(1)</script>")
}

// The report is written to a file, and as JSON it has the same data.
func TestReport(t *testing.T) {
	dir := filled(t)
	file := filepath.Join(t.TempDir(), "report.html")
	status, stdout, stderr := holdfast(t, "report", dir, "--html", file)
	require.Equal(t, statusOK, status, stderr)
	require.Contains(t, stdout, file)
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	require.NotContains(t, string(b), string(pageData))
	var p page
	asJSON(t, statusOK, &p, "report", dir)
	require.NotEmpty(t, p.Trees)
	require.NotEmpty(t, p.Segments)
	require.NotEmpty(t, p.History.Samples)
	for _, s := range p.Segments {
		require.Len(t, s.Map, pageCells)
	}
}

// What is served is the page and its data, to be looked at only, under its own name only, with a policy that lets it load nothing; and
// the directory is free between two looks.
func TestServedPage(t *testing.T) {
	dir := filled(t)
	root := newRootCommand()
	root.SetContext(t.Context())
	root.SetErr(io.Discard)
	s := httptest.NewServer(&pageServer{take: func() (*page, error) { return takePage(root, dir) }, host: map[string]bool{"localhost": true}})
	defer s.Close()
	ask := func(method, path, host string) (*http.Response, string) {
		r, err := http.NewRequestWithContext(t.Context(), method, s.URL+path, nil)
		require.NoError(t, err)
		if host != "" {
			r.Host = host
		}
		response, err := s.Client().Do(r)
		require.NoError(t, err)
		defer response.Body.Close()
		b, err := io.ReadAll(response.Body)
		require.NoError(t, err)
		return response, string(b)
	}
	r, body := ask("GET", "/", "")
	require.Equal(t, http.StatusOK, r.StatusCode)
	require.Contains(t, body, "Tiers over time")
	require.Contains(t, r.Header.Get("Content-Security-Policy"), "default-src 'none'")
	require.Contains(t, body, "const refresh = 2000;")
	r, body = ask("GET", "/data.json", "localhost:1234")
	require.Equal(t, http.StatusOK, r.StatusCode)
	var p page
	require.NoError(t, json.Unmarshal([]byte(body), &p))
	require.False(t, p.Live)
	for _, c := range []struct {
		method, path, host string
		status             int
	}{
		{"POST", "/", "", http.StatusMethodNotAllowed}, {"DELETE", "/data.json", "", http.StatusMethodNotAllowed},
		{"GET", "/etc/passwd", "", http.StatusNotFound}, {"GET", "/", "evil.example", http.StatusForbidden},
	} {
		r, _ := ask(c.method, c.path, c.host)
		require.Equal(t, c.status, r.StatusCode, "%+v", c)
	}
	d, err := db.Open(t.Context(), dir, db.Options{RAMBytes: 1 << 20})
	require.NoError(t, err, "nobody holds the directory")
	_, err = d.Close(context.Background())
	require.NoError(t, err)
}

// The command serves until it is interrupted, and ends with 0 then.
func TestServeEndsWhenInterrupted(t *testing.T) {
	dir := filled(t)
	ctx, cancel := context.WithCancel(t.Context())
	out, in := io.Pipe()
	ended := make(chan int, 1)
	go func() {
		ended <- run(ctx, []string{"serve", "--http", "127.0.0.1:0", "--json", dir}, strings.NewReader(""), in, io.Discard)
	}()
	var said struct{ URL string }
	require.NoError(t, json.NewDecoder(out).Decode(&said))
	go func() { _, _ = io.Copy(io.Discard, out) }()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	r, err := client.Get(said.URL)
	require.NoError(t, err)
	_, err = io.Copy(io.Discard, r.Body)
	require.NoError(t, err)
	require.NoError(t, r.Body.Close())
	require.Equal(t, http.StatusOK, r.StatusCode)
	cancel()
	require.Equal(t, statusOK, <-ended)
	require.NoError(t, in.Close())
}

// pageDrive is a script that uses the page as somebody does who has a keyboard and no mouse, and writes down what came of it.
const pageDrive = `<script>
try {
  const out = {};
  const press = (e, ...keys) => keys.forEach((key) => e().dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true})));
  const tree = () => document.getElementById("tree"), chart = () => document.getElementById("chart");
  const at = () => document.querySelector('#tree [tabindex="0"]').dataset.key;
  out.ready = document.body.dataset.ready;
  out.dark = document.documentElement.dataset.theme;
  out.rows = tree().children.length;
  out.first = at();
  press(tree, "ArrowDown"); out.second = at();
  press(tree, "End"); out.last = at();
  press(tree, "Home"); out.home = at();
  press(tree, "ArrowLeft"); out.folded = tree().children.length;
  press(tree, "ArrowRight"); out.unfolded = tree().children.length;
  press(tree, "Enter"); out.enter = tree().children.length;
  out.focused = tree().contains(document.activeElement);
  press(chart, "Home"); out.said = document.getElementById("chart-said").textContent;
  press(chart, "ArrowRight"); out.moved = document.getElementById("chart-said").textContent !== out.said;
  document.getElementById("theme").click(); out.switched = document.documentElement.dataset.theme;
  out.unnamed = [...document.querySelectorAll("svg, .cells, button, section")].filter((e) => !(e.getAttribute("aria-label") || e.getAttribute("aria-labelledby") || e.textContent.trim())).length;
  out.unreachable = [...document.querySelectorAll(".scroll")].filter((e) => e.tabIndex < 0 && !e.querySelector('[tabindex="0"]')).length;
  out.nothing = [...document.querySelectorAll("main *")].filter((e) => e.children.length === 0 && /^(null|undefined|NaN|Invalid Date)$/.test(e.textContent.trim())).length + (/\b(null|undefined|NaN|Invalid Date)\b/.test(document.querySelector("main").innerText) ? 1 : 0);
  out.sideways = document.documentElement.scrollWidth > document.documentElement.clientWidth;
  document.body.dataset.driven = JSON.stringify(out);
} catch (e) { document.body.dataset.driven = JSON.stringify({fault: String(e)}); }
</script></body>`

// Given the page in a real browser, in light and in dark, in a wide window and a narrow one, then it is drawn, everything in it can be
// reached and used with the keyboard and has a name, and a picture of it can be taken. HOLDFAST_SCREENSHOTS names a folder that keeps the
// pictures.
func TestPageInABrowser(t *testing.T) {
	browser := ""
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome", "headless-shell"} {
		if path, err := exec.LookPath(name); err == nil {
			browser = path
			break
		}
	}
	if browser == "" {
		t.Skip("no Chromium is installed")
	}
	keep := os.Getenv("HOLDFAST_SCREENSHOTS")
	if keep == "" {
		keep = t.TempDir()
	}
	dir := crowded(t)
	status, _, stderr := holdfast(t, "report", dir, "--html", filepath.Join(keep, "report.html"))
	require.Equal(t, statusOK, status, stderr)
	b, err := os.ReadFile(filepath.Join(keep, "report.html"))
	require.NoError(t, err)
	driven := filepath.Join(t.TempDir(), "driven.html")
	require.NoError(t, os.WriteFile(driven, []byte(strings.Replace(string(b), "</body>", pageDrive, 1)), 0o600))
	for _, c := range []struct{ theme, scheme, size string }{{"light", "1", "1280,2200"}, {"dark", "0", "500,2200"}} {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		picture := filepath.Join(keep, "report."+c.theme+".png")
		flags := []string{
			"--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-background-networking", "--disable-component-update",
			"--user-data-dir=" + t.TempDir(), "--window-size=" + c.size, "--blink-settings=preferredColorScheme=" + c.scheme,
		}
		dom, err := exec.CommandContext(ctx, browser, append(flags, "--dump-dom", "file://"+driven)...).Output()
		require.NoError(t, err)
		m := regexp.MustCompile(`data-driven="([^"]*)"`).FindStringSubmatch(string(dom))
		require.NotNil(t, m, "the script in the page did not come to its end: %.300s", dom)
		var r struct {
			Fault, Ready, Dark, First, Second, Last, Home, Said, Switched string
			Rows, Folded, Unfolded, Enter, Unnamed, Unreachable, Nothing  int
			Focused, Moved, Sideways                                      bool
		}
		require.NoError(t, json.Unmarshal([]byte(strings.ReplaceAll(m[1], "&quot;", `"`)), &r), m[1])
		require.Empty(t, r.Fault)
		require.Equal(t, "yes", r.Ready)
		require.Equal(t, c.theme, r.Dark)
		require.NotEqual(t, c.theme, r.Switched)
		require.Greater(t, r.Rows, 10)
		require.NotEqual(t, r.First, r.Second)
		require.NotEqual(t, r.Second, r.Last)
		require.Equal(t, r.First, r.Home)
		require.Less(t, r.Folded, r.Rows)
		require.Equal(t, r.Rows, r.Unfolded)
		require.Equal(t, r.Folded, r.Enter)
		require.True(t, r.Focused)
		require.Contains(t, r.Said, "checkpoints listed")
		require.True(t, r.Moved)
		require.Zero(t, r.Unnamed, "something has no name")
		require.Zero(t, r.Unreachable, "something that scrolls cannot be reached")
		require.Zero(t, r.Nothing, "something says null, undefined or NaN")
		require.False(t, r.Sideways, "the page is wider than its window")
		out, err := exec.CommandContext(ctx, browser, append(flags, "--screenshot="+picture, "file://"+filepath.Join(keep, "report.html"))...).CombinedOutput()
		cancel()
		require.NoError(t, err, "%s", out)
		info, err := os.Stat(picture)
		require.NoError(t, err)
		require.Greater(t, info.Size(), int64(10<<10))
	}
}
