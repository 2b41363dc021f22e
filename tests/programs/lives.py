"""Cluster 1, again and again at one address: each line on standard input begins a life, which is a process of its own.

Run as ``python -m tests.programs.lives ADDRESS``. Everything is imported once and each life is a fork of that, so that
one begins in milliseconds. A life owns one filled cache under the model id that is its number, and writes one line of
JSON when it listens; it lives until it is killed, or until this program ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

import anyio
import anyio._backends._asyncio  # what `anyio.run` would import in every life anew

import kvlink as kv
from tests.support.pattern import Stamp, fill

DESC = kv.CacheDesc(2, (8, 4096), "uint8")
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


async def live(life: int, address: str) -> None:
    """Be one life."""
    async with kv.Cluster(cluster_id=1, role=kv.Role.PROMPT, pool="1MiB", listen=address) as owner:
        cache = owner.kv_cache_manager.allocate_blocks_cache(DESC, kv.BlocksCacheKey(1, life))
        fill(cache.tensors, Stamp(1, life, 1))
        os.write(1, json.dumps({"pid": os.getpid(), "cache_id": cache.cache_id}).encode() + b"\n")
        await anyio.sleep_forever()


def main() -> None:
    """Begin a life per line."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for life, _ in enumerate(sys.stdin, 1):
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            anyio.run(live, life, sys.argv[1])


if __name__ == "__main__":
    main()
