package db

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/holdfast-db/holdfast/txn"
)

// Remedy says what puts a finding right.
type Remedy string

// The remedies, from the mildest to the harshest.
const (
	ByOpen    Remedy = "open"    // the next read-write open does it by itself; it is no damage
	ByRecover Remedy = "recover" // holdfast recover --apply: what cannot be restored is retired, what can be is written anew
	BySalvage Remedy = "salvage" // holdfast salvage: the catalogue is rebuilt from what can still be read
)

// Finding is one thing that is not as it was written, or as a clean close leaves it.
type Finding struct {
	Kind   string // what it is about: marker, log, index, catalogue, segment, descriptor, page, checkpoint, leftover
	File   string // path
	Offset int64  // where in the file, −1 for all of it
	Bytes  int64  // how much
	Page   txn.Key
	Rank   int    // of the page's copy
	Group  string // name of the page's group
	Detail string
	Remedy Remedy
	// Checkpoints are the listed ones that cannot be restored because of it.
	Checkpoints []Generation
}

// Damage reports whether the finding is more than what a crash leaves behind and the next open clears up.
func (f *Finding) Damage() bool { return f.Remedy != ByOpen }

// String gives one line.
func (f *Finding) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s", f.Kind, f.File)
	if f.Offset >= 0 {
		fmt.Fprintf(&b, " at %d", f.Offset)
	}
	if f.Bytes > 0 {
		fmt.Fprintf(&b, ", %d bytes", f.Bytes)
	}
	if !f.Page.IsZero() {
		fmt.Fprintf(&b, ", page %s of rank %d, group %q", f.Page.Short(), f.Rank, f.Group)
	}
	fmt.Fprintf(&b, ": %s", f.Detail)
	if n := len(f.Checkpoints); n > 0 {
		fmt.Fprintf(&b, " (%d checkpoints cannot be restored)", n)
	}
	return b.String()
}

// MarshalJSON writes digests in hex and leaves out what a finding has not.
func (f Finding) MarshalJSON() ([]byte, error) {
	out := map[string]any{"kind": f.Kind, "file": f.File, "detail": f.Detail, "remedy": f.Remedy, "damage": f.Damage()}
	if f.Offset >= 0 {
		out["offset"] = f.Offset
	}
	if f.Bytes > 0 {
		out["bytes"] = f.Bytes
	}
	if !f.Page.IsZero() {
		out["page"], out["rank"], out["group"] = f.Page.String(), f.Rank, f.Group
	}
	if len(f.Checkpoints) > 0 {
		out["checkpoints"] = hexOf(f.Checkpoints)
	}
	return json.Marshal(out)
}

func hexOf(gens []Generation) []string {
	out := make([]string, len(gens))
	for i, g := range gens {
		out[i] = g.String()
	}
	slices.Sort(out)
	return out
}

// MaxFindings bounds the findings that a report keeps, damage first come; the others are counted.
const MaxFindings = 10000
