// Package segment is the disk tier: page payloads in large append-only files that describe themselves.
//
// # Files
//
// A segment is the file <dir>/<number>.seg, the number in 20 decimal digits. Numbers start at 1 and are never used twice.
// A file consists of a header block and of batches, all of them multiples of 4096 bytes, so that every write can be
// direct. Integers are little endian.
//
//	0          4096                                                          end of file
//	┌──────────┬────────────┬──────────────────────┬────────────┬────────────────┐
//	│ header   │ descriptor │ payload of batch 1   │ descriptor │ payload of … 2 │
//	└──────────┴────────────┴──────────────────────┴────────────┴────────────────┘
//
// The header, 4096 bytes:
//
//	   0   4  magic "HFSH"
//	   4   2  format version, 1
//	   6   1  class: 1 shared, 2 own
//	   7   1  zero
//	   8   8  segment number
//	  16  16  database id
//	  32      zeros
//	4092   4  CRC-32C of everything before
//
// The descriptor of a batch of n pages, 1 to 512, is as many blocks of 4096 bytes as it needs:
//
//	 0   4  magic "HFSB"
//	 4   2  format version, 1
//	 6   1  class
//	 7   1  zero
//	 8   8  segment number
//	16  16  database id
//	32   8  batch sequence in this segment, from 1
//	40   8  offset of this descriptor in the file
//	48   8  bytes of payload that follow the descriptor
//	56   4  n
//	60   4  zero
//	64 104n entries
//	        zeros
//	-4   4  CRC-32C of everything before, from the start of the descriptor
//
// One entry, 104 bytes:
//
//	 0  32  page key, not zero
//	32  32  key of the page before this one, zero if there is none
//	64   2  rank
//	66   1  codec: 1 none, 2 zstd
//	67   5  zero
//	72   8  logical bytes, 1 to 1 GiB
//	80   8  stored bytes, 1 to 1 GiB; equal to the logical ones if the codec is none
//	88   8  offset in the file
//	96   8  XXH3-64 of the stored bytes
//
// The payload follows in the order of the entries, without gaps. Pages of 4096 stored bytes and more come first, each padded
// with zeros to a multiple of 4096; then the smaller ones, each padded to a multiple of 64, and the last to one of 4096.
// Nothing reads the padding, and no checksum covers it. An entry whose offset is not where this rule puts it is corrupt,
// and so is a length that does not follow from the entries: a damaged descriptor never makes a reader allocate or seek.
//
// No type byte is ever zero, so that space that was never written, or was punched, is not taken for anything.
//
// # Life of a segment
//
// The first Append of a class after Open begins a new file; an old one is never appended to. It is created, given its
// header and some preallocated blocks beyond its end (so that the file's size is always where its batches end), synced, and
// its directory is synced, before any Append into it returns. It is *sealed* when the next batch does not fit, by Seal, and
// by Close: the preallocated rest is given back. A write or sync that fails seals it too, for good: after a
// failed sync the kernel may have dropped the bytes and will call the next sync a success. What was not synced until
// then is cut off and was acknowledged to nobody.
//
// Deleting a page punches a hole (Free). A segment without live pages is removed as a whole (Remove), which is the cheap
// way: the classes keep pages of like lifetime together to make that the common one.
package segment
