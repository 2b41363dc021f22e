"""What a call costs in questions, messages and mappings: counted, never timed. Source: DIFFERENCES.md."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import kvlink as kv
from kvlink.links.table import LinkTable
from kvlink.memory import strided
from kvlink.memory.copying import Copier
from kvlink.memory.pool import Bytes
from kvlink.memory.strided import Copy
from kvlink.transports import shm_endpoint
from tests.spec.harness import D, P, Pair, cluster, linked_pair
from tests.support.inside import link_to, num_memfd_mappings

MIXED = (kv.Role.MIX, kv.Role.MIX)
DESC = kv.CacheDesc(4, (8, 128), "uint8")
KEY = kv.BlocksCacheKey(P)


def counts(pair: Pair) -> tuple[int, int, int]:
    """Questions of D, messages of D, messages of P, so far."""
    ours, theirs = link_to(pair.decoder, P).stats, link_to(pair.prompt, D).stats
    return ours.round_trips, ours.messages_sent, theirs.messages_sent


@pytest.mark.parametrize(
    ("name", "first", "later"),
    [
        # (questions of ours, messages of ours, messages of the peer)
        ("pull_blocks", (1, 1, 1), (0, 0, 0)),
        ("pull_blocks of many", (1, 1, 1), (0, 0, 0)),
        ("push_blocks", (1, 1, 1), (0, 0, 0)),
        ("push_blocks of many", (1, 1, 1), (0, 0, 0)),
        ("push_cache", (1, 1, 1), (0, 0, 0)),
        ("pull_cache", (1, 2, 1), (1, 2, 1)),  # the second of ours gives the lease back; nobody waits for it
        ("pull_blocks of a slot", (1, 2, 1), (1, 2, 1)),
        ("prepared pull", (1, 1, 1), (0, 0, 0)),
        ("prepared push", (1, 1, 1), (0, 0, 0)),
    ],
)
async def test_messages_of_a_movement(
    transport: str, name: str, first: tuple[int, int, int], later: tuple[int, int, int]
) -> None:
    """What is asked and said for each movement, the first time and after that."""
    async with linked_pair(transport, roles=MIXED) as pair:
        paged = pair.owner.allocate_blocks_cache(DESC, KEY)
        plain = pair.owner.allocate_cache(DESC)
        own = pair.reader.allocate_blocks_cache(DESC)
        by_id = kv.CacheKeyByIdAndIndex(P, plain.cache_id, 2)
        reader, many = pair.reader, list(range(8))

        async def prepared_pull() -> kv.TransferReport:
            return await (await reader.prepare_pull(KEY, own)).pull([1], [2])

        async def prepared_push() -> kv.TransferReport:
            return await (await reader.prepare_push(KEY, own)).push([1], [2])

        calls: dict[str, Callable[[], Coroutine[Any, Any, kv.TransferReport]]] = {
            "pull_blocks": lambda: reader.pull_blocks(KEY, own, [1], [2]),
            "pull_blocks of many": lambda: reader.pull_blocks(KEY, own, many, many[::-1]),
            "push_blocks": lambda: reader.push_blocks(KEY, own, [1], [2]),
            "push_blocks of many": lambda: reader.push_blocks(KEY, own, many, many[::-1]),
            "push_cache": lambda: reader.push_cache(by_id, own, 3),
            "pull_cache": lambda: reader.pull_cache(by_id, own, 3),
            "pull_blocks of a slot": lambda: reader.pull_blocks(by_id, own, [], [3]),
            "prepared pull": prepared_pull,
            "prepared push": prepared_push,
        }
        assert paged.is_valid
        for expected in (first, later, later):
            before = counts(pair)
            await calls[name]()
            after = counts(pair)
            assert tuple(b - a for a, b in zip(before, after, strict=True)) == expected


async def test_every_cluster_of_a_call_is_dialled_at_once(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handshakes of one `link_clusters` run at the same time: none is answered here before all have begun."""
    num = 8
    arrived, all_there = 0, anyio.Event()
    accept = LinkTable.accept

    async def wait_for_all(self: LinkTable, stream: Any) -> None:
        nonlocal arrived
        arrived += 1
        if arrived == num:
            all_there.set()
        await all_there.wait()
        await accept(self, stream)

    monkeypatch.setattr(LinkTable, "accept", wait_for_all)
    async with AsyncExitStack() as stack:
        owners = [await stack.enter_async_context(cluster(10 + n, kv.Role.PROMPT)) for n in range(num)]
        decoder = await stack.enter_async_context(cluster(D, kv.Role.DECODER))
        infos = [kv.ClusterInfo(owner.cluster_id, owner.address) for owner in owners]
        (await decoder.link_clusters(infos, timeout_s=20)).raise_for_status()
        assert all(link_to(decoder, info.cluster_id).transport == transport for info in infos)


async def test_pages_are_entered_when_the_link_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer's pool is entered into the page table in the background, and not before the handshake has ended."""
    steps: list[str] = []
    prefault, finish = Copier.prefault, LinkTable._open

    def note(self: Copier, memory: Bytes, *, for_writing: bool) -> Callable[[], None]:
        steps.append("pages")
        return prefault(self, memory, for_writing=for_writing)

    def note_end(self: LinkTable, *arguments: Any, **options: Any) -> Any:
        steps.append("link")
        return finish(self, *arguments, **options)

    monkeypatch.setattr(Copier, "prefault", note)
    monkeypatch.setattr(LinkTable, "_open", note_end)
    async with linked_pair("shm"):
        # on either side: the pool and the state words
        assert steps == ["link", "pages", "pages"] * 2


async def test_a_large_mapping_is_taken_apart_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that ends leaves no mapping behind, and a large one is emptied by the copy threads before it goes: the
    loop would be held by it. Small ones go at once.
    """
    evicted: list[int] = []
    evict = Copier.evict

    def note(self: Copier, memory: Bytes) -> None:
        evicted.append(len(memory))
        evict(self, memory)

    monkeypatch.setattr(Copier, "evict", note)
    for pool, expected in (("32MiB", [32 << 20] * 2), ("1MiB", [])):
        evicted.clear()
        before = num_memfd_mappings()
        async with linked_pair("shm", pool=pool) as pair:
            link = link_to(pair.decoder, P)
            await pair.decoder.unlink_clusters([kv.ClusterInfo(P, pair.prompt.address)], timeout_s=10)
            await link.closed.wait()
            while pair.prompt.links:
                await anyio.lowlevel.checkpoint()
            assert evicted == expected
        assert num_memfd_mappings() == before


@pytest.mark.parametrize("direction", ["pull", "push"])
@pytest.mark.parametrize("num_blocks", [3, 40, 128])
async def test_every_byte_is_copied_once(monkeypatch: pytest.MonkeyPatch, direction: str, num_blocks: int) -> None:
    """A movement is one strided copy for each run of blocks, whatever the number of tensors, and copies each byte once:
    the small way at once, in one numpy call each, and the large way in threads, in one call for every two.
    """
    copied: list[tuple[int, int]] = []
    copy_rows, copy_two = strided.copy_rows, strided.copy_two
    num_calls = 0

    def note(*arguments: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        copied.append(arguments[-2:])
        copy_rows(*arguments)

    def note_two(one: Copy, other: Copy) -> None:
        nonlocal num_calls
        num_calls += 1
        copied.extend((one[-2:], other[-2:]))
        copy_two(one, other)

    monkeypatch.setattr(strided, "copy_rows", note)
    monkeypatch.setattr(strided, "copy_two", note_two)
    monkeypatch.setattr(shm_endpoint, "copy_rows", note)
    desc = kv.CacheDesc(16, (256, 2048), "uint8")
    async with linked_pair("shm", roles=MIXED, pool="9MiB") as pair:
        theirs, own = pair.owner.allocate_blocks_cache(desc, KEY), pair.reader.allocate_blocks_cache(desc)
        move = pair.reader.pull_blocks if direction == "pull" else pair.reader.push_blocks
        scattered = [2 * block for block in range(num_blocks)]
        for _ in range(2):  # the first time looks the cache up
            copied.clear()
            num_calls = 0
            report = await move(KEY, own, scattered, scattered)
            assert copied == [(2048, 16)] * num_blocks
            assert num_calls == (num_blocks if num_blocks == 3 else num_blocks // 2)
            assert report.num_extents == num_blocks
            assert report.nbytes == sum(nbytes * rows for nbytes, rows in copied)
        copied.clear()
        in_one_piece = list(range(num_blocks))
        report = await move(KEY, own, in_one_piece, in_one_piece)
        assert report.num_extents == 1
        assert {nbytes for nbytes, _ in copied} == {2048 * num_blocks}
        assert sum(rows for _, rows in copied) == 16
        assert theirs.is_valid


@pytest.mark.parametrize("is_scattered", [True, False])
@pytest.mark.parametrize("direction", ["pull", "push"])
async def test_nothing_is_copied_to_another_place_first(direction: str, is_scattered: bool) -> None:
    """A movement of 4 or 8 MiB takes less than 256 KiB of memory while it goes on: no temporary, however large."""
    desc = kv.CacheDesc(16, (256, 2048), "uint8")
    async with linked_pair("shm", roles=MIXED, pool="9MiB") as pair:
        theirs, own = pair.owner.allocate_blocks_cache(desc, KEY), pair.reader.allocate_blocks_cache(desc)
        move = pair.reader.pull_blocks if direction == "pull" else pair.reader.push_blocks
        order = np.random.default_rng(1).permutation(256) if is_scattered else np.arange(128)
        await move(KEY, own, order[:1], order[:1])
        tracemalloc.start()
        try:
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            report = await move(KEY, own, order, order[::-1] if is_scattered else order)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert report.nbytes == len(order) * 16 * 2048
        assert peak - before < 256 * 1024
        assert theirs.is_valid
