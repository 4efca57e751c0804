//go:build !linux

package main

import "os"

func openDirect(path string, flag int) (*os.File, error) { return os.OpenFile(path, flag, 0o600) }

func preallocate(*os.File, int64, int64) {}

func syncData(f *os.File) error { return f.Sync() }

func adviseHuge([]byte) {}
