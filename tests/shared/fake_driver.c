// A stand-in for libcuda.so.1 with two cards of compute capability 9.0: contexts are kept per thread, a launch copies its
// configuration and arguments into a record instead of running anything. Enough of the driver API for cudatma's launcher.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_IMAGE = 200, INVALID_CONTEXT = 201 };
enum { INVALID_HANDLE = 400, NOT_FOUND = 500, LAUNCH_FAILED = 719, CAPTURE_UNSUPPORTED = 900 };
enum { CONTEXT_OF_DEVICE_0 = 0x1000, FUNCTION_OF_CONTEXT = 0x100000, FAILING_STREAM = 0xdead };
enum { MAX_PARAMETERS = 64 };

typedef struct {
    uint32_t grid[3], block[3], shared_bytes;
    void *stream;
    uint32_t (*attributes)[18];
    uint32_t attribute_count;
} Config;

struct {
    int32_t launches, device, attribute_count, loads, argument_bytes, dynamic_shared_bytes;
    uint32_t shape[7];
    uint32_t attributes[4][18];
    uint64_t stream, recorded_on, waited_on;
    int64_t events;
    unsigned char arguments[4096];
} fake_record;

struct {
    int32_t parameters, capturing;
    uint64_t sizes[MAX_PARAMETERS];
} fake_setup;

// The panel of a debug kernel (cudatma/hang/records.py), and whether its launches leave a record; device memory is host memory.
struct {
    uint64_t aborted, timeout_ns;
    uint32_t *records;
    unsigned char *notes;
    uint32_t capacity, taken, blocks, reserved;
} fake_panel;
int fake_hangs;

// Streams that a test has told of: their ids, and the captures that they take part in (0: none). Any other stream has an id
// that is a thousand above its handle, and captures where fake_setup.capturing says so.
enum { MAX_STREAMS = 64, MAX_RETAINED = 1024, CAPTURE_OF_ALL = 1, RELAXED = 2, CREATED_STREAM = 0xabc, ALIGNMENT = 256 };
struct {
    uint64_t handle, id, capture;
} fake_streams[MAX_STREAMS];
// Device memory: allocations, those of them while anything was captured, frees, and how often the driver was asked about a
// stream; the stream that the host waited for last, of those that
// it did not create; bytes that are allocated. A capture's graph is the capture's number.
struct {
    int64_t allocations, in_capture, frees, questions;
    uint64_t synchronized;
    int64_t held_bytes;
} fake_counts;
static struct {
    void (*destroy)(void *);
    void *pointer;
    uint64_t graph;
} retained[MAX_RETAINED];
static int retained_count;
static __thread int capture_mode;
// Ten times the compute capability; the most threads of a block; how often tensor maps were made and given another address.
int fake_capability = 90, fake_most_threads = 256, fake_encoded, fake_replaced;

static __thread uintptr_t stack[16];
static __thread int depth;
static pid_t initialized_by;

int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status) {
    char newer[128];
    void *self = dlopen("libcuda.so.1", RTLD_NOW);
    snprintf(newer, sizeof newer, "%s_v2", name);
    if (!(*found = dlsym(self, newer))) *found = dlsym(self, name);
    if (status) *status = *found ? 0 : 1;
    return *found ? SUCCESS : NOT_FOUND;
}
int cuInit(unsigned flags) {
    if (initialized_by && initialized_by != getpid()) return NOT_INITIALIZED;
    initialized_by = getpid();
    return SUCCESS;
}
int cuDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }
int cuDeviceGetCount(int *count) { return *count = 2, SUCCESS; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, SUCCESS; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    // major, minor, opt-in shared memory, SMs
    *value = attribute == 75 ? fake_capability / 10 : attribute == 76 ? fake_capability % 10 : 0;
    *value = attribute == 97 ? 232448 : attribute == 16 ? 132 : *value;
    return SUCCESS;
}
int cuDevicePrimaryCtxRetain(uintptr_t *context, int device) { return *context = CONTEXT_OF_DEVICE_0 + device, SUCCESS; }
int cuDevicePrimaryCtxRelease_v2(int device) { return SUCCESS; }
int cuCtxGetCurrent(uintptr_t *context) { return *context = depth ? stack[depth - 1] : 0, SUCCESS; }
int cuCtxSetCurrent(uintptr_t context) { return stack[depth ? depth - 1 : depth++] = context, SUCCESS; }
int cuCtxPushCurrent_v2(uintptr_t context) { return stack[depth++] = context, SUCCESS; }
int cuCtxPopCurrent_v2(uintptr_t *context) { return *context = stack[--depth], SUCCESS; }
int cuCtxGetDevice(int *device) {
    return depth ? (*device = (int)(stack[depth - 1] - CONTEXT_OF_DEVICE_0), SUCCESS) : INVALID_CONTEXT;
}
int cuModuleLoadData(uintptr_t *module, const void *image) {
    if (!depth) return INVALID_CONTEXT;
    if (memcmp(image, "\177ELF", 4)) return INVALID_IMAGE;
    fake_record.loads++;
    return *module = stack[depth - 1], SUCCESS;
}
int cuModuleGetFunction(uintptr_t *function, uintptr_t module, const char *name) {
    return *function = module + FUNCTION_OF_CONTEXT, SUCCESS;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) {
    // threads, static shared memory, registers
    *value = attribute == 0 ? fake_most_threads : attribute == 1 ? 1024 : attribute == 4 ? 40 : 0;
    return SUCCESS;
}
int cuFuncSetAttribute(void *function, int attribute, int value) {
    return fake_record.dynamic_shared_bytes = attribute == 8 ? value : 0, SUCCESS;
}
int cuFuncGetParamInfo(void *function, size_t index, size_t *offset, size_t *size) {
    if ((int)index >= fake_setup.parameters) return INVALID_VALUE;
    return *offset = 0, *size = fake_setup.sizes[index], SUCCESS;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared_bytes) {
    return *blocks = 2048 / threads, SUCCESS;
}
int cuThreadExchangeStreamCaptureMode(int *mode) {
    int previous = capture_mode;
    return capture_mode = *mode, *mode = previous, SUCCESS;
}
static uint64_t capture_of(uint64_t stream) {
    for (int i = 0; i < MAX_STREAMS; i++)
        if (fake_streams[i].id && fake_streams[i].handle == stream) return fake_streams[i].capture;
    return fake_setup.capturing ? CAPTURE_OF_ALL : 0;
}
static int anything_captures(void) {
    for (int i = 0; i < MAX_STREAMS; i++)
        if (fake_streams[i].id && fake_streams[i].capture) return 1;
    return fake_setup.capturing;
}
int cuStreamIsCapturing(uint64_t stream, int *status) {
    fake_counts.questions++;
    return *status = capture_of(stream) != 0, SUCCESS;
}
int cuStreamGetCaptureInfo_v2(uint64_t stream, int *status, uint64_t *id, uint64_t *graph, void *nodes, void *count) {
    return *status = capture_of(stream) != 0, *id = *graph = capture_of(stream), SUCCESS;
}
int cuStreamGetId(uint64_t stream, uint64_t *id) {
    fake_counts.questions++;
    if (capture_of(stream)) return CAPTURE_UNSUPPORTED;  // as on an H200
    for (int i = 0; i < MAX_STREAMS; i++)
        if (fake_streams[i].id && fake_streams[i].handle == stream) return *id = fake_streams[i].id, SUCCESS;
    return *id = stream + 1000, SUCCESS;
}
int cuUserObjectCreate(uint64_t *object, void *pointer, void (*destroy)(void *), unsigned count, unsigned flags) {
    if (count != 1 || flags != 1 || retained_count == MAX_RETAINED) return INVALID_VALUE;
    retained[retained_count].destroy = destroy, retained[retained_count].pointer = pointer;
    return *object = (uint64_t)++retained_count, SUCCESS;
}
int cuGraphRetainUserObject(uint64_t graph, uint64_t object, unsigned count, unsigned flags) {
    if (!graph || count != 1 || flags != 1) return INVALID_VALUE;
    return retained[object - 1].graph = graph, SUCCESS;
}
int cuUserObjectRelease(uint64_t object, unsigned count) {
    retained[object - 1].destroy(retained[object - 1].pointer);
    return SUCCESS;
}
// What the driver does once a graph and all that was instantiated from it are gone.
void fake_destroy_graph(uint64_t graph) {
    for (int i = 0; i < retained_count; i++)
        if (retained[i].graph == graph) retained[i].graph = 0, retained[i].destroy(retained[i].pointer);
}
int cuStreamCreate(uint64_t *stream, unsigned flags) { return *stream = CREATED_STREAM, SUCCESS; }
int cuStreamDestroy_v2(uint64_t stream) { return SUCCESS; }
int cuGetErrorString(int error, const char **text) { return *text = "said by the fake", SUCCESS; }
int cuPointerGetAttribute(void *data, int attribute, uint64_t pointer) {
    if (attribute != 9 || pointer == 0xbad) return INVALID_VALUE;
    return *(int *)data = pointer >> 40 & 1, SUCCESS;
}
int cuEventCreate(uint64_t *event, unsigned flags) { return *event = 77, fake_record.events++, SUCCESS; }
int cuEventDestroy_v2(uint64_t event) { return fake_record.events--, SUCCESS; }
int cuEventRecord(uint64_t event, uint64_t stream) { return fake_record.recorded_on = stream, SUCCESS; }
int cuStreamWaitEvent(uint64_t stream, uint64_t event, unsigned flags) {
    return fake_record.waited_on = event == 77 ? stream + 1 : 0, SUCCESS;
}
int cuModuleGetGlobal_v2(void **pointer, size_t *size, void *module, const char *name) {
    if (strcmp(name, "cudatma_debug_panel")) return NOT_FOUND;
    return *pointer = &fake_panel, *size = sizeof fake_panel, SUCCESS;
}
int cuMemHostAlloc(void **pointer, size_t size, unsigned flags) { return *pointer = malloc(size), SUCCESS; }
int cuMemHostGetDevicePointer_v2(void **device, void *host, unsigned flags) { return *device = host, SUCCESS; }
int cuMemAlloc_v2(void **pointer, size_t size) {
    if (anything_captures() && capture_mode != RELAXED) return CAPTURE_UNSUPPORTED;
    fake_counts.allocations++, fake_counts.in_capture += anything_captures();
    // The size lies in front of the memory.
    size_t *block = aligned_alloc(ALIGNMENT, (size + 2 * ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    fake_counts.held_bytes += *block = size;
    return *pointer = (char *)block + ALIGNMENT, SUCCESS;
}
int cuMemFree_v2(void *pointer) {
    if (anything_captures() && capture_mode != RELAXED) return CAPTURE_UNSUPPORTED;
    size_t *block = (size_t *)((char *)pointer - ALIGNMENT);
    fake_counts.held_bytes -= *block;
    return fake_counts.frees++, free(block), SUCCESS;
}
int cuMemsetD8Async(void *pointer, unsigned char value, size_t size, void *stream) {
    return memset(pointer, value, size), SUCCESS;
}
int cuMemcpyHtoDAsync_v2(void *device, const void *host, size_t size, void *stream) {
    return memcpy(device, host, size), SUCCESS;
}
int cuMemcpyDtoH_v2(void *host, const void *device, size_t size) { return memcpy(host, device, size), SUCCESS; }
int cuStreamSynchronize(uint64_t stream) {
    if (stream != CREATED_STREAM) fake_counts.synchronized = stream;
    return SUCCESS;
}
static int encode(uint64_t *map, int type, int rank, uint64_t address, const uint64_t *dims, const uint64_t *strides) {
    memset(map, 0, 128);
    map[0] = address, map[1] = 100 * type + rank;
    for (int i = 0; i < rank; i++) map[2 + i] = dims[i];
    for (int i = 0; i + 1 < rank; i++) map[7 + i] = strides[i];
    return fake_encoded++, SUCCESS;
}
int cuTensorMapEncodeTiled(uint64_t *map, int type, int rank, uint64_t address, const uint64_t *dims,
                           const uint64_t *strides) {
    return encode(map, type, rank, address, dims, strides);
}
int cuTensorMapEncodeIm2col(uint64_t *map, int type, int rank, uint64_t address, const uint64_t *dims,
                            const uint64_t *strides) {
    return encode(map, type, rank, address, dims, strides);
}
int cuTensorMapReplaceAddress(uint64_t *map, uint64_t address) { return map[0] = address, fake_replaced++, SUCCESS; }
int cuLaunchKernelEx(const Config *config, uintptr_t function, void **arguments, void **extra) {
    if (!depth) return INVALID_CONTEXT;
    if (function != stack[depth - 1] + FUNCTION_OF_CONTEXT) return INVALID_HANDLE;
    if ((uintptr_t)config->stream == FAILING_STREAM) return LAUNCH_FAILED;
    memcpy(fake_record.shape, config, sizeof fake_record.shape);
    fake_record.stream = (uintptr_t)config->stream;
    fake_record.attribute_count = config->attribute_count;
    memcpy(fake_record.attributes, config->attributes, config->attribute_count * sizeof *config->attributes);
    int used = 0;
    for (int i = 0; i < fake_setup.parameters; used += (int)fake_setup.sizes[i++])
        memcpy(fake_record.arguments + used, arguments[i], fake_setup.sizes[i]);
    fake_record.argument_bytes = used;
    fake_record.device = (int)(stack[depth - 1] - CONTEXT_OF_DEVICE_0);
    fake_record.launches++;
    if (fake_hangs && !fake_panel.notes[0] && !fake_panel.aborted) {
        // An expired wait for parity 1 of the barrier at 0x408, at line 3, by thread 33 of block (2, 0, 0).
        const uint32_t words[16] = {1, 3, 0x408, 0x400, 1, 0x1ffffe, 0x7ffff800, 1, 0, 2000000, 33, 2, 2, 0, 0, 0};
        memcpy(fake_panel.records, words, sizeof words);
        fake_panel.taken = 1;
        memset(fake_panel.notes, 1, 1672 * fake_panel.blocks);
    }
    return SUCCESS;
}
