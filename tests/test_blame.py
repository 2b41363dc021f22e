"""Every error of a link or a movement names the peer, the phase, the object and the next step: a table of cases."""

from __future__ import annotations

import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Final, NamedTuple

import anyio
import pytest

import kvlink as kv
from kvlink.testing import Faults, FaultyTransport
from tests.support.inside import link_to

DESC: Final = kv.CacheDesc(4, (8, 1024), "uint8")
KEY: Final = kv.BlocksCacheKey(1)


class Scene(NamedTuple):
    """Cluster 1 with a keyed cache, and cluster 2 with one that is linked to it."""

    owner: kv.Cluster
    here: kv.Cluster
    theirs: kv.KvCache
    ours: kv.KvCache
    slots: kv.KvCache

    @property
    def manager(self) -> kv.KvCacheManager:
        """Of cluster 2."""
        return self.here.kv_cache_manager

    def end_their_cache(self) -> None:
        """Cluster 1 gives its cache back."""
        self.owner.kv_cache_manager.deallocate_cache(self.theirs)


@asynccontextmanager
async def scene(faults: Faults | None = None) -> AsyncIterator[Scene]:
    """Set it up, with faults on cluster 2's side."""
    async with AsyncExitStack() as stack:
        stack.enter_context(anyio.fail_after(30))
        owner = await stack.enter_async_context(kv.Cluster(cluster_id=1, role=kv.Role.MIX, pool="1MiB"))
        wrap = None if faults is None else (lambda transport: FaultyTransport(transport, faults))
        here = await stack.enter_async_context(
            kv.Cluster(cluster_id=2, role=kv.Role.MIX, pool="1MiB", wrap_transport=wrap)
        )
        theirs = owner.kv_cache_manager.allocate_blocks_cache(DESC, KEY)
        (await here.link_clusters([kv.ClusterInfo(1, owner.address)])).raise_for_status()
        ours = here.kv_cache_manager.allocate_blocks_cache(DESC)
        yield Scene(owner, here, theirs, ours, here.kv_cache_manager.allocate_cache(DESC))


async def pull(s: Scene, timeout_s: float = 0.1) -> object:
    """Pull two blocks."""
    return await s.manager.pull_blocks(KEY, s.ours, [0, 1], [5, 3], timeout_s=timeout_s)


async def push(s: Scene, timeout_s: float = 0.1) -> object:
    """Push two blocks."""
    return await s.manager.push_blocks(KEY, s.ours, [0, 1], [5, 3], timeout_s=timeout_s)


async def pull_slot(s: Scene, timeout_s: float = 0.1) -> object:
    """Pull a slot that is no slot of anything."""
    return await s.manager.pull_cache(kv.CacheKey(1, 77), s.slots, timeout_s=timeout_s)


async def push_slot(s: Scene) -> object:
    """Push a slot to a slot that the peer's cache does not have."""
    theirs = s.owner.kv_cache_manager.allocate_cache(DESC)
    return await s.manager.push_cache(kv.CacheKeyByIdAndIndex(1, theirs.cache_id, 99), s.slots)


async def push_layers(s: Scene) -> object:
    """Push both layers of our cache into the peer's."""

    class Now(kv.LayerSynchronizer):
        async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
            return True

    config = kv.TransferWithCacheKeyConfig(KEY, range(2), range(2))
    return await s.manager.transfer_cache_async(s.ours, Now(), [config], [0, 1], [5, 3])


async def unlinked(move: Callable[[Scene], Awaitable[object]], s: Scene) -> object:
    """Move after the link has ended."""
    await s.here.unlink_clusters([1])
    return await move(s)


async def without_the_cache(move: Callable[[Scene], Awaitable[object]], s: Scene) -> object:
    """Move to or from a cache that the peer does not have any more."""
    s.end_their_cache()
    return await move(s)


async def while_it_ends(move: Callable[[Scene], Awaitable[object]], operation: str, s: Scene) -> object:
    """Have the peer's cache end just before the bytes move."""
    endpoint = link_to(s.here, 1).endpoint
    inner = getattr(endpoint, operation)

    async def end_first(*arguments: Any) -> None:
        s.end_their_cache()
        await inner(*arguments)

    setattr(endpoint, operation, end_first)
    return await move(s)


async def as_the_link_is_lost(move: Callable[..., Awaitable[object]], s: Scene) -> object:
    """Lose the link while a movement waits for a completion that never comes."""
    caught: list[kv.KVLinkError] = []

    async def lose() -> None:
        await anyio.sleep(0.02)
        link_to(s.here, 1).lose(kv.LinkLostError("cluster 1 was unplugged; link again", peer=1))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lose)
        try:
            await move(s, 5)
        except kv.KVLinkError as exc:
            caught.append(exc)
    raise caught[0]


async def with_other_blocks(move: Callable[[Scene], Awaitable[object]], s: Scene) -> object:
    """Move between caches whose blocks differ in size."""
    other = s.manager.allocate_blocks_cache(kv.CacheDesc(4, (8, 512), "uint8"))
    return await move(s._replace(ours=other))


async def link_to_nobody(s: Scene) -> object:
    """Link to a port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (await s.here.link_clusters([kv.ClusterInfo(7, f"127.0.0.1:{port}")])).raise_for_status()
    return None


async def link_to_another(s: Scene) -> object:
    """Link to a cluster that answers with another id."""
    (await s.here.link_clusters([kv.ClusterInfo(7, s.owner.address)])).raise_for_status()
    return None


async def link_to_a_mute(s: Scene) -> object:
    """Link to somebody who accepts and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        info = kv.ClusterInfo(7, f"127.0.0.1:{server.getsockname()[1]}")
        (await s.here.link_clusters([info], timeout_s=0.1)).raise_for_status()
    return None


async def probe_nobody(s: Scene) -> object:
    """Ask for a sign of life where there is no link."""
    (await s.here.check_link_status([7])).raise_for_status()
    return None


def dropping(operation: str) -> Faults:
    """Completions of one operation never come."""
    return Faults(drop=1.0, operations=frozenset({operation}))


def failing(operation: str) -> Faults:
    """One operation fails."""
    return Faults(fail=1.0, seed=4, operations=frozenset({operation}))


class Case(NamedTuple):
    """What is done, and what its error must say: `words` is searched for in its text, the peer's number is too."""

    do: Callable[[Scene], Awaitable[object]]
    kind: type[kv.KVLinkError]
    phase: str
    words: str
    faults: Faults | None = None
    peer: int = 1


_LATE, _GONE, _NONE = kv.TransferTimeoutError, kv.LinkLostError, kv.CacheNotFoundError
CASES: Final = {
    "pull without a link": Case(partial(unlinked, pull), kv.NotLinkedError, "look-up", "link_clusters"),
    "push without a link": Case(partial(unlinked, push), kv.NotLinkedError, "look-up", "link_clusters"),
    "pull_cache without a link": Case(partial(unlinked, pull_slot), kv.NotLinkedError, "look-up", "link_clusters"),
    "layers without a link": Case(partial(unlinked, push_layers), kv.NotLinkedError, "look-up", "link_clusters"),
    "pull of no cache": Case(partial(without_the_cache, pull), _NONE, "look-up", "BlocksCacheKey|model"),
    "push to no cache": Case(partial(without_the_cache, push), _NONE, "look-up", "BlocksCacheKey|model"),
    "pull_cache of no key": Case(pull_slot, _NONE, "look-up", "77"),
    "push_cache to no slot": Case(push_slot, _NONE, "look-up", "no slot 99"),
    "layers to no cache": Case(partial(without_the_cache, push_layers), _NONE, "look-up", "BlocksCacheKey|model"),
    "pull of other blocks": Case(partial(with_other_blocks, pull), kv.MismatchError, "look-up", "512.*1024|1024.*512"),
    "push of other blocks": Case(partial(with_other_blocks, push), kv.MismatchError, "look-up", "512.*1024|1024.*512"),
    "pull: no answer": Case(pull, _LATE, "look-up", "event loop", dropping("reach")),
    "push: no answer": Case(push, _LATE, "look-up", "event loop", dropping("reach")),
    "pull: late bytes": Case(pull, _LATE, "transfer", "did not end in time; see the report", dropping("get")),
    "push: late bytes": Case(push, _LATE, "transfer", "did not end in time; see the report", dropping("put")),
    "pull: late word": Case(pull, _LATE, "settle", "nothing is known", dropping("load_word")),
    "push: late word": Case(push, _LATE, "settle", "nothing is known", dropping("load_word")),
    "pull: transport fails": Case(pull, kv.TransportError, "transfer", "get failed", failing("get")),
    "push: transport fails": Case(push, kv.TransportError, "transfer", "put failed", failing("put")),
    "layers: transport fails": Case(push_layers, kv.TransportError, "transfer", "put failed", failing("put")),
    "pull: no way to the memory": Case(pull, kv.TransportError, "look-up", "reach failed", failing("reach")),
    "pull: ends in the middle": Case(partial(while_it_ends, pull, "get"), _NONE, "settle", "ended", Faults()),
    "push: ends in the middle": Case(partial(while_it_ends, push, "put"), _NONE, "settle", "ended", Faults()),
    "layers: ends in the middle": Case(partial(while_it_ends, push_layers, "put"), _NONE, "settle", "ended", Faults()),
    "pull: link lost": Case(partial(as_the_link_is_lost, pull), _GONE, "transfer", "link again", dropping("get")),
    "push: link lost": Case(partial(as_the_link_is_lost, push), _GONE, "transfer", "link again", dropping("put")),
    "link to nobody": Case(link_to_nobody, kv.LinkError, "dial", r"127\.0\.0\.1:\d+", peer=7),
    "link to another": Case(
        link_to_another, kv.HandshakeError, "hello", "cluster id does not match: ours is 1 .* theirs is 7", peer=7
    ),
    "link to a mute": Case(link_to_a_mute, _LATE, "dial", r"127\.0\.0\.1:\d+ did not finish linking", peer=7),
    "probe of nobody": Case(probe_nobody, kv.NotLinkedError, "look-up", "link_clusters", peer=7),
}


@pytest.mark.parametrize("name", CASES)
async def test_an_error_says_who_when_what_and_what_next(name: str) -> None:
    """Peer, phase and text of each error are what the table says."""
    case = CASES[name]
    async with scene(case.faults) as s:
        with pytest.raises(case.kind) as caught:
            await case.do(s)
        error = caught.value
        assert (error.peer, error.phase) == (case.peer, case.phase), error
        assert re.search(case.words, str(error)), error
        assert re.search(rf"\bcluster {case.peer}\b|cluster id", str(error)), error


async def claim(s: Scene) -> object:
    """Use a ticket of cluster 1."""
    ticket = s.owner.kv_cache_manager.expect_blocks(s.theirs, [0, 1])
    return await s.manager.push_blocks(ticket.token, s.ours, [0, 1], [], timeout_s=0.1)


@pytest.mark.parametrize(("operation", "phase"), [("reach", "look-up"), ("put", "transfer"), ("load_word", "settle")])
async def test_an_error_of_a_ticket_says_so_too(operation: str, phase: str) -> None:
    """As the table, for a push by ticket over a transport that fails in one way or the other."""
    async with scene(failing(operation)) as s:
        with pytest.raises(kv.TransportError) as caught:
            await claim(s)
        assert caught.value.peer == 1
        assert caught.value.phase == phase, caught.value
        assert "cluster 1" in str(caught.value)
