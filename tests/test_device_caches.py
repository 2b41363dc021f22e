"""Caches in CUDA memory where nothing can reach it: every way to move them ends typed, and all else goes on.

There is no device. The buffers of a device cache lie where no memory is, so whatever touched them would not live to
tell. Over UCX it is the real library that is asked to register them, and that has no way to move them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest

import kvlink as kv
from kvlink.memory import devicebuffers
from kvlink.memory.cuda import Allocation
from kvlink.transports.ucx import registry
from tests.spec.harness import LayerGate
from tests.support import inside
from tests.support.pattern import Stamp, expect, fill
from tests.support.ucx import need_ucx

P, D = 1, 2
NUM = 8
NBYTES = 4096
DESC = kv.CacheDesc(4, (NUM, NBYTES), "uint8")
BLOCKS = list(range(NUM))
NOWHERE = 0x7E00_0000_0000
"""Where no memory is."""

PAGED, CONTIGUOUS, HOST = kv.BlocksCacheKey(P, 1), kv.CacheKey(P, 5), kv.BlocksCacheKey(P, 2)


class OnDevice:
    """A buffer in CUDA memory, by its own account."""

    def __init__(self, index: int) -> None:
        self.address = NOWHERE + index * NUM * NBYTES
        self.__cuda_array_interface__ = {
            "shape": (NUM, NBYTES),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }


def on_device() -> list[Any]:
    """Return the buffers of a cache."""
    return [OnDevice(index) for index in range(DESC.num_tensors)]


@pytest.fixture(params=["shm", "ucx"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name what moves the bytes; let the driver know device 0."""
    if request.param == "ucx":
        need_ucx()
    monkeypatch.setattr(devicebuffers, "find_allocation", lambda name, address: Allocation(0, NOWHERE, 1 << 24))
    return str(request.param)


class Scene:
    """P with a paged and a contiguous cache on a device and one in its pool; D with one of each, linked to P."""

    def __init__(self, prompt: kv.Cluster, decoder: kv.Cluster) -> None:
        self.prompt, self.decoder = prompt, decoder
        owner, self.manager = prompt.kv_cache_manager, decoder.kv_cache_manager
        self.paged = owner.register_blocks_cache(DESC, on_device(), PAGED)
        self.contiguous = owner.register_cache(DESC, on_device(), [CONTIGUOUS])
        self.host = owner.allocate_blocks_cache(DESC, HOST)
        self.device = self.manager.register_blocks_cache(DESC, on_device())
        self.pool = self.manager.allocate_blocks_cache(DESC)
        fill(self.host.tensors, Stamp(P, 1, 1))
        self.forget()

    def forget(self) -> None:
        """Let our host cache hold what nobody sends."""
        fill(self.pool.tensors, Stamp(9, 9, 9))

    async def check_alive(self) -> None:
        """Check that nothing came, that nothing is in flight, and that caches of the host still move both ways."""
        expect(self.pool.tensors, Stamp(9, 9, 9))
        assert all(cache.is_quiet() for cache in (self.paged, self.contiguous, self.host, self.device, self.pool))
        link = inside.link_to(self.decoder, P)
        await link.ping()
        await self.manager.pull_blocks(HOST, self.pool, BLOCKS, BLOCKS)
        expect(self.pool.tensors, Stamp(P, 1, 1))
        await self.manager.push_blocks(HOST, self.pool, [3], [4])
        expect(self.host.tensors, Stamp(P, 1, 1), [4], src_blocks=[3])
        fill(self.host.tensors, Stamp(P, 1, 1))
        self.forget()


@asynccontextmanager
async def scene(transport: str) -> AsyncIterator[Scene]:
    """Set the scene."""
    config = kv.ClusterConfig(transports=(transport,), operation_timeout_s=5)
    async with (
        kv.Cluster(cluster_id=P, role=kv.Role.MIX, pool="1MiB", config=config) as prompt,
        kv.Cluster(cluster_id=D, role=kv.Role.MIX, pool="1MiB", config=config) as decoder,
    ):
        for each in (prompt, decoder):
            inside.take_cuda(each)
        (await decoder.link_clusters([kv.ClusterInfo(P, prompt.address)])).raise_for_status()
        assert inside.link_to(decoder, P).transport == transport
        made = Scene(prompt, decoder)
        yield made
        for manager, cache in (
            *((prompt.kv_cache_manager, cache) for cache in (made.paged, made.contiguous, made.host)),
            *((decoder.kv_cache_manager, cache) for cache in (made.device, made.pool)),
        ):
            manager.deallocate_cache(cache)


async def refused(call: Awaitable[Any], *why: str) -> str:
    """Await what must be refused, and return the words, which must say what is wrong and what to set."""
    with pytest.raises(kv.FeatureNotEnabledError) as caught:
        await call
    assert caught.value.status is kv.StatusCode.LLM_FEATURE_NOT_ENABLED
    if caught.value.report is not None:
        assert not caught.value.report.done
    text = str(caught.value)
    for part in why:
        assert part in text, text
    return text


WHY = {"shm": ("only UCX reaches", "allow_cuda=True"), "ucx": ("CUDA memory", "cuda_ipc", "GPUDirect")}

MOVEMENTS: dict[str, Callable[[Scene], Awaitable[Any]]] = {
    "pull from a device": lambda s: s.manager.pull_blocks(PAGED, s.pool, BLOCKS, BLOCKS),
    "pull one block": lambda s: s.manager.pull_blocks(PAGED, s.pool, [1], [2]),
    "pull into a device": lambda s: s.manager.pull_blocks(HOST, s.device, BLOCKS, BLOCKS),
    "pull one block into a device": lambda s: s.manager.pull_blocks(HOST, s.device, [1], [2]),
    "pull between devices": lambda s: s.manager.pull_blocks(PAGED, s.device, BLOCKS, BLOCKS),
    "pull a slot": lambda s: s.manager.pull_cache(CONTIGUOUS, s.pool, 0),
    "pull a slot into a device": lambda s: s.manager.pull_cache(kv.CacheKeyByIdAndIndex(P, s.host.cache_id), s.device),
    "pull a slot into blocks": lambda s: s.manager.pull_blocks(CONTIGUOUS, s.pool, [], [0]),
    "push to a device": lambda s: s.manager.push_blocks(PAGED, s.pool, BLOCKS, BLOCKS),
    "push from a device": lambda s: s.manager.push_blocks(HOST, s.device, BLOCKS, BLOCKS),
    "push one block from a device": lambda s: s.manager.push_blocks(HOST, s.device, [1], [2]),
    "push a slot": lambda s: s.manager.push_cache(kv.CacheKeyByIdAndIndex(P, s.contiguous.cache_id), s.pool),
    "push a slot from a device": lambda s: s.manager.push_cache(kv.CacheKeyByIdAndIndex(P, s.host.cache_id), s.device),
}


@pytest.mark.parametrize("movement", MOVEMENTS)
async def test_movements_are_refused(transport: str, movement: str) -> None:
    """Each way to pull and push, with the device on either side: twice refused, and then host caches still move."""
    async with scene(transport) as s:
        for _ in range(2):
            await refused(MOVEMENTS[movement](s), *WHY[transport])
        await s.check_alive()
        await refused(MOVEMENTS[movement](s), *WHY[transport])
        await s.check_alive()


async def test_layer_wise_pushes_are_refused(transport: str) -> None:
    """From a device, and into one by key and by address: the task says so, and the receiver hears of it."""
    async with scene(transport) as s:
        by_key = kv.TransferWithCacheKeyConfig(PAGED, range(2), range(2))
        by_address = kv.TransferConfig(P, s.contiguous.tensor_addresses)
        to_host = kv.TransferWithCacheKeyConfig(HOST, range(2), range(2))
        for cache, config, blocks in ((s.pool, by_key, True), (s.pool, by_address, False), (s.device, to_host, True)):
            chosen = (BLOCKS, BLOCKS) if blocks else ()
            task = s.manager.transfer_cache_async(cache, LayerGate(2), [config], *chosen)
            await refused(task, *WHY[transport])
        await s.check_alive()


async def test_tickets_are_refused(transport: str) -> None:
    """Tickets for blocks on a device, to read and to fill: refused; over shm before they are claimed."""
    async with scene(transport) as s:
        owner = s.prompt.kv_cache_manager
        offered, expected = owner.offer_blocks(s.paged, [1, 2]), owner.expect_blocks(s.paged, [3, 4])
        await refused(s.manager.pull_blocks(offered.token, s.pool, [], [1, 2]), *WHY[transport])
        await refused(s.manager.push_blocks(expected.token, s.pool, [1, 2], []), *WHY[transport])
        for ticket in (offered, expected):
            if transport == "ucx":
                assert (await ticket.outcome(timeout_s=5)).kind is not kv.TicketEnding.DONE
            else:
                assert ticket.is_live
                ticket.revoke()
        of_host = owner.offer_blocks(s.host, [1, 2])
        await refused(s.manager.pull_blocks(of_host.token, s.device, [], [1, 2]), *WHY[transport])
        await s.check_alive()


@pytest.mark.ucx
async def test_ucx_says_that_it_has_no_way(monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    """Registered, and UCX finds no way between the two memories: typed, nothing is moved, and the link stays.

    Nothing tells beforehand: that is how RDMA without GPUDirect looks.
    """
    if transport != "ucx":
        pytest.skip("only UCX is asked")
    monkeypatch.setattr(registry, "_EMPTY_KEY_NBYTES", 0)
    many = kv.CacheDesc(4, (100 * NUM, NBYTES // 100), "uint8")
    async with scene(transport) as s:
        for movement, move in MOVEMENTS.items():
            if "layer" not in movement:
                text = await refused(move(s), "no way", "GPUDirect")
                assert "posix" in text or "cma" in text
        await s.check_alive()
        # More requests than one row has, and that cannot be joined.
        big = s.manager.register_blocks_cache(many, on_device_of(many))
        source = s.prompt.kv_cache_manager.allocate_blocks_cache(many, kv.BlocksCacheKey(P, 7))
        blocks = list(range(0, 100 * NUM, 2))
        await refused(s.manager.pull_blocks(kv.BlocksCacheKey(P, 7), big, blocks, blocks), "no way")
        await refused(s.manager.push_blocks(kv.BlocksCacheKey(P, 7), big, blocks, blocks), "no way")
        await s.check_alive()
        s.manager.deallocate_cache(big)
        s.prompt.kv_cache_manager.deallocate_cache(source)


@pytest.mark.ucx
async def test_host_memory_that_ucx_refuses_takes_a_detour(monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    """A registration that UCX refuses leaves pulls and pushes right; the link says why they take a detour."""
    if transport != "ucx":
        pytest.skip("only UCX registers")
    map_it = registry.Registry.map
    memory = [np.zeros((NUM, NBYTES), np.uint8) for _ in range(4)]

    def map_most(self: registry.Registry, region: Any) -> registry.Registered:
        if region.address == min(int(each.ctypes.data) for each in memory):
            raise kv.LinkError("no more than so much memory may be locked")
        return map_it(self, region)

    async with scene(transport) as s:
        monkeypatch.setattr(registry.Registry, "map", map_most)
        owner, key = s.prompt.kv_cache_manager, kv.BlocksCacheKey(P, 3)
        cache = owner.register_blocks_cache(DESC, memory, key)
        fill(cache.tensors, Stamp(P, 1, 3))
        await s.manager.pull_blocks(key, s.pool, BLOCKS, BLOCKS)
        expect(s.pool.tensors, Stamp(P, 1, 3))
        assert "may be locked" in str(inside.link_to(s.decoder, P).detour)
        await s.manager.push_blocks(key, s.pool, [1], [2])
        expect(cache.tensors, Stamp(P, 1, 3), [2], src_blocks=[1])
        owner.deallocate_cache(cache)
        s.forget()
        await s.check_alive()


@pytest.mark.ucx
async def test_memory_that_was_given_up_meanwhile_is_no_refusal(transport: str) -> None:
    """A region that its owner has given up before UCX could register it: there is none, and no detour to it either."""
    if transport != "ucx":
        pytest.skip("only UCX registers")
    async with scene(transport) as s:
        inside.link_to(s.prompt, D).endpoint.share([999], for_writing=False)
        endpoint = inside.link_to(s.decoder, P).endpoint
        with anyio.fail_after(5):
            await endpoint.reach([999], for_writing=False)
        assert endpoint.region_nbytes(999) == 0
        await s.check_alive()


def on_device_of(desc: kv.CacheDesc) -> list[Any]:
    """Return buffers for another description."""
    made = on_device()
    for buffer in made:
        buffer.__cuda_array_interface__["shape"] = desc.shape
    return made


async def test_copies_within_a_cluster_are_refused(transport: str) -> None:
    """`copy_cache`, `copy_blocks` and `swap_blocks` leave a device to the framework, and say so."""
    async with scene(transport) as s:
        host = kv.CacheDesc(4, (NUM, NBYTES), "uint8", kv.Placement.HOST)
        other = s.manager.register_blocks_cache(host, [np.zeros((NUM, NBYTES), np.uint8) for _ in range(4)])
        for call in (
            s.manager.copy_cache(s.pool, s.device),
            s.manager.copy_cache(s.device, s.pool),
            s.manager.copy_blocks(s.device, {0: [1]}),
            s.manager.swap_blocks(other, s.device, {0: 1}),
            s.manager.swap_blocks(s.device, other, {0: 1}),
        ):
            await refused(call, "device 0", "copy_()")
        s.manager.deallocate_cache(other)
        await s.check_alive()


async def test_the_handle_of_a_device_cache(transport: str) -> None:
    """It gives back the very objects and their addresses; they are kept while registered, and let go of after."""
    config = kv.ClusterConfig(transports=(transport,))
    async with kv.Cluster(cluster_id=P, role=kv.Role.MIX, pool="1MiB", config=config) as cluster:
        inside.take_cuda(cluster)
        manager = cluster.kv_cache_manager
        buffers = on_device()
        watches = [weakref.ref(buffer) for buffer in buffers]
        cache = manager.register_blocks_cache(DESC, buffers, PAGED)
        assert (cache.device, cache.is_registered, cache.is_blocks) == (0, True, True)
        assert all(mine is theirs for mine, theirs in zip(cache.tensors, buffers, strict=True))
        assert cache.tensor_addresses == [buffer.address for buffer in buffers]
        del buffers
        gc.collect()
        assert all(watch() is not None for watch in watches)
        manager.unregister_cache(cache)
        gc.collect()
        assert all(watch() is None for watch in watches)
        assert (cache.tensors, cache.tensor_addresses) == ((), [])
        host = manager.allocate_blocks_cache(DESC)
        assert host.device is None
        assert host.tensor_addresses == [int(tensor.ctypes.data) for tensor in host.tensors]
        manager.deallocate_cache(host)


async def test_buffers_of_a_device_that_are_refused(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed with host memory, on two devices, overlapping, too short: nothing is registered, no key is bound."""
    config = kv.ClusterConfig(transports=(transport,))
    async with kv.Cluster(cluster_id=P, role=kv.Role.MIX, pool="1MiB", config=config) as cluster:
        manager = cluster.kv_cache_manager
        register = manager.register_blocks_cache
        with pytest.raises(kv.FeatureNotEnabledError, match=r"buffers\[0\] is in CUDA memory, which only UCX reaches"):
            register(DESC, on_device(), PAGED)
        inside.take_cuda(cluster)
        good = on_device()
        with pytest.raises(kv.ParameterError, match=r"buffers\[3\] is in host memory and others are in CUDA"):
            register(DESC, [*good[:3], np.zeros((NUM, NBYTES), np.uint8)], PAGED)
        with pytest.raises(kv.ParameterError, match="share memory"):
            register(DESC, [*good[:3], good[0]], PAGED)
        with pytest.raises(kv.ParameterError, match="4 tensors"):
            register(DESC, good[:3], PAGED)
        with pytest.raises(kv.ParameterError, match="the description says"):
            register(kv.CacheDesc(4, (NUM, NBYTES - 1), "uint8"), good, PAGED)
        with monkeypatch.context() as patch:
            devices = iter(range(4))
            patch.setattr(
                devicebuffers, "find_allocation", lambda name, address: Allocation(next(devices), NOWHERE, 1 << 24)
            )
            with pytest.raises(kv.ParameterError, match="device 0, and"):
                register(DESC, good, PAGED)
        host = manager.allocate_blocks_cache(DESC, PAGED)  # the key is free
        with pytest.raises(kv.ParameterError, match="bound"):
            register(DESC, good, PAGED)
        assert len(inside.regions(cluster)) == 0
        manager.deallocate_cache(host)


@pytest.mark.ucx
async def test_a_cluster_that_wants_cuda_and_has_none_does_not_start() -> None:
    """No driver, or a UCX without CUDA: typed on entry, with what is missing, and nothing is left behind."""
    need_ucx()
    from tests.support.gpu import missing

    if not missing():
        pytest.skip("there is CUDA here")
    config = kv.ClusterConfig(transports=("ucx",), ucx=kv.UcxConfig(allow_cuda=True))
    with pytest.raises(kv.FeatureNotEnabledError, match=r"reaches no CUDA memory here.*nvidia-smi"):
        async with kv.Cluster(cluster_id=P, role=kv.Role.MIX, pool="1MiB", config=config):
            pass
