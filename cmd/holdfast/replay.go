package main

import (
	"context"
	"fmt"
	"time"
)

// replay drives a database with a stream of requests. Every request is looked up, what is found is restored and checked,
// and then the checkpoint of its last whole block is published, one request after the other. At the end every
// checkpoint that was acknowledged is looked up once more: those that are still listed must come back whole.
//
// The driver keeps its own account of the promise in a ledger, so that it can tell a right answer from a consistent
// one: what was found must have been published, and what is listed must be found.
type replay struct {
	source       source
	holder       holder
	ledger       *ledger
	restartEvery int  // clean close and open after so many requests; 0 = never
	checkEvery   int  // inspect after so many requests; 0 = never
	audit        bool // look everything up at the end
	fresh        bool // the directory was empty, so the ledger knows of everything in it
	progress     *progress
	report       *report
	latencies    latencies
}

// latencies are samples of single calls, in the process that holds the database.
type latencies struct{ lookup, restore, publish []time.Duration }

// run replays the source and fills the report in as it goes, so that what was done until an error is told as well. It
// leaves the holder open. When ctx ends it finishes the request at hand, takes the census, and leaves the audit out.
func (d *replay) run(ctx context.Context) error {
	start := time.Now()
	d.progress.begin("replay", d.source.total)
	err := d.requests(ctx)
	d.progress.end()
	d.report.Seconds = time.Since(start).Seconds()
	d.report.Interrupted = ctx.Err() != nil
	d.report.UniquePayloadBytes = d.ledger.uniqueBytes()
	d.report.Latencies = d.latencies.summary()
	if err != nil {
		return err
	}
	if err := d.census(ctx); err != nil {
		return err
	}
	if d.audit && ctx.Err() == nil {
		err := d.auditAll(ctx)
		d.report.Interrupted = ctx.Err() != nil
		return err
	}
	return nil
}

func (d *replay) requests(ctx context.Context) error {
	for r, err := range d.source.requests {
		if err != nil {
			return usageError(err)
		}
		if ctx.Err() != nil {
			return nil
		}
		if err := d.request(ctx, r); err != nil {
			return fmt.Errorf("request %d: %w", r.Index, err)
		}
		d.progress.step(d.report.HitBlocks, d.report.Blocks)
		if d.checkEvery > 0 && d.report.Requests%int64(d.checkEvery) == 0 {
			f, err := d.holder.(inspector).inspect(ctx)
			if err != nil {
				return fmt.Errorf("check after request %d: %w", r.Index, err)
			}
			d.report.Checks++
			d.judge(fmt.Sprintf("check after request %d", r.Index), f)
		}
		if d.restartEvery > 0 && d.report.Requests%int64(d.restartEvery) == 0 {
			if err := d.holder.reopen(ctx); err != nil {
				return fmt.Errorf("reopen after request %d: %w", r.Index, err)
			}
			d.report.Restarts++
		}
	}
	return nil
}

// request looks up, restores, checks and publishes one request. One without a whole block is only counted.
func (d *replay) request(ctx context.Context, r request) error {
	d.report.Requests++
	d.report.Blocks += int64(len(r.Blocks))
	if len(r.Blocks) == 0 {
		return nil
	}
	f, err := d.holder.find(ctx, r)
	if err != nil {
		return err
	}
	hit := f.Offset / blockTokens
	possible := int64(d.ledger.possible(r))
	d.report.HitBlocks += hit
	d.report.PossibleHitBlocks += possible
	d.report.RestoredPages += f.Pages
	d.report.RestoredBytes += f.Bytes
	if d.fresh && hit > possible {
		f.mismatch(fmt.Sprintf("found %d blocks, and only %d were ever published", hit, possible))
	}
	d.judge(fmt.Sprintf("request %d", r.Index), f)
	d.latencies.lookup = append(d.latencies.lookup, f.Lookup)
	if f.Pages > 0 {
		d.latencies.restore = append(d.latencies.restore, f.Restore)
	}

	p, err := d.holder.publish(ctx, r, f)
	if err != nil {
		return err
	}
	if p.Refused != "" {
		d.report.Refused++
		d.progress.note(fmt.Sprintf("request %d: no room to publish: %s", r.Index, p.Refused))
		return nil
	}
	d.latencies.publish = append(d.latencies.publish, p.Publish)
	d.ledger.acknowledge(r)
	return nil
}

// judge enters what a lookup showed besides its result.
func (d *replay) judge(what string, f found) {
	if f.Busy != "" {
		d.report.Busy++
		d.progress.note(what + ": no room to restore: " + f.Busy)
	}
	if f.Lost {
		d.report.Lost++
	}
	d.report.Mismatches += f.Mismatches
	for _, fault := range f.Faults {
		fault = what + ": " + fault
		if len(d.report.Faults) < reportFaultsMax {
			d.report.Faults = append(d.report.Faults, fault)
			d.progress.note("mismatch: " + fault)
		}
	}
}

// census enters what the database holds.
func (d *replay) census(ctx context.Context) error {
	c, err := d.holder.census(ctx)
	if err != nil {
		return fmt.Errorf("census: %w", err)
	}
	d.report.Checkpoints = c.Checkpoints
	d.report.RAMBytesUsed, d.report.DiskBytesUsed = c.RAMBytes, c.DiskBytes
	d.report.Written = c.Written
	return nil
}

// auditAll looks every acknowledged checkpoint up at its own offset. A miss is allowed, for it is a cache; a checkpoint
// that the database lists must be found, and what is found must be whole.
func (d *replay) auditAll(ctx context.Context) error {
	d.progress.begin("audit", len(d.ledger.order))
	defer d.progress.end()
	listed := d.report.Checkpoints
	var whole int64
	for _, key := range d.ledger.order {
		if ctx.Err() != nil {
			return nil
		}
		r := d.ledger.checkpoints[key]
		f, err := d.auditOne(ctx, r)
		if err != nil {
			return fmt.Errorf("audit of request %d: %w", r.Index, err)
		}
		d.report.AuditedCheckpoints++
		d.report.AuditedPages += f.Pages
		d.judge(fmt.Sprintf("audit of request %d", r.Index), f)
		if f.Offset == r.tokens() || f.Busy != "" {
			whole++
		}
		d.progress.step(whole, d.report.AuditedCheckpoints)
	}
	if err := d.census(ctx); err != nil {
		return err
	}
	// Under pressure loading one checkpoint may retire another, found or not yet found. Then the counts say nothing,
	// and each lookup above has been judged by itself.
	if d.fresh && d.report.Checkpoints == listed && whole < listed {
		var f found
		f.mismatch(fmt.Sprintf("%d checkpoints are listed and only %d of them can be restored", listed, whole))
		f.Mismatches = listed - whole
		d.judge("audit", f)
	}
	return nil
}

// auditOne looks one checkpoint up. No room is no excuse here: nothing else is held in RAM, so what takes half of it or
// less must find room, at the latest when it is asked for again.
func (d *replay) auditOne(ctx context.Context, r request) (found, error) {
	f, err := d.holder.find(ctx, r)
	if err != nil || f.Busy == "" {
		return f, err
	}
	f, err = d.holder.find(ctx, r)
	if s := d.ledger.setup; err == nil && f.Busy != "" && s.checkpointBytes(r) <= s.RAMBytes/2 {
		f.mismatch(fmt.Sprintf("%d bytes are listed, and cannot be restored into %d: %s", s.checkpointBytes(r), s.RAMBytes, f.Busy))
	}
	return f, err
}
