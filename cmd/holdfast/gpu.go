package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"sort"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/holdfast-db/holdfast/gpu"
)

// gpuReport is what the gpu command found.
type gpuReport struct {
	Backend string      `json:"backend"` // cuda, or host where there is no usable device
	Reason  string      `json:"reason,omitempty"`
	Devices []gpuDevice `json:"devices"`
}

type gpuDevice struct {
	Index       int         `json:"index"`
	Name        string      `json:"name"`
	UUID        string      `json:"uuid"`
	Bytes       int64       `json:"bytes"`
	NUMANode    int         `json:"numa_node"`
	CopyEngines int         `json:"copy_engines"`
	Features    []string    `json:"features,omitempty"`
	Samples     []gpuSample `json:"samples,omitempty"`
}

type gpuSample struct {
	BlockBytes int64              `json:"block_bytes"`
	Blocks     int                `json:"blocks"`
	Direction  string             `json:"direction"`
	Engine     float64            `json:"engine_bytes_per_second"`
	Bare       map[string]float64 `json:"bare_bytes_per_second"`
}

// gpuTimeout bounds the whole command.
const gpuTimeout = 2 * time.Minute

// measuredShapes are from the block of a paged cache to one large copy, which shows the limit of the link.
var measuredShapes = []gpu.Shape{{BlockBytes: 4 << 10, Blocks: 1024}, {BlockBytes: 64 << 10, Blocks: 512}, {BlockBytes: 2 << 20, Blocks: 32}, {BlockBytes: 64 << 20, Blocks: 1}}

func newGPUCommand() *cobra.Command {
	var measure bool
	c := &cobra.Command{
		Use:   "gpu",
		Short: "List devices and measure copies between them and host memory",
		Long: `GPU lists the devices that the copy engine can use, with the driver's features.
Where there is no driver or no device it says why, and shows the host backend,
which plays a device in memory: a process works on without a GPU. With --measure
it copies blocks of several sizes in both directions, through the engine and by
each bare method, and prints the best of three. Figures of the host backend say
nothing about a GPU.

` + statusHelp,
		Example: `  holdfast gpu
  holdfast gpu --measure
  holdfast gpu --json | jq '.devices[].name'`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(c.Context(), gpuTimeout)
			defer cancel()
			r, err := inspectGPU(ctx, measure)
			if err != nil {
				return databaseError(err)
			}
			if wantsJSON(c) {
				return writeJSON(c.OutOrStdout(), r)
			}
			return r.writeTable(c.OutOrStdout())
		},
	}
	c.Flags().BoolVar(&measure, "measure", false, "measure copies")
	return c
}

func inspectGPU(ctx context.Context, measure bool) (r gpuReport, err error) {
	backend, reason := gpu.Detect(gpu.CUDAOptions{})
	r.Backend = "cuda"
	if reason != nil {
		r.Backend, r.Reason = "host", reason.Error()
	}
	engine, err := gpu.Open(backend, gpu.Options{})
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, engine.Close(ctx)) }()
	for i, info := range engine.Devices() {
		d := gpuDevice{
			Index: i, Name: info.Name, UUID: hex.EncodeToString(info.UUID[:]), Bytes: info.Bytes, NUMANode: info.NUMANode,
			CopyEngines: info.CopyEngines, Features: info.Features,
		}
		if measure {
			samples, err := engine.Measure(ctx, i, measuredShapes, 3)
			if err != nil {
				return r, err
			}
			for _, s := range samples {
				out := gpuSample{BlockBytes: s.BlockBytes, Blocks: s.Blocks, Direction: s.Direction.String(), Engine: s.Engine, Bare: map[string]float64{}}
				for m, v := range s.Bare {
					out.Bare[m.String()] = v
				}
				d.Samples = append(d.Samples, out)
			}
		}
		r.Devices = append(r.Devices, d)
	}
	return r, nil
}

func (r gpuReport) writeTable(w io.Writer) error {
	t := table.NewWriter()
	t.SetStyle(table.StyleRounded)
	t.AppendRow(table.Row{"backend", r.Backend})
	if r.Reason != "" {
		t.AppendRow(table.Row{"why not a GPU", wrapAt(r.Reason, 56)})
	}
	for _, d := range r.Devices {
		t.AppendSeparator()
		t.AppendRow(table.Row{fmt.Sprintf("device %d", d.Index), d.Name})
		t.AppendRow(table.Row{"uuid", d.UUID})
		if d.Bytes > 0 {
			t.AppendRow(table.Row{"memory", humanize.IBytes(uint64(d.Bytes))})
		}
		if d.CopyEngines > 0 {
			t.AppendRow(table.Row{"copy engines", d.CopyEngines})
		}
		if len(d.Features) > 0 {
			t.AppendRow(table.Row{"features", wrapAt(strings.Join(d.Features, ", "), 56)})
		}
		for _, s := range d.Samples {
			var bare []string
			for m, v := range s.Bare {
				bare = append(bare, fmt.Sprintf("%s %s/s", m, humanize.Bytes(uint64(v))))
			}
			sort.Strings(bare)
			t.AppendRow(table.Row{fmt.Sprintf("%s, %d × %s", s.Direction, s.Blocks, humanize.IBytes(uint64(s.BlockBytes))),
				fmt.Sprintf("%s/s, bare: %s", humanize.Bytes(uint64(s.Engine)), strings.Join(bare, ", "))})
		}
	}
	_, err := fmt.Fprintln(w, t.Render())
	return err
}

// wrapAt breaks a line at blanks.
func wrapAt(s string, width int) string {
	var lines []string
	line := ""
	for _, word := range strings.Fields(s) {
		if line != "" && len(line)+1+len(word) > width {
			lines, line = append(lines, line), ""
		}
		if line != "" {
			line += " "
		}
		line += word
	}
	return strings.Join(append(lines, line), "\n")
}
