"""What a turn of a UCX worker does; `transports.ucx.worker` says who makes turns, and when."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import Any, Final

from kvlink.errors import LinkError
from kvlink.loops import CallSoon
from kvlink.transports.ucx import declarations as ucp
from kvlink.transports.ucx.connection import WorkerEndpoint
from kvlink.transports.ucx.context import Context
from kvlink.transports.ucx.requests import Slots, Transfer, status_of

_log = logging.getLogger(__name__)

_MORE_PROGRESS: Final = 7
"""Calls of progress that follow a fruitful one in the same turn: a call costs 0.5 us, a turn 4."""

_LEAST_NBYTES: Final = 256 * 1024
"""What a transfer may have in flight whatever the others have."""

_MANY: Final = 1000
HOPE_S: Final = 1.0
"""A copy by this process that takes longer is not going to end: the endpoint is closed by force, which ends it."""

PATIENCE_S: Final = 3.0
"""What has not ended so long after its endpoint was closed by force never will. Closing ends no copy of a CUDA device
that hangs or has failed (``uct_cuda_base_progress_event_queue`` takes it for one that is not ready yet), and UCX before
1.19 forgets what a peer that has stopped was asked for by messages."""

_LOOK_MS: Final = 100
"""How often that is looked at: nothing wakes us for it."""

_given_up: Final[list[object]] = []


def keep_for_ever(*held: object) -> None:
    """Keep what UCX may still write into and nobody can take back: it must not be freed."""
    _given_up.append(held)


class Turns:
    """What is asked of a worker, what is in flight over it, and how that goes on.

    All methods are called by whoever has the worker's lock.

    Args:
        context: owned from now on.
        max_requests, max_inflight_nbytes: of all transfers together.
    """

    def __init__(self, context: Context, *, max_requests: int, max_inflight_nbytes: int) -> None:
        self.context = context
        self._api = context.library.api
        self._progress, self._handle = self._api.ucp_worker_progress, context.worker
        self._asked: deque[Callable[[], None]] = deque()
        self._arrived: deque[Transfer] = deque()
        self._active: list[Transfer] = []
        self._endpoints: set[WorkerEndpoint] = set()
        self._closing: list[WorkerEndpoint] = []
        self._finished: list[Callable[[], None]] = []
        self._is_own = context.longest_sleep_ms is None
        self._slots = Slots(context, max_requests)
        self._max_nbytes = max_inflight_nbytes
        self._inflight_nbytes = 0
        self._is_broken = False
        self._is_quiet = True
        self._call_soon: CallSoon | None = None
        ffi = context.library.ffi
        self._plain = ffi.new("ucp_request_param_t *")
        self._on_error = ffi.callback("void(void *, ucp_ep_h, ucs_status_t)", self._take_error)

    def report(self, function: Callable[[], None]) -> None:
        """In a turn: have `function` called on the event loop."""
        self._finished.append(function)

    def open_endpoint(self, endpoint: WorkerEndpoint, address: bytes) -> None:
        """In a turn: connect; see `WorkerEndpoint.open`."""
        if self._is_broken:
            raise LinkError("UCX failed in this cluster, see its log")
        endpoint.open(self.context, address, self._on_error)
        self._endpoints.add(endpoint)

    def _turn(self) -> bool:
        """Do what can be done without waiting; return whether to come back at once."""
        while self._asked:
            call(self._asked.popleft())
        while self._arrived:
            self._begin(self._arrived.popleft())
        active = self._issue() if self._active else self._active
        progress, worker = self._progress, self._handle
        num_events = progress(worker) if self._is_own or active or self._closing else 0
        if active:
            if num_events:
                for _ in range(_MORE_PROGRESS):
                    if self._arrived or self._asked or not progress(worker):
                        break
            self._active = [transfer for transfer in active if not self._look_at(transfer)]
        if self._closing:
            self._look_at_closing()
        return bool(num_events or self._asked or self._arrived)

    def _issue(self) -> list[Transfer]:
        """Put requests on their way, a row of each transfer; return the transfers, those that had to wait first.

        A transfer that has nothing in flight may always have something: a small one does not wait for a large one.
        """
        slots = self._slots
        waiting: list[Transfer] = []
        served: list[Transfer] = []
        for transfer in self._active:
            if transfer.endpoint.failure != ucp.OK and transfer.groups and not transfer.is_stopped:
                transfer.status, transfer.is_stopped = (
                    transfer.endpoint.failure,
                    True,
                )  # UCX may crash if asked for more
            room = self._max_nbytes - self._inflight_nbytes
            may_issue = transfer.groups and not transfer.is_stopped and slots.has_room
            if may_issue and (room > 0 or not transfer.rows):
                self._inflight_nbytes += slots.issue(transfer, max(room, _LEAST_NBYTES))
                served.append(transfer)
            else:
                waiting.append(transfer)
        return waiting + served

    def _wait(self, endpoint: WorkerEndpoint, look: Callable[[], int]) -> int:
        """Progress until a request has ended, which takes no peer; return its status."""
        progress, worker = self._progress, self._handle
        for _ in range(_MANY):
            progress(worker)
            status = look()
            if status != ucp.IN_PROGRESS:
                return status
        until = perf_counter() + HOPE_S
        while (status := look()) == ucp.IN_PROGRESS:
            progress(worker)
            if perf_counter() > until:
                self._close_now(endpoint)
        return status

    def _begin(self, transfer: Transfer) -> None:
        endpoint = transfer.endpoint
        endpoint.num_transfers += 1
        if endpoint.ep is None or endpoint.failure != ucp.OK:
            transfer.status = endpoint.failure or ucp.ERR_CANCELED
            transfer.is_stopped = True
        self._active.append(transfer)

    def _look_at(self, transfer: Transfer) -> bool:
        """Take note of requests that have ended; return whether the whole transfer has."""
        slots, rows, endpoint = self._slots, transfer.rows, transfer.endpoint
        while rows:
            if not slots.has_ended(rows[0]):
                return False
            row = rows.popleft()
            self._inflight_nbytes -= row.nbytes
            status = slots.give_back(row)
            if status == ucp.OK and transfer.status == ucp.OK:
                transfer.done_nbytes += row.nbytes
            elif transfer.status == ucp.OK:
                transfer.status = status
                if not transfer.is_refused:
                    endpoint.failure = endpoint.failure or status
        if transfer.status != ucp.OK:
            transfer.is_stopped = True
        if transfer.groups and not transfer.is_stopped:
            return False
        if transfer.is_put and transfer.status == ucp.OK:
            if endpoint.ep is None or endpoint.failure != ucp.OK:
                transfer.status = endpoint.failure or ucp.ERR_CANCELED
            elif transfer.position and not self._is_flushed(transfer):
                return False
        if transfer.flush:
            # The endpoint was lost while the flush was on its way: it is nobody's now, and touches no memory of ours.
            self._api.ucp_request_free(transfer.flush)
            transfer.flush = 0
        self._end(transfer, transfer.status)
        return True

    def _longest_sleep_ms(self) -> int | None:
        """Return how long to wait for UCX's descriptor; None for as long as it takes."""
        if self._closing:
            return _LOOK_MS
        return self.context.longest_sleep_ms if self._active or self._closing else None

    def _end(self, transfer: Transfer, status: int) -> None:
        transfer.status, transfer.has_ended = transfer.status or status, True
        transfer.endpoint.num_transfers -= 1
        transfer.keep = None  # whoever holds the transfer, a logged traceback for one, holds no memory of its caller
        if transfer.finish is not None:
            self._finished.append(transfer.finish)

    def _is_flushed(self, transfer: Transfer) -> bool:
        """Whether the peer can see what was put; the first question starts the flush."""
        endpoint = transfer.endpoint
        if transfer.flush is None:
            self._plain.op_attr_mask = 0
            transfer.flush = self._api.ucp_ep_flush_nbx(endpoint.ep, self._plain)
        status = status_of(self._api, transfer.flush)
        if status == ucp.IN_PROGRESS:
            return False
        transfer.flush = 0
        if status != ucp.OK:
            transfer.status = status
            endpoint.failure = endpoint.failure or status
        return True

    def _close_now(self, endpoint: WorkerEndpoint) -> None:
        endpoint.failure = endpoint.failure or ucp.ERR_CANCELED
        endpoint.closed_at = endpoint.closed_at or perf_counter()
        for transfer in self._active:
            if transfer.endpoint is endpoint:
                transfer.is_stopped = True
                transfer.status = transfer.status or endpoint.failure
        if endpoint.ep is not None:
            self._plain.op_attr_mask, self._plain.flags = ucp.OP_FLAGS, ucp.CLOSE_FORCE
            endpoint.closing = self._api.ucp_ep_close_nbx(endpoint.ep, self._plain)
            endpoint.ep = None
        if endpoint not in self._closing:
            self._closing.append(endpoint)

    def _look_at_closing(self) -> None:
        for endpoint in list(self._closing):
            if endpoint.closing is not None and status_of(self._api, endpoint.closing) != ucp.IN_PROGRESS:
                endpoint.closing = None
            if endpoint.closing is not None or endpoint.num_transfers:
                if endpoint.closed_at is None or perf_counter() - endpoint.closed_at < PATIENCE_S:
                    continue
                self._abandon(endpoint)
            else:
                endpoint.forget(self._api)
            self._closing.remove(endpoint)
            self._endpoints.discard(endpoint)
            if endpoint.on_closed is not None:
                self._finished.append(endpoint.on_closed)

    def _abandon(self, endpoint: WorkerEndpoint) -> None:
        """Wait no more for what UCX does not end over a closed endpoint, and keep for ever what it may write into."""
        lost = [transfer for transfer in self._active if transfer.endpoint is endpoint]
        self._active = [transfer for transfer in self._active if transfer.endpoint is not endpoint]
        _log.error(
            "UCX has not ended %d transfers %s s after their link was given up, as where a CUDA device hangs or has "
            "failed; their memory is not used again, and UCX's own stays until this process ends",
            len(lost),
            PATIENCE_S,
        )
        self._is_quiet = endpoint.is_quiet = False
        keep_for_ever(self, endpoint, [(transfer, transfer.keep) for transfer in lost])
        for transfer in lost:
            self._inflight_nbytes -= sum([row.nbytes for row in transfer.rows])
            self._end(transfer, ucp.ERR_CANCELED)

    def _take_error(self, argument: Any, ep: Any, status: int) -> None:
        """UCX has found a peer dead. Called inside of progress."""
        endpoint: WorkerEndpoint = self.context.library.ffi.from_handle(argument)
        endpoint.failure = endpoint.failure or status
        if endpoint.on_failed is not None:
            self._finished.append(endpoint.on_failed)

    def _deliver(self) -> None:
        """Have the event loop call what has finished, all at once."""
        if not self._finished:
            return
        finished, self._finished = self._finished, []
        assert self._call_soon is not None
        with suppress(RuntimeError):  # the loop has been closed: nobody waits
            self._call_soon(lambda: _call_all(finished))

    def _close_all(self) -> None:
        for endpoint in self._endpoints:
            self._close_now(endpoint)

    def _close_all_and_wait(self, patience_s: float) -> bool:
        """Return whether nothing is in flight any more, over any endpoint."""
        self._close_all()
        until = perf_counter() + patience_s
        for endpoint in self._closing:
            while endpoint.closing is not None:
                self._progress(self._handle)
                if status_of(self._api, endpoint.closing) != ucp.IN_PROGRESS:
                    endpoint.closing = None
                elif perf_counter() > until:
                    return False
        # Closing ends no copy by a device: its endpoint may be closed for long.
        rows = [row for transfer in self._active for row in transfer.rows]
        while not all(map(self._slots.has_ended, rows)):
            self._progress(self._handle)
            if perf_counter() > until:
                return False
        return True


def call(function: Callable[[], None]) -> None:
    """Call what must not keep others from being called."""
    try:
        function()
    except Exception:
        _log.exception("a call for UCX failed")


def _call_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        call(function)
