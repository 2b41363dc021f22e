"""Two linked clusters, P and D: both in this process, or P in a process of its own.

Most tests use `linked_pair` and the library as a user would. A test that must hold in both worlds uses
`owner_and_reader` and asks P by name: `SpecActor` obeys, in this process by a plain call, in the child over its socket.
Nothing here waits by sleeping: a question over a link is answered after every message before it (`flush`).

The child is ``python -m tests.spec.harness ... SETTINGS``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import anyio

import kvlink as kv
from kvlink.testing import Faults, FaultyTransport
from kvlink.transports.base import Transport
from tests.support import actor as support_actor
from tests.support.inside import link_to, used_nbytes
from tests.support.pattern import Stamp, fill
from tests.support.peer import Peer, spawn_peer

TRANSPORTS: Final = ("shm", "ucx")
WORLDS: Final = ("one process", "two processes")
P: Final = 1
D: Final = 2
LIMIT_S: Final = 30.0
"""No test takes that long; one that would hang is cancelled from within."""

LATE: Final = Faults(seed=1, delay=0.3, reorder=0.4, repeat=0.2, longest_delay_s=0.001)
LATE_VARIABLE: Final = "KVLINK_TESTS_LATE"
"""Set while the transports of a test, and of its children, are to be `LATE`."""

Desc = kv.CacheDesc


def late_if_asked(transport: Transport) -> Transport:
    """Put `LATE` around a transport where the test asks for that."""
    return FaultyTransport(transport, LATE) if LATE_VARIABLE in os.environ else transport


class Pair(NamedTuple):
    """Two linked clusters of this process."""

    prompt: kv.Cluster
    decoder: kv.Cluster

    @property
    def owner(self) -> kv.KvCacheManager:
        """The KV-cache functions of P."""
        return self.prompt.kv_cache_manager

    @property
    def reader(self) -> kv.KvCacheManager:
        """The KV-cache functions of D."""
        return self.decoder.kv_cache_manager

    async def flush(self) -> None:
        """Return when both sides have seen every message that was on its way, and the answers to them."""
        for cluster, peer in ((self.decoder, P), (self.prompt, D), (self.decoder, P)):
            await link_to(cluster, peer).ping()


@asynccontextmanager
async def cluster(
    cluster_id: int, role: kv.Role, *, pool: int | str = "1MiB", host_pool: int | str | None = None, **config: Any
) -> AsyncIterator[kv.Cluster]:
    """Run a cluster; the keywords are fields of its `ClusterConfig`."""
    async with kv.Cluster(
        cluster_id=cluster_id,
        role=role,
        pool=pool,
        host_pool=host_pool,
        config=replace(kv.ClusterConfig.from_environ(), **config),
        wrap_transport=late_if_asked,
    ) as made:
        yield made


async def link(dialler: kv.Cluster, cluster_id: int, address: str, transport: str) -> None:
    """Link and make sure that it is this transport that will be tested."""
    results = await dialler.link_clusters([kv.ClusterInfo(cluster_id, address)], timeout_s=10)
    results.raise_for_status()
    assert link_to(dialler, cluster_id).transport == transport


@asynccontextmanager
async def linked_pair(
    transport: str,
    *,
    pool: int | str = "1MiB",
    host_pool: int | str | None = None,
    roles: tuple[kv.Role, kv.Role] = (kv.Role.PROMPT, kv.Role.DECODER),
    limit_s: float = LIMIT_S,
    **config: Any,
) -> AsyncIterator[Pair]:
    """Run P and D in this process, linked over `transport`; what the body does is bounded by `limit_s`.

    Args:
        pool, host_pool: of each of them.
        roles: of P and of D, which dials.
        config: fields of both `ClusterConfig`.
    """
    with anyio.fail_after(limit_s):
        async with (
            cluster(P, roles[0], pool=pool, host_pool=host_pool, **config) as prompt,
            cluster(D, roles[1], pool=pool, host_pool=host_pool, **config) as decoder,
        ):
            await link(decoder, P, prompt.address, transport)
            yield Pair(prompt, decoder)


class Owner(Protocol):
    """P, wherever it is: `SpecActor` obeys.

    Attributes:
        cluster_id, life: in every byte that it writes.
        address: where it listens.
    """

    cluster_id: int
    life: int
    address: str

    def stamp(self, cache: int) -> Stamp:
        """Return what it writes into its cache of that handle."""

    async def call(self, name: str, **arguments: Any) -> Any:
        """Have P do something: its value, or its error."""


class Stage(NamedTuple):
    """P by name, and D in this process, linked."""

    owner: Owner
    decoder: kv.Cluster

    @property
    def reader(self) -> kv.KvCacheManager:
        """The KV-cache functions of D."""
        return self.decoder.kv_cache_manager

    async def flush(self) -> None:
        """Return when P has seen every message that D has sent, and D what P said to that."""
        for _ in range(2):
            await link_to(self.decoder, P).ping()

    def process(self) -> Peer:
        """Return P's process."""
        assert isinstance(self.owner, Peer)
        return self.owner

    async def pull(self, request: int, into: kv.KvCache, **options: Any) -> kv.TransferReport:
        """Pull the slot of a request key, and return when P has taken note."""
        return await self.pull_by(kv.CacheKey(P, request), into, **options)

    async def pull_by(
        self, key: kv.CacheKey | kv.CacheKeyByIdAndIndex, into: kv.KvCache, **options: Any
    ) -> kv.TransferReport:
        """Pull by any key, and return when P has taken note."""
        try:
            return await self.reader.pull_cache(key, into, **options)
        finally:
            await self.flush()

    async def relink(self, transport: str, address: str) -> None:
        """Link again."""
        await link(self.decoder, P, address, transport)


@asynccontextmanager
async def owner_and_reader(
    world: str,
    transport: str,
    *,
    pool: str = "1MiB",
    loop_name: str = "asyncio",
    limit_s: float = LIMIT_S,
) -> AsyncIterator[Stage]:
    """Run P in `world`, and D here; both have a pool of `pool`."""
    async with AsyncExitStack() as stack:
        stack.enter_context(anyio.fail_after(limit_s))
        owner: Owner
        if world == "one process":
            prompt = await stack.enter_async_context(cluster(P, kv.Role.PROMPT, pool=pool))
            owner = _OwnerHere(prompt)
        else:
            owner = await stack.enter_async_context(
                spawn_peer(P, pool=pool, loop_name=loop_name, python=("-W", "error", "-m", "tests.spec.harness"))
            )
        decoder = await stack.enter_async_context(cluster(D, kv.Role.DECODER, pool=pool))
        await link(decoder, P, owner.address, transport)
        yield Stage(owner, decoder)


class _OwnerHere:
    """P in this process."""

    def __init__(self, prompt: kv.Cluster) -> None:
        self.cluster_id, self.life, self.address = prompt.cluster_id, 1, prompt.address
        self._actor = SpecActor(prompt, self.life)

    def stamp(self, cache: int) -> Stamp:
        return Stamp(self.cluster_id, self.life, cache)

    async def call(self, name: str, **arguments: Any) -> Any:
        value = getattr(self._actor, name)(**arguments)
        return await value if isinstance(value, Awaitable) else value


class SpecActor(support_actor.Actor):
    """A cluster and what the tests of the spec ask of it. Caches go by their handle, as in `tests.support.actor`."""

    def __init__(self, cluster: kv.Cluster, life: int) -> None:
        super().__init__(cluster, life)
        self._tasks: list[kv.CacheTask] = []
        self._gates: list[LayerGate] = []

    def allocate_slots(
        self, num_tensors: int, shape: list[int], keys: Sequence[int | None], prefixes: Sequence[int] = ()
    ) -> int:
        """Allocate a filled cache with request keys (None: a placeholder), or with prefix keys; return its handle."""
        bound = [kv.CacheKey(P, kv.ABSENT if key is None else key) for key in keys]
        bound += [kv.CacheKey(P, kv.ABSENT, prefix_id=prefix) for prefix in prefixes]
        desc = kv.CacheDesc(num_tensors, shape, "uint8")
        return self._keep(self._cluster.kv_cache_manager.allocate_cache(desc, bound), True)

    def remove_prefix(self, prefix: int) -> None:
        """Release a prefix key."""
        self._cluster.kv_cache_manager.remove_cache_key(kv.CacheKey(P, kv.ABSENT, prefix_id=prefix))

    def used_nbytes(self) -> int:
        """Return how much of the pool is taken."""
        return used_nbytes(self._cluster)

    async def switch_role(self, role: str) -> str:
        """Become another role; return where it listens now."""
        await self._cluster.switch_role(kv.Role[role])
        return "" if role == "DECODER" else self._cluster.address

    async def push_blocks(self, model_id: int, cache: int, src: list[int], dst: list[int]) -> int:
        """Push blocks of a cache into D's; return how many bytes."""
        manager = self._cluster.kv_cache_manager
        return (await manager.push_blocks(kv.BlocksCacheKey(D, model_id), self._caches[cache], src, dst)).nbytes

    async def push_cache(self, cache_id: int, slot: int, cache: int, src_slot: int) -> int:
        """Push a slot of a cache into D's; return how many bytes."""
        key = kv.CacheKeyByIdAndIndex(D, cache_id, slot)
        return (await self._cluster.kv_cache_manager.push_cache(key, self._caches[cache], src_slot)).nbytes

    def transfer(self, cache: int, src: list[int] | None, dst: list[int] | None, configs: list[dict[str, Any]]) -> int:
        """Start a layer-wise push whose layers `open_layers` lets through; return its number.

        Args:
            configs: each has ``addresses`` and perhaps ``layers``, or ``model_id``, ``layers`` and ``dst_layers``.
        """
        made: list[kv.TransferConfig | kv.TransferWithCacheKeyConfig] = []
        for each in configs:
            layers = range(*each["layers"]) if "layers" in each else None
            if "addresses" in each:
                made.append(kv.TransferConfig(D, each["addresses"], layers, each.get("slot", 0)))
            else:
                assert layers is not None
                key = kv.BlocksCacheKey(D, each["model_id"])
                made.append(kv.TransferWithCacheKeyConfig(key, layers, range(*each["dst_layers"])))
        gate = LayerGate()
        self._gates.append(gate)
        self._tasks.append(
            self._cluster.kv_cache_manager.transfer_cache_async(self._caches[cache], gate, made, src, dst)
        )
        return len(self._tasks) - 1

    def open_layers(self, task: int, stop: int, is_good: bool = True) -> None:
        """Let the layers before `stop` through; the one after them is `is_good` or is given up."""
        self._gates[task].open(stop, is_good=is_good)

    def asked_layers(self, task: int) -> list[int]:
        """Return the layers that the synchroniser was asked for."""
        return self._gates[task].asked

    async def task_results(self, task: int, timeout_s: float) -> list[str | None]:
        """Return the task's status, then those of its configs."""
        statuses = [await self._tasks[task].synchronize(timeout_s), *await self._tasks[task].get_results(timeout_s)]
        return [None if status is None else status.name for status in statuses]


class LayerGate(kv.LayerSynchronizer):
    """Layers are computed when the test says so.

    Attributes:
        asked: the layers that it was asked for, in order.
    """

    def __init__(self, stop: int = 0) -> None:
        self.asked: list[int] = []
        self._stop = stop
        self._is_good = True
        self._moved = anyio.Event()

    def open(self, stop: int, *, is_good: bool = True) -> None:
        """Let the layers before `stop` through; with `is_good` false the next one is given up."""
        self._stop, self._is_good = stop, is_good
        self._moved.set()
        self._moved = anyio.Event()

    async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        assert timeout_in_millis is None
        self.asked.append(layer_index)
        while layer_index >= self._stop:
            if not self._is_good:
                return False
            await self._moved.wait()
        return True


class Held:
    """Movements that stand still in the middle.

    Attributes:
        reached: set when one has arrived there.
    """

    def __init__(self) -> None:
        self.reached = anyio.Event()
        self._released = anyio.Event()

    def release(self) -> None:
        """Let them go on."""
        self._released.set()

    async def pass_through(self, move: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        """Do what is held, once it is released."""
        self.reached.set()
        await self._released.wait()
        await move(*arguments)


def hold(cluster: kv.Cluster, peer: int, direction: str) -> Held:
    """Make every ``get`` or ``put`` of a link wait, after all is looked up and checked, until it is released.

    Works on the contract of transports, so for all of them.
    """
    endpoint = link_to(cluster, peer).endpoint
    held = Held()
    endpoint.immediate_nbytes = 0  # also small ones take the way that can wait
    setattr(endpoint, direction, partial(held.pass_through, getattr(endpoint, direction)))
    return held


async def refused(call: Awaitable[object], kind: type[Exception], case: object) -> None:
    """Check that `call` raises a `kind`, with LLM_PARAM_INVALID where it is an error of kvlink's; `case` says which."""
    caught: Exception | None = None
    try:
        await call
    except Exception as exc:  # looked at below
        caught = exc
    if not isinstance(caught, kind):
        raise AssertionError(f"{case}: {caught!r} instead of {kind.__name__}") from caught
    if isinstance(caught, kv.KVLinkError):
        assert caught.status is kv.StatusCode.LLM_PARAM_INVALID, case


def stamped(cache: kv.KvCache, owner: int = P) -> Stamp:
    """Fill a cache with bytes that say whose they are; return the stamp."""
    stamp = Stamp(owner, 1, cache.cache_id % 2**20)
    fill(cache.tensors, stamp)
    return stamp


def snapshot(cache: kv.KvCache) -> list[bytes]:
    """Return the contents of every tensor."""
    return [tensor.tobytes() for tensor in cache.tensors]


def main() -> None:
    """Serve as the child of a test, obeying as a `SpecActor` does."""
    sys.argv[1:] = sys.argv[-1:]
    vars(support_actor)["Actor"] = SpecActor
    vars(support_actor)["wrap_transport"] = late_if_asked
    support_actor.main()


if __name__ == "__main__":
    main()
