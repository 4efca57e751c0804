//go:build cgo && linux

package gpu

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// ptxMachine runs the few instructions that the kernel is made of, one thread after the other, over flat memory. It checks
// the kernel's logic where there is no device: which words are copied, how often, and that nothing else is touched.
type ptxMachine struct {
	code   [][]string     // instructions, split into words
	labels map[string]int // name to index in code
	memory []byte
	stores map[uint64]int // how often each 16-byte word was written
}

func parsePTX(t *testing.T, text string) *ptxMachine {
	m := &ptxMachine{labels: map[string]int{}, stores: map[uint64]int{}}
	_, body, ok := strings.Cut(text, "\n{")
	require.True(t, ok)
	for line := range strings.Lines(body) {
		line, _, _ = strings.Cut(line, "//")
		line = strings.TrimSpace(line)
		if label, is := strings.CutSuffix(line, ":"); is {
			m.labels[label] = len(m.code)
			continue
		}
		if line == "" || line == "}" || strings.HasPrefix(line, ".reg") {
			continue
		}
		line, ok = strings.CutSuffix(line, ";")
		require.True(t, ok, line)
		line = strings.NewReplacer(",", " ", "{", " ", "}", " ", "[", " ", "]", " ").Replace(line)
		m.code = append(m.code, strings.Fields(line))
	}
	return m
}

// thread runs one thread to its end.
func (m *ptxMachine) thread(params, special map[string]uint64) error {
	regs := map[string]uint64{}
	value := func(s string) uint64 {
		if v, ok := special[s]; ok {
			return v
		}
		if n, err := strconv.ParseUint(s, 10, 64); err == nil {
			return n
		}
		return regs[s]
	}
	address := func(s string) uint64 {
		base, off, _ := strings.Cut(s, "+")
		n, _ := strconv.ParseUint(off, 10, 64)
		return value(base) + n
	}
	at := func(a, n uint64) ([]byte, error) {
		if a%min(n, 16) != 0 || a+n > uint64(len(m.memory)) {
			return nil, fmt.Errorf("%d bytes at %#x", n, a)
		}
		return m.memory[a : a+n], nil
	}
	for pc, steps := 0, 0; ; pc, steps = pc+1, steps+1 {
		if steps > 1<<20 {
			return fmt.Errorf("does not end")
		}
		c := m.code[pc]
		if guard, is := strings.CutPrefix(c[0], "@"); is {
			if regs[guard] == 0 {
				continue
			}
			c = c[1:]
		}
		switch c[0] {
		case "ret":
			return nil
		case "bra":
			pc = m.labels[c[1]] - 1
		case "ld.param.u64", "ld.param.u32":
			regs[c[1]] = params[c[2]]
		case "mov.u32", "mov.u64", "cvt.u64.u32", "cvta.to.global.u64":
			regs[c[1]] = value(c[2])
		case "add.u32":
			regs[c[1]] = uint64(uint32(value(c[2]) + value(c[3])))
		case "add.s64":
			regs[c[1]] = value(c[2]) + value(c[3])
		case "shl.b64":
			regs[c[1]] = value(c[2]) << value(c[3])
		case "mul.wide.u32":
			regs[c[1]] = uint64(uint32(value(c[2]))) * uint64(uint32(value(c[3])))
		case "setp.ge.u32", "setp.ge.u64":
			regs[c[1]] = 0
			if value(c[2]) >= value(c[3]) {
				regs[c[1]] = 1
			}
		case "ld.global.u64":
			b, err := at(address(c[2]), 8)
			if err != nil {
				return err
			}
			regs[c[1]] = binary.LittleEndian.Uint64(b)
		case "ld.global.v4.u32":
			b, err := at(address(c[5]), 16)
			if err != nil {
				return err
			}
			for i := range 4 {
				regs[c[1+i]] = uint64(binary.LittleEndian.Uint32(b[4*i:]))
			}
		case "st.global.v4.u32":
			a := address(c[1])
			b, err := at(a, 16)
			if err != nil {
				return err
			}
			m.stores[a]++
			for i := range 4 {
				binary.LittleEndian.PutUint32(b[4*i:], uint32(regs[c[2+i]]))
			}
		default:
			return fmt.Errorf("unknown instruction %v", c)
		}
	}
}

// Whatever the number and length of runs and the shape of the grid, every word is copied once and no other is written.
func TestCUDAKernelCopiesEveryWordOnce(t *testing.T) {
	random := rand.New(rand.NewPCG(8, 8))
	for _, c := range []struct {
		grid, block uint64
		words       []uint64
	}{
		{1, 1, []uint64{1}},
		{1, 4, []uint64{0, 1, 3, 4, 5, 15, 16, 17, 64}},
		{3, 8, []uint64{33, 31, 32, 1, 100, 7}},
		{12, 2, []uint64{5, 9}},
		{2, 256, []uint64{256, 1024, 1023, 1025, 2048 + 3}},
	} {
		m := parsePTX(t, kernelPTX)
		// Descriptors, then sources and targets, with a word between them that stays as it is.
		const descriptors = 4096
		m.memory = make([]byte, 256<<10)
		noise(random, m.memory)
		want := append([]byte(nil), m.memory...)
		next, stored := uint64(2*descriptors), 0
		place := func(words uint64) uint64 {
			a := next
			next += 16 * (words + 1)
			return a
		}
		for i, words := range c.words {
			from, to := place(words), place(words)
			for k, v := range []uint64{from, to, words} {
				at := descriptors + 24*i + 8*k
				binary.LittleEndian.PutUint64(m.memory[at:], v)
				copy(want[at:at+8], m.memory[at:at+8])
			}
			copy(want[to:to+16*words], want[from:from+16*words])
			stored += int(words)
		}
		require.Less(t, next, uint64(len(m.memory)))
		for block := range c.grid {
			for thread := range c.block {
				require.NoError(t, m.thread(
					map[string]uint64{"holdfast_copy_runs": descriptors, "holdfast_copy_count": uint64(len(c.words))},
					map[string]uint64{"%ctaid.x": block, "%nctaid.x": c.grid, "%tid.x": thread, "%ntid.x": c.block},
				))
			}
		}
		require.Equal(t, want, m.memory)
		require.Len(t, m.stores, stored)
		for a, n := range m.stores {
			require.Equal(t, 1, n, "word at %#x", a)
		}
	}
}
