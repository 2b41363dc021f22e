"""Pull for ever, until ^C: then nothing of this process moves any more, and nothing is left.

Run as ``python -m tests.programs.interrupted LOOP ADDRESS``. Says ``moving`` in mid-pull, and ``quiet`` at the end.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import anyio
import numpy as np

import kvlink as kv
from tests.support.pair import SLOW
from tests.support.pattern import Tensors

DESC = kv.CacheDesc(8, (1024, 4096), "uint8")


async def pull_for_ever(address: str, seen: list[Tensors]) -> None:
    """Leave the views on the destination in `seen`."""
    config = kv.ClusterConfig(**SLOW)
    async with kv.Cluster(cluster_id=2, role=kv.Role.DECODER, pool="40MiB", config=config) as here:
        (await here.link_clusters([kv.ClusterInfo(1, address)])).raise_for_status()
        manager = here.kv_cache_manager
        cache = manager.allocate_blocks_cache(DESC)
        seen.append(cache.tensors)
        blocks = list(range(1024))

        async def tell() -> None:
            while not cache.tensors[0].any():  # noqa: ASYNC110  # bytes have no event
                await anyio.sleep(0.001)
            os.write(1, b"moving\n")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tell)
            while True:
                await manager.pull_blocks(kv.BlocksCacheKey(1), cache, blocks, blocks)


def main() -> None:
    """Be interrupted, and look at what is left."""
    loop_name, address = sys.argv[1:]
    backend = "trio" if loop_name == "trio" else "asyncio"
    options = {} if backend == "trio" else {"use_uvloop": loop_name == "uvloop"}
    seen: list[Tensors] = []
    try:
        anyio.run(pull_for_ever, address, seen, backend=backend, backend_options=options)
    except BaseException as exc:  # the interrupt, alone or in the group of the task group above
        cause: BaseException = exc
        while hasattr(cause, "exceptions"):
            cause = cause.exceptions[0]
        if not isinstance(cause, KeyboardInterrupt):
            raise
        after = [view.copy() for view in seen[0]]
        time.sleep(0.02)
        is_quiet = all(np.array_equal(view, copy) for view, copy in zip(seen[0], after, strict=True))
        copying = [thread.name for thread in threading.enumerate() if thread.name.startswith("kvlink")]
        os.write(1, b"quiet\n" if is_quiet and not copying else f"{is_quiet} {copying}\n".encode())


if __name__ == "__main__":
    main()
