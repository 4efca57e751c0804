package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
)

// reportFaultsMax bounds the mismatches that a report describes; all are counted.
const reportFaultsMax = 16

// tableValueWidth keeps tables within 80 columns.
const tableValueWidth = 50

// parts are what bytes were written for.
type parts struct {
	Payload int64 `json:"payload"`
	Other   int64 `json:"other"` // descriptors and padding around payloads
	Log     int64 `json:"log"`
}

// report is the result of a replay. Its JSON form is an interface: fields are added, and neither renamed nor removed.
type report struct {
	Trace       string `json:"trace"` // name of the source
	Model       model  `json:"model"`
	Ranks       int    `json:"ranks"`
	PageBytes   int64  `json:"page_bytes"`
	StateBytes  int64  `json:"state_bytes"` // 0 for an attention-only model
	RAMBytes    int64  `json:"ram_bytes"`   // size of the tier
	DiskBytes   int64  `json:"disk_bytes"`  // size of the tier; 0 = unbounded
	WritePolicy string `json:"write_policy"`
	Codec       string `json:"codec"`
	Dir         string `json:"dir,omitempty"` // kept directory; absent if it was temporary

	Requests          int64 `json:"requests"`            // driven, those without a whole block included
	Blocks            int64 `json:"blocks"`              // whole blocks asked for
	HitBlocks         int64 `json:"hit_blocks"`          // of them found and restored
	PossibleHitBlocks int64 `json:"possible_hit_blocks"` // what a cache that never forgets would have found, of this replay
	Checkpoints       int64 `json:"checkpoints"`         // listed at the end
	RestoredPages     int64 `json:"restored_pages"`      // over all ranks, every byte checked
	RestoredBytes     int64 `json:"restored_bytes"`

	Mismatches         int64    `json:"mismatches"` // wrong pages, and listed checkpoints that could not be restored
	Faults             []string `json:"faults,omitempty"`
	Busy               int64    `json:"busy"`    // restores that found no room in time
	Refused            int64    `json:"refused"` // publications that found no room in time
	Lost               int64    `json:"lost"`    // checkpoints that became misses between lookup and restore
	AuditedCheckpoints int64    `json:"audited_checkpoints"`
	AuditedPages       int64    `json:"audited_pages"`

	BytesWritten       int64   `json:"bytes_written"`    // the sum of bytes_written_by; what a killed child wrote after its last answer is not in it
	WrittenBy          parts   `json:"bytes_written_by"` // as the database counts them
	Written            written `json:"-"`
	OwnPayloadBytes    int64   `json:"own_payload_bytes"`    // of the payload written, pages that one checkpoint alone has: states
	LeftRAMBytes       int64   `json:"left_ram_bytes"`       // of pages that left RAM while they were current: what a deferred write is for
	UniquePayloadBytes int64   `json:"unique_payload_bytes"` // of what was published, every page of every rank once
	RAMBytesUsed       int64   `json:"ram_bytes_used"`
	DiskBytesUsed      int64   `json:"disk_bytes_used"`

	Restarts int64             `json:"restarts"` // clean closes and opens
	Checks   int64             `json:"checks"`   // samples of all listed checkpoints restored, and counts derived anew
	Kills    int64             `json:"kills"`
	KillsAt  map[killPoint]int `json:"kills_at,omitempty"` // where in the life of a request

	Seconds     float64        `json:"seconds"` // of the replay, without the audit
	Latencies   latencySummary `json:"latencies"`
	Interrupted bool           `json:"interrupted"`
	Error       string         `json:"error,omitempty"` // what ended the replay early; the figures are those until then
}

// latencySummary has the latencies of single calls, in the process that holds the database.
type latencySummary struct {
	Lookup  percentiles `json:"lookup"`
	Restore percentiles `json:"restore"` // of requests that found something: pins, loads and checksums, not the replay's own check
	Publish percentiles `json:"publish"` // from begin to the commit of the last rank, with filling the pages
}

// percentiles are in microseconds; all are 0 without a sample.
type percentiles struct {
	Count int     `json:"count"`
	P50   float64 `json:"p50_us"`
	P99   float64 `json:"p99_us"`
	Max   float64 `json:"max_us"`
}

func (l latencies) summary() latencySummary {
	return latencySummary{percentilesOf(l.lookup), percentilesOf(l.restore), percentilesOf(l.publish)}
}

// percentilesOf sorts samples and reads exact percentiles off (nearest rank).
func percentilesOf(samples []time.Duration) percentiles {
	if len(samples) == 0 {
		return percentiles{}
	}
	slices.Sort(samples)
	at := func(percent int) float64 {
		rank := (len(samples)*percent + 99) / 100
		return math.Round(float64(samples[max(rank, 1)-1].Nanoseconds())/100) / 10
	}
	return percentiles{Count: len(samples), P50: at(50), P99: at(99), Max: at(100)}
}

// finish enters how it ended and what follows from the counts.
func (r *report) finish(kills map[killPoint]int, err error) {
	w := r.Written
	r.BytesWritten, r.OwnPayloadBytes, r.LeftRAMBytes = w.total(), w.Own, w.Left
	r.WrittenBy = parts{Payload: w.Payload, Other: w.Other, Log: w.Log}
	r.KillsAt = kills
	for _, n := range kills {
		r.Kills += int64(n)
	}
	if err != nil {
		r.Error = err.Error()
	}
}

// status is the exit status that the result stands for.
func (r *report) status() int {
	switch {
	case r.Mismatches > 0:
		return statusMismatch
	case r.Interrupted:
		return statusInterrupted
	}
	return statusOK
}

// verdict says the status in words.
func (r *report) verdict() string {
	switch {
	case r.Mismatches > 0:
		return fmt.Sprintf("%s mismatches: the promise was broken", count(r.Mismatches))
	case r.Error != "":
		return "ended by an error; as promised until then"
	case r.Interrupted:
		return "interrupted; as promised until then"
	}
	return "as promised"
}

// writeTable writes the report for people: names and values that fit 80 columns.
func (r *report) writeTable(w io.Writer) error {
	t := newTable()
	disk := "unbounded"
	if r.DiskBytes > 0 {
		disk = humanBytes(r.DiskBytes)
	}
	t.AppendRow(table.Row{"trace", r.Trace})
	t.AppendRow(table.Row{"model", describeModel(r.Model, r.PageBytes, r.StateBytes, r.Ranks)})
	t.AppendRow(table.Row{"tiers", fmt.Sprintf("RAM %s, disk %s, %s", humanBytes(r.RAMBytes), disk, r.WritePolicy)})
	if r.Dir != "" {
		t.AppendRow(table.Row{"directory", r.Dir})
	}
	t.AppendSeparator()
	t.AppendRow(table.Row{"requests", fmt.Sprintf("%s in %s, %s a second", count(r.Requests), seconds(r.Seconds), rate(r.Requests, r.Seconds))})
	t.AppendRow(table.Row{"blocks found", fmt.Sprintf("%s of %s (%s)", count(r.HitBlocks), count(r.Blocks), percent(r.HitBlocks, r.Blocks))})
	t.AppendRow(table.Row{"… of those possible", fmt.Sprintf("%s (%s)", count(r.PossibleHitBlocks), percent(r.HitBlocks, r.PossibleHitBlocks))})
	t.AppendRow(table.Row{"pages restored", fmt.Sprintf("%s (%s), every byte checked", count(r.RestoredPages), humanBytes(r.RestoredBytes))})
	t.AppendRow(table.Row{"checkpoints listed", count(r.Checkpoints)})
	if r.AuditedCheckpoints > 0 {
		t.AppendRow(table.Row{"checkpoints audited", fmt.Sprintf("%s (%s pages)", count(r.AuditedCheckpoints), count(r.AuditedPages))})
	}
	t.AppendRow(table.Row{"mismatches", count(r.Mismatches)})
	for _, o := range []struct {
		name string
		n    int64
	}{{"restores without room", r.Busy}, {"publications refused", r.Refused}, {"lost after lookup", r.Lost}} {
		if o.n > 0 {
			t.AppendRow(table.Row{o.name, count(o.n)})
		}
	}
	t.AppendSeparator()
	t.AppendRow(table.Row{"written", fmt.Sprintf("%s (payload %s, log %s)",
		humanBytes(r.BytesWritten), humanBytes(r.Written.Payload), humanBytes(r.Written.Log))})
	t.AppendRow(table.Row{"payload published", fmt.Sprintf("%s, each page counted once", humanBytes(r.UniquePayloadBytes))})
	t.AppendRow(table.Row{"left RAM", fmt.Sprintf("%s while current, to be written once", humanBytes(r.LeftRAMBytes))})
	t.AppendRow(table.Row{"in use", fmt.Sprintf("RAM %s, disk %s", humanBytes(r.RAMBytesUsed), humanBytes(r.DiskBytesUsed))})
	if r.Checks > 0 {
		t.AppendRow(table.Row{"checks", count(r.Checks)})
	}
	if r.Restarts > 0 {
		t.AppendRow(table.Row{"clean restarts", count(r.Restarts)})
	}
	if r.Kills > 0 {
		var at []string
		for point, n := range r.KillsAt {
			at = append(at, fmt.Sprintf("%s %d", point, n))
		}
		slices.Sort(at)
		t.AppendRow(table.Row{"kills", fmt.Sprintf("%s: %s", count(r.Kills), strings.Join(at, ", "))})
	}
	t.AppendSeparator()
	for _, l := range []struct {
		name string
		p    percentiles
	}{{"lookup", r.Latencies.Lookup}, {"restore", r.Latencies.Restore}, {"publish", r.Latencies.Publish}} {
		if l.p.Count > 0 {
			t.AppendRow(table.Row{l.name, fmt.Sprintf("p50 %s, p99 %s, max %s", micros(l.p.P50), micros(l.p.P99), micros(l.p.Max))})
		}
	}
	t.AppendSeparator()
	t.AppendRow(table.Row{"result", r.verdict()})
	_, err := fmt.Fprintln(w, t.Render())
	return err
}

// newTable gives a table of names and values.
func newTable() table.Writer {
	t := table.NewWriter()
	t.SetStyle(table.StyleRounded)
	t.SetColumnConfigs([]table.ColumnConfig{{Number: 2, WidthMax: tableValueWidth, WidthMaxEnforcer: text.WrapSoft}})
	return t
}

// describeModel says in words what a checkpoint is made of.
func describeModel(m model, pageBytes, stateBytes int64, ranks int) string {
	s := fmt.Sprintf("%s, page %s", m, humanBytes(pageBytes))
	if m == hybridModel {
		s += ", state " + humanBytes(stateBytes)
	}
	if ranks > 1 {
		s += fmt.Sprintf(", %d ranks", ranks)
	}
	return s
}

func count(n int64) string { return humanize.Comma(n) }

func seconds(s float64) string {
	return (time.Duration(s*1000) * time.Millisecond).Round(10 * time.Millisecond).String()
}

func rate(n int64, s float64) string {
	if s <= 0 {
		return "-"
	}
	return humanize.CommafWithDigits(float64(n)/s, 0)
}

func percent(part, whole int64) string {
	if whole == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f %%", 100*float64(part)/float64(whole))
}

// micros writes microseconds with three digits.
func micros(us float64) string {
	switch {
	case us >= 1e6:
		return fmt.Sprintf("%.3g s", us/1e6)
	case us >= 1e3:
		return fmt.Sprintf("%.3g ms", us/1e3)
	}
	return fmt.Sprintf("%.3g µs", us)
}
