"""What all endpoints of one cluster share: the worker, the registrations, and room for the words that they load."""

from __future__ import annotations

from typing import Any, Final

import anyio
import numpy as np
from numpy.typing import NDArray

from kvlink.memory.regions import LocalRegion
from kvlink.memory.stateregion import WORD_NBYTES
from kvlink.transports.ucx.connection import WorkerEndpoint
from kvlink.transports.ucx.registry import Registered, Registry
from kvlink.transports.ucx.requests import Group, Transfer
from kvlink.transports.ucx.worker import Worker
from kvlink.ucxconfig import UcxConfig

_NUM_WORDS: Final = 4096

MAX_LOADS: Final = 128
"""Over one endpoint at a time: a peer that answers none of them takes no more places from the others."""


class Words:
    """Places for words of peers, each for one load at a time.

    Attributes:
        nowhere: a place for words that nobody looks at.
        now: a place for words that are loaded before anything else happens.

    Args:
        memory: of `Words.make_memory`.
        registered: the same, as UCX knows it.
    """

    def __init__(self, memory: NDArray[np.uint64], registered: Registered) -> None:
        self.registered = registered
        self.nowhere, self.now = 0, 1
        self._memory = memory
        self._free = list(range(2, len(memory)))
        self._freed = anyio.Event()

    @classmethod
    def make_memory(cls) -> NDArray[np.uint64]:
        """Return memory for all places."""
        return np.zeros(_NUM_WORDS, np.uint64)

    @classmethod
    def region_of(cls, memory: NDArray[np.uint64]) -> LocalRegion:
        """Return that memory as something to register."""
        return LocalRegion(memory.view(np.uint8))

    async def take(self) -> int:
        """Return a place; the caller gives it back. Waits while all are taken."""
        while not self._free:
            await self._freed.wait()
        return self._free.pop()

    def give_back(self, place: int) -> None:
        """Free a place that nothing writes to any more."""
        self._free.append(place)
        self._freed.set()
        self._freed = anyio.Event()

    def address_of(self, place: int) -> int:
        """Return where a place is."""
        return self.registered.address + place * WORD_NBYTES

    def load(self, connection: WorkerEndpoint, place: int, address: int, rkey: Any) -> Transfer:
        """Return the transfer that loads the peer's word at `address` into a place."""
        return Transfer(
            connection,
            is_put=False,
            local=[self.address_of(place)],
            nbytes=[WORD_NBYTES],
            remote=[address],
            groups=[Group(1, self.registered.memh, rkey)],
            keep=self,
        )

    def value(self, place: int) -> int:
        """Return what was loaded into a place."""
        return int(self._memory[place])


class Services:
    """One per cluster; see `UcxTransport.start`.

    Attributes:
        is_one_sided: this UCX, with these settings, needs no help of the peer.
        first_regions: those that every peer is told of.
        longest_nbytes: of one request.
        inline_nbytes: a transfer up to this size is tried on the event loop.
    """

    def __init__(
        self,
        worker: Worker,
        registry: Registry,
        words: Words,
        config: UcxConfig,
        *,
        is_one_sided: bool,
        first_regions: tuple[int, ...],
        longest_nbytes: int,
        inline_nbytes: int,
    ) -> None:
        self.worker = worker
        self.registry = registry
        self.words = words
        self.config = config
        self.is_one_sided = is_one_sided
        self.first_regions = first_regions
        self.longest_nbytes = longest_nbytes
        self.inline_nbytes = inline_nbytes
