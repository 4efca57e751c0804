package gpu

import (
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// Whatever the regions, the runs map every byte of the device to the byte of the host that its region does, once; none is
// longer than a chunk or crosses the border of a pinned piece; and none could be merged with the next.
func TestPlanMapsEveryByteOnce_GPU08(t *testing.T) {
	const arena, device = 1 << 16, uint64(1) << 40
	mem, unmap, err := mapMemory(arena)
	require.NoError(t, err)
	defer func() { require.NoError(t, unmap()) }()
	base := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem))))
	rapid.Check(t, func(t *rapid.T) {
		var pinned ledger
		pieces := uint64(rapid.SampledFrom([]int{1, 2, 16}).Draw(t, "pieces"))
		for i := range pieces {
			_, ok := pinned.add(base+i*arena/pieces, base+(i+1)*arena/pieces)
			require.True(t, ok)
		}
		limits := Limits{Regions: 1000, Bytes: arena, ChunkBytes: int64(rapid.SampledFrom([]int{4096, 10000, arena}).Draw(t, "chunk"))}
		want := map[uint64]uint64{} // device address to host address
		var regions []Region
		var at, hostAt uint64
		for range rapid.IntRange(1, 40).Draw(t, "regions") {
			n := rapid.Uint64Range(1, 1500).Draw(t, "bytes")
			at += rapid.SampledFrom([]uint64{0, 0, 1, 700}).Draw(t, "gap on the device")
			hostAt += rapid.SampledFrom([]uint64{0, 0, 1, 700}).Draw(t, "gap on the host")
			if hostAt+n > arena {
				break
			}
			regions = append(regions, Region{device + at, mem[hostAt : hostAt+n]})
			for i := range n {
				want[device+at+i] = base + hostAt + i
			}
			at += n
			hostAt += n
		}
		regions = rapid.Permutation(regions).Draw(t, "order")
		b := &Batch{Direction: Store, Regions: regions}
		runs, total, err := plan(b, limits, pinned.view(), true)
		require.NoError(t, err)
		require.EqualValues(t, len(want), total)
		for i, r := range runs {
			require.LessOrEqual(t, r.bytes, limits.ChunkBytes)
			s := pinned.view().find(r.hostAddress())
			require.LessOrEqual(t, r.hostAddress()+uint64(r.bytes), s.end)
			for k := range uint64(r.bytes) {
				require.Equal(t, want[r.device+k], r.hostAddress()+k)
				delete(want, r.device+k)
			}
			if i > 0 {
				p := runs[i-1]
				touching := p.device+uint64(p.bytes) == r.device && p.hostAddress()+uint64(p.bytes) == r.hostAddress()
				require.True(t, !touching || p.bytes == limits.ChunkBytes || pinned.view().find(p.hostAddress()) != s, "runs %d and %d should be one", i-1, i)
			}
		}
		require.Empty(t, want)
	})
}
