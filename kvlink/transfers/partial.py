"""From an error of a movement to a report of its blocks, in the caller's own numbers. Pure.

Decision: a failed movement raises the error that it always raised, with a `report`; only when some blocks are done is
it a `PartialTransferError`, and then still a time-out or a lost link where it was one.
Because: a caller that retries everything needs no new class, and one that keeps what has landed finds it in one place.
Instead of: one class for all failures, which would hide deadlines from `except TimeoutError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NoReturn

from kvlink.caches.kvcache import KvCache
from kvlink.checks import Blocks
from kvlink.errors import (
    KVLinkError,
    LinkLostError,
    NotLinkedError,
    ParameterError,
    PartialLinkLostError,
    PartialNotLinkedError,
    PartialTimeoutError,
    PartialTransferError,
    PartialTransportError,
    TransferTimeoutError,
    TransportError,
)
from kvlink.geometry import CacheGeometry, tensor_at
from kvlink.plan import Extent
from kvlink.report import BlockFailure, TransferReport

_PARTIAL: Final[dict[type[KVLinkError], type[PartialTransferError]]] = {
    TransferTimeoutError: PartialTimeoutError,
    LinkLostError: PartialLinkLostError,
    NotLinkedError: PartialNotLinkedError,
    TransportError: PartialTransportError,
}


def touched_blocks(missing: Sequence[Extent], geometry: CacheGeometry) -> set[int]:
    """Return the blocks of our cache in which bytes of these extents lie.

    Rows of an extent are the same bytes of different tensors, so the first one tells.
    """
    tensor_nbytes = geometry.num_slots * geometry.slot_nbytes
    touched: set[int] = set()
    for extent in missing:
        for run in geometry.runs:
            place = tensor_at(run, extent.local_offset, tensor_nbytes) if run.region == extent.local_region else None
            if place is not None:
                _, start = place
                stop = min(start + extent.nbytes, tensor_nbytes)  # joined tensors: all blocks of the first
                touched.update(range(start // geometry.slot_nbytes, -(-stop // geometry.slot_nbytes)))
    return touched


def raise_reported(error: KVLinkError, cache: KvCache, moving: Blocks, destination: Blocks) -> NoReturn:
    """Raise again the error of a movement that is being handled, with its report; see `report_failure`.

    Arguments that are refused have no report, nor has the push of a ticket that leaves out where its blocks go.
    """
    if isinstance(error, ParameterError) or len(moving) != len(destination):
        error.interrupted = None
        raise error
    reported = report_failure(error, cache, moving, destination)
    if reported is error:
        raise error
    raise reported from error


def report_failure(error: KVLinkError, cache: KvCache, moving: Blocks, destination: Blocks) -> KVLinkError:
    """Give the error of a movement its report, and return the error to raise: itself, or a partial one made of it.

    Args:
        cache: ours.
        moving: blocks of ours, as many as `destination`.
        destination: what these are at the destination, ours or the peer's.
    """
    interrupted, error.interrupted = error.interrupted, None
    cause = str(error)
    failed = tuple(int(block) for block in destination)
    peer = 0 if error.peer is None else error.peer
    if interrupted is None:
        failures = (BlockFailure(failed, error.status, cause),) if failed else ()
        error.report = TransferReport(peer, "", 0, 0, 0.0, (), failures)
        return error
    done: tuple[int, ...] = ()
    if len(interrupted.missing) < interrupted.num_extents:
        touched = touched_blocks(interrupted.missing, cache.geometry)
        done = tuple([int(there) for here, there in zip(moving, destination, strict=True) if int(here) not in touched])
    kept = set(done)
    failed = tuple([block for block in failed if block not in kept])
    failures = (BlockFailure(failed, error.status, cause),) if failed else ()
    _, _, nbytes, transport, duration_s = interrupted
    report = TransferReport(peer, transport, nbytes, interrupted.num_extents, duration_s, done, failures)
    if not done:
        error.report = report
        return error
    kind = next((partial for cause, partial in _PARTIAL.items() if isinstance(error, cause)), PartialTransferError)
    return kind(
        f"{len(done)} of {len(done) + len(failed)} blocks were moved, then: {cause}",
        status=error.status,
        peer=error.peer,
        phase=error.phase,
        report=report,
    )
