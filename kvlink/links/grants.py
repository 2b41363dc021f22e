"""The writer's side of write leases: which caches of a peer we may write into, and giving them back when recalled.

The owner defers the reuse of a cache's memory until every writer has given its lease back, so a lease is given back
only when nothing is written under it any more, and never later than that.

A link that ends gives no lease back: it stops its puts, and the next link of the same two lives is not made before the
last of them has ended (`WriteGrants.until_quiet`). So for the owner a new link of a writer means that nothing is
written under leases of an older one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import anyio

from kvlink.wire import CloseWrite, Found, Message, Target

_MAX_RETURNED: Final = 1024
"""Leases whose return is remembered, for answers that are still on their way to whoever asked."""


class WriteGrant:
    """One lease of a peer's cache.

    Attributes:
        found: where the cache lies; ``found.lease`` is the lease.
        is_recalled: whether the owner wants it back; no new put may begin.
        targets: by which it is found.
    """

    __slots__ = ("_grants", "_num_puts", "found", "is_recalled", "targets")

    def __init__(self, grants: WriteGrants, found: Found) -> None:
        self.found = found
        self.is_recalled = False
        self.targets: set[Target] = set()
        self._grants = grants
        self._num_puts = 0

    def begin(self) -> None:
        """Count a put under this lease. Paired with `end`."""
        self._num_puts += 1
        self._grants.num_puts += 1

    def end(self) -> None:
        """Undo one `begin`; the last one gives a recalled lease back."""
        self._num_puts -= 1
        self._grants.end_put()
        self._grants.settle(self)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is written under it now."""
        return self._num_puts == 0


class WriteGrants:
    """All write leases that one peer has given us.

    Args:
        post: sends a message to that peer.

    Attributes:
        num_puts: puts in flight, under leases and into rooms of detours.
    """

    def __init__(self, post: Callable[[Message], None]) -> None:
        self._post = post
        self._by_lease: dict[int, WriteGrant] = {}
        self._by_target: dict[Target, WriteGrant] = {}
        self._returned: deque[int] = deque(maxlen=_MAX_RETURNED)
        self.num_puts = 0
        self._is_stopped = False
        self._moving: set[anyio.CancelScope] = set()
        self._has_ended = anyio.Event()

    def __len__(self) -> int:
        """Targets that can be written into without asking."""
        return len(self._by_target)

    @contextmanager
    def stoppable(self, scope: anyio.CancelScope) -> Iterator[None]:
        """Count the body as a put, which `stop` cancels by `scope`."""
        self.num_puts += 1
        self._moving.add(scope)
        if self._is_stopped:
            scope.cancel()
        try:
            yield
        finally:
            self._moving.discard(scope)
            self.end_put()

    def end_put(self) -> None:
        """A put has ended, and nothing is written for it any more."""
        self.num_puts -= 1
        if not self.num_puts:
            self._has_ended.set()

    def stop(self) -> None:
        """The link has ended: cancel puts that can be, from now on too. Idempotent."""
        self._is_stopped = True
        for scope in self._moving:
            scope.cancel()

    async def until_quiet(self) -> None:
        """Return when nothing is written any more; soon after `stop`, for a cancelled put ends within a chunk."""
        while self.num_puts:
            if self._has_ended.is_set():
                self._has_ended = anyio.Event()
            await self._has_ended.wait()

    def get(self, target: Target) -> WriteGrant | None:
        """Return the grant by which `target` was last reached, unless it was recalled."""
        return self._by_target.get(target)

    def forget(self, target: Target) -> None:
        """Ask the peer anew the next time; the lease itself stays until it is recalled."""
        self._by_target.pop(target, None)

    def add(self, found: Found) -> WriteGrant:
        """Keep the peer's answer; the same lease again is the same grant, whatever target it was reached by.

        Only a lease that is known here can be given back when it is recalled, so this comes before anything can fail;
        `name` comes when the memory can be written.
        """
        grant = self._by_lease.get(found.lease)
        if grant is None:
            grant = WriteGrant(self, found)
            if found.lease in self._returned:
                grant.is_recalled = True  # the recall overtook whoever asked for it
            else:
                self._by_lease[found.lease] = grant
        elif found.addresses:
            grant.found = found  # the same cache, and now with addresses
        return grant

    def name(self, target: Target, grant: WriteGrant) -> None:
        """Let `get` find a grant whose memory can be written now, unless it was recalled meanwhile."""
        if not grant.is_recalled:
            self._by_target[target] = grant
            grant.targets.add(target)

    def recall(self, lease: int) -> None:
        """The owner wants this lease back: at once when idle, else when the last put under it has ended."""
        grant = self._by_lease.get(lease)
        if grant is None:
            self._returned.append(lease)  # granted to a caller that has gone, or has not had its turn yet
            self._post(CloseWrite(lease))
            return
        grant.is_recalled = True
        for target in grant.targets:  # else a link would remember every cache that was ever pushed into
            if self._by_target.get(target) is grant:
                del self._by_target[target]
        self.settle(grant)

    def settle(self, grant: WriteGrant) -> None:
        """Give a recalled grant back if it is idle."""
        if grant.is_recalled and grant.is_idle and self._by_lease.pop(grant.found.lease, None) is not None:
            self._post(CloseWrite(grant.found.lease))
