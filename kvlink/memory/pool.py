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
import platform
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlink.errors import FeatureNotEnabledError, OutOfMemoryError, ProtocolError
from kvlink.memory.allocator import Allocator, PoolExhausted
from kvlink.memory.hostmemory import available_nbytes

Bytes = NDArray[np.uint8]

_PAGE = mmap.PAGESIZE
_HUGE_PAGE = 2 * 1024 * 1024
_ALIGNMENT = 512
_STEP_NBYTES = 8 * 1024 * 1024
_NUM_OWN_REFERENCES = 2  # a local variable, and the argument of `getrefcount`; each view holds one more
_LARGE_NBYTES = 64 * 1024
"""Caches with tensors of at least this size begin on a page."""

# <linux/fcntl.h>; `fcntl` has the names on Linux only, and elsewhere kvlink must be able to say what is missing.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEALS = 0x0002 | 0x0004  # F_SEAL_SHRINK, F_SEAL_GROW


class Segment:
    """One memfd, mapped here in full.

    Attributes:
        fd: the descriptor, open until `close`; -1 where it was attached, and after that.
        address: where it is mapped.
        nbytes: its length, a whole number of pages.
        memory: all of it, shape ``(nbytes,)``, uint8; read-only where it was attached so.
    """

    def __init__(self, fd: int, nbytes: int, *, is_writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        try:
            self._mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=protection)
        except PermissionError as exc:
            os.close(fd)
            raise ProtocolError(f"a descriptor does not allow what was announced with it: {exc.strerror}") from exc
        except OSError as exc:
            os.close(fd)
            raise OutOfMemoryError(
                f"cannot map {nbytes} bytes: {exc.strerror}; see the limits on address space and mappings",
                needed=nbytes,
                free=0,
                largest_hole=0,
            ) from exc
        self.fd = fd
        # Also when nobody closes it: a segment that is dropped, by a cancelled start for one, keeps nothing.
        self._closer = weakref.finalize(self, os.close, fd)
        self._closer.atexit = False
        self._is_open = True
        self.nbytes = nbytes
        self.memory: Bytes = np.frombuffer(self._mapping, dtype=np.uint8)
        self.address = int(self.memory.ctypes.data)

    @classmethod
    def create(
        cls, name: str, nbytes: int, *, is_huge: bool = False, is_prefaulted: bool = True, numa_node: int | None = None
    ) -> Segment:
        """Make a segment of at least `nbytes`, reserved and sealed. May take seconds for tens of GiB: use a thread.

        Args:
            is_huge: of 2 MiB pages, which the host must have set aside (``vm.nr_hugepages``).
            is_prefaulted: enter all pages into the page table now, rather than at their first use.
            numa_node: take the memory from this node only.

        Raises:
            OutOfMemoryError: the host has not that much memory of that kind to give.
            FeatureNotEnabledError: this is not Linux.
        """
        if not hasattr(os, "memfd_create"):
            raise FeatureNotEnabledError(f"kvlink needs Linux: {platform.system()} has no memfd_create")
        page = _HUGE_PAGE if is_huge else _PAGE
        nbytes = -(-nbytes // page) * page
        available = None if is_huge else available_nbytes()
        if available is not None and nbytes > available:
            raise OutOfMemoryError(
                f"the host can give {available} bytes of memory now; {nbytes} are asked for {name}: "
                "ask for a smaller pool, or free memory",
                needed=nbytes,
                free=available,
                largest_hole=available,
            )
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        try:
            fd = os.memfd_create(name, flags | (os.MFD_HUGETLB | os.MFD_HUGE_2MB if is_huge else 0))
        except OSError as exc:
            raise OutOfMemoryError(
                f"this kernel makes no memory of that kind for {name}: {exc.strerror}",
                needed=nbytes,
                free=0,
                largest_hole=0,
            ) from exc
        try:
            os.ftruncate(fd, nbytes)
            if numa_node is not None:
                _bind(fd, nbytes, numa_node)
            os.posix_fallocate(fd, 0, nbytes)
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
        except OSError as exc:
            os.close(fd)
            if exc.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EINVAL):
                raise
            kind, remedy = ("huge pages", "set more aside") if is_huge else ("shared memory", "free memory")
            raise OutOfMemoryError(
                f"the host cannot reserve {nbytes} bytes of {kind} for {name}: "
                f"{exc.strerror}; ask for a smaller pool, or {remedy}",
                needed=nbytes,
                free=0,
                largest_hole=0,
            ) from exc
        segment = cls(fd, nbytes, is_writable=True)
        if is_prefaulted:
            populate(segment.memory, for_writing=True)
        return segment

    @classmethod
    def attach(cls, fd: int, nbytes: int, *, is_writable: bool = False) -> Segment:
        """Map a descriptor that a peer sent; takes it over, also on failure.

        Raises:
            ProtocolError: it is not a sealed memfd of that length, so touching it could kill this process.
        """
        try:
            seals = fcntl.fcntl(fd, _F_GET_SEALS)
            length = os.fstat(fd).st_size
        except OSError as exc:
            os.close(fd)
            raise ProtocolError("a peer sent a descriptor that is not a memfd") from exc
        if seals & _SEALS != _SEALS or length != nbytes or nbytes <= 0:
            os.close(fd)
            raise ProtocolError(
                f"a peer sent memory of {length} bytes, seals {seals:#x}; announced were {nbytes} bytes"
            )
        segment = cls(fd, nbytes, is_writable=is_writable)
        segment._closer()  # the mapping is enough; hundreds of peers would use descriptors up
        segment.fd = -1
        return segment

    def open_read_only(self) -> int:
        """Return a new descriptor of the same memory that cannot be mapped for writing; the caller closes it.

        A process that is not dumpable (setuid, or hardened) may not open its own descriptors anew; it hands out a copy
        that could write, and relies on the peer to map it for reading, as kvlink does.
        """
        try:
            return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except (PermissionError, FileNotFoundError):
            return os.dup(self.fd)

    def root(self, offset: int, nbytes: int) -> Bytes:
        """Return a writable view that is its own base: as long as any view made from it lives, so does it.

        A weak reference to it therefore tells when the last view on these bytes has died.
        """
        return np.frombuffer(memoryview(self._mapping)[offset : offset + nbytes], dtype=np.uint8)

    def close(self) -> None:
        """Give up our descriptor and our references; the mapping itself ends with the last view. Idempotent."""
        self.retire()()

    def retire(self) -> Callable[[], None]:
        """Close, but leave the unmapping, which takes up to 0.3 s per GiB, to the call that is returned. Idempotent.

        That may be made in any thread, and holds neither the GIL nor, for long, the process's other mappings.
        """
        if not self._is_open:
            return _nothing
        self._is_open = False
        self._closer()
        self.fd = -1
        held = [self._mapping, self.memory]
        del self.memory, self._mapping
        return partial(_let_go, held)


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
        grain, stride = _grain_of(tensor_nbytes), stride_of(tensor_nbytes)
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
    def largest_hole_nbytes(self) -> int:
        """Bytes of the largest free run."""
        return self._allocator.largest_hole_nbytes

    @property
    def used_nbytes(self) -> int:
        """Bytes that caches hold."""
        return self._allocator.used_nbytes

    def __repr__(self) -> str:
        return f"<Pool region={self.region} nbytes={self.nbytes} free={self.free_nbytes}>"


def _grain_of(tensor_nbytes: int) -> int:
    return _PAGE if tensor_nbytes >= _LARGE_NBYTES else _ALIGNMENT


def stride_of(tensor_nbytes: int) -> int:
    """Return how far apart tensors of this size lie in a pool."""
    grain = _grain_of(tensor_nbytes)
    return -(-tensor_nbytes // grain) * grain


def populate(memory: Bytes, *, for_writing: bool) -> None:
    """Enter all pages of `memory` into this process's page table, in one system call and without the GIL.

    One fault at a time, as a copy would take them, costs 1 to 3 s per GiB on a virtual machine; this takes 0.1 s for
    reading and 0.25 s for writing. Kernels before 5.14 refuse, and then the copy pays.
    """
    advice = _MADV_POPULATE_WRITE if for_writing else _MADV_POPULATE_READ
    _LIBC.madvise(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(len(memory)), advice)


def _let_go(held: list[Any]) -> None:
    """Drop a mapping that is in `held`, and the array on it.

    What nobody views is emptied first, in steps: unmapping it at once would hold up everybody who maps or allocates.
    What somebody views stays in the page table: to enter it anew would cost 1 to 3 s per GiB.
    """
    mapping, memory = held
    held.clear()
    address, nbytes = memory.ctypes.data, len(memory)
    del memory
    if sys.getrefcount(mapping) == _NUM_OWN_REFERENCES:
        for start in range(0, nbytes, _STEP_NBYTES):
            _depopulate(address + start, min(_STEP_NBYTES, nbytes - start))


def _nothing() -> None:
    """What is left to do for a segment that is closed already."""


def depopulate(memory: Bytes) -> None:
    """Take all pages of a *shared* mapping out of this process's page table, without the GIL; its bytes stay.

    Whoever touches them again enters them again. On private memory this would lose the bytes.
    """
    _depopulate(memory.ctypes.data, len(memory))


def _depopulate(address: int, nbytes: int) -> None:
    _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_DONTNEED)


def _bind(fd: int, nbytes: int, node: int) -> None:
    """Make the pages of a memfd come from one NUMA node; a shared mapping's policy belongs to the file itself."""
    number = {"x86_64": 237, "aarch64": 235}.get(platform.machine())  # SYS_mbind
    if number is None:
        raise OSError(errno.EINVAL, f"no NUMA binding on {platform.machine()}")
    with mmap.mmap(fd, nbytes) as mapping:
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        mask = (ctypes.c_ulong * 16)()
        mask[node // 64] = 1 << node % 64
        if _LIBC.syscall(
            ctypes.c_long(number),
            ctypes.c_void_p(address),
            ctypes.c_ulong(nbytes),
            ctypes.c_int(_MPOL_BIND),
            mask,
            ctypes.c_ulong(1024),
            ctypes.c_uint(0),
        ):
            raise OSError(errno.EINVAL, f"no NUMA node {node}: {os.strerror(ctypes.get_errno())}")


_MPOL_BIND = 2  # <linux/mempolicy.h>
_LIBC = ctypes.CDLL(None, use_errno=True)
_MADV_DONTNEED = 4
_MADV_POPULATE_READ = 22  # <asm-generic/mman-common.h>
_MADV_POPULATE_WRITE = 23


def as_tensors(
    root: Bytes, stride: int, num_tensors: int, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> tuple[NDArray[Any], ...]:
    """Return `num_tensors` views of `shape` and `dtype` on `root`, `stride` bytes apart."""
    return tuple(np.ndarray(shape, dtype, buffer=root, offset=index * stride) for index in range(num_tensors))
