"""A peer's state region, mapped: on one host a look at a state word is a load, as over shared memory.

The region is a memfd in any case, and whoever may copy from a process (which is what UCX does on one host) may open its
descriptors, so the peer says its number and inode in its card and takes no part in it. Where it cannot be opened, and
between hosts, words are got by UCX.

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
from kvlink.transports.ucx.cards import Host, StateFile


def state_file_of(segment: Segment) -> StateFile:
    """Return what a peer of this host needs to map our state region."""
    return StateFile(segment.fd, os.fstat(segment.fd).st_ino, segment.nbytes)


def map_state(host: Host, file: StateFile) -> Segment | None:
    """Return the state region of a process of this host, mapped for reading; None where that cannot be."""
    fd = -1
    with suppress(OSError, KVLinkError):
        fd = os.open(f"/proc/{host.pid}/fd/{file.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        found = os.fstat(fd)
        # Its owner may have closed it since, and the number may be something else's by now.
        if stat.S_ISREG(found.st_mode) and found.st_ino == file.inode and host.is_running():
            taken, fd = fd, -1
            return Segment.attach(taken, file.nbytes)
    if fd >= 0:
        os.close(fd)
    return None
