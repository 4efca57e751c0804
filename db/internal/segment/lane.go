package segment

import (
	"errors"
	"io/fs"

	"golang.org/x/sys/unix"

	"github.com/holdfast-db/holdfast/txn"
)

const (
	groupBytesMax  = 64 << 20 // payload, and
	groupPagesMax  = 1 << 16  // pages, after which a lane takes no more requests into a group
	batchBytesMax  = 64 << 20 // payload of one batch, unless a single page is larger
	preallocBytes  = 16 << 20 // blocks asked for ahead of the end of the open segment
	createTriesMax = 16       // files that are tried for one new segment, see create

	// bufferedBytesMax is the payload up to which a group goes through the page cache even where direct I/O works. A direct write
	// waits for the device and for the file system to note that the blocks are in use now, and only then is the sync begun; from
	// the cache all of that is one trip, which is worth a copy of this many bytes. Afterwards the cache lets go of them.
	bufferedBytesMax = 512 << 10
)

// lane writes one class. Its goroutine runs from the first Append of the class until Close and owns everything but the queue.
//
// A *group* is the requests taken together, a *batch* what one descriptor describes: at most 512 pages in one
// segment. A group becomes one or more batches and ends with one sync; one more comes where it fills a segment. When
// something fails, the requests that have pages not synced by then share the failure, and nobody else does.
type lane struct {
	s       *Store
	class   Class
	queue   chan *request
	done    chan struct{} // closed when the goroutine has ended
	staging []byte
	out     *output // nil before the first batch and after a seal
}

// output is the segment that a lane appends to.
type output struct {
	g         *segment
	f         File  // direct if that works here
	cached    File  // the same file through the page cache, nil before it is needed
	to        File  // the one of them that the group at hand goes through
	tail      int64 // where the next batch goes
	synced    int64 // where the last synced batch ends
	allocated int64 // where the preallocated blocks end
	sequence  uint64
}

// item is one page of a group.
type item struct {
	r *request
	i int
}

func (it item) entry() *Entry { return &it.r.entries[it.i] }

// lane gives the lane of the class, and starts it the first time.
func (s *Store) lane(c Class) (*lane, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.lanes[c-1]; l != nil {
		return l, nil
	}
	staging, err := mapStaging(laneStagingBytes)
	if err != nil {
		return nil, err
	}
	l := &lane{s: s, class: c, queue: make(chan *request, s.o.QueueLimit), done: make(chan struct{}), staging: staging}
	s.lanes[c-1] = l
	go l.run()
	return l, nil
}

func (l *lane) run() {
	defer close(l.done)
	defer unmapStaging(l.staging)
	for r := range l.queue {
		group, seal := l.gather(r)
		l.write(group)
		if seal {
			l.seal()
		}
		for _, r := range group {
			close(r.done)
		}
	}
	l.seal()
}

// gather takes what waits in the queue behind r, without waiting for more, up to a bound or a request to seal.
func (l *lane) gather(r *request) (group []*request, seal bool) {
	var payload int64
	var pages int
	for {
		if r.state.CompareAndSwap(queued, taken) {
			group = append(group, r)
			seal = len(r.entries) == 0
			pages += len(r.entries)
			for i := range r.entries {
				payload += r.entries[i].Place.Stored
			}
		}
		if seal || payload >= groupBytesMax || pages >= groupPagesMax {
			return group, seal
		}
		select {
		case next, more := <-l.queue:
			if !more {
				return group, seal
			}
			r = next
		default:
			return group, seal
		}
	}
}

// write makes the pages of the group durable, or sets the error of each request for which it could not.
func (l *lane) write(group []*request) {
	var items []item
	var payload int64
	for _, r := range group {
		for i := range r.entries {
			items = append(items, item{r, i})
			payload += r.entries[i].Place.Stored
		}
	}
	durable := 0
	err := func() error {
		for next := 0; next < len(items); {
			if l.out == nil {
				if err := l.create(); err != nil {
					return err
				}
			}
			l.choose(payload)
			n := fit(items[next:], l.s.o.SegmentBytes-l.out.tail)
			if n == 0 && l.out.tail > blockBytes {
				if err := l.sync(); err != nil {
					return err
				}
				l.seal()
				durable = next
				continue
			}
			n = max(n, 1) // a page larger than a segment has one to itself
			if err := l.writeBatch(items[next : next+n]); err != nil {
				return err
			}
			next += n
		}
		if len(items) == 0 {
			return nil
		}
		return l.sync()
	}()
	if err != nil {
		for _, it := range items[durable:] {
			it.r.err = err
		}
		l.fail(err)
		l.abandon(items[:durable])
	}
}

// abandon gives back the space of pages that were synced in an earlier segment for requests that failed in a later one.
func (l *lane) abandon(items []item) {
	var places []txn.Placement
	for _, it := range items {
		if it.r.err != nil {
			places = append(places, it.entry().Place)
		}
	}
	if err := l.s.free(places); err != nil {
		l.s.log.Warn("segment keeps pages of a failed append", "pages", len(places), "error", err)
	}
}

// fit is how many of the items go into one batch that takes at most room bytes in the file.
func fit(items []item, room int64) int {
	var large, small int64
	for n, it := range items {
		if stored := it.entry().Place.Stored; stored >= blockBytes {
			large += padded(stored)
		} else {
			small += padded(stored)
		}
		payload := large + roundUp(small, blockBytes)
		if n == batchPagesMax || descriptorBytes(n+1)+payload > room || n > 0 && payload > batchBytesMax {
			return n
		}
	}
	return len(items)
}

// writeBatch writes one batch at the tail, without a sync, and fills in the places of its items.
func (l *lane) writeBatch(items []item) error {
	out := l.out
	order := make([]item, 0, len(items))
	for _, it := range items {
		if it.entry().Place.Stored >= blockBytes {
			order = append(order, it)
		}
	}
	large := len(order)
	for _, it := range items {
		if it.entry().Place.Stored < blockBytes {
			order = append(order, it)
		}
	}
	entries := make([]Entry, len(order))
	for i, it := range order {
		entries[i] = *it.entry()
	}
	end := layOut(out.g.number, out.tail, entries)
	l.preallocate(end)

	w := vector{f: out.to, off: out.tail, staging: l.staging, count: &l.s.count, reads: &l.s.precedence}
	head, err := w.stage(descriptorBytes(len(entries)))
	if err != nil {
		return err
	}
	encodeDescriptor(head, l.s.origin(out.g.number, l.class), out.sequence+1, out.tail, entries, end)
	var stored int64
	for i := range large {
		stored += entries[i].Place.Stored
		if err := w.page(order[i].r.bytes[order[i].i]); err != nil {
			return err
		}
	}
	if large < len(order) {
		base := entries[large].Place.Offset
		tail, err := w.stage(end - base)
		if err != nil {
			return err
		}
		clear(tail)
		for i := large; i < len(order); i++ {
			p := &entries[i].Place
			stored += p.Stored
			w.count.copied.Add(p.Stored)
			copy(tail[p.Offset-base:], order[i].r.bytes[order[i].i])
		}
	}
	if err := w.flush(); err != nil {
		return err
	}
	for i, it := range order {
		it.entry().Place = entries[i].Place
	}
	c := &l.s.count
	c.batches.Add(1)
	c.pagesWritten.Add(int64(len(order)))
	c.payloadBytes.Add(stored)
	c.descriptorBytes.Add(int64(len(head)))
	c.paddingBytes.Add(end - out.tail - int64(len(head)) - stored)
	out.tail = end
	out.sequence++
	return nil
}

// preallocate asks for blocks up to end, and some more, so that the file system finds long runs and has less to sync.
func (l *lane) preallocate(end int64) {
	out := l.out
	if end <= out.allocated || !l.s.prealloc.Load() {
		return
	}
	to := max(end, min(end+preallocBytes, l.s.o.SegmentBytes))
	if err := out.f.Preallocate(out.allocated, to-out.allocated); err != nil {
		l.s.count.preallocRefused.Add(1) // if the disk is full, the write will say so
		if errors.Is(err, errors.ErrUnsupported) {
			l.s.prealloc.Store(false)
		}
		return
	}
	out.allocated = to
}

// forgetter is a file whose cached bytes can be given back.
type forgetter interface{ forget(off, n int64) }

// choose takes the way through which a group of this much payload is written and synced.
func (l *lane) choose(payload int64) {
	out := l.out
	out.to = out.f
	if payload > bufferedBytesMax || !out.f.Direct() {
		return
	}
	if out.cached == nil {
		f, err := l.s.fs.Open(l.s.path(out.g.number), true, false)
		if err != nil {
			return // the way that is open will do
		}
		out.cached = f
	}
	out.to = out.cached
}

// sync makes what was written durable.
func (l *lane) sync() error {
	out := l.out
	if err := out.to.Sync(); err != nil {
		return failure("sync", err)
	}
	if c, ok := out.cached.(forgetter); ok && out.to == out.cached {
		c.forget(out.synced, out.tail-out.synced)
	}
	l.s.count.syncs.Add(1)
	out.synced = out.tail
	l.s.mu.Lock()
	out.g.size = out.synced
	l.s.mu.Unlock()
	return nil
}

// seal ends the open segment, all of whose batches are synced.
func (l *lane) seal() {
	if l.out == nil {
		return
	}
	l.end(l.out.tail, l.out.allocated > l.out.tail)
}

// fail ends the open segment after an error. Nothing is written to it any more and no sync is tried again: the one that
// failed may have dropped the bytes, and the next would say that all is well.
func (l *lane) fail(err error) {
	if l.out == nil {
		return
	}
	out := l.out
	l.s.count.failed.Add(1)
	l.s.log.Warn("segment failed", "file", l.s.path(out.g.number), "class", l.class.String(),
		"kept", out.synced, "lost", out.tail-out.synced, "error", err)
	l.end(out.synced, true)
	if out.synced > blockBytes {
		return
	}
	if err := l.s.fs.Remove(l.s.path(out.g.number)); err == nil {
		l.s.forget(out.g)
	}
}

// end closes the open segment and cuts it to size if cut says so. That it cannot be cut costs space, not correctness.
func (l *lane) end(size int64, cut bool) {
	out := l.out
	l.out = nil
	var err error
	if cut {
		err = out.f.Truncate(size)
	}
	if out.cached != nil {
		err = errors.Join(err, out.cached.Close())
	}
	if err = errors.Join(err, out.f.Close()); err != nil {
		l.s.log.Warn("segment keeps blocks behind its end", "file", l.s.path(out.g.number), "size", size, "error", err)
	}
	l.s.mu.Lock()
	out.g.writing = false
	l.s.mu.Unlock()
}

// create begins a new segment and makes its name durable. A name that something else has is left alone and the next number
// taken; a file system that refuses direct I/O at the first write gets a new file, buffered.
func (l *lane) create() error {
	s := l.s
	var err error
	for range createTriesMax {
		s.mu.Lock()
		s.highest++
		number := s.highest
		s.mu.Unlock()
		direct := s.direct.Load()
		var f File
		if f, err = s.fs.Create(s.path(number), direct); err != nil {
			if errors.Is(err, fs.ErrExist) {
				continue
			}
			return failure("create", err)
		}
		if direct && !f.Direct() {
			s.directRefused(number)
		}
		if err = l.begin(f, number); err == nil {
			return nil
		}
		_ = f.Close()
		_ = s.fs.Remove(s.path(number))
		if !f.Direct() || !errors.Is(err, unix.EINVAL) {
			return err
		}
		s.directRefused(number)
	}
	return failure("create", err)
}

// begin writes the header and makes file and name durable.
func (l *lane) begin(f File, number uint64) error {
	s := l.s
	w := vector{f: f, staging: l.staging, count: &s.count}
	head, err := w.stage(blockBytes)
	if err != nil {
		return err
	}
	encodeHeader(head, s.origin(number, l.class))
	if err := w.flush(); err != nil {
		return err
	}
	s.count.descriptorBytes.Add(blockBytes)
	out := &output{f: f, to: f, tail: blockBytes, allocated: blockBytes, synced: blockBytes}
	out.g = &segment{number: number, class: l.class, size: blockBytes, writing: true}
	if err := f.Sync(); err != nil {
		return failure("sync", err)
	}
	s.count.syncs.Add(1)
	if err := s.fs.SyncDir(s.dir); err != nil {
		return failure("sync "+s.dir, err)
	}
	s.count.created.Add(1)
	s.mu.Lock()
	s.segments[number] = out.g
	s.mu.Unlock()
	l.out = out
	return nil
}
