package db

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/holdfast-db/holdfast/db/internal/segment"
	"github.com/holdfast-db/holdfast/txn"
)

// Page is one page of a restored checkpoint.
type Page struct {
	Group    int // index in the layout
	Position int64
	Key      txn.Key
	Bytes    []byte // off the Go heap; read-only; valid until Release
}

// Restoration is a checkpoint whose pages are all in RAM, pinned by a lease. The lease ends by Release, when the context of
// the Restore ends, at its deadline, or with its owner; then the pages may be given to others at once, unless a Transfer
// covers them. It is safe for concurrent use.
type Restoration struct {
	hold
	offset int64
	gen    Generation
	meta   []byte
	where  []claim
	last   txn.Key // as in candidate
	cold   int64   // pages that were not in RAM
	bytes  int64   // of all ranks
}

// Offset is the length of the restored prefix in tokens.
func (r *Restoration) Offset() int64 { return r.offset }

// Generation is the listed checkpoint at exactly this offset, zero at a page boundary inside a longer one.
func (r *Restoration) Generation() Generation { return r.gen }

// Meta is what the publisher gave the checkpoint, nil at a page boundary inside a longer one.
func (r *Restoration) Meta() []byte { return slices.Clone(r.meta) }

// Pages gives the pages of one rank, by group and then by position. Once the lease has ended, and for a rank that does not
// exist, it gives nil.
func (r *Restoration) Pages(rank int) []Page {
	r.db.residency.mu.Lock()
	defer r.db.residency.mu.Unlock()
	if r.ended != "" || rank < 0 || rank >= len(r.pages[0].slots) {
		return nil
	}
	pages := make([]Page, len(r.pages))
	for i, p := range r.pages {
		pages[i] = Page{Group: r.where[i].group, Position: r.where[i].position, Key: p.key, Bytes: p.slots[rank].Bytes()}
	}
	return pages
}

// Bounds of what a restore retries.
const (
	restoreTries = 256
	stepAside    = time.Millisecond // from the fifth try on, after some that only let others run
)

// errChanged says that the catalogue moved on under a restore.
var errChanged = fmt.Errorf("db: the catalogue changed: %w", ErrBusy)

// Restore brings the longest restorable prefix of the sequence into RAM, for all ranks at once, every page checked
// against its checksum as it is read. A page that turns out lost or corrupt is quarantined, every checkpoint that needs it is
// retired, and the same call goes on with the next shorter candidate.
//
// The context bounds the lease as well as the wait: when it ends, the restoration is released.
//
// Errors: ErrNotFound is a miss; ErrConflict: the owner has ended; ErrBusy means that no room came before the context or the
// admission timeout ended, that the disk did not answer within Options.LoadTimeout, or that too many restorations are held, and the
// checkpoint stays listed; ErrTooLarge that it is larger than the RAM tier; ErrInvalid, ErrClosed, ErrIO.
func (d *DB) Restore(ctx context.Context, s *Sequence, o LookupOptions) (r *Restoration, err error) {
	ctx, m := d.telemetry.begin(ctx, opRestore)
	defer func() {
		if r == nil {
			m.end(err, 0, 0)
			return
		}
		m.end(err, int64(len(r.where)), r.bytes)
	}()
	limit, err := o.max(s)
	if err != nil {
		return nil, err
	}
	if err := d.gate.enterWith(ctx); err != nil {
		return nil, err
	}
	defer d.gate.leave()
	length, err := d.leaseLength("LookupOptions.Lease", o.Lease)
	if err != nil {
		return nil, err
	}
	if err := d.admit(); err != nil {
		return nil, err
	}
	r, err = d.restore(ctx, s, o.Retry, limit)
	if err != nil {
		d.counters.leases.Add(-1)
		if errors.Is(err, ErrBusy) {
			d.options.Logger.Warn("restore gave up", "tokens", limit, "ranks", s.namespace.identity.Layout.Ranks, "owner", o.Owner.label(), "seconds", time.Since(m.begun).Seconds(), "error", err)
		}
		return nil, err
	}
	d.telemetry.handedOut(int64(len(r.where)), r.cold, r.bytes)
	if err := r.lease.begin(ctx, d, o.Owner, r, length); err != nil {
		r.end("refused")
		return nil, err
	}
	return r, nil
}

func (d *DB) restore(ctx context.Context, s *Sequence, again bool, limit int64) (*Restoration, error) {
	changes, asked := 0, limit
	for {
		r, err := d.restoreLongest(ctx, s, limit)
		var gone *lostPages
		var waits *beingRetired
		switch {
		case err == nil:
			d.telemetry.lookup(again, asked, r.offset)
			d.curator.note(candidate{gen: r.gen, last: r.last})
			return r, nil
		case errors.As(err, &gone):
			if stopped := d.log.Err(); stopped != nil {
				return nil, fmt.Errorf("db: %w", stopped) // what needs the pages could not be retired
			}
			limit = gone.offset - 1 // strictly shorter, so this ends
		case errors.Is(err, errChanged):
			if changes++; changes == restoreTries {
				return nil, err
			}
			if !errors.As(err, &waits) {
				if cause := d.makeWay(ctx, changes); cause != nil {
					return nil, fmt.Errorf("%w: %w", err, cause)
				}
				continue
			}
			select {
			case <-waits.retired:
			case <-d.gate.stopping:
				return nil, errClosed
			case <-ctx.Done():
				return nil, fmt.Errorf("%w: %w", err, context.Cause(ctx))
			}
		case errors.Is(err, ErrNotFound):
			d.telemetry.lookup(again, asked, 0)
			return nil, err
		default:
			return nil, err
		}
	}
}

// makeWay lets what is between two states go on, so that a call which has looked n times does not look all its tries away while
// the other one waits for a processor. It gives the cause if the context ends meanwhile.
func (d *DB) makeWay(ctx context.Context, n int) error {
	if n <= 4 {
		runtime.Gosched()
		return context.Cause(ctx)
	}
	timer := time.NewTimer(stepAside)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-d.gate.stopping:
	case <-ctx.Done():
	}
	return context.Cause(ctx)
}

// lostPages says that pages of a candidate could not be read back, and that all that needs them is retired.
type lostPages struct {
	offset int64
	pages  int
	cause  error
}

func (l *lostPages) Error() string {
	return fmt.Sprintf("db: checkpoint at %d: %d pages lost: %v", l.offset, l.pages, l.cause)
}

func (l *lostPages) Unwrap() error { return l.cause }

// beingRetired says that a page of the candidate is lost and that somebody is retiring what needs it.
type beingRetired struct{ retired <-chan struct{} }

func (*beingRetired) Error() string { return errChanged.Error() }

func (*beingRetired) Unwrap() error { return errChanged }

// restoreLongest restores the longest candidate.
func (d *DB) restoreLongest(ctx context.Context, s *Sequence, limit int64) (*Restoration, error) {
	unproven := d.unproven.active.Load()
	snapshot := d.index.Snapshot()
	c, err := d.longest(snapshot, s, limit, unproven)
	if err == nil && c.offset == 0 {
		err = miss(s)
	}
	if err != nil {
		snapshot.Close()
		return nil, err
	}
	r := &Restoration{hold: hold{db: d, what: fmt.Sprintf("restoration at %d", c.offset)}, offset: c.offset, gen: c.gen, last: c.last}
	keys, err := r.locate(snapshot, s)
	if err == nil {
		err = d.pinKnown(snapshot, r, keys, s.namespace.identity.Layout.Ranks)
	}
	snapshot.Close()
	if err != nil {
		return nil, err
	}
	if err := d.stillThere(r); err != nil {
		d.residency.unpinAll(r.pages)
		return nil, err
	}
	r.cold, r.bytes = d.residency.weight(r.pages, s.namespace.identity.Layout.Ranks)
	if err := d.load(ctx, r.pages, s.namespace.identity.Layout.Ranks); err != nil {
		var gone *lostPages
		if errors.As(err, &gone) {
			gone.offset = r.offset
		}
		return nil, err
	}
	return r, nil
}

// locate lists the pages of the candidate.
func (r *Restoration) locate(v txn.Reader, s *Sequence) (keys []txn.Key, err error) {
	layout := &s.namespace.identity.Layout
	add := func(group int, position int64, key txn.Key) {
		r.where = append(r.where, claim{group, position})
		keys = append(keys, key)
	}
	var m *txn.Manifest
	if !r.gen.IsZero() {
		if m, err = txn.ReadManifest(v, r.gen); err != nil {
			return nil, err
		}
		if m == nil {
			return nil, fmt.Errorf("db: generation %s is listed and has no manifest: %w", r.gen, ErrCorrupt)
		}
		r.meta = m.Meta
	}
	for i := range layout.Groups {
		if m != nil && !m.Groups[i].Chained {
			for j, key := range m.Groups[i].Keys {
				add(i, m.Groups[i].Positions[j], key)
			}
			continue
		}
		first, count := layout.pagesAt(i, r.offset)
		s.pageKeys(layout, i, first, count, r.offset, func(position int64, key txn.Key) { add(i, position, key) })
	}
	return keys, nil
}

// pinKnown pins the pages; what is not in the table is entered with the disk copies that the catalogue names.
func (d *DB) pinKnown(v txn.Reader, r *Restoration, keys []txn.Key, ranks int) error {
	t := d.residency
	r.pages = make([]*page, len(keys))
	var absent []int
	var err error
	t.mu.Lock()
	for i, key := range keys {
		if retired := t.quarantine[key]; retired != nil {
			err = &beingRetired{retired}
			break
		}
		if p := t.pages.get(key); p != nil && p.known {
			t.pin(p)
			p.reused = true
			r.pages[i] = p
		} else {
			absent = append(absent, i)
		}
	}
	t.mu.Unlock()
	entries := make([]*txn.PageEntry, len(absent))
	for j, i := range absent {
		if err != nil {
			break
		}
		if entries[j], err = txn.ReadPage(v, keys[i]); err != nil {
			break
		}
		if entries[j] == nil || len(entries[j].Place) != ranks {
			err = errChanged // dropped, or in RAM only and evicted with its checkpoint, since the snapshot
			break
		}
	}
	t.mu.Lock()
	for j, i := range absent {
		if err != nil {
			break
		}
		p := t.pages.get(keys[i])
		if p != nil && !p.known {
			err = errChanged // dropped from the catalogue, and somebody holds what is left of it or fills it anew
			break
		}
		if p == nil {
			e := entries[j]
			p = &page{key: keys[i], parent: e.Parent, bytes: e.Bytes, place: e.Place, class: segment.Shared, known: true, unproven: true, cool: e.Current == 0}
			t.pages.put(p)
		}
		t.pin(p)
		p.reused = true
		r.pages[i] = p
	}
	t.mu.Unlock()
	if err != nil {
		d.unpinSome(r.pages)
	}
	return err
}

func (d *DB) unpinSome(pages []*page) {
	d.residency.unpinAll(slices.DeleteFunc(slices.Clone(pages), func(p *page) bool { return p == nil }))
}

// stillThere checks, now that the pages are pinned, that the catalogue still names them and their disk copies. From here on a
// change of the catalogue finds the pins. Pages whose bytes are in RAM need no check of their own: the table follows the
// catalogue, and a key says what the bytes are.
func (d *DB) stillThere(r *Restoration) error {
	snapshot := d.index.Snapshot()
	defer snapshot.Close()
	if !r.gen.IsZero() {
		s, err := txn.ReadState(snapshot, r.gen)
		if err != nil {
			return err
		}
		if s == nil || s.Status != txn.Listed {
			return errChanged
		}
	}
	proven, err := d.prove(snapshot, r.pages)
	if err == nil && !proven {
		err = errChanged
	}
	return err
}

// prove compares those of the pages that are not in RAM with a reading of the catalogue that is younger than their pins, and tells
// whether all of them are what it names. It ends at the first that is not.
func (d *DB) prove(v txn.Reader, pages []*page) (bool, error) {
	t := d.residency
	t.mu.Lock()
	var absent []*page
	for _, p := range pages {
		if p.slots == nil || p.unproven {
			absent = append(absent, p)
		}
	}
	t.mu.Unlock()
	for _, p := range absent {
		e, err := txn.ReadPage(v, p.key)
		if err != nil {
			return false, err
		}
		t.mu.Lock()
		same := p.place != nil && e != nil && slices.Equal(e.Place, p.place)
		if same {
			p.unproven = false
			p.signal()
		} else if (p.slots == nil || p.unproven) && p.known {
			t.detach(p)
		}
		t.mu.Unlock()
		if !same {
			return false, nil
		}
	}
	return true, nil
}

// load waits until all of the pages, which the caller has pinned, are in RAM, reading those that nobody else reads. On an error
// they are unpinned.
func (d *DB) load(ctx context.Context, pages []*page, ranks int) error {
	ctx, cancel := context.WithTimeout(ctx, d.options.LoadTimeout)
	defer cancel()
	t := d.residency
	var own *load
	for {
		var mine []*page
		var wait *job
		lost := false
		t.mu.Lock()
		for _, p := range pages {
			switch {
			case p.slots != nil:
			case p.lost || p.place == nil:
				lost = true
			case p.job() != nil:
				wait = p.job()
			default:
				mine = append(mine, p)
			}
		}
		if wait == nil && !lost && own == nil && len(mine) > 0 {
			own = &load{job: job{done: make(chan struct{})}, ranks: ranks}
			for _, p := range mine {
				if p.job() != nil {
					continue // a list may name a page twice
				}
				t.pin(p)
				p.using().job = &own.job
				own.pages, own.places = append(own.pages, p), append(own.places, p.place)
			}
			wait = &own.job
			d.gate.hold()
			go d.read(ctx, own)
		}
		t.mu.Unlock()
		switch {
		case wait != nil:
			select {
			case <-wait.done:
				continue
			case <-d.gate.stopping:
				t.unpinAll(pages)
				return errClosed
			case <-ctx.Done():
				t.unpinAll(pages)
				return fmt.Errorf("db: waiting for pages to be read: %w: %w", ErrBusy, context.Cause(ctx))
			}
		case own != nil && own.lost > 0:
			t.unpinAll(pages)
			return &lostPages{pages: own.lost, cause: own.err}
		case lost:
			t.unpinAll(pages)
			return errChanged // who read them found them bad and has retired the checkpoint
		case len(mine) > 0:
			t.unpinAll(pages)
			if own != nil && own.err != nil {
				return own.err
			}
			return errChanged // somebody else's read failed for want of room
		default:
			return nil
		}
	}
}

// load is a job that reads pages of one restoration.
type load struct {
	job
	pages  []*page
	places [][]txn.Placement // of each page
	ranks  int

	lost int // pages that could not be read; valid once it is done
}

// read carries a load out. The context bounds the wait for room and for a turn at the device; a read that has begun is waited
// for. Pages that cannot be read go into quarantine, and all that needs them is retired before the job ends.
func (d *DB) read(ctx context.Context, l *load) {
	t := d.residency
	sizes := make([]int64, 0, len(l.pages)*l.ranks)
	for _, p := range l.pages {
		for range l.ranks {
			sizes = append(sizes, p.bytes)
		}
	}
	slots, err := d.allocate(ctx, sizes)
	errs := make([]error, len(slots))
	if err == nil {
		reads := make([]segment.ReadRequest, len(slots))
		for i := range slots {
			reads[i] = segment.ReadRequest{Place: l.places[i/l.ranks][i%l.ranks], Key: l.pages[i/l.ranks].key, Rank: uint16(i % l.ranks), Dst: slots[i].Bytes()}
		}
		if failed := d.segments.ReadBatch(ctx, reads); failed != nil {
			errs = failed
		}
		d.counters.pagesRead.Add(int64(len(slots)))
	}
	retired := make(chan struct{})
	var lost []*page
	var cause error
	var out leftovers
	t.mu.Lock()
	for i, p := range l.pages {
		if len(slots) == 0 {
			break
		}
		of := slots[i*l.ranks : (i+1)*l.ranks : (i+1)*l.ranks]
		switch failed := errors.Join(errs[i*l.ranks : (i+1)*l.ranks]...); {
		case failed == nil:
			p.slots = of
		case errors.Is(failed, ErrCorrupt), errors.Is(failed, ErrNotFound), errors.Is(failed, ErrIO):
			lost = append(lost, p)
			cause = errors.Join(cause, failed)
			t.lose(p, retired)
			out.slots = append(out.slots, of...)
		default:
			err = failed
			out.slots = append(out.slots, of...)
		}
	}
	t.mu.Unlock()
	t.giveBack(&out)
	if l.lost = len(lost); l.lost > 0 {
		d.counters.failedReads.Add(int64(l.lost))
		d.options.Logger.Warn("pages lost, their checkpoints are retired", "pages", l.lost, "error", cause)
		err = errors.Join(cause, d.giveUp(context.Background(), lost, txn.ReasonLost))
	}
	close(retired)
	d.endJob(&l.job, l.pages, err)
}
