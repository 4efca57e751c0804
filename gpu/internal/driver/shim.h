// The C side of package driver: the CUDA driver's functions that we call, found at run time, and a few entry points that
// do what would cost many calls from Go. No header of CUDA is needed; the declarations are our own.
#ifndef HOLDFAST_GPU_SHIM_H
#define HOLDFAST_GPU_SHIM_H

#include <stddef.h>
#include <stdint.h>

typedef struct hf_driver hf_driver;

// hf_load opens the library and fills the table. 0, or a message in why. A driver is never unloaded.
int hf_load(const char *path, hf_driver **out, char *why, size_t why_size);

// What a driver can do beyond the functions that every driver since 11.4 has.
enum {
	HF_BATCH_V1 = 1,   // cuMemcpyBatchAsync with failIdx (12.8)
	HF_BATCH_V2 = 2,   // without (13.0)
	HF_KERNEL = 4,     // modules and launches
	HF_PLANE = 8,      // 2-D copies
	HF_IPC = 16,       // memory of other processes by IPC handle
	HF_SHAREABLE = 32, // and by file descriptor
};
int hf_version(const hf_driver *d);
int hf_features(const hf_driver *d);

// Results are the driver's: 0 is success. Contexts, streams, events and addresses are passed as integers; every entry
// that takes a context makes it current on the calling thread first, since Go moves goroutines between threads.
typedef int hf_result;

hf_result hf_device_count(hf_driver *d, int *count);
typedef struct {
	int handle;
	char name[256];
	unsigned char uuid[16];
	uint64_t bytes;
	int copy_engines, numa_node, host_pointer_ok, posix_fd;
} hf_device;
hf_result hf_describe(hf_driver *d, int ordinal, hf_device *out);

hf_result hf_retain(hf_driver *d, int device, uintptr_t *ctx);
hf_result hf_release(hf_driver *d, int device);

hf_result hf_host_alloc(hf_driver *d, uintptr_t ctx, size_t bytes, void **out);
hf_result hf_host_free(hf_driver *d, uintptr_t ctx, void *p);
hf_result hf_host_register(hf_driver *d, uintptr_t ctx, void *p, size_t bytes);
hf_result hf_host_unregister(hf_driver *d, uintptr_t ctx, void *p);
hf_result hf_alloc(hf_driver *d, uintptr_t ctx, size_t bytes, uint64_t *out);
hf_result hf_free(hf_driver *d, uintptr_t ctx, uint64_t address);

hf_result hf_stream(hf_driver *d, uintptr_t ctx, int urgent, uintptr_t *out);
hf_result hf_stream_wait(hf_driver *d, uintptr_t ctx, uintptr_t stream); // blocks until the stream is idle
hf_result hf_stream_destroy(hf_driver *d, uintptr_t ctx, uintptr_t stream);
hf_result hf_event(hf_driver *d, uintptr_t ctx, uintptr_t *out);
hf_result hf_event_record(hf_driver *d, uintptr_t ctx, uintptr_t event, uintptr_t stream);
hf_result hf_event_wait(hf_driver *d, uintptr_t ctx, uintptr_t event); // blocks until what was recorded is done
hf_result hf_event_destroy(hf_driver *d, uintptr_t ctx, uintptr_t event);
// hf_event_query asks for n events at once; results[i] is 0 if event i is done, 600 if not.
hf_result hf_event_query(hf_driver *d, uintptr_t ctx, size_t n, const uintptr_t *events, hf_result *results);

hf_result hf_module(hf_driver *d, uintptr_t ctx, const char *ptx, const char *name, uintptr_t *function);

// A chunk of copies in one direction. All arrays are in memory from hf_host_alloc and belong to the chunk until its event
// has happened.
typedef struct {
	uint64_t from, to, words; // 16-byte words
} hf_kernel_run;
typedef struct {
	uint64_t device, host, width, rows, device_pitch, host_pitch; // bytes, but for rows
} hf_plane;
typedef struct {
	int direction;     // 1 from the device to the host, 2 from the host to the device
	int batch;         // HF_BATCH_V1, HF_BATCH_V2, or 0 for one call per copy
	uintptr_t kernel;  // function for the kernel runs
	unsigned blocks;   // its grid
	size_t kernel_runs, planes, copies;
	const hf_kernel_run *kernel_run;
	const hf_plane *plane;
	uint64_t *to, *from; // of copies
	size_t *bytes;
} hf_chunk;
typedef struct {
	hf_result result; // of the first call that failed
	const char *call; // its name
	size_t index;     // which copy, SIZE_MAX if unknown
	int started;      // the device may have been given something
	int recorded;     // the event tells when that is at rest
} hf_outcome;
// hf_submit starts a chunk on a stream and records event behind it, also behind a part of it.
hf_outcome hf_submit(hf_driver *d, uintptr_t ctx, uintptr_t stream, uintptr_t event, const hf_chunk *c);

// Synchronous copies and a fill, for measuring and testing.
hf_result hf_copy(hf_driver *d, uintptr_t ctx, int direction, uint64_t device, void *host, size_t bytes);
hf_result hf_fill(hf_driver *d, uintptr_t ctx, uintptr_t stream, uint64_t device, unsigned char value, size_t bytes);

// Memory of other processes.
hf_result hf_ipc_export(hf_driver *d, uintptr_t ctx, uint64_t device, unsigned char handle[64]);
hf_result hf_ipc_open(hf_driver *d, uintptr_t ctx, const unsigned char handle[64], uint64_t *device, size_t *bytes);
hf_result hf_ipc_close(hf_driver *d, uintptr_t ctx, uint64_t device);
typedef struct {
	uint64_t handle, device;
	size_t bytes;
} hf_mapping;
// hf_fd_create makes memory that can be exported and gives it with a descriptor for it; bytes is rounded up.
hf_result hf_fd_create(hf_driver *d, uintptr_t ctx, int device, size_t bytes, hf_mapping *out, int *fd);
hf_result hf_fd_open(hf_driver *d, uintptr_t ctx, int device, int fd, size_t bytes, hf_mapping *out);
hf_result hf_fd_close(hf_driver *d, uintptr_t ctx, const hf_mapping *m);

#endif
