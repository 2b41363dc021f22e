"""Strided copies: inline when small, on a few threads, in chunks, when large.

Larger work is cut into chunks of about `chunk_nbytes`. Threads take one chunk from the job at the head of the queue and
put the job back at the tail, so that jobs share the threads by bytes, a small job waits for one chunk of each other job
at most, and a cancelled job stops within one chunk.

Quiet: `Copier.run` returns or raises only when no thread touches the job's memory any more. Cancellation waits, under a
shield, for the chunks in the threads' hands.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Final

import anyio

from kvlink.errors import ClosedError, TransportError
from kvlink.loops import CallSoon, current_call_soon, until_set
from kvlink.memory.pool import Bytes, depopulate, populate
from kvlink.memory.strided import Copy, copy_now, cut

_PAGING_NBYTES: Final = 8 * 1024 * 1024
"""Pages entered or taken out between two looks at the queue: about 1 ms, for which other mappings may have to wait."""


_SC_LEVEL3_CACHE_SIZE: Final = 194  # glibc's <bits/confname.h>; Python has no name for it
_PAGE: Final = 4096
_MAX_STREAM_NBYTES: Final = 256 * 1024 * 1024


def streaming_nbytes() -> int:
    """Return from which length on one ``memcpy`` passes by the processor's caches, 0 where that is not known.

    glibc does so from three quarters of the last cache on, because writing then need not read the target first. On a
    machine where that is 240 MiB, 1 GiB takes 0.8 times as long in such pieces as in pieces of 4 MiB; pieces between
    gain nothing (8 to 128 MiB measured). A piece takes 20 ms there, and as long do cancellation and closing wait for
    it, and another copy for its turn; so none is larger, and none is made while another job waits.
    """
    try:
        nbytes = os.sysconf(_SC_LEVEL3_CACHE_SIZE) * 3 // 4
    except (OSError, ValueError):
        return 0
    return -(-nbytes // _PAGE) * _PAGE if 0 < nbytes <= _MAX_STREAM_NBYTES else 0


def _noting(chunks: Iterator[list[Copy]], copied: list[tuple[int, int]]) -> Iterator[Callable[[], None]]:
    """Yield calls that copy the chunks, and then note which bytes of all the work, counted in its order, those were."""
    start = 0
    for chunk in chunks:
        stop = start + sum([copy.nbytes * copy.num_rows for copy in chunk])
        yield partial(_copy_and_note, chunk, copied, (start, stop))
        start = stop


def _copy_and_note(chunk: list[Copy], copied: list[tuple[int, int]], place: tuple[int, int]) -> None:
    copy_now(chunk)
    copied.append(place)


class _Job:
    """One large piece of work on its way through the threads. All fields are guarded by the copier's condition."""

    __slots__ = ("chunks", "error", "finish", "has_no_more", "num_taken")

    def __init__(self, chunks: Iterator[Callable[[], None]], finish: Callable[[], None]) -> None:
        self.chunks = chunks
        self.finish = finish
        self.num_taken = 0
        self.has_no_more = False
        self.error: BaseException | None = None


class Copier:
    """The copy threads of one cluster, started with the first large copy.

    Args:
        num_threads: threads that copy at the same time.
        inline_nbytes: work up to this size is done by the caller, on the event loop.
        chunk_nbytes: work is cut into pieces of about this size.
    """

    def __init__(self, *, num_threads: int, inline_nbytes: int, chunk_nbytes: int) -> None:
        self.inline_nbytes = inline_nbytes
        self.chunk_nbytes = chunk_nbytes
        self._stream_nbytes = streaming_nbytes()
        self.window_nbytes = num_threads * chunk_nbytes  # of one copy; longer pieces are for a copy that is alone
        self._num_threads = num_threads
        self._condition = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._num_evicting = 0
        self._drained: Callable[[], None] | None = None

    async def run(self, copies: Iterable[Copy], nbytes: int, copied: list[tuple[int, int]] | None = None) -> None:
        """Do `copies`, `nbytes` in all; return when every byte is in place. They are looked at as they are needed.

        Args:
            copied: gets what has been copied by large work, however it ends; see `complete`.

        Cancellation: stops within a chunk per thread and waits for it; the target's contents are then undefined.

        Raises:
            ValueError: a row lies outside its memory.
            ClosedError: the copier is closed.
            TransportError: the host has no thread to give.
        """
        if nbytes <= self.inline_nbytes:
            copy_now(copies)
            return
        chunks = cut(copies, self.chunk_nbytes, stream_nbytes=self._stream_nbytes, is_alone=self._is_alone)
        if copied is None:
            await self.run_calls(partial(copy_now, chunk) for chunk in chunks)
        else:
            await self.run_calls(_noting(chunks, copied))

    async def run_calls(self, chunks: Iterator[Callable[[], None]]) -> None:
        """Make these calls in the threads, several at the same time; as `run`, whatever a call raises ends the job.

        Args:
            chunks: calls of about a millisecond each that do not need the GIL.
        """
        done = anyio.Event()
        job = _Job(chunks, partial(_call, current_call_soon(), done.set))
        if not self._submit(job):
            if self._is_closed:
                raise ClosedError("the cluster is closed; nothing is copied any more")
            raise TransportError(
                "this host gives the process no thread to copy with; raise its limit (pids.max of the control group, "
                "`ulimit -u`)",
                phase="transfer",
            )
        try:
            await done.wait()
        except BaseException:
            with self._condition:
                job.has_no_more = True
                if job in self._jobs:
                    self._jobs.remove(job)
                is_taken = job.num_taken > 0
            if is_taken:
                await until_set(done)
            raise
        error, job.error = job.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame: without the cycle, the memory goes when the caller is done

    def prefault(self, memory: Bytes, *, for_writing: bool) -> Callable[[], None]:
        """Enter the pages of `memory` into the page table, in the background, giving way to copies. Returns at once.

        Returns:
            what ends it early; to be called before `evict`.
        """
        job = _Job(_steps(memory, partial(populate, for_writing=for_writing)), lambda: None)
        self._submit(job)
        return partial(self._stop, job)

    def evict(self, memory: Bytes) -> None:
        """Take the pages of a shared mapping that nobody needs any more out of the page table, in the background.

        What is left for whoever drops the last reference is then nothing: unmapping 2 GiB at once would hold the loop,
        and the GIL, for 0.14 s. Returns at once; keeps `memory` until it is done.
        """
        with self._condition:
            if self._submit(_Job(_steps(memory, depopulate), self._end_eviction)):
                self._num_evicting += 1

    async def drain(self) -> None:
        """Return when nothing is evicted any more. The caller has a deadline."""
        with self._condition:
            if self._num_evicting == 0:
                return
            done = anyio.Event()
            self._drained = partial(_call, current_call_soon(), done.set)
        await done.wait()

    def _end_eviction(self) -> None:
        self._num_evicting -= 1
        if self._num_evicting == 0 and self._drained is not None:
            self._drained()

    def _stop(self, job: _Job) -> None:
        """Take no more chunks of a job whose end nobody waits for."""
        with self._condition:
            job.has_no_more = True
            job.chunks = iter(())  # they hold the memory, and the caller may keep what stops them
            if job in self._jobs:
                self._jobs.remove(job)

    def close(self) -> None:
        """End the threads: each finishes the chunk in its hands. Waits a few ms, 20 for a long row. Idempotent."""
        with self._condition:
            self._is_closed = True
            for job in self._jobs:
                job.has_no_more = True
                job.error = ClosedError("the cluster was closed during the copy")
                if job.num_taken == 0:
                    job.finish()
            self._jobs.clear()
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _work(self) -> None:
        condition = self._condition
        job: _Job | None
        chunk: Callable[[], None] | None
        error: BaseException | None
        while True:
            job = chunk = error = None  # an idle thread keeps nobody's memory mapped
            with condition:
                while not self._jobs:
                    if self._is_closed:
                        return
                    condition.wait()
                job = self._jobs.popleft()
                try:
                    chunk = next(job.chunks, None)
                except Exception as exc:  # cutting the work failed; the caller learns it
                    job.error = job.error or exc
                    chunk = None
                if chunk is None:
                    job.has_no_more = True
                    if job.num_taken == 0:
                        job.finish()
                    continue
                job.num_taken += 1
                self._jobs.append(job)
            try:
                chunk()
            except Exception as exc:  # handed to the caller, whose request it was
                error = exc
            with condition:
                job.num_taken -= 1
                if error is not None:
                    job.error = job.error or error
                    job.has_no_more = True
                    if job in self._jobs:
                        self._jobs.remove(job)
                if job.has_no_more and job.num_taken == 0:
                    job.finish()

    def _is_alone(self) -> bool:
        """Whether no job waits beside the one whose turn it is; that one has been taken from the queue."""
        return not self._jobs

    def _submit(self, job: _Job) -> bool:
        with self._condition:
            if self._is_closed:
                return False
            while len(self._threads) < self._num_threads:
                thread = threading.Thread(target=self._work, name="kvlink-copy", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the host has no more threads to give: one does, and next time it is tried anew
                    break
                self._threads.append(thread)
            if not self._threads:
                return False
            self._jobs.append(job)
            self._condition.notify_all()
        return True


def _steps(memory: Bytes, call: Callable[[Bytes], None]) -> Iterator[Callable[[], None]]:
    """Yield calls that together do `call` for all of `memory`."""
    for start in range(0, len(memory), _PAGING_NBYTES):
        yield partial(call, memory[start : start + _PAGING_NBYTES])


def _call(call_soon: CallSoon, function: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop has been closed: nobody waits
        call_soon(function)
