"""Who is at the other end of a Unix socket, as the kernel knows it."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Collection
from typing import Final

from kvlink.errors import LinkError

_UCRED: Final = struct.Struct("3i")  # pid, uid, gid; unix(7)


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return the process id and user id of the peer of a connected Unix socket, as they are in our namespaces.

    They are those of the moment when the peer connected, or, on the dialling side, when it began to listen.
    """
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


def check_user(sock: socket.socket, allowed_uids: Collection[int]) -> None:
    """Refuse a peer that runs as another user than we do, unless it is among `allowed_uids`.

    Raises:
        LinkError: it does, and which setting would allow it.
    """
    pid, uid = peer_of(sock)
    ours = os.geteuid()
    if uid != ours and uid not in allowed_uids:
        raise LinkError(
            f"process {pid} runs as user {uid} and this one as user {ours}; run both as one user, "
            f"or name {uid} in ClusterConfig.allowed_uids here",
            phase="hello",
        )
