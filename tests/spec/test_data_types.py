"""Element types, and what must match before any byte moves. Source: the spec, sections 1.2, 1.3 and 6.5 to 6.7."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import kvlink as kv
from tests.spec.harness import D, LayerGate, P, Pair, cluster, linked_pair, stamped
from tests.support.pattern import expect

KEY = kv.CacheKey(P, 10)
SIZES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "bool": 1,
    "float64": 8,
}
RAW = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


def test_all_types_are_listed() -> None:
    """The types of the spec are all there, and kvlink's two of 8 bits besides. Source: the spec, section 1.2."""
    assert {each.value for each in kv.DataType} == {*SIZES, "string"}


async def test_each_type(transport: str) -> None:
    """Views have the type's dtype, sizes are right, and a pull moves every bit. Source: the spec, section 1.3."""
    async with linked_pair(transport) as pair:
        for name, nbytes in SIZES.items():
            desc = kv.CacheDesc(2, (3, 16), name)
            assert desc.data_type is kv.DataType(name)
            assert (desc.data_type.itemsize, desc.tensor_nbytes, desc.slot_nbytes) == (nbytes, 48 * nbytes, 16 * nbytes)
            cache = pair.owner.allocate_cache(desc, [kv.CacheKey(P, kv.ABSENT), KEY])
            assert all(tensor.dtype == desc.data_type.numpy_dtype for tensor in cache.tensors)
            stamp = stamped(cache)
            into = pair.reader.allocate_cache(desc)
            await pair.reader.pull_cache(KEY, into, 2)
            expect(into.tensors, stamp, [2], src_blocks=[1])
            await pair.flush()
            pair.owner.deallocate_cache(cache)
            pair.reader.deallocate_cache(into)


async def test_values(transport: str) -> None:
    """Numbers that one side writes are those that the other side reads. Source: the spec, section 1.3."""
    async with linked_pair(transport) as pair:
        for name in SIZES.keys() - RAW.keys():
            desc = kv.CacheDesc(2, (3, 5), name)
            cache, into = pair.owner.allocate_cache(desc, [KEY]), pair.reader.allocate_cache(desc)
            assert cache.tensors[0].dtype == np.dtype(name)
            cache.tensors[1][0] = np.array([0, 1, 1, 0, 1]).astype(name)
            await pair.reader.pull_cache(KEY, into)
            assert into.tensors[1][0].tolist() == [0, 1, 1, 0, 1]
            await pair.flush()
            pair.owner.deallocate_cache(cache)
            pair.reader.deallocate_cache(into)


@pytest.mark.parametrize("name", RAW)
async def test_small_floats(transport: str, name: str) -> None:
    """kvlink: bfloat16 and the 8-bit floats are ml_dtypes' types where that package is installed.

    Source: the spec, section 1.2, and DIFFERENCES.md.
    """
    ml_dtypes = pytest.importorskip("ml_dtypes")
    desc = kv.CacheDesc(2, (3, 4), name)
    async with linked_pair(transport) as pair:
        cache, into = pair.owner.allocate_cache(desc, [KEY]), pair.reader.allocate_cache(desc)
        assert cache.tensors[0].dtype == np.dtype(getattr(ml_dtypes, name))
        cache.tensors[0][0] = [0.5, -1.0, 2.0, 0.0]
        await pair.reader.pull_cache(KEY, into)
        assert into.tensors[0][0].astype("float32").tolist() == [0.5, -1.0, 2.0, 0.0]


@pytest.mark.parametrize("name", RAW)
async def test_small_floats_as_bits(transport: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """kvlink: without ml_dtypes the views show the raw bits, and everything else is the same.

    Source: the spec, section 1.2, and DIFFERENCES.md.
    """
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    desc = kv.CacheDesc(2, (3, 4), name)
    async with linked_pair(transport) as pair:
        cache, into = pair.owner.allocate_cache(desc, [KEY]), pair.reader.allocate_cache(desc)
        registered = pair.reader.register_cache(desc, [bytearray(desc.tensor_nbytes) for _ in range(2)])
        assert cache.tensors[0].dtype == registered.tensors[0].dtype == np.dtype(RAW[name])
        cache.tensors[0][0] = [1, 2, 3, 250]
        await pair.reader.pull_cache(KEY, into, src_cache_offset=0)
        await pair.reader.pull_cache(KEY, registered)
        assert into.tensors[0][0].tolist() == registered.tensors[0][0].tolist() == [1, 2, 3, 250]


@pytest.mark.parametrize("name", ["float", "FLOAT32", "fp8", "", 4, None])
def test_unknown_types(name: Any) -> None:
    """What is no data type is refused, with those that are. Source: the spec, section 1.3."""
    with pytest.raises(kv.ParameterError, match="float16"):
        kv.CacheDesc(1, (1,), name)


async def test_strings() -> None:
    """DT_STRING has no size: nothing can be allocated of it. Source: the spec, section 1.2, and DIFFERENCES.md."""
    desc = kv.CacheDesc(1, (4,), "string")
    async with cluster(P, kv.Role.PROMPT) as prompt:
        for allocate in (prompt.kv_cache_manager.allocate_cache, prompt.kv_cache_manager.allocate_blocks_cache):
            with pytest.raises(kv.ParameterError, match="string"):
                allocate(desc)


# Mismatch is refused with the field and both values.

MISMATCHES: list[tuple[str, str, str, kv.CacheDesc, kv.CacheDesc]] = [
    ("data type", "float32", "int32", kv.CacheDesc(4, (8, 32), "float32"), kv.CacheDesc(4, (8, 32), "int32")),
    ("data type", "bfloat16", "float16", kv.CacheDesc(4, (8, 32), "bfloat16"), kv.CacheDesc(4, (8, 32), "float16")),
    ("tensors", "4", "6", kv.CacheDesc(4, (8, 32), "uint8"), kv.CacheDesc(6, (8, 32), "uint8")),
    ("tensors", "6", "2", kv.CacheDesc(6, (8, 32), "uint8"), kv.CacheDesc(2, (8, 32), "uint8")),
    (
        "layout",
        "NHD",
        "HND",
        kv.CacheDesc(4, (8, 32), "uint8", layout="NHD"),
        kv.CacheDesc(4, (8, 32), "uint8", layout="HND"),
    ),
]
BLOCK_MISMATCHES = [
    ("bytes of a block", "32", "64", kv.CacheDesc(4, (8, 32), "uint8"), kv.CacheDesc(4, (8, 64), "uint8")),
    ("bytes of a block", "36", "32", kv.CacheDesc(4, (8, 9), "float32"), kv.CacheDesc(4, (8, 8), "float32")),
]


Caches = tuple[kv.KvCache, kv.KvCache]


class Move(NamedTuple):
    """A way to move from the cache of one description to that of another: make both caches, then move."""

    make: Callable[[Pair, kv.CacheDesc, kv.CacheDesc], Caches]
    move: Callable[[Pair, Caches], Awaitable[object]]


def at_p_and_d(pair: Pair, one: kv.CacheDesc, two: kv.CacheDesc) -> Caches:
    """Allocate contiguous caches."""
    return pair.owner.allocate_cache(one, [KEY]), pair.reader.allocate_cache(two)


def blocks_at_p_and_d(pair: Pair, one: kv.CacheDesc, two: kv.CacheDesc) -> Caches:
    """Allocate paged caches."""
    return pair.owner.allocate_blocks_cache(one, kv.BlocksCacheKey(P)), pair.reader.allocate_blocks_cache(two)


async def transfer(pair: Pair, caches: Caches) -> None:
    """Push blocks layer by layer."""
    source, into = caches
    layers = range(source.desc.num_tensors // 2)
    config = kv.TransferWithCacheKeyConfig(kv.CacheKeyByIdAndIndex(D, into.cache_id), layers, layers)
    await pair.owner.transfer_cache_async(source, LayerGate(layers.stop), [config], [0], [0])


def id_of(cache: kv.KvCache) -> kv.CacheKeyByIdAndIndex:
    """Name slot 0 of a cache of D."""
    return kv.CacheKeyByIdAndIndex(D, cache.cache_id)


MOVES = {
    "pull_blocks": Move(
        blocks_at_p_and_d,
        lambda pair, caches: pair.reader.pull_blocks(kv.BlocksCacheKey(P), caches[1], [0], [0]),
    ),
    "push_blocks": Move(
        blocks_at_p_and_d, lambda pair, caches: pair.owner.push_blocks(id_of(caches[1]), caches[0], [0], [0])
    ),
    "transfer_cache_async": Move(blocks_at_p_and_d, transfer),
    "pull_cache": Move(at_p_and_d, lambda pair, caches: pair.reader.pull_cache(KEY, caches[1], src_cache_offset=0)),
    "push_cache": Move(at_p_and_d, lambda pair, caches: pair.owner.push_cache(id_of(caches[1]), caches[0])),
}


@pytest.mark.parametrize("name", MOVES)
async def test_mismatch(transport: str, name: str) -> None:
    """kvlink: data type, number of tensors, bytes of a block and layout are compared before any byte moves; the error
    names the field and both values. Source: the spec, sections 6.5 to 6.7, and DIFFERENCES.md.
    """
    make, move = MOVES[name]
    async with linked_pair(transport) as pair:
        for what, first, second, one, two in [*MISMATCHES, *BLOCK_MISMATCHES]:
            if what == "bytes of a block" and name in ("pull_cache", "push_cache"):
                continue  # slots of different sizes are allowed there
            if what == "tensors" and name == "transfer_cache_async":
                continue  # it sends as many layers as it was told to
            caches = make(pair, one, two)
            stamped(caches[0])
            other = stamped(caches[1], D)
            with pytest.raises(kv.MismatchError, match=what) as caught:
                await move(pair, caches)
            assert caught.value.status is kv.StatusCode.LLM_PARAM_INVALID
            assert first in str(caught.value)
            assert second in str(caught.value)
            expect(caches[1].tensors, other)
            await pair.flush()
            pair.owner.deallocate_cache(caches[0])
            pair.reader.deallocate_cache(caches[1])
            pair.owner.remove_cache_key(KEY)


@pytest.mark.parametrize("name", MOVES)
async def test_layouts_that_match(transport: str, name: str) -> None:
    """kvlink: equal layouts match, and a cache without one matches any. Source: the spec, section 1.3 (a name for the
    caller's information there), and DIFFERENCES.md.
    """
    make, move = MOVES[name]
    async with linked_pair(transport) as pair:
        for first, second in (("NHD", "NHD"), ("NHD", None), (None, "HND"), (None, None)):
            descs = [kv.CacheDesc(4, (8, 32), "uint8", layout=layout) for layout in (first, second)]
            caches = make(pair, descs[0], descs[1])
            stamp = stamped(caches[0])
            await move(pair, caches)
            expect(caches[1].tensors, stamp, [0])
            await pair.flush()
            pair.owner.deallocate_cache(caches[0])
            pair.reader.deallocate_cache(caches[1])
            pair.owner.remove_cache_key(KEY)


async def test_shapes_inside_of_a_block(transport: str) -> None:
    """Only byte ranges and tensor counts matter, not the inner dimensions. Source: the spec, section 6.5."""
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_blocks_cache(kv.CacheDesc(2, (8, 4, 2, 16), "float16"), kv.BlocksCacheKey(P))
        stamp = stamped(cache)
        into = pair.reader.allocate_blocks_cache(kv.CacheDesc(2, (5, 128), "float16"))
        await pair.reader.pull_blocks(kv.BlocksCacheKey(P), into, [7], [4])
        expect(into.tensors, stamp, [4], src_blocks=[7])
