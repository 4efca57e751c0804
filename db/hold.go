package db

import (
	"fmt"

	"github.com/holdfast-db/holdfast/txn/mutant"
)

// hold is a set of pages pinned in RAM under a lease. It ends by Release, when the context of the call that gave it ends, at
// its deadline, or with its owner; then the pages may be given to others at once, unless a Transfer covers them. It is safe
// for concurrent use.
type hold struct {
	db    *DB
	what  string // for messages
	lease lease

	// Guarded by residency.mu.
	pages     []*page // nil once they are given back
	ended     string  // why it ended; empty while it lasts
	transfers int
}

// Release lets go of the pages. Releasing again, or after the lease has ended, does nothing.
func (h *hold) Release() { h.end("released") }

// Err tells whether the lease still lasts: ErrConflict, saying why it ended, if not.
func (h *hold) Err() error {
	h.db.residency.mu.Lock()
	defer h.db.residency.mu.Unlock()
	return h.err()
}

func (h *hold) err() error {
	if h.ended != "" {
		return fmt.Errorf("db: %s: %s: %w", h.what, h.ended, ErrConflict)
	}
	return nil
}

// Transfer says that a copy engine is about to read the pages on its own. They stay pinned until Done, also past the end of
// the lease. ErrConflict if the lease has ended.
func (h *hold) Transfer() (*Transfer, error) {
	t := h.db.residency
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := h.err(); err != nil {
		return nil, err
	}
	h.transfers++
	h.db.counters.transfers.Add(1)
	return &Transfer{done: func() {
		t.mu.Lock()
		h.transfers--
		pages := h.spent()
		t.mu.Unlock()
		t.unpinAll(pages)
		h.db.counters.transfers.Add(-1)
	}}, nil
}

// spent gives the pages to be unpinned, once the lease has ended and the last copy is done. With residency.mu.
func (h *hold) spent() (pages []*page) {
	if h.ended != "" && h.transfers == 0 {
		pages, h.pages = h.pages, nil
	}
	return pages
}

// label implements holder.
func (h *hold) label() string { return h.what }

// end implements holder.
func (h *hold) end(why string) {
	t := h.db.residency
	t.mu.Lock()
	if h.ended != "" {
		t.mu.Unlock()
		return
	}
	h.ended = why
	if !mutant.On("a lease is never over") {
		h.db.counters.leases.Add(-1) // no later than Err tells
	}
	pages := h.spent()
	t.mu.Unlock()
	h.lease.stop()
	t.unpinAll(pages)
}

// admit counts one more hold, which end counts out; ErrBusy if too many are held.
func (d *DB) admit() error {
	if d.counters.leases.Add(1) > MaxLeases {
		d.counters.leases.Add(-1)
		return fmt.Errorf("db: %d restorations are held: %w", MaxLeases, ErrBusy)
	}
	return nil
}
