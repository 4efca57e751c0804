package main

// model is the kind of model whose checkpoints are replayed.
type model string

const (
	hybridModel    model = "hybrid"    // attention pages and a recurrent state: restorable exactly where a checkpoint was published
	attentionModel model = "attention" // attention pages only: restorable at every page boundary inside a checkpoint
)

// ledger is what the driver knows by itself: every prefix and checkpoint whose publication was acknowledged. From it
// follow what a cache that never forgets would find, and how many bytes there are to write when each is written once.
//
// It grows with the trace: about 16 bytes for a distinct block, and the ids of each distinct checkpoint.
type ledger struct {
	setup       setup
	prefixes    map[uint64]struct{} // digests of all prefixes of whole blocks
	checkpoints map[uint64]request  // by the digest of the whole prompt
	order       []uint64            // keys of checkpoints, in the order of publication
	digests     []uint64            // scratch
}

func newLedger(s setup) *ledger {
	return &ledger{setup: s, prefixes: map[uint64]struct{}{}, checkpoints: map[uint64]request{}}
}

// possible gives the blocks of r that a cache which never forgets would find.
func (l *ledger) possible(r request) int {
	l.digests = prefixDigests(l.digests, r)
	for k := len(l.digests); k > 0; k-- {
		d := l.digests[k-1]
		_, page := l.prefixes[d]
		_, checkpoint := l.checkpoints[d]
		if checkpoint || page && l.setup.Model == attentionModel {
			return k
		}
	}
	return 0
}

// newBytes gives the payload bytes of r's checkpoint that no earlier one had, over all ranks.
func (l *ledger) newBytes(r request) int64 {
	if len(r.Blocks) == 0 {
		return 0
	}
	l.digests = prefixDigests(l.digests, r)
	var n int64
	for _, d := range l.digests {
		if _, ok := l.prefixes[d]; !ok {
			n += l.setup.PageBytes
		}
	}
	if _, ok := l.checkpoints[l.digests[len(l.digests)-1]]; !ok && l.setup.Model == hybridModel {
		n += l.setup.StateBytes
	}
	return n * int64(l.setup.Ranks)
}

// acknowledge enters the checkpoint of r.
func (l *ledger) acknowledge(r request) {
	if len(r.Blocks) == 0 {
		return
	}
	l.digests = prefixDigests(l.digests, r)
	for _, d := range l.digests {
		l.prefixes[d] = struct{}{}
	}
	last := l.digests[len(l.digests)-1]
	if _, ok := l.checkpoints[last]; !ok {
		l.checkpoints[last] = r
		l.order = append(l.order, last)
	}
}

// uniqueBytes gives the payload bytes of everything acknowledged, each page of each rank counted once.
func (l *ledger) uniqueBytes() int64 {
	n := int64(len(l.prefixes)) * l.setup.PageBytes
	if l.setup.Model == hybridModel {
		n += int64(len(l.checkpoints)) * l.setup.StateBytes
	}
	return n * int64(l.setup.Ranks)
}
