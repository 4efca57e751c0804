package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"

	"github.com/holdfast-db/holdfast/db"
)

// benchAmplification replays the conversation trace and holds the bytes that were written against those of the pages that
// were published.
func benchAmplification(ctx context.Context, b *bench) (rows []benchRow, err error) {
	for _, policy := range []db.WritePolicy{db.OnEvict, db.WriteThrough} {
		row, err := b.amplification(ctx, policy)
		if err != nil {
			return rows, err
		}
		rows = append(rows, row)
	}
	return rows, nil
}

func (b *bench) amplification(ctx context.Context, policy db.WritePolicy) (row benchRow, err error) {
	dir, remove, err := b.scratch("amplification")
	if err != nil {
		return row, err
	}
	defer remove()
	o := defaultReplayOptions()
	o.ranks, o.ram, o.writePolicy, o.audit = 2, 256<<20, policy.String(), false
	if b.traces != "" {
		o.trace = filepath.Join(b.traces, "mooncake_conversation.jsonl")
	}
	o.limit = either(b, 4000, 300)
	o.dir = filepath.Join(dir, "db")
	if b.quick {
		o.ram = 16 << 20
	}
	s, err := o.setup()
	if err != nil {
		return row, err
	}
	s.Dir = o.dir
	src, closer, err := o.source(nil)
	if err != nil {
		return row, err
	}
	defer closer.Close()
	h, err := openEmbedded(ctx, s)
	if err != nil {
		return row, err
	}
	closed := false
	defer func() {
		if !closed {
			err = errors.Join(err, h.close(ctx))
		}
	}()
	r := &report{}
	d := &replay{source: src, holder: h, ledger: newLedger(s), fresh: true, progress: newProgress(io.Discard, false), report: r}
	if err := d.run(ctx); err != nil {
		return row, err
	}
	// Closing writes what is in RAM only.
	closed = true
	if err := h.close(ctx); err != nil {
		return row, err
	}
	written := h.(*embedded).before
	unique := float64(r.UniquePayloadBytes)
	ratio := float64(written.total()) / unique
	reference := unique / mebibyte
	row = benchRow{
		Name: fmt.Sprintf("bytes written, %s, %s", src.name, policy), Value: float64(written.total()) / mebibyte, Unit: "MiB", Reference: &reference,
		Against: "payload published, each page once", Ratio: &ratio, Turns: 1, Goal: ratioAtMost(1.05),
	}
	row.Reached = row.Goal.reached(ratio)
	return row.noted("%s requests with 2 ranks, pages of 4 KiB, states of 64 KiB, RAM of %s; the rest is %s of log and %s of descriptors and padding",
		count(r.Requests), humanBytes(int64(o.ram)), humanBytes(written.Log), humanBytes(written.Other)), nil
}
