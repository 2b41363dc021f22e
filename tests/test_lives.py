"""Memory of another process is read by its number, so whose memory that is must be certain when the bytes are there."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import time
from typing import Any

import pytest

import kvlink as kv
from kvlink.memory.regions import FIRST_REGISTERED, POOL
from kvlink.transports.lives import Life
from tests.support.leaks import holdings
from tests.support.loops import eventually
from tests.support.pair import Pair, pair
from tests.support.ucx import need_ucx

PROGRAM = """
import ctypes, sys, time
address, nbytes = map(int, sys.argv[1:])
low, high = address & -4096, -(-(address + nbytes) // 4096) * 4096
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
assert libc.mmap(low, high - low, 3, 0x32, -1, 0) == low  # MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS
ctypes.memset(address, 0xEE, nbytes)
time.sleep(20)
"""
"""A program with memory of its own, of 0xEE, in a given place."""

DESC = kv.CacheDesc(1, (64, 4096), "uint8")


def become_another(p: Pair, address: int, nbytes: int) -> None:
    """Have the owner's process become that program, and hold our loop until it has, so that we hear of nothing."""
    p.owner.start("become", program=PROGRAM, arguments=[str(address), str(nbytes)])
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            with open(f"/proc/{p.owner.pid}/mem", "rb", buffering=0) as memory:
                memory.seek(address)
                if memory.read(64) == b"\xee" * 64:
                    return
        except OSError:
            pass
        time.sleep(0.01)
    pytest.fail("the other program did not start")


async def move_and_fail(p: Pair, address: int, *, is_small: bool, is_put: bool) -> None:
    """Pull or push, which must fail, and write nothing into the other program's memory."""
    blocks = [3] if is_small else p.blocks
    move = p.manager.push_blocks if is_put else p.manager.pull_blocks
    with pytest.raises((kv.LinkLostError, kv.NotLinkedError, kv.CacheNotFoundError)):
        await move(p.key, p.cache, blocks, blocks)
    fd = os.open(f"/proc/{p.owner.pid}/mem", os.O_RDONLY)
    assert os.pread(fd, DESC.tensor_nbytes, address) == b"\xee" * DESC.tensor_nbytes
    os.close(fd)


@pytest.mark.ucx
@pytest.mark.parametrize(("is_small", "is_put"), [(True, False), (False, False), (True, True)])
async def test_over_ucx_another_program_is_not_the_owner(is_small: bool, is_put: bool) -> None:
    """The owner's process has become a program with memory in the same place: an error, and never its bytes."""
    need_ucx()
    config: dict[str, Any] = {"transports": ["ucx"]}
    async with pair(DESC, config=config, owner_config=config, role="MIX", here_role=kv.Role.MIX) as p:
        await p.pull()
        await p.manager.push_blocks(p.key, p.cache, [0], [0])
        remote = p.link.endpoint._remote[POOL]  # type: ignore[attr-defined]  # of UCX
        become_another(p, remote.address, remote.nbytes)
        await move_and_fail(p, remote.address, is_small=is_small, is_put=is_put)
        await eventually(lambda: not p.here.links, "the link's end")
        p.owner.kill()


@pytest.mark.parametrize(("is_small", "is_put"), [(True, False), (True, True)])
async def test_over_shared_memory_another_program_is_not_the_owner(is_small: bool, is_put: bool) -> None:
    """The same for memory that an owner has registered, which is not mapped."""
    async with pair(DESC, role="MIX", here_role=kv.Role.MIX) as p:
        await p.owner.call("register_blocks", num_tensors=1, shape=list(DESC.shape), model_id=7)
        p.key = kv.BlocksCacheKey(p.owner.cluster_id, 7)
        await p.pull()
        await p.manager.push_blocks(p.key, p.cache, [0], [0])
        foreign = p.link.endpoint._foreign[FIRST_REGISTERED]  # type: ignore[attr-defined]  # of shared memory
        become_another(p, foreign.address, foreign.nbytes)
        await move_and_fail(p, foreign.address, is_small=is_small, is_put=is_put)
        await eventually(lambda: not p.here.links, "the link's end")
        p.owner.kill()


@pytest.mark.parametrize("end", ["exec", "kill"])
def test_a_life_goes_on_until_its_end(end: str) -> None:
    """With memory at the address or none; after an `exec`, or the death of the process, it has ended."""
    before = holdings()
    code = f"import os; input(); os.execv({sys.executable!r}, ['python', '-c', 'print(flush=True); input()'])"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    with child:
        life = Life.open(child.pid)
        assert life is not None
        try:
            assert life.goes_on()
            life.place = 2**64 - 1
            assert life.goes_on()
            if end == "exec":
                child.stdin.write(b"\n")
                child.stdin.flush()
                assert child.stdout.readline() == b"\n"
                assert child.poll() is None
            else:
                child.kill()
                child.wait()
            assert not life.goes_on()
        finally:
            life.close()
            child.kill()
    assert holdings() == before


def test_reading_from_a_life() -> None:
    """All of what is asked for, or False: a hole behind it, an absurd address, a life that has ended."""
    fd = os.memfd_create("owner")
    os.ftruncate(fd, 3 * 4096)
    owner = mmap.mmap(fd, 3 * 4096)
    owner[:] = bytes(range(256)) * 48
    address = ctypes.addressof(ctypes.c_char.from_buffer(owner))
    life = Life.open(os.getpid())
    assert life is not None
    target = bytearray(5000)
    assert life.read(memoryview(target)[7:4200], address + 100)
    assert target[7:4200] == owner[100:4293]
    assert not any(target[:7])
    assert not any(target[4200:])
    os.ftruncate(fd, 8192)
    os.close(fd)
    assert not life.read(memoryview(target), address + 8192 - 100)
    for absurd in (0, 2**63, 2**64 - 1):
        assert not life.read(memoryview(target)[:8], absurd)
    life.close()
    assert not life.read(memoryview(target)[:8], address)


def test_our_own_life() -> None:
    """Clusters of one process look at each other's, at an address with memory, until they have closed it."""
    life = Life.open(os.getpid())
    assert life is not None
    byte = ctypes.c_char(b"x")
    life.place = ctypes.addressof(byte)
    assert life.goes_on()
    life.close()
    life.close()
    assert not life.goes_on()
