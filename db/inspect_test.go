package db

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

// everyQuestion asks everything there is and gives the answers as JSON, without what changes from call to call.
func everyQuestion(t testing.TB, i Inspector, g Generation) map[string]string {
	t.Helper()
	ctx := t.Context()
	out := map[string]string{}
	note := func(name string, answer any, err error) {
		require.NoError(t, err, name)
		b, err := json.Marshal(answer)
		require.NoError(t, err)
		out[name] = string(b)
	}
	o, err := i.Overview(ctx)
	require.NoError(t, err)
	o.At, o.HistoryFrom, o.Stats, o.Recovered, o.Opened, o.Settings = time.Time{}, time.Time{}, Stats{}, RecoveryReport{}, time.Time{}, Settings{}
	note("overview", o, nil)
	ns, err := i.Namespaces(ctx)
	note("namespaces", ns, err)
	l, err := i.List(ctx, ListQuery{})
	note("list", l, err)
	r, err := i.Resolve(ctx, g.String()[:8])
	note("resolve", r, err)
	m, err := i.Manifest(ctx, ManifestQuery{Generation: g})
	note("manifest", m, err)
	w, err := i.Log(ctx, LogQuery{})
	note("log", w, err)
	s, err := i.Segments(ctx, SegmentQuery{Cells: 32})
	note("segments", s, err)
	x, err := i.Index(ctx, IndexQuery{Count: true})
	require.NoError(t, err)
	note("index", x.Entries, nil)
	h, err := i.History(ctx, HistoryQuery{})
	require.NoError(t, err)
	h.From = time.Time{}
	note("history", h, nil)
	y, err := i.Why(ctx, WhyQuery{Generation: g})
	require.NoError(t, err)
	y.From = time.Time{}
	note("why", y, nil)
	a, err := i.Activity(ctx)
	require.NoError(t, err)
	require.NotEmpty(t, a.Latencies)
	note("activity", a.Events, nil)
	e, err := i.Leases(ctx)
	note("leases", e, err)
	return out
}

// Given a database in use, then every question has the same answer through the socket as in its process, the socket is for its user
// alone, there is nothing in it that changes the database, and it is gone after Close.
func TestSocketAnswersAsTheProcessDoes_OBS04_OBS05(t *testing.T) {
	dir := filepath.Join(tempDir(t), strings.Repeat("long", 30)) // longer than the path of a socket may be
	d := openDB(t, dir, Options{Introspection: true})
	ns := testNamespace(t, 2)
	s := seqOf(t, ns, tokens(1, 3000))
	publish(t, d, s, 1000)
	g, _ := publish(t, d, s, 3000)
	gone, _ := publish(t, d, seqOf(t, ns, tokens(2, 500)), 500)
	require.NoError(t, d.Delete(t.Context(), gone))
	owner, err := d.NewOwner("worker 7", time.Hour)
	require.NoError(t, err)
	held, err := d.Restore(t.Context(), s, LookupOptions{Owner: owner})
	require.NoError(t, err)
	defer held.Release()
	_, err = d.curator.work(t.Context()) // so that nothing is recorded between two answers
	require.NoError(t, err)
	pending, err := d.Begin(t.Context(), PublishRequest{Sequence: seqOf(t, ns, tokens(3, 600)), Offset: 600, Owner: owner})
	require.NoError(t, err)

	info, err := os.Lstat(filepath.Join(dir, SocketName))
	require.NoError(t, err)
	require.Equal(t, fs.ModeSocket|0o600, info.Mode())
	x, err := Inspect(t.Context(), dir, Options{Logger: quiet})
	require.NoError(t, err)
	require.True(t, x.Live())
	settle(t, d) // what was restored is noted in the background
	near, far := everyQuestion(t, d.Inspector(), g), everyQuestion(t, x, g)
	for name, answer := range near {
		require.True(t, answer == far[name], "%s\n%.2000s\n%.2000s", name, answer, far[name])
	}
	require.Len(t, far, len(near))

	l, err := x.Leases(t.Context())
	require.NoError(t, err)
	require.Equal(t, []OwnerInfo{{Name: "worker 7", TTL: time.Hour, Held: 2}}, l.Owners)
	require.Len(t, l.Leases, 2)
	require.Equal(t, "restoration", l.Leases[0].Kind)
	require.Equal(t, held.Generation(), l.Leases[0].Generation)
	require.EqualValues(t, 2*(188*4096+12345), l.Leases[0].Bytes)
	require.Equal(t, "publication", l.Leases[1].Kind)
	require.Equal(t, pending.Generation(), l.Leases[1].Generation)
	o, err := x.Overview(t.Context())
	require.NoError(t, err)
	st := o.Stats
	require.Equal(t, []int64{3, 1, 1, 1, 0, 0}, []int64{st.Published, st.Pending, st.Leases, st.Owners, st.LeasesExpired, st.Transfers})
	require.Equal(t, []int{MaxPending, MaxLeases, MaxOwners}, []int{o.Settings.PublicationsMax, o.Settings.LeasesMax, o.Settings.OwnersMax})
	require.True(t, o.Durable)
	require.NoError(t, pending.Abort())

	_, err = x.Manifest(t.Context(), ManifestQuery{Generation: Generation{1}})
	require.ErrorIs(t, err, ErrNotFound)
	_, err = x.List(t.Context(), ListQuery{State: "lost"})
	require.ErrorIs(t, err, ErrInvalid)
	_, err = x.List(t.Context(), ListQuery{Limit: MaxInspectList + 1})
	require.ErrorIs(t, err, ErrTooLarge)
	post := func(method, path, body string) (int, string) {
		r, err := http.NewRequestWithContext(t.Context(), method, "http://holdfast"+path, strings.NewReader(body))
		require.NoError(t, err)
		response, err := x.Inspector.(*distantInspector).client.Do(r)
		require.NoError(t, err)
		defer response.Body.Close()
		b, err := io.ReadAll(response.Body)
		require.NoError(t, err)
		return response.StatusCode, string(b)
	}
	for _, c := range []struct{ method, path, body, class string }{
		{"POST", "/v1/retire", "{}", "unsupported"},
		{"POST", "/v2/list", "{}", "unsupported"},
		{"GET", "/v1/list", "", "invalid"},
		{"DELETE", "/v1/list", "", "invalid"},
		{"POST", "/v1/list", `{"colour": 1}`, "invalid"},
		{"POST", "/v1/list", `{`, "invalid"},
	} {
		status, body := post(c.method, c.path, c.body)
		require.Equal(t, http.StatusUnprocessableEntity, status, c.path)
		require.Contains(t, body, `"class":"`+c.class+`"`, c.path)
	}
	status, body := post("POST", "/v1/leases", "")
	require.Equal(t, http.StatusOK, status)
	require.Contains(t, body, "worker 7")
	require.NoError(t, x.Close())
	closeDB(t, d)
	require.NoFileExists(t, filepath.Join(dir, SocketName))
}

// Given a database that nobody has open, or whose process died, then it is opened read-only for whoever looks, and nothing is changed.
// One in use without a socket is refused, and the error says what would help.
func TestInspectionOpensReadOnly(t *testing.T) {
	dir, ns := tempDir(t), testNamespace(t, 1)
	_, err := Inspect(t.Context(), filepath.Join(dir, "nowhere"), Options{Logger: quiet})
	require.ErrorIs(t, err, ErrNotFound)
	_, err = Inspect(t.Context(), dir, Options{Logger: quiet})
	require.ErrorIs(t, err, ErrNotFound)
	d := openDB(t, dir, Options{WritePolicy: OnEvict})
	g, _ := publish(t, d, seqOf(t, ns, tokens(1, 700)), 700, func(r *PublishRequest) { r.Durable = true })
	lost, _ := publish(t, d, seqOf(t, ns, tokens(2, 700)), 700)
	_, err = Inspect(t.Context(), dir, Options{Logger: quiet})
	require.ErrorIs(t, err, ErrLocked)
	require.ErrorContains(t, err, "Options.Introspection")
	crash(t, d)
	left, err := net.Listen("unix", filepath.Join(dir, SocketName)) // as a process that was killed leaves it
	require.NoError(t, err)
	left.(*net.UnixListener).SetUnlinkOnClose(false)
	require.NoError(t, left.Close())

	before := treeOf(t, dir)
	x, err := Inspect(t.Context(), dir, Options{Logger: quiet})
	require.NoError(t, err)
	require.False(t, x.Live())
	require.Contains(t, everyQuestion(t, x, g)["why"], `"hit"`)
	y, err := x.Why(t.Context(), WhyQuery{Generation: lost})
	require.NoError(t, err)
	require.Equal(t, []CauseKind{CauseNotDurable}, kindsOf(y))
	require.NoError(t, x.Close())
	require.Equal(t, before, treeOf(t, dir))

	d = openDB(t, dir, Options{Introspection: true}) // which takes the place of what was left
	x, err = Inspect(t.Context(), dir, Options{Logger: quiet})
	require.NoError(t, err)
	require.True(t, x.Live())
	require.NoError(t, x.Close())
	closeDB(t, d)
}

// What the process offers can be asked for, and is what the document says: the questions by their names, which do not change under /v1,
// the format of the directory, and whether what is published survives a restart.
func TestSocketOffersWhatIsDocumented_OBS05(t *testing.T) {
	b, err := os.ReadFile(filepath.Join("..", "docs", "command-line.md"))
	require.NoError(t, err)
	offered := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `/v1/([a-z]+)` \\|").FindAllStringSubmatch(string(b), -1) {
		offered[m[1]] = true
	}
	for name := range socketMethods {
		require.True(t, offered[name], "docs/command-line.md: /v1/%s", name)
	}
	require.Len(t, offered, len(socketMethods))
	for policy, durable := range map[WritePolicy]bool{WriteThrough: true, OnEvict: true, OnReuse: true, Never: false} {
		d := openDB(t, tempDir(t), Options{WritePolicy: policy})
		o, err := d.Inspector().Overview(t.Context())
		require.NoError(t, err)
		require.Equal(t, 1, o.Format)
		require.Equal(t, durable, o.Durable, "%v", policy)
	}
}

// A file of the socket's name that is none is left alone, and the database opens without a socket.
func TestForeignFileOfTheSocketsNameIsLeftAlone(t *testing.T) {
	dir := tempDir(t)
	d := openDB(t, dir, Options{})
	closeDB(t, d)
	path := filepath.Join(dir, SocketName)
	require.NoError(t, os.WriteFile(path, []byte("mine"), 0o600))
	var log bytes.Buffer
	d = openDB(t, dir, Options{Introspection: true, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	closeDB(t, d)
	require.Contains(t, log.String(), "no introspection socket")
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "mine", string(b))
}

// Given more questions at once than are answered, then the others wait, all are answered, and the bounds on connections and on the
// size of a question hold.
func TestSocketIsBounded(t *testing.T) {
	dir := tempDir(t)
	d := openDB(t, dir, Options{Introspection: true})
	publish(t, d, seqOf(t, testNamespace(t, 1), tokens(1, 700)), 700)
	x, err := Inspect(t.Context(), dir, Options{Logger: quiet})
	require.NoError(t, err)
	var asking sync.WaitGroup
	for range 3 * MaxSocketConnections {
		asking.Go(func() {
			x, err := Inspect(t.Context(), dir, Options{Logger: quiet})
			if err != nil {
				t.Error(err)
				return
			}
			if _, err := x.List(t.Context(), ListQuery{}); err != nil {
				t.Error(err)
			}
			if err := x.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	asking.Wait()
	for range MaxSocketQuestions {
		d.serving.turns <- struct{}{}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	_, err = x.Leases(ctx)
	cancel()
	require.ErrorIs(t, err, ErrBusy)
	for range MaxSocketQuestions {
		<-d.serving.turns
	}
	_, err = x.Resolve(t.Context(), strings.Repeat("a", MaxSocketRequestBytes))
	require.Error(t, err)
	require.True(t, errors.Is(err, ErrTooLarge) || errors.Is(err, ErrIO), "%v", err) // the connection may be closed while it is written
	require.NoError(t, x.Close())
	closeDB(t, d)
}

// What a listing says of states, tiers, ages and sizes is so, filters choose by them, and a listing in parts is the whole.
func TestListingFiltersAndGoesOn_OBS01(t *testing.T) {
	d, ns := openDB(t, tempDir(t), Options{WritePolicy: OnEvict}), testNamespace(t, 1)
	i := d.Inspector()
	s := seqOf(t, ns, tokens(1, 2000))
	a, _ := publish(t, d, s, 500, func(r *PublishRequest) { r.Durable, r.Request = true, "r1" })
	b, _ := publish(t, d, s, 1000, func(r *PublishRequest) { r.Request = "r2" })
	c, _ := publish(t, d, s, 2000, func(r *PublishRequest) { r.Request = "r3" })
	e, _ := publish(t, d, seqOf(t, testNamespace(t, 2), tokens(5, 100)), 100)
	f, _ := publish(t, d, seqOf(t, ns, tokens(6, 100)), 100)
	require.NoError(t, d.Retire(t.Context(), f))
	list := func(q ListQuery) (gens []Generation) {
		l, err := i.List(t.Context(), q)
		require.NoError(t, err)
		require.Zero(t, l.Next)
		for _, x := range l.Checkpoints {
			gens = append(gens, x.Generation)
		}
		return gens
	}
	require.ElementsMatch(t, []Generation{a, b, c, e, f}, list(ListQuery{}))
	require.ElementsMatch(t, []Generation{a, b, c, f}, list(ListQuery{Namespace: ns.ID()}))
	require.ElementsMatch(t, []Generation{f}, list(ListQuery{State: "retired"}))
	require.ElementsMatch(t, []Generation{b, c, e}, list(ListQuery{State: "undurable"}))
	require.ElementsMatch(t, []Generation{a}, list(ListQuery{Tier: "both"}))
	require.ElementsMatch(t, []Generation{b, c, e, f}, list(ListQuery{Tier: "ram"}))
	require.ElementsMatch(t, []Generation{b}, list(ListQuery{Request: "r2"}))
	require.ElementsMatch(t, []Generation{c}, list(ListQuery{MinBytes: 125*4096 + 12345}))
	require.ElementsMatch(t, []Generation{e, f}, list(ListQuery{MaxBytes: 2 * (7*4096 + 12345)}))
	require.Empty(t, list(ListQuery{Older: time.Hour}))
	require.Len(t, list(ListQuery{Newer: time.Hour}), 5)
	superseded := list(ListQuery{State: "superseded"})
	require.EqualValues(t, stats(t, d).Superseded, len(superseded))
	require.Equal(t, []Generation{a}, superseded)
	require.ElementsMatch(t, []Generation{b, c, e}, list(ListQuery{State: "current"}))

	var parts []Generation
	for q := (ListQuery{Limit: 2}); ; {
		l, err := i.List(t.Context(), q)
		require.NoError(t, err)
		for _, x := range l.Checkpoints {
			parts = append(parts, x.Generation)
		}
		if l.Next.IsZero() {
			break
		}
		q.After = l.Next
	}
	require.Equal(t, list(ListQuery{}), parts)
	_, err := d.DropRAM(t.Context())
	require.NoError(t, err)
	require.Len(t, list(ListQuery{Tier: "disk", State: "listed"}), 4)

	n, err := i.Namespaces(t.Context())
	require.NoError(t, err)
	require.Len(t, n, 2)
	var listed int64
	for _, x := range n {
		listed += x.Listed
	}
	require.Equal(t, stats(t, d).Checkpoints, listed)
}

// The pages of a manifest are all there, each with the copies that the catalogue names and the state that it has in RAM; what is drawn of
// the segments adds up to what the catalogue counts.
func TestManifestAndSegmentsAddUp_OBS01(t *testing.T) {
	d, ns := openDB(t, tempDir(t), Options{}), testNamespace(t, 2)
	s := seqOf(t, ns, tokens(1, 3000))
	g, _ := publish(t, d, s, 3000)
	_, err := d.Inspector().Manifest(t.Context(), ManifestQuery{Generation: Generation{9}})
	require.ErrorIs(t, err, ErrNotFound)
	m, err := d.Inspector().Manifest(t.Context(), ManifestQuery{Generation: g})
	require.NoError(t, err)
	require.Len(t, m.Pages, 188+1)
	require.Zero(t, m.Next)
	seen := map[txn.Key]bool{}
	for n, p := range m.Pages {
		require.Len(t, p.Disk, 2)
		require.Equal(t, "clean", p.RAM)
		require.EqualValues(t, 1, p.Needed)
		if n < 188 {
			require.EqualValues(t, n, p.Position)
			require.Equal(t, "attention:kv", p.Group)
		}
		seen[p.Key] = true
	}
	require.Len(t, seen, 189)
	var parts []PageInfo
	for q := (ManifestQuery{Generation: g, Limit: 50}); ; {
		part, err := d.Inspector().Manifest(t.Context(), q)
		require.NoError(t, err)
		parts = append(parts, part.Pages...)
		if part.Next == 0 {
			break
		}
		q.First = part.Next
	}
	require.Equal(t, m.Pages, parts)
	other, _ := publish(t, d, seqOf(t, ns, tokens(2, 3000)), 3000)
	require.NoError(t, d.Delete(t.Context(), other))
	idle(d)
	_, err = d.DropRAM(t.Context())
	require.NoError(t, err)
	m, err = d.Inspector().Manifest(t.Context(), ManifestQuery{Generation: g})
	require.NoError(t, err)
	require.Equal(t, "disk", m.Tier)
	for _, p := range m.Pages {
		require.Empty(t, p.RAM)
	}
	x, err := d.Inspector().Segments(t.Context(), SegmentQuery{Cells: 64})
	require.NoError(t, err)
	var live, copies int64
	for _, s := range x.Segments {
		live, copies = live+s.Live, copies+s.LivePages
		require.Len(t, s.Map, 64)
		require.Equal(t, s.Size, s.Live+s.Dead+s.Free)
		if s.Live > s.Size/64*2 {
			require.NotEmpty(t, strings.Trim(s.Map, ".0"), "something is alive: %s", s.Map)
		}
	}
	require.Equal(t, stats(t, d).DiskBytes, live)
	require.EqualValues(t, 2*189, copies)

	// What an earlier handle has written is known as well, although opening reads no segment.
	classes := func() (c []string) {
		x, err := d.Inspector().Segments(t.Context(), SegmentQuery{})
		require.NoError(t, err)
		for _, s := range x.Segments {
			c = append(c, s.Class)
		}
		return c
	}
	before := classes()
	require.Contains(t, before, "shared")
	dir := d.dir.path
	closeDB(t, d)
	d = openDB(t, dir, Options{})
	require.Equal(t, before, classes())
}

// A part of a file is spread over the cells that it lies in, whatever the sizes, and not a byte of it is lost.
func TestSpreadLosesNothing(t *testing.T) {
	for size := int64(1); size < 200; size++ {
		for _, k := range []int{1, 3, 7, 64} {
			cells := make([]int64, k)
			for off := int64(0); off < size; off += 5 {
				spread(cells, size, off, 5)
			}
			sum := int64(0)
			for _, c := range cells {
				sum += c
			}
			require.Equal(t, size, sum, "%d bytes in %d cells: %v", size, k, cells)
		}
	}
}

// The records that are shown are those of the log, the last ones first asked for, and each kind says what it did.
func TestLogIsShown(t *testing.T) {
	d, ns := openDB(t, tempDir(t), Options{WritePolicy: OnEvict}), testNamespace(t, 1)
	s := seqOf(t, ns, tokens(1, 1000))
	a, _ := publish(t, d, s, 500)
	b, _ := publish(t, d, s, 1000)
	require.NoError(t, d.Supersede(t.Context(), b, a))
	require.NoError(t, d.Retire(t.Context(), a))
	require.NoError(t, d.Delete(t.Context(), a))
	_, err := d.DropRAM(t.Context())
	require.NoError(t, err)
	l, err := d.Inspector().Log(t.Context(), LogQuery{})
	require.NoError(t, err)
	kinds := map[string]bool{}
	for n, r := range l.Records {
		require.EqualValues(t, n+1, r.LSN)
		require.NotEmpty(t, r.Detail)
		kinds[r.Kind] = true
	}
	for _, kind := range []string{"publish", "supersede", "retire", "delete", "persist"} {
		require.True(t, kinds[kind], kind)
	}
	last, err := d.Inspector().Log(t.Context(), LogQuery{Limit: 2})
	require.NoError(t, err)
	require.Equal(t, l.Records[len(l.Records)-2:], last.Records)
	from, err := d.Inspector().Log(t.Context(), LogQuery{From: 2, Limit: 1})
	require.NoError(t, err)
	require.Equal(t, l.Records[1:2], from.Records)
	none, err := d.Inspector().Log(t.Context(), LogQuery{Limit: -1})
	require.NoError(t, err)
	require.Empty(t, none.Records)
	require.Equal(t, stats(t, d).LSN, none.Applied)
}

// A few digits find a generation, wherever it is known from.
func TestResolveFindsByDigits(t *testing.T) {
	d, ns := openDB(t, tempDir(t), Options{}), testNamespace(t, 1)
	a, _ := publish(t, d, seqOf(t, ns, tokens(1, 100)), 100)
	b, _ := publish(t, d, seqOf(t, ns, tokens(2, 100)), 100)
	require.NoError(t, d.Delete(t.Context(), b))
	for _, g := range []Generation{a, b} {
		for _, n := range []int{5, 8, 9, 64} {
			found, err := d.Inspector().Resolve(t.Context(), strings.ToUpper(g.String()[:n]))
			require.NoError(t, err)
			require.Equal(t, []Generation{g}, found)
		}
	}
	for _, bad := range []string{"", "abc", "xyzw", strings.Repeat("a", 65)} {
		_, err := d.Inspector().Resolve(t.Context(), bad)
		require.ErrorIs(t, err, ErrInvalid)
	}
	none, err := d.Inspector().Resolve(t.Context(), "0000")
	require.NoError(t, err)
	require.Empty(t, none)
}
