package db

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// Owner is a worker, or a session of one, that holds publications and restorations. It proves that it is alive by
// heartbeats; when they stay away for its time to live, everything it holds is taken back, without any further call: its
// publications are aborted, its restorations released. What it calls after that is ErrConflict until it registers anew.
//
// Time is monotonic: a step of the wall clock neither ends nor prolongs anything. An owner is safe for concurrent use.
type Owner struct {
	db   *DB
	name string
	ttl  time.Duration

	mu    sync.Mutex // guards what follows
	timer *time.Timer
	held  map[holder]bool
	ended string // why it ended; empty while it is alive
}

// holder is what an owner, a deadline or a context can end from outside: a publication or a restoration.
type holder interface {
	end(why string)
	label() string // for messages
}

// Limits of owners and leases.
const (
	// MinOwnerTTL bounds the time to live of an owner from below: less would take slow owners for dead ones.
	MinOwnerTTL = 10 * time.Millisecond
	// MaxOwnerTTL bounds it from above.
	MaxOwnerTTL = 24 * time.Hour
	// MaxLease bounds the length of a lease.
	MaxLease = 24 * time.Hour
)

// NewOwner registers an owner. The name, at most MaxRequestBytes of text, is for messages; it need not be unique. Errors:
// ErrInvalid, ErrTooLarge; ErrBusy if MaxOwners are registered; ErrClosed.
func (d *DB) NewOwner(name string, ttl time.Duration) (*Owner, error) {
	if err := checkText("name of the owner", name, 1, MaxRequestBytes); err != nil {
		return nil, err
	}
	if ttl < MinOwnerTTL {
		return nil, fmt.Errorf("db: owner %.80q: time to live %v: want %v…%v: %w", name, ttl, MinOwnerTTL, MaxOwnerTTL, ErrInvalid)
	}
	if ttl > MaxOwnerTTL {
		return nil, fmt.Errorf("db: owner %.80q: time to live %v: want %v…%v: %w", name, ttl, MinOwnerTTL, MaxOwnerTTL, ErrTooLarge)
	}
	if err := d.gate.enter(); err != nil {
		return nil, err
	}
	defer d.gate.leave()
	o := &Owner{db: d, name: name, ttl: ttl, held: map[holder]bool{}}
	d.owners.mu.Lock()
	defer d.owners.mu.Unlock()
	if len(d.owners.all) >= MaxOwners {
		return nil, fmt.Errorf("db: %d owners are registered: %w", len(d.owners.all), ErrBusy)
	}
	o.mu.Lock()
	o.timer = time.AfterFunc(ttl, o.expire)
	o.mu.Unlock()
	d.owners.all[o] = true
	return o, nil
}

// ownerSet is the set of owners that are alive.
type ownerSet struct {
	mu  sync.Mutex // guards all
	all map[*Owner]bool
}

func (s *ownerSet) remove(o *Owner) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.all, o)
}

func (s *ownerSet) count() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return int64(len(s.all))
}

// close ends all owners.
func (s *ownerSet) close() {
	s.mu.Lock()
	owners := make([]*Owner, 0, len(s.all))
	for o := range s.all {
		owners = append(owners, o)
	}
	s.mu.Unlock()
	for _, o := range owners {
		o.Close()
	}
}

// Heartbeat says that the owner is alive. ErrConflict if it was taken for dead, or closed: register anew.
func (o *Owner) Heartbeat() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if err := o.alive(); err != nil {
		return err
	}
	o.timer.Reset(o.ttl)
	return nil
}

func (o *Owner) alive() error {
	if o.ended != "" {
		return fmt.Errorf("db: owner %q %s: register anew: %w", o.name, o.ended, ErrConflict)
	}
	return nil
}

// label names the owner in messages.
func (o *Owner) label() string {
	if o == nil {
		return "the process"
	}
	return o.name
}

// Close ends the owner and everything it holds. Closing again does nothing.
func (o *Owner) Close() { o.endAll("was closed") }

func (o *Owner) expire() {
	if o.endAll(fmt.Sprintf("sent no heartbeat for %v", o.ttl)) {
		o.db.counters.ownersExpired.Add(1)
	}
}

func (o *Owner) endAll(why string) bool {
	o.mu.Lock()
	if o.ended != "" {
		o.mu.Unlock()
		return false
	}
	o.ended = why
	o.timer.Stop()
	held := o.held
	o.held = nil
	o.mu.Unlock()
	o.db.owners.remove(o)
	var ends sync.WaitGroup
	for h := range held {
		// Each by itself: one whose last step is stuck in the log keeps no other from being given back.
		ends.Go(func() { h.end(fmt.Sprintf("taken back: its owner %q %s", o.name, why)) })
	}
	ends.Wait()
	return true
}

// take makes the owner hold h. A nil owner is the process itself, which is alive.
func (o *Owner) take(d *DB, h holder) error {
	if o == nil {
		return nil
	}
	if o.db != d {
		return fmt.Errorf("db: owner %q belongs to another database: %w", o.name, ErrInvalid)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if err := o.alive(); err != nil {
		return err
	}
	o.held[h] = true
	return nil
}

func (o *Owner) drop(h holder) {
	if o == nil {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.held, h)
}

// lease is the bound on a hold: it ends with its context, at its deadline, or with its owner, whichever is first.
type lease struct {
	mu     sync.Mutex // guards what follows: the end may come while the lease is being begun
	owner  *Owner
	holder holder
	timer  *time.Timer
	detach func() bool
	set    *leaseSet
}

// leaseSet is the set of leases that last, for people to look at.
type leaseSet struct {
	mu  sync.Mutex // guards all
	all map[*lease]leaseTerm
}

// leaseTerm is what does not change over a lease.
type leaseTerm struct {
	owner        string // empty: the process itself
	holder       holder
	began, until time.Time
}

// leaseLength gives the length of a lease: the request's, or the default.
func (d *DB) leaseLength(field string, asked time.Duration) (time.Duration, error) {
	if asked == 0 {
		return d.options.LeaseTimeout, nil
	}
	return asked, checkNumber(field, int64(asked), 1, int64(MaxLease))
}

// begin starts the lease. The holder may be ended from this moment on.
func (l *lease) begin(ctx context.Context, d *DB, o *Owner, h holder, length time.Duration) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := o.take(d, h); err != nil {
		return err
	}
	l.owner, l.holder, l.set = o, h, &d.leases
	term := leaseTerm{holder: h, began: time.Now()}
	term.until = term.began.Add(length)
	if o != nil {
		term.owner = o.name
	}
	l.set.mu.Lock()
	l.set.all[l] = term
	l.set.mu.Unlock()
	l.timer = time.AfterFunc(length, func() {
		d.counters.leasesExpired.Add(1)
		d.options.Logger.Warn("lease over", "of", h.label(), "owner", o.label(), "after", length)
		h.end(fmt.Sprintf("taken back: its lease of %v is over", length))
	})
	l.detach = context.AfterFunc(ctx, func() { h.end("taken back: its context ended") })
	return nil
}

// stop ends the lease's own watch. It does not end the holder.
func (l *lease) stop() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.timer == nil {
		return
	}
	l.timer.Stop()
	l.detach()
	l.set.mu.Lock()
	delete(l.set.all, l)
	l.set.mu.Unlock()
	l.owner.drop(l.holder)
}

// Transfer marks a copy, by a device or another process, that reads or writes pages of a lease on its own. Until Done, none of
// those pages is given to anyone else, whatever becomes of the lease: a copy that is not proven finished may still be
// writing.
type Transfer struct {
	once sync.Once
	done func()
}

// Done says that the copy is proven finished. Calling it again does nothing.
func (t *Transfer) Done() { t.once.Do(t.done) }
