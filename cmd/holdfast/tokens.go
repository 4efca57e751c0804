package main

// vocabularyBits sets the range of made-up token ids: 2^17, about what tokenizers of today use.
const vocabularyBits = 17

// appendTokens appends the 512 tokens of the block named id. They are a function of the id alone, so equal ids give
// equal tokens, and different ids differ in nearly all of them: equality of prefixes in the trace is equality of
// prefixes in the database.
func appendTokens(dst []int32, id uint64) []int32 {
	const mask = 1<<vocabularyBits - 1
	words := newWordStream(id, tokenStream)
	for range blockTokens / 2 {
		w := words.next()
		dst = append(dst, int32(w&mask), int32(w>>32&mask))
	}
	return dst
}

// promptTokens gives the tokens of the whole blocks of r, in dst's memory if it is large enough.
func promptTokens(dst []int32, r request) []int32 {
	dst = dst[:0]
	for _, id := range r.Blocks {
		dst = appendTokens(dst, id)
	}
	return dst
}
