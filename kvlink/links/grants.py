"""The writer's side of write leases: which caches of a peer we may write into, and giving them back when recalled.

The owner defers the reuse of a cache's memory until every writer has given its lease back, so a lease is given back
only when nothing is written under it any more, and never later than that.
"""

from __future__ import annotations

from collections.abc import Callable

from kvlink.wire import CloseWrite, Found, Message, Target


class WriteGrant:
    """One lease of a peer's cache.

    Attributes:
        found: where the cache lies; ``found.lease`` is the lease.
        is_recalled: whether the owner wants it back; no new put may begin.
    """

    __slots__ = ("_grants", "_num_puts", "found", "is_recalled")

    def __init__(self, grants: WriteGrants, found: Found) -> None:
        self.found = found
        self.is_recalled = False
        self._grants = grants
        self._num_puts = 0

    def begin(self) -> None:
        """Count a put under this lease. Paired with `end`."""
        self._num_puts += 1

    def end(self) -> None:
        """Undo one `begin`; the last one gives a recalled lease back."""
        self._num_puts -= 1
        self._grants.settle(self)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is written under it now."""
        return self._num_puts == 0


class WriteGrants:
    """All write leases that one peer has given us.

    Args:
        post: sends a message to that peer.
    """

    def __init__(self, post: Callable[[Message], None]) -> None:
        self._post = post
        self._by_lease: dict[int, WriteGrant] = {}
        self._by_target: dict[Target, WriteGrant] = {}

    def get(self, target: Target) -> WriteGrant | None:
        """Return the grant by which `target` was last reached, unless it was recalled."""
        grant = self._by_target.get(target)
        if grant is not None and grant.is_recalled:
            del self._by_target[target]
            return None
        return grant

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
            grant = self._by_lease[found.lease] = WriteGrant(self, found)
        elif found.addresses:
            grant.found = found  # the same cache, and now with addresses
        return grant

    def name(self, target: Target, grant: WriteGrant) -> None:
        """Let `get` find a grant whose memory can be written now, unless it was recalled meanwhile."""
        if not grant.is_recalled:
            self._by_target[target] = grant

    def recall(self, lease: int) -> None:
        """The owner wants this lease back: at once when idle, else when the last put under it has ended."""
        grant = self._by_lease.get(lease)
        if grant is None:
            self._post(CloseWrite(lease))  # granted to a caller that has gone
            return
        grant.is_recalled = True
        self.settle(grant)

    def settle(self, grant: WriteGrant) -> None:
        """Give a recalled grant back if it is idle."""
        if grant.is_recalled and grant.is_idle and self._by_lease.pop(grant.found.lease, None) is not None:
            self._post(CloseWrite(grant.found.lease))
