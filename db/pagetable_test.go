package db

import (
	"encoding/binary"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/holdfast-db/holdfast/txn"
)

// Whatever comes and goes, the table agrees with a map, and its size follows what is in it.
func TestPageTableAgreesWithMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var table pageTable
		model := map[txn.Key]*page{}
		// Few homes, at both ends of the table, so that runs of neighbours collide and wrap around.
		key := rapid.Custom(func(t *rapid.T) (k txn.Key) {
			home := rapid.SampledFrom([]uint64{0, 1, 62, 63, 126, 127}).Draw(t, "home")
			binary.LittleEndian.PutUint64(k[:], home|uint64(rapid.IntRange(0, 3).Draw(t, "high"))<<32)
			k[31] = byte(rapid.IntRange(0, 40).Draw(t, "other"))
			return k
		})
		t.Repeat(map[string]func(*rapid.T){
			"put": func(t *rapid.T) {
				p := &page{key: key.Draw(t, "key")}
				table.put(p)
				model[p.key] = p
			},
			"drop": func(t *rapid.T) {
				k := key.Draw(t, "key")
				table.drop(k)
				delete(model, k)
			},
			"": func(t *rapid.T) {
				require.Equal(t, len(model), table.len())
				for k, p := range model {
					require.Same(t, p, table.get(k))
				}
				k := key.Draw(t, "asked")
				require.Equal(t, model[k], table.get(k))
				seen := 0
				for p := range table.all() {
					require.Same(t, model[p.key], p)
					seen++
				}
				require.Equal(t, len(model), seen)
				require.LessOrEqual(t, 4*table.len(), 3*len(table.slots))
			},
		})
	})
}

// What a page in RAM costs on the heap beside its memory: the object, its slots, and its place in the table.
func TestPageObjectIsSmall(t *testing.T) {
	require.LessOrEqual(t, unsafe.Sizeof(page{}), uintptr(160))
	var table pageTable
	pages := make([]*page, 10_000)
	for i := range pages {
		pages[i] = &page{}
		binary.LittleEndian.PutUint64(pages[i].key[:], uint64(i)*0x9e3779b97f4a7c15)
		table.put(pages[i])
	}
	require.LessOrEqual(t, 8*len(table.slots), 22*len(pages), "bytes of table")
	for _, p := range pages {
		require.Same(t, p, table.get(p.key))
		table.drop(p.key)
	}
	require.LessOrEqual(t, len(table.slots), pageTableLeast, "the table gives its memory back")
}
