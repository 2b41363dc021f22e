"""Making in a thread what must be given back, so that whoever gives up waiting for it keeps none of it.

What is made must not be the thread's *result*: a native asyncio cancellation that comes between the thread's end and
the waiting task's turn leaves a result in the traceback of the cancelled task, for as long as anybody holds that task;
and nobody gives it back. So the two sides meet under a lock: it is handed to one who still wants it, or given back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import anyio.to_thread

from kvlink.errors import FeatureNotEnabledError

_T = TypeVar("_T")


async def make_in_thread(make: Callable[[], _T], give_back: Callable[[_T], object]) -> _T:
    """Return what `make` returns, called in a thread; raise what it raises.

    Cancellation: what has been made, or is being made, is given back, perhaps in the thread.

    Raises:
        FeatureNotEnabledError: the host has no thread to give.
    """
    handing_over = _HandingOver(give_back)
    has_begun = threading.Event()

    def offer() -> None:
        has_begun.set()
        handing_over.offer(make())

    try:
        await anyio.to_thread.run_sync(offer)
    except BaseException as exc:
        handing_over.refuse()
        if isinstance(exc, RuntimeError) and not has_begun.is_set():
            raise FeatureNotEnabledError(
                "this host gives the process no thread to reserve memory or to start UCX in; raise its limit (pids.max "
                "of the control group, `ulimit -u`)"
            ) from exc
        raise
    return handing_over.take()


class _HandingOver(Generic[_T]):
    """Something on its way from the thread that made it to the task that wants it."""

    def __init__(self, give_back: Callable[[_T], object]) -> None:
        self._give_back = give_back
        self._lock = threading.Lock()
        self._is_wanted = True
        self._made: list[_T] = []

    def offer(self, made: _T) -> None:
        """Hand it over, or give it back if nobody wants it any more. In the thread."""
        with self._lock:
            if self._is_wanted:
                self._made.append(made)
                return
        self._give_back(made)

    def take(self) -> _T:
        """Return what was offered."""
        with self._lock:
            return self._made.pop()

    def refuse(self) -> None:
        """Want it no more, whether it was offered or will be."""
        with self._lock:
            self._is_wanted = False
            made, self._made = self._made, []
        for each in made:
            self._give_back(each)
