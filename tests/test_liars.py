"""An owner that lies about where its caches are: the caller gets a typed error, and nothing else happens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final, NamedTuple

import anyio
import anyio.to_thread
import pytest

import kvlink as kv
from kvlink.geometry import CacheGeometry, TensorRun
from kvlink.memory.regions import POOL, STATE
from kvlink.wire import Failed, Found, LookUp, Message, OpenRead, OpenWrite, Pong
from tests.support.inside import link_to
from tests.support.loops import eventually
from tests.support.pattern import Stamp, expect, fill
from tests.support.stranger import Stranger

LIAR: Final = 99
RUBBISH: Final = Stamp(250, 250, 65000)
DESC: Final = kv.CacheDesc(2, (4, 512), "uint8")
"""Of our cache; the liar has shared 8 KiB as its pool and 8 KiB of state words."""


def found(runs: tuple[TensorRun, ...] = (TensorRun(POOL, 0, 2048, 2),), **changes: Any) -> dict[str, Any]:
    """Return the fields of a `Found` that is true but for `changes`, which may be of the geometry too."""
    geometry: dict[str, Any] = {
        "num_tensors": 2,
        "num_slots": 4,
        "slot_nbytes": 512,
        "data_type": "uint8",
        "layout": None,
        "is_blocks": True,
    }
    fields: dict[str, Any] = {"cache_id": 1, "slot": 0, "word": 0, "generation": 0, "lease": 0, "addresses": ()}
    for name, value in changes.items():
        (geometry if name in geometry else fields)[name] = value
    return {**fields, "geometry": CacheGeometry(runs=runs, **geometry)}


HUGE: Final = 2**62
LIES: Final[dict[str, dict[str, Any]]] = {
    "a region that it never shares": found((TensorRun(77, 0, 2048, 2),)),
    "behind the end": found((TensorRun(POOL, 4097, 2048, 2),)),
    "far behind the end": found((TensorRun(POOL, HUGE, 2048, 2),)),
    "before the beginning": found((TensorRun(POOL, 0, -2048, 2),)),
    "a stride that leaves": found((TensorRun(POOL, 0, HUGE, 2),)),
    "a stride that wraps": found((TensorRun(POOL, 0, 2**63 - 1024, 2),)),
    "no runs": found(()),
    "more runs than tensors": found((TensorRun(POOL, 0, 2048, 2), TensorRun(POOL, 0, 2048, 2))),
    "a run of nothing": found((TensorRun(POOL, 0, 2048, 2), TensorRun(POOL, 0, 2048, 0))),
    "tensors without end": found((TensorRun(POOL, 0, 0, HUGE),), num_tensors=HUGE),
    "slots without end": found(num_slots=HUGE),
    "a giant slot": found(slot_nbytes=HUGE),
    "both giant": found(slot_nbytes=2**40, num_slots=2**40),
    "slots of nothing": found(slot_nbytes=0),
    "no slots": found(num_slots=0),
    "a state word behind the end": found(word=1024),
    "a giant state word": found(word=HUGE),
    "a generation that never was": found(generation=HUGE),
    "another data type": found(data_type="float64"),
    "ten thousand runs": found(tuple(TensorRun(POOL, 0, 0, 1) for _ in range(10_000)), num_tensors=10_000),
}
OF_SLOTS: Final[dict[str, dict[str, Any]]] = {
    "a slot that is not there": found(slot=4, is_blocks=False, lease=1),
    "a giant slot number": found(slot=HUGE, is_blocks=False, lease=1),
}
HARMLESS: Final[dict[str, dict[str, Any]]] = {
    "tensors on top of each other": found((TensorRun(POOL, 0, 0, 2),)),
    "its state words as a cache": found((TensorRun(STATE, 0, 2048, 2),)),
    "a stride below a tensor": found((TensorRun(POOL, 0, 16, 2),)),
}


class Scene(NamedTuple):
    """A cluster of ours, its cache full of rubbish, and the liar that has linked itself to it."""

    here: kv.Cluster
    cache: kv.KvCache
    liar: Stranger

    async def ask(self, call: Callable[[], Awaitable[object]], answer: Callable[[int], Message]) -> object:
        """Make a call, let the liar answer its question, and return what came of it: a report or an error."""
        outcome: list[object] = []

        async def make() -> None:
            try:
                outcome.append(await call())
            except Exception as exc:  # the test looks at it
                outcome.append(exc)

        def lie() -> None:
            while True:
                asked = self.liar.hear()
                if isinstance(asked, (LookUp, OpenRead, OpenWrite)):
                    self.liar.say(answer(asked.seq))
                    return
                assert asked is not None, "our cluster has hung up"

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(make)
                await anyio.to_thread.run_sync(lie)
        return outcome[0]

    def pull(self) -> Awaitable[object]:
        """Pull from the liar's paged cache."""
        key, manager = kv.BlocksCacheKey(LIAR), self.here.kv_cache_manager
        return manager.pull_blocks(key, self.cache, [0, 3], [1, 2], timeout_s=0.2)

    def push(self) -> Awaitable[object]:
        """Push into it."""
        key, manager = kv.BlocksCacheKey(LIAR), self.here.kv_cache_manager
        return manager.push_blocks(key, self.cache, [0, 3], [1, 2], timeout_s=0.1)

    def pull_slot(self, into: kv.KvCache) -> Awaitable[object]:
        """Pull a slot of it."""
        return self.here.kv_cache_manager.pull_cache(kv.CacheKey(LIAR, 5), into, timeout_s=0.3)


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    """Set it up; the liar hangs up at the end."""
    async with kv.Cluster(cluster_id=1, role=kv.Role.MIX, pool="1MiB") as here:
        cache = here.kv_cache_manager.allocate_blocks_cache(DESC)
        fill(cache.tensors, RUBBISH)
        with Stranger.dial(here.address) as liar:
            await anyio.to_thread.run_sync(liar.link, 1)
            await eventually(lambda: here.links, "the link")
            yield Scene(here, cache, liar)
            await here.unlink_clusters([LIAR], force=True)


@pytest.mark.parametrize(
    ("lie", "direction"),
    [*((lie, "pull") for lie in LIES), ("behind the end", "push"), ("slots without end", "push")],
)
async def test_a_lie_is_refused(lie: str, direction: str) -> None:
    """No byte of ours changes, the error is typed and names the liar, and the link or its end is all that is left."""
    async with scene() as s:
        outcome = await s.ask(s.pull if direction == "pull" else s.push, lambda seq: Found(seq=seq, **LIES[lie]))
        assert isinstance(outcome, kv.KVLinkError), outcome
        assert outcome.peer == LIAR
        assert s.cache.is_quiet()
        if not isinstance(outcome, kv.CacheNotFoundError):  # that one is found when the bytes have come
            expect(s.cache.tensors, RUBBISH)
        expect(s.cache.tensors, RUBBISH, [0, 3])
        with suppress(StopIteration):
            assert link_to(s.here, LIAR).num_operations == 0


@pytest.mark.parametrize("lie", OF_SLOTS)
async def test_a_slot_that_is_not_there_is_refused(lie: str) -> None:
    """The slot that a key is said to be must lie in the cache that is described."""
    async with scene() as s:
        slots = s.here.kv_cache_manager.allocate_cache(kv.CacheDesc(2, (4, 512), "uint8"))
        fill(slots.tensors, RUBBISH)
        outcome = await s.ask(partial(s.pull_slot, slots), lambda seq: Found(seq=seq, **OF_SLOTS[lie]))
        assert isinstance(outcome, kv.KVLinkError), outcome
        assert outcome.peer == LIAR
        expect(slots.tensors, RUBBISH)


@pytest.mark.parametrize("lie", HARMLESS)
async def test_what_hurts_only_the_liar_is_let_pass(lie: str) -> None:
    """A cache that lies somewhere odd in the liar's own shared memory can be pulled; just our blocks are written."""
    async with scene() as s:
        outcome = await s.ask(s.pull, lambda seq: Found(seq=seq, **HARMLESS[lie]))
        assert isinstance(outcome, (kv.TransferReport, kv.KVLinkError)), outcome
        expect(s.cache.tensors, RUBBISH, [0, 3])


@pytest.mark.parametrize(
    "answer", [Pong, partial(Failed, status=0, text=""), partial(Failed, status=7, text="y" * 9999)]
)
async def test_an_answer_of_another_kind(answer: Callable[..., Message]) -> None:
    """Whatever else the answer to a look-up is, the call fails typed."""
    async with scene() as s:
        outcome = await s.ask(s.pull, lambda seq: answer(seq=seq))
        assert isinstance(outcome, kv.KVLinkError), outcome
        assert outcome.peer == LIAR
        expect(s.cache.tensors, RUBBISH)
