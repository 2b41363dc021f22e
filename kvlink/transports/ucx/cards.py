"""What the two halves of a UCX link tell each other: worker addresses and remote keys, and what makes them safe.

UCX takes addresses and keys of a peer as they are: the wheels are built without any check, and what was made by another
release, or cut short, crashes the process that unpacks it. So nothing of it reaches UCX before the two versions were
compared, and each piece carries its kind, its length and a checksum. That stops mistakes, not malice: who may link at
all is decided by the handshake before.
"""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from kvlink.errors import LinkError, ProtocolError

_KIND: Final = b"kvlink ucx 1"
_CHECKSUM_NBYTES: Final = 4
MAX_KEY_NBYTES: Final = 4096


class Host(Struct, frozen=True, array_like=True):
    """Which process this is, for another one of the same host; of no meaning anywhere else."""

    boot: Annotated[str, Meta(max_length=64)]
    namespace: Annotated[int, Meta(ge=0)]
    pid: Annotated[int, Meta(ge=0, lt=2**31)]
    started: Annotated[int, Meta(ge=0)]

    @classmethod
    def own(cls) -> Host:
        """Describe this process; empty where the system does not say."""
        with suppress(OSError, ValueError, IndexError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            namespace = os.stat("/proc/self/ns/pid").st_ino
            return cls(boot, namespace, os.getpid(), _start_of(os.getpid()))
        return cls("", 0, 0, 0)

    def open_pidfd(self) -> int | None:
        """Return a descriptor that becomes readable when that process ends, None where it is not of this host."""
        own = Host.own()
        if not self.boot or (self.boot, self.namespace) != (own.boot, own.namespace):
            return None
        fd = -1
        try:
            fd = os.pidfd_open(self.pid)
            if self.is_running():  # looked at after: the number may have been used again before
                return fd
        except (OSError, AttributeError):
            pass
        if fd >= 0:
            os.close(fd)
        return None

    def is_running(self) -> bool:
        """Whether `pid` is that process still; to be asked of one of this host."""
        try:
            return _start_of(self.pid) == self.started
        except (OSError, ValueError, IndexError):
            return False


class StateFile(Struct, frozen=True, array_like=True):
    """A state region, for another process of the same host: a memfd, by its descriptor in the process that owns it."""

    fd: Annotated[int, Meta(ge=0)]
    inode: Annotated[int, Meta(ge=0)]
    nbytes: Annotated[int, Meta(ge=0)]


class Card(Struct, frozen=True, array_like=True):
    """How to reach a worker, and which UCX made it; whose it is, and where that has its state region."""

    version: tuple[int, int, int]
    address: Annotated[bytes, Meta(min_length=1, max_length=6000)]
    host: Host
    state: StateFile | None = None


_ENCODER: Final = msgspec.msgpack.Encoder()
_CARD_DECODER: Final = msgspec.msgpack.Decoder(Card)


def pack_card(card: Card) -> bytes:
    """Return the bytes of a card."""
    return _seal(_ENCODER.encode(card))


def unpack_card(sealed: bytes) -> Card:
    """Return the card in these bytes of a peer.

    Raises:
        LinkError: they are none.
    """
    try:
        return _CARD_DECODER.decode(_open(sealed))
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise LinkError(f"the peer's card for UCX is malformed: {exc}") from exc


def pack_key(key: bytes) -> bytes:
    """Return the bytes of a remote key."""
    return _seal(key)


def unpack_key(sealed: bytes) -> bytes:
    """Return the remote key in these bytes of a peer.

    Raises:
        ProtocolError: they are none.
    """
    try:
        key = _open(sealed)
    except ValueError as exc:
        raise ProtocolError(f"a remote key for UCX is malformed: {exc}") from exc
    if not 1 <= len(key) <= MAX_KEY_NBYTES:
        raise ProtocolError(f"a remote key for UCX of {len(key)} bytes")
    return key


def check_versions(ours: tuple[int, int, int], theirs: tuple[int, int, int], *, allow_mismatch: bool) -> None:
    """Refuse a peer whose UCX may not understand ours.

    Raises:
        LinkError: major or minor differ; both are named.
    """
    if ours[:2] != tuple(theirs[:2]) and not allow_mismatch:
        raise LinkError(
            f"UCX version does not match: ours is {'.'.join(map(str, ours))}, theirs is "
            f"{'.'.join(map(str, theirs))}; run the same release on both sides (some pairs crash), or set "
            "UcxConfig.allow_version_mismatch"
        )


def _seal(body: bytes) -> bytes:
    return _KIND + zlib.crc32(body).to_bytes(_CHECKSUM_NBYTES, "big") + body


def _open(sealed: bytes) -> bytes:
    start = len(_KIND) + _CHECKSUM_NBYTES
    if len(sealed) < start or not sealed.startswith(_KIND):
        raise ValueError("it is of another kind")
    body = sealed[start:]
    if zlib.crc32(body) != int.from_bytes(sealed[len(_KIND) : start], "big"):
        raise ValueError("its checksum is wrong")
    return body


def _start_of(pid: int) -> int:
    """Return when a process was started, in the kernel's ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[19])
