package db

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Restores from disk: what they give, what they wait for, and what a lost page does.

// damage flips a bit in every block of every segment but the headers.
func damage(t testing.TB, d *DB) {
	t.Helper()
	infos, err := d.segments.Segments()
	require.NoError(t, err)
	for _, info := range infos {
		damageBlocks(t, segmentOf(d, info.Number), 4096, info.Size)
	}
}

func damageBlocks(t testing.TB, path string, from, to int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	for at := from; at < to; at += 4096 {
		var b [1]byte
		_, err := f.ReadAt(b[:], at)
		require.NoError(t, err)
		b[0] ^= 1
		_, err = f.WriteAt(b[:], at)
		require.NoError(t, err)
	}
}

// segmentOf is the path of a segment.
func segmentOf(d *DB, number uint64) string {
	return filepath.Join(d.dir.join(dataName), fmt.Sprintf("%020d.seg", number))
}

// damageState damages the recurrent page of a checkpoint on one rank.
func damageState(t testing.TB, d *DB, seq *Sequence, rank int) {
	t.Helper()
	r, err := d.Restore(context.Background(), seq, LookupOptions{})
	require.NoError(t, err)
	d.residency.mu.Lock()
	at := r.pages[len(r.pages)-1].place[rank]
	d.residency.mu.Unlock()
	r.Release()
	outOfRAM(t, d)
	damageBlocks(t, segmentOf(d, at.Segment), at.Offset, at.Offset+1)
}

// After a restart nothing is in RAM, and every rank gets its exact bytes, whatever the policy that wrote them.
func TestRestoreFromDisk_RST01_WOE04(t *testing.T) {
	for _, policy := range []WritePolicy{WriteThrough, OnEvict} {
		restarts(t, func(t *testing.T, crashed bool) {
			d := openDB(t, tempDir(t), Options{WritePolicy: policy})
			seq, books := seqOf(t, testNamespace(t, 4, sevenPages(4096)...), tokens(1, 48)), shelf{}
			books.publish(t, d, seq, 48)
			if policy == OnEvict {
				require.Zero(t, stats(t, d).PagesWritten, "nothing is written at publication")
			}
			d = reopen(t, d, crashed)
			require.Zero(t, stats(t, d).RAMUsed)
			if policy == OnEvict && crashed {
				require.Zero(t, restoreAt(t, d, seq), "it was in RAM only, and is not listed")
				require.Equal(t, 1, d.RecoveryReport().NotDurable)
			} else {
				require.Equal(t, []int64{48}, books.requireListedIsReadable(t, d))
				require.EqualValues(t, 4*7, stats(t, d).PagesRead)
			}
			recount(t, d)
		})
	}
}

// A page of one rank that is gone or damaged makes the restore a miss on all ranks: what needs it is retired by the same call, nothing stays
// pinned, the bad copy is never read again, and publishing it again heals it.
func TestLostPageIsAMiss_RST02_RST03(t *testing.T) {
	for _, how := range []string{"damaged", "file gone", "read error"} {
		for _, late := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s late %v", how, late), func(t *testing.T) {
				v := newValve()
				d := openDB(t, tempDir(t), Options{segmentFS: v.segments(), AdmissionTimeout: 200 * time.Millisecond})
				seq, books := seqOf(t, testNamespace(t, 4, sevenPages(4096)...), tokens(1, 48)), shelf{}
				gen, _ := books.publish(t, d, seq, 48)
				other := seqOf(t, seq.Namespace(), tokens(2, 48))
				switch how {
				case "damaged":
					damageState(t, d, seq, 2)
				case "file gone", "read error":
					outOfRAM(t, d)
					infos, err := d.segments.Segments()
					require.NoError(t, err)
					for _, info := range infos {
						if how == "file gone" {
							require.NoError(t, os.Remove(segmentOf(d, info.Number)))
						} else {
							require.NoError(t, os.Truncate(segmentOf(d, info.Number), 4096))
						}
					}
				}
				if late {
					v.slow("read", 20*time.Millisecond)
				}
				for range 3 {
					require.Zero(t, restoreAt(t, d, seq))
					require.Zero(t, lookupAt(t, d, seq), "delisted by the same call")
				}
				_, err := d.Checkpoint(gen)
				require.ErrorIs(t, err, ErrNotFound)
				s := stats(t, d)
				require.NotZero(t, s.FailedReads)
				require.LessOrEqual(t, s.PagesRead, int64(2*4*7), "the bad copies are not read again")
				require.NotZero(t, s.Quarantined)
				recount(t, d)
				v.slow("read", 0)
				require.NoError(t, d.segments.Seal(context.Background()))
				books.publish(t, d, seq, 48)
				books.publish(t, d, other, 48)
				require.Zero(t, stats(t, d).Quarantined, "healed")
				outOfRAM(t, d)
				require.Equal(t, []int64{48, 48}, books.requireListedIsReadable(t, d))
				recount(t, d)
			})
		}
	}
}

// A restore that finds no room waits its bounded time and ends as busy: the checkpoint stays listed and restores once there is room.
// The allocation decides, at the moment it is made, however the memory that is free lies; many tries and no loss.
func TestNoRoomIsNoLoss_RST04_RST05_RST06(t *testing.T) {
	const timeout = 100 * time.Millisecond
	d := openDB(t, tempDir(t), Options{RAMBytes: 1 << 20, AdmissionTimeout: timeout})
	ns, books := testNamespace(t, 1, sevenPages(64<<10)...), shelf{}
	seq := seqOf(t, ns, tokens(1, 48))
	books.publish(t, d, seq, 48)
	outOfRAM(t, d)
	// Somebody else's publication holds all but 4096 bytes less than what is needed.
	filler := seqOf(t, testNamespace(t, 1, attentionOnly(4096, 16)...), tokens(2, 256*16))
	p := begin(t, d, filler, (256-7*16+1)*16)
	for range 2 {
		begun := time.Now()
		_, err := d.Restore(context.Background(), seq, LookupOptions{})
		requireClass(t, err, ErrBusy)
		require.GreaterOrEqual(t, time.Since(begun), timeout)
		require.EqualValues(t, 48, lookupAt(t, d, seq), "still listed")
		require.Zero(t, stats(t, d).Leases)
	}
	require.EqualValues(t, 2, stats(t, d).AdmissionTimeouts)
	require.NoError(t, p.Abort())
	require.EqualValues(t, 48, restoreAt(t, d, seq))

	// Room that comes and goes while the restore waits: it is told so each time, and decides by trying.
	outOfRAM(t, d)
	stop := make(chan struct{})
	var group sync.WaitGroup
	for w := range 3 {
		group.Go(func() {
			other := seqOf(t, filler.Namespace(), tokens(uint64(10+w), 80*16))
			for {
				select {
				case <-stop:
					return
				default:
				}
				if q, err := d.Begin(context.Background(), PublishRequest{Sequence: other, Offset: 80 * 16}); err == nil {
					q.Abort()
				}
			}
		})
	}
	for range 20 {
		r, err := d.Restore(context.Background(), seq, LookupOptions{})
		if err != nil {
			requireClass(t, err, ErrBusy)
			continue
		}
		verify(t, r, 1)
		r.Release()
		d.residency.evictClean(1 << 20)
	}
	close(stop)
	group.Wait()
	require.Equal(t, []int64{48}, books.requireListedIsReadable(t, d))

	// Larger than the whole tier: at once, and it stays listed.
	require.NoError(t, d.SetRAMBytes(context.Background(), 128<<10))
	waits := stats(t, d).AdmissionWaits
	_, err := d.Restore(context.Background(), seq, LookupOptions{})
	requireClass(t, err, ErrTooLarge)
	require.Equal(t, waits, stats(t, d).AdmissionWaits)
	require.EqualValues(t, 48, lookupAt(t, d, seq))
	require.NoError(t, d.SetRAMBytes(context.Background(), 1<<20))
	require.Equal(t, []int64{48}, books.requireListedIsReadable(t, d))
	recount(t, d)
}

// Pinned pages of one size with holes between them: a restore of larger pages succeeds while enough bytes are free.
func TestHolesDoNotFailARestore_RST06(t *testing.T) {
	d := openDB(t, tempDir(t), Options{RAMBytes: 2 << 20, AdmissionTimeout: time.Minute})
	large, small := testNamespace(t, 1, sevenPages(128<<10)...), testNamespace(t, 1, attentionOnly(64<<10, 16)...)
	seq := seqOf(t, large, tokens(1, 48))
	publish(t, d, seq, 48)
	outOfRAM(t, d)
	var held []*Restoration
	for i := range 28 { // 28 of 32 blocks of 64 KiB, every other one of which stays
		s := seqOf(t, small, tokens(uint64(100+i), 16))
		publish(t, d, s, 16)
		r, err := d.Restore(context.Background(), s, LookupOptions{})
		require.NoError(t, err)
		held = append(held, r)
	}
	for i := 0; i < len(held); i += 2 {
		held[i].Release()
	}
	require.EqualValues(t, 48, restoreAt(t, d, seq))
	require.Zero(t, stats(t, d).AdmissionTimeouts)
	for i := 1; i < len(held); i += 2 {
		verify(t, held[i], 1)
		held[i].Release()
	}
	recount(t, d)
}

// A load that failed for want of room is an answer once: the next restore of the same pages makes its own.
func TestFailedLoadIsDeliveredOnce_RST07(t *testing.T) {
	d := openDB(t, tempDir(t), Options{RAMBytes: 1 << 20, AdmissionTimeout: time.Minute})
	seq := seqOf(t, testNamespace(t, 1, sevenPages(128<<10)...), tokens(1, 48))
	publish(t, d, seq, 48)
	outOfRAM(t, d)
	p := begin(t, d, seqOf(t, seq.Namespace(), tokens(2, 48)), 48)
	cancel, a := startRestore(d, seq) // its load waits for room
	require.Eventually(t, func() bool { return d.admission.waiting.Load() == 1 }, patience, time.Millisecond)
	_, b := startRestore(d, seq) // waits for that load
	require.Eventually(t, func() bool { return stats(t, d).Leases == 2 }, patience, time.Millisecond)
	cancel()
	requireClass(t, <-a, ErrBusy)
	require.NoError(t, p.Abort())
	require.NoError(t, <-b)
	require.EqualValues(t, 48, restoreAt(t, d, seq))
	recount(t, d)
}

// A restore is one answer for all ranks: all of them have all their pages, or none has any.
func TestRestoreIsCollective_RST08(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	seq := seqOf(t, testNamespace(t, 4, sevenPages(4096)...), tokens(1, 59), tokens(2, 100))
	publish(t, d, seq, 59)
	r, err := d.Restore(context.Background(), seq, LookupOptions{})
	require.NoError(t, err)
	require.EqualValues(t, 59, r.Offset())
	for rank := range 4 {
		require.Len(t, r.Pages(rank), 8)
	}
	require.Nil(t, r.Pages(4))
	require.Nil(t, r.Pages(-1))
	verify(t, r, 4)
	r.Release()
	damageState(t, d, seq, 2)
	require.Zero(t, restoreAt(t, d, seq), "rank 2 has lost a page: nobody gets any")
	recount(t, d)
	require.Zero(t, stats(t, d).RAMUsed)
}

// When the longest candidate has lost a page, the same call retires it and gives the next shorter one that is whole; a layout that differs
// finds nothing at all.
func TestNextShorterInTheSameCall_RST09_RST10(t *testing.T) {
	for _, lost := range []int{1, 2, 3} {
		d := openDB(t, tempDir(t), Options{SupersedeGrace: -1})
		ns, books := testNamespace(t, 2, sevenPages(4096)...), shelf{}
		seq := seqOf(t, ns, tokens(1, 144))
		for _, n := range []int64{48, 96, 144} {
			books.publish(t, d, seq, n)
		}
		for i := range lost {
			f, err := seq.Fork(int64(144 - 48*i))
			require.NoError(t, err)
			damageState(t, d, f, i%2)
		}
		want := int64(144 - 48*lost)
		require.EqualValues(t, 144, lookupAt(t, d, seq), "nobody knows yet")
		r, err := d.Restore(context.Background(), seq, LookupOptions{})
		if want == 0 {
			requireClass(t, err, ErrNotFound)
		} else {
			require.NoError(t, err)
			require.Equal(t, want, r.Offset())
			verify(t, r, 2)
			r.Release()
		}
		require.Equal(t, want, lookupAt(t, d, seq))
		require.Len(t, books.requireListedIsReadable(t, d), 3-lost)
		require.EqualValues(t, lost, stats(t, d).RetiredTotal)
		for _, other := range []*Namespace{testNamespace(t, 3, sevenPages(4096)...), testNamespace(t, 2, sevenPages(8192)...), testNamespace(t, 2, tiny()...)} {
			require.Zero(t, restoreAt(t, d, seqOf(t, other, tokens(1, 144))))
		}
		recount(t, d)
	}
}

// Every manifest that needs a lost page is retired by the call that finds it, also those of other conversations.
func TestEveryManifestOfALostPageGoes_RST10_SUP10(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	ns, books := testNamespace(t, 1, sevenPages(4096)...), shelf{}
	shared := tokens(1, 48)
	branches := []*Sequence{}
	for i := range 5 {
		s := seqOf(t, ns, shared, tokens(uint64(10+i), 48))
		books.publish(t, d, s, 96)
		branches = append(branches, s)
	}
	unrelated := seqOf(t, ns, tokens(99, 48))
	books.publish(t, d, unrelated, 48)
	r, err := d.Restore(context.Background(), branches[0], LookupOptions{})
	require.NoError(t, err)
	d.residency.mu.Lock()
	at := r.pages[1].place[0] // the second page of the shared part
	d.residency.mu.Unlock()
	r.Release()
	outOfRAM(t, d)
	damageBlocks(t, segmentOf(d, at.Segment), at.Offset, at.Offset+1)
	require.Zero(t, restoreAt(t, d, branches[3]))
	for _, s := range branches {
		require.Zero(t, lookupAt(t, d, s))
	}
	require.Equal(t, []int64{48}, books.requireListedIsReadable(t, d))
	require.EqualValues(t, 5, stats(t, d).RetiredTotal)
	recount(t, d)
}

// What a restore pins is what it gives, and MaxOffset bounds it; pages beyond are not read.
func TestPinningIsBounded_RST11(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	seq := seqOf(t, testNamespace(t, 1, attentionOnly(4096, 16)...), tokens(1, 8*16))
	publish(t, d, seq, 8*16)
	outOfRAM(t, d)
	r, err := d.Restore(context.Background(), seq, LookupOptions{MaxOffset: 3 * 16})
	require.NoError(t, err)
	require.Len(t, r.Pages(0), 3)
	require.EqualValues(t, 3, stats(t, d).PagesRead)
	require.Equal(t, 3, d.residency.counts().pinned)
	require.EqualValues(t, 8*16, lookupAt(t, d, seq))
	all, err := d.Restore(context.Background(), seq, LookupOptions{})
	require.NoError(t, err)
	require.Len(t, all.Pages(0), 8)
	require.EqualValues(t, 8, stats(t, d).PagesRead, "three are there")
	verify(t, all, 1)
	all.Release()
	r.Release()
	recount(t, d)
}

// A restore with enough room evicts nothing; one that is short evicts what it needs and no more.
func TestRestoreMakesItsOwnRoom_RST12(t *testing.T) {
	d := openDB(t, tempDir(t), Options{RAMBytes: 2 << 20})
	ns := testNamespace(t, 1, sevenPages(64<<10)...)
	var all []*Sequence
	for i := range 4 {
		s := seqOf(t, ns, tokens(uint64(i), 48))
		publish(t, d, s, 48)
		all = append(all, s)
	}
	d.residency.evictClean(7 * 64 << 10) // the first one
	before := stats(t, d)
	require.EqualValues(t, 48, restoreAt(t, d, all[0]))
	after := stats(t, d)
	require.Equal(t, before.PagesEvicted, after.PagesEvicted, "there was room")
	publish(t, d, seqOf(t, ns, tokens(9, 48)), 48)
	before = stats(t, d)
	require.EqualValues(t, 48, restoreAt(t, d, all[1]))
	after = stats(t, d)
	require.LessOrEqual(t, after.PagesEvicted-before.PagesEvicted, int64(7))
	require.LessOrEqual(t, after.AdmissionWaits-before.AdmissionWaits, int64(1))
	require.Zero(t, after.AdmissionTimeouts)
	recount(t, d)
}

// Memory into which a load has failed is never readable, by whoever was waiting for the same load.
func TestFailedLoadIsNeverReadable_RST13(t *testing.T) {
	v := newValve()
	d := openDB(t, tempDir(t), Options{segmentFS: v.segments()})
	ns, books := testNamespace(t, 2, sevenPages(4096)...), shelf{}
	seq := seqOf(t, ns, tokens(1, 96))
	for _, n := range []int64{48, 96} {
		books.publish(t, d, seq, n)
	}
	damageState(t, d, seq, 1)
	open := v.close("read")
	var group sync.WaitGroup
	got := make(chan int64, 8)
	for range 8 {
		group.Go(func() {
			r, err := d.Restore(context.Background(), seq, LookupOptions{})
			if err != nil {
				got <- -1
				return
			}
			defer r.Release()
			for rank := range 2 {
				for _, p := range r.Pages(rank) {
					if string(content(p.Key, rank, int64(len(p.Bytes)))) != string(p.Bytes) {
						got <- -2
						return
					}
				}
			}
			got <- r.Offset()
		})
	}
	v.waitFor(t, "read")
	open()
	group.Wait()
	for range 8 {
		require.EqualValues(t, 48, <-got)
	}
	require.Equal(t, []int64{48}, books.requireListedIsReadable(t, d))
	recount(t, d)
}
