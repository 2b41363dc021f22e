"""Who goes next when a cluster has as much in flight as it may."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvlink as kv
from kvlink.links.gates import Gate, Quota
from tests.support.loops import asyncio_and_trio, run_on


def gone() -> kv.KVLinkError:
    return kv.NotLinkedError("the link has ended")


def gates(number: int = 2, *, per_link: int = 2, total: int = 3) -> tuple[Quota, list[Gate]]:
    """Return a quota and the gates of some links."""
    quota = Quota("things", per_link=per_link, total=total)
    return quota, [Gate(quota, gone, peer) for peer in range(number)]


class Crowd:
    """Callers that wait at gates, by name, and the order in which they got in."""

    def __init__(self, tasks: anyio.abc.TaskGroup) -> None:
        self._tasks = tasks
        self.inside: list[str] = []
        self.errors: dict[str, Exception] = {}
        self.scopes: dict[str, anyio.CancelScope] = {}

    async def arrive(self, name: str, gate: Gate, amount: int = 1, timeout_s: float = 60) -> None:
        """Let one more caller ask, and stand in the queue if it must."""
        scope = self.scopes[name] = anyio.CancelScope()

        async def ask() -> None:
            with scope:
                try:
                    await gate.take(amount, timeout_s)
                except kv.KVLinkError as exc:
                    self.errors[name] = exc
                else:
                    self.inside.append(name)

        self._tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()


@asyncio_and_trio
async def test_within_a_link_whoever_asked_first_goes_first() -> None:
    """Five callers at a gate for two: in the order of their asking, each when one before it has ended."""
    _, (gate, _) = gates()
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(tasks)
        for name in "abcde":
            await crowd.arrive(name, gate)
        for expected in ("ab", "abc", "abcd", "abcde"):
            assert "".join(crowd.inside) == expected
            gate.give(1)
            await anyio.wait_all_tasks_blocked()


@asyncio_and_trio
async def test_between_links_in_turn() -> None:
    """A link with ten callers and one with two: they take turns."""
    quota, (many, few) = gates(per_link=2, total=2)
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(tasks)
        for number in range(10):
            await crowd.arrive(f"m{number}", many)
        for number in range(2):
            await crowd.arrive(f"f{number}", few)
        assert crowd.inside == ["m0", "m1"]
        for _ in range(10):
            (many if many.used else few).give(1)
            await anyio.wait_all_tasks_blocked()
        assert crowd.inside[2:7] == ["f0", "m2", "f1", "m3", "m4"]
        assert quota.used == 2


@asyncio_and_trio
async def test_a_link_that_has_its_share_holds_nobody_else_up() -> None:
    """While one link's callers wait for that link, another's go past; a newcomer at the full link does not."""
    _, (full, other) = gates(per_link=2, total=5)
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(tasks)
        for name in "abc":
            await crowd.arrive(name, full)
        await crowd.arrive("x", other)
        assert crowd.inside == ["a", "b", "x"]
        full.give(1)
        assert not full.try_take(1)  # it is c's turn, not a newcomer's
        await anyio.wait_all_tasks_blocked()
        assert crowd.inside == ["a", "b", "x", "c"]
        full.give(2)


@asyncio_and_trio
async def test_a_large_one_is_not_kept_out_by_small_ones() -> None:
    """Whose turn it is waits for room in the whole, and nobody overtakes it."""
    _, (one, two) = gates(per_link=4, total=4)
    assert one.try_take(1)
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(tasks)
        await crowd.arrive("large", two, 4)
        await crowd.arrive("small", one, 1)
        assert not two.try_take(1)
        assert crowd.inside == []
        one.give(1)
        await anyio.wait_all_tasks_blocked()
        assert crowd.inside == ["large"]
        two.give(4)
        await anyio.wait_all_tasks_blocked()
        assert crowd.inside == ["large", "small"]


@asyncio_and_trio
async def test_what_is_larger_than_the_limit_runs_alone() -> None:
    """It waits until nothing else is in flight on its link, and then goes; nothing else goes with it."""
    quota, (gate, _) = gates(per_link=4, total=8)
    assert gate.try_take(1)
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(tasks)
        await crowd.arrive("giant", gate, 10**12)
        assert crowd.inside == []
        gate.give(1)
        await anyio.wait_all_tasks_blocked()
        assert crowd.inside == ["giant"]
        assert not gate.try_take(1)
        gate.give(10**12)
    assert (gate.used, quota.used) == (0, 0)


@asyncio_and_trio
async def test_the_deadline_counts_in_the_queue() -> None:
    """Who does not get its turn in time is told so, with who is in the way; what is left of the time is returned."""
    quota, (gate, _) = gates(per_link=1)
    assert await gate.take(1, 7.5) == 7.5
    with pytest.raises(
        kv.TransferTimeoutError, match=r"waited 0.05 s .* cluster 0 has 1 things of 1, .* 1 of 3"
    ) as caught:
        await gate.take(1, 0.05)
    assert caught.value.phase == "queue"
    async with anyio.create_task_group() as tasks:

        async def late() -> None:
            assert 5 < await gate.take(1, 10) < 9.96

        tasks.start_soon(late)
        await anyio.sleep(0.05)
        gate.give(1)
    gate.give(1)
    assert quota.used == 0


@asyncio_and_trio
async def test_who_is_cancelled_leaves_the_queue() -> None:
    """In the middle, at its head, and at the very moment of its turn: the next one gets in, and nothing is lost."""
    quota, (gate, _) = gates(per_link=4, total=4)
    assert gate.try_take(3)
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(tasks)
        await crowd.arrive("a", gate, 2)
        await crowd.arrive("b", gate, 4)
        await crowd.arrive("c", gate, 1)
        crowd.scopes["b"].cancel()
        await anyio.wait_all_tasks_blocked()
        assert crowd.inside == []
        crowd.scopes["a"].cancel()
        await anyio.wait_all_tasks_blocked()
        assert crowd.inside == ["c"]
        await crowd.arrive("d", gate, 2)
        gate.give(3)
        crowd.scopes["d"].cancel()  # its turn has come, and it has not run yet
        await anyio.wait_all_tasks_blocked()
    gate.give(1 + 2 * ("d" in crowd.inside))
    assert (gate.used, quota.used) == (0, 0)


@asyncio_and_trio
async def test_a_link_that_ends_sends_its_queue_away() -> None:
    """With the link's own error, and whoever waited behind them in the whole gets in."""
    quota, (one, two) = gates(per_link=3, total=3)
    assert two.try_take(1)
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(tasks)
        await crowd.arrive("a", one, 3)
        await crowd.arrive("b", two, 1)
        one.close()
        await anyio.wait_all_tasks_blocked()
        assert isinstance(crowd.errors["a"], kv.NotLinkedError)
        assert crowd.inside == ["b"]
    two.give(2)
    assert quota.used == 0


STEPS = st.lists(
    st.tuples(st.sampled_from(["take", "give", "cancel", "close"]), st.integers(0, 2), st.integers(1, 7)), max_size=40
)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5), st.integers(1, 8), STEPS)
def test_nothing_is_lost_and_no_limit_is_passed(per_link: int, total: int, steps: list[tuple[str, int, int]]) -> None:
    """Whatever comes in whatever order: no more is in flight than may be, and when all has ended nothing is."""

    async def play() -> None:
        quota, doors = gates(3, per_link=per_link, total=total)
        held: list[Callable[[], None]] = []
        async with anyio.create_task_group() as tasks:
            scopes: list[anyio.CancelScope] = []

            async def ask(gate: Gate, amount: int) -> None:
                with anyio.CancelScope() as scope:
                    scopes.append(scope)
                    try:
                        await gate.take(amount, 60)
                    except kv.NotLinkedError:
                        return
                    held.append(lambda: gate.give(amount))

            for what, which, amount in steps:
                if what == "take":
                    tasks.start_soon(ask, doors[which], amount)
                elif what == "give" and held:
                    held.pop(amount % len(held))()
                elif what == "cancel" and scopes:
                    scopes[amount % len(scopes)].cancel()
                elif what == "close":
                    doors[which].close()
                if amount % 2:
                    await anyio.wait_all_tasks_blocked()
                assert quota.used == sum(door.used for door in doors) <= quota.total
                assert all(door.used <= quota.per_link for door in doors)
            for _ in range(len(steps) + 1):
                await anyio.wait_all_tasks_blocked()
                while held:
                    held.pop()()
            tasks.cancel_scope.cancel()
        assert quota.used == 0
        assert not quota.ready
        assert not any(door.waiting or door.is_ready for door in doors)

    run_on("asyncio", play)
