package db

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/holdfast-db/holdfast/db/internal/segment"
	"github.com/holdfast-db/holdfast/txn"
)

// ScrubOptions bound a Scrub.
type ScrubOptions struct {
	// BytesPerSecond bounds the rate at which page copies are read; 0 is unbounded.
	BytesPerSecond int64
	// Progress is told after every batch, on the caller's goroutine.
	Progress func(ScrubReport)
}

// ScrubReport says what a Scrub did.
type ScrubReport struct {
	Duration time.Duration
	Copies   int64 // page copies read
	Bytes    int64 // their stored bytes
	Healed   int64 // pages with a bad copy on disk that were written anew from RAM
	Lost     int64 // pages with a bad copy on disk and none in RAM: quarantined, and what needs them is retired
	Retired  int64 // checkpoints retired while it ran, for whatever reason
}

// Scrub reads every page copy on disk and checks it against its checksum, while the database serves. A copy that is bad is
// never handed out: if RAM has the page, it is written anew and the bad copy given back; if not, it is quarantined and every
// checkpoint that needs it is retired, as if a restore had met it. It holds no lock and no page while it reads; memory is
// bounded by a batch of 16 MiB or one page, and by the list of 1/256 of the pages.
//
// Errors: ErrBusy if the context ended; ErrClosed, ErrReadOnly, ErrIO. The report tells what was done until then.
func (d *DB) Scrub(ctx context.Context, o ScrubOptions) (r ScrubReport, err error) {
	if err := checkNumber("ScrubOptions.BytesPerSecond", o.BytesPerSecond, 0, 1<<50); err != nil {
		return r, err
	}
	if err := d.enterToWrite(ctx); err != nil {
		return r, err
	}
	defer d.gate.leave()
	begun, retired := time.Now(), d.counters.retired.Load()
	s := &scrubber{db: d, o: o, pause: pacer(o.BytesPerSecond), report: &r}
	for b := 0; b < 256 && err == nil; b++ {
		err = s.part(ctx, byte(b))
	}
	r.Duration, r.Retired = time.Since(begun), d.counters.retired.Load()-retired
	return r, err
}

type scrubber struct {
	db     *DB
	o      ScrubOptions
	pause  func(context.Context, int64)
	report *ScrubReport
}

// part scrubs the pages whose keys begin with b. What is published meanwhile is left for the next pass.
func (s *scrubber) part(ctx context.Context, b byte) error {
	snapshot := s.db.index.Snapshot()
	var copies []copyOf
	err := txn.PagesUnder(snapshot, []byte{b}, func(key txn.Key, e *txn.PageEntry) (bool, error) {
		for rank, at := range e.Place {
			copies = append(copies, copyOf{key: key, rank: rank, bytes: e.Bytes, at: at})
		}
		return true, nil
	})
	if err == nil {
		err = s.db.loose.under(snapshot, b, func(key txn.Key, bytes int64, at txn.Placement) error {
			copies = append(copies, copyOf{key: key, bytes: bytes, at: at, loose: true})
			return nil
		})
	}
	if err = errors.Join(err, snapshot.Close()); err != nil {
		return err
	}
	for len(copies) > 0 {
		n, bytes := 0, int64(0)
		for n < len(copies) && n < verifyCopies && (n == 0 || bytes+copies[n].bytes <= verifyBytes) {
			bytes += copies[n].bytes
			n++
		}
		if err := s.batch(ctx, copies[:n]); err != nil {
			return err
		}
		copies = copies[n:]
	}
	return nil
}

func (s *scrubber) batch(ctx context.Context, copies []copyOf) error {
	select {
	case <-s.db.gate.stopping:
		return errClosed
	default:
	}
	requests := make([]segment.ReadRequest, len(copies))
	stored := int64(0)
	for i, c := range copies {
		requests[i] = segment.ReadRequest{Place: c.at, Key: c.key, Rank: uint16(c.rank), Dst: make([]byte, c.bytes)}
		stored += c.at.Stored
	}
	var judged txn.Key
	for i, err := range s.db.segments.ReadBatch(ctx, requests) {
		if err == nil || copies[i].key == judged {
			continue
		}
		if errors.Is(err, ErrBusy) {
			return fmt.Errorf("db: scrub: %w", err)
		}
		judged = copies[i].key
		healed, lost, err := s.db.judge(ctx, &copies[i])
		if err != nil {
			return err
		}
		if healed {
			s.report.Healed++
		}
		if lost {
			s.report.Lost++
		}
	}
	s.report.Copies += int64(len(copies))
	s.report.Bytes += stored
	if s.o.Progress != nil {
		s.o.Progress(*s.report)
	}
	s.pause(ctx, stored)
	if ctx.Err() != nil {
		return fmt.Errorf("db: scrub: %w: %w", ErrBusy, context.Cause(ctx))
	}
	return nil
}

// judge deals with a page of which a copy could not be read. The page may have been deleted or moved since its place was
// looked up, and then nothing is wrong.
func (d *DB) judge(ctx context.Context, c *copyOf) (healed, lost bool, err error) {
	p, ranks, err := d.pinCopied(c)
	if p == nil || err != nil {
		return false, false, err
	}
	pages := []*page{p}
	d.residency.mu.Lock()
	resident := p.slots != nil
	d.residency.mu.Unlock()
	if !resident {
		err = d.load(ctx, pages, ranks) // reads again, and on damage does what it does for a restore
		var gone *lostPages
		if errors.As(err, &gone) {
			return false, true, nil
		}
		if err == nil || errors.Is(err, errChanged) {
			if err == nil {
				d.residency.unpinAll(pages)
			}
			return false, false, nil
		}
		return false, false, err
	}
	defer d.residency.unpinAll(pages)
	if c.loose {
		_, err = d.dropLoose([]txn.Key{c.key})
		return false, err == nil, err
	}
	moved := d.counters.pagesMoved.Load()
	if err := d.move(ctx, pages); err != nil {
		return false, false, err
	}
	return d.counters.pagesMoved.Load() > moved, false, nil
}

// pinCopied pins a page if the copy is still its own; nil otherwise.
func (d *DB) pinCopied(c *copyOf) (p *page, ranks int, err error) {
	before := d.index.Snapshot()
	p, err = d.enterCopied(before, c)
	if err = errors.Join(err, before.Close()); p == nil {
		return nil, 0, err
	}
	ranks = len(p.place)
	pages, proven := []*page{p}, false
	now := d.index.Snapshot()
	if c.loose {
		proven, err = true, d.proveLoose(now, pages)
	} else {
		proven, err = d.prove(now, pages)
	}
	if err = errors.Join(err, now.Close()); err == nil && proven {
		return p, ranks, nil
	}
	d.settleUnproven(pages)
	d.residency.unpinAll(pages)
	if errors.Is(err, errChanged) {
		err = nil
	}
	return nil, 0, err
}

// enterCopied pins a page if the copy was its own in a reading of the index, which may be old.
func (d *DB) enterCopied(v txn.Reader, c *copyOf) (*page, error) {
	fresh := &page{key: c.key, bytes: c.bytes, known: true, unproven: true, class: segment.Shared}
	if c.loose {
		_, at, there, err := d.loose.find(v, c.key)
		if err != nil || !there || at != c.at {
			return nil, err
		}
		fresh.place, fresh.class = []txn.Placement{at}, segment.Loose
	} else {
		e, err := txn.ReadPage(v, c.key)
		if err != nil || e == nil || c.rank >= len(e.Place) || e.Place[c.rank] != c.at {
			return nil, err
		}
		fresh.place, fresh.parent, fresh.cool = e.Place, e.Parent, e.Current == 0
	}
	t := d.residency
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.pages.get(c.key)
	if p == nil && t.quarantine[c.key] == nil {
		p = fresh
		t.pages.put(p)
	}
	if p == nil || !p.known || p.lost || p.filler() != nil || !slices.Equal(p.place, fresh.place) {
		return nil, nil
	}
	t.pin(p)
	return p, nil
}

// scrubPause is the time between the end of a background pass and the begin of the next one.
const scrubPause = 24 * time.Hour

// scrubLoop scrubs in the background, at Options.ScrubBytesPerSecond, until the database closes.
func (d *DB) scrubLoop() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		select {
		case <-d.gate.stopping:
			cancel()
		case <-ctx.Done():
		}
	}()
	for {
		r, err := d.Scrub(ctx, ScrubOptions{BytesPerSecond: d.options.ScrubBytesPerSecond})
		if ctx.Err() != nil || errors.Is(err, ErrClosed) {
			return
		}
		d.scrubbed.Store(&r)
		if err != nil || r.Healed+r.Lost > 0 {
			d.options.Logger.Warn("scrub", "copies", r.Copies, "bytes", r.Bytes, "healed", r.Healed, "lost", r.Lost, "error", err)
		}
		timer := time.NewTimer(scrubPause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return
		}
	}
}

// Scrubbed gives the report of the last background scrub that came to an end; ok is false if there was none.
func (d *DB) Scrubbed() (r ScrubReport, ok bool) {
	if p := d.scrubbed.Load(); p != nil {
		return *p, true
	}
	return r, false
}
