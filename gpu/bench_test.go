package gpu

import (
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// BenchmarkHostAgainstMemcpy copies scattered blocks through the engine on the host backend, and the same blocks with
// nothing but copy on as many goroutines, in turns, and prints the ratio of their speeds. It says what the engine costs,
// and nothing about GPUs.
func BenchmarkHostAgainstMemcpy(b *testing.B) {
	for _, c := range []struct {
		name  string
		block int
	}{{"64KiB", 64 << 10}, {"2MiB", 2 << 20}} {
		b.Run(c.name, func(b *testing.B) {
			const total = 256 << 20
			h, err := NewHost(HostOptions{})
			require.NoError(b, err)
			e, err := Open(h, Options{Logger: quiet})
			require.NoError(b, err)
			defer closeEngine(b, e)
			// Every second block at either end, so that nothing is merged.
			host := pinned(b, e, 2*total)
			device := pinned(b, e, 2*total)
			touch(host)
			touch(device)
			address, err := h.Expose(0, device)
			require.NoError(b, err)
			var regions []Region
			for at := 0; at < 2*total; at += 2 * c.block {
				regions = append(regions, Region{address + uint64(at), host[at : at+c.block]})
			}
			bare := func() {
				var wg sync.WaitGroup
				workers := runtime.GOMAXPROCS(0)
				for w := range workers {
					wg.Go(func() {
						for i := w; i < len(regions); i += workers {
							at := int(regions[i].Device - address)
							copy(device[at:at+c.block], regions[i].Host)
						}
					})
				}
				wg.Wait()
			}
			engine := func() { require.NoError(b, wait(b, submit(b, e, Batch{Direction: Load, Regions: regions}))) }
			bare()
			engine()
			var took [2]time.Duration
			b.ResetTimer()
			for range b.N {
				for i, f := range []func(){bare, engine} {
					begin := time.Now()
					f()
					took[i] += time.Since(begin)
				}
			}
			b.ReportMetric(float64(total)*float64(b.N)/took[0].Seconds()/1e9, "bare-GB/s")
			b.ReportMetric(float64(total)*float64(b.N)/took[1].Seconds()/1e9, "engine-GB/s")
			b.ReportMetric(took[0].Seconds()/took[1].Seconds(), "engine/bare")
		})
	}
}

// BenchmarkSubmit is what a batch costs beside its bytes: 1000 scattered blocks of 16 bytes.
func BenchmarkSubmit(b *testing.B) {
	h, err := NewHost(HostOptions{})
	require.NoError(b, err)
	e, err := Open(h, Options{Logger: quiet})
	require.NoError(b, err)
	defer closeEngine(b, e)
	host := pinned(b, e, 32<<10)
	address, err := h.Expose(0, make([]byte, 32<<10))
	require.NoError(b, err)
	var regions []Region
	for at := 0; at < 1000*32; at += 32 {
		regions = append(regions, Region{address + uint64(at), host[at : at+16]})
	}
	b.ReportAllocs()
	for range b.N {
		require.NoError(b, wait(b, submit(b, e, Batch{Direction: Load, Regions: regions})))
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/1000, "ns/block")
}
