package index

import (
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2"
)

// compactions schedules Pebble's compactions: one at a time.
//
// None begins before begin. Pebble's own scheduler begins one while it opens and then waits for its end, which for a database that was
// closed in the middle of one, as most are that were written to shortly before, makes an opening last for as long as rewriting
// some megabytes does.
//
// After one that failed the next one waits, longer each time. Pebble would begin it anew at once, for ever.
type compactions struct {
	db pebble.DBForCompaction // set by Register, before anything else

	mu       sync.Mutex // guards what follows; taken after the locks of Pebble
	idle     sync.Cond  // granting has become false; L is mu
	begun    bool
	gone     bool // Pebble is closing
	running  bool
	granting bool        // somebody asks Pebble for what waits, or has it begin that, without mu
	failures int         // in a row
	pause    *time.Timer // after a failure; nil if there is none
}

func newCompactions() *compactions {
	c := &compactions{}
	c.idle.L = &c.mu
	return c
}

// may tells whether one may begin. With mu.
func (c *compactions) may() bool { return c.begun && !c.gone && !c.running && c.pause == nil }

// begin lets compactions begin from now on.
func (c *compactions) begin() {
	c.mu.Lock()
	c.begun = true
	c.mu.Unlock()
	c.grant()
}

// ended hears how one ended.
func (c *compactions) ended(info pebble.CompactionInfo) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if info.Err == nil || c.gone {
		c.failures = 0
		return
	}
	c.failures++
	if c.pause == nil {
		c.pause = time.AfterFunc(pauseAfter(c.failures), func() {
			c.mu.Lock()
			c.pause = nil
			c.mu.Unlock()
			c.grant()
		})
	}
}

// grant has Pebble begin what waits, if it may. Without locks of Pebble.
func (c *compactions) grant() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.may() && !c.granting {
		c.granting = true
		c.mu.Unlock()
		waiting, _ := c.db.GetWaitingCompaction()
		c.mu.Lock()
		refused := false
		if waiting && c.may() {
			c.running = true
			c.mu.Unlock()
			refused = !c.db.Schedule(c)
			c.mu.Lock()
			if refused {
				c.running = false
			}
		}
		c.granting = false
		c.idle.Broadcast()
		if !refused { // else there may be another one
			return
		}
	}
}

// Register implements pebble.CompactionScheduler.
func (c *compactions) Register(_ int, db pebble.DBForCompaction) { c.db = db }

// Unregister implements pebble.CompactionScheduler.
func (c *compactions) Unregister() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.gone = true
	if c.pause != nil {
		c.pause.Stop()
	}
	for c.granting {
		c.idle.Wait()
	}
}

// TrySchedule implements pebble.CompactionScheduler.
func (c *compactions) TrySchedule() (bool, pebble.CompactionGrantHandle) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.may() {
		return false, nil
	}
	c.running = true
	return true, c
}

// UpdateGetAllowedWithoutPermission implements pebble.CompactionScheduler. How many may run never changes.
func (c *compactions) UpdateGetAllowedWithoutPermission() {}

// Done implements pebble.CompactionGrantHandle.
func (c *compactions) Done() {
	c.mu.Lock()
	c.running = false
	c.mu.Unlock()
	c.grant()
}

// Started implements pebble.CompactionGrantHandle.
func (c *compactions) Started() {}

// MeasureCPU implements pebble.CompactionGrantHandle.
func (c *compactions) MeasureCPU(pebble.CompactionGoroutineKind) {}

// CumulativeStats implements pebble.CompactionGrantHandle.
func (c *compactions) CumulativeStats(pebble.CompactionGrantHandleStats) {}
