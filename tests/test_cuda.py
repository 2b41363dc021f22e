"""Caches in the memory of a CUDA device, moved by UCX: needs a device, its driver, and UCX 1.21 with CUDA.

One command proves it where there is a device: ``python -m pytest tests/test_cuda.py -v``. Where something is missing
the tests are skipped and say what. Two processes share one device (or have one each, where there are two): what moves
the bytes is UCX's ``cuda_ipc``. Between hosts it is GPUDirect RDMA, which no test here can show.

Nothing but the driver is needed to make and to look at device memory (`tests.support.gpu`). The patterns name every
block, so that a byte that is not the right one is found out, whoever wrote it.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest

import kvlink as kv
from tests.spec.harness import LayerGate
from tests.support import inside
from tests.support.actor import config_of
from tests.support.gpu import DeviceArray, Gpu, faults_on_device, fill_on_device, need_gpu, num_devices
from tests.support.loops import eventually
from tests.support.pattern import Stamp, expect, fill
from tests.support.peer import Peer, spawn_peer

pytestmark = pytest.mark.ucx

CUDA: dict[str, Any] = {"transports": ["ucx"], "ucx": {"allow_cuda": True}}
IN_SMALL_PIECES: dict[str, Any] = {
    "transports": ["ucx"],
    "chunk_nbytes": 4096,
    "ucx": {"allow_cuda": True, "max_requests": 64, "max_inflight_nbytes": 65536},
}
"""So that there is time to do something in the middle of a transfer."""

RUBBISH = Stamp(250, 250, 65000)
DESC = kv.CacheDesc(8, (64, 4096), "uint8")
BIG = kv.CacheDesc(8, (1024, 4096), "uint8")
KEY, HOST_KEY = kv.BlocksCacheKey(1, 1), kv.BlocksCacheKey(1, 2)


class Scene:
    """An owner in a process of its own with a filled cache on a device, and a cluster here with an empty one.

    Attributes:
        owner, handle, desc: the child, its cache on the device, and what both caches are.
        here, cache, arrays: the cluster here, its cache, and the memory of that.
    """

    def __init__(self, owner: Peer, handle: int, here: kv.Cluster, desc: kv.CacheDesc, gpu: Gpu) -> None:
        self.owner, self.handle, self.here, self.desc = owner, handle, here, desc
        self.manager = here.kv_cache_manager
        self.arrays: list[DeviceArray] = [gpu.allocate(desc.shape) for _ in range(desc.num_tensors)]
        fill_on_device(self.arrays, RUBBISH)
        self.cache = self.manager.register_blocks_cache(desc, self.arrays)

    @property
    def link(self) -> kv.Link:
        """Our link to the owner."""
        return inside.link_to(self.here, 1)

    @property
    def blocks(self) -> list[int]:
        """Every block number."""
        return list(range(self.desc.num_slots))

    async def pull(self, source: list[int] | None = None, target: list[int] | None = None, **options: Any) -> Any:
        """Pull blocks, all of them unless told otherwise, from device to device."""
        source = self.blocks if source is None else source
        return await self.manager.pull_blocks(KEY, self.cache, source, source if target is None else target, **options)

    def expect(self, stamp: Stamp, blocks: list[int] | None = None, src_blocks: list[int] | None = None) -> None:
        """Check blocks of our device cache."""
        text = faults_on_device(self.arrays, stamp, blocks, src_blocks)
        assert text is None, text

    async def expect_theirs(
        self, stamp: Stamp, blocks: list[int] | None = None, src_blocks: list[int] | None = None
    ) -> None:
        """Check blocks of the owner's device cache."""
        text = await self.owner.call(
            "faults_on_device", cache=self.handle, stamp=list(stamp), blocks=blocks, src_blocks=src_blocks
        )
        assert text is None, text


@asynccontextmanager
async def scene(desc: kv.CacheDesc = DESC, config: dict[str, Any] | None = None) -> AsyncIterator[Scene]:
    """Set the scene, or skip."""
    need_gpu()
    gpu = Gpu(0)
    async with spawn_peer(1, config=CUDA, program="tests.support.gpu_actor") as owner:
        handle = await owner.call(
            "register_on_device", num_tensors=desc.num_tensors, shape=list(desc.shape), model_id=1
        )
        settings = config_of(config or CUDA)
        async with kv.Cluster(cluster_id=2, role=kv.Role.MIX, pool="64MiB", config=settings) as here:
            (await here.link_clusters([owner.info])).raise_for_status()
            made = Scene(owner, handle, here, desc, gpu)
            try:
                yield made
            finally:
                if made.cache.is_valid:
                    made.manager.deallocate_cache(made.cache)
                for array in made.arrays:
                    array.free()


async def test_a_pull_from_device_to_device() -> None:
    """Every byte of every block arrives, and the link says that CUDA serves it."""
    async with scene() as s:
        report = await s.pull()
        s.expect(s.owner.stamp(s.handle))
        assert (report.transport, report.nbytes) == ("ucx", 8 * 64 * 4096)
        assert "cuda_ipc" in getattr(s.link.endpoint, "lanes", ())
        assert s.cache.is_quiet()


async def test_scattered_blocks() -> None:
    """Blocks in any order, one or many, land where they were asked to, and nothing else is written."""
    async with scene() as s:
        stamp = s.owner.stamp(s.handle)
        order = np.random.default_rng(7).permutation(64).tolist()
        source, target = order[:20], order[30:50]
        await s.pull(source, target)
        s.expect(stamp, target, source)
        s.expect(RUBBISH, sorted(set(range(64)) - set(target)))
        for block in (0, 63, 5):
            await s.pull([block], [1])
            s.expect(stamp, [1], [block])


async def test_many_scattered_blocks() -> None:
    """More requests than fit into one window, back and forth: 4,096 of them, each at its place."""
    async with scene(BIG) as s:
        stamp = s.owner.stamp(s.handle)
        even = list(range(0, 1024, 2))
        await s.pull(even, [block + 1 for block in even])
        s.expect(stamp, [block + 1 for block in even], even)
        s.expect(RUBBISH, even)
        fill_on_device(s.arrays, Stamp(2, 1, 1))
        await s.manager.push_blocks(KEY, s.cache, even, [block + 1 for block in even])
        await s.expect_theirs(Stamp(2, 1, 1), [block + 1 for block in even], even)
        await s.expect_theirs(stamp, even)


async def test_a_push_from_device_to_device() -> None:
    """The owner sees every byte on its device when the push has returned, and nothing but the chosen blocks changed."""
    async with scene() as s:
        fill_on_device(s.arrays, Stamp(2, 1, 1))
        await s.manager.push_blocks(KEY, s.cache, [3, 9, 10], [1, 2, 60])
        await s.expect_theirs(Stamp(2, 1, 1), [1, 2, 60], [3, 9, 10])
        await s.expect_theirs(s.owner.stamp(s.handle), sorted(set(range(64)) - {1, 2, 60}))


async def test_part_of_the_layers() -> None:
    """Some layers of the peer's land in other layers of ours; the rest is untouched."""
    async with scene() as s:
        await s.pull(src_layer_range=range(2, 4), dst_layer_range=range(2))
        own = Stamp(*s.owner.stamp(s.handle))
        moved = [array.read() for array in s.arrays]
        expect(moved[:4], own, src_tensor=4)
        expect(moved[4:], RUBBISH, src_tensor=4)


async def test_a_layer_wise_push() -> None:
    """Layer by layer from device to device, by key and by address."""
    async with scene() as s:
        fill_on_device(s.arrays, Stamp(2, 1, 1))
        config = kv.TransferWithCacheKeyConfig(KEY, range(4), range(4))
        task = s.manager.transfer_cache_async(s.cache, LayerGate(4), [config], s.blocks, s.blocks)
        assert await task == [kv.StatusCode.LLM_SUCCESS]
        await s.expect_theirs(Stamp(2, 1, 1))
        fill_on_device(s.arrays, Stamp(2, 1, 2))
        addresses = await s.owner.call("addresses", cache=s.handle)
        task = s.manager.transfer_cache_async(s.cache, LayerGate(4), [kv.TransferConfig(1, addresses)])
        assert await task == [kv.StatusCode.LLM_SUCCESS]
        await s.expect_theirs(Stamp(2, 1, 2), [0])
        await s.expect_theirs(Stamp(2, 1, 1), list(range(1, 64)))


async def test_prepared_pulls_and_small_ones() -> None:
    """A prepared pull of one block, again and again: the short way is not for a device, and the bytes are right."""
    async with scene() as s:
        stamp = s.owner.stamp(s.handle)
        prepared = await s.manager.prepare_pull(KEY, s.cache)
        for block in range(8):
            await prepared.pull([block], [block + 8])
        s.expect(stamp, list(range(8, 16)), list(range(8)))


async def test_host_caches_beside_device_caches() -> None:
    """Caches of the host move over the same link, before, between and after those of a device."""
    async with scene() as s:
        handle = await s.owner.call("allocate_blocks", num_tensors=8, shape=[64, 4096], model_id=2)
        host = s.manager.allocate_blocks_cache(DESC)
        for _ in range(3):
            fill(host.tensors, RUBBISH)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(s.manager.pull_blocks, HOST_KEY, host, s.blocks, s.blocks)
                tasks.start_soon(s.pull)
            expect(host.tensors, s.owner.stamp(handle))
            s.expect(s.owner.stamp(s.handle))
            fill_on_device(s.arrays, RUBBISH)
        s.manager.deallocate_cache(host)


async def test_host_and_device_mixed() -> None:
    """Between host and device: the right bytes where UCX has a way, else a typed refusal, and the link lives.

    On one host without an RDMA device, and GPUDirect, there is none.
    """
    async with scene() as s:
        host_handle = await s.owner.call("allocate_blocks", num_tensors=8, shape=[64, 4096], model_id=2)
        host = s.manager.allocate_blocks_cache(DESC)
        fill(host.tensors, RUBBISH)
        theirs, their_host = s.owner.stamp(s.handle), s.owner.stamp(host_handle)
        outcomes = []
        for into_device in (False, True):
            try:
                if into_device:
                    await s.manager.pull_blocks(HOST_KEY, s.cache, s.blocks, s.blocks)
                    s.expect(their_host)
                else:
                    await s.manager.pull_blocks(KEY, host, s.blocks, s.blocks)
                    expect(host.tensors, theirs)
                outcomes.append("moved")
            except kv.FeatureNotEnabledError:
                expect(host.tensors, RUBBISH)
                s.expect(RUBBISH)
                outcomes.append("refused")
        print("between host and device:", outcomes)
        await s.pull()
        s.expect(theirs)
        await s.manager.pull_blocks(HOST_KEY, host, s.blocks, s.blocks)
        expect(host.tensors, their_host)
        s.manager.deallocate_cache(host)


async def test_what_ended_is_never_taken_for_what_is_there() -> None:
    """The owner ends its cache and writes the same device memory again, many times: a pull is right, or it fails.

    So the state word is looked at after the copy on the device has ended, not after it was asked for.
    """
    async with scene(BIG, IN_SMALL_PIECES) as s:
        await s.pull([0], [0])
        ending = s.owner.start("overwrite_again_and_again", cache=s.handle, num=30)
        seen: dict[str, int] = {}
        until = time.monotonic() + 2
        scattered = list(range(0, 1024, 2))
        while time.monotonic() < until:
            try:
                await s.pull(scattered, scattered)
            except kv.CacheNotFoundError:
                seen["ended"] = seen.get("ended", 0) + 1
                continue
            first = np.ascontiguousarray(s.arrays[0].read()[0][:16]).view("<u2")
            stamp = Stamp(1, 1, int(first[2]))
            s.expect(stamp, scattered)
            seen["whole"] = seen.get("whole", 0) + 1
        await ending.result()
        await s.pull()
        s.expect(Stamp(1, 1, 1029))
        print(seen)
        assert seen.get("whole")


async def test_a_killed_owner() -> None:
    """Killed in mid-pull: one typed error or every byte, soon, and nothing is written afterwards."""
    async with scene(BIG, IN_SMALL_PIECES) as s:
        await s.pull([0], [0])
        outcome: list[Any] = []

        async def attempt() -> None:
            try:
                outcome.append(await s.pull(list(range(1, 1024, 2)), list(range(1, 1024, 2))))
            except kv.KVLinkError as exc:
                outcome.append(exc)

        started = time.monotonic()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(attempt)
            await anyio.sleep(0.002)
            s.owner.kill()
        assert time.monotonic() - started < 5
        if isinstance(outcome[0], kv.TransferReport):
            s.expect(s.owner.stamp(s.handle), list(range(1, 1024, 2)))
        else:
            assert isinstance(outcome[0], kv.LinkLostError), outcome
        await eventually(lambda: not s.here.links, "the link's end")
        assert s.cache.is_quiet()
        before = [array.read() for array in s.arrays]
        await anyio.sleep(0.1)
        assert all(np.array_equal(now, array.read()) for now, array in zip(before, s.arrays, strict=True))


async def test_a_cancelled_pull_is_quiet() -> None:
    """When a cancelled pull has ended the device writes nothing more, and the link serves the next one."""
    async with scene(BIG, IN_SMALL_PIECES) as s:
        await s.pull([0], [0])
        scattered = list(range(0, 1024, 2))
        for attempt in range(5):
            with anyio.move_on_after(0.001 * (attempt + 1)):
                await s.pull(scattered, scattered)
            assert s.cache.is_quiet()
            before = [array.read() for array in s.arrays]
            await anyio.sleep(0.02)
            assert all(np.array_equal(now, array.read()) for now, array in zip(before, s.arrays, strict=True))
        await s.pull()
        s.expect(s.owner.stamp(s.handle))


async def test_caches_come_and_go() -> None:
    """Device caches that are registered, pulled and given up, with other memory each time: always the right bytes."""
    async with scene() as s:
        for number in range(2, 8):
            handle = await s.owner.call("register_on_device", num_tensors=8, shape=[64, 4096], model_id=number)
            await s.manager.pull_blocks(kv.BlocksCacheKey(1, number), s.cache, s.blocks, s.blocks)
            s.expect(s.owner.stamp(handle))
            await s.owner.call("deallocate", cache=handle)
            with pytest.raises(kv.CacheNotFoundError):
                await s.manager.pull_blocks(kv.BlocksCacheKey(1, number), s.cache, s.blocks, s.blocks)


async def test_tickets() -> None:
    """Blocks of a device by ticket: read by one, filled by the other."""
    async with scene() as s:
        expected = s.manager.expect_blocks(s.cache, [5, 6])
        handle = s.handle
        pushed = await s.owner.call("push_by_ticket", token=expected.token.decode(), cache=handle, blocks=[1, 2])
        assert pushed == 2 * 8 * 4096
        assert (await expected.outcome(timeout_s=5)).kind is kv.TicketEnding.DONE
        s.expect(s.owner.stamp(handle), [5, 6], [1, 2])
        token = await s.owner.call("offer", cache=handle, blocks=[7, 9])
        await s.manager.pull_blocks(token, s.cache, [], [0, 1])
        s.expect(s.owner.stamp(handle), [0, 1], [7, 9])


async def test_the_cluster_makes_no_context_of_its_own() -> None:
    """Registering memory and moving it leaves no context of CUDA current in the thread of the event loop."""
    need_gpu()
    driver = ctypes.CDLL("libcuda.so.1")
    current = ctypes.c_void_p()

    def now() -> int | None:
        assert driver.cuCtxGetCurrent(ctypes.byref(current)) == 0
        return current.value

    async with scene() as s:
        context = now()
        assert driver.cuCtxSetCurrent(None) == 0
        assert now() is None
        other = s.manager.register_blocks_cache(s.desc, s.arrays)
        await s.pull()
        assert now() is None
        s.manager.deallocate_cache(other)
        assert driver.cuCtxSetCurrent(ctypes.c_void_p(context)) == 0
        s.expect(s.owner.stamp(s.handle))


async def test_what_the_driver_says() -> None:
    """Only device memory that is there, and whole, is registered: a wrong claim is refused by the driver's word."""
    need_gpu()
    gpu, desc = Gpu(0), kv.CacheDesc(1, (4, 4096), "uint8")
    array, host = gpu.allocate((4, 4096)), np.zeros((4, 4096), np.uint8)
    async with kv.Cluster(cluster_id=2, role=kv.Role.MIX, pool="1MiB", config=config_of(CUDA)) as here:
        register = here.kv_cache_manager.register_blocks_cache
        cache = register(desc, [array])
        assert (cache.device, cache.tensor_addresses) == (0, [array.address])
        objects: tuple[Any, ...] = cache.tensors
        assert objects == (array,)
        here.kv_cache_manager.unregister_cache(cache)
        for claim, why in (
            (Claim(array.address, (4, 1 << 28)), "expandable_segments"),
            (Claim(int(host.ctypes.data), (4, 4096)), "is not device memory"),
            (Claim(8, (4, 4096)), "is not device memory"),
        ):
            with pytest.raises(kv.ParameterError, match=why):
                register(kv.CacheDesc(1, claim.shape, "uint8"), [claim])
        address = array.address
        array.free()
        with pytest.raises(kv.ParameterError):
            register(desc, [Claim(address, (4, 4096))])


class Claim:
    """Says that bytes are in CUDA memory, true or not."""

    def __init__(self, address: int, shape: tuple[int, int]) -> None:
        self.shape = shape
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "|u1", "data": (address, False), "version": 3}


async def test_two_devices() -> None:
    """A cache lies on one device; from one device to another one the right bytes come."""
    async with scene() as s:
        if num_devices() < 2:
            pytest.skip("there is one device")
        other = Gpu(1)
        arrays = [other.allocate(DESC.shape) for _ in range(DESC.num_tensors)]
        with pytest.raises(kv.ParameterError, match="on CUDA device 0, and"):
            s.manager.register_blocks_cache(DESC, [*s.arrays[:-1], arrays[-1]])
        cache = s.manager.register_blocks_cache(DESC, arrays)
        assert cache.device == 1
        await s.manager.pull_blocks(KEY, cache, s.blocks, s.blocks)
        text = faults_on_device(arrays, s.owner.stamp(s.handle))
        assert text is None, text
        s.manager.deallocate_cache(cache)
        for array in arrays:
            array.free()


async def test_a_device_that_hangs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A copy that the device never ends: the pull fails in time, the log says why, and the cluster can be closed.

    No device hangs when it is asked to: only the stand-in's does.
    """
    need_gpu()
    driver = ctypes.CDLL("libcuda.so.1")
    if not hasattr(driver, "standin_hang"):
        pytest.skip("this device does not hang when it is asked to")
    monkeypatch.setattr("kvlink.transports.ucx.turns.PATIENCE_S", 0.5)
    given_up: list[Any] = []
    monkeypatch.setattr("kvlink.transports.ucx.turns._given_up", given_up)
    async with scene() as s:
        try:
            await s.pull([0], [0])
            services = s.here._transports[0]._services  # type: ignore[attr-defined]  # of UCX
            driver.standin_hang(1)
            started = time.monotonic()
            with pytest.raises((kv.TransferTimeoutError, kv.LinkLostError)):
                await s.pull(timeout_s=0.3)
            await eventually(lambda: not s.here.links, "the link's end")
            assert not s.cache.is_quiet()
            assert "as where a CUDA device hangs" in caplog.text
            s.manager.unregister_cache(s.cache)
            await s.here.aclose()
            assert time.monotonic() - started < 15
            (ucx, endpoint, [(transfer, keep)]), _ = given_up
            registry = services.registry
            assert keep[0] in (
                *registry._dropped,
                *registry.known.values(),
            )  # it stays registered
            driver.standin_hang(0)  # and now it ends
            while not all(map(ucx._slots.has_ended, transfer.rows)):
                ucx._progress(ucx._handle)
            ucx._is_quiet = True
            endpoint.forget(ucx._api)
            while ucx._at_end:
                ucx._at_end.pop()()
            ucx.context.close()
        finally:
            driver.standin_hang(0)
