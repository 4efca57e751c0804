package fuzz

// Small is a part of the exhaustive set.
type Small struct{}

// Run does nothing yet.
func (s *Small) Run(*Scheduler) *Outcome { return nil }
