package main

import (
	"bytes"
	"context"
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

// Without a driver the command shows the host backend and says why; with one it lists devices. Either way it measures.
func TestGPUCommand(t *testing.T) {
	var out bytes.Buffer
	c := newRootCommand()
	c.SetArgs([]string{"gpu", "--measure", "--json"})
	c.SetOut(&out)
	require.NoError(t, c.ExecuteContext(context.Background()))
	var r gpuReport
	require.NoError(t, json.Unmarshal(out.Bytes(), &r))
	require.Equal(t, r.Backend == "host", r.Reason != "")
	for _, d := range r.Devices {
		require.Len(t, d.Samples, 2*len(measuredShapes))
		for _, s := range d.Samples {
			require.Positive(t, s.Engine)
		}
	}
	require.NoError(t, r.writeTable(&out))
	require.Contains(t, out.String(), r.Backend)
}
