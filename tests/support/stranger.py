"""The other side of a connection, when it is not kvlink: says what the test wants, and stops where the test wants.

Plain blocking sockets with a deadline at every step: the victim lives in another process, so nothing waits for itself.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import msgspec

import kvlink as kv
from kvlink.memory.regions import POOL, STATE
from kvlink.transports.shm_channel import TOKEN_NBYTES, SharedRegion
from kvlink.wire import FrameDecoder, Hello, Message, Ready, encode

STEP_TIMEOUT_S: Final = 10.0
"""Longer than any of the victim's own deadlines."""


def hello(cluster_id: int = 99, **changes: Any) -> Hello:
    """Return a hello that is in order but for `changes`."""
    fields = {
        "cluster_id": cluster_id,
        "incarnation": secrets.token_bytes(16),
        "role": int(kv.Role.MIX),
        "transports": ("shm",),
        **changes,
    }
    return Hello(**fields)


class Stranger:
    """One connection.

    Args:
        sock: connected, owned from now on.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.settimeout(STEP_TIMEOUT_S)
        self._decoder = FrameDecoder(1 << 20)
        self._heard: list[Message] = []
        self.channel: socket.socket | None = None

    @classmethod
    def dial(cls, address: str) -> Stranger:
        """Connect to a cluster."""
        host, _, port = address.rpartition(":")
        return cls(socket.create_connection((host, int(port)), STEP_TIMEOUT_S))

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up. Idempotent."""
        self.sock.close()
        if self.channel is not None:
            self.channel.close()

    def say(self, *words: Message | bytes) -> None:
        """Send messages or raw bytes; a peer that has hung up does not matter."""
        with suppress(ConnectionError):
            self.sock.sendall(b"".join(word if isinstance(word, bytes) else encode(word) for word in words))

    def hear(self) -> Message | None:
        """Return the next message, None when the other side has hung up."""
        while not self._heard:
            try:
                received = self.sock.recv(1 << 16)
            except ConnectionError:
                return None
            if not received:
                return None
            self._heard += self._decoder.feed(received)
        return self._heard.pop(0)

    def hear_end(self) -> Message | None:
        """Read until the other side hangs up; return the last message before that."""
        last = None
        while (message := self.hear()) is not None:
            last = message
        return last

    def greet(self, victim: int, ours: Hello | None = None) -> Hello:
        """Say hello and return the answer, which must be one."""
        self.say(ours or hello(expects=victim))
        answer = self.hear()
        assert isinstance(answer, Hello), answer
        return answer

    def link(self, victim: int, ours: Hello | None = None) -> None:
        """Go through the whole handshake: afterwards the victim has a link to us."""
        answer = self.greet(victim, ours)
        self.channel = dial_channel(answer)
        self.channel.sendall(token_of(answer))
        with memfds(8192, 8192) as descriptors:
            regions = (SharedRegion(POOL, 8192, True), SharedRegion(STATE, 8192, True))
            send_regions(self.channel, regions, descriptors)
        _, received, _, _ = socket.recv_fds(self.channel, 1 << 16, 16)
        for fd in received:
            os.close(fd)
        assert received, "the victim shared nothing"
        self.say(Ready(transport="shm"))
        ready = self.hear()
        assert isinstance(ready, Ready), ready


def token_of(answer: Hello) -> bytes:
    """Return what the victim wants to be shown on its descriptor socket."""
    return answer.offers["shm"][:TOKEN_NBYTES]


def dial_channel(answer: Hello) -> socket.socket:
    """Connect to the victim's descriptor socket."""
    channel = socket.socket(socket.AF_UNIX)
    channel.settimeout(STEP_TIMEOUT_S)
    channel.connect(b"\0" + answer.offers["shm"][TOKEN_NBYTES:])
    return channel


def send_regions(channel: socket.socket, regions: Sequence[SharedRegion], descriptors: Sequence[int]) -> None:
    """Send regions with descriptors, whether or not they fit together."""
    body = msgspec.msgpack.encode(tuple(regions))
    with suppress(ConnectionError):
        socket.send_fds(channel, [struct.pack(">I", len(body)) + body], list(descriptors))


def hear_hang_up(sock: socket.socket) -> None:
    """Read until the other side hangs up, descriptors included."""
    with suppress(ConnectionError):
        while True:
            received, descriptors, _, _ = socket.recv_fds(sock, 1 << 16, 16)
            for fd in descriptors:
                os.close(fd)
            if not received:
                return


@contextmanager
def memfds(*nbytes: int, seals: int = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW) -> Iterator[list[int]]:
    """Make memfds of these sizes for as long as the context lasts."""
    descriptors = []
    try:
        for size in nbytes:
            fd = os.memfd_create("stranger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            descriptors.append(fd)
            os.ftruncate(fd, size)
            if seals:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        yield descriptors
    finally:
        for fd in descriptors:
            os.close(fd)
