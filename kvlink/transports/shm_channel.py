"""The side channel over which two processes of one host hand each other descriptors of their memory.

An abstract Unix socket: it has a name but no file, so nothing is left behind, and it is reachable only from the same
network namespace. Each message is a length, a msgpack list of `SharedRegion`, and, riding on its first byte, one
descriptor per region that has one. The kernel says who the peer is; the token says which handshake it belongs to.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Collection
from contextlib import suppress
from typing import Annotated, Final

import anyio
import msgspec
from anyio.abc import UNIXSocketStream
from msgspec import Meta, Struct

from kvlink.credentials import check_user, peer_of
from kvlink.errors import ProtocolError
from kvlink.loops import send_all, until_readable, until_writable
from kvlink.transports.lives import Life

TOKEN_NBYTES: Final = 32
_LENGTH: Final = struct.Struct(">I")
_MAX_NBYTES: Final = 64 * 1024
_MAX_DESCRIPTORS: Final = 64
_SO_PEERPIDFD: Final = 77  # <asm-generic/socket.h>, Linux 6.5


class SharedRegion(Struct, frozen=True):
    """One region that the sender lets the receiver address.

    A region with a descriptor is mapped. One without is the sender's own memory at `address`, reached through the
    kernel (``process_vm_readv``).
    """

    number: Annotated[int, Meta(ge=0)]
    nbytes: Annotated[int, Meta(gt=0)]
    has_descriptor: bool
    is_writable: bool = False
    address: Annotated[int, Meta(ge=0)] = 0


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(tuple[SharedRegion, ...])


class Channel:
    """One connected side channel.

    Args:
        stream: a connected Unix socket, owned from now on.
    """

    def __init__(self, stream: UNIXSocketStream) -> None:
        self._stream = stream
        self._socket: socket.socket = stream.extra_attributes[anyio.abc.SocketAttribute.raw_socket]()

    async def send(self, regions: tuple[SharedRegion, ...], descriptors: list[int]) -> None:
        """Send regions and, in their order, the descriptors of those that have one. The caller keeps its copies."""
        body = _ENCODER.encode(regions)
        frame = _LENGTH.pack(len(body)) + body
        if descriptors:
            await until_writable(self._stream)
            await self._stream.send_fds(frame, list(descriptors))
        else:
            await send_all(self._stream, frame)

    async def receive(self) -> tuple[tuple[SharedRegion, ...], list[int]]:
        """Return the next regions and their descriptors, which the caller then owns.

        Raises:
            ProtocolError: the peer sent something else; every descriptor that came has been closed.
            anyio.EndOfStream, anyio.BrokenResourceError: the peer is gone.
        """
        descriptors: list[int] = []
        try:
            await until_readable(self._stream)
            received, descriptors = await self._stream.receive_fds(_LENGTH.size, _MAX_DESCRIPTORS)
            head = received + await self._receive_exactly(_LENGTH.size - len(received))
            (nbytes,) = _LENGTH.unpack(head)
            if nbytes > _MAX_NBYTES:
                raise ProtocolError(f"a message of {nbytes} bytes on the descriptor channel")
            try:
                regions = _DECODER.decode(await self._receive_exactly(nbytes))
            except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
                raise ProtocolError(f"a malformed message on the descriptor channel: {exc}") from exc
            if sum(region.has_descriptor for region in regions) != len(descriptors):
                raise ProtocolError(f"{len(descriptors)} descriptors came with regions {regions}")
        except BaseException:
            for fd in descriptors:
                os.close(fd)
            raise
        return regions, descriptors

    async def send_token(self, token: bytes) -> None:
        """Say which handshake this is."""
        await send_all(self._stream, token)

    async def receive_token(self) -> bytes:
        """Return which handshake the peer says this is."""
        return await self._receive_exactly(TOKEN_NBYTES)

    def open_peer_pidfd(self) -> int | None:
        """Return a descriptor that becomes readable when the peer's process ends; None where the kernel has none."""
        with suppress(OSError):
            return self._socket.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        with suppress(OSError, AttributeError):
            return os.pidfd_open(self.peer()[0])
        return None

    def open_peer_life(self, place: int) -> Life | None:
        """Return the life of the peer's process from which this channel is; None where that may not be looked at.

        Args:
            place: where it has memory.
        """
        life = Life.open(self.peer()[0])
        if life is not None:
            life.place = place
            poller = select.poll()
            poller.register(self._socket, select.POLLRDHUP)
            if poller.poll(0):  # the socket does not outlive an `exec`; so it may be the life after that one
                life.close()
        return life

    def peer(self) -> tuple[int, int]:
        """Return the process id and user id of the peer, as the kernel knows them in our namespaces."""
        return peer_of(self._socket)

    def check_user(self, allowed_uids: Collection[int]) -> None:
        """Raise `LinkError` when the peer is another user's process, and not one of `allowed_uids`."""
        check_user(self._socket, allowed_uids)

    async def aclose(self) -> None:
        """Close the socket. Idempotent."""
        with anyio.CancelScope(shield=True):
            await self._stream.aclose()

    def abort(self) -> None:
        """Shut the socket down now: the peer and our own reader see its end. Idempotent."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    async def _receive_exactly(self, nbytes: int) -> bytes:
        parts = b""
        while len(parts) < nbytes:
            await until_readable(self._stream)
            parts += await self._stream.receive(nbytes - len(parts))
        return parts
