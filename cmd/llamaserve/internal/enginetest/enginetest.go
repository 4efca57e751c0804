// Package enginetest gives tests an engine and tiny models, or skips them with the reason.
package enginetest

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/engine"
	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/gguf"
)

// LibraryVariable names the libllama.so that the tests run, or its directory. Without it they take the one that `npm ci` puts into
// cmd/llamaserve/node_modules.
const LibraryVariable = "HOLDFAST_LLAMA_LIB"

// Context size of the tests, in tokens.
const (
	ContextTokens = 4096
	Batch         = 256
)

// LibraryPath gives the path of the library; it skips the test if there is none, or if this build cannot load one. Whoever names a library
// means it: then nothing is skipped.
func LibraryPath(t testing.TB) string {
	t.Helper()
	path := os.Getenv(LibraryVariable)
	if !engine.Supported {
		const reason = "this build cannot load llama.cpp: it takes cgo on Linux, amd64 or arm64"
		if path != "" {
			t.Fatalf("%s is %s, and %s", LibraryVariable, path, reason)
		}
		t.Skip(reason)
	}
	if path != "" {
		return path
	}
	_, file, _, _ := runtime.Caller(0)
	folder := filepath.Join(filepath.Dir(file), "../../node_modules/@node-llama-cpp/linux-x64/bins/linux-x64")
	if _, err := os.Stat(folder); err != nil {
		t.Skipf("no llama.cpp here: run `npm ci --ignore-scripts` in cmd/llamaserve, or set %s", LibraryVariable)
	}
	return folder
}

var (
	loadOnce sync.Once
	library  *engine.Library
	loadErr  error
)

// Library gives the loaded library.
func Library(t testing.TB) *engine.Library {
	t.Helper()
	path := LibraryPath(t)
	loadOnce.Do(func() { library, loadErr = engine.Load(path) })
	require.NoError(t, loadErr)
	return library
}

// ModelFile writes a tiny model.
func ModelFile(t testing.TB, arch string, o gguf.Options) string {
	t.Helper()
	f, err := gguf.Tiny(arch, o)
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), arch+".gguf")
	require.NoError(t, f.Write(path))
	return path
}

// Model loads a model file, and closes it at the end of the test.
func Model(t testing.TB, path string) *engine.Model {
	t.Helper()
	m, err := Library(t).LoadModel(path)
	require.NoError(t, err)
	t.Cleanup(m.Close)
	return m
}

// Context makes a context of one thread, and closes it at the end of the test.
func Context(t testing.TB, m *engine.Model) *engine.Context {
	t.Helper()
	c, err := m.NewContext(engine.ContextOptions{Tokens: ContextTokens, Batch: Batch, Sequences: 1, Threads: 1})
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

// Tokens gives n tokens that depend on the seed.
func Tokens(seed uint64, n int) []int32 {
	r := rand.New(rand.NewPCG(seed, 1))
	tokens := make([]int32, n)
	for i := range tokens {
		tokens[i] = r.Int32N(gguf.Vocabulary)
	}
	return tokens
}
