package txn

import (
	"fmt"
	"slices"
)

// InstructionKind is the Manifest.Kind of leading parts that many prompts share. They are never superseded.
const InstructionKind = 4

// PromptKind is the Manifest.Kind of a checkpoint at the end of a prompt.
const PromptKind = 1

// Bounds of the supersession policy at one publication.
const (
	supersedeStepsMax    = 64 // prefixes looked at
	supersedeRequestsMax = 4  // earlier requests whose siblings are looked for
	supersedeSiblingsMax = 64 // checkpoints of one request looked at
)

// lineage is what the supersession policy decides about a publication.
type lineage struct {
	previous   Generation   // the longest listed proper prefix
	continues  Generation   // the checkpoint the conversation went on from: it stays current
	supersedes []Generation // what goes first from now on
}

// chooseSuperseded is the supersession policy. A new checkpoint supersedes the listed checkpoints that are proper prefixes of
// it, but for
//
//   - the one it continued from, which the caller names or which is the longest of another request: it stays current until
//     the conversation has moved past it twice;
//   - those of the same request, and instructions.
//
// A new prompt also supersedes the siblings of the requests it went through, checkpoints that it does not extend, such as a
// response that was rewritten before it was sent back, if they are shorter than it. One that is at least as long is kept: the
// new request branched off before it.
//
// Prefixes are followed from each manifest to the one before it, and the walk ends at the first one that is superseded
// already, because older ones were dealt with when that happened. So it takes a few steps whatever the length of the
// conversation.
func chooseSuperseded(v Reader, in *PublishIntent) (l lineage, err error) {
	m := in.Manifest
	if l.continues, err = checkContinues(v, in); err != nil {
		return l, err
	}
	g, err := longestBefore(v, in, m.Offset)
	if err != nil {
		return l, err
	}
	l.previous = g
	var requests []string
	walked := map[Generation]bool{l.continues: true}
	for step := 0; step < supersedeStepsMax && !g.IsZero(); step++ {
		walked[g] = true
		s, err := ReadState(v, g)
		if err != nil {
			return l, err
		}
		old, err := ReadManifest(v, g)
		if err != nil {
			return l, err
		}
		if s == nil || old == nil || s.Status != Listed {
			return l, fmt.Errorf("generation %s is listed for a prefix and not listed: %w", Key(g).Short(), ErrCorrupt)
		}
		if same := m.Request != "" && old.Request == m.Request; !same {
			if old.Request != "" && len(requests) < supersedeRequestsMax && !slices.Contains(requests, old.Request) {
				requests = append(requests, old.Request)
			}
			switch {
			case l.continues.IsZero():
				l.continues = g
			case s.Superseded():
				g = Generation{}
				continue
			case g != l.continues && old.Kind != InstructionKind:
				l.supersedes = append(l.supersedes, g)
			}
		}
		if g, err = before(v, in, old); err != nil {
			return l, err
		}
	}
	if m.Kind != PromptKind {
		return l, nil
	}
	for _, request := range requests {
		siblings, err := shorterSiblings(v, m, request, walked)
		if err != nil {
			return l, err
		}
		l.supersedes = append(l.supersedes, siblings...)
	}
	l.supersedes = unique(l.supersedes)
	return l, nil
}

// checkContinues gives the checkpoint that the caller says it continued from, zero if that is not listed any more.
func checkContinues(v Reader, in *PublishIntent) (Generation, error) {
	g := in.Manifest.Continues
	if g.IsZero() {
		return g, nil
	}
	s, err := ReadState(v, g)
	if err != nil || s == nil || s.Status != Listed {
		return Generation{}, err
	}
	old, err := ReadManifest(v, g)
	if err != nil || old == nil {
		return Generation{}, err
	}
	if old.Namespace != in.Manifest.Namespace || old.Offset >= in.Manifest.Offset || in.PrefixKey(old.Offset) != old.Prefix {
		return Generation{}, fmt.Errorf("generation %s at %d is no proper prefix of the checkpoint at %d that continues it: %w", Key(g).Short(), old.Offset, in.Manifest.Offset, ErrInvalid)
	}
	return g, nil
}

// longestBefore gives the longest listed checkpoint that is a prefix of fewer than offset tokens.
func longestBefore(v Reader, in *PublishIntent, offset int64) (Generation, error) {
	g, _, err := LongestListed(v, &Query{Max: offset - 1, Spine: in.spineKey, Prefix: in.PrefixKey, Near: in.SpineNear})
	return g, err
}

// before gives the checkpoint before an older one: the one that its manifest names, or, if that is gone, what is left.
func before(v Reader, in *PublishIntent, old *Manifest) (Generation, error) {
	if old.Previous.IsZero() {
		return Generation{}, nil
	}
	s, err := ReadState(v, old.Previous)
	if err != nil {
		return Generation{}, err
	}
	if s != nil && s.Status == Listed {
		return old.Previous, nil
	}
	return longestBefore(v, in, old.Offset)
}

// spineKey is SpineKey, and the manifest's own digest for the block in which it ends.
func (in *PublishIntent) spineKey(index int64) Key {
	if index == in.Manifest.SpineIndex() {
		return in.Manifest.Spine
	}
	return in.SpineKey(index)
}

// shorterSiblings gives the current checkpoints of a request that are shorter than m, but for those in walked.
func shorterSiblings(v Reader, m *Manifest, request string, walked map[Generation]bool) (siblings []Generation, err error) {
	var gens []Generation
	err = v.Scan(requestPrefix(m.Namespace, request), func(k, _ []byte) (bool, error) {
		g, err := endOf[Generation](k)
		gens = append(gens, g)
		return len(gens) < supersedeSiblingsMax, err
	})
	if err != nil {
		return nil, err
	}
	for _, g := range gens {
		if walked[g] {
			continue
		}
		s, err := ReadState(v, g)
		if err != nil {
			return nil, err
		}
		old, err := ReadManifest(v, g)
		if err != nil {
			return nil, err
		}
		if s == nil || old == nil || s.Superseded() || old.Kind == InstructionKind || old.Offset >= m.Offset {
			continue
		}
		siblings = append(siblings, g)
	}
	return siblings, nil
}
