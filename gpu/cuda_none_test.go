//go:build !cgo || !linux

package gpu

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/txn"
)

func exportMain(string) {}

func TestCUDAIsNotBuiltIn(t *testing.T) {
	_, err := OpenCUDA(CUDAOptions{})
	require.ErrorIs(t, err, txn.ErrUnsupported)
}
