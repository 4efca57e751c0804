package segment

import (
	"math"
	"sync"
	"time"
)

// Bounds of how writes make way for reads.
const (
	readRecent       = time.Second           // for so long after a read, writes stay small
	writeBesideReads = 1 << 20               // bytes of one write then
	giveWayMax       = 10 * time.Millisecond // and how long each of them waits for reads that are under way
)

// precedence lets reads, for which a request waits, go before writes, for which mostly nobody does. A device takes what it is
// given in turn: behind one write of 64 MiB a read waits for all of it. So while there are reads, now or a moment ago, a write
// is given to the device a mebibyte at a time, and each piece waits until no read is under way, but not for long: reads
// without end slow writes down to a mebibyte in every giveWayMax, and never stop them. Without reads, writes are as large as
// they come, which is faster.
type precedence struct {
	mu     sync.Mutex // guards what follows
	reads  int        // under way
	last   time.Time  // when the last one began or ended
	silent chan struct{}
}

func (p *precedence) begin() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.reads++; p.reads == 1 {
		p.silent = make(chan struct{})
	}
	p.last = time.Now()
}

func (p *precedence) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.reads--; p.reads == 0 {
		close(p.silent)
	}
	p.last = time.Now()
}

// giveWay waits for the reads that are under way, a bounded time, and gives how many bytes may be written then.
func (p *precedence) giveWay() int64 {
	p.mu.Lock()
	reads, silent, recent := p.reads, p.silent, !p.last.IsZero() && time.Since(p.last) < readRecent
	p.mu.Unlock()
	if reads == 0 && !recent {
		return math.MaxInt64
	}
	if reads > 0 {
		timer := time.NewTimer(giveWayMax)
		defer timer.Stop()
		select {
		case <-silent:
		case <-timer.C:
		}
	}
	return writeBesideReads
}
