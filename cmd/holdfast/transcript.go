package main

import "slices"

// transcript is the text of a conversation as the generator sees it: not words, but which text follows which, and how
// long each is. Two transcripts that were put together from the same texts give the same block ids up to where they
// part, which is all that a prefix cache can know about them.
//
// The zero transcript is empty. A copy is a branch: adding to one leaves the other as it was.
type transcript struct {
	tokens int64
	blocks []uint64 // ids of the whole blocks; never written to after they are appended
	open   uint64   // digest of everything after the last whole block, seeded by the id before it
}

// add appends the first n tokens of the text named text.
func (t *transcript) add(text uint64, n int64) {
	// Branches share the array of ids. Without spare capacity the first append moves this one to its own.
	t.blocks = slices.Clip(t.blocks)
	for start := int64(0); start < n; {
		take := min(blockTokens-t.tokens%blockTokens, n-start)
		t.open = prefixDigest(prefixDigest(t.open, text), uint64(start)<<16|uint64(take))
		t.tokens += take
		start += take
		if t.tokens%blockTokens == 0 {
			t.blocks = append(t.blocks, t.open)
		}
	}
}
