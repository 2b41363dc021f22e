"""A small program that uses kvlink and then looks at what its process has become. Prints nothing when all is well.

Run as ``python -m tests.support.guest LOOP``.
"""

from __future__ import annotations

import gc
import importlib
import locale
import logging
import os
import signal
import sys
import threading
import warnings
from contextlib import suppress
from typing import Any

import anyio


def surroundings() -> dict[str, Any]:
    """Return what belongs to the whole process and must be left alone."""
    mask = os.umask(0)
    os.umask(mask)
    return {
        "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "signal mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "wake-up descriptor": _wakeup_fd(),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "umask": mask,
        "locale": locale.setlocale(locale.LC_ALL),
        "root logger": (logging.root.level, list(logging.root.handlers)),
        "warning filters": list(warnings.filters),
        "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook),
        "recursion limit": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "garbage collector": (gc.isenabled(), gc.get_threshold()),
        "threads": [thread.name for thread in threading.enumerate() if not thread.name.startswith("Trio thread")],
    }


def _wakeup_fd() -> int:
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    return fd


async def use() -> None:
    """Link, move, unlink, fail, cancel: a little of everything."""
    kv = sys.modules["kvlink"]
    desc = kv.CacheDesc(4, (256, 4096), "float32")
    async with (
        kv.Cluster(cluster_id=1, role=kv.Role.PROMPT, pool="20MiB") as prompt,
        kv.Cluster(cluster_id=2, role=kv.Role.DECODER, pool="20MiB") as decoder,
    ):
        owned = prompt.kv_cache_manager.allocate_blocks_cache(desc, kv.BlocksCacheKey(1))
        owned.tensors[3][:] = 7
        events = decoder.events()
        (await decoder.link_clusters([kv.ClusterInfo(1, prompt.address)], relink=True)).raise_for_status()
        assert isinstance(await events.__anext__(), kv.LinkUp)
        manager = decoder.kv_cache_manager
        cache = manager.allocate_blocks_cache(desc)
        blocks = list(range(256))
        await manager.pull_blocks(kv.BlocksCacheKey(1), cache, blocks, blocks)
        assert float(cache.tensors[3].min()) == 7
        await decoder.notify(1, b"pulled")
        assert (await prompt.notifications().__anext__()).payload == b"pulled"
        with anyio.move_on_after(0.0005):
            await manager.pull_blocks(kv.BlocksCacheKey(1), cache, blocks, blocks)
        with suppress(kv.NotLinkedError):
            await manager.pull_blocks(kv.BlocksCacheKey(9), cache, [0], [0])
        manager.deallocate_cache(cache)
        prompt.kv_cache_manager.deallocate_cache(owned)
        await decoder.unlink_clusters([1])


def main() -> None:
    """Compare before and after; complain on standard error."""
    loop_name = sys.argv[1]
    backend = "trio" if loop_name == "trio" else "asyncio"
    options = {} if backend == "trio" else {"use_uvloop": loop_name == "uvloop"}
    for name in ("numpy", "uvloop" if loop_name == "uvloop" else backend):
        importlib.import_module(name)  # numpy adds warning filters of its own
    before = surroundings()
    importlib.import_module("kvlink")
    anyio.run(use, backend=backend, backend_options=options)
    gc.collect()
    after = surroundings()
    for name, value in before.items():
        if after[name] != value:
            print(f"{name}: was {value}, is {after[name]}", file=sys.stderr)


if __name__ == "__main__":
    main()
