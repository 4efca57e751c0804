package db

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"syscall"
	"time"

	"github.com/holdfast-db/holdfast/db/internal/segment"
)

// Faults makes the payload files of a database misbehave, for soak tests of the database itself and of the process around
// it. The shares are 0…1, decided for each call from the seed. The log and the index are left alone.
type Faults struct {
	Seed        uint64
	WriteErrors float64       // share of writes that fail with EIO, after part of the bytes
	SlowWrites  float64       // share of writes that take Delay longer
	SlowReads   float64       // share of reads that take Delay longer
	Delay       time.Duration // at most MaxFaultDelay
}

// MaxFaultDelay bounds Faults.Delay.
const MaxFaultDelay = time.Minute

func (f *Faults) validate() error {
	if f == nil {
		return nil
	}
	for _, s := range []struct {
		field string
		share float64
	}{{"WriteErrors", f.WriteErrors}, {"SlowWrites", f.SlowWrites}, {"SlowReads", f.SlowReads}} {
		if !(s.share >= 0 && s.share <= 1) {
			return fmt.Errorf("db: Options.Faults.%s is %v: want 0…1: %w", s.field, s.share, ErrInvalid)
		}
	}
	return checkNumber("Options.Faults.Delay", int64(f.Delay), 0, int64(MaxFaultDelay))
}

// faultyFS is a file system for segments with faults.
type faultyFS struct {
	segment.FS
	faults Faults

	mu   sync.Mutex // guards rand
	rand *rand.Rand
}

func newFaultyFS(below segment.FS, f Faults) *faultyFS {
	return &faultyFS{FS: below, faults: f, rand: rand.New(rand.NewPCG(f.Seed, 0x4846))}
}

func (s *faultyFS) happens(share float64) bool {
	if share == 0 {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rand.Float64() < share
}

func (s *faultyFS) delay(share float64) {
	if s.happens(share) {
		time.Sleep(s.faults.Delay)
	}
}

// Create implements segment.FS.
func (s *faultyFS) Create(path string, direct bool) (segment.File, error) {
	f, err := s.FS.Create(path, direct)
	return s.wrap(f, err)
}

// Open implements segment.FS.
func (s *faultyFS) Open(path string, write, direct bool) (segment.File, error) {
	f, err := s.FS.Open(path, write, direct)
	return s.wrap(f, err)
}

func (s *faultyFS) wrap(f segment.File, err error) (segment.File, error) {
	if err != nil {
		return nil, err
	}
	return &faultyFile{File: f, fs: s}, nil
}

type faultyFile struct {
	segment.File
	fs *faultyFS
}

// ReadAt implements segment.File.
func (f *faultyFile) ReadAt(buffers [][]byte, off int64) (int, error) {
	f.fs.delay(f.fs.faults.SlowReads)
	return f.File.ReadAt(buffers, off)
}

// WriteAt implements segment.File.
func (f *faultyFile) WriteAt(buffers [][]byte, off int64) (int, error) {
	f.fs.delay(f.fs.faults.SlowWrites)
	if !f.fs.happens(f.fs.faults.WriteErrors) {
		return f.File.WriteAt(buffers, off)
	}
	n := 0
	if len(buffers) > 1 {
		n, _ = f.File.WriteAt(buffers[:1], off) // a part arrives, and the call fails all the same
	}
	return n, fmt.Errorf("injected: %w", syscall.EIO)
}
