//go:build cgo && linux && (amd64 || arm64)

package engine

// #cgo LDFLAGS: -ldl -lpthread
// #include "shim.h"
// #include <stdlib.h>
import "C"

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"unsafe"

	"github.com/holdfast-db/holdfast/txn"
)

// Supported reports whether this build can load a library.
const Supported = true

// Library is a loaded libllama. It stays loaded until the process ends.
type Library struct {
	l    *C.hfl_library
	path string
}

var loading sync.Mutex // the library's initialisation is not safe for concurrent use

// Load loads a libllama.so: the file, or the directory that holds it. Back ends that are libraries of their own are looked for beside
// it. ErrNotFound, ErrUnsupported for a library that lacks a function, or whose context parameters begin otherwise.
func Load(path string) (*Library, error) {
	path, err := find(path)
	if err != nil {
		return nil, err
	}
	loading.Lock()
	defer loading.Unlock()
	file, directory := C.CString(path), C.CString(filepath.Dir(path))
	defer C.free(unsafe.Pointer(file))
	defer C.free(unsafe.Pointer(directory))
	var why *C.char
	l := C.hfl_open(file, directory, &why)
	if l == nil {
		defer C.free(unsafe.Pointer(why))
		return nil, fmt.Errorf("engine: %s: %s: %w", path, C.GoString(why), txn.ErrUnsupported)
	}
	return &Library{l, path}, nil
}

// find gives the absolute path of the library.
func find(path string) (string, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return "", fmt.Errorf("engine: %q: %w: %w", path, err, txn.ErrInvalid)
	}
	info, err := os.Stat(path)
	if err != nil {
		return "", fmt.Errorf("engine: %w: %w", err, txn.ErrNotFound)
	}
	if !info.IsDir() {
		return path, nil
	}
	// libllama.so, or with a version in its name as packages have it; not libllama-common.so.
	for _, pattern := range []string{"libllama.so", "libllama.*.so", "libllama.so.*"} {
		if names, _ := filepath.Glob(filepath.Join(path, pattern)); len(names) > 0 {
			return names[0], nil
		}
	}
	return "", fmt.Errorf("engine: %s holds no libllama.so: %w", path, txn.ErrNotFound)
}

// Version is what the library calls itself; older ones do not.
func (l *Library) Version() string { return C.GoString(C.hfl_version(l.l)) }

// Files gives the paths of everything of llama.cpp that is mapped into the process, back ends included, sorted.
func (l *Library) Files() ([]string, error) {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return nil, fmt.Errorf("engine: %w: %w", err, txn.ErrIO)
	}
	var files []string
	for line := range strings.Lines(string(maps)) {
		if i := strings.IndexByte(line, '/'); i >= 0 {
			path := strings.TrimSpace(line[i:])
			if name := filepath.Base(path); (strings.HasPrefix(name, "libggml") || strings.HasPrefix(name, "libllama")) && !slices.Contains(files, path) {
				files = append(files, path)
			}
		}
	}
	slices.Sort(files)
	return files, nil
}

// words gives what the library said last, for an error.
func words() string {
	buf := (*C.char)(C.malloc(512))
	defer C.free(unsafe.Pointer(buf))
	if C.hfl_last_words(buf, 512) <= 0 {
		return "the library does not say why"
	}
	return strings.TrimSpace(C.GoString(buf))
}

// Model is a loaded model. It must be closed after its contexts.
type Model struct {
	lib   *Library
	model unsafe.Pointer
	info  ModelInfo
}

// LoadModel loads a GGUF file. ErrUnsupported if the library refuses it.
func (l *Library) LoadModel(path string) (*Model, error) {
	if _, err := os.Stat(path); err != nil {
		return nil, fmt.Errorf("engine: %w: %w", err, txn.ErrNotFound)
	}
	file := C.CString(path)
	defer C.free(unsafe.Pointer(file))
	p := C.hfl_model_load(l.l, file)
	if p == nil {
		return nil, fmt.Errorf("engine: model %s: %s: %w", path, words(), txn.ErrUnsupported)
	}
	m := &Model{lib: l, model: p}
	m.info = ModelInfo{
		Name: m.text("general.name"), Architecture: m.text("general.architecture"),
		Vocabulary: m.number(C.HFL_VOCABULARY), Layers: m.number(C.HFL_LAYERS), Window: m.number(C.HFL_WINDOW),
		Recurrent: m.number(C.HFL_RECURRENT) != 0, Hybrid: m.number(C.HFL_HYBRID) != 0,
		TrainTokens: m.number(C.HFL_CONTEXT), Text: m.number(C.HFL_TOKENIZER) != 0,
	}
	return m, nil
}

func (m *Model) number(what C.int) int { return int(C.hfl_model_number(m.lib.l, m.model, what)) }

func (m *Model) text(key string) string {
	k, buf := C.CString(key), (*C.char)(C.malloc(1024))
	defer C.free(unsafe.Pointer(k))
	defer C.free(unsafe.Pointer(buf))
	if C.hfl_model_text(m.lib.l, m.model, k, buf, 1024) < 0 {
		return ""
	}
	return C.GoString(buf)
}

// Close frees the model.
func (m *Model) Close() {
	C.hfl_model_free(m.lib.l, m.model)
	m.model = nil
}

// Info describes the model.
func (m *Model) Info() ModelInfo { return m.info }

// Adapter is a loaded adapter of a model. It lives as long as the model.
type Adapter struct{ adapter unsafe.Pointer }

// LoadAdapter loads a LoRA adapter from a GGUF file.
func (m *Model) LoadAdapter(path string) (*Adapter, error) {
	file := C.CString(path)
	defer C.free(unsafe.Pointer(file))
	p := C.hfl_adapter_load(m.lib.l, m.model, file)
	if p == nil {
		return nil, fmt.Errorf("engine: adapter %s: %s: %w", path, words(), txn.ErrUnsupported)
	}
	return &Adapter{p}, nil
}

// Tokenize gives the tokens of a text, control tokens in it included, and those that begin a prompt if it does. ErrUnsupported if the
// model has no tokenizer.
func (m *Model) Tokenize(text string, begins bool) ([]int32, error) {
	if !m.info.Text {
		return nil, fmt.Errorf("engine: model %q has no tokenizer: %w", m.info.Name, txn.ErrUnsupported)
	}
	if len(text) > math.MaxInt32-16 {
		return nil, fmt.Errorf("engine: a text of %d bytes: %w", len(text), txn.ErrTooLarge)
	}
	tokens := make([]int32, len(text)+16) // more than a token a byte there are not, but for the first and the last one
	first := C.int(0)
	if begins {
		first = 1
	}
	s := C.CString(text)
	defer C.free(unsafe.Pointer(s))
	n := C.hfl_tokenize(m.lib.l, m.model, s, C.int32_t(len(text)), (*C.int32_t)(&tokens[0]), C.int32_t(len(tokens)), first)
	if n < 0 {
		return nil, fmt.Errorf("engine: a text of %d bytes became %d tokens: %w", len(text), -n, txn.ErrTooLarge)
	}
	return tokens[:n], nil
}

// Piece gives the text of a token, which may be a part of a character.
func (m *Model) Piece(token int32) (string, error) {
	if !m.info.Text {
		return "", fmt.Errorf("engine: model %q has no tokenizer: %w", m.info.Name, txn.ErrUnsupported)
	}
	var buf [256]byte
	n := C.hfl_piece(m.lib.l, m.model, C.int32_t(token), (*C.char)(unsafe.Pointer(&buf[0])), C.int32_t(len(buf)))
	if n < 0 {
		return "", fmt.Errorf("engine: token %d has a text of %d bytes: %w", token, -n, txn.ErrTooLarge)
	}
	return string(buf[:n]), nil
}

// IsEnd reports whether the token ends a response.
func (m *Model) IsEnd(token int32) bool {
	return m.info.Text && C.hfl_is_end(m.lib.l, m.model, C.int32_t(token)) != 0
}

// Context holds the state of one sequence. After a Decode or SetState that failed it is empty.
type Context struct {
	model   *Model
	context unsafe.Pointer
	options ContextOptions
}

// NewContext makes an empty context.
func (m *Model) NewContext(o ContextOptions) (*Context, error) {
	for _, n := range []struct {
		field string
		value int
	}{{"Tokens", o.Tokens}, {"Batch", o.Batch}, {"Sequences", o.Sequences}, {"Threads", o.Threads}} {
		if n.value < 1 || n.value > 1<<24 {
			return nil, fmt.Errorf("engine: ContextOptions.%s is %d: want 1…%d: %w", n.field, n.value, 1<<24, txn.ErrInvalid)
		}
	}
	if o.Tokens > math.MaxInt32/o.Sequences {
		return nil, fmt.Errorf("engine: %d sequences of %d tokens: more than %d: %w", o.Sequences, o.Tokens, math.MaxInt32, txn.ErrTooLarge)
	}
	p := C.hfl_context_new(m.lib.l, m.model, C.uint32_t(o.Tokens*o.Sequences), C.uint32_t(o.Batch), C.uint32_t(o.Sequences), C.int32_t(o.Threads))
	if p == nil {
		return nil, fmt.Errorf("engine: context of %d tokens: %s: %w", o.Tokens, words(), txn.ErrNoSpace)
	}
	c := &Context{m, p, o}
	if o.Adapter != nil {
		if rc := C.hfl_context_adapter(m.lib.l, p, o.Adapter.adapter); rc != 0 {
			c.Close()
			return nil, fmt.Errorf("engine: the adapter does not go with the context: %d: %s: %w", rc, words(), txn.ErrUnsupported)
		}
	}
	return c, nil
}

// Close frees the context.
func (c *Context) Close() {
	C.hfl_context_free(c.model.lib.l, c.context)
	c.context = nil
}

// Len is the number of tokens of the sequence.
func (c *Context) Len() int { return int(C.hfl_last(c.model.lib.l, c.context)) + 1 }

// Decode adds 1…Batch tokens to the sequence. Logits gives those after the last of them.
func (c *Context) Decode(tokens []int32) error {
	if len(tokens) == 0 || len(tokens) > c.options.Batch {
		return fmt.Errorf("engine: a batch of %d tokens: want 1…%d: %w", len(tokens), c.options.Batch, txn.ErrInvalid)
	}
	for i, t := range tokens {
		if t < 0 || int(t) >= c.model.info.Vocabulary {
			return fmt.Errorf("engine: token %d is %d: the model has 0…%d: %w", i, t, c.model.info.Vocabulary-1, txn.ErrInvalid)
		}
	}
	before := c.Len()
	if before+len(tokens) > c.options.Tokens {
		return fmt.Errorf("engine: %d tokens after %d: the context has room for %d: %w", len(tokens), before, c.options.Tokens, txn.ErrTooLarge)
	}
	batch := (*C.int32_t)(C.malloc(C.size_t(4 * len(tokens))))
	defer C.free(unsafe.Pointer(batch))
	copy(unsafe.Slice((*int32)(batch), len(tokens)), tokens)
	if rc := C.hfl_decode(c.model.lib.l, c.context, batch, C.int32_t(len(tokens))); rc != 0 {
		c.Clear()
		return fmt.Errorf("engine: decode of %d tokens after %d: %d: %s: %w", len(tokens), before, rc, words(), txn.ErrIO)
	}
	return nil
}

// Logits gives a copy of the logits after the last token that was decoded: one number for each token of the vocabulary.
func (c *Context) Logits() ([]float32, error) {
	p := C.hfl_logits(c.model.lib.l, c.context)
	if p == nil {
		return nil, fmt.Errorf("engine: nothing was decoded: no logits: %w", txn.ErrNotFound)
	}
	return slices.Clone(unsafe.Slice((*float32)(p), c.model.info.Vocabulary)), nil
}

// State gives a copy of the sequence's state, or of the part of it, in the library's own format.
func (c *Context) State(part Part) ([]byte, error) {
	size := C.hfl_state_size(c.model.lib.l, c.context, C.uint32_t(part))
	state := make([]byte, size)
	if size == 0 {
		return state, nil
	}
	if n := C.hfl_state_get(c.model.lib.l, c.context, unsafe.Pointer(&state[0]), size, C.uint32_t(part)); n != size {
		return nil, fmt.Errorf("engine: state of %d bytes: got %d: %s: %w", size, n, words(), txn.ErrIO)
	}
	return state, nil
}

// SetState puts a state in the place of the sequence's. The library checks its shape and none of its content: it is for bytes that
// have been checked. A state that it refuses is ErrInvalid.
func (c *Context) SetState(part Part, state []byte) error {
	if len(state) == 0 {
		return fmt.Errorf("engine: an empty state: %w", txn.ErrInvalid)
	}
	if n := C.hfl_state_set(c.model.lib.l, c.context, unsafe.Pointer(&state[0]), C.size_t(len(state)), C.uint32_t(part)); n != C.size_t(len(state)) {
		c.Clear()
		return fmt.Errorf("engine: state of %d bytes: the library took %d: %s: %w", len(state), n, words(), txn.ErrInvalid)
	}
	return nil
}

// Cut removes the tokens from position from on. False if the state cannot be cut there: nothing is changed then.
func (c *Context) Cut(from int) bool {
	return C.hfl_cut(c.model.lib.l, c.context, C.int32_t(from)) != 0
}

// Clear empties the sequence.
func (c *Context) Clear() { C.hfl_clear(c.model.lib.l, c.context) }
