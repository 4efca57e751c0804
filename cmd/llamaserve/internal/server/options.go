// Package server is a small serving process: requests come in over HTTP, llama.cpp computes, and Holdfast keeps what was computed.
//
// The parts, in the order in which a request meets them:
//
//	http.go           requests and answers as JSON, streaming
//	conversation.go   answers that a later request goes on from
//	slots.go          engine contexts, and who waits for one
//	service.go        the cache policy: look up, restore, compute the rest, publish
//	publish.go        checkpoints on their way into the database
//	identity.go       what decides whether bytes may be used again
//	shutdown.go       the orderly end
package server

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/holdfast-db/holdfast/db"
	"github.com/holdfast-db/holdfast/txn"
)

// Options of Open.
type Options struct {
	Library string // libllama.so, or its directory
	Model   string // GGUF file
	Adapter string // LoRA adapter, GGUF file; "" = none

	ContextTokens int // the longest sequence
	Batch         int // tokens of a batch of the prefill
	Threads       int
	Sequences     int // n_seq_max of the contexts; states of another number are another namespace
	Slots         int // requests that compute at the same time, each in a context of its own
	PageTokens    int // tokens of an attention page, 0 = chosen by size

	ReuseLive bool // go on from what is still in a context, without the database, if that is longer
	LogitsOut bool // give logits in answers that ask for them; for tests

	Dir      string // directory of the database; "" = none, everything is computed
	Database db.Options

	Logger *slog.Logger
}

// Defaults and limits.
const (
	DefaultContextTokens = 4096
	DefaultBatch         = 256
	MaxContextTokens     = 1 << 20
	MaxBatch             = 1 << 14
	MaxThreads           = 256
	MaxSequences         = 256
	MaxSlots             = 64
	MaxQueue             = 256              // requests that wait for a slot
	MaxQueueWait         = 30 * time.Second // and for how long
	MaxBodyBytes         = 32 << 20         // of a request
	MaxConversations     = 1024             // answers that are remembered as parents
	MaxConversationBytes = 64 << 20         // and the tokens of all of them, at 4 bytes each
	MaxPublishWait       = 30 * time.Second // for a checkpoint to be listed
	DefaultMaxTokens     = 16               // of a response
)

func (o *Options) validate() error {
	for _, n := range []struct {
		field      string
		value      int
		least, max int
	}{
		{"ContextTokens", o.ContextTokens, 16, MaxContextTokens},
		{"Batch", o.Batch, 1, MaxBatch},
		{"Threads", o.Threads, 1, MaxThreads},
		{"Sequences", o.Sequences, 1, MaxSequences},
		{"Slots", o.Slots, 1, MaxSlots},
		{"PageTokens", o.PageTokens, 0, db.MaxPageTokens},
	} {
		if n.value < n.least || n.value > n.max {
			return fmt.Errorf("server: Options.%s is %d: want %d…%d: %w", n.field, n.value, n.least, n.max, txn.ErrInvalid)
		}
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	return nil
}
