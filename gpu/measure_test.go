package gpu

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

func TestMeasureHost(t *testing.T) { testMeasure(t, hostRig("host", 0), MethodSingle) }

func testMeasure(t *testing.T, r rig, methods ...Method) {
	e := r.open(t, Options{Limits: Limits{Regions: 100}}).engine()
	shapes := []Shape{{4096, 1}, {4096, 20}}
	samples, err := e.Measure(t.Context(), 0, shapes, 2)
	require.NoError(t, err)
	require.Len(t, samples, 4)
	for i, s := range samples {
		require.Equal(t, shapes[i/2], s.Shape)
		require.Equal(t, []Direction{Store, Load}[i%2], s.Direction)
		require.Positive(t, s.Engine)
		require.Len(t, s.Bare, len(methods))
		for _, m := range methods {
			require.Positive(t, s.Bare[m], "%v", m)
		}
	}
	even(t, e)
	require.Empty(t, e.allPinned())
	for _, bad := range [][]Shape{nil, {{0, 1}}, {{1, 0}}, {{1, 101}}, {{1 << 60, 100}}} {
		_, err = e.Measure(t.Context(), 0, bad, 1)
		require.ErrorIs(t, err, txn.ErrInvalid)
	}
}
