package gpu

// DeviceStats counts what happened on one device since it was opened. Transfers are counted once they settle.
type DeviceStats struct {
	Submitted int64 // admitted
	Completed int64
	Failed    int64
	Canceled  int64
	Expired   int64 // by their deadline

	Regions     int64    // of admitted batches
	Runs        int64    // issued: what is left of the regions after merging
	Chunks      int64    // issued
	CopiedBytes [2]int64 // proven, by Direction-1

	Admitted         int   // now: admitted and not released
	InFlightBytes    int64 // now: in the window
	InFlightRuns     int
	InFlightBytesMax int64 // the most there ever were
	InFlightRunsMax  int
	Quarantined      int // now: settled and not released
	QuarantinedBytes int64
	Lost             bool
}

// Stats gives the counters of the devices that have been used, by device number.
func (e *Engine) Stats() map[int]DeviceStats {
	all := map[int]DeviceStats{}
	for i, d := range e.opened() {
		d.mu.Lock()
		s := d.stats
		s.Admitted = len(d.active)
		s.InFlightBytes, s.InFlightRuns = d.window.bytes, d.window.regions
		d.mu.Unlock()
		all[i] = s
	}
	return all
}
