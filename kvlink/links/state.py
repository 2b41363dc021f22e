"""The life of a link, as a table. Pure.

::

    GREETING --HELLO--> OPEN --CLOSE_ASKED--> DRAINING --DRAINED--> CLOSED
        |                 |                      |
        +----REFUSED------+------PEER_LOST-------+-----------------> CLOSED
                          +------GOODBYE---------+-----------------> CLOSED

A link is made on both sides by one handshake and is OPEN from its last message on. DRAINING is ours: no new operation
starts, those in flight may end, then the goodbye is sent. CLOSED is final: a new link to the same peer is a new object.
"""

from __future__ import annotations

from enum import Enum
from typing import Final


class LinkState(Enum):
    """Where a link is in its life."""

    GREETING = "greeting"
    OPEN = "open"
    DRAINING = "draining"
    CLOSED = "closed"


class LinkEvent(Enum):
    """What can happen to a link."""

    HELLO = "hello"
    REFUSED = "refused"
    CLOSE_ASKED = "close asked"
    DRAINED = "drained"
    GOODBYE = "goodbye"
    PEER_LOST = "peer lost"
    REPLACED = "replaced"


NEXT: Final[dict[tuple[LinkState, LinkEvent], LinkState]] = {
    (LinkState.GREETING, LinkEvent.HELLO): LinkState.OPEN,
    (LinkState.GREETING, LinkEvent.REFUSED): LinkState.CLOSED,
    (LinkState.GREETING, LinkEvent.CLOSE_ASKED): LinkState.CLOSED,
    (LinkState.OPEN, LinkEvent.CLOSE_ASKED): LinkState.DRAINING,
    (LinkState.DRAINING, LinkEvent.CLOSE_ASKED): LinkState.DRAINING,
    (LinkState.DRAINING, LinkEvent.DRAINED): LinkState.CLOSED,
    **{(state, LinkEvent.GOODBYE): LinkState.CLOSED for state in LinkState},
    **{(state, LinkEvent.PEER_LOST): LinkState.CLOSED for state in LinkState},
    **{(state, LinkEvent.REPLACED): LinkState.CLOSED for state in LinkState},
    # What comes too late changes nothing.
    **{(LinkState.CLOSED, event): LinkState.CLOSED for event in LinkEvent},
}


class ImpossibleEvent(Exception):
    """An event came in a state in which it cannot happen: a bug in kvlink, never a peer's doing."""


def next_state(state: LinkState, event: LinkEvent) -> LinkState:
    """Return the state after `event`."""
    try:
        return NEXT[state, event]
    except KeyError:
        raise ImpossibleEvent(f"{event.value!r} cannot happen to a link that is {state.value}") from None
