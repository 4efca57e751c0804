// Package driver calls the CUDA driver library, which it opens at run time. It is as thin as it can be: names and order
// of calls are the driver's, a result is a Code, and what a call means is for the CUDA backend in package gpu to know.
//
// It has content with cgo on Linux only. Nothing of CUDA is needed to build it: the C side declares the driver's functions
// itself, so a binary built anywhere runs with a GPU and without.
//
// Rules of the driver that the C side keeps, and its callers rely on:
//
//   - The current context belongs to the thread, and goroutines change threads, so every call names its context.
//   - Memory that the device reads or writes after a call has returned is C memory or mapped memory, never Go memory;
//     that includes the descriptors of a chunk.
//   - The default streams are not used: they wait for others.
//   - No callback runs on a thread of the driver: a callback may not call the driver, and is not called after an error.
//     Completion is learned by waiting for an event.
package driver
