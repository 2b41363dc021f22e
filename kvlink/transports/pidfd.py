"""A death watch on a process of this host."""

from __future__ import annotations

import os

import anyio


class PidfdWatch:
    """Waits on a pidfd of its own; without one, for ever.

    Args:
        fd: owned from now on; None where the kernel has none to give.
    """

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    async def wait(self) -> None:
        """See `DeathWatch`."""
        if self._fd is None:
            await anyio.sleep_forever()
        else:
            await anyio.wait_readable(self._fd)

    def close(self) -> None:
        """See `DeathWatch`."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
