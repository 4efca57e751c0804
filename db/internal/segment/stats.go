package segment

import "sync/atomic"

// Stats counts since Open. All byte counts are of bytes handed to the file system, failed batches included.
type Stats struct {
	PayloadBytes    int64 // stored bytes of pages
	DescriptorBytes int64 // descriptors and headers
	PaddingBytes    int64 // zeros between and after pages
	PagesWritten    int64
	Batches         int64
	Syncs           int64 // of segment files
	SegmentsCreated int64
	SegmentsFailed  int64 // sealed by an error
	SegmentsRemoved int64

	CopiedBytes     int64 // payload that went through a staging buffer: small pages, ends of pages, unaligned memory
	DirectWrites    int64 // write calls by kind of file
	BufferedWrites  int64
	DirectReads     int64 // read calls by kind of file
	BufferedReads   int64
	DirectRefused   int64 // files for which direct I/O was asked and refused
	PagesRead       int64 // pages whose checksum held
	BytesRead       int64 // their stored bytes
	PagesCorrupt    int64 // reads answered with txn.ErrCorrupt
	PagesFreed      int64 // places given to Free, repetitions included
	BytesPunched    int64
	PunchRefused    int64 // holes that the file system has no call for
	PreallocRefused int64 // preallocations that failed; writing went on without
}

// counters is Stats while it is being counted.
type counters struct {
	payloadBytes, descriptorBytes, paddingBytes, pagesWritten, batches, syncs   atomic.Int64
	created, failed, removed                                                    atomic.Int64
	copied, directWrites, bufferedWrites, directReads, bufferedReads            atomic.Int64
	directRefused, pagesRead, bytesRead, pagesCorrupt, pagesFreed, bytesPunched atomic.Int64
	punchRefused, preallocRefused                                               atomic.Int64
}

// Stats reads the counters.
func (s *Store) Stats() Stats {
	c := &s.count
	return Stats{
		PayloadBytes:    c.payloadBytes.Load(),
		DescriptorBytes: c.descriptorBytes.Load(),
		PaddingBytes:    c.paddingBytes.Load(),
		PagesWritten:    c.pagesWritten.Load(),
		Batches:         c.batches.Load(),
		Syncs:           c.syncs.Load(),
		SegmentsCreated: c.created.Load(),
		SegmentsFailed:  c.failed.Load(),
		SegmentsRemoved: c.removed.Load(),
		CopiedBytes:     c.copied.Load(),
		DirectWrites:    c.directWrites.Load(),
		BufferedWrites:  c.bufferedWrites.Load(),
		DirectReads:     c.directReads.Load(),
		BufferedReads:   c.bufferedReads.Load(),
		DirectRefused:   c.directRefused.Load(),
		PagesRead:       c.pagesRead.Load(),
		BytesRead:       c.bytesRead.Load(),
		PagesCorrupt:    c.pagesCorrupt.Load(),
		PagesFreed:      c.pagesFreed.Load(),
		BytesPunched:    c.bytesPunched.Load(),
		PunchRefused:    c.punchRefused.Load(),
		PreallocRefused: c.preallocRefused.Load(),
	}
}
