"""A dial that is under way, shared by all who want that link."""

from __future__ import annotations

import anyio

from kvlink.config import ClusterInfo
from kvlink.errors import KVLinkError


class Attempt:
    """One dial, and those who wait for it.

    Attributes:
        scope, dialling: end the whole attempt, or only its own connection, because the peer's has come in.
        settled, came_in: it is over; the peer's own connection has become the link.
        error: why it failed; None where there is a link.
        num_waiting: callers.
    """

    def __init__(self, info: ClusterInfo) -> None:
        self.info = info
        self.scope = anyio.CancelScope()
        self.dialling = anyio.CancelScope()
        self.settled = anyio.Event()
        self.came_in = anyio.Event()
        self.error: KVLinkError | None = None
        self.num_waiting = 0
