package main

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/dustin/go-humanize"

	"github.com/holdfast-db/holdfast/txn"
)

// byteSize is a number of bytes on the command line: 4096, 64KiB, 1.5GiB, 24G. It is a pflag.Value.
type byteSize int64

// Binary units, largest first, for writing a size back without losing a byte.
var byteUnits = []struct {
	name  string
	bytes int64
}{{"EiB", 1 << 60}, {"PiB", 1 << 50}, {"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}}

// Set parses a size; a fraction of a byte is cut off.
func (b *byteSize) Set(s string) error {
	n, err := humanize.ParseBytes(s)
	if err != nil {
		return fmt.Errorf("size %.40q: want a number of bytes such as 4096, 64KiB or 1.5GiB: %w", s, txn.ErrInvalid)
	}
	if n > math.MaxInt64 {
		return fmt.Errorf("size %.40q: more than %d bytes: %w", s, int64(math.MaxInt64), txn.ErrTooLarge)
	}
	*b = byteSize(n)
	return nil
}

// String writes the size in the largest unit that divides it, so that Set gives the same size back.
func (b *byteSize) String() string {
	for _, u := range byteUnits {
		if n := int64(*b); n != 0 && n%u.bytes == 0 {
			return strconv.FormatInt(n/u.bytes, 10) + u.name
		}
	}
	return strconv.FormatInt(int64(*b), 10)
}

// Type names the value in help texts.
func (b *byteSize) Type() string { return "size" }

// humanBytes writes n for people, with three digits at most: 4 KiB, 1.37 GiB.
func humanBytes(n int64) string {
	if n < 1<<10 {
		return fmt.Sprintf("%d B", n)
	}
	s := humanize.IBytesN(uint64(n), 3)
	for _, zeros := range []string{".00 ", ".0 "} {
		s = strings.Replace(s, zeros, " ", 1)
	}
	return s
}
