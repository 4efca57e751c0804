package server

import (
	"context"
	"errors"
	"time"

	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/state"
	"github.com/holdfast-db/holdfast/db"
)

// Published says what became of one checkpoint.
type Published struct {
	Kind       string  `json:"kind"`
	Offset     int     `json:"offset"`
	Generation string  `json:"generation,omitempty"`
	Listed     bool    `json:"listed"`
	Known      bool    `json:"known,omitempty"` // it was listed before
	Pages      int     `json:"pages"`           // new ones
	Bytes      int64   `json:"bytes"`           // of them
	StateBytes int     `json:"state_bytes"`     // of the state as the engine gives it
	MS         float64 `json:"ms"`
	Error      string  `json:"error,omitempty"`
}

// publisher publishes the checkpoints of one request, one after the other, beside its computing. At most one for each of the
// kinds instruction, prompt and response comes.
type publisher struct {
	service *Service
	request string
	from    db.Generation // the checkpoint that the request went on from
	jobs    chan func() Published
	done    chan []Published
}

func (s *Service) newPublisher(request string, from db.Generation) *publisher {
	p := &publisher{service: s, request: request, from: from, jobs: make(chan func() Published, 3), done: make(chan []Published, 1)}
	go func() {
		var all []Published
		for job := range p.jobs {
			all = append(all, job())
		}
		p.done <- all
	}()
	return p
}

// add takes a snapshot of the session and has it published. A failure is no failure of the request: it is logged, counted and told.
func (p *publisher) add(session *state.Session, seq *db.Sequence, kind db.CheckpointKind) {
	if p.service.store == nil || session.Len() == 0 {
		return
	}
	begun := time.Now()
	out := Published{Kind: kind.String(), Offset: session.Len()}
	snapshot, err := session.Snapshot()
	if err == nil {
		out.StateBytes = snapshot.Bytes
		seq, err = seq.Fork(int64(session.Len())) // the caller goes on appending to its own
	}
	p.jobs <- func() Published {
		if err == nil {
			err = p.service.publish(seq, snapshot, kind, p, &out)
		}
		out.MS = milliseconds(time.Since(begun))
		if err != nil {
			out.Error = err.Error()
			p.service.counters.publicationErrors.Add(1)
			p.service.logger.Warn("checkpoint not published", "kind", out.Kind, "offset", out.Offset, "request", p.request, "err", err)
		} else if out.Listed {
			p.service.counters.publications.Add(1)
			p.service.counters.pageBytes.Add(out.Bytes)
			p.service.counters.stateBytes.Add(int64(out.StateBytes))
		}
		return out
	}
}

// wait gives what became of all checkpoints. It ends: each of them is bounded by MaxPublishWait, and by the shutdown.
func (p *publisher) wait() []Published {
	close(p.jobs)
	return <-p.done
}

// publishTries bounds how often a publication is begun anew because what it built on went away meanwhile.
const publishTries = 3

func (s *Service) publish(seq *db.Sequence, snapshot *state.Snapshot, kind db.CheckpointKind, p *publisher, out *Published) (err error) {
	ctx, cancel := context.WithTimeout(s.publishing, MaxPublishWait)
	defer cancel()
	r := db.PublishRequest{Sequence: seq, Offset: int64(snapshot.Tokens), Kind: kind, Request: p.request, Continues: p.from}
	for range publishTries {
		out.Pages, out.Bytes = 0, 0
		if err = s.publishOnce(ctx, r, snapshot, out); err == nil || !errors.Is(err, db.ErrConflict) {
			break
		}
	}
	return err
}

func (s *Service) publishOnce(ctx context.Context, r db.PublishRequest, snapshot *state.Snapshot, out *Published) error {
	pub, err := s.store.Begin(ctx, r)
	if err != nil {
		return err
	}
	defer pub.Abort()
	out.Generation, out.Known = pub.Generation().String(), pub.Listed()
	slots, err := pub.Slots(ctx, 0)
	if err != nil {
		return err
	}
	for _, slot := range slots {
		buf := slot.Buffer()
		if buf == nil {
			break // ended from outside, as Commit says
		}
		if err := snapshot.Fill(slot.Group(), slot.Position(), buf); err != nil {
			return err
		}
		slot.Filled(slot.Size())
		out.Pages++
		out.Bytes += slot.Size()
	}
	if _, err := pub.Commit(ctx, 0); err != nil {
		return err
	}
	out.Listed = true
	return nil
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
