"""The progress of one UCX worker: what is asked of it, what is in flight, and who hears of the end.

Everything that touches the worker happens under one lock, in *turns*: run what was asked, put requests of the transfers
on their way while there is room, let UCX progress, look what has ended. A thread makes the turns (`UcxConfig.progress`)
and sleeps on the worker's descriptor between them, since UCX copies inside of ``ucp_worker_progress`` and must not do
that in the event loop; over RDMA, where the device copies, a task of the loop can make them. Whoever starts something
small while nothing else is in flight makes a few turns itself: two switches of threads cost more than the copy.

A transfer ends when none of its requests is in flight, whatever happened; the first error, or `Worker.stop`, only stops
issuing. Nothing can take a request back but closing its endpoint by force, which ends all of them.
"""

from __future__ import annotations

import logging
import select
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import Any, Final

import anyio
import anyio.lowlevel

from kvlink.errors import ClosedError
from kvlink.loops import CallSoon
from kvlink.transports.ucx import declarations as ucp
from kvlink.transports.ucx.connection import WorkerEndpoint
from kvlink.transports.ucx.context import Context
from kvlink.transports.ucx.requests import Slots, Transfer

_log = logging.getLogger(__name__)

_ASSIST_S: Final = 0.0003
"""How long a caller turns the worker itself before it leaves that to the thread: three times the price of that."""

_LOOP_TURNS_S: Final = 0.001
"""How long a task of the event loop turns the worker before others have their turn."""

_PATIENCE_S: Final = 0.005
"""How long the event loop waits for a turn to end, for what is better done at once: most turns take far less."""

_MORE_PROGRESS: Final = 7
"""Calls of progress that follow a fruitful one in the same turn: a call costs 0.5 us, a turn 4."""

_LEAST_NBYTES: Final = 256 * 1024
"""What a transfer may have in flight whatever the others have."""

_MANY: Final = 1000
_HOPE_S: Final = 1.0
"""A copy by this process that takes longer is not going to end: the endpoint is closed by force, which ends it."""

_JOIN_S: Final = 5.0


class Worker:
    """One worker and its turns. Its methods belong to the event loop unless they say otherwise.

    Args:
        context: owned from now on.
        max_requests, max_inflight_nbytes: of all transfers together.
    """

    def __init__(self, context: Context, *, max_requests: int, max_inflight_nbytes: int) -> None:
        self.context = context
        self._api = context.library.api
        self._lock = threading.Lock()
        self._asked: deque[Callable[[], None]] = deque()
        self._arrived: deque[Transfer] = deque()
        self._active: list[Transfer] = []
        self._closing: list[WorkerEndpoint] = []
        self._finished: list[Callable[[], None]] = []
        self._is_own = context.longest_sleep_ms is None
        self._slots = Slots(context, max_requests)
        self._max_nbytes = max_inflight_nbytes
        self._inflight_nbytes = 0
        self._is_ending = False
        self._thread: threading.Thread | None = None
        self._call_soon: CallSoon | None = None
        ffi = context.library.ffi
        self._plain = ffi.new("ucp_request_param_t *")
        self._on_error = ffi.callback("void(void *, ucp_ep_h, ucs_status_t)", self._take_error)

    def start(self, call_soon: CallSoon, *, has_thread: bool) -> None:
        """Begin to turn.

        Args:
            call_soon: makes the event loop call something.
            has_thread: else `run_in_loop` must run.
        """
        self._call_soon = call_soon
        if has_thread:
            self._thread = threading.Thread(target=self._run, name="kvlink-ucx", daemon=True)
            self._thread.start()

    async def call(self, function: Callable[[], Any]) -> Any:
        """Call `function` in a turn and return, or raise, what it does. Once asked for it is waited for."""
        done = anyio.Event()
        outcome: list[Any] = [None, None]

        def run() -> None:
            try:
                outcome[0] = function()
            except Exception as exc:  # handed to the caller, whose request it was
                outcome[1] = exc
            self._finished.append(done.set)

        self.ask(run)
        with anyio.CancelScope(shield=True):
            await done.wait()
        if outcome[1] is not None:
            try:
                raise outcome[1]
            finally:
                outcome.clear()  # its traceback holds this frame
        return outcome[0]

    def ask(self, function: Callable[[], None]) -> None:
        """Have `function` called in a turn, after everything that was asked before. It must not raise."""
        self._check_open()
        self._asked.append(function)
        self.context.wake()

    def do(self, function: Callable[[], None]) -> None:
        """Call `function` before returning, where no turn is in the way for long; else have it called in one."""
        self._check_open()
        if self._lock.acquire(timeout=_PATIENCE_S):
            try:
                function()
            finally:
                self._lock.release()
        else:
            self.ask(function)

    def report(self, function: Callable[[], None]) -> None:
        """In a turn: have `function` called on the event loop."""
        self._finished.append(function)

    def submit(self, transfer: Transfer) -> None:
        """Put a transfer on its way; its `finish` is called when it has ended."""
        self._check_open()
        self._arrived.append(transfer)
        self.context.wake()

    def try_now(self, transfer: Transfer, finish: Callable[[], None]) -> bool:
        """Do a small transfer here and now, where nothing else is in the way.

        Returns:
            Whether it has ended; else it is on its way, and `finish` is called when it has.
        """
        self._check_open()
        if self._active or self._arrived or self._asked or not self._lock.acquire(blocking=False):
            transfer.finish = finish
            self.submit(transfer)
            return False
        try:
            self._begin(transfer)
            until = perf_counter() + _ASSIST_S
            while not transfer.has_ended and perf_counter() < until:
                self._turn()
            if not transfer.has_ended:
                transfer.finish = finish
            self._deliver()
        finally:
            self._lock.release()
        if not transfer.has_ended:
            self.context.wake()
        return transfer.has_ended

    def move_now(
        self, endpoint: WorkerEndpoint, is_put: bool, local: int, nbytes: int, remote: int, memh: int, rkey: Any
    ) -> int | None:
        """Do one request before returning, over an endpoint whose transfers are copies by this very process.

        Returns:
            Its status; None where something else is in the way and nothing was done.
        """
        if self._active or self._arrived or self._asked or self._is_ending:
            return None
        with self._lock:
            if endpoint.ep is None or endpoint.failure != ucp.OK:
                return endpoint.failure or ucp.ERR_CANCELED
            status = self._slots.issue_one(endpoint.ep, is_put, local, nbytes, remote, memh, rkey)
            if status == ucp.IN_PROGRESS:
                status = self._wait(endpoint, self._slots.status_of_one)
            if is_put and status == ucp.OK:
                self._plain.op_attr_mask = 0
                flush = self._api.ucp_ep_flush_nbx(endpoint.ep, self._plain)
                status = self._wait(endpoint, lambda: self._status_of(flush))
            if status != ucp.OK:
                endpoint.failure = endpoint.failure or status
            if self._finished:
                self._deliver()
            return status

    def finish_now(self, transfer: Transfer) -> bool:
        """Do a transfer before returning, where nothing else is in the way; as `move_now`."""
        if self._active or self._arrived or self._asked or self._is_ending:
            return False
        with self._lock:
            self._begin(transfer)
            until = perf_counter() + _HOPE_S
            while not transfer.has_ended:
                self._turn()
                if perf_counter() > until:
                    self._close_now(transfer.endpoint)
            self._deliver()
        return True

    def stop(self, transfer: Transfer) -> None:
        """Issue no more of a transfer; it ends when what is in flight has ended."""
        transfer.is_stopped = True
        with suppress(ClosedError):
            self.ask(_nothing)

    def open_endpoint(self, endpoint: WorkerEndpoint, address: bytes) -> None:
        """In a turn: connect; see `WorkerEndpoint.open`."""
        endpoint.open(self.context, address, self._on_error)

    def close_endpoint(self, endpoint: WorkerEndpoint, on_closed: Callable[[], None]) -> None:
        """Close an endpoint by force: what is in flight over it ends, and then `on_closed` is called."""

        def close() -> None:
            endpoint.on_closed = on_closed
            endpoint.failure = endpoint.failure or ucp.ERR_CANCELED
            self._close_now(endpoint)

        self.ask(close)

    async def run_in_loop(self) -> None:
        """Turn the worker from a task of the event loop, until `close`; cancelling it does not end it."""
        with anyio.CancelScope(shield=True):
            while not self._is_ending:
                until = perf_counter() + _LOOP_TURNS_S
                is_busy = True
                while is_busy and perf_counter() < until:
                    with self._lock:
                        is_busy = self._turn() or not self.context.arm()
                        self._deliver()
                if is_busy:
                    await anyio.lowlevel.checkpoint()
                else:
                    await anyio.wait_readable(self.context.fd)
        self.context.close()

    def close(self) -> None:
        """End the turns and give the worker up; all endpoints must have been closed. Waits for the thread, some ms."""
        if self._is_ending:
            return
        self._is_ending = True
        self.context.wake()
        if self._thread is None:
            return  # `run_in_loop` gives the worker up when it ends
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            _log.error("UCX does not end what is in flight; its worker and its memory stay until this process ends")
        else:
            self.context.close()

    def _check_open(self) -> None:
        if self._is_ending:
            raise ClosedError("the cluster is closed; nothing is moved any more")

    # From here on: in a turn, under the lock.

    def _turn(self) -> bool:
        """Do what can be done without waiting; return whether to come back at once."""
        while self._asked:
            self._asked.popleft()()
        while self._arrived:
            self._begin(self._arrived.popleft())
        active = self._issue() if self._active else self._active
        progress, worker = self._api.ucp_worker_progress, self.context.worker
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
        progress, worker = self._api.ucp_worker_progress, self.context.worker
        for _ in range(_MANY):
            progress(worker)
            status = look()
            if status != ucp.IN_PROGRESS:
                return status
        until = perf_counter() + _HOPE_S
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
                endpoint.failure = endpoint.failure or status
        if transfer.status != ucp.OK:
            transfer.is_stopped = True
        if not transfer.is_stopped and (transfer.groups or (transfer.is_put and not self._is_flushed(transfer))):
            return False
        if transfer.flush:
            # Stopped while the flush is on its way: it is nobody's any more, and touches no memory of ours.
            self._api.ucp_request_free(transfer.flush)
            transfer.flush = 0
        transfer.has_ended = True
        endpoint.num_transfers -= 1
        if transfer.finish is not None:
            self._finished.append(transfer.finish)
        return True

    def _is_flushed(self, transfer: Transfer) -> bool:
        """Whether the peer can see what was put; the first question starts the flush."""
        endpoint = transfer.endpoint
        if transfer.flush is None:
            self._plain.op_attr_mask = 0
            transfer.flush = self._api.ucp_ep_flush_nbx(endpoint.ep, self._plain)
        status = self._status_of(transfer.flush)
        if status == ucp.IN_PROGRESS:
            return False
        transfer.flush = 0
        if status != ucp.OK:
            transfer.status = status
            endpoint.failure = endpoint.failure or status
        return True

    def _status_of(self, request: int) -> int:
        """Return the status of a request that UCX has made, and free it when it has ended."""
        if request == 0:
            return ucp.OK
        if request >= ucp.FIRST_ERROR_POINTER:
            return request - 2**64
        status = int(self._api.ucp_request_check_status(request))
        if status != ucp.IN_PROGRESS:
            self._api.ucp_request_free(request)
        return status

    def _close_now(self, endpoint: WorkerEndpoint) -> None:
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
            if endpoint.closing is not None:
                if self._status_of(endpoint.closing) == ucp.IN_PROGRESS:
                    continue
                endpoint.closing = None
            if endpoint.num_transfers:
                continue
            self._closing.remove(endpoint)
            endpoint.forget(self._api)
            if endpoint.on_closed is not None:
                self._finished.append(endpoint.on_closed)

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

    def _run(self) -> None:
        """Make the turns, in the thread."""
        poller = select.poll()
        poller.register(self.context.fd, select.POLLIN)
        while True:
            with self._lock:
                is_busy = self._turn()
                self._deliver()
                if not is_busy:
                    if self._is_ending and not (self._active or self._closing or self._asked or self._arrived):
                        return
                    is_busy = not self.context.arm()
            if not is_busy:
                poller.poll(self.context.longest_sleep_ms if self._active or self._closing else None)


def _nothing() -> None:
    """Asked for to have a turn made."""


def _call_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()
