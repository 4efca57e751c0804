//go:build mutants && cgo && linux

package gpu

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// edit replaces a text that occurs once in a file.
type edit struct{ file, old, new string }

// The faults that the suite has to notice, each one that has been made in such code before. They are made to copies of the
// source by an overlay, so that the source has no trace of them; a mutant whose text is no longer there fails this test.
var mutants = []struct {
	name  string
	edits []edit
}{
	{"the wait for the producer is dropped", []edit{{"engine.go", "if order == nil {", "if order == nil || b.Direction > 0 {"}}},
	{"released at the deadline under a running copy", []edit{{"transfer.go", "t.released = len(t.inFlight) == 0", "t.released = true"}}},
	{"complete when it is submitted", []edit{{"lane.go", "r.flying <- c", "r.d.landed(c, copied, nil)"}}},
	{"source orders swapped", []edit{{"internal/driver/shim.c", "c->direction == 1 ? ORDER_STREAM : ORDER_ANY", "c->direction == 2 ? ORDER_STREAM : ORDER_ANY"}}},
	{"event in front of the copies", []edit{
		{"internal/driver/shim.c", "	start(d, (CUstream)stream, c, &out);\n", "	hf_result r = d->event_record((CUevent)event, (CUstream)stream);\n	start(d, (CUstream)stream, c, &out);\n"},
		{"internal/driver/shim.c", "		hf_result r = d->event_record((CUevent)event, (CUstream)stream);\n		out.recorded", "		out.recorded"},
	}},
	{"merged over a gap on the host", []edit{{"batch.go", " && runs[k].hostAddress()+uint64(runs[k].bytes) == r.hostAddress()", ""}}},
	{"a failure keeps its budget", []edit{{"transfer.go", "	t.d.budget.give(t.cost)\n", "	if t.err == nil {\n		t.d.budget.give(t.cost)\n	}\n"}}},
	{"stores before restores", []edit{{"dispatcher.go", "return high, true", "return low, true"}}},
	{"stores starve", []edit{{"dispatcher.go", "if d.passed >= fairTurns {", "if d.passed < 0 {"}}},
	{"a lost device goes unnoticed", []edit{{"dispatcher.go", "if v == unproven || errors.Is(err, ErrDeviceLost) {", "if v == unproven && v == copied {"}}},
	{"a lost device's memory is freed", []edit{{"cuda_lane.go", "return unproven, combined(", "return drained, combined("}}},
	{"a failed chunk is a success", []edit{{"dispatcher.go", "		} else {\n			t.fail(err)\n		}\n		t.inFlight", "		}\n		t.inFlight"}}},
	{"cancel does not wait for what runs", []edit{{"transfer.go", "		t.fail(ErrCanceled)\n		t.finish()\n", "		t.fail(ErrCanceled)\n		t.inFlight = nil\n		t.finish()\n"}}},
	{"cancel goes on issuing", []edit{{"transfer.go", "	if t.stage == ready {\n		t.d.dequeue(t)\n	}\n	t.stage = issued\n", ""}}},
	{"descriptors of all slots in the same memory", []edit{{"cuda_lane.go", "		s.carve(runs)\n", "		s.carve(runs)\n		if len(l.slots) > 0 {\n			s.chunk = l.slots[0].chunk\n		}\n"}}},
	{"the context of whoever was last on the thread", []edit{{"internal/driver/shim.c", "	out.result = d->set_current((CUcontext)ctx);\n", "	(void)ctx;\n"}}},
	{"one copy over two registrations", []edit{{"batch.go", "				n = min(n, int64(piece.end-r.hostAddress()))\n", ""}}},
	{"the window is open", []edit{{"dispatcher.go", "regions: d.limits.WindowRuns})", "regions: d.limits.WindowRuns}) || true"}}},
	{"pinned memory goes away under a copy", []edit{{"pinned.go", "users := p.e.pinned.retire(p.pieces); users > 0", "users := p.e.pinned.retire(p.pieces); users < 0"}}},
	{"device memory goes away under a copy", []edit{{"device_memory.go", "[]*span{m.span}); users > 0", "[]*span{m.span}); users < 0"}}},
	{"memory of the RAM tier is given back while it is page-locked", []edit{{"../db/internal/arena/class.go", "	places = a.unlockAll(places)\n", ""}}},
	{"released twice", []edit{{"transfer.go", "if !first && (t.released || len(t.inFlight) > 0) {", "if !first && len(t.inFlight) > 0 {"}}},
	{"overlapping regions are taken", []edit{{"batch.go", "> address(ends[i]) {", "> address(ends[i])+1<<40 {"}}},
	{"a partial submission is a whole one", []edit{{"lane.go", "		if err != nil {\n			r.d.partial(c, err)", "		if err != nil && c == nil {\n			r.d.partial(c, err)"}, {"cuda_lane.go", "waited == nil && s.err == nil", "waited == nil"}}},
}

func TestEveryMutantFails(t *testing.T) {
	root, err := os.Getwd()
	require.NoError(t, err)
	survives := func(t *testing.T, edits []edit) (bool, string) {
		dir := t.TempDir()
		replaced := map[string]string{}
		texts := map[string]string{}
		for _, e := range edits {
			path := filepath.Join(root, e.file)
			if texts[path] == "" {
				text, err := os.ReadFile(path)
				require.NoError(t, err)
				texts[path] = string(text)
			}
			require.Equal(t, 1, strings.Count(texts[path], e.old), "%s: %q", e.file, e.old)
			texts[path] = strings.Replace(texts[path], e.old, e.new, 1)
			replaced[path] = filepath.Join(dir, filepath.Base(path))
		}
		for path, text := range texts {
			require.NoError(t, os.WriteFile(replaced[path], []byte(text), 0o600))
		}
		overlay, err := json.Marshal(map[string]any{"Replace": replaced})
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(dir, "overlay.json"), overlay, 0o600))
		binary := filepath.Join(dir, "gpu.test")
		build := exec.Command("go", "test", "-c", "-vet=off", "-overlay", filepath.Join(dir, "overlay.json"), "-o", binary, ".")
		out, err := build.CombinedOutput()
		require.NoError(t, err, "the mutant does not build: %s", out)
		out, err = exec.Command(binary, "-test.short", "-test.failfast", "-test.timeout=90s", "-test.run=^(TestConformance|TestCUDA)").CombinedOutput()
		return err == nil, string(out)
	}
	t.Run("none", func(t *testing.T) {
		ok, out := survives(t, nil)
		require.True(t, ok, out)
	})
	for _, m := range mutants {
		t.Run(m.name, func(t *testing.T) {
			ok, out := survives(t, m.edits)
			require.False(t, ok, "the suite does not notice")
			for line := range strings.Lines(out) {
				if strings.Contains(line, "--- FAIL") || strings.Contains(line, "fatal error") || strings.HasPrefix(line, "panic:") {
					t.Log(strings.TrimSpace(line))
				}
			}
		})
	}
}
