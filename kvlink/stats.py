"""Counters. Plain numbers that only grow; reading them is free and never waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class PoolUsage(NamedTuple):
    """What a pool holds at one moment.

    Attributes:
        nbytes, free_nbytes, largest_hole_nbytes: of the pool, in bytes.
        num_caches: caches that live, by their id or by a key.
        num_waiting: caches that have ended and whose memory something still uses: a view, a transfer, a lease.
        quarantined: how many write leases keep memory in quarantine (see `KvCache.is_quiet`), by the cluster id of the
            peer that may still write.
    """

    nbytes: int
    free_nbytes: int
    largest_hole_nbytes: int
    num_caches: int
    num_waiting: int
    quarantined: dict[int, int]


@dataclass(slots=True)
class LinkStats:
    """What went over one link since it was made.

    Attributes:
        pulls, pushes: movements that succeeded.
        failures: movements that raised.
        nbytes_pulled, nbytes_pushed: bytes of those that succeeded.
        round_trips: control requests that this side has sent and waited for.
        messages_sent, messages_received: control messages, heartbeats included.
    """

    pulls: int = 0
    pushes: int = 0
    failures: int = 0
    nbytes_pulled: int = 0
    nbytes_pushed: int = 0
    round_trips: int = 0
    messages_sent: int = 0
    messages_received: int = 0
