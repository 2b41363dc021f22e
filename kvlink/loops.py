"""The one place where event loops differ: waking one from another thread, being cancelled, and Unix sockets."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
from anyio.abc import ByteSendStream, SocketAttribute, SocketListener, UNIXSocketStream

CallSoon = Callable[[Callable[[], Any]], Any]


def current_call_soon() -> CallSoon:
    """Return a function that, from any thread, makes the running loop (asyncio, uvloop or trio) call another soon."""
    try:
        return asyncio.get_running_loop().call_soon_threadsafe
    except RuntimeError:
        import trio

        return trio.lowlevel.current_trio_token().run_sync_soon


async def until_set(event: anyio.Event, *, patience_s: float = math.inf, hurry: Callable[[], object] = bool) -> None:
    """Return when `event` is set, which is certain to come, and not before, however often the caller is cancelled.

    A shield of anyio holds off cancellation by anyio, but not by asyncio's own ``task.cancel()``, as ``wait_for`` and
    ``timeout`` do it; that is raised afterwards.

    Args:
        patience_s, hurry: what is called when it has taken so long, to make it come.
    """
    cancelled: BaseException | None = None
    deadline = anyio.current_time() + patience_s
    while not event.is_set():
        try:
            with anyio.CancelScope(shield=True, deadline=deadline):
                await event.wait()
            if not event.is_set():
                deadline = math.inf
                hurry()
        except GeneratorExit:
            raise
        except BaseException as exc:
            cancelled = exc
    if cancelled is not None:
        try:
            raise cancelled
        finally:
            del cancelled  # its traceback holds this frame


async def until_readable(stream: object) -> None:
    """Return when `stream` has something to read, or to accept, if it is a Unix socket; for any other, at once.

    To be awaited before its ``receive`` or ``accept``, which then need not wait. When that waits on asyncio and is
    cancelled in the same turn of the loop in which bytes arrive, the loop reports an `InvalidStateError` on the user's
    standard error.
    """
    if isinstance(stream, UNIXSocketStream) or (
        isinstance(stream, SocketListener) and stream.extra(SocketAttribute.family) == socket.AF_UNIX
    ):
        raw = stream.extra(SocketAttribute.raw_socket)
        if raw.fileno() >= 0:  # else `receive` says that it is closed
            await anyio.wait_readable(raw)


async def until_writable(stream: object) -> None:
    """Return when something can be written to `stream`, if it is a Unix socket; see `until_readable`."""
    if isinstance(stream, UNIXSocketStream):
        raw = stream.extra(SocketAttribute.raw_socket)
        if raw.fileno() >= 0:
            await anyio.wait_writable(raw)


async def send_all(stream: ByteSendStream, message: bytes) -> None:
    """Write `message` as ``stream.send`` does, and raise what that raises; for the reason of `until_readable`."""
    if not isinstance(stream, UNIXSocketStream):
        await stream.send(message)
        return
    raw = stream.extra(SocketAttribute.raw_socket)
    left = memoryview(message)
    await anyio.lowlevel.checkpoint()
    while left:
        try:
            left = left[raw.send(left, socket.MSG_NOSIGNAL) :]
        except BlockingIOError:
            await anyio.wait_writable(raw)
        except OSError as exc:
            raise (anyio.ClosedResourceError if raw.fileno() < 0 else anyio.BrokenResourceError) from exc
