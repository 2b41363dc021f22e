"""`transfer_cache_async`: layer after layer, to one or several receivers. Source: the spec, section 8."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

import kvlink as kv
from tests.spec.harness import D, LayerGate, P, Pair, cluster, hold, link, linked_pair, owner_and_reader, stamped
from tests.support.inside import link_to, used_nbytes
from tests.support.loops import every_loop
from tests.support.pattern import Stamp, expect

LAYERS = 4
NUM = 8
NBYTES = 256
DESC = kv.CacheDesc(2 * LAYERS, (NUM, NBYTES), "uint8")
OK, FAILED = kv.StatusCode.LLM_SUCCESS, kv.StatusCode.LLM_FAILED
INVALID, WAITING = kv.StatusCode.LLM_PARAM_INVALID, kv.StatusCode.LLM_WAIT_PROCESS_TIMEOUT
ALL = range(LAYERS)
Configs = Sequence[kv.TransferConfig | kv.TransferWithCacheKeyConfig]


def to_slot(target: kv.KvCache, slot: int = 0, layers: range | None = None, **options: Any) -> kv.TransferConfig:
    """Address one slot of D's cache, as an application would: address of K and V of each layer, plus slot x stride."""
    chosen = ALL if layers is None else layers
    addresses = [address + slot * target.block_nbytes for address in target.tensor_addresses]
    return kv.TransferConfig(D, addresses[chosen.start * 2 : chosen.stop * 2], layers, **options)


def by_id(target: kv.KvCache, slot: int = 0, src: range = ALL, dst: range = ALL, **options: Any) -> Any:
    """Name one slot of D's cache by its id."""
    return kv.TransferWithCacheKeyConfig(kv.CacheKeyByIdAndIndex(D, target.cache_id, slot), src, dst, **options)


def two_caches(pair: Pair) -> tuple[kv.KvCache, Stamp, kv.KvCache, Stamp]:
    """Return a filled cache at P and one at D, with their stamps."""
    source, target = pair.owner.allocate_cache(DESC), pair.reader.allocate_cache(DESC)
    return source, stamped(source), target, stamped(target, D)


async def results(task: kv.CacheTask) -> list[kv.StatusCode | None]:
    """Wait for the end of a task: its own status, then those of its configs."""
    return [await task.synchronize(20), *await task.get_results(20)]


# Section 8.1.


async def test_transfer_config() -> None:
    """dst_addrs: list/tuple of uint64; src_layer_range: step 1 with 0 <= start < stop; src_batch_index: uint32.

    Source: the spec, section 8.1.
    """
    config = kv.TransferConfig(D, (1, 2**64 - 1), range(1), 3)
    assert (config.dst_cluster_id, config.dst_addrs, config.src_layer_range, config.src_batch_index) == (
        D,
        (1, 2**64 - 1),
        range(1),
        3,
    )
    assert (kv.TransferConfig(D, []).src_layer_range, kv.TransferConfig(D, []).src_batch_index) == (None, 0)
    bad_values: list[tuple[Any, ...]] = [
        (-1, []),
        (2**64, []),
        (D, [-1]),
        (D, [2**64]),
        (D, [1, 2], range(0)),
        (D, [1, 2], range(0, 2, 2)),
        (D, [1, 2], range(-1, 1)),
        (D, [1, 2], range(2, 1)),
        (D, [1, 2], None, -1),
        (D, [1, 2], None, 2**32),
    ]
    for bad in bad_values:
        with pytest.raises(ValueError, match="must be"):
            kv.TransferConfig(*bad)
    bad_types: list[tuple[Any, ...]] = [
        (D, [1, 2], [0]),
        (D, [1, 2], 1),
        (D, {1, 2}),
        (D, ["1"]),
        ("2", []),
        (D, [1], None, 0.0),
    ]
    for wrong in bad_types:
        with pytest.raises(TypeError):
            kv.TransferConfig(*wrong)


async def test_transfer_with_cache_key_config() -> None:
    """cache_key BlocksCacheKey or CacheKeyByIdAndIndex; both ranges required, equal length; src_batch_index must be 0
    for a blocks key. Source: the spec, section 8.1.
    """
    key = kv.BlocksCacheKey(D)
    shifted = kv.TransferWithCacheKeyConfig(key, range(1), range(3, 4))
    assert (shifted.dst_cluster_id, shifted.src_batch_index) == (D, 0)
    bad_values: list[tuple[Any, ...]] = [
        (key, range(2), range(1)),
        (key, range(1), range(2, 4)),
        (key, range(0), range(0)),
        (key, range(0, 4, 2), range(2)),
        (key, range(1), range(1), 1),
    ]
    for bad in bad_values:
        with pytest.raises(kv.ParameterError) as caught:
            kv.TransferWithCacheKeyConfig(*bad)
        assert caught.value.status is INVALID
    bad_types: list[tuple[Any, ...]] = [
        (key, None, range(1)),
        (key, range(1), None),
        (key, [0], [0]),
        (kv.CacheKey(D, 1), range(1), range(1)),
    ]
    for wrong in bad_types:
        with pytest.raises(TypeError):
            kv.TransferWithCacheKeyConfig(*wrong)


# Section 8.2: refused before anything starts.


async def test_arguments_that_are_refused(transport: str) -> None:
    """All this is refused before anything starts: nothing is asked of the synchroniser, nothing is sent.

    Source: the spec, section 8.2.
    """
    async with linked_pair(transport) as pair:
        source, _, target, other = two_caches(pair)
        gate = LayerGate(LAYERS)
        addresses = target.tensor_addresses
        refused: list[tuple[Any, ...]] = [
            ([kv.TransferConfig(D, addresses[:-1])],),
            ([kv.TransferConfig(D, [*addresses, addresses[0]])],),
            ([kv.TransferConfig(D, addresses[:4], range(1))],),
            ([kv.TransferConfig(D, addresses[:4], range(3, 5))],),
            ([by_id(target, src=range(3, 5), dst=range(2))],),
            ([to_slot(target, src_batch_index=NUM)],),
            ([to_slot(target, src_batch_index=1)], [0], [0]),
            ([to_slot(target)], [0], None),
            ([to_slot(target)], [], None),
            ([to_slot(target)], [0, 1], [0]),
            ([to_slot(target)], [0], [0, 1]),
            ([to_slot(target)], [0, 1], [5, 5]),
            ([to_slot(target)], [NUM], [0]),
            ([to_slot(target)], [-1], [0]),
            ([to_slot(target)], [0], [-1]),
            ([to_slot(target)], [], []),
            ([to_slot(target)], None, [0]),
            ([to_slot(target)], None, [0], 0),
            ([to_slot(target)], None, [0], NBYTES - 1),
            ([to_slot(target)], None, [], NBYTES),
            ([to_slot(target)], None, None, 1),
            ([to_slot(target)], [0], [0], NBYTES - 1),
            ([to_slot(target)], [0], [0], -1),
        ]
        for arguments in refused:
            with pytest.raises(kv.ParameterError) as caught:
                pair.owner.transfer_cache_async(source, gate, *arguments)
            assert caught.value.status is INVALID
        odd = pair.owner.allocate_cache(kv.CacheDesc(3, (NUM, NBYTES), "uint8"))
        with pytest.raises(kv.ParameterError):
            pair.owner.transfer_cache_async(odd, gate, [kv.TransferConfig(D, addresses[:2])])
        pair.owner.deallocate_cache(odd)
        with pytest.raises(kv.CacheNotFoundError):
            pair.owner.transfer_cache_async(odd, gate, [to_slot(target)])
        await pair.flush()
        assert gate.asked == []
        assert source.is_quiet()
        expect(target.tensors, other)


async def test_types_that_are_refused(transport: str) -> None:
    """Bad types TypeError. Source: the spec, section 8.2."""
    async with linked_pair(transport) as pair:
        source, _, target, _ = two_caches(pair)
        gate, configs = LayerGate(LAYERS), [to_slot(target)]
        wrong: list[tuple[Any, ...]] = [
            (source.tensors, gate, configs),
            (source, lambda layer: True, configs),
            (source, gate, to_slot(target)),
            (source, gate, []),
            (source, gate, [(D, target.tensor_addresses)]),
            (source, gate, configs, 0, [0]),
            (source, gate, configs, [0.0], [0]),
            (source, gate, configs, [0], ["0"]),
            (source, gate, configs, [True], [0]),
            (source, gate, configs, None, [0], "256"),
        ]
        for arguments in wrong:
            with pytest.raises(TypeError):
                pair.owner.transfer_cache_async(*arguments)
        assert gate.asked == []


async def test_missing_range(transport: str) -> None:
    """Missing src_layer_range is replaced by all layers; kvlink does not write it back into the caller's object.

    Source: the spec, section 8.2, and DIFFERENCES.md.
    """
    async with linked_pair(transport) as pair:
        source, stamp, target, other = two_caches(pair)
        config = to_slot(target, 3, src_batch_index=2)
        task = pair.owner.transfer_cache_async(source, LayerGate(LAYERS), [config])
        assert await results(task) == [OK, OK]
        assert config.src_layer_range is None
        expect(target.tensors, stamp, [3], src_blocks=[2])
        expect(target.tensors, other, [0, 1, 2, *range(4, NUM)])


# Sections 8.1 and 8.2: what goes where.


@pytest.mark.parametrize("layers", [range(1, 3), range(3, 4), range(4)])
async def test_slot_by_address(transport: str, layers: range) -> None:
    """Two addresses per transferred layer in K, V order, starting at the first transferred layer; for a slot other than
    0 the caller adds slot x stride. Source: the spec, section 8.1.
    """
    async with linked_pair(transport) as pair:
        source, stamp, target, other = two_caches(pair)
        task = pair.owner.transfer_cache_async(
            source, LayerGate(LAYERS), [to_slot(target, 5, layers, src_batch_index=1)]
        )
        assert await results(task) == [OK, OK]
        first, stop = layers.start * 2, layers.stop * 2
        expect(target.tensors[first:stop], stamp, [5], src_blocks=[1], src_tensor=first)
        expect(target.tensors, other, [slot for slot in range(NUM) if slot != 5])
        expect(target.tensors[:first], other)
        expect(target.tensors[stop:], other, src_tensor=stop)


async def test_addresses_in_any_order(transport: str) -> None:
    """Addresses point directly at the target bytes: any layer, any tensor, any cache. Source: the spec, section 8.1."""
    async with linked_pair(transport) as pair:
        source, stamp, target, _ = two_caches(pair)
        second = pair.reader.allocate_cache(kv.CacheDesc(3, (2, NBYTES), "uint8"))
        addresses = [target.tensor_addresses[6], second.tensor_addresses[2] + NBYTES]
        addresses += [second.tensor_addresses[0], target.tensor_addresses[1]]
        config = kv.TransferConfig(D, addresses, range(1, 3))
        assert await results(pair.owner.transfer_cache_async(source, LayerGate(LAYERS), [config])) == [OK, OK]
        for tensor, slot, source_tensor in (
            (target.tensors[6], 0, 2),
            (second.tensors[2], 1, 3),
            (second.tensors[0], 0, 4),
            (target.tensors[1], 0, 5),
        ):
            expect([tensor], stamp, [slot], src_blocks=[0], src_tensor=source_tensor)


@pytest.mark.parametrize(("src", "dst"), [(ALL, ALL), (range(1, 3), range(1, 3)), (range(2, 4), range(1, 3))])
async def test_slot_by_id(transport: str, src: range, dst: range) -> None:
    """By key config, the k-th layer of src_layer_range goes to the k-th of dst_layer_range, also when the source range
    does not start at 0. Source: the spec, sections 8.1 and 8.4.
    """
    async with linked_pair(transport) as pair:
        source, stamp, target, other = two_caches(pair)
        task = pair.owner.transfer_cache_async(
            source, LayerGate(LAYERS), [by_id(target, 5, src, dst, src_batch_index=1)]
        )
        assert await results(task) == [OK, OK]
        first, stop = dst.start * 2, dst.stop * 2
        expect(target.tensors[first:stop], stamp, [5], src_blocks=[1], src_tensor=src.start * 2)
        expect(target.tensors[:first], other)
        expect(target.tensors[stop:], other, src_tensor=stop)
        expect(target.tensors, other, [slot for slot in range(NUM) if slot != 5])


@pytest.mark.parametrize("size", [None, 0, NBYTES])
async def test_blocks(transport: str, size: int | None) -> None:
    """Blocks to blocks: both index lists of equal length; dst_block_memory_size may be omitted, 0, or the source's.

    Source: the spec, section 8.2.
    """
    async with linked_pair(transport, roles=(kv.Role.PROMPT, kv.Role.MIX)) as pair:
        source = pair.owner.allocate_blocks_cache(DESC)
        target = pair.reader.allocate_blocks_cache(DESC, kv.BlocksCacheKey(D, 4))
        stamp, other = stamped(source), stamped(target, D)
        key_config = kv.TransferWithCacheKeyConfig(kv.BlocksCacheKey(D, 4), range(2), range(2))
        configs: Configs = [key_config, to_slot(target, layers=range(3, 4))]
        task = pair.owner.transfer_cache_async(source, LayerGate(LAYERS), configs, [7, 1, 2], [0, 5, 6], size)
        assert await results(task) == [OK, OK, OK]
        expect(target.tensors[:4], stamp, [0, 5, 6], src_blocks=[7, 1, 2])
        expect(target.tensors[6:], stamp, [0, 5, 6], src_blocks=[7, 1, 2], src_tensor=6)
        expect(target.tensors[4:6], other, src_tensor=4)
        expect(target.tensors, other, [1, 2, 3, 4, 7])


async def test_slot_into_blocks(transport: str) -> None:
    """Source plain with destination blocks needs dst_block_memory_size; the last block perhaps only in part.

    Source: the spec, section 8.2 (the second generation's rule), and DIFFERENCES.md.
    """
    async with linked_pair(transport) as pair:
        source = pair.owner.allocate_cache(DESC)
        stamped(source)
        target = pair.reader.allocate_blocks_cache(kv.CacheDesc(2 * LAYERS, (9, 100), "uint8"))
        stamped(target, D)
        before = [tensor.copy() for tensor in target.tensors]
        config = by_id(target, src_batch_index=3)
        task = pair.owner.transfer_cache_async(source, LayerGate(LAYERS), [config], None, [8, 0, 3], 100)
        assert await results(task) == [OK, OK]
        for tensor, old, origin in zip(target.tensors, before, source.tensors, strict=True):
            old[8], old[0], old[3, :56] = origin[3, :100], origin[3, 100:200], origin[3, 200:]
            assert (tensor == old).all()


async def test_plain_to_a_larger_slot(transport: str) -> None:
    """A destination with room behind the address is enough: shapes may otherwise differ.

    Source: the spec, section 8.3.
    """
    async with linked_pair(transport) as pair:
        source = pair.owner.allocate_cache(DESC)
        stamped(source)
        target = pair.reader.allocate_cache(kv.CacheDesc(2 * LAYERS, (2, 300), "uint8"))
        task = pair.owner.transfer_cache_async(source, LayerGate(LAYERS), [by_id(target, 1)])
        assert await results(task) == [OK, OK]
        for tensor, origin in zip(target.tensors, source.tensors, strict=True):
            assert (tensor[1, :NBYTES] == origin[0]).all()


# Section 8.3: execution.


@every_loop
async def test_layers_follow_the_computation(transport: str) -> None:
    """For layer 0..L-1 ascending: the synchroniser is called once, then the layer is sent; a config gets SUCCESS when
    its last layer is sent. kvlink's receivers can await each layer. Source: the spec, section 8.3, and DIFFERENCES.md.
    """
    async with linked_pair(transport) as pair:
        source, stamp, target, other = two_caches(pair)
        gate = LayerGate()
        with target.arrivals.watch(peer=P) as watch:
            task = pair.owner.transfer_cache_async(source, gate, [to_slot(target, 3)])
            for layer in ALL:
                expect(target.tensors[2 * layer :], other, src_tensor=2 * layer)
                gate.open(layer + 1)
                await watch.layer(layer, timeout_s=10)
                expect(target.tensors[: 2 * layer + 2], stamp, [3], src_blocks=[0])
                assert task.is_done == (layer == LAYERS - 1)
            assert await watch.end(timeout_s=10) == {0, 1, 2, 3}
        assert await results(task) == [OK, OK]
        assert gate.asked == [0, 1, 2, 3]


async def test_layers_that_nobody_wants(transport: str) -> None:
    """Collect configs whose range contains the layer; none: skip without synchronising. Called once for a layer that
    several want. Source: the spec, section 8.3.
    """
    async with linked_pair(transport) as pair:
        source, stamp, target, _ = two_caches(pair)
        gate = LayerGate(LAYERS)
        configs = [
            to_slot(target, 1, range(1, 2)),
            to_slot(target, 2, range(1, 2)),
            by_id(target, 3, range(3, 4), range(1)),
        ]
        assert await results(pair.owner.transfer_cache_async(source, gate, configs)) == [OK, OK, OK, OK]
        assert gate.asked == [1, 3]
        expect(target.tensors[2:4], stamp, [1, 2], src_blocks=[0, 0], src_tensor=2)
        expect(target.tensors[:2], stamp, [3], src_blocks=[0], src_tensor=6)


async def test_synchroniser_gives_up(transport: str) -> None:
    """False: those configs get LLM_PARAM_INVALID, the job stops. A config that had finished keeps its success; a later
    one stays None. Source: the spec, section 8.3.
    """
    async with linked_pair(transport) as pair:
        source, stamp, target, other = two_caches(pair)
        gate = LayerGate()
        configs = [to_slot(target, 1, range(1)), to_slot(target, 2), to_slot(target, 3, range(3, 4))]
        with target.arrivals.watch() as first, target.arrivals.watch() as second:
            task = pair.owner.transfer_cache_async(source, gate, configs)
            gate.open(1)
            for watch in (first, second):
                await watch.layer(0, timeout_s=10)
            gate.open(1, is_good=False)
            assert await results(task) == [INVALID, OK, INVALID, None]
        with pytest.raises(kv.ParameterError):
            await task
        assert gate.asked == [0, 1]
        expect(target.tensors[:2], stamp, [1, 2], src_blocks=[0, 0])
        expect(target.tensors, other, [0, *range(3, NUM)])


async def test_tested_case_of_a_refusal(transport: str) -> None:
    """Synchroniser returning False on layer 0: results [error, None]. Source: the spec, section 8.4, tested."""
    async with linked_pair(transport) as pair:
        source, _, target, other = two_caches(pair)
        gate = LayerGate()
        task = pair.owner.transfer_cache_async(source, gate, [to_slot(target), to_slot(target, layers=range(2, 4))])
        gate.open(0, is_good=False)
        assert await task.get_results(10) == [INVALID, None]
        expect(target.tensors, other)


async def test_tested_case_of_two_configs(world: str, transport: str) -> None:
    """Two configs, ranges 0..3 and 2..4 with 6 and 4 addresses, synchroniser waiting on layer 0: synchronize(0) and
    get_results(0) give the timeout code; later both succeed. Source: the spec, section 8.4, tested.
    """
    async with owner_and_reader(world, transport) as stage:
        cache = await stage.owner.call("allocate_slots", num_tensors=2 * LAYERS, shape=[NUM, NBYTES], keys=[])
        first, second = stage.reader.allocate_cache(DESC), stage.reader.allocate_cache(DESC)
        others = [stamped(first, D), stamped(second, D)]
        configs = [
            {"addresses": first.tensor_addresses[:6], "layers": [0, 3]},
            {"addresses": second.tensor_addresses[4:], "layers": [2, 4]},
        ]
        with first.arrivals.watch() as early, second.arrivals.watch() as late:
            task = await stage.owner.call("transfer", cache=cache, src=None, dst=None, configs=configs)
            waiting = await stage.owner.call("task_results", task=task, timeout_s=0)
            assert waiting == [WAITING.name] * 3
            await stage.owner.call("open_layers", task=task, stop=LAYERS)
            assert await early.end(timeout_s=10) == {0, 1, 2}
            assert await late.end(timeout_s=10) == {2, 3}
        assert await stage.owner.call("task_results", task=task, timeout_s=10) == [OK.name] * 3
        assert await stage.owner.call("asked_layers", task=task) == [0, 1, 2, 3]
        stamp = stage.owner.stamp(cache)
        expect(first.tensors[:6], stamp, [0])
        expect(first.tensors[6:], others[0], src_tensor=6)
        expect(second.tensors[4:], stamp, [0], src_tensor=4)
        expect(second.tensors[:4], others[1])


async def test_blocks_between_processes(world: str, transport: str) -> None:
    """Layers of blocks reach a receiver in another process one after the other; it can await each.

    Source: the spec, section 8.3, and DIFFERENCES.md.
    """
    async with owner_and_reader(world, transport) as stage:
        cache = await stage.owner.call("allocate_blocks", num_tensors=2 * LAYERS, shape=[NUM, NBYTES])
        target = stage.reader.allocate_blocks_cache(DESC)
        stamp, other = stage.owner.stamp(cache), stamped(target, D)
        configs = [{"addresses": target.tensor_addresses}]
        with target.arrivals.watch(peer=P) as watch:
            task = await stage.owner.call("transfer", cache=cache, src=[5, 6, 0], dst=[1, 2, 7], configs=configs)
            for layer in ALL:
                expect(target.tensors[2 * layer :], other, src_tensor=2 * layer)
                await stage.owner.call("open_layers", task=task, stop=layer + 1)
                await watch.layer(layer, timeout_s=10)
                expect(target.tensors[: 2 * layer + 2], stamp, [1, 2, 7], src_blocks=[5, 6, 0])
            await watch.end(timeout_s=10)
        assert await stage.owner.call("task_results", task=task, timeout_s=10) == [OK.name] * 2


async def test_sender_that_dies(transport: str) -> None:
    """kvlink: a receiver that waits for a layer learns that the sender has died; what had landed stays.

    Source: the spec, section 8.3, and DIFFERENCES.md.
    """
    async with owner_and_reader("two processes", transport) as stage:
        cache = await stage.owner.call("allocate_slots", num_tensors=2 * LAYERS, shape=[NUM, NBYTES], keys=[])
        target = stage.reader.allocate_cache(DESC)
        with target.arrivals.watch() as watch:
            configs = [{"addresses": target.tensor_addresses}]
            task = await stage.owner.call("transfer", cache=cache, src=None, dst=None, configs=configs)
            await stage.owner.call("open_layers", task=task, stop=2)
            await watch.layer(1, timeout_s=10)
            stage.process().kill()
            with pytest.raises(kv.LinkLostError):
                await watch.layer(3, timeout_s=10)
            await watch.layer(0, timeout_s=10)
        expect(target.tensors[:4], stage.owner.stamp(cache), [0])


async def test_exception_in_the_synchroniser(transport: str) -> None:
    """kvlink: an exception inside the synchroniser is a failure of the task, with the exception as its cause.

    Source: the spec, section 8.4, and DIFFERENCES.md.
    """
    landed = threading.Event()

    class Broken(kv.LayerSynchronizer):
        def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
            if layer_index == 1:
                assert landed.wait(10)
                raise ZeroDivisionError("no such layer")
            return True

    async with linked_pair(transport) as pair:
        source, _, target, _ = two_caches(pair)
        configs = [to_slot(target), to_slot(target, 1, range(2, 4))]
        with target.arrivals.watch() as watch:
            task = pair.owner.transfer_cache_async(source, Broken(), configs)
            await watch.layer(0, timeout_s=10)
            landed.set()
            assert await results(task) == [FAILED, FAILED, None]
            with pytest.raises(kv.KVLinkError, match="ZeroDivisionError") as caught:
                await task
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
            with pytest.raises(kv.KVLinkError, match="ZeroDivisionError"):
                await watch.end(timeout_s=10)


@pytest.mark.parametrize("addressed_by", ["address", "id"])
async def test_receivers_learn_of_a_failure_before_the_first_layer(transport: str, addressed_by: str) -> None:
    """kvlink: a receiver of which no layer has been sent is told of a failure too, once the push has reached it.

    Source: the spec, section 8.3, and DIFFERENCES.md.
    """
    async with linked_pair(transport) as pair:
        source, _, target, _ = two_caches(pair)
        gate, layers = LayerGate(), range(1, 3)
        configs: Configs = [
            to_slot(target, 0, range(1), tag="first"),
            to_slot(target, 1, layers, tag="later")
            if addressed_by == "address"
            else by_id(target, 1, layers, layers, tag="later"),
        ]
        with target.arrivals.watch(tag="first") as first, target.arrivals.watch(tag="later") as later:
            task = pair.owner.transfer_cache_async(source, gate, configs)
            gate.open(1)
            await first.end(timeout_s=10)
            await pair.flush()
            gate.open(1, is_good=False)
            assert await results(task) == [INVALID, OK, INVALID]
            await pair.flush()
            with pytest.raises(kv.ParameterError):
                await later.end(timeout_s=0.01)


async def test_answers_that_are_no_bool(transport: str) -> None:
    """kvlink: a synchroniser that answers neither True nor False has failed. Source: the spec, section 8.1."""

    class Vague(kv.LayerSynchronizer):
        def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
            return None  # type: ignore[return-value]  # the mistake

    async with linked_pair(transport) as pair:
        source, _, target, other = two_caches(pair)
        task = pair.owner.transfer_cache_async(source, Vague(), [to_slot(target)])
        assert (await results(task))[0] is FAILED
        expect(target.tensors, other)


async def test_blocking_synchroniser(transport: str) -> None:
    """A plain synchroniser may block until that layer's K/V is computed: it has a thread, and the loop stays free.

    Source: the spec, sections 8.1 and 8.3.
    """
    ready, threads = [threading.Event() for _ in ALL], set()

    class Blocking(kv.LayerSynchronizer):
        def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
            threads.add(threading.get_ident())
            return ready[layer_index].wait(10)

    async with linked_pair(transport) as pair:
        source, stamp, target, _ = two_caches(pair)
        with target.arrivals.watch() as watch:
            task = pair.owner.transfer_cache_async(source, Blocking(), [to_slot(target)])
            for layer in ALL:
                assert (await pair.decoder.check_link_status(P)).is_ok
                ready[layer].set()
                await watch.layer(layer, timeout_s=10)
        assert await results(task) == [OK, OK]
        expect(target.tensors, stamp, [0])
        assert threading.get_ident() not in threads


async def test_several_receivers(transport: str) -> None:
    """kvlink: results are kept by position, also for two configs to one cluster; senders to different clusters do not
    wait for each other. Source: the spec, section 8.4, and DIFFERENCES.md.
    """
    async with linked_pair(transport) as pair, cluster(3, kv.Role.DECODER) as third:
        await link(third, P, pair.prompt.address, transport)
        source, stamp, target, _ = two_caches(pair)
        far = third.kv_cache_manager.allocate_cache(DESC)
        held = hold(pair.prompt, D, "put")
        far_config = kv.TransferWithCacheKeyConfig(kv.CacheKeyByIdAndIndex(3, far.cache_id, 2), ALL, ALL)
        configs: Configs = [to_slot(target, 1), far_config, by_id(target, 2, range(1), range(3, 4))]
        with far.arrivals.watch() as watch:
            task = pair.owner.transfer_cache_async(source, LayerGate(LAYERS), configs)
            await watch.end(timeout_s=10)
        expect(far.tensors, stamp, [2], src_blocks=[0])
        assert await task.synchronize(0) is WAITING
        held.release()
        assert await results(task) == [OK, OK, OK, OK]
        expect(target.tensors, stamp, [1], src_blocks=[0])
        expect(target.tensors[6:], stamp, [2], src_blocks=[0], src_tensor=0)


async def test_two_configs_to_one_cluster(transport: str) -> None:
    """kvlink: of two configs to one cluster one may fail and the other succeed. Source: the spec, section 8.4."""
    async with linked_pair(transport) as pair:
        source, _, target, _ = two_caches(pair)
        gate = LayerGate()
        configs = [to_slot(target, 1, range(1)), to_slot(target, 2, range(2))]
        with target.arrivals.watch() as first, target.arrivals.watch() as second:
            task = pair.owner.transfer_cache_async(source, gate, configs)
            gate.open(1)
            for watch in (first, second):
                await watch.layer(0, timeout_s=10)
            gate.open(1, is_good=False)
            assert await results(task) == [INVALID, OK, INVALID]
            assert await first.end(timeout_s=10) == {0}
            with pytest.raises(kv.ParameterError):
                await second.end(timeout_s=10)


# Section 8.3: what fails once it has started.


async def test_addresses_outside_of_a_cache(transport: str) -> None:
    """Each address must lie inside a live allocation of D with enough bytes after it, else the config fails and the
    link stays usable. For blocks the span checked is (highest destination block + 1) x block bytes.

    Source: the spec, section 8.3.
    """
    async with linked_pair(transport) as pair:
        source, stamp, target, other = two_caches(pair)
        good = target.tensor_addresses
        gone = pair.reader.allocate_cache(DESC)
        freed = gone.tensor_addresses
        pair.reader.deallocate_cache(gone)
        for bad, blocks in (
            (1, None),
            (good[-1] + (1 << 30), None),
            (freed[1], None),
            (good[1] + (NUM - 1) * NBYTES + 1, None),
            (good[1], [0, NUM]),
            (good[1] + 1, [0, NUM - 1]),
        ):
            config = kv.TransferConfig(D, [good[0], bad], range(1))
            source_blocks = None if blocks is None else [0, 1]
            task = pair.owner.transfer_cache_async(source, LayerGate(1), [config], source_blocks, blocks)
            status = await task.synchronize(10)
            assert status in (INVALID, kv.StatusCode.LLM_KV_CACHE_NOT_EXIST)
            assert await task.get_results() == [status]
        expect(target.tensors, other)
        assert await results(pair.owner.transfer_cache_async(source, LayerGate(4), [to_slot(target)])) == [OK, OK]
        expect(target.tensors, stamp, [0])


async def test_receivers_that_do_not_fit(transport: str) -> None:
    """kvlink: what does not fit is found before the first layer is there, not when it is sent.

    Source: the spec, sections 8.2 and 8.3, and DIFFERENCES.md.
    """
    async with linked_pair(transport, roles=(kv.Role.PROMPT, kv.Role.MIX)) as pair:
        source, _, target, other = two_caches(pair)
        small = pair.reader.allocate_cache(kv.CacheDesc(2 * LAYERS, (NUM, NBYTES - 1), "uint8"))
        few = pair.reader.allocate_cache(kv.CacheDesc(2, (NUM, NBYTES), "uint8"))
        signed = pair.reader.allocate_cache(kv.CacheDesc(2 * LAYERS, (NUM, NBYTES), "int8"))
        blocks = pair.reader.allocate_blocks_cache(DESC, kv.BlocksCacheKey(D))
        to_blocks = kv.TransferWithCacheKeyConfig(kv.BlocksCacheKey(D), ALL, ALL)
        nowhere = kv.TransferWithCacheKeyConfig(kv.CacheKeyByIdAndIndex(9, 1), ALL, ALL)
        unknown = kv.TransferWithCacheKeyConfig(kv.CacheKeyByIdAndIndex(D, 99), ALL, ALL)
        cases: list[tuple[Any, list[int] | None, list[int] | None, kv.StatusCode]] = [
            (by_id(small), None, None, INVALID),
            (by_id(few), None, None, INVALID),
            (by_id(signed), None, None, INVALID),
            (by_id(target, NUM), None, None, INVALID),
            (by_id(small), [0], [0], INVALID),
            (to_blocks, [0], [NUM], INVALID),
            (to_blocks, None, None, INVALID),
            (nowhere, None, None, kv.StatusCode.LLM_NOT_YET_LINK),
            (unknown, None, None, kv.StatusCode.LLM_KV_CACHE_NOT_EXIST),
        ]
        for config, src, dst, expected in cases:
            task = pair.owner.transfer_cache_async(source, LayerGate(), [config], src, dst)
            assert await results(task) == [expected, expected]
        expect(target.tensors, other)
        assert blocks.is_valid


async def test_references_are_not_touched(transport: str) -> None:
    """Keys and references are not touched on either side. Source: the spec, section 8.3."""
    async with linked_pair(transport, roles=(kv.Role.PROMPT, kv.Role.MIX)) as pair:
        source, key = pair.owner.allocate_cache(DESC, [kv.CacheKey(P, 1)]), kv.CacheKey(D, 2)
        stamped(source)
        target = pair.reader.allocate_cache(DESC, [key])
        assert await results(pair.owner.transfer_cache_async(source, LayerGate(LAYERS), [to_slot(target)])) == [OK, OK]
        with pytest.raises(kv.ParameterError):
            pair.reader.allocate_cache(DESC, [key])
        with pytest.raises(kv.ParameterError):
            pair.owner.allocate_cache(DESC, [kv.CacheKey(P, 1)])


async def test_source_that_is_given_back(transport: str) -> None:
    """Memory that a running transfer is using stays alive until that operation ends. Source: the spec, section 5.2."""
    async with linked_pair(transport) as pair:
        source, stamp, target, _ = two_caches(pair)
        gate = LayerGate()
        with target.arrivals.watch() as watch:
            task = pair.owner.transfer_cache_async(source, gate, [to_slot(target)])
            gate.open(1)
            await watch.layer(0, timeout_s=10)
            pair.owner.deallocate_cache(source)
            assert used_nbytes(pair.prompt) == DESC.nbytes
            gate.open(LAYERS)
            assert await results(task) == [OK, OK]
        expect(target.tensors, stamp, [0])
        assert used_nbytes(pair.prompt) == 0


async def test_target_that_is_given_back(transport: str) -> None:
    """kvlink: a receiver's cache that ends in the middle fails the push, and nobody else's memory is touched.

    Source: the spec, section 5.2, and DIFFERENCES.md.
    """
    async with linked_pair(transport) as pair:
        source, _, target, _ = two_caches(pair)
        gate, watch = LayerGate(), target.arrivals.watch()
        task = pair.owner.transfer_cache_async(source, gate, [to_slot(target), by_id(target, 1)])
        gate.open(1)
        await watch.layer(0, timeout_s=10)
        pair.reader.deallocate_cache(target)
        with pytest.raises(kv.CacheNotFoundError):
            await watch.layer(1, timeout_s=10)
        await pair.flush()
        new = pair.reader.allocate_cache(DESC)
        other = stamped(new, D)
        gate.open(LAYERS)
        assert await task.synchronize(10) is kv.StatusCode.LLM_KV_CACHE_NOT_EXIST
        expect(new.tensors, other)


async def test_key_that_names_another_cache_by_then(transport: str) -> None:
    """kvlink: a push goes into one cache or fails; it is not spread over two that bear its key one after the other.

    Source: the spec, section 5.2, and DIFFERENCES.md.
    """
    async with linked_pair(transport, roles=(kv.Role.PROMPT, kv.Role.MIX)) as pair:
        key = kv.BlocksCacheKey(D, 4)
        source = pair.owner.allocate_blocks_cache(DESC)
        target = pair.reader.allocate_blocks_cache(DESC, key)
        gate, watch = LayerGate(), target.arrivals.watch()
        configs: Configs = [kv.TransferWithCacheKeyConfig(key, ALL, ALL)]
        task = pair.owner.transfer_cache_async(source, gate, configs, [0, 1], [0, 1])
        gate.open(1)
        await watch.layer(0, timeout_s=10)
        watch.close()
        pair.reader.deallocate_cache(target)
        new = pair.reader.allocate_blocks_cache(DESC, key)
        other = stamped(new, D)
        await pair.flush()
        gate.open(LAYERS)
        assert await task.synchronize(10) is kv.StatusCode.LLM_KV_CACHE_NOT_EXIST
        assert task.error is not None
        assert task.error.peer == D
        expect(new.tensors, other)


async def test_link_that_ends(transport: str) -> None:
    """A link that ends in the middle is a failure of that push, seen at both ends. Source: the spec, section 8.3."""
    async with linked_pair(transport) as pair:
        source, _, target, _ = two_caches(pair)
        gate = LayerGate()
        with target.arrivals.watch() as watch:
            task = pair.owner.transfer_cache_async(source, gate, [to_slot(target)])
            gate.open(1)
            await watch.layer(0, timeout_s=10)
            closed = link_to(pair.prompt, D).closed
            (await pair.decoder.unlink_clusters([P], force=True)).raise_for_status()
            await closed.wait()
            gate.open(LAYERS)
            assert await task.synchronize(10) not in (OK, WAITING)
            with pytest.raises(kv.LinkLostError):
                await watch.end(timeout_s=10)


# Section 8.4.


async def test_cache_task_polls(transport: str) -> None:
    """Still running at the deadline: LLM_WAIT_PROCESS_TIMEOUT; 0 polls. Both may be called repeatedly; a timeout does
    not cancel. Source: the spec, section 8.4.
    """
    async with linked_pair(transport) as pair:
        source, stamp, target, _ = two_caches(pair)
        gate = LayerGate()
        task = pair.owner.transfer_cache_async(source, gate, [to_slot(target), to_slot(target, 1, range(1))])
        for timeout_s in (0, 0.01, 0):
            assert await task.synchronize(timeout_s) is WAITING
            assert await task.get_results(timeout_s) == [WAITING, WAITING]
        assert not task.is_done
        gate.open(LAYERS)
        for _ in range(2):
            assert await results(task) == [OK, OK, OK]
            assert await task.synchronize() is OK
            assert await task == [OK, OK]
        assert task.error is None
        expect(target.tensors, stamp, [0])


async def test_waiter_that_is_cancelled(transport: str) -> None:
    """kvlink: cancelling whoever awaits the task stops nothing. Source: the spec, section 8.4."""
    async with linked_pair(transport) as pair:
        source, stamp, target, _ = two_caches(pair)
        gate = LayerGate()
        task = pair.owner.transfer_cache_async(source, gate, [to_slot(target)])
        with anyio.move_on_after(0.01) as scope:
            await task
        assert scope.cancelled_caught
        gate.open(LAYERS)
        assert await task == [OK]
        expect(target.tensors, stamp, [0])


async def test_cancelling_the_task(transport: str) -> None:
    """kvlink: a task can be cancelled: no further layer is sent, receivers are told, the overall status is no success.

    Source: the spec, section 8.4 (it has no cancel call), and DIFFERENCES.md.
    """
    async with linked_pair(transport) as pair:
        source, stamp, target, other = two_caches(pair)
        gate = LayerGate()
        with target.arrivals.watch() as watch:
            task = pair.owner.transfer_cache_async(source, gate, [to_slot(target)])
            gate.open(2)
            await watch.layer(1, timeout_s=10)
            task.cancel()
            assert await results(task) == [FAILED, None]
            with pytest.raises(kv.KVLinkError):
                await task
            with pytest.raises(kv.KVLinkError, match="cancelled"):
                await watch.end(timeout_s=10)
        assert source.is_quiet()
        expect(target.tensors[:4], stamp, [0])
        expect(target.tensors[4:], other, src_tensor=4)


async def test_success_only_if_every_config_succeeded(transport: str) -> None:
    """kvlink: overall SUCCESS only if every config succeeded; None is never taken for success.

    Source: the spec, sections 8.4 and 19, and DIFFERENCES.md.
    """
    async with linked_pair(transport) as pair:
        source, _, target, _ = two_caches(pair)
        gate = LayerGate()
        configs = [to_slot(target, 0, range(1)), to_slot(target, 1, range(2, 3))]
        with target.arrivals.watch() as watch:
            task = pair.owner.transfer_cache_async(source, gate, configs)
            gate.open(1)
            await watch.end(timeout_s=10)
            task.cancel()
            assert await results(task) == [FAILED, OK, None]


async def test_closing_the_cluster_ends_tasks(transport: str) -> None:
    """A task of a cluster that closes has ended, and not with success. Source: the spec, sections 8.4 and 19."""
    async with linked_pair(transport, close_timeout_s=0.1) as pair:
        source, _, target, _ = two_caches(pair)
        task = pair.owner.transfer_cache_async(source, LayerGate(), [to_slot(target)])
    assert task.is_done
    assert await task.synchronize(0) not in (OK, None, WAITING)


async def test_tags_tell_pushes_apart(transport: str) -> None:
    """kvlink: a watch follows the push that carries its tag. Source: the spec, section 8.3, and DIFFERENCES.md."""
    async with linked_pair(transport) as pair:
        source, _, target, _ = two_caches(pair)
        with target.arrivals.watch(tag="b") as second, target.arrivals.watch(tag="a") as first:
            configs = [to_slot(target, 0, range(2), tag="a"), to_slot(target, 1, range(1, 4), tag="b")]
            task = pair.owner.transfer_cache_async(source, LayerGate(LAYERS), configs)
            assert await first.end(timeout_s=10) == {0, 1}
            assert await second.end(timeout_s=10) == {1, 2, 3}
            assert await results(task) == [OK, OK, OK]
        with target.arrivals.watch(tag="c") as watch:
            assert await results(pair.owner.transfer_cache_async(source, LayerGate(LAYERS), [to_slot(target)])) == [
                OK,
                OK,
            ]
            await pair.flush()
            with pytest.raises(kv.TransferTimeoutError):
                await watch.layer(0, timeout_s=0.01)
