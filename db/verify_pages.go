package db

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/holdfast-db/holdfast/db/internal/segment"
	"github.com/holdfast-db/holdfast/txn"
)

// copyOf is one page copy to be read.
type copyOf struct {
	key   txn.Key
	rank  int
	bytes int64
	at    txn.Placement
	loose bool
}

// readPages reads every page copy, in the order of the keys, checkpoints' pages first.
func (v *verifier) readPages(ctx context.Context, r txn.Reader) error {
	var batch []copyOf
	bytes := int64(0)
	flush := func() error {
		err := v.readCopies(ctx, r, batch)
		batch, bytes = batch[:0], 0
		return err
	}
	for b := int(v.o.From[0]); b < 256; b++ {
		err := txn.PagesUnder(r, []byte{byte(b)}, func(key txn.Key, e *txn.PageEntry) (bool, error) {
			if strings.Compare(string(key[:]), string(v.o.From[:])) < 0 {
				return true, nil
			}
			if len(batch) == 0 {
				v.report.Next = key
			}
			if ctx.Err() != nil {
				return false, fmt.Errorf("db: verify: %w: %w", ErrBusy, context.Cause(ctx))
			}
			for rank, at := range e.Place {
				if v.isShort(r, key, at) {
					continue
				}
				batch = append(batch, copyOf{key: key, rank: rank, bytes: e.Bytes, at: at})
				bytes += e.Bytes
			}
			v.report.Pages++
			if len(batch) >= verifyCopies || bytes >= verifyBytes {
				return true, flush()
			}
			return true, nil
		})
		if err != nil {
			return err
		}
	}
	if err := flush(); err != nil {
		return err
	}
	v.report.Next = txn.Key{}
	err := v.loose.all(r, func(key txn.Key, size int64, at txn.Placement) error {
		if ctx.Err() != nil {
			return fmt.Errorf("db: verify: %w: %w", ErrBusy, context.Cause(ctx))
		}
		v.report.Pages++
		v.report.Loose++
		if v.short[at.Segment] != nil && at.Offset+at.Stored > v.files[at.Segment] {
			v.lost = append(v.lost, key)
			return nil
		}
		batch = append(batch, copyOf{key: key, bytes: size, at: at, loose: true})
		if bytes += size; len(batch) >= verifyCopies || bytes >= verifyBytes {
			return flush()
		}
		return nil
	})
	if err == nil {
		err = flush()
	}
	for _, n := range slices.Sorted(maps.Keys(v.short)) {
		v.short[n].Checkpoints = slices.Collect(maps.Keys(v.losing[n]))
		v.find(*v.short[n])
	}
	clear(v.short)
	return err
}

// isShort tells whether a copy lies where its file has ended, and then adds what needs it to the finding about the file.
func (v *verifier) isShort(r txn.Reader, key txn.Key, at txn.Placement) bool {
	f := v.short[at.Segment]
	if f == nil || at.Offset+at.Stored <= v.files[at.Segment] {
		return false
	}
	v.lost = append(v.lost, key)
	gens, err := v.listedWith(r, key)
	if err != nil {
		return false // reading it will tell
	}
	if v.losing[at.Segment] == nil {
		v.losing[at.Segment] = map[Generation]bool{}
	}
	for _, g := range gens {
		v.losing[at.Segment][g] = true
	}
	return true
}

// readCopies reads one batch and finds what is wrong with it.
func (v *verifier) readCopies(ctx context.Context, r txn.Reader, batch []copyOf) error {
	if len(batch) == 0 {
		return nil
	}
	requests := make([]segment.ReadRequest, len(batch))
	stored := int64(0)
	for i, c := range batch {
		if c.bytes < 1 || c.bytes > MaxPageBytes {
			return fmt.Errorf("db: page %s has %d bytes: %w", c.key.Short(), c.bytes, ErrCorrupt)
		}
		requests[i] = segment.ReadRequest{Place: c.at, Key: c.key, Rank: uint16(c.rank), Dst: make([]byte, c.bytes)}
		stored += c.at.Stored
	}
	errs := v.segments.ReadBatch(ctx, requests)
	for i, err := range errs {
		if err == nil {
			continue
		}
		if errors.Is(err, ErrBusy) || errors.Is(err, ErrPermission) {
			return err
		}
		if err := v.badCopy(r, &batch[i], err); err != nil {
			return err
		}
	}
	v.report.Copies += int64(len(batch))
	v.report.Bytes += stored
	v.pause(ctx, stored)
	v.tell()
	return nil
}

// badCopy adds the finding about a page copy.
func (v *verifier) badCopy(r txn.Reader, c *copyOf, cause error) error {
	f := Finding{Kind: "page", File: v.file(c.at.Segment), Offset: c.at.Offset, Bytes: c.at.Stored, Page: c.key, Rank: c.rank, Detail: cause.Error(), Remedy: ByRecover}
	v.lost = append(v.lost, c.key)
	if c.loose {
		f.Group = "loose"
		v.find(f)
		return nil
	}
	var err error
	if f.Checkpoints, err = v.listedWith(r, c.key); err != nil {
		return err
	}
	for _, g := range f.Checkpoints {
		if f.Group, err = v.groupOf(r, g, c.key); err != nil || f.Group != "" {
			break
		}
	}
	v.find(f)
	return err
}

// listedWith gives the listed checkpoints that need a page.
func (v *verifier) listedWith(r txn.Reader, key txn.Key) ([]Generation, error) {
	gens, err := txn.Dependents(r, key)
	if err != nil {
		return nil, err
	}
	listed := gens[:0]
	for _, g := range gens {
		s, err := txn.ReadState(r, g)
		if err != nil {
			return nil, err
		}
		if s != nil && s.Status == txn.Listed {
			listed = append(listed, g)
		}
	}
	return listed, nil
}

// groupOf names the group of a checkpoint that a page belongs to.
func (v *verifier) groupOf(r txn.Reader, g Generation, key txn.Key) (string, error) {
	m, err := txn.ReadManifest(r, g)
	if err != nil || m == nil {
		return "", err
	}
	ns := v.names[m.Namespace]
	if ns == nil {
		encoding, err := txn.ReadNamespace(r, m.Namespace)
		if err != nil {
			return "", err
		}
		if ns, err = ParseNamespace(encoding); err != nil {
			return "", err
		}
		v.names[m.Namespace] = ns
	}
	for i := range m.Groups {
		keys := m.Groups[i].Keys
		if m.Groups[i].Chained {
			if keys, err = txn.ChainPages(r, m.Groups[i].Head, m.Groups[i].Count); err != nil {
				return "", err
			}
		}
		if i < len(ns.identity.Layout.Groups) && slices.Contains(keys, key) {
			return ns.identity.Layout.Groups[i].Name, nil
		}
	}
	return "", nil
}
