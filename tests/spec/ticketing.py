"""P in a process of its own that also gives tickets, and holds those of D. The child is this module."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio

import kvlink as kv
from tests.spec.harness import LIMIT_S, D, P, SpecActor, Stage, cluster, late_if_asked, link
from tests.support import actor as support_actor
from tests.support.peer import spawn_peer


class TicketActor(SpecActor):
    """What the tests of tickets ask of P. Tickets go by their number."""

    def __init__(self, made: kv.Cluster, life: int) -> None:
        super().__init__(made, life)
        self._tickets: dict[int, kv.Ticket] = {}
        self._held: dict[int, kv.HeldTicket] = {}

    def offer(self, cache: int, blocks: list[int], lease_s: float = 30.0, is_write: bool = False) -> str:
        """Give a ticket and return its token."""
        manager = self._cluster.kv_cache_manager
        give = manager.expect_blocks if is_write else manager.offer_blocks
        ticket = give(self._caches[cache], blocks, lease_s=lease_s)
        self._tickets[ticket.number] = ticket
        return ticket.token.decode()

    def revoke(self, number: int) -> None:
        """Take a ticket back."""
        self._tickets[number].revoke()

    async def outcome(self, number: int, timeout_s: float = 10.0) -> list[Any]:
        """Return kind, cause and peer of a ticket's end."""
        kind, cause, peer = await self._tickets[number].outcome(timeout_s=timeout_s)
        return [kind.name, cause, peer]

    async def layer(self, number: int, layer: int) -> None:
        """Await a layer of a ticket."""
        await self._tickets[number].layer(layer, timeout_s=10)

    async def hold(self, token: str) -> int:
        """Claim a ticket of D's and return its number."""
        held = await self._cluster.kv_cache_manager.hold_ticket(token)
        self._held[held.number] = held
        return held.number

    async def held_outcome(self, number: int, timeout_s: float = 10.0) -> list[Any]:
        """Return kind, cause and peer of the end of a ticket that P held."""
        kind, cause, peer = await self._held[number].outcome(timeout_s=timeout_s)
        return [kind.name, cause, peer]

    async def push(self, token: str, cache: int, src: list[int], dst: list[int], layers: list[int] | None) -> int:
        """Push by ticket; return how many bytes."""
        chosen = None if layers is None else range(*layers)
        report = await self._cluster.kv_cache_manager.push_blocks(
            token, self._caches[cache], src, dst, src_layer_range=chosen, dst_layer_range=chosen
        )
        return report.nbytes


@asynccontextmanager
async def owner_in_child(
    transport: str, *, life: int = 1, here: kv.Cluster | None = None, **config: Any
) -> AsyncIterator[Stage]:
    """Run P in a child, and D here (None: a new one), linked; both are MIX.

    Args:
        config: fields of both `ClusterConfig`.
    """
    python = ("-W", "error", "-m", "tests.spec.ticketing")
    async with AsyncExitStack() as stack:
        stack.enter_context(anyio.fail_after(LIMIT_S))
        owner = await stack.enter_async_context(
            spawn_peer(P, "MIX", pool="1MiB", life=life, config=config, python=python)
        )
        if here is None:
            here = await stack.enter_async_context(cluster(D, kv.Role.MIX, **config))
        await link(here, P, owner.address, transport)
        yield Stage(owner, here)


def main() -> None:
    """Serve as the child of a test."""
    sys.argv[1:] = sys.argv[-1:]
    vars(support_actor)["Actor"] = TicketActor
    vars(support_actor)["wrap_transport"] = late_if_asked
    support_actor.main()


if __name__ == "__main__":
    main()
