"""The turns of a UCX worker: what has ended has ended, and nobody waits for a turn that will not come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

import anyio
import numpy as np
import pytest

import kvlink as kv
from kvlink.loops import current_call_soon, until_set
from kvlink.memory.regions import LocalMemory, LocalRegion
from tests.support.loops import asyncio_and_trio, asyncio_and_uvloop, eventually, every_loop
from tests.support.pair import Pair, pair
from tests.support.ucx import need_ucx

pytestmark = pytest.mark.ucx


class TwoWorkers(NamedTuple):
    """A writer with an endpoint to a reader, and one region on either side."""

    writer: Any
    reader: Any
    endpoint: Any
    source: np.ndarray[Any, Any]
    target: np.ndarray[Any, Any]
    put: Any


@asynccontextmanager
async def two_workers() -> AsyncIterator[TwoWorkers]:
    """Make two workers of this process that talk over TCP, where a put needs the other side's turns."""
    need_ucx()
    from kvlink.transports.ucx.cards import unpack_key
    from kvlink.transports.ucx.connection import WorkerEndpoint
    from kvlink.transports.ucx.context import Context
    from kvlink.transports.ucx.registry import Registry
    from kvlink.transports.ucx.requests import Group, Transfer
    from kvlink.transports.ucx.worker import Worker

    config = kv.UcxConfig(transports=("tcp",), allow_tcp=True)
    memories = [np.zeros(4096, np.uint8) for _ in range(2)]
    workers = [Worker(Context.create(config), max_requests=64, max_inflight_nbytes=1 << 20) for _ in range(2)]
    writer, reader = workers
    try:
        known = []
        for worker, memory in zip(workers, memories, strict=True):
            worker.start(current_call_soon(), has_thread=True)
            registry = Registry(worker, LocalMemory())
            known.append(await worker.call(partial(registry.map, LocalRegion(memory))))
        endpoint = WorkerEndpoint()
        library = writer.context.library
        rkey = library.ffi.new("ucp_rkey_h *")
        key = library.ffi.from_buffer(unpack_key(known[1].key))
        await writer.call(lambda: writer.open_endpoint(endpoint, reader.context.address))
        assert await writer.call(lambda: library.api.ucp_ep_rkey_unpack(endpoint.ep, key, rkey)) == 0
        endpoint.rkeys.append(rkey[0])

        async def put(is_waited_for: bool = True) -> tuple[Transfer, anyio.Event]:
            transfer, ended = (
                Transfer(
                    endpoint,
                    is_put=True,
                    local=[known[0].address],
                    nbytes=[64],
                    remote=[known[1].address],
                    groups=[Group(1, known[0].memh, rkey[0])],
                ),
                anyio.Event(),
            )
            transfer.finish = ended.set
            writer.submit(transfer)
            if is_waited_for:
                await ended.wait()
            return transfer, ended

        yield TwoWorkers(writer, reader, endpoint, memories[0], memories[1], put)
        closed = anyio.Event()
        writer.close_endpoint(endpoint, closed.set)
        await closed.wait()
        for worker, region in zip(workers, known, strict=True):
            context = worker.context
            await worker.call(partial(context.library.api.ucp_mem_unmap, context.handle, region.handle))
    finally:
        for worker in workers:
            await worker.aclose()


async def test_a_put_that_was_stopped_ends_when_its_bytes_have_landed() -> None:
    """What UCX has let go of is still on its way: a lease given back then would let it into the next cache."""
    async with two_workers() as two:
        await two.put()
        two.source[:] = 9
        with two.reader._lock:
            transfer, ended = await two.put(is_waited_for=False)
            await eventually(lambda: transfer.flush, "the put to be let go of")
            two.writer.stop(transfer)
            await anyio.sleep(0.05)
            assert not transfer.has_ended
            assert two.target[0] == 0
        with anyio.fail_after(5):
            await ended.wait()
        assert two.target[0] == 9


async def test_a_put_whose_endpoint_is_closed_before_its_flush_has_failed() -> None:
    """Force-closed while the flush is on its way: the put is no success."""
    async with two_workers() as two:
        await two.put()
        with two.reader._lock:
            transfer, ended = await two.put(is_waited_for=False)
            await eventually(lambda: transfer.flush, "the put to be let go of")
            await two.writer.call(lambda: two.writer._close_now(two.endpoint))
            with anyio.fail_after(5):
                await ended.wait()
        assert transfer.status != 0


async def test_a_call_that_raises_keeps_no_other_from_being_made(caplog: pytest.LogCaptureFixture) -> None:
    """On the thread and on the loop: it is logged, and the next one has its turn."""
    async with two_workers() as two:
        two.writer.ask(lambda: 1 / 0)
        two.writer.ask(lambda: two.writer.report(lambda: 1 / 0))
        with anyio.fail_after(5):
            assert await two.writer.call(lambda: 3) == 3
        await two.put()
    assert caplog.text.count("ZeroDivisionError") == 2


def break_turns(p: Pair) -> None:
    """Make the turns of the consumer's worker fail."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    p.link.endpoint._worker._look_at = fail  # type: ignore[attr-defined]


@asyncio_and_trio
@pytest.mark.parametrize("progress", ["thread", "loop"])
async def test_turns_that_fail_end_every_transfer_and_every_link(
    progress: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault of ours in a turn: a typed error at once, a lost link, and a cluster that can be closed."""
    need_ucx()
    config = {"transports": ["ucx"], "inline_nbytes": 0, "ucx": {"progress": progress}}
    with anyio.fail_after(20):
        async with pair(config=config, owner_config={"transports": ["ucx"]}) as p:
            await p.warm_up()
            link = p.link
            break_turns(p)
            with pytest.raises(kv.LinkLostError), anyio.fail_after(5):
                await p.pull()
            with anyio.fail_after(5):
                await link.closed.wait()
            with pytest.raises(kv.KVLinkError), anyio.fail_after(5):
                await p.pull()
    assert "ZeroDivisionError" in caplog.text


async def test_a_turn_that_takes_long_does_not_hold_the_event_loop() -> None:
    """While memory is being registered, a small pull waits in the queue like any other, and the loop goes on."""
    need_ucx()
    async with pair(config={"transports": ["ucx"]}, owner_config={"transports": ["ucx"]}) as p:
        await p.warm_up()
        worker = p.link.endpoint._worker  # type: ignore[attr-defined]
        async with anyio.create_task_group() as tasks:
            with worker._lock:
                tasks.start_soon(p.pull, [0], [0])
                await anyio.sleep(0.05)
                p.expect_untouched()
        await p.pull()
        p.expect_all()


@asyncio_and_uvloop
async def test_cancelled_twice_still_waits() -> None:
    """asyncio's own cancellation goes through shields of anyio; it is raised when the wait is over, and not before."""
    event = anyio.Event()
    waiting = asyncio.get_running_loop().create_task(until_set(event))
    for _ in range(3):
        await asyncio.sleep(0)
        waiting.cancel()
    await asyncio.sleep(0.01)
    assert not waiting.done()
    event.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@every_loop
async def test_a_wait_that_takes_long_is_hurried_once() -> None:
    """After its patience, and only once."""
    event, calls = anyio.Event(), []

    def hurry() -> None:
        calls.append(1)
        event.set()

    with anyio.fail_after(5):
        await until_set(event, patience_s=0.01, hurry=hurry)
    assert calls == [1]


@asyncio_and_uvloop
async def test_a_pull_that_asyncio_cancels_twice_is_quiet() -> None:
    """When the call has ended, by whatever cancellation, not a byte is written any more."""
    need_ucx()
    desc = kv.CacheDesc(8, (1024, 4096), "uint8")
    config = {"transports": ["ucx"], "inline_nbytes": 0, "chunk_nbytes": 4096}
    async with pair(desc, config=config, owner_config={"transports": ["ucx"]}) as p:
        await p.warm_up()
        worker = p.link.endpoint._worker  # type: ignore[attr-defined]
        pulling = asyncio.get_running_loop().create_task(p.pull())
        await p.is_moving()
        pulling.cancel()
        await asyncio.sleep(0)
        pulling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        assert not worker._active
        assert p.cache.is_quiet()
