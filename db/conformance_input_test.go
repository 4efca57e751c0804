package db

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

// Bad input at every public call: the class is the one documented, the message names the field, the value and the limit, and
// nothing has changed. A panic fails the test by itself.

// classes are all classes; an error has exactly one of them.
var classes = []error{
	ErrInvalid, ErrTooLarge, ErrNotFound, ErrConflict, ErrBusy, ErrNoSpace, ErrReadOnly, ErrPermission, ErrLocked, ErrFenced, ErrCorrupt,
	ErrIO, ErrUnsupported, ErrClosed,
}

func requireClass(t testing.TB, err, class error, parts ...string) {
	t.Helper()
	require.Error(t, err)
	for _, c := range classes {
		require.Equal(t, c == class, errors.Is(err, c), "%v: %v", c, err)
	}
	for _, p := range parts {
		require.ErrorContains(t, err, p)
	}
}

// refusal is a call that has to be refused.
type refusal struct {
	name  string
	call  func() error
	class error
	parts []string // of the message
}

// requireRefusals makes every call and compares the database before and after each.
func requireRefusals(t *testing.T, d *DB, books shelf, all []refusal) {
	before := still(t, d)
	for _, r := range all {
		t.Run(r.name, func(t *testing.T) {
			requireClass(t, r.call(), r.class, r.parts...)
			require.Equal(t, before, still(t, d))
		})
	}
	books.requireListedIsReadable(t, d)
}

func TestBadPublications(t *testing.T) {
	d := openDB(t, tempDir(t), Options{RAMBytes: 1 << 20})
	ns, books := testNamespace(t, 2, shared()...), shelf{}
	seq := seqOf(t, ns, tokens(1, 40))
	books.publish(t, d, seq, 40)
	long := seqOf(t, testNamespace(t, 1, attentionOnly(1, 1)...), tokens(1, MaxCheckpointPages+1))
	window := seqOf(t, testNamespace(t, 1, Group{Name: "w", Kind: Attention, PageBytes: 1, PageTokens: 1, WindowTokens: MaxListedPages + 9}), tokens(1, MaxListedPages+1))
	sets := func(change func(s []PageSet) []PageSet) func(*PublishRequest) {
		return func(r *PublishRequest) {
			r.Groups = change([]PageSet{
				{Group: "attention:kv", Positions: []int64{0, 1}},
				{Group: "recurrent:state", Positions: []int64{7}},
				{Group: "auxiliary:draft", Positions: []int64{0}},
			})
		}
	}
	attention := func(positions ...int64) func(*PublishRequest) {
		return sets(func(s []PageSet) []PageSet { s[0].Positions = positions; return s })
	}
	state := func(positions ...int64) func(*PublishRequest) {
		return sets(func(s []PageSet) []PageSet { s[1].Positions = positions; return s })
	}
	other := openDB(t, tempDir(t), Options{RAMBytes: 1 << 20})
	foreign, err := other.NewOwner("foreign", time.Hour)
	require.NoError(t, err)

	var all []refusal
	for _, c := range []struct {
		name   string
		change func(r *PublishRequest)
		class  error
		parts  []string
	}{
		{"nil sequence", func(r *PublishRequest) { r.Sequence = nil }, ErrInvalid, []string{"PublishRequest.Sequence is nil"}},
		{"zero sequence", func(r *PublishRequest) { r.Sequence = new(Sequence) }, ErrInvalid, []string{"PublishRequest.Sequence", "namespace"}},
		{"sequence of a zero namespace", func(r *PublishRequest) { r.Sequence = seqOf(t, new(Namespace), tokens(1, 32)) }, ErrInvalid, []string{"PublishRequest.Sequence", "namespace"}},
		{"empty sequence", func(r *PublishRequest) { r.Sequence = ns.NewSequence() }, ErrInvalid, []string{"PublishRequest.Offset is 32", "1…0"}},
		{"offset 0", func(r *PublishRequest) { r.Offset = 0 }, ErrInvalid, []string{"PublishRequest.Offset is 0", "1…40"}},
		{"offset negative", func(r *PublishRequest) { r.Offset = -1 }, ErrInvalid, []string{"PublishRequest.Offset is -1", "1…40"}},
		{"offset beyond the sequence", func(r *PublishRequest) { r.Offset = 41 }, ErrInvalid, []string{"PublishRequest.Offset is 41", "1…40"}},
		{"offset of the least number", func(r *PublishRequest) { r.Offset = math.MinInt64 }, ErrInvalid, []string{fmt.Sprint(math.MinInt64), "1…40"}},
		{"offset of the largest number", func(r *PublishRequest) { r.Offset = math.MaxInt64 }, ErrInvalid, []string{fmt.Sprint(math.MaxInt64), "1…40"}},
		{"kind", func(r *PublishRequest) { r.Kind = 5 }, ErrInvalid, []string{"PublishRequest.Kind is 5", "1…4"}},
		{"largest kind", func(r *PublishRequest) { r.Kind = 255 }, ErrInvalid, []string{"PublishRequest.Kind is 255", "1…4"}},
		{"long request id", func(r *PublishRequest) { r.Request = strings.Repeat("x", 257) }, ErrInvalid, []string{"PublishRequest.Request", "257", "0…256"}},
		{"request id with NUL", func(r *PublishRequest) { r.Request = "a\x00b" }, ErrInvalid, []string{"PublishRequest.Request", "NUL"}},
		{"request id not UTF-8", func(r *PublishRequest) { r.Request = "\xff" }, ErrInvalid, []string{"PublishRequest.Request", "UTF-8"}},
		{"negative ranks", func(r *PublishRequest) { r.Ranks = -1 }, ErrInvalid, []string{"PublishRequest.Ranks is -1", "2"}},
		{"too few ranks", func(r *PublishRequest) { r.Ranks = 1 }, ErrInvalid, []string{"PublishRequest.Ranks is 1", "2"}},
		{"too many ranks", func(r *PublishRequest) { r.Ranks = 3 }, ErrInvalid, []string{"PublishRequest.Ranks is 3", "2"}},
		{"huge ranks", func(r *PublishRequest) { r.Ranks = math.MaxInt }, ErrInvalid, []string{fmt.Sprint(math.MaxInt)}},
		{"large meta", func(r *PublishRequest) { r.Meta = make([]byte, MaxMetaBytes+1) }, ErrTooLarge, []string{"PublishRequest.Meta has 65537 bytes", "65536"}},
		{"negative lease", func(r *PublishRequest) { r.Lease = -1 }, ErrInvalid, []string{"PublishRequest.Lease is -1", "1…"}},
		{"long lease", func(r *PublishRequest) { r.Lease = MaxLease + 1 }, ErrTooLarge, []string{"PublishRequest.Lease", fmt.Sprint(int64(MaxLease))}},
		{"owner of another database", func(r *PublishRequest) { r.Owner = foreign }, ErrInvalid, []string{`owner "foreign"`, "another database"}},
		{"no groups", sets(func(s []PageSet) []PageSet { return s[:0] }), ErrInvalid, []string{"PublishRequest.Groups has 0 groups", "3"}},
		{"group left out", sets(func(s []PageSet) []PageSet { return s[:2] }), ErrInvalid, []string{"PublishRequest.Groups has 2 groups", "3"}},
		{"group too many", sets(func(s []PageSet) []PageSet { return append(s, PageSet{Group: "x"}) }), ErrInvalid, []string{"PublishRequest.Groups has 4 groups", "3"}},
		{"group twice", sets(func(s []PageSet) []PageSet { return append(s[:2], s[1]) }), ErrInvalid, []string{"PublishRequest.Groups[2]", `"recurrent:state"`, "twice"}},
		{"unknown group", sets(func(s []PageSet) []PageSet { s[2].Group = "auxiliary:else"; return s }), ErrInvalid, []string{`"auxiliary:draft"`, "32"}},
		{"group without a name", sets(func(s []PageSet) []PageSet { s[0].Group = ""; return s }), ErrInvalid, []string{`"attention:kv"`}},
		{"too few pages", attention(0), ErrInvalid, []string{`"attention:kv"`, "lists 1 pages", "32 requires 2"}},
		{"no pages", attention(), ErrInvalid, []string{`"attention:kv"`, "lists 0 pages", "32 requires 2"}},
		{"too many pages", attention(0, 1, 2), ErrInvalid, []string{`"attention:kv"`, "lists 3 pages", "32 requires 2"}},
		{"duplicate positions", attention(1, 1), ErrInvalid, []string{`"attention:kv"`, "position 1"}},
		{"unordered positions", attention(1, 0), ErrInvalid, []string{`"attention:kv"`, "position"}},
		{"negative position", attention(-1, 0), ErrInvalid, []string{`"attention:kv"`, "position -1", fmt.Sprint(int64(MaxPosition))}},
		{"position beyond the limit", attention(0, MaxPosition+1), ErrInvalid, []string{fmt.Sprint(int64(MaxPosition) + 1), fmt.Sprint(int64(MaxPosition))}},
		{"positions shifted", attention(1, 2), ErrInvalid, []string{`"attention:kv"`, "position 1", "0…1"}},
		{"position of state negative", state(-7), ErrInvalid, []string{`"recurrent:state"`, "position -7"}},
		{"position of state beyond the limit", state(math.MaxInt64), ErrInvalid, []string{`"recurrent:state"`, fmt.Sprint(math.MaxInt64)}},
		{"two states", state(1, 2), ErrInvalid, []string{`"recurrent:state"`, "lists 2 pages", "requires 1"}},
		{"more pages than a checkpoint has", func(r *PublishRequest) { r.Sequence, r.Offset = long, long.Len() }, ErrTooLarge, []string{fmt.Sprint(MaxCheckpointPages)}},
		{"more pages than a publication has", func(r *PublishRequest) { r.Sequence, r.Offset = long, MaxPublicationCopies+1 }, ErrTooLarge, []string{fmt.Sprint(MaxPublicationCopies + 1), fmt.Sprint(MaxPublicationCopies)}},
		{"more pages than a window lists", func(r *PublishRequest) { r.Sequence, r.Offset = window, window.Len() }, ErrTooLarge, []string{`"w"`, fmt.Sprint(MaxListedPages + 1), fmt.Sprint(MaxListedPages)}},
		{"larger than the RAM tier", func(r *PublishRequest) {
			r.Sequence = seqOf(t, testNamespace(t, 2, Group{Name: "a", Kind: Auxiliary, PageBytes: 1 << 20, Pages: 1}), tokens(1, 32))
		}, ErrTooLarge, []string{"2097152", "1048576"}},
	} {
		all = append(all, refusal{c.name, func() error {
			r := PublishRequest{Sequence: seq, Offset: 32}
			c.change(&r)
			p, err := d.Begin(context.Background(), r)
			if err == nil || p != nil {
				return nil
			}
			return err
		}, c.class, c.parts})
	}
	requireRefusals(t, d, books, all)
	require.EqualValues(t, 0, stats(t, other).Pending)
}

func TestBadSlotsAndRanks(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	ns, books := testNamespace(t, 2, shared()...), shelf{}
	seq := seqOf(t, ns, tokens(1, 40))
	books.publish(t, d, seq, 20)
	p := begin(t, d, seq, 40)
	fill(t, p, 0)
	s := slots(t, p, 1)[1]
	whole := content(s.Key(), 1, s.Size())
	other := slots(t, p, 1)[0]
	_, err := other.Write(content(other.Key(), 1, other.Size()))
	require.NoError(t, err)
	_, err = s.Write(whole[:100])
	require.NoError(t, err)
	commitOne := func() error {
		_, err := p.Commit(context.Background(), 1)
		return err
	}
	var all []refusal
	for _, rank := range []int{-1, 2, 1024, math.MinInt, math.MaxInt} {
		parts := []string{fmt.Sprintf("rank %d", rank), "0…1"}
		all = append(all,
			refusal{fmt.Sprintf("slots of rank %d", rank), func() error { _, err := p.Slots(context.Background(), rank); return err }, ErrInvalid, parts},
			refusal{fmt.Sprintf("commit of rank %d", rank), func() error { _, err := p.Commit(context.Background(), rank); return err }, ErrInvalid, parts},
			refusal{fmt.Sprintf("transfer of rank %d", rank), func() error { _, err := p.Transfer(rank); return err }, ErrInvalid, parts},
		)
	}
	filled := func(n int64) func() error {
		return func() error {
			s.Filled(n)
			defer s.Filled(100)
			return commitOne()
		}
	}
	all = append(all,
		refusal{"slot written short", commitOne, ErrInvalid, []string{`rank 1`, `"attention:kv"`, "page 2", "100 of 128 bytes"}},
		refusal{"write past the end", func() error { _, err := s.Write(whole[:29]); return err }, ErrTooLarge, []string{`"attention:kv"`, "page 2", "29 bytes at 100", "128"}},
		refusal{"write of more than a page", func() error { _, err := s.Write(make([]byte, 1000)); return err }, ErrTooLarge, []string{"1000 bytes at 100", "128"}},
		refusal{"filled short", filled(127), ErrInvalid, []string{"127 of 128 bytes"}},
		refusal{"filled past the end", filled(129), ErrInvalid, []string{"129 of 128 bytes"}},
		refusal{"filled with the least number", filled(math.MinInt64), ErrInvalid, []string{fmt.Sprint(math.MinInt64)}},
		refusal{"filled with the largest number", filled(math.MaxInt64), ErrInvalid, []string{fmt.Sprint(math.MaxInt64)}},
		refusal{"write after a negative fill", func() error {
			s.Filled(-5)
			defer s.Filled(100)
			_, err := s.Write([]byte{1})
			return err
		}, ErrTooLarge, []string{"-5"}},
	)
	before := still(t, d)
	for _, r := range all {
		t.Run(r.name, func(t *testing.T) {
			requireClass(t, r.call(), r.class, r.parts...)
			require.Equal(t, before, still(t, d))
		})
	}
	n, err := s.Write(whole[100:])
	require.NoError(t, err)
	require.Equal(t, 28, n, "none of the refused writes was taken")
	require.False(t, commit(t, p, 0))
	for _, s := range slots(t, p, 1)[2:] {
		_, err := s.Write(content(s.Key(), 1, s.Size()))
		require.NoError(t, err)
	}
	require.True(t, commit(t, p, 1))
	books.keep(t, p.Generation(), seq, 40)
	require.Equal(t, []int64{20, 40}, books.requireListedIsReadable(t, d))
}

func TestBadLookups(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	ns, books := testNamespace(t, 2, tiny()...), shelf{}
	seq := seqOf(t, ns, tokens(1, 40))
	books.publish(t, d, seq, 40)
	foreign, err := openDB(t, tempDir(t), Options{}).NewOwner("foreign", time.Hour)
	require.NoError(t, err)
	var all []refusal
	add := func(name string, s *Sequence, o LookupOptions, class error, parts ...string) {
		all = append(all, refusal{"restore: " + name, func() error { _, err := d.Restore(context.Background(), s, o); return err }, class, parts})
		if o.Lease == 0 && o.Owner == nil {
			all = append(all, refusal{"lookup: " + name, func() error { _, err := d.Lookup(context.Background(), s, o); return err }, class, parts})
		}
	}
	add("nil sequence", nil, LookupOptions{}, ErrInvalid, "sequence is nil")
	add("zero sequence", new(Sequence), LookupOptions{}, ErrInvalid, "namespace")
	add("negative maximum", seq, LookupOptions{MaxOffset: -1}, ErrInvalid, "LookupOptions.MaxOffset is -1", "40")
	add("maximum beyond the sequence", seq, LookupOptions{MaxOffset: 41}, ErrInvalid, "LookupOptions.MaxOffset is 41", "40")
	add("largest maximum", seq, LookupOptions{MaxOffset: math.MaxInt64}, ErrInvalid, fmt.Sprint(math.MaxInt64), "40")
	add("negative rest", seq, LookupOptions{LeaveTokens: -1}, ErrInvalid, "LookupOptions.LeaveTokens is -1", "0")
	add("least rest", seq, LookupOptions{LeaveTokens: math.MinInt64}, ErrInvalid, fmt.Sprint(math.MinInt64))
	add("rest of everything", seq, LookupOptions{LeaveTokens: math.MaxInt64}, ErrNotFound)
	add("stranger", seqOf(t, ns, tokens(2, 40)), LookupOptions{}, ErrNotFound, "40 tokens")
	add("other namespace", seqOf(t, testNamespace(t, 3, tiny()...), tokens(1, 40)), LookupOptions{}, ErrNotFound)
	add("empty sequence", ns.NewSequence(), LookupOptions{}, ErrNotFound)
	add("negative lease", seq, LookupOptions{Lease: -1}, ErrInvalid, "LookupOptions.Lease is -1")
	add("long lease", seq, LookupOptions{Lease: MaxLease + 1}, ErrTooLarge, "LookupOptions.Lease", fmt.Sprint(int64(MaxLease)))
	add("owner of another database", seq, LookupOptions{Owner: foreign}, ErrInvalid, `"foreign"`)
	requireRefusals(t, d, books, all)

	r, err := d.Restore(context.Background(), seq, LookupOptions{})
	require.NoError(t, err)
	for _, rank := range []int{-1, 2, math.MinInt, math.MaxInt} {
		require.Nil(t, r.Pages(rank))
	}
	r.Release()
	r.Release()
	require.Nil(t, r.Pages(0))
	requireClass(t, r.Err(), ErrConflict, "released")
	_, err = r.Transfer()
	requireClass(t, err, ErrConflict, "released")
	require.EqualValues(t, 40, r.Offset())
	require.Equal(t, []int64{40}, books.requireListedIsReadable(t, d))
}

func TestBadGenerations(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	ns, books := testNamespace(t, 1, tiny()...), shelf{}
	first, _ := books.publish(t, d, seqOf(t, ns, tokens(1, 40)), 40)
	second, _ := books.publish(t, d, seqOf(t, ns, tokens(2, 40)), 40)
	foreign, _ := books.publish(t, d, seqOf(t, testNamespace(t, 2, tiny()...), tokens(1, 40)), 40)
	retired, _ := publish(t, d, seqOf(t, ns, tokens(3, 40)), 40)
	require.NoError(t, d.Retire(context.Background(), retired))
	ctx := context.Background()
	var all []refusal
	for name, g := range map[string]Generation{"zero": {}, "unknown": {31: 1}} {
		all = append(all,
			refusal{"retire of a " + name + " generation", func() error { return d.Retire(ctx, g) }, ErrNotFound, nil},
			refusal{"delete of a " + name + " generation", func() error { return d.Delete(ctx, g) }, ErrNotFound, nil},
			refusal{"look at a " + name + " generation", func() error { _, err := d.Checkpoint(g); return err }, ErrNotFound, nil},
			refusal{"supersede of a " + name + " generation", func() error { return d.Supersede(ctx, second, g) }, ErrConflict, nil},
		)
	}
	all = append(all,
		refusal{"retire of a retired one", func() error { return d.Retire(ctx, retired) }, ErrNotFound, nil},
		refusal{"look at a retired one", func() error { _, err := d.Checkpoint(retired); return err }, ErrNotFound, nil},
		refusal{"supersede by an unknown one", func() error { return d.Supersede(ctx, Generation{1}, first) }, ErrConflict, []string{string(txn.NoDanglingSupersede)}},
		refusal{"supersede by a retired one", func() error { return d.Supersede(ctx, retired, first) }, ErrConflict, []string{string(txn.NoDanglingSupersede)}},
		refusal{"supersede of a retired one", func() error { return d.Supersede(ctx, second, retired) }, ErrConflict, []string{string(txn.NoDanglingSupersede)}},
		refusal{"supersede by itself", func() error { return d.Supersede(ctx, second, second) }, ErrInvalid, []string{string(txn.NoDanglingSupersede)}},
		refusal{"supersede by an older one", func() error { return d.Supersede(ctx, first, second) }, ErrInvalid, []string{string(txn.NoDanglingSupersede), "LSN"}},
		refusal{"supersede over namespaces", func() error { return d.Supersede(ctx, foreign, first) }, ErrInvalid, []string{string(txn.NoDanglingSupersede)}},
		refusal{"one good and one bad", func() error { return d.Supersede(ctx, second, first, Generation{1}) }, ErrConflict, nil},
	)
	before := still(t, d)
	requireRefusals(t, d, books, all)
	require.NoError(t, d.Supersede(ctx, second), "nothing to do is no mistake")
	require.Equal(t, before.gauges["Superseded"], stats(t, d).Superseded)
	require.NoError(t, d.Delete(ctx, retired))
	requireEmpty(t, d)
}

func TestBadOwnersAndBudgets(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	books := shelf{}
	books.publish(t, d, seqOf(t, testNamespace(t, 1, tiny()...), tokens(1, 40)), 40)
	owner := func(name string, ttl time.Duration) func() error {
		return func() error { _, err := d.NewOwner(name, ttl); return err }
	}
	ctx := context.Background()
	requireRefusals(t, d, books, []refusal{
		{"owner without a name", owner("", time.Second), ErrInvalid, []string{"name of the owner", "1…256"}},
		{"owner with a long name", owner(strings.Repeat("x", 257), time.Second), ErrInvalid, []string{"name of the owner", "257", "1…256"}},
		{"owner with NUL", owner("a\x00", time.Second), ErrInvalid, []string{"NUL"}},
		{"owner without time", owner("a", 0), ErrInvalid, []string{"0s", "10ms"}},
		{"owner with negative time", owner("a", -1), ErrInvalid, []string{"-1ns", "10ms"}},
		{"owner for ever", owner("a", math.MaxInt64), ErrTooLarge, []string{"24h"}},
		{"RAM 0", func() error { return d.SetRAMBytes(ctx, 0) }, ErrInvalid, []string{"RAM bytes is 0", fmt.Sprint(MinRAMBytes)}},
		{"RAM negative", func() error { return d.SetRAMBytes(ctx, -1) }, ErrInvalid, []string{"RAM bytes is -1"}},
		{"RAM huge", func() error { return d.SetRAMBytes(ctx, MaxRAMBytes+1) }, ErrTooLarge, []string{fmt.Sprint(int64(MaxRAMBytes))}},
		{"disk negative", func() error { return d.SetDiskBytes(-1) }, ErrInvalid, []string{"disk bytes is -1"}},
		{"disk huge", func() error { return d.SetDiskBytes(math.MaxInt64) }, ErrTooLarge, []string{fmt.Sprint(math.MaxInt64)}},
	})
	o, err := d.NewOwner("a", time.Hour)
	require.NoError(t, err)
	o.Close()
	o.Close()
	requireClass(t, o.Heartbeat(), ErrConflict, `"a"`)
	seq := seqOf(t, testNamespace(t, 1, tiny()...), tokens(1, 40))
	requireRefusals(t, d, books, []refusal{
		{"publication of a closed owner", func() error {
			_, err := d.Begin(ctx, PublishRequest{Sequence: seq, Offset: 20, Owner: o})
			return err
		}, ErrConflict, []string{`"a"`}},
		{"restoration of a closed owner", func() error {
			_, err := d.Restore(ctx, seq, LookupOptions{Owner: o})
			return err
		}, ErrConflict, []string{`"a"`}},
	})
}

// Options are refused before anything is made, and so is a name that can be no directory; a directory that is not ours is
// left as it is.
func TestBadOptionsAndDirectories(t *testing.T) {
	for _, c := range []struct {
		o     Options
		class error
		parts []string
	}{
		{Options{RAMBytes: -1}, ErrInvalid, []string{"Options.RAMBytes is -1", fmt.Sprint(MinRAMBytes)}},
		{Options{RAMBytes: MinRAMBytes - 1}, ErrInvalid, []string{"Options.RAMBytes", fmt.Sprint(MinRAMBytes)}},
		{Options{RAMBytes: MaxRAMBytes + 1}, ErrTooLarge, []string{"Options.RAMBytes", fmt.Sprint(int64(MaxRAMBytes))}},
		{Options{DiskBytes: -1}, ErrInvalid, []string{"Options.DiskBytes is -1"}},
		{Options{DiskBytes: math.MaxInt64}, ErrTooLarge, []string{"Options.DiskBytes"}},
		{Options{SegmentBytes: 1}, ErrInvalid, []string{"Options.SegmentBytes is 1"}},
		{Options{SegmentBytes: -1}, ErrInvalid, []string{"Options.SegmentBytes is -1"}},
		{Options{SegmentBytes: math.MaxInt64}, ErrTooLarge, []string{"Options.SegmentBytes"}},
		{Options{ReplayBytes: 1}, ErrInvalid, []string{"Options.ReplayBytes is 1"}},
		{Options{ReplayBytes: math.MaxInt64}, ErrTooLarge, []string{"Options.ReplayBytes"}},
		{Options{AdmissionTimeout: -1}, ErrInvalid, []string{"Options.AdmissionTimeout is -1"}},
		{Options{AdmissionTimeout: math.MaxInt64}, ErrTooLarge, []string{"Options.AdmissionTimeout"}},
		{Options{LeaseTimeout: -1}, ErrInvalid, []string{"Options.LeaseTimeout is -1"}},
		{Options{LeaseTimeout: math.MaxInt64}, ErrTooLarge, []string{"Options.LeaseTimeout"}},
		{Options{WritePolicy: 4}, ErrInvalid, []string{"Options.WritePolicy is 4", "0…3"}},
		{Options{WritePolicy: 255}, ErrInvalid, []string{"Options.WritePolicy is 255", "0…3"}},
	} {
		dir := filepath.Join(tempDir(t), "not", "made")
		_, err := Open(context.Background(), dir, c.o)
		requireClass(t, err, c.class, c.parts...)
		require.NoDirExists(t, filepath.Dir(dir))
	}
	for _, name := range []string{"", "a\x00b", filepath.Join(tempDir(t), strings.Repeat("x", 300))} {
		_, err := Open(context.Background(), name, Options{Logger: quiet})
		requireClass(t, err, ErrInvalid)
	}
	file := filepath.Join(tempDir(t), "file")
	require.NoError(t, os.WriteFile(file, []byte("x"), 0o600))
	_, err := Open(context.Background(), file, Options{Logger: quiet})
	requireClass(t, err, ErrInvalid, file)
	before := files(t, filepath.Dir(file))
	_, err = Open(context.Background(), filepath.Dir(file), Options{Logger: quiet})
	requireClass(t, err, ErrUnsupported, `"file"`)
	require.Equal(t, before, files(t, filepath.Dir(file)))

	dir := tempDir(t)
	openDB(t, dir, Options{})
	_, err = Open(context.Background(), dir, Options{Logger: quiet})
	requireClass(t, err, ErrLocked, fmt.Sprint("pid ", os.Getpid()))

	for _, s := range []string{"", "WRITE-THROUGH", "write-through ", strings.Repeat("x", 1000)} {
		_, err := ParseWritePolicy(s)
		requireClass(t, err, ErrInvalid, "write-through", "never")
		require.Less(t, len(err.Error()), 400)
	}
}

// An empty field of an identity that must not be empty, one by one; the whole list of rules is tested with identities.
func TestEmptyIdentityFields(t *testing.T) {
	for field, change := range map[string]func(*Identity){
		"Identity.Model":                     func(id *Identity) { id.Model = "" },
		"Identity.Weights":                   func(id *Identity) { id.Weights = "" },
		"Identity.Tokenizer":                 func(id *Identity) { id.Tokenizer = "" },
		"Identity.Engine":                    func(id *Identity) { id.Engine = "" },
		"Identity.DType":                     func(id *Identity) { id.DType = "" },
		"key of Identity.Settings":           func(id *Identity) { id.Settings = map[string]string{"": "x"} },
		"Layout.Ranks is 0":                  func(id *Identity) { id.Layout.Ranks = 0 },
		"number of Layout.Groups is 0":       func(id *Identity) { id.Layout.Groups = nil },
		"Layout.Groups[0].Name":              func(id *Identity) { id.Layout.Groups[0].Name = "" },
		"Layout.Groups[0].Kind is 0":         func(id *Identity) { id.Layout.Groups[0].Kind = 0 },
		"Layout.Groups[0].PageBytes is 0":    func(id *Identity) { id.Layout.Groups[0].PageBytes = 0 },
		"Layout.Groups[0].PageTokens is 0":   func(id *Identity) { id.Layout.Groups[0].PageTokens = 0 },
		"Layout.Groups[1].Pages is 0":        func(id *Identity) { id.Layout.Groups[1].Pages = 0 },
		"Layout.Groups[1].PageTokens is 1":   func(id *Identity) { id.Layout.Groups[1].PageTokens = 1 },
		"Layout.Groups[1].Name \"attention:": func(id *Identity) { id.Layout.Groups[1].Name = id.Layout.Groups[0].Name },
	} {
		id := testIdentity(1, tiny()...)
		change(&id)
		_, err := NewNamespace(id)
		requireClass(t, err, ErrInvalid, field)
	}
}

// Every call on a closed handle is ErrClosed, also on what was made from it before, and closing again reports the same.
func TestClosedHandle(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	ns := testNamespace(t, 1, tiny()...)
	seq := seqOf(t, ns, tokens(1, 40))
	gen, _ := publish(t, d, seq, 20)
	replay, err := d.Begin(context.Background(), PublishRequest{Sequence: seq, Offset: 20})
	require.NoError(t, err)
	aborted := begin(t, d, seq, 30)
	require.NoError(t, aborted.Abort())
	listed := begin(t, d, seq, 30)
	fill(t, listed, 0)
	require.True(t, commit(t, listed, 0))
	pending := begin(t, d, seq, 40)
	open := slots(t, pending, 0)
	held, err := d.Restore(context.Background(), seq, LookupOptions{})
	require.NoError(t, err)
	owner, err := d.NewOwner("a", time.Hour)
	require.NoError(t, err)
	checkpoints := d.Checkpoints(context.Background())

	ended, cancel := context.WithCancel(context.Background())
	cancel()
	report, err := d.Close(ended)
	require.NoError(t, err, "write-through leaves nothing to wait for")
	require.Equal(t, 1, report.Aborted)
	require.Equal(t, 1, report.Leases)
	again, err := d.Close(context.Background())
	require.NoError(t, err)
	require.Equal(t, report, again)
	before := files(t, d.dir.path)

	ctx := context.Background()
	for name, call := range map[string]func() error{
		"Begin":       func() error { _, err := d.Begin(ctx, PublishRequest{Sequence: seq, Offset: 20}); return err },
		"Lookup":      func() error { _, err := d.Lookup(ctx, seq, LookupOptions{}); return err },
		"Restore":     func() error { _, err := d.Restore(ctx, seq, LookupOptions{}); return err },
		"Retire":      func() error { return d.Retire(ctx, gen) },
		"Delete":      func() error { return d.Delete(ctx, gen) },
		"Supersede":   func() error { return d.Supersede(ctx, gen) },
		"Checkpoint":  func() error { _, err := d.Checkpoint(gen); return err },
		"Stats":       func() error { _, err := d.Stats(); return err },
		"NewOwner":    func() error { _, err := d.NewOwner("b", time.Hour); return err },
		"Clear":       func() error { _, err := d.Clear(ctx, txn.Key{}); return err },
		"DropRAM":     func() error { _, err := d.DropRAM(ctx); return err },
		"SetRAMBytes": func() error { return d.SetRAMBytes(ctx, MinRAMBytes) },
		"SetDisk":     func() error { return d.SetDiskBytes(0) },
	} {
		requireClass(t, call(), ErrClosed)
		require.Equal(t, before, files(t, d.dir.path), name)
	}
	for _, sequence := range []func(func(Checkpoint, error) bool){checkpoints, d.Checkpoints(ctx)} {
		n := 0
		for _, err := range sequence {
			requireClass(t, err, ErrClosed)
			n++
		}
		require.Equal(t, 1, n)
	}
	for name, p := range map[string]*Publication{"replay": replay, "aborted": aborted, "listed": listed, "pending": pending} {
		_, err := p.Slots(ctx, 0)
		requireClass(t, err, ErrClosed)
		_, err = p.Commit(ctx, 0)
		requireClass(t, err, ErrClosed)
		_, err = p.Transfer(0)
		require.Error(t, err, name)
		p.Abort()
		require.Equal(t, name == "replay", p.Listed())
		require.False(t, p.Generation().IsZero())
	}
	for _, s := range open {
		_, err := s.Write([]byte{1})
		requireClass(t, err, ErrConflict)
		require.Nil(t, s.Buffer())
		s.Filled(1)
		require.NotZero(t, s.Size())
		require.NotZero(t, s.Key())
	}
	requireClass(t, owner.Heartbeat(), ErrConflict)
	owner.Close()
	verify(t, held, 1)
	held.Release()
	held.Release()
	require.Nil(t, held.Pages(0))
	require.Equal(t, before, files(t, d.dir.path))

	d = openDB(t, d.dir.path, Options{})
	require.EqualValues(t, 30, restoreAt(t, d, seq))
	requireIdle(t, d)
}

// A context that ended before the call gets nothing done: the class is ErrBusy, the cause is kept, nothing has changed, and the
// call can be made again.
func TestEndedContexts(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	ns, books := testNamespace(t, 1, tiny()...), shelf{}
	seq := seqOf(t, ns, tokens(1, 40))
	gen, _ := books.publish(t, d, seq, 20)
	books.publish(t, d, seq, 40)
	p := begin(t, d, seq, 30)
	fill(t, p, 0)
	cause := errors.New("the reason")
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(cause)
	late, done := context.WithDeadline(context.Background(), time.Unix(0, 0))
	defer done()
	for _, c := range []struct {
		ctx   context.Context
		cause error
	}{{ctx, cause}, {late, context.DeadlineExceeded}} {
		before := still(t, d)
		for name, call := range map[string]func() error{
			"Begin":       func() error { _, err := d.Begin(c.ctx, PublishRequest{Sequence: seq, Offset: 10}); return err },
			"Slots":       func() error { _, err := p.Slots(c.ctx, 0); return err },
			"Commit":      func() error { _, err := p.Commit(c.ctx, 0); return err },
			"Lookup":      func() error { _, err := d.Lookup(c.ctx, seq, LookupOptions{}); return err },
			"Restore":     func() error { _, err := d.Restore(c.ctx, seq, LookupOptions{}); return err },
			"Retire":      func() error { return d.Retire(c.ctx, gen) },
			"Delete":      func() error { return d.Delete(c.ctx, gen) },
			"Supersede":   func() error { return d.Supersede(c.ctx, Generation{}, gen) },
			"Clear":       func() error { _, err := d.Clear(c.ctx, txn.Key{}); return err },
			"DropRAM":     func() error { _, err := d.DropRAM(c.ctx); return err },
			"SetRAMBytes": func() error { return d.SetRAMBytes(c.ctx, 1<<20) },
			"Checkpoints": func() error {
				for _, err := range d.Checkpoints(c.ctx) {
					return err
				}
				return nil
			},
		} {
			err := call()
			requireClass(t, err, ErrBusy)
			require.ErrorIs(t, err, c.cause, name)
			require.Equal(t, before, still(t, d), name)
		}
		dir := filepath.Join(tempDir(t), "new")
		_, err := Open(c.ctx, dir, Options{Logger: quiet})
		requireClass(t, err, ErrBusy)
		require.NoDirExists(t, dir)
	}
	require.True(t, commit(t, p, 0), "the publication is alive")
	books.keep(t, p.Generation(), seq, 30)

	// One that ends in the middle of an iteration.
	ctx, stop := context.WithCancelCause(context.Background())
	defer stop(nil)
	n := 0
	for _, err := range d.Checkpoints(ctx) {
		if n++; n == 1 {
			require.NoError(t, err)
			stop(cause)
			continue
		}
		requireClass(t, err, ErrBusy)
		require.ErrorIs(t, err, cause)
	}
	require.Equal(t, 2, n)
	require.Equal(t, []int64{20, 30, 40}, books.requireListedIsReadable(t, d))
}

// The context of a publication, and that of a restoration, is the end of it.
func TestContextEndsWhatItBegan(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	ns, books := testNamespace(t, 1, tiny()...), shelf{}
	seq := seqOf(t, ns, tokens(1, 40))
	books.publish(t, d, seq, 20)
	before := still(t, d)
	ctx, cancel := context.WithCancel(context.Background())
	p, err := d.Begin(ctx, PublishRequest{Sequence: seq, Offset: 40})
	require.NoError(t, err)
	follower := begin(t, d, seq, 40, withMeta("follower"))
	r, err := d.Restore(ctx, seq, LookupOptions{})
	require.NoError(t, err)
	held := slots(t, p, 0)
	cancel()
	fill(t, follower, 0) // waits until the pages are its own
	for r.Err() == nil {
		runtime.Gosched() // the end of the lease comes from a goroutine of the context
	}
	_, err = p.Commit(context.Background(), 0)
	requireClass(t, err, ErrConflict, "context ended")
	requireClass(t, r.Err(), ErrConflict, "context ended")
	_, err = held[0].Write([]byte{1})
	requireClass(t, err, ErrConflict)
	requireClass(t, p.Abort(), ErrConflict)
	require.Nil(t, r.Pages(0))
	require.NoError(t, follower.Abort())
	require.Equal(t, before, still(t, d))
	require.Equal(t, []int64{20}, books.requireListedIsReadable(t, d))
}
