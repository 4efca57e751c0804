package wal

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

const sectorBytes = 512

var errPowerFailed = errors.New("power failed")

// power is a disk that remembers what has been synced, fails at a chosen operation, and can then say what a machine might find
// after the power came back. Of what was not synced, each sector is there, zero, or rubbish; the file may have any length in
// between; each created name may be missing and each removed one be back. Now and then a sync fails, and what it should have
// written is lost, although it can still be read and the next sync succeeds.
type power struct {
	*seam
	rng     *rand.Rand
	left    int               // operations until the power fails
	done    bool              // whether the operation that meets the failure is carried out
	content map[string][]byte // of files, as last synced
	names   map[string]map[string]bool
	lost    map[string]lost
}

// newPower starts with everything below root durable.
func newPower(t *testing.T, root string, rng *rand.Rand) *power {
	p := &power{rng: rng, content: map[string][]byte{}, names: map[string]map[string]bool{}, lost: map[string]lost{}}
	require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		require.NoError(t, err)
		if d.IsDir() {
			p.names[path] = map[string]bool{}
		} else {
			p.content[path] = contents(t, path)
		}
		if path != root {
			p.names[filepath.Dir(path)][d.Name()] = true
		}
		return nil
	}))
	p.seam = newSeam(func(op operation) error {
		switch op.name {
		case "readdir", "open", "read", "close":
			return nil
		}
		p.left--
		if p.left > 0 || p.left == 0 && p.done {
			return nil
		}
		return errPowerFailed
	})
	return p
}

// failed turns success into failure if the power went while the operation was carried out.
func (p *power) failed(err error) error {
	if err == nil && p.left <= 0 {
		return errPowerFailed
	}
	return err
}

// remember notes what a sync made durable: all of the file but what an earlier sync failed to write.
func (p *power) remember(path string) {
	data, err := os.ReadFile(path)
	if err != nil {
		return
	}
	if lost, ok := p.lost[path]; ok {
		clear(data[min(lost.from, int64(len(data))):min(lost.to, int64(len(data)))])
	}
	p.content[path] = data
}

// lost is a part of a file that a failed sync has dropped, although it can still be read.
type lost struct{ from, to int64 }

func (p *power) Mkdir(path string) error  { return p.failed(p.seam.Mkdir(path)) }
func (p *power) Remove(path string) error { return p.failed(p.seam.Remove(path)) }
func (p *power) SyncDir(path string) error {
	if err := p.failed(p.seam.SyncDir(path)); err != nil {
		return err
	}
	p.names[path] = current(path)
	return nil
}

func (p *power) Truncate(path string, size int64) error {
	return p.failed(p.seam.Truncate(path, size))
}

func (p *power) Renew(path string, offset int64) error {
	if err := p.failed(p.seam.Renew(path, offset)); err != nil {
		return err
	}
	if lost, ok := p.lost[path]; ok && offset <= lost.from {
		delete(p.lost, path)
	}
	p.remember(path)
	return nil
}

func (p *power) Appender(dir string) (Appender, uint64, error) {
	a, n, err := p.seam.Appender(dir)
	if err = p.failed(err); err != nil {
		return nil, 0, err
	}
	return powerAppender{a, p, filepath.Join(dir, segmentName)}, n, nil
}

type powerAppender struct {
	Appender
	p    *power
	path string
}

func (a powerAppender) Append(entries [][]byte) error { return a.p.failed(a.Appender.Append(entries)) }
func (a powerAppender) Sync() error {
	if a.p.rng.IntN(30) == 0 {
		if data, err := os.ReadFile(a.path); err == nil {
			a.p.lost[a.path] = lost{int64(min(len(data), len(a.p.content[a.path]))), int64(len(data))}
		}
		return syscall.EIO
	}
	if err := a.p.failed(a.Appender.Sync()); err != nil {
		return err
	}
	a.p.remember(a.path)
	return nil
}

func current(dir string) map[string]bool {
	got := map[string]bool{}
	list, _ := os.ReadDir(dir) // a directory that is gone has no names
	for _, e := range list {
		got[e.Name()] = true
	}
	return got
}

// after writes what is found when the power is back.
func (p *power) after(t *testing.T, path, to string) {
	if info, err := os.Stat(path); err == nil && !info.IsDir() || p.names[path] == nil && p.content[path] != nil {
		require.NoError(t, os.WriteFile(to, p.survivor(t, path), 0o600))
		return
	}
	require.NoError(t, os.MkdirAll(to, 0o700))
	durable, now := p.names[path], current(path)
	for name := range union(durable, now) {
		if durable[name] == now[name] || p.rng.IntN(2) == 0 {
			p.after(t, filepath.Join(path, name), filepath.Join(to, name))
		}
	}
}

func union(a, b map[string]bool) map[string]bool {
	all := map[string]bool{}
	for name := range a {
		all[name] = true
	}
	for name := range b {
		all[name] = true
	}
	return all
}

func (p *power) survivor(t *testing.T, path string) []byte {
	durable := p.content[path]
	now, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return durable
	}
	require.NoError(t, err)
	if len(now) <= len(durable) { // a cut that was not synced
		if p.rng.IntN(2) == 0 {
			return durable
		}
		return now
	}
	end := len(durable) + p.rng.IntN(len(now)-len(durable)+1)
	if p.rng.IntN(2) == 0 {
		end = len(now)
	}
	got := append([]byte(nil), now[:end]...)
	style := p.rng.IntN(3)
	for start := len(durable); start < end; {
		stop := min(end, start-start%sectorBytes+sectorBytes)
		if style != 0 {
			switch p.rng.IntN(4) {
			case 0:
				clear(got[start:stop])
			case 1:
				if style == 2 {
					for i := start; i < stop; i++ {
						got[i] = byte(p.rng.Uint32())
					}
				}
			}
		}
		start = stop
	}
	return got
}

// The process dies or the power fails at a random operation, again and again, also while the log is being repaired: it always
// opens, with every record that a sync had covered, byte for byte, and then at most some of those after it, in order, without
// a gap. What an open found after the death of a process, and called durable, survives the power failure after that.
func TestPowerFailures(t *testing.T) {
	base := memoryDir(t)
	histories, lifetimes := 40, 8
	if testing.Short() {
		histories = 10
	}
	for seed := range histories {
		rng := rand.New(rand.NewPCG(7, uint64(seed)))
		root := filepath.Join(base, fmt.Sprint(seed), "0")
		require.NoError(t, os.MkdirAll(root, 0o700))
		want := map[txn.LSN]string{}
		var synced, cut, floor txn.LSN
		disk := newPower(t, root, rng)
		for lifetime := range lifetimes {
			disk.left, disk.done = 1+rng.IntN(40), rng.IntN(2) == 0
			o := Options{FS: disk, RotateBytes: int64(1 + rng.IntN(6000)), FirstLSN: floor}
			l, err := Open(filepath.Join(root, "wal"), o)
			if err != nil {
				require.ErrorIs(t, err, errPowerFailed, "seed %d lifetime %d", seed, lifetime)
			}
			for err == nil {
				switch rng.IntN(6) {
				case 0:
					below := synced - min(synced, txn.LSN(rng.IntN(10)))
					cut = max(cut, below)
					err = l.Cut(below)
				case 1, 2:
					err = l.Sync()
				default:
					var batch []Record
					for i := range 1 + rng.IntN(5) {
						payload := make([]byte, rng.IntN(1500))
						for j := range payload {
							payload[j] = byte(rng.Uint32())
						}
						want[l.Next()+txn.LSN(i)] = string(payload)
						batch = append(batch, Record{Kind: 1, Payload: payload})
					}
					_, err = l.Append(batch)
				}
			}
			require.True(t, errors.Is(err, errPowerFailed) || errors.Is(err, syscall.EIO), "seed %d lifetime %d: %v", seed, lifetime, err)
			if l != nil {
				for lsn := range want { // Synced may be a number that was skipped
					if lsn <= l.Synced() {
						synced = max(synced, lsn)
					}
				}
				_ = l.Close()
			}
			if rng.IntN(3) > 0 { // the power, not only the process
				next := filepath.Join(base, fmt.Sprint(seed), fmt.Sprint(lifetime+1))
				disk.after(t, root, next)
				require.NoError(t, os.RemoveAll(root))
				root = next
				disk = newPower(t, root, rng)
			}

			l, err = Open(filepath.Join(root, "wal"), Options{ReadOnly: true})
			if errors.Is(err, txn.ErrNotFound) {
				require.Zero(t, synced)
				continue
			}
			require.NoError(t, err, "seed %d lifetime %d", seed, lifetime)
			got := replayed(t, l, 0)
			last := synced
			for i, e := range got {
				require.Equal(t, want[e.lsn], e.payload, "seed %d lifetime %d LSN %d", seed, lifetime, e.lsn)
				if i > 0 {
					for skipped := got[i-1].lsn + 1; skipped < e.lsn; skipped++ {
						require.NotContains(t, want, skipped, "seed %d lifetime %d", seed, lifetime)
					}
				}
				last = max(last, e.lsn)
			}
			if synced > 0 {
				require.NotEmpty(t, got, "seed %d lifetime %d", seed, lifetime)
				for lsn := range want {
					require.False(t, lsn >= cut && lsn < got[0].lsn, "seed %d lifetime %d lost LSN %d", seed, lifetime, lsn)
				}
				require.GreaterOrEqual(t, got[len(got)-1].lsn, synced, "seed %d lifetime %d", seed, lifetime)
			}
			require.NoError(t, l.Close())
			for lsn := range want { // what is lost is lost; its number may be used again, or skipped
				if lsn > last {
					delete(want, lsn)
				}
			}
			floor = last + 1 + txn.LSN(rng.IntN(2)*rng.IntN(5))
		}
	}
}
