package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/enginetest"
	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/gguf"
)

// Given checkpoints at 1,024 and 2,000 tokens, when the process is killed and started again, then going on, branching off and
// trying again restore all there is, and the logits of the 32 steps after are those of a run that nothing interrupted, to the last bit.
func TestRestoredAfterAKillIsTheUninterruptedRun(t *testing.T) {
	forEachArchitecture(t, func(t *testing.T, arch, model string) {
		tokens, other := enginetest.Tokens(1, 2000), enginetest.Tokens(2, 50)
		flags := []string{"--model", model, "--dir", filepath.Join(t.TempDir(), "db"), "--reuse-live=false", "--allow-logits"}
		p := start(t, flags...)
		first := p.complete(body{Prompt: tokens[:1024]})
		require.Zero(t, first.Holdfast.RestoredTokens)
		second := p.complete(body{Prompt: tokens})
		require.Equal(t, 1024, second.Holdfast.RestoredTokens)
		p.kill()

		again := 0 // tokens that are computed once more when the whole prompt is there
		if !exact(arch) {
			again = 1
		}
		j := newJudge(t, model)
		p = start(t, flags...)
		goneOn := p.complete(body{Prompt: join(tokens, other[:1]), MaxTokens: 32, Logits: true})
		require.Equal(t, 2000, goneOn.Holdfast.RestoredTokens)
		requireSameBits(t, j.uninterrupted(t, false, 32, tokens[:1024], tokens[1024:], other[:1]), logitsOf(t, goneOn), "going on")

		branch := p.complete(body{Prompt: join(tokens[:1024], other), MaxTokens: 32, Logits: true})
		require.Equal(t, 1024, branch.Holdfast.RestoredTokens)
		requireSameBits(t, j.uninterrupted(t, false, 32, tokens[:1024], other), logitsOf(t, branch), "branching off")

		retried := p.complete(body{Prompt: tokens, MaxTokens: 32, Logits: true})
		require.Equal(t, 2000-again, retried.Holdfast.RestoredTokens)
		tried := j.uninterrupted(t, again > 0, 32, tokens[:1024], tokens[1024:])
		requireSameBits(t, tried, logitsOf(t, retried), "trying again")
		p.kill()

		p = start(t, flags...)
		retried = p.complete(body{Prompt: tokens, MaxTokens: 32, Logits: true})
		require.Equal(t, 2000-again, retried.Holdfast.RestoredTokens)
		requireSameBits(t, tried, logitsOf(t, retried), "trying again after another kill")
	})
}

// Given a context that still holds a conversation, when a request branches off at an earlier checkpoint, then only what cannot be cut goes to the
// engine again: the recurrent state, or the cells inside the window. The logits are those of an uninterrupted run.
func TestBranchInALiveContextRestoresPartOfTheState(t *testing.T) {
	paths := map[string]string{"llama": "live", "gemma3": "partial", "qwen35": "partial", "granitehybrid": "partial", "mamba2": "whole"}
	forEachArchitecture(t, func(t *testing.T, arch, model string) {
		tokens, other := enginetest.Tokens(3, 1500), enginetest.Tokens(4, 50)
		p := start(t, "--model", model, "--dir", filepath.Join(t.TempDir(), "db"), "--allow-logits")
		p.complete(body{Prompt: tokens, InstructionTokens: 1024})
		branch := p.complete(body{Prompt: join(tokens[:1024], other), MaxTokens: 32, Logits: true})
		require.Equal(t, paths[arch], branch.Holdfast.Path)
		require.Equal(t, 1024, branch.Usage.Details.CachedTokens)
		requireSameBits(t, newJudge(t, model).uninterrupted(t, false, 32, tokens[:1024], other), logitsOf(t, branch), "branching off")
		goneOn := p.complete(body{Prompt: join(tokens[:1024], other, branch.Choices[0].Tokens, other[:3]), MaxTokens: 1})
		require.Equal(t, "live", goneOn.Holdfast.Path)
		require.Equal(t, 1024+50+31, goneOn.Holdfast.LiveTokens)
	})
}

// Weights of the same shape, another number of sequences in a context, another build of the engine, another tenant: each is a miss.
// The library itself would take the state of other weights without a word.
func TestWhatIsNotTheSameIsAMiss(t *testing.T) {
	forEachArchitecture(t, func(t *testing.T, arch, model string) {
		tokens := enginetest.Tokens(5, 300)
		dir := filepath.Join(t.TempDir(), "db")
		ask := func(tenant string, flags ...string) int {
			p := start(t, append([]string{"--dir", dir, "--reuse-live=false"}, flags...)...)
			defer p.stop()
			return p.complete(body{Prompt: join(tokens, []int32{1}), Tenant: tenant}).Usage.Details.CachedTokens
		}
		p := start(t, "--dir", dir, "--model", model)
		p.complete(body{Prompt: tokens})
		p.kill()
		require.Equal(t, 300, ask("", "--model", model), "the same: this test can tell")
		require.Zero(t, ask("", "--model", enginetest.ModelFile(t, arch, gguf.Options{Seed: 2})), "other weights")
		require.Zero(t, ask("", "--model", model, "--n-seq-max", "2"), "another number of sequences")
		require.Zero(t, ask("", "--model", model, "--lib", anotherBuild(t)), "another build of the engine")
		require.Zero(t, ask("somebody else", "--model", model), "another tenant")
		require.Equal(t, 301-1+btoi(exact(arch)), ask("", "--model", model), "and nothing of it was in the way")
	})
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// anotherBuild makes a folder with the same engine but for a few bytes at the end of the library, which nobody reads.
func anotherBuild(t *testing.T) string {
	path := enginetest.LibraryPath(t)
	if info, err := os.Stat(path); err != nil || !info.IsDir() {
		path = filepath.Dir(path)
	}
	entries, err := os.ReadDir(path)
	require.NoError(t, err)
	folder := t.TempDir()
	changed := 0
	for _, e := range entries {
		from, to := filepath.Join(path, e.Name()), filepath.Join(folder, e.Name())
		if !strings.HasPrefix(e.Name(), "libllama.") {
			require.NoError(t, os.Symlink(from, to))
			continue
		}
		b, err := os.ReadFile(from)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(to, append(b, "another build"...), 0o755))
		changed++
	}
	require.NotZero(t, changed)
	return folder
}

// An adapter makes another model of the same weights: what was stored without it is a miss with it, and the other way round.
func TestAnAdapterIsAnotherModel(t *testing.T) {
	enginetest.LibraryPath(t)
	model, adapter := enginetest.ModelFile(t, "llama", gguf.Options{Seed: 1}), filepath.Join(t.TempDir(), "adapter.gguf")
	require.NoError(t, gguf.TinyAdapter(1).Write(adapter))
	tokens := enginetest.Tokens(6, 300)
	dir := filepath.Join(t.TempDir(), "db")
	ask := func(flags ...string) (cached int, logits []float32) {
		p := start(t, append([]string{"--model", model, "--dir", dir, "--allow-logits"}, flags...)...)
		defer p.stop()
		a := p.complete(body{Prompt: tokens, MaxTokens: 1, Logits: true})
		return a.Usage.Details.CachedTokens, logitsOf(t, a)[0]
	}
	cached, without := ask()
	require.Zero(t, cached)
	cached, with := ask("--lora", adapter)
	require.Zero(t, cached)
	require.Greater(t, distance(without, with), 0.1, "the adapter has an effect")
	cached, again := ask("--lora", adapter)
	require.Equal(t, 299, cached)
	require.Less(t, distance(with, again), farthest)
	cached, again = ask()
	require.Equal(t, 299, cached)
	require.Less(t, distance(without, again), farthest)
}
