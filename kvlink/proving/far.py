"""The prover's view of the side that serves."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
from anyio.abc import SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

from kvlink.config import ClusterInfo, parse_address
from kvlink.proving.server import receive_line

_CALL_TIMEOUT_S: Final = 120.0


class FarError(Exception):
    """The other side could not do what it was asked to, or is not there."""


class Far:
    """The other side. Made by `connect`. Calls are made one at a time."""

    def __init__(self, stream: SocketStream) -> None:
        self._stream = stream
        self._lines = BufferedByteReceiveStream(stream)

    async def about(self) -> dict[str, Any]:
        """Return what machine it is, what its doctor says, and the size of its caches."""
        value: dict[str, Any] = await self._ask("about")
        return value

    async def start(self, cluster_id: int, *, writer: int) -> ClusterInfo:
        """Start a target, in place of one with that id, whose blocks are filled by `writer`."""
        value = await self._ask("start", cluster_id=cluster_id, writer=writer)
        return ClusterInfo(cluster_id, value["address"])

    async def stop(self, cluster_id: int) -> None:
        """Stop a target's process (SIGSTOP); it stands still when this returns."""
        await self._ask("stop", cluster_id=cluster_id)

    async def go(self, cluster_id: int) -> None:
        """Let it go on."""
        await self._ask("go", cluster_id=cluster_id)

    async def kill(self, cluster_id: int) -> None:
        """Kill a target's process (SIGKILL)."""
        await self._ask("kill", cluster_id=cluster_id)

    async def count_wrong(
        self, cluster_id: int, cache: int, writer: int, blocks: Sequence[int], sources: Sequence[int]
    ) -> int:
        """Return how many blocks of a target's cache are not what `writer` has in `sources`."""
        value = await self._ask(
            "check", cluster_id=cluster_id, cache=cache, writer=writer, blocks=list(blocks), sources=list(sources)
        )
        return int(value["wrong"])

    async def _ask(self, name: str, **arguments: Any) -> Any:
        try:
            with anyio.fail_after(_CALL_TIMEOUT_S):
                await self._stream.send(json.dumps({"ask": name, **arguments}).encode() + b"\n")
                answer = await receive_line(self._lines)
        except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError) as exc:
            raise FarError(f"the side that serves hung up during {name!r}: is the key right?") from exc
        except TimeoutError as exc:
            raise FarError(f"the side that serves did not answer {name!r} within {_CALL_TIMEOUT_S:g} s") from exc
        if "error" in answer:
            raise FarError(f"the side that serves could not {name}: {answer['error']}")
        return answer["value"]


@asynccontextmanager
async def connect(address: str, key: str) -> AsyncIterator[Far]:
    """Connect to the side that serves.

    Raises:
        FarError: it cannot be reached.
    """
    where = parse_address(address)
    try:
        with anyio.fail_after(10):
            stream = await anyio.connect_tcp(where.host, where.port)
    except (OSError, TimeoutError) as exc:
        raise FarError(f"nobody serves at {address}: {exc or 'no answer'}; run `prove-rdma serve` there") from exc
    async with stream:
        await stream.send(json.dumps({"key": key}).encode() + b"\n")
        yield Far(stream)
