package server

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/enginetest"
	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/gguf"
	"github.com/holdfast-db/holdfast/db"
)

// open opens a service of one thread that logs to log.
func open(t *testing.T, model, dir string, log *bytes.Buffer) *Service {
	t.Helper()
	s, err := Open(context.Background(), Options{
		Library: enginetest.LibraryPath(t), Model: model, ContextTokens: enginetest.ContextTokens, Batch: enginetest.Batch, Threads: 1, Sequences: 1, Slots: 1,
		LogitsOut: true, Dir: dir, Logger: slog.New(slog.NewTextHandler(log, nil)),
	})
	require.NoError(t, err)
	return s
}

func shut(t *testing.T, s *Service) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	report := s.Shutdown(ctx)
	require.Empty(t, report.Error)
	require.Zero(t, report.Abandoned)
}

// ask asks for one token.
func ask(t *testing.T, s *Service, tokens []int32) *Answer {
	t.Helper()
	a, err := s.Complete(context.Background(), &Request{Tokens: tokens, MaxTokens: 1, Logits: true}, nil)
	require.NoError(t, err)
	return a
}

// A bit that flips on disk, in a page of any group, is found by Holdfast as ErrCorrupt, and makes a shorter hit; it never
// reaches the engine: the logits are those of a computation from where the hit ends, bit by bit.
func TestAFlippedBitIsAShorterHit(t *testing.T) {
	enginetest.LibraryPath(t)
	for _, arch := range gguf.Architectures() {
		t.Run(arch, func(t *testing.T) {
			model := enginetest.ModelFile(t, arch, gguf.Options{Seed: 1})
			dir := filepath.Join(t.TempDir(), "db")
			tokens := enginetest.Tokens(1, 600)
			var log bytes.Buffer
			s := open(t, model, dir, &log)
			ask(t, s, tokens[:512])
			want := ask(t, s, tokens) // goes on from 512
			require.Equal(t, 512, want.Restored)
			// The last page of each group, as it is stored.
			_, seq, err := s.prompt(&Request{Tokens: tokens})
			require.NoError(t, err)
			r, err := s.store.Restore(context.Background(), seq, db.LookupOptions{})
			require.NoError(t, err)
			require.EqualValues(t, 600, r.Offset())
			last := make([][]byte, len(s.pages.Layout.Groups))
			for _, page := range r.Pages(0) {
				last[page.Group] = bytes.Clone(page.Bytes)
			}
			r.Release()
			shut(t, s)
			for group, page := range last {
				name := s.pages.Layout.Groups[group].Name
				damaged := filepath.Join(t.TempDir(), "db")
				require.NoError(t, os.CopyFS(damaged, os.DirFS(dir)))
				flip(t, damaged, page)
				report, err := db.Verify(context.Background(), damaged, db.VerifyOptions{})
				require.NoError(t, err)
				require.Len(t, report.Findings, 1, name)
				require.Equal(t, name, report.Findings[0].Group)

				log.Reset()
				s := open(t, model, damaged, &log)
				got := ask(t, s, tokens)
				require.Equal(t, 512, got.Restored, name)
				require.Equal(t, want.Logits, got.Logits, name)
				require.NotZero(t, s.Stats().Database.FailedReads)
				require.Contains(t, log.String(), db.ErrCorrupt.Error(), name)
				// What was computed instead is stored again.
				require.GreaterOrEqual(t, ask(t, s, append(tokens[:600:600], 1)).Restored, 600)
				shut(t, s)
			}
		})
	}
}

// flip flips a bit in the middle of the page, wherever it is in the files.
func flip(t *testing.T, dir string, page []byte) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "data", "*"))
	require.NoError(t, err)
	found := 0
	for _, path := range files {
		b, err := os.ReadFile(path)
		require.NoError(t, err)
		at := bytes.Index(b, page)
		if at < 0 {
			continue
		}
		found++
		b[at+len(page)/4] ^= 1 << 5
		require.NoError(t, os.WriteFile(path, b, 0o600))
	}
	require.Equal(t, 1, found, "the page is in one file")
}
