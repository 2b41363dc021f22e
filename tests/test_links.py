"""Linking and unlinking, between processes and under every kind of bad luck."""

from __future__ import annotations

import os
import random
import re
import socket
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

import kvlink as kv
from kvlink.wire import PROTOCOL_VERSION, Hello, Refuse
from tests.support import inside
from tests.support.loops import asyncio_and_trio, asyncio_and_uvloop, eventually, every_loop, until
from tests.support.pair import SLOW, pair
from tests.support.pattern import Stamp, expect, fill
from tests.support.peer import Peer, spawn_peer
from tests.support.proxy import Proxy
from tests.support.stranger import Stranger, hello

SUCCESS = kv.StatusCode.LLM_SUCCESS
needs_ipv6 = pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this host has no IPv6")
DESC = kv.CacheDesc(2, (8, 4096), "uint8")


def decoder(cluster_id: int = 2, **config: float) -> kv.Cluster:
    """Return a small decoder."""
    settings = kv.ClusterConfig(**config)  # type: ignore[arg-type]  # checked by ClusterConfig
    return kv.Cluster(cluster_id=cluster_id, role=kv.Role.DECODER, pool="4MiB", config=settings)


def mix(cluster_id: int) -> kv.Cluster:
    """Return a small MIX."""
    return kv.Cluster(cluster_id=cluster_id, role=kv.Role.MIX, pool="4MiB")


def info_of(cluster: kv.Cluster) -> kv.ClusterInfo:
    """Return what links to a cluster of this process."""
    return kv.ClusterInfo(cluster.cluster_id, cluster.address)


async def peers_of(peer: Peer) -> list[int]:
    """Return whom the child is linked to."""
    return [link["peer"] for link in await peer.call("links")]


async def has_peers(peer: Peer, *expected: int) -> None:
    """Wait until the child is linked to exactly these."""
    await until(partial(peers_of, peer), lambda peers: peers == list(expected), within_s=5)


def _has_no_link(cluster: kv.Cluster) -> bool:
    return not list(cluster.links)


# Who is who


@asyncio_and_uvloop
async def test_dialling_another_cluster_fails_on_both_sides() -> None:
    """The dialler's error names both ids and the address; neither side keeps a link, and the right id still links."""
    async with spawn_peer(1, "MIX", pool="4MiB") as peer, decoder() as here:
        status, (result,) = await here.link_clusters([kv.ClusterInfo(7, peer.address)])
        assert status is kv.StatusCode.LLM_LINK_FAILED
        assert isinstance(result.error, kv.HandshakeError)
        assert (result.cluster_id, result.error.peer, result.error.phase) == (7, 7, "hello")
        for word in ("7", "1", peer.address):
            assert word in str(result.error)
        assert await peers_of(peer) == []
        assert list(here.links) == []
        (await here.link_clusters([peer.info])).raise_for_status()


async def test_the_reached_side_is_told_of_a_wrong_id() -> None:
    """A hello that expects somebody else is refused with both ids, so that the dialler's log and ours agree."""
    async with spawn_peer(1, "MIX", pool="4MiB") as peer:
        with Stranger.dial(peer.address) as stranger:
            stranger.say(hello(expects=7))
            refusal = stranger.hear_end()
            assert isinstance(refusal, Refuse)
            assert refusal.field == "cluster id"
            assert "7" in refusal.text
            assert "1" in refusal.text


async def test_the_dialler_says_whom_it_wants() -> None:
    """The first message carries the id that was dialled, so that the wrong one can refuse before it does anything."""
    async with spawn_peer(1, "MIX", pool="4MiB") as peer:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(10)
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            pending = peer.start("link", clusters=[(99, address)])
            sock, _ = listener.accept()
            with Stranger(sock) as stranger:
                first = stranger.hear()
                assert isinstance(first, Hello)
                stranger.say(Refuse(status=int(kv.StatusCode.LLM_LINK_FAILED), field="mood", text="not today"))
                stranger.hear_end()
        with pytest.raises(kv.HandshakeError, match="not today"):
            await pending.result()
        assert first.expects == 99


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, 2**32 - 1])
async def test_another_protocol_version_is_refused_by_number(version: int) -> None:
    """Both sides learn both versions: the stranger in its refusal, and the dialler in its error."""
    async with spawn_peer(1, "MIX", pool="4MiB") as peer:
        with Stranger.dial(peer.address) as stranger:
            stranger.say(hello(expects=1, version=version))
            refusal = stranger.hear_end()
            assert isinstance(refusal, Refuse)
            assert refusal.field == "protocol version"
            assert str(version) in refusal.text
            assert str(PROTOCOL_VERSION) in refusal.text
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(10)
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            pending = peer.start("link", clusters=[(99, address)])
            sock, _ = listener.accept()
            with Stranger(sock) as stranger:
                stranger.hear()
                stranger.say(hello(version=version))
                refusal = stranger.hear_end()
                assert isinstance(refusal, Refuse)
                assert str(version) in refusal.text
        with pytest.raises(kv.HandshakeError) as caught:
            await pending.result()
        for word in ("protocol version", str(version), str(PROTOCOL_VERSION), address):
            assert word in str(caught.value)


async def test_linking_to_oneself_is_refused() -> None:
    """A cluster that dials its own address is told so."""
    async with mix(5) as here:
        status, (result,) = await here.link_clusters([info_of(here)])
        assert status is kv.StatusCode.LLM_LINK_FAILED
        assert isinstance(result.error, kv.HandshakeError)
        assert "this very cluster 5" in str(result.error)
        assert list(here.links) == []


@asyncio_and_trio
async def test_of_two_processes_with_one_id_the_second_is_refused() -> None:
    """While the first lives its link works on; the second is told which id is taken, and gets in when it goes."""
    async with mix(1) as here, spawn_peer(2, "DECODER", pool="4MiB") as first:
        assert await first.call("link", clusters=[(1, here.address)]) == ["LLM_SUCCESS"]
        async with spawn_peer(2, "DECODER", pool="4MiB", life=2) as second:
            with pytest.raises(kv.LinkError) as caught:
                await second.call("link", clusters=[(1, here.address)])
            assert "cluster 2 is linked already" in str(caught.value)
            assert "alive" in str(caught.value)
            older = inside.link_to(here, 2).incarnation.hex()[:8]
            assert re.findall("incarnation ([0-9a-f]{8})", str(caught.value))[0] == older
            assert len(set(re.findall("incarnation ([0-9a-f]{8})", str(caught.value)))) == 2
            assert await peers_of(first) == [1]
            assert [link.peer for link in here.links] == [2]
            first.kill()
            assert await second.call("link", clusters=[(1, here.address)]) == ["LLM_SUCCESS"]


async def test_a_stopped_process_keeps_its_id() -> None:
    """A process that is only stopped is not dead: whoever claims its id is refused within the link's deadline."""
    async with mix(1) as here, spawn_peer(2, "DECODER", pool="4MiB") as first:
        await first.call("link", clusters=[(1, here.address)])
        first.stop()
        async with spawn_peer(2, "DECODER", pool="4MiB", life=2) as second:
            with pytest.raises(kv.LinkError, match="linked already"):
                await second.call("link", clusters=[(1, here.address)])
        first.cont()
        assert await peers_of(first) == [1]


async def test_the_same_id_on_both_sides_is_refused() -> None:
    """Two clusters that carry one id cannot link to each other."""
    async with mix(1) as one, mix(1) as other:
        _, (result,) = await one.link_clusters([info_of(other)])
        assert isinstance(result.error, kv.HandshakeError)
        assert "ids must differ" in str(result.error)


# Nobody there


@asyncio_and_trio
async def test_a_port_where_nobody_listens_fails_at_once() -> None:
    """The error names the cluster and the address, and others of the same call are linked."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dead = f"127.0.0.1:{listener.getsockname()[1]}"
    async with spawn_peer(1, pool="4MiB") as peer, decoder() as here:
        status, results = await here.link_clusters([kv.ClusterInfo(9, dead), peer.info], timeout_s=20)
        assert status is kv.StatusCode.LLM_LINK_FAILED
        assert [result.cluster_id for result in results] == [9, 1]
        assert results[0].error is not None
        assert results[0].error.phase == "dial"
        assert "cluster 9" in str(results[0].error)
        assert dead in str(results[0].error)
        assert results[1].status is SUCCESS
        assert [link.peer for link in here.links] == [1]


@every_loop
async def test_a_peer_that_never_answers_costs_the_deadline() -> None:
    """A connection that is accepted and left alone ends the call by its deadline, as a time-out, and is hung up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        async with decoder() as here:
            started = time.monotonic()
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            _, (result,) = await here.link_clusters([kv.ClusterInfo(9, address)], timeout_s=0.2)
            assert 0.2 <= time.monotonic() - started < 5
            assert result.status is kv.StatusCode.LLM_WAIT_PROCESS_TIMEOUT
            assert address in str(result.error)
            sock, _ = listener.accept()
            with Stranger(sock) as stranger:
                await anyio.to_thread.run_sync(stranger.hear_end)
            assert list(here.links) == []


async def test_a_stopped_process_costs_the_deadline() -> None:
    """The kernel accepts for a stopped process; the call ends by its deadline, and works when the process goes on."""
    async with spawn_peer(1, pool="4MiB") as peer, decoder() as here:
        peer.stop()
        _, (result,) = await here.link_clusters([peer.info], timeout_s=0.2)
        assert result.status is kv.StatusCode.LLM_WAIT_PROCESS_TIMEOUT
        peer.cont()
        (await here.link_clusters([peer.info])).raise_for_status()


# No link too many


@every_loop
@pytest.mark.parametrize("who", ["listens", "dials"])
async def test_simultaneous_dials_make_no_link_too_many(who: str) -> None:
    """Six at once where there is room for two, out of one cluster or into it: two links, and four are told why not."""
    few = kv.ClusterConfig(max_links=2)
    async with AsyncExitStack() as stack:
        hub = await stack.enter_async_context(kv.Cluster(cluster_id=1, role=kv.Role.MIX, pool="64KiB", config=few))
        others = [
            await stack.enter_async_context(kv.Cluster(cluster_id=number, role=kv.Role.MIX, pool="64KiB"))
            for number in range(2, 8)
        ]
        outcomes: list[kv.LinkResult] = []

        async def link(other: kv.Cluster) -> None:
            dialler, target = (other, hub) if who == "listens" else (hub, other)
            info = kv.ClusterInfo(target.cluster_id, target.address)
            outcomes.extend((await dialler.link_clusters([info], timeout_s=10))[1])

        async with anyio.create_task_group() as tasks:
            for other in others:
                tasks.start_soon(link, other)
        assert len(hub.links) == 2
        assert sum(outcome.is_ok for outcome in outcomes) == 2
        for outcome in outcomes:
            assert outcome.is_ok or "2 links already" in str(outcome.error), outcome
        await eventually(lambda: sum(len(other.links) for other in others) == 2, "both sides to agree")


# One link per peer


@every_loop
async def test_64_callers_share_one_connection() -> None:
    """However many link to one peer at once, one connection is made, and all are told that it worked."""
    async with spawn_peer(1, pool="4MiB") as peer, decoder() as here:
        with Proxy(peer.address) as proxy:
            info = kv.ClusterInfo(1, proxy.address)
            outcomes: list[kv.LinkResults] = []

            async def link() -> None:
                outcomes.append(await here.link_clusters([info], timeout_s=10))

            async with anyio.create_task_group() as tasks:
                for _ in range(64):
                    tasks.start_soon(link)
            assert [outcome.status for outcome in outcomes] == [SUCCESS] * 64
            assert proxy.num_accepted == 1
            assert await peers_of(peer) == [2]
            (await here.unlink_clusters([1])).raise_for_status()


@every_loop
async def test_cancelling_some_callers_does_not_cancel_the_rest() -> None:
    """The first caller among those that are cancelled; the attempt goes on for the others, on its one connection."""
    async with spawn_peer(1, pool="4MiB") as peer, decoder() as here:
        with Proxy(peer.address) as proxy:
            proxy.hold()
            info = kv.ClusterInfo(1, proxy.address)
            outcomes: dict[int, kv.LinkResults] = {}
            scopes: dict[int, anyio.CancelScope] = {}

            async def link(index: int) -> None:
                with anyio.CancelScope() as scopes[index]:
                    outcomes[index] = await here.link_clusters([info], timeout_s=10)

            async with anyio.create_task_group() as tasks:
                for index in range(8):
                    tasks.start_soon(link, index)
                await eventually(lambda: len(scopes) == 8 and proxy.num_accepted == 1, "the connection")
                for index in range(5):
                    scopes[index].cancel()
                await anyio.lowlevel.checkpoint()
                proxy.release()
            assert sorted(outcomes) == [5, 6, 7]
            assert {outcome.status for outcome in outcomes.values()} == {SUCCESS}
            assert proxy.num_accepted == 1
            (await here.unlink_clusters([1])).raise_for_status()


@asyncio_and_uvloop
async def test_an_attempt_ends_with_its_last_caller() -> None:
    """When nobody waits any more the connection is given up, and the next call makes a new one."""
    async with spawn_peer(1, pool="4MiB") as peer, decoder() as here:
        with Proxy(peer.address) as proxy:
            proxy.hold()
            info = kv.ClusterInfo(1, proxy.address)
            with anyio.move_on_after(10) as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(here.link_clusters, [info])
                    tasks.start_soon(partial(here.link_clusters, [info], timeout_s=0.1))
                    await eventually(lambda: proxy.num_accepted == 1, "the connection")
                    scope.cancel()
            proxy.release()
            await eventually(lambda: proxy.num_open == 0, "the end of the connection")
            (await here.link_clusters([info])).raise_for_status()
            assert proxy.num_accepted == 2
            await has_peers(peer, 2)
            (await here.unlink_clusters([1])).raise_for_status()


async def test_linking_twice_is_no_failure() -> None:
    """A second call is LLM_ALREADY_LINK, the same cluster twice in one call LLM_REPEAT_REQUEST; both are fine."""
    async with spawn_peer(1, pool="4MiB") as peer, decoder() as here:
        results = await here.link_clusters([peer.info, peer.info])
        assert [result.status for result in results.results] == [SUCCESS, kv.StatusCode.LLM_REPEAT_REQUEST]
        assert results.is_ok
        link = inside.link_to(here, 1)
        again = await here.link_clusters([peer.info])
        assert [result.status for result in again.results] == [kv.StatusCode.LLM_ALREADY_LINK]
        assert again.is_ok
        assert inside.link_to(here, 1) is link


@every_loop
async def test_two_clusters_that_dial_each_other_keep_one_link() -> None:
    """However the two dials interleave: both calls succeed, each side has exactly one link, and it works."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    async with mix(1) as one, mix(2) as two:
        owned = {}
        for cluster in (one, two):
            key = kv.BlocksCacheKey(cluster.cluster_id)
            owned[cluster] = cluster.kv_cache_manager.allocate_blocks_cache(DESC, key)
            fill(owned[cluster].tensors, Stamp(cluster.cluster_id, 1, 1))
        for _ in range(40):
            outcomes: list[kv.LinkResults] = []

            async def link(
                cluster: kv.Cluster, other: kv.Cluster, num_turns: int, into: list[kv.LinkResults] = outcomes
            ) -> None:
                for _ in range(num_turns):
                    await anyio.lowlevel.checkpoint()
                into.append(await cluster.link_clusters([info_of(other)], timeout_s=5))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(link, one, two, chance.choice([0, 0, 0, 1, 2, 5, 10, 20]))
                tasks.start_soon(link, two, one, chance.choice([0, 0, 0, 1, 2, 5, 10, 20]))
            for outcome in outcomes:
                outcome.raise_for_status()
            for cluster, other in ((one, two), (two, one)):
                (link_here,) = cluster.links
                assert link_here.is_open
                cache = cluster.kv_cache_manager.allocate_blocks_cache(DESC)
                await cluster.kv_cache_manager.pull_blocks(
                    kv.BlocksCacheKey(other.cluster_id), cache, [0, 1], [0, 1], timeout_s=5
                )
                expect(cache.tensors, Stamp(other.cluster_id, 1, 1), [0, 1])
                cluster.kv_cache_manager.deallocate_cache(cache)
            (await one.unlink_clusters([2], timeout_s=5)).raise_for_status()
            await eventually(lambda: not list(one.links) and not list(two.links), "both halves gone")
        for cluster, cache in owned.items():
            cluster.kv_cache_manager.deallocate_cache(cache)


async def test_two_processes_that_dial_each_other_keep_one_link() -> None:
    """The same between processes, where nothing orders the two."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    async with mix(1) as here, spawn_peer(2, "MIX", pool="4MiB") as there:
        for _ in range(25):
            pending = there.start("link", clusters=[(1, here.address)], timeout_s=5)
            await anyio.sleep(chance.choice([0, 0.0003, 0.0007, 0.001, 0.0015, 0.002, 0.003]))
            (await here.link_clusters([there.info], timeout_s=5)).raise_for_status()
            assert (await pending.result())[0] in ("LLM_SUCCESS", "LLM_ALREADY_LINK")
            assert [link.peer for link in here.links] == [2]
            assert await peers_of(there) == [1]
            (await here.check_link_status(2, timeout_s=5)).raise_for_status()
            (await here.unlink_clusters([2], timeout_s=5)).raise_for_status()
            await has_peers(there)


# Unlinking


@every_loop
async def test_unlinking_takes_both_halves_away() -> None:
    """In good order: afterwards neither side has the link, its state is CLOSED, and a pull is LLM_NOT_YET_LINK."""
    async with pair() as p:
        link = p.link
        results = await p.here.unlink_clusters([p.owner.info])
        assert [(result.cluster_id, result.status) for result in results.results] == [(1, SUCCESS)]
        assert link.state is kv.LinkState.CLOSED
        assert list(p.here.links) == []
        await has_peers(p.owner)
        with pytest.raises(kv.NotLinkedError):
            await p.pull()
        p.expect_untouched()
        (await p.here.link_clusters([p.owner.info])).raise_for_status()
        await p.pull()
        p.expect_all()


async def test_unlinking_by_force_says_nothing() -> None:
    """Our half is gone at once, also when the peer is stopped; the peer finds out when it looks."""
    async with spawn_peer(1, pool="4MiB") as peer, decoder() as here:
        (await here.link_clusters([peer.info])).raise_for_status()
        peer.stop()
        results = await here.unlink_clusters([1], force=True)
        assert results.status is SUCCESS
        assert list(here.links) == []
        peer.cont()
        await has_peers(peer)


async def test_unlinking_a_stranger_is_no_failure() -> None:
    """A cluster that is not linked is LLM_NOT_YET_LINK; the call as a whole succeeds, and others are unlinked."""
    async with spawn_peer(1, pool="4MiB") as peer, decoder() as here:
        (await here.link_clusters([peer.info])).raise_for_status()
        status, results = await here.unlink_clusters([42, 1])
        assert status is SUCCESS
        assert [result.status for result in results] == [kv.StatusCode.LLM_NOT_YET_LINK, SUCCESS]
        status, results = await here.unlink_clusters([1])
        assert [result.status for result in results] == [kv.StatusCode.LLM_NOT_YET_LINK]


@asyncio_and_uvloop
async def test_unlinking_waits_for_a_pull_in_flight() -> None:
    """The pull ends well, with every byte, and only then the link goes; no new pull may start meanwhile."""
    desc = kv.CacheDesc(8, (1024, 4096), "uint8")
    async with pair(desc, config=SLOW) as p:
        await p.warm_up()
        reports: list[kv.TransferReport] = []

        async def pull() -> None:
            reports.append(await p.pull())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pull)
            await p.is_moving()
            tasks.start_soon(p.here.unlink_clusters, [1])
            await eventually(lambda: p.link.state is kv.LinkState.DRAINING, "the unlink")
            assert not reports
            with pytest.raises(kv.NotLinkedError):
                await p.pull([0], [0])
        assert len(reports) == 1
        p.expect_all()
        assert list(p.here.links) == []


async def test_two_unlinks_during_a_pull_both_end_with_it() -> None:
    """Both callers wait for the pull, and both are told that it worked, without waiting for a deadline."""
    desc = kv.CacheDesc(8, (1024, 4096), "uint8")
    async with pair(desc, config=SLOW) as p:
        await p.warm_up()
        statuses: list[kv.StatusCode] = []

        async def unlink() -> None:
            statuses.append((await p.here.unlink_clusters([1], timeout_s=20)).status)

        started = time.monotonic()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(p.pull)
            await p.is_moving()
            tasks.start_soon(unlink)
            tasks.start_soon(unlink)
        assert statuses == [SUCCESS, SUCCESS]
        assert time.monotonic() - started < 15
        p.expect_all()


@asyncio_and_trio
async def test_unlinking_a_stopped_peer_ends_by_the_deadline() -> None:
    """It cannot be told: LLM_NOTIFY_PROMPT_UNLINK_FAILED, and our half is gone all the same."""
    async with spawn_peer(1, pool="4MiB") as peer, decoder() as here:
        (await here.link_clusters([peer.info])).raise_for_status()
        link = inside.link_to(here, 1)
        peer.stop()
        started = time.monotonic()
        status, (result,) = await here.unlink_clusters([1], timeout_s=0.3)
        assert 0.3 <= time.monotonic() - started < 5
        assert status is kv.StatusCode.LLM_UNLINK_FAILED
        assert result.status is kv.StatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED
        assert "cluster 1" in str(result.error)
        assert link.state is kv.LinkState.CLOSED
        assert list(here.links) == []
        peer.cont()
        await has_peers(peer)
        (await here.link_clusters([peer.info])).raise_for_status()


@asyncio_and_uvloop
async def test_the_owner_may_unlink_during_a_pull() -> None:
    """The peer's goodbye in mid-pull: the pull ends with every byte or a typed error, soon, and both halves go."""
    desc = kv.CacheDesc(8, (1024, 4096), "uint8")
    async with pair(desc, role="MIX", config=SLOW) as p:
        await p.warm_up()
        outcome: list[kv.TransferReport | kv.KVLinkError] = []

        async def pull() -> None:
            try:
                outcome.append(await p.pull())
            except kv.KVLinkError as exc:
                outcome.append(exc)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pull)
            await p.is_moving()
            assert await p.owner.call("unlink", clusters=[2], timeout_s=10) == ["LLM_SUCCESS"]
        if isinstance(outcome[0], kv.TransferReport):
            p.expect_all()
        assert list(p.here.links) == []
        assert p.cache.is_quiet()


# Asking for a sign of life


@asyncio_and_trio
async def test_link_status_is_asked_of_each() -> None:
    """One alive, one stopped, one never linked: each gets its own answer, by the deadline, and links stay."""
    async with AsyncExitStack() as stack:
        alive = await stack.enter_async_context(spawn_peer(11, pool="4MiB"))
        stopped = await stack.enter_async_context(spawn_peer(12, pool="4MiB"))
        here = await stack.enter_async_context(decoder())
        (await here.link_clusters([alive.info, stopped.info])).raise_for_status()
        (await here.check_link_status([11, 12])).raise_for_status()
        stopped.stop()
        started = time.monotonic()
        status, results = await here.check_link_status([11, 12, 13], timeout_s=0.3)
        assert time.monotonic() - started < 5
        expected = [SUCCESS, kv.StatusCode.LLM_WAIT_PROCESS_TIMEOUT, kv.StatusCode.LLM_NOT_YET_LINK]
        assert [(result.cluster_id, result.status) for result in results] == list(
            zip([11, 12, 13], expected, strict=True)
        )
        assert status is kv.StatusCode.LLM_WAIT_PROCESS_TIMEOUT
        assert sorted(link.peer for link in here.links) == [11, 12]
        stopped.cont()
        (await here.check_link_status([11, 12])).raise_for_status()


async def test_a_prompt_neither_links_nor_asks_and_a_decoder_has_no_address() -> None:
    """What the role forbids is refused by name, before anything else is looked at."""
    async with kv.Cluster(cluster_id=1, role=kv.Role.PROMPT, pool="4MiB") as prompt, decoder() as here:
        refused = await prompt.link_clusters([kv.ClusterInfo(9, "127.0.0.1:1")])
        assert (refused.status, refused.results) == (kv.StatusCode.LLM_PARAM_INVALID, ())
        with pytest.raises(kv.RoleError, match="PROMPT"):
            refused.raise_for_status()
        with pytest.raises(kv.RoleError, match="PROMPT"):
            await prompt.check_link_status(9)
        with pytest.raises(kv.NotLinkedError, match="DECODER"):
            _ = here.address
        cache = prompt.kv_cache_manager.allocate_blocks_cache(DESC)
        with pytest.raises(kv.RoleError, match="PROMPT"):
            await prompt.kv_cache_manager.pull_blocks(kv.BlocksCacheKey(9), cache, [0], [0])
        prompt.kv_cache_manager.deallocate_cache(cache)
        with pytest.raises(kv.RoleError, match="DECODER"):
            here.kv_cache_manager.allocate_blocks_cache(DESC, kv.BlocksCacheKey(2))


async def test_a_prompt_may_be_unlinked_from_and_unlink() -> None:
    """A PROMPT may end links, though it does not make them."""
    async with kv.Cluster(cluster_id=1, role=kv.Role.PROMPT, pool="4MiB") as prompt, decoder() as here:
        (await here.link_clusters([info_of(prompt)])).raise_for_status()
        (await prompt.unlink_clusters([2])).raise_for_status()
        await eventually(lambda: not list(here.links), "the decoder's half")


@pytest.mark.parametrize("listen", ["127.0.0.1:0", pytest.param("[::1]:0", marks=needs_ipv6), "localhost:0", "unix"])
async def test_any_kind_of_address(listen: str, tmp_path: Path) -> None:
    """IPv4, IPv6, a name and a Unix socket: what `address` says is what a peer can dial; nothing stays behind."""
    if listen == "unix":
        listen = f"unix:{tmp_path}/socket"
    async with spawn_peer(1, pool="4MiB", listen=listen) as peer, decoder() as here:
        (await here.link_clusters([peer.info])).raise_for_status()
        (await here.check_link_status(1)).raise_for_status()
    assert os.listdir(tmp_path) == []


# Death and restart


@every_loop
async def test_death_is_noticed_at_once_on_an_idle_link() -> None:
    """An idle peer is killed: its link is CLOSED long before any heartbeat, and no other link notices."""
    async with AsyncExitStack() as stack:
        victim = await stack.enter_async_context(spawn_peer(11, pool="4MiB"))
        other = await stack.enter_async_context(spawn_peer(12, pool="4MiB"))
        # With this liveness limit a heartbeat is minutes away.
        here = await stack.enter_async_context(decoder(liveness_s=1000.0))
        (await here.link_clusters([victim.info, other.info])).raise_for_status()
        link = inside.link_to(here, 11)
        victim.kill()
        with anyio.fail_after(5):
            await link.closed.wait()
        assert link.state is kv.LinkState.CLOSED
        assert [left.peer for left in here.links] == [12]
        (await here.check_link_status(12)).raise_for_status()


@every_loop
async def test_a_peer_that_restarts_is_linked_anew() -> None:
    """Killed and started again at one id and address: old keys fail typed, new bytes come, never old ones."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    async with decoder() as here:
        manager = here.kv_cache_manager
        cache = manager.allocate_blocks_cache(DESC)
        incarnations = set()
        for life in range(1, 5):
            async with spawn_peer(1, pool="4MiB", life=life, listen=address) as peer:
                assert peer.address == address
                with pytest.raises(kv.NotLinkedError):
                    await manager.pull_blocks(kv.BlocksCacheKey(1), cache, [0], [0])
                (await here.link_clusters([peer.info])).raise_for_status()
                with pytest.raises(kv.CacheNotFoundError):
                    await manager.pull_blocks(kv.BlocksCacheKey(1), cache, [0], [0])
                handle = await peer.call("allocate_blocks", num_tensors=2, shape=[8, 4096], model_id=0)
                await manager.pull_blocks(kv.BlocksCacheKey(1), cache, [0, 1], [0, 1])
                expect(cache.tensors, peer.stamp(handle), [0, 1])
                link = inside.link_to(here, 1)
                incarnations.add(link.incarnation)
                peer.kill()
                with anyio.fail_after(5):
                    await link.closed.wait()
        assert len(incarnations) == 4
        manager.deallocate_cache(cache)


async def test_a_restarted_peer_that_dials_replaces_its_old_self() -> None:
    """The newcomer dials before anybody has noticed that the old one is dead: it is let in, and only it is linked."""
    async with mix(1) as here:
        for life in (1, 2, 3):
            async with spawn_peer(2, "DECODER", pool="4MiB", life=life) as peer:
                assert await peer.call("link", clusters=[(1, here.address)]) == ["LLM_SUCCESS"]
                assert [link.peer for link in here.links] == [2]
                peer.kill()


@asyncio_and_uvloop
async def test_a_peer_that_lost_its_half_may_dial_again() -> None:
    """The same life links again after it dropped its half by force: the healthy side needs nothing done to it."""
    async with mix(1) as here, spawn_peer(2, "DECODER", pool="4MiB") as peer:
        for _ in range(5):
            assert await peer.call("link", clusters=[(1, here.address)]) == ["LLM_SUCCESS"]
            assert await peer.call("unlink", clusters=[1], force=True) == ["LLM_SUCCESS"]
        assert await peer.call("link", clusters=[(1, here.address)]) == ["LLM_SUCCESS"]
        await eventually(lambda: [link.peer for link in here.links] == [2], "one link")
        assert await peers_of(peer) == [1]


async def test_many_peers_link_again_in_parallel() -> None:
    """Eight decoders of one restarted prompt come back at the same time."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    async with AsyncExitStack() as stack:
        decoders = [await stack.enter_async_context(decoder(number)) for number in range(10, 18)]
        for life in (1, 2):
            async with spawn_peer(1, pool="4MiB", life=life, listen=address) as peer:
                async with anyio.create_task_group() as tasks:
                    for each in decoders:
                        tasks.start_soon(each.link_clusters, [peer.info])
                assert sorted(await peers_of(peer)) == list(range(10, 18))
                peer.kill()
                for each in decoders:
                    await eventually(partial(_has_no_link, each), "the old link gone")
