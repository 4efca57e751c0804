//go:build !invariants

package arena

const poisonsFreed = false
