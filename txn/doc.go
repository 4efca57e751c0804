// Package txn is the catalogue of a Holdfast database as a pure, deterministic state machine: transaction records and
// their codec, the state they act on, and the ordering invariants that make "listed means restorable" true. It does no
// I/O and has no clock, goroutine or random source.
//
// # Stages
//
// A caller hands an intent to Decide, which reads the catalogue and answers with a record or a refusal; the record goes
// to the log; Apply turns it into changes of the catalogue. The same Apply runs at commit and at replay. A record
// carries decisions, never intentions: what a policy chose is written down, so replay consults nothing but the record
// and the state before it, and the same log always gives the same bytes (see Hash).
//
// # State
//
// The catalogue is a sorted map of byte strings (View), so that an index on disk, a batch over it and a plain map in a
// test are the same thing to this package. The first byte of a key says what the entry is:
//
//	a                            accounts: totals over everything below
//	b ‖ spine digest             spine node: one block of 512 tokens on the way to a listed checkpoint
//	c ‖ page key ‖ page key      child edge: the second page follows the first in its group's chain
//	e ‖ prefix digest            the generation listed for exactly this prefix
//	g ‖ segment number           live bytes, live pages and recorded end of one segment file
//	h ‖ page key ‖ generation    hold edge: the manifest names this page itself
//	m ‖ generation               manifest; its content never changes
//	n ‖ namespace id             canonical encoding of the namespace
//	o ‖ class ‖ LSN ‖ generation eviction order of listed checkpoints: superseded ones first, then by age
//	p ‖ page key                 page: parent, depth, size, counts, placements
//	q ‖ namespace ‖ request ‖ generation
//	                             listed checkpoint of a serving request, named by the request's digest
//	s ‖ generation               state of a manifest: listed or retired, durable, superseded by whom
//	u ‖ generation               listed and not durable yet: how many of its holds wait for a disk copy
//	v ‖ generation ‖ generation  supersede edge: the first superseded the second
//	w ‖ generation               superseded, and in its time of grace
//	z                            applied LSN, written by the owner of the view with every batch
//
// # Cost follows what is new
//
// The pages of a full-attention group form a chain: the key of page k is a digest of everything before its end, so it
// fixes pages 0…k−1, and a manifest names the last page only. A page entry names its parent and counts what hangs on
// it. Publishing turn 100 of a conversation therefore writes the pages of turn 100 and touches one older page, whatever
// the length of the prompt, and any turn can be retired without touching the others. Lists of fixed position ranges
// (extents) with reference counts were the first design; they cost a list of n/64 digests a publication and rewrite
// a partial tail, the chain costs neither. Window, recurrent and auxiliary pages are few and are named one by one.
//
// The spine is the same structure over blocks of tokens; it answers "which listed checkpoint is the longest prefix of
// this sequence" by a search over depth, because a node is there exactly if its parent is.
//
// # Counts kept and derived
//
// A page counts how many edges hold it (Held) and how many of those lead to a listed manifest (Listed). A page goes when
// Held reaches zero, and can be looked up while Listed is above zero. Current counts the edges that lead to a listed
// manifest that does not go first when room is needed; a page is cool once that is zero. ChainDurable says that the page
// and everything before it have disk copies, so that a manifest's durability is known without reading its pages. Check
// re-derives all of this from the manifests and the parents of the pages; builds with the tag "invariants" do so after
// every record.
package txn
