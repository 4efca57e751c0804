package db

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/db/internal/index"
	"github.com/holdfast-db/holdfast/txn"
	"github.com/holdfast-db/holdfast/wal"
)

// model is a directory that damage is done to: closed, or left by a killed process. Its checkpoints are those of stock.
type model struct {
	dir    string
	gens   []Generation
	places [][]txn.Placement // of each checkpoint: state pages, rank by rank
	first  []txn.Placement   // of the chain that the first two share
	loose  txn.Placement
}

var models struct {
	sync.Mutex
	closed, killed, cut *model
	root                string
}

// modelOf makes each kind once, and gives a copy. The log of a cut one does not go back to the first record: what the index
// alone knows are the first three checkpoints, and the log has a fourth (800 tokens of the second conversation).
func modelOf(t *testing.T, kind string) *model {
	t.Helper()
	models.Lock()
	defer models.Unlock()
	build := func(at **model, end func(testing.TB, *DB)) {
		if *at != nil {
			return
		}
		dir, err := os.MkdirTemp(models.root, "model")
		require.NoError(t, err)
		d, err := Open(context.Background(), dir, Options{RAMBytes: 16 << 20, Logger: quiet})
		require.NoError(t, err)
		m := &model{dir: dir}
		var seqs []*Sequence
		seqs, m.gens = stock(t, d)
		for _, g := range m.gens {
			m.places = append(m.places, placesOf(t, d, g, 1))
		}
		m.first = placesOf(t, d, m.gens[0], 0)
		require.NoError(t, (catalogue{d.index}).Read(func(v txn.Reader) error {
			return d.loose.all(v, func(_ txn.Key, _ int64, at txn.Placement) error {
				m.loose = at
				return nil
			})
		}))
		if kind == "cut" {
			closeDB(t, d)
			require.NoError(t, os.RemoveAll(d.dir.join(walName)))
			l, err := wal.Open(d.dir.join(walName), wal.Options{FirstLSN: 1000})
			require.NoError(t, err)
			require.NoError(t, l.Close())
			d, err = Open(context.Background(), dir, Options{RAMBytes: 16 << 20, Logger: quiet})
			require.NoError(t, err)
			require.NoError(t, seqs[2].Append(tokens(4, 100)))
			g, _ := publish(t, d, seqs[2], 800)
			m.gens = append(m.gens, g)
		}
		end(t, d)
		*at = m
	}
	var of **model
	switch kind {
	case "killed":
		of = &models.killed
		build(of, crash)
	case "cut":
		of = &models.cut
		build(of, func(t testing.TB, d *DB) { closeDB(t, d) })
	default:
		of = &models.closed
		build(of, func(t testing.TB, d *DB) { closeDB(t, d) })
	}
	m := **of
	m.dir = filepath.Join(tempDir(t), "db")
	require.NoError(t, os.CopyFS(m.dir, os.DirFS((*of).dir)))
	return &m
}

func (m *model) path(parts ...string) string {
	return filepath.Join(append([]string{m.dir}, parts...)...)
}

// logFile is the newest file of the log.
func (m *model) logFile(t testing.TB) string {
	files, err := filepath.Glob(m.path(walName, "*", "*"))
	require.NoError(t, err)
	require.NotEmpty(t, files)
	return files[len(files)-1]
}

// tables are the files of the index with a suffix.
func (m *model) tables(t testing.TB, pattern string) []string {
	files, err := filepath.Glob(m.path(indexName, pattern))
	require.NoError(t, err)
	require.NotEmpty(t, files, pattern)
	return files
}

func appendTo(t testing.TB, path string, b []byte) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	require.NoError(t, err)
	_, err = f.Write(b)
	require.NoError(t, err)
	require.NoError(t, f.Close())
}

func overwrite(t testing.TB, path string, at int64, b []byte) {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = f.WriteAt(b, at)
	require.NoError(t, err)
	require.NoError(t, f.Close())
}

func resize(t testing.TB, path string, change func(size int64) int64) {
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.NoError(t, os.Truncate(path, change(info.Size())))
}

// damageKind is one kind of docs/recovery.md.
type damageKind struct {
	name   string // as in the document
	model  string // closed, killed, cut
	damage func(t *testing.T, m *model)
	remedy Remedy   // the harshest that verify names; "" if it finds nothing
	kind   string   // that a finding with that remedy has
	opens  error    // what Open says before any repair; nil: it opens, and keeps the promise
	kept   [3]int64 // what is found of the three sequences afterwards: 600, 1000, 700 if all is kept
}

var all = [3]int64{600, 1000, 700}

func stateOf(m *model, i, rank int) (path string, at txn.Placement) {
	p := m.places[i][rank]
	return segmentFile(m.dir, p.Segment), p
}

var damageKinds = []damageKind{
	{"nothing", "closed", func(*testing.T, *model) {}, "", "", nil, all},
	{"killed", "killed", func(*testing.T, *model) {}, ByOpen, "log", nil, all},
	{"log: zeros after the end_B22", "killed", func(t *testing.T, m *model) { appendTo(t, m.logFile(t), make([]byte, 512)) }, ByOpen, "log", nil, all},
	{"log: half a record_B22", "killed", func(t *testing.T, m *model) {
		b, err := os.ReadFile(m.logFile(t))
		require.NoError(t, err)
		appendTo(t, m.logFile(t), b[:100])
	}, ByOpen, "log", nil, all},
	{"log: last sector of a record is zero_B22", "killed", func(t *testing.T, m *model) {
		b, err := os.ReadFile(m.logFile(t))
		require.NoError(t, err)
		appendTo(t, m.logFile(t), append(bytes.Clone(b[:1024]), make([]byte, 512)...))
	}, ByOpen, "log", nil, all},
	{"log: empty newest directory_B22", "killed", func(t *testing.T, m *model) {
		require.NoError(t, os.Mkdir(m.path(walName, "00000000000000009999"), 0o700))
	}, ByOpen, "log", nil, all},
	{"log: preallocated zeros_B22", "killed", func(t *testing.T, m *model) { appendTo(t, m.logFile(t), make([]byte, 1<<20)) }, ByOpen, "log", nil, all},
	{"log: a record in the middle", "killed", func(t *testing.T, m *model) {
		at := recordAt(t, m, 1)
		flip(t, m.logFile(t), at+60)
	}, BySalvage, "log", ErrCorrupt, [3]int64{600, 600, 700}},
	{"log: the first record", "killed", func(t *testing.T, m *model) { flip(t, m.logFile(t), 60) }, BySalvage, "log", ErrCorrupt, [3]int64{}},
	{"log: missing", "closed", func(t *testing.T, m *model) { require.NoError(t, os.RemoveAll(m.path(walName))) }, BySalvage, "log", ErrCorrupt, all},
	{"log: a foreign file in it", "closed", func(t *testing.T, m *model) {
		require.NoError(t, os.WriteFile(filepath.Join(filepath.Dir(m.logFile(t)), "x"), nil, 0o600))
	}, BySalvage, "log", ErrCorrupt, all},
	{"index: missing, and the log is whole", "closed", func(t *testing.T, m *model) { require.NoError(t, os.RemoveAll(m.path(indexName))) }, ByOpen, "log", nil, all},
	{"index: missing, and the log was cut", "cut", func(t *testing.T, m *model) { require.NoError(t, os.RemoveAll(m.path(indexName))) }, BySalvage, "index", ErrCorrupt, [3]int64{}},
	{"index: missing, and the log too", "closed", func(t *testing.T, m *model) {
		require.NoError(t, os.RemoveAll(m.path(indexName)))
		require.NoError(t, os.RemoveAll(m.path(walName)))
	}, BySalvage, "index", ErrCorrupt, [3]int64{}},
	{"index: its manifest is cut short", "closed", func(t *testing.T, m *model) {
		for _, f := range m.tables(t, "MANIFEST-*") {
			resize(t, f, func(int64) int64 { return 3 })
		}
	}, BySalvage, "index", ErrCorrupt, all},
	{"index: a table is missing", "closed", func(t *testing.T, m *model) {
		for _, f := range m.tables(t, "*.sst") {
			require.NoError(t, os.Remove(f))
		}
	}, BySalvage, "index", ErrCorrupt, all},
	{"index: a bit of a table", "closed", func(t *testing.T, m *model) { flip(t, m.tables(t, "*.sst")[0], 40) }, BySalvage, "index", ErrCorrupt, all},
	{"catalogue: an entry is missing", "closed", func(t *testing.T, m *model) {
		x, err := index.Open(m.path(indexName), index.Options{Logger: quiet})
		require.NoError(t, err)
		b := x.NewBatch()
		require.NoError(t, b.Delete([]byte{'a'}))
		require.NoError(t, b.Commit())
		require.NoError(t, x.Flush())
		require.NoError(t, x.Close())
	}, BySalvage, "catalogue", errAny, all},
	{"page: a bit_B27", "closed", func(t *testing.T, m *model) {
		path, at := stateOf(m, 1, 0)
		flip(t, path, at.Offset+at.Stored-1)
	}, ByRecover, "page", nil, [3]int64{600, 600, 700}},
	{"page: zeros", "closed", func(t *testing.T, m *model) {
		path, at := stateOf(m, 1, 1)
		overwrite(t, path, at.Offset, make([]byte, at.Stored))
	}, ByRecover, "page", nil, [3]int64{600, 600, 700}},
	{"page: another page in its place_B27", "closed", func(t *testing.T, m *model) {
		path, at := stateOf(m, 1, 1)
		from, other := stateOf(m, 0, 1)
		b, err := os.ReadFile(from)
		require.NoError(t, err)
		overwrite(t, path, at.Offset, b[other.Offset:other.Offset+other.Stored])
	}, ByRecover, "page", nil, [3]int64{600, 600, 700}},
	{"page: one that two checkpoints share_B26", "closed", func(t *testing.T, m *model) {
		flip(t, segmentFile(m.dir, m.first[0].Segment), m.first[0].Offset)
	}, ByRecover, "page", nil, [3]int64{0, 0, 700}},
	{"page: a loose one", "closed", func(t *testing.T, m *model) {
		flip(t, segmentFile(m.dir, m.loose.Segment), m.loose.Offset)
	}, ByRecover, "page", nil, all},
	{"segment: a byte short_B26", "closed", func(t *testing.T, m *model) {
		path, _ := stateOf(m, 0, 0)
		resize(t, path, func(n int64) int64 { return n - 4097 })
	}, ByRecover, "segment", nil, [3]int64{600, 1000, 0}},
	{"segment: half of it_B26", "closed", func(t *testing.T, m *model) {
		path, _ := stateOf(m, 0, 0)
		_, first := stateOf(m, 1, 0)
		resize(t, path, func(int64) int64 { return first.Offset })
	}, ByRecover, "segment", nil, [3]int64{600, 600, 0}},
	{"segment: empty_B26", "closed", func(t *testing.T, m *model) {
		path, _ := stateOf(m, 0, 0)
		resize(t, path, func(int64) int64 { return 0 })
	}, ByRecover, "segment", nil, [3]int64{}},
	{"segment: missing", "closed", func(t *testing.T, m *model) {
		path, _ := stateOf(m, 0, 0)
		require.NoError(t, os.Remove(path))
	}, ByRecover, "segment", nil, [3]int64{}},
	{"segment: a link in its place", "closed", func(t *testing.T, m *model) {
		path, _ := stateOf(m, 0, 0)
		require.NoError(t, os.Rename(path, m.path("elsewhere")))
		require.NoError(t, os.Symlink(m.path("elsewhere"), path))
	}, ByRecover, "segment", nil, [3]int64{}},
	{"segments: all missing", "closed", func(t *testing.T, m *model) { require.NoError(t, os.RemoveAll(m.path(dataName))) }, ByRecover, "segment", nil, [3]int64{}},
	{"segment: a block more_B26", "closed", func(t *testing.T, m *model) {
		path, _ := stateOf(m, 0, 0)
		appendTo(t, path, make([]byte, 4096))
	}, ByOpen, "leftover", nil, all},
	{"segment: garbage after the end_B26", "closed", func(t *testing.T, m *model) {
		path, _ := stateOf(m, 0, 0)
		appendTo(t, path, bytes.Repeat([]byte{0xA5}, 70001))
	}, ByOpen, "leftover", nil, all},
	{"segment: header", "closed", func(t *testing.T, m *model) {
		path, _ := stateOf(m, 0, 0)
		flip(t, path, 100)
	}, ByRecover, "segment", nil, all},
	{"segment: descriptor", "closed", func(t *testing.T, m *model) {
		path, _ := stateOf(m, 0, 0)
		flip(t, path, 4096+200)
	}, ByRecover, "descriptor", nil, all},
	{"segment: descriptor of a loose page", "closed", func(t *testing.T, m *model) {
		flip(t, segmentFile(m.dir, m.loose.Segment), 4096+70)
	}, ByRecover, "descriptor", nil, all},
	{"segment: one that nobody names_B21", "closed", func(t *testing.T, m *model) {
		require.NoError(t, os.WriteFile(segmentFile(m.dir, 77), make([]byte, 8192), 0o600))
	}, ByOpen, "leftover", nil, all},
	{"foreign files_B21_B40", "closed", func(t *testing.T, m *model) {
		for _, name := range []string{"note", "x.tmp", filepath.Join(dataName, "note.seg"), filepath.Join(walName, "x.tmp")} {
			require.NoError(t, os.WriteFile(m.path(name), []byte("not yours"), 0o600))
		}
	}, "", "", nil, all},
	{"marker: one that was not put in place_B21", "closed", func(t *testing.T, m *model) {
		require.NoError(t, os.WriteFile(m.path("HOLDFAST.new"), []byte("HOLD"), 0o600))
	}, ByOpen, "leftover", nil, all},
	{"marker: a bit", "closed", func(t *testing.T, m *model) { flip(t, m.path(markerName), 20) }, BySalvage, "marker", ErrCorrupt, all},
	{"marker: empty", "closed", func(t *testing.T, m *model) {
		resize(t, m.path(markerName), func(int64) int64 { return 0 })
	}, BySalvage, "marker", ErrCorrupt, all},
	{"lock file: missing", "closed", func(t *testing.T, m *model) { require.NoError(t, os.Remove(m.path(lockName))) }, "", "", nil, all},
}

// errAny: Open may or may not notice.
var errAny = errors.New("any")

// recordAt gives where the n-th record of the newest log file begins, from 0.
func recordAt(t testing.TB, m *model, n int) int64 {
	b, err := os.ReadFile(m.logFile(t))
	require.NoError(t, err)
	at := -1
	for range n + 1 {
		next := bytes.Index(b[at+1:], []byte("HFW\x01"))
		require.GreaterOrEqual(t, next, 0)
		at += 1 + next
	}
	return int64(at)
}

// sizeOf adds up the files of a directory.
func sizeOf(t testing.TB, dir string) (n int64) {
	require.NoError(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if info, err := e.Info(); err == nil && info.Mode().IsRegular() {
			n += info.Size()
		}
		return nil
	}))
	return n
}

// requirePromise looks up and restores all three sequences, and checks every listed checkpoint.
func (m *model) requirePromise(t testing.TB, d *DB, kept [3]int64) {
	t.Helper()
	ns := testNamespace(t, 2)
	long, other := seqOf(t, ns, tokens(1, 1000)), seqOf(t, ns, tokens(2, 700))
	short := seqOf(t, ns, tokens(1, 600))
	require.Equal(t, kept, [3]int64{restoreAt(t, d, short), restoreAt(t, d, long), restoreAt(t, d, other)})
	checkCatalogue(t, d)
}

// Given a directory of each kind of damage, when it is verified, opened, repaired by what verify says, verified again, opened
// idle five times and used, then verify sees it and changes nothing, what is refused stays untouched, nothing listed is
// unreadable, nothing undamaged is lost, what is lost is in the report, and nothing grows.
func TestDamage_FSA06_FSA09_B21_B22_B26_B27_B40(t *testing.T) {
	root, err := os.MkdirTemp("", "holdfast-models-")
	require.NoError(t, err)
	models.root = root
	t.Cleanup(func() {
		models.closed, models.killed, models.cut = nil, nil, nil
		require.NoError(t, os.RemoveAll(root))
	})
	require.GreaterOrEqual(t, len(damageKinds), 25)
	for i, k := range damageKinds {
		if testing.Short() && i%5 != 0 {
			continue
		}
		t.Run(k.name, func(t *testing.T) {
			t.Parallel()
			k.run(t)
		})
	}
}

func (k *damageKind) run(t *testing.T) {
	ctx := context.Background()
	m := modelOf(t, k.model)
	k.damage(t, m)
	r := verifyDir(t, m.dir)
	require.Equal(t, k.remedy == ByRecover || k.remedy == BySalvage, r.Damaged(), "%v", r.Findings)
	if k.remedy == "" {
		require.Empty(t, r.Findings)
	} else {
		var kinds []string
		for _, f := range r.Findings {
			if f.Remedy == k.remedy {
				kinds = append(kinds, f.Kind)
			}
			require.False(t, f.Remedy == BySalvage && k.remedy != BySalvage, "%s", f.String())
		}
		require.Contains(t, kinds, k.kind, "%v", r.Findings)
	}

	// What Open makes of it, on a copy.
	copied := filepath.Join(tempDir(t), "copy")
	require.NoError(t, copyTree(m.dir, copied))
	data := treeOf(t, filepath.Join(copied, dataName))
	d, err := Open(ctx, copied, Options{RAMBytes: 16 << 20, Logger: quiet})
	switch {
	case k.opens == errAny:
		if err == nil {
			closeDB(t, d)
		}
	case k.opens != nil:
		require.ErrorIs(t, err, k.opens)
		require.Equal(t, data, treeOf(t, filepath.Join(copied, dataName)), "what an open that was refused leaves")
	default:
		require.NoError(t, err)
		m.requirePromise(t, d, k.kept)
		closeDB(t, d)
	}

	foreign := m.foreign(t)
	switch k.remedy {
	case ByRecover, ByOpen:
		r, err := Recover(ctx, m.dir, RecoverOptions{Apply: true, Logger: quiet})
		require.NoError(t, err)
		require.True(t, r.Applied)
	case BySalvage:
		_, err := Recover(ctx, m.dir, RecoverOptions{Apply: true, Logger: quiet})
		require.ErrorIs(t, err, ErrCorrupt)
		tree := treeOf(t, m.dir)
		dry, err := Salvage(ctx, m.dir, SalvageOptions{})
		require.NoError(t, err)
		require.True(t, dry.Needed)
		require.Equal(t, tree, treeOf(t, m.dir), "a dry run changes nothing")
		wet, err := Salvage(ctx, m.dir, SalvageOptions{Apply: true})
		require.NoError(t, err)
		require.True(t, wet.Applied)
		if !wet.Marker {
			require.Equal(t, dry.Kept, wet.Kept)
			require.Equal(t, dry.Lost, wet.Lost)
		}
	}
	require.Equal(t, foreign, m.foreign(t))

	r = verifyDir(t, m.dir)
	require.Empty(t, damageOf(r), "%v", r.Findings)
	d = openDB(t, m.dir, Options{})
	m.requirePromise(t, d, k.kept)
	closeDB(t, d)
	require.Empty(t, verifyDir(t, m.dir).Findings)
	size := sizeOf(t, m.dir)
	for range 5 {
		d = openDB(t, m.dir, Options{})
		closeDB(t, d)
	}
	require.LessOrEqual(t, sizeOf(t, m.dir)-size, int64(4096), "idle opens")
	d = openDB(t, m.dir, Options{})
	stock(t, d)
	m.requirePromise(t, d, all)
	disk := stats(t, d)
	require.Equal(t, disk.DiskBytes, liveBytes(t, d), "accounting")
	closeDB(t, d)
	require.Empty(t, verifyDir(t, m.dir).Findings)
}

// liveBytes adds up the catalogue and the loose pages.
func liveBytes(t testing.TB, d *DB) (n int64) {
	snapshot := d.index.Snapshot()
	defer snapshot.Close()
	a, err := txn.ReadAccounts(snapshot)
	require.NoError(t, err)
	loose, err := d.loose.segments(snapshot)
	require.NoError(t, err)
	for _, l := range loose {
		n += l.bytes
	}
	return n + a.AllocatedBytes
}

// foreign gives the content of what is not ours.
func (m *model) foreign(t testing.TB) map[string]string {
	found := map[string]string{}
	for _, name := range []string{"note", "x.tmp", filepath.Join(dataName, "note.seg"), filepath.Join(walName, "x.tmp"), "elsewhere"} {
		if b, err := os.ReadFile(m.path(name)); err == nil {
			found[name] = string(b)
		}
	}
	return found
}

// copyTree copies a directory, links as links.
func copyTree(from, to string) error {
	return filepath.WalkDir(from, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		at := filepath.Join(to, name)
		switch {
		case e.IsDir():
			return os.MkdirAll(at, 0o700)
		case e.Type()&fs.ModeSymlink != 0:
			link, err := os.Readlink(path)
			if err != nil {
				return err
			}
			return os.Symlink(link, at)
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(at, b, 0o600)
	})
}

// Unknown, newer, foreign and marker-less directories are refused by everything and untouched.
func TestForeignDirectoriesAreRefusedAndUntouched_B40(t *testing.T) {
	root, err := os.MkdirTemp("", "holdfast-models-")
	require.NoError(t, err)
	models.root = root
	t.Cleanup(func() {
		models.closed = nil
		require.NoError(t, os.RemoveAll(root))
	})
	for name, damage := range map[string]func(m *model){
		"newer":       func(m *model) { overwrite(t, m.path(markerName), 8, []byte{2}) },
		"marker-less": func(m *model) { require.NoError(t, os.Remove(m.path(markerName))) },
		"foreign": func(m *model) {
			require.NoError(t, os.RemoveAll(m.dir))
			require.NoError(t, os.MkdirAll(m.dir, 0o700))
			require.NoError(t, os.WriteFile(m.path("note"), nil, 0o600))
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := modelOf(t, "closed")
			damage(m)
			before := treeOf(t, m.dir)
			ctx := context.Background()
			_, err := Open(ctx, m.dir, Options{})
			require.ErrorIs(t, err, ErrUnsupported)
			_, err = Open(ctx, m.dir, Options{ReadOnly: true})
			require.ErrorIs(t, err, ErrUnsupported)
			_, err = Verify(ctx, m.dir, VerifyOptions{})
			require.ErrorIs(t, err, ErrUnsupported)
			_, err = Recover(ctx, m.dir, RecoverOptions{Apply: true})
			require.ErrorIs(t, err, ErrUnsupported)
			_, err = Salvage(ctx, m.dir, SalvageOptions{Apply: true})
			require.ErrorIs(t, err, ErrUnsupported)
			require.Equal(t, before, treeOf(t, m.dir))
		})
	}
}

// Given one flipped bit anywhere, in any file, when the directory is verified, opened read-only and read, then every outcome is
// the right bytes or an error of a class, nothing panics, and verify finds every flip in live data.
func TestAnyFlippedBitIsSeenOrHarmless_B27(t *testing.T) {
	root, err := os.MkdirTemp("", "holdfast-models-")
	require.NoError(t, err)
	models.root = root
	t.Cleanup(func() {
		models.closed = nil
		require.NoError(t, os.RemoveAll(root))
	})
	m := modelOf(t, "closed")
	var files []string
	require.NoError(t, filepath.WalkDir(m.dir, func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			if info, _ := e.Info(); info.Size() > 0 {
				files = append(files, path)
			}
		}
		return err
	}))
	n := 60
	if testing.Short() {
		n = 15
	}
	r := rand.New(rand.NewPCG(27, 0))
	ns := testNamespace(t, 2)
	long := seqOf(t, ns, tokens(1, 1000))
	for range n {
		path := files[r.IntN(len(files))]
		info, err := os.Stat(path)
		require.NoError(t, err)
		at, bit := r.Int64N(info.Size()), byte(1)<<r.IntN(8)
		b, err := os.ReadFile(path)
		require.NoError(t, err)
		was := b[at]
		overwrite(t, path, at, []byte{was ^ bit})
		v, err := Verify(context.Background(), m.dir, VerifyOptions{})
		if err != nil {
			require.True(t, errors.Is(err, ErrCorrupt) || errors.Is(err, ErrUnsupported), "%s at %d: %v", path, at, err)
		}
		d, err := Open(context.Background(), m.dir, Options{ReadOnly: true, RAMBytes: 16 << 20, Logger: quiet})
		if err == nil {
			found := int64(0)
			p, err := d.Restore(context.Background(), long, LookupOptions{})
			if err == nil {
				verify(t, p, 2) // compares every byte
				found = p.Offset()
				p.Release()
			} else {
				require.True(t, errors.Is(err, ErrNotFound) || errors.Is(err, ErrCorrupt), "%s at %d: %v", path, at, err)
			}
			require.Contains(t, []int64{0, 600, 1000}, found)
			if found != 1000 {
				require.True(t, v != nil && v.Damaged(), "%s at %d costs a checkpoint and verify says nothing", path, at)
			}
			_, _ = d.Close(context.Background()) // may meet the damage
		} else {
			require.True(t, v == nil || v.Damaged(), "%s at %d: %v, and verify says nothing", path, at, err)
		}
		overwrite(t, path, at, []byte{was})
	}
	require.Empty(t, verifyDir(t, m.dir).Findings)
}
