package engine_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/engine"
	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/enginetest"
	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/gguf"
	"github.com/holdfast-db/holdfast/txn"
)

// A build that cannot load a library says what it would take.
func TestLoadSaysWhatItTakes(t *testing.T) {
	_, err := engine.Load(filepath.Join(t.TempDir(), "libllama.so"))
	if engine.Supported {
		require.ErrorIs(t, err, txn.ErrNotFound)
		return
	}
	require.ErrorIs(t, err, txn.ErrUnsupported)
	require.ErrorContains(t, err, "cgo")
}

// A library that is none, or not this one, is refused before anything of it is called.
func TestAnotherLibraryIsRefused(t *testing.T) {
	if !engine.Supported {
		t.Skip("this build cannot load a library: it takes cgo on Linux, amd64 or arm64")
	}
	junk := filepath.Join(t.TempDir(), "libllama.so")
	require.NoError(t, os.WriteFile(junk, []byte("junk"), 0o755))
	_, err := engine.Load(junk)
	require.ErrorIs(t, err, txn.ErrUnsupported)
	_, err = engine.Load(t.TempDir())
	require.ErrorIs(t, err, txn.ErrNotFound)
	for _, name := range []string{"/lib/x86_64-linux-gnu/libm.so.6", "/lib/aarch64-linux-gnu/libm.so.6"} {
		if _, err := os.Stat(name); err == nil {
			_, err = engine.Load(name)
			require.ErrorIs(t, err, txn.ErrUnsupported)
			require.ErrorContains(t, err, "it has no function llama_")
		}
	}
}

// Requests that would make the library end the process, or read past an end, are refused before they get to it.
func TestRefusedBeforeTheLibrary(t *testing.T) {
	m := enginetest.Model(t, enginetest.ModelFile(t, "llama", gguf.Options{Seed: 1}))
	c, err := m.NewContext(engine.ContextOptions{Tokens: 64, Batch: 32, Sequences: 1, Threads: 1})
	require.NoError(t, err)
	t.Cleanup(c.Close)
	require.ErrorIs(t, c.Decode(nil), txn.ErrInvalid)
	require.ErrorIs(t, c.Decode([]int32{512}), txn.ErrInvalid)
	require.ErrorIs(t, c.Decode([]int32{-1}), txn.ErrInvalid)
	require.ErrorIs(t, c.Decode(make([]int32, 33)), txn.ErrInvalid)
	require.ErrorIs(t, c.SetState(engine.Whole, nil), txn.ErrInvalid)
	require.NoError(t, c.Decode(make([]int32, 32)))
	require.NoError(t, c.Decode(make([]int32, 32)))
	require.ErrorIs(t, c.Decode([]int32{1}), txn.ErrTooLarge)
	require.Equal(t, 64, c.Len())
	_, err = m.NewContext(engine.ContextOptions{Tokens: 0, Batch: 32, Sequences: 1, Threads: 1})
	require.ErrorIs(t, err, txn.ErrInvalid)
	_, err = m.Tokenize("a text", true)
	require.ErrorIs(t, err, txn.ErrUnsupported)
	state, err := c.State(engine.Whole)
	require.NoError(t, err)
	require.ErrorIs(t, c.SetState(engine.Whole, state[:len(state)/2]), txn.ErrInvalid, "a state that ends early")
	require.Zero(t, c.Len())
}

// Why nothing may reach the engine that was not checked: it takes a state with a bit flipped, and computes something else from it.
func TestTheEngineTakesAFlippedBitInSilence(t *testing.T) {
	enginetest.Library(t)
	for _, arch := range gguf.Architectures() {
		t.Run(arch, func(t *testing.T) {
			c := enginetest.Context(t, enginetest.Model(t, enginetest.ModelFile(t, arch, gguf.Options{Seed: 1})))
			require.NoError(t, c.Decode(enginetest.Tokens(1, 200)))
			state, err := c.State(engine.Whole)
			require.NoError(t, err)
			after := func(state []byte) []float32 {
				c.Clear()
				require.NoError(t, c.SetState(engine.Whole, state))
				require.NoError(t, c.Decode([]int32{1}))
				l, err := c.Logits()
				require.NoError(t, err)
				return l
			}
			want := after(state)
			require.Equal(t, want, after(state))
			// Not in the numbers of cells and layers at the beginning, which would have it take all of the memory.
			at := len(state) - len(state)/8
			state[at-at%4+3] ^= 1 << 6
			require.NotEqual(t, want, after(state))
		})
	}
}
