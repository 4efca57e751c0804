package fuzz

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/holdfast-db/holdfast/db"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var layouts = []db.Layout{
	{Ranks: 2, Groups: []db.Group{
		{Name: "attention:kv", Kind: db.Attention, PageBytes: 4096, PageTokens: 16},
		{Name: "attention:window", Kind: db.Attention, PageBytes: 700, PageTokens: 16, WindowTokens: 64},
		{Name: "recurrent:state", Kind: db.Recurrent, PageBytes: 5000, Pages: 2},
	}},
	{Ranks: 1, Groups: []db.Group{{Name: "attention:kv", Kind: db.Attention, PageBytes: 2048, PageTokens: 32}}},
}

// world is a database under test beside its model.
type world struct {
	dir     string
	db      *db.DB
	options db.Options
	spaces  []*db.Namespace
	model   *Model
	exact   bool // nothing may be given up for want of room, or by policy
	walks   [][]int32
}

func (w *world) open(t require.TestingT) {
	var err error
	w.db, err = db.Open(context.Background(), w.dir, w.options)
	require.NoError(t, err)
}

func (w *world) sequence(t require.TestingT, space int, tokens []int32) *db.Sequence {
	s := w.spaces[space].NewSequence()
	require.NoError(t, s.Append(tokens))
	return s
}

func (w *world) publish(t require.TestingT, space int, tokens []int32, request string, durable bool) {
	ctx := context.Background()
	s := w.sequence(t, space, tokens)
	p, err := w.db.Begin(ctx, db.PublishRequest{Sequence: s, Offset: s.Len(), Request: request, Durable: durable})
	require.NoError(t, err)
	for rank := range layouts[space].Ranks {
		slots, err := p.Slots(ctx, rank)
		require.NoError(t, err)
		for _, slot := range slots {
			Fill(slot.Buffer(), slot.Key(), rank)
			slot.Filled(slot.Size())
		}
		_, err = p.Commit(ctx, rank)
		require.NoError(t, err)
	}
	c := &Checkpoint{Generation: p.Generation(), Space: space, Tokens: tokens, Durable: durable || w.options.WritePolicy == db.WriteThrough}
	if old := w.model.Listed[c.Generation]; old != nil {
		c.Durable = c.Durable && old.Durable || c.Durable && w.durable(t, c.Generation)
	}
	w.model.Publish(c)
}

func (w *world) durable(t require.TestingT, g db.Generation) bool {
	c, err := w.db.Checkpoint(g)
	require.NoError(t, err)
	return c.Durable
}

// check holds the database against the model.
func (w *world) check(t require.TestingT) {
	ctx := context.Background()
	listed := map[db.Generation]*Checkpoint{}
	for c, err := range w.db.Checkpoints(ctx) {
		require.NoError(t, err)
		known := w.model.Listed[c.Generation]
		require.NotNil(t, known, "generation %s is listed and was never published, or taken back", c.Generation)
		require.EqualValues(t, len(known.Tokens), c.Offset)
		listed[c.Generation] = known
	}
	if w.exact {
		require.Len(t, listed, len(w.model.Listed), "everything that was acknowledged is listed")
	}
	for g := range w.model.Listed {
		if listed[g] == nil {
			delete(w.model.Listed, g) // given up
		}
	}
	for _, c := range listed {
		w.restore(t, c.Space, c.Tokens, int64(len(c.Tokens)))
	}
	for space := range w.spaces {
		for _, tokens := range w.walks {
			s := w.sequence(t, space, tokens)
			m, err := w.db.Lookup(ctx, s, db.LookupOptions{})
			if err != nil {
				require.ErrorIs(t, err, db.ErrNotFound)
			}
			want := Longest(listed, space, tokens)
			if space == 0 {
				require.Equal(t, want, m.Offset, "a hybrid model restores exactly where a checkpoint was published")
			} else {
				require.GreaterOrEqual(t, m.Offset, want)
			}
		}
	}
	s, err := w.db.Stats()
	require.NoError(t, err)
	require.EqualValues(t, len(listed), s.Checkpoints)
	require.Zero(t, s.Leases)
	require.Zero(t, s.Pending)
	require.LessOrEqual(t, s.RAMUsed, s.RAMCapacity)
	if s.DiskBudget > 0 {
		require.LessOrEqual(t, s.DiskBytes, s.DiskBudget)
	}
}

func (w *world) restore(t require.TestingT, space int, tokens []int32, want int64) {
	s := w.sequence(t, space, tokens)
	r, err := w.db.Restore(context.Background(), s, db.LookupOptions{})
	require.NoError(t, err, "listed means restorable")
	defer r.Release()
	require.Equal(t, want, r.Offset())
	for rank := range layouts[space].Ranks {
		pages := r.Pages(rank)
		require.NotEmpty(t, pages)
		for _, p := range pages {
			require.NoError(t, Verify(p.Bytes, p.Key, rank))
		}
	}
}

// image copies the directory as it is at one moment. The database works in the background, so a copy counts only if no
// name, size or time of a change differs between before and after it.
func (w *world) image(t require.TestingT, to string) {
	for range 1000 {
		before, err := w.tree()
		if err == nil {
			err = os.CopyFS(to, os.DirFS(w.dir))
		}
		if after, e := w.tree(); err == nil && e == nil && maps.Equal(before, after) {
			return
		}
		require.NoError(t, os.RemoveAll(to))
	}
	require.Fail(t, "the directory never stood still")
}

func (w *world) tree() (map[string]string, error) {
	files := map[string]string{}
	err := filepath.WalkDir(w.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err == nil {
			files[path] = fmt.Sprint(info.Size(), info.ModTime().UnixNano())
		}
		return err
	})
	return files, err
}

// crash goes on from an image of the directory, as a killed process leaves it.
func (w *world) crash(t require.TestingT) {
	image := w.dir + "+"
	w.image(t, image)
	_, err := w.db.Close(context.Background())
	require.NoError(t, err)
	require.NoError(t, os.RemoveAll(w.dir))
	w.dir = image
	w.model.Crash()
	w.open(t)
}

// Every random history keeps the promise, under every policy and with little room.
func TestHistoriesKeepThePromise(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		base, err := os.MkdirTemp("", "holdfast-history")
		require.NoError(t, err)
		defer os.RemoveAll(base)
		w := &world{dir: filepath.Join(base, "d"), model: NewModel()}
		w.options = db.Options{
			WritePolicy: rapid.SampledFrom([]db.WritePolicy{db.WriteThrough, db.OnEvict, db.OnReuse, db.Never}).Draw(t, "policy"),
			RAMBytes:    rapid.SampledFrom([]int64{512 << 10, 32 << 20}).Draw(t, "RAM"),
			DiskBytes:   rapid.SampledFrom([]int64{0, 1 << 20}).Draw(t, "disk"),
			// A small log and small segments, so that both are rotated, cut and removed.
			ReplayBytes: 64 << 10, SegmentBytes: 1 << 20, SupersedeGrace: time.Nanosecond,
			Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
		}
		w.exact = w.options.DiskBytes == 0 && (w.options.WritePolicy == db.WriteThrough || w.options.RAMBytes > 1<<20)
		for i, layout := range layouts {
			ns, err := db.NewNamespace(db.Identity{Model: "m", Weights: "unversioned:w", Tokenizer: "t", Engine: "e", DType: "d", Tenant: string(rune('a' + i)), Layout: layout})
			require.NoError(t, err)
			w.spaces = append(w.spaces, ns)
		}
		w.open(t)
		defer func() {
			if w.db != nil {
				w.db.Close(context.Background())
			}
		}()
		walk := func() []int32 {
			tokens := []int32{}
			if len(w.walks) > 0 && rapid.IntRange(0, 3).Draw(t, "fresh") > 0 {
				from := rapid.SampledFrom(w.walks).Draw(t, "from")
				tokens = append(tokens, from[:rapid.IntRange(0, len(from)).Draw(t, "keep")]...)
			}
			for range rapid.IntRange(1, 120).Draw(t, "more") {
				tokens = append(tokens, int32(rapid.IntRange(0, 3).Draw(t, "token")))
			}
			w.walks = append(w.walks, tokens)
			if len(w.walks) > 12 {
				w.walks = w.walks[1:]
			}
			return tokens
		}
		some := func() (db.Generation, bool) {
			if len(w.model.Listed) == 0 {
				return db.Generation{}, false
			}
			var gens []db.Generation
			for c, err := range w.db.Checkpoints(context.Background()) {
				require.NoError(t, err)
				gens = append(gens, c.Generation)
			}
			if len(gens) == 0 {
				return db.Generation{}, false
			}
			return rapid.SampledFrom(gens).Draw(t, "generation"), true
		}
		ctx := context.Background()
		t.Repeat(map[string]func(*rapid.T){
			"": func(t *rapid.T) { w.check(t) },
			"publish": func(t *rapid.T) {
				w.publish(t, rapid.IntRange(0, 1).Draw(t, "space"), walk(), rapid.SampledFrom([]string{"", "r1", "r2"}).Draw(t, "request"), rapid.Bool().Draw(t, "durable"))
			},
			"publish again": func(t *rapid.T) {
				if len(w.walks) > 0 {
					w.publish(t, 0, rapid.SampledFrom(w.walks).Draw(t, "walk"), "", false)
				}
			},
			"retire": func(t *rapid.T) {
				if g, ok := some(); ok {
					require.NoError(t, w.db.Retire(ctx, g))
					delete(w.model.Listed, g)
				}
			},
			"delete": func(t *rapid.T) {
				if g, ok := some(); ok {
					require.NoError(t, w.db.Delete(ctx, g))
					delete(w.model.Listed, g)
				}
			},
			"supersede": func(t *rapid.T) {
				a, ok := some()
				b, _ := some()
				if !ok || a == b {
					return
				}
				if err := w.db.Supersede(ctx, a, b); err != nil {
					require.True(t, errors.Is(err, db.ErrInvalid), "%v", err) // not newer, or of another namespace
				}
			},
			"drop RAM": func(t *rapid.T) {
				if w.options.WritePolicy == db.OnReuse || w.options.WritePolicy == db.Never {
					w.exact = false
				}
				_, err := w.db.DropRAM(ctx)
				require.NoError(t, err)
			},
			"clear": func(t *rapid.T) {
				space := rapid.IntRange(0, 1).Draw(t, "space")
				if rapid.IntRange(0, 4).Draw(t, "really") > 0 {
					return
				}
				_, err := w.db.Clear(ctx, w.spaces[space].ID())
				require.NoError(t, err)
				for g, c := range w.model.Listed {
					if c.Space == space {
						delete(w.model.Listed, g)
					}
				}
			},
			"reopen": func(t *rapid.T) {
				_, err := w.db.Close(ctx)
				require.NoError(t, err)
				if w.options.WritePolicy == db.OnReuse || w.options.WritePolicy == db.Never {
					w.exact = false
				}
				w.open(t)
			},
			"crash": func(t *rapid.T) {
				// What was not asked to be durable may have become so; the model keeps what it can be sure of, and looks.
				for g, c := range w.model.Listed {
					if !c.Durable && w.stillListed(g) {
						c.Durable = w.durable(t, g)
					}
				}
				w.crash(t)
			},
		})
	})
}

func (w *world) stillListed(g db.Generation) bool {
	_, err := w.db.Checkpoint(g)
	return err == nil
}
