package db

import (
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// GroupKind says how the pages of a group relate to the tokens of a sequence. Zero is invalid.
type GroupKind uint8

// The kinds of group; the numbers are part of the format.
const (
	// Attention pages each hold a fixed run of tokens; a page that is full is the same for every longer sequence.
	Attention GroupKind = 1
	// Recurrent pages hold the state after the whole prefix; they are of use at exactly one offset.
	Recurrent GroupKind = 2
	// Auxiliary pages hold anything else that belongs to the whole prefix.
	Auxiliary GroupKind = 3
)

// String gives the kind in lower case, as it is written in logs and metrics.
func (k GroupKind) String() string {
	switch k {
	case Attention:
		return "attention"
	case Recurrent:
		return "recurrent"
	case Auxiliary:
		return "auxiliary"
	}
	return fmt.Sprintf("GroupKind(%d)", uint8(k))
}

// Group declares one storage role of every rank. All pages of a group have one size.
type Group struct {
	Name         string    // 1…MaxGroupNameBytes bytes of UTF-8 without NUL, unique in the layout
	Kind         GroupKind // Attention, Recurrent or Auxiliary
	PageBytes    int64     // 1…MaxPageBytes
	PageTokens   int64     // attention: tokens a page, 1…MaxPageTokens; otherwise 0
	WindowTokens int64     // attention: 0 = every earlier token is needed, n = the last n (1…MaxWindowTokens); otherwise 0
	Pages        int       // recurrent and auxiliary: pages a checkpoint, 1…MaxGroupPages; attention: 0
}

// Layout is the shape of every checkpoint of a namespace: Ranks parallel workers with the same groups, each with its own
// bytes. The order of the groups is part of the identity.
type Layout struct {
	Ranks  int // 1…MaxRanks
	Groups []Group
}

// clone gives a copy that shares nothing with l.
func (l Layout) clone() Layout {
	l.Groups = slices.Clone(l.Groups)
	return l
}

// validate refuses a layout that breaks a limit or a rule, naming the field.
func (l Layout) validate() error {
	if err := checkNumber("Layout.Ranks", int64(l.Ranks), 1, MaxRanks); err != nil {
		return err
	}
	if err := checkNumber("number of Layout.Groups", int64(len(l.Groups)), 1, MaxGroups); err != nil {
		return err
	}
	seen := make(map[string]int, len(l.Groups))
	for i, g := range l.Groups {
		if err := g.validate(fmt.Sprintf("Layout.Groups[%d]", i)); err != nil {
			return err
		}
		if first, taken := seen[g.Name]; taken {
			return fmt.Errorf("db: Layout.Groups[%d].Name %.80q: already the name of group %d: %w", i, g.Name, first, ErrInvalid)
		}
		seen[g.Name] = i
	}
	return nil
}

// validate refuses a group that breaks a limit or a rule; field is where the group stands.
func (g Group) validate(field string) error {
	if err := checkText(field+".Name", g.Name, 1, MaxGroupNameBytes); err != nil {
		return err
	}
	if err := checkNumber(field+".PageBytes", g.PageBytes, 1, MaxPageBytes); err != nil {
		return err
	}
	numbers := []struct {
		name      string
		value     int64
		attention bool // says something about attention groups only, or about the others only
		min, max  int64
	}{
		{".PageTokens", g.PageTokens, true, 1, MaxPageTokens},
		{".WindowTokens", g.WindowTokens, true, 0, MaxWindowTokens},
		{".Pages", int64(g.Pages), false, 1, MaxGroupPages},
	}
	switch g.Kind {
	case Attention, Recurrent, Auxiliary:
	default:
		return fmt.Errorf("db: %s.Kind is %d: want %d (attention), %d (recurrent) or %d (auxiliary): %w",
			field, uint8(g.Kind), Attention, Recurrent, Auxiliary, ErrInvalid)
	}
	for _, n := range numbers {
		if n.attention != (g.Kind == Attention) {
			if n.value != 0 {
				return fmt.Errorf("db: %s%s is %d: want 0 in a group of kind %s: %w", field, n.name, n.value, g.Kind, ErrInvalid)
			}
			continue
		}
		if err := checkNumber(field+n.name, n.value, n.min, n.max); err != nil {
			return err
		}
	}
	return nil
}

// checkNumber refuses a value outside min…max: ErrInvalid below, ErrTooLarge above.
func checkNumber(field string, value, min, max int64) error {
	if value < min {
		return fmt.Errorf("db: %s is %d: want %d…%d: %w", field, value, min, max, ErrInvalid)
	}
	if value > max {
		return fmt.Errorf("db: %s is %d: want %d…%d: %w", field, value, min, max, ErrTooLarge)
	}
	return nil
}

// checkText refuses a text that is not min…max bytes of UTF-8 without NUL. There is no other rule and no normalisation:
// two texts are the same exactly if their bytes are.
func checkText(field, value string, min, max int) error {
	if len(value) < min || len(value) > max {
		return fmt.Errorf("db: %s %.80q: %d bytes long, want %d…%d: %w", field, value, len(value), min, max, ErrInvalid)
	}
	if i := strings.IndexByte(value, 0); i >= 0 {
		return fmt.Errorf("db: %s %.80q: NUL at byte %d: %w", field, value, i, ErrInvalid)
	}
	if !utf8.ValidString(value) {
		return fmt.Errorf("db: %s %.80q: not UTF-8: %w", field, value, ErrInvalid)
	}
	return nil
}

// hybrid reports whether a checkpoint carries recurrent state, which is of use at its exact offset alone.
func (l Layout) hybrid() bool {
	return slices.ContainsFunc(l.Groups, func(g Group) bool { return g.Kind == Recurrent })
}

// pagesAt gives the positions first…first+count−1 of a group that a restore at offset needs, for offset ≥ 0.
//
// The prefix of offset o is tokens 0…o−1. A window of n tokens needs those of them from o−n on: that is one more than the
// engines need whose window counts the token being computed, which costs at most one page and suits both readings.
func (l Layout) pagesAt(group int, offset int64) (first, count int64) {
	g := &l.Groups[group]
	if g.Kind != Attention {
		return 0, int64(g.Pages)
	}
	if offset == 0 {
		return 0, 0
	}
	if 0 < g.WindowTokens && g.WindowTokens < offset {
		first = (offset - g.WindowTokens) / g.PageTokens
	}
	return first, (offset-1)/g.PageTokens - first + 1
}

// pageEnd gives the token after the last one that a page of a checkpoint at offset was computed from.
func (l Layout) pageEnd(group int, position, offset int64) int64 {
	g := &l.Groups[group]
	if g.Kind == Attention && position < offset/g.PageTokens {
		return (position + 1) * g.PageTokens // at most offset, so it cannot overflow
	}
	return offset
}

// boundary gives the largest offset ≤ offset at which every page of a longer checkpoint ends that began before it, or 0
// if there is none. Only attention pages end inside a checkpoint, so one group of another kind leaves nothing but 0.
func (l Layout) boundary(offset int64) int64 {
	step := int64(1) // least common multiple of the page sizes so far
	for i := range l.Groups {
		g := &l.Groups[i]
		if g.Kind != Attention {
			return 0
		}
		factor := g.PageTokens / greatestCommonDivisor(step, g.PageTokens)
		if factor > offset/step { // step·factor > offset, without the product that could overflow
			return 0
		}
		step *= factor
	}
	return offset - offset%step
}

func greatestCommonDivisor(a, b int64) int64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
