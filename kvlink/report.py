"""What a movement tells its caller."""

from __future__ import annotations

from time import perf_counter
from typing import Any, NamedTuple

import msgspec

from kvlink.errors import KVLinkError, LinkError, StatusCode, error_for
from kvlink.plan import Extent


class BlockFailure(NamedTuple):
    """Blocks, in the caller's own destination numbers, that were not moved, and why."""

    blocks: tuple[int, ...]
    status: StatusCode
    cause: str


class Interrupted(NamedTuple):
    """A movement that ended before its end.

    Attributes:
        missing: the extents of which it cannot be vouched that all their bytes are in place.
        num_extents: of the whole movement.
        nbytes: bytes in the others.
        transport: what moved them.
        duration_s: how long.
    """

    missing: tuple[Extent, ...]
    num_extents: int
    nbytes: int
    transport: str
    duration_s: float


class TransferReport(msgspec.Struct, frozen=True):
    """What one pull or push did.

    `done` and the blocks of `failed` partition the destination numbers of the request; for a movement of one slot they
    are that slot. A call that returns has an empty `failed`; one that fails raises its error with this as `report`.

    A block of a failed call is done when all its bytes are in place in every tensor, and the peer's cache was found
    valid *after* that. When the cache has ended, or nobody can tell, no block is done. Neighbouring blocks travel as
    one and fail as one. A cancelled call has no report: its destination is undefined.

    Attributes:
        peer: the other side's cluster id.
        transport: what moved the bytes: ``"shm"``, ``"ucx"`` ...
        nbytes: bytes that landed.
        num_extents: strided pieces that the request became.
        duration_s: from the call to the last check, in seconds.
        done: destination numbers that landed whole.
        failed: the rest, with causes.
    """

    peer: int
    transport: str
    nbytes: int
    num_extents: int
    duration_s: float
    done: tuple[int, ...]
    failed: tuple[BlockFailure, ...] = ()

    @classmethod
    def of(
        cls, peer: int, transport: str, nbytes: int, num_extents: int, started: float, done: tuple[int, ...]
    ) -> TransferReport:
        """Return the report of a movement that began at `started` (``perf_counter``) and has just ended well."""
        return cls(peer, transport, nbytes, num_extents, perf_counter() - started, done)

    @property
    def gb_per_s(self) -> float:
        """Bytes per nanosecond: 10**9 bytes a second."""
        return self.nbytes / self.duration_s / 1e9 if self.duration_s > 0 else 0.0


class LinkResult(NamedTuple):
    """What linking to, unlinking from or probing one cluster came to. `error` says why it failed."""

    cluster_id: int
    status: StatusCode
    error: KVLinkError | None = None

    @property
    def is_ok(self) -> bool:
        """Whether the wish is now reality: done, or nothing was to be done."""
        return self.status in _HARMLESS

    @classmethod
    def failed(cls, cluster_id: int, error: KVLinkError) -> LinkResult:
        """Return the result that carries `error`."""
        return cls(cluster_id, error.status, error)


_HARMLESS = frozenset({StatusCode.LLM_SUCCESS, StatusCode.LLM_ALREADY_LINK, StatusCode.LLM_REPEAT_REQUEST})


class LinkResults(tuple[StatusCode, tuple[LinkResult, ...]]):
    """The spec's pair: one status for the call, one result per cluster, in the order of the argument.

    It unpacks as ``status, results``. `error` is the cause when the call as a whole was refused.
    """

    error: KVLinkError | None

    def __new__(
        cls, status: StatusCode, results: tuple[LinkResult, ...], error: KVLinkError | None = None
    ) -> LinkResults:
        self = super().__new__(cls, (status, results))
        self.error = error
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (*self, self.error))

    @classmethod
    def refused(cls, error: KVLinkError) -> LinkResults:
        """Return the outcome of a call that was refused as a whole."""
        return cls(error.status, (), error)

    @property
    def status(self) -> StatusCode:
        """The outcome of the call as a whole."""
        return self[0]

    @property
    def results(self) -> tuple[LinkResult, ...]:
        """The outcome for each cluster, in the order of the argument."""
        return self[1]

    @property
    def is_ok(self) -> bool:
        """Whether the call as a whole succeeded."""
        return self.status is StatusCode.LLM_SUCCESS

    def raise_for_status(self) -> None:
        """Raise the cause of a failed call: its own, else the first failed cluster's."""
        if self.is_ok:
            return
        for error in (self.error, *(result.error for result in self.results if not result.is_ok)):
            if error is not None:
                raise error
        raise LinkError(f"the call ended with {self.status.name}", status=self.status)


def failed_result(cluster_id: int, status: StatusCode, message: str) -> LinkResult:
    """Return a result whose error says `message`."""
    return LinkResult(cluster_id, status, error_for(status, message, peer=cluster_id))
