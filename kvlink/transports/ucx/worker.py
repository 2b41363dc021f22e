"""The progress of one UCX worker: what is asked of it, what is in flight, and who hears of the end.

Everything that touches the worker happens under one lock, in *turns*: run what was asked, put requests of the transfers
on their way while there is room, let UCX progress, look what has ended. A thread makes the turns (`UcxConfig.progress`)
and sleeps on the worker's descriptor between them, since UCX copies inside of ``ucp_worker_progress`` and must not do
that in the event loop; over RDMA, where the device copies, a task of the loop can make them. Whoever starts something
small while nothing else is in flight makes a few turns itself: two switches of threads cost more than the copy.

A transfer ends when none of its requests is in flight, whatever happened; the first error, or `Worker.stop`, only stops
issuing. A put that was stopped is flushed like any other: whoever stopped it says next that he writes no more, and not
all that UCX has let go of has landed. Nothing can take a request back but closing its endpoint by force, which ends all
of them; what does not end by that is abandoned after a while, and its endpoint is not quiet (`Endpoint.is_quiet`).

A turn that raises is a fault of ours. Then nothing may wait for the next one: every endpoint is closed by force, every
transfer fails, every link is lost, and memory that UCX may still write into stays until the process ends.
"""

from __future__ import annotations

import logging
import math
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import Any, Final

import anyio
import anyio.lowlevel
import anyio.to_thread

from kvlink.errors import ClosedError, FeatureNotEnabledError
from kvlink.loops import CallSoon, until_set
from kvlink.transports.ucx import declarations as ucp
from kvlink.transports.ucx.connection import WorkerEndpoint
from kvlink.transports.ucx.context import Context
from kvlink.transports.ucx.requests import Transfer, status_of
from kvlink.transports.ucx.turns import HOPE_S, Turns, call, keep_for_ever

_log = logging.getLogger(__name__)

_ASSIST_S: Final = 0.0003
"""How long a caller turns the worker itself before it leaves that to the thread: three times the price of that."""

_LOOP_TURNS_S: Final = 0.001
"""How long a task of the event loop turns the worker before others have their turn."""

_PATIENCE_S: Final = 0.005
"""How long the event loop waits for a turn to end, for what is better done at once: most turns take far less."""

_JOIN_S: Final = 5.0


class Worker(Turns):
    """One worker and its turns. Its methods belong to the event loop unless they say otherwise.

    Args:
        context: owned from now on.
        max_requests, max_inflight_nbytes: of all transfers together.
    """

    def __init__(self, context: Context, *, max_requests: int, max_inflight_nbytes: int) -> None:
        super().__init__(context, max_requests=max_requests, max_inflight_nbytes=max_inflight_nbytes)
        self._lock = threading.Lock()
        self._is_ending = False
        self._is_left = False
        self._thread: threading.Thread | None = None
        self._at_end: list[Callable[[], None]] = []
        self._calls: list[Callable[[], None]] = []
        self._ended = anyio.Event()

    @property
    def is_quiet(self) -> bool:
        """Whether all that was in flight will end, or has; else UCX was given up, and may move bytes at any time."""
        return self._is_quiet

    def start(self, call_soon: CallSoon, *, has_thread: bool) -> None:
        """Begin to turn.

        Args:
            call_soon: makes the event loop call something.
            has_thread: else `run_in_loop` must run.

        Raises:
            FeatureNotEnabledError: the host has no thread to give.
        """
        self._call_soon = call_soon
        if has_thread:
            thread = threading.Thread(target=self._run, name="kvlink-ucx", daemon=True)
            try:
                thread.start()
            except RuntimeError as exc:
                self._ended.set()
                raise FeatureNotEnabledError(
                    "this host gives the process no thread for UCX; raise its limit (pids.max of the control group, "
                    "`ulimit -u`), or set UcxConfig.progress to 'loop'"
                ) from exc
            self._thread = thread

    async def call(self, function: Callable[[], Any]) -> Any:
        """Call `function` in a turn and return, or raise, what it does. Once asked for it is waited for.

        Raises:
            ClosedError: the worker was given up before it came to that.
        """
        done = anyio.Event()
        outcome: list[Any] = [None, ClosedError("UCX does not go on, and was given up")]

        def run() -> None:
            try:
                outcome[:] = function(), None
            except Exception as exc:  # handed to the caller, whose request it was
                outcome[1] = exc
            self._finished.append(done.set)

        self.ask(run)
        self._calls.append(done.set)
        try:
            await until_set(done)
        finally:
            self._calls.remove(done.set)
        if outcome[1] is not None:
            try:
                raise outcome[1]
            finally:
                outcome.clear()  # its traceback holds this frame
        return outcome[0]

    def ask(self, function: Callable[[], None]) -> None:
        """Have `function` called in a turn, after everything that was asked before."""
        self._check_open()
        self._asked.append(function)
        self._wake()

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

    def submit(self, transfer: Transfer) -> None:
        """Put a transfer on its way; its `finish` is called when it has ended."""
        self._check_works()
        self._arrived.append(transfer)
        self._wake()

    def try_now(self, transfer: Transfer, finish: Callable[[], None]) -> bool:
        """Do a small transfer here and now, where nothing else is in the way.

        Returns:
            Whether it has ended; else it is on its way, and `finish` is called when it has.
        """
        self._check_works()
        if self._active or self._arrived or self._asked or not self._lock.acquire(blocking=False):
            transfer.finish = finish
            self.submit(transfer)
            return False
        try:
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
        except Exception:
            self._give_up()
        if not transfer.has_ended:
            self._wake()
        return transfer.has_ended

    def move_now(
        self, endpoint: WorkerEndpoint, is_put: bool, local: int, nbytes: int, remote: int, memh: int, rkey: Any
    ) -> int | None:
        """Do one request before returning, over an endpoint whose transfers are copies by this very process.

        Returns:
            Its status; None where something else is in the way and nothing was done.
        """
        if not self._take_turns():
            return None
        try:
            if endpoint.ep is None or endpoint.failure != ucp.OK:
                return endpoint.failure or ucp.ERR_CANCELED
            status = self._slots.move_one(endpoint.ep, is_put, local, nbytes, remote, memh, rkey)
            if status == ucp.IN_PROGRESS:
                status = self._wait(endpoint, self._slots.status_of_one)
            if is_put and status == ucp.OK:
                self._plain.op_attr_mask = 0
                flush = self._api.ucp_ep_flush_nbx(endpoint.ep, self._plain)
                if flush:
                    status = self._wait(endpoint, lambda: status_of(self._api, flush))
            if status != ucp.OK:
                endpoint.failure = endpoint.failure or status
            if self._finished:
                self._deliver()
            return status
        finally:
            self._lock.release()

    def finish_now(self, transfer: Transfer) -> bool:
        """Do a transfer before returning, where nothing else is in the way; as `move_now`."""
        if not self._take_turns():
            return False
        try:
            try:
                self._begin(transfer)
                until = perf_counter() + HOPE_S
                while not transfer.has_ended:
                    self._turn()
                    if perf_counter() > until:
                        self._close_now(transfer.endpoint)
                self._deliver()
            finally:
                self._lock.release()
        except Exception:
            self._give_up()
        return True

    def stop(self, transfer: Transfer) -> None:
        """Issue no more of a transfer; it ends when what is in flight has ended."""
        transfer.is_stopped = True
        with suppress(ClosedError):
            self.ask(_nothing)

    def close_endpoint(self, endpoint: WorkerEndpoint, on_closed: Callable[[], None]) -> None:
        """Close an endpoint by force: what is in flight over it ends, and then `on_closed` is called."""

        def close() -> None:
            endpoint.on_closed = on_closed
            self._close_now(endpoint)

        self.ask(close)

    async def run_in_loop(self) -> None:
        """Turn the worker from a task of the event loop, until `aclose`; cancelling it does not end it."""
        with anyio.CancelScope(shield=True):
            try:
                while True:
                    until = perf_counter() + _LOOP_TURNS_S
                    is_busy: bool | None = True
                    while is_busy and perf_counter() < until:
                        is_busy = self._make_turn()
                    if is_busy is None:
                        return
                    if is_busy:
                        await anyio.lowlevel.checkpoint()
                    else:
                        with anyio.move_on_after(self._longest_sleep_s()):
                            await anyio.wait_readable(self.context.fd)
            except Exception:
                self._give_up()
            finally:
                self._ended.set()

    def at_end(self, function: Callable[[], None]) -> None:
        """Have `function` called when nothing is in flight any more, before the worker is given up; in any thread.

        It is not called where UCX does not end what is in flight: then it may still need what would be undone.
        """
        self._at_end.append(function)

    async def aclose(self) -> None:
        """End the turns and give the worker up; endpoints should have been closed. Bounded. Idempotent.

        Cancellation: it is ended all the same.
        """
        if self._is_ending:
            await until_set(self._ended, patience_s=_JOIN_S, hurry=self._ended.set)
            return
        self.ask(self._close_all)
        self._is_ending = True
        self.context.wake()
        try:
            await until_set(self._ended, patience_s=_JOIN_S, hurry=self._leave)
        finally:
            await self._end_for_good()

    async def _end_for_good(self) -> None:
        """Give everything up, in a thread: unpinning memory and closing devices take their time."""

        def end() -> None:
            if self._thread is not None:
                self._thread.join()  # it has said that it ends
            while self._at_end:
                call(self._at_end.pop())
            self.context.close()
            has_ended.append(True)

        has_ended: list[bool] = []
        if self._is_quiet and not self._is_left:
            with anyio.move_on_after(_JOIN_S, shield=True):
                try:
                    await anyio.to_thread.run_sync(end, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
                except RuntimeError:  # the host has no thread to give
                    end()
        if not has_ended:
            _log.error("UCX does not end what is in flight; its worker and its memory stay until this process ends")
            keep_for_ever(self)

    def _leave(self) -> None:
        """Wait no more for turns that do not end, and tell everybody who waits that nothing will come of them.

        A turn may be under way, in a system call that does not return, and have the lock; so UCX is asked for nothing.
        """
        self._is_left, self._is_quiet = True, False
        transfers = [*self._active, *self._arrived]
        keep_for_ever(self, [(transfer, transfer.keep) for transfer in transfers])
        for transfer in transfers:
            transfer.endpoint.is_quiet = False
            transfer.status = transfer.status or ucp.ERR_CANCELED
            transfer.has_ended = True
        endings = [transfer.finish for transfer in transfers] + [endpoint.on_closed for endpoint in self._closing]
        for ending in [*endings, *self._calls]:
            if ending is not None:
                call(ending)
        self.context.wake()
        self._ended.set()

    def _check_works(self) -> None:
        self._check_open()
        if self._is_broken:
            raise ClosedError("UCX failed in this cluster, see the log; make a new cluster")

    def _check_open(self) -> None:
        if self._is_ending:
            raise ClosedError("the cluster is closed; nothing is moved any more")

    def _wake(self) -> None:
        self.context.wake()
        if self._is_broken:  # there are no more turns
            self._end_everything()

    def _take_turns(self) -> bool:
        """Take the lock, where nothing else is in the way and no turn takes long (registering memory may)."""
        if self._active or self._arrived or self._asked or self._is_ending or self._is_broken:
            return False
        return self._lock.acquire(blocking=False) or self._lock.acquire(timeout=_PATIENCE_S)

    def _has_no_more_turns(self) -> bool:
        if self._is_broken or self._is_left:
            return True
        return self._is_ending and not (self._active or self._closing or self._asked or self._arrived)

    def _make_turn(self) -> bool | None:
        """Take a turn; return whether to come back at once, and None when there will be no more turns."""
        with self._lock:
            if self._is_broken or self._is_left:
                return None
            is_busy = self._turn()
            self._deliver()
            if is_busy:
                return True
            return None if self._has_no_more_turns() else not self.context.arm()

    def _longest_sleep_s(self) -> float:
        sleep_ms = self._longest_sleep_ms()
        return math.inf if sleep_ms is None else sleep_ms / 1000

    def _run(self) -> None:
        """Make the turns, in the thread."""
        poller = select.poll()
        poller.register(self.context.fd, select.POLLIN)
        try:
            while True:
                is_busy = self._make_turn()
                if is_busy is None:
                    return
                if not is_busy:
                    poller.poll(self._longest_sleep_ms())
        except BaseException:
            self._give_up()
        finally:
            assert self._call_soon is not None
            with suppress(RuntimeError):  # the loop has been closed: nobody waits
                self._call_soon(self._ended.set)

    def _give_up(self) -> None:
        """A turn has failed; there will be no other."""
        _log.critical("a turn of UCX failed; its links end, and this cluster moves nothing over UCX", exc_info=True)
        with self._lock:
            self._is_quiet = False
            with suppress(Exception):
                self._is_quiet = self._close_all_and_wait(HOPE_S)
            if not self._is_quiet:
                for endpoint in self._endpoints:
                    endpoint.is_quiet = False
                keep_for_ever(self, [(transfer, transfer.keep) for transfer in self._active])
            self._is_broken = True
        self._end_everything()

    def _end_everything(self) -> None:
        """In place of turns: do what was asked, and tell everybody who waits for something else that it will not be."""
        with self._lock:
            while self._asked:
                call(self._asked.popleft())
            while self._arrived:
                self._begin(self._arrived.popleft())
            for transfer in self._active:
                if not transfer.has_ended:
                    self._end(transfer, ucp.ERR_CANCELED)
            self._active.clear()
            for endpoint in self._endpoints:
                endpoint.failure = endpoint.failure or ucp.ERR_CANCELED
                if endpoint.on_failed is not None:
                    self._finished.append(endpoint.on_failed)
                    endpoint.on_failed = None
            if self._is_quiet:
                self._look_at_closing()
            else:
                self._finished += [end.on_closed for end in self._closing if end.on_closed is not None]
                self._closing.clear()
            self._deliver()


def _nothing() -> None:
    """Asked for to have a turn made."""
