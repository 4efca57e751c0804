package wal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime/metrics"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

// wholeEntry is what the next record of a log would look like in its file.
func wholeEntry(l *Log, payload string) []byte {
	frame := appendFrame(nil, header{kind: 1, durable: uint32(l.tail.durable), lsn: l.next, previous: l.last}, []byte(payload))
	return append(binary.AppendUvarint(nil, uint64(len(frame))), frame...)
}

// Whatever is at the end of the log after a crash: A, B and C are found at once; one warning tells how many bytes were cut;
// they are gone before D is appended; and the second open finds all four and has nothing to say.
func TestTornTailIsCutOnce_B22(t *testing.T) {
	long := strings.Repeat("D was never acknowledged. ", 100)
	for _, c := range []struct {
		name   string
		damage func(t *testing.T, dir string, l *Log) (bad int64)
	}{
		{"a 512 zero bytes", func(t *testing.T, dir string, l *Log) int64 {
			appendTo(t, newest(t, dir), make([]byte, 512))
			return 512
		}},
		{"b half a record", func(t *testing.T, dir string, l *Log) int64 {
			whole := wholeEntry(l, long)
			appendTo(t, newest(t, dir), whole[:len(whole)/2])
			return int64(len(whole) / 2)
		}},
		{"c whole length, last sector zero", func(t *testing.T, dir string, l *Log) int64 {
			whole := wholeEntry(l, long)
			clear(whole[len(whole)-512:])
			appendTo(t, newest(t, dir), whole)
			return int64(len(whole))
		}},
		{"d newest directory without a file", func(t *testing.T, dir string, l *Log) int64 {
			require.NoError(t, os.Mkdir(filepath.Join(dir, directoryName(l.Next())), 0o700))
			return 0
		}},
		{"d newest file empty", func(t *testing.T, dir string, l *Log) int64 {
			d := directory{path: filepath.Join(dir, directoryName(l.Next()))}
			require.NoError(t, os.Mkdir(d.path, 0o700))
			require.NoError(t, os.WriteFile(d.file(), nil, 0o600))
			return 0
		}},
		{"e preallocated zero region", func(t *testing.T, dir string, l *Log) int64 {
			info, err := os.Stat(newest(t, dir))
			require.NoError(t, err)
			require.NoError(t, os.Truncate(newest(t, dir), 3<<20))
			return 3<<20 - info.Size()
		}},
		{"e zero region in a new file", func(t *testing.T, dir string, l *Log) int64 {
			d := directory{path: filepath.Join(dir, directoryName(l.Next()))}
			require.NoError(t, os.Mkdir(d.path, 0o700))
			require.NoError(t, os.WriteFile(d.file(), make([]byte, 1<<20), 0o600))
			return 1 << 20
		}},
	} {
		for _, clean := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, closed=%v", c.name, clean), func(t *testing.T) {
				dir := filepath.Join(t.TempDir(), "wal")
				l := open(t, dir, Options{})
				put(t, l, "A", "B", "C")
				if clean {
					require.NoError(t, l.Close())
				} else {
					abandon(t, l)
				}
				good := contents(t, newest(t, dir))
				bad := c.damage(t, dir, l)

				log := &logged{}
				l = open(t, dir, Options{Logger: slog.New(log)})
				require.Equal(t, []string{"A", "B", "C"}, payloads(replayed(t, l, 1)))
				require.Equal(t, bad, l.Repair().Cut)
				require.Len(t, log.warnings(), 1)
				require.Equal(t, bad, log.warnings()[0]["bytes"])
				require.Equal(t, good, contents(t, newest(t, dir)), "the bad bytes are gone, and nothing else")

				put(t, l, "D")
				require.NoError(t, l.Close())
				l = open(t, dir, Options{Logger: slog.New(log)})
				require.Equal(t, []string{"A", "B", "C", "D"}, payloads(replayed(t, l, 1)))
				require.Len(t, log.warnings(), 1)
				require.Equal(t, RepairReport{Clean: true}, l.Repair())
			})
		}
	}
}

// A torn write may end at any byte.
func TestTailTornAtEveryByte_B22(t *testing.T) {
	dir := filepath.Join(memoryDir(t), "wal")
	l := open(t, dir, Options{})
	put(t, l, "A", "B")
	good := contents(t, newest(t, dir))
	torn := wholeEntry(l, strings.Repeat("x", 200))
	abandon(t, l)
	for cut := 1; cut < len(torn); cut++ {
		require.NoError(t, os.WriteFile(newest(t, dir), append(good[:len(good):len(good)], torn[:cut]...), 0o600))
		log := &logged{}
		l := open(t, dir, Options{Logger: slog.New(log)})
		require.Equal(t, []string{"A", "B"}, payloads(replayed(t, l, 1)), "cut at %d", cut)
		require.Equal(t, int64(cut), l.Repair().Cut)
		require.Len(t, log.warnings(), 1)
		require.Equal(t, txn.LSN(3), l.Next())
		abandon(t, l)
		require.Equal(t, good, contents(t, newest(t, dir)))
	}
}

// One flipped bit anywhere: the records before it are right, and the log is either refused as damaged, with nothing changed, or
// ends there. It may end only where nothing behind the flip can tell that the bytes had been durable.
func TestEveryBitFlipIsFound_B27(t *testing.T) {
	for _, clean := range []bool{true, false} {
		t.Run(fmt.Sprintf("closed=%v", clean), func(t *testing.T) {
			dir := filepath.Join(memoryDir(t), "wal")
			l := open(t, dir, Options{RotateBytes: 120})
			want := []string{"first", "second", "", strings.Repeat("z", 100), "fifth", "sixth"}
			put(t, l, want...)
			end := l.Size()
			if clean {
				require.NoError(t, l.Close())
			} else {
				abandon(t, l)
			}
			found, err := listDirectories(diskFS{}, dir)
			require.NoError(t, err)
			require.GreaterOrEqual(t, len(found), 3, "several directories")
			var cuts, refusals int
			for i, d := range found {
				good := contents(t, d.file())
				lastEntry := len(good) - int(entryBytes(len("sixth")))
				if clean {
					lastEntry = len(good) - int(entryBytes(0))
				}
				for bit := range len(good) * 8 {
					flipped := append([]byte(nil), good...)
					flipped[bit/8] ^= 1 << (bit % 8)
					require.NoError(t, os.WriteFile(d.file(), flipped, 0o600))
					before := allocatedBytes()
					l, err := Open(dir, Options{})
					require.Less(t, allocatedBytes()-before, uint64(4<<20), "%s bit %d", d.path, bit)
					if err != nil {
						refusals++
						require.ErrorIs(t, err, txn.ErrCorrupt, "%s bit %d", d.path, bit)
						require.ErrorContains(t, err, d.file())
						require.Equal(t, flipped, contents(t, d.file()))
					} else {
						cuts++
						require.True(t, i == len(found)-1 && bit/8 >= lastEntry, "%s bit %d was cut", d.path, bit)
						got := payloads(replayed(t, l, 1))
						require.Equal(t, want[:len(got)], got)
						require.GreaterOrEqual(t, len(got), len(want)-1)
						require.Positive(t, l.Repair().Cut)
						require.Less(t, l.Size(), end+1)
						abandon(t, l)
					}
					require.NoError(t, os.WriteFile(d.file(), good, 0o600))
				}
			}
			require.Positive(t, cuts)
			require.Positive(t, refusals)
		})
	}
}

// allocatedBytes is how much this process has taken from the heap so far, without stopping it to ask.
func allocatedBytes() uint64 {
	sample := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}

// Damage in front of something that was written later is never cut away, and nothing on disk changes.
func TestDamageInTheMiddleIsRefusedUnchanged(t *testing.T) {
	type hit struct {
		name   string
		damage func(t *testing.T, dir string, found []directory)
		file   func(found []directory) string
		class  error
	}
	first := func(found []directory) string { return found[0].file() }
	last := func(found []directory) string { return found[len(found)-1].file() }
	edit := func(file func([]directory) string, change func(data []byte) []byte) func(*testing.T, string, []directory) {
		return func(t *testing.T, _ string, found []directory) {
			require.NoError(t, os.WriteFile(file(found), change(contents(t, file(found))), 0o600))
		}
	}
	for _, c := range []hit{
		{"zeros over an entry of the newest file", edit(last, func(b []byte) []byte { clear(b[:60]); return b }), last, txn.ErrCorrupt},
		{"a byte missing in the newest file", edit(last, func(b []byte) []byte { return append(b[:50], b[51:]...) }), last, txn.ErrCorrupt},
		{"bytes inserted in the newest file", edit(last, func(b []byte) []byte {
			return append(b[:50:50], append([]byte("abc"), b[50:]...)...)
		}), last, txn.ErrCorrupt},
		{"the length before an entry", edit(last, func(b []byte) []byte { b[0]++; return b }), last, txn.ErrCorrupt},
		{"a torn end of an older file", edit(first, func(b []byte) []byte { return b[:len(b)-1] }), first, txn.ErrCorrupt},
		{"zeros behind an older file", edit(first, func(b []byte) []byte { return append(b, 0) }), first, txn.ErrCorrupt},
		{"an older file empty", edit(first, func(b []byte) []byte { return nil }), first, txn.ErrCorrupt},
		{"an older directory missing", func(t *testing.T, _ string, found []directory) {
			require.NoError(t, os.RemoveAll(found[1].path))
		}, func(found []directory) string { return found[2].file() }, txn.ErrCorrupt},
		{"an older file missing", func(t *testing.T, _ string, found []directory) {
			require.NoError(t, os.Remove(found[1].file()))
		}, func(found []directory) string { return found[1].path }, txn.ErrCorrupt},
		{"a directory under another number", func(t *testing.T, dir string, found []directory) {
			require.NoError(t, os.Rename(found[2].path, filepath.Join(dir, directoryName(found[2].first+1))))
		}, func(found []directory) string { return directoryName(found[2].first + 1) }, txn.ErrCorrupt},
		{"a second file", func(t *testing.T, _ string, found []directory) {
			require.NoError(t, os.WriteFile(filepath.Join(found[1].path, "00000000000000000003.END"), nil, 0o600))
		}, func(found []directory) string { return found[1].path }, txn.ErrCorrupt},
		{"a newer version", edit(last, func(b []byte) []byte { return resigned(b, 1+3, frameVersion+1) }), last, txn.ErrUnsupported},
		{"an unknown flag", edit(last, func(b []byte) []byte { return resigned(b, 1+5, 1) }), last, txn.ErrUnsupported},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "wal")
			l := open(t, dir, Options{RotateBytes: 250})
			for i := range 20 {
				put(t, l, fmt.Sprintf("record %d", i))
			}
			abandon(t, l)
			found, err := listDirectories(diskFS{}, dir)
			require.NoError(t, err)
			require.GreaterOrEqual(t, len(found), 3)
			c.damage(t, dir, found)
			before := fingerprint(t, dir)

			_, err = Open(dir, Options{})
			require.ErrorIs(t, err, c.class)
			require.ErrorContains(t, err, c.file(found))
			require.ErrorContains(t, err, "offset")
			require.Equal(t, before, fingerprint(t, dir))
			_, err = Open(dir, Options{ReadOnly: true})
			require.ErrorIs(t, err, c.class)
		})
	}
}

// resigned changes one byte of the first frame of a file and makes its checksums good again.
func resigned(file []byte, at int, value byte) []byte {
	length, n := binary.Uvarint(file)
	frame := file[n : n+int(length)]
	file[at] = value
	sum := checksum(frame[:checkedBytes])
	binary.LittleEndian.PutUint32(frame[checkedBytes:], sum)
	return file
}

// A batch that was not synced may reach the disk in any order: its second half without its first is a torn tail, not damage.
func TestUnsyncedBatchInAnyOrderIsCut(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "wal")
	l := open(t, dir, Options{})
	put(t, l, "A")
	good := l.Size()
	_, err := l.Append([]Record{record(strings.Repeat("b", 600)), record(strings.Repeat("c", 600)), record("d")})
	require.NoError(t, err)
	abandon(t, l)
	data := contents(t, newest(t, dir))
	clear(data[good : good+512])
	require.NoError(t, os.WriteFile(newest(t, dir), data, 0o600))
	l = open(t, dir, Options{})
	require.Equal(t, []string{"A"}, payloads(replayed(t, l, 1)))
	require.Equal(t, int64(len(data))-good, l.Repair().Cut)
}

// A record that carries the image of another log's records in its payload proves nothing about the bytes before it.
func TestPayloadThatLooksLikeFrames(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "wal")
	l := open(t, dir, Options{})
	put(t, l, "A", "B", "C", "D")
	image := string(contents(t, newest(t, dir)))
	image += string(appendFrame(nil, header{kind: 1, durable: 1 << 20, lsn: 9, previous: 8}, []byte("of a longer file")))
	torn := wholeEntry(l, image)
	abandon(t, l)
	appendTo(t, newest(t, dir), torn[:len(torn)-1])
	l = open(t, dir, Options{})
	require.Equal(t, []string{"A", "B", "C", "D"}, payloads(replayed(t, l, 1)))
	put(t, l, image)
	require.Equal(t, image, replayed(t, l, 5)[0].payload)
}

// Looking for what comes behind a damaged record reads the file about once, whatever the record is made of.
func TestTornRecordFullOfMagicIsReadOnce(t *testing.T) {
	dir := filepath.Join(memoryDir(t), "wal")
	l := open(t, dir, Options{})
	put(t, l, "A")
	torn := wholeEntry(l, strings.Repeat(string(frameMagic), 2<<20))
	abandon(t, l)
	torn[len(torn)-1] ^= 1
	appendTo(t, newest(t, dir), torn)
	var reads int
	l = open(t, dir, Options{FS: newSeam(func(op operation) error {
		if op.name == "read" {
			reads++
		}
		return nil
	})})
	require.Equal(t, int64(len(torn)), l.Repair().Cut)
	require.Less(t, reads, 2*len(torn)/windowBytes)
}

// A read that fails says nothing about the bytes: it is an error, and nothing is cut.
func TestReadErrorIsNeverTheEnd(t *testing.T) {
	dir := filepath.Join(memoryDir(t), "wal")
	l := open(t, dir, Options{RotateBytes: 1})
	put(t, l, "A", "B", "C", "D", "E")
	abandon(t, l)
	appendTo(t, newest(t, dir), make([]byte, 100))
	before := fingerprint(t, dir)
	for _, name := range []string{"readdir", "open", "read"} {
		for nth := 1; ; nth++ {
			calls := 0
			l, err := Open(dir, Options{FS: newSeam(func(op operation) error {
				if op.name == name {
					if calls++; calls == nth {
						return syscall.EIO
					}
				}
				if op.name == "truncate" {
					return errReached
				}
				return nil
			})})
			require.Nil(t, l)
			require.ErrorIs(t, err, txn.ErrIO)
			require.NotErrorIs(t, err, txn.ErrCorrupt)
			require.Equal(t, before, fingerprint(t, dir), "%s %d", name, nth)
			if calls < nth {
				require.ErrorIs(t, err, errReached)
				require.Greater(t, nth, 5, "every directory was in the way")
				break
			}
			require.ErrorIs(t, err, syscall.EIO)
		}
	}
}

var errReached = errors.New("reached the repair")

// A repair that fails or is interrupted is not believed, and is done by the next open.
func TestRepairInterruptedAtEveryStep(t *testing.T) {
	for _, frameless := range []bool{false, true} {
		for nth := 1; ; nth++ {
			dir := filepath.Join(t.TempDir(), "wal")
			l := open(t, dir, Options{})
			put(t, l, "A", "B")
			abandon(t, l)
			if frameless {
				d := directory{path: filepath.Join(dir, directoryName(l.Next()))}
				require.NoError(t, os.Mkdir(d.path, 0o700))
				require.NoError(t, os.WriteFile(d.file(), make([]byte, 77), 0o600))
			} else {
				appendTo(t, newest(t, dir), make([]byte, 77))
			}
			calls := 0
			log := &logged{}
			l, err := Open(dir, Options{Logger: slog.New(log), FS: newSeam(func(op operation) error {
				switch op.name {
				case "remove", "truncate", "renew", "syncdir":
					if calls++; calls == nth {
						return syscall.EIO
					}
				}
				return nil
			})})
			if calls < nth {
				require.NoError(t, err)
				abandon(t, l)
				require.GreaterOrEqual(t, nth, 3)
				break
			}
			require.ErrorIs(t, err, txn.ErrIO)
			require.Empty(t, log.warnings(), "what did not happen is not told")
			l = open(t, dir, Options{})
			require.Equal(t, []string{"A", "B"}, payloads(replayed(t, l, 1)))
			put(t, l, "C")
			require.Equal(t, []string{"A", "B", "C"}, payloads(replayed(t, l, 1)))
		}
	}
}

// A log opened for reading only leaves a torn tail where it is.
func TestReadOnlyChangesNothing(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "wal")
	_, err := Open(dir, Options{ReadOnly: true})
	require.ErrorIs(t, err, txn.ErrNotFound)
	require.NoDirExists(t, dir)

	w := open(t, dir, Options{RotateBytes: 100})
	put(t, w, "A", "B", "C", "D")
	abandon(t, w)
	appendTo(t, newest(t, dir), make([]byte, 100))
	require.NoError(t, os.Mkdir(filepath.Join(dir, "notes"), 0o700))
	before := fingerprint(t, dir)
	log := &logged{}
	l := open(t, dir, Options{ReadOnly: true, Logger: slog.New(log), FS: newSeam(func(op operation) error {
		switch op.name {
		case "readdir", "open", "read":
			return nil
		}
		return fs.ErrPermission
	})})
	require.Equal(t, []string{"A", "B", "C", "D"}, payloads(replayed(t, l, 1)))
	require.Equal(t, int64(100), l.Repair().Cut)
	_, err = l.Append([]Record{record("E")})
	require.ErrorIs(t, err, txn.ErrReadOnly)
	require.ErrorIs(t, l.Sync(), txn.ErrReadOnly)
	require.ErrorIs(t, l.Cut(3), txn.ErrReadOnly)
	require.NoError(t, l.Close())
	require.Empty(t, log.warnings())
	require.Equal(t, before, fingerprint(t, dir))
}
