"""Which of our memory UCX knows: each region is registered once, and its key is packed once for all peers.

A registration holds the memory until it has been undone, whatever its owner does meanwhile. That is as soon as the
region is forgotten, unless the worker is busy for long just then.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import anyio

from kvlink.errors import ClosedError, FeatureNotEnabledError, LinkError
from kvlink.memory.regions import DeviceRegion, LocalMemory, Region
from kvlink.transports.ucx import declarations as ucp
from kvlink.transports.ucx.cards import pack_key
from kvlink.transports.ucx.turns import call
from kvlink.transports.ucx.worker import Worker
from kvlink.wire import Share

GONE: Final = "it is not there any more"
"""Why a region was not registered that its owner has given up meanwhile."""

_EMPTY_KEY_NBYTES: Final = 9
"""A key that names no memory domain: their map, and the kind of memory. Source: ``ucp_rkey_packed_size``."""


@dataclass(frozen=True, slots=True, eq=False)
class Registered:
    """A region that UCX knows.

    Args:
        region: ours; held.
        address, nbytes: where it lies.
        handle, memh: UCX's handle, as cffi and as numpy want it.
        key: what peers need to address it.
        memory_type: UCX's number of the kind of memory.
    """

    region: Region
    address: int
    nbytes: int
    handle: Any
    memh: int
    key: bytes
    memory_type: int = ucp.MEMORY_HOST

    @property
    def is_on_device(self) -> bool:
        """Whether the processor cannot read or write it."""
        return self.memory_type != ucp.MEMORY_HOST

    def share(self, number: int) -> Share:
        """Return what a peer is told of it."""
        return Share(
            region=number, nbytes=self.nbytes, address=self.address, key=self.key, is_on_device=self.is_on_device
        )


class Registry:
    """The registrations of one worker.

    Args:
        local: the cluster's regions.

    Attributes:
        known: the regions that are registered, by number; for reading.
    """

    def __init__(self, worker: Worker, local: LocalMemory) -> None:
        self._worker = worker
        self._local = local
        self.known: dict[int, Registered] = {}
        self._waiting: dict[int, list[Callable[[Registered | None, str], None]]] = {}
        self._dropped: list[Registered] = []
        local.watchers.append(self._forget)
        worker.at_end(self._undo)

    def register(self, number: int, then: Callable[[Registered | None, str], None]) -> None:
        """Register a region, unless it is; call `then` on the event loop with it, or with None and the reason."""
        known = self.known.get(number)
        if known is not None:
            then(known, "")
            return
        region = self._local.get(number)
        if region is None:
            then(None, GONE)
            return
        waiting = self._waiting.setdefault(number, [])
        waiting.append(then)
        if len(waiting) > 1:
            return

        def map_it() -> None:
            made, reason = None, ""
            try:
                made = self.map(region)
            except LinkError as exc:
                reason = str(exc)
            self._worker.report(lambda: self._settle(number, made, reason))

        try:
            self._worker.ask(map_it)
        except ClosedError as exc:
            self._settle(number, None, str(exc))

    async def ensure(self, number: int) -> Registered:
        """Return a region of ours, registered.

        Raises:
            FeatureNotEnabledError: UCX cannot register it.
        """
        known = self.known.get(number)
        if known is not None:
            return known
        settled = anyio.Event()
        outcome: list[tuple[Registered | None, str]] = []

        def then(made: Registered | None, reason: str) -> None:
            outcome.append((made, reason))
            settled.set()

        self.register(number, then)
        await settled.wait()
        made, reason = outcome[0]
        if made is None:
            raise FeatureNotEnabledError(f"our memory cannot be moved over UCX: {reason}")
        return made

    def map(self, region: Region) -> Registered:
        """In a turn: register memory and pack its key.

        Raises:
            LinkError: UCX refuses.
        """
        context = self._worker.context
        library = context.library
        ffi, api = library.ffi, library.api
        memory_type = ucp.MEMORY_CUDA if isinstance(region, DeviceRegion) else ucp.MEMORY_HOST
        if memory_type != ucp.MEMORY_HOST and not context.reaches_cuda:
            raise LinkError("UCX reaches no CUDA memory in this cluster; see UcxConfig.allow_cuda")
        params = ffi.new("ucp_mem_map_params_t *")
        address, nbytes = region.address, region.nbytes
        params.field_mask = ucp.MAP_ADDRESS | ucp.MAP_LENGTH | ucp.MAP_MEMORY_TYPE
        params.address, params.length = ffi.cast("void *", address), nbytes
        params.memory_type = memory_type
        handle = ffi.new("ucp_mem_h *")
        library.check(api.ucp_mem_map(context.handle, params, handle), f"registering {nbytes} bytes")
        buffer, key_nbytes = ffi.new("void **"), ffi.new("size_t *")
        try:
            library.check(api.ucp_rkey_pack(context.handle, handle[0], buffer, key_nbytes), "packing a remote key")
        except LinkError:
            api.ucp_mem_unmap(context.handle, handle[0])
            raise
        key = bytes(ffi.buffer(buffer[0], key_nbytes[0]))
        api.ucp_rkey_buffer_release(buffer[0])
        if memory_type != ucp.MEMORY_HOST and len(key) <= _EMPTY_KEY_NBYTES:
            api.ucp_mem_unmap(context.handle, handle[0])
            raise LinkError(
                "none of UCX's transports here lets a peer reach CUDA memory; that takes cuda_ipc on one host, or RDMA "
                "with GPUDirect (nvidia_peermem, or dmabuf)"
            )
        memh = int(ffi.cast("uintptr_t", handle[0]))
        return Registered(region, address, nbytes, handle[0], memh, pack_key(key), memory_type)

    def unmap(self, registered: Registered) -> None:
        """In a turn: undo `map`; nothing is in flight with it any more. Where UCX was given up it stays as it is."""
        if not self._worker.is_quiet:
            self._dropped.append(registered)
            return
        context = self._worker.context
        context.library.api.ucp_mem_unmap(context.handle, registered.handle)

    def close(self) -> None:
        """Heed the regions no more; the registrations are undone when the worker ends. Idempotent."""
        with suppress(ValueError):
            self._local.watchers.remove(self._forget)

    def _undo(self) -> None:
        """Undo every registration: nothing is in flight any more."""
        known, self.known = self.known, {}
        for registered in (*known.values(), *self._dropped):
            self.unmap(registered)
        self._dropped.clear()

    def _settle(self, number: int, made: Registered | None, reason: str) -> None:
        waiting = self._waiting.pop(number, [])
        if made is not None:
            if self._local.get(number) is made.region:
                self.known[number] = made
            else:  # forgotten meanwhile
                self._drop(made)
                made, reason = None, GONE
        for then in waiting:
            call(partial(then, made, reason))

    def _forget(self, number: int) -> None:
        registered = self.known.pop(number, None)
        if registered is not None:
            self._drop(registered)

    def _drop(self, registered: Registered) -> None:
        try:
            self._worker.do(lambda: self.unmap(registered))
        except ClosedError:
            self._dropped.append(registered)
