package main

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/enginetest"
)

var (
	shellBlock = regexp.MustCompile("(?s)```sh\n(.*?)```")
	curl       = regexp.MustCompile(`^curl -d '([^']*)' ([^/]+)(/\S*)$`)
)

// Every command of docs/llamaserve.md does what the document says, in order, in a directory of its own; only the port is the
// kernel's choice, and the package is where the tests have it. Then the process is killed and started again, and a prompt that
// goes on from the first one is computed from where that ended.
func TestDocumentedCommands(t *testing.T) {
	enginetest.LibraryPath(t)
	document, err := os.ReadFile(filepath.Join("..", "..", "docs", "llamaserve.md"))
	require.NoError(t, err)
	self, err := os.Executable()
	require.NoError(t, err)
	t.Chdir(t.TempDir())
	var serving *process
	var flags []string
	prompt := ""
	post := func(path, body string) (answer struct {
		Holdfast struct {
			Restored int `json:"restored_tokens"`
			Computed int `json:"computed_tokens"`
		} `json:"holdfast"`
	}) {
		response, err := http.Post(serving.url+path, "application/x-www-form-urlencoded", strings.NewReader(body)) // as curl -d does
		require.NoError(t, err)
		defer response.Body.Close()
		b, err := io.ReadAll(response.Body)
		require.NoError(t, err)
		require.Equal(t, http.StatusOK, response.StatusCode, "%s", b)
		require.NoError(t, json.Unmarshal(b, &answer), "%s", b)
		return answer
	}
	ran := map[string]bool{}
	for _, block := range shellBlock.FindAllSubmatch(document, -1) {
		for line := range strings.Lines(string(block[1])) {
			line, _, _ = strings.Cut(line, " # ")
			line = strings.TrimSpace(line)
			words := strings.Fields(line)
			switch {
			case line == "":
			case strings.HasPrefix(line, "cd cmd/llamaserve && npm ci "), line == "go build ./cmd/llamaserve":
				// What the tests of this package begin with.
			case strings.HasPrefix(line, "./llamaserve model "):
				c := exec.Command(self, words[1:]...)
				c.Env = append(os.Environ(), childVariable+"=1")
				out, err := c.CombinedOutput()
				require.NoError(t, err, "%s: %s", line, out)
				require.FileExists(t, words[len(words)-1])
				ran["model"] = true
			case strings.HasPrefix(line, "./llamaserve --lib "):
				flags = words[3:] // start has a library of its own
				serving = start(t, flags...)
				ran["serve"] = true
			case curl.MatchString(line):
				require.NotNil(t, serving, line)
				m := curl.FindStringSubmatch(line)
				prompt = m[1]
				require.Zero(t, post(m[3], prompt).Holdfast.Restored)
				ran["curl"] = true
			default:
				t.Fatalf("no test runs %q of docs/llamaserve.md", line)
			}
		}
	}
	require.Len(t, ran, 3)

	serving.kill()
	serving = start(t, flags...)
	var request struct {
		Prompt    []int `json:"prompt"`
		MaxTokens int   `json:"max_tokens"`
	}
	require.NoError(t, json.NewDecoder(bytes.NewReader([]byte(prompt))).Decode(&request))
	seen := len(request.Prompt)
	request.Prompt = append(request.Prompt, 5)
	longer, err := json.Marshal(request)
	require.NoError(t, err)
	answer := post("/v1/completions", string(longer))
	require.Equal(t, seen, answer.Holdfast.Restored)
	require.Equal(t, 1, answer.Holdfast.Computed)
	serving.stop()
}
