// Command peers does the same work with Holdfast and with what one would otherwise build such a store from: a directory of
// manifests in SQLite or bbolt with one file for each page, Badger, and Pebble. It is a module of its own, so that none of
// these is a dependency of Holdfast.
//
// The work: publications of 61 pages on two ranks, of which two on each rank are new, durable when they return; lookups of
// prompts that go on from one of them; reading the pages back, once while the store is open and once after reopening with the
// page cache dropped. The stores take turns, so that a machine that becomes slower does so for all.
package main

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"
)

const (
	ranks      = 2
	prefix     = 59 // pages that all publications share, and
	fresh      = 2  // new ones on each rank: the last attention page and the state
	pageTokens = 64
)

type digest = [32]byte

// page is the content of one page on one rank.
type page struct {
	key   digest
	rank  int
	bytes []byte
}

// checkpoint is one publication: its sequence is the shared prefix and a block of tokens of its own.
type checkpoint struct {
	number int
	tokens []int32
	name   digest   // of the whole prefix
	pages  []digest // keys of all pages of a rank, in order
	new    []page   // of both ranks
	probes []digest // of a prompt that goes on from it: names of its prefixes, longest first
	prompt []int32  // that prompt
}

// store is one of those that are compared. Calls come one at a time.
type store interface {
	// open opens or creates the store in a directory.
	open(dir string) error
	// publish makes the checkpoint durable: the pages that are new, and its manifest.
	publish(c *checkpoint) error
	// lookup finds the longest prefix of the prompt that is there, and gives how many pages it has.
	lookup(c *checkpoint) (pages int, err error)
	// read brings all pages of the checkpoint, of both ranks, into dst, one after the other.
	read(c *checkpoint, dst []byte) error
	close() error
}

// figures are the medians of one store.
type figures struct {
	Store         string  `json:"store"`
	Publish       float64 `json:"publish_per_second"`
	Lookup        float64 `json:"lookup_us"`
	Read          float64 `json:"read_mib_per_second"`
	Reopen        float64 `json:"reopen_ms"`
	ReadCold      float64 `json:"read_cold_mib_per_second"`
	Amplification float64 `json:"bytes_written_per_payload_byte"`
}

// work is the checkpoints of a run.
type work struct {
	pageBytes int
	base      *checkpoint // the shared prefix
	all       []*checkpoint
	random    *rand.Rand
	token     int32
}

func (w *work) tokens(n int) []int32 {
	t := make([]int32, n)
	for i := range t {
		t[i] = w.token
		w.token++
	}
	return t
}

func hashTokens(t []int32) digest {
	b := make([]byte, 0, 4*len(t))
	for _, x := range t {
		b = binary.LittleEndian.AppendUint32(b, uint32(x))
	}
	return sha256.Sum256(b)
}

func (w *work) content() []byte {
	b := make([]byte, w.pageBytes)
	for i := 0; i < len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], w.random.Uint64())
	}
	return b
}

// checkpoint makes one that goes on from base, or the base itself.
func (w *work) checkpoint(base *checkpoint, pages int) *checkpoint {
	c := &checkpoint{number: len(w.all)}
	var added = pages
	if base != nil {
		c.tokens = slices.Clone(base.tokens)
		c.pages = slices.Clone(base.pages[:len(base.pages)-1]) // but for the state of the base
		added = 1
	}
	for range added {
		c.tokens = append(c.tokens, w.tokens(pageTokens)...)
		c.pages = append(c.pages, hashTokens(c.tokens))
	}
	c.name = hashTokens(c.tokens)
	state := sha256.Sum256(c.name[:])
	c.pages = append(c.pages, state)
	for rank := range ranks {
		for _, key := range c.pages[len(c.pages)-added-1:] {
			c.new = append(c.new, page{key, rank, w.content()})
		}
	}
	c.prompt = append(slices.Clone(c.tokens), w.tokens(pageTokens)...)
	for n := len(c.prompt); n > 0; n -= pageTokens {
		c.probes = append(c.probes, hashTokens(c.prompt[:n]))
	}
	return c
}

func median(s []float64) float64 {
	s = slices.Sorted(slices.Values(s))
	if len(s) == 0 {
		return 0
	}
	return s[len(s)/2]
}

// written gives the bytes that the files in dir were written, as the kernel counts them for this process.
func written() int64 {
	b, err := os.ReadFile("/proc/self/io")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		var n int64
		if _, err := fmt.Sscanf(line, "write_bytes: %d", &n); err == nil {
			return n
		}
	}
	return 0
}

// dropCache takes the files of a directory out of the page cache.
func dropCache(dir string) error {
	unix.Sync()
	return filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		return unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
	})
}

type contender struct {
	name                                string
	store                               store
	dir                                 string
	bytes                               int64 // written
	publish, lookup, read, reopen, cold []float64
}

func run(ctx context.Context, dir string, pageBytes, rounds, each int) ([]figures, error) {
	w := &work{pageBytes: pageBytes, random: rand.New(rand.NewPCG(1, 2))}
	w.base = w.checkpoint(nil, prefix)
	contenders := []*contender{
		{name: "Holdfast", store: &holdfastStore{pageBytes: pageBytes}},
		{name: "SQLite, a file per page", store: &sqliteStore{}},
		{name: "bbolt, a file per page", store: &bboltStore{}},
		{name: "Badger", store: &badgerStore{}},
		{name: "Pebble, values separated", store: &pebbleStore{}},
	}
	for i, c := range contenders {
		c.dir = filepath.Join(dir, fmt.Sprint(i))
		if err := os.Mkdir(c.dir, 0o700); err != nil {
			return nil, err
		}
		if err := c.store.open(c.dir); err != nil {
			return nil, fmt.Errorf("%s: %w", c.name, err)
		}
		defer c.store.close()
		if err := c.store.publish(w.base); err != nil {
			return nil, fmt.Errorf("%s: %w", c.name, err)
		}
	}
	dst := make([]byte, ranks*(prefix+fresh)*pageBytes)
	timed := func(samples *[]float64, unit func(time.Duration) float64, fn func() error) error {
		start := time.Now()
		err := fn()
		*samples = append(*samples, unit(time.Since(start)))
		return err
	}
	for round := range rounds {
		var cs []*checkpoint
		for range each {
			c := w.checkpoint(w.base, 0)
			w.all = append(w.all, c)
			cs = append(cs, c)
		}
		for i := range contenders {
			c := contenders[(i+round)%len(contenders)]
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			before := written()
			err := timed(&c.publish, func(d time.Duration) float64 { return float64(each) / d.Seconds() }, func() error {
				for _, x := range cs {
					if err := c.store.publish(x); err != nil {
						return err
					}
				}
				return nil
			})
			unix.Sync()
			c.bytes += written() - before
			if err == nil {
				err = timed(&c.lookup, func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 / float64(each) }, func() error {
					for _, x := range cs {
						if n, err := c.store.lookup(x); err != nil || n != prefix+fresh {
							return fmt.Errorf("lookup of checkpoint %d: %d pages: %w", x.number, n, err)
						}
					}
					return nil
				})
			}
			rate := func(n int) func(d time.Duration) float64 {
				return func(d time.Duration) float64 { return float64(n*len(dst)) / (1 << 20) / d.Seconds() }
			}
			few := cs[:min(8, len(cs))]
			readAll := func() error {
				for _, x := range few {
					if err := c.store.read(x, dst); err != nil {
						return err
					}
					last := x.new[len(x.new)-1].bytes
					if string(dst[len(dst)-pageBytes:]) != string(last) {
						return fmt.Errorf("checkpoint %d came back with other bytes", x.number)
					}
				}
				return nil
			}
			if err == nil {
				err = timed(&c.read, rate(len(few)), readAll)
			}
			if err == nil {
				before = written()
				err = c.store.close()
				unix.Sync()
				c.bytes += written() - before
			}
			if err == nil {
				err = dropCache(c.dir)
			}
			if err == nil {
				err = timed(&c.reopen, func(d time.Duration) float64 { return d.Seconds() * 1e3 }, func() error {
					if err := c.store.open(c.dir); err != nil {
						return err
					}
					_, err := c.store.lookup(cs[0])
					return err
				})
			}
			if err == nil {
				few = cs[:1]
				err = timed(&c.cold, rate(1), readAll)
			}
			if err != nil {
				return nil, fmt.Errorf("%s: %w", c.name, err)
			}
		}
	}
	var out []figures
	payload := float64(rounds * each * ranks * fresh * pageBytes)
	for _, c := range contenders {
		out = append(out, figures{c.name, median(c.publish), median(c.lookup), median(c.read), median(c.reopen), median(c.cold), float64(c.bytes) / payload})
	}
	return out, nil
}

func main() {
	dir := flag.String("dir", "", "measure the file system of this directory (default: where temporary files go)")
	kib := flag.Int("page", 64, "KiB of a page")
	rounds := flag.Int("rounds", 5, "turns of every store")
	each := flag.Int("each", 100, "publications of a turn")
	asJSON := flag.Bool("json", false, "print JSON")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	scratch, err := os.MkdirTemp(*dir, "holdfast-peers-")
	var rows []figures
	if err == nil {
		rows, err = run(ctx, scratch, *kib<<10, *rounds, *each)
		if e := os.RemoveAll(scratch); err == nil {
			err = e
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "peers:", err)
		os.Exit(1)
	}
	if *asJSON {
		e := json.NewEncoder(os.Stdout)
		e.SetIndent("", "  ")
		_ = e.Encode(rows)
		return
	}
	t := tabwriter.NewWriter(os.Stdout, 0, 0, 1, ' ', 0)
	fmt.Fprintln(t, "| store\t| publish /s\t| lookup µs\t| read MiB/s\t| reopen ms\t| read cold MiB/s\t| written per byte\t|")
	fmt.Fprintln(t, "| ---\t| ---\t| ---\t| ---\t| ---\t| ---\t| ---\t|")
	for _, r := range rows {
		fmt.Fprintf(t, "| %s\t| %.0f\t| %.1f\t| %.0f\t| %.1f\t| %.0f\t| %.2f\t|\n", r.Store, r.Publish, r.Lookup, r.Read, r.Reopen, r.ReadCold, r.Amplification)
	}
	t.Flush()
}
