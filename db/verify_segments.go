package db

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/holdfast-db/holdfast/db/internal/segment"
	"github.com/holdfast-db/holdfast/txn"
)

// leftovers finds what an open that was cut short left beside the marker.
func (v *verifier) leftovers() error {
	path := v.dir.join(markerName + temporarySuffix)
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return osError("stat", path, err)
	}
	v.find(Finding{Kind: "leftover", File: path, Offset: -1, Bytes: info.Size(), Detail: "a marker that was not put in place", Remedy: ByOpen})
	return nil
}

func (v *verifier) openSegments() (err error) {
	v.segments, err = segment.Open(v.dir.join(dataName), segment.Options{DatabaseID: v.dir.marker.id, ReadOnly: true, Logger: v.o.Logger})
	if err != nil {
		return fmt.Errorf("db: %w", err)
	}
	infos, err := v.segments.Segments()
	if err != nil {
		return fmt.Errorf("db: %w", err)
	}
	v.report.Segments = len(infos)
	for _, info := range infos {
		v.files[info.Number] = info.Size
	}
	return nil
}

func (v *verifier) file(number uint64) string {
	return filepath.Join(v.dir.join(dataName), fmt.Sprintf("%020d.seg", number))
}

// scanSegments reads the header and the descriptors of every file, and compares them with the catalogue, if there is one.
func (v *verifier) scanSegments(ctx context.Context, r txn.Reader) error {
	numbers := make([]uint64, 0, len(v.files))
	for n := range v.files {
		numbers = append(numbers, n)
	}
	slices.Sort(numbers)
	live := map[uint64]segmentLive{}
	if r != nil {
		var err error
		if live, err = v.loose.segments(r); err != nil {
			return err
		}
		if err := txn.Segments(r, func(n uint64, use txn.SegmentUse) (bool, error) {
			live[n] = segmentLive{live[n].copies + use.LivePages, live[n].bytes + use.LiveBytes}
			return true, nil
		}); err != nil {
			return err
		}
	}
	for _, n := range numbers {
		sum, err := v.segments.Scan(ctx, n, func(e segment.Entry) error {
			if r == nil {
				return nil
			}
			is, err := v.isLive(r, &e)
			if is {
				v.matched[n]++
			}
			return err
		})
		if errors.Is(err, ErrUnsupported) || errors.Is(err, ErrIO) || errors.Is(err, ErrBusy) || errors.Is(err, ErrPermission) {
			return err
		}
		if err != nil {
			return v.unreadable(err)
		}
		if r != nil && live[n].copies == 0 {
			continue // orphaned, and said so
		}
		if sum.Header != nil {
			v.find(Finding{Kind: "segment", File: v.file(n), Offset: 0, Detail: sum.Header.Error(), Remedy: ByRecover})
		}
		if missing := live[n].copies - v.matched[n]; r != nil && missing > 0 && v.short[n] == nil {
			at := sum.SkippedAt
			if sum.Skipped == 0 {
				at = -1
			}
			v.find(Finding{Kind: "descriptor", File: v.file(n), Offset: at, Bytes: sum.Skipped, Remedy: ByRecover,
				Detail: fmt.Sprintf("descriptors are damaged: %d of %d live page copies are described by the index alone", missing, live[n].copies)})
		}
		if r != nil && (sum.Header != nil || live[n].copies > v.matched[n]) && v.short[n] == nil {
			if err := v.toMove(r, n); err != nil {
				return err
			}
			if err := v.loose.all(r, func(key txn.Key, _ int64, at txn.Placement) error {
				if at.Segment == n {
					v.lost = append(v.lost, key)
				}
				return nil
			}); err != nil {
				return err
			}
		}
	}
	return nil
}

// isLive reports whether the catalogue names this very copy.
func (v *verifier) isLive(r txn.Reader, e *segment.Entry) (bool, error) {
	if e.Class == segment.Loose {
		_, at, ok, err := v.loose.find(r, e.Key)
		return ok && at == e.Place, err
	}
	p, err := txn.ReadPage(r, e.Key)
	return p != nil && int(e.Rank) < len(p.Place) && p.Place[e.Rank] == e.Place, err
}

// toMove notes the pages of checkpoints that live in a damaged file: recover writes them anew. Loose pages are not moved; those
// that their file no longer describes are given up.
func (v *verifier) toMove(r txn.Reader, number uint64) error {
	return txn.Pages(r, func(key txn.Key, e *txn.PageEntry) (bool, error) {
		if slices.ContainsFunc(e.Place, func(p txn.Placement) bool { return p.Segment == number }) {
			v.move[number] = append(v.move[number], key)
		}
		return true, nil
	})
}
