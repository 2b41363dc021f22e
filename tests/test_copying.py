"""The copier: the right bytes, on every loop; quiet when a call has ended; fair; gone when closed.

No test waits for time to pass. Where threads must be in the middle of something, their calls stop at gates.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import subprocess
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.abc
import anyio.to_thread
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvlink.errors import ClosedError, TransportError
from kvlink.memory import copying
from kvlink.memory.copying import Copier, streaming_nbytes
from kvlink.memory.pool import Bytes, Segment
from kvlink.memory.strided import Copy, copy_now, copy_rows, cut

BACKENDS: Final = ("asyncio", "uvloop", "trio")
on_every_loop = pytest.mark.parametrize("backend", BACKENDS)
LONG_S: Final = 20.0
"""Longer than any step here takes; a test that waits so long has failed."""


def run_on(backend: str, test: Callable[[], Awaitable[None]]) -> None:
    """Run `test` on a loop of its own, for at most a minute."""

    async def bounded() -> None:
        with anyio.fail_after(3 * LONG_S):
            await test()

    if backend == "trio":
        anyio.run(bounded, backend="trio")
    else:
        anyio.run(bounded, backend="asyncio", backend_options={"use_uvloop": backend == "uvloop"})


@contextmanager
def a_copier(*, num_threads: int = 2, inline_nbytes: int = 0, chunk_nbytes: int = 4096) -> Iterator[Copier]:
    copier = Copier(num_threads=num_threads, inline_nbytes=inline_nbytes, chunk_nbytes=chunk_nbytes)
    try:
        yield copier
    finally:
        copier.close()


def copy_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvlink-copy"]


class Gate:
    """A call that a copy thread makes and that stops until it is let through."""

    def __init__(self) -> None:
        self._has_begun = threading.Event()
        self._may_go_on = threading.Event()
        self.has_ended = False

    def __call__(self) -> None:
        self._has_begun.set()
        assert self._may_go_on.wait(LONG_S)
        self.has_ended = True

    async def wait_begun(self) -> None:
        assert await anyio.to_thread.run_sync(self._has_begun.wait, LONG_S)

    def open(self) -> None:
        self._may_go_on.set()


async def turns(number: int = 20) -> None:
    """Give every other task of the loop that many turns."""
    for _ in range(number):
        await anyio.lowlevel.checkpoint()


async def becomes_true(is_true: Callable[[], bool]) -> bool:
    """Whether `is_true` holds now or soon: a thread that has woken us may not have gone back to sleep yet."""
    with anyio.move_on_after(2.0):
        while not is_true():
            gc.collect()
            await anyio.sleep(0.001)
        return True
    return False


class Call:
    """An awaited call in a task of its own: whether it has ended, and how."""

    def __init__(self, tasks: anyio.abc.TaskGroup, function: Callable[[], Awaitable[None]]) -> None:
        self.scope = anyio.CancelScope()
        self.ended = anyio.Event()
        self.error: BaseException | None = None
        self._function = function
        tasks.start_soon(self._run)

    @property
    def has_ended(self) -> bool:
        return self.ended.is_set()

    async def _run(self) -> None:
        try:
            with self.scope:
                await self._function()
        except Exception as exc:
            self.error = exc
        finally:
            self.ended.set()


def do_nothing() -> None:
    pass


def num_mappings() -> int:
    """How many mappings of the segments made here this process has."""
    return Path("/proc/self/maps").read_text().count("/memfd:kvlink-test")


# ---- copies against a byte-by-byte model


def bytes_of(copies: Sequence[Copy]) -> list[tuple[int, int]]:
    """``(target, source)`` of every byte that `copies` move, in order."""
    return [
        (copy.target_offset + row * copy.target_stride + byte, copy.source_offset + row * copy.source_stride + byte)
        for copy in copies
        for row in range(copy.num_rows)
        for byte in range(copy.nbytes)
    ]


@st.composite
def rows(draw: st.DrawFn, num_rows: int, nbytes: int) -> tuple[int, int, int]:
    """``(offset, stride, end)`` of rows that do not overlap, forwards or backwards."""
    stride = nbytes + draw(st.sampled_from([0, 1, 7]))
    start = draw(st.integers(0, 9))
    last = start + (num_rows - 1) * stride
    if draw(st.booleans()):
        return start, stride, last + nbytes
    return last, -stride, last + nbytes


@st.composite
def works(draw: st.DrawFn) -> list[Copy]:
    """A few copies between two memories; no target byte is written twice."""
    shapes = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 40)), min_size=1, max_size=6))
    used = 0
    placed: list[tuple[int, int, int, int, int, int]] = []
    source_nbytes = 1
    for num_rows, nbytes in shapes:
        target_offset, target_stride, target_end = draw(rows(num_rows, nbytes))
        source_offset, source_stride, source_end = draw(rows(num_rows, nbytes))
        placed.append((used + target_offset, target_stride, source_offset, source_stride, nbytes, num_rows))
        used += target_end
        source_nbytes = max(source_nbytes, source_end)
    target = np.zeros(used, np.uint8)
    source = (np.arange(source_nbytes) % 250 + 1).astype(np.uint8)
    return [
        Copy(target, target_offset, target_stride, source, source_offset, source_stride, nbytes, num_rows)
        for target_offset, target_stride, source_offset, source_stride, nbytes, num_rows in placed
    ]


def expected_of(copies: Sequence[Copy]) -> Bytes:
    """What the target holds after `copies`, which begin with zeros."""
    expected = np.zeros_like(copies[0].target)
    for target, source in bytes_of(copies):
        expected[target] = copies[0].source[source]
    return expected


@settings(deadline=None)
@given(works())
def test_copies_move_the_right_bytes(copies: list[Copy]) -> None:
    """Rows at any strides, backwards too, one row or many: exactly the bytes that a loop over bytes would move."""
    expected = expected_of(copies)
    copy_now(copies)
    assert (copies[0].target == expected).all()


@st.composite
def alike(draw: st.DrawFn) -> list[Copy]:
    """Copies of one shape at scattered places, as those of blocks are; some sources more than once."""
    num_rows, nbytes, num_blocks = draw(st.integers(1, 4)), draw(st.integers(1, 9)), draw(st.integers(2, 9))
    stride = num_blocks * nbytes
    numbers = draw(st.permutations(range(num_blocks)))[: draw(st.integers(2, num_blocks))]
    target = np.zeros(num_rows * stride, np.uint8)
    source = (np.arange(num_rows * stride) % 250 + 1).astype(np.uint8)
    sources = draw(st.lists(st.integers(0, num_blocks - 1), min_size=len(numbers), max_size=len(numbers)))
    return [
        Copy(target, to * nbytes, stride, source, origin * nbytes, stride, nbytes, num_rows)
        for to, origin in zip(numbers, sources, strict=True)
    ]


@settings(deadline=None)
@given(alike())
def test_copies_that_go_two_by_two_move_the_right_bytes(copies: list[Copy]) -> None:
    """Forwards and backwards, from the same place twice, with one left over: what a loop over bytes would move."""
    expected = expected_of(copies)
    copy_now(copies)
    assert (copies[0].target == expected).all()


@pytest.mark.parametrize("is_target", [False, True])
@pytest.mark.parametrize("offset", [-1, 91, 10**9])
@pytest.mark.parametrize("is_second", [False, True])
def test_one_of_two_outside_of_the_memory_is_refused(is_target: bool, offset: int, is_second: bool) -> None:
    """Whichever of the two it is; and neither has been copied."""
    good = Copy(np.zeros(100, np.uint8), 0, 50, np.ones(100, np.uint8), 20, 50, 10, 2)
    bad = good._replace(target_offset=offset) if is_target else good._replace(source_offset=offset)
    with pytest.raises(ValueError, match=r"strides|offset|buffer"):
        copy_now([good, bad] if is_second else [bad, good])
    assert not good.target.any()


@settings(max_examples=300, deadline=None)
@given(works(), st.integers(1, 300), st.integers(0, 300), st.lists(st.booleans()))
def test_cutting_covers_every_byte_once(
    copies: list[Copy], chunk_nbytes: int, stream_nbytes: int, answers: list[bool]
) -> None:
    """Whatever the size of the chunks, together they move each byte of the work exactly once, and no other."""
    is_alone = iter(answers)
    chunks = list(
        cut(copies, chunk_nbytes, stream_nbytes=stream_nbytes, is_alone=lambda: next(is_alone, bool(len(answers) % 2)))
    )
    assert sorted(bytes_of([copy for chunk in chunks for copy in chunk])) == sorted(bytes_of(copies))


@settings(max_examples=300, deadline=None)
@given(works(), st.integers(1, 300))
def test_chunks_are_full(copies: list[Copy], chunk_nbytes: int) -> None:
    """No chunk is empty or larger than asked for, and no small copy is left out of a chunk that had room for it."""
    chunks = list(cut(copies, chunk_nbytes))
    sizes = [sum(copy.nbytes * copy.num_rows for copy in chunk) for chunk in chunks]
    assert all(0 < size <= chunk_nbytes for size in sizes)
    whole = set(map(id, copies))
    for size, chunk, after in zip(sizes, chunks, chunks[1:], strict=False):
        if id(chunk[-1]) in whole and id(after[0]) in whole:
            assert size + after[0].nbytes * after[0].num_rows > chunk_nbytes


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 300))
def test_a_large_copy_has_the_fewest_chunks(nbytes: int, num_rows: int, chunk_nbytes: int) -> None:
    """One copy is cut into no more chunks than whole rows, or else parts of rows, of that size make necessary."""
    memory = np.zeros(4096, np.uint8)
    chunks = list(cut([Copy(memory, 0, 70, memory, 0, 60, nbytes, num_rows)], chunk_nbytes))
    if nbytes > chunk_nbytes:
        assert len(chunks) == num_rows * math.ceil(nbytes / chunk_nbytes)
    else:
        assert len(chunks) == math.ceil(num_rows / (chunk_nbytes // nbytes))


def test_small_copies_go_together_and_large_ones_are_cut() -> None:
    """Small copies share a chunk; tall ones are cut by rows; a row that is too long is cut by columns."""
    memory = np.zeros(100_000, np.uint8)

    def copy(nbytes: int, num_rows: int) -> Copy:
        return Copy(memory, 0, 1000, memory, 0, 2000, nbytes, num_rows)

    def shapes(copies: list[Copy], chunk_nbytes: int) -> list[list[tuple[int, int]]]:
        return [[(part.nbytes, part.num_rows) for part in chunk] for chunk in cut(copies, chunk_nbytes)]

    assert shapes([copy(10, 2), copy(30, 1), copy(60, 1)], 100) == [[(10, 2), (30, 1)], [(60, 1)]]
    assert shapes([copy(30, 8)], 100) == [[(30, 3)], [(30, 3)], [(30, 2)]]
    assert shapes([copy(250, 2)], 100) == [[(100, 1)], [(100, 1)], [(50, 1)]] * 2
    assert shapes([copy(10, 1), copy(250, 1), copy(10, 1)], 100) == [
        [(10, 1)],
        [(100, 1)],
        [(100, 1)],
        [(50, 1)],
        [(10, 1)],
    ]
    assert shapes([], 100) == []


def test_a_long_row_goes_in_long_pieces_while_nobody_waits() -> None:
    """A row is cut into pieces that pass by the processor's caches, as long as the rest has one and no job waits."""
    memory = np.zeros(2000, np.uint8)
    for answers, expected in (
        ([True] * 3, [300, 300, 300, 100]),
        ([True, False, True, True], [300, 100, 300, 300]),
        ([False] * 8, [100] * 10),
    ):
        is_alone = partial(next, iter(answers))
        pieces = cut([Copy(memory, 0, 0, memory, 1000, 0, 1000, 1)], 100, stream_nbytes=300, is_alone=is_alone)
        assert [part.nbytes for (part,) in pieces] == expected
    (small,) = cut([Copy(memory, 0, 0, memory, 1000, 0, 80, 1)], 100, stream_nbytes=50)
    assert len(small) == 1


def test_long_pieces_are_as_long_as_the_c_library_wants() -> None:
    """The length is three quarters of the last cache, as ``getconf`` knows it, and 0 where that is unknown or large."""
    try:
        said = subprocess.run(["getconf", "LEVEL3_CACHE_SIZE"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no getconf of glibc here")
    if not said.strip().isdigit() or int(said) == 0:
        pytest.skip("the size of the last cache is not known here")
    length = -(-(int(said) * 3 // 4) // 4096) * 4096
    assert streaming_nbytes() == (length if length <= 256 << 20 else 0)


async def test_long_pieces_are_for_a_job_that_is_alone() -> None:
    """While another job waits for its turn, a long row is cut small, so that the other waits for a small piece."""
    copier = Copier(num_threads=1, inline_nbytes=0, chunk_nbytes=100)
    copier._stream_nbytes = 300
    try:
        assert copier._is_alone()
        started, gate = threading.Event(), threading.Event()

        def block() -> None:
            started.set()
            gate.wait(LONG_S)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(copier.run_calls, iter([block]))
            assert await anyio.to_thread.run_sync(started.wait, LONG_S)
            assert not copier._is_alone()
            gate.set()
    finally:
        gate.set()
        copier.close()


MEMORY_NBYTES: Final = 64


@pytest.mark.parametrize(
    ("offset", "stride", "nbytes", "num_rows"),
    [
        (60, 0, 5, 1),
        (64, 0, 1, 1),
        (10**6, 0, 1, 1),
        (-8, 0, 4, 1),
        (-8, 0, 8, 1),
        (-1, 0, 65, 1),
        (0, 0, 65, 1),
        (0, 16, 17, 4),
        (0, 21, 8, 4),
        (48, -16, 16, 5),
        (-16, 16, 8, 2),
        (8, -16, 8, 2),
        (2**62, 1, 1, 2),
        (0, 2**62, 1, 3),
    ],
)
@pytest.mark.parametrize("side", ["target", "source"])
def test_rows_outside_of_the_memory_are_refused(
    side: str, offset: int, stride: int, nbytes: int, num_rows: int
) -> None:
    """A row that begins before or ends behind its memory is an error, and nothing outside of its place is written."""
    large = np.zeros(1024, np.uint8)
    outer = np.zeros(3 * MEMORY_NBYTES, np.uint8)
    small = outer[MEMORY_NBYTES : 2 * MEMORY_NBYTES]
    if side == "target":
        large[:] = 1
        copy = Copy(small, offset, stride, large, 0, 100, nbytes, num_rows)
    else:
        outer[:] = 1
        copy = Copy(large, 0, 100, small, offset, stride, nbytes, num_rows)
    for call in (partial(copy_now, [copy]), partial(copy_rows, *copy)):
        with pytest.raises(ValueError):  # noqa: PT011  # whose words are numpy's
            call()
    assert not copy.target.any()
    if side == "target":
        assert not outer.any()


@pytest.mark.parametrize(
    ("offset", "stride", "nbytes", "num_rows"),
    [(0, 0, 64, 1), (60, 0, 4, 1), (0, 16, 16, 4), (48, -16, 16, 4), (64, 0, 0, 1)],
)
def test_rows_up_to_the_ends_of_the_memory_are_copied(offset: int, stride: int, nbytes: int, num_rows: int) -> None:
    """The first and the last byte belong to the memory."""
    source = np.arange(1, MEMORY_NBYTES + 1).astype(np.uint8)
    target = np.zeros(1024, np.uint8)
    copy = Copy(target, 0, 100, source, offset, stride, nbytes, num_rows)
    expected = expected_of([copy])
    copy_now([copy])
    assert (target == expected).all()


# ---- on every loop


@on_every_loop
@pytest.mark.parametrize("inline_nbytes", [0, 10**9], ids=["threads", "inline"])
def test_a_run_moves_the_right_bytes(backend: str, inline_nbytes: int) -> None:
    """Inline or in threads, in chunks of any size, a run that has returned has put every byte in its place."""
    with a_copier(num_threads=3, inline_nbytes=inline_nbytes) as copier:

        @settings(max_examples=25, deadline=None)
        @given(works(), st.integers(1, 300))
        def check(copies: list[Copy], chunk_nbytes: int) -> None:
            copier.chunk_nbytes = chunk_nbytes
            expected = expected_of(copies)

            async def test() -> None:
                await copier.run(copies, len(bytes_of(copies)))
                assert (copies[0].target == expected).all()

            run_on(backend, test)

        check()
        assert len(copy_threads()) == (0 if inline_nbytes else 3)


def test_small_work_is_done_before_anything_waits() -> None:
    """Work up to the limit is copied by the caller itself: in place at the first step, without a loop or a thread."""
    source, target = np.ones(4096, np.uint8), np.zeros(4096, np.uint8)
    with a_copier(inline_nbytes=4096) as copier:
        steps = copier.run([Copy(target, 0, 0, source, 0, 0, 4096, 1)], 4096)
        with pytest.raises(StopIteration):
            steps.send(None)
        assert target.all()
        assert copy_threads() == []


@on_every_loop
def test_runs_at_the_same_time_do_not_disturb_each_other(backend: str) -> None:
    """Many runs of all sizes at once all end, each with its own bytes."""

    async def test() -> None:
        with a_copier(num_threads=3, inline_nbytes=1000, chunk_nbytes=4096) as copier:
            targets: list[Bytes] = []

            async def one(index: int) -> None:
                nbytes = 1 + index * 1777
                source = np.full(nbytes, index % 255 + 1, np.uint8)
                target = np.zeros(nbytes + 2, np.uint8)
                targets.append(target)
                await copier.run([Copy(target, 1, 0, source, 0, 0, nbytes, 1)], nbytes)
                assert (target[1:-1] == index % 255 + 1).all()

            async with anyio.create_task_group() as tasks:
                for index in range(40):
                    tasks.start_soon(one, index)
            assert all(target[0] == target[-1] == 0 for target in targets)

    run_on(backend, test)


@on_every_loop
def test_an_error_in_a_thread_is_the_callers(backend: str) -> None:
    """A row outside of its memory raises in the run that asked for it; other runs and the threads go on."""

    async def test() -> None:
        with a_copier() as copier:
            memory = np.zeros(10_000, np.uint8)
            for _ in range(5):
                with pytest.raises(ValueError, match="outside its memory"):
                    await copier.run([Copy(memory, 5000, 0, memory, 0, 0, 6000, 1)], 6000)
            source = np.ones(10_000, np.uint8)
            await copier.run([Copy(memory, 0, 0, source, 0, 0, 10_000, 1)], 10_000)
            assert memory.all()
            assert len(copy_threads()) == 2

    run_on(backend, test)


@on_every_loop
def test_an_error_ends_the_job_and_waits_for_its_other_calls(backend: str) -> None:
    """After one call of a job has failed no further one begins, and the error comes when the last one has ended."""

    async def test() -> None:
        with a_copier(num_threads=2) as copier:
            gate = Gate()
            later: list[int] = []

            def fail() -> None:
                raise RuntimeError("this call fails")

            def chunks() -> Iterator[Callable[[], None]]:
                yield gate
                yield fail
                for index in range(100):
                    yield partial(later.append, index)

            async with anyio.create_task_group() as tasks:
                call = Call(tasks, partial(copier.run_calls, chunks()))
                await gate.wait_begun()
                other = Call(tasks, partial(copier.run_calls, iter([do_nothing])))
                await other.ended.wait()  # the other thread took `fail` first, which was in the queue before
                await turns()
                assert not call.has_ended
                gate.open()
                await call.ended.wait()
            assert gate.has_ended
            assert isinstance(call.error, RuntimeError)
            assert later == []

    run_on(backend, test)


@on_every_loop
def test_an_error_in_cutting_the_work_is_the_callers(backend: str) -> None:
    """Where the next call cannot even be made, the run raises that, and the threads go on."""

    async def test() -> None:
        with a_copier(num_threads=1) as copier:

            def chunks() -> Iterator[Callable[[], None]]:
                yield do_nothing
                raise KeyError("no such piece")

            with pytest.raises(KeyError, match="no such piece"), anyio.fail_after(LONG_S):
                await copier.run_calls(chunks())
            await copier.run_calls(iter([do_nothing]))

    run_on(backend, test)


@on_every_loop
def test_work_without_chunks_ends(backend: str) -> None:
    """A job of no calls is done at once."""

    async def test() -> None:
        with a_copier() as copier, anyio.fail_after(LONG_S):
            await copier.run_calls(iter(()))
            await copier.run([], 1)

    run_on(backend, test)


# ---- quiet


@on_every_loop
def test_a_cancelled_run_waits_for_the_threads(backend: str) -> None:
    """Cancelled, it returns only when no call of it is in a thread's hands; and no further one is begun."""

    async def test() -> None:
        with a_copier(num_threads=2) as copier:
            gates = [Gate(), Gate()]
            later: list[int] = []

            def chunks() -> Iterator[Callable[[], None]]:
                yield from gates
                for index in range(1000):
                    yield partial(later.append, index)

            async with anyio.create_task_group() as tasks:
                call = Call(tasks, partial(copier.run_calls, chunks()))
                for gate in gates:
                    await gate.wait_begun()
                call.scope.cancel()
                for gate in gates:
                    await turns()
                    assert not call.has_ended
                    gate.open()
                await call.ended.wait()
                assert all(gate.has_ended for gate in gates)
                assert later == []
            assert call.scope.cancelled_caught

    run_on(backend, test)


@on_every_loop
def test_a_cancelled_run_that_nobody_took_up_ends_at_once(backend: str) -> None:
    """Behind the calls of others that take long, a cancelled run does not wait for its turn."""

    async def test() -> None:
        with a_copier(num_threads=1) as copier:
            gate = Gate()
            begun: list[int] = []
            async with anyio.create_task_group() as tasks:
                blocker = Call(tasks, partial(copier.run_calls, iter([gate])))
                await gate.wait_begun()
                call = Call(tasks, partial(copier.run_calls, iter([partial(begun.append, 1)])))
                await turns()
                call.scope.cancel()
                await call.ended.wait()
                assert not blocker.has_ended
                gate.open()
                await blocker.ended.wait()
                await copier.run_calls(iter([do_nothing]))
            assert begun == []

    run_on(backend, test)


@on_every_loop
def test_after_a_cancelled_copy_nothing_is_written(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that is cancelled in the middle stops within a chunk per thread, and its target then stays as it is."""
    num_threads, chunk = 2, 4096
    gates = [Gate() for _ in range(num_threads)]
    order = iter(gates)
    num_begun = 0
    lock = threading.Lock()

    def copy_and_stop(copies: Sequence[Copy]) -> None:
        nonlocal num_begun
        with lock:
            num_begun += 1
            gate = next(order, None)
        if gate is not None:
            gate()
        copy_now(copies)

    monkeypatch.setattr(copying, "copy_now", copy_and_stop)

    async def test() -> None:
        with a_copier(num_threads=num_threads, chunk_nbytes=chunk) as copier:
            nbytes = 256 * chunk
            source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
            async with anyio.create_task_group() as tasks:
                call = Call(tasks, partial(copier.run, [Copy(target, 0, 0, source, 0, 0, nbytes, 1)], nbytes))
                for gate in gates:
                    await gate.wait_begun()
                call.scope.cancel()
                await turns()
                assert not call.has_ended
                for gate in gates:
                    gate.open()
                await call.ended.wait()
                # From here on the memory is the caller's again.
                assert np.count_nonzero(target) == num_threads * chunk
                target[:] = 7
                await copier.run_calls(iter([do_nothing] * 20))
            assert (target == 7).all()
            assert num_begun == num_threads

    run_on(backend, test)


@on_every_loop
def test_a_deadline_is_a_cancellation(backend: str) -> None:
    """A run under a deadline that has passed ends by it, quietly."""

    async def test() -> None:
        with a_copier(num_threads=1) as copier:
            gate = Gate()
            async with anyio.create_task_group() as tasks:
                Call(tasks, partial(copier.run_calls, iter([gate])))
                await gate.wait_begun()
                with anyio.move_on_after(0) as scope:
                    await copier.run_calls(iter([do_nothing]))
                assert scope.cancelled_caught
                gate.open()

    run_on(backend, test)


@on_every_loop
def test_random_cancellations_leave_nothing_behind(backend: str) -> None:
    """Copies cancelled after any number of turns: each has returned quiet, and later ones are whole."""

    async def test() -> None:
        with a_copier(num_threads=2, chunk_nbytes=4096) as copier:
            nbytes = 64 * 4096
            source = np.ones(nbytes, np.uint8)
            for number in range(60):
                target = np.zeros(nbytes, np.uint8)
                async with anyio.create_task_group() as tasks:
                    call = Call(tasks, partial(copier.run, [Copy(target, 0, 0, source, 0, 0, nbytes, 1)], nbytes))
                    await turns(number % 12)
                    call.scope.cancel()
                    await call.ended.wait()
                if not call.scope.cancelled_caught:
                    assert target.all()
                target[:] = 7
                await turns(3)
                assert (target == 7).all()
            target = np.zeros(nbytes, np.uint8)
            await copier.run([Copy(target, 0, 0, source, 0, 0, nbytes, 1)], nbytes)
            assert target.all()

    run_on(backend, test)


# ---- fairness


@on_every_loop
def test_a_small_job_is_not_delayed_behind_a_huge_one(backend: str) -> None:
    """A job that comes second waits for what the threads have in hand and for one more call, not for all."""

    async def test() -> None:
        with a_copier(num_threads=1) as copier:
            gate = Gate()
            order: list[str] = []

            def huge() -> Iterator[Callable[[], None]]:
                yield gate
                for _ in range(500):
                    yield partial(order.append, "huge")

            async with anyio.create_task_group() as tasks:
                first = Call(tasks, partial(copier.run_calls, huge()))
                await gate.wait_begun()
                small = Call(tasks, partial(copier.run_calls, iter([partial(order.append, "small")])))
                await turns()
                gate.open()
                await small.ended.wait()
                await first.ended.wait()
            assert order.index("small") <= 1
            assert order.count("huge") == 500

    run_on(backend, test)


@on_every_loop
def test_jobs_take_turns(backend: str) -> None:
    """Three jobs of equal chunks progress together: at no point is one more than a chunk ahead of another."""

    async def test() -> None:
        with a_copier(num_threads=1) as copier:
            gate = Gate()
            order: list[str] = []
            async with anyio.create_task_group() as tasks:
                Call(tasks, partial(copier.run_calls, iter([gate])))
                await gate.wait_begun()
                for name in "abc":
                    Call(tasks, partial(copier.run_calls, iter([partial(order.append, name)] * 30)))
                    await turns()
                gate.open()
            for end in range(91):
                counts = [order[:end].count(name) for name in "abc"]
                assert max(counts) - min(counts) <= 1
            assert len(order) == 90

    run_on(backend, test)


@on_every_loop
def test_a_large_job_uses_all_threads(backend: str) -> None:
    """Calls of one job are made by several threads at the same time."""

    async def test() -> None:
        with a_copier(num_threads=3) as copier:
            meeting = threading.Barrier(3, timeout=LONG_S)

            def meet() -> None:
                meeting.wait()

            await copier.run_calls(iter([meet] * 3))

    run_on(backend, test)


@on_every_loop
def test_the_loop_turns_while_threads_copy(backend: str) -> None:
    """Other tasks run while a job is in the threads' hands."""

    async def test() -> None:
        with a_copier() as copier:
            gate = Gate()
            async with anyio.create_task_group() as tasks:
                call = Call(tasks, partial(copier.run_calls, iter([gate])))
                await gate.wait_begun()
                await turns(1000)
                assert not call.has_ended
                gate.open()

    run_on(backend, test)


# ---- the end


@on_every_loop
def test_closing_ends_the_threads(backend: str) -> None:
    """Threads start with the first large copy and not before; after `close` there is none; twice does no harm."""

    async def test() -> None:
        copier = Copier(num_threads=3, inline_nbytes=0, chunk_nbytes=4096)
        assert copy_threads() == []
        await copier.run_calls(iter([do_nothing]))
        assert len(copy_threads()) == 3
        await copier.run_calls(iter([do_nothing]))
        assert len(copy_threads()) == 3
        for _ in range(2):
            copier.close()
            assert copy_threads() == []
        with pytest.raises(ClosedError):
            await copier.run([Copy(np.zeros(9, np.uint8), 0, 0, np.ones(9, np.uint8), 0, 0, 9, 1)], 9)
        assert copy_threads() == []

    run_on(backend, test)


def test_closing_what_never_copied() -> None:
    """Without a large copy there was no thread, and `close` has nothing to do."""
    copier = Copier(num_threads=3, inline_nbytes=0, chunk_nbytes=4096)
    copier.close()
    assert copy_threads() == []


@on_every_loop
def test_closing_during_a_run_fails_it_quietly(backend: str) -> None:
    """`close` waits for the calls in the threads' hands; then every run, begun or not, has raised `ClosedError`."""

    async def test() -> None:
        copier = Copier(num_threads=1, inline_nbytes=0, chunk_nbytes=4096)
        gate = Gate()
        later: list[int] = []

        def chunks() -> Iterator[Callable[[], None]]:
            yield gate
            for index in range(100):
                yield partial(later.append, index)

        async with anyio.create_task_group() as tasks:
            begun = Call(tasks, partial(copier.run_calls, chunks()))
            await gate.wait_begun()
            waiting = Call(tasks, partial(copier.run_calls, iter([partial(later.append, 0)])))
            await turns()
            closing = Call(tasks, partial(anyio.to_thread.run_sync, copier.close))
            await waiting.ended.wait()
            await turns()
            assert not begun.has_ended
            assert not closing.has_ended
            gate.open()
            await begun.ended.wait()
            await closing.ended.wait()
        assert closing.error is None
        assert isinstance(begun.error, ClosedError)
        assert isinstance(waiting.error, ClosedError)
        assert gate.has_ended
        assert later == []
        assert copy_threads() == []

    run_on(backend, test)


@on_every_loop
def test_a_host_without_threads_to_give(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread at all is a typed error, one is enough, and closing works whatever was refused."""
    start, given = threading.Thread.start, iter([False, True, False])

    def start_or_not(thread: threading.Thread) -> None:
        if thread.name == "kvlink-copy" and not next(given, True):
            raise RuntimeError("can't start new thread")
        start(thread)

    async def test() -> None:
        copier = Copier(num_threads=2, inline_nbytes=0, chunk_nbytes=4096)
        source, target = np.full(65536, 7, np.uint8), np.zeros(65536, np.uint8)
        work = [Copy(target, 0, 0, source, 0, 0, 65536, 1)]
        with pytest.raises(TransportError, match="thread"):
            await copier.run(work, 65536)
        await copier.run(work, 65536)
        copier.close()
        assert (target == 7).all()
        assert not copy_threads()

    monkeypatch.setattr(threading.Thread, "start", start_or_not)
    run_on(backend, test)


@on_every_loop
def test_a_loop_that_ends_early_hurts_no_thread(backend: str) -> None:
    """A job whose loop is gone is finished and forgotten; the copier serves the next loop."""
    gate = Gate()
    with a_copier(num_threads=1) as copier:

        async def leave() -> None:
            copier.prefault(np.zeros(4096, np.uint8), for_writing=False)
            async with anyio.create_task_group() as tasks:
                Call(tasks, partial(copier.run_calls, iter([gate])))
                await gate.wait_begun()
                gate.open()
                tasks.cancel_scope.cancel()

        async def come() -> None:
            await copier.run_calls(iter([do_nothing]))

        run_on(backend, leave)
        for other in BACKENDS:
            run_on(other, come)
        assert len(copy_threads()) == 1


def test_a_loop_that_is_gone_hurts_no_thread() -> None:
    """When a loop was closed under a job, the thread that would wake it goes on, and serves other loops."""
    gate = Gate()
    with a_copier(num_threads=1) as copier:

        async def begin() -> asyncio.Task[None]:
            job = asyncio.get_running_loop().create_task(copier.run_calls(iter([gate])))
            await gate.wait_begun()
            return job

        async def come() -> None:
            await copier.run_calls(iter([do_nothing]))

        loop = asyncio.new_event_loop()
        abandoned: asyncio.Task[None] | None = loop.run_until_complete(begin())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
        gate.open()
        run_on("asyncio", come)
        assert len(copy_threads()) == 1
        logging.getLogger("asyncio").disabled = True  # asyncio's word on the task that we leave behind
        del abandoned
        gc.collect()
        logging.getLogger("asyncio").disabled = False


def test_two_loops_share_a_copier() -> None:
    """Runs of two loops in two threads at once each wake their own."""
    with a_copier(num_threads=2) as copier:
        errors: list[BaseException] = []

        async def work() -> None:
            for _ in range(50):
                target = np.zeros(9000, np.uint8)
                await copier.run([Copy(target, 0, 0, np.ones(9000, np.uint8), 0, 0, 9000, 1)], 9000)
                assert target.all()

        def serve(backend: str) -> None:
            try:
                run_on(backend, work)
            except BaseException as exc:
                errors.append(exc)

        loops = [threading.Thread(target=serve, args=(backend,)) for backend in ("asyncio", "trio")]
        for loop in loops:
            loop.start()
        for loop in loops:
            loop.join(3 * LONG_S)
        assert not any(loop.is_alive() for loop in loops)
        assert errors == []


@on_every_loop
def test_prefaulting_returns_at_once_and_gives_way(backend: str) -> None:
    """`prefault` waits for nothing, changes no byte, and a copy that comes later is not behind all of it."""

    async def test() -> None:
        segment = Segment.create("kvlink-test", 4 * 2**20, is_prefaulted=False)
        segment.memory[:] = 3
        with a_copier(num_threads=1) as copier:
            gate = Gate()
            async with anyio.create_task_group() as tasks:
                Call(tasks, partial(copier.run_calls, iter([gate])))
                await gate.wait_begun()
                copier.prefault(segment.memory, for_writing=True)
                copier.prefault(segment.memory[:0], for_writing=False)
                gate.open()
            await copier.run_calls(iter([do_nothing] * 3))
            assert (segment.memory == 3).all()
        copier.prefault(segment.memory, for_writing=False)
        assert copy_threads() == []
        segment.close()

    run_on(backend, test)


@on_every_loop
def test_eviction_keeps_the_bytes_and_lets_go(backend: str) -> None:
    """`evict` returns at once and changes no byte; after `drain` nothing of it holds the memory, whoever waits when."""

    async def test() -> None:
        segment = Segment.create("kvlink-test", 20 * 2**20)
        segment.memory[:] = 3
        with a_copier(num_threads=1) as copier:
            await copier.drain()  # there is nothing to wait for
            stop = copier.prefault(segment.memory, for_writing=False)
            stop()
            stop()
            copier.evict(segment.memory)
            copier.evict(segment.memory[:4096])
            await copier.drain()
            await copier.drain()
            assert (segment.memory == 3).all()
            assert copier._num_evicting == 0
            mapping = weakref.ref(segment.memory)
            segment.close()
            await copier.run_calls(iter([do_nothing] * 3))  # the thread has let go of the job before
            assert mapping() is None
        copier.evict(np.zeros(4096, np.uint8))  # closed: nothing is done
        await copier.drain()

    run_on(backend, test)


@on_every_loop
def test_closing_ends_an_eviction(backend: str) -> None:
    """Whoever waits for evictions is woken when the copier is closed under them."""

    async def test() -> None:
        segment = Segment.create("kvlink-test", 4096)
        with a_copier(num_threads=1) as copier:
            gate = Gate()
            async with anyio.create_task_group() as tasks:
                Call(tasks, partial(copier.run_calls, iter([gate])))
                await gate.wait_begun()
                copier.evict(segment.memory)
                call = Call(tasks, copier.drain)
                await anyio.lowlevel.checkpoint()
                threading.Timer(0.05, gate.open).start()
                copier.close()
            assert call is not None
        segment.close()

    run_on(backend, test)


@on_every_loop
def test_memory_of_a_finished_copy_is_not_kept(backend: str) -> None:
    """When a run has ended, no idle thread holds its memory: a peer's pool goes when the link does."""

    async def test() -> None:
        with a_copier(num_threads=1) as copier:
            segment = Segment.create("kvlink-test", 8 * 4096)
            source: NDArray[Any] = np.ones(8 * 4096, np.uint8)
            await copier.run([Copy(segment.memory, 0, 0, source, 0, 0, 8 * 4096, 1)], 8 * 4096)
            segment.close()
            assert await becomes_true(lambda: num_mappings() == 0)

    run_on(backend, test)


@on_every_loop
def test_an_idle_thread_keeps_no_finished_call(backend: str) -> None:
    """Nor when it was another thread that found out that there is no more to do."""

    async def test() -> None:
        with a_copier(num_threads=2) as copier:

            async def work() -> weakref.ref[Gate]:
                gate = Gate()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(copier.run_calls, iter([gate]))
                    await gate.wait_begun()
                    await copier.run_calls(iter([do_nothing]))  # the other thread has looked for more of the first job
                    gate.open()
                return weakref.ref(gate)

            finished = await work()
            assert await becomes_true(lambda: finished() is None)

    run_on(backend, test)


@on_every_loop
def test_memory_of_a_failed_copy_is_not_kept(backend: str) -> None:
    """Nor when the run has failed, once its caller has forgotten the error."""

    async def test() -> None:
        with a_copier(num_threads=1) as copier:
            segment = Segment.create("kvlink-test", 8 * 4096)
            source: NDArray[Any] = np.ones(8 * 4096, np.uint8)
            with suppress(ValueError):
                await copier.run([Copy(segment.memory, 1, 0, source, 0, 0, 8 * 4096, 1)], 8 * 4096)
            segment.close()
            assert await becomes_true(lambda: num_mappings() == 0)

    run_on(backend, test)
