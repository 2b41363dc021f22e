"""The command line of the stress program; see the package for what it does."""

from __future__ import annotations

import argparse
import random
import sys
from typing import Final

from kvlink.benchmarks.progress import Progress
from kvlink.testing import Faults
from tests.programs.stress.settings import Settings
from tests.programs.stress.supervisor import Goal, Outcome, Supervisor

FAULTS: Final = {
    "late": Faults(delay=0.2, reorder=0.3, repeat=0.1, longest_delay_s=0.003),
    "faulty": Faults(delay=0.2, reorder=0.2, repeat=0.1, fail=0.05, drop=0.01, longest_delay_s=0.003),
}
_OPERATIONS: Final = (
    *("pull_blocks", "pull_cache", "push_blocks", "push_layers", "ticket_pull", "ticket_push", "notify"),
    *("ticket to read", "ticket to fill", "link", "unlink", "visit"),
)


def main(arguments: list[str] | None = None) -> int:
    """Run; return 0 when nothing was wrong."""
    options = _parser().parse_args(arguments)
    seed = random.randrange(2**31) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    name, _, kind = options.transport.partition("+")
    if name in FAULTS:
        name, kind = "", name
    settings = Settings(
        seed=seed,
        num_workers=options.workers,
        faults=FAULTS[kind] if kind else None,
        transports=(name,) if name not in ("", "shm") else (),
    )
    minutes = 0.0 if options.cancellations or options.kills else 1.0
    goal = Goal(
        duration_s=60 * (minutes if options.minutes is None else options.minutes),
        cancellations=options.cancellations,
        kills=options.kills,
        limit_s=60 * options.limit_minutes,
        events_per_s=options.events,
    )
    progress = Progress(sys.stderr)
    outcome = Supervisor(settings, goal, lambda so_far: progress.show(_sum_up(so_far))).run()
    progress.clear()
    print(_sum_up(outcome))
    for operation in _OPERATIONS:
        parts = {key: num for key, num in outcome.counts.items() if key.startswith(operation + " ")}
        ended = ", ".join(
            f"{num} {key.removeprefix(operation + ' ')}" for key, num in sorted(parts.items(), key=lambda p: -p[1])
        )
        print(f"  {operation:14} {ended}")
    if not outcome.wrong:
        print("nothing wrong: no wrong byte, no hang, no leak")
        return 0
    for number, lines in outcome.last.items():
        print(f"the last of worker {number}:", *lines, sep="\n  ")
    print(f"WRONG, with --seed {seed}:", *outcome.wrong[:20], sep="\n  ")
    return 1


def _sum_up(outcome: Outcome) -> str:
    counts = outcome.counts
    checked = counts["bytes checked"] / 1e9
    return (
        f"{outcome.duration_s:.0f} s: {counts['cancellations']} cancellations (the slowest ended after "
        f"{outcome.slowest_cancel_s * 1e3:.0f} ms), {counts['kills']} kills, {counts['stops']} stops, "
        f"{counts['restarts']} restarts, {checked:.1f} GB checked"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/stress",
        description="Random pulls, pushes, cancels, kills, stops and restarts over processes; every byte is checked.",
    )
    parser.add_argument("--minutes", type=float, default=None, help="how long at least (default: 1)")
    parser.add_argument("--seed", type=int, default=None, help="of everything random (default: a new one, printed)")
    parser.add_argument("--workers", type=int, default=3, help="processes (default: 3)")
    parser.add_argument("--cancellations", type=int, default=0, help="go on until that many calls were cancelled")
    parser.add_argument(
        "--kills", type=int, default=0, help="go on until that many processes were killed, and kill more"
    )
    parser.add_argument("--events", type=float, default=1.0, help="kills, stops and restarts a second (default: 1)")
    parser.add_argument("--limit-minutes", type=float, default=60, help="fail when the goal is not reached by then")
    parser.add_argument(
        "--transport",
        default="shm",
        choices=["shm", "ucx", *FAULTS, *(f"ucx+{kind}" for kind in FAULTS)],
        help="what moves the bytes; late and faulty are shared memory with faults on purpose (default: shm)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
