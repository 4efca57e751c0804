package index

import (
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/holdfast-db/holdfast/txn"
)

// Whatever is committed, discarded and flushed between readings, every reading says of every key what was committed when it began, the
// latest as well as those that are still open, and however often it is asked.
func TestReadingsAreThoseOfTheirMoment(t *testing.T) {
	type reading struct {
		*Snapshot
		want map[string]string
	}
	rapid.Check(t, func(t *rapid.T) {
		x, err := Open("index", Options{FS: vfs.NewMem()})
		require.NoError(t, err)
		defer func() { require.NoError(t, x.Close()) }()
		// More keys than a set has slots, in few sets; some long, some of what is not of the catalogue.
		var keys []string
		for i := range 40 {
			keys = append(keys, fmt.Sprintf("p%d%s", i, strings.Repeat("k", i%3*60)))
		}
		keys = append(keys, "\x80loose", "\x90note")
		key := rapid.SampledFrom(keys)
		now := map[string]string{}
		var open []reading
		defer func() {
			for _, r := range open {
				require.NoError(t, r.Close())
			}
		}()
		same := func(r txn.Reader, k string, want map[string]string) {
			got, err := r.Get([]byte(k))
			require.NoError(t, err)
			v, ok := want[k]
			require.Equal(t, ok, got != nil, k)
			require.Equal(t, v, string(got), k)
		}
		t.Repeat(map[string]func(*rapid.T){
			"batch": func(t *rapid.T) {
				b, then := x.NewBatch(), maps.Clone(now)
				for range rapid.IntRange(0, 6).Draw(t, "changes") {
					k := key.Draw(t, "key")
					same(b, k, then)
					if rapid.IntRange(0, 2).Draw(t, "delete") == 0 {
						require.NoError(t, b.Delete([]byte(k)))
						delete(then, k)
					} else {
						then[k] = strings.Repeat("v", rapid.SampledFrom([]int{0, 1, 7, 100, 236, 237, 300}).Draw(t, "length"))
						require.NoError(t, b.Set([]byte(k), []byte(then[k])))
					}
					same(b, k, then)
				}
				if rapid.Bool().Draw(t, "discard") {
					require.NoError(t, b.Discard())
					return
				}
				require.NoError(t, b.Commit())
				now = then
			},
			"begin": func(t *rapid.T) { open = append(open, reading{x.Snapshot(), maps.Clone(now)}) },
			"read": func(t *rapid.T) {
				for range 10 {
					if len(open) > 0 {
						r := rapid.SampledFrom(open).Draw(t, "reading")
						same(r, key.Draw(t, "key"), r.want)
					}
				}
			},
			"end": func(t *rapid.T) {
				if len(open) > 0 {
					require.NoError(t, open[0].Close())
					open = open[1:]
				}
			},
			"flush": func(t *rapid.T) { require.NoError(t, x.Flush()) },
		})
	})
}

// Readers beside a writer see both halves of every change or none, and what they see only grows.
func TestReadingsBesideCommits(t *testing.T) {
	x, err := Open("index", Options{FS: vfs.NewMem()})
	require.NoError(t, err)
	defer func() { require.NoError(t, x.Close()) }()
	const pairs, rounds = 30, 400
	commit := func(round int) {
		b := x.NewBatch()
		for i := range pairs {
			for _, half := range []string{"a", "b"} {
				require.NoError(t, b.Set(fmt.Appendf(nil, "p%d%s", i, half), fmt.Appendf(nil, "%06d", round)))
			}
		}
		require.NoError(t, b.Commit())
	}
	commit(0)
	done := make(chan struct{})
	var group sync.WaitGroup
	for r := range 4 {
		group.Go(func() {
			last := ""
			for n := r; ; n++ {
				s := x.Snapshot()
				a, err := s.Get(fmt.Appendf(nil, "p%da", n%pairs))
				if err != nil {
					t.Error(err)
				}
				first := string(a)
				b, err := s.Get(fmt.Appendf(nil, "p%db", (n+1)%pairs))
				if err != nil || string(b) != first || first < last {
					t.Errorf("read %s and %s after %s: %v", first, b, last, err)
				}
				last = first
				if err := s.Close(); err != nil {
					t.Error(err)
				}
				select {
				case <-done:
					return
				default:
				}
			}
		})
	}
	for round := range rounds {
		commit(round + 1)
	}
	close(done)
	group.Wait()
}

// What a commit that failed has done is not known, so it is asked for.
func TestFailedCommitIsForgotten(t *testing.T) {
	r := newRecent()
	set := func(v string, err error) {
		require.Equal(t, err, r.commit(map[string][]byte{"p": []byte(v)}, func() error { return err }))
	}
	set("one", nil)
	v, known := r.get([]byte("p"), r.version.Load(), nil)
	require.True(t, known)
	require.Equal(t, "one", string(v))
	before := r.version.Load()
	set("two", txn.ErrIO)
	_, known = r.get([]byte("p"), r.version.Load(), nil)
	require.False(t, known)
	r.saw([]byte("p"), []byte("one"), before)
	_, known = r.get([]byte("p"), r.version.Load(), nil)
	require.False(t, known, "read before, and entered after: that may be old")
}

// What is remembered is asked for without allocating.
func TestRecentAllocatesNothing(t *testing.T) {
	r := newRecent()
	require.NoError(t, r.commit(map[string][]byte{"p": make([]byte, 100)}, func() error { return nil }))
	key, buf := []byte("p"), make([]byte, 0, 256)
	require.Zero(t, testing.AllocsPerRun(100, func() { _, _ = r.get(key, r.version.Load(), buf) }))
}
