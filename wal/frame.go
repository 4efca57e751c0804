package wal

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/holdfast-db/holdfast/txn"
	"github.com/holdfast-db/holdfast/txn/mutant"
)

// Limits of the format.
const (
	// MaxRecordBytes is the largest payload of one record.
	MaxRecordBytes = 32 << 20
	// MaxBatchBytes is the most that one Append writes, framing included.
	MaxBatchBytes = 64 << 20
	// MaxLSN is the largest LSN of a record; the log never gets there.
	MaxLSN txn.LSN = 1<<63 - 1
	// MaxKind is the largest kind that a record may have; kind 0 is invalid and 255 is the log's own.
	MaxKind = 254
)

const (
	frameVersion  = 1
	kindSeal      = 255
	headerBytes   = 36
	checkedBytes  = 32 // of the header, covered by both checksums
	trailerBytes  = 4
	overheadBytes = headerBytes + trailerBytes
	prefixMax     = 4 // bytes of the uvarint before a frame: MaxRecordBytes + overheadBytes < 1<<28
)

var (
	frameMagic = []byte("HFW")
	castagnoli = crc32.MakeTable(crc32.Castagnoli)
)

// Record is one entry of the log as the caller sees it.
type Record struct {
	Kind    byte   // 1…MaxKind
	Payload []byte // at most MaxRecordBytes; not kept after Append returns
	// Essential records may use the space that the log keeps in reserve when the disk is full. They are the ones
	// that give space back.
	Essential bool
}

// check refuses a record that the format cannot hold.
func (r Record) check() error {
	if r.Kind == 0 || r.Kind > MaxKind {
		return fmt.Errorf("wal: record kind %d, want 1…%d: %w", r.Kind, MaxKind, txn.ErrInvalid)
	}
	if len(r.Payload) > MaxRecordBytes {
		return fmt.Errorf("wal: record of %d bytes, at most %d: %w", len(r.Payload), MaxRecordBytes, txn.ErrTooLarge)
	}
	return nil
}

func checksum(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

// entryBytes is what a record occupies in the file, tidwall's length prefix included.
func entryBytes(payload int) int64 {
	frame := uint64(overheadBytes + payload)
	var prefix [binary.MaxVarintLen64]byte
	return int64(binary.PutUvarint(prefix[:], frame)) + int64(frame)
}

// header is the decoded fixed part of a frame.
type header struct {
	kind     byte
	length   uint32 // bytes of payload
	durable  uint32 // bytes of the file that were synced when the frame was written
	lsn      txn.LSN
	previous txn.LSN
}

// appendFrame encodes one frame, without the length prefix that tidwall puts before it.
func appendFrame(dst []byte, h header, payload []byte) []byte {
	start := len(dst)
	dst = append(dst, frameMagic...)
	dst = append(dst, frameVersion, h.kind, 0, 0, 0)
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(payload)))
	dst = binary.LittleEndian.AppendUint32(dst, h.durable)
	dst = binary.LittleEndian.AppendUint64(dst, uint64(h.lsn))
	dst = binary.LittleEndian.AppendUint64(dst, uint64(h.previous))
	sum := checksum(dst[start:])
	dst = binary.LittleEndian.AppendUint32(dst, sum)
	dst = append(dst, payload...)
	return binary.LittleEndian.AppendUint32(dst, crc32.Update(sum, castagnoli, payload))
}

// decodeHeader reads the first headerBytes of a frame. A reason that is not empty says why the bytes are no header. An
// error says that they are a header, and one that this build must not touch.
func decodeHeader(b []byte) (h header, reason string, err error) {
	if string(b[:3]) != string(frameMagic) {
		return header{}, "no frame", nil
	}
	if checksum(b[:checkedBytes]) != binary.LittleEndian.Uint32(b[checkedBytes:]) {
		return header{}, "header checksum differs", nil
	}
	if v := b[3]; v != frameVersion {
		return header{}, "", fmt.Errorf("frame version %d, want %d: %w", v, frameVersion, txn.ErrUnsupported)
	}
	if b[5] != 0 || b[6] != 0 || b[7] != 0 {
		return header{}, "", fmt.Errorf("frame flags % x, want none: %w", b[5:8], txn.ErrUnsupported)
	}
	h = header{
		kind:     b[4],
		length:   binary.LittleEndian.Uint32(b[8:]),
		durable:  binary.LittleEndian.Uint32(b[12:]),
		lsn:      txn.LSN(binary.LittleEndian.Uint64(b[16:])),
		previous: txn.LSN(binary.LittleEndian.Uint64(b[24:])),
	}
	if h.kind == 0 {
		return header{}, "kind 0", nil
	}
	if h.length > MaxRecordBytes {
		return header{}, "length over the limit", nil
	}
	return h, "", nil
}

// payloadOf checks the frame checksum of a whole frame and gives its payload.
func payloadOf(frame []byte) (payload []byte, ok bool) {
	end := len(frame) - trailerBytes
	payload = frame[headerBytes:end]
	if mutant.On("frames are not checked") {
		return payload, true
	}
	return payload, crc32.Update(checksum(frame[:checkedBytes]), castagnoli, payload) == binary.LittleEndian.Uint32(frame[end:])
}
