package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/enginetest"
	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/gguf"
	"github.com/holdfast-db/holdfast/db"
	"github.com/holdfast-db/holdfast/txn"
)

// Whatever happens to the database, requests are computed, with the same result; what went wrong is in the answer and in the counters.
func TestRequestsOutliveTheDatabase(t *testing.T) {
	enginetest.LibraryPath(t)
	var log bytes.Buffer
	s := open(t, enginetest.ModelFile(t, "qwen35", gguf.Options{Seed: 1}), filepath.Join(t.TempDir(), "db"), &log)
	tokens := enginetest.Tokens(1, 300)
	want := ask(t, s, tokens)
	_, err := s.store.Close(context.Background())
	require.NoError(t, err)
	got := ask(t, s, tokens)
	require.Equal(t, want.Logits, got.Logits)
	require.Zero(t, got.Restored)
	require.Contains(t, got.CacheError, db.ErrClosed.Error())
	require.NotEmpty(t, got.Published)
	for _, p := range got.Published {
		require.False(t, p.Listed)
		require.Contains(t, p.Error, db.ErrClosed.Error())
	}
	stats := s.Stats()
	require.EqualValues(t, 1, stats.CacheErrors)
	require.EqualValues(t, len(got.Published), stats.PublicationErrors)
	shut(t, s)
}

// A request whose client is gone ends, and leaves a slot that the next one can use. A token that cannot be sent ends it too.
func TestARequestEndsWithItsClient(t *testing.T) {
	enginetest.LibraryPath(t)
	var log bytes.Buffer
	s := open(t, enginetest.ModelFile(t, "llama", gguf.Options{Seed: 1}), filepath.Join(t.TempDir(), "db"), &log)
	ctx, cancel := context.WithCancel(context.Background())
	n := 0
	_, err := s.Complete(ctx, &Request{Tokens: enginetest.Tokens(1, 50), MaxTokens: 3000}, func(int32) error {
		if n++; n == 5 {
			cancel()
		}
		return nil
	})
	require.ErrorIs(t, err, txn.ErrClosed)
	require.Equal(t, 5, n)
	gone := errors.New("gone")
	_, err = s.Complete(context.Background(), &Request{Tokens: enginetest.Tokens(1, 50), MaxTokens: 3000}, func(int32) error { return gone })
	require.ErrorIs(t, err, gone)
	require.EqualValues(t, 2, s.Stats().Failed)
	require.Equal(t, 49, ask(t, s, enginetest.Tokens(1, 50)).Cached, "the prompt was stored before")
	shut(t, s)
	_, err = s.Complete(context.Background(), &Request{Tokens: []int32{1}}, nil)
	require.ErrorIs(t, err, txn.ErrClosed)
}

// Requests at the same time, of conversations that share their beginning, in two slots: each gets what a computation from nothing gives.
func TestRequestsAtTheSameTime(t *testing.T) {
	enginetest.LibraryPath(t)
	var log bytes.Buffer
	model := enginetest.ModelFile(t, "qwen35", gguf.Options{Seed: 1})
	bare := open(t, model, "", &log)
	var want [][]float32
	prompts := make([][]int32, 4)
	for i := range prompts {
		prompts[i] = append(enginetest.Tokens(1, 256), enginetest.Tokens(uint64(10+i), 40)...)
		want = append(want, ask(t, bare, prompts[i]).Logits[0])
	}
	shut(t, bare)
	s, err := Open(context.Background(), Options{
		Library: enginetest.LibraryPath(t), Model: model, ContextTokens: 1024, Batch: enginetest.Batch, Threads: 1, Sequences: 1, Slots: 2,
		LogitsOut: true, ReuseLive: true, Dir: filepath.Join(t.TempDir(), "db"),
	})
	require.NoError(t, err)
	var wait sync.WaitGroup
	for range 3 {
		for i, prompt := range prompts {
			wait.Go(func() {
				a, err := s.Complete(context.Background(), &Request{Tokens: prompt, MaxTokens: 3, InstructionTokens: 256, Logits: true}, nil)
				if err != nil || fmt.Sprint(a.Logits[0]) != fmt.Sprint(want[i]) {
					t.Errorf("prompt %d: other logits, or %v", i, err)
				}
			})
		}
	}
	wait.Wait()
	stats := s.Stats()
	require.Zero(t, stats.PublicationErrors)
	require.NotZero(t, stats.RestoredTokens+stats.LiveTokens)
	shut(t, s)
}

// The limits in docs/llamaserve.md are those of the code.
func TestLimitsAreDocumented(t *testing.T) {
	b, err := os.ReadFile("../../../../docs/llamaserve.md")
	require.NoError(t, err)
	documented := map[string]string{}
	for _, m := range regexp.MustCompile("(?m)^\\| `(Max\\w+|Default\\w+)` \\| ([^|]+) \\|").FindAllStringSubmatch(string(b), -1) {
		documented[m[1]] = m[2]
	}
	require.Equal(t, map[string]string{
		"DefaultContextTokens": fmt.Sprint(DefaultContextTokens), "DefaultBatch": fmt.Sprint(DefaultBatch), "DefaultMaxTokens": fmt.Sprint(DefaultMaxTokens),
		"MaxContextTokens": fmt.Sprint(MaxContextTokens), "MaxBatch": fmt.Sprint(MaxBatch), "MaxThreads": fmt.Sprint(MaxThreads),
		"MaxSequences": fmt.Sprint(MaxSequences), "MaxSlots": fmt.Sprint(MaxSlots), "MaxQueue": fmt.Sprint(MaxQueue),
		"MaxQueueWait": MaxQueueWait.String(), "MaxBodyBytes": fmt.Sprint(MaxBodyBytes), "MaxConversations": fmt.Sprint(MaxConversations),
		"MaxConversationBytes": fmt.Sprint(MaxConversationBytes), "MaxPublishWait": MaxPublishWait.String(),
	}, documented)
}

// A queue has an end, and so has waiting in it.
func TestConversationsAreBounded(t *testing.T) {
	cs := newConversations()
	for i := range MaxConversations + 10 {
		cs.add(&conversation{id: fmt.Sprint(i), tokens: make([]int32, 10)})
	}
	_, err := cs.find("9", "")
	require.ErrorIs(t, err, txn.ErrNotFound)
	c, err := cs.find("10", "")
	require.NoError(t, err)
	require.Equal(t, "10", c.id)
	_, err = cs.find("10", "somebody else")
	require.ErrorIs(t, err, txn.ErrNotFound)
	cs.add(&conversation{id: "large", tokens: make([]int32, MaxConversationBytes/4)})
	require.Equal(t, 1, cs.recent.Len())
	require.EqualValues(t, MaxConversationBytes, cs.bytes)
}

// Characters come out whole, however the tokens cut them, and what is none comes out as such.
func TestTextIsPutTogetherByCharacters(t *testing.T) {
	var b textBuilder
	require.Equal(t, "a", b.add("a\xe2"))
	require.Equal(t, "", b.add("\x82"))
	require.Equal(t, "€b", b.add("\xacb"))
	require.Equal(t, "�x", b.add("\xffx"))
	require.Equal(t, "", b.add("\xf0\x9f"))
	require.Equal(t, "�", b.rest())
	require.Equal(t, "", b.rest())
}

// The likeliest token, the first of equals; at random the same for the same seed; never one from logits that are no numbers.
func TestSampler(t *testing.T) {
	logits := []float32{0, 3, 3, 1}
	token, err := newSampler(0, 1).next(logits)
	require.NoError(t, err)
	require.EqualValues(t, 1, token)
	draw := func(seed uint64) (drawn []int32) {
		s := newSampler(1, seed)
		for range 200 {
			token, err := s.next(logits)
			require.NoError(t, err)
			drawn = append(drawn, token)
		}
		return drawn
	}
	require.Equal(t, draw(1), draw(1))
	require.NotEqual(t, draw(1), draw(2))
	require.Contains(t, draw(1), int32(0))
	zero := float32(0)
	_, err = newSampler(0, 1).next([]float32{1, zero / zero})
	require.ErrorIs(t, err, txn.ErrIO)
}
