"""One UCX context and worker, with kvlink's settings and nobody else's.

Settings go into the context by ``ucp_config_modify``, so that the process's environment, which others read too, stays
as it is. What UCX refuses (a setting of another release, or of a device that this build does not know) is kept for the
report, and does not stop anything.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any, Final

from kvlink.errors import FeatureNotEnabledError, LinkError
from kvlink.transports.ucx import declarations as ucp
from kvlink.transports.ucx.library import Library, load, rdma_devices
from kvlink.transports.ucx.providers import Handles
from kvlink.ucxconfig import UcxConfig

_SAME_HOST: Final = ("posix", "cma")
_SPARE_DESCRIPTORS: Final = 64
_RDMA: Final = ("rc", "dc", "ud")
_CUDA: Final = "cuda"
"""UCX's name for cuda_copy, cuda_ipc and gdr_copy, as far as they are built."""

_FIRST_CUDA: Final = (1, 21)
"""From here on UCX needs no context of CUDA in the thread that calls it, and can be told to imitate nothing. Before,
``uct_cuda_ipc_rkey_unpack`` takes the context of the thread, and a transfer without a way becomes messages."""


def settings_of(config: UcxConfig) -> dict[str, str]:
    """Return the settings of UCX that stand for `config`, by their names without ``UCX_``."""
    names = config.transports
    if names is None:
        names = (*_SAME_HOST, *(_RDMA if rdma_devices() else ()), *(("tcp",) if config.allow_tcp else ()))
    if config.allow_cuda and not names[0].startswith("^"):
        names = (*names, _CUDA)
    settings = {
        "TLS": ",".join(names),
        # Without these two, shared memory and CMA do not serve endpoints that must survive the death of their peer.
        "MM_ERROR_HANDLING": "y",
        "CMA_MEMORY_INVALIDATE": "y",
        # Pieces of at most 512 KiB that one call of progress copies, without the GIL: fewer make more calls, each of
        # which may have to wait for the GIL while the event loop is busy; more keep the worker for too long.
        "CMA_TX_QUOTA": "32",
        # An operation that the hardware cannot do fails; imitated, it would need the peer's help and its good will.
        "PROTO_EMULATION_ENABLE": "y" if config.allow_tcp else "n",
        "KEEPALIVE_INTERVAL": f"{round(config.keepalive_s * 1000)}ms",
        "LOG_LEVEL": "fatal",  # UCX writes to the standard output, which is not ours
        "HANDLE_ERRORS": "none",
        "WARN_UNUSED_ENV_VARS": "n",
    }
    if config.allow_cuda:
        # Else GPUs without NVLink, also two processes on one GPU, have no get.
        settings["CUDA_IPC_ENABLE_GET_ZCOPY"] = "on"
    if config.devices:
        settings["NET_DEVICES"] = ",".join(config.devices)
    if config.rails:
        settings["MAX_RMA_RAILS"] = str(config.rails)
    if config.traffic_class is not None:
        settings["IB_TRAFFIC_CLASS"] = str(config.traffic_class)
    if config.gid_index is not None:
        settings["IB_GID_INDEX"] = str(config.gid_index)
    settings.update(config.options)
    return settings


class Context:
    """A context and its worker. Whoever has it calls it from one thread at a time.

    Attributes:
        library: whose functions are called.
        handle, worker: of UCX.
        applied, refused: the settings in force, and those that this UCX does not take.
        address: how peers reach the worker.
        request_nbytes: what UCX needs in front of a request of ours.
        reaches_cuda: whether it can tell CUDA memory from other memory, and register it.
        fd: becomes readable when there is something to do, after `arm`.
        longest_sleep_ms: how long to wait for it while something is in flight; None where it tells of everything.
    """

    def __init__(self, library: Library, handle: Any, worker: Any, *, is_own: bool) -> None:
        self.library = library
        self.handle = handle
        self.worker = worker
        self.applied: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self.keep: object = None
        self._is_own = is_own
        ffi, api = library.ffi, library.api
        attributes = ffi.new("ucp_context_attr_t *")
        attributes.field_mask = ucp.CONTEXT_REQUEST_SIZE | ucp.CONTEXT_MEMORY_TYPES
        library.check(api.ucp_context_query(handle, attributes), "asking for the size of a request")
        self.request_nbytes = int(attributes.request_size)
        self.reaches_cuda = library.version[:2] >= _FIRST_CUDA and bool(attributes.memory_types >> ucp.MEMORY_CUDA & 1)
        worker_attributes = ffi.new("ucp_worker_attr_t *")
        worker_attributes.field_mask = ucp.WORKER_ATTR_ADDRESS
        library.check(api.ucp_worker_query(worker, worker_attributes), "asking for the worker's address")
        self.address = bytes(ffi.buffer(worker_attributes.address, worker_attributes.address_length))
        api.ucp_worker_release_address(worker, worker_attributes.address)
        self.longest_sleep_ms: int | None = None
        if is_own:
            fd = ffi.new("int *")
            library.check(api.ucp_worker_get_efd(worker, fd), "asking for the worker's descriptor")
            self.fd = int(fd[0])
        else:  # the worker's own descriptor is its owner's business
            self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self.longest_sleep_ms = 1

    @classmethod
    def create(cls, config: UcxConfig, thread_mode: int = ucp.THREAD_MODE_SERIALIZED) -> Context:
        """Make one of our own. May take a second where there are many devices.

        Raises:
            FeatureNotEnabledError: there is no UCX here, or it has none of the transports that are asked for.
        """
        library = load(config.library_path)
        _check_descriptors()
        settings = settings_of(config)
        ffi, api = library.ffi, library.api
        ucx_config = ffi.new("ucp_config_t **")
        library.check(api.ucp_config_read(ffi.NULL, ffi.NULL, ucx_config), "reading its configuration")
        refused = {}
        handle = ffi.new("ucp_context_h *")
        name = ffi.new("char[]", b"kvlink")
        params = ffi.new("ucp_params_t *")
        params.field_mask = ucp.PARAM_FEATURES | ucp.PARAM_NAME
        params.features = ucp.FEATURE_RMA | ucp.FEATURE_WAKEUP
        params.name = name
        try:
            for setting, value in settings.items():
                if api.ucp_config_modify(ucx_config[0], setting.encode(), value.encode()) != ucp.OK:
                    refused[setting] = value
            library.check(api.ucp_init_version(*library.version[:2], params, ucx_config[0], handle), "making a context")
        except LinkError as exc:
            raise FeatureNotEnabledError(
                f"{exc}; it was told to use {settings['TLS']}: see `kvlink doctor`, and ClusterConfig.ucx.transports"
            ) from exc
        finally:
            api.ucp_config_release(ucx_config[0])
        worker = ffi.new("ucp_worker_h *")
        worker_params = ffi.new("ucp_worker_params_t *")
        worker_params.field_mask, worker_params.thread_mode = ucp.WORKER_PARAM_THREAD_MODE, thread_mode
        try:
            library.check(api.ucp_worker_create(handle[0], worker_params, worker), "making a worker")
            made = cls(library, handle[0], worker[0], is_own=True)
        except BaseException:
            if worker[0]:
                api.ucp_worker_destroy(worker[0])
            api.ucp_cleanup(handle[0])
            raise
        if config.allow_cuda and not made.reaches_cuda:
            made.close()
            raise FeatureNotEnabledError(
                f"UCX {'.'.join(map(str, library.version))} reaches no CUDA memory here; UcxConfig.allow_cuda needs an "
                "NVIDIA driver (see `nvidia-smi`) and a UCX of 1.21 or later that was built with CUDA, as the wheels "
                "libucx-cu12 and libucx-cu13 are (see `ucx_info -d`)"
            )
        made.refused = refused
        made.applied = {name: value for name, value in settings.items() if name not in refused}
        return made

    @classmethod
    def adopt(cls, handles: Handles, config: UcxConfig) -> Context:
        """Use a context and a worker that somebody else has made, and ends.

        Raises:
            FeatureNotEnabledError: only one thread may use the worker.
        """
        library = load(config.library_path)
        ffi, api = library.ffi, library.api
        worker = ffi.cast("ucp_worker_h", handles.worker)
        attributes = ffi.new("ucp_worker_attr_t *")
        attributes.field_mask = ucp.WORKER_ATTR_THREAD_MODE
        library.check(api.ucp_worker_query(worker, attributes), "asking for the worker's thread mode")
        if attributes.thread_mode != ucp.THREAD_MODE_MULTI:
            raise FeatureNotEnabledError(
                "kvlink uses a worker of UCX from a thread of its own; make it with UCS_THREAD_MODE_MULTI"
            )
        made = cls(library, ffi.cast("ucp_context_h", handles.context), worker, is_own=False)
        made.keep = handles.keep
        return made

    def arm(self) -> bool:
        """Return whether `fd` will tell of the next event; False when there is something to do already.

        Raises:
            LinkError: UCX cannot say, now or ever: whoever came back at once would come back for ever.
        """
        if not self._is_own:
            try:
                os.eventfd_read(self.fd)
            except BlockingIOError:
                return True
            return False
        status = self.library.api.ucp_worker_arm(self.worker)
        if status == ucp.ERR_BUSY:
            return False
        self.library.check(status, "waiting for events")
        return True

    def wake(self) -> None:
        """Make `fd` readable. From any thread."""
        if not self._is_own:
            os.eventfd_write(self.fd, 1)
            return
        self.library.api.ucp_worker_signal(self.worker)

    def describe_transports(self, ep: Any) -> tuple[str, ...]:
        """Return the names of what serves an endpoint; empty where this release does not say."""
        ffi = self.library.ffi
        entries = ffi.new("ucp_transport_entry_t[]", 32)
        attributes = ffi.new("ucp_ep_attr_t *")
        attributes.field_mask = ucp.EP_ATTR_TRANSPORTS
        attributes.transports.entries = entries
        attributes.transports.num_entries = 32
        attributes.transports.entry_size = ffi.sizeof("ucp_transport_entry_t")
        if self.library.api.ucp_ep_query(ep, attributes) != ucp.OK:
            return ()
        names = []
        for index in range(min(32, attributes.transports.num_entries)):
            with suppress(UnicodeDecodeError):
                names.append(ffi.string(entries[index].transport_name).decode())
        return tuple(dict.fromkeys(names))

    def close(self) -> None:
        """Give the worker and the context up, if they are ours. Idempotent."""
        if self.handle is not None and self._is_own:
            self.library.api.ucp_worker_destroy(self.worker)
            self.library.api.ucp_cleanup(self.handle)
        elif self.handle is not None:
            os.close(self.fd)
        self.handle = self.worker = self.keep = None


def _check_descriptors() -> None:
    """Refuse where UCX may run out of descriptors while it starts: then it aborts the process.

    Raises:
        FeatureNotEnabledError: there are too few left.
    """
    held: list[int] = []
    try:
        for _ in range(_SPARE_DESCRIPTORS):
            held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as exc:
        raise FeatureNotEnabledError(
            f"UCX needs up to {_SPARE_DESCRIPTORS} descriptors to start, and this process has {len(held)} left "
            f"({exc.strerror}): raise `ulimit -n`"
        ) from exc
    finally:
        for fd in held:
            os.close(fd)
