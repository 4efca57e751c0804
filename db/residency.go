package db

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/holdfast-db/holdfast/db/internal/arena"
	"github.com/holdfast-db/holdfast/db/internal/segment"
	"github.com/holdfast-db/holdfast/txn"
	"github.com/holdfast-db/holdfast/txn/mutant"
)

// page is what this process holds of one page: the bytes of every rank in RAM, or on their way, and where its disk copies
// are. The catalogue says what exists; a page object exists only while something of the page is in RAM or somebody uses it.
// All fields are guarded by residency.mu, the bytes behind slots by the states below.
//
// States:
//
//	filling   filler() != nil: that publication alone writes the slots, rank by rank (done)
//	resident  slots != nil, filler() == nil: readable by whoever has a pin; it is dirty if the catalogue names no disk copy
//	absent    slots == nil: on disk only
//
// A job that is set writes a resident page, or loads an absent one.
//
// A page that has pins is never evicted, and neither its slots nor its disk copies are given to anybody else. A page that
// has none is either evictable (in the clean or dirty list, if the catalogue knows it) or released at once.
type page struct {
	key    txn.Key
	parent txn.Key
	bytes  int64

	slots []arena.Slot    // one per rank, or nil
	place []txn.Placement // one per rank, or nil

	use        *pageUse // nil while nobody fills, moves or waits for it
	prev, next *page    // in a list of evictable pages; nil outside

	pins  int32
	class segment.Class

	// unrecorded copies are written and the catalogue does not name them yet: whoever wrote them may have given up waiting
	// before the record. The page is dirty until it does.
	unrecorded bool

	// unproven pages were entered from a reading of the catalogue that may have been old, and not compared with it since: their
	// copies may be somebody else's by now. No publication shares one.
	unproven bool

	known  bool // in the catalogue
	cool   bool // no current checkpoint needs it: it goes before those that one does
	lost   bool // its disk copy turned out bad; not to be shared any more
	reused bool // a restore has used it
	young  bool // published here, and in RAM since
}

// pageUse is what goes on with a page. There are millions of pages and few of them in use, so it is an object of its own, which
// goes when the page can be evicted.
type pageUse struct {
	filler    *Publication
	done      []bool         // while filling: ranks whose bytes are complete
	followers []*Publication // publications that share the page once it is filled, in order of arrival
	changed   chan struct{}  // closed at the next change of filler, done or unproven, and when the table forgets the page; nil if nobody waits
	job       *job           // being written or loaded; the job has a pin
}

// using gives the use of the page, to be changed. With residency.mu.
func (p *page) using() *pageUse {
	if p.use == nil {
		p.use = &pageUse{}
	}
	return p.use
}

// filler gives the publication that fills the page, if one does.
func (p *page) filler() *Publication {
	if p.use == nil {
		return nil
	}
	return p.use.filler
}

// job gives the write or load that is under way for the page, if there is one.
func (p *page) job() *job {
	if p.use == nil {
		return nil
	}
	return p.use.job
}

// evictable reports whether the page is in a list.
func (p *page) evictable() bool { return p.next != nil }

func (p *page) complete() bool { return p.filler() == nil && (p.slots != nil || p.place != nil) }

func (p *page) dirty() bool { return p.slots != nil && !p.placed() }

// placed tells whether the page has disk copies that the catalogue names, if it knows the page.
func (p *page) placed() bool {
	return p.place != nil && (!p.unrecorded || mutant.On("copies count before they are recorded"))
}

// wait gives a channel that is closed at the next change. With residency.mu.
func (p *page) wait() <-chan struct{} {
	u := p.using()
	if u.changed == nil {
		u.changed = make(chan struct{})
	}
	return u.changed
}

// signal wakes who waits. With residency.mu.
func (p *page) signal() {
	if p.use != nil && p.use.changed != nil {
		close(p.use.changed)
		p.use.changed = nil
	}
}

// pageList is a list of pages in the order in which they were last used. It is a ring through root, which is no page: so a page
// can leave without knowing its list.
type pageList struct{ root page }

func (l *pageList) append(p *page) {
	if l.root.next == nil {
		l.root.prev, l.root.next = &l.root, &l.root
	}
	p.prev, p.next = l.root.prev, &l.root
	p.prev.next, l.root.prev = p, p
}

// first gives the page that was used least recently, nil if there is none.
func (l *pageList) first() *page { return l.after(&l.root) }

// after gives the page after one of the list.
func (l *pageList) after(p *page) *page {
	if p.next == &l.root {
		return nil
	}
	return p.next
}

func (p *page) unlink() {
	if p.next == nil {
		return
	}
	p.prev.next, p.next.prev = p.next, p.prev
	p.prev, p.next = nil, nil
}

// residency is the table of all page objects. Its lock is held for a few map operations at a time and never over I/O,
// allocation or a wait.
//
// A publication reuses pages that the catalogue knows without holding each of them: it registers the last known page of
// each chain as its *basis*. Should that page be dropped from the catalogue before the publication commits, the
// publication gets custody of it, and of its ancestors as they are dropped, and declares them anew when it commits. So the
// retirement of an ancestor never fails a publication that builds on it, and a publication costs what is new.
type residency struct {
	arena   *arena.Arena
	leftRAM atomic.Int64 // Stats.LeftRAM

	mu    sync.Mutex // guards all that follows, and all fields of all pages
	pages pageTable
	basis map[txn.Key]map[*Publication]bool
	// The evictable pages, each list in the order of last use. The dirty ones are evictable once they have disk copies, or
	// once what needs them is retired.
	cleanCool, clean, dirtyCool, dirty pageList

	room chan struct{}

	closed bool // the database has closed: what is let go is freed

	// quarantine holds the pages that were lost and not published again since, at most MaxQuarantine of them. The channel is
	// closed once all that needs the page is retired; until then nobody reads it again.
	quarantine map[txn.Key]<-chan struct{}

	disk func(places, loose []txn.Placement) // takes disk copies that nothing needs any more; called without the lock
}

func newResidency(a *arena.Arena, disk func(places, loose []txn.Placement)) *residency {
	return &residency{arena: a, disk: disk, basis: map[txn.Key]map[*Publication]bool{}, quarantine: map[txn.Key]<-chan struct{}{}, room: make(chan struct{})}
}

// leftovers is what a change of the table set free; it is given back after the lock is.
type leftovers struct {
	slots  []arena.Slot
	places []txn.Placement
	loose  []txn.Placement // of loose pages
	room   bool            // a page became evictable
}

// giveBack returns memory and disk space, and wakes who waits for room. Without residency.mu.
func (r *residency) giveBack(l *leftovers) {
	for _, s := range l.slots {
		if err := r.arena.Free(s); err != nil {
			panic(err) // a slot freed twice: some page's bytes are no longer its own, nothing read from RAM can be trusted
		}
	}
	if len(l.places)+len(l.loose) > 0 {
		r.mu.Lock()
		disk := r.disk
		r.mu.Unlock()
		disk(l.places, l.loose)
	}
	if len(l.slots) > 0 || l.room {
		r.mu.Lock()
		close(r.room)
		r.room = make(chan struct{})
		r.mu.Unlock()
	}
}

// roomChanged gives a channel that is closed when memory was freed or may be freed by evicting. Without residency.mu.
func (r *residency) roomChanged() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.room
}

// pin keeps the page. With residency.mu.
func (r *residency) pin(p *page) {
	p.pins++
	p.unlink()
}

// unpin lets go of the page. With residency.mu.
func (r *residency) unpin(p *page, out *leftovers) {
	if p.pins--; p.pins < 0 {
		panic(fmt.Sprintf("page %s: %d pins", p.key.Short(), p.pins))
	}
	if p.pins == 0 {
		r.settle(p, out)
	}
}

// settle puts a page without pins where it belongs. With residency.mu.
func (r *residency) settle(p *page, out *leftovers) {
	switch {
	case !p.known || p.lost || r.closed: // nothing leads to it any more
		out.slots = append(out.slots, p.slots...)
		if p.class == segment.Loose {
			out.loose = append(out.loose, p.place...)
		} else {
			out.places = append(out.places, p.place...)
		}
		p.slots, p.place = nil, nil
		r.forget(p)
	case p.slots == nil:
		r.forget(p)
	default:
		if p.use != nil && p.use.changed == nil {
			p.use = nil // what is done by pins is over with the last of them
		}
		r.listOf(p).append(p)
		out.room = true
	}
}

// listOf gives the list that an evictable page belongs to. With residency.mu.
func (r *residency) listOf(p *page) *pageList {
	switch {
	case p.placed() && p.cool:
		return &r.cleanCool
	case p.placed():
		return &r.clean
	case p.cool:
		return &r.dirtyCool
	}
	return &r.dirty
}

// cool follows the catalogue: no current checkpoint needs these pages any more, or one does again. On the committer goroutine.
func (r *residency) setCool(keys []txn.Key, cool bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, key := range keys {
		p := r.pages.get(key)
		if p == nil || p.cool == cool {
			continue
		}
		p.cool = cool
		if p.evictable() {
			p.unlink()
			r.listOf(p).append(p)
		}
	}
}

// forget takes the page out of the table, unless another object has taken its place. With residency.mu.
func (r *residency) forget(p *page) {
	p.signal()
	if r.pages.get(p.key) == p {
		r.pages.drop(p.key)
	}
}

// unpinAll lets go of pages.
func (r *residency) unpinAll(pages []*page) {
	var out leftovers
	r.mu.Lock()
	for _, p := range pages {
		r.unpin(p, &out)
	}
	r.mu.Unlock()
	r.giveBack(&out)
}

// evictClean frees clean pages, cool ones first and then the least recently used, until bytes of RAM are free or none is
// left. It takes no transaction: the disk copies are known.
func (r *residency) evictClean(bytes int64) (freed int64, pages int64) {
	var out leftovers
	r.mu.Lock()
	for freed < bytes {
		p := r.cleanCool.first()
		if p == nil {
			p = r.clean.first()
		}
		if p == nil {
			break
		}
		p.unlink()
		for _, s := range p.slots {
			freed += int64(len(s.Padded()))
		}
		if p.young && !p.cool {
			r.leftRAM.Add(p.bytes * int64(len(p.slots)))
		}
		out.slots = append(out.slots, p.slots...)
		p.slots = nil
		r.forget(p)
		pages++
	}
	r.mu.Unlock()
	r.giveBack(&out)
	return freed, pages
}

// oldest pins pages of a list, the least recently used first, up to so many bytes of all ranks, at least one if there is any.
func (r *residency) oldest(l *pageList, bytes int64) (pages []*page) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for p := l.first(); p != nil && (bytes > 0 || len(pages) == 0); p = l.first() {
		r.pin(p)
		pages = append(pages, p)
		bytes -= p.bytes * int64(len(p.slots))
	}
	return pages
}

// published marks the pages of a publication as known to the catalogue: those it claimed, and those it had custody of, which
// its record declares anew. written are those that the record declares with disk copies. On the committer goroutine.
func (r *residency) published(b *Publication, written map[txn.Key]bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, pages := range [][]*page{b.claims, b.custody} {
		for _, p := range pages {
			p.known, p.cool = true, false
			if written[p.key] {
				p.unrecorded = false
			}
			delete(r.quarantine, p.key)
		}
	}
}

// recorded marks the disk copies of pages as named by the catalogue. The pages are pinned.
func (r *residency) recorded(pages []*page) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range pages {
		if p.known {
			p.unrecorded = false
		}
	}
}

// dropped follows the catalogue: the pages are not known any more. What nobody uses is given back; what a publication builds
// on becomes its own. On the committer goroutine.
func (r *residency) dropped(pages []txn.DroppedPage) {
	var out leftovers
	r.mu.Lock()
	for _, d := range pages {
		p := r.pages.get(d.Key)
		builders := r.basis[d.Key]
		if r.quarantine[d.Key] != nil {
			builders = nil // nothing can be built on it: the publication is refused as incomplete when it commits
		}
		if p == nil && len(builders) == 0 {
			out.places = append(out.places, d.Place...)
			continue
		}
		if p == nil {
			p = &page{key: d.Key, parent: d.Parent, bytes: d.Bytes, place: d.Place, class: segment.Shared}
			r.pages.put(p)
		}
		if !slices.Equal(p.place, d.Place) {
			out.places = append(out.places, d.Place...) // the page in the table is another one than the catalogue knew
		}
		p.known = false
		for b := range builders {
			r.pin(p)
			b.custody = append(b.custody, p)
			r.register(d.Parent, b)
		}
		delete(r.basis, d.Key)
		if p.pins == 0 {
			p.unlink()
			r.settle(p, &out)
		}
	}
	r.mu.Unlock()
	r.giveBack(&out)
}

// register makes key a basis of the publication. With residency.mu.
func (r *residency) register(key txn.Key, b *Publication) {
	if key.IsZero() {
		return
	}
	m := r.basis[key]
	if m == nil {
		m = map[*Publication]bool{}
		r.basis[key] = m
	}
	m[b] = true
	b.bases[key] = true
}

// unregister ends all registrations of the publication. With residency.mu.
func (r *residency) unregister(b *Publication) {
	for key := range b.bases {
		if m := r.basis[key]; m != nil {
			if delete(m, b); len(m) == 0 {
				delete(r.basis, key)
			}
		}
	}
	clear(b.bases)
}

// detach takes a page whose disk copy is not the one that the catalogue names (any more) out of the table. It goes with its
// last pin, and the disk copy stays the catalogue's business. With residency.mu.
func (r *residency) detach(p *page) {
	p.lost = true
	if p.known {
		p.place = nil
	}
	r.forget(p)
}

// lose takes a page whose disk copy is bad out of the table, so that nobody shares it any more, and puts it in quarantine.
// With residency.mu.
func (r *residency) lose(p *page, retired <-chan struct{}) {
	r.detach(p)
	if len(r.quarantine) < MaxQuarantine {
		r.quarantine[p.key] = retired
	}
}

// counts is the content of the table, for Stats and for tests.
type residencyCounts struct {
	pages, pinned, filling, dirty, quarantined int
	dirtyBytes                                 int64
}

func (r *residency) counts() (c residencyCounts) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c.quarantined = len(r.quarantine)
	for p := range r.pages.all() {
		c.pages++
		if p.pins > 0 {
			c.pinned++
		}
		if p.filler() != nil {
			c.filling++
		} else if p.dirty() {
			c.dirty++
			c.dirtyBytes += p.bytes * int64(len(p.slots))
		}
	}
	return c
}

// clear frees the memory of all pages that nobody holds. The database is closing: nothing else uses the table.
func (r *residency) clear() {
	var out leftovers
	r.mu.Lock()
	r.closed = true
	for _, p := range slices.Collect(r.pages.all()) { // forgetting changes the table
		if p.pins == 0 {
			p.unlink()
			out.slots = append(out.slots, p.slots...)
			p.slots = nil
			r.forget(p)
		}
	}
	r.disk = func(_, _ []txn.Placement) {} // space of pages that leases still hold is found by the next open
	r.mu.Unlock()
	r.giveBack(&out)
}
