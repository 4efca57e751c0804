package server

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/engine"
	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/state"
	"github.com/holdfast-db/holdfast/db"
	"github.com/holdfast-db/holdfast/txn"
)

// Service answers requests. A request goes through these stages:
//
//   - it takes a slot, which is an engine context;
//   - it goes on from the longest of: what is live in the context, and the longest prefix that the database restores;
//   - it computes the rest of the prompt and publishes the checkpoint at its end, and before that one at the end of the
//     instruction part, if it names one;
//   - it computes the response and publishes the checkpoint at its end;
//   - it is answered when all of its checkpoints are listed, or have failed.
//
// The last token of a response is not computed before a later request needs it, so its last checkpoint is one token shorter than the conversation.
// Checkpoints are written to the database beside the computing; only copying the state out of the engine is waited for.
//
// Whatever the database answers, the request is computed: a database that is full, busy or broken makes it slower.
type Service struct {
	options  Options
	logger   *slog.Logger
	lib      *engine.Library
	model    *engine.Model
	pages    *state.Pages
	identity db.Identity
	store    *db.DB // nil: none
	slots    *slots
	recent   *conversations
	counters counters

	publishing context.Context // ends when a shutdown has no time left for publications
	stop       context.CancelFunc
	generating context.Context // ends when a shutdown has no time left for responses
	cut        context.CancelFunc

	mu       sync.Mutex // guards what follows
	draining bool
	running  int
	idle     chan struct{} // closed when draining and running is 0
	sessions []*state.Session
}

// counters of a service. They begin at zero with the process.
type counters struct {
	requests, failed                                       atomic.Int64
	promptTokens, liveTokens, restoredTokens, computed     atomic.Int64
	byLive, byWhole, byPartial, byNothing                  atomic.Int64
	publications, publicationErrors, pageBytes, stateBytes atomic.Int64
	cacheErrors                                            atomic.Int64
}

// Open loads the library and the model, learns what its states look like, and opens the database.
func Open(ctx context.Context, o Options) (opened *Service, err error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	s := &Service{options: o, logger: o.Logger, recent: newConversations(), idle: make(chan struct{})}
	s.publishing, s.stop = context.WithCancel(context.Background())
	s.generating, s.cut = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			s.free()
		}
	}()
	if s.lib, err = engine.Load(o.Library); err != nil {
		return nil, err
	}
	if s.model, err = s.lib.LoadModel(o.Model); err != nil {
		return nil, err
	}
	var adapter *engine.Adapter
	if o.Adapter != "" {
		if adapter, err = s.model.LoadAdapter(o.Adapter); err != nil {
			return nil, err
		}
	}
	for range o.Slots {
		c, err := s.model.NewContext(engine.ContextOptions{Tokens: o.ContextTokens, Batch: o.Batch, Sequences: o.Sequences, Threads: o.Threads, Adapter: adapter})
		if err != nil {
			return nil, err
		}
		if s.pages == nil {
			shape, err := state.Learn(c, s.model.Info())
			if err != nil {
				c.Close()
				return nil, err
			}
			s.pages = state.NewPages(shape, o.PageTokens)
		}
		s.sessions = append(s.sessions, state.NewSession(c, s.pages, o.Batch))
	}
	s.slots = newSlots(append([]*state.Session(nil), s.sessions...))
	if s.identity, err = identity(&o, s.lib, s.model.Info(), s.pages); err != nil {
		return nil, err
	}
	if o.Dir != "" {
		if o.Database.Logger == nil {
			o.Database.Logger = o.Logger
		}
		if s.store, err = db.Open(ctx, o.Dir, o.Database); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// free gives the engine's memory back.
func (s *Service) free() {
	s.stop()
	s.cut()
	for _, session := range s.sessions {
		session.Close()
	}
	if s.model != nil {
		s.model.Close()
	}
}

// Identity is what the namespaces have in common; a tenant is added.
func (s *Service) Identity() db.Identity { return s.identity }

// Pages says how states are cut.
func (s *Service) Pages() *state.Pages { return s.pages }

// ModelName is the name of the model.
func (s *Service) ModelName() string { return s.identity.Model }

// Request of a completion.
type Request struct {
	Tokens            []int32
	Parent            string // id of an earlier answer, after which the tokens come; "" = none
	Tenant            string // what one tenant stored is never found by another
	MaxTokens         int    // 0: the prompt is computed and published, and that is all
	InstructionTokens int    // length of the part at the beginning that many prompts share; a checkpoint is published there
	Temperature       float64
	Seed              uint64
	Logits            bool // give the logits of each token
}

// Answer to a request.
type Answer struct {
	ID           string
	PromptTokens int // those of the parent included
	Tokens       []int32
	Finish       string // length, stop, shutdown
	Logits       [][]float32

	Cached     int    // tokens of the prompt that were not computed: live or restored
	Live       int    // of them, those that were in the context
	Restored   int    // and those that came from the database
	Path       string // none, live, whole, partial: how the context came by them
	From       db.Generation
	CacheError string // why the database was of no use, if that was no ordinary miss
	Published  []Published
	known      bool // From is the checkpoint at the end of the prompt

	Wait    time.Duration // for a slot
	Restore time.Duration // lookup, restore and handing to the engine
	First   time.Duration // from the beginning of the request to its first token
	Total   time.Duration
}

// enter admits a request.
func (s *Service) enter() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining {
		return fmt.Errorf("server: shutting down: %w", txn.ErrClosed)
	}
	s.running++
	return nil
}

func (s *Service) leave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running--; s.draining && s.running == 0 {
		close(s.idle)
	}
}

// Complete answers a request. emit, if not nil, is called with each token as it comes; an error of it ends the request.
func (s *Service) Complete(ctx context.Context, r *Request, emit func(token int32) error) (*Answer, error) {
	if err := s.enter(); err != nil {
		return nil, err
	}
	defer s.leave()
	s.counters.requests.Add(1)
	a, err := s.complete(ctx, r, emit)
	if err != nil {
		s.counters.failed.Add(1)
		return nil, err
	}
	s.counters.promptTokens.Add(int64(a.PromptTokens))
	s.counters.liveTokens.Add(int64(a.Live))
	s.counters.restoredTokens.Add(int64(a.Restored))
	s.counters.computed.Add(int64(a.PromptTokens - a.Cached + len(a.Tokens)))
	map[string]*atomic.Int64{"live": &s.counters.byLive, "whole": &s.counters.byWhole, "partial": &s.counters.byPartial, "none": &s.counters.byNothing}[a.Path].Add(1)
	return a, nil
}

func (s *Service) complete(ctx context.Context, r *Request, emit func(token int32) error) (*Answer, error) {
	begun := time.Now()
	tokens, seq, err := s.prompt(r)
	if err != nil {
		return nil, err
	}
	session, err := s.slots.take(ctx, tokens)
	if err != nil {
		return nil, err
	}
	defer s.slots.give(session)
	a := &Answer{ID: "cmpl-" + rand.Text(), PromptTokens: len(tokens), Path: "none", Wait: time.Since(begun)}
	resuming := time.Now()
	s.resume(ctx, session, seq, tokens, a)
	a.Restore = time.Since(resuming)

	publisher := s.newPublisher(a.ID, a.From)
	err = s.compute(ctx, session, seq, tokens, r, a, publisher, emit, begun)
	a.Published = publisher.wait()
	if err != nil {
		return nil, err
	}
	s.recent.add(&conversation{id: a.ID, tenant: r.Tenant, tokens: append(tokens[:len(tokens):len(tokens)], a.Tokens...), seq: seq})
	a.Total = time.Since(begun)
	return a, nil
}

// prompt gives the tokens of the request, those of its parent included, hashed if there is a database. Both are the caller's own.
func (s *Service) prompt(r *Request) (tokens []int32, seq *db.Sequence, err error) {
	var before []int32
	if r.Parent != "" {
		parent, err := s.recent.find(r.Parent, r.Tenant)
		if err != nil {
			return nil, nil, err
		}
		before = parent.tokens
		if parent.seq != nil {
			if seq, err = parent.seq.Fork(parent.seq.Len()); err != nil {
				return nil, nil, err
			}
		}
	}
	for i, t := range r.Tokens {
		if t < 0 || int(t) >= s.pages.Shape().Vocabulary {
			return nil, nil, fmt.Errorf("server: prompt[%d] is %d: the model has tokens 0…%d: %w", i, t, s.pages.Shape().Vocabulary-1, txn.ErrInvalid)
		}
	}
	tokens = append(before[:len(before):len(before)], r.Tokens...)
	switch room := s.options.ContextTokens - len(tokens); {
	case len(tokens) == 0:
		err = fmt.Errorf("server: an empty prompt: %w", txn.ErrInvalid)
	case r.MaxTokens < 0:
		err = fmt.Errorf("server: max_tokens is %d: want at least 0: %w", r.MaxTokens, txn.ErrInvalid)
	case room < 0 || r.MaxTokens > room+1: // the last one is not computed
		err = fmt.Errorf("server: %d tokens of prompt and up to %d of response: the context has room for %d: %w", len(tokens), r.MaxTokens, s.options.ContextTokens, txn.ErrTooLarge)
	case r.InstructionTokens < 0 || r.InstructionTokens > len(tokens):
		err = fmt.Errorf("server: instruction_tokens is %d: the prompt has %d: %w", r.InstructionTokens, len(tokens), txn.ErrInvalid)
	case r.Logits && !s.options.LogitsOut:
		err = fmt.Errorf("server: logits were not allowed when the server was started: %w", txn.ErrPermission)
	}
	if err != nil || s.store == nil {
		return tokens, nil, err
	}
	if seq != nil {
		return tokens, seq, seq.Append(r.Tokens)
	}
	id := s.identity
	id.Tenant = r.Tenant
	ns, err := db.NewNamespace(id)
	if err != nil {
		return nil, nil, err
	}
	seq = ns.NewSequence()
	return tokens, seq, seq.Append(tokens)
}

// resume brings as much of the prompt into the context as there is. Failing is a miss.
func (s *Service) resume(ctx context.Context, session *state.Session, seq *db.Sequence, tokens []int32, a *Answer) {
	live := 0
	if s.options.ReuseLive {
		live = session.Common(tokens)
	}
	keep := s.keepable(session, live, len(tokens))
	if s.store != nil {
		if err := s.fromStore(ctx, session, seq, tokens, live, keep, a); err == nil {
			return
		} else if !errors.Is(err, db.ErrNotFound) {
			a.CacheError = err.Error()
			s.counters.cacheErrors.Add(1)
			s.logger.Warn("computed without the database", "request", a.ID, "err", err)
		}
	}
	if keep > 0 && session.Trim(keep) {
		a.Live, a.Cached, a.Path = keep, keep, "live"
		return
	}
	session.Reset()
	a.Live, a.Restored, a.Cached, a.Path, a.From, a.known = 0, 0, 0, "none", db.Generation{}, false
}

// keepable gives how many of the live tokens the context can go on from by itself.
func (s *Service) keepable(session *state.Session, live, prompt int) int {
	if live == session.Len() && (live < prompt || session.Logits() != nil) {
		return live
	}
	if shape := s.pages.Shape(); shape.Exact() || shape.Window() > 0 {
		return 0
	}
	return min(live, prompt-1)
}

// fromStore goes on from the database, if it has more than what is live. ErrNotFound if not, and then the session is as it was.
func (s *Service) fromStore(ctx context.Context, session *state.Session, seq *db.Sequence, tokens []int32, live, keep int, a *Answer) error {
	if keep > 0 {
		m, err := s.store.Lookup(ctx, seq, db.LookupOptions{})
		if err != nil {
			return err
		}
		if int(m.Offset) <= keep {
			return fmt.Errorf("server: %d tokens are live: %w", keep, db.ErrNotFound)
		}
	}
	r, err := s.store.Restore(ctx, seq, db.LookupOptions{})
	if err != nil {
		return err
	}
	n, from := int(r.Offset()), r.Generation()
	all := n == len(tokens) && !from.IsZero()
	if n <= keep { // what Lookup found is gone by now
		r.Release()
		return fmt.Errorf("server: %d tokens are live: %w", keep, db.ErrNotFound)
	}
	pages := r.Pages(0)
	if pages == nil {
		return fmt.Errorf("server: the restoration ended at once: %w", db.ErrBusy)
	}
	restored, err := s.pages.Join(pages, n)
	r.Release() // everything was copied
	if err != nil {
		return err
	}
	path := "whole"
	if shape := s.pages.Shape(); n <= live && len(tokens) > 0 && (shape.Window() > 0 || shape.Exact() && shape.TokenBytes() > 0) {
		ok, err := session.RestorePartial(restored)
		if err != nil {
			return err
		}
		if ok {
			path = "partial"
		}
	}
	if path == "whole" {
		if err := session.Restore(restored, tokens[:n]); err != nil {
			return err
		}
	}
	if n == len(tokens) && session.Logits() == nil {
		// The next token's logits are not in the checkpoint: the last token is computed once more.
		n--
		if n == 0 || !session.Trim(n) {
			session.Reset()
			return fmt.Errorf("server: the last token of the prompt cannot be computed once more: %w", db.ErrNotFound)
		}
	}
	a.Path, a.Cached, a.Restored, a.From, a.known = path, n, n, from, all
	return nil
}

// compute computes what is missing of the prompt, and the response.
func (s *Service) compute(ctx context.Context, session *state.Session, seq *db.Sequence, tokens []int32, r *Request, a *Answer, p *publisher, emit func(int32) error, begun time.Time) error {
	if k := r.InstructionTokens; k > session.Len() && k < len(tokens) {
		if err := s.decode(ctx, session, tokens[session.Len():k]); err != nil {
			return err
		}
		p.add(session, seq, db.Instruction)
	}
	if err := s.decode(ctx, session, tokens[session.Len():]); err != nil {
		return err
	}
	// The first token needs nothing but the logits that are there, so it does not wait for the copy of the state.
	stored := a.known
	store := func() {
		if !stored {
			p.add(session, seq, db.Prompt)
		}
		stored = true
	}
	a.Finish = "length"
	sampler := newSampler(r.Temperature, r.Seed)
	for i := range r.MaxTokens {
		logits := session.Logits()
		token, err := sampler.next(logits)
		if err != nil {
			session.Reset()
			return err
		}
		if i == 0 {
			a.First = time.Since(begun)
		}
		a.Tokens = append(a.Tokens, token)
		if r.Logits {
			a.Logits = append(a.Logits, logits)
		}
		if seq != nil {
			if err := seq.Append([]int32{token}); err != nil {
				return err
			}
		}
		if emit != nil {
			err = emit(token)
		}
		store()
		if err != nil {
			return err
		}
		if s.model.IsEnd(token) {
			a.Finish = "stop"
			break
		}
		if s.generating.Err() != nil {
			a.Finish = "shutdown"
			break
		}
		if i+1 == r.MaxTokens {
			break
		}
		if err := s.decode(ctx, session, []int32{token}); err != nil {
			return err
		}
	}
	store()
	if session.Len() > len(tokens) {
		p.add(session, seq, db.Response)
	}
	return nil
}

// decode computes tokens, one batch after the other, until the request ends.
func (s *Service) decode(ctx context.Context, session *state.Session, tokens []int32) error {
	for len(tokens) > 0 {
		if ctx.Err() != nil {
			return fmt.Errorf("server: the request ended: %w: %w", txn.ErrClosed, context.Cause(ctx))
		}
		n := session.NextBatch(len(tokens))
		if err := session.Decode(tokens[:n]); err != nil {
			return err
		}
		tokens = tokens[n:]
	}
	return nil
}

// Stats is a reading of the counters.
type Stats struct {
	Requests          int64     `json:"requests"`
	Failed            int64     `json:"failed"`
	PromptTokens      int64     `json:"prompt_tokens"`
	LiveTokens        int64     `json:"live_tokens"`     // of the prompts, those that were in a context
	RestoredTokens    int64     `json:"restored_tokens"` // and those that came from the database
	ComputedTokens    int64     `json:"computed_tokens"` // responses included
	ByLive            int64     `json:"requests_live"`
	ByWhole           int64     `json:"requests_restored_whole"`
	ByPartial         int64     `json:"requests_restored_partial"`
	ByNothing         int64     `json:"requests_from_nothing"`
	CacheErrors       int64     `json:"cache_errors"` // requests that were computed without the database because it failed
	Publications      int64     `json:"publications"`
	PublicationErrors int64     `json:"publication_errors"`
	PageBytes         int64     `json:"page_bytes"`  // of new pages of all publications
	StateBytes        int64     `json:"state_bytes"` // what they would be as whole states
	Database          *db.Stats `json:"database,omitempty"`
}

// Stats reads the counters.
func (s *Service) Stats() Stats {
	c := &s.counters
	out := Stats{
		Requests: c.requests.Load(), Failed: c.failed.Load(), PromptTokens: c.promptTokens.Load(), LiveTokens: c.liveTokens.Load(),
		RestoredTokens: c.restoredTokens.Load(), ComputedTokens: c.computed.Load(), ByLive: c.byLive.Load(), ByWhole: c.byWhole.Load(),
		ByPartial: c.byPartial.Load(), ByNothing: c.byNothing.Load(), CacheErrors: c.cacheErrors.Load(), Publications: c.publications.Load(),
		PublicationErrors: c.publicationErrors.Load(), PageBytes: c.pageBytes.Load(), StateBytes: c.stateBytes.Load(),
	}
	if s.store != nil {
		if stats, err := s.store.Stats(); err == nil {
			out.Database = &stats
		}
	}
	return out
}

// Describe gives a line about the service, for its log.
func (s *Service) Describe() []any {
	info, shape := s.model.Info(), s.pages.Shape()
	return []any{
		"model", s.identity.Model, "architecture", info.Architecture, "engine", cmp.Or(s.lib.Version(), "unknown"),
		"token_bytes", shape.TokenBytes(), "recurrent_bytes", shape.RecurrentBytes(), "window", shape.Window(), "page_tokens", s.pages.Tokens,
	}
}
