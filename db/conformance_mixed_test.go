package db

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Everything at once: sixteen goroutines that publish, follow, abort, look up, restore, retire, delete and clear over a few
// conversations that share their pages, in tiers that are too small for all of them. Any byte that is wrong is seen, any error
// has to be one that the situation allows, and at the end everything adds up and can be given back.

// mixed is what the goroutines share.
type mixed struct {
	d      *DB
	ranks  int
	seqs   []*Sequence
	mu     sync.Mutex
	gens   []Generation
	books  shelf
	listed atomic.Int64
	reads  atomic.Int64
}

// allowed tells whether an operation may fail like that because of what the others do.
func allowed(err error) bool {
	return err == nil || errors.Is(err, ErrBusy) || errors.Is(err, ErrConflict) || errors.Is(err, ErrNotFound)
}

// step carries out one random operation.
func (m *mixed) step(rng *rand.Rand) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	seq := m.seqs[rng.IntN(len(m.seqs))]
	n := 1 + rng.Int64N(seq.Len())
	if rng.IntN(3) > 0 {
		n = max(n/64*64, 64) // often the same offset as somebody else
	}
	switch k := rng.IntN(100); {
	case k < 40:
		return m.publish(ctx, rng, seq, n)
	case k < 70:
		return m.restore(ctx, rng, seq, n)
	case k < 80:
		_, err := m.d.Lookup(ctx, seq, LookupOptions{MaxOffset: n})
		return err
	case k < 96:
		g, ok := m.any(rng)
		if !ok {
			return nil
		}
		if rng.IntN(2) == 0 {
			return m.d.Retire(ctx, g)
		}
		return m.d.Delete(ctx, g)
	case k < 98:
		_, err := m.d.DropRAM(ctx)
		return err
	default:
		for _, err := range m.d.Checkpoints(ctx) {
			if err != nil {
				return err
			}
		}
		_, err := m.d.Stats()
		return err
	}
}

func (m *mixed) any(rng *rand.Rand) (Generation, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.gens) == 0 {
		return Generation{}, false
	}
	return m.gens[rng.IntN(len(m.gens))], true
}

func (m *mixed) publish(ctx context.Context, rng *rand.Rand, seq *Sequence, n int64) error {
	f, err := seq.Fork(n)
	if err != nil {
		return err
	}
	r := PublishRequest{Sequence: f, Offset: n, Durable: rng.IntN(4) == 0, Kind: CheckpointKind(rng.IntN(5)), Request: fmt.Sprint(rng.IntN(4))}
	if rng.IntN(4) == 0 {
		r.Meta = []byte{byte(rng.IntN(2))}
	}
	p, err := m.d.Begin(ctx, r)
	if err != nil {
		return err
	}
	m.mu.Lock()
	m.books[p.Generation()] = f
	if !slices.Contains(m.gens, p.Generation()) {
		m.gens = append(m.gens, p.Generation())
	}
	m.mu.Unlock()
	defer p.Abort()
	for _, rank := range rng.Perm(m.ranks) {
		if rng.IntN(12) == 0 {
			return p.Abort()
		}
		slots, err := p.Slots(ctx, rank)
		if err != nil {
			return err
		}
		for _, s := range slots {
			if rng.IntN(400) == 0 {
				return p.Abort() // half way
			}
			if _, err := s.Write(content(s.Key(), rank, s.Size())); err != nil {
				return err
			}
		}
		listed, err := p.Commit(ctx, rank)
		if err != nil {
			return err
		}
		if listed {
			m.listed.Add(1)
		}
	}
	return nil
}

func (m *mixed) restore(ctx context.Context, rng *rand.Rand, seq *Sequence, n int64) error {
	r, err := m.d.Restore(ctx, seq, LookupOptions{MaxOffset: n})
	if err != nil {
		return err
	}
	defer r.Release()
	if r.Offset() > n {
		return fmt.Errorf("restored at %d, at most %d was asked for", r.Offset(), n)
	}
	for range 1 + rng.IntN(2) { // what is held stays as it is
		for rank := range m.ranks {
			pages := r.Pages(rank)
			if len(pages) == 0 {
				return errors.New("a restoration without pages")
			}
			for _, p := range pages {
				if !slices.Equal(content(p.Key, rank, int64(len(p.Bytes))), p.Bytes) {
					return fmt.Errorf("wrong bytes: offset %d, rank %d, group %d, page %d", r.Offset(), rank, p.Group, p.Position)
				}
			}
		}
		m.reads.Add(1)
	}
	return nil
}

func TestMixedOperations_PUB04_DED03_DED04(t *testing.T) {
	rounds := 120
	if testing.Short() {
		rounds = 20
	}
	layouts := map[string][]Group{
		"hybrid": {
			{Name: "attention:kv", Kind: Attention, PageBytes: 512, PageTokens: 16},
			{Name: "recurrent:state", Kind: Recurrent, PageBytes: 5000, Pages: 1},
		},
		"attention": {
			{Name: "attention:kv", Kind: Attention, PageBytes: 700, PageTokens: 16},
			{Name: "attention:window", Kind: Attention, PageBytes: 4096, PageTokens: 32, WindowTokens: 64},
		},
	}
	for _, c := range []struct {
		layout string
		o      Options
	}{
		{"hybrid", Options{WritePolicy: WriteThrough, RAMBytes: 512 << 10, DiskBytes: 768 << 10}},
		{"attention", Options{WritePolicy: OnEvict, RAMBytes: 512 << 10, DiskBytes: 1 << 20}},
		{"hybrid", Options{WritePolicy: OnReuse, RAMBytes: 384 << 10}},
		{"attention", Options{WritePolicy: Never, RAMBytes: 512 << 10, DiskBytes: 1 << 20}},
	} {
		t.Run(fmt.Sprintf("%s %v", c.layout, c.o.WritePolicy), func(t *testing.T) {
			const ranks, workers = 2, 16
			c.o.SegmentBytes = 1 << 20
			c.o.AdmissionTimeout = time.Minute
			m := &mixed{d: openDB(t, memoryDir(t), c.o), ranks: ranks, books: shelf{}}
			ns, trunk := testNamespace(t, ranks, layouts[c.layout]...), tokens(1, 320)
			for i := range 6 {
				m.seqs = append(m.seqs, seqOf(t, ns, trunk[:64*(i%4)], tokens(uint64(10+i), 320-64*(i%4))))
			}
			var group sync.WaitGroup
			failed := make(chan error, workers)
			for w := range workers {
				group.Go(func() {
					rng := rand.New(rand.NewPCG(uint64(w), 11))
					for range rounds {
						if err := m.step(rng); !allowed(err) {
							failed <- err
							return
						}
					}
				})
			}
			group.Wait()
			close(failed)
			for err := range failed {
				require.NoError(t, err)
			}
			require.NotZero(t, m.listed.Load())
			require.NotZero(t, m.reads.Load())
			t.Logf("%d listed, %d restorations", m.listed.Load(), m.reads.Load())
			requireIdle(t, m.d)
			m.books.requireListedIsReadable(t, m.d)
			m.d = reopen(t, m.d, c.o.WritePolicy == WriteThrough)
			m.books.requireListedIsReadable(t, m.d)
			requireEmpty(t, m.d)
		})
	}
}
