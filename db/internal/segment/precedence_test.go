package segment

import (
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// A write waits for a read that is under way, but not for one that takes too long, and stays small for a moment after it.
func TestWritesMakeWayForReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p precedence
		require.EqualValues(t, math.MaxInt64, p.giveWay(), "without reads a write is as large as it comes")

		start := time.Now()
		p.begin()
		go func() {
			time.Sleep(giveWayMax / 2)
			p.end()
		}()
		require.EqualValues(t, writeBesideReads, p.giveWay())
		require.Equal(t, giveWayMax/2, time.Since(start), "it waits for the read, and no longer")

		start = time.Now()
		require.EqualValues(t, writeBesideReads, p.giveWay(), "there was a read a moment ago")
		require.Zero(t, time.Since(start))

		p.begin()
		require.EqualValues(t, writeBesideReads, p.giveWay())
		require.Equal(t, giveWayMax, time.Since(start), "a read that hangs holds nobody up for ever")
		p.end()

		time.Sleep(readRecent)
		require.EqualValues(t, math.MaxInt64, p.giveWay())
	})
}

func TestFrontOfBuffers(t *testing.T) {
	a, b, c := make([]byte, 2*blockBytes), make([]byte, blockBytes), make([]byte, 3*blockBytes)
	for _, x := range []struct {
		n    int64
		want []int
	}{
		{math.MaxInt64, []int{2, 1, 3}}, {6 * blockBytes, []int{2, 1, 3}}, {5 * blockBytes, []int{2, 1, 2}}, {3 * blockBytes, []int{2, 1}},
		{2 * blockBytes, []int{2}}, {blockBytes, []int{1}},
	} {
		var got []int
		for _, p := range front([][]byte{a, b, c}, x.n) {
			got = append(got, len(p)/int(blockBytes))
		}
		require.Equal(t, x.want, got, "%d bytes", x.n)
	}
}
