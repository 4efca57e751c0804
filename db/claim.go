package db

import (
	"context"
	"fmt"
	"slices"

	"github.com/holdfast-db/holdfast/db/internal/arena"
	"github.com/holdfast-db/holdfast/db/internal/segment"
	"github.com/holdfast-db/holdfast/txn"
)

// chain is the part of a group's chain that is new.
type chain struct {
	known int64     // pages before it
	keys  []txn.Key // of the pages after these
}

// claim says which page of the checkpoint a claimed page is.
type claim struct {
	group    int
	position int64
}

// need is a page that the catalogue does not know.
type need struct {
	claim
	key, parent txn.Key
	bytes       int64
	class       segment.Class
}

// chainKey gives the key of a page of a chained group.
func (p *Publication) chainKey(group int, position int64) txn.Key {
	if group < len(p.chains) {
		c := &p.chains[group]
		if i := position - c.known; i >= 0 && i < int64(len(c.keys)) {
			return c.keys[i]
		}
	}
	return p.sequence.pageKey(group, position, p.layout.pageEnd(group, position, p.manifest.Offset))
}

// missing finds the pages that the catalogue does not know, and the known pages that the checkpoint builds on.
func (p *Publication) missing(v txn.Reader) (needs []need, bases []txn.Key, err error) {
	chains := make([]chain, len(p.manifest.Groups))
	for i := range p.manifest.Groups {
		g := &p.manifest.Groups[i]
		if !g.Chained {
			class := segment.Own
			if p.layout.Groups[i].Kind == Attention {
				class = segment.Shared
			}
			for j, key := range g.Keys {
				entry, err := txn.ReadPage(v, key)
				if err != nil {
					return nil, nil, err
				}
				if entry != nil {
					bases = append(bases, key)
					continue
				}
				needs = append(needs, need{claim: claim{i, g.Positions[j]}, key: key, bytes: g.PageBytes, class: class})
			}
			continue
		}
		keyAt := func(k int64) txn.Key {
			if k == g.Count-1 {
				return g.Head
			}
			return p.chainKey(i, k)
		}
		near := int64(txn.NoGuess)
		if blocks := p.sequence.near.Load(); blocks > 0 {
			near = min(blocks*txn.BlockTokens/p.layout.Groups[i].PageTokens, g.Count) - 1
		}
		known, err := txn.Deepest(g.Count-1, near, func(k int64) (bool, error) {
			entry, err := txn.ReadPage(v, keyAt(k))
			return entry != nil, err
		})
		if err != nil {
			return nil, nil, err
		}
		parent := txn.Key{}
		if known >= 0 {
			parent = keyAt(known)
			bases = append(bases, parent)
		}
		chains[i].known = known + 1
		for k := known + 1; k < g.Count; k++ {
			n := need{claim: claim{i, k}, key: keyAt(k), parent: parent, bytes: g.PageBytes, class: segment.Shared}
			if k == g.Count-1 && p.manifest.Offset%p.layout.Groups[i].PageTokens != 0 {
				n.class = segment.Own // a page that is not full belongs to this checkpoint alone
			}
			needs = append(needs, n)
			chains[i].keys = append(chains[i].keys, n.key)
			parent = n.key
		}
	}
	p.chains = chains
	return needs, bases, nil
}

// claimPages looks up what is missing, reserves RAM for it and claims it. What others did in between is noticed by looking
// again after the bases are registered; then it begins anew.
func (p *Publication) claimPages(ctx context.Context) error {
	for try := range claimTries {
		if try > 0 {
			if err := p.db.makeWay(ctx, try); err != nil {
				return fmt.Errorf("db: publication at %d: the pages it builds on kept changing: %w: %w", p.manifest.Offset, ErrBusy, err)
			}
		}
		unproven := p.db.unproven.active.Load()
		snapshot := p.db.index.Snapshot()
		state, err := txn.ReadState(snapshot, p.gen)
		var needs []need
		var bases []txn.Key
		if err == nil {
			p.listed = state != nil && state.Status == txn.Listed && (state.Durable || !p.durable)
			if !p.listed {
				needs, bases, err = p.missing(snapshot)
			}
		}
		var gone []Generation
		if err == nil && unproven {
			gone, err = p.db.unproven.met(snapshot, p.gen, state, bases)
		}
		snapshot.Close()
		if err == nil && len(gone) > 0 {
			p.listed = false
			if err = p.db.unproven.settle(ctx, gone); err == nil {
				continue
			}
		}
		if err != nil || p.listed {
			return err
		}
		if n := int64(len(needs)) * int64(p.manifest.Ranks); n > MaxPublicationCopies {
			return fmt.Errorf("db: publication of %d new pages on %d ranks: limit %d page copies: %w", len(needs), p.manifest.Ranks, MaxPublicationCopies, ErrTooLarge)
		}
		ok, err := p.tryClaim(ctx, needs, bases)
		if err != nil || ok {
			return err
		}
	}
	return fmt.Errorf("db: publication at %d: the pages it builds on kept changing: %w", p.manifest.Offset, ErrBusy)
}

func (p *Publication) tryClaim(ctx context.Context, needs []need, bases []txn.Key) (ok bool, err error) {
	r := p.db.residency
	r.mu.Lock()
	for _, key := range bases {
		r.register(key, p)
	}
	var sizes []int64
	for i := range needs {
		if q := r.pages.get(needs[i].key); q == nil {
			for range p.manifest.Ranks {
				sizes = append(sizes, needs[i].bytes)
			}
		}
	}
	r.mu.Unlock()
	defer func() {
		if !ok {
			p.letGo()
		}
	}()
	if still, err := p.basesKnown(bases); err != nil || !still {
		return false, err
	}
	slots, err := p.db.allocate(ctx, sizes)
	if err != nil {
		return false, err
	}
	if unproven := p.claim(needs, slots); unproven != nil {
		select {
		case <-unproven:
		case <-p.db.gate.stopping:
			return false, errClosed
		case <-ctx.Done():
			return false, fmt.Errorf("db: publication at %d waits for a page that is being looked up: %w: %w", p.manifest.Offset, ErrBusy, context.Cause(ctx))
		}
		return false, nil
	}
	if len(p.claims) < len(needs) {
		return false, nil // a page that was there is gone; what is claimed so far is let go
	}
	return p.stillMissing(needs)
}

// claim claims pages, with the slots for those that nobody has, until one of them is not as it was when the slots were
// counted. Who finds a page that another one has just entered and not yet compared with the catalogue gets a channel to wait for.
func (p *Publication) claim(needs []need, slots []arena.Slot) (unproven <-chan struct{}) {
	r := p.db.residency
	var out leftovers
	r.mu.Lock()
	defer func() {
		out.slots = append(out.slots, slots...)
		r.mu.Unlock()
		r.giveBack(&out)
	}()
	for i := range needs {
		n := &needs[i]
		q := r.pages.get(n.key)
		if q == nil {
			if len(slots) < p.manifest.Ranks || slots[0].Len() != n.bytes {
				return nil
			}
			q = &page{key: n.key, parent: n.parent, bytes: n.bytes, class: n.class, young: true, use: &pageUse{filler: p, done: make([]bool, p.manifest.Ranks)}}
			q.slots, slots = slices.Clone(slots[:p.manifest.Ranks]), slots[p.manifest.Ranks:]
			r.pages.put(q)
		} else if q.unproven {
			return q.wait()
		} else if q.filler() != nil {
			q.use.followers = append(q.use.followers, p)
		}
		r.pin(q)
		p.claims = append(p.claims, q)
		p.groups = append(p.groups, n.claim)
		p.byKey[n.key] = true
	}
	return nil
}

// stillMissing tells whether the catalogue still knows none of the pages, now that they are claimed and nobody else can list them.
// One that it learned since they were looked up has been listed with other memory and other copies. It knows no page of a chain
// without the one before it, so only the first of each chain has to be asked about.
func (p *Publication) stillMissing(needs []need) (bool, error) {
	snapshot := p.db.index.Snapshot()
	defer snapshot.Close()
	for i := range needs {
		if i > 0 && needs[i].parent == needs[i-1].key {
			continue
		}
		entry, err := txn.ReadPage(snapshot, needs[i].key)
		if err != nil || entry != nil {
			return false, err
		}
	}
	return true, nil
}

func (p *Publication) basesKnown(bases []txn.Key) (bool, error) {
	snapshot := p.db.index.Snapshot()
	defer snapshot.Close()
	for _, key := range bases {
		entry, err := txn.ReadPage(snapshot, key)
		if err != nil || entry == nil {
			return false, err
		}
	}
	return true, nil
}

// letGo gives back all claims. Pages that the publication was filling go to the publication that follows first, or
// disappear.
func (p *Publication) letGo() {
	r := p.db.residency
	var out leftovers
	r.mu.Lock()
	for _, q := range p.claims {
		if q.use != nil {
			q.use.followers = slices.DeleteFunc(q.use.followers, func(f *Publication) bool { return f == p })
		}
		if q.filler() == p {
			q.use.filler = nil
			if len(p.transfers) > 0 {
				q.lost = true // a copy may still be writing to it
				r.forget(q)
				r.pin(q)
				p.quarantine = append(p.quarantine, q)
			} else if len(q.use.followers) > 0 {
				q.use.filler, q.use.followers = q.use.followers[0], q.use.followers[1:]
			} else {
				q.lost = true // unfinished bytes: never readable by anybody
			}
			q.signal()
		}
		r.unpin(q, &out)
	}
	for _, q := range p.custody {
		r.unpin(q, &out)
	}
	r.unregister(p)
	p.claims, p.groups, p.custody = nil, nil, nil
	clear(p.byKey)
	r.mu.Unlock()
	r.giveBack(&out)
}

// errQuarantined says that a page which this publication was to share is under a copy that is not proven finished, of a
// publication that ended.
func (p *Publication) errQuarantined(i int) error {
	at := p.groups[i]
	return fmt.Errorf("db: group %q, page %d: the publication that was filling it ended during a copy; begin again: %w", p.layout.Groups[at.group].Name, at.position, ErrBusy)
}

// toFill gives the claims that the rank has to fill; nobody else takes one of them away. ErrBusy if another publication is
// filling one that the rank needs.
func (p *Publication) toFill(rank int) (claims []int, err error) {
	r := p.db.residency
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := p.transfers[rank]; n > 0 {
		return nil, fmt.Errorf("db: rank %d: %d copies are not finished: %w", rank, n, ErrBusy)
	}
	for i, q := range p.claims {
		switch {
		case q.lost:
			return nil, p.errQuarantined(i)
		case q.filler() == nil || q.use.done[rank]:
		case q.filler() != p:
			return nil, fmt.Errorf("db: rank %d: group %q, page %d is being filled by another publication: %w", rank,
				p.layout.Groups[p.groups[i].group].Name, p.groups[i].position, ErrBusy)
		default:
			claims = append(claims, i)
		}
	}
	return claims, nil
}

// chainsNear gives how many pages of each group the catalogue knew when the publication claimed those that it did not.
func (p *Publication) chainsNear() []int64 {
	near := make([]int64, len(p.chains))
	for i := range p.chains {
		near[i] = p.chains[i].known
	}
	return near
}

// have reports whether the publication holds a page, which the catalogue does not know, on all ranks, and its disk copies. On the
// committer goroutine.
func (p *Publication) have(key txn.Key) ([]txn.Placement, bool) {
	r := p.db.residency
	r.mu.Lock()
	defer r.mu.Unlock()
	q := r.pages.get(key)
	if q == nil || !q.complete() || q.lost {
		return nil, false
	}
	if !p.byKey[key] && !slices.Contains(p.custody, q) {
		return nil, false // somebody else's: nothing keeps it until the record is applied
	}
	return q.place, true
}
