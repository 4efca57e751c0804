package txn

import "fmt"

// What recovery, verification and salvage read besides the catalogue's own lookups.

// PagesUnder is Pages for the keys that begin with prefix: a scan that is done in parts gives way between them.
func PagesUnder(v Reader, prefix []byte, fn func(key Key, entry *PageEntry) (more bool, err error)) error {
	return v.Scan(append([]byte{tagPage}, prefix...), func(k, b []byte) (bool, error) {
		key, err := endOf[Key](k)
		if err != nil {
			return false, err
		}
		entry := new(PageEntry)
		if err := entry.unmarshal(b); err != nil {
			return false, fmt.Errorf("catalogue key %x: %w", k, err)
		}
		return fn(key, entry)
	})
}

// Manifests calls fn for every manifest, listed or retired. One that does not decode is given as nil, with the reason.
func Manifests(v Reader, fn func(g Generation, m *Manifest, damage error) (more bool, err error)) error {
	return v.Scan([]byte{tagManifest}, func(k, b []byte) (bool, error) {
		g, err := endOf[Generation](k)
		if err != nil {
			return false, err
		}
		m, damage := DecodeManifest(b, g)
		return fn(g, m, damage)
	})
}

// SpineNode says where a block of tokens stands.
type SpineNode struct {
	Parent Key   // the block before it; zero for the first
	Index  int64 // blocks before it
}

// Spines calls fn for every spine node.
func Spines(v Reader, fn func(key Key, node SpineNode) (more bool, err error)) error {
	return v.Scan([]byte{tagSpine}, func(k, b []byte) (bool, error) {
		key, err := endOf[Key](k)
		if err != nil {
			return false, err
		}
		var s spineEntry
		if err := s.unmarshal(b); err != nil {
			return false, fmt.Errorf("catalogue key %x: %w", k, err)
		}
		return fn(key, SpineNode{Parent: s.parent, Index: s.index})
	})
}
