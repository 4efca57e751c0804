package fuzz

import (
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Disk is a simulated file system that knows, of everything done to it, what a power failure may take back.
//
// A file has bytes that are durable and a list of effects since: a block written, a size changed. A directory has names that
// are durable and a list of effects since: a name added, removed, or both at once for a rename. A sync of a file makes its
// effects durable, a sync of a directory those of its names, and neither does anything for the other, which is all
// that POSIX promises. When the power fails, any subset of the effects is kept. Of what is kept last of a file, sectors
// may be missing or hold rubbish, as far as they were written since the last sync.
//
// After a sync that failed the blocks are as a page cache shows them, but no later sync writes them: only writing them again does.
//
// Whatever goes through one of the file systems over a Disk (storage.go) and changes it is counted, asks the scheduler for its
// turn, and may meet a fault. All methods are safe for concurrent use.
type Disk struct {
	Schedule *Scheduler // nil: whoever comes first
	// Buffered refuses direct I/O.
	Buffered bool
	// Before, if set, is called before every change, with the disk standing still.
	Before func(d *Disk, c Call)

	mu     sync.Mutex
	root   *node
	calls  int
	faults []*Fault
	fired  []string
	locks  map[string]bool
	digest uint64 // of all calls so far, in order
	ended  bool   // nothing is counted, scheduled or refused any more
}

// trace gets what happens, if it is set.
var trace io.Writer

// Area is a part of a database directory, as faults tell them apart.
type Area string

// The areas.
const (
	Top   Area = "top" // marker and lock
	Log   Area = "log"
	Index Area = "index"
	Data  Area = "data"
)

// areaOf tells by the path, which is /d or under it.
func areaOf(p string) Area {
	switch part, _, _ := strings.Cut(strings.TrimPrefix(p, Root+"/"), "/"); part {
	case "wal":
		return Log
	case "index":
		return Index
	case "data":
		return Data
	}
	return Top
}

// Root is the path of the database on every Disk.
const Root = "/d"

// Call is one change that is asked of a Disk.
type Call struct {
	Op   string // write, sync, truncate, punch, reserve, create, remove, rename, mkdir, syncdir
	Path string
	Size int64
}

func (c Call) String() string { return fmt.Sprintf("%s %s %d", c.Op, c.Path, c.Size) }

const (
	blockBytes  = 4096
	sectorBytes = 512
)

type block [blockBytes]byte // never changed once it is in a file; nil reads as zeros

// node is a file or a directory.
type node struct {
	dir bool

	blocks, durable   []*block
	size, durableSize int64
	reserved          int64 // end of the blocks that were reserved
	pending           []effect

	names, durableNames map[string]*node
	pendingNames        []nameEffect
}

// effect is a change of a file that is not durable yet.
type effect struct {
	block    int // -1: a change of size
	data     *block
	from, to int // bytes of the block that were written
	size     int64
	lost     bool // a sync of it failed: a later one does not write it
}

// nameEffect is a change of a directory that is not durable yet. Its parts happen together or not at all.
type nameEffect []struct {
	name string
	to   *node // nil: removed
}

func newDir() *node {
	return &node{dir: true, names: map[string]*node{}, durableNames: map[string]*node{}}
}

// NewDisk gives an empty disk.
func NewDisk() *Disk { return &Disk{root: newDir(), locks: map[string]bool{}} }

// Fault makes calls go wrong.
type Fault struct {
	Area  Area          `json:"area"`
	After int           `json:"after"` // calls of the kinds concerned that go well before
	Kind  string        `json:"kind"`  // one of FaultKinds
	Ever  bool          `json:"ever,omitempty"`
	Delay time.Duration `json:"delay,omitempty"` // of slow
}

// FaultKinds are the kinds of Fault: a call fails, for want of space, or after half of a write; a sync fails and loses what it
// should have written; a read fails; a call takes its time.
var FaultKinds = []string{"eio", "enospc", "short", "lost-sync", "read", "slow"}

func (f *Fault) concerns(op, p string) bool {
	switch f.Kind {
	case "short":
		return op == "write"
	case "lost-sync":
		return op == "sync"
	case "read":
		return op == "read"
	case "enospc":
		return op == "write" || op == "create" || op == "reserve" || op == "mkdir"
	case "slow":
		// Pebble holds mutexes over other calls to its files, and time stands still while somebody waits for a mutex.
		return f.Area != Index || path.Ext(p) == ".sst" && (op == "write" || op == "sync")
	}
	return op != "read"
}

// Inject arms faults, replacing those that are armed.
func (d *Disk) Inject(f ...*Fault) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.faults = f
}

// Fired gives the faults that have happened.
func (d *Disk) Fired() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.fired)
}

// Calls is the number of changes so far.
func (d *Disk) Calls() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.calls
}

// Trace is a digest of all changes so far, in their order.
func (d *Disk) Trace() uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.digest
}

// End lets everything through from now on: what becomes of this disk is of no interest any more.
func (d *Disk) End() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ended, d.faults, d.Before = true, nil, nil
}

func pathError(op, p string, err error) error { return &fs.PathError{Op: op, Path: p, Err: err} }

// change counts a call, waits for its turn, and carries it out unless a fault says otherwise. With part, a write happens by half.
func (d *Disk) change(c Call, do func() error) error {
	// Pebble holds mutexes over calls that its other goroutines want, so what it does happens at once, before the next of the
	// others gets its turn. It removes files when it gets round to it, which depends on the clock of the machine: that is
	// no call that is counted, or that a crash may be set to.
	inIndex := areaOf(c.Path) == Index
	counted := !inIndex || c.Op != "remove"
	if s := d.Schedule; s != nil && !inIndex && !d.over() {
		s.turn(c)
	}
	d.mu.Lock()
	fault := d.strike(c.Op, c.Path)
	if counted && !d.ended {
		if d.Before != nil {
			d.Before(d, c)
		}
		d.calls++
		if trace != nil {
			fmt.Fprintln(trace, c)
		}
		for _, b := range []byte(c.Op + c.Path) {
			d.digest = (d.digest ^ uint64(b)) * 1099511628211
		}
		d.digest = (d.digest ^ uint64(c.Size)) * 1099511628211
	}
	d.mu.Unlock()
	if fault != nil {
		switch fault.Kind {
		case "slow":
			time.Sleep(fault.Delay)
		case "enospc":
			return pathError(c.Op, c.Path, syscall.ENOSPC)
		case "lost-sync":
			d.mu.Lock()
			if n := d.find(c.Path); n != nil {
				for i := range n.pending {
					n.pending[i].lost = n.pending[i].lost || n.pending[i].block >= 0
				}
			}
			d.mu.Unlock()
			return pathError(c.Op, c.Path, syscall.EIO)
		case "short": // the caller does half of it
			return errShort
		default:
			return pathError(c.Op, c.Path, syscall.EIO)
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return do()
}

var errShort = fmt.Errorf("half of it was written: %w", syscall.EIO)

func (d *Disk) over() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.ended
}

// strike gives the fault that a call meets. With d.mu.
func (d *Disk) strike(op, p string) *Fault {
	for _, f := range d.faults {
		if f.Area != areaOf(p) || !f.concerns(op, p) {
			continue
		}
		if f.After > 0 {
			f.After--
			continue
		}
		if f.After < 0 && !f.Ever {
			continue
		}
		f.After = -1
		d.fired = append(d.fired, fmt.Sprintf("%s of %s %s", f.Kind, op, p))
		return f
	}
	return nil
}

// reading lets a read through or not.
func (d *Disk) reading(p string) error {
	d.mu.Lock()
	f := d.strike("read", p)
	d.mu.Unlock()
	if f == nil {
		return nil
	}
	if f.Kind == "slow" {
		time.Sleep(f.Delay)
		return nil
	}
	return pathError("read", p, syscall.EIO)
}

// find gives the node at a path, nil if there is none. With d.mu.
func (d *Disk) find(p string) *node {
	n := d.root
	for part := range strings.SplitSeq(strings.Trim(path.Clean(p), "/"), "/") {
		if part == "" {
			continue
		}
		if n == nil || !n.dir {
			return nil
		}
		n = n.names[part]
	}
	return n
}

func (d *Disk) parent(p string) (*node, string) { return d.find(path.Dir(p)), path.Base(p) }

// set changes names of a directory, together.
func (n *node) set(e nameEffect) {
	for _, s := range e {
		if s.to == nil {
			delete(n.names, s.name)
		} else {
			n.names[s.name] = s.to
		}
	}
	n.pendingNames = append(n.pendingNames, e)
}

func (n *node) link(name string, to *node) {
	n.set(nameEffect{{name, to}})
}

func (n *node) at(i int) *block {
	if i < len(n.blocks) && n.blocks[i] != nil {
		return n.blocks[i]
	}
	return nil
}

func grow(b []*block, n int) []*block {
	for len(b) < n {
		b = append(b, nil)
	}
	return b
}

// write puts bytes at an offset. With d.mu.
func (n *node) write(b []byte, off int64) {
	end := off + int64(len(b))
	for len(b) > 0 {
		i, in := int(off/blockBytes), int(off%blockBytes)
		k := min(len(b), blockBytes-in)
		fresh := new(block)
		if old := n.at(i); old != nil {
			*fresh = *old
		}
		copy(fresh[in:], b[:k])
		n.blocks = grow(n.blocks, i+1)
		n.blocks[i] = fresh
		n.pending = append(n.pending, effect{block: i, data: fresh, from: in, to: in + k})
		b, off = b[k:], off+int64(k)
	}
	if end > n.size {
		n.size = end
		n.pending = append(n.pending, effect{block: -1, size: end})
	}
}

// read fills b from an offset and gives how much there was. With d.mu.
func (n *node) read(b []byte, off int64) int {
	if off >= n.size {
		return 0
	}
	b = b[:min(int64(len(b)), n.size-off)]
	for done := 0; done < len(b); {
		i, in := int((off+int64(done))/blockBytes), int((off+int64(done))%blockBytes)
		k := min(len(b)-done, blockBytes-in)
		if from := n.at(i); from != nil {
			copy(b[done:done+k], from[in:])
		} else {
			clear(b[done : done+k])
		}
		done += k
	}
	return len(b)
}

// cut gives blocks and content of a file that is cut to a size.
func cut(blocks []*block, size int64) []*block {
	k := int((size + blockBytes - 1) / blockBytes)
	if len(blocks) > k {
		blocks = blocks[:k:k]
	}
	if in := size % blockBytes; in > 0 && k <= len(blocks) && k > 0 && blocks[k-1] != nil {
		last := *blocks[k-1]
		clear(last[in:])
		blocks = slices.Clone(blocks)
		blocks[k-1] = &last
	}
	return blocks
}

func (n *node) truncate(size int64) {
	n.blocks, n.size, n.reserved = cut(n.blocks, size), size, min(n.reserved, size)
	n.pending = append(n.pending, effect{block: -1, size: size})
}

func (n *node) punch(off, length int64) {
	for i := off / blockBytes; i < (off+length)/blockBytes; i++ {
		if int(i) < len(n.blocks) {
			n.blocks[i] = nil
			n.pending = append(n.pending, effect{block: int(i)})
		}
	}
}

// apply carries an effect out on blocks that are durable.
func (e *effect) apply(blocks []*block, size int64) ([]*block, int64) {
	if e.block < 0 {
		if e.size < size {
			blocks = cut(blocks, e.size)
		}
		return blocks, e.size
	}
	blocks = grow(blocks, e.block+1)
	blocks[e.block] = e.data
	return blocks, size
}

// sync makes the effects of a file durable, but for those that a failed sync has lost.
func (n *node) sync() {
	var left []effect
	written := map[int]bool{}
	for i := range n.pending {
		e := &n.pending[i]
		if e.lost {
			left = append(left, *e)
			continue
		}
		n.durable, n.durableSize = e.apply(n.durable, n.durableSize)
		if e.block >= 0 {
			written[e.block] = true
		}
	}
	n.pending = slices.DeleteFunc(left, func(e effect) bool { return written[e.block] })
}

func (n *node) syncNames() {
	n.durableNames, n.pendingNames = maps.Clone(n.names), nil
}

func (n *node) allocated() int64 {
	var k int64
	for _, b := range n.blocks {
		if b != nil {
			k += blockBytes
		}
	}
	return k + max(0, n.reserved-(n.size+blockBytes-1)/blockBytes*blockBytes)
}

// Clone copies the disk with everything that is not durable yet. Locks are not held in it, and no fault is armed.
func (d *Disk) Clone() *Disk {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.clone()
}

// clone is Clone with d.mu.
func (d *Disk) clone() *Disk {
	made := map[*node]*node{}
	var copyOf func(n *node) *node
	copyNames := func(m map[string]*node) map[string]*node {
		out := make(map[string]*node, len(m))
		for k, v := range m {
			out[k] = copyOf(v)
		}
		return out
	}
	copyOf = func(n *node) *node {
		if n == nil || made[n] != nil {
			return made[n]
		}
		c := &node{dir: n.dir, size: n.size, durableSize: n.durableSize, reserved: n.reserved}
		made[n] = c
		if n.dir {
			c.names, c.durableNames = copyNames(n.names), copyNames(n.durableNames)
			for _, e := range n.pendingNames {
				e = slices.Clone(e)
				for i := range e {
					e[i].to = copyOf(e[i].to)
				}
				c.pendingNames = append(c.pendingNames, e)
			}
			return c
		}
		c.blocks, c.durable, c.pending = slices.Clone(n.blocks), slices.Clone(n.durable), slices.Clone(n.pending)
		return c
	}
	return &Disk{root: copyOf(d.root), locks: map[string]bool{}, Schedule: d.Schedule, Buffered: d.Buffered}
}

// Choice decides what a power failure keeps, one effect after the other.
type Choice interface {
	Keep(what string) bool
	// Sector decides about a sector of the block that was written last: 0 keep, 1 lose, 2 rubbish.
	Sector(what string) int
}

// PowerCut takes back what the choice does not keep. What is left is durable.
func (d *Disk) PowerCut(c Choice) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.locks = map[string]bool{}
	seen := map[*node]bool{}
	d.root.powerCut("/", c, seen)
}

func (n *node) powerCut(p string, c Choice, seen map[*node]bool) {
	if seen[n] {
		return
	}
	seen[n] = true
	if !n.dir {
		n.powerCutFile(p, c)
		return
	}
	names := maps.Clone(n.durableNames)
	for _, e := range n.pendingNames {
		if !c.Keep("name " + path.Join(p, e[0].name)) {
			continue
		}
		for _, s := range e {
			if s.to == nil {
				delete(names, s.name)
			} else {
				names[s.name] = s.to
			}
		}
	}
	n.names, n.durableNames, n.pendingNames = names, maps.Clone(names), nil
	for _, name := range slices.Sorted(maps.Keys(names)) {
		names[name].powerCut(path.Join(p, name), c, seen)
	}
}

func (n *node) powerCutFile(p string, c Choice) {
	blocks, size := n.durable, n.durableSize
	last := -1
	for i := range n.pending {
		if n.pending[i].block >= 0 {
			last = i
		}
	}
	for i := range n.pending {
		e := n.pending[i]
		if !c.Keep(fmt.Sprintf("%s block %d", p, e.block)) {
			continue
		}
		if i == last && e.data != nil {
			e.data = e.tear(p, blocks, c)
		}
		blocks, size = e.apply(blocks, size)
	}
	n.blocks, n.size = cut(blocks, size), size
	n.durable, n.durableSize, n.pending, n.reserved = slices.Clone(n.blocks), size, nil, 0
}

// tear gives the block of an effect with the sectors that were written decided about one by one. What a write leaves as it was is
// never rubbish: every log that appends to the end of a sector relies on that.
func (e *effect) tear(p string, blocks []*block, c Choice) *block {
	var old block
	if e.block < len(blocks) && blocks[e.block] != nil {
		old = *blocks[e.block]
	}
	fresh := *e.data
	for s := e.from &^ (sectorBytes - 1); s < e.to; s += sectorBytes {
		from, to := max(s, e.from), min(s+sectorBytes, e.to)
		switch c.Sector(fmt.Sprint(p, e.block, s)) {
		case 1:
			copy(fresh[from:to], old[from:to])
		case 2:
			for i := from; i < to; i++ {
				if fresh[i] != old[i] {
					fresh[i] ^= byte(0x5a + i*7)
				}
			}
		}
	}
	return &fresh
}

// Pending counts the effects that are not durable.
func (d *Disk) Pending() int {
	c := &counting{}
	d.Clone().PowerCut(c)
	return c.n
}

type counting struct{ n int }

func (c *counting) Keep(string) bool  { c.n++; return true }
func (c *counting) Sector(string) int { return 0 }

// RandomChoice keeps effects with a share that is drawn once, so that nearly all and nearly nothing happen as well. What becomes of
// an effect depends on the seed and on the effect.
func RandomChoice(seed uint64) Choice {
	rng := rand.New(rand.NewPCG(seed, 0x706f776572))
	return &randomChoice{seed: seed, share: []uint64{0, 1, 5, 9, 10}[rng.IntN(5)], torn: rng.Uint64N(3), seen: map[string]uint64{}}
}

type randomChoice struct {
	seed, share, torn uint64
	seen              map[string]uint64
}

func (c *randomChoice) draw(what string) uint64 {
	c.seen[what]++
	h := c.seed ^ c.seen[what]*0x9E3779B97F4A7C15
	for _, b := range []byte(what) {
		h = (h ^ uint64(b)) * 1099511628211
	}
	h ^= h >> 31
	h *= 0xBF58476D1CE4E5B9
	return h >> 33
}

func (c *randomChoice) Keep(what string) bool { return c.draw(what)%10 < c.share }

func (c *randomChoice) Sector(what string) int { return int(c.draw(what) % (c.torn + 1)) }

// subset keeps the first effects as its bits say, and all of the rest or none.
type subset struct {
	bits, n, of uint64
	rest        bool
}

func (s *subset) Keep(string) bool {
	s.n++
	if s.n > s.of {
		return s.rest
	}
	return s.bits>>(s.n-1)&1 == 1
}

func (s *subset) Sector(string) int { return 0 }

// Files gives the paths of all files in an area, sorted.
func (d *Disk) Files(area Area) (paths []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.walk(func(p string, n *node) {
		if !n.dir && areaOf(p) == area {
			paths = append(paths, p)
		}
	})
	return paths
}

// walk visits everything that has a name, in order. With d.mu.
func (d *Disk) walk(visit func(p string, n *node)) {
	var in func(p string, n *node)
	in = func(p string, n *node) {
		visit(p, n)
		for _, name := range slices.Sorted(maps.Keys(n.names)) {
			in(path.Join(p, name), n.names[name])
		}
	}
	in("/", d.root)
}

// Flip changes one bit of a file at rest.
func (d *Disk) Flip(p string, off int64, bit uint) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := d.find(p)
	if n == nil || n.size == 0 {
		return false
	}
	off %= n.size
	i := int(off / blockBytes)
	if n.at(i) == nil {
		return false
	}
	fresh := *n.blocks[i]
	fresh[off%blockBytes] ^= 1 << (bit % 8)
	n.blocks[i] = &fresh
	if i < len(n.durable) && n.durable[i] != nil {
		n.durable = slices.Clone(n.durable)
		n.durable[i] = &fresh
	}
	return true
}

// Patch writes bytes over a file at rest, from an offset on. With end, they are the last of the file.
func (d *Disk) Patch(p string, off int64, b []byte, end bool) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := d.find(p)
	if n == nil {
		return false
	}
	off %= n.size + 1
	n.write(b, off)
	if end {
		n.truncate(off + int64(len(b)))
	}
	n.sync()
	return true
}

// Digest is a digest of all names and bytes as they are now.
func (d *Disk) Digest() uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	h := uint64(14695981039346656037)
	mix := func(b []byte) {
		for len(b) >= 8 {
			h = (h ^ (uint64(b[0]) | uint64(b[1])<<8 | uint64(b[2])<<16 | uint64(b[3])<<24 | uint64(b[4])<<32 | uint64(b[5])<<40 | uint64(b[6])<<48 | uint64(b[7])<<56)) * 0x9E3779B97F4A7C15
			h ^= h >> 29
			b = b[8:]
		}
		for _, c := range b {
			h = (h ^ uint64(c)) * 1099511628211
		}
	}
	d.walk(func(p string, n *node) {
		mix([]byte(p))
		mix(fmt.Append(nil, n.dir, n.size))
		for i, b := range n.blocks {
			if b != nil {
				h = (h ^ uint64(i)) * 1099511628211
				mix(b[:])
			}
		}
	})
	return h
}

// Materialize writes everything under Root to a real directory, which must not exist.
func (d *Disk) Materialize(dir string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var failed error
	d.walk(func(p string, n *node) {
		rel, ok := strings.CutPrefix(p, Root)
		if !ok || failed != nil {
			return
		}
		to := filepath.Join(dir, rel)
		if n.dir {
			failed = os.MkdirAll(to, 0o700)
			return
		}
		b := make([]byte, n.size)
		n.read(b, 0)
		failed = os.WriteFile(to, b, 0o600)
	})
	return failed
}
