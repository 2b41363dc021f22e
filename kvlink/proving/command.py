"""``prove-rdma``: ``serve HOST:PORT`` on one machine, ``prove HOST:PORT --key KEY`` on the other one."""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import anyio

from kvlink.config import parse_address, parse_nbytes
from kvlink.errors import ParameterError
from kvlink.proving.report import Report
from kvlink.proving.server import serve

_EVERYWHERE: Final = frozenset({"0.0.0.0", "::", "*"})


def main(argv: Sequence[str] | None = None) -> int:
    """Serve or prove; return 0, or 1 where something was not proved, or 2 for wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="prove-rdma",
        description="Prove what kvlink promises between two machines: links, right bytes, one-sidedness, "
        "cancellation, death and speed. ClusterConfig comes from the environment (KVLINK_*) on both sides.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    server = commands.add_parser("serve", help="own the memory, and be stopped and killed")
    server.add_argument("address", metavar="HOST:PORT", help="where to be reached: an address that the other side has")
    server.add_argument("--size", default="64MiB", help="of each of the 5 caches; default 64MiB")
    server.add_argument("--key", help="what the other side must show; default: a random one")
    server.add_argument("--once", action="store_true", help="end when the first prover has gone")
    prover = commands.add_parser("prove", help="run all checks and print the report")
    prover.add_argument("address", metavar="HOST:PORT", help="what the serving side says")
    prover.add_argument("--key", required=True, help="what the serving side says")
    prover.add_argument("--kills", type=int, default=5, help="targets to kill under pulls; default 5")
    prover.add_argument("--seconds", type=float, default=2.0, help="for each of the 10 measurements; default 2")
    prover.add_argument("--seed", type=int, default=None, help="of all random choices; default: a random one")
    prover.add_argument("--listen", default=None, help="where our own cluster listens; default: loopback")
    prover.add_argument("--json", metavar="FILE", help="also write everything as JSON; - for standard output alone")
    arguments = parser.parse_args(argv)
    try:
        host = parse_address(arguments.address).host
        if arguments.command == "serve":
            if not host or host in _EVERYWHERE:
                parser.error("serve needs the address by which the other machine reaches this one")
            return _serve(arguments)
    except ParameterError as exc:
        parser.error(str(exc))
    return _prove(arguments)


def _serve(arguments: argparse.Namespace) -> int:
    key = arguments.key or secrets.token_hex(16)

    def say(text: str) -> None:
        print(text, flush=True)

    def ready(address: str) -> None:
        say(f"serving; on the other machine run:\n  scripts/prove-rdma prove {address} --key {key}")

    run = partial(
        serve,
        arguments.address,
        key=key,
        size_nbytes=parse_nbytes(arguments.size, "--size"),
        say=say,
        on_ready=ready,
        once=arguments.once,
    )
    try:
        anyio.run(run)
    except OSError as exc:
        print(f"cannot serve at {arguments.address}: {exc.strerror or exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


def _prove(arguments: argparse.Namespace) -> int:
    """Run the prover's process, show how it gets on, and print the report."""
    settings = {
        "address": arguments.address,
        "key": arguments.key,
        "kills": arguments.kills,
        "for_s": arguments.seconds,
        "seed": random.SystemRandom().randrange(2**32) if arguments.seed is None else arguments.seed,
        "listen": arguments.listen,
    }
    report = Report()
    is_plain = arguments.json != "-"
    process = subprocess.Popen(
        [sys.executable, "-m", "kvlink.proving.prover", json.dumps(settings)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path)},
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            with suppress(ValueError):  # what a C library prints is no line of ours
                said = json.loads(line)
                report.take(said)
                if said["kind"] == "outcome" and is_plain:
                    print(f"{said['state']:<8} {said['name']}: {said['found']}", file=sys.stderr, flush=True)
        status = process.wait()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    if status:
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        report.take_death(how)
    everything = json.dumps(
        {"schema": 1, "verdict": report.verdict(), "passed": report.has_passed, "carrier": report.carrier}
        | {"about": report.about, "steps": report.outcomes},
        indent=2,
    )
    if arguments.json == "-":
        print(everything)
    else:
        print(report.render())
        if arguments.json:
            with open(arguments.json, "w", encoding="utf-8") as file:
                file.write(everything + "\n")
    return 0 if report.has_passed else 1


if __name__ == "__main__":
    sys.exit(main())
