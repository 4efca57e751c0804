package db

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

// stocked makes a closed directory with two checkpoints of one conversation on two ranks (600 and 1000 tokens), one of
// another conversation, and a loose page; it gives the sequences and the generations in that order.
func stocked(t testing.TB, o Options) (dir string, seqs []*Sequence, gens []Generation) {
	t.Helper()
	dir = tempDir(t)
	d := openDB(t, dir, o)
	seqs, gens = stock(t, d)
	closeDB(t, d)
	return dir, seqs, gens
}

func stock(t testing.TB, d *DB) (seqs []*Sequence, gens []Generation) {
	t.Helper()
	ns := testNamespace(t, 2)
	long, other := seqOf(t, ns, tokens(1, 1000)), seqOf(t, ns, tokens(2, 700))
	a, _ := publish(t, d, long, 600)
	b, _ := publish(t, d, long, 1000)
	c, _ := publish(t, d, other, 700)
	require.NoError(t, d.PutLoose(context.Background(), ns, LoosePage{Key: []byte("k"), Bytes: bytes.Repeat([]byte("v"), 5000)}))
	return []*Sequence{long, long, other}, []Generation{a, b, c}
}

func verifyDir(t testing.TB, dir string) *VerifyReport {
	t.Helper()
	before := treeOf(t, dir)
	r, err := Verify(context.Background(), dir, VerifyOptions{})
	require.NoError(t, err)
	require.True(t, r.Complete)
	require.Equal(t, before, treeOf(t, dir), "verify changes nothing")
	return r
}

// damageOf leaves out what the next open clears up by itself.
func damageOf(r *VerifyReport) (found []Finding) {
	for _, f := range r.Findings {
		if f.Damage() {
			found = append(found, f)
		}
	}
	return found
}

func TestVerifyOfAHealthyDirectoryFindsNothing(t *testing.T) {
	dir, _, _ := stocked(t, Options{})
	r := verifyDir(t, dir)
	require.Empty(t, r.Findings)
	require.False(t, r.Damaged())
	require.EqualValues(t, 3, r.Checkpoints)
	require.EqualValues(t, 1, r.Loose)
	// 38 pages at 600, the last partial; 63 at 1000, the first 37 shared; 44 at 700; three states; a loose page.
	require.EqualValues(t, 38+26+44+3+1, r.Pages)
	require.EqualValues(t, 2*(38+26+44+3)+1, r.Copies)

	d := openDB(t, dir, Options{})
	_, err := Verify(context.Background(), dir, VerifyOptions{})
	require.ErrorIs(t, err, ErrLocked)
	crash(t, d)
	_, err = Verify(context.Background(), filepath.Join(dir, "nowhere"), VerifyOptions{})
	require.ErrorIs(t, err, ErrNotFound)
	_, err = Verify(context.Background(), dir, VerifyOptions{BytesPerSecond: -1})
	require.ErrorIs(t, err, ErrInvalid)
}

// Given one flipped bit in the page of one rank, when verify reads it, then the finding names file, offset, page, rank, group
// and every checkpoint that cannot be restored, and no other.
func TestVerifyNamesWhatABadPageCosts_B27(t *testing.T) {
	dir, _, gens := stocked(t, Options{})
	d := openDB(t, dir, Options{})
	shared := placesOf(t, d, gens[0], 0)[2*3+1] // page 3 of rank 1
	closeDB(t, d)
	flip(t, segmentFile(dir, shared.Segment), shared.Offset+17)
	r := verifyDir(t, dir)
	require.True(t, r.Damaged())
	require.Len(t, r.Findings, 1)
	f := r.Findings[0]
	require.Equal(t, "page", f.Kind)
	require.Equal(t, segmentFile(r.Directory, shared.Segment), f.File)
	require.Equal(t, shared.Offset, f.Offset)
	require.Equal(t, 1, f.Rank)
	require.Equal(t, "attention:kv", f.Group)
	require.ElementsMatch(t, gens[:2], f.Checkpoints)
	require.ElementsMatch(t, gens[:2], r.Affected)
	require.Equal(t, ByRecover, f.Remedy)
	require.Contains(t, f.String(), "2 checkpoints")
}

// A pass that was broken off goes on where it was, and together the parts read every page.
func TestVerifyGoesOnWhereItWas(t *testing.T) {
	dir, _, _ := stocked(t, Options{})
	d := openDB(t, dir, Options{})
	publish(t, d, seqOf(t, testNamespace(t, 2), tokens(3, 4000)), 4000)
	closeDB(t, d)
	whole := verifyDir(t, dir)
	var pages int64
	var from txn.Key
	for parts := 1; ; parts++ {
		ctx, cancel := context.WithCancel(context.Background())
		v, err := newVerifier(dir, VerifyOptions{From: from})
		require.NoError(t, err)
		v.pause = func(context.Context, int64) { cancel() } // after the first batch
		r, err := v.run(ctx)
		cancel()
		require.NoError(t, err)
		pages += r.Pages - r.Loose
		if r.Next.IsZero() {
			require.Greater(t, parts, 1, "the first part was broken off")
			break
		}
		require.False(t, r.Complete)
		require.Positive(t, bytes.Compare(r.Next[:], from[:]))
		from = r.Next
	}
	require.GreaterOrEqual(t, pages, whole.Pages-whole.Loose)
}

// Recover shows first and changes nothing, then does exactly that; and has nothing to do on a healthy directory.
func TestRecoverRetiresWhatCannotBeRestored_B40(t *testing.T) {
	dir, seqs, gens := stocked(t, Options{})
	healthy := treeOf(t, dir)
	for _, apply := range []bool{false, true} {
		r, err := Recover(context.Background(), dir, RecoverOptions{Apply: apply, Logger: quiet})
		require.NoError(t, err)
		require.Empty(t, r.Changes)
		require.False(t, r.Applied)
		require.Equal(t, healthy, treeOf(t, dir), "a healthy directory stays byte for byte")
	}
	d := openDB(t, dir, Options{})
	at := placesOf(t, d, gens[1], 1)[0]
	closeDB(t, d)
	flip(t, segmentFile(dir, at.Segment), at.Offset)
	damaged := treeOf(t, dir)
	r, err := Recover(context.Background(), dir, RecoverOptions{})
	require.NoError(t, err)
	require.Len(t, r.Changes, 1)
	require.Equal(t, "retire", r.Changes[0].Action)
	require.Equal(t, []string{gens[1].String()}, r.Changes[0].Checkpoints)
	require.Equal(t, damaged, treeOf(t, dir), "a dry run changes nothing")

	r, err = Recover(context.Background(), dir, RecoverOptions{Apply: true, Logger: quiet})
	require.NoError(t, err)
	require.True(t, r.Applied)
	require.Equal(t, 1, r.Retired)
	require.Empty(t, verifyDir(t, dir).Findings)
	d = openDB(t, dir, Options{})
	require.EqualValues(t, 600, restoreAt(t, d, seqs[1]))
	require.EqualValues(t, 700, restoreAt(t, d, seqs[2]))
	checkCatalogue(t, d)
}

// A segment that no longer describes itself costs nothing: its pages are written anew.
func TestRecoverRewritesWhatIsNotDescribed(t *testing.T) {
	dir, seqs, gens := stocked(t, Options{})
	d := openDB(t, dir, Options{})
	at := placesOf(t, d, gens[0], 0)[0]
	closeDB(t, d)
	flip(t, segmentFile(dir, at.Segment), 4096+70) // in the first descriptor
	r := verifyDir(t, dir)
	require.Len(t, damageOf(r), 1)
	require.Equal(t, "descriptor", damageOf(r)[0].Kind)
	require.Empty(t, r.Affected)
	rec, err := Recover(context.Background(), dir, RecoverOptions{Apply: true, Logger: quiet})
	require.NoError(t, err)
	require.Positive(t, rec.Rewritten)
	require.Zero(t, rec.Retired)
	require.Empty(t, verifyDir(t, dir).Findings)
	d = openDB(t, dir, Options{})
	require.EqualValues(t, 1000, restoreAt(t, d, seqs[1]))
	require.EqualValues(t, 700, restoreAt(t, d, seqs[2]))
}

// A scrub finds a bad copy before anybody asks for it: what RAM has is written anew, what it has not is retired, and nothing
// else is touched.
func TestScrubHealsFromRAMOrRetires(t *testing.T) {
	dir := tempDir(t)
	d := openDB(t, dir, Options{})
	seqs, gens := stock(t, d)
	r, err := d.Scrub(context.Background(), ScrubOptions{})
	require.NoError(t, err)
	require.EqualValues(t, 2*(38+26+44+3)+1, r.Copies)
	require.Zero(t, r.Healed+r.Lost+r.Retired)

	at := placesOf(t, d, gens[0], 0)[5]
	flip(t, segmentFile(dir, at.Segment), at.Offset+1)
	r, err = d.Scrub(context.Background(), ScrubOptions{})
	require.NoError(t, err)
	require.EqualValues(t, 1, r.Healed)
	require.Zero(t, r.Lost+r.Retired)
	require.NotEqual(t, at, placesOf(t, d, gens[0], 0)[5])
	closeDB(t, d)
	require.Empty(t, damageOf(verifyDir(t, dir)))

	d = openDB(t, dir, Options{}) // nothing in RAM
	at = placesOf(t, d, gens[1], 1)[1]
	flip(t, segmentFile(dir, at.Segment), at.Offset+1)
	r, err = d.Scrub(context.Background(), ScrubOptions{})
	require.NoError(t, err)
	require.EqualValues(t, 1, r.Lost)
	require.EqualValues(t, 1, r.Retired)
	require.EqualValues(t, 1, stats(t, d).Quarantined)
	require.EqualValues(t, 600, restoreAt(t, d, seqs[1]))
	publish(t, d, seqs[1], 1000)
	require.EqualValues(t, 1000, restoreAt(t, d, seqs[1]))
	require.Zero(t, stats(t, d).Quarantined)
	closeDB(t, d)
	require.Empty(t, damageOf(verifyDir(t, dir)))
}

// The background scrub ends with the database, and says what it did.
func TestScrubInTheBackground(t *testing.T) {
	dir, _, gens := stocked(t, Options{})
	d := openDB(t, dir, Options{})
	at := placesOf(t, d, gens[2], 1)[0]
	closeDB(t, d)
	flip(t, segmentFile(dir, at.Segment), at.Offset+1)
	d = openDB(t, dir, Options{ScrubBytesPerSecond: 1 << 40})
	require.Eventually(t, func() bool {
		r, ok := d.Scrubbed()
		return ok && r.Lost == 1 && r.Retired == 1
	}, patience, time.Millisecond)
	closeDB(t, d)
	d = openDB(t, dir, Options{ScrubBytesPerSecond: 1}) // a rate that no pass ends at
	closeDB(t, d)
}

// What a verify of a directory after a crash finds is what the next open clears up, and then nothing.
func TestVerifyAfterACrashFindsNoDamage(t *testing.T) {
	dir := tempDir(t)
	d := openDB(t, dir, Options{WritePolicy: OnEvict})
	stock(t, d)
	crash(t, d)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "HOLDFAST.new"), []byte("x"), 0o600))
	r := verifyDir(t, dir)
	require.NotEmpty(t, r.Findings)
	require.Empty(t, damageOf(r))
	rec, err := Recover(context.Background(), dir, RecoverOptions{Apply: true, Logger: quiet})
	require.NoError(t, err)
	require.Equal(t, 3, rec.Retired)
	require.Empty(t, verifyDir(t, dir).Findings)
}
