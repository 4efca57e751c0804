package db

import (
	"context"
	"time"

	"github.com/holdfast-db/holdfast/txn"
)

// Inspector answers questions about a database and changes nothing. DB.Inspector gives one for an open database; Inspect gives one
// for a directory, whether a process has it open or not. Every answer is of one moment, and bounded: lists have a limit, and
// say where to go on.
//
// Errors: ErrInvalid, ErrTooLarge, ErrNotFound for the question; ErrBusy if the context ended, or a process has too many questions
// to answer; ErrClosed; ErrCorrupt, ErrIO for what cannot be read.
type Inspector interface {
	// Overview says what database it is, who has it open and how, and gives all counters and gauges.
	Overview(ctx context.Context) (*Overview, error)
	// Namespaces lists the namespaces that a publication has named.
	Namespaces(ctx context.Context) ([]NamespaceInfo, error)
	// List lists checkpoints, listed and retired ones, in the order of their generations.
	List(ctx context.Context, q ListQuery) (*CheckpointList, error)
	// Resolve gives the generations that begin with some hex digits, at least 4 of them: those in the catalogue, those being
	// published and those of the history. At most MaxResolved.
	Resolve(ctx context.Context, hex string) ([]Generation, error)
	// Manifest describes one checkpoint with its pages and where each copy of them is.
	Manifest(ctx context.Context, q ManifestQuery) (*ManifestInfo, error)
	// Log describes the log and decodes records of it.
	Log(ctx context.Context, q LogQuery) (*LogInfo, error)
	// Segments describes the segment files, and maps what is alive in them.
	Segments(ctx context.Context, q SegmentQuery) (*SegmentMap, error)
	// Index describes the index.
	Index(ctx context.Context, q IndexQuery) (*IndexInfo, error)
	// Leases lists owners, publications that have begun and restorations that are held.
	Leases(ctx context.Context) (*LeaseList, error)
	// Activity gives the last events and the latencies of the process that has the database open.
	Activity(ctx context.Context) (*Activity, error)
	// History lists retirements, the youngest first, and samples of how full the database was.
	History(ctx context.Context, q HistoryQuery) (*HistoryInfo, error)
	// Why explains why a sequence is a hit, a shorter hit or a miss, or what became of a generation.
	Why(ctx context.Context, q WhyQuery) (*Explanation, error)
}

// Limits of an Inspector.
const (
	// MaxInspectList bounds the entries of one answer: checkpoints, pages, records, retirements, samples, segments.
	MaxInspectList = 1 << 14
	// MaxInspectScan bounds the checkpoints that one List looks at.
	MaxInspectScan = 1 << 16
	// MaxSegmentCells bounds the cells that a segment is mapped to.
	MaxSegmentCells = 256
	// MaxResolved bounds the generations that Resolve gives.
	MaxResolved = 16
	// MaxWhyTokens bounds the tokens of a WhyQuery.
	MaxWhyTokens = 1 << 21
	// MaxCauses bounds the causes of an Explanation.
	MaxCauses = 64
)

// limited gives how many entries a question asks for.
func limited(field string, n, preset int) (int, error) {
	if n == 0 {
		return preset, nil
	}
	return n, checkNumber(field, int64(n), 1, MaxInspectList)
}

// Overview describes a database and the handle that answered.
type Overview struct {
	Directory   string         `json:"directory"`
	ID          string         `json:"id"`
	Epoch       uint64         `json:"epoch"` // of the marker: read-write opens so far
	Format      int            `json:"format"`
	ReadOnly    bool           `json:"read_only"`
	PID         int            `json:"pid"`
	Opened      time.Time      `json:"opened"`
	At          time.Time      `json:"at"` // of the answer
	Settings    Settings       `json:"settings"`
	Recovered   RecoveryReport `json:"recovered"`
	Durable     bool           `json:"durable"` // what is published survives a restart without asking for it, at the latest with Close
	Stats       Stats          `json:"stats"`
	Scrubbed    *ScrubReport   `json:"scrubbed,omitempty"`
	HistoryFrom time.Time      `json:"history_from,omitzero"` // retirements before are forgotten
	LogError    string         `json:"log_error,omitempty"`   // what stopped the log: nothing is acknowledged any more
}

// Settings are the options that a database is open with, and the limits of the handle.
type Settings struct {
	WritePolicy      string        `json:"write_policy"`
	RAMBytes         int64         `json:"ram_bytes"`
	DiskBytes        int64         `json:"disk_bytes"` // 0: unbounded
	SegmentBytes     int64         `json:"segment_bytes"`
	ReplayBytes      int64         `json:"replay_bytes"`
	ScrubBytes       int64         `json:"scrub_bytes_per_second"`
	AdmissionTimeout time.Duration `json:"admission_timeout_ns"`
	LoadTimeout      time.Duration `json:"load_timeout_ns"`
	LeaseTimeout     time.Duration `json:"lease_timeout_ns"`
	SupersedeGrace   time.Duration `json:"supersede_grace_ns"`
	HistoryAge       time.Duration `json:"history_age_ns"`
	PublicationsMax  int           `json:"publications_max"`
	LeasesMax        int           `json:"leases_max"`
	OwnersMax        int           `json:"owners_max"`
	QuarantinedMax   int           `json:"quarantined_max"`
	Introspection    bool          `json:"introspection"`
}

// NamespaceInfo describes a namespace and what is in it.
type NamespaceInfo struct {
	ID          txn.Key  `json:"id"`
	Identity    Identity `json:"identity"`
	Listed      int64    `json:"listed"`
	Superseded  int64    `json:"superseded"` // of the listed ones
	Retired     int64    `json:"retired"`    // and not deleted
	Tokens      int64    `json:"tokens"`     // of the longest listed checkpoint
	SharedBytes int64    `json:"bytes_with_shared"`
}

// CheckpointInfo describes a checkpoint.
type CheckpointInfo struct {
	Generation   Generation `json:"generation"`
	Namespace    txn.Key    `json:"namespace"`
	State        string     `json:"state"` // current, superseded or retired
	Tier         string     `json:"tier"`  // ram, disk or both: where the pages are that the manifest names itself; none if they are spread
	Offset       int64      `json:"offset"`
	Kind         string     `json:"kind"`
	Request      string     `json:"request,omitempty"`
	Continues    Generation `json:"continues,omitzero"`
	Previous     Generation `json:"previous,omitzero"` // the longest listed proper prefix when it was published
	SupersededBy Generation `json:"superseded_by,omitzero"`
	Ranks        int        `json:"ranks"`
	Pages        int64      `json:"pages"` // of one rank
	Bytes        int64      `json:"bytes"` // logical, all ranks, shared pages included
	MetaBytes    int        `json:"meta_bytes"`
	Durable      bool       `json:"durable"`
	Grace        bool       `json:"grace,omitempty"`
	Continued    bool       `json:"continued,omitempty"`
	Published    txn.LSN    `json:"published"`
	Used         txn.LSN    `json:"used"`
	After        time.Time  `json:"published_after,omitzero"` // it was published between these two times
	Before       time.Time  `json:"published_before,omitzero"`
}

// ListQuery chooses checkpoints. The zero value is all of them.
type ListQuery struct {
	Namespace txn.Key       `json:"namespace,omitzero"`
	State     string        `json:"state,omitempty"` // current, superseded, listed, retired or undurable
	Tier      string        `json:"tier,omitempty"`  // ram, disk or both
	Request   string        `json:"request,omitempty"`
	MinBytes  int64         `json:"min_bytes,omitempty"`
	MaxBytes  int64         `json:"max_bytes,omitempty"`
	Older     time.Duration `json:"older_ns,omitempty"` // published at least so long ago
	Newer     time.Duration `json:"newer_ns,omitempty"` // published at most so long ago
	After     Generation    `json:"after,omitzero"`     // go on behind this one
	Limit     int           `json:"limit,omitempty"`    // 0: 1,000
}

// CheckpointList is an answer to a ListQuery.
type CheckpointList struct {
	Checkpoints []CheckpointInfo `json:"checkpoints"`
	Next        Generation       `json:"next,omitzero"` // ListQuery.After for the rest, zero if there is none
}

// ManifestQuery chooses a checkpoint and which of its pages are wanted.
type ManifestQuery struct {
	Generation Generation `json:"generation"`
	First      int64      `json:"first,omitempty"` // pages, counted over all groups of one rank, to be passed over
	Limit      int        `json:"limit,omitempty"` // 0: 1,000
}

// ManifestInfo describes a checkpoint in full.
type ManifestInfo struct {
	CheckpointInfo
	Prefix txn.Key     `json:"prefix"`
	Meta   []byte      `json:"meta,omitempty"`
	Groups []GroupInfo `json:"groups"`
	Pages  []PageInfo  `json:"page_list"`
	Next   int64       `json:"next,omitempty"` // ManifestQuery.First for the rest, 0 if there is none
}

// GroupInfo describes a group of a checkpoint.
type GroupInfo struct {
	Name       string `json:"name"`
	Kind       string `json:"kind"`
	Chained    bool   `json:"chained"` // named by its last page
	PageBytes  int64  `json:"page_bytes"`
	PageTokens int64  `json:"page_tokens,omitempty"`
	Pages      int64  `json:"pages"` // of one rank
}

// PageInfo says where the copies of one page are.
type PageInfo struct {
	Group       string          `json:"group"`
	Position    int64           `json:"position"`
	Key         txn.Key         `json:"key"`
	Bytes       int64           `json:"bytes"`
	RAM         string          `json:"ram,omitempty"` // clean, dirty, filling, loading or writing; empty if it is not there
	Pins        int             `json:"pins,omitempty"`
	Quarantined bool            `json:"quarantined,omitempty"` // turned out bad
	Needed      int64           `json:"needed"`                // ways to listed checkpoints that need it
	Disk        []PlacementInfo `json:"disk,omitempty"`        // one for every rank
}

// PlacementInfo says where a page copy lies on disk.
type PlacementInfo struct {
	Rank     int    `json:"rank"`
	Segment  uint64 `json:"segment"`
	Offset   int64  `json:"offset"`
	Stored   int64  `json:"stored"`
	Codec    string `json:"codec"`
	Checksum string `json:"checksum"`
}

// LogQuery chooses records of the log.
type LogQuery struct {
	From  txn.LSN `json:"from,omitempty"`  // 0: the last Limit ones
	Limit int     `json:"limit,omitempty"` // 0: 100; negative: none
}

// LogInfo describes the log.
type LogInfo struct {
	Files   []LogFile   `json:"files"`
	Bytes   int64       `json:"bytes"`
	First   txn.LSN     `json:"first"` // held
	Next    txn.LSN     `json:"next"`  // of the next record
	Synced  txn.LSN     `json:"synced"`
	Applied txn.LSN     `json:"applied"` // in the index
	Durable txn.LSN     `json:"durable"` // in the index after a crash: replay begins behind it
	Cut     int64       `json:"cut"`     // bytes of a torn end that open cut off
	Records []LogRecord `json:"records"`
}

// LogFile is one file of the log.
type LogFile struct {
	Path  string  `json:"path"`
	First txn.LSN `json:"first"`
	Last  txn.LSN `json:"last"`
	Bytes int64   `json:"bytes"`
}

// LogRecord is one record, decoded.
type LogRecord struct {
	LSN         txn.LSN      `json:"lsn"`
	Kind        string       `json:"kind"`
	Bytes       int          `json:"bytes"`
	Generations []Generation `json:"generations,omitempty"` // at most 16; Count says how many
	Count       int          `json:"count"`                 // generations, or pages of a persist
	Detail      string       `json:"detail"`
	After       time.Time    `json:"after,omitzero"` // it was made between these two times
	Before      time.Time    `json:"before,omitzero"`
}

// SegmentQuery says how segments are described.
type SegmentQuery struct {
	Cells int `json:"cells,omitempty"` // map each to so many cells, at most MaxSegmentCells; 0 is no map, which reads no page entry
}

// SegmentMap describes the segment files.
type SegmentMap struct {
	Segments []SegmentInfo `json:"segments"`
	Omitted  int           `json:"omitted,omitempty"` // beyond MaxInspectList
}

// SegmentInfo describes a segment file. What is neither alive nor free is dead: headers, descriptors, and pages that nothing needs
// and whose space was not given back yet.
type SegmentInfo struct {
	Number    uint64 `json:"number"`
	Class     string `json:"class"` // shared, own or loose; unknown if the header of the file cannot be read
	Size      int64  `json:"size"`
	Sealed    bool   `json:"sealed"`
	LivePages int64  `json:"live_copies"` // every rank's counted
	Live      int64  `json:"live_bytes"`
	Dead      int64  `json:"dead_bytes"`
	Free      int64  `json:"free_bytes"` // given back to the file system
	// Map has one cell for every equal part of the file, as a digit each: 0…9 is how much of it is alive, '.' is a part that was
	// given back.
	Map string `json:"map,omitempty"`
}

// IndexQuery says how the index is described.
type IndexQuery struct {
	Count bool `json:"count,omitempty"` // count the entries, which reads all of them
}

// IndexInfo describes the index.
type IndexInfo struct {
	DiskBytes     int64            `json:"disk_bytes"`
	MemTableBytes int64            `json:"mem_table_bytes"`
	CacheBytes    int64            `json:"cache_bytes"`
	CacheHits     int64            `json:"cache_hits"`
	CacheMisses   int64            `json:"cache_misses"`
	Levels        []IndexLevel     `json:"levels"`
	Applied       txn.LSN          `json:"applied"`
	Durable       txn.LSN          `json:"durable"`
	Entries       map[string]int64 `json:"entries,omitempty"`
}

// IndexLevel is one level of the tree on disk.
type IndexLevel struct {
	Files int64 `json:"files"`
	Bytes int64 `json:"bytes"`
}

// LeaseList lists who holds what.
type LeaseList struct {
	Owners []OwnerInfo `json:"owners"`
	Leases []LeaseInfo `json:"leases"` // the oldest first
}

// OwnerInfo describes an owner that is registered.
type OwnerInfo struct {
	Name string        `json:"name"`
	TTL  time.Duration `json:"ttl_ns"`
	Held int           `json:"held"`
}

// LeaseInfo describes something that is held.
type LeaseInfo struct {
	Owner      string     `json:"owner,omitempty"` // empty: the process itself
	Kind       string     `json:"kind"`            // publication, restoration or loose pages
	Generation Generation `json:"generation,omitzero"`
	Namespace  txn.Key    `json:"namespace,omitzero"`
	Offset     int64      `json:"offset,omitempty"`
	Pages      int        `json:"pages"`
	Bytes      int64      `json:"bytes"` // logical, all ranks
	Began      time.Time  `json:"began"`
	Until      time.Time  `json:"until"`
}

// HistoryQuery chooses what of the history is wanted.
type HistoryQuery struct {
	Namespace txn.Key `json:"namespace,omitzero"`
	Limit     int     `json:"limit,omitempty"`   // retirements; 0: 100; negative: none
	Samples   int     `json:"samples,omitempty"` // 0: none; the samples are spread over the time that is known
}

// HistoryInfo is what is remembered.
type HistoryInfo struct {
	Retirements []Retirement     `json:"retirements"`
	Reasons     map[string]int64 `json:"reasons"` // retirements that are remembered, by reason, over all namespaces
	Samples     []Sample         `json:"samples,omitempty"`
	From        time.Time        `json:"from,omitzero"` // retirements before are forgotten
}

// Activity is what happened in the process that has the database open.
type Activity struct {
	Events    []EventInfo   `json:"events"`    // the last ones, the oldest first
	Latencies []LatencyInfo `json:"latencies"` // of operations that happened
}

// EventInfo is one event.
type EventInfo struct {
	LSN        txn.LSN    `json:"lsn"`
	At         time.Time  `json:"at,omitzero"`
	Kind       string     `json:"kind"`
	Generation Generation `json:"generation,omitzero"`
	Reason     string     `json:"reason,omitempty"`
	By         Generation `json:"by,omitzero"`
	Offset     int64      `json:"offset,omitempty"`
	Request    string     `json:"request,omitempty"`
	Pages      int64      `json:"pages,omitempty"`
	NewPages   int64      `json:"new_pages,omitempty"`
	Bytes      int64      `json:"bytes,omitempty"`
}

// LatencyInfo is how long one kind of operation took.
type LatencyInfo struct {
	Operation string              `json:"operation"`
	Count     int64               `json:"count"`
	Sum       time.Duration       `json:"sum_ns"`
	P50       time.Duration       `json:"p50_ns"`
	P99       time.Duration       `json:"p99_ns"`
	Max       time.Duration       `json:"max_ns"`
	Buckets   []LatencyBucketInfo `json:"buckets"` // those that are not empty, the shortest first
}

// LatencyBucketInfo counts the operations that took less than a bound and not less than that of the bucket before.
type LatencyBucketInfo struct {
	Below time.Duration `json:"below_ns"`
	Count int64         `json:"count"`
}
