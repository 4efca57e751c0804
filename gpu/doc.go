// Package gpu is the copy engine: it moves pages between device memory and host memory while the device goes on
// computing.
//
// A caller hands the engine a Batch: scattered regions of one device, each with the host bytes it belongs to, a
// direction, what must have happened on the device before the first byte moves, and a deadline. It gets a Transfer
// back, which completes exactly once.
//
//	Submit ── check ── plan ── admit ──▶ gated ──▶ ready ──▶ in flight ──▶ settled ──▶ released
//	           │        │       │          │         │           │            │            │
//	           │        │       │          │         │           │            │            └ both ends are proven untouched
//	           │        │       │          │         │           │            └ the outcome is known; Done is closed
//	           │        │       │          │         │           └ chunks lie in lanes of the device
//	           │        │       │          │         └ waits for its turn: priority, then arrival
//	           │        │       │          └ waits for the caller's stream, event or transfer
//	           │        │       └ waits for room in the device's budget
//	           │        └ sorted, merged into runs where both ends are adjacent, cut into chunks
//	           └ refused here, before anything moves, if it breaks a rule
//
// Settled and released are the same moment except when a copy outlives its deadline or its device: then the transfer
// settles with an error while its memory stays in quarantine, because a device may still read or write it. Nobody may
// reuse the memory of a transfer that has not been released.
//
// The engine knows no hardware. It drives a Backend: NewHost plays devices with goroutines and ordinary memory and is
// what runs where there is no GPU; OpenCUDA drives NVIDIA GPUs through the driver library, which it opens at run time,
// so that one binary runs with and without a GPU and nothing of CUDA is needed to build it.
//
// Bounds. Every wait in this package ends by a deadline (Options.Deadline unless the batch has its own), every queue
// is bounded by Limits, and nothing is retried.
package gpu
