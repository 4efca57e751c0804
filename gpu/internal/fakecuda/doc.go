//go:build !linux

// Package fakecuda has content on Linux only.
package fakecuda
