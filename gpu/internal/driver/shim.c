//go:build cgo && linux

#include "shim.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUhandle;
typedef void *CUcontext, *CUstream, *CUevent, *CUmodule, *CUfunction;
typedef struct { unsigned char b[64]; } CUipc;
typedef struct { int type, id; } CUlocation;
typedef struct { int order; CUlocation from, to; unsigned flags; } CUattributes;
typedef struct { CUlocation where; int flags; } CUaccess;
typedef struct {
	int type, handles;
	CUlocation where;
	void *metadata;
	unsigned char compression, rdma;
	unsigned short usage;
	unsigned char reserved[4];
} CUproperties;
typedef struct {
	size_t from_x, from_y;
	int from_type;
	const void *from_host;
	CUdeviceptr from_device;
	void *from_array;
	size_t from_pitch, to_x, to_y;
	int to_type;
	void *to_host;
	CUdeviceptr to_device;
	void *to_array;
	size_t to_pitch, width, rows;
} CUplane;

_Static_assert(sizeof(CUattributes) == 24, "batch attributes");
_Static_assert(sizeof(CUaccess) == 12, "access descriptor");
_Static_assert(sizeof(CUproperties) == 32, "allocation properties");
_Static_assert(sizeof(CUplane) == 128, "2-D copy");

enum {
	ERROR_INVALID_VALUE = 1,
	ERROR_UNSUPPORTED = 801,
	STREAM_NON_BLOCKING = 1,
	EVENT_BLOCKING_SYNC = 1,
	EVENT_DISABLE_TIMING = 2,
	HOST_PORTABLE = 1,
	HOST_DEVICEMAP = 2,
	MEMORY_HOST = 1,
	MEMORY_DEVICE = 2,
	ORDER_STREAM = 1,
	ORDER_ANY = 3,
	BATCH_PREFER_OVERLAP = 1,
	LOCATION_DEVICE = 1,
	HANDLE_POSIX_FD = 1,
	ALLOCATION_PINNED = 1,
	ACCESS_READ_WRITE = 3,
	IPC_LAZY_PEER_ACCESS = 1,
	ATTRIBUTE_COPY_ENGINES = 40,
	ATTRIBUTE_HOST_POINTER = 91,
	ATTRIBUTE_POSIX_FD = 103,
	ATTRIBUTE_NUMA_NODE = 134,
	OLDEST_VERSION = 11040,
	KERNEL_THREADS = 256,
};

// The driver's functions: whether a driver must have it, its field, the symbol and the arguments. The symbols are exact:
// the plain names are ABIs of long ago.
#define FUNCTIONS(X)                                                                                                    \
	X(1, init, "cuInit", (unsigned))                                                                                    \
	X(1, driver_version, "cuDriverGetVersion", (int *))                                                                 \
	X(0, get_proc_address, "cuGetProcAddress_v2", (const char *, void **, int, uint64_t, int *))                        \
	X(1, device_count, "cuDeviceGetCount", (int *))                                                                     \
	X(1, device_get, "cuDeviceGet", (CUdevice *, int))                                                                  \
	X(1, device_name, "cuDeviceGetName", (char *, int, CUdevice))                                                       \
	X(1, device_memory, "cuDeviceTotalMem_v2", (size_t *, CUdevice))                                                    \
	X(1, device_attribute, "cuDeviceGetAttribute", (int *, int, CUdevice))                                              \
	X(1, device_uuid, "cuDeviceGetUuid_v2", (unsigned char *, CUdevice))                                                \
	X(1, retain, "cuDevicePrimaryCtxRetain", (CUcontext *, CUdevice))                                                   \
	X(1, release, "cuDevicePrimaryCtxRelease_v2", (CUdevice))                                                           \
	X(1, set_current, "cuCtxSetCurrent", (CUcontext))                                                                   \
	X(1, priority_range, "cuCtxGetStreamPriorityRange", (int *, int *))                                                 \
	X(1, mem_alloc, "cuMemAlloc_v2", (CUdeviceptr *, size_t))                                                           \
	X(1, mem_free, "cuMemFree_v2", (CUdeviceptr))                                                                       \
	X(1, host_alloc, "cuMemHostAlloc", (void **, size_t, unsigned))                                                     \
	X(1, host_free, "cuMemFreeHost", (void *))                                                                          \
	X(1, host_register, "cuMemHostRegister_v2", (void *, size_t, unsigned))                                             \
	X(1, host_unregister, "cuMemHostUnregister", (void *))                                                              \
	X(1, copy_to_device, "cuMemcpyHtoD_v2", (CUdeviceptr, const void *, size_t))                                        \
	X(1, copy_to_host, "cuMemcpyDtoH_v2", (void *, CUdeviceptr, size_t))                                                \
	X(1, copy_to_device_async, "cuMemcpyHtoDAsync_v2", (CUdeviceptr, const void *, size_t, CUstream))                   \
	X(1, copy_to_host_async, "cuMemcpyDtoHAsync_v2", (void *, CUdeviceptr, size_t, CUstream))                           \
	X(0, copy_plane_async, "cuMemcpy2DAsync_v2", (const CUplane *, CUstream))                                           \
	X(1, fill_async, "cuMemsetD8Async", (CUdeviceptr, unsigned char, size_t, CUstream))                                 \
	X(1, stream_create, "cuStreamCreateWithPriority", (CUstream *, unsigned, int))                                      \
	X(1, stream_destroy, "cuStreamDestroy_v2", (CUstream))                                                              \
	X(1, stream_synchronize, "cuStreamSynchronize", (CUstream))                                                         \
	X(1, event_create, "cuEventCreate", (CUevent *, unsigned))                                                          \
	X(1, event_record, "cuEventRecord", (CUevent, CUstream))                                                            \
	X(1, event_query, "cuEventQuery", (CUevent))                                                                        \
	X(1, event_synchronize, "cuEventSynchronize", (CUevent))                                                            \
	X(1, event_destroy, "cuEventDestroy_v2", (CUevent))                                                                 \
	X(0, module_load, "cuModuleLoadDataEx", (CUmodule *, const void *, unsigned, int *, void **))                       \
	X(0, module_function, "cuModuleGetFunction", (CUfunction *, CUmodule, const char *))                                \
	X(0, launch, "cuLaunchKernel",                                                                                      \
	  (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **))   \
	X(0, address_range, "cuMemGetAddressRange_v2", (CUdeviceptr *, size_t *, CUdeviceptr))                              \
	X(0, ipc_export, "cuIpcGetMemHandle", (CUipc *, CUdeviceptr))                                                       \
	X(0, ipc_open, "cuIpcOpenMemHandle_v2", (CUdeviceptr *, CUipc, unsigned))                                           \
	X(0, ipc_close, "cuIpcCloseMemHandle", (CUdeviceptr))                                                               \
	X(0, mem_granularity, "cuMemGetAllocationGranularity", (size_t *, const CUproperties *, int))                       \
	X(0, mem_create, "cuMemCreate", (CUhandle *, size_t, const CUproperties *, uint64_t))                               \
	X(0, mem_export, "cuMemExportToShareableHandle", (void *, CUhandle, int, uint64_t))                                 \
	X(0, mem_import, "cuMemImportFromShareableHandle", (CUhandle *, void *, int))                                       \
	X(0, mem_release, "cuMemRelease", (CUhandle))                                                                       \
	X(0, address_reserve, "cuMemAddressReserve", (CUdeviceptr *, size_t, size_t, CUdeviceptr, uint64_t))                \
	X(0, address_free, "cuMemAddressFree", (CUdeviceptr, size_t))                                                       \
	X(0, mem_map, "cuMemMap", (CUdeviceptr, size_t, size_t, CUhandle, uint64_t))                                        \
	X(0, mem_unmap, "cuMemUnmap", (CUdeviceptr, size_t))                                                                \
	X(0, mem_access, "cuMemSetAccess", (CUdeviceptr, size_t, const CUaccess *, size_t))

struct hf_driver {
	hf_driver *next;
	int version, features;
#define FIELD(required, name, symbol, arguments) CUresult(*name) arguments;
	FUNCTIONS(FIELD)
#undef FIELD
	CUresult (*batch_v1)(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUattributes *, size_t *, size_t, size_t *, CUstream);
	CUresult (*batch_v2)(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUattributes *, size_t *, size_t, CUstream);
};

// All drivers that were opened. They are kept for the life of the process, as their libraries are.
static _Atomic(hf_driver *) loaded;

// batch_function asks for one ABI of the batch copy: through the driver's own look-up, which tells ABIs apart by version
// and so finds the first one in drivers that have moved its plain name on, else by symbol.
static void *batch_function(hf_driver *d, void *library, int version, const char *symbol) {
	void *f = NULL;
	int status = 0;
	if (d->get_proc_address != NULL) {
		if (d->version < version || d->get_proc_address("cuMemcpyBatchAsync", &f, version, 0, &status) != 0 || status != 0)
			return NULL;
		return f;
	}
	return d->version < version ? NULL : dlsym(library, symbol);
}

int hf_load(const char *path, hf_driver **out, char *why, size_t why_size) {
	void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (library == NULL) {
		snprintf(why, why_size, "%s", dlerror());
		return 1;
	}
	hf_driver *d = calloc(1, sizeof *d);
	if (d == NULL) {
		snprintf(why, why_size, "out of memory");
		return 1;
	}
#define FIND(required, name, symbol, arguments)                                  \
	*(void **)&d->name = dlsym(library, symbol);                                 \
	if (required && d->name == NULL) {                                           \
		snprintf(why, why_size, "%s has no %s: the driver is too old", path, symbol); \
		free(d);                                                                 \
		return 1;                                                                \
	}
	FUNCTIONS(FIND)
#undef FIND
	CUresult r = d->init(0);
	if (r == 0)
		r = d->driver_version(&d->version);
	if (r != 0) {
		snprintf(why, why_size, "%s does not start: result %d", path, r);
		free(d);
		return r;
	}
	if (d->version < OLDEST_VERSION) {
		snprintf(why, why_size, "%s is of version %d.%d: %d.%d or newer is needed", path, d->version / 1000,
			d->version % 1000 / 10, OLDEST_VERSION / 1000, OLDEST_VERSION % 1000 / 10);
		free(d);
		return ERROR_UNSUPPORTED;
	}
	*(void **)&d->batch_v1 = batch_function(d, library, 12080, "cuMemcpyBatchAsync");
	*(void **)&d->batch_v2 = batch_function(d, library, 13000, "cuMemcpyBatchAsync_v2");
	d->features = (d->batch_v1 ? HF_BATCH_V1 : 0) | (d->batch_v2 ? HF_BATCH_V2 : 0) |
		(d->module_load && d->module_function && d->launch ? HF_KERNEL : 0) | (d->copy_plane_async ? HF_PLANE : 0) |
		(d->ipc_open && d->ipc_close && d->address_range ? HF_IPC : 0) |
		(d->mem_import && d->mem_release && d->address_reserve && d->address_free && d->mem_map && d->mem_unmap && d->mem_access ? HF_SHAREABLE : 0);
	d->next = atomic_load(&loaded);
	while (!atomic_compare_exchange_weak(&loaded, &d->next, d)) {
	}
	*out = d;
	return 0;
}

int hf_version(const hf_driver *d) { return d->version; }
int hf_features(const hf_driver *d) { return d->features; }

// TRY returns from an entry with the result of the first call that fails.
#define TRY(call)             \
	do {                      \
		CUresult r_ = (call); \
		if (r_ != 0)          \
			return r_;        \
	} while (0)
#define ENTER(ctx) TRY(d->set_current((CUcontext)(ctx)))

hf_result hf_device_count(hf_driver *d, int *count) { return d->device_count(count); }

hf_result hf_describe(hf_driver *d, int ordinal, hf_device *out) {
	size_t bytes = 0;
	memset(out, 0, sizeof *out);
	TRY(d->device_get(&out->handle, ordinal));
	TRY(d->device_name(out->name, sizeof out->name - 1, out->handle));
	TRY(d->device_uuid(out->uuid, out->handle));
	TRY(d->device_memory(&bytes, out->handle));
	out->bytes = bytes;
	TRY(d->device_attribute(&out->copy_engines, ATTRIBUTE_COPY_ENGINES, out->handle));
	TRY(d->device_attribute(&out->host_pointer_ok, ATTRIBUTE_HOST_POINTER, out->handle));
	TRY(d->device_attribute(&out->posix_fd, ATTRIBUTE_POSIX_FD, out->handle));
	if (d->device_attribute(&out->numa_node, ATTRIBUTE_NUMA_NODE, out->handle) != 0)
		out->numa_node = -1; // older drivers do not know the attribute
	return 0;
}

hf_result hf_retain(hf_driver *d, int device, uintptr_t *ctx) { return d->retain((CUcontext *)ctx, device); }
hf_result hf_release(hf_driver *d, int device) { return d->release(device); }

hf_result hf_host_alloc(hf_driver *d, uintptr_t ctx, size_t bytes, void **out) {
	ENTER(ctx);
	return d->host_alloc(out, bytes, HOST_PORTABLE | HOST_DEVICEMAP);
}

hf_result hf_host_free(hf_driver *d, uintptr_t ctx, void *p) {
	ENTER(ctx);
	return d->host_free(p);
}

hf_result hf_host_register(hf_driver *d, uintptr_t ctx, void *p, size_t bytes) {
	ENTER(ctx);
	return d->host_register(p, bytes, HOST_PORTABLE | HOST_DEVICEMAP);
}

hf_result hf_host_unregister(hf_driver *d, uintptr_t ctx, void *p) {
	ENTER(ctx);
	return d->host_unregister(p);
}

hf_result hf_alloc(hf_driver *d, uintptr_t ctx, size_t bytes, uint64_t *out) {
	CUdeviceptr p = 0;
	ENTER(ctx);
	TRY(d->mem_alloc(&p, bytes));
	*out = p;
	return 0;
}

hf_result hf_free(hf_driver *d, uintptr_t ctx, uint64_t address) {
	ENTER(ctx);
	return d->mem_free(address);
}

hf_result hf_stream(hf_driver *d, uintptr_t ctx, int urgent, uintptr_t *out) {
	int least = 0, greatest = 0;
	ENTER(ctx);
	TRY(d->priority_range(&least, &greatest));
	return d->stream_create((CUstream *)out, STREAM_NON_BLOCKING, urgent ? greatest : least);
}

hf_result hf_stream_wait(hf_driver *d, uintptr_t ctx, uintptr_t stream) {
	ENTER(ctx);
	return d->stream_synchronize((CUstream)stream);
}

hf_result hf_stream_destroy(hf_driver *d, uintptr_t ctx, uintptr_t stream) {
	ENTER(ctx);
	return d->stream_destroy((CUstream)stream);
}

hf_result hf_event(hf_driver *d, uintptr_t ctx, uintptr_t *out) {
	ENTER(ctx);
	return d->event_create((CUevent *)out, EVENT_BLOCKING_SYNC | EVENT_DISABLE_TIMING);
}

hf_result hf_event_record(hf_driver *d, uintptr_t ctx, uintptr_t event, uintptr_t stream) {
	ENTER(ctx);
	return d->event_record((CUevent)event, (CUstream)stream);
}

hf_result hf_event_wait(hf_driver *d, uintptr_t ctx, uintptr_t event) {
	ENTER(ctx);
	return d->event_synchronize((CUevent)event);
}

hf_result hf_event_destroy(hf_driver *d, uintptr_t ctx, uintptr_t event) {
	ENTER(ctx);
	return d->event_destroy((CUevent)event);
}

hf_result hf_event_query(hf_driver *d, uintptr_t ctx, size_t n, const uintptr_t *events, hf_result *results) {
	ENTER(ctx);
	for (size_t i = 0; i < n; i++)
		results[i] = d->event_query((CUevent)events[i]);
	return 0;
}

hf_result hf_module(hf_driver *d, uintptr_t ctx, const char *ptx, const char *name, uintptr_t *function) {
	CUmodule module = NULL;
	if (!(d->features & HF_KERNEL))
		return ERROR_UNSUPPORTED;
	ENTER(ctx);
	TRY(d->module_load(&module, ptx, 0, NULL, NULL)); // stays loaded while the context lives
	return d->module_function((CUfunction *)function, module, name);
}

static hf_result copy_batch(hf_driver *d, CUstream stream, const hf_chunk *c, size_t *index) {
	// A store has to read in the order of the stream: with ANY the driver may read before what precedes it there. A load
	// reads page-locked memory that nobody changes until the event has happened, so any order will do.
	CUattributes attributes = {.order = c->direction == 1 ? ORDER_STREAM : ORDER_ANY, .flags = BATCH_PREFER_OVERLAP};
	size_t first = 0;
	if (c->batch == HF_BATCH_V1)
		return d->batch_v1((CUdeviceptr *)c->to, (CUdeviceptr *)c->from, c->bytes, c->copies, &attributes, &first, 1, index, stream);
	return d->batch_v2((CUdeviceptr *)c->to, (CUdeviceptr *)c->from, c->bytes, c->copies, &attributes, &first, 1, stream);
}

static hf_result copy_plane(hf_driver *d, CUstream stream, int direction, const hf_plane *p) {
	CUplane plane = {.width = p->width, .rows = p->rows};
	if (direction == 1) {
		plane.from_type = MEMORY_DEVICE, plane.from_device = p->device, plane.from_pitch = p->device_pitch;
		plane.to_type = MEMORY_HOST, plane.to_host = (void *)p->host, plane.to_pitch = p->host_pitch;
	} else {
		plane.from_type = MEMORY_HOST, plane.from_host = (void *)p->host, plane.from_pitch = p->host_pitch;
		plane.to_type = MEMORY_DEVICE, plane.to_device = p->device, plane.to_pitch = p->device_pitch;
	}
	return d->copy_plane_async(&plane, stream);
}

static hf_result copy_one(hf_driver *d, CUstream stream, int direction, uint64_t to, uint64_t from, size_t bytes) {
	if (direction == 1)
		return d->copy_to_host_async((void *)to, from, bytes, stream);
	return d->copy_to_device_async(to, (const void *)from, bytes, stream);
}

static void start(hf_driver *d, CUstream stream, const hf_chunk *c, hf_outcome *out) {
	// A call that fails may have given the device a part of what it was asked for, so trying is starting.
	if (c->kernel_runs > 0) {
		uint64_t runs = (uint64_t)c->kernel_run;
		uint32_t count = c->kernel_runs;
		void *parameters[] = {&runs, &count};
		out->call = "cuLaunchKernel", out->started = 1;
		out->result = d->launch((CUfunction)c->kernel, c->blocks, 1, 1, KERNEL_THREADS, 1, 1, 0, stream, parameters, NULL);
		if (out->result != 0)
			return;
	}
	for (size_t i = 0; i < c->planes; i++) {
		out->call = "cuMemcpy2DAsync", out->started = 1, out->index = i;
		out->result = copy_plane(d, stream, c->direction, &c->plane[i]);
		if (out->result != 0)
			return;
	}
	if (c->copies > 0 && c->batch != 0) {
		out->call = "cuMemcpyBatchAsync", out->started = 1, out->index = SIZE_MAX;
		out->result = copy_batch(d, stream, c, &out->index);
		return;
	}
	for (size_t i = 0; i < c->copies; i++) {
		out->call = c->direction == 1 ? "cuMemcpyDtoHAsync" : "cuMemcpyHtoDAsync", out->started = 1, out->index = i;
		out->result = copy_one(d, stream, c->direction, c->to[i], c->from[i], c->bytes[i]);
		if (out->result != 0)
			return;
	}
}

hf_outcome hf_submit(hf_driver *d, uintptr_t ctx, uintptr_t stream, uintptr_t event, const hf_chunk *c) {
	hf_outcome out = {.call = "cuCtxSetCurrent", .index = SIZE_MAX};
	out.result = d->set_current((CUcontext)ctx);
	if (out.result != 0)
		return out;
	start(d, (CUstream)stream, c, &out);
	if (out.started) {
		hf_result r = d->event_record((CUevent)event, (CUstream)stream);
		out.recorded = r == 0;
		if (out.result == 0 && r != 0)
			out.call = "cuEventRecord", out.result = r, out.index = SIZE_MAX;
	}
	return out;
}

hf_result hf_copy(hf_driver *d, uintptr_t ctx, int direction, uint64_t device, void *host, size_t bytes) {
	ENTER(ctx);
	return direction == 1 ? d->copy_to_host(host, device, bytes) : d->copy_to_device(device, host, bytes);
}

hf_result hf_fill(hf_driver *d, uintptr_t ctx, uintptr_t stream, uint64_t device, unsigned char value, size_t bytes) {
	ENTER(ctx);
	return d->fill_async(device, value, bytes, (CUstream)stream);
}

hf_result hf_ipc_export(hf_driver *d, uintptr_t ctx, uint64_t device, unsigned char handle[64]) {
	CUipc ipc;
	if (d->ipc_export == NULL)
		return ERROR_UNSUPPORTED;
	ENTER(ctx);
	TRY(d->ipc_export(&ipc, device));
	memcpy(handle, ipc.b, sizeof ipc.b);
	return 0;
}

hf_result hf_ipc_open(hf_driver *d, uintptr_t ctx, const unsigned char handle[64], uint64_t *device, size_t *bytes) {
	CUipc ipc;
	CUdeviceptr p = 0, base = 0;
	if (!(d->features & HF_IPC))
		return ERROR_UNSUPPORTED;
	memcpy(ipc.b, handle, sizeof ipc.b);
	ENTER(ctx);
	TRY(d->ipc_open(&p, ipc, IPC_LAZY_PEER_ACCESS));
	CUresult r = d->address_range(&base, bytes, p);
	if (r != 0 || base != p) {
		d->ipc_close(p);
		return r != 0 ? r : ERROR_INVALID_VALUE;
	}
	*device = p;
	return 0;
}

hf_result hf_ipc_close(hf_driver *d, uintptr_t ctx, uint64_t device) {
	ENTER(ctx);
	return d->ipc_close(device);
}

// map gives memory an address and the device access to it. On failure nothing of it stays, but for the handle.
static hf_result map(hf_driver *d, int device, hf_mapping *m) {
	CUaccess access = {.where = {LOCATION_DEVICE, device}, .flags = ACCESS_READ_WRITE};
	CUdeviceptr p = 0;
	TRY(d->address_reserve(&p, m->bytes, 0, 0, 0));
	CUresult r = d->mem_map(p, m->bytes, 0, m->handle, 0);
	if (r == 0) {
		r = d->mem_access(p, m->bytes, &access, 1);
		if (r != 0)
			d->mem_unmap(p, m->bytes);
	}
	if (r != 0)
		d->address_free(p, m->bytes);
	m->device = p;
	return r;
}

hf_result hf_fd_create(hf_driver *d, uintptr_t ctx, int device, size_t bytes, hf_mapping *out, int *fd) {
	CUproperties properties = {.type = ALLOCATION_PINNED, .handles = HANDLE_POSIX_FD, .where = {LOCATION_DEVICE, device}};
	CUhandle handle = 0;
	size_t unit = 0;
	if (!(d->features & HF_SHAREABLE) || d->mem_create == NULL || d->mem_export == NULL || d->mem_granularity == NULL)
		return ERROR_UNSUPPORTED;
	ENTER(ctx);
	TRY(d->mem_granularity(&unit, &properties, 0));
	out->bytes = (bytes + unit - 1) / unit * unit;
	TRY(d->mem_create(&handle, out->bytes, &properties, 0));
	out->handle = handle;
	CUresult r = map(d, device, out);
	if (r == 0) {
		r = d->mem_export(fd, handle, HANDLE_POSIX_FD, 0);
		if (r != 0)
			return hf_fd_close(d, ctx, out), r;
		return 0;
	}
	d->mem_release(handle);
	return r;
}

hf_result hf_fd_open(hf_driver *d, uintptr_t ctx, int device, int fd, size_t bytes, hf_mapping *out) {
	CUhandle handle = 0;
	if (!(d->features & HF_SHAREABLE))
		return ERROR_UNSUPPORTED;
	ENTER(ctx);
	TRY(d->mem_import(&handle, (void *)(uintptr_t)fd, HANDLE_POSIX_FD));
	out->handle = handle, out->bytes = bytes;
	CUresult r = map(d, device, out);
	if (r != 0)
		d->mem_release(handle);
	return r;
}

hf_result hf_fd_close(hf_driver *d, uintptr_t ctx, const hf_mapping *m) {
	ENTER(ctx);
	TRY(d->mem_unmap(m->device, m->bytes));
	TRY(d->address_free(m->device, m->bytes));
	return d->mem_release(m->handle);
}
