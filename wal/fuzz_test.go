package wal

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

// memoryFile is a file in memory.
type memoryFile struct{ *bytes.Reader }

func (memoryFile) Close() error           { return nil }
func (f memoryFile) Size() (int64, error) { return f.Reader.Size(), nil }

// FuzzFrame: whatever is encoded comes back; whatever bytes come in front of or behind it, the scanner neither panics nor takes
// anything for a frame that is not one.
func FuzzFrame(f *testing.F) {
	f.Add(byte(1), uint64(1), uint64(0), []byte("payload"), []byte{0, 0, 0})
	f.Add(byte(254), uint64(MaxLSN), uint64(7), []byte{}, []byte("HFW\x01"))
	f.Fuzz(func(t *testing.T, kind byte, lsn, previous uint64, payload, junk []byte) {
		if kind == 0 || kind > MaxKind || lsn <= previous || lsn > uint64(MaxLSN) {
			t.Skip()
		}
		h := header{kind: kind, length: uint32(len(payload)), lsn: txn.LSN(lsn), previous: txn.LSN(previous)}
		var image bytes.Buffer
		frame := appendFrame(nil, h, payload)
		image.Write(binary.AppendUvarint(nil, uint64(len(frame))))
		image.Write(frame)
		require.Equal(t, entryBytes(len(payload)), int64(image.Len()))
		end := int64(image.Len())
		image.Write(junk)

		sc := &scanner{}
		sc.begin(memoryFile{bytes.NewReader(image.Bytes())}, "image", int64(image.Len()))
		got, gotPayload, err := sc.next()
		require.NoError(t, err)
		require.Equal(t, h, got)
		require.True(t, bytes.Equal(payload, gotPayload))
		require.Equal(t, end, sc.off)
		if _, _, err = sc.next(); len(junk) == 0 {
			require.ErrorIs(t, err, io.EOF)
		} else {
			require.Error(t, err)
		}
	})
}

// FuzzLogImage: any bytes at all as the newest file of a log, with the checksums made good or as they are. Opening it either refuses and changes nothing, or keeps a prefix
// of the bytes that reads back whole, appends to it, and finds all of it again.
func FuzzLogImage(f *testing.F) {
	dir := filepath.Join(f.TempDir(), "wal")
	l := open(f, dir, Options{})
	put(f, l, "A", "B")
	_, err := l.Append([]Record{record("C"), record("D")})
	require.NoError(f, err)
	require.NoError(f, l.Close())
	image := contents(f, newest(f, dir))
	for _, resign := range []bool{false, true} {
		f.Add(image, resign)
		f.Add(image[:len(image)-20], resign)
		f.Add(append(bytes.Clone(image), make([]byte, 600)...), resign)
		f.Add(append(bytes.Clone(image[:50]), image[60:]...), resign)
		f.Add(append(bytes.Clone(image), image...), resign)
	}
	f.Add([]byte{}, false)
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0x0f}, false)
	root := memoryDir(f)
	f.Fuzz(func(t *testing.T, image []byte, resign bool) {
		if resign {
			image = resignedAll(image)
		}
		dir, err := os.MkdirTemp(root, "wal")
		require.NoError(t, err)
		defer func() { require.NoError(t, os.RemoveAll(dir)) }()
		d := directory{path: filepath.Join(dir, directoryName(1))}
		require.NoError(t, os.Mkdir(d.path, 0o700))
		require.NoError(t, os.WriteFile(d.file(), image, 0o600))
		l, err := Open(dir, Options{})
		if err != nil {
			require.True(t, errors.Is(err, txn.ErrCorrupt) || errors.Is(err, txn.ErrUnsupported), "%v", err)
			require.Equal(t, image, contents(t, d.file()))
			return
		}
		defer func() { _ = l.Close() }()
		require.Equal(t, int64(len(image)), l.Size()+l.Repair().Cut)
		if l.Size() > 0 {
			require.Equal(t, image[:l.Size()], contents(t, d.file()))
		}
		before := replayed(t, l, 1)
		put(t, l, "after")
		require.NoError(t, l.Close())
		l, err = Open(dir, Options{})
		require.NoError(t, err)
		defer func() { _ = l.Close() }()
		require.Equal(t, append(before, entry{l.Next() - 1, 1, "after"}), replayed(t, l, 1))
	})
}

// resignedAll makes the checksums of everything that looks like a frame good, so that what they protect is tried as well.
func resignedAll(image []byte) []byte {
	image = bytes.Clone(image)
	for at := 0; ; at++ {
		i := bytes.Index(image[at:], frameMagic)
		if i < 0 {
			return image
		}
		at += i
		rest := image[at:]
		if len(rest) < overheadBytes {
			return image
		}
		sum := checksum(rest[:checkedBytes])
		binary.LittleEndian.PutUint32(rest[checkedBytes:], sum)
		end := uint64(headerBytes) + uint64(binary.LittleEndian.Uint32(rest[8:]))
		if end+trailerBytes <= uint64(len(rest)) {
			binary.LittleEndian.PutUint32(rest[end:], crc32.Update(sum, castagnoli, rest[headerBytes:end]))
		}
	}
}
