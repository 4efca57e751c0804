//go:build gofuzz

package fuzz

import (
	"os"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/holdfast-db/holdfast/txn"
)

// What follows is for go-fuzz and OSS-Fuzz builds, which want functions of this shape: 1 if the input was a good one, 0 if not, a panic
// if it breaks a promise. Fuzz does what FuzzHistory of go test -fuzz does, FuzzPatch and FuzzFile what FuzzImage and FuzzProgram do; FuzzRecord does
// less than that of txn.

var (
	bubble   sync.Once
	programs = make(chan *Program)
	outcomes = make(chan *Outcome)
)

// Fuzz leads a database through the history that bytes stand for.
func Fuzz(data []byte) int { return lead(FromBytes(data)) }

// FuzzPatch writes bytes over a file of a database that is closed, and opens it.
func FuzzPatch(data []byte) int { return lead(FromImage(data)) }

// lead leads a database through a program. All histories happen in one bubble of time: package testing has the only door to one, and
// does not come back from it.
func lead(p *Program) int {
	bubble.Do(func() {
		os.Args = []string{os.Args[0], "-test.timeout=0"}
		go testing.Main(func(string, string) (bool, error) { return true, nil }, []testing.InternalTest{{Name: "Fuzz", F: func(t *testing.T) {
			synctest.Test(t, func(*testing.T) {
				s := NewScheduler()
				s.Run(func() {
					for p := range programs {
						outcomes <- Run(p, s, "")
					}
				})
			})
		}}}, nil, nil)
	})
	programs <- p
	if o := <-outcomes; o.Violation != nil {
		panic(o.Violation.Error() + "\n" + string(p.JSON()))
	}
	return 1
}

// FuzzRecord decodes bytes as a record, the first one being its kind, and encodes what it finds.
func FuzzRecord(data []byte) int {
	if len(data) == 0 {
		return 0
	}
	r, err := txn.Decode(txn.Kind(data[0]), data[1:])
	if err != nil {
		return 0
	}
	if again := txn.Encode(nil, r); string(again) != string(data[1:]) {
		panic("a record is encoded as other bytes than it was decoded from")
	}
	return 1
}

// FuzzFile reads bytes as the file of a program.
func FuzzFile(data []byte) int {
	p, err := ParseProgram(data)
	if err != nil {
		return 0
	}
	if _, err := ParseProgram(p.JSON()); err != nil {
		panic(err)
	}
	return 1
}
