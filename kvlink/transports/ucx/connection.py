"""A connection of the worker to a peer's worker, as UCX sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvlink.transports.ucx import declarations as ucp
from kvlink.transports.ucx.context import Context


class WorkerEndpoint:
    """A connection of the worker to a peer's. All fields belong to whoever has the worker's lock.

    Attributes:
        ep: UCX's handle, None before it is made and after it was closed.
        rkeys: the peer's regions that were unpacked for it.
        num_transfers: on their way.
        closed_at: when it was closed by force, by `perf_counter`.
        is_quiet: False once something was abandoned that UCX may still do.
        failure: the first status of something that failed.
        on_failed, on_closed: called on the event loop when UCX has found the peer dead, and when nothing is left.
    """

    def __init__(self) -> None:
        self.ep: Any = None
        self.rkeys: list[Any] = []
        self.num_transfers = 0
        self.failure = ucp.OK
        self.closing: int | None = None
        self.closed_at: float | None = None
        self.is_quiet = True
        self.on_failed: Callable[[], None] | None = None
        self.on_closed: Callable[[], None] | None = None
        self.handle: Any = None

    def open(self, context: Context, address: bytes, on_error: Any) -> None:
        """Connect to the worker at `address`, which must come from a UCX of a version that fits.

        Args:
            on_error: a function of C that UCX calls when it has found the peer dead, with this object's `handle`.

        Raises:
            LinkError: UCX refuses.
        """
        library = context.library
        ffi = library.ffi
        packed, made = ffi.new("char[]", address), ffi.new("ucp_ep_h *")
        params = ffi.new("ucp_ep_params_t *")
        params.field_mask = ucp.EP_PARAM_REMOTE_ADDRESS | ucp.EP_PARAM_ERR_MODE | ucp.EP_PARAM_ERR_HANDLER
        params.address = ffi.cast("ucp_address_t *", packed)
        params.err_mode = ucp.ERR_MODE_PEER
        params.err_handler.callback = ffi.cast("void *", on_error)
        params.err_handler.argument = self.handle = ffi.new_handle(self)
        library.check(library.api.ucp_ep_create(context.worker, params, made), "connecting")
        self.ep = made[0]

    def forget(self, api: Any) -> None:
        """Give the keys up, once the endpoint is closed and nothing is in flight with them."""
        for rkey in self.rkeys:
            api.ucp_rkey_destroy(rkey)
        self.rkeys.clear()
        self.handle = None
