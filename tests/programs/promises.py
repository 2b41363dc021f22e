"""The sixteen promises of kvlink: where each one's mechanism is, and the tests that fail when it is taken out.

``python -m tests.programs.promises`` takes every mechanism out, one after the other, in a copy of the repository, and
says which tests noticed; ``--write`` writes the table, ``tests/PROMISES.md``. `tests.test_promises` keeps both true.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

REPOSITORY: Final = Path(__file__).parents[2]
TABLE: Final = REPOSITORY / "tests" / "PROMISES.md"


class Cut(NamedTuple):
    """One mechanism taken out.

    Attributes:
        what: it does, in words.
        path: where it is, below ``kvlink/``.
        old, new: the text that it is, and what stands there without it.
        tests: one of them at least must fail then. Below ``tests/``, as pytest names them.
    """

    what: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]


class Promise(NamedTuple):
    """A promise, and how it is kept."""

    title: str
    cuts: tuple[Cut, ...]


PROMISES: Final = (
    Promise(
        "Quiet after await",
        (
            Cut(
                "a cancelled copy waits for the chunks in the threads' hands",
                "memory/copying.py",
                "is_taken = job.num_taken > 0",
                "is_taken = False",
                ("test_copying.py", "test_adversity.py::test_a_cancelled_pull_is_quiet_when_it_has_ended"),
            ),
            Cut(
                "blocks that a transport has not let go of are never quiet again",
                "caches/store.py",
                "        if is_quiet:\n            del entry.moving[number]",
                "        if True:\n            del entry.moving[number]",
                ("test_ucx_closing.py::test_what_ucx_does_not_let_go_of_ends_and_its_memory_is_used_for_nothing_else",),
            ),
            Cut(
                "blocks that a lost writer may still write into are in quarantine",
                "transfers/serving.py",
                "            leases.quarantine_all(holder, link.peer)\n",
                "            leases.drop_writers(holder)\n",
                ("test_quarantine.py::test_what_a_lost_writer_may_write_into_is_kept_until_it_cannot",),
            ),
        ),
    ),
    Promise(
        "Fail closed",
        (
            Cut(
                "the state word is read after the bytes",
                "transfers/transfer.py",
                "if generation != found.generation:",
                "if False:",
                ("spec/test_pull_blocks.py::test_ends_while_being_read",),
            ),
            Cut(
                "a peer's description is checked against what it has shared",
                "transfers/views.py",
                "    check_geometry(found.geometry, limits, peer=link.peer)\n",
                "    del limits, check_geometry\n",
                ("test_liars.py",),
            ),
            Cut(
                "a ticket is for whoever knows its secret",
                "caches/tickets.py",
                "if not hmac.compare_digest(ticket.secret, message.secret) or",
                "if",
                ("spec/test_tickets.py::test_tokens_that_are_refused",),
            ),
            Cut(
                "a layer-wise push stays with the cache that it has opened",
                "transfers/layersender.py",
                "grant = self._opened\n",
                "grant = await self._grant(link, cache_of(self.config.cache_key))\n",
                ("spec/test_layerwise.py::test_key_that_names_another_cache_by_then",),
            ),
        ),
    ),
    Promise(
        "Nothing is freed under a reader",
        (
            Cut(
                "a lease pins the memory",
                "caches/table.py",
                "if not entry.has_ended or entry.pins or",
                "if not entry.has_ended or",
                ("test_adversity.py::test_a_lease_keeps_the_memory_until_the_reader_has_done",),
            ),
            Cut(
                "a dead reader's leases end",
                "transfers/serving.py",
                "        leases.drop_readers(holder)\n",
                "",
                ("test_adversity.py::test_a_puller_killed_after_the_owner_let_go_frees_the_memory",),
            ),
            Cut(
                "a silent reader's lease has an end",
                "cluster.py",
                "partial(self._store.leases.expire, now), ",
                "",
                ("test_adversity.py::test_a_stopped_reader_does_not_hold_the_memory_for_ever",),
            ),
        ),
    ),
    Promise(
        "Views outlive everything",
        (
            Cut(
                "a view keeps the memory of its cache from being used again",
                "caches/table.py",
                "        entry.root = weakref.ref(root, lambda _: dead.append(cache_id))\n",
                "        del root, dead, cache_id\n",
                ("test_caches.py::test_a_view_keeps_the_memory", "test_good_guest.py::test_views_outlive_everything"),
            ),
        ),
    ),
    Promise(
        "A process that attaches never destroys",
        (
            Cut(
                "a peer that was not asked to write cannot",
                "transports/shm_endpoint.py",
                "os.dup(segment.fd) if for_writing else segment.open_read_only()",
                "os.dup(segment.fd)",
                ("test_attaching.py::test_what_is_shared_for_reading_cannot_be_written",),
            ),
        ),
    ),
    Promise(
        "Everything ends",
        (
            Cut(
                "a question has a deadline",
                "transfers/views.py",
                "    with anyio.move_on_after(timeout_s):\n        answer = await link.ask(",
                "    with anyio.move_on_after(1000):\n        answer = await link.ask(",
                ("test_adversity.py::test_a_stopped_owner_that_must_be_asked_costs_the_deadline",),
            ),
            Cut(
                "a get has a deadline",
                "transfers/transfer.py",
                "            with anyio.move_on_after(timeout_s) as scope:\n                await endpoint.get(",
                "            with anyio.move_on_after(1000) as scope:\n                await endpoint.get(",
                ("test_testing.py::test_a_dropped_completion_costs_the_deadline",),
            ),
            Cut(
                "reading a state word has a deadline",
                "transfers/transfer.py",
                "        with anyio.move_on_after(timeout_s):\n            return await endpoint.load_word(word)",
                "        with anyio.move_on_after(1000):\n            return await endpoint.load_word(word)",
                ("test_testing.py::test_a_dropped_completion_costs_the_deadline",),
            ),
        ),
    ),
    Promise(
        "Death is noticed",
        (
            Cut(
                "a peer on another host that is silent is given up",
                "links/table.py",
                "if now - link.heard_at > liveness_s - beat_s:",
                "if False:",
                ("test_quarantine.py::test_silence_ends_a_link_to_another_host_and_a_busy_loop_does_not",),
            ),
            Cut(
                "the end of a peer's stream ends the link",
                "links/link.py",
                "            self.lose(error)\n",
                "            pass\n",
                ("test_links.py::test_death_is_noticed_at_once_on_an_idle_link",),
            ),
        ),
    ),
    Promise(
        "A restart is a new life",
        (
            Cut(
                "a token names the life of its owner",
                "transfers/ticketcalls.py",
                "if link.incarnation != said.incarnation:",
                "if False:",
                ("spec/test_tickets.py::test_a_restarted_owner_refuses_what_it_gave_before",),
            ),
            Cut(
                "an older link of a peer that dials again is looked at",
                "links/table.py",
                "if old is None or old.incarnation == hello.incarnation:",
                "if True:",
                ("test_links.py::test_of_two_processes_with_one_id_the_second_is_refused",),
            ),
            Cut(
                "bytes of another process count only while that leads the life that was linked",
                "transports/process_vm.py",
                "if self._life is not None:",
                "if False:",
                ("test_lives.py::test_over_shared_memory_another_program_is_not_the_owner",),
            ),
        ),
    ),
    Promise(
        "One link per peer",
        (
            Cut(
                "callers join the attempt that is under way",
                "links/table.py",
                "        if attempt is None:\n            attempt = self._attempts[peer] = Attempt(info)",
                "        if True:\n            attempt = self._attempts[peer] = Attempt(info)",
                ("test_links.py::test_64_callers_share_one_connection",),
            ),
        ),
    ),
    Promise(
        "A slow or hostile peer delays nobody",
        (
            Cut(
                "a frame has a largest size",
                "wire.py",
                "            if nbytes > self.max_nbytes:\n",
                "            if False:\n",
                ("test_hostile.py::test_an_oversized_frame_is_refused_before_it_is_read",),
            ),
            Cut(
                "a stranger has a deadline",
                "acceptor.py",
                "with anyio.move_on_after(timeout_s) as scope:",
                "with anyio.move_on_after(1000) as scope:",
                ("test_hostile.py::test_an_idle_stranger_is_closed_by_its_deadline",),
            ),
            Cut(
                "a secret is proved",
                "links/seal.py",
                "if not hmac.compare_digest(proof, expected):",
                "if False:",
                ("test_security.py::test_secrets_that_do_not_match_are_refused_by_name",),
            ),
        ),
    ),
    Promise(
        "Typed, complete reports",
        (
            Cut(
                "blocks with missing bytes are found",
                "transfers/partial.py",
                "    touched: set[int] = set()\n    for extent in missing:",
                "    touched: set[int] = set()\n    for extent in missing[:0]:",
                ("test_partial.py",),
            ),
            Cut(
                "nothing is vouched for when the cache has ended",
                "transfers/transfer.py",
                "is_valid = word == found.generation",
                "is_valid = True",
                ("test_partial.py",),
            ),
            Cut(
                "an error names the peer and the phase",
                "links/blame.py",
                '    error.phase = error.phase or "look-up"\n',
                "",
                ("test_blame.py",),
            ),
        ),
    ),
    Promise(
        "Both ends learn",
        (
            Cut(
                "a ticket that has ended has no word any more",
                "caches/tickets.py",
                "        self.state.end(ticket.word)  # first: from here on nothing that is read under it counts\n",
                "",
                ("spec/test_tickets.py::test_revoke_during_a_pull",),
            ),
            Cut(
                "a holder is told how its ticket has ended",
                "caches/tickets.py",
                "            if told_by is not holder:\n",
                "            if False:\n",
                ("spec/test_tickets.py::test_one_end_on_both_sides",),
            ),
            Cut(
                "a ticket of a lost holder ends",
                "transfers/serving.py",
                "        self._tickets.lose(link, cause)\n",
                "",
                ("spec/test_tickets.py::test_killed_holder",),
            ),
        ),
    ),
    Promise(
        "Mismatch is refused with both values",
        (
            Cut(
                "caches are compared",
                "checks.py",
                "        if ours != theirs and not",
                "        if False and not",
                ("test_processes.py::test_caches_that_do_not_fit_are_refused_with_both_values",),
            ),
            Cut(
                "protocol versions are compared",
                "links/handshake.py",
                "if theirs.version != ours.version:",
                "if False:",
                ("test_links.py::test_another_protocol_version_is_refused_by_number",),
            ),
        ),
    ),
    Promise(
        "The loop stays free",
        (
            Cut(
                "large copies run in threads",
                "memory/copying.py",
                "        if nbytes <= self.inline_nbytes:\n",
                "        if True:\n",
                ("test_adversity.py::test_the_loop_stays_free_during_a_large_pull",),
            ),
        ),
    ),
    Promise(
        "Bounded appetite",
        (
            Cut(
                "operations wait for their turn",
                "links/gates.py",
                "    if not gate.try_take(1):\n        timeout_s = await gate.take(1, timeout_s)",
                "    gate.count(1)",
                ("spec/test_backpressure.py::test_more_operations_than_may_be_wait_in_order",),
            ),
            Cut(
                "a peer gets so many read leases",
                "caches/leases.py",
                "if num_held >= self.max_reads_per_holder:",
                "if False:",
                ("spec/test_backpressure.py::test_a_peer_gets_so_many_leases_and_no_more",),
            ),
        ),
    ),
    Promise(
        "A good guest",
        (
            Cut(
                "reads of Unix sockets are not cancelled in the middle",
                "loops.py",
                "            await anyio.wait_readable(raw)",
                "            pass",
                ("test_loops.py::test_a_read_that_is_cancelled_as_bytes_arrive",),
            ),
            Cut(
                "a forked child finds out at once",
                "memory/forkmark.py",
                "        page.madvise(_MADV_WIPEONFORK)\n",
                "        pass\n",
                ("test_good_guest.py::test_a_forked_child_is_refused_and_the_parent_undisturbed",),
            ),
            Cut(
                "closing ends the threads",
                "cluster.py",
                "            self._copier.close()\n",
                "            pass\n",
                ("test_good_guest.py::test_200_openings_and_closings_leave_nothing",),
            ),
        ),
    ),
)


def table() -> str:
    """Return the text of ``tests/PROMISES.md``."""
    lines = [
        "# What keeps each promise",
        "",
        "Made by `python -m tests.programs.promises --write`. Each line is one mechanism: taken out, at least one of",
        "its tests fails (`python -m tests.programs.promises` does that with all of them, in a copy). More tests than",
        "these stand behind each promise; these are the ones that have been seen to fail.",
        "",
        "| promise | mechanism | module | test |",
        "|---|---|---|---|",
    ]
    for number, promise in enumerate(PROMISES, 1):
        for index, cut in enumerate(promise.cuts):
            title = f"{number}. {promise.title}" if index == 0 else ""
            tests = ", ".join(f"`{test}`" for test in cut.tests)
            lines.append(f"| {title} | {cut.what} | `kvlink/{cut.path}` | {tests} |")
    return "\n".join(lines) + "\n"


def noticed(cut: Cut, folder: Path) -> str | None:
    """Take a mechanism out of the copy in `folder`, run its tests, put it back; return the first that failed."""
    path = folder / "kvlink" / cut.path
    text = path.read_text()
    path.write_text(text.replace(cut.old, cut.new, 1))
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout", "40", "--no-header"]
            + [f"tests/{test}" for test in cut.tests],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        path.write_text(text)
    if ended.returncode == 0:
        return None
    failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else f"pytest ended with {ended.returncode}"


def main() -> int:
    """Take all mechanisms out, one at a time; return 1 if that of some went unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help="write tests/PROMISES.md and do nothing else")
    parser.add_argument("--only", type=int, default=0, help="of this promise alone")
    options = parser.parse_args()
    if options.write:
        TABLE.write_text(table())
        return 0
    num_unnoticed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("kvlink", "tests", "examples"):
            shutil.copytree(REPOSITORY / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(REPOSITORY / "pyproject.toml", folder)
        for number, promise in enumerate(PROMISES, 1):
            if options.only in (0, number):
                for cut in promise.cuts:
                    found = noticed(cut, folder)
                    num_unnoticed += found is None
                    print(f"{number:2}. {cut.what}: {found or 'NOBODY NOTICED'}"[:200], flush=True)
    return 1 if num_unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
