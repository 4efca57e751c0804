package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/enginetest"
	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/gguf"
	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/server"
)

// readEvents reads a stream to its end.
func readEvents(t *testing.T, r io.Reader) (events []server.Completion) {
	t.Helper()
	done := false
	s := bufio.NewScanner(r)
	s.Buffer(nil, 1<<20)
	for s.Scan() {
		data, ok := strings.CutPrefix(s.Text(), "data: ")
		switch {
		case !ok:
			require.Empty(t, s.Text())
		case data == "[DONE]":
			done = true
		default:
			require.False(t, done)
			var c server.Completion
			require.NoError(t, json.Unmarshal([]byte(data), &c), data)
			require.NotEmpty(t, c.Choices, data)
			events = append(events, c)
		}
	}
	require.NoError(t, s.Err())
	require.True(t, done, "the stream ended early")
	require.NotEmpty(t, events)
	return events
}

// A text goes in and comes out, whole or as a stream, and both are the same; a conversation goes on and branches by its parent, and so it does by its
// tokens.
func TestConversationsOfText(t *testing.T) {
	enginetest.LibraryPath(t)
	p := start(t, "--model", enginetest.ModelFile(t, "llama", gguf.Options{Seed: 1, Text: true}), "--dir", filepath.Join(t.TempDir(), "db"), "--slots", "2")
	whole := p.complete(body{Prompt: "the house of the people", MaxTokens: 12})
	require.NotEmpty(t, whole.Choices[0].Text)
	require.Equal(t, 12, whole.Usage.CompletionTokens)
	require.Equal(t, "length", *whole.Choices[0].FinishReason)

	b, err := json.Marshal(body{Prompt: "the house of the people", MaxTokens: 12, Stream: true})
	require.NoError(t, err)
	r, err := (&http.Client{Timeout: patience}).Post(p.url+"/v1/completions", "application/json", bytes.NewReader(b))
	require.NoError(t, err)
	defer r.Body.Close()
	require.Equal(t, "text/event-stream", r.Header.Get("Content-Type"))
	text, tokens := "", []int32{}
	events := readEvents(t, r.Body)
	for _, e := range events {
		text += e.Choices[0].Text
		tokens = append(tokens, e.Choices[0].Tokens...)
	}
	require.Equal(t, whole.Choices[0].Text, text)
	require.Equal(t, whole.Choices[0].Tokens, tokens)
	last := events[len(events)-1]
	require.Equal(t, whole.Usage.PromptTokens-1, last.Usage.Details.CachedTokens)

	one := p.complete(body{Prompt: " and the other", Parent: whole.ID, MaxTokens: 4})
	two := p.complete(body{Prompt: " but not this", Parent: whole.ID, MaxTokens: 4})
	before := whole.Usage.TotalTokens
	for _, branch := range []*server.Completion{one, two} {
		require.Greater(t, branch.Usage.PromptTokens, before)
		require.GreaterOrEqual(t, branch.Usage.Details.CachedTokens, before-1, "the last token of a response is computed with the next turn")
	}
	status, answer := p.post(body{Prompt: "x", Parent: whole.ID, Tenant: "somebody else"})
	require.Equal(t, http.StatusNotFound, status, "%s", answer)
	p.stop()
}

// What is wrong with a request is said, with the status and the type of its class.
func TestRefusals(t *testing.T) {
	enginetest.LibraryPath(t)
	p := start(t, "--model", enginetest.ModelFile(t, "llama", gguf.Options{Seed: 1}), "--context", "64")
	for _, c := range []struct {
		request any
		status  int
		kind    string
		says    string
	}{
		{map[string]any{}, 400, "invalid_request", "prompt is missing"},
		{map[string]any{"prompt": []int{}}, 400, "invalid_request", "an empty prompt"},
		{map[string]any{"prompt": []int{1}, "n": 2}, 400, "invalid_request", `unknown field "n"`},
		{map[string]any{"prompt": []int{512}}, 400, "invalid_request", "prompt[0] is 512: the model has tokens 0…511"},
		{map[string]any{"prompt": []int{-1}}, 400, "invalid_request", "prompt[0] is -1"},
		{map[string]any{"prompt": map[string]int{}}, 400, "invalid_request", "want a text or an array of token ids"},
		{map[string]any{"prompt": []int{1}, "max_tokens": -1}, 400, "invalid_request", "max_tokens is -1"},
		{map[string]any{"prompt": []int{1}, "temperature": -1}, 400, "invalid_request", "temperature is -1"},
		{map[string]any{"prompt": []int{1}, "instruction_tokens": 2}, 400, "invalid_request", "the prompt has 1"},
		{map[string]any{"prompt": make([]int, 65)}, 413, "too_large", "the context has room for 64"},
		{map[string]any{"prompt": []int{1}, "max_tokens": 65}, 413, "too_large", "the context has room for 64"},
		{map[string]any{"prompt": "a text"}, 422, "unsupported", "has no tokenizer"},
		{map[string]any{"prompt": []int{1}, "parent": "cmpl-x"}, 404, "not_found", "send the whole prompt"},
		{map[string]any{"prompt": []int{1}, "model": "another"}, 404, "not_found", `this server has "tiny-llama"`},
		{map[string]any{"prompt": []int{1}, "logits": true}, 403, "forbidden", "not allowed"},
	} {
		status, answer := p.post(c.request)
		var said struct {
			Error struct{ Type, Message string }
		}
		require.NoError(t, json.Unmarshal(answer, &said), "%s", answer)
		require.Equal(t, c.status, status, "%s", answer)
		require.Equal(t, c.kind, said.Error.Type, "%s", answer)
		require.Contains(t, said.Error.Message, c.says)
	}
	require.Equal(t, 64, p.complete(body{Prompt: []int32{1}, MaxTokens: 64}).Usage.CompletionTokens, "to the last token")
	require.EqualValues(t, 1, p.stats().Requests-p.stats().Failed)
	require.Nil(t, p.stats().Database)
	p.stop()
}

// A start that cannot be says why, and with which status.
func TestStartsThatCannotBe(t *testing.T) {
	lib := enginetest.LibraryPath(t)
	folder := t.TempDir()
	junk := filepath.Join(folder, "libllama.so")
	require.NoError(t, os.WriteFile(junk, []byte("no library"), 0o755))
	model := enginetest.ModelFile(t, "llama", gguf.Options{Seed: 1})
	used := filepath.Join(folder, "db")
	holder := start(t, "--model", model, "--dir", used)
	for _, c := range []struct {
		flags  []string
		status int
		says   string
	}{
		{[]string{"--model", model}, statusUsage, "--lib is missing"},
		{[]string{"--lib", lib}, statusUsage, "--model is missing"},
		{[]string{"--lib", folder + "/none", "--model", model}, statusUsage, "no such file"},
		{[]string{"--lib", junk, "--model", model}, statusError, "libllama.so"},
		{[]string{"--lib", lib, "--model", folder + "/none"}, statusUsage, "no such file"},
		{[]string{"--lib", lib, "--model", junk}, statusError, "model " + junk},
		{[]string{"--lib", lib, "--model", model, "--slots", "0"}, statusUsage, "Slots is 0: want 1…64"},
		{[]string{"--lib", lib, "--model", model, "--write-policy", "sometimes"}, statusUsage, "write policy"},
		{[]string{"--lib", lib, "--model", model, "--dir", used}, statusError, "locked"},
		{[]string{"--lib", lib, "--model", model, "--dir", filepath.Dir(model)}, statusError, "unsupported"},
		{[]string{"--no-such-flag"}, statusUsage, "unknown flag"},
	} {
		p := launch(t, c.flags...)
		timer := time.AfterFunc(patience, func() { p.cmd.Process.Kill() })
		for line := range p.lines {
			t.Errorf("%v: it listens: %s", c.flags, line)
			p.cmd.Process.Kill()
		}
		timer.Stop()
		p.cmd.Wait()
		p.stopped = true
		require.Equal(t, c.status, p.cmd.ProcessState.ExitCode(), "%v: %s", c.flags, p.stderr)
		require.Contains(t, p.stderr.String(), c.says, "%v", c.flags)
	}
	require.Len(t, holder.complete(body{Prompt: []int32{1, 2, 3}, MaxTokens: 1}).Choices[0].Tokens, 1)
	holder.stop()
}

// In a conversation of several turns only what is new is computed, after a restart too, and the response is the one without Holdfast.
func TestMeasure(t *testing.T) {
	lib := enginetest.LibraryPath(t)
	var out, errs bytes.Buffer
	require.Equal(t, statusOK, run(t.Context(), []string{"measure", "--lib", lib, "--arch", "granitehybrid", "--turns", "4", "--instruction", "200", "--user", "50", "--answer", "8", "--json"}, &out, &errs), errs.String())
	var m measured
	require.NoError(t, json.Unmarshal(out.Bytes(), &m))
	require.Len(t, m.Turns, 4)
	for i, x := range m.Turns {
		if i == 0 {
			require.Equal(t, 250, x.Computed)
			continue
		}
		require.Equal(t, 51, x.Computed, "what the user said, and the last token of the response before")
		require.Less(t, x.StoredBytes, x.StateBytes)
	}
	require.True(t, m.Turns[3].Restarted)
}
