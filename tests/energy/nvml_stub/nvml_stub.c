/* A library that behaves like NVML, for tests: no GPU needed, the real nvidia-ml-py talks to it.
 *
 * Its state is a file (named by PENSTOCK_NVML_STUB) that every process maps, so several processes see the same
 * GPUs. nvml_stub.py writes the same layout. Without that variable it says "driver not loaded".
 * Watts are what the load wants, at most the power limit, at least the idle power; joules are their integral over
 * the machine's monotonic clock, or over a virtual one that a test moves.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAX_DEVICES 16
#define MAX_PIDS 64

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
       DRIVER_NOT_LOADED = 9, FUNCTION_NOT_FOUND = 13, GPU_IS_LOST = 15 };
enum { NO_COUNTER = 1, NO_ENERGY_FUNCTION = 2, STALLED = 4, LOST = 8, LOCKED = 16, MIG = 32, NO_LIMIT = 64 };
enum { CALL_ENERGY, CALL_POWER, CALL_SET, CALL_OTHER, CALLS };

typedef struct {
    char name[64], uuid[64];
    double load_w, idle_w, limit_w, min_w, max_w, default_w;
    double energy_j, settled_s, stalled_j, quantum_s;
    int64_t flags, sets;
} Device;

typedef struct {
    int64_t count, is_virtual;
    double now_s, unused;
    Device devices[MAX_DEVICES];
    struct { int64_t pid; int64_t calls[CALLS]; } pids[MAX_PIDS];
} State;

static State *state;
static int fd = -1, users;

static double now_s(void) {
    if (state->is_virtual) return state->now_s;
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double watts(const Device *d) {
    double w = d->load_w < d->limit_w ? d->load_w : d->limit_w;
    return w > d->idle_w ? w : d->idle_w;
}

static double joules(const Device *d, double t) {
    double elapsed = t - d->settled_s;
    return d->energy_j + (elapsed > 0 ? elapsed : 0) * watts(d);
}

static void count_call(int kind) {
    int64_t me = getpid();
    for (int i = 0; i < MAX_PIDS; i++) {
        int64_t expected = 0;
        if (state->pids[i].pid == me ||
            __atomic_compare_exchange_n(&state->pids[i].pid, &expected, me, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST) ||
            expected == me) {
            __atomic_add_fetch(&state->pids[i].calls[kind], 1, __ATOMIC_RELAXED);
            return;
        }
    }
}

static int device(void *handle, Device **out) {
    if (!state) return UNINITIALIZED;
    intptr_t i = (intptr_t)handle - 1;
    if (i < 0 || i >= state->count) return INVALID;
    *out = &state->devices[i];
    return ((*out)->flags & LOST) ? GPU_IS_LOST : OK;
}

#define DEVICE(kind) Device *d; int r = device(handle, &d); if (state) count_call(kind); if (r) return r

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    if (users++) return OK;
    const char *path = getenv("PENSTOCK_NVML_STUB");
    if (!path || (fd = open(path, O_RDWR | O_CLOEXEC)) < 0) { users = 0; return DRIVER_NOT_LOADED; }
    state = mmap(NULL, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (state == MAP_FAILED) { state = NULL; users = 0; close(fd); return DRIVER_NOT_LOADED; }
    return OK;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    if (!users) return UNINITIALIZED;
    if (--users == 0) { munmap(state, sizeof(State)); state = NULL; close(fd); fd = -1; }
    return OK;
}

const char *nvmlErrorString(int r) {
    switch (r) {
    case OK: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case FUNCTION_NOT_FOUND: return "Function Not Found";
    case GPU_IS_LOST: return "GPU is lost";
    default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *out, unsigned size) {
    if (!state) return UNINITIALIZED;
    snprintf(out, size, "stub");
    return OK;
}

int nvmlDeviceGetCount_v2(unsigned *out) {
    if (!state) return UNINITIALIZED;
    *out = (unsigned)state->count;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) {
    if (!state) return UNINITIALIZED;
    if (index >= state->count) return INVALID;
    if (state->devices[index].flags & LOST) return GPU_IS_LOST;
    *out = (void *)(intptr_t)(index + 1);
    return OK;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) {
    if (!state) return UNINITIALIZED;
    for (int i = 0; i < state->count; i++)
        if (!strcmp(state->devices[i].uuid, uuid)) { *out = (void *)(intptr_t)(i + 1); return OK; }
    return NOT_FOUND;
}

int nvmlDeviceGetIndex(void *handle, unsigned *out) {
    DEVICE(CALL_OTHER);
    *out = (unsigned)((intptr_t)handle - 1);
    return OK;
}

int nvmlDeviceGetName(void *handle, char *out, unsigned size) {
    DEVICE(CALL_OTHER);
    snprintf(out, size, "%s", d->name);
    return OK;
}

int nvmlDeviceGetUUID(void *handle, char *out, unsigned size) {
    DEVICE(CALL_OTHER);
    snprintf(out, size, "%s", d->uuid);
    return OK;
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned *out) {
    DEVICE(CALL_POWER);
    *out = (unsigned)(watts(d) * 1000 + 0.5);
    return OK;
}

#ifndef WITHOUT_ENERGY
int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *out) {
    DEVICE(CALL_ENERGY);
    if (d->flags & NO_COUNTER) return NOT_SUPPORTED;
    if (d->flags & NO_ENERGY_FUNCTION) return FUNCTION_NOT_FOUND;
    double t = now_s();
    if (d->quantum_s > 0) t = (double)(long long)(t / d->quantum_s) * d->quantum_s;
    double j = (d->flags & STALLED) ? d->stalled_j : joules(d, t);
    *out = (unsigned long long)(j * 1000);
    return OK;
}
#endif

int nvmlDeviceGetPowerManagementLimit(void *handle, unsigned *out) {
    DEVICE(CALL_OTHER);
    if (d->flags & NO_LIMIT) return NOT_SUPPORTED;
    *out = (unsigned)(d->limit_w * 1000 + 0.5);
    return OK;
}
int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *out) {
    return nvmlDeviceGetPowerManagementLimit(handle, out);
}

int nvmlDeviceGetPowerManagementDefaultLimit(void *handle, unsigned *out) {
    DEVICE(CALL_OTHER);
    if (d->flags & NO_LIMIT) return NOT_SUPPORTED;
    *out = (unsigned)(d->default_w * 1000 + 0.5);
    return OK;
}

int nvmlDeviceGetPowerManagementLimitConstraints(void *handle, unsigned *low, unsigned *high) {
    DEVICE(CALL_OTHER);
    if (d->flags & NO_LIMIT) return NOT_SUPPORTED;
    *low = (unsigned)(d->min_w * 1000 + 0.5);
    *high = (unsigned)(d->max_w * 1000 + 0.5);
    return OK;
}

int nvmlDeviceSetPowerManagementLimit(void *handle, unsigned limit_mw) {
    DEVICE(CALL_SET);
    if (d->flags & NO_LIMIT) return NOT_SUPPORTED;
    if (d->flags & LOCKED) return NO_PERMISSION;
    double limit_w = limit_mw / 1000.0;
    if (limit_w < d->min_w || limit_w > d->max_w) return INVALID;
    flock(fd, LOCK_EX);
    double t = now_s();
    d->energy_j = joules(d, t);
    d->settled_s = t;
    d->limit_w = limit_w;
    d->sets++;
    flock(fd, LOCK_UN);
    return OK;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *pending) {
    DEVICE(CALL_OTHER);
    *now = *pending = (d->flags & MIG) ? 1 : 0;
    return OK;
}
