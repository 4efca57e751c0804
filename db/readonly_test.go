package db

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

// treeOf describes every file of a directory: name, mode, size, time of last change and content.
func treeOf(t testing.TB, dir string) map[string]string {
	t.Helper()
	tree := map[string]string{}
	if _, err := os.Lstat(dir); errors.Is(err, fs.ErrNotExist) {
		return tree
	}
	require.NoError(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		about := fmt.Sprintf("%v %v", info.Mode(), info.ModTime())
		if info.Mode().IsRegular() {
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			about += fmt.Sprintf(" %d %x", len(b), sha256.Sum256(b))
		}
		tree[name] = about
		return nil
	}))
	return tree
}

// Given a directory whose writer was killed with records to replay and a checkpoint in RAM only, when it is opened read-only,
// then what is durable is found and restored, the other is a miss, what would write is refused, and not a byte, name, mode or
// time on disk is another one.
func TestReadOnlyServesAndChangesNothing_B32(t *testing.T) {
	dir, ctx := tempDir(t), context.Background()
	ns := testNamespace(t, 2)
	d := openDB(t, dir, Options{WritePolicy: OnEvict})
	kept, dropped := seqOf(t, ns, tokens(1, 1000)), seqOf(t, ns, tokens(2, 500))
	gen, _ := publish(t, d, kept, 1000, func(r *PublishRequest) { r.Durable = true })
	publish(t, d, dropped, 500)
	require.NoError(t, d.PutLoose(ctx, ns, LoosePage{Key: []byte("k"), Bytes: []byte("v")}))
	crash(t, d)
	before := treeOf(t, dir)

	d = openDB(t, dir, Options{ReadOnly: true})
	other := openDB(t, dir, Options{ReadOnly: true}) // readers share
	require.NotZero(t, d.RecoveryReport().LogRecords)
	require.Equal(t, 1, d.RecoveryReport().NotDurable)
	require.EqualValues(t, 1000, restoreAt(t, d, kept))
	require.EqualValues(t, 1000, lookupAt(t, other, kept))
	require.Zero(t, restoreAt(t, d, dropped))
	require.EqualValues(t, 1, stats(t, d).Checkpoints)
	checkCatalogue(t, d)

	_, err := d.Begin(ctx, PublishRequest{Sequence: dropped, Offset: 500})
	require.ErrorIs(t, err, ErrReadOnly)
	require.ErrorIs(t, d.PutLoose(ctx, ns, LoosePage{Key: []byte("l"), Bytes: []byte("v")}), ErrReadOnly)
	_, err = d.DeleteLoose(ctx, ns, []byte("k"))
	require.ErrorIs(t, err, ErrReadOnly)
	require.ErrorIs(t, d.Retire(ctx, gen), ErrReadOnly)
	require.ErrorIs(t, d.Delete(ctx, gen), ErrReadOnly)
	require.ErrorIs(t, d.Supersede(ctx, Generation{}, gen), ErrReadOnly)
	require.ErrorIs(t, d.SetDiskBytes(1), ErrReadOnly)
	_, err = d.Clear(ctx, ns.ID())
	require.ErrorIs(t, err, ErrReadOnly)

	_, err = Open(ctx, dir, Options{RAMBytes: 1 << 20})
	require.ErrorIs(t, err, ErrLocked)
	require.ErrorContains(t, err, "read-only handles")
	closeDB(t, d)
	closeDB(t, other)
	require.Equal(t, before, treeOf(t, dir))
}

// A writer keeps readers out, and says who it is.
func TestReadOnlyIsRefusedBesideAWriter_B32(t *testing.T) {
	dir := tempDir(t)
	d := openDB(t, dir, Options{})
	_, err := Open(context.Background(), dir, Options{ReadOnly: true})
	require.ErrorIs(t, err, ErrLocked)
	require.ErrorContains(t, err, fmt.Sprintf("pid %d ", os.Getpid()))
	closeDB(t, d)
	_, err = Open(context.Background(), filepath.Join(dir, "nowhere"), Options{ReadOnly: true})
	require.ErrorIs(t, err, ErrNotFound)
	require.NoDirExists(t, filepath.Join(dir, "nowhere"))
	empty := t.TempDir()
	_, err = Open(context.Background(), empty, Options{ReadOnly: true})
	require.ErrorIs(t, err, ErrNotFound)
	require.Empty(t, treeOf(t, empty)["LOCK"])
}

// A page that a reader finds bad costs it that checkpoint and nothing else, and stays on disk as it is.
func TestReadOnlyGoesOnWithTheNextShorter(t *testing.T) {
	dir := tempDir(t)
	ns := testNamespace(t, 1)
	d := openDB(t, dir, Options{})
	seq := seqOf(t, ns, tokens(1, 1000))
	publish(t, d, seq, 600)
	gen, _ := publish(t, d, seq, 1000)
	at := placesOf(t, d, gen, 1)[0]
	closeDB(t, d)
	flip(t, segmentFile(dir, at.Segment), at.Offset+100)
	before := treeOf(t, dir)
	d = openDB(t, dir, Options{ReadOnly: true})
	require.EqualValues(t, 600, restoreAt(t, d, seq))
	require.EqualValues(t, 600, lookupAt(t, d, seq))
	checkCatalogue(t, d)
	closeDB(t, d)
	require.Equal(t, before, treeOf(t, dir))
}

// placesOf gives the disk copies of the pages that a checkpoint names itself in a group.
func placesOf(t testing.TB, d *DB, g Generation, group int) (places []txn.Placement) {
	t.Helper()
	snapshot := d.index.Snapshot()
	defer snapshot.Close()
	m, err := txn.ReadManifest(snapshot, g)
	require.NoError(t, err)
	keys := m.Groups[group].Keys
	if m.Groups[group].Chained {
		keys, err = txn.ChainPages(snapshot, m.Groups[group].Head, m.Groups[group].Count)
		require.NoError(t, err)
	}
	for _, key := range keys {
		e, err := txn.ReadPage(snapshot, key)
		require.NoError(t, err)
		places = append(places, e.Place...)
	}
	return places
}

func segmentFile(dir string, number uint64) string {
	return filepath.Join(dir, dataName, fmt.Sprintf("%020d.seg", number))
}

// flip changes one bit of a file.
func flip(t testing.TB, path string, at int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	var b [1]byte
	_, err = f.ReadAt(b[:], at)
	require.NoError(t, err)
	b[0] ^= 1
	_, err = f.WriteAt(b[:], at)
	require.NoError(t, err)
	require.NoError(t, f.Close())
}

// Without permission to write, a read-write open fails at open, and a read-only one serves.
func TestReadOnlyWithoutPermissionToWrite_B32(t *testing.T) {
	if dir := os.Getenv("HOLDFAST_TEST_UNWRITABLE"); dir != "" { // in the child
		_, err := Open(context.Background(), dir, Options{RAMBytes: 1 << 20})
		require.ErrorIs(t, err, ErrPermission)
		d := openDB(t, dir, Options{ReadOnly: true})
		require.EqualValues(t, 1000, restoreAt(t, d, seqOf(t, testNamespace(t, 1), tokens(1, 1000))))
		_, err = d.Begin(context.Background(), PublishRequest{Sequence: seqOf(t, testNamespace(t, 1), tokens(2, 10)), Offset: 10})
		require.ErrorIs(t, err, ErrReadOnly)
		closeDB(t, d)
		return
	}
	dir, err := os.MkdirTemp("/tmp", "holdfast-unwritable-")
	require.NoError(t, err)
	chmod := func(dirs, files os.FileMode) {
		require.NoError(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			if e.IsDir() {
				return os.Chmod(path, dirs)
			}
			return os.Chmod(path, files)
		}))
	}
	t.Cleanup(func() {
		chmod(0o700, 0o600)
		require.NoError(t, os.RemoveAll(dir))
	})
	d := openDB(t, dir, Options{})
	publish(t, d, seqOf(t, testNamespace(t, 1), tokens(1, 1000)), 1000)
	closeDB(t, d)
	chmod(0o555, 0o444)
	before := treeOf(t, dir)
	self, err := os.Executable()
	require.NoError(t, err)
	if os.Geteuid() == 0 { // permissions do not bind root: a copy that anybody may run, run by nobody
		b, err := os.ReadFile(self)
		require.NoError(t, err)
		copied, err := os.CreateTemp("/tmp", "holdfast-test-")
		require.NoError(t, err)
		defer os.Remove(copied.Name())
		_, err = copied.Write(b)
		require.NoError(t, err)
		require.NoError(t, copied.Chmod(0o755))
		require.NoError(t, copied.Close())
		self = copied.Name()
	}
	child := exec.CommandContext(t.Context(), self, "-test.run", "^"+t.Name()+"$", "-test.v")
	child.Env = append(os.Environ(), "HOLDFAST_TEST_UNWRITABLE="+dir, "TMPDIR=/tmp")
	child.Dir = "/"
	if os.Geteuid() == 0 {
		child.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	}
	out, err := child.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.True(t, strings.Contains(string(out), "--- PASS: "+t.Name()), "%s", out)
	require.Equal(t, before, treeOf(t, dir))
}
