package wal

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/holdfast-db/holdfast/txn"
)

// windowBytes is how much of a file is read at a time. A frame that is larger gets a window of its own size, and only after
// its header checksum was found good and the file was found long enough to hold it.
const windowBytes = 256 << 10

// Damage is the error for stored bytes that are not what was written. It is of class ErrCorrupt.
type Damage struct {
	File   string // path of the file, or of the directory that should hold it
	Offset int64  // bytes from the start of the file
	Reason string

	// The checksums are good and the content contradicts what comes before it. No torn write does that, so it is never cut.
	contradiction bool
}

// Error names the file, the offset and what is wrong there.
func (d *Damage) Error() string {
	return fmt.Sprintf("wal: %s: offset %d: %s: %v", d.File, d.Offset, d.Reason, txn.ErrCorrupt)
}

// Unwrap gives the class.
func (d *Damage) Unwrap() error { return txn.ErrCorrupt }

// scanner walks the entries of one file, in order, in memory bounded by one window or one frame.
//
// next has three kinds of ending, and the caller must not confuse them: io.EOF after the last entry; a *Damage, with the
// scanner still standing on the offending offset, for bytes that are no entry; any other error for a read that failed, which
// says nothing about the bytes.
type scanner struct {
	file File
	path string
	size int64 // how much of the file to look at
	off  int64 // of the next entry

	entries  uint64 // seen so far, seals included
	last     txn.LSN
	anything bool // whether last is known: a frame was seen, or the caller knows what came before
	sealed   bool // the last entry seen is a seal

	window   []byte
	windowAt int64
}

// begin turns to another file. The window's memory and the last LSN are kept: files are read in the order of the log.
func (s *scanner) begin(file File, path string, size int64) {
	*s = scanner{file: file, path: path, size: size, last: s.last, anything: s.anything, window: s.window[:0]}
}

// bytes returns n bytes at off. They are valid until the next call.
func (s *scanner) bytes(off, n int64) ([]byte, error) {
	if off < s.windowAt || off+n > s.windowAt+int64(len(s.window)) {
		want := min(max(n, windowBytes), s.size-off)
		if int64(cap(s.window)) < want {
			s.window = make([]byte, want)
		}
		s.window, s.windowAt = s.window[:want], off
		if read, err := s.file.ReadAt(s.window, off); int64(read) < want {
			s.window = s.window[:0]
			if err == nil || errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return nil, failure(fmt.Sprintf("read %s at %d", s.path, off), err)
		}
	}
	at := off - s.windowAt
	return s.window[at : at+n : at+n], nil
}

func (s *scanner) damage(format string, args ...any) error {
	return &Damage{File: s.path, Offset: s.off, Reason: fmt.Sprintf(format, args...)}
}

// next reads the entry at off and steps over it. The payload is valid until the next call.
func (s *scanner) next() (header, []byte, error) {
	rest := s.size - s.off
	if rest == 0 {
		return header{}, nil, io.EOF
	}
	prefix, err := s.bytes(s.off, min(rest, prefixMax))
	if err != nil {
		return header{}, nil, err
	}
	if prefix[0] == 0 {
		return header{}, nil, s.damage("zero bytes")
	}
	length, n := binary.Uvarint(prefix)
	switch {
	case n <= 0 && rest < prefixMax:
		return header{}, nil, s.damage("torn: %d bytes", rest)
	case n <= 0 || n > 1 && prefix[n-1] == 0 || length < overheadBytes || length > overheadBytes+MaxRecordBytes:
		return header{}, nil, s.damage("no entry length")
	case rest < int64(n)+headerBytes:
		return header{}, nil, s.damage("torn: %d bytes of an entry of %d", rest, uint64(n)+length)
	}
	raw, err := s.bytes(s.off+int64(n), headerBytes)
	if err != nil {
		return header{}, nil, err
	}
	h, reason, err := decodeHeader(raw)
	switch {
	case err != nil:
		return header{}, nil, fmt.Errorf("wal: %s: offset %d: %w", s.path, s.off, err)
	case reason != "":
		return header{}, nil, s.damage("%s", reason)
	case uint64(h.length)+overheadBytes != length:
		return header{}, nil, s.damage("entry of %d bytes holds a frame of %d", length, uint64(h.length)+overheadBytes)
	case rest < int64(n)+int64(length):
		return header{}, nil, s.damage("torn: %d bytes of an entry of %d", rest, uint64(n)+length)
	}
	frame, err := s.bytes(s.off+int64(n), int64(length))
	if err != nil {
		return header{}, nil, err
	}
	payload, ok := payloadOf(frame)
	if !ok {
		return header{}, nil, s.damage("frame checksum differs")
	}
	if err := s.follow(h); err != nil {
		return header{}, nil, err
	}
	s.off += int64(n) + int64(length)
	s.entries++
	s.last, s.anything, s.sealed = h.lsn, true, h.kind == kindSeal
	return h, payload, nil
}

// follow checks that a frame belongs where it stands.
func (s *scanner) follow(h header) error {
	reason := ""
	switch {
	case int64(h.durable) > s.off:
		reason = fmt.Sprintf("frame says that %d bytes before it were durable", h.durable)
	case h.kind == kindSeal && (h.length != 0 || s.entries == 0 || h.lsn != s.last || h.previous != s.last):
		reason = fmt.Sprintf("seal of LSN %d after LSN %d", h.lsn, s.last)
	case h.lsn > MaxLSN:
		reason = fmt.Sprintf("LSN %d, at most %d", h.lsn, MaxLSN)
	case h.kind != kindSeal && h.lsn <= h.previous:
		reason = fmt.Sprintf("LSN %d after LSN %d", h.lsn, h.previous)
	case h.kind != kindSeal && s.anything && h.previous != s.last:
		reason = fmt.Sprintf("record %d follows record %d, but the one before it is %d: records are missing", h.lsn, h.previous, s.last)
	default:
		return nil
	}
	return &Damage{File: s.path, Offset: s.off, Reason: reason, contradiction: true}
}

// witness looks for proof that the bytes at off had been durable: a good frame anywhere behind them that says so. It
// searches for the frame itself, at every offset, because nothing about the damaged bytes says where the next entry begins.
func (s *scanner) witness() (at int64, found bool, err error) {
	for q := s.off + 1; ; q++ {
		var length int64
		q, length, err = s.claimant(q)
		if err != nil || q < 0 {
			return 0, false, err
		}
		frame, err := s.bytes(q, length)
		if err != nil {
			return 0, false, err
		}
		if _, ok := payloadOf(frame); ok {
			return q, true, nil
		}
	}
}

// claimant finds the next good header, at q or behind it, of a frame that says that the byte at off was durable. It gives -1 if
// there is none.
func (s *scanner) claimant(q int64) (at, length int64, err error) {
	for s.size-q >= overheadBytes {
		chunk, err := s.bytes(q, min(windowBytes, s.size-q))
		if err != nil {
			return 0, 0, err
		}
		headers := len(chunk) - headerBytes + 1 // places where a whole header is in sight
		for i := 0; i < headers; i++ {
			next := bytes.Index(chunk[i:headers-1+len(frameMagic)], frameMagic)
			if next < 0 {
				break
			}
			i += next
			h, reason, err := decodeHeader(chunk[i:])
			at, length = q+int64(i), overheadBytes+int64(h.length)
			if err == nil && reason == "" && s.off < int64(h.durable) && int64(h.durable) <= at && length <= s.size-at {
				return at, length, nil
			}
		}
		q += int64(headers)
	}
	return -1, 0, nil
}
