"""Serving a listener so that it can be closed without losing what it has accepted."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import anyio
from anyio.abc import Listener, SocketListener, TaskGroup

from kvlink.loops import until_readable

_log = logging.getLogger(__name__)

_RETRY_S: Final = 0.2
_BURST: Final = 20
_LINE_EVERY_S: Final = 1.0


class Acceptor:
    """A listener and the task that accepts on it.

    Args:
        listener: owned from now on.
        serve: awaited in a task of its own for each connection; outlives the acceptor.
        tasks: parent of all these tasks.
    """

    def __init__(
        self, listener: Listener[Any], serve: Callable[[Any], Coroutine[Any, Any, None]], tasks: TaskGroup
    ) -> None:
        self._listener = listener
        self._serve_it = serve
        self._tasks = tasks
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()
        tasks.start_soon(self._run)

    async def aclose(self) -> None:
        """Accept nothing any more; connections that were accepted live on. Idempotent."""
        self._scope.cancel()
        await self._ended.wait()

    def abort(self) -> None:
        """Accept nothing any more, from the loop's next turn on. Idempotent."""
        self._scope.cancel()

    async def _run(self) -> None:
        try:
            with self._scope:
                while True:
                    try:
                        if isinstance(self._listener, SocketListener):
                            await self._serve_socket(self._listener)
                        await self._listener.serve(self._serve, self._tasks)
                    except Exception as exc:  # out of descriptors or memory, alone or in a group: it passes
                        _log.warning("cannot accept connections for now: %r", exc)
                        await anyio.sleep(_RETRY_S)
        finally:
            with anyio.CancelScope(shield=True), suppress(OSError):
                await self._listener.aclose()
            self._ended.set()

    async def _serve(self, stream: Any) -> None:
        """Serve a connection; a fault of ours ends that, and not the tasks' parent with all that it has."""
        try:
            await self._serve_it(stream)
        except Exception:
            _log.exception("failed to serve a connection")
            with anyio.CancelScope(shield=True), suppress(OSError):
                await anyio.aclose_forcefully(stream)

    async def _serve_socket(self, listener: SocketListener) -> None:
        """As its own `serve`, but that an accept on a Unix socket is never cancelled while it waits; see `loops`."""
        while True:
            await until_readable(listener)
            self._tasks.start_soon(self._serve, await listener.accept())


class Complaints:
    """Log lines about connections that were no good: one each, but a flood of them cannot fill the log.

    `_BURST` lines at once, then one every `_LINE_EVERY_S`; a line that follows silence says how many were left out.

    Args:
        log: where to.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._is_free_at = -math.inf
        self._num_left_out = 0

    def say(self, message: str, *arguments: object, cause: Exception | None = None) -> None:
        """Log a warning, unless there were too many; `cause` is one of our own faults, logged with its traceback."""
        now = anyio.current_time()
        free_at = max(self._is_free_at, now - (_BURST - 1) * _LINE_EVERY_S)
        if free_at > now:
            self._num_left_out += 1
            return
        self._is_free_at = free_at + _LINE_EVERY_S
        if self._num_left_out:
            message += f" ({self._num_left_out} more lines like this were left out)"
            self._num_left_out = 0
        self._log.log(logging.WARNING if cause is None else logging.ERROR, message, *arguments, exc_info=cause)


class Strangers:
    """Connections that have not said who they are. When there are too many, the one that has waited longest goes.

    So idle connections, however many, cannot keep a peer out that speaks at once.

    Args:
        most: how many may wait at the same time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: dict[int, anyio.CancelScope] = {}
        self._next = 0

    @contextmanager
    def waiting(self, timeout_s: float) -> Iterator[anyio.CancelScope]:
        """Run the body as a stranger: it is cancelled after `timeout_s`, or earlier when it must make room."""
        if len(self._waiting) >= self._most:
            oldest = next(iter(self._waiting))
            self._waiting.pop(oldest).cancel()
        number = self._next
        self._next += 1
        with anyio.move_on_after(timeout_s) as scope:
            self._waiting[number] = scope
            try:
                yield scope
            finally:
                self._waiting.pop(number, None)
