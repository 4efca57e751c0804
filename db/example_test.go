package db_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/holdfast-db/holdfast/db"
)

// The first two functions are the example of README.md, word for word.

func open(ctx context.Context, dir string) (*db.DB, *db.Namespace, error) {
	ns, err := db.NewNamespace(db.Identity{ // all that decides whether bytes may be used again
		Model: "tiny", Weights: "4f1c6b0e9d2a7358c1e0b4f69a7d83521c0e5b7f", Tokenizer: "bpe-7", Engine: "engine-1.4", DType: "bf16",
		Layout: db.Layout{Ranks: 2, Groups: []db.Group{
			{Name: "attention:kv", Kind: db.Attention, PageBytes: 64 << 10, PageTokens: 16},
			{Name: "recurrent:state", Kind: db.Recurrent, PageBytes: 256 << 10, Pages: 1},
		}},
	})
	if err != nil {
		return nil, nil, err
	}
	store, err := db.Open(ctx, dir, db.Options{RAMBytes: 64 << 20})
	return store, ns, err
}

// serve goes on from the longest checkpoint of the prompt that is there, and publishes the one at its end.
func serve(ctx context.Context, store *db.DB, prompt *db.Sequence, compute func(*db.Slot) []byte) (cached int64, err error) {
	r, err := store.Restore(ctx, prompt, db.LookupOptions{LeaveTokens: 1})
	if err == nil {
		cached = r.Offset() // r.Pages(rank) holds the state of every rank up to here
		r.Release()
	} else if !errors.Is(err, db.ErrNotFound) { // which is an ordinary miss
		return 0, err
	}
	p, err := store.Begin(ctx, db.PublishRequest{Sequence: prompt, Offset: prompt.Len()})
	if err != nil {
		return cached, err
	}
	defer p.Abort() // which does nothing to a checkpoint that is listed
	for rank := range prompt.Namespace().Layout().Ranks {
		slots, err := p.Slots(ctx, rank) // the pages that are not there yet
		for i := 0; err == nil && i < len(slots); i++ {
			_, err = slots[i].Write(compute(slots[i]))
		}
		if err == nil {
			_, err = p.Commit(ctx, rank) // the last rank's lists the checkpoint
		}
		if err != nil {
			return cached, err
		}
	}
	return cached, nil
}

// temporary gives the directory of an example, and what removes it.
func temporary() (dir string, remove func()) {
	parent, err := os.MkdirTemp("", "holdfast-example-")
	if err != nil {
		panic(err)
	}
	return filepath.Join(parent, "checkpoints"), func() { os.RemoveAll(parent) }
}

// must ends an example whose next step would make no sense.
func must(err error) {
	if err != nil {
		panic(err)
	}
}

// computed stands for the engine: bytes that depend on the page.
func computed(s *db.Slot) []byte {
	key := s.Key()
	return bytes.Repeat(key[:1], int(s.Size()))
}

// prompt gives the first n of made-up tokens.
func prompt(n int) []int32 {
	tokens := make([]int32, n)
	for i := range tokens {
		tokens[i] = int32(i * i % 50_000)
	}
	return tokens
}

// A conversation of two turns, with a restart of the process in between.
func ExampleOpen() {
	ctx := context.Background()
	dir, remove := temporary()
	defer remove()

	store, ns, err := open(ctx, dir)
	must(err)
	conversation := ns.NewSequence()
	must(conversation.Append(prompt(1000)))
	cached, err := serve(ctx, store, conversation, computed)
	fmt.Println("first turn:", cached, "of", conversation.Len(), "tokens cached,", err)
	_, err = store.Close(ctx)
	must(err)

	store, _, err = open(ctx, dir)
	must(err)
	must(conversation.Append([]int32{7, 8, 9}))
	cached, err = serve(ctx, store, conversation, computed)
	fmt.Println("second turn:", cached, "of", conversation.Len(), "tokens cached,", err)
	_, err = store.Close(ctx)
	must(err)
	// Output:
	// first turn: 0 of 1000 tokens cached, <nil>
	// second turn: 1000 of 1003 tokens cached, <nil>
}

// Any change of the identity is another namespace, and nothing crosses from one to the other.
func ExampleNewNamespace() {
	id := db.Identity{
		Model: "tiny", Weights: "main", Tokenizer: "bpe-7", Engine: "engine-1.4", DType: "bf16",
		Layout: db.Layout{Ranks: 1, Groups: []db.Group{{Name: "attention:kv", Kind: db.Attention, PageBytes: 4096, PageTokens: 16}}},
	}
	_, err := db.NewNamespace(id)
	fmt.Println(errors.Is(err, db.ErrInvalid), err)

	id.Weights = "unversioned:whatever main is today" // says so, and is never equal to a real revision
	one, err := db.NewNamespace(id)
	must(err)
	id.Tenant = "a customer"
	other, err := db.NewNamespace(id)
	must(err)
	fmt.Println(one.ID() == other.ID())
	// Output:
	// true db: Identity.Weights "main": want 40 or 64 lower-case hex digits, or "unversioned:" and something after it: invalid
	// false
}

// A sequence is hashed while it grows and is kept over the turns of a conversation. A branch shares what came before it.
func ExampleSequence_Fork() {
	ctx := context.Background()
	dir, remove := temporary()
	defer remove()
	store, ns, err := open(ctx, dir)
	must(err)
	defer store.Close(ctx)

	conversation := ns.NewSequence()
	must(conversation.Append(prompt(300)))
	must(conversation.AppendMedia([32]byte{1, 2, 3}, make([]int32, 64))) // an image: its placeholder tokens and its digest
	_, err = serve(ctx, store, conversation, computed)
	must(err)

	retry, err := conversation.Fork(conversation.Len())
	must(err)
	must(retry.Append([]int32{4, 5}))
	cached, err := serve(ctx, store, retry, computed)
	fmt.Println(cached, err)

	earlier, err := conversation.Fork(300)
	must(err)
	must(earlier.AppendMedia([32]byte{9}, make([]int32, 64))) // another image
	cached, err = serve(ctx, store, earlier, computed)
	fmt.Println(cached, err)
	// Output:
	// 364 <nil>
	// 0 <nil>
}

// A copy engine fills the memory of a slot itself. Nothing is visible before the last rank has committed.
func ExampleDB_Begin() {
	ctx := context.Background()
	dir, remove := temporary()
	defer remove()
	store, ns, err := open(ctx, dir)
	must(err)
	defer store.Close(ctx)
	seq := ns.NewSequence()
	must(seq.Append(prompt(64)))

	p, err := store.Begin(ctx, db.PublishRequest{Sequence: seq, Offset: 64, Kind: db.Prompt, Request: "request 17", Meta: []byte("sampler state")})
	must(err)
	for rank := range 2 {
		slots, err := p.Slots(ctx, rank)
		must(err)
		for _, s := range slots {
			s.Filled(int64(copy(s.Buffer(), computed(s))))
		}
		listed, err := p.Commit(ctx, rank)
		must(err)
		_, err = store.Lookup(ctx, seq, db.LookupOptions{})
		fmt.Printf("rank %d: %d slots, listed %t, a miss %t\n", rank, len(slots), listed, errors.Is(err, db.ErrNotFound))
	}

	again, err := store.Begin(ctx, db.PublishRequest{Sequence: seq, Offset: 64, Meta: []byte("sampler state")})
	must(err)
	fmt.Println("again:", again.Listed(), again.Generation() == p.Generation())
	// Output:
	// rank 0: 5 slots, listed false, a miss true
	// rank 1: 5 slots, listed true, a miss false
	// again: true true
}

// Without recurrent state, every page boundary inside a listed checkpoint is restorable.
func ExampleDB_Lookup() {
	ctx := context.Background()
	dir, remove := temporary()
	defer remove()
	store, err := db.Open(ctx, dir, db.Options{RAMBytes: 64 << 20})
	must(err)
	defer store.Close(ctx)
	ns, err := db.NewNamespace(db.Identity{
		Model: "tiny", Weights: "unversioned:example", Tokenizer: "bpe-7", Engine: "engine-1.4", DType: "bf16",
		Layout: db.Layout{Ranks: 1, Groups: []db.Group{{Name: "attention:kv", Kind: db.Attention, PageBytes: 4096, PageTokens: 16}}},
	})
	must(err)
	seq := ns.NewSequence()
	must(seq.Append(prompt(100)))
	_, err = serve(ctx, store, seq, computed)
	must(err)

	for _, o := range []db.LookupOptions{{}, {LeaveTokens: 1}, {MaxOffset: 50}} {
		m, err := store.Lookup(ctx, seq, o)
		fmt.Println(m.Offset, m.Generation.IsZero(), err)
	}
	// Output:
	// 100 false <nil>
	// 96 true <nil>
	// 48 true <nil>
}

// One call restores all ranks. The pages stay where they are until Release.
func ExampleDB_Restore() {
	ctx := context.Background()
	dir, remove := temporary()
	defer remove()
	store, ns, err := open(ctx, dir)
	must(err)
	defer store.Close(ctx)
	seq := ns.NewSequence()
	must(seq.Append(prompt(40)))
	_, err = serve(ctx, store, seq, computed)
	must(err)

	must(seq.Append([]int32{1, 2, 3}))
	r, err := store.Restore(ctx, seq, db.LookupOptions{})
	must(err)
	fmt.Println("tokens:", r.Offset())
	groups := ns.Layout().Groups
	for _, page := range r.Pages(1) {
		fmt.Println("rank 1:", groups[page.Group].Name, page.Position, len(page.Bytes))
	}
	r.Release()
	// Output:
	// tokens: 40
	// rank 1: attention:kv 0 65536
	// rank 1: attention:kv 1 65536
	// rank 1: attention:kv 2 65536
	// rank 1: recurrent:state 0 262144
}

// What is listed, in the order in which it would be evicted.
func ExampleDB_Checkpoints() {
	ctx := context.Background()
	dir, remove := temporary()
	defer remove()
	store, ns, err := open(ctx, dir)
	must(err)
	defer store.Close(ctx)
	seq := ns.NewSequence()
	for range 2 {
		must(seq.Append(prompt(100)))
		_, err = serve(ctx, store, seq, computed)
		must(err)
	}

	for c, err := range store.Checkpoints(ctx) {
		must(err)
		fmt.Println(c.Offset, c.Kind, c.Ranks, c.Pages, c.Durable)
	}
	// Output:
	// 100 prompt 2 8 true
	// 200 prompt 2 14 true
}
