"""Planning requests of any size: where so many blocks would hold the event loop, in a thread."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import anyio
import anyio.to_thread

from kvlink.errors import TransferTimeoutError
from kvlink.geometry import TensorRun
from kvlink.plan import BlockNumbers, Extent, plan_blocks

MANY_BLOCKS: Final = 65536
"""Planning takes 0.3 us a block, so 20 ms from here on; a change of threads takes 0.1 ms."""


async def plan(
    local_runs: tuple[TensorRun, ...],
    remote_runs: tuple[TensorRun, ...],
    local: BlockNumbers,
    remote: BlockNumbers,
    block_nbytes: int,
    *,
    timeout_s: float,
    is_push: bool = False,
) -> Sequence[Extent]:
    """Return what `plan_blocks` does. Waits with `MANY_BLOCKS` or more: what the caller knew may have changed then.

    Ownership: the arrays are the caller's, who leaves them as they are.
    Cancellation: at once; whatever is planned by then is nobody's.

    Raises:
        TransferTimeoutError: it was not ready in time; nothing has moved.
    """
    if len(local) >= MANY_BLOCKS:
        there = partial(plan_blocks, local_runs, remote_runs, local, remote, block_nbytes, is_push=is_push)
        with anyio.move_on_after(timeout_s) as scope, suppress(RuntimeError):  # the host has no thread to give
            # A limiter of its own: the default one may be full of the caller's work, for longer than its deadline.
            return await anyio.to_thread.run_sync(there, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
        if scope.cancelled_caught:
            raise TransferTimeoutError(f"{len(local)} blocks could not be planned in time", phase="transfer")
    return plan_blocks(local_runs, remote_runs, local, remote, block_nbytes, is_push=is_push)
