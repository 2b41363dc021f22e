"""Heartbeats over links to other hosts: silence is noticed within the limit, and our own deafness is not silence."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

import kvlink as kv
from kvlink.links.table import BEATS, LinkTable
from tests.support import inside
from tests.support.loops import eventually

LIMIT_S: Final = 1000.0
"""So that no beat but the test's own comes in its time."""
BEAT_S: Final = LIMIT_S / BEATS


@asynccontextmanager
async def far_link() -> AsyncIterator[tuple[LinkTable, kv.Link]]:
    """Link two clusters; the one that dials takes the other for one of another host."""
    config = kv.ClusterConfig(liveness_s=LIMIT_S)
    async with (
        kv.Cluster(cluster_id=1, role=kv.Role.PROMPT, pool="1MiB", config=config) as peer,
        kv.Cluster(cluster_id=2, role=kv.Role.DECODER, pool="1MiB", config=config) as here,
    ):
        (await here.link_clusters([kv.ClusterInfo(1, peer.address)])).raise_for_status()
        link, table = inside.link_to(here, 1), inside.table_of(here)
        link.endpoint.capabilities = replace(link.endpoint.capabilities, is_same_host=False)
        yield table, link


async def test_silence_is_noticed_within_the_limit_and_not_much_before() -> None:
    """The last look before the limit gives the link up; until then it stays, and the peer is asked whether it lives."""
    async with far_link() as (table, link):
        start, said = link.heard_at, link.stats.messages_sent
        for number in range(1, BEATS):
            table.beat(start + number * BEAT_S)
            assert link.is_open
        assert link.stats.messages_sent - said >= 2
        link.heard_at = start  # its answers came, at the true time, which the test's clock has left behind
        table.beat(start + LIMIT_S)
        assert link.state is kv.LinkState.CLOSED


async def test_an_answer_keeps_the_link() -> None:
    """A peer that is heard of between two looks is not given up, however long it goes on."""
    async with far_link() as (table, link):
        start = link.heard_at
        for number in range(1, 5 * BEATS):
            before, now = link.heard_at, start + number * BEAT_S
            said = link.stats.messages_sent
            table.beat(now)
            assert link.is_open
            if link.stats.messages_sent > said:  # it was asked, and answers
                await eventually(lambda: link.heard_at != before, "the answer")  # noqa: B023  # used at once
                link.heard_at = now


async def test_time_in_which_we_heard_nobody_is_no_silence_of_theirs() -> None:
    """A loop that was held up for most of the limit finds its links as they were; what follows counts again."""
    async with far_link() as (table, link):
        start = link.heard_at
        table.beat(start + BEAT_S)
        late = start + BEAT_S + 0.95 * LIMIT_S
        table.beat(late)
        assert link.is_open
        for number in range(1, BEATS):
            table.beat(late + number * BEAT_S)
        assert link.state is kv.LinkState.CLOSED
