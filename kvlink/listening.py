"""Where a cluster listens: TCP, or a Unix socket that is ours while we listen on it and nobody else's.

A Unix socket is a file, and binding takes the place of a socket that lies there already, alive or not. So whether
somebody answers is tried first; and what is removed in the end is the file that was made, not one that has taken its
place since.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

import anyio
from anyio.abc import Listener, SocketAttribute, SocketStream

from kvlink.config import Address, parse_address
from kvlink.errors import ListenError

_PROBE_TIMEOUT_S: Final = 1.0


class Door:
    """An open listener and its address. Made by `open_door`.

    Attributes:
        listener: accepts connections; the caller closes it.
        address: what peers dial.
    """

    def __init__(self, listener: Listener[SocketStream], address: Address) -> None:
        self.listener = listener
        self.address = str(address)
        self._path = address.path
        self._file = _identity(address.path)

    def remove(self) -> None:
        """Remove the socket's file, if there is one and it is still ours. Idempotent."""
        if self._file is not None and _identity(self._path) == self._file:
            with suppress(OSError):
                os.unlink(self._path)
        self._file = None


async def open_door(listen: str) -> Door:
    """Listen at an address; the caller closes what it gets.

    Raises:
        ListenError: that is not possible, and why.
    """
    address = parse_address(listen)
    try:
        if address.path:
            path = _absolute(address.path)
            await _expect_nobody(path)
            return Door(await anyio.create_unix_listener(path), Address(path=path))
        listener = await anyio.create_tcp_listener(local_host=address.host, local_port=address.port)
    except (OSError, ValueError) as exc:  # a name that cannot be looked up may be a ValueError
        if isinstance(exc, ListenError):
            raise
        raise ListenError(
            f"cannot listen at {listen}: {getattr(exc, 'strerror', None) or exc}; "
            "give `listen` an address of this host that is free, with port 0 for any port"
        ) from exc
    local = listener.extra(SocketAttribute.local_address)
    assert isinstance(local, tuple)
    return Door(listener, Address(host=str(local[0]), port=int(local[1])))


async def _expect_nobody(path: str) -> None:
    """Raise `ListenError` where a living process listens at `path` already."""
    try:
        with anyio.move_on_after(_PROBE_TIMEOUT_S):  # a queue that is full is somebody too
            stream = await anyio.connect_unix(path)
            await stream.aclose()
    except OSError:
        return
    raise ListenError(f"another process listens at unix:{path}; give each cluster a path of its own")


def _absolute(path: str) -> str:
    """Return the path as somebody who stands in another folder must write it."""
    return os.path.abspath(path)


def _identity(path: str) -> tuple[int, int] | None:
    """Return what tells one file from another that has its name later."""
    if not path:
        return None
    with suppress(OSError):
        found = os.stat(path, follow_symlinks=False)
        return found.st_dev, found.st_ino
    return None
