/*
 * A stand-in for the CUDA driver, so that UCX's own cuda_ipc runs where there is no device.
 *
 * Device memory is a memfd. Its address is reserved and cannot be touched by the processor: whoever takes it for host
 * memory faults, or gets EFAULT from the kernel. What the driver copies goes through a second mapping, in one thread,
 * after a delay (STANDIN_DELAY_US), so that a copy that was asked for and one that has ended are different things. A
 * handle of IPC is a process and its descriptor; like the real one it cannot be opened by its own process. Functions
 * that need a context in the calling thread refuse without one.
 *
 * It proves that the right things are asked of UCX, and that nothing is believed before it has happened. It proves
 * nothing about a device. STANDIN_DEVICES is how many there are.
 *
 * Built as libcuda.so.1, which is also libnvidia-ml.so.1. Names and numbers are those of cuda.h.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int result_t;
typedef uint64_t address_t;

enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    NOT_SUPPORTED = 801
};
enum { MAX_DEVICES = 8, MAX_MEMORIES = 4096, MAX_DEPTH = 64, PAGE = 4096 };

typedef struct {
    int device;
    unsigned long long id;
    int num_retained;
} context_t;

typedef struct {
    address_t address;
    size_t nbytes;
    char *alias;
    int fd;
    int device;
    unsigned long long id;
    int is_imported;
} memory_t;

typedef struct {
    context_t *context;
    int num_pending;
} waited_t; /* a stream, or an event */

typedef struct operation {
    struct operation *next;
    waited_t *stream;
    char *to; /* of a copy */
    const char *from;
    size_t nbytes;
    waited_t *event;                                /* of a record */
    void (*call)(void *, result_t, void *); /* of a callback */
    void *argument;
} operation_t;

static int is_initialized, num_devices = 1, num_memories, has_thread, hangs;
static useconds_t delay_us;
static unsigned long long next_id = 1;
static context_t contexts[MAX_DEVICES];
static memory_t memories[MAX_MEMORIES];
static operation_t *first, **end = &first;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static __thread context_t *stack[MAX_DEPTH];
static __thread int depth;

#define API __attribute__((visibility("default"), noinline)) result_t
#define NEED_CONTEXT()              \
    do {                            \
        if (!is_initialized)        \
            return NOT_INITIALIZED; \
        if (!current())             \
            return INVALID_CONTEXT; \
    } while (0)

static context_t *current(void)
{
    return depth ? stack[depth - 1] : NULL;
}

static memory_t *find(address_t address, size_t nbytes)
{
    for (int i = 0; i < num_memories; i++) {
        memory_t *memory = &memories[i];
        if (memory->address && address >= memory->address && address < memory->address + memory->nbytes &&
            address + nbytes <= memory->address + memory->nbytes)
            return memory;
    }
    return NULL;
}

static char *alias_of(memory_t *memory, address_t address)
{
    return memory->alias + (address - memory->address);
}

static void *run(void *unused)
{
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!first || hangs)
            pthread_cond_wait(&changed, &lock);
        operation_t *operation = first;
        pthread_mutex_unlock(&lock);
        if (operation->to) {
            if (delay_us)
                usleep(delay_us);
            memcpy(operation->to, operation->from, operation->nbytes);
        }
        if (operation->call)
            operation->call(operation->stream, OK, operation->argument);
        pthread_mutex_lock(&lock);
        first = operation->next;
        if (!first)
            end = &first;
        if (operation->event)
            operation->event->num_pending--;
        operation->stream->num_pending--;
        pthread_cond_broadcast(&changed);
        free(operation);
    }
    return NULL;
}

static result_t enqueue(operation_t operation)
{
    operation_t *made = malloc(sizeof *made);
    pthread_t thread;

    *made = operation;
    pthread_mutex_lock(&lock);
    if (!has_thread) {
        has_thread = 1;
        pthread_create(&thread, NULL, run, NULL);
        pthread_detach(thread);
    }
    made->stream->num_pending++;
    if (made->event)
        made->event->num_pending++;
    *end = made;
    end = &made->next;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return OK;
}

static void drain(void)
{
    pthread_mutex_lock(&lock);
    while (first)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

static memory_t *enter(int fd, size_t nbytes, int is_imported)
{
    memory_t *memory = NULL;

    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_memories && !memory; i++)
        if (!memories[i].address)
            memory = &memories[i];
    if (!memory)
        memory = &memories[num_memories++];
    memory->alias = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    memory->nbytes = nbytes;
    memory->fd = fd;
    memory->device = current()->device;
    memory->id = next_id++ + ((unsigned long long)getpid() << 32);
    memory->is_imported = is_imported;
    memory->address = (address_t)mmap(NULL, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    pthread_mutex_unlock(&lock);
    return memory;
}

static result_t leave(address_t address)
{
    memory_t *memory = find(address, 1);

    if (!memory || memory->address != address)
        return INVALID_VALUE;
    drain();
    munmap(memory->alias, memory->nbytes);
    munmap((void *)address, memory->nbytes);
    if (memory->fd >= 0)
        close(memory->fd);
    memory->address = 0;
    return OK;
}

/* Devices and contexts. */

API cuInit(unsigned flags)
{
    if (getenv("STANDIN_DELAY_US"))
        delay_us = atoi(getenv("STANDIN_DELAY_US"));
    if (getenv("STANDIN_DEVICES"))
        num_devices = atoi(getenv("STANDIN_DEVICES"));
    for (int i = 0; i < num_devices; i++) {
        contexts[i].device = i;
        contexts[i].id = 100 + i;
    }
    is_initialized = 1;
    return OK;
}

API cuDeviceGetCount(int *count)
{
    *count = num_devices;
    return is_initialized ? OK : NOT_INITIALIZED;
}

API cuDeviceGet(int *device, int ordinal)
{
    if (!is_initialized)
        return NOT_INITIALIZED;
    *device = ordinal;
    return ordinal >= 0 && ordinal < num_devices ? OK : INVALID_DEVICE;
}

API cuDeviceGetName(char *name, int length, int device)
{
    snprintf(name, length, "stand-in %d", device);
    return OK;
}

API cuDeviceGetUuid(char *uuid, int device)
{
    memset(uuid, 0x40 + device, 16);
    return OK;
}

API cuDeviceTotalMem_v2(size_t *nbytes, int device)
{
    *nbytes = 1ul << 34;
    return OK;
}

API cuDeviceGetAttribute(int *value, int attribute, int device)
{
    /* PCI bus, compute capability, unified addressing; all else is not there */
    *value = attribute == 33 ? 0x40 + device : attribute == 75 ? 9 : attribute == 41;
    return OK;
}

API cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active)
{
    *flags = 0;
    *is_active = contexts[device].num_retained > 0;
    return OK;
}

API cuDevicePrimaryCtxRetain(context_t **context, int device)
{
    __atomic_add_fetch(&contexts[device].num_retained, 1, __ATOMIC_SEQ_CST);
    *context = &contexts[device];
    return OK;
}

API cuDevicePrimaryCtxRelease_v2(int device)
{
    __atomic_sub_fetch(&contexts[device].num_retained, 1, __ATOMIC_SEQ_CST);
    return OK;
}

API cuCtxGetCurrent(context_t **context)
{
    *context = current();
    return is_initialized ? OK : NOT_INITIALIZED;
}

API cuCtxSetCurrent(context_t *context)
{
    if (!depth)
        depth = 1;
    stack[depth - 1] = context;
    return OK;
}

API cuCtxPushCurrent_v2(context_t *context)
{
    if (!context || depth == MAX_DEPTH)
        return INVALID_CONTEXT;
    stack[depth++] = context;
    return OK;
}

API cuCtxPopCurrent_v2(context_t **context)
{
    if (!depth)
        return INVALID_CONTEXT;
    depth--;
    if (context)
        *context = stack[depth];
    return OK;
}

API cuCtxGetDevice(int *device)
{
    NEED_CONTEXT();
    *device = current()->device;
    return OK;
}

API cuCtxGetId(context_t *context, unsigned long long *id)
{
    if (!context)
        context = current();
    if (!context)
        return INVALID_CONTEXT;
    *id = context->id;
    return OK;
}

API cuCtxSetFlags(unsigned flags)
{
    NEED_CONTEXT();
    return OK;
}

API cuCtxSynchronize(void)
{
    NEED_CONTEXT();
    drain();
    return OK;
}

/* Not of the real one: let all devices hang, or go on. */
API standin_hang(int is_so)
{
    pthread_mutex_lock(&lock);
    hangs = is_so;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return OK;
}

/* Streams and events. */

static result_t make_waited(waited_t **made)
{
    NEED_CONTEXT();
    *made = calloc(1, sizeof **made);
    (*made)->context = current();
    return OK;
}

API cuStreamCreate(waited_t **stream, unsigned flags)
{
    return make_waited(stream);
}

API cuEventCreate(waited_t **event, unsigned flags)
{
    return make_waited(event);
}

API cuStreamDestroy_v2(waited_t *stream)
{
    free(stream);
    return OK;
}

API cuEventDestroy_v2(waited_t *event)
{
    free(event);
    return OK;
}

API cuStreamSynchronize(waited_t *stream)
{
    drain();
    return OK;
}

API cuEventQuery(waited_t *event)
{
    pthread_mutex_lock(&lock);
    int num_pending = event->num_pending;
    pthread_mutex_unlock(&lock);
    return num_pending ? NOT_READY : OK;
}

API cuEventRecord(waited_t *event, waited_t *stream)
{
    if (event->context != stream->context)
        return INVALID_HANDLE;
    return enqueue((operation_t){.stream = stream, .event = event});
}

API cuStreamAddCallback(waited_t *stream, void (*call)(void *, result_t, void *), void *argument, unsigned flags)
{
    return enqueue((operation_t){.stream = stream, .call = call, .argument = argument});
}

/* Memory. */

API cuMemAlloc_v2(address_t *address, size_t nbytes)
{
    NEED_CONTEXT();
    size_t whole = (nbytes + PAGE - 1) / PAGE * PAGE;
    int fd = memfd_create("stand-in", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, whole))
        return OUT_OF_MEMORY;
    *address = enter(fd, whole, 0)->address;
    return OK;
}

API cuMemFree_v2(address_t address)
{
    return leave(address);
}

API cuMemGetAddressRange_v2(address_t *start, size_t *nbytes, address_t address)
{
    NEED_CONTEXT();
    memory_t *memory = find(address, 1);
    if (!memory)
        return NOT_FOUND;
    *start = memory->address;
    *nbytes = memory->nbytes;
    return OK;
}

API cuMemcpyDtoDAsync_v2(address_t to, address_t from, size_t nbytes, waited_t *stream)
{
    NEED_CONTEXT();
    memory_t *target = find(to, nbytes), *source = find(from, nbytes);
    if (!target || !source)
        return ILLEGAL_ADDRESS;
    return enqueue((operation_t){
        .stream = stream, .to = alias_of(target, to), .from = alias_of(source, from), .nbytes = nbytes});
}

API cuMemcpyHtoD_v2(address_t to, const void *from, size_t nbytes)
{
    NEED_CONTEXT();
    memory_t *target = find(to, nbytes);
    if (!target)
        return INVALID_VALUE;
    drain();
    memcpy(alias_of(target, to), from, nbytes);
    return OK;
}

API cuMemcpyDtoH_v2(void *to, address_t from, size_t nbytes)
{
    NEED_CONTEXT();
    memory_t *source = find(from, nbytes);
    if (!source)
        return INVALID_VALUE;
    drain();
    memcpy(to, alias_of(source, from), nbytes);
    return OK;
}

static result_t look(void *value, int attribute, memory_t *memory)
{
    switch (attribute) {
    case 1: /* context */
        *(void **)value = memory ? &contexts[memory->device] : NULL;
        return OK;
    case 2: /* kind of memory: a device's */
        *(unsigned *)value = memory ? 2 : 0;
        return OK;
    case 7: /* number of the allocation */
        *(unsigned long long *)value = memory ? memory->id : 0;
        return OK;
    case 8: /* managed */
        *(unsigned *)value = 0;
        return OK;
    case 9: /* device */
        *(int *)value = memory ? memory->device : -2;
        return OK;
    case 10: /* has a handle of IPC */
        *(unsigned *)value = memory && !memory->is_imported;
        return OK;
    case 14: /* other kinds of handle */
        *(uint64_t *)value = 0;
        return OK;
    case 17: /* pool */
        *(void **)value = NULL;
        return OK;
    default:
        return INVALID_VALUE;
    }
}

API cuPointerGetAttribute(void *value, int attribute, address_t address)
{
    memory_t *memory = find(address, 1);
    return !is_initialized ? NOT_INITIALIZED : memory ? look(value, attribute, memory) : INVALID_VALUE;
}

API cuPointerGetAttributes(unsigned num, int *attributes, void **values, address_t address)
{
    if (!is_initialized)
        return NOT_INITIALIZED;
    for (unsigned i = 0; i < num; i++)
        look(values[i], attributes[i], find(address, 1));
    return OK;
}

API cuPointerSetAttribute(const void *value, int attribute, address_t address)
{
    return find(address, 1) ? OK : INVALID_VALUE;
}

/* Between processes. */

typedef union {
    struct {
        int pid, fd;
        size_t nbytes;
    } of;
    char bytes[64];
} handle_t;

API cuIpcGetMemHandle(handle_t *handle, address_t address)
{
    NEED_CONTEXT();
    memory_t *memory = find(address, 1);
    if (!memory || memory->is_imported)
        return INVALID_VALUE;
    memset(handle, 0, sizeof *handle);
    handle->of.pid = getpid();
    handle->of.fd = memory->fd;
    handle->of.nbytes = memory->nbytes;
    return OK;
}

API cuIpcOpenMemHandle_v2(address_t *address, handle_t handle, unsigned flags)
{
    char path[64];

    NEED_CONTEXT();
    if (handle.of.pid == getpid())
        return INVALID_CONTEXT;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.of.pid, handle.of.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return INVALID_VALUE;
    memory_t *memory = enter(fd, handle.of.nbytes, 1);
    close(fd);
    memory->fd = -1;
    *address = memory->address;
    return OK;
}

API cuIpcCloseMemHandle(address_t address)
{
    return leave(address);
}

/* The rest. */

API cuGetErrorString(result_t result, const char **text)
{
    static __thread char made[32];
    snprintf(made, sizeof made, "CUDA_ERROR_%d", result);
    *text = made;
    return OK;
}

API cuGetErrorName(result_t result, const char **text)
{
    return cuGetErrorString(result, text);
}

API cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *found)
{
    *function = dlsym(RTLD_DEFAULT, name);
    if (found)
        *found = !*function;
    return *function ? OK : NOT_FOUND;
}

__attribute__((visibility("default"))) const char *nvmlErrorString(int result)
{
    return "no NVML";
}

API nvmlInit_v2(void)
{
    return 12; /* NVML_ERROR_LIBRARY_NOT_FOUND */
}

#define ABSENT(name)          \
    API name(void)            \
    {                         \
        return NOT_SUPPORTED; \
    }
ABSENT(cuMemAddressFree)
ABSENT(cuMemAddressReserve)
ABSENT(cuMemAllocManaged)
ABSENT(cuMemCreate)
ABSENT(cuMemcpyAsync)
ABSENT(cuMemExportToShareableHandle)
ABSENT(cuMemGetAllocationGranularity)
ABSENT(cuMemGetAllocationPropertiesFromHandle)
ABSENT(cuMemHostRegister_v2)
ABSENT(cuMemHostUnregister)
ABSENT(cuMemImportFromShareableHandle)
ABSENT(cuMemMap)
ABSENT(cuMemPoolDestroy)
ABSENT(cuMemPoolExportPointer)
ABSENT(cuMemPoolExportToShareableHandle)
ABSENT(cuMemPoolImportFromShareableHandle)
ABSENT(cuMemPoolImportPointer)
ABSENT(cuMemPoolSetAccess)
ABSENT(cuMemRangeGetAttribute)
ABSENT(cuMemRelease)
ABSENT(cuMemRetainAllocationHandle)
ABSENT(cuMemSetAccess)
ABSENT(cuMemUnmap)
