package server

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"

	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/engine"
	"github.com/holdfast-db/holdfast/cmd/llamaserve/internal/state"
	"github.com/holdfast-db/holdfast/db"
	"github.com/holdfast-db/holdfast/txn"
)

// identity is everything that decides whether the bytes of a state may be used again, tenant and layout aside. llama.cpp itself
// checks hardly any of it: weights of the same shape take each other's states without a word.
func identity(o *Options, lib *engine.Library, info engine.ModelInfo, pages *state.Pages) (db.Identity, error) {
	weights, err := fileDigest(o.Model)
	if err != nil {
		return db.Identity{}, err
	}
	adapter := ""
	if o.Adapter != "" {
		if adapter, err = fileDigest(o.Adapter); err != nil {
			return db.Identity{}, err
		}
	}
	build, err := engineBuild(lib)
	if err != nil {
		return db.Identity{}, err
	}
	format := sha256.Sum256([]byte(pages.Shape().Text()))
	return db.Identity{
		Model:     cmp.Or(info.Name, filepath.Base(o.Model)),
		Weights:   weights,
		Tokenizer: "gguf " + weights, // it is in the file of the weights
		Engine:    build,
		DType:     pages.Shape().Types(),
		Adapter:   adapter,
		Settings: map[string]string{
			"n_seq_max":    strconv.Itoa(o.Sequences),
			"state_format": hex.EncodeToString(format[:]),
		},
		Layout: pages.Layout,
	}, nil
}

// engineBuild names the release and the exact bytes of the library and its back ends, of which the one that was chosen for this
// processor decides about the last bits.
func engineBuild(lib *engine.Library) (string, error) {
	files, err := lib.Files()
	if err != nil {
		return "", err
	}
	all := sha256.New()
	for _, path := range files {
		digest, err := fileDigest(path)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(all, "%s %s\n", filepath.Base(path), digest)
	}
	return fmt.Sprintf("llama.cpp %s %x", cmp.Or(lib.Version(), "unknown"), all.Sum(nil)), nil
}

// fileDigest gives the SHA-256 of a file in hexadecimal digits.
func fileDigest(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("server: %w: %w", err, txn.ErrNotFound)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", fmt.Errorf("server: %w: %w", err, txn.ErrIO)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
