"""Room in an owner's pool for detours: how much of it a peer gets, and how long it is kept."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest

import kvlink as kv
from kvlink.caches.copies import LocalCopier
from kvlink.checks import Tensors
from kvlink.geometry import TensorRun
from kvlink.transfers.staging import stage
from kvlink.wire import CloseRead, Commit, Found, Stage, Target
from tests.spec.harness import D, P, Pair, linked_pair, stamped
from tests.support.inside import link_to, used_nbytes
from tests.support.loops import asyncio_and_trio, eventually
from tests.support.pattern import expect

DESC = kv.CacheDesc(2, (16, 4096), "uint8")
MIX = (kv.Role.MIX, kv.Role.MIX)
KEY = kv.BlocksCacheKey(P)
TARGET = Target("blocks", 0)
BOTH = Tensors(0, 2)


@asynccontextmanager
async def out_of_reach(**config: Any) -> AsyncIterator[tuple[Pair, kv.Link, kv.KvCache, kv.KvCache]]:
    """Run a pair whose D reaches the caches of P by detours only; yield its link, P's cache and its own."""
    async with linked_pair("shm", roles=MIX, **config) as pair:
        theirs, ours = pair.owner.allocate_blocks_cache(DESC, KEY), pair.reader.allocate_blocks_cache(DESC)
        link = link_to(pair.decoder, P)
        link.unreachable |= {run.region for run in theirs.geometry.runs}
        link.detour = "as where the kernel does not permit it"
        yield pair, link, theirs, ours
        pair.owner.deallocate_cache(theirs)
        pair.reader.deallocate_cache(ours)


@asyncio_and_trio
async def test_a_peer_gets_so_many_bytes_of_the_pool_and_no_more() -> None:
    """Rooms up to the limit; then it is refused, until it gives one back; what never fits is refused as such."""
    async with out_of_reach(max_detour_nbytes_per_link=64 * 1024) as (pair, link, theirs, ours):
        stamp, before = stamped(theirs), used_nbytes(pair.prompt)
        rooms = [await stage(link, TARGET, [n], BOTH, 4096, is_write=n % 2 == 0) for n in range(8)]
        assert used_nbytes(pair.prompt) - before == 64 * 1024
        with pytest.raises(kv.LinkBusyError, match="max_detour_nbytes_per_link"):
            await pair.reader.pull_blocks(KEY, ours, [3], [5])
        link.post(CloseRead(rooms[0].lease))
        await pair.reader.pull_blocks(KEY, ours, [3], [5])
        expect(ours.tensors, stamp, [5], src_blocks=[3])
        for room in rooms[1:]:
            link.post(CloseRead(room.lease))
        await pair.reader.push_blocks(KEY, ours, range(8), range(8))
        with pytest.raises(kv.ParameterError, match="move less at once"):
            await pair.reader.pull_blocks(KEY, ours, range(9), range(9))
        await pair.flush()
        assert used_nbytes(pair.prompt) == before


async def test_by_default_a_peer_gets_a_quarter_of_the_pool() -> None:
    """Of 1 MiB, 256 KiB: padding counts, and nothing is kept after a refusal."""
    async with out_of_reach() as (pair, link, _, _):
        tiny = pair.owner.allocate_blocks_cache(kv.CacheDesc(600, (2, 1), "uint8"), kv.BlocksCacheKey(P, 1))
        before = used_nbytes(pair.prompt)
        with pytest.raises(kv.ParameterError, match="at most 262144"):
            await stage(link, Target("blocks", 0, 1), [0], Tensors(0, 513), 1, is_write=False)
        assert used_nbytes(pair.prompt) == before
        room = await stage(link, Target("blocks", 0, 1), [0], Tensors(0, 512), 1, is_write=False)
        link.post(CloseRead(room.lease))
        await pair.flush()
        assert used_nbytes(pair.prompt) == before
        pair.owner.deallocate_cache(tiny)


async def test_rooms_of_all_peers_together_have_a_limit_and_those_in_quarantine_count() -> None:
    """A peer that comes back as a new life again and again does not get more of the pool each time."""
    async with out_of_reach(max_detour_nbytes_per_link=64 * 1024) as (pair, _, _, _):
        blocks = list(range(8))
        for life in range(3):
            async with kv.Cluster(cluster_id=3, role=kv.Role.MIX, pool="64KiB") as again:
                (await again.link_clusters([kv.ClusterInfo(P, pair.prompt.address)])).raise_for_status()
                link = link_to(again, P)
                if life == 2:
                    with pytest.raises(kv.LinkBusyError, match="all peers"):
                        await stage(link, TARGET, blocks, BOTH, 4096, is_write=True)
                else:
                    await stage(link, TARGET, blocks, BOTH, 4096, is_write=True)
                    (await pair.prompt.unlink_clusters([3], force=True)).raise_for_status()
                    await eventually(lambda: not again.links, "its half gone")


@asyncio_and_trio
async def test_a_room_that_is_given_back_in_the_middle_of_its_commit_is_kept_until_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The writer gives up while the owner copies from its room: nobody else gets that memory before the copy ends."""
    async with out_of_reach() as (pair, link, _, _):
        before = used_nbytes(pair.prompt)
        room = await stage(link, TARGET, [1], BOTH, 4096, is_write=True)
        reached, may_go_on, copy_runs = anyio.Event(), anyio.Event(), LocalCopier.copy_runs

        async def slowly(*arguments: Any) -> None:
            reached.set()
            await may_go_on.wait()
            await copy_runs(*arguments)

        monkeypatch.setattr(LocalCopier, "copy_runs", slowly)
        link.post(Commit(1000, room.lease))
        await reached.wait()
        link.post(CloseRead(room.lease))
        await pair.flush()
        assert used_nbytes(pair.prompt) - before == 8192
        may_go_on.set()
        await eventually(lambda: used_nbytes(pair.prompt) == before, "the room given back")


LIES: dict[str, dict[str, Any]] = {
    "outside": {"runs": (TensorRun(0, 2**40, 4096, 2),)},
    "nowhere": {"runs": (TensorRun(99, 0, 4096, 2),)},
    "too few tensors": {"num_tensors": 1, "runs": (TensorRun(0, 0, 4096, 1),)},
    "too few slots": {"num_slots": 1},
    "too small": {"slot_nbytes": 8},
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("is_write", [False, True], ids=["pull", "push"])
async def test_an_owner_that_lies_about_a_room_is_a_typed_error(
    lie: str, is_write: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The room is not the one that was asked for, or no memory at all: no byte moves, and the room is given back."""
    async with out_of_reach() as (pair, link, _, ours):
        before = used_nbytes(pair.prompt)
        server, answer_in = link_to(pair.prompt, D), link._take

        def lying(message: Any) -> None:
            if isinstance(message, Found) and isinstance(link._answers[message.seq].asked, Stage):
                geometry = msgspec.structs.replace(message.geometry, **LIES[lie])
                message = msgspec.structs.replace(message, geometry=geometry)
            answer_in(message)

        monkeypatch.setattr(link, "_take", lying)
        move = pair.reader.push_blocks if is_write else pair.reader.pull_blocks
        with pytest.raises((kv.ProtocolError, kv.ParameterError, kv.TransferTimeoutError)):
            await move(KEY, ours, [1, 2], [3, 4], timeout_s=0.5)
        await pair.flush()
        assert used_nbytes(pair.prompt) == before
        assert server.is_open


async def test_a_fault_in_a_detour_ends_that_detour_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The owner cannot copy, for a reason that nobody thought of: the caller is told, and the owner lives."""
    async with out_of_reach() as (pair, _, theirs, ours):
        before = used_nbytes(pair.prompt)

        async def fail(*_: object) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(LocalCopier, "copy_runs", fail)
            with pytest.raises(kv.KVLinkError, match="can't start new thread"):
                await pair.reader.pull_blocks(KEY, ours, [0], [0])
        assert "a detour for cluster 2 failed" in caplog.text
        assert used_nbytes(pair.prompt) == before
        stamp = stamped(theirs)
        await pair.reader.pull_blocks(KEY, ours, [0], [1])
        expect(ours.tensors, stamp, [1], src_blocks=[0])
