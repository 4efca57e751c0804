// Package wal is the durable, checksummed, group-committed log of a Holdfast directory.
//
// A log is an ordered sequence of records, each with a log sequence number (LSN) that is never used twice. [Log] writes
// and reads them; [Group] lets many goroutines share one write and one sync.
//
// # On disk
//
// The log is a sequence of numbered directories, each named by the LSN of its first record and each holding exactly one
// github.com/tidwall/wal log with exactly one file:
//
//	wal/00000000000000000001/00000000000000000001
//	wal/00000000000000004711/00000000000000000001     the tail: the only one written to
//
// A file is a sequence of entries. The outer length is tidwall's framing, the frame is ours. All integers are little-endian.
//
//		+--------------------+---------------------------------------------------------------+
//		| length of frame    | frame                                                         |
//		| uvarint, shortest  |                                                               |
//		+--------------------+---------------------------------------------------------------+
//
//		frame, 40 + n bytes:
//
//		  0        3   4    5     6      8        12        16         24          32        36      36+n
//		  +--------+---+----+-----+------+---------+---------+----------+-----------+---------+--------+---------+
//		  | magic  | v |kind|flags| zero | n       | durable | LSN      | previous  | header  |payload | frame   |
//		  | "HFW"  | 1 |    | 0   | 0    |         |         |          | LSN       | CRC-32C |n bytes | CRC-32C |
//		  | 3      | 1 | 1  | 1   | 2    | 4       | 4       | 8        | 8         | 4       |        | 4       |
//		  +--------+---+----+-----+------+---------+---------+----------+-----------+---------+--------+---------+
//
//	  - kind is 1…254 for records and 255 for a seal; 0 is invalid, so that unwritten space exposes itself.
//	  - n is at most [MaxRecordBytes]. The header checksum covers bytes 0…31 and is checked before n is believed, so that a
//	    damaged length allocates nothing.
//	  - durable says how many bytes of this file had been synced when the frame was written. It is what tells a torn tail
//	    from damage, see below.
//	  - previous LSN is that of the record before, in this file or in the directory before. It is LSN−1 except where the
//	    log had to skip numbers ([Options.FirstLSN]), so that a missing directory and a skipped number look different.
//	  - the frame checksum covers bytes 0…31 and the payload. It leaves out the header checksum: a CRC run over data and
//	    its own CRC forgets the data, and would let a payload pass under another header.
//	  - a seal has no payload, the LSN of the last record as both of its LSNs, and counts as no record. [Log.Close] writes it
//	    after everything else is synced; it is the mark of a clean shutdown.
//
// Flags and zero are reserved: a frame with a good checksum and an unknown version or flag is refused with ErrUnsupported.
//
// # Torn tail or damage
//
// What was not synced when power failed may come back whole, in part, in any order of its sectors, or not at all. So the
// newest file may end in bytes that are no frame, even with good frames behind them that reached the disk first. Those
// bytes were never acknowledged as durable and are cut. Bytes that had been synced and are no frame any more are damage,
// and cutting there would silently take back what was acknowledged. A later frame tells which it is: if a good frame says
// that the bad bytes were durable when it was written, [Open] fails with ErrCorrupt, names file and offset, and changes
// nothing. The seal of a clean shutdown says it for everything before it. Older directories were synced to their end
// before the next one was begun, so that anything wrong in them is damage.
//
// What cannot be told: damage within the bytes of the last sync before a crash, because nothing was written after it
// that could say so. It is cut like a torn tail, with the same warning.
//
// # What tidwall/wal is used for
//
// Only appending entries to one file and syncing it. It is never given a file that it could find wrong, never splits a
// batch over two files, never truncates, and is used by one goroutine. Files are read by this package, which needs offsets,
// checksums and bounded memory.
package wal
