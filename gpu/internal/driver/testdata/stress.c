// Several threads use the shim at once on the fake driver, under ThreadSanitizer: each has a lane of its own on a device
// that all share, stores what it loaded, and compares. Arguments: the library, and how often.
#include "shim.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { THREADS = 4, BLOCKS = 24, BLOCK = 4096, BYTES = BLOCKS * BLOCK };

static hf_driver *driver;
static uintptr_t ctx;
static int rounds;

#define MUST(call)                                                         \
	do {                                                                   \
		int r_ = (call);                                                   \
		if (r_ != 0) {                                                     \
			fprintf(stderr, "line %d: %s: result %d\n", __LINE__, #call, r_); \
			exit(1);                                                       \
		}                                                                  \
	} while (0)

struct lane {
	uintptr_t stream, event;
	uint64_t *to, *from;
	size_t *bytes;
	hf_kernel_run *runs;
	hf_plane *plane;
};

static void open_lane(struct lane *l) {
	void *p;
	MUST(hf_stream(driver, ctx, 1, &l->stream));
	MUST(hf_event(driver, ctx, &l->event));
	MUST(hf_host_alloc(driver, ctx, BLOCKS * 80, &p));
	l->to = p, l->from = l->to + BLOCKS, l->bytes = (size_t *)(l->from + BLOCKS);
	l->runs = (hf_kernel_run *)(l->bytes + BLOCKS), l->plane = (hf_plane *)(l->runs + BLOCKS);
}

// copy moves every block one way, by one of the methods, and waits by one of the ways to wait.
static void copy(struct lane *l, int direction, uint64_t device, char *host, int round) {
	hf_chunk c = {.direction = direction, .to = l->to, .from = l->from, .bytes = l->bytes, .kernel_run = l->runs, .plane = l->plane, .blocks = 4};
	static const int batches[] = {0, HF_BATCH_V1, HF_BATCH_V2};
	c.batch = batches[round % 3];
	if (round % 5 == 4) {
		c.planes = 1;
		l->plane[0] = (hf_plane){device, (uint64_t)host, BLOCK, BLOCKS, BLOCK, BLOCK};
	}
	for (int i = 0; c.planes == 0 && i < BLOCKS; i++) {
		uint64_t d = device + (uint64_t)i * BLOCK, h = (uint64_t)(host + i * BLOCK);
		l->to[i] = direction == 1 ? h : d, l->from[i] = direction == 1 ? d : h, l->bytes[i] = BLOCK;
		c.copies++;
	}
	hf_outcome out = hf_submit(driver, ctx, l->stream, l->event, &c);
	if (out.result != 0 || !out.started || !out.recorded) {
		fprintf(stderr, "submit: %s: result %d\n", out.call, out.result);
		exit(1);
	}
	if (round % 2) {
		hf_result result = 600;
		while (result == 600)
			MUST(hf_event_query(driver, ctx, 1, &l->event, &result));
		MUST(result);
	} else
		MUST(hf_event_wait(driver, ctx, l->event));
}

static void *run(void *arg) {
	int id = (int)(intptr_t)arg;
	struct lane up, down;
	void *memory;
	uint64_t device;
	open_lane(&up);
	open_lane(&down);
	MUST(hf_alloc(driver, ctx, BYTES, &device));
	MUST(hf_host_alloc(driver, ctx, BYTES, &memory));
	char *host = memory;
	for (int round = 0; round < rounds; round++) {
		memset(host, id * 31 + round, BYTES);
		copy(&down, 2, device, host, round);
		memset(host, 0, BYTES);
		copy(&up, 1, device, host, round + 1);
		for (int i = 0; i < BYTES; i++)
			if (host[i] != (char)(id * 31 + round)) {
				fprintf(stderr, "thread %d, round %d: byte %d is wrong\n", id, round, i);
				exit(1);
			}
	}
	MUST(hf_host_free(driver, ctx, memory));
	MUST(hf_free(driver, ctx, device));
	MUST(hf_stream_wait(driver, ctx, up.stream));
	MUST(hf_event_destroy(driver, ctx, up.event));
	MUST(hf_event_destroy(driver, ctx, down.event));
	MUST(hf_stream_destroy(driver, ctx, up.stream));
	MUST(hf_stream_destroy(driver, ctx, down.stream));
	return NULL;
}

int main(int argc, char **argv) {
	char why[512];
	hf_device device;
	pthread_t threads[THREADS];
	if (argc != 3 || hf_load(argv[1], &driver, why, sizeof why) != 0) {
		fprintf(stderr, "load: %s\n", why);
		return 1;
	}
	rounds = atoi(argv[2]);
	MUST(hf_describe(driver, 0, &device));
	MUST(hf_retain(driver, device.handle, &ctx));
	for (int i = 0; i < THREADS; i++)
		MUST(pthread_create(&threads[i], NULL, run, (void *)(intptr_t)i));
	for (int i = 0; i < THREADS; i++)
		MUST(pthread_join(threads[i], NULL));
	MUST(hf_release(driver, device.handle));
	return 0;
}
