package db

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/holdfast-db/holdfast/txn"
)

// Generation is the identity of one checkpoint, derived from its content.
type Generation = txn.Generation

// CheckpointKind says what a checkpoint is for. It decides about supersession and is not part of the identity.
type CheckpointKind uint8

// The kinds of checkpoint.
const (
	Prompt      CheckpointKind = 1 // end of a prompt
	Response    CheckpointKind = 2 // end of a response
	PrefillTail CheckpointKind = 3 // inside a long prompt, while it is being computed
	Instruction CheckpointKind = 4 // leading part that many prompts share; never superseded
)

var checkpointKinds = [...]string{Prompt: "prompt", Response: "response", PrefillTail: "prefill-tail", Instruction: "instruction"}

// String gives the kind in lower case.
func (k CheckpointKind) String() string {
	if k == 0 || int(k) >= len(checkpointKinds) {
		return fmt.Sprintf("CheckpointKind(%d)", uint8(k))
	}
	return checkpointKinds[k]
}

// PageSet names the pages of one group by their logical positions, strictly increasing.
type PageSet struct {
	Group     string
	Positions []int64
}

// PublishRequest describes a checkpoint that is to be published.
type PublishRequest struct {
	// Sequence holds the tokens. It may be appended to as soon as Begin has returned.
	Sequence *Sequence
	// Offset is the exact token offset of the checkpoint, 1…Sequence.Len().
	Offset int64
	// Kind is Prompt if zero.
	Kind CheckpointKind
	// Request is the id of the serving request, at most MaxRequestBytes of text.
	Request string
	// Continues names the checkpoint that the computation went on from; zero if there was none.
	Continues Generation
	// Ranks, if not zero, has to equal the number of ranks of the namespace's layout.
	Ranks int
	// Groups lists the pages; nil means what the layout calls for at Offset. A list has to name every group of the layout
	// once, with exactly the positions of the attention pages that a restore at Offset needs, and as many positions of
	// recurrent and auxiliary pages as the layout declares.
	Groups []PageSet
	// Meta is the engine's own, at most MaxMetaBytes. It is part of the identity and comes back with a restore.
	Meta []byte
	// Durable asks that the checkpoint is listed only with a complete and synced disk copy, whatever the write policy.
	Durable bool
	// Owner holds the publication; nil is the process itself.
	Owner *Owner
	// Lease is how long the publication may take, at most MaxLease; 0 is Options.LeaseTimeout.
	Lease time.Duration
}

// Publication is one attempt at publishing a checkpoint: *begun*, its pages claimed; *filled* rank by rank; *listed* by the
// commit of the last rank, or *aborted*. It is safe for concurrent use; ranks may fill and commit in parallel.
//
// A page that is not there yet is claimed by one publication, which gets a slot for it on every rank. Another publication
// that needs the same page follows: it waits, shares the page once it is filled, or takes it over if the first one
// aborts. Followers always began later than whom they follow, so nobody waits in a circle.
type Publication struct {
	db       *DB
	manifest *txn.Manifest
	sequence *Sequence // a fork of the caller's
	layout   Layout
	gen      Generation
	durable  bool
	replay   bool // listed before it began: nothing to write, nothing claimed

	// chains has one entry for each group: how many pages of a chained group the catalogue knew when they were claimed, and the
	// keys of those after them.
	chains []chain

	claims []*page // pinned; not in the catalogue when the publication began
	groups []claim // where in the checkpoint each of them stands
	byKey  map[txn.Key]bool
	lease  lease

	// What is told of it when it ends.
	counted            bool // it began
	whole              measured
	newPages, newBytes int64 // claimed: pages, and their bytes on all ranks
	failed             error // of its final step; with mu

	// ended is cancelled by interrupt when the publication is ended from outside: a commit that waits for the disk, and holds mu
	// meanwhile, waits no longer.
	ended     context.Context
	interrupt context.CancelCauseFunc

	// Guarded by residency.mu.
	bases   map[txn.Key]bool
	custody []*page // pinned; dropped from the catalogue since it began

	mu         longLock // guards what follows; held over the final commit, so that its outcome is known to every caller
	attempt    *txn.Attempt
	slots      map[slotID]*Slot
	listed     bool        // before it began, or by it
	aborted    bool        // by its caller
	done       bool        // listed, failed, aborted or taken back: all pins are given back, but for
	transfers  map[int]int // copies that are not proven finished, by rank, and
	quarantine []*page     // pages that such copies may still be writing; pinned
}

// Bounds of what a publication retries before it gives up with ErrBusy.
const (
	claimTries   = 16
	publishTries = 16
)

// Begin begins a publication: it claims the pages that are not there yet and reserves RAM for them, waiting for room
// until the context ends or the admission timeout is over. The context bounds the publication as well as the wait: when it
// ends, a publication that is not listed is aborted. So do its deadline and the end of its owner.
//
// Errors: ErrInvalid and ErrTooLarge for a request that breaks a rule or a limit, ErrBusy if no room came or too many
// publications are pending, ErrClosed, ErrFenced, ErrIO. Nothing is left behind by a Begin that failed.
func (d *DB) Begin(ctx context.Context, r PublishRequest) (*Publication, error) {
	ctx, whole := d.telemetry.begin(ctx, opPublish)
	ctx, m := d.telemetry.begin(ctx, opBegin)
	p, err := d.begin(ctx, &r, whole)
	if err != nil {
		m.end(err, 0, 0)
		whole.close(err, 0, 0)
		return nil, err
	}
	m.end(nil, p.newPages, p.newBytes)
	return p, nil
}

// begin is Begin. What it gives ends the measuring of the whole.
func (d *DB) begin(ctx context.Context, r *PublishRequest, whole measured) (*Publication, error) {
	if err := d.enterToWrite(ctx); err != nil {
		return nil, err
	}
	defer d.gate.leave()
	length, err := d.leaseLength("PublishRequest.Lease", r.Lease)
	if err != nil {
		return nil, err
	}
	p, err := d.newPublication(r)
	if err != nil {
		d.telemetry.rejected.Add(1)
		return nil, err
	}
	if err := d.pending.add(p); err != nil {
		return nil, err
	}
	if err := p.claimPages(ctx); err != nil || p.listed {
		p.replay = p.listed
		p.finish("refused")
		if err != nil {
			return nil, err
		}
		d.telemetry.replays.Add(1)
		whole.close(nil, 0, 0)
		return p, nil
	}
	p.counted, p.whole = true, whole
	for _, q := range p.claims {
		p.newPages, p.newBytes = p.newPages+1, p.newBytes+q.bytes*int64(p.manifest.Ranks)
	}
	if err := p.lease.begin(ctx, d, r.Owner, p, length); err != nil {
		p.end("refused")
		return nil, err
	}
	return p, nil
}

// Generation is the identity that the checkpoint has or will have.
func (p *Publication) Generation() Generation { return p.gen }

// Listed reports whether this very checkpoint was listed already when the publication began. Then there is nothing to write:
// Slots are empty and Commit does nothing.
func (p *Publication) Listed() bool { return p.replay }

// newPublication checks the request and derives the manifest.
func (d *DB) newPublication(r *PublishRequest) (*Publication, error) {
	if err := checkSequence("PublishRequest.Sequence", r.Sequence); err != nil {
		return nil, err
	}
	length := r.Sequence.Len()
	if r.Offset < 1 || r.Offset > length {
		return nil, fmt.Errorf("db: PublishRequest.Offset is %d: the sequence has offsets 1…%d: %w", r.Offset, length, ErrInvalid)
	}
	if r.Kind == 0 {
		r.Kind = Prompt
	}
	if int(r.Kind) >= len(checkpointKinds) {
		return nil, fmt.Errorf("db: PublishRequest.Kind is %d: want 1…%d: %w", r.Kind, len(checkpointKinds)-1, ErrInvalid)
	}
	if err := checkText("PublishRequest.Request", r.Request, 0, MaxRequestBytes); err != nil {
		return nil, err
	}
	if len(r.Meta) > MaxMetaBytes {
		return nil, fmt.Errorf("db: PublishRequest.Meta has %d bytes: limit %d: %w", len(r.Meta), MaxMetaBytes, ErrTooLarge)
	}
	ns := r.Sequence.Namespace()
	layout := ns.identity.Layout
	if r.Ranks != 0 && r.Ranks != layout.Ranks {
		return nil, fmt.Errorf("db: PublishRequest.Ranks is %d: the namespace has %d: %w", r.Ranks, layout.Ranks, ErrInvalid)
	}
	seq, err := r.Sequence.Fork(r.Offset)
	if err != nil {
		return nil, err
	}
	m := &txn.Manifest{
		Namespace: ns.id, Offset: r.Offset, Prefix: seq.prefix(r.Offset), Ranks: layout.Ranks,
		Meta: slices.Clone(r.Meta), Kind: uint8(r.Kind), Request: r.Request, Continues: r.Continues,
	}
	m.Spine = seq.spine(m.SpineIndex())
	if m.Groups, err = groupPages(seq, layout, r); err != nil {
		return nil, err
	}
	ended, interrupt := context.WithCancelCause(context.Background())
	return &Publication{
		db: d, manifest: m, sequence: seq, mu: newLongLock(), ended: ended, interrupt: interrupt, layout: layout, gen: m.Generation(), durable: r.Durable || d.options.WritePolicy == WriteThrough,
		byKey: map[txn.Key]bool{}, transfers: map[int]int{}, bases: map[txn.Key]bool{}, slots: map[slotID]*Slot{},
	}, nil
}

// groupPages derives the keys of the checkpoint's pages and holds the positions of the request, if it gives any, against
// the layout.
func groupPages(seq *Sequence, layout Layout, r *PublishRequest) ([]txn.GroupPages, error) {
	given := make(map[string][]int64, len(r.Groups))
	for i, s := range r.Groups {
		if _, ok := given[s.Group]; ok {
			return nil, fmt.Errorf("db: PublishRequest.Groups[%d]: group %.80q appears twice: %w", i, s.Group, ErrInvalid)
		}
		given[s.Group] = s.Positions
	}
	if r.Groups != nil && len(r.Groups) != len(layout.Groups) {
		return nil, fmt.Errorf("db: PublishRequest.Groups has %d groups: the layout has %d: %w", len(r.Groups), len(layout.Groups), ErrInvalid)
	}
	groups := make([]txn.GroupPages, len(layout.Groups))
	copies := int64(0)
	for i := range layout.Groups {
		g := &layout.Groups[i]
		first, count := layout.pagesAt(i, r.Offset)
		positions, ok := given[g.Name]
		if r.Groups != nil {
			if !ok {
				return nil, fmt.Errorf("db: PublishRequest.Groups lacks group %q (%s), which a checkpoint at %d requires: %w", g.Name, g.Kind, r.Offset, ErrInvalid)
			}
			if err := checkPositions(g, positions, first, count, r.Offset); err != nil {
				return nil, err
			}
		}
		if copies += count; copies > MaxCheckpointPages {
			return nil, fmt.Errorf("db: a checkpoint at %d has more than %d pages a rank: %w", r.Offset, MaxCheckpointPages, ErrTooLarge)
		}
		out := &groups[i]
		out.PageBytes, out.Count = g.PageBytes, count
		if g.Kind == Attention && g.WindowTokens == 0 {
			out.Chained = true
			out.Head = seq.pageKey(i, count-1, layout.pageEnd(i, count-1, r.Offset))
			continue
		}
		if count > MaxListedPages {
			return nil, fmt.Errorf("db: group %q has %d pages at %d: limit %d for a group that is not full attention: %w", g.Name, count, r.Offset, MaxListedPages, ErrTooLarge)
		}
		if positions == nil {
			positions = make([]int64, count)
			for j := range positions {
				positions[j] = first + int64(j)
			}
		}
		out.Positions, out.Keys = slices.Clone(positions), make([]txn.Key, count)
		for j, at := range positions {
			out.Keys[j] = seq.pageKey(i, at, layout.pageEnd(i, at, r.Offset))
		}
	}
	return groups, nil
}

func checkPositions(g *Group, positions []int64, first, count, offset int64) error {
	if int64(len(positions)) != count {
		return fmt.Errorf("db: PublishRequest.Groups: group %q (%s) lists %d pages: a checkpoint at %d requires %d: %w", g.Name, g.Kind, len(positions), offset, count, ErrInvalid)
	}
	for j, at := range positions {
		switch {
		case at < 0 || at > MaxPosition:
			return fmt.Errorf("db: PublishRequest.Groups: group %q: position %d: want 0…%d: %w", g.Name, at, int64(MaxPosition), ErrInvalid)
		case j > 0 && at <= positions[j-1]:
			return fmt.Errorf("db: PublishRequest.Groups: group %q: position %d after %d: want strictly increasing positions: %w", g.Name, at, positions[j-1], ErrInvalid)
		case g.Kind == Attention && at != first+int64(j):
			return fmt.Errorf("db: PublishRequest.Groups: group %q: position %d: a checkpoint at %d requires %d…%d: %w", g.Name, at, offset, first, first+count-1, ErrInvalid)
		}
	}
	return nil
}

// finish ends the publication and gives everything back. With p.mu, or before the publication is known to anybody.
func (p *Publication) finish(why string) {
	if p.done {
		return
	}
	p.done = true
	p.attempt.End(why)
	p.lease.stop()
	p.tell(why)
	for _, s := range p.slots {
		s.setClosed(p.attempt.Alive())
	}
	p.letGo()
	clear(p.slots)
	p.db.pending.remove(p)
}

// tell counts and measures a publication that has ended.
func (p *Publication) tell(why string) {
	if !p.counted {
		return
	}
	if p.whole.span.IsRecording() {
		p.whole.span.SetAttributes(attribute.String(keyEnd, why))
	}
	if !p.listed {
		p.db.telemetry.ended.Add(1)
	}
	if p.listed || p.failed != nil {
		p.whole.end(p.failed, p.newPages, p.newBytes)
	} else {
		p.whole.close(nil, p.newPages, p.newBytes)
	}
}

// label implements holder.
func (p *Publication) label() string { return fmt.Sprintf("publication at %d", p.manifest.Offset) }

// errAborted is why a commit that its caller aborts meanwhile does not go on.
var errAborted = errors.New("aborted")

// untilEnded gives a context that also ends when the publication is ended from outside.
func (p *Publication) untilEnded(ctx context.Context) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	detach := context.AfterFunc(p.ended, func() { cancel(context.Cause(p.ended)) })
	return ctx, func() {
		detach()
		cancel(nil)
	}
}

// fail ends the publication after its final step has failed, of itself or because it was ended meanwhile. With p.mu.
func (p *Publication) fail() {
	why := "failed"
	if cause := context.Cause(p.ended); cause != nil {
		why, p.aborted = cause.Error(), cause == errAborted
	}
	p.finish(why)
}

// end implements holder.
func (p *Publication) end(why string) {
	p.interrupt(errors.New(why))
	p.mu.Lock()
	defer p.mu.Unlock()
	p.finish(why)
}

// Transfer says that a copy engine is about to write the slots of a rank on its own. Until Done the rank cannot commit, and
// should the publication end first, by whatever cause, its slots are in quarantine: they are given to nobody. ErrConflict if
// the publication has ended or the rank has committed.
func (p *Publication) Transfer(rank int) (*Transfer, error) {
	if err := p.checkRank(rank); err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.attempt.Alive(); err != nil {
		return nil, err
	}
	if p.attempt.HasCommitted(rank) {
		return nil, fmt.Errorf("db: rank %d has committed: %w", rank, ErrConflict)
	}
	p.transfers[rank]++
	p.db.counters.transfers.Add(1)
	return &Transfer{done: func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.transfers[rank]--; p.transfers[rank] == 0 {
			delete(p.transfers, rank)
		}
		if p.done && len(p.transfers) == 0 {
			p.db.residency.unpinAll(p.quarantine)
			p.quarantine = nil
		}
		p.db.counters.transfers.Add(-1)
	}}, nil
}

func (p *Publication) checkRank(rank int) error {
	if rank < 0 || rank >= p.manifest.Ranks {
		return fmt.Errorf("db: rank %d: the namespace has ranks 0…%d: %w", rank, p.manifest.Ranks-1, ErrInvalid)
	}
	return nil
}

// Commit says that the rank has filled its slots. The commit of the last rank lists the checkpoint, in one logged
// transaction, and returns true; before that nothing of it is visible. Committing a rank again returns false, and so does the
// last rank if another publication of the very same checkpoint was first.
//
// Errors: ErrInvalid for a wrong rank or a slot that is not full (nothing changes, fill it and call again); ErrBusy if the
// context had ended before the call, or while another publication fills pages of this rank (call Slots); ErrConflict if the
// publication has ended or what it builds on is gone; ErrClosed. Any error of the last rank's final step ends the publication:
// nothing of it stays, and it may be begun anew.
func (p *Publication) Commit(ctx context.Context, rank int) (listed bool, err error) {
	ctx, m := p.db.telemetry.begin(p.whole.within(ctx), opCommit)
	defer func() { m.end(err, 0, 0) }()
	if err := p.checkRank(rank); err != nil {
		return false, err
	}
	if err := p.db.gate.enterWith(ctx); err != nil {
		return false, err
	}
	defer p.db.gate.leave()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listed {
		return false, nil
	}
	if err := p.attempt.Alive(); err != nil {
		return false, err
	}
	if p.attempt.HasCommitted(rank) {
		return false, nil
	}
	if err := p.commitRank(rank); err != nil {
		return false, err
	}
	_, complete, err := p.attempt.Commit(rank)
	if err != nil || !complete {
		return false, err
	}
	ctx, stop := p.untilEnded(ctx)
	defer stop()
	if listed, err = p.publish(ctx); err != nil {
		p.failed = err
		p.fail()
		return false, err
	}
	if !listed {
		p.db.telemetry.replays.Add(1)
	}
	p.listed = true
	p.sequence.near.Store(p.manifest.SpineIndex() + 1)
	p.finish("published")
	return listed, nil
}

// commitRank checks that all pages of the rank are filled, closes its slots and marks the pages that this publication filled.
func (p *Publication) commitRank(rank int) error {
	filled, err := p.toFill(rank)
	if err != nil {
		return err
	}
	why := fmt.Errorf("rank %d has committed: %w", rank, ErrConflict)
	for n, i := range filled {
		written, full := int64(0), false
		if s := p.slots[slotID{rank, i}]; s != nil {
			written, full = s.closeFull(why)
		}
		if !full {
			for _, j := range filled[:n] {
				p.slots[slotID{rank, j}].setClosed(nil)
			}
			return fmt.Errorf("db: rank %d: group %q, page %d: %d of %d bytes written: %w", rank,
				p.layout.Groups[p.groups[i].group].Name, p.groups[i].position, written, p.claims[i].bytes, ErrInvalid)
		}
	}
	r := p.db.residency
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, i := range filled {
		q := p.claims[i]
		q.use.done[rank] = true
		if !slices.Contains(q.use.done, false) {
			q.use.filler, q.use.followers, q.use.done = nil, nil, nil
		}
		q.signal()
	}
	return nil
}

// Abort ends the publication. What it claimed goes to the publications that wait for it, or is given back. Aborting it again
// does nothing, and neither does aborting one that had nothing to write. ErrConflict, and no effect, if it has ended in another
// way: it is listed, it failed, it was taken back.
func (p *Publication) Abort() error {
	p.interrupt(errAborted)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.done && !p.aborted && !p.replay {
		return p.attempt.Alive()
	}
	p.aborted = true
	p.finish("aborted")
	return nil
}

// publish lists the checkpoint; false if another publication of the very same one was first. All ranks have committed.
//
// What it builds on may be dropped by a transaction that is decided in the same batch before it. It gets custody when the
// batch is applied, so it is refused once as incomplete and goes through the next time.
func (p *Publication) publish(ctx context.Context) (listed bool, err error) {
	for range publishTries {
		if p.durable {
			if err := p.makeDurable(ctx); err != nil {
				return false, err
			}
		}
		var again bool
		written := map[txn.Key]bool{}
		t := &transaction{
			decide: func(v txn.Reader) (txn.Record, error) {
				clear(written)
				rec, err := txn.DecidePublish(v, &txn.PublishIntent{
					Manifest: p.manifest, Committed: p.attempt.Committed(), Encoding: p.sequence.namespace.encoding, Durable: p.durable,
					SpineKey: p.sequence.spine, ChainKey: p.chainKey, SpineNear: p.sequence.near.Load(), ChainNear: p.chainsNear(), PrefixKey: p.sequence.prefix,
					Have: p.have,
				})
				if v, ok := err.(*txn.Violation); ok && v.Class == ErrConflict {
					// Another publication listed pages without their disk copies in between, or see above.
					again = v.Invariant == txn.PayloadBeforeRecord || v.Invariant == txn.CompleteAtPublish
				}
				if err != nil {
					return nil, err
				}
				if rec == nil { // listed by another publication, which may have asked for less
					again, err = p.wantsMore(v)
					return nil, err
				}
				for i := range rec.Pages {
					written[rec.Pages[i].Key] = len(rec.Pages[i].Place) > 0
				}
				return rec, nil
			},
			applied: func(*txn.Effects) { p.db.residency.published(p, written) },
		}
		if err = p.db.committer.commit(ctx, t, p.durable); !again {
			return t.effects != nil, err
		}
	}
	return false, fmt.Errorf("db: publication at %d: its pages kept changing: %w", p.manifest.Offset, cmp.Or(err, ErrBusy))
}

// wantsMore tells whether the checkpoint, which is listed, has to be durable and is not.
func (p *Publication) wantsMore(v txn.Reader) (bool, error) {
	if !p.durable {
		return false, nil
	}
	s, err := txn.ReadState(v, p.gen)
	return err == nil && s != nil && s.Status == txn.Listed && !s.Durable, err
}

// makeDurable writes every page of the checkpoint that has no disk copy: those it claimed, and older ones that the
// catalogue knows without one.
func (p *Publication) makeDurable(ctx context.Context) error {
	pages := slices.Clone(p.claims)
	p.db.residency.mu.Lock()
	pages = append(pages, p.custody...)
	p.db.residency.mu.Unlock()
	older, err := p.undurableBases()
	if err != nil {
		return err
	}
	defer p.db.residency.unpinAll(older)
	return p.db.persist(ctx, append(pages, older...))
}

// undurableBases pins the pages without a disk copy that the checkpoint builds on.
func (p *Publication) undurableBases() (pages []*page, err error) {
	r := p.db.residency
	r.mu.Lock()
	next := make([]txn.Key, 0, len(p.bases))
	for key := range p.bases {
		next = append(next, key)
	}
	r.mu.Unlock()
	snapshot := p.db.index.Snapshot()
	defer snapshot.Close()
	for len(next) > 0 {
		key := next[len(next)-1]
		next = next[:len(next)-1]
		entry, err := txn.ReadPage(snapshot, key)
		if err != nil {
			return pages, err
		}
		if entry == nil || entry.ChainDurable {
			continue
		}
		if len(entry.Place) == 0 {
			r.mu.Lock()
			if q := r.pages.get(key); q != nil {
				r.pin(q)
				pages = append(pages, q)
			}
			r.mu.Unlock()
		}
		if !entry.Parent.IsZero() {
			next = append(next, entry.Parent)
		}
	}
	return pages, nil
}
