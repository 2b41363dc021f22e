"""The target's process: it owns memory, and does nothing while it is read and written. Started by `pair`."""

from __future__ import annotations

import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import anyio
from anyio import to_thread

from kvlink.benchmarks.sides import Order, Side, open_side
from kvlink.geometry import Role

TARGET_ID = 1


async def _serve(channel: Connection, order: Order) -> None:
    """Answer the initiator's requests, one at a time: (name of the request, arguments)."""
    async with open_side(order, cluster_id=TARGET_ID, role=Role.PROMPT) as side:
        channel.send((side.cluster.address, side.setup))
        while True:
            try:
                # In a thread, and blocked in the kernel: an idle target costs nothing and its loop stays free.
                name, *arguments = await to_thread.run_sync(channel.recv, abandon_on_cancel=True)
            except EOFError:
                return
            if name == "quit":
                return
            channel.send(await _answer(side, name, arguments))


async def _answer(side: Side, name: str, arguments: list[Any]) -> Any:
    if name == "allocate":
        await side.allocate(*arguments)
        return side.places(), side.setup
    if name == "fill":
        return side.fill(*arguments)
    if name == "clear":
        return side.clear(*arguments)
    if name == "count_wrong":
        return side.count_wrong(*arguments)
    raise ValueError(f"the target was asked for {name!r}")


def main() -> None:
    """Serve the initiator whose end of a socket pair is our descriptor number ``argv[1]``."""
    channel = Connection(int(sys.argv[1]))
    with suppress(KeyboardInterrupt, BrokenPipeError, EOFError):
        order = channel.recv()
        anyio.run(_serve, channel, order, backend_options={"use_uvloop": order.has_uvloop})


if __name__ == "__main__":
    main()
