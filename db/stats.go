package db

import (
	"sync/atomic"

	"github.com/holdfast-db/holdfast/txn"
)

// Stats is a reading of the counters and gauges. Counters begin at zero when the database is opened; gauges are exact.
type Stats struct {
	// Gauges.
	Checkpoints   int64 // listed
	Superseded    int64 // of the listed ones
	Undurable     int64 // of the listed ones: without a complete disk copy
	Retired       int64 // retired and not deleted yet
	Unverified    int64 // left incomplete by the last process, not listed, and not retired yet
	Namespaces    int64
	Pages         int64 // distinct pages of all checkpoints, ranks not counted
	PageBytes     int64 // their logical bytes over all ranks
	PlacedPages   int64 // of the pages, those with disk copies
	RAMCapacity   int64 // bytes
	RAMUsed       int64 // bytes of slots in use
	RAMDirtyBytes int64 // of those, pages without a disk copy
	DiskBytes     int64 // allocated bytes of page copies on disk, those being written or given back included
	DiskBudget    int64 // 0: unbounded
	LogBytes      int64 // size of the log on disk
	IndexBytes    int64 // size of the index on disk
	Segments      int64 // segment files
	SegmentBytes  int64 // what they take on disk
	Pending       int64 // publications that have begun and not ended
	Leases        int64 // restorations that are held
	Quarantined   int64 // lost pages that were not published again
	Owners        int64 // registered and alive
	Transfers     int64 // copies that are not proven finished
	LSN           txn.LSN

	// Counters.
	Published         int64            // checkpoints listed
	Replays           int64            // publications of what was listed already
	Rejected          int64            // publications refused as invalid
	Unlisted          int64            // publications that had begun and ended without being listed: aborted, failed, taken back
	RetiredTotal      int64            // checkpoints retired, for whatever reason
	RetiredBy         map[string]int64 // and by Reason; those that did not occur are left out
	DeletedTotal      int64
	LookupsFull       int64 // lookups that found the whole of what was asked
	LookupsPartial    int64
	LookupsMissed     int64
	LookupsRetried    int64 // lookups and restores with LookupOptions.Retry, in none of the other counters of lookups and tokens
	TokensAsked       int64
	TokensFound       int64
	PagesRestored     int64 // pages that restores handed out, ranks not counted
	PagesRestoredCold int64 // of those, pages that had to be read
	BytesRestored     int64 // their bytes, all ranks
	PagesWritten      int64 // page copies, every rank's counted
	PayloadWritten    int64 // logical bytes of them
	OwnWritten        int64 // of those, of pages that one checkpoint alone has: states, and attention pages that are not full
	LeftRAM           int64 // logical bytes of pages that left RAM while a current checkpoint needed them, each the first time it does
	SegmentWritten    int64 // bytes written to segment files: payload, descriptors, padding
	LogWritten        int64 // bytes written to the log
	PagesRead         int64 // page copies read from disk
	PagesMoved        int64 // pages moved out of segments of which little was left
	PagesEvicted      int64 // pages evicted from RAM with their disk copies left
	WritesFailed      int64 // writes of pages that failed and were tried again or given up
	WritesLate        int64 // writes of pages that took longer than the making of room waits for
	FailedReads       int64 // pages that could not be read back
	AdmissionWaits    int64 // allocations that had to wait for room
	AdmissionTimeouts int64 // of those, how many got none
	FoundAgain        int64 // superseded checkpoints that a lookup or a restore made current again
	FindsDropped      int64 // finds that were not recorded in the order of eviction
	LoopsRestarted    int64 // background loops that failed and were started again
	LeasesExpired     int64 // publications and restorations ended by their deadline
	OwnersExpired     int64 // owners taken for dead
}

// counters are those that the database itself counts.
type counters struct {
	published, retired, deleted          atomic.Int64
	pagesWritten, payloadWritten         atomic.Int64
	ownWritten                           atomic.Int64
	pagesRead, pagesEvicted, failedReads atomic.Int64
	admissionWaits, admissionTimeouts    atomic.Int64
	leasesExpired, ownersExpired         atomic.Int64
	writesFailed, writesLate             atomic.Int64
	pagesMoved                           atomic.Int64
	findsDropped, foundAgain             atomic.Int64
	loopsRestarted                       atomic.Int64
	leases, transfers                    atomic.Int64 // gauges
}

// Stats reads the counters and gauges. It is cheap enough to be called every second. ErrClosed on a closed database.
func (d *DB) Stats() (Stats, error) {
	if err := d.gate.enter(); err != nil {
		return Stats{}, err
	}
	defer d.gate.leave()
	snapshot := d.index.Snapshot()
	a, err := txn.ReadAccounts(snapshot)
	lsn, err2 := txn.ReadApplied(snapshot)
	snapshot.Close()
	if err == nil {
		err = err2
	}
	if err != nil {
		return Stats{}, err
	}
	ram, table, seg := d.arena.Usage(), d.residency.counts(), d.segments.Stats()
	unverified := d.unproven.count()
	s := Stats{
		Unverified: unverified, Checkpoints: max(a.Listed-unverified, 0), Superseded: a.Superseded, Undurable: max(a.Undurable-unverified, 0), Retired: a.Retired, Namespaces: a.Namespaces,
		Pages: a.Pages, PageBytes: a.PageBytes, PlacedPages: a.PlacedPages,
		RAMCapacity: ram.Capacity, RAMUsed: ram.Used, RAMDirtyBytes: table.dirtyBytes,
		DiskBytes: d.disk.inUse(), DiskBudget: d.disk.bound(), LogBytes: d.log.Size(), IndexBytes: d.index.DiskBytes(),
		Pending: d.pending.count(), Leases: d.counters.leases.Load(), Owners: d.owners.count(), Transfers: d.counters.transfers.Load(), Quarantined: int64(table.quarantined), LSN: lsn,
		Published: d.counters.published.Load(), Replays: d.telemetry.replays.Load(), Rejected: d.telemetry.rejected.Load(), Unlisted: d.telemetry.ended.Load(),
		RetiredTotal: d.counters.retired.Load(), DeletedTotal: d.counters.deleted.Load(),
		LookupsFull: d.telemetry.full.Load(), LookupsPartial: d.telemetry.partial.Load(), LookupsMissed: d.telemetry.missed.Load(), LookupsRetried: d.telemetry.again.Load(),
		PagesRestored: d.telemetry.restored.Load(), PagesRestoredCold: d.telemetry.restoredCold.Load(), BytesRestored: d.telemetry.restoredBytes.Load(),
		TokensAsked: d.telemetry.asked.Load(), TokensFound: d.telemetry.found.Load(),
		PagesWritten: d.counters.pagesWritten.Load(), PayloadWritten: d.counters.payloadWritten.Load(),
		OwnWritten: d.counters.ownWritten.Load(), LeftRAM: d.residency.leftRAM.Load(),
		SegmentWritten: seg.PayloadBytes + seg.DescriptorBytes + seg.PaddingBytes, LogWritten: d.log.Bytes(),
		PagesRead: d.counters.pagesRead.Load(), PagesEvicted: d.counters.pagesEvicted.Load(), FailedReads: d.counters.failedReads.Load(),
		AdmissionWaits: d.counters.admissionWaits.Load(), AdmissionTimeouts: d.counters.admissionTimeouts.Load(),
		WritesFailed: d.counters.writesFailed.Load(), WritesLate: d.counters.writesLate.Load(), PagesMoved: d.counters.pagesMoved.Load(), FoundAgain: d.counters.foundAgain.Load(), FindsDropped: d.counters.findsDropped.Load(), LoopsRestarted: d.counters.loopsRestarted.Load(), LeasesExpired: d.counters.leasesExpired.Load(), OwnersExpired: d.counters.ownersExpired.Load(),
	}
	s.RetiredBy = map[string]int64{}
	for r := range d.events.retired {
		if n := d.events.retired[r].Load(); n > 0 {
			s.RetiredBy[Reason(r).String()] = n
		}
	}
	infos, err := d.segments.Segments()
	if err != nil {
		return Stats{}, err
	}
	for _, info := range infos {
		s.Segments++
		s.SegmentBytes += info.Allocated
	}
	return s, nil
}
