package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"regexp"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/holdfast-db/holdfast/db"
)

// whyBytesMax bounds what is read of tokens or an identity.
const whyBytesMax = 32 << 20

func newInspectWhyCommand() *cobra.Command {
	var namespace, identity string
	var leave int64
	c := &cobra.Command{
		Use:   "why DIR TOKENS|GENERATION",
		Short: "Explain why a prompt is a hit, a shorter hit or a miss",
		Long: `Why explains what a lookup of some tokens finds and what speaks against more: it
was never published; it is another namespace's, and which fields differ; it was
retired, when, by which record and for which reason; and so on. The causes are
those that docs/guarantees.md lists. Of a generation it tells what became of it.

TOKENS are numbers with commas between them (1,2,3; one alone as 1,), a file
(@FILE) or standard input (-). A file has such numbers, a JSON list of them, or
a JSON list of parts: {"tokens": [...]}, and for media spans
{"tokens": [...], "content": "64 hex digits"}. GENERATION is at least 4 hex
digits of one.

` + lookStatusHelp + `

A miss that is explained has status 0.`,
		Example: `  holdfast inspect why /var/cache/model 3f9a12bc
  holdfast inspect why /var/cache/model @prompt.json --leave 1
  holdfast inspect why DIR @prompt.json --identity identity.json
  generate-tokens | holdfast inspect why DIR - --namespace 1f03 --json`,
		Args: cobra.ExactArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			var q db.WhyQuery
			var err error
			generation := ""
			if digits.MatchString(args[1]) {
				generation = args[1]
			} else if q.Parts, err = readParts(args[1], c.InOrStdin()); err != nil {
				return usageError(err)
			}
			q.LeaveTokens = leave
			if identity != "" {
				if q.Identity, err = readIdentity(identity); err != nil {
					return usageError(err)
				}
			}
			return look(c, args[0], func(ctx context.Context, x *db.Inspection, at looked) error {
				if generation != "" {
					if q.Generation, err = generationOf(ctx, x, generation); err != nil {
						return err
					}
				}
				if q.Namespace, err = namespaceBy(ctx, x, namespace); err != nil {
					return err
				}
				w, err := x.Why(ctx, q)
				if err != nil {
					return err
				}
				if wantsJSON(c) {
					return writeJSON(c.OutOrStdout(), struct {
						looked
						*db.Explanation
					}{at, w})
				}
				s := newScreen(c.OutOrStdout())
				s.heading(at)
				s.explanation(w, generation != "")
				return nil
			})
		},
	}
	c.Flags().StringVar(&namespace, "namespace", "", "of the tokens, `ID` in at least 4 hex digits (default: the only one)")
	c.Flags().StringVar(&identity, "identity", "", "of the tokens, as a JSON `FILE` with the fields of db.Identity")
	c.Flags().Int64Var(&leave, "leave", 0, "leave `N` tokens out of what may be found, as engines do that compute one")
	return directoryArgs(c)
}

var digits = regexp.MustCompile(`^[0-9a-fA-F]{4,64}$`)

func readBounded(name string, stdin io.Reader) ([]byte, error) {
	r := stdin
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		r = f
	}
	b, err := io.ReadAll(io.LimitReader(r, whyBytesMax+1))
	if err == nil && len(b) > whyBytesMax {
		err = fmt.Errorf("%s has more than %d bytes", name, whyBytesMax)
	}
	return b, err
}

// readParts reads tokens from an argument, or from the file that it names.
func readParts(arg string, stdin io.Reader) ([]db.SequencePart, error) {
	text := []byte(arg)
	if name, ok := strings.CutPrefix(arg, "@"); ok || arg == "-" {
		var err error
		if text, err = readBounded(name, stdin); err != nil {
			return nil, fmt.Errorf("tokens: %w", err)
		}
	}
	text = bytes.TrimSpace(text)
	if bytes.HasPrefix(text, []byte("[")) {
		var tokens []int32
		if json.Unmarshal(text, &tokens) == nil {
			return []db.SequencePart{{Tokens: tokens}}, nil
		}
		var parts []db.SequencePart
		if err := json.Unmarshal(text, &parts); err != nil {
			return nil, fmt.Errorf("tokens: a list of numbers or of parts: %w", err)
		}
		return parts, nil
	}
	fields := strings.FieldsFunc(string(text), func(r rune) bool { return r == ',' || r == ' ' || r == '\n' || r == '\t' || r == '\r' })
	tokens := make([]int32, 0, len(fields))
	for _, f := range fields {
		n, err := strconv.ParseInt(f, 10, 32)
		if err != nil {
			return nil, fmt.Errorf("tokens: %.40q is no number of 0…2147483647, and %.40q no generation", f, arg)
		}
		tokens = append(tokens, int32(n))
	}
	if len(tokens) == 0 {
		return nil, fmt.Errorf("tokens: %.40q has none", arg)
	}
	return []db.SequencePart{{Tokens: tokens}}, nil
}

func readIdentity(name string) (*db.Identity, error) {
	b, err := readBounded(name, nil)
	if err != nil {
		return nil, fmt.Errorf("--identity: %w", err)
	}
	id := new(db.Identity)
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(id); err != nil {
		return nil, fmt.Errorf("--identity %s: %w", name, err)
	}
	return id, nil
}

func (s *screen) explanation(w *db.Explanation, ofGeneration bool) {
	c := red
	switch w.Outcome {
	case "hit":
		c = green
	case "shorter hit":
		c = yellow
	}
	s.printf("%s", s.paint(c, w.Outcome))
	switch {
	case ofGeneration:
		s.printf("  %s", w.Generation)
	default:
		s.printf("  %s of %s tokens", count(w.Offset), count(w.Tokens))
	}
	if !w.Namespace.IsZero() {
		s.printf("  in namespace %s", w.Namespace.Short())
	}
	s.printf("\n")
	for i := range w.Causes {
		x := &w.Causes[i]
		s.printf("\n%s\n%s\n", s.paint(bold, string(x.Kind)), s.wrap("  ", x.Text))
		for _, f := range x.Differs {
			s.printf("%s\n", s.clip(fmt.Sprintf("    %s %q here, %q there", s.paint(dim, fmt.Sprintf("%-24s", f.Field)), brief(f.Asked, 64), brief(f.Other, 64))))
		}
	}
	if w.Omitted > 0 {
		s.printf("\n%s\n", s.paint(dim, fmt.Sprintf("and %d causes more", w.Omitted)))
	}
}
