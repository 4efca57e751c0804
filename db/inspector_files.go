package db

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/holdfast-db/holdfast/db/internal/index"
	"github.com/holdfast-db/holdfast/db/internal/segment"
	"github.com/holdfast-db/holdfast/txn"
)

func (i inspector) Log(ctx context.Context, q LogQuery) (*LogInfo, error) {
	limit := 0
	if q.Limit >= 0 {
		var err error
		if limit, err = limited("LogQuery.Limit", q.Limit, 100); err != nil {
			return nil, err
		}
	}
	r := &LogInfo{Files: []LogFile{}, Records: []LogRecord{}}
	err := i.look(ctx, func(v *index.Snapshot) error {
		l := i.d.log
		r.Bytes, r.First, r.Next, r.Synced, r.Cut = l.Size(), l.First(), l.Next(), l.Synced(), l.Repair().Cut
		for _, f := range l.Files() {
			r.Files = append(r.Files, LogFile{Path: f.Path, First: f.First, Last: f.Last, Bytes: f.Bytes})
		}
		var err error
		if r.Applied, err = txn.ReadApplied(v); err != nil {
			return err
		}
		if r.Durable, err = i.d.index.DurableApplied(); err != nil {
			return err
		}
		c, err := readClock(v)
		if err != nil || limit == 0 || len(r.Files) == 0 {
			return err
		}
		from := q.From
		if from == 0 && r.Next > txn.LSN(limit) {
			from = r.Next - txn.LSN(limit)
		}
		if first := r.Files[0].First; from <= first {
			from = 0 // what the log still holds
		}
		err = l.Replay(ctx, from, func(lsn txn.LSN, kind byte, payload []byte) error {
			x, err := decodeRecord(lsn, kind, payload)
			if err != nil {
				return err
			}
			x.After, x.Before = c.at(lsn)
			if r.Records = append(r.Records, x); len(r.Records) == limit {
				return errEnough
			}
			return nil
		})
		if errors.Is(err, errEnough) {
			err = nil
		}
		return err
	})
	return r, err
}

// recordGenerations bounds the generations of a record that are shown.
const recordGenerations = 16

func decodeRecord(lsn txn.LSN, kind byte, payload []byte) (r LogRecord, err error) {
	r = LogRecord{LSN: lsn, Kind: txn.Kind(kind).String(), Bytes: len(payload)}
	record, err := txn.Decode(txn.Kind(kind), payload)
	if err != nil {
		return r, fmt.Errorf("db: LSN %d: %w", lsn, err)
	}
	gens := func(g []Generation) {
		r.Count = len(g)
		r.Generations = slices.Clone(g[:min(len(g), recordGenerations)])
	}
	switch x := record.(type) {
	case *txn.Publish:
		g := x.Manifest.Generation()
		r.Count, r.Generations = 1, []Generation{g}
		placed := 0
		for i := range x.Pages {
			if len(x.Pages[i].Place) > 0 {
				placed++
			}
		}
		r.Detail = fmt.Sprintf("%s at %d in %s: %d new pages, %d on disk", CheckpointKind(x.Manifest.Kind), x.Manifest.Offset, x.Manifest.Namespace.Short(), len(x.Pages), placed)
		if n := len(x.Supersedes); n > 0 {
			r.Detail += fmt.Sprintf("; supersedes %s", shortOf(x.Supersedes))
		}
		if n := len(x.Replaced); n > 0 {
			r.Detail += fmt.Sprintf("; replaces %s", shortOf(x.Replaced))
		}
	case *txn.Supersede:
		gens(x.Generations)
		r.Detail = "current again"
		if !x.By.IsZero() {
			r.Detail = "superseded by " + x.By.Short()
		}
	case *txn.Retire:
		gens(x.Generations)
		r.Detail = x.Reason.String()
		if x.Delete {
			r.Detail += ", pages given up"
		}
	case *txn.Delete:
		gens(x.Generations)
		r.Detail = "pages given up"
	case *txn.Persist:
		r.Count = len(x.Pages)
		r.Detail = fmt.Sprintf("%d pages are on disk", len(x.Pages))
	case *txn.Mark:
		gens(x.Generations)
		r.Detail = "found by a lookup"
		if x.Mark == txn.MarkEndGrace {
			r.Detail = "time of grace is over"
		}
	}
	return r, nil
}

func shortOf(gens []Generation) string {
	var b strings.Builder
	for i, g := range gens {
		if i == 4 {
			fmt.Fprintf(&b, " and %d more", len(gens)-i)
			break
		}
		if i > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(g.Short())
	}
	return b.String()
}

func (i inspector) Segments(ctx context.Context, q SegmentQuery) (*SegmentMap, error) {
	if err := checkNumber("SegmentQuery.Cells", int64(q.Cells), 0, MaxSegmentCells); err != nil {
		return nil, err
	}
	r := &SegmentMap{Segments: []SegmentInfo{}}
	err := i.look(ctx, func(v *index.Snapshot) error {
		infos, err := i.d.segments.Segments()
		if err != nil {
			return err
		}
		live, err := i.d.loose.segments(v)
		if err != nil {
			return err
		}
		if err := txn.Segments(v, func(n uint64, use txn.SegmentUse) (bool, error) {
			x := live[n]
			live[n] = segmentLive{x.copies + use.LivePages, x.bytes + use.LiveBytes}
			return true, nil
		}); err != nil {
			return err
		}
		if over := len(infos) - MaxInspectList; over > 0 {
			r.Omitted, infos = over, infos[over:]
		}
		for _, info := range infos {
			x := live[info.Number]
			s := SegmentInfo{Number: info.Number, Class: "unknown", Size: info.Size, Sealed: info.Sealed, LivePages: x.copies, Live: x.bytes}
			// The class stands in the header, which opening does not read. One that cannot be read is for Verify to tell.
			if class, err := i.d.segments.Class(ctx, info.Number); err == nil {
				s.Class = class.String()
			} else if cancelled := given(ctx, "listing segments"); cancelled != nil {
				return cancelled
			}
			// Preallocated blocks behind the end are no part of the file yet.
			s.Free = max(info.Size-info.Allocated, 0)
			s.Dead = max(info.Size-s.Live-s.Free, 0)
			r.Segments = append(r.Segments, s)
		}
		if q.Cells == 0 {
			return nil
		}
		return i.mapSegments(ctx, v, r, q.Cells)
	})
	return r, err
}

// mapSegments draws what is alive in each segment. It reads every page entry.
func (i inspector) mapSegments(ctx context.Context, v *index.Snapshot, r *SegmentMap, cells int) error {
	at := map[uint64]int{}
	alive := make([][]int64, len(r.Segments))
	for n := range r.Segments {
		at[r.Segments[n].Number] = n
		alive[n] = make([]int64, cells)
	}
	draw := func(p txn.Placement) {
		n, ok := at[p.Segment]
		if !ok {
			return
		}
		spread(alive[n], r.Segments[n].Size, p.Offset, p.Allocated())
	}
	seen := 0
	if err := txn.Pages(v, func(_ txn.Key, entry *txn.PageEntry) (bool, error) {
		if seen++; seen%4096 == 0 {
			if err := given(ctx, "mapping segments"); err != nil {
				return false, err
			}
		}
		for _, p := range entry.Place {
			draw(p)
		}
		return true, nil
	}); err != nil {
		return err
	}
	if err := v.Scan(looseKey('p'), func(_, b []byte) (bool, error) {
		_, p, err := decodeLoose(b)
		draw(p)
		return err == nil, err
	}); err != nil {
		return err
	}
	for n := range r.Segments {
		s := &r.Segments[n]
		data, err := i.d.segments.Data(s.Number)
		if err != nil {
			data = []segment.Range{{Offset: 0, Bytes: s.Size}} // gone meanwhile: what is drawn is the catalogue's word
		}
		blocks := make([]int64, cells)
		for _, d := range data {
			spread(blocks, s.Size, d.Offset, d.Bytes)
		}
		s.Map = cellsOf(alive[n], blocks, s.Size)
	}
	return nil
}

// spread adds a part of a file to the cells that it lies in.
func spread(cells []int64, size, off, n int64) {
	k := int64(len(cells))
	if size <= 0 || off >= size {
		return
	}
	n = min(n, size-off)
	for c := off * k / size; c < k && n > 0; c++ {
		end := (c+1)*size/k + 1 // of the cell, rounded up so that every step moves on
		part := min(n, max(end-off, 1))
		cells[c] += part
		off, n = off+part, n-part
	}
}

func cellsOf(alive, blocks []int64, size int64) string {
	b := make([]byte, len(alive))
	each := max(size/int64(len(alive)), 1)
	for c := range b {
		switch {
		case blocks[c] < each/8 && alive[c] < each/8:
			b[c] = '.'
		default:
			b[c] = byte('0' + min(alive[c]*10/each, 9))
		}
	}
	return string(b)
}

func (i inspector) Index(ctx context.Context, q IndexQuery) (*IndexInfo, error) {
	r := new(IndexInfo)
	err := i.look(ctx, func(v *index.Snapshot) (err error) {
		s := i.d.index.Shape()
		r.DiskBytes, r.MemTableBytes, r.CacheBytes, r.CacheHits, r.CacheMisses = i.d.index.DiskBytes(), s.MemTableBytes, s.CacheBytes, s.CacheHits, s.CacheMisses
		for _, l := range s.Levels {
			r.Levels = append(r.Levels, IndexLevel(l))
		}
		if r.Applied, err = txn.ReadApplied(v); err != nil {
			return err
		}
		if r.Durable, err = i.d.index.DurableApplied(); err != nil || !q.Count {
			return err
		}
		r.Entries = map[string]int64{}
		names, seen := txn.EntryKinds(), 0
		count := func(name string) func(k, _ []byte) (bool, error) {
			return func(k, _ []byte) (bool, error) {
				if seen++; seen%4096 == 0 {
					if err := given(ctx, "counting entries"); err != nil {
						return false, err
					}
				}
				if name == "" {
					r.Entries[names[k[0]]]++
					return true, nil
				}
				r.Entries[name]++
				return true, nil
			}
		}
		if err := v.Scan(nil, count("")); err != nil {
			return err
		}
		if err := v.Scan(looseKey('p'), count("loose pages")); err != nil {
			return err
		}
		return v.Scan([]byte{index.HistoryTag}, count("history"))
	})
	return r, err
}
