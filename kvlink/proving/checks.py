"""What is proved, step by step. Each step is an async function that returns words for the report, or raises."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import anyio
import numpy as np

from kvlink.caches.kvcache import KvCache
from kvlink.cluster import Cluster
from kvlink.errors import KVLinkError, LinkLostError, NotLinkedError
from kvlink.keys import BlocksCacheKey
from kvlink.proving.far import Far, FarError
from kvlink.proving.layout import BLOCK_NBYTES, NUM_TENSORS, desc_of
from kvlink.proving.pattern import count_wrong, fill
from kvlink.report import TransferReport

LINK_TIMEOUT_S: Final = 30.0
DEATH_LIMIT_S: Final = 5.0
"""By then a killed target must have ended what was in flight: the default of ``ClusterConfig.liveness_s``."""
_QUIET_S: Final = 0.3

STEADY: Final = 7001
"""The cluster id of the target that lives through everything."""
VICTIM: Final = 7002
OURS: Final = 7000
WRITER: Final = 1
OUR_WRITER: Final = 2


class ProofError(Exception):
    """Something that was to be proved is not so."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one step ended.

    Args:
        state: ``passed``, ``failed`` or ``skipped``.
        found: in words.
        rows: numbers, a dict per line of a table.
    """

    name: str
    state: str
    found: str
    rows: Sequence[dict[str, Any]] = field(default_factory=tuple)


class Scene:
    """The prover's cluster, its caches (one per size of block), and the other side."""

    def __init__(self, far: Far, here: Cluster, size_nbytes: int, *, seed: int) -> None:
        self.far = far
        self.here = here
        self.chance = Random(seed)
        manager = here.kv_cache_manager
        self.caches: list[KvCache] = [manager.allocate_blocks_cache(desc_of(n, size_nbytes)) for n in BLOCK_NBYTES]

    def scatter(self, number: int, count: int | None = None) -> tuple[list[int], list[int]]:
        """Return two different random orders of `count` blocks of cache `number`, all of them if None."""
        num_blocks = self.caches[number].desc.num_slots
        blocks = list(range(num_blocks))
        count = num_blocks if count is None else min(count, num_blocks)
        return self.chance.sample(blocks, count), self.chance.sample(blocks, count)

    async def start(self, cluster_id: int) -> None:
        """Start a target and link to it."""
        info = await self.far.start(cluster_id, writer=WRITER)
        (await self.here.link_clusters([info], timeout_s=LINK_TIMEOUT_S)).raise_for_status()

    async def pull(
        self, cluster_id: int, number: int, theirs: Sequence[int], ours: Sequence[int], **options: Any
    ) -> TransferReport:
        """Pull blocks `theirs` of a target's cache into `ours`."""
        key = BlocksCacheKey(cluster_id, number)
        return await self.here.kv_cache_manager.pull_blocks(key, self.caches[number], theirs, ours, **options)

    async def push(
        self, cluster_id: int, number: int, ours: Sequence[int], theirs: Sequence[int], **options: Any
    ) -> TransferReport:
        """Push our blocks into a target's cache."""
        key = BlocksCacheKey(cluster_id, number)
        return await self.here.kv_cache_manager.push_blocks(key, self.caches[number], ours, theirs, **options)

    def clear(self, number: int) -> None:
        """Make our cache hold nothing that anybody writes."""
        for tensor in self.caches[number].tensors:
            tensor[:] = 0xA5

    def expect(self, number: int, ours: Sequence[int], theirs: Sequence[int], writer: int = WRITER) -> None:
        """Check every byte of `ours`. Raises `ProofError`."""
        wrong = count_wrong(self.caches[number].tensors, writer, ours, theirs)
        if wrong:
            raise ProofError(f"{wrong} blocks of {BLOCK_NBYTES[number]} bytes came with wrong bytes")


async def check_link(scene: Scene) -> str:
    """Link to a target; say over what, and why over that."""
    info = await scene.far.start(STEADY, writer=WRITER)
    started = time.perf_counter()
    (await scene.here.link_clusters([info], timeout_s=LINK_TIMEOUT_S)).raise_for_status()
    took_ms = (time.perf_counter() - started) * 1000
    link = scene.here.links[0]
    return f"linked over {link.transport} in {took_ms:.1f} ms ({link.reason})"


async def check_bytes(scene: Scene) -> str:
    """Pull and push every block of every size in random order; every byte is looked at, on the side that received."""
    total = 0
    for number in range(len(BLOCK_NBYTES)):
        scene.clear(number)
        theirs, ours = scene.scatter(number)
        total += (await scene.pull(STEADY, number, theirs, ours)).nbytes
        scene.expect(number, ours, theirs)
        fill(scene.caches[number].tensors, OUR_WRITER)
        ours, theirs = scene.scatter(number)
        total += (await scene.push(STEADY, number, ours, theirs)).nbytes
        for first in range(0, len(ours), 1024):
            sent, landed = ours[first : first + 1024], theirs[first : first + 1024]
            wrong = await scene.far.count_wrong(STEADY, number, OUR_WRITER, landed, sent)
            if wrong:
                raise ProofError(f"{wrong} blocks of {BLOCK_NBYTES[number]} bytes were pushed with wrong bytes")
    return f"{total} bytes in scattered blocks of {len(BLOCK_NBYTES)} sizes, pulled and pushed, all right"


async def check_one_sided(scene: Scene) -> str:
    """Stop the target's process; pulls and pushes that need nothing of it must complete, with the right bytes."""
    await scene.start(VICTIM)
    lengths = []
    warm, number = ([0], [0]), 2
    await scene.pull(VICTIM, number, *warm)  # where its cache is, and the right to write into it, are asked for once
    await scene.push(VICTIM, number, *warm)
    await scene.far.stop(VICTIM)
    try:
        scene.clear(number)
        theirs, ours = scene.scatter(number, 256)
        theirs = [block for block in theirs if block != 0]  # block 0 was pushed
        ours = ours[: len(theirs)]
        started = time.perf_counter()
        try:
            await scene.pull(VICTIM, number, theirs, ours, timeout_s=10.0)
            lengths.append(time.perf_counter() - started)
            scene.expect(number, ours, theirs)
            fill(scene.caches[number].tensors, OUR_WRITER)
            started = time.perf_counter()
            await scene.push(VICTIM, number, ours, theirs, timeout_s=10.0)
            lengths.append(time.perf_counter() - started)
        except KVLinkError as exc:
            raise ProofError(f"nothing moves while the target is stopped: {type(exc).__name__}: {exc}") from exc
    finally:
        await scene.far.go(VICTIM)
    wrong = await scene.far.count_wrong(VICTIM, number, OUR_WRITER, theirs, ours)
    if wrong:
        raise ProofError(f"{wrong} blocks that were pushed into the stopped target are wrong")
    nbytes = len(ours) * NUM_TENSORS * BLOCK_NBYTES[number]
    shown = " and ".join(f"{length * 1000:.1f} ms" for length in lengths)
    return f"with the target stopped, {nbytes} bytes were pulled and pushed in {shown}"


async def check_cancel(scene: Scene) -> str:
    """Cancel pulls at random moments: when the await has ended, no byte of the destination changes any more."""
    number, cancelled, rounds = 4, 0, 20
    theirs, ours = scene.scatter(number)
    started = time.perf_counter()
    await scene.pull(STEADY, number, theirs, ours)
    usual_s = time.perf_counter() - started
    for _ in range(rounds):
        theirs, ours = scene.scatter(number)
        with anyio.move_on_after(scene.chance.random() * usual_s) as scope:
            await scene.pull(STEADY, number, theirs, ours)
        cancelled += scope.cancelled_caught
        await _expect_quiet(scene, number, _QUIET_S / 10)
    return f"{cancelled} of {rounds} pulls were cancelled under way; nothing arrived after any of them"


async def check_death(scene: Scene, *, rounds: int) -> str:
    """Kill targets under pulls: one typed error in time, no byte afterwards, and the next life is welcome."""
    longest = max([await _kill_one(scene) for _ in range(rounds)], default=0.0)
    theirs, ours = scene.scatter(1)
    await scene.pull(STEADY, 1, theirs, ours)  # the other link never noticed
    return f"{rounds} targets killed under pulls; the last word came within {longest:.2f} s; other links went on"


async def _kill_one(scene: Scene) -> float:
    """Kill a target while it is pulled from; return how long after that the pulls failed."""
    await scene.start(VICTIM)
    await scene.pull(VICTIM, 4, [0], [0])
    killed_at = 0.0

    async def kill() -> None:
        nonlocal killed_at
        await anyio.sleep(scene.chance.random() * 0.1)
        killed_at = time.perf_counter()
        await scene.far.kill(VICTIM)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kill)
        ended_at = await _pull_until_lost(scene)
    took_s = ended_at - killed_at
    if took_s > DEATH_LIMIT_S:
        raise ProofError(f"a pull from a killed target ended only after {took_s:.1f} s")
    await _expect_quiet(scene, 4, _QUIET_S)
    return took_s


async def _expect_quiet(scene: Scene, number: int, for_s: float) -> None:
    """Check that no byte of our cache is written by anybody for a while."""
    tensors = scene.caches[number].tensors
    for tensor in tensors:
        tensor[:] = 0x5A
    await anyio.sleep(for_s)
    if not all(np.all(tensor == 0x5A) for tensor in tensors):
        raise ProofError("bytes arrived after the call that asked for them had ended")


async def _pull_until_lost(scene: Scene) -> float:
    """Pull until that fails because of the target's death, and return when it did."""
    deadline = time.perf_counter() + DEATH_LIMIT_S * 4
    while time.perf_counter() < deadline:
        theirs, ours = scene.scatter(4)
        try:
            await scene.pull(VICTIM, 4, theirs, ours)
        except (LinkLostError, NotLinkedError):
            return time.perf_counter()
    raise ProofError("pulls from a killed target go on and on")


async def run_step(
    name: str, limit_s: float, step: Callable[[], Awaitable[str | Outcome]], emit: Callable[[Outcome], None]
) -> bool:
    """Run one step, bounded, and emit how it ended; return whether it passed. Cancellation passes through."""
    try:
        with anyio.move_on_after(limit_s) as scope:
            found = await step()
        if scope.cancelled_caught:
            emit(Outcome(name, "failed", f"did not end within {limit_s:g} s"))
            return False
    except Exception as exc:  # whatever it is, it is a line of the report
        inner: BaseException = exc
        while getattr(inner, "exceptions", ()):
            inner = inner.exceptions[0]  # type: ignore[attr-defined]  # a group, which Python 3.10 has not got
        words = str(inner) if isinstance(inner, (ProofError, FarError)) else f"{type(inner).__name__}: {inner}"
        emit(Outcome(name, "failed", words))
        return False
    emit(found if isinstance(found, Outcome) else Outcome(name, "passed", found))
    return True


@asynccontextmanager
async def beside(ticks: list[float]) -> AsyncIterator[None]:
    """Measure how late a 1 ms ticker is on this loop while the body runs: seconds, into `ticks`."""

    async def tick() -> None:
        while True:
            before = time.perf_counter()
            await anyio.sleep(0.001)
            ticks.append(time.perf_counter() - before - 0.001)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tick)
        yield
        tasks.cancel_scope.cancel()
