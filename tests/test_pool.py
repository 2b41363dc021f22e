"""Segments and pools: memory that can be shared without either side being able to hurt the other."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import resource
import socket
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlink.errors import KVLinkError, OutOfMemoryError, ProtocolError, StatusCode
from kvlink.memory.pool import Pool, Segment, as_tensors, populate

PAGE: Final = mmap.PAGESIZE
NAME: Final = "kvlink-test"
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@contextmanager
def a_segment(nbytes: int = 2 * PAGE) -> Iterator[Segment]:
    segment = Segment.create(NAME, nbytes)
    try:
        yield segment
    finally:
        segment.close()


def a_memfd(nbytes: int, seals: int) -> int:
    """Make a memfd by hand, as a peer might that has its own ideas."""
    fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def num_mappings() -> int:
    """How many mappings of memory of ours this process has."""
    return Path("/proc/self/maps").read_text().count(f"/memfd:{NAME}")


# ---- making a segment


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE])
def test_a_segment_is_whole_pages_of_zeros(nbytes: int) -> None:
    """Its length is rounded up to pages, its memory is all of it, zero and writable."""
    with a_segment(nbytes) as segment:
        assert segment.nbytes == -(-nbytes // PAGE) * PAGE == len(segment.memory)
        assert os.fstat(segment.fd).st_size == segment.nbytes
        assert segment.memory.dtype == np.uint8
        assert not segment.memory.any()
        segment.memory[:] = 7
        assert segment.memory.ctypes.data % PAGE == 0


def test_a_segment_is_sealed() -> None:
    """Nobody who has the descriptor can change its length: not the owner, not through a descriptor of a peer."""
    with a_segment() as segment:
        assert fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS) & SEALS == SEALS
        for length in (0, PAGE, 3 * PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(segment.fd, length)
        assert os.fstat(segment.fd).st_size == 2 * PAGE


@pytest.mark.parametrize("is_prefaulted", [True, False])
def test_a_segment_is_reserved(is_prefaulted: bool) -> None:
    """Its pages exist before anything is written to them, so that a full host is an error now and no signal later."""
    segment = Segment.create(NAME, 64 * PAGE, is_prefaulted=is_prefaulted)
    try:
        assert os.fstat(segment.fd).st_blocks * 512 >= segment.nbytes
    finally:
        segment.close()


def test_a_segment_has_no_name_and_is_not_inherited() -> None:
    """There is nothing under /dev/shm to be left behind, and programs that are started do not get the descriptor."""
    with a_segment() as segment:
        assert not os.get_inheritable(segment.fd)
        assert os.fstat(segment.fd).st_nlink == 0
        read_only = segment.open_read_only()
        assert not os.get_inheritable(read_only)
        os.close(read_only)


def test_a_host_without_room_is_an_error() -> None:
    """Where the kernel refuses so much memory, `create` raises `OutOfMemoryError` with the bytes, and keeps nothing."""
    before = open_fds()
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 * PAGE, old[1]))
    try:
        with pytest.raises(OutOfMemoryError, match=f"cannot reserve {17 * PAGE} bytes of shared memory") as caught:
            Segment.create(NAME, 16 * PAGE + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert caught.value.status is StatusCode.LLM_DEVICE_OUT_OF_MEMORY
    assert caught.value.needed == 17 * PAGE
    assert isinstance(caught.value.__cause__, OSError)
    assert open_fds() == before
    assert num_mappings() == 0


def test_more_than_the_host_has_is_refused_before_any_of_it_is_taken() -> None:
    """A pool that cannot fit is refused with what could be had; reserving it would make the kernel kill somebody."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 * PAGE, old[1]))  # so that nobody is, should the test fail
    try:
        with pytest.raises(OutOfMemoryError, match=r"^the host can give \d+ bytes of memory now; ") as caught:
            Segment.create(NAME, 2**60)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert caught.value.needed == 2**60
    assert 0 < caught.value.free == caught.value.largest_hole < 2**50


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM, errno.EFBIG])
@pytest.mark.parametrize("step", ["ftruncate", "posix_fallocate"])
def test_every_way_of_having_no_room_is_out_of_memory(step: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever step finds out, and by whichever errno, it is `OutOfMemoryError`, and the descriptor is closed."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    before = open_fds()
    monkeypatch.setattr(os, step, refuse)
    with pytest.raises(OutOfMemoryError, match=os.strerror(number)):
        Segment.create(NAME, PAGE)
    assert open_fds() == before


def test_other_failures_are_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """An errno that has nothing to do with room keeps its own exception; the descriptor is closed all the same."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = open_fds()
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)) as caught:
        Segment.create(NAME, PAGE)
    assert not isinstance(caught.value, KVLinkError)
    assert open_fds() == before


def test_huge_pages_that_are_not_there_are_out_of_memory() -> None:
    """A segment of huge pages is whole 2 MiB pages, or the error says that the host has none to give."""
    before = open_fds()
    error: OutOfMemoryError | None = None
    try:
        segment = Segment.create(NAME, PAGE, is_huge=True)
        nbytes = segment.nbytes
        segment.close()
    except OutOfMemoryError as exc:
        nbytes, error = exc.needed, exc
    assert nbytes == 2 * 2**20
    assert error is None or "memory of that kind" in str(error) or "huge pages" in str(error)
    assert open_fds() == before


def test_a_numa_node_that_is_not_there_is_an_error() -> None:
    """Memory of a node that the host has not is refused, and nothing is kept."""
    before = open_fds()
    with pytest.raises(OutOfMemoryError, match="1023"):
        Segment.create(NAME, PAGE, numa_node=1023)
    assert open_fds() == before
    assert num_mappings() == 0


# ---- attaching


def test_an_attached_segment_is_the_same_memory() -> None:
    """What the owner writes is seen at once, and a writable attachment writes back."""
    with a_segment() as owner:
        reader = Segment.attach(owner.open_read_only(), owner.nbytes)
        writer = Segment.attach(os.dup(owner.fd), owner.nbytes, is_writable=True)
        owner.memory[5] = 55
        assert reader.memory[5] == writer.memory[5] == 55
        writer.memory[PAGE] = 66
        assert owner.memory[PAGE] == reader.memory[PAGE] == 66
        reader.close()
        writer.close()
        assert owner.memory[5] == 55


def test_a_reader_cannot_write() -> None:
    """Memory attached for reading is read-only in numpy, and cannot be made writable."""
    with a_segment() as owner:
        reader = Segment.attach(owner.open_read_only(), owner.nbytes)
        with pytest.raises(ValueError, match="read-only"):
            reader.memory[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            reader.memory.flags.writeable = True
        with pytest.raises(ValueError, match="WRITEABLE"):
            reader.root(0, PAGE).flags.writeable = True
        reader.close()


def test_a_read_only_descriptor_cannot_be_mapped_for_writing() -> None:
    """The kernel itself refuses: neither `mmap`, nor `write`, nor making it writable again gets around it."""
    with a_segment() as owner:
        fd = owner.open_read_only()
        with pytest.raises(PermissionError):
            mmap.mmap(fd, owner.nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            os.write(fd, b"x")
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_RDWR)
        with pytest.raises(PermissionError):
            mmap.mmap(fd, owner.nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(fd)


def test_a_descriptor_that_only_claims_to_be_writable_is_a_protocol_error() -> None:
    """A peer that announces a writable descriptor and sends a read-only one breaks the protocol: no lack of memory."""
    with a_segment() as owner:
        fd = owner.open_read_only()
        with pytest.raises(ProtocolError):
            Segment.attach(fd, owner.nbytes, is_writable=True)
        assert not is_open(fd)


@pytest.mark.parametrize(
    ("nbytes", "seals", "announced"),
    [
        (PAGE, 0, PAGE),
        (PAGE, fcntl.F_SEAL_SHRINK, PAGE),
        (PAGE, fcntl.F_SEAL_GROW, PAGE),
        (PAGE, fcntl.F_SEAL_WRITE, PAGE),
        (PAGE, SEALS, 2 * PAGE),
        (2 * PAGE, SEALS, PAGE),
        (PAGE, SEALS, PAGE - 1),
        (PAGE, SEALS, 0),
        (PAGE, SEALS, -PAGE),
        (0, SEALS, 0),
    ],
)
def test_a_memfd_that_could_kill_us_is_refused(nbytes: int, seals: int, announced: int) -> None:
    """Without both seals, or of another length than announced, it is refused with the numbers, and closed."""
    fd = a_memfd(nbytes, seals)
    with pytest.raises(ProtocolError) as caught:
        Segment.attach(fd, announced)
    assert f"{nbytes} bytes, seals {seals:#x}" in str(caught.value)
    assert f"announced were {announced} bytes" in str(caught.value)
    assert not is_open(fd)
    assert num_mappings() == 0


def test_more_seals_than_needed_are_no_harm() -> None:
    """A peer may seal its memory further."""
    reader = Segment.attach(a_memfd(PAGE, SEALS | fcntl.F_SEAL_SEAL), PAGE)
    assert not reader.memory.any()
    reader.close()


OTHER_DESCRIPTORS: Final[dict[str, Callable[[Path], int]]] = {
    "file": lambda folder: os.open(folder / "file", os.O_RDWR | os.O_CREAT),
    "folder": lambda folder: os.open(folder, os.O_RDONLY),
    "device": lambda _: os.open("/dev/zero", os.O_RDWR),
    "pipe": lambda _: _first_of_pipe(),
    "socket": lambda _: socket.socket(socket.AF_UNIX).detach(),
}


def _first_of_pipe() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


@pytest.mark.parametrize("kind", OTHER_DESCRIPTORS)
def test_what_is_no_memfd_is_refused(kind: str, tmp_path: Path) -> None:
    """A file, a folder, a device, a pipe and a socket are each a protocol error, and closed."""
    fd = OTHER_DESCRIPTORS[kind](tmp_path)
    with pytest.raises(ProtocolError):
        Segment.attach(fd, PAGE)
    assert not is_open(fd)


def test_memory_that_cannot_be_mapped_is_refused() -> None:
    """More than the address space holds, which a peer can announce without having it, is an error; it is closed."""
    fd = a_memfd(2**60, SEALS)
    with pytest.raises(KVLinkError, match=f"cannot map {2**60} bytes"):
        Segment.attach(fd, 2**60)
    assert not is_open(fd)


# ---- the end of a segment


def test_views_outlive_the_segment() -> None:
    """After `close` a view can still be read and written, by owner and peer; with the last view the mapping goes."""
    owner = Segment.create(NAME, 2 * PAGE)
    reader = Segment.attach(owner.open_read_only(), owner.nbytes)
    whole, part, seen = owner.memory, owner.root(512, 1024).view(np.float32)[1::2], reader.memory[512:1536]
    owner.close()
    reader.close()
    part[:] = 1.5
    whole[0] = 9
    assert seen.view(np.float32)[1::2].tolist() == [1.5] * 128
    assert num_mappings() == 2
    del seen
    assert num_mappings() == 1
    del whole
    assert num_mappings() == 1
    assert part.sum() == 1.5 * 128
    del part
    assert num_mappings() == 0


def test_closing_in_any_order_and_twice() -> None:
    """`close` gives back the descriptor, again does nothing, and the peer's memory is not hurt by the owner's end."""
    owner = Segment.create(NAME, PAGE)
    reader = Segment.attach(owner.open_read_only(), owner.nbytes)
    owner.memory[0] = 3
    fds = [owner.fd, reader.fd]
    for _ in range(2):
        owner.close()
    assert reader.memory[0] == 3
    for _ in range(2):
        reader.close()
    assert not any(map(is_open, fds))
    assert num_mappings() == 0


@pytest.mark.parametrize("is_viewed", [False, True])
def test_unmapping_is_left_to_the_call_that_is_returned(is_viewed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`retire` takes no time; the call takes the pages out and unmaps, but leaves alone what somebody views."""
    emptied: list[int] = []
    monkeypatch.setattr("kvlink.memory.pool._depopulate", lambda address, nbytes: emptied.append(nbytes))
    segment = Segment.create(NAME, 3 * 8 * 1024 * 1024 // 2)
    view = segment.root(0, PAGE)[4:] if is_viewed else None
    unmap, again = segment.retire(), segment.retire()
    assert num_mappings() == 1
    assert not emptied
    again()
    unmap()
    assert emptied == ([] if is_viewed else [8 * 1024 * 1024, 4 * 1024 * 1024])
    assert num_mappings() == is_viewed
    del view
    assert num_mappings() == 0


def test_closing_twice_closes_nobody_elses_descriptor() -> None:
    """The number of a closed descriptor may belong to somebody else by then."""
    segment = Segment.create(NAME, PAGE)
    number = segment.fd
    segment.close()
    other = os.open(os.devnull, os.O_RDONLY)
    os.dup2(other, number)
    segment.close()
    assert is_open(number)
    if number != other:
        os.close(number)
    os.close(other)


# ---- roots


def test_a_root_lives_as_long_as_any_view_made_from_it() -> None:
    """A weak reference to it dies with the last view of any kind on these bytes, at once, and with no other view."""
    with a_segment() as segment:
        root = segment.root(512, 1024)
        other = segment.root(512, 1024)
        views = [
            root[5:],
            root.view(np.int32).reshape(2, 128)[:, ::3],
            as_tensors(root, 512, 2, (4, 16), np.dtype("float64"))[1],
            np.lib.stride_tricks.as_strided(root, (3, 4), (8, 1)),
            root.data,
        ]
        alive = weakref.ref(root)
        del root
        gc.disable()
        try:
            while views:
                assert alive() is not None
                views.pop()
            assert alive() is None
        finally:
            gc.enable()
        assert other.base is not None


def test_a_root_is_those_bytes() -> None:
    """It has the asked range of the segment, writable."""
    with a_segment() as segment:
        root = segment.root(512, 100)
        root[:] = np.arange(100)
        assert len(root) == 100
        assert segment.memory[512:612].tolist() == list(range(100))
        assert not segment.memory[:512].any()
        assert not segment.memory[612:].any()


# ---- pools


@contextmanager
def a_pool(nbytes: int) -> Iterator[Pool]:
    with a_segment(nbytes) as segment:
        yield Pool(segment, 3)


SIZES = st.integers(1, 5000) | st.sampled_from([512, 513, 65535, 65536, 65537, 70000, 131072])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SIZES, st.integers(1, 6), st.booleans()), max_size=12))
def test_tensors_lie_at_one_constant_stride(wishes: list[tuple[int, int, bool]]) -> None:
    """Room for equal tensors is one run: aligned, at one stride, as tight as alignment permits, inside, and nobody's.

    Tensors are aligned to 512 bytes, those of 64 KiB and more to pages: offsets, strides, and addresses.
    """
    with a_pool(1024 * 1024) as pool:
        taken: dict[int, int] = {}
        for tensor_nbytes, num_tensors, is_freed in wishes:
            grain = PAGE if tensor_nbytes >= 64 * 1024 else 512
            try:
                offset, stride = pool.allocate(tensor_nbytes, num_tensors)
            except OutOfMemoryError:
                continue
            assert offset % grain == stride % grain == 0
            assert (pool.segment.memory.ctypes.data + offset) % grain == 0
            assert tensor_nbytes <= stride < tensor_nbytes + grain
            end = offset + stride * num_tensors
            assert offset >= 0
            assert end <= pool.nbytes
            assert all(end <= start or offset >= stop for start, stop in taken.items())
            if is_freed:
                pool.free(offset)
            else:
                taken[offset] = end
            assert pool.used_nbytes == sum(stop - start for start, stop in taken.items())
            assert pool.free_nbytes == pool.nbytes - pool.used_nbytes >= pool.largest_hole_nbytes
        for offset in taken:
            pool.free(offset)
        assert pool.free_nbytes == pool.nbytes == 1024 * 1024


def test_a_full_pool_says_how_full() -> None:
    """The error has what was needed, what is free and the largest hole, in text and attributes; nothing changes."""
    with a_pool(8 * PAGE) as pool:
        offsets = [pool.allocate(PAGE, 2)[0] for _ in range(4)]
        pool.free(offsets[0])
        pool.free(offsets[2])
        for _ in range(2):
            with pytest.raises(OutOfMemoryError) as caught:
                pool.allocate(PAGE, 3)
            error = caught.value
            assert (error.needed, error.free, error.largest_hole) == (3 * PAGE, 4 * PAGE, 2 * PAGE)
            for number in (pool.nbytes, error.needed, error.free, error.largest_hole):
                assert str(number) in str(error)
            assert error.status is StatusCode.LLM_DEVICE_OUT_OF_MEMORY
            assert pool.used_nbytes == 4 * PAGE
            assert pool.largest_hole_nbytes == 2 * PAGE
        assert sorted(pool.allocate(PAGE, 2)[0] for _ in range(2)) == sorted([offsets[0], offsets[2]])


def test_what_can_never_fit_is_refused() -> None:
    """More than the whole pool, by however much, is out of memory like any other."""
    with a_pool(4 * PAGE) as pool:
        for tensor_nbytes, num_tensors in ((4 * PAGE + 1, 1), (1, 33), (2**62, 2**31)):
            with pytest.raises(OutOfMemoryError):
                pool.allocate(tensor_nbytes, num_tensors)
        assert pool.free_nbytes == pool.nbytes


def test_freeing_what_is_not_allocated_is_a_bug() -> None:
    """A second free, and one of an offset inside an allocation, raise and change nothing."""
    with a_pool(4 * PAGE) as pool:
        offset, stride = pool.allocate(PAGE, 2)
        with pytest.raises(ValueError, match="no allocation starts"):
            pool.free(offset + stride)
        pool.free(offset)
        with pytest.raises(ValueError, match="no allocation starts"):
            pool.free(offset)
        assert pool.free_nbytes == pool.nbytes


def test_a_pool_shows_itself() -> None:
    """Its repr has region, size and room."""
    with a_pool(4 * PAGE) as pool:
        pool.allocate(PAGE, 1)
        assert repr(pool) == f"<Pool region=3 nbytes={4 * PAGE} free={3 * PAGE}>"


# ---- views on tensors


@pytest.mark.parametrize(
    ("shape", "dtype"), [((4, 2, 8), "float32"), ((4,), "uint8"), ((16, 16), "float16"), ((1, 1, 1, 5), "int64")]
)
def test_tensors_are_views_at_their_places(shape: tuple[int, ...], dtype: str) -> None:
    """Tensor k has its shape and dtype, begins k strides into the root, and writing it writes those bytes alone."""
    kind: np.dtype[Any] = np.dtype(dtype)
    with a_segment() as segment:
        root = segment.root(512, 3 * 1024)
        tensors = as_tensors(root, 1024, 3, shape, kind)
        assert len(tensors) == 3
        nbytes = kind.itemsize * int(np.prod(shape))
        for index, tensor in enumerate(tensors):
            assert tensor.shape == shape
            assert tensor.dtype == kind
            assert tensor.flags.c_contiguous
            assert tensor.flags.writeable
            assert tensor.ctypes.data == root.ctypes.data + index * 1024
            tensor[...] = index + 1
        for index in range(3):
            written = segment.memory[512 + index * 1024 :][:nbytes].view(kind)
            assert (written == index + 1).all()
            segment.memory[512 + index * 1024 :][:nbytes] = 0
        assert not segment.memory.any()


def test_tensors_do_not_reach_beyond_their_root() -> None:
    """More tensors than the root has room for is an error of numpy's, no view."""
    with a_segment() as segment, pytest.raises((TypeError, ValueError)):
        as_tensors(segment.root(0, 1024), 512, 3, (512,), np.dtype("uint8"))


@pytest.mark.parametrize("for_writing", [True, False])
def test_populating_changes_nothing(for_writing: bool) -> None:
    """Entering pages into the page table leaves every byte as it was, also where it is done twice or to a part."""
    with a_segment(4 * PAGE) as segment:
        segment.memory[:] = np.arange(4 * PAGE) % 251
        for memory in (segment.memory, segment.memory, segment.memory[PAGE : 2 * PAGE], segment.memory[:0]):
            populate(memory, for_writing=for_writing)
        assert (segment.memory == np.arange(4 * PAGE) % 251).all()
        reader = Segment.attach(segment.open_read_only(), segment.nbytes)
        populate(reader.memory, for_writing=False)
        assert (reader.memory == segment.memory).all()
        reader.close()
