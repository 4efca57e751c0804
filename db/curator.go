package db

import (
	"context"
	"sync"
	"time"

	"github.com/holdfast-db/holdfast/txn"
)

// curator keeps the order of eviction true to what happens, in the background. Lookups and restores tell it which checkpoints
// were found: a superseded one becomes current again, any other the youngest. Publications tell it which superseded
// checkpoints have a time of grace, and it ends that. All of it is preference: its records are logged and not waited
// for, a crash may lose the last few, and nobody's call waits for it.
//
// Times are monotonic. A restart begins the time of grace anew, because the clocks of two processes cannot be compared; what is in
// it is looked for when it is over, and not at open.
type curator struct {
	db    *DB
	grace time.Duration
	wake  chan struct{}

	turn longLock // held over work: what was noted before a call of it is recorded when it returns

	mu       sync.Mutex // guards what follows
	youngest Generation // the last one that was listed or marked as used: finding it changes nothing
	found    map[foundCheckpoint]bool
	graced   []gracedCheckpoints // by rising deadline
	earlier  time.Time           // when the grace ends of what was superseded before the open; zero once that is done
	since    txn.LSN             // up to it, before the open
}

// foundCheckpoint is a checkpoint that was found, or, for a match inside a longer one, the last page of it that was used.
type foundCheckpoint struct {
	gen  Generation
	page txn.Key
}

type gracedCheckpoints struct {
	until time.Time
	gens  []Generation
}

// foundMax bounds the finds that wait to be recorded; more are dropped, which costs recency and nothing else.
const foundMax = 4096

func newCurator(d *DB, grace time.Duration, since txn.LSN) *curator {
	return &curator{db: d, grace: grace, earlier: time.Now().Add(grace), since: since, turn: newLongLock(), wake: make(chan struct{}, 1), found: map[foundCheckpoint]bool{}}
}

func (c *curator) signal() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// note remembers a find. It does not block.
func (c *curator) note(at candidate) {
	f := foundCheckpoint{gen: at.gen, page: at.last}
	if f.gen.IsZero() && f.page.IsZero() || c.db.options.ReadOnly {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.found[f] || f.gen == c.youngest && !f.gen.IsZero() {
		return
	}
	if len(c.found) >= foundMax {
		c.db.counters.findsDropped.Add(1)
		return
	}
	c.found[f] = true
	c.signal()
}

// listed says that a checkpoint is the youngest now. On the committer goroutine.
func (c *curator) listed(g Generation) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.youngest = g
}

// spare begins the time of grace of checkpoints. It does not block.
func (c *curator) spare(gens []Generation) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.graced = append(c.graced, gracedCheckpoints{until: time.Now().Add(c.grace), gens: gens})
	c.signal()
}

// work records what is due and gives the time until more is. It is called again when told so, or when that time is over.
func (c *curator) work(ctx context.Context) (time.Duration, error) {
	c.turn.Lock()
	defer c.turn.Unlock()
	c.mu.Lock()
	var found map[foundCheckpoint]bool
	if len(c.found) > 0 {
		found, c.found = c.found, map[foundCheckpoint]bool{}
	}
	var over []Generation
	for len(c.graced) > 0 && !time.Now().Before(c.graced[0].until) {
		over = append(over, c.graced[0].gens...)
		c.graced = c.graced[1:]
	}
	next := time.Duration(-1)
	if len(c.graced) > 0 {
		next = time.Until(c.graced[0].until)
	}
	earlier := !c.earlier.IsZero()
	if earlier && time.Now().Before(c.earlier) {
		if left := time.Until(c.earlier); next < 0 || left < next {
			next = left
		}
		earlier = false
	}
	c.mu.Unlock()
	if earlier {
		gens, err := c.gracedBefore()
		if err != nil {
			return next, err
		}
		over = append(over, gens...)
	}
	if len(found) > 0 {
		if err := c.record(ctx, found); err != nil {
			return next, err
		}
	}
	for len(over) > 0 {
		some := over[:min(len(over), retireAtOnce)]
		over = over[len(some):]
		err := c.db.committer.commit(ctx, &transaction{decide: func(v txn.Reader) (txn.Record, error) {
			return optional(txn.DecideMark(v, txn.MarkEndGrace, some))
		}}, false)
		if err != nil {
			return next, err
		}
	}
	if earlier {
		c.mu.Lock()
		c.earlier = time.Time{}
		c.mu.Unlock()
	}
	return next, nil
}

// gracedBefore gives the checkpoints in grace that were superseded by what was published before the open.
func (c *curator) gracedBefore() (gens []Generation, err error) {
	snapshot := c.db.index.Snapshot()
	defer snapshot.Close()
	var graced []Generation
	if err := txn.InGrace(snapshot, func(g Generation) (bool, error) {
		graced = append(graced, g)
		return true, nil
	}); err != nil {
		return nil, err
	}
	for _, g := range graced {
		s, err := txn.ReadState(snapshot, g)
		if err != nil || s == nil {
			return gens, err
		}
		by, err := txn.ReadState(snapshot, s.SupersededBy)
		if err != nil {
			return gens, err
		}
		if by == nil || by.Published <= c.since {
			gens = append(gens, g)
		}
	}
	return gens, nil
}

// record makes found checkpoints current and young again.
func (c *curator) record(ctx context.Context, found map[foundCheckpoint]bool) error {
	gens := make([]Generation, 0, len(found))
	resolve := func(v txn.Reader) error {
		gens = gens[:0]
		for f := range found {
			if f.gen.IsZero() {
				g, err := txn.AnyListed(v, f.page)
				if err != nil {
					return err
				}
				f.gen = g
			}
			if !f.gen.IsZero() {
				gens = append(gens, f.gen)
			}
		}
		return nil
	}
	revive := &transaction{
		decide: func(v txn.Reader) (txn.Record, error) {
			if err := resolve(v); err != nil {
				return nil, err
			}
			var superseded []Generation
			for _, g := range gens {
				s, err := txn.ReadState(v, g)
				if err != nil {
					return nil, err
				}
				if s != nil && s.Status == txn.Listed && s.Superseded() {
					superseded = append(superseded, g)
				}
			}
			if len(superseded) == 0 {
				return nil, nil
			}
			c.db.counters.foundAgain.Add(int64(len(superseded)))
			return optional(txn.DecideSupersede(v, Generation{}, superseded))
		},
	}
	if err := c.db.committer.commit(ctx, revive, false); err != nil {
		return err
	}
	return c.db.committer.commit(ctx, &transaction{
		decide: func(v txn.Reader) (txn.Record, error) {
			return optional(txn.DecideMark(v, txn.MarkUsed, gens))
		},
		applied: func(*txn.Effects) { c.listed(gens[len(gens)-1]) },
	}, false)
}

// run works until the database closes. Errors are logged; the next find or deadline tries again.
func (c *curator) run() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	for {
		next, err := c.work(ctx)
		if err != nil {
			c.db.options.Logger.Warn("order of eviction not recorded", "error", err)
		}
		var due <-chan time.Time
		var timer *time.Timer
		if next >= 0 {
			timer = time.NewTimer(next)
			due = timer.C
		}
		select {
		case <-c.wake:
		case <-due:
		case <-c.db.gate.stopping:
			c.work(ctx) // the last finds; an error here loses a little recency
			return
		}
		if timer != nil {
			timer.Stop()
		}
	}
}

// optional turns a decision that may be nil into a Record that is nil then.
func optional[R interface {
	*T
	txn.Record
}, T any](r R, err error) (txn.Record, error) {
	if r == nil || err != nil {
		return nil, err
	}
	return r, nil
}
