"""One-sided copies to and from another process's private memory: ``process_vm_readv`` and ``process_vm_writev``.

Memory that the caller owns is not in a memfd, so it cannot be mapped. The kernel can still copy from or to it without
that process's help: one system call for up to 1,024 pieces, with no GIL held. It needs the permission to trace the
other process: the same user, and, where the Yama module restricts tracing to descendants, that the owner allows it
(`permit_tracing`).

A process id can be used again after its process has died, and a process can become another program; then these calls
would reach a stranger's memory. So a call counts only when the peer's life still goes on after it
(`kvlink.transports.lives`), or, where that cannot be told, when its process exists after it; and nothing is written
unless that was so before, too.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlink.errors import FeatureNotEnabledError, LinkLostError, TransportError
from kvlink.transports.lives import Life

MAX_PIECES: Final = 1024
"""IOV_MAX on Linux: more in one call are refused."""

_PR_SET_PTRACER: Final = 0x59616D61  # <linux/prctl.h>
_PR_SET_PTRACER_ANY: Final = ctypes.c_ulong(-1)
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def _function(name: str) -> Callable[..., int]:
    """Return a function of the C library; where it has none, one that says what a kernel without it would."""
    found = getattr(_LIBC, name, None)
    if found is None:
        return _refuse
    found.restype = ctypes.c_ssize_t
    found.argtypes = (
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    )
    return found  # type: ignore[no-any-return]  # a function of C


def _refuse(*_: object) -> int:
    ctypes.set_errno(errno.ENOSYS)
    return -1


_READ: Final = _function("process_vm_readv")
_WRITE: Final = _function("process_vm_writev")

Vectors = NDArray[np.uint64]
"""Rows of (address, nbytes): a C array of ``struct iovec``."""


def permit_tracing(pid: int | None) -> None:
    """Let process `pid` (None: any process of this user) copy this process's memory, where Yama restricts it.

    Without Yama this changes nothing. It also lets that process trace this one; hence never done unasked.
    """
    which = _PR_SET_PTRACER_ANY if pid is None else ctypes.c_ulong(pid)
    prctl = getattr(_LIBC, "prctl", _refuse)
    prctl(_PR_SET_PTRACER, which, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


class ForeignMemory:
    """A region of another process.

    Args:
        pid: the process.
        pidfd: a descriptor of the same process, which stays open longer than this object is used.
        address: where the region begins there.
        nbytes: its length.
        life: that which the process led when it told of the region; stays open longer than this object is used.
    """

    __slots__ = ("_life", "_pidfd", "_piece", "_piece_address", "address", "nbytes", "pid")

    def __init__(self, pid: int, pidfd: int, address: int, nbytes: int, life: Life | None = None) -> None:
        self.pid = pid
        self.address = address
        self.nbytes = nbytes
        self._pidfd = pidfd
        self._life = life
        self._piece: Vectors | None = None  # a link remembers every region that its peer has ever registered
        self._piece_address = 0

    def __len__(self) -> int:
        return self.nbytes

    def probe(self) -> None:
        """Read one byte, to learn whether the kernel allows it.

        Raises:
            FeatureNotEnabledError: it does not, and what to do.
        """
        byte = np.zeros(1, np.uint8)
        local = np.array([[byte.ctypes.data, 1]], np.uint64)
        remote = np.array([[self.address, 1]], np.uint64)
        try:
            self.copy(local, remote, is_write=False)
        except PermissionError as exc:
            raise FeatureNotEnabledError(
                f"the kernel does not let this process copy the memory of process {self.pid}: run both as the same "
                "user and in the same container; where /proc/sys/kernel/yama/ptrace_scope is 1, let the owner set "
                "ClusterConfig.permit_peer_access"
            ) from exc

    def copy(self, local: Vectors, remote: Vectors, *, is_write: bool) -> None:
        """Copy between equally long lists of at most `MAX_PIECES` pieces; returns when all is done.

        Raises:
            PermissionError: the kernel refuses.
            LinkLostError: the process has ended.
            TransportError: the memory is not there any more.
        """
        call = _WRITE if is_write else _READ
        expected = int(local[:, 1].sum())
        if is_write:
            self._check_alive(0)
        copied = call(self.pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0)
        number = ctypes.get_errno() if copied < 0 else 0
        self._check_alive(number)
        if number in (errno.EPERM, errno.EACCES, errno.ENOSYS):
            raise PermissionError(number, os.strerror(number))
        if copied != expected:
            why = os.strerror(number) if number else f"{copied} of {expected} bytes were there"
            raise TransportError(
                f"memory that process {self.pid} has registered is not all there: {why}", phase="transfer"
            )

    def copy_piece(self, local: int, remote: int, nbytes: int, *, is_write: bool) -> bool:
        """Copy one piece, by addresses; for one thread at a time.

        Returns:
            False where that could not be done: `copy` says why.
        """
        if self._piece is None:
            self._piece = np.zeros((2, 2), np.uint64)
            self._piece_address = int(self._piece.ctypes.data)
        piece, address = self._piece, self._piece_address
        piece[0, 0], piece[1, 0] = local, remote
        piece[:, 1] = nbytes
        call = _WRITE if is_write else _READ
        if is_write and not self._is_alive():
            return False
        return bool(call(self.pid, address, 1, address + 16, 1, 0) == nbytes) and self._is_alive()

    def read(self, target: memoryview, remote: int) -> bool:
        """Fill `target`, a few KiB, from an address of the process; False where that is not possible this way."""
        return self._life is not None and self._life.read(target, remote)

    def _check_alive(self, number: int) -> None:
        if not self._is_alive() or number == errno.ESRCH:
            raise LinkLostError(f"process {self.pid} has ended, or is another program now", phase="transfer")

    def _is_alive(self) -> bool:
        if self._life is not None:
            return self._life.goes_on()
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return not poller.poll(0)


def cut_vectors(
    pieces: Sequence[tuple[int, int, int, int, int, int]], chunk_nbytes: int
) -> Iterator[tuple[Vectors, Vectors]]:
    """Yield ``(local, remote)`` vectors of at most `MAX_PIECES` pieces and about `chunk_nbytes` each.

    Args:
        pieces: ``(local address, local stride, remote address, remote stride, nbytes, rows)``.
    """
    step = max(4096, chunk_nbytes)
    for local, local_stride, remote, remote_stride, nbytes, num_rows in pieces:
        starts = np.arange(0, nbytes, step, dtype=np.int64)
        lengths = np.minimum(step, nbytes - starts)
        rows = np.arange(num_rows, dtype=np.int64)[:, None]
        table = np.empty((num_rows * len(starts), 3), np.int64)
        table[:, 0] = (local + rows * local_stride + starts).ravel()
        table[:, 1] = (remote + rows * remote_stride + starts).ravel()
        table[:, 2] = np.broadcast_to(lengths, (num_rows, len(starts))).ravel()
        at_once = max(1, min(MAX_PIECES, chunk_nbytes // max(1, min(nbytes, step))))
        for first in range(0, len(table), at_once):
            part = table[first : first + at_once]
            yield np.ascontiguousarray(part[:, (0, 2)], np.uint64), np.ascontiguousarray(part[:, (1, 2)], np.uint64)


def join_vectors(parts: Iterator[tuple[Vectors, Vectors]], chunk_nbytes: int) -> Iterator[tuple[Vectors, Vectors]]:
    """Yield the same work in fewer, larger calls: small parts together, up to both limits."""
    locals_: list[Vectors] = []
    remotes: list[Vectors] = []
    num_pieces = total = 0
    for local, remote in parts:
        nbytes = int(local[:, 1].sum())
        if locals_ and (num_pieces + len(local) > MAX_PIECES or total + nbytes > chunk_nbytes):
            yield np.concatenate(locals_), np.concatenate(remotes)
            locals_, remotes, num_pieces, total = [], [], 0, 0
        locals_.append(local)
        remotes.append(remote)
        num_pieces += len(local)
        total += nbytes
    if locals_:
        yield np.concatenate(locals_), np.concatenate(remotes)
