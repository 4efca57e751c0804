package db

import (
	"context"
	"fmt"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

// shared is a layout like that of the overlap tests: three attention pages that two prefixes of 48 tokens and more share, and
// a state page and an auxiliary one of each offset.
func shared() []Group {
	return []Group{
		{Name: "attention:kv", Kind: Attention, PageBytes: 128, PageTokens: 16},
		{Name: "recurrent:state", Kind: Recurrent, PageBytes: 256, Pages: 1},
		{Name: "auxiliary:draft", Kind: Auxiliary, PageBytes: 96, Pages: 1},
	}
}

// awaitWaiter returns once somebody waits for a change of the page.
func awaitWaiter(t testing.TB, d *DB, key txn.Key) {
	t.Helper()
	for waiting := false; !waiting; runtime.Gosched() {
		d.residency.mu.Lock()
		p := d.residency.pages.get(key)
		waiting = p != nil && p.use != nil && p.use.changed != nil
		d.residency.mu.Unlock()
	}
}

// An exact republication is known as one before anything is reserved, also after a restart; the same prefix with other content
// is another generation; what is listed stays found all the while.
func TestExactRepublicationWritesNothing_DED01(t *testing.T) {
	restarts(t, func(t *testing.T, crashed bool) {
		d := openDB(t, tempDir(t), Options{})
		seq, books := seqOf(t, testNamespace(t, 2), tokens(1, 1000)), shelf{}
		first, _ := books.publish(t, d, seq, 1000, withMeta("m"))
		d = reopen(t, d, crashed)
		require.EqualValues(t, 1000, lookupAt(t, d, seq)) // the first find after a restart is noted
		before, counted := still(t, d), stats(t, d)
		for range 3 {
			p, err := d.Begin(context.Background(), PublishRequest{Sequence: seq, Offset: 1000, Meta: []byte("m"), Durable: true})
			require.NoError(t, err)
			require.True(t, p.Listed())
			require.Equal(t, first, p.Generation())
			require.Equal(t, before, still(t, d), "nothing is reserved")
			require.Empty(t, slots(t, p, 0))
			require.False(t, commit(t, p, 1))
			require.NoError(t, p.Abort())
			require.EqualValues(t, 1000, lookupAt(t, d, seq))
		}
		now := stats(t, d)
		require.EqualValues(t, 3, now.Replays)
		require.Equal(t, counted.LogWritten, now.LogWritten)
		require.Equal(t, counted.SegmentWritten, now.SegmentWritten)
		require.Zero(t, now.Published)
		require.Equal(t, before, still(t, d))

		other, bytes := books.publish(t, d, seq, 1000, withMeta("other"))
		require.NotEqual(t, first, other)
		require.Zero(t, bytes, "its pages are there")
		require.Equal(t, []int64{1000}, books.requireListedIsReadable(t, d))
	})
}

// A checkpoint that was listed in RAM and is published again, to be durable, is durable when that returns.
func TestRepublicationCanAskForDurability_DED01(t *testing.T) {
	for _, policy := range []WritePolicy{OnEvict, OnReuse, Never} {
		d := openDB(t, tempDir(t), Options{WritePolicy: policy})
		seq, books := seqOf(t, testNamespace(t, 2, shared()...), tokens(1, 1000)), shelf{}
		gen, _ := books.publish(t, d, seq, 1000)
		require.EqualValues(t, 1, stats(t, d).Undurable)
		p, err := d.Begin(context.Background(), PublishRequest{Sequence: seq, Offset: 1000, Durable: true})
		require.NoError(t, err)
		for rank := range 2 {
			require.Empty(t, slots(t, p, rank))
			require.False(t, commit(t, p, rank))
		}
		c, err := d.Checkpoint(gen)
		require.NoError(t, err)
		require.True(t, c.Durable, policy)
		require.Zero(t, stats(t, d).Undurable)
		written := stats(t, d).PagesWritten
		require.EqualValues(t, 2*(63+2), written)
		again, err := d.Begin(context.Background(), PublishRequest{Sequence: seq, Offset: 1000, Durable: true})
		require.NoError(t, err)
		require.True(t, again.Listed())
		require.Equal(t, written, stats(t, d).PagesWritten, "once")
		d = reopen(t, d, true)
		require.Equal(t, []int64{1000}, books.requireListedIsReadable(t, d))
	}
}

// Pages that are there are not asked for again; the others are.
func TestResidentPagesAreNotCopiedAgain_DED02(t *testing.T) {
	restarts(t, func(t *testing.T, crashed bool) {
		d := openDB(t, tempDir(t), Options{})
		ns, text, books := testNamespace(t, 1, shared()...), tokens(1, 48), shelf{}
		books.publish(t, d, seqOf(t, ns, text), 48)
		d = reopen(t, d, crashed)
		long := seqOf(t, ns, text, tokens(2, 16))
		p := begin(t, d, long, 64)
		var asked []string
		for _, s := range slots(t, p, 0) {
			asked = append(asked, fmt.Sprintf("%s %d", s.GroupName(), s.Position()))
		}
		require.Equal(t, []string{"attention:kv 3", "recurrent:state 0", "auxiliary:draft 0"}, asked)
		fill(t, p, 0)
		require.True(t, commit(t, p, 0))
		books.keep(t, p.Generation(), long, 64)
		a, err := d.Restore(context.Background(), seqOf(t, ns, text), LookupOptions{})
		require.NoError(t, err)
		b, err := d.Restore(context.Background(), long, LookupOptions{})
		require.NoError(t, err)
		for i := range 3 {
			require.Equal(t, a.Pages(0)[i].Key, b.Pages(0)[i].Key)
			require.Same(t, &a.Pages(0)[i].Bytes[0], &b.Pages(0)[i].Bytes[0], "one copy in RAM")
		}
		require.NotEqual(t, a.Pages(0)[3].Key, b.Pages(0)[4].Key)
		a.Release()
		b.Release()
		require.Equal(t, []int64{48, 64}, books.requireListedIsReadable(t, d))
	})
}

// A publication that shares pages with one that is still filling them waits; it shares them when they are finished, and fills
// them itself when the first gives up. It is listed either way.
func TestFollowerSharesOrTakesOver_DED03(t *testing.T) {
	for _, fails := range []bool{false, true} {
		t.Run(fmt.Sprintf("first fails %v", fails), func(t *testing.T) {
			d := openDB(t, tempDir(t), Options{})
			ns, text, books := testNamespace(t, 1, shared()...), tokens(1, 64), shelf{}
			short, long := seqOf(t, ns, text[:48]), seqOf(t, ns, text)
			a, b := begin(t, d, short, 48), begin(t, d, long, 64)
			_, err := b.Commit(context.Background(), 0)
			require.ErrorIs(t, err, ErrBusy)
			first := slots(t, a, 0)
			got := make(chan []*Slot)
			go func() {
				s, err := b.Slots(context.Background(), 0)
				if err != nil {
					s = nil
				}
				got <- s
			}()
			awaitWaiter(t, d, first[0].Key())
			require.EqualValues(t, 2, stats(t, d).Pending)
			if fails {
				_, err := first[0].Write(make([]byte, 100)) // unfinished bytes that nobody may ever read
				require.NoError(t, err)
				require.NoError(t, a.Abort())
			} else {
				fill(t, a, 0)
				require.True(t, commit(t, a, 0))
				books.keep(t, a.Generation(), short, 48)
			}
			mine := <-got
			if fails {
				require.Len(t, mine, 4+2)
			} else {
				require.Len(t, mine, 1+2)
			}
			fill(t, b, 0)
			require.True(t, commit(t, b, 0))
			books.keep(t, b.Generation(), long, 64)
			require.Len(t, books.requireListedIsReadable(t, d), len(books))
			d = reopen(t, d, true)
			require.Len(t, books.requireListedIsReadable(t, d), len(books))
			requireEmpty(t, d)
		})
	}
}

// Three publications follow one that fills. Whoever is first in line takes over when the one before it gives up, with
// all pages to fill; the last one finds them filled. Those that are still waiting are told to try again, and nothing else.
func TestChainOfFollowers_DED03(t *testing.T) {
	for _, giveUp := range []int{0, 1, 2, 3} {
		t.Run(fmt.Sprintf("%d give up", giveUp), func(t *testing.T) {
			d := openDB(t, tempDir(t), Options{})
			ns, text, books := testNamespace(t, 2, shared()...), tokens(1, 48), shelf{}
			var line []*Publication
			var seqs []*Sequence
			for i := range 4 {
				seq := seqOf(t, ns, text, tokens(uint64(10+i), 16))
				seqs = append(seqs, seq)
				line = append(line, begin(t, d, seq, 64))
			}
			for _, p := range line[1:] {
				for rank := range 2 {
					_, err := p.Commit(context.Background(), rank)
					require.ErrorIs(t, err, ErrBusy)
					require.NotErrorIs(t, err, ErrConflict)
					ctx, cancel := context.WithTimeout(context.Background(), time.Microsecond)
					_, err = p.Slots(ctx, rank)
					cancel()
					require.ErrorIs(t, err, ErrBusy)
				}
			}
			for i, p := range line[:giveUp] {
				require.Len(t, slots(t, p, 0), 4+2, "publication %d has all of its pages to fill", i)
				_, err := slots(t, p, 0)[0].Write([]byte("half"))
				require.NoError(t, err)
				if i == 1 {
					p.end("taken back: for the test")
				} else {
					require.NoError(t, p.Abort())
				}
			}
			for i, p := range line[giveUp:] {
				want := 1 + 2
				if i == 0 {
					want = 4 + 2
				}
				for rank := range 2 {
					require.Len(t, slots(t, p, rank), want)
					fill(t, p, rank)
					require.Equal(t, rank == 1, commit(t, p, rank))
				}
				books.keep(t, p.Generation(), seqs[giveUp+i], 64)
			}
			require.Len(t, books.requireListedIsReadable(t, d), 4-giveUp)
			d = reopen(t, d, false)
			require.Len(t, books.requireListedIsReadable(t, d), 4-giveUp)
			requireEmpty(t, d)
		})
	}
}

// The first one commits some ranks and gives up: who takes over fills the others only, and a rank that is done is done.
func TestTakeoverKeepsFinishedRanks_DED03(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	ns, text, books := testNamespace(t, 3, shared()...), tokens(1, 48), shelf{}
	a := begin(t, d, seqOf(t, ns, text), 48)
	long := seqOf(t, ns, text, tokens(2, 16))
	b := begin(t, d, long, 64)
	fill(t, a, 1)
	require.False(t, commit(t, a, 1))
	require.Len(t, slots(t, b, 1), 1+2, "the rank that the first has committed need not wait for the others")
	fill(t, b, 1)
	require.False(t, commit(t, b, 1))
	require.NoError(t, a.Abort())
	for _, rank := range []int{2, 0} {
		require.Len(t, slots(t, b, rank), 4+2)
		fill(t, b, rank)
		require.Equal(t, rank == 0, commit(t, b, rank))
	}
	books.keep(t, b.Generation(), long, 64)
	require.Equal(t, []int64{64}, books.requireListedIsReadable(t, d))
	requireEmpty(t, d)
}

// While the copy of one publication is stuck, one that shares its pages waits and everything else is served.
func TestStuckCopyDelaysItsFollowersOnly_DED04(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	ns, text, books := testNamespace(t, 1, shared()...), tokens(1, 48), shelf{}
	a := begin(t, d, seqOf(t, ns, text), 48)
	copying, err := a.Transfer(0)
	require.NoError(t, err)
	long := seqOf(t, ns, text, tokens(2, 16))
	b := begin(t, d, long, 64)
	done := make(chan error)
	go func() {
		s, err := b.Slots(context.Background(), 0)
		for _, s := range s {
			if err == nil {
				_, err = s.Write(content(s.Key(), 0, s.Size()))
			}
		}
		if err == nil {
			_, err = b.Commit(context.Background(), 0)
		}
		done <- err
	}()
	awaitWaiter(t, d, slots(t, a, 0)[0].Key())
	for i := range 5 {
		other := seqOf(t, ns, tokens(uint64(50+i), 80))
		books.publish(t, d, other, 80)
		require.EqualValues(t, 80, restoreAt(t, d, other))
	}
	select {
	case <-done:
		t.Fatal("the follower did not wait")
	default:
	}
	fill(t, a, 0)
	_, err = a.Commit(context.Background(), 0)
	require.ErrorIs(t, err, ErrBusy, "the copy is not proven finished")
	copying.Done()
	require.True(t, commit(t, a, 0))
	require.NoError(t, <-done)
	books.keep(t, a.Generation(), seqOf(t, ns, text), 48)
	books.keep(t, b.Generation(), long, 64)
	require.Len(t, books.requireListedIsReadable(t, d), 7)
}

// A writer that dies in the middle of a copy is taken back at its deadline. Who shares its pages gets every one of them to
// fill, never one that is half written; and while the dead writer's copy is not proven finished, nobody gets its memory.
func TestDeadWriterIsTakenOver_DED05(t *testing.T) {
	for _, copying := range []bool{false, true} {
		t.Run(fmt.Sprintf("copying %v", copying), func(t *testing.T) {
			d := openDB(t, tempDir(t), Options{})
			ns, text, books := testNamespace(t, 1, shared()...), tokens(1, 48), shelf{}
			a := begin(t, d, seqOf(t, ns, text), 48, func(r *PublishRequest) { r.Lease = time.Hour })
			half := slots(t, a, 0)
			_, err := half[0].Write(make([]byte, 100))
			require.NoError(t, err)
			long := seqOf(t, ns, text, tokens(2, 16))
			b := begin(t, d, long, 64)
			var transfer *Transfer
			if copying {
				transfer, err = a.Transfer(0)
				require.NoError(t, err)
			}
			got := make(chan error)
			go func() {
				_, err := b.Slots(context.Background(), 0)
				got <- err
			}()
			awaitWaiter(t, d, half[0].Key())
			a.end("taken back: for the test")
			err = <-got
			if copying {
				require.ErrorIs(t, err, ErrBusy, "the pages are in quarantine: begin again")
				require.NoError(t, b.Abort())
				b = begin(t, d, long, 64)
			} else {
				require.NoError(t, err)
			}
			mine := slots(t, b, 0)
			require.Len(t, mine, 4+2)
			if copying {
				memory := map[*byte]bool{}
				for _, s := range half {
					memory[&s.buf[0]] = true
				}
				for _, s := range mine {
					require.False(t, memory[&s.Buffer()[0]], "memory under a copy is nobody else's")
				}
				transfer.Done()
			}
			fill(t, b, 0)
			require.True(t, commit(t, b, 0))
			books.keep(t, b.Generation(), long, 64)
			require.Equal(t, []int64{64}, books.requireListedIsReadable(t, d))
			d = reopen(t, d, true)
			require.Equal(t, []int64{64}, books.requireListedIsReadable(t, d))
			requireEmpty(t, d)
		})
	}
}

// A checkpoint of which the first of 25 sub-pages, or a 25th of each page, was written is refused, with page and byte counts, and
// leaves nothing. One that is whole writes exactly what was declared and gives exactly that back.
func TestPartOfAPageIsNoPage_B03(t *testing.T) {
	groups := []Group{
		{Name: "attention:kv", Kind: Attention, PageBytes: 25 * 1000, PageTokens: 16},
		{Name: "auxiliary:sub", Kind: Auxiliary, PageBytes: 1000, Pages: 25},
	}
	restarts(t, func(t *testing.T, crashed bool) {
		d := openDB(t, tempDir(t), Options{})
		ns, books := testNamespace(t, 2, groups...), shelf{}
		a, b := seqOf(t, ns, tokens(1, 60)), seqOf(t, ns, tokens(2, 60))
		before := still(t, d)

		p := begin(t, d, a, 60)
		fill(t, p, 0)
		require.False(t, commit(t, p, 0))
		for _, s := range slots(t, p, 1) {
			if s.GroupName() == "attention:kv" || s.Position() == 0 {
				_, err := s.Write(content(s.Key(), 1, s.Size()))
				require.NoError(t, err)
			}
		}
		_, err := p.Commit(context.Background(), 1)
		require.ErrorIs(t, err, ErrInvalid)
		require.ErrorContains(t, err, `rank 1: group "auxiliary:sub", page 1: 0 of 1000 bytes`)
		require.NoError(t, p.Abort())
		require.Equal(t, before, still(t, d))

		p = begin(t, d, a, 60)
		for rank := range 2 {
			for _, s := range slots(t, p, rank) {
				_, err := s.Write(content(s.Key(), rank, s.Size()/25))
				require.NoError(t, err)
			}
			_, err = p.Commit(context.Background(), rank)
			require.ErrorIs(t, err, ErrInvalid)
			require.ErrorContains(t, err, `group "attention:kv", page 0: 1000 of 25000 bytes`)
		}
		require.NoError(t, p.Abort())
		require.Equal(t, before, still(t, d))
		require.Zero(t, stats(t, d).PayloadWritten)

		_, bytes := books.publish(t, d, b, 60)
		declared := int64(2 * (4*25*1000 + 25*1000))
		require.Equal(t, declared, bytes)
		require.Equal(t, declared, stats(t, d).PayloadWritten, "a ratio of exactly one")
		require.Equal(t, declared, stats(t, d).PageBytes)
		d = reopen(t, d, crashed)
		require.Zero(t, lookupAt(t, d, a))
		r, err := d.Restore(context.Background(), b, LookupOptions{})
		require.NoError(t, err)
		for rank := range 2 {
			for _, page := range r.Pages(rank) {
				require.Len(t, page.Bytes, int(groups[page.Group].PageBytes))
			}
		}
		r.Release()
		require.Equal(t, []int64{60}, books.requireListedIsReadable(t, d))
	})
}

// The writes of a life: replays are free, a successor costs its new page, a branch its new pages, and what nothing needs any
// more is given back, so that the counters and du agree.
func TestBytesFollowWhatIsNew_B05(t *testing.T) {
	const pageBytes, pageTokens = 1 << 20, 200
	d := openDB(t, tempDir(t), Options{RAMBytes: 64 << 20, SegmentBytes: 64 << 20})
	ns, text, books := testNamespace(t, 1, attentionOnly(pageBytes, pageTokens)...), tokens(1, 1200), shelf{}
	a, _ := books.publish(t, d, seqOf(t, ns, text), 1000)
	for range 10 {
		was := stats(t, d)
		again, bytes := publish(t, d, seqOf(t, ns, text), 1000)
		now := stats(t, d)
		require.Equal(t, a, again)
		require.Zero(t, bytes)
		require.Equal(t, was.SegmentWritten, now.SegmentWritten, "no payload")
		require.LessOrEqual(t, now.LogWritten-was.LogWritten, int64(4<<10))
	}
	was := stats(t, d)
	b, bytes := books.publish(t, d, seqOf(t, ns, text), 1200)
	require.EqualValues(t, pageBytes, bytes)
	require.EqualValues(t, pageBytes, stats(t, d).PayloadWritten-was.PayloadWritten, "exactly the new page")
	require.NoError(t, d.Delete(context.Background(), a))
	require.EqualValues(t, 1200, restoreAt(t, d, seqOf(t, ns, text)), "what the successor shares stays")

	branch := seqOf(t, ns, text[:800], tokens(2, 400))
	c, bytes := books.publish(t, d, branch, 1200)
	require.EqualValues(t, 2*pageBytes, bytes)
	require.NoError(t, d.Supersede(context.Background(), c, b))
	require.NoError(t, d.Delete(context.Background(), b))
	idle(d)
	require.Equal(t, []int64{1200}, books.requireListedIsReadable(t, d))
	s := stats(t, d)
	require.EqualValues(t, 6, s.Pages)
	require.EqualValues(t, 6*pageBytes, s.PageBytes)
	require.EqualValues(t, 6*pageBytes, s.DiskBytes)
	require.NoError(t, d.segments.Seal(context.Background())) // gives preallocated space back
	require.InEpsilon(t, s.DiskBytes, allocated(t, filepath.Join(d.dir.path, dataName)), 0.01, "du")
	d = reopen(t, d, false)
	require.InEpsilon(t, stats(t, d).DiskBytes, allocated(t, filepath.Join(d.dir.path, dataName)), 0.01, "du after a restart")
	require.Equal(t, []int64{1200}, books.requireListedIsReadable(t, d))
	requireEmpty(t, d)
}

// A conversation of twenty turns writes little more than what is new, log and segment descriptors included.
func TestConversationWritesWhatIsNew_B05(t *testing.T) {
	d := openDB(t, tempDir(t), Options{})
	seq, books := testNamespace(t, 2).NewSequence(), shelf{}
	var fresh int64
	start := stats(t, d)
	for turn := range 20 {
		require.NoError(t, seq.Append(tokens(uint64(turn), 640)))
		_, bytes := books.publish(t, d, seq, seq.Len())
		fresh += bytes
	}
	s := stats(t, d)
	require.EqualValues(t, 20*2*(40*4096+12345), fresh)
	written := s.SegmentWritten - start.SegmentWritten + s.LogWritten - start.LogWritten
	require.LessOrEqual(t, float64(written), 1.2*float64(fresh))
	t.Logf("written: %.3f of the new bytes", float64(written)/float64(fresh))
	books.requireListedIsReadable(t, d)
}

// A checkpoint of a hybrid model without its recurrent state cannot be published, whether the page is left out of the list, its
// group is, or nobody fills it. And what a restore reports is what a lookup finds.
func TestHybridWithoutStateIsRefused_B08(t *testing.T) {
	restarts(t, func(t *testing.T, crashed bool) {
		d := openDB(t, tempDir(t), Options{})
		seq, books := seqOf(t, testNamespace(t, 1, tiny()...), tokens(1, 5000)), shelf{}
		attention := PageSet{Group: "attention:kv"}
		for i := range int64(313) {
			attention.Positions = append(attention.Positions, i)
		}
		before := still(t, d)
		for _, groups := range [][]PageSet{
			{attention},
			{attention, {Group: "recurrent:state"}},
			{attention, {Group: "recurrent:state", Positions: []int64{}}},
			{attention, {Group: "recurrent:other", Positions: []int64{0}}},
		} {
			_, err := d.Begin(context.Background(), PublishRequest{Sequence: seq, Offset: 5000, Groups: groups})
			require.ErrorIs(t, err, ErrInvalid)
			if len(groups) > 1 {
				require.ErrorContains(t, err, "recurrent")
				require.ErrorContains(t, err, "5000")
			}
		}
		p := begin(t, d, seq, 5000)
		for _, s := range slots(t, p, 0) {
			if s.Group() == 0 {
				_, err := s.Write(content(s.Key(), 0, s.Size()))
				require.NoError(t, err)
			}
		}
		_, err := p.Commit(context.Background(), 0)
		require.ErrorIs(t, err, ErrInvalid)
		require.ErrorContains(t, err, `group "recurrent:state", page 0: 0 of 96 bytes`)
		require.NoError(t, p.Abort())
		require.Equal(t, before, still(t, d))
		d = reopen(t, d, crashed)
		require.Zero(t, lookupAt(t, d, seq))
		require.Zero(t, restoreAt(t, d, seq))

		books.publish(t, d, seq, 4000)
		d = reopen(t, d, crashed)
		require.EqualValues(t, 4000, lookupAt(t, d, seq))
		require.EqualValues(t, 4000, restoreAt(t, d, seq))
		require.Equal(t, []int64{4000}, books.requireListedIsReadable(t, d))
	})
}
