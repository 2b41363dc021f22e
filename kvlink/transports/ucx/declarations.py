"""What kvlink uses of libucp: about thirty functions and nine structs, as cffi reads them.

Source: ``ucp/api/ucp.h`` of UCX 1.15 to 1.22. Structs are driven by a mask of the fields that are set and only grow at
their end, so one declaration serves all of these versions; the ends that kvlink does not use are declared too, so that
a library that looks at them finds zeros. ``ucs_status_t`` is a packed enum: one signed byte.

Where C has a pointer that kvlink only passes on (buffers, requests, handles in `ucp_request_param_t`), an integer of
the same width stands here: numbers come out of numpy by the thousand, pointers of cffi one by one.
"""

from __future__ import annotations

from typing import Final

DECLARATIONS: Final = """
typedef int8_t ucs_status_t;
typedef void FILE;
typedef struct ucp_config ucp_config_t;
typedef struct ucp_context *ucp_context_h;
typedef struct ucp_worker *ucp_worker_h;
typedef struct ucp_ep *ucp_ep_h;
typedef struct ucp_mem *ucp_mem_h;
typedef struct ucp_rkey *ucp_rkey_h;
typedef struct ucp_address ucp_address_t;

typedef struct {
    uint64_t field_mask;
    uint64_t features;
    size_t request_size;
    void *request_init;
    void *request_cleanup;
    uint64_t tag_sender_mask;
    int mt_workers_shared;
    size_t estimated_num_eps;
    size_t estimated_num_ppn;
    const char *name;
    size_t node_local_id;
    char spare[64];
} ucp_params_t;

typedef struct {
    uint64_t field_mask;
    size_t request_size;
    int thread_mode;
    uint64_t memory_types;
    char name[32];
    size_t device_counter_size;
    char spare[64];
} ucp_context_attr_t;

typedef struct {
    uint64_t field_mask;
    int thread_mode;
    uint64_t cpu_mask[16];
    unsigned events;
    void *user_data;
    int event_fd;
    uint64_t flags;
    const char *name;
    size_t am_alignment;
    uint64_t client_id;
    char spare[64];
} ucp_worker_params_t;

typedef struct {
    uint64_t field_mask;
    int thread_mode;
    uint32_t address_flags;
    ucp_address_t *address;
    size_t address_length;
    size_t max_am_header;
    char name[32];
    size_t max_debug_string;
    char spare[64];
} ucp_worker_attr_t;

typedef struct {
    void *callback;
    void *argument;
} ucp_err_handler_t;

typedef struct {
    uint64_t field_mask;
    const ucp_address_t *address;
    int err_mode;
    ucp_err_handler_t err_handler;
    void *user_data;
    unsigned flags;
    struct { const void *addr; uint32_t addrlen; } sockaddr;
    void *conn_request;
    const char *name;
    struct { const void *addr; uint32_t addrlen; } local_sockaddr;
    char spare[64];
} ucp_ep_params_t;

typedef struct {
    const char *transport_name;
    const char *device_name;
} ucp_transport_entry_t;

typedef struct {
    ucp_transport_entry_t *entries;
    unsigned num_entries;
    size_t entry_size;
} ucp_transports_t;

typedef struct {
    uint64_t field_mask;
    char name[32];
    char local_sockaddr[128];
    char remote_sockaddr[128];
    ucp_transports_t transports;
    void *user_data;
    char spare[64];
} ucp_ep_attr_t;

typedef struct {
    uint64_t field_mask;
    void *address;
    size_t length;
    unsigned flags;
    unsigned prot;
    int memory_type;
    const void *exported_memh_buffer;
    char spare[64];
} ucp_mem_map_params_t;

typedef struct {
    uint32_t op_attr_mask;
    uint32_t flags;
    uintptr_t request;
    uintptr_t callback;
    uint64_t datatype;
    uintptr_t user_data;
    void *reply_buffer;
    int memory_type;
    void *recv_info;
    uintptr_t memh;
    uint64_t remote_datatype;
    const void *remote;
    size_t remote_count;
    char spare[64];
} ucp_request_param_t;

const char *ucs_status_string(ucs_status_t status);

void ucp_get_version(unsigned *major, unsigned *minor, unsigned *release);
const char *ucp_get_version_string(void);
ucs_status_t ucp_init_version(unsigned major, unsigned minor, const ucp_params_t *params, const ucp_config_t *config,
                              ucp_context_h *context);
void ucp_cleanup(ucp_context_h context);
ucs_status_t ucp_context_query(ucp_context_h context, ucp_context_attr_t *attr);
void ucp_context_print_info(const ucp_context_h context, FILE *stream);

ucs_status_t ucp_config_read(const char *env_prefix, const char *filename, ucp_config_t **config);
ucs_status_t ucp_config_modify(ucp_config_t *config, const char *name, const char *value);
void ucp_config_release(ucp_config_t *config);
void ucp_config_print(const ucp_config_t *config, FILE *stream, const char *title, int print_flags);

ucs_status_t ucp_worker_create(ucp_context_h context, const ucp_worker_params_t *params, ucp_worker_h *worker);
void ucp_worker_destroy(ucp_worker_h worker);
ucs_status_t ucp_worker_query(ucp_worker_h worker, ucp_worker_attr_t *attr);
void ucp_worker_release_address(ucp_worker_h worker, ucp_address_t *address);
ucs_status_t ucp_worker_get_efd(ucp_worker_h worker, int *fd);
ucs_status_t ucp_worker_arm(ucp_worker_h worker);
ucs_status_t ucp_worker_signal(ucp_worker_h worker);
unsigned ucp_worker_progress(ucp_worker_h worker);

ucs_status_t ucp_ep_create(ucp_worker_h worker, const ucp_ep_params_t *params, ucp_ep_h *ep);
uintptr_t ucp_ep_close_nbx(ucp_ep_h ep, const ucp_request_param_t *param);
uintptr_t ucp_ep_flush_nbx(ucp_ep_h ep, const ucp_request_param_t *param);
ucs_status_t ucp_ep_query(ucp_ep_h ep, ucp_ep_attr_t *attr);

ucs_status_t ucp_mem_map(ucp_context_h context, const ucp_mem_map_params_t *params, ucp_mem_h *memh);
ucs_status_t ucp_mem_unmap(ucp_context_h context, ucp_mem_h memh);
ucs_status_t ucp_rkey_pack(ucp_context_h context, ucp_mem_h memh, void **buffer, size_t *nbytes);
void ucp_rkey_buffer_release(void *buffer);
ucs_status_t ucp_ep_rkey_unpack(ucp_ep_h ep, const void *buffer, ucp_rkey_h *rkey);
void ucp_rkey_destroy(ucp_rkey_h rkey);

uintptr_t ucp_get_nbx(ucp_ep_h ep, uintptr_t buffer, size_t count, uint64_t remote_addr, ucp_rkey_h rkey,
                      const ucp_request_param_t *param);
uintptr_t ucp_put_nbx(ucp_ep_h ep, uintptr_t buffer, size_t count, uint64_t remote_addr, ucp_rkey_h rkey,
                      const ucp_request_param_t *param);
ucs_status_t ucp_request_check_status(uintptr_t request);
void ucp_request_free(uintptr_t request);
"""

LIBC_DECLARATIONS: Final = """
FILE *open_memstream(char **buffer, size_t *nbytes);
int fclose(FILE *stream);
void free(void *buffer);
void *memset(void *memory, int value, size_t nbytes);
int sigaction(int number, const void *action, void *old_action);
"""

OK: Final = 0
IN_PROGRESS: Final = 1
ERR_INVALID_PARAM: Final = -5
ERR_UNREACHABLE: Final = -6
ERR_BUSY: Final = -15
ERR_CANCELED: Final = -16
ERR_UNSUPPORTED: Final = -22

FEATURE_RMA: Final = 1 << 1
FEATURE_WAKEUP: Final = 1 << 4
PARAM_FEATURES: Final = 1 << 0
PARAM_NUM_EPS: Final = 1 << 6
PARAM_NAME: Final = 1 << 8

WORKER_PARAM_THREAD_MODE: Final = 1 << 0
WORKER_ATTR_THREAD_MODE: Final = 1 << 0
WORKER_ATTR_ADDRESS: Final = 1 << 1
THREAD_MODE_SINGLE: Final = 0
THREAD_MODE_SERIALIZED: Final = 1
THREAD_MODE_MULTI: Final = 2

EP_PARAM_REMOTE_ADDRESS: Final = 1 << 0
EP_PARAM_ERR_MODE: Final = 1 << 1
EP_PARAM_ERR_HANDLER: Final = 1 << 2
EP_ATTR_TRANSPORTS: Final = 1 << 3
ERR_MODE_PEER: Final = 1
CLOSE_FORCE: Final = 1 << 0

MAP_ADDRESS: Final = 1 << 0
MAP_LENGTH: Final = 1 << 1
MAP_FLAGS: Final = 1 << 2
MAP_MEMORY_TYPE: Final = 1 << 4

CONTEXT_REQUEST_SIZE: Final = 1 << 0
CONTEXT_MEMORY_TYPES: Final = 1 << 2

OP_REQUEST: Final = 1 << 0
OP_CALLBACK: Final = 1 << 1
OP_USER_DATA: Final = 1 << 2
OP_FLAGS: Final = 1 << 4
OP_MEMORY_TYPE: Final = 1 << 6
OP_MEMH: Final = 1 << 8

MEMORY_HOST: Final = 0
MEMORY_CUDA: Final = 1

FIRST_ERROR_POINTER: Final = 2**64 - 100
"""A status pointer from here on is an error; 0 is done; anything else is a request."""
