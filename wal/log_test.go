package wal

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	tidwall "github.com/tidwall/wal"
	"pgregory.net/rapid"

	"github.com/holdfast-db/holdfast/txn"
)

func TestRecordsComeBackAsWritten(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "wal")
	l := open(t, dir, Options{RotateBytes: 4 << 10})
	require.Equal(t, txn.LSN(1), l.Next())
	require.Equal(t, txn.LSN(1), l.First())
	require.Equal(t, RepairReport{Clean: true}, l.Repair())
	var want []entry
	for i := range 60 {
		var batch []Record
		first := l.Next()
		for j := range i % 7 {
			kind := byte(1 + (i*7+j*41)%MaxKind)
			payload := strings.Repeat(string(rune('a'+j)), i*j*3)
			batch = append(batch, Record{Kind: kind, Payload: []byte(payload)})
			want = append(want, entry{first + txn.LSN(j), kind, payload})
		}
		if len(batch) == 0 {
			continue
		}
		got, err := l.Append(batch)
		require.NoError(t, err)
		require.Equal(t, first, got)
		require.Equal(t, want, replayed(t, l, 0), "readable at once")
	}
	require.Less(t, l.Synced(), l.Next()-1)
	require.NoError(t, l.Sync())
	require.Equal(t, l.Next()-1, l.Synced())
	size := l.Size()
	require.Equal(t, size, l.Bytes())
	require.NoError(t, l.Close())
	require.NoError(t, l.Close())

	l = open(t, dir, Options{})
	require.Equal(t, want, replayed(t, l, 1))
	require.Equal(t, want[99:], replayed(t, l, 100))
	require.Empty(t, replayed(t, l, l.Next()))
	require.Equal(t, txn.LSN(len(want)+1), l.Next())
	require.Equal(t, l.Next()-1, l.Synced())
	require.Equal(t, size+entryBytes(0), l.Size(), "the seal")
	require.Zero(t, l.Bytes())

	found, err := listDirectories(diskFS{}, dir)
	require.NoError(t, err)
	require.Greater(t, len(found), 3)
	for _, d := range found {
		info, err := os.Stat(d.path)
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o700), info.Mode().Perm())
		info, err = os.Stat(d.file())
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
		require.LessOrEqual(t, info.Size(), int64(4<<10+8<<10))
	}
}

// The directories are what tidwall/wal itself reads: one log, one file, one entry for each frame.
func TestDirectoriesAreTidwallLogs(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "wal")
	l := open(t, dir, Options{})
	put(t, l, "A", "B")
	require.NoError(t, l.Close())
	theirs, err := tidwall.Open(filepath.Dir(newest(t, dir)), nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, theirs.Close()) }()
	last, err := theirs.LastIndex()
	require.NoError(t, err)
	require.Equal(t, uint64(3), last)
	frame, err := theirs.Read(2)
	require.NoError(t, err)
	payload, ok := payloadOf(frame)
	require.True(t, ok)
	require.Equal(t, "B", string(payload))
}

// The bytes of version 1, written down once. A change of this test is a change of the format.
func TestGoldenFile(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "wal")
	l := open(t, dir, Options{FirstLSN: 7})
	_, err := l.Append([]Record{{Kind: 2, Payload: []byte("hold")}})
	require.NoError(t, err)
	_, err = l.Append([]Record{{Kind: MaxKind}})
	require.NoError(t, err)
	require.NoError(t, l.Close())
	require.Equal(t, filepath.Join(dir, "00000000000000000007", "00000000000000000001"), newest(t, dir))
	require.Equal(t, goldenFile, fmt.Sprintf("%x", contents(t, newest(t, dir))))
}

const goldenFile = "" +
	// 44 bytes; "HFW" 1, kind 2; 4 bytes of payload; 0 bytes durable; LSN 7 after 6; header checksum; "hold"; frame checksum
	"2c" + "48465701" + "02000000" + "04000000" + "00000000" + "0700000000000000" + "0600000000000000" + "cb4da417" + "686f6c64" + "efeee3fa" +
	// kind 254, no payload, 45 bytes durable
	"28" + "48465701" + "fe000000" + "00000000" + "2d000000" + "0800000000000000" + "0700000000000000" + "fef405f6" + "fef405f6" +
	// the seal: 86 bytes durable, LSN 8 twice
	"28" + "48465701" + "ff000000" + "00000000" + "56000000" + "0800000000000000" + "0800000000000000" + "72799a69" + "72799a69"

func TestLimitsAreRefusedAtTheEdge(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "wal")
	l := open(t, dir, Options{})
	big := make([]byte, MaxRecordBytes+1)
	for _, c := range []struct {
		batch []Record
		class error
	}{
		{nil, txn.ErrInvalid},
		{[]Record{{Kind: 0}}, txn.ErrInvalid},
		{[]Record{{Kind: 255}}, txn.ErrInvalid},
		{[]Record{record("fits"), {Kind: 1, Payload: big}}, txn.ErrTooLarge},
		{[]Record{{Kind: 1, Payload: big[1:]}, {Kind: 1, Payload: big[1:]}}, txn.ErrTooLarge},
	} {
		_, err := l.Append(c.batch)
		require.ErrorIs(t, err, c.class)
	}
	require.NoError(t, l.Err())
	require.Equal(t, txn.LSN(1), l.Next())
	require.Zero(t, l.Size())
	big[5] = 9
	_, err := l.Append([]Record{{Kind: 1, Payload: big[1:]}, record("after")})
	require.NoError(t, err)
	require.NoError(t, l.Close())
	l = open(t, dir, Options{})
	got := replayed(t, l, 1)
	require.Equal(t, string(big[1:]), got[0].payload)
	require.Equal(t, "after", got[1].payload)

	for _, o := range []Options{{RotateBytes: -1}, {RotateBytes: RotateBytesMax + 1}, {ReserveBytes: -1}, {ReserveBytes: ReserveBytesMax + 1}, {FirstLSN: MaxLSN + 1}} {
		_, err := Open(dir, o)
		require.ErrorIs(t, err, txn.ErrInvalid)
	}
}

// The first batch of a directory is durable when Append returns, sync or not.
func TestNewDirectoryIsDurableAtOnce(t *testing.T) {
	l := open(t, filepath.Join(t.TempDir(), "wal"), Options{RotateBytes: 100})
	for i := range 9 {
		_, err := l.Append([]Record{record("x")})
		require.NoError(t, err)
		require.Equal(t, txn.LSN(i/3*3+1), l.Synced(), "three records to a directory")
	}
	require.NoError(t, l.Sync())
	require.Equal(t, txn.LSN(9), l.Synced())
}

// A closed log refuses everything and says so.
func TestClosedLog(t *testing.T) {
	l := open(t, filepath.Join(t.TempDir(), "wal"), Options{})
	put(t, l, "A")
	require.NoError(t, l.Close())
	_, err := l.Append([]Record{record("B")})
	require.ErrorIs(t, err, txn.ErrClosed)
	require.ErrorIs(t, l.Sync(), txn.ErrClosed)
	require.ErrorIs(t, l.Cut(1), txn.ErrClosed)
	require.ErrorIs(t, l.Replay(context.Background(), 0, nil), txn.ErrClosed)
}

// Cut removes whole directories below the LSN and never the newest.
func TestCutRemovesWholeDirectories(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "wal")
	l := open(t, dir, Options{RotateBytes: 200})
	var want []string
	for i := range 30 {
		want = append(want, fmt.Sprintf("record %02d", i+1))
		put(t, l, want[i])
	}
	found, err := listDirectories(diskFS{}, dir)
	require.NoError(t, err)
	require.Greater(t, len(found), 4)

	require.NoError(t, l.Cut(found[2].first-1), "one record short of the second directory's end")
	require.NoDirExists(t, found[0].path)
	require.DirExists(t, found[1].path)
	require.Equal(t, found[1].first, l.First())
	require.Equal(t, want[found[1].first-1:], payloads(replayed(t, l, l.First())))
	require.Equal(t, want[found[1].first-1:], payloads(replayed(t, l, 0)))

	err = l.Replay(context.Background(), found[1].first-1, func(txn.LSN, byte, []byte) error { return nil })
	require.ErrorIs(t, err, txn.ErrCorrupt, "a record that was asked for is gone")

	require.NoError(t, l.Cut(1000))
	require.Equal(t, found[len(found)-1].first, l.First())
	require.Equal(t, txn.LSN(31), l.Next())
	info, err := os.Stat(newest(t, dir))
	require.NoError(t, err)
	require.Equal(t, info.Size(), l.Size())
	put(t, l, "record 31")
	require.NoError(t, l.Close())
	l = open(t, dir, Options{})
	require.Equal(t, txn.LSN(32), l.Next())
	require.Equal(t, append(want, "record 31")[l.First()-1:], payloads(replayed(t, l, l.First())))
	err = l.Replay(context.Background(), l.First()-1, func(txn.LSN, byte, []byte) error { return nil })
	require.ErrorIs(t, err, txn.ErrCorrupt, "the same after opening")
}

// A cut that stopped half way, wherever that was, leaves a log that opens.
func TestCutInterruptedAtEveryStep(t *testing.T) {
	for nth := 1; ; nth++ {
		dir := filepath.Join(t.TempDir(), "wal")
		calls, cutting := 0, false
		stop := errors.New("stop")
		l := open(t, dir, Options{RotateBytes: 1, FS: newSeam(func(op operation) error {
			if cutting && (op.name == "remove" || op.name == "syncdir") {
				if calls++; calls >= nth {
					return stop
				}
			}
			return nil
		})})
		put(t, l, "A", "B", "C", "D", "E", "F", "G")
		cutting = true
		err := l.Cut(6)
		if calls < nth {
			require.NoError(t, err)
			require.Greater(t, nth, 12)
			break
		}
		require.ErrorIs(t, err, txn.ErrIO)
		abandon(t, l)
		log := &logged{}
		l = open(t, dir, Options{RotateBytes: 1, Logger: slog.New(log)})
		got := payloads(replayed(t, l, 0))
		require.Equal(t, []string{"A", "B", "C", "D", "E", "F", "G"}[7-len(got):], got)
		require.Empty(t, log.warnings())
		require.Equal(t, txn.LSN(8), l.Next())
		put(t, l, "H")
		require.NoError(t, l.Cut(8))
		require.Equal(t, []string{"H"}, payloads(replayed(t, l, 0)))
	}
}

// The caller's state may be ahead of a log that lost its unsynced end. Its numbers are not given out again, and the gap is
// told from a missing directory for ever.
func TestFirstLSNSkipsNumbers(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "wal")
	l := open(t, dir, Options{FirstLSN: 3})
	require.Equal(t, txn.LSN(3), l.Next())
	require.ErrorIs(t, l.Replay(context.Background(), 2, nil), txn.ErrCorrupt)
	put(t, l, "three", "four")
	require.NoError(t, l.Close())
	l = open(t, dir, Options{FirstLSN: 2})
	require.Equal(t, txn.LSN(5), l.Next(), "a floor, not a ceiling")
	require.NoError(t, l.Close())

	for range 2 { // opened twice before anything is written
		l = open(t, dir, Options{FirstLSN: 101, RotateBytes: 100})
		require.Equal(t, txn.LSN(101), l.Next())
		require.Equal(t, []string{"three", "four"}, payloads(replayed(t, l, 3)))
		require.Empty(t, replayed(t, l, 101))
		require.NoError(t, l.Close())
	}
	l = open(t, dir, Options{FirstLSN: 101, RotateBytes: 100})
	put(t, l, "hundred and one", "hundred and two")
	require.NoError(t, l.Cut(5))
	require.NoError(t, l.Close())
	l = open(t, dir, Options{})
	require.Equal(t, []entry{{101, 1, "hundred and one"}, {102, 1, "hundred and two"}}, replayed(t, l, 0))
	require.Equal(t, []string{"hundred and one", "hundred and two"}, payloads(replayed(t, l, 5)), "5…100 never were")
	require.ErrorIs(t, l.Replay(context.Background(), 4, nil), txn.ErrCorrupt)
}

// Replay stops where it is told to, and says why.
func TestReplayEnds(t *testing.T) {
	l := open(t, filepath.Join(t.TempDir(), "wal"), Options{})
	put(t, l, "A", "B", "C")
	mine := errors.New("mine")
	seen := 0
	require.Equal(t, mine, l.Replay(context.Background(), 1, func(lsn txn.LSN, _ byte, _ []byte) error {
		seen++
		if lsn == 2 {
			return mine
		}
		return nil
	}))
	require.Equal(t, 2, seen)
	ctx, cancel := context.WithCancel(context.Background())
	err := l.Replay(ctx, 1, func(txn.LSN, byte, []byte) error { cancel(); return nil })
	require.ErrorIs(t, err, txn.ErrBusy)
	require.ErrorIs(t, err, context.Canceled)
}

// Damage that comes after opening is found by Replay, with file and offset.
func TestReplayChecksAgain(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "wal")
	l := open(t, dir, Options{})
	put(t, l, "A", "B", "C")
	data := contents(t, newest(t, dir))
	at := int64(len(data)) / 2
	data[at] ^= 1
	require.NoError(t, os.WriteFile(newest(t, dir), data, 0o600))
	var damage *Damage
	err := l.Replay(context.Background(), 1, func(txn.LSN, byte, []byte) error { return nil })
	require.ErrorAs(t, err, &damage)
	require.ErrorIs(t, err, txn.ErrCorrupt)
	require.Equal(t, newest(t, dir), damage.File)
	require.Equal(t, entryBytes(1), damage.Offset)
}

// Any history of batches, syncs, cuts and reopenings gives back exactly what was written.
func TestHistoriesComeBack(t *testing.T) {
	fast := memoryDir(t)
	rapid.Check(t, func(rt *rapid.T) {
		dir, err := os.MkdirTemp(fast, "wal")
		require.NoError(t, err)
		o := Options{RotateBytes: rapid.Int64Range(1, 2000).Draw(rt, "rotate")}
		l := open(t, dir, o)
		var want []entry
		var cut txn.LSN
		kept := func() []entry {
			for i, e := range want {
				if e.lsn >= l.First() {
					return want[i:]
				}
			}
			return nil
		}
		rt.Repeat(map[string]func(*rapid.T){
			"append": func(rt *rapid.T) {
				var batch []Record
				next := l.Next()
				for _, size := range rapid.SliceOfN(rapid.IntRange(0, 700), 1, 5).Draw(rt, "sizes") {
					kind := rapid.ByteRange(1, MaxKind).Draw(rt, "kind")
					payload := strings.Repeat("p", size)
					batch = append(batch, Record{Kind: kind, Payload: []byte(payload)})
					want = append(want, entry{next + txn.LSN(len(batch)) - 1, kind, payload})
				}
				first, err := l.Append(batch)
				require.NoError(rt, err)
				require.Equal(rt, next, first)
			},
			"sync": func(rt *rapid.T) {
				require.NoError(rt, l.Sync())
				if len(want) > 0 {
					require.Equal(rt, want[len(want)-1].lsn, l.Synced())
				}
			},
			"cut": func(rt *rapid.T) {
				below := txn.LSN(rapid.Uint64Range(0, uint64(l.Next())).Draw(rt, "below"))
				require.NoError(rt, l.Cut(below))
				cut = max(cut, below)
				if i := slices.IndexFunc(want, func(e entry) bool { return e.lsn >= cut }); i >= 0 {
					require.LessOrEqual(rt, l.First(), want[i].lsn)
				}
			},
			"reopen": func(rt *rapid.T) {
				if rapid.Bool().Draw(rt, "clean") {
					require.NoError(rt, l.Close())
				} else {
					abandon(t, l)
				}
				o.FirstLSN = l.Next() + txn.LSN(rapid.IntRange(0, 2).Draw(rt, "skip"))
				l = open(t, dir, o)
				require.Equal(rt, o.FirstLSN, l.Next())
			},
			"": func(rt *rapid.T) {
				require.Equal(rt, kept(), replayed(t, l, 0))
			},
		})
		require.NoError(rt, l.Close())
	})
}
