//go:build unix && !linux

package gpu

// preferHugePages does nothing: there is no such advice here.
func preferHugePages([]byte) {}
