"""Links that come back by themselves: after restarts, with growing waits, and not after an unlink."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import anyio
import pytest

import kvlink as kv
from kvlink.links.events import LinkEventStream
from kvlink.links.relink import Relinker
from kvlink.report import LinkResult
from tests.support.loops import asyncio_and_trio, every_loop, on_loops
from tests.support.pattern import Stamp, expect
from tests.support.peer import PATHS, REPOSITORY, spawn_peer
from tests.test_events import is_silent, take

DESC = kv.CacheDesc(2, (8, 4096), "uint8")
QUICK = {"relink_min_s": 0.004, "relink_max_s": 0.02}


def cluster(cluster_id: int, role: str = "DECODER", **config: Any) -> kv.Cluster:
    """Return a small cluster that links again quickly."""
    settings = kv.ClusterConfig(**{**QUICK, **config})
    return kv.Cluster(cluster_id=cluster_id, role=kv.Role[role], pool="1MiB", config=settings)


def free_address() -> str:
    """Return an address where nobody listens now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


class Lives:
    """Cluster 1 in one process after the other, at one address: see `tests.programs.lives`."""

    def __init__(self, address: str) -> None:
        command = [sys.executable, "-m", "tests.programs.lives", address]
        self.num = 0
        self._program = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY, env={**os.environ, **PATHS}
        )

    def __enter__(self) -> Lives:
        return self

    def __exit__(self, *unused: object) -> None:
        with self._program:
            self._program.kill()

    async def begin(self) -> tuple[int, int]:
        """Return the process id and the cache id of a new life that listens."""
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self.num += 1
        self._program.stdin.write(b"\n")
        self._program.stdin.flush()
        with anyio.fail_after(10):
            await anyio.wait_readable(self._program.stdout)
        answer = json.loads(self._program.stdout.readline())
        return answer["pid"], answer["cache_id"]


@on_loops("uvloop", "trio")
async def test_twenty_restarts_need_nothing_of_the_healthy_side() -> None:
    """Same id, same address, killed twenty times: each time the link comes back, old keys fail, new bytes are right."""
    address = free_address()
    with Lives(address) as lives:
        async with cluster(2) as here, here.events() as events:
            manager = here.kv_cache_manager
            cache = manager.allocate_blocks_cache(DESC)
            keys: list[kv.CacheKeyByIdAndIndex] = []
            while lives.num < 20:
                pid, cache_id = await lives.begin()
                if lives.num == 1:
                    (await here.link_clusters([kv.ClusterInfo(1, address)], relink=True)).raise_for_status()
                    await take(events, kv.LinkUp)
                else:
                    await take(events, kv.PeerRestarted, kv.LinkUp)
                with pytest.raises(kv.CacheNotFoundError):
                    await manager.pull_blocks(kv.BlocksCacheKey(1, lives.num - 1), cache, [0], [0])
                for key in keys[-3:]:
                    with pytest.raises(kv.CacheNotFoundError):
                        await manager.pull_blocks(key, cache, [], [0])
                await manager.pull_blocks(kv.BlocksCacheKey(1, lives.num), cache, [0, 1], [0, 1])
                expect(cache.tensors, Stamp(1, lives.num, 1), [0, 1])
                keys.append(kv.CacheKeyByIdAndIndex(1, cache_id))
                await manager.pull_blocks(keys[-1], cache, [], [0])
                os.kill(pid, signal.SIGKILL)
                await take(events, kv.LinkLost)
                with pytest.raises(kv.NotLinkedError, match="Re-linking is under way"):
                    await manager.pull_blocks(kv.BlocksCacheKey(1, lives.num), cache, [0], [0])
            manager.deallocate_cache(cache)


@every_loop
async def test_a_closed_peer_is_linked_again_and_one_that_unlinked_is_not() -> None:
    """Closing in good order is half of a restart; an unlink, by either side, is somebody's wish and ends it."""
    address = free_address()

    def prompt() -> kv.Cluster:
        return kv.Cluster(cluster_id=1, role=kv.Role.PROMPT, pool="1MiB", listen=address)

    async with cluster(2) as here, here.events() as events:
        async with prompt():
            (await here.link_clusters([kv.ClusterInfo(1, address)], relink=True)).raise_for_status()
        async with prompt() as there:
            await take(events, kv.LinkUp, kv.LinkLost, kv.PeerRestarted, kv.LinkUp)
            (await there.unlink_clusters([2])).raise_for_status()
            await take(events, kv.LinkLost)
            await is_silent(events)
            (await here.link_clusters([kv.ClusterInfo(1, address)], relink=True)).raise_for_status()
            (await here.unlink_clusters([1])).raise_for_status()
            await take(events, kv.LinkUp, kv.LinkLost)
            await is_silent(events)


@asyncio_and_trio
async def test_unlinking_in_the_gap_ends_it() -> None:
    """Nobody dials any more, the role can be switched again, and the call itself is no failure."""
    async with spawn_peer(1, pool="1MiB") as peer, cluster(2) as here, here.events() as events:
        (await here.link_clusters([peer.info], relink=True)).raise_for_status()
        peer.kill()
        await take(events, kv.LinkUp, kv.LinkLost)
        with pytest.raises(kv.LinkExistsError, match="clusters 1"):
            await here.switch_role(kv.Role.PROMPT)
        status, (result,) = await here.unlink_clusters([1])
        assert status is kv.StatusCode.LLM_SUCCESS
        assert result.status is kv.StatusCode.LLM_NOT_YET_LINK
        with socket.create_server(("127.0.0.1", int(peer.address.rpartition(":")[2]))) as listener:
            listener.settimeout(0.1)
            with pytest.raises(TimeoutError):
                listener.accept()
        await here.switch_role(kv.Role.PROMPT)


async def test_a_first_attempt_that_fails_is_not_repeated() -> None:
    """`relink` is about links that are lost: whoever cannot be linked at first is reported and left alone."""
    address = free_address()
    async with cluster(2) as here:
        (result,) = (await here.link_clusters([kv.ClusterInfo(1, address)], relink=True)).results
        assert isinstance(result.error, kv.LinkError)
        with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))) as listener:
            listener.settimeout(0.1)
            with pytest.raises(TimeoutError):
                listener.accept()


async def test_a_peer_that_dials_closes_the_gap_itself() -> None:
    """The link that comes in is the one that stays: one LinkUp, and no dial of ours after it."""
    address = free_address()
    async with cluster(1, "MIX", relink_min_s=30.0, relink_max_s=30.0) as here, here.events() as events:
        async with spawn_peer(2, "MIX", pool="1MiB", listen=address) as peer:
            (await here.link_clusters([peer.info], relink=True)).raise_for_status()
            peer.kill()
        await take(events, kv.LinkUp, kv.LinkLost)
        async with spawn_peer(2, "MIX", pool="1MiB", listen=address, life=2) as peer:
            assert await peer.call("link", clusters=[(1, here.address)]) == ["LLM_SUCCESS"]
            await take(events, kv.PeerRestarted, kv.LinkUp)
            assert len(here._open_links().relinker) == 0
            await is_silent(events)


async def test_many_peers_come_back_in_parallel() -> None:
    """Eight decoders of one prompt that is restarted: all are linked again, and closing in the gap is prompt."""
    address = free_address()
    async with AsyncExitStack() as stack:
        decoders = [await stack.enter_async_context(cluster(number)) for number in range(10, 18)]
        streams: list[LinkEventStream] = [decoder.events() for decoder in decoders]
        for life in (1, 2):
            async with spawn_peer(1, pool="1MiB", life=life, listen=address) as peer:
                if life == 1:
                    for decoder in decoders:
                        (await decoder.link_clusters([peer.info], relink=True)).raise_for_status()
                for stream in streams:
                    await take(stream, *([kv.LinkUp] if life == 1 else [kv.PeerRestarted, kv.LinkUp]))
                peer.kill()
                for stream in streams:
                    await take(stream, kv.LinkLost)
        started = time.monotonic()
    assert time.monotonic() - started < 2


# The waits, on a clock that the test turns


class _FakeLink:
    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.is_dismissed = False
        self.error = kv.LinkLostError(f"cluster {peer} died")


def test_waits_double_up_to_the_limit_and_jitter_shortens_them() -> None:
    """0.1 s, 0.2 s, ... 1 s, each less its random part; and of many gaps only so many dial at a time."""
    trio, testing = pytest.importorskip("trio"), pytest.importorskip("trio.testing")
    config = kv.ClusterConfig(relink_min_s=0.1, relink_max_s=1.0, max_relinks=3)

    async def waits(chance: float) -> list[float]:
        dials: list[float] = []

        async def dial(info: kv.ClusterInfo, *, timeout_s: float) -> LinkResult:
            dials.append(anyio.current_time())
            return LinkResult.failed(info.cluster_id, kv.LinkError("not there"))

        async with anyio.create_task_group() as tasks:
            relinker = Relinker(dial, config, tasks, lambda: chance)
            relinker.want(kv.ClusterInfo(1, "h:1"))
            relinker.lost(_FakeLink(1))  # type: ignore[arg-type]  # what it looks at of a link
            started = anyio.current_time()
            await anyio.sleep(4.05)
            assert "6 attempts have failed (the last: not there)" in (relinker.explain(1) or "") or chance
            relinker.forget(1)
            assert relinker.explain(1) is None
        return [round(after - before, 6) for before, after in zip([started, *dials], dials, strict=False)]

    async def crowd() -> int:
        at_work = [0, 0]

        async def dial(info: kv.ClusterInfo, *, timeout_s: float) -> LinkResult:
            at_work[0] += 1
            at_work[1] = max(at_work)
            await anyio.sleep(0.05)
            at_work[0] -= 1
            return LinkResult(info.cluster_id, kv.StatusCode.LLM_SUCCESS)

        async with anyio.create_task_group() as tasks:
            relinker = Relinker(dial, config, tasks)
            for peer in range(20):
                relinker.want(kv.ClusterInfo(peer, "h:1"))
                relinker.lost(_FakeLink(peer))  # type: ignore[arg-type]
            assert len(relinker) == 20
        assert len(relinker) == 0
        return at_work[1]

    run = partial(trio.run, clock=testing.MockClock(autojump_threshold=0))
    assert run(waits, 0.0)[:6] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert run(waits, 0.5)[:6] == [0.075, 0.15, 0.3, 0.6, 0.75, 0.75]
    assert run(crowd) == 3
