"""`transfer_cache_async`: push a cache layer by layer while it is being computed. Source: the spec, section 8.

One job per call asks the synchroniser for layer 0, 1, 2, ... and hands each finished layer to one sender per
destination. Senders work while the next layer is computed, each in layer order. The first failure, anywhere, stops the
job: what was sent stays sent, and destinations that had finished keep their success. Each receiver is told of every
layer, after its bytes, and of the end or the failure (`Arrivals`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

import anyio
from anyio.abc import ObjectReceiveStream, TaskGroup

from kvlink.caches.kvcache import KvCache
from kvlink.caches.store import CacheStore
from kvlink.caches.table import CacheEntry
from kvlink.checks import Blocks, check_blocks, check_same_length
from kvlink.config import ClusterConfig
from kvlink.errors import KVLinkError, ParameterError, ParameterTypeError, ParameterValueError, StatusCode
from kvlink.geometry import check_int
from kvlink.links.table import LinkTable
from kvlink.transfers.layerconfig import (
    LayerSynchronizer,
    TransferConfig,
    TransferWithCacheKeyConfig,
    TransferWithTicketConfig,
)
from kvlink.transfers.layersender import WIDTH, BlocksToMove, LayerSender
from kvlink.transfers.ticketcalls import TicketMover
from kvlink.transfers.ticketsender import TicketSender

AnyTransferConfig = TransferConfig | TransferWithCacheKeyConfig | TransferWithTicketConfig
AnySender = LayerSender | TicketSender


class CacheTask:
    """A layer-wise push that is under way. Await it for the end; poll it; cancel it. Made by `transfer_cache_async`.

    Awaiting returns the results when every destination succeeded and raises the first failure otherwise. It goes on
    when whoever awaits it is cancelled or runs out of time.
    """

    def __init__(self, num_configs: int) -> None:
        self._results: list[StatusCode | None] = [None] * num_configs
        self._error: KVLinkError | None = None
        self._ended = anyio.Event()
        self._scope = anyio.CancelScope()

    @property
    def is_done(self) -> bool:
        """Whether it has ended, in any way."""
        return self._ended.is_set()

    @property
    def error(self) -> KVLinkError | None:
        """The first failure, None while there is none."""
        return self._error

    def cancel(self) -> None:
        """Stop it: no further layer is sent, receivers are told. Await it to know when nothing is in flight."""
        self._scope.cancel()

    async def synchronize(self, timeout_s: float | None = None) -> StatusCode:
        """Wait for the end and return one status; never raises for what happened to the push.

        Args:
            timeout_s: None waits for ever, 0 polls. Still running then: `LLM_WAIT_PROCESS_TIMEOUT`; it goes on.

        Returns:
            `LLM_SUCCESS` only if every destination succeeded; else the first failure.

        Source: the spec, section 8.4.
        """
        if not await self._wait(timeout_s):
            return StatusCode.LLM_WAIT_PROCESS_TIMEOUT
        for status in self._results:
            if status not in (None, StatusCode.LLM_SUCCESS):
                return status
        if self._error is not None:
            return self._error.status
        return StatusCode.LLM_FAILED if None in self._results else StatusCode.LLM_SUCCESS

    async def get_results(self, timeout_s: float | None = None) -> list[StatusCode | None]:
        """Return one status per destination, in their order; None for one that was never finished.

        Still running at the deadline: `LLM_WAIT_PROCESS_TIMEOUT` for each. Source: the spec, section 8.4.
        """
        if not await self._wait(timeout_s):
            return [StatusCode.LLM_WAIT_PROCESS_TIMEOUT] * len(self._results)
        return list(self._results)

    def __await__(self) -> Generator[Any, None, list[StatusCode | None]]:
        return self._finish().__await__()

    async def _finish(self) -> list[StatusCode | None]:
        await self._ended.wait()
        if self._error is not None:
            raise self._error
        return list(self._results)

    async def _wait(self, timeout_s: float | None) -> bool:
        if not self.is_done:
            with anyio.move_on_after(math.inf if timeout_s is None else timeout_s):
                await self._ended.wait()
        return self.is_done


_StreamOfLayers = ObjectReceiveStream[int]


class LayerPusher:
    """The layer-wise pushes of one cluster.

    Args:
        store: what it owns.
        links: whom it can push to.
        tasks: the cluster's task group, parent of every job.
        mover: pushes by ticket.
    """

    def __init__(
        self, store: CacheStore, links: LinkTable, config: ClusterConfig, tasks: TaskGroup, mover: TicketMover
    ) -> None:
        self._store = store
        self._links = links
        self._config = config
        self._tasks = tasks
        self._mover = mover
        self._next_push = 1

    def start(
        self,
        cache: KvCache,
        synchronizer: LayerSynchronizer,
        configs: Sequence[AnyTransferConfig],
        src_blocks: Blocks | None,
        dst_blocks: Blocks | None,
        dst_block_memory_size: int | None,
    ) -> CacheTask:
        """See `KvCacheManager.transfer_cache_async`."""
        entry = self._store.own_entry(cache, "the source")
        if not callable(getattr(synchronizer, "synchronize_layer", None)):
            raise ParameterTypeError(f"layer_synchronizer must be a LayerSynchronizer, got {synchronizer!r}")
        if entry.desc.num_tensors % WIDTH:
            raise ParameterError(f"a layer is K and V; the cache has {entry.desc.num_tensors} tensors")
        num_layers = entry.desc.num_tensors // WIDTH
        if not isinstance(configs, (list, tuple)) or not configs:
            raise ParameterTypeError(f"transfer_configs must be a list of at least one, got {configs!r}")
        if (
            dst_blocks is None
            and not dst_block_memory_size
            and all(isinstance(each, TransferWithTicketConfig) for each in configs)
        ):
            source = None if src_blocks is None else check_blocks("src_block_indices", src_blocks, entry.desc.num_slots)
            moving = BlocksToMove(source, None, 0)  # where they go is for the tickets to say
        else:
            moving = self._check_blocks(entry, src_blocks, dst_blocks, dst_block_memory_size)
        senders: list[AnySender] = []
        for index, config in enumerate(configs):
            layers = _check_config(f"transfer_configs[{index}]", config, num_layers, entry, moving)
            if isinstance(config, TransferWithTicketConfig):
                timeout_s = self._config.operation_timeout_s
                senders.append(TicketSender(config, layers, entry, moving, self._mover, timeout_s=timeout_s))
                continue
            number = self._next_push
            self._next_push += 1
            senders.append(
                LayerSender(
                    number, config, layers, entry, moving, self._links, timeout_s=self._config.operation_timeout_s
                )
            )
        task = CacheTask(len(senders))
        blocks = moving.source if moving.source is not None else [sender.config.src_batch_index for sender in senders]
        movement = self._store.begin_moving(entry, blocks)
        self._tasks.start_soon(self._run, task, entry, movement, synchronizer, senders, num_layers)
        return task

    def _check_blocks(
        self, entry: CacheEntry, src_blocks: Blocks | None, dst_blocks: Blocks | None, dst_block_nbytes: int | None
    ) -> BlocksToMove:
        """Source: the spec, section 8.2."""
        own = entry.desc.slot_nbytes
        if dst_block_nbytes is not None:
            check_int("dst_block_memory_size", dst_block_nbytes, 0, 2**63 - 1)
        if dst_blocks is None:
            if src_blocks is not None:
                raise ParameterError("src_block_indices without dst_block_indices")
            if dst_block_nbytes:
                raise ParameterError(f"dst_block_memory_size {dst_block_nbytes} without dst_block_indices")
            return BlocksToMove(None, None, 0)
        targets = check_blocks("dst_block_indices", dst_blocks, 2**63, is_unique=True)
        if not targets:
            raise ParameterValueError("dst_block_indices is empty")
        if src_blocks is None:
            if not dst_block_nbytes:
                raise ParameterError("a contiguous slot pushed into blocks needs dst_block_memory_size")
            if len(targets) * dst_block_nbytes < own:
                raise ParameterError(
                    f"{len(targets)} blocks of {dst_block_nbytes} bytes do not hold a slot of {own} bytes"
                )
            return BlocksToMove(None, targets, dst_block_nbytes)
        sources = check_blocks("src_block_indices", src_blocks, entry.desc.num_slots)
        check_same_length(sources, targets)
        if dst_block_nbytes and dst_block_nbytes != own:
            raise ParameterError(f"dst_block_memory_size is {dst_block_nbytes}; a source block has {own} bytes")
        return BlocksToMove(sources, targets, own)

    async def _run(
        self,
        task: CacheTask,
        entry: CacheEntry,
        movement: int,
        synchronizer: LayerSynchronizer,
        senders: list[AnySender],
        num_layers: int,
    ) -> None:
        """Run one job to its end; never raises. Failures are the task's."""
        failed = _Failures(task)
        pairs = [anyio.create_memory_object_stream[int](math.inf) for _ in senders]
        queues = [send for send, _ in pairs]
        try:
            with task._scope:
                async with anyio.create_task_group() as tasks:
                    for index, (sender, (_, receive)) in enumerate(zip(senders, pairs, strict=True)):
                        tasks.start_soon(self._send, sender, index, receive, failed)
                    await self._synchronize(synchronizer, senders, queues, num_layers, failed)
                    for queue in queues:
                        queue.close()
        finally:
            for send, receive in pairs:
                send.close()
                receive.close()
            if any(status is None for status in task._results) and task._error is None:
                task._error = KVLinkError("the layer-wise push was cancelled")
            for sender in senders:
                sender.close(task._error)
            self._store.end_moving(entry, movement)
            task._ended.set()

    async def _synchronize(
        self,
        synchronizer: LayerSynchronizer,
        senders: list[AnySender],
        queues: list[Any],
        num_layers: int,
        failed: _Failures,
    ) -> None:
        for layer in range(num_layers):
            wanted = [index for index, sender in enumerate(senders) if layer in sender.layers]
            if not wanted:
                continue
            try:
                is_ready = await _ask(synchronizer, layer)
            except Exception as exc:  # the synchroniser is the caller's code: whatever it raises is a failure
                error = KVLinkError(f"the synchroniser failed on layer {layer}: {exc!r}")
                error.__cause__ = exc
                failed.stop(wanted, error)
                return
            if not is_ready:
                failed.stop(wanted, ParameterError(f"the synchroniser gave up on layer {layer}"))
                return
            for index in wanted:
                queues[index].send_nowait(layer)

    async def _send(self, sender: AnySender, index: int, layers: _StreamOfLayers, failed: _Failures) -> None:
        try:
            await sender.open()
            async for layer in layers:
                await sender.send(layer)
                if layer == sender.layers[-1]:
                    failed.task._results[index] = StatusCode.LLM_SUCCESS
                    sender.close(None)
                    return
        except KVLinkError as exc:
            sender.blame(exc)
            failed.stop([index], exc)
        except Exception as exc:
            error = KVLinkError(f"sending a layer failed: {exc!r}")
            error.__cause__ = exc
            failed.stop([index], error)


class _Failures:
    """Where the first failure of a job is kept, and what it stops."""

    def __init__(self, task: CacheTask) -> None:
        self.task = task

    def stop(self, indices: list[int], error: KVLinkError) -> None:
        """Record `error` for these destinations that have not finished, and stop the job."""
        for index in indices:
            if self.task._results[index] is None:
                self.task._results[index] = error.status
        self.task._error = self.task._error or error
        self.task._scope.cancel()


async def _ask(synchronizer: LayerSynchronizer, layer: int) -> bool:
    method: Callable[[int, int | None], Any] = synchronizer.synchronize_layer
    if inspect.iscoroutinefunction(method):
        answer = await method(layer, None)
    else:
        answer = await anyio.to_thread.run_sync(method, layer, None, abandon_on_cancel=True)
        if inspect.isawaitable(answer):
            answer = await answer
    if not isinstance(answer, bool):
        raise ParameterTypeError(f"synchronize_layer must return True or False, got {answer!r}")
    return answer


_AnyConfig: Final = (TransferConfig, TransferWithCacheKeyConfig, TransferWithTicketConfig)


def _check_config(
    name: str,
    config: AnyTransferConfig,
    num_layers: int,
    entry: CacheEntry,
    moving: BlocksToMove,
) -> range:
    """Return the layers that a destination gets. Source: the spec, section 8.2."""
    if not isinstance(config, _AnyConfig):
        kinds = " or ".join(kind.__name__ for kind in _AnyConfig)
        raise ParameterTypeError(f"{name} must be a {kinds}, got {config!r}")
    layers = range(num_layers) if config.src_layer_range is None else config.src_layer_range
    if layers.stop > num_layers:
        raise ParameterValueError(f"{name}: src_layer_range is {layers!r}; the cache has layers 0 to {num_layers - 1}")
    if isinstance(config, TransferConfig) and len(config.dst_addrs) != WIDTH * len(layers):
        raise ParameterError(
            f"{name}: {len(config.dst_addrs)} addresses for {len(layers)} layers; K and V of each need one"
        )
    if moving.source is not None and config.src_batch_index:
        raise ParameterError(f"{name}: src_batch_index must be 0 when blocks are sent, got {config.src_batch_index}")
    if config.src_batch_index >= entry.desc.num_slots:
        raise ParameterError(
            f"{name}: src_batch_index is {config.src_batch_index}; the cache has slots 0 to {entry.desc.num_slots - 1}"
        )
    return layers
