package db

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

// attention is a small layout without recurrent state.
var attention = Group{Name: "attention:kv", Kind: Attention, PageBytes: 4096, PageTokens: 16}

func subscribe(t testing.TB, d *DB, o SubscribeOptions) *Subscription {
	t.Helper()
	s, err := d.Subscribe(o)
	require.NoError(t, err)
	t.Cleanup(s.Close)
	return s
}

// upTo gives the events up to an LSN. Waiting for one that does not come ends the test.
func upTo(t testing.TB, s *Subscription, lsn txn.LSN) (events []Event) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for s.Resume() <= lsn {
		e, err := s.Next(ctx)
		require.NoError(t, err)
		events = append(events, e)
	}
	return events
}

// pastEvents makes told events equal to those of the log: without a time, and without what is told only while it happens.
func pastEvents(events []Event) (same []Event) {
	for _, e := range events {
		if e.Time = (time.Time{}); e.Kind != EventDurable {
			same = append(same, e)
		}
	}
	return same
}

// told gives kind and reason of events in short.
func told(events []Event) (short []string) {
	for _, e := range events {
		s := e.Kind.String()
		if e.Reason != 0 {
			s += ": " + e.Reason.String()
		}
		short = append(short, s)
	}
	return short
}

// Every step in the life of checkpoints is an event with its LSN and its reason, while it happens and again from the log.
func TestEventsTellTheLifeOfACheckpoint(t *testing.T) {
	d := openDB(t, tempDir(t), Options{WritePolicy: OnEvict, SupersedeGrace: -1})
	ns := testNamespace(t, 2)
	now := subscribe(t, d, SubscribeOptions{})
	seq := seqOf(t, ns, tokens(1, 100))
	a, _ := publish(t, d, seq, 40, func(r *PublishRequest) { r.Request, r.Kind = "r1", Response })
	b, _ := publish(t, d, seq, 100, func(r *PublishRequest) { r.Durable, r.Request, r.Continues = true, "r2", a })
	ctx := context.Background()
	require.NoError(t, d.Supersede(ctx, b, a))
	require.EqualValues(t, 40, restoreAt(t, d, seqOf(t, ns, tokens(1, 40))))
	_, err := d.curator.work(ctx)
	require.NoError(t, err)
	replaced, _ := publish(t, d, seq, 100, func(r *PublishRequest) { r.Meta = []byte("another") })
	require.NoError(t, d.Retire(ctx, replaced))
	require.NoError(t, d.Delete(ctx, replaced))
	require.NoError(t, d.Delete(ctx, a))
	lsn := stats(t, d).LSN
	events := upTo(t, now, lsn)

	require.Subset(t, told(events), []string{
		"published", "persisted", "superseded", "current", "used", "retired: replaced", "deleted: replaced", "retired: requested", "deleted", "deleted: requested",
	})
	first := events[0]
	require.WithinDuration(t, time.Now(), first.Time, time.Hour)
	first.Time = time.Time{}
	require.Equal(t, Event{
		LSN: first.LSN, Kind: EventPublished, Generation: a, Namespace: ns.ID(), Offset: 40, Checkpoint: Response, Request: "r1",
		Pages: 4, Bytes: 2 * (3*4096 + 12345), NewPages: 4,
	}, first)
	for _, e := range events {
		switch {
		case e.Kind == EventSuperseded:
			require.Equal(t, []Generation{a, b}, []Generation{e.Generation, e.By})
		case e.Reason == ReasonReplaced:
			require.Equal(t, []Generation{b, replaced}, []Generation{e.Generation, e.By})
		}
	}
	for i := range events[1:] {
		require.LessOrEqual(t, events[i].LSN, events[i+1].LSN)
	}

	require.Equal(t, pastEvents(events), upTo(t, subscribe(t, d, SubscribeOptions{From: OldestLSN}), lsn), "the log tells the same")
	middle := events[len(events)/2].LSN
	var later []Event
	for _, e := range pastEvents(events) {
		if e.LSN >= middle {
			later = append(later, e)
		}
	}
	require.Equal(t, later, upTo(t, subscribe(t, d, SubscribeOptions{From: middle}), lsn))
	require.Equal(t, events, d.RecentEvents())

	// What happens goes on where the log ends, without a gap.
	both := subscribe(t, d, SubscribeOptions{From: OldestLSN})
	c, _ := publish(t, d, seqOf(t, ns, tokens(3, 20)), 20)
	lsn = stats(t, d).LSN
	all := upTo(t, both, lsn)
	require.Equal(t, pastEvents(append(events, upTo(t, now, lsn)...)), pastEvents(all))
	require.Equal(t, c, all[len(all)-1].Generation)

	future := subscribe(t, d, SubscribeOptions{From: lsn + 2})
	publish(t, d, seqOf(t, ns, tokens(4, 20)), 20)
	e, _ := publish(t, d, seqOf(t, ns, tokens(5, 20)), 20)
	require.Equal(t, e, upTo(t, future, lsn+2)[0].Generation)
}

// Whoever waits for a checkpoint to be durable is told when it is: at the write that brought its last copy.
func TestEventTellsWhenACheckpointIsDurable(t *testing.T) {
	d := openDB(t, tempDir(t), Options{WritePolicy: OnEvict})
	s := subscribe(t, d, SubscribeOptions{})
	g, _ := publish(t, d, seqOf(t, testNamespace(t, 1), tokens(1, 100)), 100)
	_, err := d.DropRAM(context.Background())
	require.NoError(t, err)
	events := upTo(t, s, stats(t, d).LSN)
	require.Equal(t, []string{"published", "persisted", "durable"}, told(events))
	require.Equal(t, g, events[2].Generation)
	require.Equal(t, []int64{8, 7*4096 + 12345}, []int64{events[1].Pages, events[1].Bytes})
}

// Every kind of miss has its cause in an event: the reason with which the checkpoint was retired.
func TestEveryMissHasItsCause_OBS02(t *testing.T) {
	ctx := context.Background()
	ns := testNamespace(t, 1, attention)
	causes := map[Reason]func(t *testing.T) *DB{}
	published := func(t *testing.T, o Options) (*DB, Generation) {
		d := openDB(t, tempDir(t), o)
		g, _ := publish(t, d, seqOf(t, ns, tokens(1, 100)), 100)
		return d, g
	}
	reopened := func(t *testing.T, d *DB) *DB { return openDB(t, d.dir.path, Options{}) }
	crowd := func(t *testing.T, d *DB) *DB {
		for i := range 40 {
			publish(t, d, seqOf(t, ns, tokens(uint64(100+i), 1600)), 1600)
		}
		return d
	}
	causes[ReasonRequested] = func(t *testing.T) *DB {
		d, g := published(t, Options{})
		require.NoError(t, d.Retire(ctx, g))
		return d
	}
	causes[ReasonReplaced] = func(t *testing.T) *DB {
		d, g := published(t, Options{})
		other, _ := publish(t, d, seqOf(t, ns, tokens(1, 100)), 100, func(r *PublishRequest) { r.Meta = []byte("another") })
		require.NotEqual(t, g, other)
		return d
	}
	causes[ReasonNotDurable] = func(t *testing.T) *DB {
		d, _ := published(t, Options{WritePolicy: Never})
		crash(t, d)
		return reopened(t, d)
	}
	causes[ReasonRAMPressure] = func(t *testing.T) *DB {
		d, _ := published(t, Options{WritePolicy: Never, RAMBytes: 2 << 20})
		return crowd(t, d)
	}
	causes[ReasonDiskPressure] = func(t *testing.T) *DB {
		d, _ := published(t, Options{DiskBytes: 4 << 20})
		return crowd(t, d)
	}
	causes[ReasonWriteFailed] = func(t *testing.T) *DB {
		d, _ := published(t, Options{WritePolicy: OnEvict, Faults: &Faults{WriteErrors: 1}})
		_, err := d.DropRAM(ctx)
		require.NoError(t, err)
		return d
	}
	causes[ReasonLost] = func(t *testing.T) *DB {
		d, _ := published(t, Options{})
		spoil(t, d)
		require.Zero(t, restoreAt(t, d, seqOf(t, ns, tokens(1, 100))))
		return d
	}
	causes[ReasonShutdown] = func(t *testing.T) *DB {
		d, _ := published(t, Options{WritePolicy: Never})
		require.Equal(t, 1, closeDB(t, d).Retired)
		return reopened(t, d)
	}
	causes[ReasonCleared] = func(t *testing.T) *DB {
		d, _ := published(t, Options{})
		_, err := d.Clear(ctx, txn.Key{})
		require.NoError(t, err)
		return d
	}
	for reason := Reason(1); int(reason) < reasonsMax; reason++ {
		t.Run(reason.String(), func(t *testing.T) {
			require.Contains(t, causes, reason)
			d := causes[reason](t)
			var first Generation
			why := map[Generation]Reason{}
			for _, e := range upTo(t, subscribe(t, d, SubscribeOptions{From: OldestLSN}), stats(t, d).LSN) {
				if first.IsZero() && e.Kind == EventPublished {
					first = e.Generation
				}
				if e.Kind == EventRetired {
					why[e.Generation] = e.Reason
				}
			}
			require.False(t, first.IsZero())
			require.Equal(t, reason, why[first])
			_, err := d.Checkpoint(first)
			require.ErrorIs(t, err, ErrNotFound)
		})
	}
}

// spoil empties the RAM tier and breaks the bytes of every page on disk.
func spoil(t testing.TB, d *DB) {
	t.Helper()
	left, err := d.DropRAM(context.Background())
	require.NoError(t, err)
	require.Zero(t, left)
	snapshot := d.index.Snapshot()
	defer snapshot.Close()
	require.NoError(t, txn.Pages(snapshot, func(_ txn.Key, e *txn.PageEntry) (bool, error) {
		for _, at := range e.Place {
			overwrite(t, segmentFile(d.dir.path, at.Segment), at.Offset, []byte("not what was written"))
		}
		return true, nil
	}))
}

// A reader that does not read costs its buffer: publications go on, it gets what is held and is told where to go on, and what
// it missed is in the log.
func TestSlowReaderOfEventsLosesNothing(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	ns := testNamespace(t, 1, attention)
	all := subscribe(t, d, SubscribeOptions{})
	slow := subscribe(t, d, SubscribeOptions{Buffer: 4})
	for i := range 10 {
		publish(t, d, seqOf(t, ns, tokens(uint64(i), 20)), 20)
	}
	lsn := stats(t, d).LSN
	want := upTo(t, all, lsn)
	require.Len(t, want, 10)
	var got []Event
	for e, err := range slow.Events(t.Context()) {
		if err != nil {
			require.ErrorIs(t, err, ErrBusy)
			require.ErrorContains(t, err, fmt.Sprintf("events from LSN %d on", want[4].LSN))
			break
		}
		got = append(got, e)
	}
	require.Equal(t, want[:4], got)
	require.Equal(t, want[4].LSN, slow.Resume())
	got = append(got, upTo(t, subscribe(t, d, SubscribeOptions{From: slow.Resume(), Buffer: 4}), lsn)...)
	require.Equal(t, pastEvents(want), pastEvents(got))

	// A record larger than the buffer comes whole to a reader that has nothing waiting.
	small := subscribe(t, d, SubscribeOptions{Buffer: 1})
	r, err := d.Clear(t.Context(), ns.ID())
	require.NoError(t, err)
	require.Equal(t, 10, r.Checkpoints)
	require.Len(t, upTo(t, small, stats(t, d).LSN), 20)
}

// The log does not reach back for ever; who asks for more is told where it begins.
func TestEventsBeforeTheLogAreNotFound(t *testing.T) {
	dir := tempDir(t)
	d := openDB(t, dir, Options{})
	publish(t, d, seqOf(t, testNamespace(t, 1, attention), tokens(1, 20)), 20)
	closeDB(t, d)
	require.NoError(t, os.RemoveAll(d.dir.join(walName)))
	require.NoError(t, os.Mkdir(d.dir.join(walName), 0o700)) // as if it had been cut up to its end
	d = openDB(t, dir, Options{})
	publish(t, d, seqOf(t, testNamespace(t, 1, attention), tokens(2, 20)), 20)
	_, err := subscribe(t, d, SubscribeOptions{From: 1}).Next(t.Context())
	require.ErrorIs(t, err, ErrNotFound)
	require.ErrorContains(t, err, "events from LSN 1 on were asked for, the log begins at 2")
	events := upTo(t, subscribe(t, d, SubscribeOptions{From: OldestLSN}), 2)
	require.Equal(t, []string{"published"}, told(events))
	require.EqualValues(t, 2, events[0].LSN)
}

// Subscriptions are bounded, end when they are closed, and with the database after telling what it retired.
func TestSubscriptionsEnd(t *testing.T) {
	d := openDB(t, tempDir(t), Options{WritePolicy: Never})
	g, _ := publish(t, d, seqOf(t, testNamespace(t, 1), tokens(1, 20)), 20)
	var open []*Subscription
	for range MaxSubscriptions {
		open = append(open, subscribe(t, d, SubscribeOptions{}))
	}
	_, err := d.Subscribe(SubscribeOptions{})
	require.ErrorIs(t, err, ErrBusy)
	open[1].Close()
	_, err = open[1].Next(t.Context())
	require.ErrorIs(t, err, ErrClosed)
	subscribe(t, d, SubscribeOptions{})
	for _, n := range []int{-1, MaxEventBuffer + 1} {
		_, err = d.Subscribe(SubscribeOptions{Buffer: n})
		require.Error(t, err)
		require.True(t, errors.Is(err, ErrInvalid) || errors.Is(err, ErrTooLarge), err)
	}
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	_, err = open[0].Next(ended)
	require.ErrorIs(t, err, ErrBusy)

	closeDB(t, d)
	var events []Event
	for e, err := range open[0].Events(t.Context()) {
		if err != nil {
			require.ErrorIs(t, err, ErrClosed)
			break
		}
		events = append(events, e)
	}
	require.Equal(t, []string{"retired: shutdown", "deleted: shutdown"}, told(events))
	require.Equal(t, g, events[0].Generation)
	_, err = d.Subscribe(SubscribeOptions{})
	require.ErrorIs(t, err, ErrClosed)
}

// Events go to a slog handler, with a level of their own, until the database closes.
func TestEventsAreLogged(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	ns := testNamespace(t, 1, attention)
	var out lockedBuffer
	handler := slog.NewTextHandler(&out, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey || a.Key == "generation" || a.Key == "namespace" {
			return slog.Attr{}
		}
		return a
	}})
	done := make(chan error, 1)
	g, _ := publish(t, d, seqOf(t, ns, tokens(1, 100)), 100, func(r *PublishRequest) { r.Request = "request 17" })
	go func() {
		done <- d.LogEvents(context.Background(), handler, SubscribeOptions{From: OldestLSN, Buffer: 1})
	}()
	require.NoError(t, d.Delete(t.Context(), g))
	publish(t, d, seqOf(t, ns, tokens(2, 100)), 100)
	spoil(t, d)
	require.Zero(t, restoreAt(t, d, seqOf(t, ns, tokens(2, 100))))
	require.Eventually(t, func() bool { return strings.Contains(out.String(), "lsn=4 ") }, time.Minute, time.Millisecond)
	closeDB(t, d)
	require.NoError(t, <-done)
	text := out.String()
	for _, line := range []string{
		`level=INFO msg="checkpoint published" lsn=1 offset=100 checkpoint=prompt request="request 17" pages=7 new_pages=7 bytes=28672` + "\n",
		`level=INFO msg="checkpoint retired" lsn=2 reason=requested` + "\n",
		`level=WARN msg="checkpoint retired" lsn=4 reason="page lost"` + "\n",
	} {
		require.Contains(t, text, line)
	}
	require.Equal(t, 1, strings.Count(text, "lsn=1 "), text)
	value := Event{LSN: 7, Kind: EventRetired, Reason: ReasonLost}.LogValue()
	require.Equal(t, "[kind=retired lsn=7 reason=page lost]", value.String())
}

// lockedBuffer is read while somebody writes to it.
type lockedBuffer struct {
	mu  sync.Mutex
	all bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.all.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.all.String()
}
