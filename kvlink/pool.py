"""Memory that other processes can map: sealed, reserved memfds, and the pool that caches are carved from.

A `Segment` is one memfd. Its pages are *reserved* when it is made, so a host without room is an error now and never a
SIGBUS later, and it is *sealed* against shrinking, so that no process that maps it can be killed by another one that
truncates it. It has no name anywhere: it dies with its last user, also after kill -9.

Peers get a descriptor that can only read; one that can write is handed out with a write lease. Views keep the mapping
alive by themselves (numpy's base chain ends at the mmap), so closing a segment is dropping our own references, in any
order with everything else.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlink.allocator import Allocator, PoolExhausted
from kvlink.errors import OutOfMemoryError, ProtocolError

Bytes = NDArray[np.uint8]

_PAGE = mmap.PAGESIZE
_ALIGNMENT = 512
_LARGE_NBYTES = 64 * 1024
"""Caches with tensors of at least this size begin on a page."""

# <linux/fcntl.h>; the names are in `fcntl` from Python 3.10 on, on Linux only.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Segment:
    """One memfd, mapped here in full.

    Attributes:
        fd: the descriptor, open until `close`.
        nbytes: its length, a whole number of pages.
        memory: all of it, shape ``(nbytes,)``, uint8; read-only where it was attached so.
    """

    def __init__(self, fd: int, nbytes: int, *, is_writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        try:
            self._mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=protection)
        except OSError as exc:
            os.close(fd)
            raise OutOfMemoryError(
                f"cannot map {nbytes} bytes: {exc.strerror}; see the limits on address space and mappings",
                needed=nbytes,
                free=0,
                largest_hole=0,
            ) from exc
        self.fd = fd
        self.nbytes = nbytes
        self.memory: Bytes = np.frombuffer(self._mapping, dtype=np.uint8)

    @classmethod
    def create(cls, name: str, nbytes: int) -> Segment:
        """Make a segment of at least `nbytes`, reserved and sealed. May take seconds for tens of GiB: use a thread.

        Raises:
            OutOfMemoryError: the host has not that much memory to give.
        """
        nbytes = -(-nbytes // _PAGE) * _PAGE
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            os.posix_fallocate(fd, 0, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as exc:
            os.close(fd)
            if exc.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EINVAL):
                raise
            raise OutOfMemoryError(
                f"the host cannot reserve {nbytes} bytes of shared memory for {name}: {exc.strerror}; "
                "ask for a smaller pool, or free memory",
                needed=nbytes,
                free=0,
                largest_hole=0,
            ) from exc
        segment = cls(fd, nbytes, is_writable=True)
        populate(segment.memory, for_writing=True)
        return segment

    @classmethod
    def attach(cls, fd: int, nbytes: int, *, is_writable: bool = False) -> Segment:
        """Map a descriptor that a peer sent; takes it over, also on failure.

        Raises:
            ProtocolError: it is not a sealed memfd of that length, so touching it could kill this process.
        """
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            length = os.fstat(fd).st_size
        except OSError as exc:
            os.close(fd)
            raise ProtocolError("a peer sent a descriptor that is not a memfd") from exc
        if seals & _SEALS != _SEALS or length != nbytes or nbytes <= 0:
            os.close(fd)
            raise ProtocolError(
                f"a peer sent memory of {length} bytes, seals {seals:#x}; announced were {nbytes} bytes"
            )
        return cls(fd, nbytes, is_writable=is_writable)

    def open_read_only(self) -> int:
        """Return a new descriptor of the same memory that cannot be mapped for writing; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def root(self, offset: int, nbytes: int) -> Bytes:
        """Return a writable view that is its own base: as long as any view made from it lives, so does it.

        A weak reference to it therefore tells when the last view on these bytes has died.
        """
        return np.frombuffer(memoryview(self._mapping)[offset : offset + nbytes], dtype=np.uint8)

    def close(self) -> None:
        """Give up our descriptor and our references; the mapping itself ends with the last view. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            del self.memory, self._mapping


class Pool:
    """A segment and the allocator inside it.

    Args:
        segment: the memory, owned by the pool from now on.
        region: the number under which peers address it.
    """

    def __init__(self, segment: Segment, region: int) -> None:
        self.segment = segment
        self.region = region
        self._allocator = Allocator(segment.nbytes, alignment=_ALIGNMENT)

    def allocate(self, tensor_nbytes: int, num_tensors: int) -> tuple[int, int]:
        """Return ``(offset, stride)`` of room for equal tensors at one constant stride, all or nothing.

        Raises:
            OutOfMemoryError: naming needed, free and largest hole.
        """
        grain = _PAGE if tensor_nbytes >= _LARGE_NBYTES else _ALIGNMENT
        stride = -(-tensor_nbytes // grain) * grain
        needed = stride * num_tensors
        try:
            return self._allocator.allocate(needed, alignment=grain), stride
        except PoolExhausted as exc:
            raise OutOfMemoryError(
                f"the pool of {self.nbytes} bytes has no room: needed {needed}, free {self.free_nbytes}, "
                f"largest hole {exc.largest_hole}; deallocate caches that are no longer used, or make the pool larger",
                needed=needed,
                free=exc.free,
                largest_hole=exc.largest_hole,
            ) from exc

    def free(self, offset: int) -> None:
        """Give back what `allocate` returned as `offset`."""
        self._allocator.free(offset)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool."""
        return self.segment.nbytes

    @property
    def free_nbytes(self) -> int:
        """Bytes that are free, perhaps in many holes."""
        return self._allocator.free_nbytes

    @property
    def used_nbytes(self) -> int:
        """Bytes that caches hold."""
        return self._allocator.used_nbytes

    def __repr__(self) -> str:
        return f"<Pool region={self.region} nbytes={self.nbytes} free={self.free_nbytes}>"


def populate(memory: Bytes, *, for_writing: bool) -> None:
    """Enter all pages of `memory` into this process's page table, in one system call and without the GIL.

    One fault at a time, as a copy would take them, costs 1 to 3 s per GiB on a virtual machine; this takes 0.1 s for
    reading and 0.25 s for writing. Kernels before 5.14 refuse, and then the copy pays.
    """
    advice = _MADV_POPULATE_WRITE if for_writing else _MADV_POPULATE_READ
    _LIBC.madvise(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(len(memory)), advice)


_LIBC = ctypes.CDLL(None)
_MADV_POPULATE_READ = 22  # <asm-generic/mman-common.h>
_MADV_POPULATE_WRITE = 23


def as_tensors(
    root: Bytes, stride: int, num_tensors: int, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> tuple[NDArray[Any], ...]:
    """Return `num_tensors` views of `shape` and `dtype` on `root`, `stride` bytes apart."""
    return tuple(np.ndarray(shape, dtype, buffer=root, offset=index * stride) for index in range(num_tensors))
