"""What differs between event loops, and what it must not lead to."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import SocketAttribute, UNIXSocketStream

from kvlink.acceptor import Acceptor
from kvlink.loops import send_all, until_readable
from tests.support.loops import asyncio_and_uvloop, every_loop


async def connected(folder: Path, use: Callable[[UNIXSocketStream, UNIXSocketStream], Awaitable[None]]) -> None:
    """Call `use` with both ends of a Unix connection."""
    ours: list[UNIXSocketStream] = []
    has_come = anyio.Event()

    async def keep(stream: Any) -> None:
        async with stream:
            ours.append(stream)
            has_come.set()
            await anyio.sleep_forever()

    path = folder / "socket"
    async with await anyio.create_unix_listener(path) as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, keep)
        async with await anyio.connect_unix(path) as theirs:
            await has_come.wait()
            await use(ours[0], theirs)
        tasks.cancel_scope.cancel()


@asyncio_and_uvloop
async def test_a_read_that_is_cancelled_as_bytes_arrive(tmp_path: Path) -> None:
    """The loop has nothing to complain about, in whichever order the two happen within one turn."""
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))

    async def use(ours: UNIXSocketStream, theirs: UNIXSocketStream) -> None:
        sender = theirs.extra(SocketAttribute.raw_socket)

        async def read(scope: anyio.CancelScope) -> None:
            with scope:
                while True:
                    await until_readable(ours)
                    await ours.receive()

        for num_turns in range(4):
            scope = anyio.CancelScope()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read, scope)
                await anyio.sleep(0.002)
                sender.send(b"x")
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                scope.cancel()
        await anyio.lowlevel.checkpoint()

    await connected(tmp_path, use)
    assert complaints == []


@asyncio_and_uvloop
async def test_a_write_that_is_cancelled_as_there_is_room(tmp_path: Path) -> None:
    """As for reads: a write that waits for room and is cancelled as there is some makes no noise."""
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))

    async def use(ours: UNIXSocketStream, theirs: UNIXSocketStream) -> None:
        receiver = theirs.extra(SocketAttribute.raw_socket)

        async def write(scope: anyio.CancelScope) -> None:
            with scope:
                while True:
                    await send_all(ours, bytes(1 << 20))

        for num_turns in range(4):
            scope = anyio.CancelScope()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(write, scope)
                await anyio.sleep(0.005)
                with suppress(BlockingIOError):
                    while receiver.recv(1 << 20):
                        pass
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                scope.cancel()
        await anyio.lowlevel.checkpoint()

    await connected(tmp_path, use)
    assert complaints == []


@asyncio_and_uvloop
async def test_an_acceptor_that_is_closed_as_somebody_connects(tmp_path: Path) -> None:
    """As for reads: it makes no noise, in whichever order the two happen within one turn."""
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))

    async def hang_up(stream: Any) -> None:
        await stream.aclose()

    async with anyio.create_task_group() as tasks:
        for num_turns in range(5):
            path = tmp_path / str(num_turns)
            acceptor = Acceptor(await anyio.create_unix_listener(path), hang_up, tasks)
            await anyio.sleep(0.002)
            with socket.socket(socket.AF_UNIX) as caller:
                caller.connect(str(path))
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                acceptor.abort()
                await anyio.sleep(0.002)
            await acceptor.aclose()
    assert complaints == []


@every_loop
async def test_send_all_sends_all(tmp_path: Path) -> None:
    """More than the socket holds arrives whole, and a peer that has hung up is an error."""
    message = bytes(range(256)) * 20000

    async def use(ours: UNIXSocketStream, theirs: UNIXSocketStream) -> None:
        received = bytearray()

        async def read() -> None:
            while len(received) < len(message):
                received.extend(await theirs.receive())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await send_all(ours, message)
        assert received == message
        await theirs.aclose()
        with pytest.raises(anyio.BrokenResourceError):
            await send_all(ours, b"x")

    await connected(tmp_path, use)


@every_loop
async def test_until_readable_loses_nothing(tmp_path: Path) -> None:
    """What was sent before and after is received, and the end of the stream is found."""

    async def use(ours: UNIXSocketStream, theirs: UNIXSocketStream) -> None:
        received = b""

        async def read() -> None:
            nonlocal received
            with suppress(anyio.EndOfStream):
                while True:
                    await until_readable(ours)
                    received += await ours.receive()

        await theirs.send(b"before ")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await anyio.sleep(0.002)
            await theirs.send(b"after")
            await theirs.aclose()
        assert received == b"before after"

    await connected(tmp_path, use)
