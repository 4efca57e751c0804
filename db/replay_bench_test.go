package db

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// BenchmarkReplayOfDeferredWrites opens a directory whose log holds publications that were listed while their pages were in RAM
// only, and the records of those pages being written later. One iteration makes and opens a directory: -benchtime 1x.
func BenchmarkReplayOfDeferredWrites(b *testing.B) {
	ns := testNamespace(b, 2,
		Group{Name: "attention:kv", Kind: Attention, PageBytes: 64, PageTokens: 16},
		Group{Name: "recurrent:state", Kind: Recurrent, PageBytes: 64, Pages: 1})
	for b.Loop() {
		dir := tempDir(b)
		d := openDB(b, dir, Options{WritePolicy: OnEvict, RAMBytes: 256 << 20, ReplayBytes: 1 << 30})
		for i := range 1000 {
			publish(b, d, seqOf(b, ns, tokens(uint64(i), 960)), 960)
		}
		published := stats(b, d).LogWritten
		for { // 128 pages in a record, as 16 MiB of pages of 64 KiB on two ranks are
			pages := d.residency.oldest(&d.residency.dirty, 128*2*64)
			if len(pages) == 0 {
				break
			}
			require.NoError(b, d.persist(context.Background(), pages))
			d.residency.unpinAll(pages)
		}
		s := stats(b, d)
		require.Zero(b, s.Undurable)
		crash(b, d)
		d = openDB(b, dir, Options{RAMBytes: 256 << 20})
		r := d.RecoveryReport()
		crash(b, d)
		b.ReportMetric(float64(r.Replay/time.Microsecond)/float64(s.Pages), "µs/page")
		b.ReportMetric(float64(r.LogRecords), "records")
		b.ReportMetric(float64(published)/float64(s.Pages), "published-B/page")
		b.ReportMetric(float64(s.LogWritten-published)/float64(s.Pages), "written-B/page")
	}
}
