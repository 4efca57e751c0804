package txn

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// Whatever the guess, the answer is the same, the last index that was present when asked about is the answer, and a guess that is
// right costs two questions at most.
func TestDeepestWithAnyGuess(t *testing.T) {
	for last := int64(-1); last < 20; last++ {
		for answer := int64(-1); answer <= last; answer++ {
			for near := int64(NoGuess); near <= last; near++ {
				name := fmt.Sprintf("0…%d, answer %d, guess %d", last, answer, near)
				asked, seen := 0, int64(-1)
				got, err := Deepest(last, near, func(i int64) (bool, error) {
					require.True(t, i >= 0 && i <= last, name)
					asked++
					if i <= answer {
						seen = i
					}
					return i <= answer, nil
				})
				require.NoError(t, err)
				require.Equal(t, answer, got, name)
				require.Equal(t, answer, seen, name)
				if near == answer {
					require.LessOrEqual(t, asked, 2, name)
				}
				require.LessOrEqual(t, asked, 14, name)
			}
		}
	}
	fail := fmt.Errorf("disk: %w", ErrIO)
	for k := range 2 {
		_, err := Deepest(100, 50, func(int64) (bool, error) {
			if k--; k < 0 {
				return false, fail
			}
			return k%2 == 0, nil
		})
		require.ErrorIs(t, err, ErrIO)
	}
}
