package fuzz

import (
	"math/rand/v2"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"
)

// FuzzHistory leads a database on a simulated disk through the history that bytes stand for, and through a crash at its end. Whatever the
// bytes are, no promise is broken.
func FuzzHistory(f *testing.F) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 8 {
		b := make([]byte, 50+rng.IntN(300))
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		f.Add(b)
	}
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) { leads(t, FromBytes(b)) })
}

// leads leads a database through a program.
func leads(t *testing.T, p *Program) {
	synctest.Test(t, func(t *testing.T) {
		s := NewScheduler()
		s.Run(func() {
			if o := Run(p, s, ""); o.Violation != nil {
				t.Errorf("%v\n%s", o.Violation, p.JSON())
			}
		})
	})
}

// FuzzImage writes any bytes over any file of a database that is closed: marker, lock, log, segment, or one of the index. Whatever they are, the next open
// refuses the directory as damaged, or everything that is listed then can be restored, byte for byte, and goes on being so.
func FuzzImage(f *testing.F) {
	rng := rand.New(rand.NewPCG(3, 4))
	for file := range 256 {
		b := make([]byte, 3+1<<rng.IntN(9))
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		b[0] = byte(file)
		f.Add(b)
	}
	f.Add([]byte{1, 0, 0, 0, 0, 0, 0})
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) { leads(t, FromImage(b)) })
}

// FuzzProgram reads any bytes as the file of a program. What is accepted survives being written.
func FuzzProgram(f *testing.F) {
	f.Add(Generate(1).JSON())
	f.Add([]byte(`{"policy":"never","steps":[{"do":"fault"}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := ParseProgram(b)
		if err != nil {
			return
		}
		q, err := ParseProgram(p.JSON())
		require.NoError(t, err)
		require.Equal(t, p.JSON(), q.JSON())
	})
}

// Bytes are decisions: the same bytes are the same program, a change at their end leaves the beginning as it is, and one at the beginning does not.
func TestBytesAreDecisions(t *testing.T) {
	b := make([]byte, 2000)
	for i := range b {
		b[i] = byte(i*i>>3 + i)
	}
	p := FromBytes(b)
	require.Equal(t, p.JSON(), FromBytes(b).JSON())
	b[1]++
	require.NotEqual(t, p.JSON(), FromBytes(b).JSON())
	require.NotEmpty(t, FromBytes(nil).Steps)
	_, err := ParseProgram(FromBytes(nil).JSON())
	require.NoError(t, err)
}
