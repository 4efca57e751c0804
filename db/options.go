package db

import (
	"fmt"
	"log/slog"
	"time"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/holdfast-db/holdfast/db/internal/segment"
	"github.com/holdfast-db/holdfast/gpu"
	"github.com/holdfast-db/holdfast/txn"
	"github.com/holdfast-db/holdfast/wal"
)

// WritePolicy says when pages are written to disk.
type WritePolicy uint8

// The write policies. The zero value is WriteThrough.
const (
	// WriteThrough writes the pages of a publication before it is listed: every listed checkpoint survives a crash.
	WriteThrough WritePolicy = 0
	// OnEvict lists publications while their pages are in RAM only and writes a page when RAM is needed for others.
	OnEvict WritePolicy = 1
	// OnReuse is OnEvict for pages that a restore has used; the others are given up with their checkpoints.
	OnReuse WritePolicy = 2
	// Never keeps pages in RAM only. Publications that ask to be durable are written all the same.
	Never WritePolicy = 3
)

var writePolicies = [...]string{"write-through", "on-evict", "on-reuse", "never"}

// String gives the name that ParseWritePolicy reads.
func (p WritePolicy) String() string {
	if int(p) < len(writePolicies) {
		return writePolicies[p]
	}
	return fmt.Sprintf("WritePolicy(%d)", uint8(p))
}

// ParseWritePolicy reads write-through, on-evict, on-reuse or never.
func ParseWritePolicy(s string) (WritePolicy, error) {
	for i, name := range writePolicies {
		if s == name {
			return WritePolicy(i), nil
		}
	}
	return 0, fmt.Errorf("db: write policy %.80q: want one of %v: %w", s, writePolicies, ErrInvalid)
}

// Codec says how pages are stored on disk.
type Codec = txn.Codec

// The codecs. A page that CodecZstd does not make smaller in the file is stored as it is.
const (
	CodecNone = txn.CodecNone
	CodecZstd = txn.CodecZstd
)

var codecs = [...]string{CodecNone: "none", CodecZstd: "zstd"}

// ParseCodec reads none or zstd.
func ParseCodec(s string) (Codec, error) {
	for i, name := range codecs {
		if s == name && s != "" {
			return Codec(i), nil
		}
	}
	return 0, fmt.Errorf("db: codec %.80q: want one of %v: %w", s, codecs[CodecNone:], ErrInvalid)
}

// Options of Open. The zero value opens read-write with 1 GiB of RAM, an unbounded disk and write-through.
type Options struct {
	// RAMBytes is the capacity of the RAM tier, MinRAMBytes…MaxRAMBytes; 0 is DefaultRAMBytes.
	RAMBytes int64
	// DiskBytes bounds the page payloads on disk, in allocated bytes; 0 is unbounded.
	DiskBytes int64
	// WritePolicy says when pages are written.
	WritePolicy WritePolicy
	// Codec is how pages are stored that are written from now on; 0 is CodecNone. What is on disk stays as it is, and is read whatever
	// this says.
	Codec Codec
	// AdmissionTimeout bounds how long a publication or a restore waits for room, whatever the deadline of its context;
	// 0 is DefaultAdmissionTimeout.
	AdmissionTimeout time.Duration
	// LoadTimeout bounds how long a restore waits for pages to be read, room for them included; 0 is DefaultLoadTimeout.
	LoadTimeout time.Duration
	// LeaseTimeout bounds how long a publication may take and a restoration may be held, in monotonic time; 0 is
	// DefaultLeaseTimeout. LookupOptions.Lease and PublishRequest.Lease say otherwise for one of them.
	LeaseTimeout time.Duration
	// SupersedeGrace is how long a superseded checkpoint that a later one went on from keeps its place in the order of
	// eviction; 0 is DefaultSupersedeGrace, less than 0 is none.
	SupersedeGrace time.Duration
	// SegmentBytes is the size at which a segment file is closed and the next one begun; 0 is DefaultSegmentBytes.
	SegmentBytes int64
	// ReplayBytes bounds the log that an open after a crash has to replay, a page in it counted as 512 bytes at least; 0 is
	// DefaultReplayBytes.
	ReplayBytes int64
	// OpenBudget is the time after which Open serves, 0 is DefaultOpenBudget. What it has not come to by then is settled in the
	// background, and is not listed until then. Opening the parts and replaying the log are always waited for; ReplayBytes
	// bounds them.
	OpenBudget time.Duration
	// OpenProgress is told how far Open has come, on its goroutine, and after it has returned on one in the background, until
	// StageComplete. It must not call the database. nil is nobody.
	OpenProgress func(OpenProgress)
	// ScrubBytesPerSecond is the rate at which page copies on disk are read and checked in the background, once a day; 0 is
	// not at all.
	ScrubBytesPerSecond int64
	// HistoryAge is how long it is remembered which checkpoints were retired and why, at most MaxHistory of them, for
	// Inspector.Why and for people; 0 is DefaultHistoryAge, less than 0 is not at all.
	HistoryAge time.Duration
	// Introspection serves a socket in the directory (SocketName, permissions 0600) through which the command line looks at
	// the database while it is in use. Nothing can be changed through it. A directory in which a socket cannot be made is
	// a warning and no error.
	Introspection bool
	// ReadOnly opens a database that is there and changes nothing on disk, which may be read-only: what a crash left to be
	// replayed or retired is so in memory only. Several handles may be open like that, and none beside a writer. What would
	// change the database is ErrReadOnly.
	ReadOnly bool
	// Engine copies between pages and device memory for Publication.FillFromDevice and Restoration.CopyToDevice; nil is none. If
	// it copies from and to pinned memory only, as the CUDA backend does, the RAM tier is page-locked piece by piece as it
	// grows, and a page-lock that fails counts as no room. The engine stays the caller's, who closes it after the database.
	Engine *gpu.Engine
	// Faults makes the payload files misbehave; nil, as it should be but for tests, is none.
	Faults *Faults
	// Storage is the file system under the database; nil is the operating system's. It is for tests of the database itself.
	Storage *Storage
	// Logger receives what an operator should see; nil is slog.Default().
	Logger *slog.Logger
	// MeterProvider and TracerProvider take metrics and spans; nil is the global one.
	MeterProvider  metric.MeterProvider
	TracerProvider trace.TracerProvider

	// The file systems of log and segments; nil is the operating system's. Tests inject faults here.
	walFS     wal.FS
	segmentFS segment.FS
	storage   Storage // Storage, with what it leaves out
	// holdProof, if it is there, keeps the background from settling what Open left until it is closed.
	holdProof <-chan struct{}
}

// Defaults and limits of Options.
const (
	DefaultRAMBytes         = 1 << 30
	MinRAMBytes             = 64 << 10
	MaxRAMBytes             = 1 << 44
	DefaultAdmissionTimeout = 8 * time.Second
	DefaultLoadTimeout      = 30 * time.Second
	DefaultLeaseTimeout     = 10 * time.Minute
	DefaultSupersedeGrace   = 300 * time.Second
	DefaultSegmentBytes     = 256 << 20
	DefaultReplayBytes      = 16 << 20
	DefaultOpenBudget       = 2 * time.Second
	MaxOpenBudget           = 24 * time.Hour
	DefaultHistoryAge       = 24 * time.Hour
	MaxHistoryAge           = 366 * 24 * time.Hour
)

func (o Options) withDefaults() (Options, error) {
	set := func(v *int64, d int64) {
		if *v == 0 {
			*v = d
		}
	}
	set(&o.RAMBytes, DefaultRAMBytes)
	set(&o.SegmentBytes, DefaultSegmentBytes)
	set(&o.ReplayBytes, DefaultReplayBytes)
	if o.Codec == 0 {
		o.Codec = CodecNone
	}
	if int(o.Codec) >= len(codecs) {
		return o, fmt.Errorf("db: Options.Codec is %d: want %d (none) or %d (zstd): %w", o.Codec, CodecNone, CodecZstd, ErrInvalid)
	}
	if o.AdmissionTimeout == 0 {
		o.AdmissionTimeout = DefaultAdmissionTimeout
	}
	if o.LoadTimeout == 0 {
		o.LoadTimeout = DefaultLoadTimeout
	}
	if o.OpenBudget == 0 {
		o.OpenBudget = DefaultOpenBudget
	}
	if o.SupersedeGrace == 0 {
		o.SupersedeGrace = DefaultSupersedeGrace
	}
	o.SupersedeGrace = max(o.SupersedeGrace, 0)
	if o.HistoryAge == 0 {
		o.HistoryAge = DefaultHistoryAge
	}
	o.HistoryAge = max(o.HistoryAge, 0)
	if o.LeaseTimeout == 0 {
		o.LeaseTimeout = DefaultLeaseTimeout
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	for _, c := range []struct {
		field         string
		value, lo, hi int64
	}{
		{"Options.RAMBytes", o.RAMBytes, MinRAMBytes, MaxRAMBytes},
		{"Options.DiskBytes", o.DiskBytes, 0, 1 << 60},
		{"Options.SegmentBytes", o.SegmentBytes, 1 << 20, 1 << 40},
		{"Options.ScrubBytesPerSecond", o.ScrubBytesPerSecond, 0, 1 << 50},
		{"Options.ReplayBytes", o.ReplayBytes, 64 << 10, 1 << 32},
		{"Options.OpenBudget", int64(o.OpenBudget), 1, int64(MaxOpenBudget)},
		{"Options.AdmissionTimeout", int64(o.AdmissionTimeout), 1, int64(time.Hour)},
		{"Options.LoadTimeout", int64(o.LoadTimeout), 1, int64(time.Hour)},
		{"Options.HistoryAge", int64(o.HistoryAge), 0, int64(MaxHistoryAge)},
		{"Options.LeaseTimeout", int64(o.LeaseTimeout), 1, int64(MaxLease)},
	} {
		if err := checkNumber(c.field, c.value, c.lo, c.hi); err != nil {
			return o, err
		}
	}
	if o.Storage != nil {
		o.storage = *o.Storage
	}
	if o.storage.Directory == nil {
		o.storage.Directory = osDirectory{}
	}
	if o.walFS == nil {
		o.walFS = o.storage.Log
	}
	if o.segmentFS == nil {
		o.segmentFS = o.storage.Segments
	}
	if err := o.Faults.validate(); err != nil {
		return o, err
	}
	if o.Faults != nil {
		below := o.segmentFS
		if below == nil {
			below = segment.OS()
		}
		o.segmentFS = newFaultyFS(below, *o.Faults)
	}
	if int(o.WritePolicy) >= len(writePolicies) {
		return o, fmt.Errorf("db: Options.WritePolicy is %d: want 0…%d: %w", o.WritePolicy, len(writePolicies)-1, ErrInvalid)
	}
	return o, nil
}
