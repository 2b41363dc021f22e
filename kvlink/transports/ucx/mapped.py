"""A peer's state region, mapped: on one host a look at a state word is a load, as over shared memory.

The region is a memfd in any case, and whoever may copy from a process (which is what UCX does on one host) may open its
descriptors, so the peer says its number and inode in its card and takes no part in it. Where it cannot be opened, and
between hosts, words are got by UCX.

A word that is got comes from the memory that the bytes came from. A mapped one stays what it was when its owner ends,
and what UCX copies by a process id may be another process's by then. So a word that is mapped counts only together
with a look at the owner's life (`kvlink.transports.lives`) between the bytes and the word.

    Decision: map the words of a peer on the same host, although UCX could get them.
    Because: a small pull looks at the word before and after its bytes; got by UCX each look costs as much as the bytes
        do, 5 us of 20 (bench S1_4K). Over cuda_ipc, which is what UCX is there for on one host, it would be far more.
    Instead of: only the look after the bytes, which is enough for the answer to be right, but not for refusing a
    stale key before a byte of the caller's memory has changed.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from kvlink.errors import KVLinkError
from kvlink.memory.pool import Segment
from kvlink.transports.lives import Life
from kvlink.transports.ucx.cards import Host, StateFile


class MappedState:
    """The state region of a process of this host.

    Args:
        segment, life: of that process; owned from now on.

    Attributes:
        words: what it holds, read-only.
        life: to be looked at between bytes and words.
    """

    def __init__(self, segment: Segment, life: Life) -> None:
        self.words = segment.memory.data.cast("Q")
        self.life = life
        self._segment = segment

    def close(self) -> None:
        """Unmap it. Idempotent."""
        self.words = memoryview(b"").cast("Q")
        self._segment.close()
        self.life.close()


def state_file_of(segment: Segment) -> StateFile:
    """Return what a peer of this host needs to map our state region."""
    return StateFile(segment.fd, os.fstat(segment.fd).st_ino, segment.nbytes)


def map_state(host: Host, file: StateFile) -> MappedState | None:
    """Return the state region of a process of this host, mapped for reading; None where that cannot be."""
    life = Life.open(host.pid)
    if life is None:
        return None
    # Opened after its memory: the descriptor does not outlive an `exec`, so whose it is, that memory is.
    segment = _map(host, file)
    if segment is None:
        life.close()
        return None
    return MappedState(segment, life)


def _map(host: Host, file: StateFile) -> Segment | None:
    place = f"/proc/{host.pid}/fd/{file.fd}"
    fd = -1
    with suppress(OSError, KVLinkError):
        # Looked at before it is opened: its owner may have closed it since, and the number may be a device's by now,
        # or a file's of a network, which to open is to do something.
        if not os.readlink(place).startswith("/memfd:"):
            return None
        fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        found = os.fstat(fd)
        if stat.S_ISREG(found.st_mode) and found.st_ino == file.inode and host.is_running():
            taken, fd = fd, -1
            return Segment.attach(taken, file.nbytes)
    if fd >= 0:
        os.close(fd)
    return None
