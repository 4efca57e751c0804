package state

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/engine"
	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/enginetest"
	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/gguf"
	"github.com/holdfast-db/holdfast/db"
)

// forEachArchitecture runs a test for the five tiny models.
func forEachArchitecture(t *testing.T, fn func(t *testing.T, w *workshop)) {
	enginetest.Library(t)
	for _, arch := range gguf.Architectures() {
		t.Run(arch, func(t *testing.T) {
			m := enginetest.Model(t, enginetest.ModelFile(t, arch, gguf.Options{Seed: 1}))
			shape, err := Learn(enginetest.Context(t, m), m.Info())
			require.NoError(t, err)
			fn(t, &workshop{model: m, pages: NewPages(shape, 0)})
		})
	}
}

// workshop is a model with its pages, and sessions for it.
type workshop struct {
	model *engine.Model
	pages *Pages
}

func (w *workshop) session(t *testing.T) *Session {
	return NewSession(enginetest.Context(t, w.model), w.pages, enginetest.Batch)
}

// pagesOf cuts a snapshot into the pages that a checkpoint of it has.
func pagesOf(t *testing.T, p *Pages, s *Snapshot) (pages []db.Page) {
	for i, g := range p.Layout.Groups {
		first, last := int64(0), int64(g.Pages)-1
		if g.Kind == db.Attention {
			last = (int64(s.Tokens) - 1) / g.PageTokens
			if w := g.WindowTokens; w > 0 && int64(s.Tokens) > w {
				first = (int64(s.Tokens) - w) / g.PageTokens
			}
		}
		for k := first; k <= last; k++ {
			buf := slices.Repeat([]byte{0xa5}, int(g.PageBytes))
			require.NoError(t, s.Fill(i, k, buf))
			pages = append(pages, db.Page{Group: i, Position: k, Bytes: buf})
		}
	}
	return pages
}

// What is cut into pages is put together to the very bytes that the engine gave, whole and partial, at offsets around page, batch and
// window boundaries.
func TestPagesJoinToTheBytesOfTheEngine(t *testing.T) {
	forEachArchitecture(t, func(t *testing.T, w *workshop) {
		s := w.session(t)
		tokens := enginetest.Tokens(7, 1024)
		for _, n := range []int{1, 2, w.pages.Tokens - 1, w.pages.Tokens, w.pages.Tokens + 1, 255, 256, 257, 300, 600, 601, 1000, 1024} {
			if n <= s.Len() {
				continue
			}
			require.NoError(t, s.Decode(tokens[s.Len():n]))
			snapshot, err := s.Snapshot()
			require.NoError(t, err)
			restored, err := w.pages.Join(pagesOf(t, w.pages, snapshot), n)
			require.NoError(t, err)
			whole, err := s.context.State(engine.Whole)
			require.NoError(t, err)
			require.True(t, slices.Equal(whole, restored.encode(w.pages.shape)), "the whole state at %d", n)
			if w.pages.shape.Exact() || w.pages.shape.Window() > 0 {
				partial, err := s.context.State(engine.Partial)
				require.NoError(t, err)
				require.True(t, slices.Equal(partial, restored.encodePartial(w.pages.shape)), "the partial state at %d", n)
			}
			if w.pages.shape.Exact() {
				require.Equal(t, s.Logits(), restored.Logits)
			}
		}
	})
}

// A page that two checkpoints share is the same whichever of them fills it.
func TestSharedPagesAreEqual(t *testing.T) {
	forEachArchitecture(t, func(t *testing.T, w *workshop) {
		s := w.session(t)
		tokens := enginetest.Tokens(8, 900)
		known := map[string][]byte{}
		shared := 0
		for _, n := range []int{256, 333, 334, 512, 700, 701, 900} {
			require.NoError(t, s.Decode(tokens[s.Len():n]))
			snapshot, err := s.Snapshot()
			require.NoError(t, err)
			for _, page := range pagesOf(t, w.pages, snapshot) {
				g := w.pages.Layout.Groups[page.Group]
				if g.Kind != db.Attention || (page.Position+1)*g.PageTokens > int64(n) {
					continue
				}
				name := fmt.Sprint(page.Group, page.Position)
				if was := known[name]; was != nil {
					shared++
					require.True(t, slices.Equal(was, page.Bytes), "page %s at %d", name, n)
				}
				known[name] = page.Bytes
			}
		}
		if len(w.pages.shape.caches) > 0 {
			require.NotZero(t, shared)
		}
	})
}
