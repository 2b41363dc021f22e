"""Frames on their way to a peer: posted without waiting, written in order by one task of the link."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import anyio
from anyio.abc import ByteStream

from kvlink.loops import send_all


class Outbox:
    """What has been posted and not written.

    Attributes:
        nbytes: of the frames that wait.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._frames: deque[bytes] = deque()
        self._has_post = anyio.Event()
        self._is_written = anyio.Event()
        self._has_ended = False

    def put(self, frame: bytes) -> None:
        """Add a frame."""
        self._frames.append(frame)
        self.nbytes += len(frame)
        self._has_post.set()

    async def write(self, stream: ByteStream, on_sent: Callable[[], None]) -> None:
        """Write frames to `stream` as they come, until it ends with an error.

        Args:
            on_sent: called after each write.
        """
        try:
            while True:
                while self._frames:
                    frames = b"".join(self._frames)
                    self._frames.clear()
                    self.nbytes = 0
                    await send_all(stream, frames)
                    on_sent()
                self._is_written.set()
                self._has_post = anyio.Event()
                await self._has_post.wait()
        finally:
            self._has_ended = True
            self._is_written.set()

    async def flush(self) -> None:
        """Return once everything that has been put is written, or cannot be any more. The caller has a deadline."""
        if self._has_ended:
            return
        self._is_written = anyio.Event()
        self._has_post.set()
        await self._is_written.wait()
