"""A process that attaches can do no harm: what it is given for reading it cannot write."""

from __future__ import annotations

import mmap
import os
import socket

import anyio.to_thread
import pytest

import kvlink as kv
from kvlink.memory.regions import POOL, STATE
from kvlink.transports.shm_channel import SharedRegion
from tests.support.stranger import Stranger, dial_channel, memfds, send_regions, token_of


def take_descriptors(address: str) -> list[int]:
    """Attach to cluster 1 as a peer does, and return the descriptors that it hands over."""
    with Stranger.dial(address) as stranger:
        answer = stranger.greet(1)
        stranger.channel = dial_channel(answer)
        stranger.channel.sendall(token_of(answer))
        with memfds(8192, 8192) as descriptors:
            send_regions(
                stranger.channel, (SharedRegion(POOL, 8192, True), SharedRegion(STATE, 8192, True)), descriptors
            )
        _, received, _, _ = socket.recv_fds(stranger.channel, 1 << 16, 16)
        return list(received)


async def test_what_is_shared_for_reading_cannot_be_written() -> None:
    """A peer gets descriptors of the pool and the state words that the kernel lets it read, and nothing more."""
    async with kv.Cluster(cluster_id=1, role=kv.Role.MIX, pool="64KiB") as owner:
        descriptors = await anyio.to_thread.run_sync(take_descriptors, owner.address)
        assert len(descriptors) == 2
        for fd in descriptors:
            try:
                mmap.mmap(fd, 4096, prot=mmap.PROT_READ).close()
                with pytest.raises(PermissionError):
                    mmap.mmap(fd, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
                with pytest.raises(OSError, match=r"Bad file descriptor|not permitted"):
                    os.pwrite(fd, b"x", 0)
            finally:
                os.close(fd)
