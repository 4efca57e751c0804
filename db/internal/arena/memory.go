package arena

import (
	"os"
	"unsafe"
)

var systemPageBytes = int64(os.Getpagesize())

// wholePages is the part of b that covers whole pages of the system.
func wholePages(b []byte) []byte {
	from := int64(uintptr(unsafe.Pointer(&b[0])))
	skip := -from & (systemPageBytes - 1)
	end := (from + int64(len(b))) &^ (systemPageBytes - 1)
	if from+skip >= end {
		return nil
	}
	return b[skip : end-from]
}
