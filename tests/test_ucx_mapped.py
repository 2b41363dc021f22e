"""State words of a peer on the same host are looked at in its memory, where that is surely its memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvlink as kv
from kvlink.memory.pool import Segment
from kvlink.transports.lives import Life
from kvlink.transports.ucx.cards import Host, StateFile
from kvlink.transports.ucx.mapped import map_state, state_file_of
from kvlink.transports.ucx.worker import Worker
from tests.support import inside
from tests.support.leaks import holdings
from tests.support.pair import pair
from tests.support.ucx import need_ucx

UCX: dict[str, Any] = {"transports": ["ucx"]}


@contextmanager
def segment() -> Iterator[Segment]:
    """A state region of this process."""
    made = Segment.create("state", 8192)
    try:
        made.memory[8] = 77
        yield made
    finally:
        made.close()


def test_the_owners_words_are_seen() -> None:
    """What the owner stores is what the mapping shows, and it cannot be written through."""
    with segment() as theirs:
        mapped = map_state(Host.own(), state_file_of(theirs))
        assert mapped is not None
        words = mapped.words
        assert words[1] == 77
        theirs.memory[8] = 78
        assert words[1] == 78
        assert words.readonly
        del words
        mapped.close()


LIES: dict[str, Callable[[StateFile, dict[str, int]], StateFile]] = {
    "another length": lambda file, _: StateFile(file.fd, file.inode, file.nbytes + 4096),
    "the number is something else's now": lambda file, _: StateFile(file.fd, file.inode + 1, file.nbytes),
    "closed": lambda file, _: StateFile(10**6, file.inode, file.nbytes),
    "absurd": lambda file, _: StateFile(2**64 - 1, 2**64 - 1, 2**64 - 1),
    "a pipe": lambda _, fds: StateFile(fds["pipe"], os.fstat(fds["pipe"]).st_ino, 8192),
    "a file": lambda _, fds: StateFile(fds["file"], os.fstat(fds["file"]).st_ino, 8192),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_is_not_surely_a_state_region_is_not_mapped(lie: str, tmp_path: Path) -> None:
    """Something else's number by now, a pipe, a file that could be cut short: None, at once, and nothing is kept."""
    with segment() as theirs, ExitStack() as stack:
        (tmp_path / "file").write_bytes(bytes(8192))
        reading, writing = os.pipe()
        fds = {"pipe": reading, "file": os.open(tmp_path / "file", os.O_RDWR)}
        for fd in (*fds.values(), writing):
            stack.callback(os.close, fd)
        before = holdings()
        assert map_state(Host.own(), LIES[lie](state_file_of(theirs), fds)) is None
        assert holdings() == before


def test_another_process_of_the_same_number_is_not_opened() -> None:
    """The process that the card speaks of has ended, and its number is somebody else's."""
    own = Host.own()
    with segment() as theirs:
        assert map_state(Host(own.boot, own.namespace, own.pid, own.started + 1), state_file_of(theirs)) is None


@pytest.mark.ucx
@pytest.mark.parametrize("is_mapped", [True, False])
async def test_a_small_pull_is_one_request(is_mapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block is one system call of our own on one host, and three gets of UCX, one of them the block, where words
    are not mapped; a stale key is found out before any.
    """
    need_ucx()
    if not is_mapped:
        monkeypatch.setattr("kvlink.transports.ucx.transport.map_state", lambda *_: None)
    num_moves = num_reads = 0
    move, read = Worker.move_now, Life.read

    def count_reads(*arguments: Any) -> bool:
        nonlocal num_reads
        num_reads += 1
        return read(*arguments)

    def count(*arguments: Any) -> int | None:
        nonlocal num_moves
        num_moves += 1
        return move(*arguments)

    async with pair(kv.CacheDesc(1, (64, 4096), "uint8"), config=UCX, owner_config=UCX) as p:
        await p.pull()
        if not p.link.endpoint.capabilities.is_one_sided:
            pytest.skip("this release of UCX imitates get by messages")
        monkeypatch.setattr(Worker, "move_now", count)
        monkeypatch.setattr(Life, "read", count_reads)
        inside.give_turn(p.here)  # on a slow host the first pull may have held the loop for long
        await p.pull([3], [4])
        assert (num_moves, num_reads) == ((0, 1) if is_mapped else (3, 0))
        assert np.array_equal(p.cache.tensors[0][4], p.cache.tensors[0][3])  # pulled before, to where it was
        await p.owner.call("deallocate", cache=p.handle)
        num_moves = num_reads = 0
        with pytest.raises(kv.CacheNotFoundError):
            await p.pull([3], [4])
        assert (num_moves, num_reads) == ((0, 0) if is_mapped else (1, 0))


def test_nothing_but_shared_memory_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To open a device or a file of a network is to do something; so what a peer names is looked at before."""
    opened: list[str] = []
    do_open = os.open

    def note(path: str, *arguments: Any, **options: Any) -> int:
        opened.append(path)
        return do_open(path, *arguments, **options)

    with segment() as theirs, ExitStack() as stack:
        (tmp_path / "memfd:kvlink-state").write_bytes(bytes(8192))
        fds = [do_open(path, os.O_RDWR) for path in ("/dev/null", tmp_path / "memfd:kvlink-state")]
        for fd in fds:
            stack.callback(os.close, fd)
        monkeypatch.setattr(os, "open", note)
        for fd in fds:
            assert map_state(Host.own(), StateFile(fd, os.fstat(fd).st_ino, 8192)) is None
        assert not [path for path in opened if "/fd/" in path]
        mapped = map_state(Host.own(), state_file_of(theirs))
        assert mapped is not None
        mapped.close()
        assert [path for path in opened if "/fd/" in path]
