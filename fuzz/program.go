package fuzz

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"time"

	"github.com/holdfast-db/holdfast/db"
)

// Program is a history as data: what is done to a database, in order. The same program gives the same history, so it is what a
// violation is reported as, what is made smaller, and what is run again.
type Program struct {
	Seed    uint64 `json:"seed"` // of the order in which waiting calls get their turns, and of the number of a generated program
	Policy  string `json:"policy"`
	RAM     int64  `json:"ram"`
	Disk    int64  `json:"disk,omitempty"`
	Replay  int64  `json:"replay"`
	Direct  bool   `json:"direct,omitempty"`
	Grace   int64  `json:"grace_ms,omitempty"`
	Steps   []Step `json:"steps"`
	Problem string `json:"problem,omitempty"` // the violation that it was reported for
}

// Step is one operation. What it does not use is zero; numbers that choose something count from the start again when they are
// too large, so that every program means something, whatever was taken out of it.
type Step struct {
	Do string `json:"do"` // one of Operations

	// What is published or looked up: the first Keep percent of an earlier sequence and More tokens that follow from Seed.
	Space int    `json:"space,omitempty"`
	From  int    `json:"from,omitempty"`
	Keep  int    `json:"keep,omitempty"`
	More  int    `json:"more,omitempty"`
	Seed  uint64 `json:"seed,omitempty"`

	Request string `json:"request,omitempty"`
	Kind    int    `json:"kind,omitempty"`
	Meta    int    `json:"meta,omitempty"` // bytes
	Durable bool   `json:"durable,omitempty"`

	N     int   `json:"n,omitempty"` // which checkpoint, publication, lease or page; or how much
	M     int   `json:"m,omitempty"`
	Bytes int64 `json:"bytes,omitempty"`

	// Of a crash: the calls of the disk until it happens, in this open and then in those that recover from it; and how many
	// images are made of that moment.
	In     []int `json:"in,omitempty"`
	Images int   `json:"images,omitempty"`

	Fault *Fault `json:"fault,omitempty"`
	Area  Area   `json:"area,omitempty"`
	Patch []byte `json:"patch,omitempty"` // the bytes that are written over file N of the area, from Bytes on, while nobody has it open
	End   bool   `json:"end,omitempty"`   // and they are the last of the file
}

// Operations are what a Step can do.
var Operations = []string{
	"publish", "begin", "commit", "abort", "cancel", "hold", "release", "retire", "delete", "supersede", "drop-ram", "set-ram", "set-disk",
	"clear", "scrub", "put-loose", "get-loose", "delete-loose", "sleep", "reopen", "crash", "kill", "fault", "flip", "patch", "read-only", "steal",
}

// weights say how often each operation is drawn.
var weights = map[string]int{
	"publish": 22, "begin": 4, "commit": 6, "abort": 1, "cancel": 2, "hold": 2, "release": 2, "retire": 3, "delete": 4, "supersede": 3, "drop-ram": 2,
	"set-ram": 1, "set-disk": 1, "clear": 1, "scrub": 1, "put-loose": 2, "get-loose": 2, "delete-loose": 1, "sleep": 2, "reopen": 2, "crash": 9, "kill": 3,
	"fault": 1, "flip": 0, "patch": 0, "read-only": 1, "steal": 1,
}

// Generate gives the program of a seed.
func Generate(seed uint64) *Program {
	rng := rand.New(rand.NewPCG(seed, 0x686f6c64))
	return generate(rng, seed, func() int { return 8 + rng.IntN(25) })
}

// FromBytes gives the program that bytes stand for: what Generate would draw is taken from them, 2 for each draw. So a fuzzer that
// changes some bytes changes some decisions. It has at most fromBytesSteps steps, and another crash.
func FromBytes(b []byte) *Program {
	rng := rand.New(&byteSource{rest: b, after: rand.NewPCG(0, 0)})
	return generate(rng, rng.Uint64()>>32, func() int { return 1 + rng.IntN(fromBytesSteps) })
}

const fromBytesSteps = 16

// FromImage gives a program that closes a small database and writes bytes over one of its files: the first byte chooses the file and whether the bytes
// end it, two more say where, the rest is what is written. Then the database is opened, used, and opened again.
func FromImage(b []byte) *Program {
	p := &Program{Policy: db.WriteThrough.String(), RAM: 32 << 20, Replay: 64 << 10, Grace: 1}
	for i := range 3 {
		p.Steps = append(p.Steps, Step{Do: "publish", Space: i % 2, Keep: 100, More: 40, Seed: uint64(i)})
	}
	patch := Step{Do: "patch", Area: Log}
	if len(b) > 3 {
		patch.Area, patch.End = []Area{Top, Log, Data, Index}[b[0]%4], b[0]&4 != 0
		patch.N, patch.Bytes, patch.Patch = int(b[0]>>3), int64(binary.LittleEndian.Uint16(b[1:])), b[3:]
	}
	p.Steps = append(p.Steps, patch, Step{Do: "publish", Keep: 50, More: 40, Seed: 9}, Step{Do: "scrub"}, Step{Do: "reopen"}, Step{Do: "read-only"})
	return p
}

// byteSource gives the numbers that bytes hold, and then those of another source.
type byteSource struct {
	rest  []byte
	after rand.Source
}

// Uint64 implements rand.Source.
func (s *byteSource) Uint64() uint64 {
	if len(s.rest) == 0 {
		return s.after.Uint64()
	}
	var b [8]byte // the first bits are those that small numbers are drawn from
	n := copy(b[:2], s.rest)
	s.rest = s.rest[n:]
	return binary.BigEndian.Uint64(b[:])
}

func generate(rng *rand.Rand, seed uint64, steps func() int) *Program {
	p := &Program{Seed: seed, RAM: 32 << 20, Replay: 64 << 10, Direct: rng.IntN(2) == 0}
	p.Policy = []db.WritePolicy{db.WriteThrough, db.OnEvict, db.OnReuse, db.Never}[[]int{0, 0, 0, 1, 1, 2, 3}[rng.IntN(7)]].String()
	if rng.IntN(3) == 0 {
		p.RAM = 1 << 20
	}
	if rng.IntN(3) == 0 {
		p.Disk = 1 << 20
	}
	if rng.IntN(2) == 0 {
		p.Grace = 1000
	}
	w := map[string]int{}
	for op, n := range weights {
		w[op] = n
	}
	if rng.IntN(3) == 0 { // damage and faults have programs of their own, because less can be expected of what comes after them
		w["fault"] = 6
	}
	if rng.IntN(8) == 0 {
		w["flip"] = 3
	}
	total := 0
	for _, op := range Operations {
		total += w[op]
	}
	for range steps() {
		x := rng.IntN(total)
		for _, op := range Operations {
			if x -= w[op]; x < 0 {
				p.Steps = append(p.Steps, generateStep(rng, op, p.Disk > 0))
				break
			}
		}
	}
	p.Steps = append(p.Steps, generateStep(rng, "crash", false))
	if rng.IntN(6) == 0 { // loose pages whose entries are durable, and whose deletion is not yet
		put := Step{Do: "put-loose", N: 3 + rng.IntN(3), M: 3}
		forget := []Step{put, {Do: "reopen"}, generateStep(rng, "crash", false), {Do: "delete-loose", N: put.N + rng.IntN(put.M)}, generateStep(rng, "publish", false)}
		p.Steps = slices.Insert(p.Steps, rng.IntN(len(p.Steps)), forget...)
	}
	if rng.IntN(6) == 0 { // much log, so that directories of it are cut
		if rng.IntN(2) == 0 { // and some that begin and end while the index is flushed: it is late, and then the process dies
			late := []Step{{Do: "fault", Fault: &Fault{Area: Index, Kind: "slow", Ever: true, Delay: time.Second}}}
			for range 3 + rng.IntN(4) {
				late = append(late, generateStep(rng, "publish", false))
			}
			late = append(late, Step{Do: "sleep", Bytes: int64(time.Minute)}, generateStep(rng, "publish", false), generateStep(rng, "crash", false))
			p.Steps = slices.Insert(p.Steps, rng.IntN(len(p.Steps)), late...)
		}
		for i := range p.Steps {
			if s := &p.Steps[i]; s.Do == "publish" || s.Do == "begin" {
				s.Meta = 8000 + rng.IntN(db.MaxMetaBytes-8000)
			}
		}
	}
	return p
}

func generateStep(rng *rand.Rand, op string, budget bool) Step {
	s := Step{Do: op}
	switch op {
	case "publish", "begin", "cancel", "hold":
		s.Space = []int{0, 0, 0, 1, 1, 2}[rng.IntN(6)]
		s.From, s.Seed = rng.IntN(16), rng.Uint64()>>32
		if rng.IntN(4) > 0 {
			s.Keep = []int{100, 100, 100, 50, 25, rng.IntN(101)}[rng.IntN(6)]
		}
		if s.Keep < 100 || rng.IntN(6) > 0 {
			s.More = 1 + rng.IntN(60)
		}
		if rng.IntN(3) == 0 {
			s.Request = []string{"r1", "r2"}[rng.IntN(2)]
		}
		if rng.IntN(4) == 0 {
			s.Kind = rng.IntN(5)
		}
		if rng.IntN(5) == 0 {
			s.Meta = 1 + rng.IntN(12000)
		}
		s.Durable, s.N = rng.IntN(3) == 0, rng.IntN(12)
	case "commit", "abort", "release", "retire", "delete", "supersede", "get-loose", "delete-loose":
		s.N, s.M = rng.IntN(16), rng.IntN(16)
	case "put-loose":
		s.N, s.M, s.Bytes = rng.IntN(8), 1+rng.IntN(3), int64(1+rng.IntN(9000))
	case "drop-ram":
		s.N = max(0, rng.IntN(12)-5)
	case "set-ram":
		s.Bytes = []int64{1 << 20, 32 << 20}[rng.IntN(2)]
	case "set-disk":
		if !budget {
			s.Do = "drop-ram"
			return s
		}
		s.Bytes = []int64{512 << 10, 1 << 20, 2 << 20}[rng.IntN(3)]
	case "clear":
		s.Space = rng.IntN(4)
	case "sleep":
		s.Bytes = int64([]time.Duration{time.Millisecond, 2 * time.Second, 11 * time.Minute}[rng.IntN(3)])
	case "crash", "kill":
		s.Seed, s.Images = rng.Uint64()>>32, 1+rng.IntN(4)
		s.In = []int{rng.IntN([]int{10, 60, 250}[rng.IntN(3)])}
		for rng.IntN(3) == 0 {
			s.In = append(s.In, rng.IntN(40))
		}
		if s.Do == "kill" {
			s.Images = 1
		}
	case "fault":
		s.Fault = &Fault{
			Area: []Area{Log, Log, Data, Data, Data, Index, Top}[rng.IntN(7)], After: rng.IntN(20), Kind: FaultKinds[rng.IntN(len(FaultKinds))],
			Ever: rng.IntN(3) == 0, Delay: []time.Duration{time.Millisecond, time.Second, 30 * time.Second}[rng.IntN(3)],
		}
	case "flip":
		s.Area = []Area{Data, Data, Data, Data, Log, Index}[rng.IntN(6)]
		s.N, s.Bytes = rng.IntN(16), rng.Int64N(1<<40)
	}
	return s
}

// ReadProgram reads a program from a file.
func ReadProgram(path string) (*Program, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return ParseProgram(b)
}

// ParseProgram reads the JSON of a program and refuses what no run could mean.
func ParseProgram(b []byte) (*Program, error) {
	p := new(Program)
	if err := json.Unmarshal(b, p); err != nil {
		return nil, fmt.Errorf("fuzz: not a program: %w", err)
	}
	if _, err := db.ParseWritePolicy(p.Policy); err != nil {
		return nil, err
	}
	if len(p.Steps) > 10000 {
		return nil, fmt.Errorf("fuzz: program of %d steps, at most 10000", len(p.Steps))
	}
	for i, s := range p.Steps {
		if _, ok := weights[s.Do]; !ok {
			return nil, fmt.Errorf("fuzz: step %d: there is no operation %q", i, s.Do)
		}
		if s.Keep < 0 || s.Keep > 100 || s.More < 0 || s.More > 4096 || s.Meta < 0 || s.Meta > db.MaxMetaBytes || s.Bytes < 0 || s.N < 0 || s.M < 0 ||
			s.Space < 0 || s.From < 0 || s.Images < 0 || s.Images > 64 || len(s.In) > 16 || s.Do == "fault" && s.Fault == nil || len(s.Patch) > 1<<20 {
			return nil, fmt.Errorf("fuzz: step %d: a number is out of range", i)
		}
	}
	return p, nil
}

// JSON gives the program as a file holds it.
func (p *Program) JSON() []byte {
	b, err := json.MarshalIndent(p, "", " ")
	if err != nil {
		panic(err) // plain data
	}
	return append(b, '\n')
}
