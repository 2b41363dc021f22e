"""One worker: a cluster of its own, and tasks that do random things with it and the others until told to end."""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, Final

import anyio
import numpy as np

import kvlink as kv
from kvlink.testing import Faults, FaultyTransport
from kvlink.transports.base import Transport
from tests.programs.stress.checks import Lives, check_inbox, check_pulled
from tests.programs.stress.settings import (
    HANG_S,
    INBOX_MODEL,
    NUM_OFFERS,
    NUM_REQUESTS,
    NUM_TASKS,
    NUM_TENSORS,
    OFFER,
    SLOTS,
    WIDTH,
    Journal,
    Settings,
    part_of,
)
from tests.programs.stress.ticketing import NUM_GIVERS, TicketWork
from tests.support import inside
from tests.support.leaks import holdings, new_since
from tests.support.pattern import Stamp, block_bytes, faults, fill, rows

_POOL: Final = "24MiB"
_RUBBISH: Final = Stamp(250, 250, 65000)
_HARMLESS: Final = (
    *(kv.CacheNotFoundError, kv.NotLinkedError, kv.LinkError, kv.LinkLostError, kv.TransferTimeoutError),
    *(kv.PartialTransferError, kv.TransportError, kv.TicketError),
)
"""How a movement may fail when peers die, free their memory and run out of time."""


class Worker:
    """What one process does.

    Args:
        number, life: of its cluster; both are in every byte that it writes.
        addresses: of all workers.
        talk: to the supervisor. A line goes there now and then; a byte that comes back means that it is time to end.
        journal: what goes there.
    """

    def __init__(
        self,
        settings: Settings,
        number: int,
        life: int,
        addresses: dict[int, str],
        talk: socket.socket,
        journal: Journal,
    ) -> None:
        self._settings = settings
        self._number = number
        self._life = life
        self._addresses = addresses
        self._talk = talk
        self.chance = Random(f"{settings.seed}/{number}/{life}")
        self.journal = journal
        self._lives = Lives()
        self._cluster: kv.Cluster | None = None
        self._serial = 0
        self.offers: dict[int, tuple[kv.KvCache, Stamp, list[Any]]] = {}
        self._requests: dict[int, kv.CacheKey] = {}
        self._running: dict[int, tuple[float, str]] = {}
        self._next_call = 0
        self.is_ending = False
        self._num_stops = 0
        signal.signal(signal.SIGCONT, self._note_stop)

    def _note_stop(self, *unused: object) -> None:
        self._num_stops += 1

    async def run(self) -> None:
        """Live until told to end."""
        faulty = self._settings.faults
        if faulty is not None:
            faulty = replace(faulty, seed=faulty.seed * 1_000_000 + self._number * 1000 + self._life)
        config: dict[str, Any] = {
            "inline_nbytes": self.chance.choice([0, 0, 256 * 1024]),
            "chunk_nbytes": self.chance.choice([4096, 16384, 65536]),
            "copy_threads": self.chance.choice([1, 2]),
            "liveness_s": 1.0,
            "operation_timeout_s": 2.0,
            "link_timeout_s": 2.0,
            "close_timeout_s": 1.0,
        }
        if self._settings.transports:
            config["transports"] = self._settings.transports
        self._cluster = kv.Cluster(
            cluster_id=self._number,
            role=kv.Role.MIX,
            pool=_POOL,
            listen=self._addresses[self._number],
            config=kv.ClusterConfig(**config),
            wrap_transport=None if faulty is None else partial(_wrap, faults=faulty),
        )
        async with self._cluster:
            for model in (*range(NUM_OFFERS), INBOX_MODEL):
                self._replace(model)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._report)
                tasks.start_soon(self._watch)
                async with anyio.create_task_group() as movers:
                    movers.start_soon(self._keep_links)
                    movers.start_soon(self._keep_house)
                    for task in range(NUM_TASKS):
                        movers.start_soon(self._move, task)
                    tickets = TicketWork(self)
                    movers.start_soon(tickets.take)
                    for _ in range(NUM_GIVERS):
                        movers.start_soon(tickets.give)
                    await anyio.wait_readable(self._talk)
                    self.is_ending = True  # every task ends after what it is doing; nothing is cancelled for this
                    tickets.end()
                await self._give_back()
                tasks.cancel_scope.cancel()
        self._cluster = None

    @property
    def cluster(self) -> kv.Cluster:
        """Its cluster, while it lives."""
        assert self._cluster is not None
        return self._cluster

    @property
    def _manager(self) -> kv.KvCacheManager:
        assert self._cluster is not None
        return self._cluster.kv_cache_manager

    # What goes on beside the movements

    async def _report(self) -> None:
        while True:
            await anyio.sleep(0.2)
            self._talk.sendall(self.journal.line())

    async def _watch(self) -> None:
        """Find calls that outlive their deadline. Time in which the process was stopped does not count."""
        last = time.monotonic()
        while True:
            await anyio.sleep(0.5)
            now = time.monotonic()
            stood_s, last = max(0.0, now - last - 1.0), now
            for number, (latest, text) in list(self._running.items()):
                if stood_s:
                    self._running[number] = (latest + stood_s, text)
                elif now > latest:
                    self.journal.accuse(f"hangs: {text}")
                    self._talk.sendall(self.journal.line(is_done=True))
                    os._exit(3)

    @contextmanager
    def bounded(self, text: str, timeout_s: float) -> Iterator[None]:
        """Note a call that must end by its deadline."""
        self._next_call += 1
        number = self._next_call
        self._running[number] = (time.monotonic() + timeout_s + HANG_S, text)
        try:
            yield
        finally:
            del self._running[number]

    async def _keep_links(self) -> None:
        """Link to whoever is not linked; end links now and then; start and cancel clusters that nobody needs."""
        assert self._cluster is not None
        chance = self.chance
        while not self.is_ending:
            await anyio.sleep(chance.expovariate(50))
            others = [number for number in self._addresses if number != self._number]
            linked = {link.peer for link in self._cluster.links}
            missing = [number for number in others if number not in linked]
            dice = chance.random()
            if missing and dice < 0.8:
                infos = [kv.ClusterInfo(number, self._addresses[number]) for number in missing]
                await self.do("link", missing[0], 1.0, partial(self._cluster_link, infos), chance.random() < 0.2)
            elif linked and dice < 0.84:
                peer = chance.choice(sorted(linked))
                force = chance.random() < 0.3
                await self.do("unlink", peer, 1.0, partial(self._cluster_unlink, peer, force), chance.random() < 0.3)
            elif dice > 0.97:
                peer = chance.choice(others)
                await self.do("visit", peer, 2.0, partial(self._visit, peer), chance.random() < 0.7)

    async def _cluster_link(self, infos: list[kv.ClusterInfo]) -> None:
        assert self._cluster is not None
        results = await self._cluster.link_clusters(infos, timeout_s=1.0)
        for result in results.results:
            if result.error is not None and not result.is_ok:
                raise result.error

    async def _cluster_unlink(self, peer: int, force: bool) -> None:
        assert self._cluster is not None
        results = await self._cluster.unlink_clusters([peer], timeout_s=1.0, force=force)
        for result in results.results:
            if result.error is not None and result.status is not kv.StatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED:
                raise result.error

    async def _visit(self, peer: int) -> None:
        """Open a cluster, link it, close it: each may be cancelled at any moment."""
        visitor = kv.Cluster(cluster_id=1000 + self._number, role=kv.Role.DECODER, pool="64KiB")
        async with visitor:
            results = await visitor.link_clusters([kv.ClusterInfo(peer, self._addresses[peer])], timeout_s=1.0)
            for result in results.results:
                if result.error is not None:
                    raise result.error

    # What this worker owns

    async def _keep_house(self) -> None:
        """Replace caches at random, after making sure that they hold what they must."""
        chance = self.chance
        while not self.is_ending:
            await anyio.sleep(chance.expovariate(60))
            if chance.random() < 0.5:
                self._renew_request(chance.randint(1, NUM_REQUESTS))
            else:
                self._replace(chance.choice([*range(NUM_OFFERS), INBOX_MODEL]))

    def stamp(self) -> Stamp:
        self._serial += 1
        return Stamp(self._number, self._life, self._serial % 65000)

    def _replace(self, model: int) -> None:
        """Give a blocks cache back and make another one; no peer sees it before it is filled."""
        self._drop(model)
        desc = self._settings.inbox if model == INBOX_MODEL else OFFER
        key, stamp = kv.BlocksCacheKey(self._number, model), self.stamp()
        buffers: list[Any] = []
        try:
            if self.chance.random() < 0.2:
                buffers = [np.empty(desc.tensor_nbytes, np.uint8) for _ in range(NUM_TENSORS)]
                cache = self._manager.register_blocks_cache(desc, buffers, key)
            else:
                cache = self._manager.allocate_blocks_cache(desc, key)
        except kv.OutOfMemoryError:
            self.journal.note("allocate", "no room")
            return
        fill(cache.tensors, stamp)
        self.offers[model] = (cache, stamp, buffers)
        self.journal.note("allocate", "done", f"model {model} {stamp}")

    def _drop(self, model: int) -> None:
        cache, stamp, _ = self.offers.pop(model, (None, None, None))
        if cache is None or stamp is None:
            return
        if model == INBOX_MODEL:
            fault = check_inbox(cache.tensors, stamp, self._settings.num_workers)
        else:
            fault = faults(cache.tensors, stamp)
        if fault is not None:
            self.journal.accuse(f"model {model}, which is our own: {fault}")
        self.journal.counts["bytes checked"] += cache.desc.nbytes
        if cache.is_registered:
            self._manager.unregister_cache(cache)
        else:
            self._manager.deallocate_cache(cache)

    def _renew_request(self, request: int) -> None:
        key = kv.CacheKey(self._number, request)
        self._manager.remove_cache_key(key)
        try:
            cache = self._manager.allocate_cache(SLOTS, [key])
        except kv.OutOfMemoryError:
            self.journal.note("allocate", "no room")
            return
        self._requests[request] = key
        fill(cache.tensors, self.stamp())
        self._manager.deallocate_cache(cache)  # it lives by its key

    async def _give_back(self) -> None:
        """Release everything; the pool must be empty soon."""
        assert self._cluster is not None
        for model in list(self.offers):
            self._drop(model)
        for key in self._requests.values():
            self._manager.remove_cache_key(key)
        with anyio.move_on_after(8):
            while inside.used_nbytes(self._cluster) or inside.num_read_leases(self._cluster):
                await anyio.sleep(0.02)
                # A writer whose link is lost says that it has ended when it links again, or when it dies.
                linked = {link.peer for link in self._cluster.links}
                for number, address in self._addresses.items():
                    if number not in linked and number != self._number and inside.num_write_leases(self._cluster):
                        await self._cluster.link_clusters([kv.ClusterInfo(number, address)], timeout_s=0.2)
            return
        used, leases = inside.used_nbytes(self._cluster), inside.num_read_leases(self._cluster)
        if used or leases:
            usage = self._manager.pool_usage()
            self.journal.accuse(f"{used} bytes of the pool and {leases} read leases do not come back: {usage}")

    # Movements

    async def _move(self, task: int) -> None:
        """Do one random movement after the other."""
        chance = self.chance
        cache = self._manager.allocate_blocks_cache(OFFER)
        slots = self._manager.allocate_cache(SLOTS)
        outgoing = self._manager.allocate_blocks_cache(self._settings.inbox)
        back = self._manager.allocate_blocks_cache(self._settings.inbox)
        for each in (cache, slots, outgoing, back):
            fill(each.tensors, _RUBBISH)
        others = [number for number in self._addresses if number != self._number]
        while not self.is_ending:
            linked = [number for number in others if self._link(number) is not None]
            if not linked:
                await anyio.sleep(0.005)
            peer = chance.choice(linked if linked and chance.random() < 0.95 else others)
            dice = chance.random()
            if dice < 0.5:
                await self._pull_blocks(peer, cache)
            elif dice < 0.65:
                await self._pull_slot(peer, slots)
            elif dice < 0.85:
                await self._push(peer, task, outgoing, back)
            else:
                await self._push_layers(peer, task, outgoing, back)
            if chance.random() < 0.05:
                await anyio.sleep(chance.expovariate(200))
        for each in (cache, slots, outgoing, back):
            self._manager.deallocate_cache(each)

    async def _pull_blocks(self, peer: int, cache: kv.KvCache) -> None:
        chance = self.chance
        model, num = chance.randrange(NUM_OFFERS), chance.randint(1, 32)
        source, destination = chance.sample(range(32), num), chance.sample(range(32), num)
        layer = chance.choice([None, None, range(1), range(1, 2)])
        await self._pull(
            "pull_blocks",
            peer,
            f"model {model}",
            cache,
            source,
            destination,
            lambda timeout_s: self._manager.pull_blocks(
                kv.BlocksCacheKey(peer, model),
                cache,
                source,
                destination,
                src_layer_range=layer,
                dst_layer_range=layer,
                timeout_s=timeout_s,
            ),
            layer,
        )

    async def _pull_slot(self, peer: int, slots: kv.KvCache) -> None:
        request = self.chance.randint(1, NUM_REQUESTS)
        key = kv.CacheKey(peer, request)
        await self._pull(
            "pull_cache",
            peer,
            f"request {request}",
            slots,
            [0],
            [0],
            lambda timeout_s: self._manager.pull_cache(key, slots, timeout_s=timeout_s),
        )

    async def _pull(
        self,
        operation: str,
        peer: int,
        name: str,
        cache: kv.KvCache,
        source: Sequence[int],
        destination: Sequence[int],
        call: Callable[[float], Awaitable[kv.TransferReport]],
        layer: range | None = None,
    ) -> None:
        """Pull, and check what has come, or that nothing comes any more."""
        link = self._link(peer)
        before = self._lives.seen(peer, name)
        timeout_s = self.timeout_s()
        report = await self.do(operation, peer, timeout_s, lambda: call(timeout_s))
        first = 0 if layer is None else layer.start * 2
        tensors = cache.tensors if layer is None else cache.tensors[first : layer.stop * 2]
        if report is None:
            await self.expect_quiet(operation, cache, destination)
            return
        stamp, fault = check_pulled(tensors, destination, source, first)
        current = self._link(peer)
        # Which life it came from can be told only if the link is still the one from before.
        if fault is None and link is not None and current is link:
            fault = self._lives.check(stamp, peer, name, link, before)
        elif fault is None and (stamp.cluster != peer or stamp[1:] < before):
            fault = f"bytes of {stamp} came from {name} of cluster {peer}; {before} was seen before"
        if fault is not None:
            self.journal.accuse(f"{operation} of {name} from cluster {peer} succeeded, but {fault}")
        self.journal.counts["bytes checked"] += report.nbytes

    async def _push(self, peer: int, task: int, outgoing: kv.KvCache, back: kv.KvCache) -> None:
        """Push into our part of a peer's inbox, then pull that back."""
        part = part_of(self._number, task)
        destination = self.chance.sample(part, self.chance.randint(1, WIDTH))
        stamp = self._prepare(outgoing, destination)
        key = kv.BlocksCacheKey(peer, INBOX_MODEL)
        timeout_s = self.timeout_s()
        report = await self.do(
            "push_blocks",
            peer,
            timeout_s,
            lambda: self._manager.push_blocks(key, outgoing, destination, destination, timeout_s=timeout_s),
        )
        if report is not None:
            await self._check_pushed(peer, destination, stamp, back)

    async def _push_layers(self, peer: int, task: int, outgoing: kv.KvCache, back: kv.KvCache) -> None:
        """As `_push`, layer by layer."""
        part = part_of(self._number, task)
        destination = self.chance.sample(part, self.chance.randint(1, WIDTH))
        stamp = self._prepare(outgoing, destination)
        config = kv.TransferWithCacheKeyConfig(kv.BlocksCacheKey(peer, INBOX_MODEL), range(2), range(2))
        started: list[kv.CacheTask] = []

        async def push() -> bool:
            pushing = self._manager.transfer_cache_async(
                outgoing, _Layers(self.chance), [config], destination, destination
            )
            started.append(pushing)
            try:
                await pushing
            except kv.ParameterError as exc:
                if "gave up" not in str(exc):  # which is what its synchroniser does now and then
                    raise
                return False
            return True

        timeout_s = 30.0  # the cluster's own, for each layer
        done = await self.do("push_layers", peer, timeout_s, push)
        for pushing in started:
            pushing.cancel()
            text = f"the end of a layer-wise push to cluster {peer} that was cancelled"
            with self.bounded(text, timeout_s), suppress(kv.KVLinkError):
                await pushing
        if done:
            await self._check_pushed(peer, destination, stamp, back)

    def _prepare(self, outgoing: kv.KvCache, destination: Sequence[int]) -> Stamp:
        stamp = self.stamp()
        for index, tensor in enumerate(outgoing.tensors):
            target = rows(tensor)
            target[list(destination)] = block_bytes(stamp, index, destination, target.shape[1])
        return stamp

    async def _check_pushed(self, peer: int, blocks: Sequence[int], stamp: Stamp, back: kv.KvCache) -> None:
        """Pull back what was pushed: it must be there, unless the inbox is a newer one, as its owner made it."""
        key = kv.BlocksCacheKey(peer, INBOX_MODEL)
        report = await self.do(
            "pull_back", peer, 5.0, lambda: self._manager.pull_blocks(key, back, blocks, blocks, timeout_s=5.0), False
        )
        if report is None:
            return
        found, fault = check_pulled(back.tensors, blocks, blocks)
        if fault is None and found != stamp and found.cluster != peer:
            fault = f"it holds {found}"
        if fault is not None:
            self.journal.accuse(f"{stamp} was pushed into blocks {blocks} of cluster {peer}, but {fault}")
        self.journal.counts["pushes found again" if found == stamp else "pushes into an inbox that was replaced"] += 1
        self.journal.counts["bytes checked"] += report.nbytes

    # What all of them share

    async def do(
        self,
        operation: str,
        peer: int,
        timeout_s: float,
        call: Callable[[], Awaitable[Any]],
        is_cancelled: bool | None = None,
    ) -> Any:
        """Make a call, perhaps cancel it in the middle, and return what it returned; None when it did not succeed."""
        chance = self.chance
        if is_cancelled is None:
            is_cancelled = chance.random() < 0.45
        after_s = chance.expovariate(chance.choice([30, 300, 3000])) if is_cancelled else 1000.0
        text = f"{operation} with cluster {peer}, timeout_s {timeout_s:.4g}"
        num_stops = self._num_stops
        cancelled_at = 0.0
        result: Any = None
        outcome = "done"
        with self.bounded(text, timeout_s), anyio.CancelScope() as scope:
            cancelled_at = anyio.current_time() + after_s
            scope.deadline = cancelled_at
            try:
                result = await call()
            except kv.KVLinkError as exc:
                outcome = type(exc).__name__
                if not isinstance(exc, _HARMLESS) and not (self.is_ending and isinstance(exc, kv.ClosedError)):
                    self.journal.accuse(f"{text} raised {exc!r}")
                elif exc.peer is None:
                    self.journal.accuse(f"{text} raised {exc!r}, which does not name the peer")
            except Exception as exc:  # whatever it is, it is no outcome that was promised
                outcome = type(exc).__name__
                self.journal.accuse(f"{text} raised {exc!r}")
        if scope.cancelled_caught:
            outcome, result = "cancelled", None
            took_s = anyio.current_time() - cancelled_at
            # Opening and closing clusters takes its time; and a process that stood still took it all.
            if operation.startswith(("pu", "ticket")) and num_stops == self._num_stops:
                self.journal.slowest_cancel_s = max(self.journal.slowest_cancel_s, took_s)
            self.journal.counts["cancellations"] += 1
        self.journal.note(operation, outcome, f"cluster {peer}")
        return result

    async def expect_quiet(self, operation: str, cache: kv.KvCache, blocks: Sequence[int]) -> None:
        """A call that has ended writes nothing any more."""
        if not cache.is_quiet(list(blocks)):
            self.journal.accuse(f"{operation} has ended, and its blocks are not quiet")
        if self.chance.random() < 0.15:
            chosen = list(blocks)
            before = [rows(tensor)[chosen] for tensor in cache.tensors]
            await anyio.sleep(self.chance.random() * 0.02)
            for index, tensor in enumerate(cache.tensors):
                if not np.array_equal(before[index], rows(tensor)[chosen]):
                    self.journal.accuse(f"{operation} has ended, and tensor {index} still changes")

    def timeout_s(self) -> float:
        return self.chance.choice([self.chance.random() * 0.02, 0.5, 2.0, 2.0])

    def _link(self, peer: int) -> kv.Link | None:
        assert self._cluster is not None
        return next((link for link in self._cluster.links if link.peer == peer), None)


class _Layers(kv.LayerSynchronizer):
    """Layers that take a random time to be computed; now and then one never is."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance

    async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        await anyio.sleep(self.chance.expovariate(1000))
        return self.chance.random() > 0.02


def _wrap(transport: Transport, *, faults: Faults) -> Transport:
    return FaultyTransport(transport, faults)


def run_worker(
    settings: Settings, number: int, life: int, addresses: dict[int, str], talk: socket.socket, loop_name: str
) -> int:
    """Run one worker in this process; return the exit status."""
    backend = "trio" if loop_name == "trio" else "asyncio"
    options = {} if backend == "trio" else {"use_uvloop": loop_name == "uvloop"}
    before = holdings()
    journal = Journal()
    anyio.run(Worker(settings, number, life, addresses, talk, journal).run, backend=backend, backend_options=options)
    gc.collect()  # whatever was forgotten while open says so now
    for what in new_since(before, within_s=5.0):
        journal.accuse(f"left behind: {what}")
    talk.sendall(journal.line(is_done=True))
    return 1 if journal.wrong else 0
