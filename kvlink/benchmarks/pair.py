"""The initiator's view of the two processes."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, Final, TypeAlias

import anyio
import numpy as np
from anyio import to_thread

from kvlink.benchmarks.accounting import cpu_of
from kvlink.benchmarks.scenarios import READ, BlockIds, Request, Scenario
from kvlink.benchmarks.sides import Order, Places, Side, block_addresses, open_side
from kvlink.benchmarks.target import TARGET_ID
from kvlink.config import ClusterInfo
from kvlink.geometry import Role
from kvlink.keys import BlocksCacheKey
from kvlink.memory.pool import populate

INITIATOR_ID: Final = 2
_ANSWER_WITHIN_S: Final = 120.0
_QUIT_WITHIN_S: Final = 15.0

Mover: TypeAlias = Callable[[BlocksCacheKey, Any, BlockIds, BlockIds], Awaitable[object]]


class Target:
    """The other process.

    Args:
        order: what it is to be.
    """

    def __init__(self, order: Order) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvlink.benchmarks.target", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._channel = Connection(ours.detach())
        self._channel.send(order)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def receive(self) -> Any:
        """Return its next answer.

        Raises:
            EOFError: it has died; what it said is on stderr.
            TimeoutError: it does not answer.
        """
        with anyio.fail_after(_ANSWER_WITHIN_S):
            return await to_thread.run_sync(self._channel.recv, abandon_on_cancel=True)

    async def ask(self, name: str, *arguments: object) -> Any:
        """Let it do something, while our loop stays free: it may need us, to give a lease back."""
        self._channel.send((name, *arguments))
        return await self.receive()

    def close(self) -> None:
        """End it, by force if it does not go. Idempotent."""
        with suppress(OSError):
            self._channel.send(("quit",))
        try:
            self._process.wait(_QUIT_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._channel.close()


class Mapping:
    """The target's memory, mapped once more for the floor, which must not wait for what kvlink maps and when."""

    def __init__(self, places: Places) -> None:
        fd = os.open(f"/proc/{places.pid}/fd/{places.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._bytes = np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=np.uint8)
        finally:
            os.close(fd)
        populate(self._bytes, for_writing=True)
        self.address = int(self._bytes.ctypes.data)


class Pair:
    """Initiator and target, linked. Made by `open_pair`.

    Attributes:
        side: ours.
        target: theirs.
        setup: seconds of the parts of the making, by name; the target's begin with ``target_``.
    """

    def __init__(self, side: Side, target: Target) -> None:
        self.side = side
        self.target = target
        self.key = BlocksCacheKey(TARGET_ID)
        self.setup: dict[str, float] = {}
        self._mapping: Mapping | None = None
        self._places: Places | None = None

    async def allocate(self, scenario: Scenario) -> None:
        """Make the caches of a scenario on both sides, in place of those before."""
        await self.side.allocate(scenario)
        self._places, setup = await self.target.ask("allocate", scenario)
        self.setup = {
            **{f"initiator_{name}": seconds for name, seconds in self.side.setup.items()},
            **{f"target_{name}": seconds for name, seconds in setup.items()},
        }

    def floors(self, op: str, requests: Iterable[Request]) -> list[Callable[[], None]]:
        """Return a call per request that copies its blocks by ``memcpy``."""
        assert self._places is not None
        if self._mapping is None:
            self._mapping = Mapping(self._places)
        native, nbytes = self.side.native, self.side.scenario.block_nbytes
        theirs = [self._mapping.address + offset for offset in self._places.offsets]
        calls = []
        for source, target in requests:
            if op == READ:
                ends = self.side.addresses(target), block_addresses(theirs, source, nbytes)
            else:
                ends = block_addresses(theirs, target, nbytes), self.side.addresses(source)
            calls.append(native.copy(*ends, nbytes))
        return calls

    def mover(self, op: str) -> Mover:
        """Return kvlink's call for READ or WRITE."""
        manager = self.side.cluster.kv_cache_manager
        return manager.pull_blocks if op == READ else manager.push_blocks

    async def fill_source(self, op: str, seed: int) -> None:
        """Write the pattern into the side that is read."""
        if op == READ:
            await self.target.ask("fill", seed)
        else:
            self.side.fill(seed)

    async def clear(self, op: str, blocks: BlockIds) -> None:
        """Zero these blocks of the side that is written."""
        if op == READ:
            self.side.clear(blocks)
        else:
            await self.target.ask("clear", blocks)

    async def count_wrong(self, op: str, request: Request, seed: int) -> int:
        """Return how many of the blocks that were written are not what they must be."""
        if op == READ:
            return self.side.count_wrong(request.target, request.source, seed)
        wrong: int = await self.target.ask("count_wrong", request.target, request.source, seed)
        return wrong

    def target_cpu_s(self) -> float:
        """CPU seconds of the target so far."""
        return cpu_of(self.target.pid)

    def own_cpu_s(self) -> float:
        """CPU seconds of both processes so far."""
        return time.process_time() + self.target_cpu_s()


@asynccontextmanager
async def open_pair(order: Order, scenario: Scenario) -> AsyncIterator[Pair]:
    """Start a target, make the caches of `scenario` on both sides, and link to it.

    Raises:
        EOFError: the target has died.
        KVLinkError: something of kvlink's failed.
    """
    target = Target(order)
    try:
        async with open_side(order, cluster_id=INITIATOR_ID, role=Role.DECODER) as side:
            address, _ = await target.receive()
            pair = Pair(side, target)
            await pair.allocate(scenario)
            started = time.perf_counter()
            results = await side.cluster.link_clusters([ClusterInfo(TARGET_ID, address)], timeout_s=30)
            results.raise_for_status()
            pair.setup["initiator_connect_s"] = time.perf_counter() - started
            yield pair
    finally:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(target.close)
