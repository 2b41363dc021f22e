"""The life of a link: the whole table, written out once more by hand."""

from __future__ import annotations

from itertools import product
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlink.links.state import NEXT, ImpossibleEvent, LinkEvent, LinkState, next_state

# One line per state; the columns are the events, in this order. "-" is: cannot happen.
EVENTS: Final = ("HELLO", "REFUSED", "CLOSE_ASKED", "DRAINED", "GOODBYE", "PEER_LOST", "REPLACED")
TABLE: Final = """
    GREETING  OPEN    CLOSED  CLOSED    -       CLOSED  CLOSED  CLOSED
    OPEN      -       -       DRAINING  -       CLOSED  CLOSED  CLOSED
    DRAINING  -       -       DRAINING  CLOSED  CLOSED  CLOSED  CLOSED
    CLOSED    CLOSED  CLOSED  CLOSED    CLOSED  CLOSED  CLOSED  CLOSED
"""


def expected() -> dict[tuple[LinkState, LinkEvent], LinkState | None]:
    """The table above, None for what cannot happen."""
    table: dict[tuple[LinkState, LinkEvent], LinkState | None] = {}
    for line in TABLE.strip().splitlines():
        state, *outcomes = line.split()
        for event, outcome in zip(EVENTS, outcomes, strict=True):
            table[LinkState[state], LinkEvent[event]] = None if outcome == "-" else LinkState[outcome]
    return table


EXPECTED: Final = expected()


def test_the_table_is_about_every_state_and_event() -> None:
    """No state and no event is missing above, and the package's table has nothing else."""
    assert set(EXPECTED) == set(product(LinkState, LinkEvent))
    assert set(NEXT) == {pair for pair, outcome in EXPECTED.items() if outcome is not None}


@pytest.mark.parametrize(("state", "event"), list(EXPECTED), ids=lambda value: value.name)
def test_each_event_in_each_state(state: LinkState, event: LinkEvent) -> None:
    """Every event leads from every state to the listed one, or is impossible and says what cannot happen to what."""
    outcome = EXPECTED[state, event]
    if outcome is None:
        with pytest.raises(ImpossibleEvent) as caught:
            next_state(state, event)
        assert event.value in str(caught.value)
        assert state.value in str(caught.value)
        assert (state, event) not in NEXT
    else:
        assert next_state(state, event) is outcome


@pytest.mark.parametrize("event", LinkEvent, ids=lambda event: event.name)
def test_closed_is_final(event: LinkEvent) -> None:
    """Whatever comes too late, a closed link stays closed and nothing is raised."""
    assert next_state(LinkState.CLOSED, event) is LinkState.CLOSED


@pytest.mark.parametrize("state", LinkState, ids=lambda state: state.name)
def test_every_link_can_end_at_once(state: LinkState) -> None:
    """The loss of the peer, its goodbye and a new link in its place end a link in any state."""
    for event in (LinkEvent.PEER_LOST, LinkEvent.GOODBYE, LinkEvent.REPLACED):
        assert next_state(state, event) is LinkState.CLOSED


@given(st.lists(st.sampled_from(LinkEvent)))
def test_no_history_leads_back(events: list[LinkEvent]) -> None:
    """Under any events that can happen a link only goes forward: greeting, open, draining, closed."""
    order = list(LinkState)
    assert [state.name for state in order] == ["GREETING", "OPEN", "DRAINING", "CLOSED"]
    state = LinkState.GREETING
    for event in events:
        if EXPECTED[state, event] is None:
            continue
        following = next_state(state, event)
        assert order.index(following) >= order.index(state)
        state = following


def test_an_impossible_event_is_no_error_of_the_library() -> None:
    """It is a bug in kvlink: it must not look like something that a caller or a peer did."""
    assert ImpossibleEvent.__mro__[1] is Exception
