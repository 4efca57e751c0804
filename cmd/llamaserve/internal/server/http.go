package server

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/holdfast-db/holdfast/txn"
)

// completionRequest is the body of POST /v1/completions. A field that is not here is refused, because it would be expected to have an
// effect.
type completionRequest struct {
	Model             string          `json:"model"`
	Prompt            json.RawMessage `json:"prompt"` // a text, or an array of token ids
	Parent            string          `json:"parent"`
	Tenant            string          `json:"tenant"`
	MaxTokens         *int            `json:"max_tokens"`
	InstructionTokens int             `json:"instruction_tokens"`
	Temperature       float64         `json:"temperature"`
	Seed              uint64          `json:"seed"`
	Stream            bool            `json:"stream"`
	Logits            bool            `json:"logits"`
}

// Completion is the answer to POST /v1/completions, and, with a part of the fields, each event of a stream of it.
type Completion struct {
	ID       string    `json:"id"`
	Object   string    `json:"object"`
	Created  int64     `json:"created"`
	Model    string    `json:"model"`
	Choices  []Choice  `json:"choices"`
	Usage    *Usage    `json:"usage,omitempty"`
	Holdfast *Holdfast `json:"holdfast,omitempty"`
}

// Choice is the one response of a completion.
type Choice struct {
	Index        int      `json:"index"`
	Text         string   `json:"text"`
	Tokens       []int32  `json:"tokens"`
	FinishReason *string  `json:"finish_reason"`
	Logits       []string `json:"logits,omitempty"` // of each token: base64 of little-endian float32
}

// Usage counts tokens.
type Usage struct {
	PromptTokens     int           `json:"prompt_tokens"`
	CompletionTokens int           `json:"completion_tokens"`
	TotalTokens      int           `json:"total_tokens"`
	Details          PromptDetails `json:"prompt_tokens_details"`
}

// PromptDetails says how many tokens of the prompt were not computed.
type PromptDetails struct {
	CachedTokens int `json:"cached_tokens"`
}

// Holdfast says where they came from, and what was stored.
type Holdfast struct {
	LiveTokens     int         `json:"live_tokens"`     // were in the engine's context
	RestoredTokens int         `json:"restored_tokens"` // came from the database
	ComputedTokens int         `json:"computed_tokens"` // of the prompt
	Path           string      `json:"path"`            // none, live, whole, partial
	From           string      `json:"from,omitempty"`  // generation of the checkpoint
	Error          string      `json:"error,omitempty"` // why the database was of no use
	Published      []Published `json:"published,omitempty"`
	WaitMS         float64     `json:"wait_ms"`
	RestoreMS      float64     `json:"restore_ms"`
	FirstTokenMS   float64     `json:"first_token_ms"`
	TotalMS        float64     `json:"total_ms"`
}

// Handler serves the service over HTTP.
func (s *Service) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/completions", s.serveCompletion)
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]any{"object": "list", "data": []map[string]any{{"id": s.ModelName(), "object": "model", "owned_by": "holdfast"}}})
	})
	mux.HandleFunc("GET /v1/stats", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, http.StatusOK, s.Stats()) })
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) {
		s.mu.Lock()
		draining := s.draining
		s.mu.Unlock()
		if draining {
			writeJSON(w, http.StatusServiceUnavailable, map[string]string{"status": "draining"})
			return
		}
		writeJSON(w, http.StatusOK, map[string]string{"status": "ok"})
	})
	return mux
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(v) // an error is the client's, who is gone
}

// httpStatus gives the status that a class of errors stands for, and its name.
func httpStatus(err error) (status int, kind string) {
	for _, c := range []struct {
		class  error
		status int
		kind   string
	}{
		{txn.ErrInvalid, http.StatusBadRequest, "invalid_request"},
		{txn.ErrTooLarge, http.StatusRequestEntityTooLarge, "too_large"},
		{txn.ErrNotFound, http.StatusNotFound, "not_found"},
		{txn.ErrPermission, http.StatusForbidden, "forbidden"},
		{txn.ErrUnsupported, http.StatusUnprocessableEntity, "unsupported"},
		{txn.ErrBusy, http.StatusServiceUnavailable, "busy"},
		{txn.ErrClosed, http.StatusServiceUnavailable, "shutting_down"},
	} {
		if errors.Is(err, c.class) {
			return c.status, c.kind
		}
	}
	return http.StatusInternalServerError, "internal"
}

func errorBody(err error) any {
	_, kind := httpStatus(err)
	return map[string]any{"error": map[string]string{"type": kind, "message": err.Error()}}
}

func writeError(w http.ResponseWriter, err error) {
	status, _ := httpStatus(err)
	if status == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", "1")
	}
	writeJSON(w, status, errorBody(err))
}

// parse reads the body of a request.
func (s *Service) parse(w http.ResponseWriter, r *http.Request) (c completionRequest, out *Request, err error) {
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, MaxBodyBytes))
	d.DisallowUnknownFields()
	if err := d.Decode(&c); err != nil {
		if tooLarge := (*http.MaxBytesError)(nil); errors.As(err, &tooLarge) {
			return c, nil, fmt.Errorf("server: the body has more than %d bytes: %w", tooLarge.Limit, txn.ErrTooLarge)
		}
		return c, nil, fmt.Errorf("server: the body is no request: %w: %w", err, txn.ErrInvalid)
	}
	if _, err := d.Token(); err != io.EOF {
		return c, nil, fmt.Errorf("server: something follows the request in the body: %w", txn.ErrInvalid)
	}
	if c.Model != "" && c.Model != s.ModelName() {
		return c, nil, fmt.Errorf("server: model %.80q: this server has %q: %w", c.Model, s.ModelName(), txn.ErrNotFound)
	}
	if c.Temperature < 0 || c.Temperature > 100 {
		return c, nil, fmt.Errorf("server: temperature is %v: want 0…100: %w", c.Temperature, txn.ErrInvalid)
	}
	out = &Request{
		Parent: c.Parent, Tenant: c.Tenant, MaxTokens: DefaultMaxTokens, InstructionTokens: c.InstructionTokens,
		Temperature: c.Temperature, Seed: c.Seed, Logits: c.Logits,
	}
	if c.MaxTokens != nil {
		out.MaxTokens = *c.MaxTokens
	}
	switch prompt := bytes.TrimSpace(c.Prompt); {
	case len(prompt) == 0:
		err = fmt.Errorf("server: prompt is missing: %w", txn.ErrInvalid)
	case prompt[0] == '"':
		var text string
		if err = json.Unmarshal(prompt, &text); err == nil {
			out.Tokens, err = s.model.Tokenize(text, c.Parent == "")
		}
	default:
		if err = json.Unmarshal(prompt, &out.Tokens); err != nil {
			err = fmt.Errorf("server: prompt: want a text or an array of token ids: %w: %w", err, txn.ErrInvalid)
		}
	}
	return c, out, err
}

func (s *Service) serveCompletion(w http.ResponseWriter, r *http.Request) {
	c, request, err := s.parse(w, r)
	if err != nil {
		writeError(w, err)
		return
	}
	created := time.Now().Unix()
	event := func(id string, choice Choice) *Completion {
		return &Completion{ID: id, Object: "text_completion", Created: created, Model: s.ModelName(), Choices: []Choice{choice}}
	}
	var text textBuilder
	piece := func(token int32) (string, error) {
		if !s.model.Info().Text {
			return "", nil
		}
		p, err := s.model.Piece(token)
		return text.add(p), err
	}
	var whole strings.Builder
	emit := func(token int32) error {
		part, err := piece(token)
		whole.WriteString(part)
		return err
	}
	if c.Stream {
		stream := &eventStream{w: w}
		emit = func(token int32) error {
			part, err := piece(token)
			if err != nil {
				return err
			}
			return stream.send(event("", Choice{Text: part, Tokens: []int32{token}}))
		}
		a, err := s.Complete(r.Context(), request, emit)
		if err != nil {
			if !stream.begun {
				writeError(w, err)
				return
			}
			stream.send(errorBody(err)) // an error is the client's, who is gone
			return
		}
		last := s.completion(event(a.ID, Choice{Text: text.rest(), Tokens: []int32{}}), a)
		if stream.send(last) == nil {
			stream.done()
		}
		return
	}
	a, err := s.Complete(r.Context(), request, emit)
	if err != nil {
		writeError(w, err)
		return
	}
	whole.WriteString(text.rest())
	tokens := a.Tokens
	if tokens == nil {
		tokens = []int32{}
	}
	writeJSON(w, http.StatusOK, s.completion(event(a.ID, Choice{Text: whole.String(), Tokens: tokens}), a))
}

// completion adds what is known at the end.
func (s *Service) completion(c *Completion, a *Answer) *Completion {
	c.Choices[0].FinishReason = &a.Finish
	for _, logits := range a.Logits {
		b := make([]byte, 0, 4*len(logits))
		for _, v := range logits {
			b = binary.LittleEndian.AppendUint32(b, math.Float32bits(v))
		}
		c.Choices[0].Logits = append(c.Choices[0].Logits, base64.StdEncoding.EncodeToString(b))
	}
	c.Usage = &Usage{PromptTokens: a.PromptTokens, CompletionTokens: len(a.Tokens), TotalTokens: a.PromptTokens + len(a.Tokens), Details: PromptDetails{a.Cached}}
	c.Holdfast = &Holdfast{
		LiveTokens: a.Live, RestoredTokens: a.Restored, ComputedTokens: a.PromptTokens - a.Cached, Path: a.Path, Error: a.CacheError, Published: a.Published,
		WaitMS: milliseconds(a.Wait), RestoreMS: milliseconds(a.Restore), FirstTokenMS: milliseconds(a.First), TotalMS: milliseconds(a.Total),
	}
	if !a.From.IsZero() {
		c.Holdfast.From = a.From.String()
	}
	return c
}

// eventStream writes server-sent events.
type eventStream struct {
	w     http.ResponseWriter
	begun bool
}

func (e *eventStream) send(v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("server: %w: %w", err, txn.ErrInvalid)
	}
	return e.write(b)
}

func (e *eventStream) done() { e.write([]byte("[DONE]")) } // an error is the client's, who is gone

func (e *eventStream) write(data []byte) error {
	if !e.begun {
		e.w.Header().Set("Content-Type", "text/event-stream")
		e.w.Header().Set("Cache-Control", "no-cache")
		e.begun = true
	}
	if _, err := fmt.Fprintf(e.w, "data: %s\n\n", data); err != nil {
		return fmt.Errorf("server: the client is gone: %w: %w", txn.ErrClosed, err)
	}
	if err := http.NewResponseController(e.w).Flush(); err != nil {
		return fmt.Errorf("server: the client is gone: %w: %w", txn.ErrClosed, err)
	}
	return nil
}

// textBuilder puts characters together that tokens have parts of.
type textBuilder struct{ held []byte }

// add gives the text that is whole by now.
func (t *textBuilder) add(piece string) string {
	t.held = append(t.held, piece...)
	n := 0
	for n < len(t.held) && utf8.FullRune(t.held[n:]) {
		_, size := utf8.DecodeRune(t.held[n:])
		n += size
	}
	text := string(bytes.ToValidUTF8(t.held[:n], []byte("\ufffd")))
	t.held = t.held[n:]
	return text
}

// rest gives what is left at the end, which is no whole character.
func (t *textBuilder) rest() string {
	text := string(bytes.ToValidUTF8(t.held, []byte("\ufffd")))
	t.held = nil
	return text
}
