"""The one place where event loops differ: waking one from another thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

CallSoon = Callable[[Callable[[], Any]], Any]


def current_call_soon() -> CallSoon:
    """Return a function that, from any thread, makes the running loop (asyncio, uvloop or trio) call another soon."""
    try:
        return asyncio.get_running_loop().call_soon_threadsafe
    except RuntimeError:
        import trio

        return trio.lowlevel.current_trio_token().run_sync_soon
