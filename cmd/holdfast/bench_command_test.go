package main

import (
	"encoding/json"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestRatioOfARowIsTheMedianOfTheTurns(t *testing.T) {
	r := ratioRow("row", "MiB/s", "bare", []turn{{100, 100}, {50, 100}, {30, 10}}, ratioAtLeast(1))
	require.Equal(t, 50.0, r.Value)
	require.Equal(t, 100.0, *r.Reference)
	require.Equal(t, 1.0, *r.Ratio)
	require.Equal(t, 0.75, *r.Low)
	require.Equal(t, 2.0, *r.High)
	require.True(t, r.Reached)
	require.False(t, ratioRow("row", "µs", "bare", []turn{{3, 1}}, ratioAtMost(2)).Reached)
	require.False(t, ratioRow("row", "µs", "bare", nil, ratioAtMost(2)).Reached, "nothing measured")
}

func TestGoalsCompareWhatTheyName(t *testing.T) {
	require.True(t, valueRow("row", "B", 256, 1, valueAtMost(256)).Reached)
	require.False(t, valueRow("row", "B", 257, 1, valueAtMost(256)).Reached)
	require.False(t, valueRow("row", "B", math.NaN(), 1, valueAtMost(256)).Reached)
	require.Equal(t, "value <= 256", valueAtMost(256).String())
	require.Equal(t, "ratio >= 0.95", ratioAtLeast(0.95).String())
}

func TestTurnsAlternateAndTheFirstDoesNotCount(t *testing.T) {
	var order string
	side := func(name string, n float64) func() (float64, error) {
		return func() (float64, error) {
			order += name
			return n, nil
		}
	}
	turns, err := takeTurns(t.Context(), time.Nanosecond, side("A", 2), side("B", 1))
	require.NoError(t, err)
	require.Equal(t, "ABBAABBA", order)
	require.Len(t, turns, turnsMin)
	require.Equal(t, turn{2, 1}, turns[0])
}

func TestRowsHaveTheFieldsOfTheInterface(t *testing.T) {
	r := benchReport{Rows: []benchRow{
		ratioRow("a", "MiB/s", "bare", []turn{{1, 0}}, ratioAtLeast(0.95)), valueRow("b", "B", math.NaN(), 1, valueAtMost(1)),
	}}
	r.finite()
	b, err := json.Marshal(r)
	require.NoError(t, err)
	var got struct{ Rows []map[string]any }
	require.NoError(t, json.Unmarshal(b, &got))
	for _, row := range got.Rows {
		for _, name := range []string{"name", "value", "unit", "reference", "ratio", "goal", "reached"} {
			require.Contains(t, row, name)
		}
		require.Equal(t, false, row["reached"])
	}
}

func TestBenchRefusesAWordThatItDoesNotKnow(t *testing.T) {
	status, stdout, stderr := holdfast(t, "bench", "nonsense")
	require.Equal(t, statusUsage, status)
	require.Empty(t, stdout)
	require.Contains(t, stderr, "the words are")
}
