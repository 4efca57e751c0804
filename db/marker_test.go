package db

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"testing"

	"github.com/stretchr/testify/require"
)

// FuzzMarker reads any bytes as a marker, with a checksum made to hold or as it is. What is accepted is written the same way but for bytes that
// have no meaning yet.
func FuzzMarker(f *testing.F) {
	whole := marker{epoch: 7}.marshal()
	for _, resign := range []bool{false, true} {
		f.Add(whole, resign)
		f.Add(whole[:40], resign)
		f.Add(append([]byte("HOLDFAST"), 2, 0, 0, 0), resign)
		f.Add([]byte{}, resign)
	}
	f.Fuzz(func(t *testing.T, b []byte, resign bool) {
		if resign && len(b) == markerBytes {
			binary.LittleEndian.PutUint32(b[60:], crc32.Checksum(b[:60], castagnoli))
		}
		m, err := parseMarker(b)
		if err != nil {
			require.True(t, errors.Is(err, ErrCorrupt) || errors.Is(err, ErrUnsupported), "%v", err)
			return
		}
		again, err := parseMarker(m.marshal())
		require.NoError(t, err)
		require.Equal(t, m, again)
	})
}
