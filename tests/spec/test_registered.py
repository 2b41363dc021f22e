"""Memory that the caller owns: `register_cache`, `register_blocks_cache`, `unregister_cache`.

Source: the spec, section 9.1.
"""

from __future__ import annotations

import array
import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

import kvlink as kv
from tests.spec.harness import D, LayerGate, P, cluster, hold, linked_pair, owner_and_reader, stamped
from tests.support.inside import used_nbytes
from tests.support.loops import every_loop
from tests.support.pattern import expect

NUM = 8
NBYTES = 256
TENSOR = NUM * NBYTES
DESC = kv.CacheDesc(4, (NUM, NBYTES), "uint8")
KEY = kv.BlocksCacheKey(P)


class Interfaced:
    """Has nothing but ``__array_interface__``."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.memory = memory

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.memory.__array_interface__


class Packed:
    """Has nothing but DLPack."""

    def __init__(self, memory: NDArray[Any]) -> None:
        self.memory = memory

    def __dlpack__(self, **options: Any) -> Any:
        return self.memory.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.memory.__dlpack_device__()


class Accelerated:
    """Says that it is in an accelerator's memory."""

    __cuda_array_interface__: dict[str, Any] = {}  # noqa: RUF012  # the protocol wants an attribute


def random_bytes(nbytes: int = TENSOR) -> bytes:
    """Return bytes that are unlike any others."""
    return np.random.default_rng().bytes(nbytes)


def numpy_array(contents: bytes, dtype: str = "uint8") -> NDArray[Any]:
    """Return an array of its own memory."""
    return np.frombuffer(bytearray(contents), dtype)


def an_array(contents: bytes) -> Any:
    """Return an `array.array` of floats."""
    made = array.array("f")
    made.frombytes(contents)
    return made


def a_map(contents: bytes) -> mmap.mmap:
    """Return an anonymous mapping."""
    made = mmap.mmap(-1, len(contents))
    made[:] = contents
    return made


KINDS: dict[str, Callable[[bytes], Any]] = {
    "bytearray": bytearray,
    "array": an_array,
    "numpy": numpy_array,
    "numpy of shape": lambda contents: numpy_array(contents, "float32").reshape(NUM, 8, 8),
    "mmap": a_map,
    "memoryview": lambda contents: memoryview(bytearray(contents)),
    "ctypes": lambda contents: (ctypes.c_uint16 * (TENSOR // 2)).from_buffer_copy(contents),
    "array interface": lambda contents: Interfaced(numpy_array(contents)),
    "DLPack": lambda contents: Packed(numpy_array(contents)),
}
IS_DLPACK_WRITABLE = np.from_dlpack(Packed(np.zeros(1, np.uint8))).flags.writeable


def make(kind: str, contents: bytes) -> Any:
    """Return a buffer of that kind; skip where this numpy gets read-only arrays from DLPack."""
    if kind == "DLPack" and not IS_DLPACK_WRITABLE:
        pytest.skip("this numpy gets read-only arrays from DLPack")
    return KINDS[kind](contents)


def contents_of(buffer: Any) -> bytes:
    """Return what a buffer holds."""
    return bytes(buffer.memory if isinstance(buffer, (Interfaced, Packed)) else buffer)


def zeros(count: int = 4, nbytes: int = TENSOR) -> list[bytearray]:
    """Return buffers of zeros."""
    return [bytearray(nbytes) for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
async def test_pull_from_any_buffer(transport: str, kind: str) -> None:
    """Memory of any kind is used in place: peers read what the buffer holds now. Source: the spec, section 9.1."""
    async with linked_pair(transport) as pair:
        contents = [random_bytes() for _ in range(4)]
        buffers = [make(kind, each) for each in contents]
        cache = pair.owner.register_blocks_cache(DESC, buffers, KEY)
        assert (cache.is_registered, cache.is_blocks, used_nbytes(pair.prompt)) == (True, True, 0)
        into = pair.reader.allocate_blocks_cache(DESC)
        await pair.reader.pull_blocks(KEY, into, range(NUM), range(NUM))
        assert [tensor.tobytes() for tensor in into.tensors] == contents
        cache.tensors[2][5] = 77
        assert contents_of(buffers[2])[5 * NBYTES : 6 * NBYTES] == bytes([77]) * NBYTES
        await pair.reader.pull_blocks(KEY, into, [5], [0])
        assert (into.tensors[2][0] == 77).all()


@pytest.mark.parametrize("kind", KINDS)
async def test_pull_and_push_into_any_buffer(transport: str, kind: str) -> None:
    """Pulls of ours and pushes of peers land in the buffer itself. Source: the spec, section 9.1."""
    async with linked_pair(transport) as pair:
        source = pair.owner.allocate_blocks_cache(DESC, KEY)
        stamp = stamped(source)
        buffers = [make(kind, bytes(TENSOR)) for _ in range(4)]
        cache = pair.reader.register_cache(DESC, buffers)
        await pair.reader.pull_blocks(KEY, cache, [1, 2], [6, 7])
        await pair.owner.push_cache(kv.CacheKeyByIdAndIndex(D, cache.cache_id, 3), source, 0)
        seen = [np.frombuffer(contents_of(buffer), np.uint8).reshape(NUM, NBYTES) for buffer in buffers]
        expect(seen, stamp, [6, 7, 3], src_blocks=[1, 2, 0])
        assert not any(tensor[[0, 1, 2, 4, 5]].any() for tensor in seen)


async def test_between_processes(transport: str) -> None:
    """Registered memory of another process is pulled, pushed into, and pushed from. Source: the spec, section 9.1."""
    async with owner_and_reader("two processes", transport) as stage:
        cache = await stage.owner.call("register_blocks", num_tensors=4, shape=[NUM, NBYTES], model_id=2)
        stamp, theirs = stage.owner.stamp(cache), kv.BlocksCacheKey(P, 2)
        buffers = zeros()
        mine = stage.reader.register_blocks_cache(DESC, buffers, kv.BlocksCacheKey(D, 2))
        await stage.reader.pull_blocks(theirs, mine, [4, 5, 1], [0, 1, 7])
        expect(mine.tensors, stamp, [0, 1, 7], src_blocks=[4, 5, 1])
        other = stamped(mine, D)
        await stage.reader.push_blocks(theirs, mine, [2, 3], [6, 0])
        found = await stage.owner.call("faults", cache=cache, stamp=list(other), blocks=[6, 0], src_blocks=[2, 3])
        assert found is None
        await stage.owner.call("fill", cache=cache)
        assert await stage.owner.call("push_blocks", model_id=2, cache=cache, src=[7], dst=[3]) == 4 * NBYTES
        expect(mine.tensors, stamp, [3], src_blocks=[7])
        expect(mine.tensors, other, [0, 1, 2, *range(4, NUM)])


@every_loop
async def test_contiguous(transport: str) -> None:
    """register_cache binds key i to slot i. Source: the spec, sections 6.2 and 9.1."""
    async with linked_pair(transport) as pair:
        keys = [kv.CacheKey(P, kv.ABSENT), kv.CacheKey(P, 10)]
        cache = pair.owner.register_cache(DESC, zeros(), keys)
        stamp = stamped(cache)
        into = pair.reader.allocate_cache(DESC)
        await pair.reader.pull_cache(keys[1], into)
        expect(into.tensors, stamp, [0], src_blocks=[1])


async def test_never_consumed(transport: str) -> None:
    """Registered caches are never consumed: pulls do not release their keys. Source: the spec, section 9.1."""
    async with linked_pair(transport) as pair:
        cache = pair.owner.register_cache(DESC, zeros(), [kv.CacheKey(P, 10)])
        stamp = stamped(cache)
        into = pair.reader.allocate_cache(DESC)
        for _ in range(3):
            await pair.reader.pull_cache(kv.CacheKey(P, 10), into)
            await pair.reader.pull_cache(kv.CacheKeyByIdAndIndex(P, cache.cache_id), into, 1)
            await pair.flush()
        expect(into.tensors, stamp, [0, 1], src_blocks=[0, 0])


async def test_remove_cache_key(transport: str) -> None:
    """kvlink: remove_cache_key releases a key of registered memory as any other (the spec ignores it).

    Source: the spec, section 9.1, and DIFFERENCES.md.
    """
    async with linked_pair(transport) as pair:
        cache = pair.owner.register_cache(DESC, zeros(), [kv.CacheKey(P, 10)])
        into = pair.reader.allocate_cache(DESC)
        pair.owner.remove_cache_key(kv.CacheKey(P, 10))
        with pytest.raises(kv.CacheNotFoundError):
            await pair.reader.pull_cache(kv.CacheKey(P, 10), into)
        assert cache.is_valid


@pytest.mark.parametrize("by", ["handle", "id", "deallocate_cache"])
async def test_unregister(transport: str, by: str) -> None:
    """unregister_cache: unknown id fine; drops every key. kvlink: deallocate_cache does the same (the spec ignores it).

    Source: the spec, section 9.1, and DIFFERENCES.md.
    """
    keys: list[kv.CacheKey] = [kv.CacheKey(P, 10), kv.CacheKey(P, kv.ABSENT, prefix_id=3)]
    async with linked_pair(transport) as pair:
        buffers = zeros()
        cache = pair.owner.register_cache(DESC, buffers, keys)
        into, cache_id = pair.reader.allocate_cache(DESC), cache.cache_id
        await pair.reader.pull_cache(keys[0], into)
        for _ in range(2):
            if by == "deallocate_cache":
                pair.owner.deallocate_cache(cache)
            else:
                pair.owner.unregister_cache(cache if by == "handle" else cache_id)
        pair.owner.unregister_cache(4711)
        assert not cache.is_valid
        await pair.flush()
        gone: list[kv.CacheKey | kv.CacheKeyByIdAndIndex] = [*keys, kv.CacheKeyByIdAndIndex(P, cache_id)]
        for key in gone:
            with pytest.raises(kv.CacheNotFoundError):
                await pair.reader.pull_cache(key, into)
        buffers[0].append(0)  # nobody holds it any more
        again = pair.owner.register_cache(DESC, zeros(), keys)
        assert again.cache_id > cache_id


@pytest.mark.parametrize("what", ["blocks", "a slot"])
async def test_unregister_under_a_reader(transport: str, what: str) -> None:
    """kvlink: a pull during which the memory is unregistered fails, and reports no bytes as good.

    Source: the spec, section 9.1 ("call after unlinking"), and DIFFERENCES.md.
    """
    async with linked_pair(transport) as pair:
        cache = pair.owner.register_blocks_cache(DESC, zeros(), KEY)
        into = pair.reader.allocate_blocks_cache(DESC)
        held = hold(pair.decoder, P, "get")

        by_id = kv.CacheKeyByIdAndIndex(P, cache.cache_id)
        calls = {
            "blocks": lambda: pair.reader.pull_blocks(KEY, into, [0], [0]),
            "a slot": lambda: pair.reader.pull_cache(by_id, into),
        }

        async def pull() -> None:
            with pytest.raises(kv.CacheNotFoundError):
                await calls[what]()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pull)
            await held.reached.wait()
            pair.owner.unregister_cache(cache)
            held.release()


async def test_unregister_under_a_writer(transport: str) -> None:
    """kvlink: memory that a peer may be writing into is kept alive and locked until the peer has stopped.

    Source: the spec, section 9.1, and DIFFERENCES.md.
    """
    async with linked_pair(transport) as pair:
        buffers = zeros()
        target = pair.reader.register_cache(DESC, buffers)
        source = pair.owner.allocate_cache(DESC)
        held = hold(pair.prompt, D, "put")

        async def push() -> None:
            with pytest.raises(kv.CacheNotFoundError):
                await pair.owner.push_cache(kv.CacheKeyByIdAndIndex(D, target.cache_id), source)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(push)
            await held.reached.wait()
            pair.reader.unregister_cache(target)
            await pair.flush()
            with pytest.raises(BufferError):
                buffers[0].append(0)
            held.release()
        await pair.flush()
        for buffer in buffers:
            buffer.append(0)


@pytest.mark.parametrize(
    ("make_buffer", "resize"),
    [
        (bytearray, lambda buffer: buffer.append(0)),
        (bytearray, lambda buffer: buffer.clear()),
        (lambda contents: array.array("B", contents), lambda buffer: buffer.append(0)),
        (a_map, lambda buffer: buffer.resize(2 * TENSOR)),
        (a_map, lambda buffer: buffer.close()),
    ],
    ids=["bytearray", "bytearray.clear", "array", "mmap.resize", "mmap.close"],
)
async def test_locked_while_registered(make_buffer: Callable[[bytes], Any], resize: Callable[[Any], None]) -> None:
    """kvlink: a registered buffer refuses to be resized or closed, and does not any more once it is unregistered.

    Source: the spec, section 9.1, and DIFFERENCES.md.
    """
    buffer = make_buffer(bytes(TENSOR))
    async with cluster(P, kv.Role.PROMPT) as prompt:
        manager = prompt.kv_cache_manager
        cache = manager.register_cache(kv.CacheDesc(1, (NUM, NBYTES), "uint8"), [buffer])
        with pytest.raises(BufferError):
            resize(buffer)
        assert cache.tensors[0].nbytes == TENSOR
        manager.unregister_cache(cache)
        resize(buffer)


async def test_numpy_locked_while_registered() -> None:
    """The same for an array, which numpy resizes only where nothing else refers to it.

    Source: the spec, section 9.1, and DIFFERENCES.md.
    """
    buffer = np.zeros(1, np.uint8)
    buffer.resize(TENSOR)  # so it can be resized here at all
    async with cluster(P, kv.Role.PROMPT) as prompt:
        manager = prompt.kv_cache_manager
        cache = manager.register_cache(kv.CacheDesc(1, (NUM, NBYTES), "uint8"), [buffer])
        with pytest.raises(ValueError, match="resize"):
            buffer.resize(2 * TENSOR)
        manager.unregister_cache(cache)
        buffer.resize(2 * TENSOR)


async def test_kept_alive(transport: str) -> None:
    """kvlink: the memory lives while it is registered, whoever else lets go of it. Source: the spec, section 9.1."""
    async with linked_pair(transport) as pair:
        buffers = [np.full((NUM, NBYTES), value, np.uint8) for value in range(4)]
        cache = pair.owner.register_blocks_cache(DESC, buffers, KEY)
        del buffers
        into = pair.reader.allocate_blocks_cache(DESC)
        for _ in range(50):
            await pair.reader.pull_blocks(KEY, into, range(NUM), range(NUM))
            assert [int(tensor.min()) for tensor in into.tensors] == [0, 1, 2, 3]
            assert [int(tensor.max()) for tensor in into.tensors] == [0, 1, 2, 3]
        assert cache.is_valid


def read_only_numpy() -> NDArray[np.uint8]:
    """Return an array that cannot be written."""
    made = np.zeros(TENSOR, np.uint8)
    made.flags.writeable = False
    return made


def field(count: int) -> NDArray[np.uint8]:
    """Return an array of `count` tensors' bytes."""
    return np.zeros(count * TENSOR, np.uint8)


async def test_buffers_that_are_refused() -> None:
    """kvlink: read-only, strided, and of the wrong length: refused, nothing is registered, no buffer is held.

    Source: the spec, section 9.1, and DIFFERENCES.md.
    """
    cases: list[tuple[Any, str]] = [
        (bytes(TENSOR), "read-only"),
        (read_only_numpy(), "read-only"),
        (memoryview(bytearray(TENSOR)).toreadonly(), "read-only"),
        (mmap.mmap(-1, TENSOR, prot=mmap.PROT_READ), "read-only"),
        (Interfaced(read_only_numpy()), "read-only"),
        (field(2)[::2], "contiguous"),
        (field(2).reshape(NUM, 2 * NBYTES)[:, :NBYTES], "contiguous"),
        (field(1).reshape(NBYTES, NUM).T, "contiguous"),
        (field(1)[::-1], "contiguous"),
        (memoryview(bytearray(2 * TENSOR))[::2], "contiguous"),
        (Interfaced(field(2)[::2]), "contiguous"),
        (bytearray(TENSOR - 1), f"{TENSOR - 1} bytes"),
        (bytearray(TENSOR + 1), f"{TENSOR + 1} bytes"),
        (bytearray(), "0 bytes"),
    ]
    desc = kv.CacheDesc(2, (NUM, NBYTES), "uint8")
    async with cluster(P, kv.Role.PROMPT) as prompt:
        for buffer, why in cases:
            good = bytearray(TENSOR)
            with pytest.raises(kv.ParameterError, match=rf"buffers\[1\].*{why}") as caught:
                prompt.kv_cache_manager.register_cache(desc, [good, buffer])
            assert caught.value.status is kv.StatusCode.LLM_PARAM_INVALID
            del caught
            good.append(0)


async def test_overlapping_buffers() -> None:
    """Addresses distinct; kvlink: no two buffers may share a byte. Source: the spec, section 9.1."""
    memory = field(3)
    async with cluster(P, kv.Role.PROMPT) as prompt:
        manager, desc = prompt.kv_cache_manager, kv.CacheDesc(2, (NUM, NBYTES), "uint8")
        for first, second in ((0, 0), (0, TENSOR - 1), (TENSOR - 1, 0), (5, 6)):
            with pytest.raises(kv.ParameterError, match="share memory"):
                manager.register_cache(desc, [memory[first : first + TENSOR], memory[second : second + TENSOR]])
        cache = manager.register_cache(desc, [memory[TENSOR : 2 * TENSOR], memory[:TENSOR]])
        assert cache.is_valid


async def test_lists_and_objects_that_are_refused() -> None:
    """addrs non-empty, length num_tensors: else an error; things without bytes: TypeError; an accelerator's memory:
    LLM_FEATURE_NOT_ENABLED. Source: the spec, section 9.1.
    """
    async with cluster(P, kv.Role.PROMPT) as prompt:
        manager = prompt.kv_cache_manager
        for count in (0, 3, 5):
            with pytest.raises(kv.ParameterError):
                manager.register_cache(DESC, zeros(count))
        one = kv.CacheDesc(1, (NUM, NBYTES), "uint8")
        for thing in (None, 0, 0x7F0000000000, "text", [0] * TENSOR, object()):
            with pytest.raises(TypeError):
                manager.register_cache(one, [thing])
        with pytest.raises(TypeError):
            manager.register_cache(one, bytearray(TENSOR))
        with pytest.raises(TypeError):
            manager.register_cache("desc", zeros(1))  # type: ignore[arg-type]  # refused
        with pytest.raises(kv.FeatureNotEnabledError) as caught:
            manager.register_cache(one, [Accelerated()])
        assert caught.value.status is kv.StatusCode.LLM_FEATURE_NOT_ENABLED
        with pytest.raises(kv.ParameterError):
            manager.register_cache(kv.CacheDesc(1, (NUM,), kv.DataType.STRING), zeros(1))


async def test_torch(transport: str) -> None:
    """Torch tensors on the CPU are registered in place, any data type. Source: the spec, section 9.1."""
    torch = pytest.importorskip("torch")
    desc = kv.CacheDesc(2, (4, 16), "bfloat16")
    async with linked_pair(transport) as pair:
        tensors = [torch.full((4, 16), float(value), dtype=torch.bfloat16) for value in (1, 2)]
        cache = pair.owner.register_cache(desc, tensors, [kv.CacheKey(P, 10)])
        into = pair.reader.allocate_cache(desc)
        await pair.reader.pull_cache(kv.CacheKey(P, 10), into)
        assert [tensor[0].view(np.uint16).tolist() for tensor in into.tensors] == [[0x3F80] * 16, [0x4000] * 16]
        with pytest.raises(kv.ParameterError):
            pair.owner.register_cache(kv.CacheDesc(1, (4, 4), "float32"), [torch.zeros(4, 8)[:, ::2]])
        assert cache.is_valid


async def test_keys_of_registered_caches() -> None:
    """kvlink: a key that is bound already is refused, for registered memory as for allocated; nothing is registered.

    Source: the spec, section 9.1, and DIFFERENCES.md.
    """
    key, buffers = kv.CacheKey(P, 1), zeros()
    async with cluster(P, kv.Role.PROMPT) as prompt:
        manager = prompt.kv_cache_manager
        kept = [manager.allocate_cache(DESC, [key]), manager.register_blocks_cache(DESC, zeros(), KEY)]
        registrations: list[Callable[[], kv.KvCache]] = [
            lambda: manager.register_cache(DESC, buffers, [key]),
            lambda: manager.register_cache(DESC, buffers, [kv.CacheKey(P, number) for number in range(9, 9 + NUM + 1)]),
            lambda: manager.register_blocks_cache(DESC, buffers, KEY),
            lambda: manager.allocate_blocks_cache(DESC, KEY),
        ]
        for register in registrations:
            with pytest.raises(kv.ParameterError):
                register()
        buffers[0].append(0)
        assert all(cache.is_valid for cache in kept)


async def test_many_buffers_anywhere(transport: str) -> None:
    """kvlink: no limit of 240 addresses, no alignment, no order; buffers may lie anywhere, and in any order.

    Source: the spec, section 9.1, and DIFFERENCES.md.
    """
    count, nbytes = 300, 24
    desc = kv.CacheDesc(count, (3, nbytes // 3), "uint8")
    async with linked_pair(transport) as pair:
        memory = np.zeros(1 << 16, np.uint8)
        places = np.random.default_rng(1).permutation(count) * 111 + 1
        buffers: list[Any] = [memory[place : place + nbytes] for place in places[:-20]]
        buffers += [bytearray(nbytes) for _ in range(20)]
        cache = pair.owner.register_blocks_cache(desc, buffers, KEY)
        stamp = stamped(cache)
        into = pair.reader.allocate_blocks_cache(desc)
        await pair.reader.pull_blocks(KEY, into, [2, 0], [1, 2])
        expect(into.tensors, stamp, [1, 2], src_blocks=[2, 0])
        before = memory.copy()
        await pair.reader.push_blocks(KEY, into, [1], [0])
        for place in places[:-20]:
            before[place : place + nbytes // 3] = before[place + 2 * nbytes // 3 : place + nbytes]
        assert (memory == before).all()


async def test_while_linked(transport: str) -> None:
    """kvlink: memory can be registered at any time, also once linked. Source: the spec, section 9.1."""
    async with linked_pair(transport) as pair:
        into = pair.reader.allocate_cache(DESC)
        for number in range(3):
            cache = pair.owner.register_cache(DESC, zeros(), [kv.CacheKey(P, number)])
            stamp = stamped(cache)
            await pair.reader.pull_cache(kv.CacheKey(P, number), into)
            expect(into.tensors, stamp, [0])
            pair.owner.unregister_cache(cache)


async def test_local_copies() -> None:
    """Registered and allocated caches copy and swap with each other. Source: the spec, sections 6.8 to 6.10."""
    async with cluster(P, kv.Role.PROMPT) as prompt:
        manager = prompt.kv_cache_manager
        host_desc = kv.CacheDesc(4, (NUM, NBYTES), "uint8", kv.Placement.HOST)
        host, other = manager.register_blocks_cache(host_desc, zeros()), manager.register_blocks_cache(DESC, zeros())
        device = manager.allocate_blocks_cache(DESC)
        stamp = stamped(device)
        await manager.swap_blocks(device, host, {1: 2, 2: 3, 7: 0})
        expect(host.tensors, stamp, [2, 3, 0], src_blocks=[1, 2, 7])
        await manager.copy_cache(other, device, 1, 5)
        await manager.copy_blocks(other, {1: [6, 7]})
        expect(other.tensors, stamp, [1, 6, 7], src_blocks=[5, 5, 5])


@pytest.mark.parametrize("order", ["ascending", "descending", "mixed"])
async def test_layer_wise_into_registered_memory(transport: str, order: str) -> None:
    """A layer-wise push by address lands in registered memory, wherever its buffers lie.

    Source: the spec, sections 8.3 and 9.1.
    """
    places = {"ascending": [0, 1, 2, 3], "descending": [3, 2, 1, 0], "mixed": [2, 0, 3, 1]}[order]
    memory = field(4).reshape(4, TENSOR)
    async with linked_pair(transport) as pair:
        source = pair.owner.allocate_cache(DESC)
        stamp = stamped(source)
        target = pair.reader.register_cache(DESC, [memory[place] for place in places])
        for slot in (0, 1, NUM - 1):
            addresses = [address + slot * NBYTES for address in target.tensor_addresses]
            task = pair.owner.transfer_cache_async(source, LayerGate(2), [kv.TransferConfig(D, addresses)])
            assert await task == [kv.StatusCode.LLM_SUCCESS]
            expect(target.tensors, stamp, [slot], src_blocks=[0])


async def test_large_registered_memory(transport: str) -> None:
    """More than one system call moves arrives whole. Source: the spec, section 9.1."""
    desc = kv.CacheDesc(4, (600, 4096), "uint8")
    async with linked_pair(transport, pool="32MiB", chunk_nbytes=1 << 20) as pair:
        cache = pair.owner.register_blocks_cache(desc, [np.zeros((600, 4096), np.uint8) for _ in range(4)], KEY)
        stamp = stamped(cache)
        into = pair.reader.allocate_blocks_cache(desc)
        order = np.random.default_rng(5).permutation(600)
        await pair.reader.pull_blocks(KEY, into, order, range(600))
        expect(into.tensors, stamp, range(600), src_blocks=order.tolist())


async def test_a_small_movement_is_one_system_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block of one tensor, pulled or pushed again: no list of pieces is made, and the bytes are right."""
    key, desc = kv.BlocksCacheKey(P), kv.CacheDesc(1, (8, 4096), "uint8")
    memory = np.arange(8 * 4096, dtype=np.int64).astype(np.uint8) + np.repeat(np.arange(8, dtype=np.uint8), 4096)
    async with linked_pair("shm", roles=(kv.Role.MIX, kv.Role.MIX)) as pair:
        cache = pair.owner.register_blocks_cache(desc, [memory], key)
        own = pair.reader.allocate_blocks_cache(desc)
        mine = own.tensors[0].reshape(8, 4096)
        await pair.reader.pull_blocks(key, own, [0], [0])
        await pair.reader.push_blocks(key, own, [0], [0])
        with monkeypatch.context() as patch:
            patch.setattr("kvlink.transports.shm_endpoint.cut_vectors", None)
            report = await pair.reader.pull_blocks(key, own, [5], [3])
            assert (report.done, report.nbytes) == ((3,), 4096)
            assert np.array_equal(mine[3], memory[5 * 4096 : 6 * 4096])
            mine[4] = 77
            await pair.reader.push_blocks(key, own, [4], [7])
            assert (memory[7 * 4096 :] == 77).all()
        pair.owner.unregister_cache(cache)
        with pytest.raises(kv.CacheNotFoundError):
            await pair.reader.pull_blocks(key, own, [5], [3])
