package server

import (
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/holdfast-db/holdfast/txn"
)

// sampler chooses the next token: the likeliest one, the first of equals, or at random by a temperature.
type sampler struct {
	temperature float64
	r           *rand.Rand
}

func newSampler(temperature float64, seed uint64) *sampler {
	return &sampler{temperature, rand.New(rand.NewPCG(seed, 0))}
}

// next refuses logits that are no numbers: what follows from them would be as worthless as they are.
func (s *sampler) next(logits []float32) (int32, error) {
	best, sum := 0, 0.0
	for i, v := range logits {
		if math.IsNaN(float64(v)) {
			return 0, fmt.Errorf("server: the engine's logit of token %d is not a number: %w", i, txn.ErrIO)
		}
		if v > logits[best] {
			best = i
		}
	}
	if s.temperature <= 0 {
		return int32(best), nil
	}
	weight := func(v float32) float64 { return math.Exp(float64(v-logits[best]) / s.temperature) }
	for _, v := range logits {
		sum += weight(v)
	}
	at := s.r.Float64() * sum
	for i, v := range logits {
		if at -= weight(v); at < 0 {
			return int32(i), nil
		}
	}
	return int32(best), nil
}
