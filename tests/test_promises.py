"""The table of promises is true: its mechanisms are in the source, and its tests exist."""

from __future__ import annotations

import ast

from tests.programs.promises import PROMISES, REPOSITORY, TABLE, table

CUTS = [cut for promise in PROMISES for cut in promise.cuts]


def test_there_are_sixteen() -> None:
    """One entry for each promise, each with a mechanism and a test."""
    assert len(PROMISES) == 16
    assert all(promise.cuts for promise in PROMISES)
    assert all(cut.tests for cut in CUTS)


def test_the_page_is_the_table() -> None:
    """``tests/PROMISES.md`` says what the table says; ``python -m tests.programs.promises --write`` writes it."""
    assert TABLE.read_text() == table()


def test_each_mechanism_is_where_the_table_says() -> None:
    """Each text that is taken out is there, once, what stands there without it is sound, and the tests are there."""
    for cut in CUTS:
        text = (REPOSITORY / "kvlink" / cut.path).read_text()
        assert text.count(cut.old) == 1, cut.what
        ast.parse(text.replace(cut.old, cut.new))
        for test in cut.tests:
            name, _, function = test.partition("::")
            source = (REPOSITORY / "tests" / name).read_text()
            assert not function or f"def {function}(" in source, cut.what
