"""The allocator against a model too simple to be wrong, and the sentences of its contract one by one."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from kvlink.memory.allocator import Allocator, PoolExhausted

BASE: Final = 512
PAGE: Final = 4096
KIB: Final = 1024


@dataclass(frozen=True)
class Observed:
    """All that an allocator says of itself."""

    holes: list[tuple[int, int]]
    free_nbytes: int
    used_nbytes: int
    largest_hole_nbytes: int
    num_allocations: int


def observe(allocator: Allocator) -> Observed:
    return Observed(
        holes=list(allocator.holes()),
        free_nbytes=allocator.free_nbytes,
        used_nbytes=allocator.used_nbytes,
        largest_hole_nbytes=allocator.largest_hole_nbytes,
        num_allocations=allocator.num_allocations,
    )


# ---- against a model


class AgainstModel(RuleBasedStateMachine):
    """The model is one owner per unit of the base alignment, 0 for nobody; every answer looks at every unit."""

    allocations: Bundle[int] = Bundle("allocations")

    @initialize(
        target=allocations,
        units=st.sampled_from([0, 1, 16, 23, 32, 40]),
        log2_base=st.sampled_from([0, 4, 9, 12]),
        pieces=st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=16),
    )
    def open_pool(self, units: int, log2_base: int, pieces: list[tuple[int, bool]]) -> MultipleResults[int]:
        """Start with a pool in pieces, (units, whether kept) each: few random walks from an empty pool get there."""
        self.base = 1 << log2_base
        self.allocator = Allocator(units * self.base, alignment=self.base)
        self.owners = [0] * units
        self.last_owner = 0
        taken = [(self.take(piece, None), is_kept) for piece, is_kept in pieces if self.model_places(piece, 1)]
        for offset, is_kept in taken:
            if not is_kept:
                self.give_back(offset)
        return multiple(*(offset for offset, is_kept in taken if is_kept))

    def model_holes(self) -> list[tuple[int, int]]:
        """``(first unit, units)`` of each longest run of units that nobody owns, in address order."""
        runs: list[tuple[int, int]] = []
        for unit, owner in enumerate(self.owners):
            if owner:
                continue
            if runs and sum(runs[-1]) == unit:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((unit, 1))
        return runs

    def model_places(self, units: int, step: int) -> list[tuple[int, int]]:
        """``(units of the hole, first unit)`` of every place for `units` units at a multiple of `step`, best first."""
        return sorted(
            (hole_units, unit)
            for first, hole_units in self.model_holes()
            for unit in range(first, first + hole_units - units + 1)
            if unit % step == 0
        )

    def take(self, units: int, step: int | None, *, missing: int = 0) -> int:
        """Allocate where the model says that there is room, and check that the place is the model's."""
        hole_units, place = self.model_places(units, step or 1)[0]
        event("granted: exact fit" if hole_units == units else "granted: from a larger hole")
        offset = self.allocator.allocate(
            units * self.base - missing, alignment=None if step is None else step * self.base
        )
        first = offset // self.base
        assert offset % ((step or 1) * self.base) == 0, "misaligned"
        assert 0 <= first <= len(self.owners) - units, "outside the pool"
        assert not any(self.owners[first : first + units]), "overlaps another allocation"
        assert first == place, "not the best fit, or not at the lowest address"
        self.last_owner += 1
        self.owners[first : first + units] = [self.last_owner] * units
        return offset

    def give_back(self, offset: int) -> None:
        owner = self.owners[offset // self.base]
        assert self.allocator.free(offset) == self.owners.count(owner) * self.base
        self.owners = [0 if other == owner else other for other in self.owners]

    @rule(
        target=allocations,
        units=st.sampled_from([1, 2, 3, 4, 5, 8, 16, 41]),
        missing=st.integers(0, PAGE),
        step=st.sampled_from([None, 1, 2, 4, 8, 32]),
    )
    def allocate(self, units: int, missing: int, step: int | None) -> int | MultipleResults[int]:
        missing %= self.base
        if self.model_places(units, step or 1):
            return self.take(units, step, missing=missing)
        before = observe(self.allocator)
        event("refused: " + ("too little" if before.free_nbytes < units * self.base else "in pieces or misaligned"))
        with pytest.raises(PoolExhausted) as caught:
            self.allocator.allocate(units * self.base - missing, alignment=None if step is None else step * self.base)
        assert caught.value.needed == units * self.base
        assert caught.value.free == self.owners.count(0) * self.base
        assert caught.value.largest_hole == max((n for _, n in self.model_holes()), default=0) * self.base
        assert observe(self.allocator) == before, "a refused allocation changed something"
        return multiple()

    @rule(offset=consumes(allocations))
    def free(self, offset: int) -> None:
        self.give_back(offset)

    @rule(offset=st.integers(-1, 49), off_by=st.integers(0, 1))
    def free_what_is_not_allocated(self, offset: int, off_by: int) -> None:
        starts = {self.owners.index(owner) * self.base for owner in set(self.owners) - {0}}
        offset = offset * self.base + off_by
        if offset in starts:
            return
        before = observe(self.allocator)
        with pytest.raises(ValueError, match=f"no allocation starts at offset {offset}:"):
            self.allocator.free(offset)
        assert observe(self.allocator) == before, "a refused free changed something"

    @invariant()
    def holes_are_what_nobody_owns(self) -> None:
        """The runs of the model are the longest ones: so holes never touch, and the tiling is exact."""
        holes = [(first * self.base, units * self.base) for first, units in self.model_holes()]
        assert list(self.allocator.holes()) == holes

    @invariant()
    def counts_are_right(self) -> None:
        free = self.owners.count(0) * self.base
        assert self.allocator.nbytes == len(self.owners) * self.base
        assert self.allocator.free_nbytes == free
        assert self.allocator.used_nbytes == self.allocator.nbytes - free
        assert self.allocator.largest_hole_nbytes == max((n for _, n in self.model_holes()), default=0) * self.base
        assert self.allocator.num_allocations == len(set(self.owners) - {0})

    def teardown(self) -> None:
        """Whatever was done, giving everything back leaves the whole pool as one hole."""
        for owner in set(self.owners) - {0}:
            self.allocator.free(self.owners.index(owner) * self.base)
        assert list(self.allocator.holes()) == ([(0, self.allocator.nbytes)] if self.owners else [])
        assert self.allocator.num_allocations == 0


def test_allocator_answers_as_the_model() -> None:
    """Under any sequence of calls the allocator answers as the model does: every place, every refusal, every count."""
    # Several failures of one 40-step run may take minutes to shrink: one is enough.
    run_state_machine_as_test(
        AgainstModel,
        settings=settings(max_examples=200, stateful_step_count=40, deadline=None, report_multiple_bugs=False),
    )


# ---- a new pool


def test_new_pool_is_one_hole() -> None:
    """A new pool is one hole of its whole size."""
    allocator = Allocator(8 * KIB)
    assert observe(allocator) == Observed([(0, 8 * KIB)], 8 * KIB, 0, 8 * KIB, 0)
    assert allocator.nbytes == 8 * KIB


def test_empty_pool_has_no_hole_and_no_room() -> None:
    """A pool of 0 bytes has no holes, and refuses the smallest allocation."""
    allocator = Allocator(0)
    assert observe(allocator) == Observed([], 0, 0, 0, 0)
    with pytest.raises(PoolExhausted) as caught:
        allocator.allocate(1)
    assert (caught.value.needed, caught.value.free, caught.value.largest_hole) == (BASE, 0, 0)


@pytest.mark.parametrize("nbytes", [-BASE, -1, 1, BASE - 1, BASE + 1])
def test_pool_size_must_be_whole(nbytes: int) -> None:
    """A pool whose size is negative or not a multiple of the alignment is refused: its tail could not be given out."""
    with pytest.raises(ValueError, match=f"multiple of its alignment, 512 bytes, not {nbytes} bytes"):
        Allocator(nbytes)


@pytest.mark.parametrize("alignment", [-512, 0, 3, 511, 513, 768])
def test_base_alignment_must_be_power_of_two(alignment: int) -> None:
    """A base alignment that is not a power of two is refused."""
    with pytest.raises(ValueError, match=f"power of two, not {alignment}"):
        Allocator(768 * 513 * 511, alignment=alignment)


# ---- sizes


@pytest.mark.parametrize(
    ("nbytes", "taken"), [(1, BASE), (BASE - 1, BASE), (BASE, BASE), (BASE + 1, 2 * BASE), (3 * BASE - 1, 3 * BASE)]
)
def test_size_is_rounded_up(nbytes: int, taken: int) -> None:
    """A size is rounded up to the base alignment, no further, and `free` says the rounded size."""
    allocator = Allocator(16 * BASE)
    offset = allocator.allocate(nbytes)
    assert allocator.used_nbytes == taken
    assert allocator.free(offset) == taken
    assert allocator.used_nbytes == 0


@pytest.mark.parametrize("nbytes", [0, -1, -BASE])
def test_size_must_be_positive(nbytes: int) -> None:
    """An allocation of no bytes, or fewer, is refused and changes nothing."""
    allocator = Allocator(4 * BASE)
    before = observe(allocator)
    with pytest.raises(ValueError, match=f"at least 1 byte, not {nbytes}"):
        allocator.allocate(nbytes)
    assert observe(allocator) == before


def test_size_must_be_an_integer() -> None:
    """A size that is a float is refused, even when it is whole: a rounded float would lose bytes in a large pool."""
    with pytest.raises(TypeError):
        Allocator(4 * BASE).allocate(512.0)  # type: ignore[arg-type]  # the mistake under test


def test_exact_fit_leaves_no_hole() -> None:
    """An allocation of exactly the pool's size succeeds, leaves no hole, and after it one byte more is refused."""
    allocator = Allocator(4 * BASE)
    assert allocator.allocate(4 * BASE) == 0
    assert observe(allocator) == Observed([], 0, 4 * BASE, 0, 1)
    with pytest.raises(PoolExhausted):
        allocator.allocate(1)


def test_pool_larger_than_any_float_is_exact_in_the_last_byte() -> None:
    """Offsets are exact integers, also in a pool beyond 2**53 bytes."""
    allocator = Allocator(1 << 60)
    assert allocator.allocate((1 << 60) - BASE) == 0
    assert allocator.allocate(BASE) == (1 << 60) - BASE


# ---- which hole


def with_holes(*hole_units: int) -> tuple[Allocator, list[int]]:
    """Return an allocator with holes of so many units, one unit in use after each, and the offsets of the holes."""
    allocator = Allocator((sum(hole_units) + len(hole_units)) * BASE)
    offsets = []
    for units in hole_units:
        offsets.append(allocator.allocate(units * BASE))
        allocator.allocate(BASE)
    for offset in offsets:
        allocator.free(offset)
    assert list(allocator.holes()) == [(o, u * BASE) for o, u in zip(offsets, hole_units, strict=True)]
    return allocator, offsets


@pytest.mark.parametrize(
    ("hole_units", "wanted", "chosen"),
    [
        ((5, 3, 4), 3, 1),  # exact
        ((5, 2, 4), 3, 2),  # the smallest that is large enough, neither the first nor the largest
        ((9, 4, 4, 4), 4, 1),  # equal holes: the lowest address
        ((4, 9, 4), 2, 0),  # equal holes that are too large: also the lowest address
        ((1, 1, 1, 7), 2, 3),  # only one fits
    ],
)
def test_best_fit_lowest_address(hole_units: tuple[int, ...], wanted: int, chosen: int) -> None:
    """The smallest hole that fits is taken, the one at the lowest address among equals, from its start on."""
    allocator, offsets = with_holes(*hole_units)
    assert allocator.allocate(wanted * BASE) == offsets[chosen]


def test_equal_holes_are_taken_by_address_whatever_the_order_of_freeing() -> None:
    """Among equal holes the order in which they were freed plays no part."""
    allocator = Allocator(8 * BASE)
    offsets = [allocator.allocate(BASE) for _ in range(8)]
    for position in (6, 2, 4, 0):
        allocator.free(offsets[position])
    assert [allocator.allocate(BASE) for _ in range(4)] == [offsets[0], offsets[2], offsets[4], offsets[6]]


# ---- alignment


def test_alignment_padding_is_reusable() -> None:
    """The bytes skipped for an alignment are a hole that the next allocation gets, and nothing is lost."""
    allocator = Allocator(4 * PAGE)
    first = allocator.allocate(BASE)
    page = allocator.allocate(PAGE, alignment=PAGE)
    assert (first, page) == (0, PAGE)
    assert allocator.used_nbytes == BASE + PAGE
    assert list(allocator.holes()) == [(BASE, PAGE - BASE), (2 * PAGE, 2 * PAGE)]
    assert allocator.allocate(PAGE - BASE) == BASE
    assert allocator.allocate(2 * PAGE) == 2 * PAGE
    assert allocator.free_nbytes == 0


def test_alignment_padding_coalesces() -> None:
    """When the aligned allocation is freed, the bytes skipped before it, its own and those behind it are one hole."""
    allocator = Allocator(4 * PAGE)
    allocator.allocate(BASE)
    page = allocator.allocate(PAGE, alignment=PAGE)
    assert allocator.free(page) == PAGE
    assert list(allocator.holes()) == [(BASE, 4 * PAGE - BASE)]


def test_aligned_allocation_passes_over_smaller_holes_that_lie_wrongly() -> None:
    """A hole that is large enough but has no room from an aligned offset on is left for a larger one that has."""
    allocator = Allocator(4 * PAGE)
    allocator.allocate(BASE)
    wrong = allocator.allocate(PAGE)
    allocator.allocate(BASE)
    allocator.free(wrong)
    assert list(allocator.holes()) == [(BASE, PAGE), (PAGE + 2 * BASE, 3 * PAGE - 2 * BASE)]
    assert allocator.allocate(PAGE, alignment=PAGE) == 2 * PAGE
    assert allocator.allocate(PAGE) == wrong


def test_aligned_allocation_fits_exactly_at_the_end() -> None:
    """Room that ends with the pool counts: not one byte behind an aligned allocation is asked for."""
    allocator = Allocator(2 * PAGE)
    allocator.allocate(BASE)
    assert allocator.allocate(PAGE, alignment=PAGE) == PAGE


@pytest.mark.parametrize("alignment", [-PAGE, 0, 1, 256, 513, 3 * BASE, PAGE + BASE])
def test_bad_alignment_is_refused(alignment: int) -> None:
    """An alignment below the base one, or not a power of two times it, is refused and changes nothing."""
    allocator = Allocator(4 * PAGE)
    before = observe(allocator)
    with pytest.raises(ValueError, match=f"or more, not {alignment}"):
        allocator.allocate(BASE, alignment=alignment)
    assert observe(allocator) == before


# ---- freeing


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_all_freed_gives_one_hole(order: tuple[int, int, int]) -> None:
    """Freeing everything gives one hole again, in any order: with a hole before, behind, on both sides, on none."""
    allocator = Allocator(6 * BASE)
    offsets = [allocator.allocate(units * BASE) for units in (1, 2, 3)]
    assert [allocator.free(offsets[position]) for position in order] == [(position + 1) * BASE for position in order]
    assert observe(allocator) == Observed([(0, 6 * BASE)], 6 * BASE, 0, 6 * BASE, 0)


def test_double_free_is_refused() -> None:
    """Freeing twice is refused and changes nothing, though the offset now lies inside a hole."""
    allocator = Allocator(4 * BASE)
    offset = allocator.allocate(BASE)
    allocator.free(offset)
    before = observe(allocator)
    with pytest.raises(ValueError, match="no allocation starts at offset 0: it was freed before, or never given out"):
        allocator.free(offset)
    assert observe(allocator) == before


@pytest.mark.parametrize("offset", [-BASE, 1, BASE, 2 * BASE, 4 * BASE, 1 << 40])
def test_freeing_what_is_not_an_allocation_is_refused(offset: int) -> None:
    """Freeing an offset inside an allocation, inside a hole or outside the pool is refused and changes nothing."""
    allocator = Allocator(4 * BASE)
    allocator.allocate(2 * BASE)
    before = observe(allocator)
    with pytest.raises(ValueError, match=f"no allocation starts at offset {offset}:"):
        allocator.free(offset)
    assert observe(allocator) == before


def test_holes_may_change_while_iterated() -> None:
    """`holes` gives those of the moment of the call, so that a caller may fill each one as it comes."""
    allocator, offsets = with_holes(3, 2, 1)
    assert [allocator.allocate(nbytes) for _, nbytes in allocator.holes()] == offsets
    assert allocator.free_nbytes == 0


# ---- refusals


def test_exhausted_pool_names_what_was_needed_and_what_there_is() -> None:
    """When too few bytes are free the error says how many are needed, how many are free, and what to do."""
    allocator = Allocator(4 * BASE)
    allocator.allocate(3 * BASE)
    with pytest.raises(PoolExhausted, match=r"no room for 1024 bytes .*: only 512 are free; free something") as caught:
        allocator.allocate(BASE + 1)
    assert (caught.value.needed, caught.value.free, caught.value.largest_hole) == (2 * BASE, BASE, BASE)
    assert caught.value.alignment == BASE


def test_fragmented_pool_is_told_from_a_full_one() -> None:
    """When enough bytes are free but in pieces, the error names the largest piece."""
    allocator, _ = with_holes(2, 3)
    with pytest.raises(PoolExhausted, match="2560 are free, but in pieces of which the largest has 1536") as caught:
        allocator.allocate(4 * BASE)
    assert (caught.value.needed, caught.value.free, caught.value.largest_hole) == (4 * BASE, 5 * BASE, 3 * BASE)


def test_refusal_for_alignment_names_the_alignment() -> None:
    """When a hole is large enough but lies wrongly, the error names the alignment; without it the bytes can be had."""
    allocator = Allocator(2 * PAGE)
    allocator.allocate(BASE)
    with pytest.raises(PoolExhausted, match="none has room from a multiple of 4096 on") as caught:
        allocator.allocate(PAGE + BASE, alignment=PAGE)
    assert caught.value.largest_hole == 2 * PAGE - BASE > caught.value.needed
    assert caught.value.alignment == PAGE
    assert allocator.allocate(PAGE + BASE) == BASE


def test_refused_allocation_changes_nothing() -> None:
    """After a refusal the same allocator gives what it would have given without."""
    refused, _ = with_holes(2, 3, 5)
    untouched, _ = with_holes(2, 3, 5)
    for alignment in (None, PAGE):
        with pytest.raises(PoolExhausted):
            refused.allocate(6 * BASE, alignment=alignment)
    assert observe(refused) == observe(untouched)
    for units in (3, 4, 2, 1):
        assert refused.allocate(units * BASE) == untouched.allocate(units * BASE)


# ---- many


@pytest.mark.stress
def test_many_random_allocations_never_overlap_and_all_come_back() -> None:
    """A large pool under random work is always tiled exactly by its allocations and its holes, and comes back whole."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # shown by pytest when the test fails
    rng = random.Random(seed)
    allocator = Allocator(64 << 20)
    live: list[tuple[int, int]] = []  # (offset, nbytes)
    refused = 0
    for step in range(6000):
        if live and rng.random() < 0.4:
            offset, nbytes = live.pop(rng.randrange(len(live)))
            assert allocator.free(offset) == nbytes
        else:
            nbytes = rng.randrange(BASE, 128 * KIB, BASE)
            try:
                live.append((allocator.allocate(nbytes, alignment=rng.choice([None, PAGE, 64 * KIB])), nbytes))
            except PoolExhausted:
                refused += 1
        if step % 100 == 0:
            tiles = sorted([*live, *allocator.holes()])
            ends = [offset + nbytes for offset, nbytes in tiles]
            assert [offset for offset, _ in tiles] == [0, *ends[:-1]]
            assert ends[-1] == allocator.nbytes
    assert refused, "the pool was never full: the test is too weak"
    for offset, _ in live:
        allocator.free(offset)
    assert list(allocator.holes()) == [(0, allocator.nbytes)]
