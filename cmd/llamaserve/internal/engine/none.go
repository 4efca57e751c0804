//go:build !(cgo && linux && (amd64 || arm64))

package engine

import (
	"fmt"

	"github.com/holdfast-db/holdfast/txn"
)

// Supported reports whether this build can load a library.
const Supported = false

func unsupported() error {
	return fmt.Errorf("engine: this build cannot load llama.cpp: it takes cgo (CGO_ENABLED=1 and a C compiler) on Linux, amd64 or arm64: %w", txn.ErrUnsupported)
}

// Library is a loaded libllama.
type Library struct{}

// Model is a loaded model.
type Model struct{}

// Adapter is a loaded adapter of a model.
type Adapter struct{}

// Context holds the state of one sequence.
type Context struct{}

// Load always refuses.
func Load(string) (*Library, error) { return nil, unsupported() }

// The methods below are never reached, because nothing can be loaded.

func (*Library) Version() string                           { return "" }
func (*Library) Files() ([]string, error)                  { return nil, unsupported() }
func (*Library) LoadModel(string) (*Model, error)          { return nil, unsupported() }
func (*Model) Close()                                      {}
func (*Model) Info() ModelInfo                             { return ModelInfo{} }
func (*Model) LoadAdapter(string) (*Adapter, error)        { return nil, unsupported() }
func (*Model) NewContext(ContextOptions) (*Context, error) { return nil, unsupported() }
func (*Model) Tokenize(string, bool) ([]int32, error)      { return nil, unsupported() }
func (*Model) Piece(int32) (string, error)                 { return "", unsupported() }
func (*Model) IsEnd(int32) bool                            { return false }
func (*Context) Close()                                    {}
func (*Context) Decode([]int32) error                      { return unsupported() }
func (*Context) Logits() ([]float32, error)                { return nil, unsupported() }
func (*Context) State(Part) ([]byte, error)                { return nil, unsupported() }
func (*Context) SetState(Part, []byte) error               { return unsupported() }
func (*Context) Cut(int) bool                              { return false }
func (*Context) Clear()                                    {}
func (*Context) Len() int                                  { return 0 }
