package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/gguf"
	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/server"
	"github.com/holdfast-db/holdfast/db"
	"github.com/holdfast-db/holdfast/txn"
)

// libraryVariable is the default of --lib.
const libraryVariable = "HOLDFAST_LLAMA_LIB"

// byteSize is a size flag: 4096, 64KiB, 1.5GiB.
type byteSize int64

// Set parses a size.
func (b *byteSize) Set(s string) error {
	n, err := humanize.ParseBytes(s)
	if err != nil || n > 1<<62 {
		return fmt.Errorf("size %.40q: want a number of bytes such as 4096, 64KiB or 1.5GiB: %w", s, txn.ErrInvalid)
	}
	*b = byteSize(n)
	return nil
}

// String writes the size.
func (b *byteSize) String() string { return humanize.IBytes(uint64(*b)) }

// Type names the value in help texts.
func (b *byteSize) Type() string { return "size" }

// serveOptions are the flags of the server.
type serveOptions struct {
	server.Options
	listen      string
	ram, disk   byteSize
	writePolicy string
	grace       time.Duration
	slowWrites  time.Duration
	supersede   time.Duration
	verbose     bool
}

func newRootCommand() *cobra.Command {
	o := serveOptions{
		Options: server.Options{
			Library: os.Getenv(libraryVariable), ContextTokens: server.DefaultContextTokens, Batch: server.DefaultBatch, Threads: 1, Sequences: 1,
			Slots: 1, ReuseLive: true,
		},
		listen: "127.0.0.1:8080", ram: 1 << 30, writePolicy: "write-through", grace: 10 * time.Second,
	}
	c := &cobra.Command{
		Use:   "llamaserve --lib FILE --model FILE [--dir DIR]",
		Short: "Serve a GGUF model with llama.cpp and keep its state in Holdfast",
		Long: `Llamaserve answers POST /v1/completions with a model that llama.cpp runs on the
processor. It loads libllama.so at run time: any that is installed, or the one
that 'npm ci --ignore-scripts' in cmd/llamaserve fetches. With --dir the state
of every prompt and response is a checkpoint in a Holdfast database, and a later
request, also after a crash, goes on from the longest one that is a prefix of
its prompt. Without it everything is computed.

Once it listens it writes one line of JSON with the address to standard output.
SIGTERM or SIGINT ends it within --grace: running requests end, what is in RAM
only is written, and a line of JSON says what was done. A second one ends it at
once, which loses nothing under write-through.

Exit status:
  0  ended by a signal, in order
  2  a flag, an argument or a file is wrong
  3  the engine, the database or the operating system gave an error`,
		Example: `  # a tiny random model, to try it out
  llamaserve model llama tiny.gguf
  llamaserve --lib node_modules/@node-llama-cpp/linux-x64/bins/linux-x64 --model tiny.gguf --dir ./checkpoints

  curl -d '{"prompt": [1, 2, 3, 4], "max_tokens": 8}' 127.0.0.1:8080/v1/completions`,
		Args:          cobra.NoArgs,
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE: func(c *cobra.Command, _ []string) error {
			return serve(c.Context(), &o, c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	f := c.Flags()
	f.SortFlags = false
	f.StringVar(&o.listen, "listen", o.listen, "`ADDRESS` to listen on; port 0 lets the system choose")
	o.addEngineFlags(f)
	f.IntVar(&o.Slots, "slots", o.Slots, "`N` requests compute at the same time, each in a context of its own")
	f.BoolVar(&o.ReuseLive, "reuse-live", o.ReuseLive, "go on from what a context still holds, where that is longer than what is stored")
	f.StringVar(&o.Dir, "dir", o.Dir, "directory of the Holdfast database (default: none, everything is computed)")
	f.Var(&o.ram, "ram", "size of the RAM tier")
	f.Var(&o.disk, "disk", "size of the disk tier, 0 = unbounded")
	f.StringVar(&o.writePolicy, "write-policy", o.writePolicy, "`WHEN` pages go to disk: write-through, on-evict, on-reuse, never")
	f.DurationVar(&o.supersede, "supersede-grace", o.supersede, "how long a superseded checkpoint that a later one went on from keeps its place, negative = not at all (default 5m0s)")
	f.DurationVar(&o.grace, "grace", o.grace, "how long an orderly end may take")
	f.BoolVarP(&o.verbose, "verbose", "v", o.verbose, "log every request")
	f.BoolVar(&o.LogitsOut, "allow-logits", o.LogitsOut, "answer requests for logits; for tests")
	f.DurationVar(&o.slowWrites, "slow-writes", o.slowWrites, "make every write of pages take so much longer; for tests")
	c.AddCommand(newModelCommand(), newMeasureCommand())
	return c
}

// addEngineFlags adds the flags that choose the engine and the model.
func (o *serveOptions) addEngineFlags(f *pflag.FlagSet) {
	f.StringVar(&o.Library, "lib", o.Library, "libllama.so, or the directory that holds it (default: $"+libraryVariable+")")
	f.StringVar(&o.Model, "model", o.Model, "GGUF `FILE`")
	f.StringVar(&o.Adapter, "lora", o.Adapter, "LoRA adapter, GGUF `FILE`")
	f.IntVar(&o.ContextTokens, "context", o.ContextTokens, "the longest sequence, in tokens")
	f.IntVar(&o.Batch, "batch", o.Batch, "tokens of a batch of the prefill")
	f.IntVar(&o.Threads, "threads", o.Threads, "threads of the engine")
	f.IntVar(&o.Sequences, "n-seq-max", o.Sequences, "sequences that a context is made for; only one of them is used")
	f.IntVar(&o.PageTokens, "page-tokens", o.PageTokens, "tokens of a page, 0 = as many as make about 64 KiB")
}

// complete checks the flags and fills the options of the server.
func (o *serveOptions) complete(stderr io.Writer) (*slog.Logger, error) {
	switch {
	case o.Library == "":
		return nil, fmt.Errorf("--lib is missing, and %s is not set: want libllama.so or its directory: %w", libraryVariable, txn.ErrInvalid)
	case o.Model == "":
		return nil, fmt.Errorf("--model is missing: want a GGUF file, such as 'llamaserve model' writes: %w", txn.ErrInvalid)
	case o.grace < 0 || o.grace > time.Hour:
		return nil, fmt.Errorf("--grace is %v: want 0…1h: %w", o.grace, txn.ErrInvalid)
	}
	policy, err := db.ParseWritePolicy(o.writePolicy)
	if err != nil {
		return nil, err
	}
	level := slog.LevelWarn
	if o.verbose {
		level = slog.LevelInfo
	}
	o.Logger = slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: level}))
	o.Database = db.Options{RAMBytes: int64(o.ram), DiskBytes: int64(o.disk), WritePolicy: policy, SupersedeGrace: o.supersede, Logger: o.Logger}
	if o.slowWrites > 0 {
		o.Database.Faults = &db.Faults{SlowWrites: 1, Delay: o.slowWrites}
	}
	return o.Logger, nil
}

// listening is the line that says that requests are welcome.
type listening struct {
	Listening string `json:"listening"`
	Model     string `json:"model"`
	Engine    string `json:"engine"`
}

// stopped is the line at the end.
type stopped struct {
	Stopped server.ShutdownReport `json:"stopped"`
}

func serve(ctx context.Context, o *serveOptions, stdout, stderr io.Writer) error {
	log, err := o.complete(stderr)
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", o.listen)
	if err != nil {
		return fmt.Errorf("listen on %s: %w: %w", o.listen, err, txn.ErrIO)
	}
	defer listener.Close()
	s, err := server.Open(ctx, o.Options)
	if err != nil {
		return err
	}
	h := &http.Server{Handler: s.Handler(), ReadHeaderTimeout: 10 * time.Second, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn)}
	failed := make(chan error, 1)
	go func() { failed <- h.Serve(listener) }()
	out := json.NewEncoder(stdout)
	log.Info("serving", s.Describe()...)
	if err := out.Encode(listening{listener.Addr().String(), s.ModelName(), s.Identity().Engine}); err != nil {
		log.Warn("nobody reads standard output", "err", err)
	}
	select {
	case err = <-failed:
		err = fmt.Errorf("serving %s: %w: %w", listener.Addr(), err, txn.ErrIO)
	case <-ctx.Done():
	}
	end, cancel := context.WithTimeout(context.Background(), o.grace)
	defer cancel()
	report := s.Shutdown(end)
	// What is still open are idle connections, and answers on their way out.
	if h.Shutdown(end) != nil {
		h.Close()
	}
	if encoded := out.Encode(stopped{report}); encoded != nil {
		log.Warn("nobody reads standard output", "err", encoded)
	}
	if report.Error != "" {
		err = errors.Join(err, fmt.Errorf("closing the database: %s: %w", report.Error, txn.ErrIO))
	}
	return err
}

func newModelCommand() *cobra.Command {
	o := gguf.Options{Seed: 1}
	c := &cobra.Command{
		Use:   "model ARCHITECTURE FILE",
		Short: "Write a tiny model of random weights",
		Long: `Model writes a GGUF file of about a million random weights. It says nothing
sensible; its state has the shape that the state of a real model has.

Architectures: ` + strings.Join(gguf.Architectures(), ", "),
		Args:      cobra.ExactArgs(2),
		ValidArgs: gguf.Architectures(),
		RunE: func(c *cobra.Command, args []string) error {
			f, err := gguf.Tiny(args[0], o)
			if err != nil {
				return err
			}
			return f.Write(args[1])
		},
	}
	c.Flags().Uint64Var(&o.Seed, "seed", o.Seed, "`SEED` of the weights")
	c.Flags().BoolVar(&o.Text, "text", o.Text, "with a tokenizer, so that prompts can be texts")
	return c
}
