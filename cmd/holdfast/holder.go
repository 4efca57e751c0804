package main

import (
	"context"
	"time"
)

// holder is whoever holds the open database for the driver: an embedded in this process, or a supervisor, whose
// database lives in a child process. The driver calls one method at a time.
//
// Errors end the replay. What a cache may do, it says in its answers instead: a miss, or no room in time.
type holder interface {
	// find looks r up, restores the longest prefix there is on every rank, checks every byte of it and lets it go.
	find(ctx context.Context, r request) (found, error)
	// publish publishes the checkpoint of r's last whole block, which went on from what find gave. Publishing again
	// what is listed already changes nothing.
	publish(ctx context.Context, r request, from found) (published, error)
	// reopen closes the database cleanly and opens it again.
	reopen(ctx context.Context) error
	// census counts what is there.
	census(ctx context.Context) (census, error)
	// close closes the database; the holder is not used afterwards.
	close(ctx context.Context) error
}

// found is what find saw.
type found struct {
	Offset     int64         `json:"offset"`               // tokens restored; 0 is a miss
	Generation string        `json:"generation,omitempty"` // of the checkpoint that was restored, in hex
	Pages      int64         `json:"pages,omitempty"`      // restored and checked, over all ranks
	Bytes      int64         `json:"bytes,omitempty"`
	Mismatches int64         `json:"mismatches,omitempty"` // pages with a wrong byte, missing pages, broken promises
	Faults     []string      `json:"faults,omitempty"`     // the first of them in words, at most faultsMax
	Busy       string        `json:"busy,omitempty"`       // there was a checkpoint and no room to restore it: what the database says
	Lost       bool          `json:"lost,omitempty"`       // lookup found more than restore gave, and did not any more afterwards
	Lookup     time.Duration `json:"lookup"`
	Restore    time.Duration `json:"restore,omitempty"`
}

// faultsMax bounds the mismatches that are described; all are counted.
const faultsMax = 8

// mismatch counts one and describes it if there is room.
func (f *found) mismatch(what string) {
	f.Mismatches++
	if len(f.Faults) < faultsMax {
		f.Faults = append(f.Faults, what)
	}
}

// published is what publish did.
type published struct {
	Repeated bool          `json:"repeated,omitempty"` // the checkpoint was listed already
	Refused  string        `json:"refused,omitempty"`  // there was no room in time; nothing was published
	Publish  time.Duration `json:"publish"`
	Written  written       `json:"written,omitzero"` // by this holder so far, if the setup says so
}

// written counts bytes handed to the operating system for the directory, as the database counts them.
type written struct {
	Payload int64 `json:"payload"`
	Own     int64 `json:"own"`   // of the payload, pages that one checkpoint alone has
	Left    int64 `json:"left"`  // not written: bytes of pages that left RAM while they were current
	Other   int64 `json:"other"` // descriptors and padding around payloads
	Log     int64 `json:"log"`
}

func (w written) add(o written) written {
	return written{w.Payload + o.Payload, w.Own + o.Own, w.Left + o.Left, w.Other + o.Other, w.Log + o.Log}
}

func (w written) total() int64 { return w.Payload + w.Other + w.Log }

// census is what a database holds at one moment.
type census struct {
	Checkpoints int64   `json:"checkpoints"` // listed
	RAMBytes    int64   `json:"ram_bytes"`   // used
	DiskBytes   int64   `json:"disk_bytes"`  // used
	Written     written `json:"written"`     // by this holder so far
}

// setup is how a database is opened for a replay. A child process gets it as JSON.
type setup struct {
	Dir         string        `json:"dir"`
	Model       model         `json:"model"`
	Ranks       int           `json:"ranks"`
	PageBytes   int64         `json:"page_bytes"`  // of an attention page: 512 tokens of one rank
	StateBytes  int64         `json:"state_bytes"` // of a recurrent state of one rank
	RAMBytes    int64         `json:"ram_bytes"`
	DiskBytes   int64         `json:"disk_bytes"` // 0 = unbounded
	WritePolicy string        `json:"write_policy"`
	Codec       string        `json:"codec,omitempty"`      // none if empty
	Grace       time.Duration `json:"grace,omitempty"`      // as db.Options.SupersedeGrace
	Faults      bool          `json:"faults,omitempty"`     // payload files fail and lag, calls are cancelled, everything is cleared now and then
	Seed        uint64        `json:"seed,omitempty"`       // of the faults
	Log         bool          `json:"log,omitempty"`        // the database's log goes to standard error
	CountEach   bool          `json:"count_each,omitempty"` // bytes are counted with each publication, for who may not live to be asked
}

// checkpointBytes gives the size of r's checkpoint, over all ranks.
func (s setup) checkpointBytes(r request) int64 {
	return (int64(len(r.Blocks))*s.PageBytes + s.StateBytes) * int64(s.Ranks)
}

// Bounds of what a replay waits for. They are far above what a healthy machine needs, and end a replay that would
// otherwise hang.
const (
	requestTimeout = 2 * time.Minute // one lookup and restore, or one publication
	openTimeout    = 2 * time.Minute
	closeTimeout   = 5 * time.Minute // deferred writes are written then: as much as fits in RAM
)
