"""A death watch on a process of this host."""

from __future__ import annotations

import logging
import os

import anyio

_log = logging.getLogger(__name__)


class PidfdWatch:
    """Waits on a pidfd of its own; without one, for ever.

    Args:
        fd: of the process, duplicated; None where the kernel has none to give. Where this process is out of descriptors
            there is no watch either: whoever has it must live with a death that nobody reports.
    """

    def __init__(self, fd: int | None) -> None:
        self._fd: int | None = None
        if fd is not None:
            try:
                self._fd = os.dup(fd)
            except OSError as exc:
                _log.warning("a process cannot be watched: %s", str(exc))

    async def wait(self) -> None:
        """See `DeathWatch`."""
        if self._fd is not None:
            try:
                await anyio.wait_readable(self._fd)
                return
            except OSError as exc:  # out of what epoll keeps for each
                _log.warning("a process cannot be watched: %s", str(exc))
        await anyio.sleep_forever()

    def close(self) -> None:
        """See `DeathWatch`."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
