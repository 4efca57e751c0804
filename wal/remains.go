package wal

import (
	"bytes"
	"errors"
	"fmt"
	"io"

	"github.com/holdfast-db/holdfast/txn"
)

// Remains is what ReadRemains found of a log that may be damaged anywhere.
type Remains struct {
	Records     int64
	First, Last txn.LSN  // of the records found; 0 if there were none
	Missing     []Gap    // records that are named by the next one and are not there
	Damaged     []Damage // bytes that are no frame, the torn end of the newest file included
}

// Gap is a range of records that are missing.
type Gap struct{ From, To txn.LSN }

// ReadRemains gives every record that can still be read, in order, whatever lies between them, and changes nothing. It is for
// salvage: Open and Replay refuse a log with a gap, because what is behind one cannot be replayed, only weighed. After bytes
// that are no frame it goes on at the next good one. A file that cannot be read to its end counts as damaged from there.
//
// fn's error ends it; txn.ErrUnsupported is of a newer format. A log that is not there has no remains. Memory is bounded by
// the largest record.
func ReadRemains(fsys FS, dir string, fn func(lsn txn.LSN, kind byte, payload []byte) error) (r Remains, err error) {
	if fsys == nil {
		fsys = diskFS{}
	}
	found, err := listDirectories(fsys, dir)
	if isNotExist(err) {
		return r, nil
	}
	if err != nil {
		return r, failure("list "+dir, err)
	}
	sc := &scanner{}
	for _, d := range found {
		if err := r.readFile(fsys, d, sc, fn); err != nil {
			return r, err
		}
	}
	return r, nil
}

func (r *Remains) readFile(fsys FS, d directory, sc *scanner, fn func(txn.LSN, byte, []byte) error) error {
	damaged := func(at int64, reason string) {
		r.Damaged = append(r.Damaged, Damage{File: d.file(), Offset: at, Reason: reason})
	}
	file, err := fsys.Open(d.file())
	if err != nil {
		damaged(0, err.Error())
		return nil
	}
	defer func() { _ = file.Close() }() // nothing was written through it
	size, err := file.Size()
	if err != nil {
		damaged(0, err.Error())
		return nil
	}
	sc.begin(file, d.file(), size)
	for {
		sc.anything = false // a frame stands for itself
		h, payload, err := sc.next()
		var bad *Damage
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case errors.As(err, &bad):
			damaged(bad.Offset, bad.Reason)
			if h, payload, err = sc.resync(); err == nil && payload == nil {
				return nil
			}
		}
		if errors.Is(err, txn.ErrUnsupported) {
			return err
		}
		if err != nil {
			damaged(sc.off, err.Error())
			return nil
		}
		if h.kind == kindSeal || h.lsn <= r.Last {
			continue
		}
		if r.Last != 0 && h.previous > r.Last {
			r.Missing = append(r.Missing, Gap{From: r.Last + 1, To: h.previous})
		}
		if r.First == 0 {
			r.First = h.lsn
		}
		r.Last = h.lsn
		r.Records++
		if err := fn(h.lsn, h.kind, payload); err != nil {
			return err
		}
	}
}

// resync steps over bytes that are no entry to the end of the next good frame, and gives that. A nil payload means that there
// is none; the payload of an empty record is not nil.
func (s *scanner) resync() (header, []byte, error) {
	for q := s.off + 1; s.size-q >= overheadBytes; {
		chunk, err := s.bytes(q, min(windowBytes, s.size-q))
		if err != nil {
			return header{}, nil, err
		}
		next := bytes.Index(chunk, frameMagic)
		if next < 0 {
			q += int64(len(chunk) - len(frameMagic) + 1)
			continue
		}
		q += int64(next)
		if s.size-q < overheadBytes {
			break
		}
		raw, err := s.bytes(q, headerBytes)
		if err != nil {
			return header{}, nil, err
		}
		h, reason, err := decodeHeader(raw)
		if length := overheadBytes + int64(h.length); err == nil && reason == "" && length <= s.size-q {
			frame, err := s.bytes(q, length)
			if err != nil {
				return header{}, nil, err
			}
			if payload, ok := payloadOf(frame); ok {
				s.off, s.sealed = q+length, h.kind == kindSeal
				s.entries++
				return h, payload[:len(payload):len(payload)], nil
			}
		}
		q++
	}
	s.off = s.size
	return header{}, nil, nil
}

// String tells the range.
func (g Gap) String() string { return fmt.Sprintf("LSN %d to %d", g.From, g.To) }
