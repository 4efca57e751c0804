package server

import (
	"context"
	"errors"
	"time"

	"github.com/holdfast-db/holdfast/db"
)

// ShutdownReport says what Shutdown did.
type ShutdownReport struct {
	Drained        int     `json:"drained"`         // requests that were running and ended
	CutShort       bool    `json:"cut_short"`       // responses were ended early
	Abandoned      int     `json:"abandoned"`       // requests that were still running at the deadline
	PersistedPages int64   `json:"persisted_pages"` // written at the end
	PersistedBytes int64   `json:"persisted_bytes"`
	Retired        int     `json:"retired"` // checkpoints given up because there was no time to write them
	Aborted        int     `json:"aborted"` // publications that had not ended
	Seconds        float64 `json:"seconds"`
	Unfinished     string  `json:"unfinished,omitempty"` // what the database was still at when there was no time left: the next open recovers
	Error          string  `json:"error,omitempty"`
}

// Shares of the time until the deadline.
const (
	drainShare   = 0.4 // after which responses are ended early
	publishShare = 0.6 // after which publications are ended
	closeShare   = 0.9 // after which the database writes no more pages
)

// Shutdown ends the service before the deadline of the context: nothing new is admitted, requests that run end by themselves, then
// early, what they computed is published, and the database is closed, writing what is in RAM only.
func (s *Service) Shutdown(ctx context.Context) ShutdownReport {
	begun := time.Now()
	total := time.Hour
	if deadline, ok := ctx.Deadline(); ok {
		total = max(time.Until(deadline), 0)
	}
	share := func(f float64) time.Duration { return max(time.Duration(f*float64(total))-time.Since(begun), 0) }

	s.mu.Lock()
	report := ShutdownReport{Drained: s.running}
	if !s.draining {
		if s.draining = true; s.running == 0 {
			close(s.idle)
		}
	}
	s.mu.Unlock()
	idle := s.waitIdle(share(drainShare))
	if !idle {
		report.CutShort = true
		s.cut()
		idle = s.waitIdle(share(publishShare))
	}
	s.stop()
	if !idle {
		idle = s.waitIdle(share((publishShare + closeShare) / 2))
	}
	s.mu.Lock()
	report.Abandoned = s.running
	s.mu.Unlock()
	report.Drained -= report.Abandoned
	if s.store != nil {
		closing, cancel := context.WithTimeout(ctx, share(closeShare))
		defer cancel()
		closed, err := s.store.Close(closing)
		report.PersistedPages, report.PersistedBytes = closed.Persisted, closed.PersistedBytes
		report.Retired, report.Aborted = closed.Retired, closed.Aborted
		switch {
		case err == nil:
		case errors.Is(err, db.ErrBusy) && closing.Err() != nil:
			report.Unfinished = err.Error()
		default:
			report.Error = err.Error()
		}
	}
	if idle { // otherwise somebody is in the engine, and the process ends anyway
		s.free()
	}
	report.Seconds = time.Since(begun).Seconds()
	return report
}

// waitIdle waits until no request runs, for so long.
func (s *Service) waitIdle(d time.Duration) bool {
	select {
	case <-s.idle:
		return true
	default:
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-s.idle:
		return true
	case <-timer.C:
		return false
	}
}
