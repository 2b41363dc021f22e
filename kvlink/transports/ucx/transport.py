"""UCX for one cluster: a context, a worker, its thread; what peers need to attach to it.

Attaching: both sides say in their cards which UCX they run and where their worker is. The dialling side compares the
versions and connects; its own card goes back with its answer, and the accepting side does the same. Nothing of the peer
is given to UCX before the versions were found to fit. Regions follow over the link itself.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from anyio.abc import TaskGroup

from kvlink.config import ClusterConfig
from kvlink.errors import ClosedError, LinkError
from kvlink.handingover import make_in_thread
from kvlink.loops import current_call_soon
from kvlink.memory.regions import HOST_POOL, POOL, STATE, LocalMemory
from kvlink.transports.base import Endpoint, Offer, Transport
from kvlink.transports.ucx.cards import Card, Host, check_versions, pack_card, unpack_card
from kvlink.transports.ucx.connection import WorkerEndpoint
from kvlink.transports.ucx.context import Context
from kvlink.transports.ucx.endpoint import UcxEndpoint
from kvlink.transports.ucx.library import ONE_SIDED
from kvlink.transports.ucx.mapped import map_state, state_file_of
from kvlink.transports.ucx.providers import find_handles
from kvlink.transports.ucx.registry import Registered, Registry
from kvlink.transports.ucx.services import Services, Words
from kvlink.transports.ucx.worker import Worker


class UcxTransport(Transport):
    """Get and put over UCX.

    Args:
        local: the cluster's regions.
    """

    name = "ucx"

    def __init__(self, local: LocalMemory, config: ClusterConfig) -> None:
        self._local = local
        self._config = config
        self._services: Services | None = None
        self._card = b""
        self._version: tuple[int, int, int] = (0, 0, 0)

    async def start(self, tasks: TaskGroup) -> None:
        """See `Transport.start`.

        Raises:
            FeatureNotEnabledError: there is no UCX here that can be used, and what to do about it.
        """
        config = self._config.ucx
        if config.provider == "own":
            context = await make_in_thread(partial(Context.create, config), Context.close)
        else:
            context = Context.adopt(find_handles(config.provider), config)
        try:
            worker = Worker(context, max_requests=config.max_requests, max_inflight_nbytes=config.max_inflight_nbytes)
        except BaseException:
            context.close()
            raise
        try:
            has_thread = config.progress == "thread"
            worker.start(current_call_soon(), has_thread=has_thread)
            if not has_thread:
                tasks.start_soon(worker.run_in_loop)
            registry = Registry(worker, self._local)
            words = Words.make_memory()

            def map_words() -> Registered:
                made = registry.map(Words.region_of(words))
                worker.at_end(partial(registry.unmap, made))
                return made

            registered = await worker.call(map_words)
            first = tuple(number for number in (POOL, HOST_POOL) if number in self._local)
            for number in (STATE, *first):
                await registry.ensure(number)
        except BaseException:
            await worker.aclose()
            raise
        self._version = context.library.version
        state = self._local[STATE].segment
        assert state is not None
        self._card = pack_card(Card(self._version, context.address, Host.own(), state_file_of(state)))
        self._services = Services(
            worker,
            registry,
            Words(words, registered),
            config,
            is_one_sided=context.library.version[:2] >= ONE_SIDED,
            first_regions=first,
            longest_nbytes=self._config.chunk_nbytes,
            inline_nbytes=self._config.inline_nbytes,
        )

    @property
    def settings(self) -> dict[str, str]:
        """The settings of UCX that are in force, by their names without ``UCX_``."""
        return {} if self._services is None else dict(self._services.worker.context.applied)

    def offer(self) -> Offer | None:
        return None if self._services is None else Offer(self._card)

    async def accept(self, offer: Offer, card: bytes) -> Endpoint:
        return await self._attach(card)

    def withdraw(self, offer: Offer) -> None:
        """Nothing was set aside for it."""

    async def dial(self, card: bytes) -> Endpoint:
        return await self._attach(card)

    async def aclose(self) -> None:
        services, self._services = self._services, None
        if services is None:
            return
        services.registry.close()
        await services.worker.aclose()

    async def _attach(self, sealed: bytes) -> UcxEndpoint:
        services = self._services
        if services is None:
            raise LinkError("UCX is closed")
        card = unpack_card(sealed)
        check_versions(self._version, card.version, allow_mismatch=services.config.allow_version_mismatch)
        worker, connection = services.worker, WorkerEndpoint()
        try:
            await worker.call(partial(worker.open_endpoint, connection, card.address))
            pidfd = card.host.open_pidfd()
            state = map_state(card.host, card.state) if pidfd is not None and card.state is not None else None
            return UcxEndpoint(services, connection, self._card, pidfd, state)
        except ClosedError as exc:
            raise LinkError("UCX is closed") from exc
        except BaseException:  # cancelled, it may be open by now
            with suppress(ClosedError):
                worker.close_endpoint(connection, _nothing)
            raise


def _nothing() -> None:
    """Nobody waits for the end of an endpoint that was not wanted after all."""
