// What a test and the fake driver share: the file "<library>.control", mapped by both. Every field is read and written as
// one aligned word. The Go side is in control.go, in the same order.
#ifndef FAKECUDA_CONTROL_H
#define FAKECUDA_CONTROL_H

#include <stdatomic.h>
#include <stdint.h>

enum { FAKE_DEVICES = 8 };

struct control {
	// Set by the test.
	_Atomic uint64_t devices;       // how many there are
	_Atomic uint64_t version;       // of the driver, as cuDriverGetVersion tells it
	_Atomic uint64_t batch_abis;    // 1: the first, 2: the second, 3: both
	_Atomic uint64_t init_result;   // of cuInit
	_Atomic uint64_t hold;          // copies and kernels wait while it is not 0
	_Atomic uint64_t hold_fills;    // fills wait whose value, modulo 64, is a bit of it
	_Atomic uint64_t fail_at;       // the call with this number fails, counted from 1; 0 is none
	_Atomic uint64_t fail_more;     // and so many after it
	_Atomic uint64_t fail_with;     // with this result
	_Atomic uint64_t delay_us;      // longest random delay before a copy
	_Atomic uint64_t seed;
	_Atomic uint64_t lost[FAKE_DEVICES];   // copies on the device fail for ever
	_Atomic uint64_t module_result; // of cuModuleLoadDataEx

	// Set by the driver.
	_Atomic uint64_t calls;      // that can fail
	_Atomic uint64_t copies;     // single ones
	_Atomic uint64_t batches;
	_Atomic uint64_t batched;    // copies in batches
	_Atomic uint64_t planes;
	_Atomic uint64_t kernels;
	_Atomic uint64_t kernel_runs;
	_Atomic uint64_t allocations; // device and page-locked memory that is not freed
	_Atomic uint64_t streams;     // that are not destroyed
	_Atomic uint64_t events;
	_Atomic uint64_t imports;
	_Atomic uint64_t contexts;    // retained
	_Atomic uint64_t violations;  // rules of the driver that were broken
	char violation[256];          // the first
};

#endif
