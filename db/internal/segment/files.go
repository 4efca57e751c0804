package segment

import (
	"fmt"

	"github.com/holdfast-db/holdfast/txn"
)

// acquire opens the segment's file, or finds it open, and holds it until release.
func (s *Store) acquire(number uint64) (*segment, File, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.segments[number]
	if g == nil {
		return nil, nil, fmt.Errorf("no segment %s: %w", s.path(number), txn.ErrNotFound)
	}
	if g.file == nil {
		s.mu.Unlock()
		f, err := s.openFile(number)
		s.mu.Lock()
		switch {
		case err != nil:
			return nil, nil, err
		case g.removed:
			_ = f.Close()
			return nil, nil, fmt.Errorf("no segment %s: %w", s.path(number), txn.ErrNotFound)
		case g.file != nil: // somebody else was quicker
			_ = f.Close()
		default:
			g.file = f
			s.open++
		}
	}
	if g.spot != nil {
		s.idle.Remove(g.spot)
		g.spot = nil
	}
	g.readers++
	s.closeIdle(s.o.OpenFiles)
	return g, g.file, nil
}

func (s *Store) openFile(number uint64) (File, error) {
	direct := s.direct.Load()
	f, err := s.fs.Open(s.path(number), !s.o.ReadOnly, direct)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", classOf(err), err)
	}
	if direct && !f.Direct() {
		s.directRefused(number)
	}
	return f, nil
}

// directRefused turns to buffered I/O for the files opened from now on.
func (s *Store) directRefused(number uint64) {
	s.count.directRefused.Add(1)
	if s.direct.CompareAndSwap(true, false) {
		s.log.Info("segments are buffered", "reason", "the file system refuses direct I/O", "file", s.path(number))
	}
}

func (s *Store) release(g *segment) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if g.readers--; g.readers > 0 {
		return
	}
	if g.removed {
		s.shut(g)
		return
	}
	g.spot = s.idle.PushFront(g)
	s.closeIdle(s.o.OpenFiles)
}

// closeIdle closes files that nobody reads, least recently used first, while more than n are open. Beyond n, one stays
// open per running read.
func (s *Store) closeIdle(n int) {
	for s.open > n && s.idle.Len() > 0 {
		g := s.idle.Remove(s.idle.Back()).(*segment)
		g.spot = nil
		s.shut(g)
	}
}

// shut closes the file of a segment that nobody reads.
func (s *Store) shut(g *segment) {
	_ = g.file.Close() // nothing was written through it that a close could lose
	g.file = nil
	s.open--
}

// shutIdle closes the file of a segment if nobody reads it, for the next acquire to open it anew.
func (s *Store) shutIdle(g *segment) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if g.spot != nil {
		s.idle.Remove(g.spot)
		g.spot = nil
		s.shut(g)
	}
}

// forget takes a removed segment off the books; its file is closed by the last reader.
func (s *Store) forget(g *segment) {
	s.mu.Lock()
	defer s.mu.Unlock()
	g.removed = true
	delete(s.segments, g.number)
	if g.spot != nil {
		s.idle.Remove(g.spot)
		g.spot = nil
		s.shut(g)
	}
}
