package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"path/filepath"
	"time"
	"unsafe"

	"github.com/holdfast-db/holdfast/db"
)

const (
	lookupTurnTokens = 512                  // a turn of the conversations that are looked up
	lookupTurns      = 80                   // of each: 40,960 tokens
	lookupTokens     = 40_000               // of the prompts
	lookupPageBytes  = 64                   // pages are there to be counted, not to be read
	lookupLongTokens = 1_000_000            // the long prompt
	lookupBuildMax   = 80 * time.Second     // for building the large namespace
	lookupFew        = 1000                 // checkpoints of the small namespace
	lookupMany       = 1_000_000            // of the large one
	hashBlockBytes   = lookupTurnTokens * 4 // tokens are hashed in blocks of so many bytes, and
	hashPrefixBytes  = 1 + 32               // behind a tag and the digest of what comes before
)

// conversations publishes n checkpoints: conversations of so many turns, each turn two pages of its own. It gives the
// tokens of the last conversation, and how many checkpoints it got done before the time was over.
func (s *benchStore) conversations(ctx context.Context, n, turns int, until time.Time) (tokens []int32, done int, err error) {
	for done < n {
		seq := s.ns.NewSequence()
		tokens = tokens[:0]
		for range turns {
			if done == n || ctx.Err() != nil || time.Now().After(until) {
				return tokens, done, ctx.Err()
			}
			for range lookupTurnTokens {
				tokens = append(tokens, s.random.Int32N(1<<17))
			}
			if err := seq.Append(tokens[len(tokens)-lookupTurnTokens:]); err != nil {
				return nil, done, err
			}
			if _, _, err := s.publish(ctx, seq, db.PublishRequest{}, s.touchSlot); err != nil {
				return nil, done, err
			}
			done++
		}
	}
	return tokens, done, nil
}

// lookups looks sequences up in turns and gives the median latency in microseconds.
func (s *benchStore) lookups(ctx context.Context, sequences []*db.Sequence, n int) (float64, error) {
	samples := make([]float64, n)
	for i := range samples {
		start := time.Now()
		m, err := s.Lookup(ctx, sequences[i%len(sequences)], db.LookupOptions{LeaveTokens: 1})
		samples[i] = float64(time.Since(start).Nanoseconds()) / 1e3
		if err != nil {
			return 0, err
		}
		if m.Offset < lookupTurnTokens {
			return 0, fmt.Errorf("found %d tokens", m.Offset)
		}
	}
	return quantile(samples, 0.5), nil
}

// bareHash is the least that hashing a prompt takes: SHA-256 over its tokens in blocks, each with the digest before it.
func bareHash(tokens []int32) (digest [32]byte) {
	b := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(tokens))), 4*len(tokens))
	var block [hashPrefixBytes + hashBlockBytes]byte
	for len(b) > 0 {
		copy(block[1:], digest[:])
		n := copy(block[hashPrefixBytes:], b)
		digest = sha256.Sum256(block[:hashPrefixBytes+n])
		b = b[n:]
	}
	return digest
}

// benchLookup measures lookups. Every checkpoint has a recurrent state, so it is found exactly where it was published.
func benchLookup(ctx context.Context, b *bench) (rows []benchRow, err error) {
	dir, remove, err := b.scratch("lookup")
	if err != nil {
		return nil, err
	}
	defer remove()
	shape := benchShape{ranks: 1, pageTokens: lookupTurnTokens, pageBytes: lookupPageBytes, stateBytes: lookupPageBytes}
	s, err := b.openStore(ctx, filepath.Join(dir, "db"), shape, db.Options{RAMBytes: 512 << 20, WritePolicy: db.Never})
	if err != nil {
		return nil, err
	}
	defer s.close(&err)
	count := either(b, 65_536, 1024)
	tokens, n, err := s.conversations(ctx, count, lookupTurns, time.Now().Add(lookupBuildMax))
	if err != nil {
		return nil, err
	}
	if len(tokens) < lookupTokens { // the last conversation is cut short: a whole one
		if tokens, _, err = s.conversations(ctx, lookupTurns, lookupTurns, time.Now().Add(lookupBuildMax)); err != nil {
			return nil, err
		}
	}
	tokens = tokens[:lookupTokens]
	warm := s.ns.NewSequence()
	if err := warm.Append(tokens); err != nil {
		return nil, err
	}
	each := either(b, 2000, 500)
	samples := 0
	latencies := []float64{}
	for range either(b, 20, 5) {
		us, err := s.lookups(ctx, []*db.Sequence{warm}, each)
		if err != nil {
			return nil, err
		}
		latencies = append(latencies, us)
		samples += each
	}
	rows = append(rows, valueRow("lookup of 40,000 tokens, hashed before", "µs", quantile(latencies, 0.5), samples, valueAtMost(20)).
		noted("median of %d lookups among %d checkpoints", samples, n))

	turns, err := takeTurns(ctx, either(b, 2*time.Second, 300*time.Millisecond), func() (float64, error) {
		start := time.Now()
		for range 20 {
			seq := s.ns.NewSequence()
			if err := seq.Append(tokens); err != nil {
				return 0, err
			}
			if _, err := s.Lookup(ctx, seq, db.LookupOptions{LeaveTokens: 1}); err != nil {
				return 0, err
			}
		}
		return float64(time.Since(start).Nanoseconds()) / 20e3, nil
	}, func() (float64, error) {
		start := time.Now()
		var all byte
		for range 20 {
			digest := bareHash(tokens)
			all |= digest[0]
		}
		return float64(time.Since(start).Nanoseconds()) / 20e3, digestsAreZero(all == 0)
	})
	if err != nil {
		return rows, err
	}
	rows = append(rows, ratioRow("lookup of 40,000 tokens with hashing", "µs", "SHA-256 of the same tokens", turns, overReferenceAtMost(30)))

	// Both conversations are known up to a checkpoint just before their end.
	long, err := s.sequence(lookupLongTokens - lookupTurnTokens)
	if err != nil {
		return rows, err
	}
	if _, _, err := s.publish(ctx, long, db.PublishRequest{}, s.touchSlot); err != nil {
		return rows, err
	}
	if err := s.extend(long, lookupTurnTokens); err != nil {
		return rows, err
	}
	forked := s.ns.NewSequence() // known for its first 40,000 tokens only
	if err := forked.Append(tokens); err != nil {
		return rows, err
	}
	if err := s.extend(forked, lookupLongTokens-forked.Len()); err != nil {
		return rows, err
	}
	turns, err = takeTurns(ctx, either(b, 2*time.Second, 300*time.Millisecond), func() (float64, error) {
		return s.lookups(ctx, []*db.Sequence{long}, each)
	}, func() (float64, error) {
		return s.lookups(ctx, []*db.Sequence{warm}, each)
	})
	if err != nil {
		return rows, err
	}
	rows = append(rows, ratioRow("lookup of 1,000,000 tokens", "µs", "of 40,000 tokens", turns, ratioAtMost(1.5)))
	turns, err = takeTurns(ctx, either(b, time.Second, 100*time.Millisecond), func() (float64, error) {
		return s.lookups(ctx, []*db.Sequence{forked}, each/10)
	}, func() (float64, error) {
		return s.lookups(ctx, []*db.Sequence{warm}, each/10)
	})
	if err != nil {
		return rows, err
	}
	rows = append(rows, ratioRow("… of which the first 40,000 are known", "µs", "of 40,000 tokens", turns, goal{}))
	s.close(&err)
	if err != nil {
		return rows, err
	}
	row, err := b.lookupAmongMany(ctx)
	return append(rows, row), err
}

// digestsAreZero is what a reference returns so that what it computed is used.
func digestsAreZero(wrong bool) error {
	if wrong {
		return errors.New("the digests are zero")
	}
	return nil
}

// lookupAmongMany compares lookups in a namespace of many checkpoints with those in one of few.
func (b *bench) lookupAmongMany(ctx context.Context) (row benchRow, err error) {
	sides := []*benchStore{nil, nil}
	counts := []int{either(b, lookupMany, 4*lookupFew), lookupFew}
	var sequences [2][]*db.Sequence
	for i, n := range counts {
		dir, remove, err := b.scratch("lookup")
		if err != nil {
			return row, err
		}
		defer remove()
		shape := benchShape{ranks: 1, pageTokens: lookupTurnTokens, pageBytes: lookupPageBytes, stateBytes: lookupPageBytes}
		s, err := b.openStore(ctx, filepath.Join(dir, "db"), shape, db.Options{RAMBytes: 512 << 20, WritePolicy: db.Never})
		if err != nil {
			return row, err
		}
		sides[i] = s
		defer s.close(&err)
		turns := 20
		var tokens []int32
		if tokens, counts[i], err = s.conversations(ctx, n, turns, time.Now().Add(lookupBuildMax)); err != nil {
			return row, err
		}
		for at := lookupTurnTokens; at <= len(tokens); at += lookupTurnTokens {
			seq := s.ns.NewSequence()
			if err := seq.Append(tokens[:at]); err != nil {
				return row, err
			}
			if err := s.extend(seq, lookupTurnTokens*lookupTurns-int64(at)); err != nil { // what the prompt adds
				return row, err
			}
			sequences[i] = append(sequences[i], seq)
		}
	}
	each := either(b, 2000, 500)
	turns, err := takeTurns(ctx, either(b, 2*time.Second, 300*time.Millisecond), func() (float64, error) {
		return sides[0].lookups(ctx, sequences[0], each)
	}, func() (float64, error) {
		return sides[1].lookups(ctx, sequences[1], each)
	})
	if err != nil {
		return row, err
	}
	row = ratioRow(fmt.Sprintf("lookup among %s checkpoints", count(int64(counts[0]))), "µs", fmt.Sprintf("among %s", count(int64(counts[1]))), turns, ratioAtMost(1.5))
	if want := either(b, lookupMany, 4*lookupFew); counts[0] < want {
		row = row.noted("%d were wanted, and the time for building them was over", want)
	}
	return row, nil
}
