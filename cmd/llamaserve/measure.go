package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/gguf"
	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/server"
	"github.com/holdfast-db/holdfast/db"
	"github.com/holdfast-db/holdfast/txn"
)

// measureOptions are the flags of measure.
type measureOptions struct {
	serveOptions
	arch         string
	turns        int
	instruction  int
	userTokens   int
	answerTokens int
	seed         uint64
	asJSON       bool
}

// turn is one line of the result.
type turn struct {
	Turn         int     `json:"turn"`
	Restarted    bool    `json:"restarted"` // the process that held the database ended before this turn
	Prompt       int     `json:"prompt_tokens"`
	Cached       int     `json:"cached_tokens"`
	Computed     int     `json:"computed_tokens"` // of the prompt
	FirstMS      float64 `json:"first_token_ms"`
	BareFirstMS  float64 `json:"first_token_ms_without"`
	StoredBytes  int64   `json:"stored_bytes"` // of new pages, at the ends of prompt and response
	StateBytes   int64   `json:"state_bytes"`  // of whole states at the same places
	SameResponse bool    `json:"same_response"`
}

// measured is the result.
type measured struct {
	Model       string  `json:"model"`
	PageTokens  int     `json:"page_tokens"`
	Turns       []turn  `json:"turns"`
	Prompt      int     `json:"prompt_tokens"`
	Cached      int     `json:"cached_tokens"`
	Computed    int     `json:"computed_tokens"`
	FirstMS     float64 `json:"first_token_ms"` // sum over the turns
	BareFirstMS float64 `json:"first_token_ms_without"`
	Stored      int64   `json:"stored_bytes"`
	State       int64   `json:"state_bytes"`
}

func newMeasureCommand() *cobra.Command {
	o := measureOptions{
		serveOptions: serveOptions{
			Options: server.Options{Library: os.Getenv(libraryVariable), ContextTokens: server.DefaultContextTokens, Batch: server.DefaultBatch, Threads: 1, Sequences: 1, Slots: 1},
			ram:     1 << 30, writePolicy: "write-through", grace: time.Minute,
		},
		arch: "qwen35", turns: 8, instruction: 600, userTokens: 200, answerTokens: 32, seed: 1,
	}
	c := &cobra.Command{
		Use:   "measure",
		Short: "Have a conversation with and without Holdfast, and compare",
		Long: `Measure has one conversation of several turns twice: once everything is computed,
once what Holdfast has is restored, with nothing kept in the engine between the
turns. Before the last turn the database is closed and opened again, with a new
engine. It tells tokens computed, time to the first token and bytes stored.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return measure(c.Context(), &o, c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	f := c.Flags()
	f.SortFlags = false
	o.addEngineFlags(f)
	f.StringVar(&o.arch, "arch", o.arch, "without --model: `ARCHITECTURE` of a tiny random one")
	f.IntVar(&o.turns, "turns", o.turns, "`N` turns")
	f.IntVar(&o.instruction, "instruction", o.instruction, "tokens of the instruction at the beginning")
	f.IntVar(&o.userTokens, "user", o.userTokens, "tokens that each turn adds")
	f.IntVar(&o.answerTokens, "answer", o.answerTokens, "tokens of each response")
	f.Uint64Var(&o.seed, "seed", o.seed, "`SEED` of the tokens")
	f.BoolVar(&o.asJSON, "json", o.asJSON, "write JSON")
	return c
}

func measure(ctx context.Context, o *measureOptions, stdout, stderr io.Writer) error {
	if o.turns < 2 || o.instruction < 1 || o.userTokens < 1 || o.answerTokens < 1 {
		return fmt.Errorf("measure: want at least 2 turns and 1 token of each kind: %w", txn.ErrInvalid)
	}
	if last := o.instruction + o.turns*(o.userTokens+o.answerTokens); last > o.ContextTokens {
		return fmt.Errorf("measure: %d turns have %d tokens: the context has room for %d: %w", o.turns, last, o.ContextTokens, txn.ErrTooLarge)
	}
	work, err := os.MkdirTemp("", "llamaserve-measure-")
	if err != nil {
		return fmt.Errorf("measure: %w: %w", err, txn.ErrIO)
	}
	defer os.RemoveAll(work)
	if o.Model == "" {
		f, err := gguf.Tiny(o.arch, gguf.Options{Seed: 1})
		if err != nil {
			return err
		}
		o.Model = filepath.Join(work, "model.gguf")
		if err := f.Write(o.Model); err != nil {
			return err
		}
	}
	if _, err := o.complete(stderr); err != nil {
		return err
	}
	o.Logger = slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	o.ReuseLive = false
	bare, err := o.converse(ctx, "", nil)
	if err != nil {
		return err
	}
	kept, err := o.converse(ctx, filepath.Join(work, "checkpoints"), bare.answers)
	if err != nil {
		return err
	}
	out := measured{Model: kept.model, PageTokens: kept.pageTokens}
	for i, t := range kept.turns {
		t.BareFirstMS = bare.turns[i].FirstMS
		out.Turns = append(out.Turns, t)
		out.Prompt, out.Cached, out.Computed = out.Prompt+t.Prompt, out.Cached+t.Cached, out.Computed+t.Computed
		out.FirstMS, out.BareFirstMS = out.FirstMS+t.FirstMS, out.BareFirstMS+t.BareFirstMS
		out.Stored, out.State = out.Stored+t.StoredBytes, out.State+t.StateBytes
	}
	if o.asJSON {
		return json.NewEncoder(stdout).Encode(out)
	}
	out.print(stdout)
	return nil
}

// conversation is one run of it.
type conversation struct {
	model      string
	pageTokens int
	turns      []turn
	answers    [][]int32
}

// converse has the conversation. With answers, the next turn goes on from these, so that two runs have the same prompts.
func (o *measureOptions) converse(ctx context.Context, dir string, answers [][]int32) (c *conversation, err error) {
	c = &conversation{}
	options := o.Options
	options.Dir = dir
	var s *server.Service
	open := func() error {
		var err error
		s, err = server.Open(ctx, options)
		return err
	}
	stop := func() error {
		end, cancel := context.WithTimeout(context.Background(), o.grace)
		defer cancel()
		if report := s.Shutdown(end); report.Error != "" {
			return fmt.Errorf("measure: %s: %w", report.Error, txn.ErrIO)
		}
		return nil
	}
	if err := open(); err != nil {
		return nil, err
	}
	defer func() {
		if s == nil {
			return
		}
		if stopped := stop(); err == nil {
			err = stopped
		}
	}()
	c.model, c.pageTokens = s.ModelName(), s.Pages().Tokens
	vocabulary := int32(s.Pages().Shape().Vocabulary)
	r := rand.New(rand.NewPCG(o.seed, 2))
	more := func(tokens []int32, n int) []int32 {
		for range n {
			tokens = append(tokens, r.Int32N(vocabulary))
		}
		return tokens
	}
	prompt := more(nil, o.instruction)
	for i := range o.turns {
		restarted := i == o.turns-1
		if restarted {
			err := stop()
			s = nil
			if err != nil {
				return nil, err
			}
			if err := open(); err != nil {
				return nil, err
			}
		}
		prompt = more(prompt, o.userTokens)
		a, err := s.Complete(ctx, &server.Request{Tokens: prompt, MaxTokens: o.answerTokens}, nil)
		if err != nil {
			return nil, err
		}
		t := turn{Turn: i + 1, Restarted: restarted, Prompt: a.PromptTokens, Cached: a.Cached, Computed: a.PromptTokens - a.Cached, FirstMS: float64(a.First.Microseconds()) / 1000}
		for _, p := range a.Published {
			if p.Error != "" {
				return nil, fmt.Errorf("measure: a checkpoint at %d was not stored: %s: %w", p.Offset, p.Error, db.ErrIO)
			}
			t.StoredBytes += p.Bytes
			t.StateBytes += int64(p.StateBytes)
		}
		answer := a.Tokens
		if answers != nil {
			t.SameResponse = fmt.Sprint(answer) == fmt.Sprint(answers[i])
			answer = answers[i]
		}
		c.turns, c.answers = append(c.turns, t), append(c.answers, a.Tokens)
		prompt = append(prompt, answer...)
	}
	return c, nil
}

func (m *measured) print(w io.Writer) {
	t := table.NewWriter()
	t.SetStyle(table.StyleLight)
	t.AppendHeader(table.Row{"turn", "prompt", "restored", "computed", "first token, ms", "without, ms", "stored", "whole states", "same response"})
	row := func(name string, prompt, cached, computed int, first, bare float64, stored, state int64, same string) {
		t.AppendRow(table.Row{name, prompt, cached, computed, fmt.Sprintf("%.1f", first), fmt.Sprintf("%.1f", bare), stored, state, same})
	}
	for _, x := range m.Turns {
		name, same := fmt.Sprint(x.Turn), "yes"
		if x.Restarted {
			name += ", restarted"
		}
		if !x.SameResponse {
			same = "no"
		}
		row(name, x.Prompt, x.Cached, x.Computed, x.FirstMS, x.BareFirstMS, x.StoredBytes, x.StateBytes, same)
	}
	t.AppendSeparator()
	row("all", m.Prompt, m.Cached, m.Computed, m.FirstMS, m.BareFirstMS, m.Stored, m.State, "")
	fmt.Fprintf(w, "%s, %d tokens a page\n%s\n", m.Model, m.PageTokens, t.Render())
}
