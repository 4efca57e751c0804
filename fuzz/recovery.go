package fuzz

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/holdfast-db/holdfast/db"
)

// crash is what a crash left: the disk and what may be true of it.
type crash struct {
	disk  *Disk
	model *Model
}

// capture makes the crash happen now.
func (w *World) capture(image *Disk) {
	m := w.model
	if w.during != nil {
		m = w.during
	}
	w.crashed = &crash{image, m.Clone()}
}

// abandon closes the handle of a world that has ended.
func (w *World) abandon() {
	for _, r := range w.held {
		r.Release()
	}
	for _, p := range w.pubs {
		_ = p.p.Abort()
	}
	w.held, w.pubs = nil, nil
	if w.db == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	w.db.Close(ctx) // on a disk that has ended, whatever it says
	w.db = nil
}

// recover goes on from the crash: every image of it is opened and checked, the last one is kept. false ends the history.
func (w *World) recover() bool {
	for {
		if w.crashed == nil {
			w.capture(w.disk.Clone())
		}
		s, c := w.crashing, w.crashed
		old := w.disk
		old.End()
		w.abandon()
		w.out.Calls += old.Calls()
		w.out.Trace = w.out.Trace*31 + old.Trace()
		if trace != nil {
			fmt.Fprintln(trace, "crashed")
		}
		w.noteFaults(old)
		w.crashed, w.during = nil, nil
		if len(w.armed) > 0 {
			w.armed = w.armed[1:]
		}
		if len(w.armed) == 0 {
			w.crashing = nil
		}
		images := max(s.Images, 1)
		for i := range images {
			image := c.disk
			if i < images-1 {
				image = c.disk.Clone()
			}
			if s.Do == "crash" {
				image.PowerCut(RandomChoice(s.Seed + uint64(i)<<32 + uint64(len(w.armed))<<48))
			}
			w.out.Cycles++
			w.model = c.model.Clone()
			w.model.Crash(s.Do == "crash")
			if i < images-1 {
				crashing, armed := w.crashing, w.armed
				w.crashing, w.armed = nil, nil
				w.tryImage(image)
				w.crashing, w.armed = crashing, armed
				continue
			}
			if w.real != "" && w.out.Cycles%32 == 1 {
				w.tryReal(image)
			}
			w.adopt(image)
		}
		w.faulted = false
		alive := true
		if w.survives(func() {
			if alive = w.open(); alive {
				w.settle()
				w.check()
			}
		}) {
			continue // it died again
		}
		return alive
	}
}

// tryImage opens an image and checks it, and leaves it.
func (w *World) tryImage(d *Disk) {
	model := w.model.Clone()
	w.adopt(d)
	if w.open() {
		w.settle()
		w.check()
	}
	d.End()
	w.abandon()
	w.out.Calls += d.Calls()
	w.out.Trace = w.out.Trace*31 + d.Trace()
	w.model = model
}

// tryReal opens an image in a real directory, where github.com/tidwall/wal and the operating system do what the simulated
// disk otherwise does in their place.
func (w *World) tryReal(d *Disk) {
	dir := filepath.Join(w.real, fmt.Sprint(w.program.Seed, "-", w.out.Cycles))
	defer os.RemoveAll(dir)
	if err := d.Materialize(dir); err != nil {
		w.fail("writing an image to a real directory: %v", err)
	}
	if w.disorder {
		return
	}
	model := w.model.Clone()
	d, err := w.openAt(dir, nil)
	_ = d
	if err != nil {
		w.fail("a real directory with what a crash left cannot be opened: %v", err)
	}
	w.settle()
	w.check()
	if _, err := w.db.Close(context.Background()); err != nil {
		w.fail("close of a real directory: %v", err)
	}
	w.db = nil
	w.model = model
	w.out.Checks["real directory"]++
}

func (w *World) openAt(dir string, s *db.Storage) (*Disk, error) {
	o := w.options
	o.Storage = s
	d, err := db.Open(context.Background(), dir, o)
	w.db = d
	return nil, err
}

// open opens the database. false: it says that it is damaged, and it is.
func (w *World) open() bool {
	for try := 0; ; try++ {
		_, err := w.openAt(Root, w.disk.Storage())
		if w.crashed != nil {
			panic(stop{})
		}
		if err == nil {
			if !w.options.ReadOnly {
				w.model.Opened()
			}
			return true
		}
		w.db = nil
		if w.disorder && (errors.Is(err, db.ErrCorrupt) || errors.Is(err, db.ErrUnsupported)) {
			return false
		}
		if len(w.disk.Fired()) == 0 || try == 1 {
			w.fail("open: %v", err)
		}
		w.noteFaults(w.disk)
		w.disk.Inject()
		w.classed(err)
	}
}

// noteFaults counts what went wrong on a disk.
func (w *World) noteFaults(d *Disk) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, f := range d.fired {
		w.out.Faults[f[:indexByte(f, '/')-1]]++
	}
	if len(d.fired) > 0 {
		w.faulted = true
	}
	d.fired = nil
}

func indexByte(s string, c byte) int {
	for i := range len(s) {
		if s[i] == c {
			return i
		}
	}
	return len(s)
}
