package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var (
	shellBlock  = regexp.MustCompile("(?s)```sh\n(.*?)```")
	outputBlock = regexp.MustCompile("(?s)```text\n(.*?)```")
	program     = regexp.MustCompile("(?s)```go\n(package main\n.*?)```")
)

// changes are what the test runs instead of what a document says: the same commands, made short, or found elsewhere. Commands for
// developers of Holdfast are left out here; .ci/run consists of them.
var changes = []struct {
	said *regexp.Regexp
	run  string
}{
	{regexp.MustCompile(`^(\w+=\S+ )*(go test|\.ci/run|gpu/check\.sh|npm) .*$`), ``},
	{regexp.MustCompile(`^(go test|\.ci/run)$`), ``},
	{regexp.MustCompile(`^go install \./cmd/holdfast\b.*$`), ``}, // this very program, which is in the PATH
	{regexp.MustCompile(`^go run \./cmd/holdfast `), `holdfast `},
	{regexp.MustCompile(`^go build -o app \./first$`), `go build -C "$$REPOSITORY" -o "$$PWD/app" "$$PWD/first/main.go"`},
	{regexp.MustCompile(`^go build -o holdfast \./cmd/holdfast$`), ``},
	{regexp.MustCompile(`^\./holdfast `), `holdfast `},
	{regexp.MustCompile(` *# .*$`), ``},
	{regexp.MustCompile(`\| jq .*$`), `| cat`}, // not ours
	{regexp.MustCompile(`^cd cmd/peers && go run \. .*$`), ``},
	{regexp.MustCompile(`^holdfast bench( persist restore| memory| --\w+)?( --cpu-profile \S+| \||$)`), `holdfast bench ram$1$2`}, // one word, whatever it says
	{regexp.MustCompile(`^holdfast bench ram (persist restore|memory)`), `holdfast bench ram`},
	{regexp.MustCompile(`^holdfast bench ram( --quick)?`), `holdfast bench ram --quick`},
	{regexp.MustCompile(`^holdfast bench open\b`), `holdfast bench open --quick`},
	{regexp.MustCompile(`--trace FILE`), `--trace "$$TRACE"`},
	{regexp.MustCompile(`--limit \d+`), ``},
	{regexp.MustCompile(`--(kill|restart|check)-every \d+`), `--$1-every 7`},
	{regexp.MustCompile(`^holdfast replay\b`), `holdfast replay --limit 20`},
	{regexp.MustCompile(`^holdfast crash --duration \w+`), `holdfast crash --duration 1s`},
	{regexp.MustCompile(`^holdfast crash --count \d+`), `holdfast crash --count 20`},
	{regexp.MustCompile(`^holdfast crash --(exhaustive|replay)\b.*`), ``}, // minutes, and a file that is there after a violation
	{regexp.MustCompile(`^holdfast bench replay\b`), `holdfast bench replay --limit 20`},
	{regexp.MustCompile(`^holdfast bench orders\b`), `holdfast bench orders --limit 200`},
}

// elsewhere are the documents whose commands are run by another test, because they take more than this program.
var elsewhere = map[string]string{
	"llamaserve.md": "../llamaserve/docs_test.go", // a library that is loaded at run time, and a server
}

// script gives what is run for a document.
func script(text string) string {
	var lines []string
	for _, block := range shellBlock.FindAllStringSubmatch(text, -1) {
		for _, line := range strings.Split(strings.TrimSpace(block[1]), "\n") {
			for _, c := range changes {
				line = c.said.ReplaceAllString(line, c.run)
			}
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "\n") + "\n"
}

// Every command that a document tells the reader to type does what it should: all of a document in order, in a directory of its own,
// with the program that the document shows. What the document says of the output comes out, in that order. The way of a newcomer is that of
// docs/getting-started.md: from a first program over a kill to a database that is whole.
func TestDocumentedCommands(t *testing.T) {
	repository, err := filepath.Abs(filepath.Join("..", ".."))
	require.NoError(t, err)
	trace := filepath.Join(t.TempDir(), "trace.jsonl")
	require.NoError(t, os.WriteFile(trace, []byte(`{"timestamp": 0, "input_length": 1000, "output_length": 20, "hash_ids": [1, 2]}
{"timestamp": 5, "input_length": 1500, "output_length": 20, "hash_ids": [1, 2, 3]}
`), 0o644))
	self, err := os.Executable()
	require.NoError(t, err)
	bin := t.TempDir()
	require.NoError(t, os.Symlink(self, filepath.Join(bin, "holdfast")))
	var names []string
	found, err := filepath.Glob(filepath.Join(repository, "*.md"))
	require.NoError(t, err)
	for _, f := range found {
		names = append(names, filepath.Base(f))
	}
	found, err = filepath.Glob(filepath.Join(repository, "docs", "*.md"))
	require.NoError(t, err)
	for _, f := range found {
		if tests, ok := elsewhere[filepath.Base(f)]; ok {
			require.FileExists(t, tests)
			continue
		}
		names = append(names, "docs/"+filepath.Base(f))
	}
	ran, kept := 0, t.TempDir()
	for _, name := range []string{"docs/getting-started.md", ""} {
		for _, other := range names {
			if name == "" && other == "docs/getting-started.md" || name != "" && other != name {
				continue // it goes first: what it leaves is the database that the others are about
			}
			b, err := os.ReadFile(filepath.Join(repository, other))
			require.NoError(t, err)
			commands := script(string(b))
			if strings.TrimSpace(commands) == "" {
				continue
			}
			t.Run(strings.ReplaceAll(other, "/", "_"), func(t *testing.T) {
				dir := t.TempDir()
				if name != "" {
					dir = kept
				} else {
					require.NoError(t, os.CopyFS(filepath.Join(dir, "checkpoints"), os.DirFS(filepath.Join(kept, "checkpoints"))))
				}
				if m := program.FindStringSubmatch(string(b)); m != nil {
					require.NoError(t, os.Mkdir(filepath.Join(dir, "first"), 0o755))
					require.NoError(t, os.WriteFile(filepath.Join(dir, "first", "main.go"), []byte(m[1]), 0o644))
				}
				ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
				defer cancel()
				c := exec.CommandContext(ctx, "sh", "-eux", "-c", commands)
				c.Dir, c.WaitDelay = dir, 10*time.Second
				c.Env = append(os.Environ(), "PATH="+bin+string(os.PathListSeparator)+os.Getenv("PATH"), "REPOSITORY="+repository, "TRACE="+trace)
				out, err := c.CombinedOutput()
				require.NoError(t, err, "%s\n%s", commands, out)
				rest := string(out)
				for _, m := range outputBlock.FindAllStringSubmatch(string(b), -1) {
					_, after, ok := strings.Cut(rest, m[1])
					require.True(t, ok, "%s says\n%s\nit is\n%s", other, m[1], rest)
					rest = after
				}
			})
			ran++
		}
	}
	require.GreaterOrEqual(t, ran, 4)
}
