package arena

import (
	"fmt"
	"testing"
	"time"
)

func BenchmarkAllocFree(b *testing.B) {
	for _, n := range []int64{64, 4096, 64 << 10, 2 << 20} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			a := newArena(b, 1<<30)
			b.ReportAllocs()
			for b.Loop() {
				s, err := a.Alloc(n)
				if err != nil || a.Free(s) != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkReuse writes 32 MiB into a slot whose memory is there already, and into one whose memory was given to
// another class meanwhile; the ratio is what keeping freed slots warm is worth.
func BenchmarkReuse(b *testing.B) {
	for _, n := range []int64{32 << 20, 32<<20 - 4096} { // with huge pages and without
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			const capacity = 32 << 20
			a := newArena(b, capacity)
			var warm, cold time.Duration
			write := func() time.Duration {
				start := time.Now()
				s := alloc(b, a, n)
				p := s.Bytes()
				for i := 0; i < len(p); i += 64 {
					p[i]++
				}
				d := time.Since(start)
				free(b, a, s)
				return d
			}
			write()
			for b.Loop() {
				warm += write()
				free(b, a, alloc(b, a, capacity-8192)) // takes the memory
				cold += write()
			}
			b.ReportMetric(float64(warm.Microseconds())/float64(b.N), "warm-us/op")
			b.ReportMetric(float64(cold.Microseconds())/float64(b.N), "cold-us/op")
			b.ReportMetric(float64(cold)/float64(warm), "ratio")
		})
	}
}
