package segment

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// roundBytes is what each side writes, and reads, per round.
const roundBytes = 64 << 20

// BenchmarkAppend writes pages, 64 MiB to an Append, against a bare loop that writes the same bytes from the same memory to
// a file of its own, page by page with direct I/O, and syncs them once. The two take turns. A ratio of 1 means
// that the store is as fast.
func BenchmarkAppend(b *testing.B) {
	for _, n := range []int{2 << 20, 64 << 10} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			dir := b.TempDir()
			s := open(b, dir, func(o *Options) { o.SegmentBytes = SegmentBytesDefault })
			pages := pagesOf(b, n)
			bare := bareFile(b, dir)
			var ours, theirs time.Duration
			b.SetBytes(roundBytes)
			turn := 0
			for b.Loop() {
				turn++
				for side := range 2 {
					if (side+turn)%2 == 0 {
						start := time.Now()
						write(b, s, Own, pages...)
						ours += time.Since(start)
					} else {
						require.NoError(b, bare.Truncate(0))
						start := time.Now()
						off := int64(0)
						for i := range pages {
							_, err := bare.WriteAt([][]byte{pages[i].Bytes}, off)
							require.NoError(b, err)
							off += int64(n)
						}
						require.NoError(b, bare.Sync())
						theirs += time.Since(start)
					}
				}
				b.StopTimer()
				for _, g := range mustSegments(b, s) {
					if g.Sealed {
						require.NoError(b, s.Remove(g.Number))
					}
				}
				b.StartTimer()
			}
			report(b, ours, theirs)
		})
	}
}

// BenchmarkRead reads pages back, verified, in one batch, against a bare loop of direct reads of the same file.
func BenchmarkRead(b *testing.B) {
	for _, n := range []int{2 << 20, 64 << 10} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			dir := b.TempDir()
			s := open(b, dir, func(o *Options) { o.SegmentBytes = SegmentBytesDefault })
			pages := pagesOf(b, n)
			places := write(b, s, Own, pages...)
			bare, err := osFS{}.Open(s.path(1), false, true)
			require.NoError(b, err)
			defer bare.Close()
			requests := make([]ReadRequest, len(pages))
			for i, p := range pages {
				requests[i] = reading(p, places[i], true)
			}
			var ours, theirs time.Duration
			b.SetBytes(roundBytes)
			turn := 0
			for b.Loop() {
				turn++
				for side := range 2 {
					start := time.Now()
					if (side+turn)%2 == 0 {
						require.Nil(b, s.ReadBatch(b.Context(), requests))
						ours += time.Since(start)
					} else {
						for _, r := range requests {
							_, err := bare.ReadAt([][]byte{r.Dst}, r.Place.Offset)
							require.NoError(b, err)
						}
						theirs += time.Since(start)
					}
				}
			}
			report(b, ours, theirs)
		})
	}
}

// BenchmarkAppendSmallRequests is many callers that append one page each, against each page written and synced alone.
func BenchmarkAppendSmallRequests(b *testing.B) {
	const callers = 64
	dir := b.TempDir()
	s := open(b, dir, func(o *Options) { o.SegmentBytes = SegmentBytesDefault })
	p := pageOf(1, 64<<10, true)
	bare := bareFile(b, dir)
	var ours, theirs time.Duration
	for b.Loop() {
		start := time.Now()
		done := make(chan error, callers)
		for range callers {
			go func() {
				_, err := s.Append(b.Context(), Own, []Page{p})
				done <- err
			}()
		}
		for range callers {
			require.NoError(b, <-done)
		}
		ours += time.Since(start)
		start = time.Now()
		for i := range callers {
			_, err := bare.WriteAt([][]byte{p.Bytes}, int64(i)*64<<10)
			require.NoError(b, err)
			require.NoError(b, bare.Sync())
		}
		theirs += time.Since(start)
	}
	report(b, ours, theirs)
}

func pagesOf(b *testing.B, n int) []Page {
	pages := make([]Page, roundBytes/n)
	for i := range pages {
		pages[i] = pageOf(uint64(i+1), n, true)
	}
	return pages
}

func bareFile(b *testing.B, dir string) File {
	f, err := openFile(filepath.Join(dir, "bare"), os.O_RDWR|os.O_CREATE, true)
	require.NoError(b, err)
	b.Cleanup(func() { f.Close() })
	if !f.Direct() {
		b.Log("buffered: the file system takes no direct I/O")
	}
	return f
}

func report(b *testing.B, ours, theirs time.Duration) {
	b.ReportMetric(float64(theirs)/float64(ours), "ratio")
	b.ReportMetric(ours.Seconds()*1e3/float64(b.N), "ours-ms/op")
	b.ReportMetric(theirs.Seconds()*1e3/float64(b.N), "bare-ms/op")
}
