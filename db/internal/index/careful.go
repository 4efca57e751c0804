package index

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/holdfast-db/holdfast/txn/mutant"
)

// careful is the file system that Pebble gets. It makes up for four things:
//
//   - Pebble makes a manifest, syncs it, makes a marker file that names it, and syncs the directory. Nothing says that of two
//     names made since the last sync of a directory the first survives if the second does, so a power failure in between may leave
//     a marker of a manifest that is not there, and no index that opens. The directory is synced before a marker is made as well.
//   - It removes the marker before once the new one is made, and then syncs the directory. A power failure in between may leave neither,
//     which to Pebble is an index that has yet to be made. The directory is synced before a marker is removed as well.
//   - A flush or compaction that fails is begun again at once, for ever, at the price of a core. What fails makes the next file
//     wait, twice as long each time, up to pauseMax.
//   - A manifest that cannot be written is fatal to Pebble, in a goroutine of its own. It marks the index as broken instead:
//     nothing is committed any more, what is there can be read, and the next open recovers.
type careful struct {
	vfs.FS
	broken  chan struct{} // closed by the first failure of a manifest
	closing chan struct{} // closed by Close

	mu       sync.Mutex // guards what follows
	opened   bool
	why      error // of broken
	last     error // of the last failure
	failures int   // in a row
}

const (
	markerPrefix   = "marker."
	manifestPrefix = "MANIFEST-"

	pauseMin = 10 * time.Millisecond
	pauseMax = time.Second
	// flushFailuresMax is how many failures in a row Flush waits for.
	flushFailuresMax = 6
)

// pauseAfter is how long the next try waits after so many failures in a row.
func pauseAfter(failures int) time.Duration { return min(pauseMin<<min(failures-1, 10), pauseMax) }

func newCareful(below vfs.FS) *careful {
	return &careful{FS: below, broken: make(chan struct{}), closing: make(chan struct{})}
}

// note counts a success or a failure.
func (c *careful) note(err error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil {
		c.failures = 0
	} else {
		c.failures++
		c.last = err
	}
	return err
}

// fail marks the index as broken.
func (c *careful) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.why == nil {
		c.why = fmt.Errorf("index: manifest: %w", classify(err))
		close(c.broken)
	}
}

// err is why the index is broken; nil while it is not.
func (c *careful) err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.why
}

// failing gives the failures in a row, and the last of them.
func (c *careful) failing() (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.failures, c.last
}

// wait holds a new file up after a failure, and for good in an index that is broken.
func (c *careful) wait() error {
	c.mu.Lock()
	why, n, opened := c.why, c.failures, c.opened
	c.mu.Unlock()
	if why != nil {
		if opened {
			<-c.closing
		}
		return why
	}
	if n == 0 || !opened {
		return nil
	}
	timer := time.NewTimer(pauseAfter(n))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-c.closing:
	}
	return nil
}

// Create implements vfs.FS.
func (c *careful) Create(name string, category vfs.DiskWriteCategory) (vfs.File, error) {
	base := c.PathBase(name)
	if strings.HasPrefix(base, markerPrefix) && !mutant.On("directory of the index is not synced before a marker") {
		if err := c.syncDir(c.PathDir(name)); err != nil {
			return nil, err
		}
	} else if err := c.wait(); err != nil {
		return nil, err
	}
	f, err := c.FS.Create(name, category)
	if err != nil {
		return nil, c.note(err)
	}
	return &carefulFile{File: f, c: c, manifest: strings.HasPrefix(base, manifestPrefix)}, nil
}

// Remove implements vfs.FS.
func (c *careful) Remove(name string) error {
	if strings.HasPrefix(c.PathBase(name), markerPrefix) {
		if err := c.syncDir(c.PathDir(name)); err != nil {
			return err
		}
	}
	return c.FS.Remove(name)
}

func (c *careful) syncDir(dir string) error {
	d, err := c.FS.OpenDir(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// Unwrap implements vfs.FS.
func (c *careful) Unwrap() vfs.FS { return c.FS }

// carefulFile tells of what failed.
type carefulFile struct {
	vfs.File
	c        *careful
	manifest bool
	failed   atomic.Bool // once: what goes well with it after that says nothing
}

func (f *carefulFile) told(err error) error {
	if err != nil && f.manifest {
		f.c.fail(err)
	}
	if err != nil {
		f.failed.Store(true)
	} else if f.failed.Load() {
		return nil
	}
	return f.c.note(err)
}

// Write implements vfs.File.
func (f *carefulFile) Write(b []byte) (int, error) {
	n, err := f.File.Write(b)
	if err != nil {
		err = f.told(err)
	}
	return n, err
}

// Sync implements vfs.File.
func (f *carefulFile) Sync() error { return f.told(f.File.Sync()) }

// SyncData implements vfs.File.
func (f *carefulFile) SyncData() error { return f.told(f.File.SyncData()) }

// Flush makes everything applied durable. It does not wait for a disk that fails again and again.
func (x *Index) Flush() error {
	done, err := x.AsyncFlush()
	if err != nil {
		return err
	}
	before, _ := x.careful.failing() // of earlier tries, until one goes well
	tick := time.NewTicker(pauseMin)
	defer tick.Stop()
	for {
		select {
		case <-done:
			return nil
		case <-x.careful.broken:
			return x.careful.err()
		case <-tick.C:
			n, err := x.careful.failing()
			before = min(before, n)
			if n-before >= flushFailuresMax {
				return fmt.Errorf("index: not flushed, tried %d times: %w", n-before, classify(err))
			}
		}
	}
}

// Err is why nothing can be committed any more, nil while the index works.
func (x *Index) Err() error { return x.careful.err() }
