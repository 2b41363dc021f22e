"""Tickets: `offer_blocks`, `expect_blocks`, and their tokens in place of keys."""

from __future__ import annotations

import kvlink as kv
from tests.spec.ticketing import owner_in_child
from tests.support.pattern import expect

NUM = 16
DESC = kv.CacheDesc(4, (NUM, 256), "uint8")


async def test_between_processes() -> None:
    """A token that travels as text lets another process read these blocks, and both sides learn that it is done."""
    async with owner_in_child() as stage:
        into = stage.reader.allocate_blocks_cache(DESC)
        cache = await stage.owner.call("allocate_blocks", num_tensors=4, shape=[NUM, 256])
        token = await stage.owner.call("offer", cache=cache, blocks=[7, 1, 2])
        report = await stage.reader.pull_blocks(token, into, [], [4, 5, 6])
        expect(into.tensors, stage.owner.stamp(cache), [4, 5, 6], src_blocks=[7, 1, 2])
        assert (report.peer, report.done, report.nbytes) == (1, (4, 5, 6), 3 * 4 * 256)
        assert await stage.owner.call("outcome", number=1) == ["DONE", "", 2]
