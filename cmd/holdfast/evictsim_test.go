package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// With room for everything every order finds what the ledger says is possible, and bytes are counted to the last one.
func TestSimulationWithRoomFindsEverything(t *testing.T) {
	for _, m := range []model{hybridModel, attentionModel} {
		s := testSetup(m)
		var requests []request
		for r, err := range generate(3, 300).requests {
			require.NoError(t, err)
			requests = append(requests, r)
		}
		w := workload{"generated", requests}
		l := newLedger(s)
		var possible, asked int64
		for _, r := range requests {
			possible += int64(l.possible(r))
			asked += int64(len(r.Blocks))
			l.acknowledge(r)
		}
		s.Ranks = 1 // of which the simulation knows nothing
		total := w.bytes(s)
		future := newSimFuture(requests, m)
		for _, o := range simOrders() {
			sim := newSimulation(o, s, total, future)
			for _, r := range requests {
				sim.request(r)
			}
			require.Equal(t, possible, sim.hits, "%s, %s", m, o.name)
			require.Equal(t, asked, sim.asked)
			require.EqualValues(t, total, sim.used, "%s, %s", m, o.name)
		}
		full := 100 * float64(possible) / float64(asked)
		require.InDelta(t, full, w.clairvoyant(s, total, future), 1e-9, m)
		small := w.simulate(simOrders()[0], s, total/20, future)
		require.Less(t, small, full, "%s: eviction forgets", m)
		require.GreaterOrEqual(t, w.clairvoyant(s, total/20, future), small, "%s: foresight helps", m)
	}
}

// An evicted checkpoint takes its state and the pages that nobody else has, and leaves the others.
func TestSimulationEvictsWhatIsNotShared(t *testing.T) {
	s := setup{Model: hybridModel, Ranks: 1, PageBytes: 10, StateBytes: 100}
	sim := newSimulation(simOrders()[0], s, 2*100+4*10, nil)
	sim.request(request{Index: 0, Blocks: []uint64{1, 2}})
	sim.request(request{Index: 1, Blocks: []uint64{1, 2, 3}})
	require.EqualValues(t, 2*100+3*10, sim.used)
	require.EqualValues(t, 2, sim.hits)
	sim.request(request{Index: 2, Blocks: []uint64{7}}) // the checkpoint of {1, 2} goes: only its state, its pages are shared
	require.EqualValues(t, 2*100+4*10, sim.used)
	sim.request(request{Index: 3, Blocks: []uint64{1, 2, 3, 4}})
	require.EqualValues(t, 2+3, sim.hits)
}
