// A libcuda.so.1 without a GPU, for tests. It behaves like the driver where that is hard on its caller:
//
//   - Copies are asynchronous. Each stream has a worker thread, which copies when it likes: after random delays, and not
//     at all while the test holds it.
//   - Device memory is mapped without any access where the process sees it; workers use another mapping of the same
//     memory. So is page-locked host memory that a copy in flight writes to, and read-only where one reads from it: whoever
//     touches memory before its copy is finished gets a fault, not luck. Guarded are the pages that lie entirely in
//     the range.
//   - Memory is filled with 0xA5, not with zeros. Addresses are not used again.
//   - The current context belongs to the thread; without it every call fails.
//   - The batch copy keeps the driver's rules: no default stream, no empty copies, attributes in order, any order inside.
//   - A failed copy loses the context: every later call in it fails with the same result.
//   - What is undefined in the driver, such as freeing memory under a copy, is counted as a violation.
//
// It does not measure anything: no speed of it says something about a GPU.
#define _GNU_SOURCE
#include "control.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUhandle;
typedef struct { unsigned char b[64]; } CUipc;
typedef struct { int type, id; } CUlocation;
typedef struct { int order; CUlocation from, to; unsigned flags; } CUattributes;
typedef struct { CUlocation where; int flags; } CUaccess;
typedef struct { int type, handles; CUlocation where; } CUproperties; // the part that is looked at
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

enum {
	SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
	INVALID_CONTEXT = 201, UNSUPPORTED_PTX = 222, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600,
	ILLEGAL_ADDRESS = 700, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, MISALIGNED = 716, NOT_SUPPORTED = 801,
};

enum { PAGE = 4096, POISON = 0xA5, MOST_SPANS = 4096, MOST_CONTEXTS = FAKE_DEVICES };

// ---- The world. One lock guards all of it; workers copy without it.

static pthread_mutex_t world = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER; // an event is over, a stream is idle
static struct control *control;
static struct control no_control = {.devices = 1, .version = 13000, .batch_abis = 3};

static void violation(const char *format, ...) {
	if (atomic_fetch_add(&control->violations, 1) == 0) {
		va_list list;
		va_start(list, format);
		vsnprintf(control->violation, sizeof control->violation, format, list);
		va_end(list);
	}
}

struct context {
	int device, references;
	_Atomic int lost; // the result of every call from now on
};
static struct context contexts[MOST_CONTEXTS];

// The current context of the thread. A key, since LeakSanitizer does not get along with thread-local variables of libraries
// that are opened at run time.
static pthread_key_t current_key;
#define current ((struct context *)pthread_getspecific(current_key))

// span is memory that copies can reach: on a device, or page-locked on the host.
struct span {
	enum { FREE, DEVICE, HOST } kind;
	int device;
	char *visible;  // where the process sees it
	char *real;     // where workers see it
	size_t bytes;
	int fd;         // of the memory; for export
	int users;      // copies in flight
	int owned;      // allocated here, not registered
	int references; // imports
	ino_t inode;    // of imported memory
	uint16_t *writers, *readers; // host: copies in flight by page
	CUhandle handle;             // of mapped memory
};
static struct span spans[MOST_SPANS];
static int used_spans; // no span behind these has been used

static struct span *find(const void *p, size_t bytes) {
	for (int i = 0; i < used_spans; i++) {
		struct span *s = &spans[i];
		if (s->kind != FREE && (const char *)p >= s->visible && (const char *)p < s->visible + s->bytes)
			return (const char *)p + bytes <= s->visible + s->bytes ? s : NULL;
	}
	return NULL;
}

static struct span *fresh(void) {
	for (int i = 0; i < used_spans; i++)
		if (spans[i].kind == FREE)
			return &spans[i];
	return used_spans < MOST_SPANS ? &spans[used_spans++] : NULL;
}

static size_t round_up(size_t n) { return (n + PAGE - 1) / PAGE * PAGE; }

// enter is the start of every call: is there a context, has it been lost, is this the call that the test wants to fail?
static CUresult enter(int needs_context) {
	if (control == NULL)
		return NOT_INITIALIZED;
	uint64_t n = atomic_fetch_add(&control->calls, 1) + 1;
	if (needs_context && current == NULL) {
		violation("a call without a current context");
		return INVALID_CONTEXT;
	}
	if (needs_context && current->lost)
		return current->lost;
	uint64_t fail = atomic_load(&control->fail_at);
	if (fail != 0 && n >= fail && n <= fail + atomic_load(&control->fail_more))
		return (CUresult)atomic_load(&control->fail_with);
	return SUCCESS;
}

#define ENTER(needs_context)                  \
	do {                                      \
		CUresult r_ = enter(needs_context);   \
		if (r_ != SUCCESS)                    \
			return r_;                        \
	} while (0)

// ---- Guards: what the process may do with page-locked memory while copies are in flight. Called with world held.

static void guard(struct span *s, const char *p, size_t bytes, int writing, int change) {
	size_t first = ((size_t)(p - s->visible) + PAGE - 1) / PAGE, end = ((size_t)(p - s->visible) + bytes) / PAGE;
	for (size_t i = first; i < end; i++) {
		uint16_t *n = writing ? &s->writers[i] : &s->readers[i];
		*n += change;
		int access = s->writers[i] ? PROT_NONE : s->readers[i] ? PROT_READ : PROT_READ | PROT_WRITE;
		if (mprotect(s->visible + i * PAGE, PAGE, access) != 0)
			abort();
	}
}

// ---- Streams and events.

struct event {
	struct event *next, **link;
	uint64_t recorded, over; // how often; guarded by world
	int result;              // of the last that is over
};

static struct event *events; // all, so that those that are never destroyed are no leaks

struct part { // one stretch of a copy
	char *to, *from;   // where workers see them
	struct span *target, *source;
	char *seen_to, *seen_from;
	size_t bytes;
	char *early; // a snapshot of the source, for copies whose source may be read early
};

struct kernel_run { uint64_t from, to, words; };

struct operation {
	enum { COPY, KERNEL, FILL, RECORD } kind;
	struct operation *next;
	size_t parts;
	struct part *part;
	struct span *descriptors; // of a kernel
	const struct kernel_run *runs; // where workers see them
	uint32_t count;
	int value;
	struct event *event;
	uint64_t number; // of the record
};

struct stream {
	struct context *context;
	pthread_t worker;
	struct operation *head, **tail; // guarded by world
	pthread_cond_t work;
	int busy, closing;
	uint64_t random;
};

static uint64_t draw(uint64_t *state) {
	*state += 0x9e3779b97f4a7c15ull;
	uint64_t z = *state;
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

static void pause_us(uint64_t us) {
	struct timespec t = {.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000};
	nanosleep(&t, NULL);
}

// take makes an operation a user of the memory of p. Called with world held.
static void take(struct part *p) {
	p->target->users++, p->source->users++;
	if (p->target->kind == HOST)
		guard(p->target, p->seen_to, p->bytes, 1, 1);
	if (p->source->kind == HOST)
		guard(p->source, p->seen_from, p->bytes, 0, 1);
}

static void give_back(struct part *p) {
	if (p->target->kind == HOST)
		guard(p->target, p->seen_to, p->bytes, 1, -1);
	if (p->source->kind == HOST)
		guard(p->source, p->seen_from, p->bytes, 0, -1);
	p->target->users--, p->source->users--;
}

// resolve finds the memory of a stretch. Called with world held.
static int resolve(struct part *p, uint64_t to, uint64_t from, size_t bytes) {
	memset(p, 0, sizeof *p);
	p->target = find((void *)to, bytes), p->source = find((void *)from, bytes);
	if (p->target == NULL || p->source == NULL)
		return 0;
	p->seen_to = (char *)to, p->seen_from = (char *)from, p->bytes = bytes;
	p->to = p->target->real + ((char *)to - p->target->visible);
	p->from = p->source->real + ((char *)from - p->source->visible);
	return 1;
}

static void copy_part(struct stream *s, struct part *p) {
	char *from = p->early ? p->early : p->from;
	size_t half = p->bytes / 2;
	if (draw(&s->random) % 2) { // in no particular order
		memcpy(p->to + half, from + half, p->bytes - half);
		sched_yield();
		memcpy(p->to, from, half);
	} else {
		memcpy(p->to, from, half);
		sched_yield();
		memcpy(p->to + half, from + half, p->bytes - half);
	}
}

// run_kernel does what the embedded PTX does, with descriptors that are read only now.
static int run_kernel(struct stream *s, struct operation *o) {
	for (uint32_t i = 0; i < o->count; i++) {
		struct kernel_run r = o->runs[i];
		struct part p;
		if ((r.from | r.to) % 16 != 0)
			return MISALIGNED;
		pthread_mutex_lock(&world);
		int ok = resolve(&p, r.to, r.from, r.words * 16);
		pthread_mutex_unlock(&world);
		if (!ok)
			return ILLEGAL_ADDRESS;
		copy_part(s, &p);
	}
	return SUCCESS;
}

static int perform(struct stream *s, struct operation *o) {
	if (o->kind == RECORD)
		return SUCCESS;
	while (o->kind == FILL ? atomic_load(&control->hold_fills) >> (o->value % 64) & 1 : atomic_load(&control->hold))
		pause_us(100);
	uint64_t most = atomic_load(&control->delay_us);
	if (most > 0)
		pause_us(draw(&s->random) % (most + 1));
	if (atomic_load(&control->lost[s->context->device]))
		return ILLEGAL_ADDRESS;
	if (o->kind == KERNEL)
		return run_kernel(s, o);
	if (o->kind == FILL) {
		memset(o->part[0].to, o->value, o->part[0].bytes);
		return SUCCESS;
	}
	for (size_t i = o->parts; i > 1; i--) {
		size_t k = draw(&s->random) % i;
		struct part p = o->part[k];
		o->part[k] = o->part[i - 1], o->part[i - 1] = p;
	}
	for (size_t i = 0; i < o->parts; i++)
		copy_part(s, &o->part[i]);
	return SUCCESS;
}

static void discard(struct operation *o) {
	for (size_t i = 0; i < o->parts; i++)
		free(o->part[i].early);
	free(o->part);
	free(o);
}

static void *work(void *arg) {
	struct stream *s = arg;
	pthread_mutex_lock(&world);
	for (;;) {
		while (s->head == NULL && !s->closing)
			pthread_cond_wait(&s->work, &world);
		if (s->head == NULL)
			break;
		struct operation *o = s->head;
		s->head = o->next;
		if (s->head == NULL)
			s->tail = &s->head;
		s->busy = 1;
		int result = s->context->lost;
		if (result == SUCCESS) {
			pthread_mutex_unlock(&world);
			result = perform(s, o);
			pthread_mutex_lock(&world);
		}
		if (result != SUCCESS)
			s->context->lost = result; // and what the operation held stays guarded: nobody knows what the device does with it
		else if (o->kind == RECORD)
			o->event->over = o->number, o->event->result = SUCCESS;
		else {
			for (size_t i = 0; i < o->parts; i++)
				give_back(&o->part[i]);
			if (o->descriptors)
				o->descriptors->users--;
		}
		if (o->kind == RECORD && result != SUCCESS)
			o->event->over = o->number, o->event->result = result;
		discard(o);
		s->busy = 0;
		pthread_cond_broadcast(&changed);
	}
	pthread_mutex_unlock(&world);
	return NULL;
}

static void enqueue(struct stream *s, struct operation *o) {
	*s->tail = o;
	s->tail = &o->next;
	pthread_cond_signal(&s->work);
}

static struct stream *user_stream(void *stream) {
	struct stream *s = stream;
	if ((uintptr_t)stream <= 2) {
		violation("work on a default stream");
		return NULL;
	}
	if (s->context != current) {
		violation("work on a stream of another context");
		return NULL;
	}
	return s;
}

// ---- Start, devices, contexts.

CUresult cuInit(unsigned flags) {
	static struct control *mapped;
	pthread_mutex_lock(&world);
	if (control == NULL) {
		Dl_info self;
		char path[4200];
		control = &no_control;
		if (pthread_key_create(&current_key, NULL) != 0)
			abort();
		if (dladdr((void *)cuInit, &self) && snprintf(path, sizeof path, "%s.control", self.dli_fname) < (int)sizeof path) {
			int fd = open(path, O_RDWR | O_CLOEXEC);
			if (fd >= 0) {
				mapped = mmap(NULL, sizeof *mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
				close(fd);
				if (mapped != MAP_FAILED)
					control = mapped;
			}
		}
	}
	pthread_mutex_unlock(&world);
	return flags != 0 ? INVALID_VALUE : (CUresult)atomic_load(&control->init_result);
}

CUresult cuDriverGetVersion(int *version) {
	*version = (int)atomic_load(&control->version);
	return SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
	*count = (int)atomic_load(&control->devices);
	return SUCCESS;
}

static int bad_device(int device) { return device < 0 || device >= (int)atomic_load(&control->devices) || device >= FAKE_DEVICES; }

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
	if (bad_device(ordinal))
		return INVALID_DEVICE;
	*device = ordinal;
	return SUCCESS;
}

CUresult cuDeviceGetName(char *name, int bytes, CUdevice device) {
	if (bad_device(device))
		return INVALID_DEVICE;
	snprintf(name, bytes, "fake device %d", device);
	return SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
	*bytes = 1ull << 30;
	return bad_device(device) ? INVALID_DEVICE : SUCCESS;
}

CUresult cuDeviceGetUuid_v2(unsigned char *uuid, CUdevice device) {
	memcpy(uuid, "fake GPU, no. ", 14);
	uuid[14] = 0, uuid[15] = device;
	return bad_device(device) ? INVALID_DEVICE : SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
	if (bad_device(device))
		return INVALID_DEVICE;
	switch (attribute) {
	case 40: *value = 2; return SUCCESS;
	case 41: case 91: case 99: case 103: *value = 1; return SUCCESS;
	case 134: *value = 0; return SUCCESS;
	}
	return INVALID_VALUE;
}

CUresult cuDevicePrimaryCtxRetain(struct context **out, CUdevice device) {
	ENTER(0);
	if (bad_device(device))
		return INVALID_DEVICE;
	pthread_mutex_lock(&world);
	contexts[device].device = device;
	if (contexts[device].references++ == 0)
		atomic_fetch_add(&control->contexts, 1);
	*out = &contexts[device];
	pthread_mutex_unlock(&world);
	return SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
	pthread_mutex_lock(&world);
	CUresult r = SUCCESS;
	if (bad_device(device) || contexts[device].references == 0) {
		violation("release of a context that is not retained");
		r = INVALID_CONTEXT;
	} else if (--contexts[device].references == 0) {
		contexts[device].lost = SUCCESS;
		atomic_fetch_sub(&control->contexts, 1);
	}
	pthread_mutex_unlock(&world);
	return r;
}

CUresult cuCtxSetCurrent(struct context *context) {
	ENTER(0);
	return pthread_setspecific(current_key, context) == 0 ? SUCCESS : OUT_OF_MEMORY;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
	ENTER(1);
	*least = 0, *greatest = -5;
	return SUCCESS;
}

// ---- Memory.

// create maps memory twice: where the process sees it, and where workers do. Called with world held.
static struct span *create(int kind, size_t bytes, int fd, int poison) {
	struct span *s = fresh();
	size_t whole = round_up(bytes);
	if (s == NULL)
		return NULL;
	if (fd < 0) {
		fd = memfd_create("fake cuda memory", MFD_CLOEXEC);
		if (fd < 0 || ftruncate(fd, whole) != 0)
			return NULL;
	}
	memset(s, 0, sizeof *s);
	s->real = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	// A page without access on either side, so that what is off by a little is nobody else's.
	char *reserved = mmap(NULL, whole + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (s->real == MAP_FAILED || reserved == MAP_FAILED)
		return NULL;
	s->visible = reserved + PAGE;
	if (kind == HOST && mmap(s->visible, whole, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
		return NULL;
	if (poison)
		memset(s->real, POISON, whole);
	if (kind == HOST) {
		s->writers = calloc(whole / PAGE, sizeof *s->writers);
		s->readers = calloc(whole / PAGE, sizeof *s->readers);
	}
	s->kind = kind, s->bytes = bytes, s->fd = fd, s->owned = 1;
	s->device = current ? current->device : 0;
	atomic_fetch_add(&control->allocations, 1);
	return s;
}

// destroy unmaps what workers see. What the process saw stays reserved without access, so that its address is not used
// again; of registered memory it stays mapped. Called with world held.
static CUresult destroy(struct span *s, const char *what) {
	if (s->users > 0) {
		violation("%s of memory under %d copies", what, s->users);
		return SUCCESS; // and it stays, as a device would go on using it
	}
	munmap(s->real, round_up(s->bytes));
	if (s->kind == HOST && s->owned)
		mmap(s->visible, round_up(s->bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
	close(s->fd);
	free(s->writers);
	free(s->readers);
	s->kind = FREE;
	atomic_fetch_sub(&control->allocations, 1);
	return SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t bytes) {
	ENTER(1);
	if (bytes == 0)
		return INVALID_VALUE;
	pthread_mutex_lock(&world);
	struct span *s = create(DEVICE, bytes, -1, 1);
	if (s != NULL)
		*out = (CUdeviceptr)s->visible;
	pthread_mutex_unlock(&world);
	return s ? SUCCESS : OUT_OF_MEMORY;
}

static CUresult remove_at(CUdeviceptr p, int kind, int owned, const char *what) {
	pthread_mutex_lock(&world);
	struct span *s = find((void *)p, 0);
	CUresult r = INVALID_VALUE;
	if (s != NULL && s->visible == (char *)p && (int)s->kind == kind && s->owned == owned && s->references == 0)
		r = destroy(s, what);
	else
		violation("%s of memory that is not there", what);
	pthread_mutex_unlock(&world);
	return r;
}

CUresult cuMemFree_v2(CUdeviceptr p) {
	ENTER(1);
	return remove_at(p, DEVICE, 1, "free");
}

CUresult cuMemHostAlloc(void **out, size_t bytes, unsigned flags) {
	ENTER(1);
	if (bytes == 0 || flags > 7)
		return INVALID_VALUE;
	pthread_mutex_lock(&world);
	struct span *s = create(HOST, bytes, -1, 1);
	if (s != NULL)
		*out = s->visible;
	pthread_mutex_unlock(&world);
	return s ? SUCCESS : OUT_OF_MEMORY;
}

CUresult cuMemFreeHost(void *p) {
	ENTER(1);
	return remove_at((CUdeviceptr)p, HOST, 1, "free");
}

// cuMemHostRegister puts memory that can be mapped twice in the place of the caller's, with the same content.
CUresult cuMemHostRegister_v2(void *p, size_t bytes, unsigned flags) {
	ENTER(1);
	if (bytes == 0 || (uintptr_t)p % PAGE != 0 || bytes % PAGE != 0 || flags > 15)
		return INVALID_VALUE;
	pthread_mutex_lock(&world);
	CUresult r = ALREADY_REGISTERED;
	for (int i = 0; i < used_spans; i++)
		if (spans[i].kind != FREE && spans[i].visible < (char *)p + bytes && (char *)p < spans[i].visible + spans[i].bytes)
			goto out;
	struct span *s = create(HOST, bytes, -1, 0);
	r = OUT_OF_MEMORY;
	if (s == NULL)
		goto out;
	memcpy(s->real, p, bytes);
	if (mmap(p, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, s->fd, 0) == MAP_FAILED)
		goto out;
	munmap(s->visible - PAGE, bytes + 2 * PAGE);
	s->visible = p, s->owned = 0;
	r = SUCCESS;
out:
	pthread_mutex_unlock(&world);
	return r;
}

CUresult cuMemHostUnregister(void *p) {
	ENTER(1);
	return remove_at((CUdeviceptr)p, HOST, 0, "unregistering");
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr p) {
	ENTER(1);
	pthread_mutex_lock(&world);
	struct span *s = find((void *)p, 1);
	if (s != NULL)
		*base = (CUdeviceptr)s->visible, *bytes = s->bytes;
	pthread_mutex_unlock(&world);
	return s ? SUCCESS : NOT_FOUND;
}

// ---- Copies.

// submit makes an operation of stretches; those that are not memory of a device on one side and page-locked on the other
// are refused.
static CUresult submit(struct stream *s, int kind, size_t n, const CUdeviceptr *to, const CUdeviceptr *from, const size_t *bytes, int order) {
	struct operation *o = calloc(1, sizeof *o);
	o->part = calloc(n, sizeof *o->part);
	o->kind = kind, o->parts = n;
	pthread_mutex_lock(&world);
	for (size_t i = 0; i < n; i++) {
		if (!resolve(&o->part[i], to[i], from[i], bytes[i]) || o->part[i].target->kind == o->part[i].source->kind) {
			pthread_mutex_unlock(&world);
			discard(o);
			return INVALID_VALUE;
		}
	}
	for (size_t i = 0; i < n; i++) {
		struct part *p = &o->part[i];
		if (order == 3 && p->source->kind == DEVICE) {
			violation("a store whose source may be read in any order");
			p->early = malloc(p->bytes);
			memcpy(p->early, p->from, p->bytes);
		}
		take(p);
	}
	enqueue(s, o);
	pthread_mutex_unlock(&world);
	return SUCCESS;
}

static CUresult single(CUdeviceptr to, CUdeviceptr from, size_t bytes, void *stream) {
	ENTER(1);
	struct stream *s = user_stream(stream);
	if (s == NULL)
		return INVALID_HANDLE;
	atomic_fetch_add(&control->copies, 1);
	return submit(s, COPY, 1, &to, &from, &bytes, 1);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, void *stream) { return single(to, (CUdeviceptr)from, bytes, stream); }
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, void *stream) { return single((CUdeviceptr)to, from, bytes, stream); }

CUresult cuMemcpy2DAsync_v2(const CUplane *p, void *stream) {
	ENTER(1);
	struct stream *s = user_stream(stream);
	if (s == NULL)
		return INVALID_HANDLE;
	if (p->width == 0 || p->rows == 0 || p->width > p->from_pitch || p->width > p->to_pitch || p->from_pitch > INT32_MAX || p->to_pitch > INT32_MAX ||
		p->from_x || p->from_y || p->to_x || p->to_y || p->from_type + p->to_type != 3)
		return INVALID_VALUE;
	CUdeviceptr *to = calloc(p->rows, sizeof *to), *from = calloc(p->rows, sizeof *from);
	size_t *bytes = calloc(p->rows, sizeof *bytes);
	for (size_t i = 0; i < p->rows; i++) {
		to[i] = (p->to_type == 1 ? (CUdeviceptr)p->to_host : p->to_device) + i * p->to_pitch;
		from[i] = (p->from_type == 1 ? (CUdeviceptr)p->from_host : p->from_device) + i * p->from_pitch;
		bytes[i] = p->width;
	}
	atomic_fetch_add(&control->planes, 1);
	CUresult r = submit(s, COPY, p->rows, to, from, bytes, 1);
	free(to), free(from), free(bytes);
	return r;
}

static CUresult batch(CUdeviceptr *to, CUdeviceptr *from, size_t *bytes, size_t n, CUattributes *attributes, size_t *first, size_t groups, size_t *failed, void *stream) {
	if (failed)
		*failed = SIZE_MAX;
	CUresult r = enter(1);
	if (r != SUCCESS && r != ILLEGAL_ADDRESS && n > 1 && current && !current->lost && user_stream(stream)) {
		// The call that the test wants to fail has started some of its copies.
		submit(stream, COPY, n / 2, to, from, bytes, 1);
		if (failed)
			*failed = n / 2;
	}
	if (r != SUCCESS)
		return r;
	struct stream *s = user_stream(stream);
	if (s == NULL || n == 0 || groups == 0 || groups > n || first[0] != 0)
		return INVALID_VALUE;
	for (size_t i = 0; i < groups; i++)
		if (attributes[i].order < 1 || attributes[i].order > 3 || attributes[i].flags > 1 || first[i] >= n || (i > 0 && first[i] <= first[i - 1]))
			return INVALID_VALUE;
	for (size_t i = 0; i < n; i++)
		if (bytes[i] == 0) {
			if (failed)
				*failed = i;
			return INVALID_VALUE;
		}
	atomic_fetch_add(&control->batches, 1);
	atomic_fetch_add(&control->batched, n);
	return submit(s, COPY, n, to, from, bytes, attributes[0].order);
}

CUresult cuMemcpyBatchAsync(CUdeviceptr *to, CUdeviceptr *from, size_t *bytes, size_t n, CUattributes *attributes, size_t *first, size_t groups, size_t *failed, void *stream) {
	return batch(to, from, bytes, n, attributes, first, groups, failed, stream);
}

CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *to, CUdeviceptr *from, size_t *bytes, size_t n, CUattributes *attributes, size_t *first, size_t groups, void *stream) {
	return batch(to, from, bytes, n, attributes, first, groups, NULL, stream);
}

CUresult cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status) {
	(void)flags;
	*out = NULL, *status = 1;
	if (strcmp(name, "cuMemcpyBatchAsync") != 0)
		return NOT_FOUND;
	if (version >= 13000 && (atomic_load(&control->batch_abis) & 2))
		*out = (void *)cuMemcpyBatchAsync_v2;
	else if (version >= 12080 && version < 13000 && (atomic_load(&control->batch_abis) & 1))
		*out = (void *)cuMemcpyBatchAsync;
	*status = *out ? 0 : 1;
	return *out ? SUCCESS : NOT_FOUND;
}

static CUresult synchronous(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
	struct part p;
	ENTER(1);
	pthread_mutex_lock(&world);
	struct span *t = find((void *)to, bytes), *f = find((void *)from, bytes);
	CUresult r = t && f ? INVALID_VALUE : SUCCESS; // one side is a device's
	if (t && resolve(&p, to, (CUdeviceptr)t->visible, bytes))
		memcpy(p.to, (void *)from, bytes);
	else if (f && resolve(&p, (CUdeviceptr)f->visible, from, bytes))
		memcpy((void *)to, p.from, bytes);
	else
		r = INVALID_VALUE;
	pthread_mutex_unlock(&world);
	return r;
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) { return synchronous(to, (CUdeviceptr)from, bytes); }
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) { return synchronous((CUdeviceptr)to, from, bytes); }

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, void *stream) {
	ENTER(1);
	struct stream *s = user_stream(stream);
	struct operation *o = calloc(1, sizeof *o);
	o->part = calloc(1, sizeof *o->part);
	o->kind = FILL, o->parts = 1, o->value = value;
	pthread_mutex_lock(&world);
	int ok = s != NULL && resolve(o->part, to, to, bytes) && o->part[0].target->kind == DEVICE;
	if (ok) {
		take(o->part);
		enqueue(s, o);
	}
	pthread_mutex_unlock(&world);
	if (!ok)
		discard(o);
	return ok ? SUCCESS : INVALID_VALUE;
}

// ---- Streams and events.

CUresult cuStreamCreateWithPriority(struct stream **out, unsigned flags, int priority) {
	(void)priority;
	ENTER(1);
	if (flags != 1)
		violation("a stream that waits for the default stream");
	struct stream *s = calloc(1, sizeof *s);
	pthread_mutex_lock(&world);
	static uint64_t streams;
	s->context = current, s->tail = &s->head, s->random = atomic_load(&control->seed) + streams++;
	pthread_mutex_unlock(&world);
	pthread_cond_init(&s->work, NULL);
	if (pthread_create(&s->worker, NULL, work, s) != 0) {
		free(s);
		return OUT_OF_MEMORY;
	}
	atomic_fetch_add(&control->streams, 1);
	*out = s;
	return SUCCESS;
}

CUresult cuStreamDestroy_v2(struct stream *s) {
	ENTER(1);
	pthread_mutex_lock(&world);
	if (s->head != NULL || s->busy)
		violation("a stream is destroyed with work on it");
	s->closing = 1;
	pthread_cond_signal(&s->work);
	pthread_mutex_unlock(&world);
	pthread_join(s->worker, NULL);
	pthread_cond_destroy(&s->work);
	free(s);
	atomic_fetch_sub(&control->streams, 1);
	return SUCCESS;
}

CUresult cuStreamSynchronize(struct stream *s) {
	ENTER(1);
	pthread_mutex_lock(&world);
	while (s->head != NULL || s->busy)
		pthread_cond_wait(&changed, &world);
	CUresult r = s->context->lost;
	pthread_mutex_unlock(&world);
	return r;
}

CUresult cuEventCreate(struct event **out, unsigned flags) {
	ENTER(1);
	if (flags > 7)
		return INVALID_VALUE;
	struct event *e = calloc(1, sizeof *e);
	pthread_mutex_lock(&world);
	e->next = events, e->link = &events;
	if (events != NULL)
		events->link = &e->next;
	events = e;
	pthread_mutex_unlock(&world);
	atomic_fetch_add(&control->events, 1);
	*out = e;
	return SUCCESS;
}

CUresult cuEventRecord(struct event *e, struct stream *s) {
	ENTER(1);
	if (user_stream(s) == NULL)
		return INVALID_HANDLE;
	struct operation *o = calloc(1, sizeof *o);
	pthread_mutex_lock(&world);
	o->kind = RECORD, o->event = e, o->number = ++e->recorded;
	enqueue(s, o);
	pthread_mutex_unlock(&world);
	return SUCCESS;
}

CUresult cuEventQuery(struct event *e) {
	ENTER(1);
	pthread_mutex_lock(&world);
	CUresult r = e->over == e->recorded ? e->result : NOT_READY;
	pthread_mutex_unlock(&world);
	return r;
}

CUresult cuEventSynchronize(struct event *e) {
	ENTER(1);
	pthread_mutex_lock(&world);
	uint64_t until = e->recorded;
	while (e->over < until)
		pthread_cond_wait(&changed, &world);
	CUresult r = e->result;
	pthread_mutex_unlock(&world);
	return r;
}

CUresult cuEventDestroy_v2(struct event *e) {
	ENTER(1);
	pthread_mutex_lock(&world);
	if (e->over == e->recorded) { // one that has not happened yet goes on existing, unnamed
		*e->link = e->next;
		if (e->next != NULL)
			e->next->link = e->link;
		free(e);
	}
	pthread_mutex_unlock(&world);
	atomic_fetch_sub(&control->events, 1);
	return SUCCESS;
}

// ---- Kernels.

static const char kernel_name[] = "holdfast_copy";

CUresult cuModuleLoadDataEx(void **out, const void *image, unsigned options, int *names, void **values) {
	(void)names, (void)values;
	ENTER(1);
	const char *text = image;
	if (atomic_load(&control->module_result))
		return (CUresult)atomic_load(&control->module_result);
	const char *version = strstr(text, "\n.version ");
	if (version == NULL || strstr(text, ".target sm_") == NULL || strstr(text, kernel_name) == NULL || options != 0)
		return INVALID_VALUE;
	if (atof(version + strlen("\n.version ")) > 7.4) // what 11.4 takes
		return UNSUPPORTED_PTX;
	*out = (void *)kernel_name;
	return SUCCESS;
}

CUresult cuModuleGetFunction(void **out, void *module, const char *name) {
	ENTER(1);
	if (strcmp(name, kernel_name) != 0)
		return NOT_FOUND;
	*out = module;
	return SUCCESS;
}

CUresult cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream, void **parameters, void **extra) {
	ENTER(1);
	struct stream *s = user_stream(stream);
	if (s == NULL)
		return INVALID_HANDLE;
	if (function != kernel_name || gx == 0 || gy != 1 || gz != 1 || bx == 0 || bx > 1024 || by != 1 || bz != 1 || shared || extra)
		return INVALID_VALUE;
	struct operation *o = calloc(1, sizeof *o);
	uint64_t runs;
	memcpy(&runs, parameters[0], sizeof runs);
	memcpy(&o->count, parameters[1], sizeof o->count);
	pthread_mutex_lock(&world);
	struct span *d = find((void *)runs, o->count * sizeof(struct kernel_run));
	o->kind = KERNEL, o->parts = 0;
	if (d != NULL) {
		// What it will touch is what the descriptors say now; what it does touch is what they say then.
		o->descriptors = d, o->runs = (const struct kernel_run *)(d->real + ((char *)runs - d->visible));
		o->part = calloc(o->count, sizeof *o->part);
		for (uint32_t i = 0; i < o->count; i++)
			if (resolve(&o->part[o->parts], o->runs[i].to, o->runs[i].from, o->runs[i].words * 16))
				take(&o->part[o->parts++]);
		d->users++;
		enqueue(s, o);
		atomic_fetch_add(&control->kernels, 1);
		atomic_fetch_add(&control->kernel_runs, o->count);
	} else {
		current->lost = ILLEGAL_ADDRESS;
		free(o);
	}
	pthread_mutex_unlock(&world);
	return SUCCESS;
}

// ---- Memory of other processes. A handle tells the importer where to find the exporter's descriptor.

struct ipc { char magic[8]; int pid, fd; uint64_t bytes; int device; };

CUresult cuIpcGetMemHandle(CUipc *out, CUdeviceptr p) {
	ENTER(1);
	struct ipc ipc = {.magic = "fakeipc", .pid = getpid()};
	pthread_mutex_lock(&world);
	struct span *s = find((void *)p, 1);
	int ok = s != NULL && s->kind == DEVICE && s->handle == 0; // memory from cuMemCreate cannot be exported so
	if (ok)
		ipc.fd = s->fd, ipc.bytes = s->bytes, ipc.device = s->device;
	pthread_mutex_unlock(&world);
	memset(out, 0, sizeof *out);
	memcpy(out->b, &ipc, sizeof ipc);
	return ok ? SUCCESS : INVALID_VALUE;
}

// open_memory maps memory by descriptor, or finds that it is mapped already. Called with world held.
static struct span *open_memory(int fd, size_t bytes) {
	struct stat info;
	if (fstat(fd, &info) != 0 || (size_t)info.st_size < bytes) {
		close(fd);
		return NULL;
	}
	for (int i = 0; i < used_spans; i++)
		if (spans[i].kind == DEVICE && spans[i].inode == info.st_ino && spans[i].references > 0) {
			close(fd);
			spans[i].references++;
			return &spans[i];
		}
	struct span *s = create(DEVICE, bytes, fd, 0);
	if (s != NULL)
		s->references = 1, s->inode = info.st_ino;
	return s;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *out, CUipc handle, unsigned flags) {
	ENTER(1);
	struct ipc ipc;
	char path[64];
	memcpy(&ipc, handle.b, sizeof ipc);
	if (memcmp(ipc.magic, "fakeipc", 8) != 0 || flags > 1)
		return INVALID_VALUE;
	if (ipc.pid == getpid())
		return INVALID_CONTEXT;
	if (ipc.device != current->device)
		return INVALID_DEVICE;
	snprintf(path, sizeof path, "/proc/%d/fd/%d", ipc.pid, ipc.fd);
	int fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0)
		return INVALID_VALUE;
	pthread_mutex_lock(&world);
	struct span *s = open_memory(fd, ipc.bytes);
	if (s != NULL) {
		*out = (CUdeviceptr)s->visible;
		atomic_fetch_add(&control->imports, 1);
	}
	pthread_mutex_unlock(&world);
	return s ? SUCCESS : INVALID_VALUE;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr p) {
	ENTER(1);
	pthread_mutex_lock(&world);
	struct span *s = find((void *)p, 1);
	CUresult r = INVALID_VALUE;
	if (s != NULL && s->references > 0) {
		r = SUCCESS;
		atomic_fetch_sub(&control->imports, 1);
		if (--s->references == 0)
			r = destroy(s, "closing an import");
	} else
		violation("closing an import that is not open");
	pthread_mutex_unlock(&world);
	return r;
}

// Handles of cuMemCreate are descriptors, off by one so that 0 is none.

CUresult cuMemGetAllocationGranularity(size_t *out, const CUproperties *properties, int kind) {
	(void)properties, (void)kind;
	*out = 64 << 10;
	return SUCCESS;
}

CUresult cuMemCreate(CUhandle *out, size_t bytes, const CUproperties *properties, uint64_t flags) {
	ENTER(1);
	if (bytes % (64 << 10) != 0 || properties->type != 1 || properties->where.type != 1 || flags != 0)
		return INVALID_VALUE;
	int fd = memfd_create("fake cuda memory", MFD_CLOEXEC);
	if (fd < 0 || ftruncate(fd, bytes) != 0)
		return OUT_OF_MEMORY;
	*out = fd + 1;
	return SUCCESS;
}

CUresult cuMemExportToShareableHandle(void *out, CUhandle handle, int type, uint64_t flags) {
	ENTER(1);
	if (type != 1 || flags != 0)
		return INVALID_VALUE;
	int fd = dup((int)handle - 1);
	memcpy(out, &fd, sizeof fd);
	return fd < 0 ? INVALID_VALUE : SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUhandle *out, void *os_handle, int type) {
	ENTER(1);
	struct stat info;
	int fd = fcntl((int)(intptr_t)os_handle, F_DUPFD_CLOEXEC, 0);
	if (type != 1 || fd < 0 || fstat(fd, &info) != 0 || info.st_size == 0)
		return INVALID_VALUE;
	atomic_fetch_add(&control->imports, 1);
	*out = fd + 1;
	return SUCCESS;
}

CUresult cuMemRelease(CUhandle handle) {
	ENTER(1);
	atomic_fetch_sub(&control->imports, 1);
	return close((int)handle - 1) == 0 ? SUCCESS : INVALID_VALUE;
}

CUresult cuMemAddressReserve(CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr at, uint64_t flags) {
	ENTER(1);
	if (bytes == 0 || alignment || at || flags)
		return INVALID_VALUE;
	void *p = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	*out = (CUdeviceptr)p;
	return p == MAP_FAILED ? OUT_OF_MEMORY : SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr p, size_t bytes) {
	ENTER(1);
	pthread_mutex_lock(&world);
	if (find((void *)p, 1) != NULL)
		violation("an address range is freed with memory in it");
	pthread_mutex_unlock(&world);
	return munmap((void *)p, bytes) == 0 ? SUCCESS : INVALID_VALUE;
}

CUresult cuMemMap(CUdeviceptr p, size_t bytes, size_t offset, CUhandle handle, uint64_t flags) {
	ENTER(1);
	struct stat info;
	int fd = fcntl((int)handle - 1, F_DUPFD_CLOEXEC, 0);
	if (fd < 0 || offset != 0 || flags != 0 || fstat(fd, &info) != 0 || (size_t)info.st_size != bytes) {
		close(fd);
		return INVALID_VALUE;
	}
	pthread_mutex_lock(&world);
	struct span *s = create(DEVICE, bytes, fd, 0);
	if (s != NULL) {
		munmap(s->visible - PAGE, round_up(bytes) + 2 * PAGE);
		s->visible = (char *)p, s->handle = handle;
		s->device = -1; // nobody has access yet
	}
	pthread_mutex_unlock(&world);
	return s ? SUCCESS : OUT_OF_MEMORY;
}

CUresult cuMemSetAccess(CUdeviceptr p, size_t bytes, const CUaccess *access, size_t n) {
	ENTER(1);
	pthread_mutex_lock(&world);
	struct span *s = find((void *)p, bytes);
	int ok = s != NULL && n == 1 && access->where.type == 1 && access->flags == 3;
	if (ok)
		s->device = access->where.id;
	pthread_mutex_unlock(&world);
	return ok ? SUCCESS : INVALID_VALUE;
}

CUresult cuMemUnmap(CUdeviceptr p, size_t bytes) {
	ENTER(1);
	pthread_mutex_lock(&world);
	struct span *s = find((void *)p, bytes);
	CUresult r = s != NULL && s->handle != 0 ? destroy(s, "unmapping") : INVALID_VALUE;
	pthread_mutex_unlock(&world);
	return r;
}
