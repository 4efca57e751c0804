package txn

import (
	"encoding/binary"
	"fmt"
)

// intMax bounds every signed number in a record or an entry, so that the sum of two fits and a negative one is seen.
const intMax = 1 << 62

// encoder appends the primitive fields of records and entries: unsigned varints, fixed digests, counted bytes.
type encoder struct{ b []byte }

func (e *encoder) byte(v byte)    { e.b = append(e.b, v) }
func (e *encoder) uint(v uint64)  { e.b = binary.AppendUvarint(e.b, v) }
func (e *encoder) int(v int64)    { e.b = binary.AppendUvarint(e.b, uint64(v)) }
func (e *encoder) fixed(v uint64) { e.b = binary.LittleEndian.AppendUint64(e.b, v) }
func (e *encoder) key(k Key)      { e.b = append(e.b, k[:]...) }
func (e *encoder) bool(v bool) {
	if v {
		e.byte(1)
	} else {
		e.byte(0)
	}
}

func (e *encoder) bytes(v []byte) {
	e.uint(uint64(len(v)))
	e.b = append(e.b, v...)
}

// decoder reads what encoder wrote. The first failure sticks; later reads give zero values. It never allocates more
// than the input is long: every count is checked against the bytes that are left before anything is made of it.
type decoder struct {
	b    []byte
	what string
	err  error
}

func (d *decoder) fail(field string) {
	if d.err == nil {
		d.err = fmt.Errorf("%s: %s does not decode: %w", d.what, field, ErrCorrupt)
	}
	d.b = nil
}

func (d *decoder) byte(field string) byte {
	if len(d.b) < 1 {
		d.fail(field)
		return 0
	}
	v := d.b[0]
	d.b = d.b[1:]
	return v
}

func (d *decoder) bool(field string) bool {
	v := d.byte(field)
	if v > 1 {
		d.fail(field)
	}
	return v == 1
}

func (d *decoder) uint(field string) uint64 {
	v, n := binary.Uvarint(d.b)
	if n <= 0 || (n > 1 && d.b[n-1] == 0) { // a padded varint is a second spelling of the same value
		d.fail(field)
		return 0
	}
	d.b = d.b[n:]
	return v
}

func (d *decoder) int(field string) int64 {
	v := d.uint(field)
	if v > intMax {
		d.fail(field)
		return 0
	}
	return int64(v)
}

func (d *decoder) fixed(field string) uint64 {
	if len(d.b) < 8 {
		d.fail(field)
		return 0
	}
	v := binary.LittleEndian.Uint64(d.b)
	d.b = d.b[8:]
	return v
}

func (d *decoder) key(field string) (k Key) {
	if len(d.b) < len(k) {
		d.fail(field)
		return Key{}
	}
	copy(k[:], d.b)
	d.b = d.b[len(k):]
	return k
}

// bytes returns a copy, so that what is decoded outlives the buffer it came from.
func (d *decoder) bytes(field string) []byte {
	n := d.uint(field)
	if n > uint64(len(d.b)) {
		d.fail(field)
		return nil
	}
	if n == 0 {
		return nil
	}
	v := append([]byte(nil), d.b[:n]...)
	d.b = d.b[n:]
	return v
}

// count reads how many items follow, each at least itemBytes long.
func (d *decoder) count(field string, itemBytes int) int {
	n := d.uint(field)
	if n > uint64(len(d.b)/itemBytes) {
		d.fail(field)
		return 0
	}
	return int(n)
}

// end reports the first failure, or trailing bytes.
func (d *decoder) end() error {
	if d.err == nil && len(d.b) != 0 {
		d.err = fmt.Errorf("%s: %d bytes too many: %w", d.what, len(d.b), ErrCorrupt)
	}
	return d.err
}
