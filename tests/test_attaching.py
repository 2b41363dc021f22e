"""A process that attaches can do no harm: what it is given for reading it cannot write."""

from __future__ import annotations

import errno
import mmap
import os
import socket
from types import SimpleNamespace

import anyio
import anyio.to_thread
import pytest

import kvlink as kv
from kvlink.memory.regions import POOL, STATE
from kvlink.transports import pidfd, shm_endpoint
from kvlink.transports.shm_channel import SharedRegion
from tests.support.loops import eventually, every_loop
from tests.support.stranger import Stranger, dial_channel, memfds, send_regions, token_of


def take_descriptors(address: str) -> list[int]:
    """Attach to cluster 1 as a peer does, and return the descriptors that it hands over."""
    with Stranger.dial(address) as stranger:
        answer = stranger.greet(1)
        stranger.channel = dial_channel(answer)
        stranger.channel.sendall(token_of(answer))
        with memfds(8192, 8192) as descriptors:
            send_regions(
                stranger.channel, (SharedRegion(POOL, 8192, True), SharedRegion(STATE, 8192, True)), descriptors
            )
        _, received, _, _ = socket.recv_fds(stranger.channel, 1 << 16, 16)
        return list(received)


async def test_what_is_shared_for_reading_cannot_be_written() -> None:
    """A peer gets descriptors of the pool and the state words that the kernel lets it read, and nothing more."""
    async with kv.Cluster(cluster_id=1, role=kv.Role.MIX, pool="64KiB") as owner:
        descriptors = await anyio.to_thread.run_sync(take_descriptors, owner.address)
        assert len(descriptors) == 2
        for fd in descriptors:
            try:
                mmap.mmap(fd, 4096, prot=mmap.PROT_READ).close()
                with pytest.raises(PermissionError):
                    mmap.mmap(fd, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
                with pytest.raises(OSError, match=r"Bad file descriptor|not permitted"):
                    os.pwrite(fd, b"x", 0)
            finally:
                os.close(fd)


async def test_a_region_that_could_not_be_shared_is_shared_with_the_next_lease(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An owner that is out of descriptors for a moment fails one push and says so; the next one goes through."""
    failures = [OSError(errno.EMFILE, "Too many open files")]

    def dup(fd: int) -> int:
        if failures:
            raise failures.pop()
        return os.dup(fd)

    desc, key = kv.CacheDesc(1, (4, 64), "uint8"), kv.BlocksCacheKey(1)
    async with (
        kv.Cluster(cluster_id=1, role=kv.Role.MIX, pool="64KiB") as owner,
        kv.Cluster(cluster_id=2, role=kv.Role.MIX, pool="64KiB") as writer,
    ):
        target = owner.kv_cache_manager.allocate_blocks_cache(desc, blocks_cache_key=key)
        source = writer.kv_cache_manager.allocate_blocks_cache(desc)
        source.tensors[0][...] = 7
        (await writer.link_clusters([kv.ClusterInfo(1, owner.address)])).raise_for_status()
        push = writer.kv_cache_manager.push_blocks
        monkeypatch.setattr(shm_endpoint, "os", SimpleNamespace(dup=dup, close=os.close))
        with pytest.raises(kv.TransferTimeoutError):
            await push(key, source, [0], [0], timeout_s=0.1)
        await push(key, source, [0], [0], timeout_s=5)
        assert target.tensors[0][0].min() == 7
    assert "Too many open files" in caplog.text


async def test_a_fault_of_ours_while_a_peer_attaches_costs_that_peer_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The peer's attempt fails with a typed error, and the cluster goes on: the next attempt succeeds."""
    for name in ("kvlink.transports.shm", "kvlink.links.table"):
        caplog.set_level("CRITICAL", name)  # a traceback in a record would hold everything
    async with (
        kv.Cluster(cluster_id=1, role=kv.Role.MIX, pool="64KiB") as owner,
        kv.Cluster(cluster_id=2, role=kv.Role.MIX, pool="64KiB") as peer,
    ):
        for place in ("_send_initial", "_check_bounds"):
            with monkeypatch.context() as patch:
                patch.setattr(shm_endpoint.ShmEndpoint, place, lambda *_: 1 // 0)
                (result,) = (await peer.link_clusters([kv.ClusterInfo(1, owner.address)]))[1]
                assert isinstance(result.error, kv.LinkError)
        (await peer.link_clusters([kv.ClusterInfo(1, owner.address)])).raise_for_status()
    del result


@every_loop
@pytest.mark.parametrize("what", ["dup", "wait_readable"])
async def test_a_process_without_descriptors_keeps_its_links(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The peer's death cannot be watched then: a line in the log; this link and the others go on, and end in order."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    async with (
        kv.Cluster(cluster_id=1, role=kv.Role.MIX, pool="64KiB") as owner,
        kv.Cluster(cluster_id=2, role=kv.Role.MIX, pool="64KiB") as peer,
    ):
        module = {"dup": "os", "wait_readable": "anyio"}[what]
        names = {"close": os.close, "sleep_forever": anyio.sleep_forever, what: refuse}
        monkeypatch.setattr(pidfd, module, SimpleNamespace(**names))
        (await peer.link_clusters([kv.ClusterInfo(1, owner.address)])).raise_for_status()
        (await peer.check_link_status(1, timeout_s=5)).raise_for_status()
        await eventually(lambda: caplog.text.count("cannot be watched") == 2, "both sides to say so")
        assert (len(owner.links), len(peer.links)) == (1, 1)
        (await peer.unlink_clusters([1])).raise_for_status()
        await eventually(lambda: not owner.links, "the other side to unlink")


async def test_a_fault_of_ours_costs_a_link_or_a_look_and_not_the_cluster(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the tasks of a link, in serving a connection, in what is looked at regularly: logged, and all else goes on."""
    levels: dict[str, int | str] = {"kvlink.links.link": 60, "kvlink.acceptor": 60, "kvlink.cluster": "ERROR"}
    for name, level in levels.items():
        caplog.set_level(level, name)  # a traceback in a record would hold everything
    config = kv.ClusterConfig(liveness_s=0.1)
    async with (
        kv.Cluster(cluster_id=1, role=kv.Role.MIX, pool="64KiB", config=config) as owner,
        kv.Cluster(cluster_id=2, role=kv.Role.MIX, pool="64KiB") as peer,
    ):
        info = kv.ClusterInfo(1, owner.address)
        with monkeypatch.context() as patch:
            patch.setattr(shm_endpoint.ShmEndpoint, "watch_death", lambda endpoint: 1 // 0)
            await peer.link_clusters([info])
            await eventually(lambda: not owner.links and not peer.links, "the link to end")
        with monkeypatch.context() as patch:
            patch.setattr(owner._links, "_hello", lambda: 1 // 0)
            patch.setattr(owner._links._complaints, "say", lambda *_, **__: 1 // 0)  # type: ignore[union-attr]
            assert not (await peer.link_clusters([info], timeout_s=1)).is_ok
        with monkeypatch.context() as patch:
            patch.setattr(owner._links, "beat", lambda now: 1 // 0)
            await eventually(lambda: caplog.text.count("a regular look") >= 2, "two looks to fail")
        (await peer.link_clusters([info])).raise_for_status()
        caplog.clear()


async def test_a_cluster_that_peers_cannot_attach_to_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """No socket for the descriptors to be had: a typed error on entry, and nothing stays."""

    def refuse(address: str) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(anyio, "create_unix_listener", refuse)
    with pytest.raises(kv.ListenError, match="Too many open files"):
        await kv.Cluster(cluster_id=1, role=kv.Role.MIX, pool="64KiB").__aenter__()
