// Package gguf writes model files of llama.cpp's format, and makes tiny models of random weights with it, for tests and for
// trying things out. They say nothing sensible, and their state has exactly the shape that the state of real ones has.
package gguf

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"os"

	"github.com/holdfast-db/holdfast/txn"
)

// A file, all little endian:
//
//	magic "GGUF" | version uint32 = 3 | number of tensors uint64 | number of pairs uint64
//	for each pair: key (text) | type uint32 | value
//	for each tensor: name (text) | dimensions uint32 | each of them uint64 | type uint32 = 0 (float32) | offset uint64
//	padding to 32 bytes, then the tensors, each padded to 32 bytes; offsets count from here
//
// A text is a uint64 length and its bytes; an array is the type of its elements uint32, their number uint64, and they.
const (
	magic     = "GGUF"
	version   = 3
	alignment = 32
)

// Types of values.
const (
	typeUint32  = 4
	typeInt32   = 5
	typeFloat32 = 6
	typeBool    = 7
	typeString  = 8
	typeArray   = 9
)

// pair is one line of the metadata: a string, bool, uint32, float32, or a slice of string, int32 or float32.
type pair struct {
	key   string
	value any
}

// tensor is float32 numbers, the first dimension varying fastest.
type tensor struct {
	name  string
	shape []int
	data  []float32
}

// File is a model file before it is written.
type File struct {
	pairs   []pair
	tensors []tensor
}

func (f *File) set(key string, value any) { f.pairs = append(f.pairs, pair{key, value}) }

// writer counts what it writes and keeps the first error.
type writer struct {
	w   *bufio.Writer
	n   int64
	err error
}

func (w *writer) put(b []byte) {
	if w.err == nil {
		_, w.err = w.w.Write(b)
	}
	w.n += int64(len(b))
}

func (w *writer) uint32(v uint32) { w.put(binary.LittleEndian.AppendUint32(nil, v)) }
func (w *writer) uint64(v uint64) { w.put(binary.LittleEndian.AppendUint64(nil, v)) }

func (w *writer) text(s string) {
	w.uint64(uint64(len(s)))
	w.put([]byte(s))
}

func (w *writer) pad() { w.put(make([]byte, -w.n&(alignment-1))) }

func (w *writer) value(v any) {
	switch v := v.(type) {
	case uint32:
		w.uint32(typeUint32)
		w.uint32(v)
	case float32:
		w.uint32(typeFloat32)
		w.uint32(math.Float32bits(v))
	case bool:
		w.uint32(typeBool)
		b := byte(0)
		if v {
			b = 1
		}
		w.put([]byte{b})
	case string:
		w.uint32(typeString)
		w.text(v)
	case []string:
		w.array(typeString, len(v))
		for _, s := range v {
			w.text(s)
		}
	case []int32:
		w.array(typeInt32, len(v))
		for _, n := range v {
			w.uint32(uint32(n))
		}
	case []float32:
		w.array(typeFloat32, len(v))
		for _, n := range v {
			w.uint32(math.Float32bits(n))
		}
	default:
		w.err = fmt.Errorf("gguf: a value of type %T: %w", v, txn.ErrUnsupported)
	}
}

func (w *writer) array(element, count int) {
	w.uint32(typeArray)
	w.uint32(uint32(element))
	w.uint64(uint64(count))
}

// WriteTo writes the file.
func (f *File) WriteTo(to io.Writer) (int64, error) {
	w := &writer{w: bufio.NewWriter(to)}
	w.put([]byte(magic))
	w.uint32(version)
	w.uint64(uint64(len(f.tensors)))
	w.uint64(uint64(len(f.pairs)))
	for _, p := range f.pairs {
		w.text(p.key)
		w.value(p.value)
	}
	offset := int64(0)
	for _, t := range f.tensors {
		w.text(t.name)
		w.uint32(uint32(len(t.shape)))
		for _, d := range t.shape {
			w.uint64(uint64(d))
		}
		w.uint32(0)
		w.uint64(uint64(offset))
		offset += (int64(4*len(t.data)) + alignment - 1) &^ (alignment - 1)
	}
	w.pad()
	for _, t := range f.tensors {
		for _, v := range t.data {
			w.uint32(math.Float32bits(v))
		}
		w.pad()
	}
	if w.err == nil {
		w.err = w.w.Flush()
	}
	if w.err != nil {
		return w.n, fmt.Errorf("gguf: %w", w.err)
	}
	return w.n, nil
}

// Write writes the file to a path.
func (f *File) Write(path string) error {
	file, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("gguf: %w: %w", err, txn.ErrIO)
	}
	_, err = f.WriteTo(file)
	if closed := file.Close(); err == nil {
		err = closed
	}
	if err != nil {
		return fmt.Errorf("gguf: %s: %w: %w", path, err, txn.ErrIO)
	}
	return nil
}
