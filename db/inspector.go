package db

import (
	"cmp"
	"context"
	"encoding/hex"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/holdfast-db/holdfast/db/internal/index"
	"github.com/holdfast-db/holdfast/txn"
)

// inspector answers for a database that is open in this process. Everything of the catalogue comes from a snapshot; what is in RAM is
// read under the lock of the table, page by page or a batch at a time, never over I/O.
type inspector struct{ d *DB }

// Inspector gives the one for this database.
func (d *DB) Inspector() Inspector { return inspector{d} }

// look admits a question and gives it a view of the catalogue.
func (i inspector) look(ctx context.Context, fn func(v *index.Snapshot) error) error {
	if err := i.d.gate.enterWith(ctx); err != nil {
		return err
	}
	defer i.d.gate.leave()
	v := i.d.index.Snapshot()
	defer v.Close()
	return fn(v)
}

func given(ctx context.Context, what string) error {
	if ctx.Err() == nil {
		return nil
	}
	return fmt.Errorf("db: %s: the context ended: %w: %w", what, ErrBusy, context.Cause(ctx))
}

func (i inspector) Overview(ctx context.Context) (*Overview, error) {
	d := i.d
	s, err := d.Stats()
	if err != nil {
		return nil, err
	}
	o := d.options
	r := &Overview{
		Directory: d.dir.path, ID: d.dir.marker.id.String(), Epoch: d.dir.marker.epoch, Format: formatVersion, ReadOnly: o.ReadOnly,
		PID: os.Getpid(), Opened: d.begun, At: time.Now(), Recovered: d.RecoveryReport(), Durable: o.WritePolicy != Never && !o.ReadOnly, Stats: s, Scrubbed: d.scrubbed.Load(),
		Settings: Settings{
			WritePolicy: o.WritePolicy.String(), RAMBytes: s.RAMCapacity, DiskBytes: s.DiskBudget, SegmentBytes: o.SegmentBytes, ReplayBytes: o.ReplayBytes,
			ScrubBytes: o.ScrubBytesPerSecond, AdmissionTimeout: o.AdmissionTimeout, LoadTimeout: o.LoadTimeout, LeaseTimeout: o.LeaseTimeout,
			SupersedeGrace: o.SupersedeGrace, HistoryAge: o.HistoryAge, PublicationsMax: MaxPending, LeasesMax: MaxLeases, OwnersMax: MaxOwners,
			QuarantinedMax: MaxQuarantine, Introspection: o.Introspection,
		},
	}
	if err := d.log.Err(); err != nil {
		r.LogError = err.Error()
	}
	err = i.look(ctx, func(v *index.Snapshot) error {
		c, err := readClock(v)
		if err == nil {
			r.HistoryFrom = d.history.from(c)
		}
		return err
	})
	return r, err
}

// from gives the time before which retirements are forgotten. The first mark is as old as the directory, or as what was kept of it.
func (h *chronicle) from(c clock) (t time.Time) {
	if h.age > 0 {
		t = h.now().Add(-h.age).UTC()
	}
	if len(c) > 0 && c[0].At.After(t) {
		t = c[0].At
	}
	return t
}

func (i inspector) Namespaces(ctx context.Context) (out []NamespaceInfo, err error) {
	err = i.look(ctx, func(v *index.Snapshot) error {
		at := map[txn.Key]int{}
		if err := txn.Namespaces(v, func(ns txn.Key, encoding []byte) (bool, error) {
			n, err := ParseNamespace(encoding)
			if err != nil {
				return false, err
			}
			at[ns] = len(out)
			out = append(out, NamespaceInfo{ID: ns, Identity: n.Identity()})
			return true, nil
		}); err != nil {
			return err
		}
		return eachState(ctx, v, Generation{}, func(g Generation, s *txn.State) (bool, error) {
			m, err := txn.ReadManifest(v, g)
			if err != nil || m == nil {
				return err == nil, err
			}
			n := &out[at[m.Namespace]]
			if s.Status != txn.Listed {
				n.Retired++
				return true, nil
			}
			n.Listed++
			if s.Superseded() {
				n.Superseded++
			}
			n.Tokens = max(n.Tokens, m.Offset)
			n.SharedBytes += m.Bytes()
			return true, nil
		})
	})
	return out, err
}

// eachState calls fn for every checkpoint behind after. Reading the view is allowed inside.
func eachState(ctx context.Context, v txn.Seeker, after Generation, fn func(g Generation, s *txn.State) (bool, error)) error {
	type one struct {
		g Generation
		s *txn.State
	}
	for {
		var some []one // so that reading them does not go on inside the scan
		if err := txn.StatesAfter(v, after, func(g Generation, s *txn.State) (bool, error) {
			some = append(some, one{g, s})
			return len(some) < 1024, nil
		}); err != nil || len(some) == 0 {
			return err
		}
		if err := given(ctx, "looking at checkpoints"); err != nil {
			return err
		}
		for _, x := range some {
			if more, err := fn(x.g, x.s); err != nil || !more {
				return err
			}
		}
		after = some[len(some)-1].g
	}
}

func (q *ListQuery) validate() error {
	if !slices.Contains([]string{"", "current", "superseded", "listed", "retired", "undurable"}, q.State) {
		return fmt.Errorf("db: state %.80q: want current, superseded, listed, retired or undurable: %w", q.State, ErrInvalid)
	}
	if !slices.Contains([]string{"", "ram", "disk", "both"}, q.Tier) {
		return fmt.Errorf("db: tier %.80q: want ram, disk or both: %w", q.Tier, ErrInvalid)
	}
	return nil
}

func (q *ListQuery) wants(c *CheckpointInfo, now time.Time) bool {
	listed := c.State != "retired"
	switch q.State {
	case "listed":
		if !listed {
			return false
		}
	case "undurable":
		if !listed || c.Durable {
			return false
		}
	case "":
	default:
		if c.State != q.State {
			return false
		}
	}
	return (q.Namespace.IsZero() || q.Namespace == c.Namespace) && (q.Tier == "" || q.Tier == c.Tier) && (q.Request == "" || q.Request == c.Request) &&
		c.Bytes >= q.MinBytes && (q.MaxBytes == 0 || c.Bytes <= q.MaxBytes) &&
		(q.Older == 0 || !c.Before.IsZero() && now.Sub(c.Before) >= q.Older) && (q.Newer == 0 || !c.After.IsZero() && now.Sub(c.After) <= q.Newer)
}

func (i inspector) List(ctx context.Context, q ListQuery) (*CheckpointList, error) {
	limit, err := limited("ListQuery.Limit", q.Limit, 1000)
	if err == nil {
		err = q.validate()
	}
	if err != nil {
		return nil, err
	}
	l := &CheckpointList{Checkpoints: []CheckpointInfo{}}
	now := time.Now()
	err = i.look(ctx, func(v *index.Snapshot) error {
		c, err := readClock(v)
		if err != nil {
			return err
		}
		seen := 0
		return eachState(ctx, v, q.After, func(g Generation, s *txn.State) (bool, error) {
			info, _, err := i.describe(v, c, g, s)
			if err != nil {
				return false, err
			}
			if q.wants(&info, now) {
				l.Checkpoints = append(l.Checkpoints, info)
			}
			if seen++; len(l.Checkpoints) == limit || seen == MaxInspectScan {
				l.Next = g
				return false, nil
			}
			return true, nil
		})
	})
	return l, err
}

func (i inspector) describe(v txn.Reader, c clock, g Generation, s *txn.State) (info CheckpointInfo, m *txn.Manifest, err error) {
	m, err = txn.ReadManifest(v, g)
	if err == nil && m == nil {
		err = fmt.Errorf("db: generation %s has a state and no manifest: %w", g, ErrCorrupt)
	}
	if err != nil {
		return info, nil, err
	}
	info = CheckpointInfo{
		Generation: g, Namespace: m.Namespace, State: "current", Offset: m.Offset, Kind: CheckpointKind(m.Kind).String(), Request: m.Request,
		Continues: m.Continues, Previous: m.Previous, SupersededBy: s.SupersededBy, Ranks: m.Ranks, Pages: m.Pages(), Bytes: m.Bytes(),
		MetaBytes: len(m.Meta), Durable: s.Durable, Grace: s.Grace, Continued: s.Continued, Published: s.Published, Used: s.Used,
	}
	switch {
	case s.Status == txn.Retired:
		info.State = "retired"
	case s.Superseded():
		info.State = "superseded"
	}
	info.After, info.Before = c.at(s.Published)
	info.Tier = i.d.residency.tierOf(m, s.Durable)
	return info, m, nil
}

// tierOf says where the pages are that a manifest names itself.
func (r *residency) tierOf(m *txn.Manifest, durable bool) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	inRAM := true
	for i := range m.Groups {
		g := &m.Groups[i]
		keys := g.Keys
		if g.Chained {
			keys = []txn.Key{g.Head}
		}
		for _, key := range keys {
			p := r.pages.get(key)
			inRAM = inRAM && p != nil && p.slots != nil && p.filler() == nil
		}
	}
	switch {
	case inRAM && durable:
		return "both"
	case inRAM:
		return "ram"
	case durable:
		return "disk"
	}
	return "none"
}

func (i inspector) Resolve(ctx context.Context, digits string) (out []Generation, err error) {
	digits = strings.ToLower(digits)
	if len(digits) < 4 || len(digits) > 64 || strings.Trim(digits, "0123456789abcdef") != "" {
		return nil, fmt.Errorf("db: generation %.80q: want 4…64 hex digits: %w", digits, ErrInvalid)
	}
	b, err := hex.DecodeString(digits[:len(digits)&^1])
	if err != nil {
		return nil, fmt.Errorf("db: generation %.80q: %w: %w", digits, ErrInvalid, err)
	}
	found := map[Generation]bool{}
	take := func(g Generation) bool {
		if strings.HasPrefix(g.String(), digits) {
			found[g] = true
		}
		return len(found) < MaxResolved
	}
	for _, p := range i.d.pending.list() {
		take(p.gen)
	}
	err = i.look(ctx, func(v *index.Snapshot) error {
		var from Generation // the one before the first that begins like this
		copy(from[:], b)
		for n := len(from) - 1; n >= 0; n-- {
			from[n]--
			if from[n] != 0xff {
				break
			}
		}
		if slices.Equal(b, make([]byte, len(b))) {
			from = Generation{}
		}
		if err := txn.StatesAfter(v, from, func(g Generation, _ *txn.State) (bool, error) {
			return take(g) && string(g[:len(b)]) <= string(b), nil
		}); err != nil {
			return err
		}
		return retirements(v, nil, func(r *Retirement) bool { return take(r.Generation) })
	})
	return slices.SortedFunc(maps.Keys(found), func(a, b Generation) int { return cmp.Compare(string(a[:]), string(b[:])) }), err
}

// list gives the publications that are pending.
func (s *pendingPublications) list() (all []*Publication) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for p := range s.all {
		all = append(all, p)
	}
	return all
}

func (i inspector) Manifest(ctx context.Context, q ManifestQuery) (*ManifestInfo, error) {
	limit, err := limited("ManifestQuery.Limit", q.Limit, 1000)
	if err == nil {
		err = checkNumber("ManifestQuery.First", q.First, 0, MaxCheckpointPages)
	}
	if err != nil {
		return nil, err
	}
	r := &ManifestInfo{Pages: []PageInfo{}}
	err = i.look(ctx, func(v *index.Snapshot) error {
		s, err := txn.ReadState(v, q.Generation)
		if err == nil && s == nil {
			err = fmt.Errorf("db: generation %s is neither listed nor retired: %w", q.Generation, ErrNotFound)
		}
		if err != nil {
			return err
		}
		c, err := readClock(v)
		if err != nil {
			return err
		}
		info, m, err := i.describe(v, c, q.Generation, s)
		if err != nil {
			return err
		}
		encoding, err := txn.ReadNamespace(v, m.Namespace)
		if err != nil {
			return err
		}
		ns, err := ParseNamespace(encoding)
		if err != nil {
			return err
		}
		r.CheckpointInfo, r.Prefix, r.Meta = info, m.Prefix, m.Meta
		skip := q.First
		for n := range m.Groups {
			g, at := &m.Groups[n], &ns.identity.Layout.Groups[n]
			r.Groups = append(r.Groups, GroupInfo{Name: at.Name, Kind: at.Kind.String(), Chained: g.Chained, PageBytes: g.PageBytes, PageTokens: at.PageTokens, Pages: g.Count})
			if skip >= g.Count {
				skip -= g.Count
				continue
			}
			keys := g.Keys
			if g.Chained && len(r.Pages) < limit {
				if keys, err = txn.ChainPages(v, g.Head, g.Count); err != nil {
					return err
				}
			}
			for ; skip < int64(len(keys)) && len(r.Pages) < limit; skip++ {
				p := PageInfo{Group: at.Name, Position: skip, Key: keys[skip], Bytes: g.PageBytes}
				if !g.Chained {
					p.Position = g.Positions[skip]
				}
				if err := i.page(v, &p); err != nil {
					return err
				}
				r.Pages = append(r.Pages, p)
			}
			skip = 0
		}
		if next := q.First + int64(len(r.Pages)); next < m.Pages() {
			r.Next = next
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return r, nil
}

// page fills in where the copies of a page are.
func (i inspector) page(v txn.Reader, p *PageInfo) error {
	entry, err := txn.ReadPage(v, p.Key)
	if err != nil {
		return err
	}
	if entry != nil {
		p.Needed = entry.Listed
		for rank, at := range entry.Place {
			codec := "none"
			if at.Codec == txn.CodecZstd {
				codec = "zstd"
			}
			p.Disk = append(p.Disk, PlacementInfo{Rank: rank, Segment: at.Segment, Offset: at.Offset, Stored: at.Stored, Codec: codec, Checksum: fmt.Sprintf("%016x", at.Checksum)})
		}
	}
	r := i.d.residency
	r.mu.Lock()
	defer r.mu.Unlock()
	_, p.Quarantined = r.quarantine[p.Key]
	x := r.pages.get(p.Key)
	if x == nil {
		return nil
	}
	p.Pins = int(x.pins)
	switch {
	case x.filler() != nil:
		p.RAM = "filling"
	case x.slots == nil && x.job() != nil:
		p.RAM = "loading"
	case x.slots == nil:
	case x.job() != nil:
		p.RAM = "writing"
	case x.dirty():
		p.RAM = "dirty"
	default:
		p.RAM = "clean"
	}
	return nil
}

func (i inspector) Leases(ctx context.Context) (*LeaseList, error) {
	d := i.d
	r := &LeaseList{Owners: []OwnerInfo{}, Leases: []LeaseInfo{}}
	if err := d.gate.enterWith(ctx); err != nil {
		return nil, err
	}
	defer d.gate.leave()
	d.owners.mu.Lock()
	owners := slices.Collect(maps.Keys(d.owners.all))
	d.owners.mu.Unlock()
	for _, o := range owners {
		o.mu.Lock()
		r.Owners = append(r.Owners, OwnerInfo{Name: o.name, TTL: o.ttl, Held: len(o.held)})
		o.mu.Unlock()
	}
	slices.SortFunc(r.Owners, func(a, b OwnerInfo) int { return cmp.Compare(a.Name, b.Name) })
	d.leases.mu.Lock()
	terms := slices.Collect(maps.Values(d.leases.all))
	d.leases.mu.Unlock()
	for _, t := range terms {
		info := LeaseInfo{Owner: t.owner, Began: t.began, Until: t.until}
		switch h := t.holder.(type) {
		case *Publication:
			info.Kind, info.Generation, info.Namespace, info.Offset = "publication", h.gen, h.manifest.Namespace, h.manifest.Offset
			d.residency.sum(&info, func() []*page { return h.claims })
		case *Restoration:
			info.Kind, info.Generation, info.Offset = "restoration", h.gen, h.offset
			d.residency.sum(&info, func() []*page { return h.pages })
		case *LooseLease:
			info.Kind = "loose pages"
			d.residency.sum(&info, func() []*page { return h.pages })
		}
		r.Leases = append(r.Leases, info)
	}
	slices.SortFunc(r.Leases, func(a, b LeaseInfo) int { return a.Began.Compare(b.Began) })
	return r, nil
}

// sum adds up the pages that pages gives, with residency.mu.
func (r *residency) sum(into *LeaseInfo, pages func() []*page) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range pages() {
		into.Pages++
		into.Bytes += p.bytes * int64(len(p.slots))
	}
}

func (i inspector) Activity(ctx context.Context) (*Activity, error) {
	if err := i.d.gate.enterWith(ctx); err != nil {
		return nil, err
	}
	defer i.d.gate.leave()
	r := &Activity{Events: []EventInfo{}, Latencies: []LatencyInfo{}}
	for _, e := range i.d.RecentEvents() {
		x := EventInfo{
			LSN: e.LSN, At: e.Time, Kind: e.Kind.String(), Generation: e.Generation, By: e.By, Offset: e.Offset, Request: e.Request,
			Pages: e.Pages, NewPages: e.NewPages, Bytes: e.Bytes,
		}
		if e.Reason != 0 {
			x.Reason = e.Reason.String()
		}
		r.Events = append(r.Events, x)
	}
	for _, l := range i.d.Latencies() {
		if l.Count == 0 {
			continue
		}
		x := LatencyInfo{Operation: l.Operation, Count: l.Count, Sum: l.Sum, P50: l.Quantile(0.5), P99: l.Quantile(0.99), Max: l.Max}
		for _, b := range l.Buckets {
			x.Buckets = append(x.Buckets, LatencyBucketInfo(b))
		}
		r.Latencies = append(r.Latencies, x)
	}
	return r, nil
}

func (i inspector) History(ctx context.Context, q HistoryQuery) (*HistoryInfo, error) {
	limit := 0
	if q.Limit >= 0 {
		var err error
		if limit, err = limited("HistoryQuery.Limit", q.Limit, 100); err != nil {
			return nil, err
		}
	}
	if err := checkNumber("HistoryQuery.Samples", int64(q.Samples), 0, MaxInspectList); err != nil {
		return nil, err
	}
	r := &HistoryInfo{Retirements: []Retirement{}, Reasons: map[string]int64{}}
	err := i.look(ctx, func(v *index.Snapshot) error {
		c, err := readClock(v)
		if err != nil {
			return err
		}
		r.From = i.d.history.from(c)
		r.Samples = c.spread(q.Samples)
		return retirements(v, c, func(x *Retirement) bool {
			r.Reasons[x.Reason]++
			if len(r.Retirements) < limit && (q.Namespace.IsZero() || q.Namespace == x.Namespace) {
				r.Retirements = append(r.Retirements, *x)
			}
			return true
		})
	})
	return r, err
}

// spread gives at most n samples, evenly over time, the last one among them.
func (c clock) spread(n int) []Sample {
	if n == 0 || len(c) == 0 {
		return nil
	}
	if len(c) <= n {
		return c
	}
	first, last := c[0].At, c[len(c)-1].At
	step := last.Sub(first) / time.Duration(n)
	out := make([]Sample, 0, n)
	due := first
	for i := range c {
		if i == len(c)-1 && len(out) == n {
			out = out[:n-1]
		}
		if i == len(c)-1 || len(out) < n && !c[i].At.Before(due) {
			out = append(out, c[i])
			due = c[i].At.Add(step)
		}
	}
	return out
}
