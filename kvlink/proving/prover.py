"""The prover's process: links to targets, runs every check, and writes each outcome as a line of JSON when it is there.

Run by `kvlink.proving.command`, which tells the user when this process has died instead.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from typing import Any

import anyio

from kvlink.benchmarks.accounting import machine
from kvlink.cluster import Cluster
from kvlink.doctor.command import examine
from kvlink.geometry import Role
from kvlink.proving import bandwidth, checks
from kvlink.proving.checks import OURS, STEADY, Outcome, Scene, run_step
from kvlink.proving.far import FarError, connect
from kvlink.proving.layout import pool_nbytes
from kvlink.proving.target import config_with


async def _prove(settings: dict[str, Any]) -> None:
    emit = _emit_outcome
    async with connect(settings["address"], settings["key"]) as far:
        _emit("starting", name="both sides")
        theirs = await far.about()
        size_nbytes = int(theirs["size_nbytes"])
        config = config_with(settings["key"])
        _emit(
            "about",
            here={"machine": machine(), "doctor": examine().as_json()},
            there=theirs,
            seed=settings["seed"],
            address=settings["address"],
        )
        async with Cluster(
            cluster_id=OURS, role=Role.MIX, pool=pool_nbytes(size_nbytes), listen=settings["listen"], config=config
        ) as here:
            scene = Scene(far, here, size_nbytes, seed=settings["seed"])
            _emit("starting", name="link")
            is_linked = await run_step("link", 60, partial(checks.check_link, scene), emit)
            if is_linked:
                _emit("carrier", **_carrier(here))
            await _run_all(scene, settings, is_linked=is_linked)
            if is_linked:
                _emit("carrier", **_carrier(here))  # UCX says what serves a link once it has been used


async def _run_all(scene: Scene, settings: dict[str, Any], *, is_linked: bool) -> None:
    steps: dict[str, tuple[float, Any]] = {
        "bytes": (120, partial(checks.check_bytes, scene)),
        "one-sided": (60, partial(checks.check_one_sided, scene)),
        "cancellation": (60, partial(checks.check_cancel, scene)),
        "death": (60 + 30 * settings["kills"], partial(checks.check_death, scene, rounds=settings["kills"])),
        "speed": (120 + 15 * settings["for_s"], partial(bandwidth.measure, scene, "speed", for_s=settings["for_s"])),
    }
    for name, (limit_s, step) in steps.items():
        if not is_linked:
            _emit_outcome(Outcome(name, "skipped", "there is no link"))
            continue
        _emit("starting", name=name)
        await run_step(name, limit_s, step, _emit_outcome)


def _carrier(here: Cluster) -> dict[str, Any]:
    """Return what carries the link to the steady target."""
    link = next((link for link in here.links if link.peer == STEADY), None)
    if link is None:
        return {}
    lanes = list(getattr(link.endpoint, "lanes", ()))
    return {"transport": link.transport, "reason": link.reason, "lanes": lanes}


def _emit_outcome(outcome: Outcome) -> None:
    _emit("outcome", **asdict(outcome))


def _emit(kind: str, **content: Any) -> None:
    sys.stdout.write(json.dumps({"kind": kind, **content}) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Take the settings from the command line and prove."""
    settings = json.loads(sys.argv[1])
    try:
        anyio.run(_prove, settings)
    except FarError as exc:
        _emit("outcome", **asdict(Outcome("both sides", "failed", str(exc))))


if __name__ == "__main__":
    main()
