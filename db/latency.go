package db

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// histogram counts durations in buckets whose bounds are within a fifth of what they hold, from 1 µs to about half an hour. Adding is
// a few atomic additions, allocates nothing and waits for nobody, so that it is always on; a reading while others add may
// miss what they add. Buckets of equal width would have needed to know the disk, and a sketch would have allocated.
type histogram struct {
	count, sum, max atomic.Int64 // sum and max in nanoseconds
	buckets         [latencyBuckets]atomic.Int64
}

// Each power of two from 2^latencyFirst ns on is cut into four buckets. What is below is in the first one, what is above in the
// last one.
const (
	latencyFirst   = 10
	latencyLast    = 41
	latencyBuckets = 1 + 4*(latencyLast-latencyFirst)
)

func (h *histogram) add(d time.Duration) {
	ns := max(int64(d), 0)
	h.count.Add(1)
	h.sum.Add(ns)
	for {
		top := h.max.Load()
		if ns <= top || h.max.CompareAndSwap(top, ns) {
			break
		}
	}
	h.buckets[latencyBucket(ns)].Add(1)
}

func latencyBucket(ns int64) int {
	e := bits.Len64(uint64(ns)) - 1
	switch {
	case e < latencyFirst:
		return 0
	case e >= latencyLast:
		return latencyBuckets - 1
	}
	return 1 + 4*(e-latencyFirst) + int(ns>>(e-2))&3
}

// latencyBound is the smallest duration that is above the bucket.
func latencyBound(bucket int) time.Duration {
	if bucket == 0 {
		return 1 << latencyFirst
	}
	e, quarter := latencyFirst+(bucket-1)/4, int64(bucket-1)%4
	return time.Duration((5 + quarter) << (e - 2))
}

// LatencyBucket counts the durations that are below a bound and not below that of the bucket before.
type LatencyBucket struct {
	Below time.Duration
	Count int64
}

// Latency is how long one kind of operation took since the database was opened.
type Latency struct {
	Operation string // as in docs/metrics.md
	Count     int64
	Sum, Max  time.Duration
	Buckets   []LatencyBucket // those that are not empty, shortest first
}

// Quantile gives a duration that the share q of all operations, 0…1, did not reach or just reached: the bound of the bucket that it
// falls into, or Max if that is less. 0 if there was no operation.
func (l *Latency) Quantile(q float64) time.Duration {
	total := int64(0)
	for _, b := range l.Buckets {
		total += b.Count
	}
	rank := max(int64(q*float64(total)+0.5), 1)
	for _, b := range l.Buckets {
		if rank -= b.Count; rank <= 0 {
			return min(b.Below, l.Max)
		}
	}
	return 0
}

func (h *histogram) read(name string) Latency {
	l := Latency{Operation: name, Count: h.count.Load(), Sum: time.Duration(h.sum.Load()), Max: time.Duration(h.max.Load())}
	for i := range h.buckets {
		if n := h.buckets[i].Load(); n > 0 {
			l.Buckets = append(l.Buckets, LatencyBucket{Below: latencyBound(i), Count: n})
		}
	}
	return l
}

// Latencies tells how long operations took, for every kind of operation, those that did not happen included. No SDK is needed
// for it. It works on a closed database as well.
func (d *DB) Latencies() []Latency {
	all := make([]Latency, 0, len(operations))
	for op, name := range operations {
		all = append(all, d.telemetry.latencies[op].read(name))
	}
	return all
}
