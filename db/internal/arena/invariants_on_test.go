//go:build invariants

package arena

import (
	"testing"

	"github.com/stretchr/testify/require"
)

const poisonsFreed = true

func TestMisuseOfFreePanics(t *testing.T) {
	a := newArena(t, 1<<20)
	s := alloc(t, a, 64)
	b := s.Bytes()
	keep := alloc(t, a, 64) // keeps the slab
	free(t, a, s)
	require.EqualValues(t, 0xdb, b[0], "a freed slot reads as what it held")
	require.Panics(t, func() { _ = a.Free(s) })
	require.Panics(t, func() { _ = a.Free(Slot{}) })
	free(t, a, keep)
}
