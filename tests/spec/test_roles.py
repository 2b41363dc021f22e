"""What each role may do, and becoming another one. Source: the spec, sections 12 and 4.4."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import kvlink as kv
from tests.spec.harness import D, P, cluster, link, linked_pair, stamped
from tests.support.inside import link_to
from tests.support.loops import every_loop
from tests.support.pattern import expect

PROMPT, DECODER, MIX = kv.Role.PROMPT, kv.Role.DECODER, kv.Role.MIX
DESC = kv.CacheDesc(2, (4, 64), "uint8")
HOST = kv.CacheDesc(2, (4, 64), "uint8", kv.Placement.HOST)
NOWHERE = kv.CacheKeyByIdAndIndex(9, 1)


class Ready(kv.LayerSynchronizer):
    """Every layer is there already."""

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


async def allocate(manager: kv.KvCacheManager) -> None:
    """Allocate without keys, and give back."""
    for cache in (manager.allocate_cache(DESC), manager.allocate_blocks_cache(DESC)):
        manager.deallocate_cache(cache)


async def allocate_with_keys(manager: kv.KvCacheManager) -> None:
    """Allocate with a key, and give back."""
    manager.deallocate_cache(manager.allocate_cache(DESC, [kv.CacheKey(P, 1)]))


async def allocate_blocks_with_key(manager: kv.KvCacheManager) -> None:
    """Allocate a paged cache with a key, and give back."""
    manager.deallocate_cache(manager.allocate_blocks_cache(DESC, kv.BlocksCacheKey(P)))


async def copy_and_swap(manager: kv.KvCacheManager) -> None:
    """Make every local copy."""
    caches = [manager.allocate_cache(DESC), manager.allocate_cache(DESC), manager.allocate_blocks_cache(HOST)]
    await manager.copy_cache(caches[0], caches[1])
    await manager.copy_blocks(caches[0], {0: [1]})
    await manager.swap_blocks(caches[0], caches[2], {0: 1})
    for cache in caches:
        manager.deallocate_cache(cache)


async def remove_key(manager: kv.KvCacheManager) -> None:
    """Remove a key that is not there."""
    manager.remove_cache_key(kv.CacheKey(P, 1))


async def transfer(manager: kv.KvCacheManager) -> None:
    """Start a layer-wise push to nobody; may means: it fails for want of a link."""
    cache = manager.allocate_cache(DESC)
    try:
        config = kv.TransferWithCacheKeyConfig(NOWHERE, range(1), range(1))
        task = manager.transfer_cache_async(cache, Ready(), [config])
        assert await task.synchronize() is kv.StatusCode.LLM_NOT_YET_LINK
    finally:
        manager.deallocate_cache(cache)


async def with_a_cache(manager: kv.KvCacheManager, move: Callable[[kv.KvCache], Awaitable[Any]]) -> None:
    """Move something to or from nobody; may means: it fails for want of a link."""
    cache = manager.allocate_blocks_cache(DESC)
    try:
        with pytest.raises(kv.NotLinkedError):
            await move(cache)
    finally:
        manager.deallocate_cache(cache)


async def pull_cache(manager: kv.KvCacheManager) -> None:
    """Pull a slot from nobody."""
    await with_a_cache(manager, lambda cache: manager.pull_cache(NOWHERE, cache))


async def pull_blocks(manager: kv.KvCacheManager) -> None:
    """Pull blocks from nobody."""
    await with_a_cache(manager, lambda cache: manager.pull_blocks(kv.BlocksCacheKey(9), cache, [0], [0]))


async def push_cache(manager: kv.KvCacheManager) -> None:
    """Push a slot to nobody."""
    await with_a_cache(manager, lambda cache: manager.push_cache(NOWHERE, cache))


async def push_blocks(manager: kv.KvCacheManager) -> None:
    """Push blocks to nobody."""
    await with_a_cache(manager, lambda cache: manager.push_blocks(kv.BlocksCacheKey(9), cache, [0], [0]))


async def register(manager: kv.KvCacheManager) -> None:
    """Register memory, with keys, and unregister it."""
    buffers = [np.zeros((4, 64), np.uint8) for _ in range(2)]
    manager.unregister_cache(manager.register_cache(DESC, buffers, [kv.CacheKey(P, 1)]))
    manager.unregister_cache(manager.register_blocks_cache(DESC, buffers, kv.BlocksCacheKey(P)))


Call = Callable[[kv.KvCacheManager], Awaitable[None]]
MATRIX: list[tuple[Call, set[kv.Role]]] = [
    (allocate, {PROMPT, DECODER, MIX}),
    (allocate_with_keys, {PROMPT, MIX}),
    (allocate_blocks_with_key, {PROMPT, MIX}),
    (copy_and_swap, {PROMPT, DECODER, MIX}),
    (remove_key, {PROMPT, MIX}),
    (transfer, {PROMPT, MIX}),
    (pull_cache, {DECODER, MIX}),
    (pull_blocks, {DECODER, MIX}),
    (push_cache, {PROMPT, DECODER, MIX}),
    (push_blocks, {PROMPT, DECODER, MIX}),
    (register, {PROMPT, DECODER, MIX}),
]


@pytest.mark.parametrize("role", kv.Role)
async def test_role_matrix(role: kv.Role) -> None:
    """Each call is for the roles of the matrix; kvlink: MIX may do whatever either may, and any role may push and
    register. Source: the spec, section 12, and DIFFERENCES.md.
    """
    async with cluster(P, role, pool="64KiB", host_pool="64KiB") as made:
        for call, allowed in MATRIX:
            if role in allowed:
                await call(made.kv_cache_manager)
                continue
            with pytest.raises(kv.RoleError, match=role.name) as caught:
                await call(made.kv_cache_manager)
            assert caught.value.status is kv.StatusCode.LLM_PARAM_INVALID


async def test_role_before_all_else() -> None:
    """A role violation is LLM_PARAM_INVALID, before the other arguments are looked at. Source: the spec, section 6."""
    async with cluster(P, DECODER, pool="64KiB") as made:
        manager = made.kv_cache_manager
        cache = manager.allocate_cache(DESC)
        with pytest.raises(kv.RoleError):
            manager.transfer_cache_async(cache, Ready(), [], [9])
        with pytest.raises(kv.RoleError):
            manager.remove_cache_key("key")  # type: ignore[arg-type]  # would be refused next
    async with cluster(P, PROMPT, pool="64KiB") as made:
        cache = made.kv_cache_manager.allocate_cache(DESC)
        with pytest.raises(kv.RoleError):
            await made.kv_cache_manager.pull_cache(None, cache, -5)  # type: ignore[arg-type]  # would be refused next


async def test_who_links(transport: str) -> None:
    """link_clusters, check_link_status: PROMPT no (status / exception), DECODER yes; kvlink: MIX yes.

    Source: the spec, section 12, and DIFFERENCES.md.
    """
    async with linked_pair(transport, roles=(PROMPT, DECODER)) as pair, cluster(3, MIX, pool="64KiB") as mix:
        info = kv.ClusterInfo(3, mix.address)
        results = await pair.prompt.link_clusters([info])
        assert results.status is kv.StatusCode.LLM_PARAM_INVALID
        assert isinstance(results.error, kv.RoleError)
        with pytest.raises(kv.RoleError):
            await pair.prompt.check_link_status(D)
        assert (await pair.decoder.check_link_status(P)).is_ok
        await link(pair.decoder, 3, mix.address, transport)
        await link(mix, P, pair.prompt.address, transport)
        assert (await mix.check_link_status([P, D])).is_ok


@pytest.mark.parametrize("role", kv.Role)
async def test_who_unlinks(transport: str, role: kv.Role) -> None:
    """unlink_clusters: PROMPT, DECODER and MIX. Source: the spec, section 12."""
    roles = (role, DECODER) if role is not DECODER else (PROMPT, DECODER)
    async with linked_pair(transport, roles=roles) as pair:
        one, peer = (pair.decoder, P) if role is DECODER else (pair.prompt, D)
        (await one.unlink_clusters([peer])).raise_for_status()
        assert not list(one.links)


@every_loop
async def test_two_mixes(transport: str) -> None:
    """kvlink: two MIX clusters pull from each other over one link. Source: the spec, section 12, and DIFFERENCES.md."""
    async with linked_pair(transport, roles=(MIX, MIX)) as pair:
        caches = [
            pair.owner.allocate_cache(DESC, [kv.CacheKey(P, 1)]),
            pair.reader.allocate_cache(DESC, [kv.CacheKey(D, 1)]),
        ]
        stamps = [stamped(caches[0]), stamped(caches[1], D)]
        await pair.owner.pull_cache(kv.CacheKey(D, 1), caches[0], 2)
        await pair.reader.pull_cache(kv.CacheKey(P, 1), caches[1], 2)
        expect(caches[0].tensors, stamps[1], [2], src_blocks=[0])
        expect(caches[1].tensors, stamps[0], [2], src_blocks=[0])


# Section 4.4.


async def test_switch_to_the_same_role() -> None:
    """Role equal to the current: LLM_PARAM_INVALID. Source: the spec, section 4.4."""
    for role in kv.Role:
        async with cluster(P, role, pool="64KiB") as made:
            with pytest.raises(kv.ParameterError) as caught:
                await made.switch_role(role)
            assert caught.value.status is kv.StatusCode.LLM_PARAM_INVALID
            assert made.role is role
            with pytest.raises(TypeError):
                await made.switch_role(1)  # type: ignore[arg-type]  # refused


async def test_switch_while_linked(transport: str) -> None:
    """Any link alive: LLM_EXIST_LINK, and nothing has changed. Source: the spec, section 4.4."""
    async with linked_pair(transport) as pair:
        address = pair.prompt.address
        for one, role in ((pair.prompt, DECODER), (pair.decoder, MIX)):
            before = one.role
            with pytest.raises(kv.LinkExistsError) as caught:
                await one.switch_role(role)
            assert caught.value.status is kv.StatusCode.LLM_EXIST_LINK
            assert one.role is before
        assert pair.prompt.address == address
        assert (await pair.decoder.check_link_status(P)).is_ok


async def test_switch_mix_to_decoder_to_prompt(transport: str) -> None:
    """MIX to DECODER to PROMPT is a tested path. Listening stops (if it did) and starts (if target is PROMPT).

    Source: the spec, section 4.4.
    """
    async with cluster(P, MIX, pool="64KiB") as one, cluster(D, DECODER, pool="64KiB") as two:
        first = one.address
        await one.switch_role(DECODER)
        with pytest.raises(kv.NotLinkedError):
            _ = one.address
        results = await two.link_clusters([kv.ClusterInfo(P, first)], timeout_s=2)
        assert results.status is kv.StatusCode.LLM_LINK_FAILED
        await one.switch_role(PROMPT)
        await link(two, P, one.address, transport)


async def test_switch_and_listen() -> None:
    """kvlink: no option has to be set, and `listen` says where from now on; None is the role's own default.

    Source: the spec, section 4.4, and DIFFERENCES.md.
    """
    async with cluster(P, DECODER, pool="64KiB") as made:
        await made.switch_role(PROMPT)
        host, _, port = made.address.rpartition(":")
        assert (host, int(port) > 0) == ("127.0.0.1", True)
        await made.switch_role(DECODER, listen="127.0.0.1:0")
        assert made.address.startswith("127.0.0.1:")


async def test_what_survives_a_switch(transport: str) -> None:
    """Caches, cache ids and bound keys survive; only permission changes. Source: the spec, section 4.4."""
    async with linked_pair(transport) as pair:
        key = kv.CacheKey(P, 1)
        cache = pair.owner.allocate_cache(DESC, [key])
        blocks = pair.owner.allocate_blocks_cache(DESC, kv.BlocksCacheKey(P))
        stamp, cache_id, tensor = stamped(cache), cache.cache_id, cache.tensors[1]
        block_stamp = stamped(blocks)
        (await pair.decoder.unlink_clusters([P])).raise_for_status()
        await pair.prompt.switch_role(DECODER)
        with pytest.raises(kv.RoleError):
            pair.owner.remove_cache_key(key)
        assert cache.is_valid
        assert cache.cache_id == cache_id
        assert cache.tensors[1] is tensor
        await pair.prompt.switch_role(PROMPT)
        await link(pair.decoder, P, pair.prompt.address, transport)
        into = pair.reader.allocate_cache(DESC)
        await pair.reader.pull_cache(kv.CacheKeyByIdAndIndex(P, cache_id, 3), into)
        expect(into.tensors, stamp, [0], src_blocks=[3])
        await pair.reader.pull_blocks(kv.BlocksCacheKey(P), into, [3], [2])
        expect(into.tensors, block_stamp, [2], src_blocks=[3])
        await pair.reader.pull_cache(key, into, 1)
        expect(into.tensors, stamp, [1], src_blocks=[0])


async def test_peers_learn_the_new_role(transport: str) -> None:
    """A peer that links anew sees the new role. Source: the spec, section 4.4."""
    async with linked_pair(transport) as pair:
        assert link_to(pair.decoder, P).role is PROMPT
        (await pair.decoder.unlink_clusters([P])).raise_for_status()
        await pair.prompt.switch_role(MIX)
        await link(pair.decoder, P, pair.prompt.address, transport)
        assert link_to(pair.decoder, P).role is MIX
